"""VaLLA's fits that move the inducing points: their objectives, optima, limits, early stopping, and divergence."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.covariance.terms import DenseTerm
from lapwing.data.inputs import Inputs
from lapwing.methods import Batch
from lapwing.methods.valla import alpha_divergence, moving_points
from lapwing.methods.valla.alpha_divergence import inner_factor
from lapwing.methods.valla.moving_points import divergence
from tests import oracle
from tests.conformance import close, expanded, jacobian, problem_of, psd, setup
from tests.methods.test_valla import points_of, rows_at

MOVING = (lw.AlphaDivergence(steps=4), lw.VariationalBound(steps=4), lw.VariationalBound(4, then=lw.NaturalGradient(3)))


# --- pure functions --------------------------------------------------------------------------------------------------


def test_divergence_is_the_gaussian_one():
    """With the distance it is `KL(N(θ̂, (δI + J_ZᵀAJ_Z)⁻¹) ‖ N(μ0, I/δ))` in weight space."""
    generator = torch.Generator().manual_seed(0)
    rows, root = (torch.randn(*shape, generator=generator).double() for shape in ((4, 9), (4, 4)))
    delta, mean = 0.7, torch.randn(9, generator=generator).double()
    precision = delta * torch.eye(9).double() + rows.T @ root @ root.T @ rows
    q = torch.distributions.MultivariateNormal(mean, precision_matrix=precision)
    p = torch.distributions.MultivariateNormal(torch.zeros(9).double(), torch.eye(9).double() / delta)
    found = divergence(inner_factor(rows @ rows.T / delta, root)) + delta * mean.square().sum() / 2
    close(found, torch.distributions.kl_divergence(q, p))


# --- objectives ------------------------------------------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["mlp_scalar", "conv1d", "mlp"])
def test_the_bound_is_the_dense_one(name):
    """`-[Σ log p - 1/2 tr(Λ_n J Σ Jᵀ)] + KL` in weight space, at the optimal A, with temperature and data size."""
    case = setup(name)
    for options, factor in (({}, 1.0), ({"temperature": 2.0, "data_size": 45}, 2.5)):
        problem = problem_of(case.tangent, case.likelihood, case.y, prior_mean=0.3, **options)
        anchors = points_of(case, lw.VaLLA(4))
        steps = moving_points.BoundSteps(problem, anchors, 3, 0.1, None)
        state = steps.init()
        batch = Batch(case.tangent, Inputs(case.x), case.y, 0)
        found = steps.objective(state, state.values, batch, torch.Generator())
        rows = rows_at(case, anchors)
        inverse = torch.linalg.inv(rows @ rows.T)
        A = factor * inverse @ rows @ case.G @ rows.T @ inverse
        precision = 2 * torch.eye(rows.shape[1]).double() + rows.T @ A @ rows
        q = torch.distributions.MultivariateNormal(case.theta, precision_matrix=precision)
        p = torch.distributions.MultivariateNormal(
            torch.full_like(case.theta, 0.3), torch.eye(len(case.theta)).double() / 2
        )
        expected = factor * (case.log_likelihood - (case.G @ torch.linalg.inv(precision)).trace() / 2)
        close(found, torch.distributions.kl_divergence(q, p) - expected, 1e-6)


@pytest.mark.quick(2)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_divergence_for_gaussian_noise(alpha):
    """Mini-batches are scaled to N; at α = 0 the bound without the distance, at α = 1 the log predictive density."""
    case, noise = setup("conv1d"), 0.2
    problem = problem_of(case.tangent, lw.Gaussian(noise), case.y, data_size=90)
    anchors = points_of(case, lw.VaLLA(4))
    fit = lw.AlphaDivergence(alpha=alpha)
    steps = alpha_divergence.AlphaSteps(fit, problem, anchors, None)
    state = steps.init()
    some = slice(0, 5)
    batch = Batch(case.tangent, Inputs(oracle.take(case.x, some)), case.y[some], 0)
    found = steps.objective(state, state.values, batch, torch.Generator())
    rows = rows_at(case, anchors)
    sigma = torch.linalg.inv(2 * torch.eye(rows.shape[1]).double() + rows.T @ rows)  # L = I
    expected = torch.zeros(()).double()
    for J, f, y in zip(case.J[some], case.f[some], case.y[some], strict=True):
        K, r = J @ sigma @ J.T, y - f
        if alpha == 0:
            one = -0.5 * (r.square().sum() + K.trace()) / noise - len(r) / 2 * math.log(2 * math.pi * noise)
        else:
            eye = torch.eye(len(r)).double()
            whole = torch.distributions.MultivariateNormal(torch.zeros(len(r)).double(), noise / alpha * eye + K)
            one = whole.log_prob(r) / alpha  # N(y; f, σ²)^α is N(y; f, σ²/α) up to its constant
            one = one - len(r) / 2 * (math.log(2 * math.pi * noise) - math.log(2 * math.pi * noise / alpha) / alpha)
        expected = expected + one
    kl = divergence(inner_factor(rows @ rows.T / 2, torch.eye(4).double()))
    close(found, kl - 90 / 5 * expected, 1e-8)


def test_the_divergence_uses_the_given_link():
    """For α = 1 and classes the data term is the log probability of the link's prediction under `K*`."""
    case = setup("mlp")
    problem = problem_of(case.tangent, case.likelihood, case.y, data_size=90)
    anchors, some = points_of(case, lw.VaLLA(4)), slice(0, 5)
    rows, batch = rows_at(case, anchors), Batch(case.tangent, Inputs(oracle.take(case.x, some)), case.y[some], 0)
    sigma = torch.linalg.inv(2 * torch.eye(rows.shape[1]).double() + rows.T @ rows)  # L = I
    kl = divergence(inner_factor(rows @ rows.T / 2, torch.eye(4).double()))
    found = {}
    for link in (lw.Probit(), lw.Probit(scale="marginal"), lw.LaplaceBridge()):
        steps = alpha_divergence.AlphaSteps(lw.AlphaDivergence(link=link), problem, anchors, None)
        state = steps.init()
        found[link] = steps.objective(state, state.values, batch, torch.Generator())
        latent = lw.covariance.Latent(case.f[some], (DenseTerm(case.J[some] @ sigma @ case.J[some].mT),))
        logs = lw.Categorical().predict(latent, link).log_prob(case.y[some])
        close(found[link], kl - 90 / 5 * logs.sum(), 1e-6)
    assert len({round(float(value), 3) for value in found.values()}) == 3
    steps = alpha_divergence.AlphaSteps(lw.AlphaDivergence(alpha=0.5, link=lw.Probit()), problem, anchors, None)
    with pytest.raises(lw.LapwingError, match=r"alpha=0.5 with link=Probit\(scale='mean'\). Write link=lw.SampledLink"):
        steps.objective(state, state.values, batch, torch.Generator())


