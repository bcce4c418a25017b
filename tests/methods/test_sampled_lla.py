"""Sampled linearised Laplace: draws against dense solves for the same noise, and EM against Full's evidence."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.covariance.base import split_blocks
from lapwing.data.inputs import Samples
from lapwing.methods import Batch
from lapwing.methods import problem as problem_module
from lapwing.methods.sampled_lla.conjugate_gradients import _residual
from lapwing.methods.sampled_lla.linearised_mode import LENGTHS, LinearisedMode
from lapwing.methods.sampled_lla.system import NOISE_STREAM as DATA
from lapwing.methods.sampled_lla.system import generator_at, prior_noise
from tests import oracle
from tests.conformance import EVERY, NOISE, Setup, close, cut, sampled_from, setup

EXACTLY = lw.ConjugateGradients(iterations=400, tolerance=1e-12)
NETWORKS = (
    "mlp", "mlp_scalar", "squeezed", "cnn_bn_inplace", "grouped_strided_conv", "conv1d", "prelu", "tied", "attention",
    "embedding_bag_of_tokens", "gpt2", "lstm", "shared_module", "transposed_conv", "all_frozen", "compiled",
)  # fmt: skip


def together(vectors: dict[str, Tensor]) -> Tensor:
    """Joins blocks, (S, P)."""
    return torch.cat(list(vectors.values()), -1)


def draws_of(fitted: lw.Posterior) -> Tensor:
    """The posterior's draws z (S, P)."""
    return together(fitted.covariance.draws)


def right_hand_sides(
    problem: Setup, count: int, delta: Tensor, scale: float, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Returns `√s Σ_n J_nᵀ R_n ε_n + Δ^(1/2) ε₀` (S, P) by a loop, for the library's ε."""
    root = problem.likelihood.fisher_root(problem.f)  # R (N, C, R) at unit noise
    data = torch.zeros(count, len(problem.theta), dtype=torch.float64)
    for n, (J, R) in enumerate(zip(problem.J, root, strict=True)):
        noise = torch.randn((R.shape[1], count), generator=generator_at(0, n, DATA), dtype=torch.float64)
        data += (R @ noise).T @ J
    double, cpu = torch.float64, torch.device("cpu")
    tangent = SimpleNamespace(blocks=problem.blocks, dtype=dtype, contraction_dtype=double, device=cpu)
    fit: Any = SimpleNamespace(tangent=tangent, seed=0)
    prior = together(dict(prior_noise(fit, count)))
    return scale**0.5 * data + delta.sqrt() * prior


def solved(problem: Setup, count: int, delta: Tensor | float = 2.0, factor: float = 1.0) -> Tensor:
    """Returns the dense solution (S, P)."""
    delta = oracle.precision_vector(delta, len(problem.theta))
    scale = factor * (1.0 if problem.case.classification else 1 / NOISE)
    b = right_hand_sides(problem, count, delta, scale)
    return torch.linalg.solve(factor * problem.G + torch.diag(delta), b.T).T


# --- draws -----------------------------------------------------------------------------------------------------------


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("name", "count"),
    [*((name, 5) for name in NETWORKS), ("mlp", 1)],  # one vector of three outputs: forward mode
)
def test_draws_are_the_dense_solution(name, count):
    problem = setup(name)
    fitted = problem.fit(lw.SampledLLA(count, EXACTLY), tune=None)
    close(draws_of(fitted), solved(problem, count), 1e-8)
    assert fitted.history["residuals"].shape == (count,)
    assert fitted.history["residuals"].max() <= 1e-12


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["mlp", "deep_linear"])
def test_temperature_data_size_and_prior(name):
    problem = setup(name)
    method = lw.SampledLLA(3, EXACTLY)
    options = {"temperature": 3.0, "data_size": 45, "tune": None}
    close(draws_of(problem.fit(method, **options)), solved(problem, 3, factor=5 / 3), 1e-8)
    fitted = problem.fit(method, prior_precision=None, weight_decay=0.3, tune=None, prior_mean=1.5)
    close(draws_of(fitted), solved(problem, 3, 9 * 0.3), 1e-8)
    values = torch.tensor([0.5 * 1.7**i for i in range(len(problem.blocks))]).double()
    by_name = {block.name: float(value) for block, value in zip(problem.blocks, values, strict=True)}
    fitted = problem.fit(method, prior_precision=by_name, tune=None)
    close(draws_of(fitted), solved(problem, 3, problem.expand(values)), 1e-8)
    assert fitted.prior_precision == by_name


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "preconditioner",
    [lw.KFAC(), lw.EKFAC(), lw.Diagonal(), lw.ELLA(rank=5, rows=8, residual="prior"), lw.Full()],
    ids=lambda method: type(method).__name__,
)
def test_preconditioners_change_the_way_not_the_end(preconditioner):
    problem = setup("cnn_bn_inplace")
    solver = lw.ConjugateGradients(300, 1e-12, preconditioner)
    fitted = problem.fit(lw.SampledLLA(4, solver), tune=None)
    close(draws_of(fitted), solved(problem, 4), 1e-8)
    if isinstance(preconditioner, lw.Full):
        assert fitted.history["iterations"].tolist() == [1.0]