# --- optima ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def still(monkeypatch):
    """Z stays: what is optimised is A."""
    monkeypatch.setattr(moving_points, "movable", lambda anchors: False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp_scalar"])
def test_at_alpha_zero_the_optimal_A_is_the_closed_form(name, still):
    """Fixed Z, δ and σ², Gaussian noise: Adam on L to within 1 % of the variances that the closed form gives."""
    case = setup(name)
    loader = [(case.x, case.y)]
    exact = case.fit(lw.VaLLA(3, fit=lw.ClosedForm()), loader=loader)
    found = case.fit(lw.VaLLA(3, fit=lw.AlphaDivergence(alpha=0.0, steps=4000, learning_rate=0.01)), loader=loader)
    torch.testing.assert_close(found.latent(case.test).variance, exact.latent(case.test).variance, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["mlp_scalar", "mlp", pytest.param("attention", marks=pytest.mark.slow)])
def test_moving_points_raise_the_bound(name):
    """The evidence's lower bound with the points found is above that of the points it began at."""
    case = setup(name, samples=40)
    loader = [(case.x, case.y)]
    began = case.fit(lw.VaLLA(3, fit=lw.ClosedForm()), loader=loader)
    moved = case.fit(lw.VaLLA(3, fit=lw.VariationalBound(100, 0.03)), loader=loader)
    full = case.fit(lw.Full(), loader=loader)
    first, last, most = (fit.log_marginal_likelihood(lower_bound=True) for fit in (began, moved, full))
    assert first < last <= most + 1e-6
    objective = moved.history["objective"]
    assert float(objective[-1]) == pytest.approx(-last, rel=1e-3)
    assert float(objective[-1]) < float(objective[0])


def test_nothing_to_move_is_the_closed_form(caplog):
    case = setup("tied")
    exact = case.fit(lw.VaLLA(5, fit=lw.ClosedForm()))
    found = case.fit(lw.VaLLA(5, fit=lw.VariationalBound(3)))
    close(found.covariance.to_dense(), exact.covariance.to_dense(), 1e-12)


def toy(count: int = 60) -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(1, 15), nn.Tanh(), nn.Linear(15, 1)).double().eval()
    x = torch.linspace(-2, 2, count)[:, None].double()
    return model, x, model(x).detach() + 0.3 * torch.randn(count, 1).double()


@pytest.mark.slow
def test_the_bound_finds_precision_and_noise():
    """δ and σ² of the bound are those that the evidence's lower bound has at the points found."""
    model, x, y = toy()
    fitted = lw.fit(model, [(x, y)], lw.VaLLA(8, fit=lw.VariationalBound(1500, 0.01)), tune=lw.Evidence())
    history = fitted.history
    assert float(history["noise_variance"][-1]) == pytest.approx(fitted.noise_variance, rel=0.02)
    assert float(history["precision"][-1]) == pytest.approx(float(fitted.prior.precision[0]), rel=0.1)


def test_by_the_divergence_what_is_given_is_kept_and_the_rest_is_found():
    model, x, y = toy()
    fit = lw.VaLLA(5, fit=lw.AlphaDivergence(steps=3, learning_rate=0.05))
    free = lw.fit(model, [(x, y)], fit)
    assert free.prior_precision != 1.0
    assert free.noise_variance != pytest.approx(float((model(x) - y).detach().square().mean()))
    kept = lw.fit(model, [(x, y)], fit, prior_precision=0.7)
    assert kept.prior_precision == pytest.approx(0.7, rel=1e-12)
    both = lw.fit(model, [(x, y)], fit, prior_precision=0.7, likelihood=lw.Gaussian(0.04))
    assert both.noise_variance == 0.04
    assert both.prior_precision == pytest.approx(0.7, rel=1e-12)


def test_found_numbers_belong_to_the_covariance():
    """The posterior's variance is `K*` at what was found: `(Δ + J_ZᵀAJ_Z)⁻¹` noise, N/n and τ undone."""
    model, x, y = toy()
    fit = lw.AlphaDivergence(steps=3, learning_rate=1e-9)  # A stays the identity
    points = lw.InducingPoints(x[::20])
    for options in ({}, {"data_size": 600}, {"temperature": 3.0}, {"prior_precision": {"0": 2.0, "2": 0.5}}):
        fitted = lw.fit(model, [(x[:40], y[:40]), (x[40:], y[40:])], lw.VaLLA(points, fit=fit), **options)
        rows = jacobian(model, x[::20], fitted.tangent.blocks)[:, 0]
        delta = expanded(fitted.tangent.blocks, fitted.prior.precision)
        sigma = torch.linalg.inv(torch.diag(delta) + rows.T @ rows)
        close(fitted.covariance.to_dense(), sigma, 1e-6)


# --- validation ------------------------------------------------------------------------------------------------------


def test_early_stopping_returns_the_best_not_the_last():
    model, x, y = toy()
    held_out = [(x[::7], y[::7] + 0.1), (x[3::7], y[3::7] - 0.1)]  # noisier: training overshoots
    fit = lw.AlphaDivergence(steps=400, learning_rate=0.05, validation=held_out, every=10, patience=2)
    fitted = lw.fit(model, [(x, y)], lw.VaLLA(5, fit=fit))
    scores = fitted.history["validation"]
    best = int(scores.argmin())
    assert best > 0
    assert len(scores) == best + 3  # and two looks that did not improve
    assert len(fitted.history["objective"]) == 10 * (len(scores) - 1)
    found = -torch.cat([fitted.predict(a).log_prob(b) for a, b in held_out]).mean()
    assert float(found) == pytest.approx(float(scores[best]), rel=1e-6)


def test_held_out_data_in_every_form_that_fit_accepts():
    model, x, y = toy()
    pair = x[::7], y[::7] + 0.5
    forms = [[pair], pair, (pair[0].numpy(), pair[1].numpy()), torch.utils.data.TensorDataset(*pair)]
    found = [
        lw.fit(
            model, [(x, y)], lw.VaLLA(5, fit=lw.AlphaDivergence(steps=20, validation=held_out, every=10))
        ).history["validation"]
        for held_out in forms
    ]  # fmt: skip
    for scores in found:
        assert torch.equal(scores, found[0])
    frame = pytest.importorskip("pandas").DataFrame({"a": [0.0, 1.0], "b": [1.0, 0.0]})
    with pytest.raises(lw.LapwingError, match=r"reads no frames. Pass \(x.to_numpy\(\), y.to_numpy\(\)\)"):
        lw.AlphaDivergence(validation=(frame, pair[1][:2]))  # columns in another order than in the fit are not noticed


def test_the_first_rise_ends_the_steps_and_the_last_values_are_returned():
    model, x, y = toy()
    held_out = [(x[::7], y[::7] + 0.5), (x[3::7], y[3::7] - 0.5)]
    fit = lw.AlphaDivergence(steps=400, learning_rate=0.05, validation=held_out, every=10, stop="first rise")
    fitted = lw.fit(model, [(x, y)], lw.VaLLA(5, fit=fit))
    scores = fitted.history["validation"]
    assert 2 <= len(scores) < 41
    assert scores[-1] > scores[-2]
    assert (scores[1:-1] <= scores[:-2]).all()
    found = -torch.cat([fitted.predict(a).log_prob(b) for a, b in held_out]).mean()
    assert float(found) == pytest.approx(float(scores[-1]), rel=1e-6)
    with pytest.raises(lw.LapwingError, match=r'stop="first rise", validation=\(x_val, y_val\)'):
        lw.AlphaDivergence(stop="first rise")