def test_residuals_are_relative_to_the_right_hand_side():
    """They are 1 at Z = 0, whatever the length of b, and 0 if b is 0."""
    b = {"a": torch.tensor([[3e-6, 4e-6], [30.0, 40.0], [0.0, 0.0]], dtype=torch.float64)}
    prior, zeros = {"a": torch.full((2,), 4.0, dtype=torch.float64)}, {"a": torch.zeros(3, 2, dtype=torch.float64)}
    system: Any = SimpleNamespace(right_hand_sides=lambda: {"a": b["a"].clone()}, prior=lambda: prior, scale=1.0)
    residual, relative, bound = _residual(system, zeros, zeros)
    close(residual["a"], b["a"])
    close(relative, torch.tensor([1.0, 1.0, 0.0]).double())
    close(bound, torch.tensor([2.5e-6, 25.0, 0.0]).double())


def test_more_draws_than_weights():
    """A block of directions that spans everything takes one step; its Gram matrices are singular."""
    problem = setup("mlp_scalar")
    fitted = problem.fit(lw.SampledLLA(50, lw.ConjugateGradients(tolerance=1e-9)), tune=None)
    assert fitted.history["iterations"].tolist() == [1.0]
    close(draws_of(fitted), solved(problem, 50), 1e-8)


def test_bfloat16_network():
    problem = setup("cnn_bn_inplace")
    model = problem.case.build().bfloat16()
    fitted = lw.fit(model, [(problem.x.bfloat16(), problem.y)], lw.SampledLLA(6), params=EVERY, prior_precision=2.0)
    assert draws_of(fitted).dtype == torch.float32
    assert fitted.history["residuals"].max() <= 0.01
    delta = torch.full((len(problem.theta),), 2.0).double()
    b = right_hand_sides(problem, 6, delta, 1.0, dtype=torch.float32)
    wanted = torch.linalg.solve(problem.G + torch.diag(delta), b.T).T
    assert (draws_of(fitted) - wanted).norm() < 0.05 * wanted.norm()
    assert fitted.predict(problem.test.bfloat16()).probs.shape == (3, 3)


def test_many_outputs_sample_the_fisher(monkeypatch):
    """One column an input, the same in every pass; a loader in another order each time would change G."""
    problem = setup("mlp")
    monkeypatch.setattr(problem_module, "EXACT_FISHER_OUTPUTS", 2)
    method = lw.SampledLLA(300, lw.ConjugateGradients(tolerance=1e-9))
    fitted = problem.fit(method, tune=None)
    again = problem.fit(method, tune=None, loader=cut(problem.x, problem.y, (2, 7)))
    close(draws_of(again), draws_of(fitted), 1e-6)
    assert fitted.history["residuals"].max() <= 1e-9
    shuffled = DataLoader(TensorDataset(problem.x, problem.y), 3, shuffle=True)
    with pytest.raises(lw.LapwingError, match="shuffle=False"):
        problem.fit(method, tune=None, loader=shuffled)


def interpolating() -> tuple[nn.Module, Tensor, Tensor]:
    """A network of one output, and 60 rows that it fits exactly."""
    net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1)).double().eval()
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return net, x, net(x).detach()