def test_an_open_prior_precision_and_noise_variance_start_where_they_are_told():
    model, x, y = toy()
    weights, residual = torch.nn.utils.parameters_to_vector(model.parameters()).detach(), (y - model(x)).detach()
    usual = {
        "initial_prior_precision": len(weights) / float(weights.square().sum()),
        "initial_noise_variance": float(residual.square().mean()),
    }

    def fitted(**options):
        return lw.fit(model, [(x, y)], lw.VaLLA(3, lw.AlphaDivergence(steps=3, **options)), tune=None)

    close(fitted(**usual).history["objective"], fitted().history["objective"], 1e-6)
    start = fitted(initial_prior_precision=0.7, initial_noise_variance=0.3, learning_rate=1e-9)
    assert start.prior.precision.tolist() == pytest.approx([0.7] * len(start.prior.precision))
    assert start.noise_variance == pytest.approx(0.3)
    for name in ("prior_precision", "noise_variance"):
        method = lw.VaLLA(3, lw.AlphaDivergence(steps=3, **{f"initial_{name}": 1.0}))
        given = {"prior_precision": 2.0} if name[0] == "p" else {"likelihood": lw.Gaussian(0.1)}
        with pytest.raises(lw.LapwingError, match=f"start of an open {name}, and this fit has none"):
            lw.fit(model, [(x, y)], method, **given)


def test_a_constant_learning_rate_does_not_depend_on_the_number_of_steps():
    model, x, y = toy()
    found = {
        (schedule, steps): lw.fit(
            model, [(x, y)], lw.VaLLA(3, lw.AlphaDivergence(steps=steps, learning_rate=0.05, schedule=schedule))
        ).history["objective"][:4]
        for schedule in ("constant", "linear") for steps in (4, 12)
    }  # fmt: skip
    close(found["constant", 4], found["constant", 12])
    assert not torch.allclose(found["linear", 4], found["linear", 12])
    assert torch.equal(found["constant", 4][:2], found["linear", 4][:2])  # the first step has the full rate


@pytest.mark.parametrize("fit", [lw.AlphaDivergence, lw.VariationalBound])
def test_divergence_raises(fit):
    model, x, y = toy()
    with pytest.raises(lw.LapwingError, match=r"diverged: .* at step \d+ after .*learning_rate=100000\)"):
        lw.fit(model, [(x, y)], lw.VaLLA(5, fit=fit(steps=50, learning_rate=1e6)))


# --- everything else -------------------------------------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "fit"),
    [
        *(("mlp", fit) for fit in MOVING),
        ("mlp_scalar", MOVING[0]), ("cnn_bn_inplace", MOVING[1]), ("attention", MOVING[0]),
        ("tied", MOVING[2]), ("frozen_trunk", MOVING[0]), ("all_frozen", MOVING[1]),
        *(pytest.param(name, MOVING[1], marks=pytest.mark.slow) for name in ("gpt2", "vit")),
    ],
)  # fmt: skip
def test_networks(name, fit):
    """Every fit runs on every kind of network and gives a covariance below the prior's."""
    case = setup(name)
    for options in ({}, {"prior_precision": None}):
        fitted = case.fit(lw.VaLLA(4, fit=fit), **options)
        sigma = fitted.covariance.to_dense()
        assert psd(sigma)
        prior = torch.diag(1 / case.expand(fitted.prior.precision))
        assert torch.linalg.eigvalsh(prior - sigma).min() > -1e-9 * prior.max()
        close(fitted.latent(case.test).covariance, oracle.output_covariance(case.J_test, sigma), 1e-7)


@pytest.mark.parametrize("fit", [lw.AlphaDivergence(steps=2), lw.VariationalBound(steps=2)], ids=str)
def test_points_that_are_given_stay_as_they_are(fit):
    model, points = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval(), torch.randn(3, 3)
    before = points.clone()
    data = [(torch.randn(8, 3), torch.arange(8) % 2)]
    posterior = lw.fit(model, data, lw.VaLLA(lw.InducingPoints(points), fit), prior_precision=1.0)
    assert torch.equal(points, before)
    assert torch.equal(lw.fit(model, data, lw.VaLLA(lw.InducingPoints(points), fit), prior_precision=1.0)
                       .latent(points).variance, posterior.latent(points).variance)  # fmt: skip