def ratio_to_full(noise: float, count: int, dtype: torch.dtype) -> Tensor:
    """Returns variances of draws at 12 inputs over those of Full in float64, of a network that interpolates."""
    net, x, y = interpolating()
    test = torch.randn(12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options = {"likelihood": lw.Gaussian(noise), "prior_precision": 1.0, "params": lw.everything, "tune": None}
    full = lw.fit(net, [(x, y)], lw.Full(), **options).latent(test).variance
    fitted = lw.fit(net.to(dtype), [(x.to(dtype), y.to(dtype))], lw.SampledLLA(count, em_steps=0), **options)
    return fitted.latent(test.to(dtype)).variance.double() / full


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 32, 500])
@pytest.mark.parametrize("noise", [1e-4, 1e-10])
def test_draws_of_a_network_that_interpolates(noise, count):
    """Variances are Full's times a χ² of S degrees over S."""
    ratio = ratio_to_full(noise, count, torch.float64)
    chi_square = torch.distributions.Chi2(torch.tensor(float(count))).sample((100_000,)) / count
    low, high = chi_square.quantile(torch.tensor([1e-4, 1 - 1e-4]))
    assert low < ratio.min()
    assert ratio.max() < high


@pytest.mark.quick(1)
@pytest.mark.parametrize("noise", [1e-14, 1e-6])
def test_in_float32_the_noise_is_raised_only_if_the_rounding_of_draws_would_dominate(noise, caplog):
    ratio = ratio_to_full(noise, 64, torch.float32)
    assert ("float64 for the noise variance itself" in caplog.text) == (noise == 1e-14)
    assert 0.7 < ratio.mean() < 1.5


def test_draws_of_a_float32_classifier_at_weak_priors_are_those_in_float64():
    """Inputs far from 0 have a large eigenvalue; float32 solves gave variances up to 1e7 times too large."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64) + 3
    y, test = torch.randint(3, (60,), generator=generator), x[:12] + 0.1
    net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 3)).double().eval()
    options = {"params": lw.everything, "prior_precision": 1e-6, "tune": None}
    full = lw.fit(net, [(x, y)], lw.Full(), **options).latent(test).variance
    fitted = lw.fit(net.float(), [(x.float(), y)], lw.SampledLLA(64), **options)
    assert draws_of(fitted).dtype == torch.float32
    ratio = fitted.latent(test.float()).variance.double() / full
    assert ratio.min() > 0.5
    assert ratio.max() < 2


@pytest.mark.quick(2)
@pytest.mark.parametrize("preconditioner", [None, lw.Full()], ids=["None", "Full"])
@pytest.mark.parametrize("per_block", [False, True])
def test_directions_without_data_keep_the_prior(per_block, preconditioner):
    """`N z = N Δ⁻¹ b` for directions `Δ N` in the null space of G, whatever the tolerance and the prior."""
    problem = setup("mlp")
    method = lw.SampledLLA(5, lw.ConjugateGradients(preconditioner=preconditioner), em_steps=4, per_block=per_block)
    fitted = problem.fit(method, prior_precision=None, tune=None)
    assert len(fitted.history["precision"]) > 1
    delta = problem.expand(fitted.history["precision"][-1])
    values, vectors = torch.linalg.eigh(problem.G)
    unseen = vectors[:, values < 1e-10 * values.max()]
    assert unseen.shape[1] > 5
    wanted = right_hand_sides(problem, 5, delta, 1.0) @ unseen
    close((draws_of(fitted) * delta) @ unseen, wanted, 1e-7)


def test_latent_and_sample():
    problem = setup("cnn_bn_inplace")
    fitted = problem.fit(lw.SampledLLA(6), tune=None)
    sigma, draws = fitted.covariance.to_dense(), draws_of(fitted)
    close(sigma, draws.T @ draws / 6)
    close(together(fitted.covariance.diagonal()), sigma.diagonal())
    latent = fitted.latent(problem.test)
    close(latent.mean, oracle.outputs(problem.model, problem.test))
    close(latent.covariance, oracle.output_covariance(problem.J_test, sigma), 1e-8)
    joint = fitted.latent(problem.test, joint=True)
    close(joint.covariance, oracle.joint_output_covariance(problem.J_test, sigma), 1e-8)
    picked = together(fitted.covariance.sample(6, torch.Generator().manual_seed(1)))
    similar = (picked @ draws.T) / draws.square().sum(1)
    assert sorted(similar.abs().argmax(1).tolist()) == list(range(6))
    close(similar.abs().amax(1), torch.ones(6).double())
    sampled_from(together(fitted.covariance.sample(20_000, torch.Generator().manual_seed(1))), sigma)
    for way in (lw.MonteCarlo(6), lw.Linearized()):
        assert fitted.predict(problem.test, via=way).probs.sum(-1).allclose(torch.ones(3).double())
    mlp = setup("mlp").fit(lw.SampledLLA(6), tune=None)
    assert mlp.predict(setup("mlp").test, via=lw.Streamlined()).probs.isfinite().all()


# --- EM --------------------------------------------------------------------------------------------------------------

MANY = lw.SampledLLA(400, lw.ConjugateGradients(tolerance=1e-6), em_steps=20)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["mlp", "mlp_scalar"])
def test_em_finds_the_maximum_of_the_evidence(name):
    """γ of 10 from 400 draws has a relative error of 2 %, and steps end within 2 % of the fixed point."""
    problem = setup(name, samples=40)
    full = problem.fit(lw.Full(), prior_precision=None)
    fitted = problem.fit(MANY, prior_precision=None, tune=None)
    assert fitted.prior_precision == pytest.approx(full.prior_precision, rel=0.06)
    history = fitted.history
    assert history["precision"].shape == (len(history["iterations"]), len(problem.blocks))
    distance = float(problem.theta.square().sum())
    assert float(history["effective_dimension"][-1]) / distance == pytest.approx(fitted.prior_precision, rel=0.02)
    twice = problem.fit(lw.SampledLLA(400, MANY.solver, em_steps=1), prior_precision=None, tune=None)
    assert len(twice.history["precision"]) == 2


def test_em_by_block():
    problem = setup("mlp", samples=40)
    full = problem.fit(lw.Full(), prior_precision=None, tune=lw.Evidence(per_layer=True))
    method = lw.SampledLLA(600, MANY.solver, em_steps=20, per_block=True)
    fitted = problem.fit(method, prior_precision=None, tune=None)
    for block, value in full.prior_precision.items():
        assert fitted.prior_precision[block] == pytest.approx(value, rel=0.1)


def regression() -> tuple[nn.Module, Tensor, Tensor]:
    """A network of one output, and noisy targets."""
    net, x, y = interpolating()
    return net, x, y + 0.1 * torch.randn(60, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_em_with_an_open_noise_variance():
    net, x, y = regression()
    for options in ({}, {"data_size": 180}, {"temperature": 2.0}):
        full = lw.fit(net, [(x, y)], lw.Full(), tune=lw.Evidence(), **options)
        fitted = lw.fit(net, [(x, y)], MANY, tune=None, **options)
        assert fitted.prior_precision == pytest.approx(full.prior_precision, rel=0.06)
        assert fitted.noise_variance == pytest.approx(full.noise_variance, rel=0.04)
    given = lw.fit(net, [(x, y)], MANY, prior_precision=2.0, tune=None)
    full = lw.fit(net, [(x, y)], lw.Full(), prior_precision=2.0, tune=lw.Evidence())
    assert given.prior_precision == 2.0
    assert given.noise_variance == pytest.approx(full.noise_variance, rel=0.04)


def test_without_em():
    net, x, y = regression()
    fitted = lw.fit(net, [(x, y)], lw.SampledLLA(4, em_steps=0), tune=None)
    assert fitted.prior_precision == 1.0
    assert fitted.noise_variance == pytest.approx(float((net(x) - y).detach().square().mean()))
    assert len(fitted.history["iterations"]) == 1


def log_joint(problem: Setup, delta: float) -> Callable[[Tensor], Tensor]:
    """Returns the log joint of the linearised model, as a function of θ - θ̂ (P,)."""
    outputs, jacobian = problem.f, problem.J  # computed here, and not while a derivative is taken

    def joint(m: Tensor) -> Tensor:
        f = outputs + torch.einsum("ncp,p->nc", jacobian, m)
        if problem.case.classification:
            fit = oracle.categorical_log_likelihood(f, problem.y)
        else:
            fit = oracle.gaussian_log_likelihood(f, problem.y, NOISE)
        return fit - delta / 2 * (problem.theta + m).square().sum()

    return joint


@pytest.mark.parametrize("delta", [0.5, 20.0])
@pytest.mark.parametrize("factor", [-0.5, 1.0, 3.0, 12.0])
def test_the_search_along_a_step_finds_the_highest_log_joint(factor, delta):
    problem, zero = setup("mlp", samples=40), torch.zeros(1, dtype=torch.float64)
    tangent, joint = problem.tangent, log_joint(problem, delta)
    prior_mean = SimpleNamespace(mean=dict.fromkeys(tangent.named_blocks, zero))
    start = torch.zeros_like(problem.theta)
    step = factor * torch.linalg.solve(-torch.func.hessian(joint)(start), torch.func.grad(joint)(start))
    fit: Any = SimpleNamespace(
        tangent=tangent, likelihood=problem.likelihood, prior=prior_mean,
        zeros=lambda *shape, dtype=torch.float64: torch.zeros(shape, dtype=dtype),
    )  # fmt: skip
    system: Any = SimpleNamespace(scale=1.0, prior=lambda: dict.fromkeys(tangent.named_blocks, zero + delta))
    mode = LinearisedMode(fit, wanted=True)
    search = mode.advance(system, None, split_blocks(tangent.blocks, step[None]))
    along = next(search)
    state = along.init()
    along.update(state, Batch.of(tangent, Samples.of((problem.x, problem.y))))
    with pytest.raises(StopIteration):
        search.send(state)
    best = max((0.0, *LENGTHS), key=lambda length: float(joint(length * step)))
    close(together(mode.offset)[0], best * step)
    assert best == 0 if factor < 0 else best > 0
    assert factor < 2 or best < 1


def linearised_mode(problem: Setup, delta: float) -> Tensor:
    """Returns the mode (P,) of the linearised model's log joint, by damped Newton steps."""
    m, joint = torch.zeros_like(problem.theta), log_joint(problem, delta)
    for _ in range(50):
        gradient = torch.func.grad(joint)(m)
        step = torch.linalg.solve(-torch.func.hessian(joint)(m), gradient)
        length = next(t for t in (1.0, 0.5, 0.25, 0.1, 0.0) if joint(m + t * step) >= joint(m))
        m = m + length * step
    assert torch.func.grad(joint)(m).norm() < 1e-6 * delta * problem.theta.norm()
    return problem.theta + m


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "mlp_scalar", "squeezed"])
def test_em_at_the_linearised_mode(name):
    """δ is `γ/‖θ_lin‖²` of the mode at δ."""
    problem = setup(name, samples=40)
    method = lw.SampledLLA(300, MANY.solver, em_steps=40, linearised_mode=True)
    fitted = problem.fit(method, prior_precision=None, tune=None)
    mode = linearised_mode(problem, fitted.prior_precision)
    effective = float(fitted.history["effective_dimension"][-1])
    assert effective / float(mode.square().sum()) == pytest.approx(fitted.prior_precision, rel=0.1)
    assert abs(float(mode.norm() / problem.theta.norm()) - 1) > 0.05  # it is another one than the network
    assert len(draws_of(fitted)) == 300


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["mlp", "cnn_bn_inplace", "embedding_bag_of_tokens"])
def test_g_prior_is_isotropic_over_scaled_features(name):
    problem = setup(name)  # tokens that never occur have no curvature
    ratio = problem.G.diagonal() / problem.G.diagonal().mean()
    g = torch.where(ratio > 1e-6, ratio, 1.0)  # with mean 1 over weights that have curvature and those that have none
    assert (g == 1).any() == (name == "embedding_bag_of_tokens")
    fitted = problem.fit(lw.SampledLLA(4, EXACTLY, prior="g"), tune=None)
    close(draws_of(fitted), solved(problem, 4, 2.0 * g), 1e-8)
    assert fitted.prior_precision == 2.0
    whitened = problem.J / g.sqrt()
    sigma = oracle.laplace_covariance(oracle.ggn(whitened, problem.fisher), 2.0) / torch.outer(g, g).sqrt()
    many = draws_of(problem.fit(lw.SampledLLA(600, lw.ConjugateGradients(tolerance=1e-8), prior="g"), tune=None))
    sampled_from(many, sigma)


def test_validation_of_a_spread_that_is_too_wide_names_the_method(caplog):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=generator)
    net = nn.Linear(2, 2).eval()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[2.0, 0.0], [-2.0, 0.0]]))
        net.bias.zero_()
    y = torch.multinomial(net(x).detach().softmax(-1), 1, generator=generator)[:, 0]
    fitted = lw.fit(net, (x[:4], y[:4]), lw.SampledLLA(16), prior_precision=0.01, validation=(x[4:], y[4:]))
    assert fitted.logit_temperature < 1
    assert "prior precision of SampledLLA, here 0.01" in caplog.text
    assert "prior_precision=1" in caplog.text
