"""Predictions of every method: joint covariances, weight draws, gradients in x, loaders, precision, inference mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.covariance import JointLatent
from tests import oracle
from tests.conformance import EVERY, close, covering, cut, psd, sampled_from, setup
from tests.trained import train
from tests.tuning.test_evidence import METHODS, every


@pytest.mark.quick(3)
@covering(
    ["mlp", "mlp_scalar", "grouped_strided_conv", "tied", "embedding_bag_of_tokens", "prelu"],
    ["mlp_scalar", "tied"], METHODS, "kfac",
)  # fmt: skip
def test_joint_covariance(name, method):
    problem = setup(name)
    fitted = problem.fit(method)
    sigma = fitted.covariance.to_dense()
    joint = fitted.latent(problem.test, joint=True)
    assert isinstance(joint, JointLatent)
    assert joint.joint
    wanted = oracle.joint_output_covariance(problem.J_test, sigma)
    close(joint.covariance, wanted, 1e-8)
    size = joint.mean.numel()
    assert psd(joint.covariance.reshape(size, size))
    close(joint.variance, fitted.latent(problem.test).variance, 1e-8)
    draws = joint.sample(20_000, torch.Generator().manual_seed(0)) - joint.mean
    sampled_from(draws.flatten(1), wanted.reshape(size, size))


@pytest.mark.quick(3)
@covering(["mlp", "cnn_bn_inplace", "tied"], ["mlp"], METHODS, "kfac")
def test_weight_draws_have_the_covariance(name, method):
    problem = setup(name)
    fitted = problem.fit(method)
    drawn = fitted.sample(4000, seed=2)
    named = dict(problem.model.named_parameters())
    assert {n: tuple(v.shape[1:]) for n, v in drawn.items()} == {n: tuple(named[n].shape) for n in drawn}
    flat = torch.cat([block.join(drawn) for block in problem.blocks], -1)
    sampled_from(flat - problem.theta, fitted.covariance.to_dense())


def test_monte_carlo_runs_the_network_under_the_drawn_weights():
    """Batches of a loader have the same weights, and covariances of several inputs are those of the draws."""
    problem = setup("cnn_bn_inplace")
    fitted = problem.fit(lw.KFAC())
    joint = fitted.latent(problem.test, via=lw.MonteCarlo(draws=3, seed=7), joint=True)
    drawn = joint.draws
    close(fitted.latent([problem.test[:2], problem.test[2:]], via=lw.MonteCarlo(draws=3, seed=7)).draws, drawn)
    centred = (drawn - drawn.mean(0)).flatten(1)
    close(joint.covariance.flatten(2).flatten(0, 1), centred.T @ centred / 2)
    generator = torch.Generator().manual_seed(7)
    for found in drawn:
        vectors = fitted.covariance.sample(1, generator)
        flat = problem.theta + torch.cat([vectors[b.name][0] for b in problem.blocks])
        weights = {}
        for block in problem.blocks:
            weights |= block.split(flat[problem.slices[block.name]])
        close(found, torch.func.functional_call(problem.model, weights, problem.test).detach(), 1e-10)


# --- differentiable in x ---------------------------------------------------------------------------------------------


@pytest.mark.quick(2)
@covering(["mlp", "grouped_strided_conv", "cnn_bn_inplace", "prelu", "attention"], ["prelu"], METHODS, "kfac")
def test_moments_are_differentiable_in_x(name, method):
    problem = setup(name)
    fitted = problem.fit(method)
    x = problem.test[:2].clone().requires_grad_()

    def moments(x: Tensor) -> tuple[Tensor, ...]:
        latent = fitted.latent(x)
        return latent.mean, latent.variance, latent.covariance, fitted.latent(x, joint=True).covariance

    assert torch.autograd.gradcheck(moments, (x,), eps=1e-6, atol=1e-6, rtol=1e-5, fast_mode=True)
    latent = fitted.latent(x)
    assert latent.variance.requires_grad
    assert not fitted.latent(x.detach()).variance.requires_grad
    with torch.no_grad():
        assert not fitted.latent(x).variance.requires_grad


def test_standard_deviations_have_no_slope_where_they_are_zero():
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Tanh(), nn.Linear(5, 2, bias=False)).double().eval()
    x = torch.randn(8, 3, dtype=torch.float64)
    for method in (lw.Diagonal(), lw.KFAC()):
        fitted = lw.fit(model, [(x, torch.randint(2, (8,)))], method, prior_precision=1.0)
        at = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
        std = fitted.latent(at).std
        (slope,) = torch.autograd.grad(std.sum(), at)
        assert std.max() < 1e-100
        assert not slope.any()


def test_predictions_are_differentiable_in_x():
    problem = setup("mlp")
    fitted = problem.fit(lw.KFAC())
    x = problem.test.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: fitted.predict(x).probs, (x,), atol=1e-6)
    assert torch.autograd.gradcheck(lambda x: fitted.latent(x, via=lw.MonteCarlo(draws=5)).variance, (x,), atol=1e-6)


# --- loaders ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick(3)
@covering(["mlp", "squeezed", "grouped_strided_conv", "bilinear", "prelu"], ["prelu"], METHODS, "kfac")
def test_loaders_predict_as_tensors_do(name, method):
    problem = setup(name)
    fitted = problem.fit(method)
    whole = fitted.predict(problem.x)
    parts = fitted.predict(problem.loader)
    for attribute in ("probs",) if problem.case.classification else ("mean", "variance"):
        close(getattr(parts, attribute), getattr(whole, attribute), 1e-9)
    close(parts.log_prob(problem.y), whole.log_prob(problem.y), 1e-9)
    latent = fitted.latent(problem.loader)
    close(latent.covariance, fitted.latent(problem.x).covariance, 1e-9)


@pytest.mark.quick(2)
@every(METHODS)
def test_texts_of_other_lengths_share_a_loader(method):
    """One batch of single tokens beside longer ones: other positions, other factors."""
    problem = setup("attention")
    fitted = problem.fit(method)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randn(2, length, 6, generator=generator, dtype=torch.float64) for length in (3, 1, 5)]
    together = fitted.latent(texts)
    for i, text in enumerate(texts):
        alone = fitted.latent(text)
        close(together.mean[2 * i : 2 * i + 2], alone.mean)
        close(together.covariance[2 * i : 2 * i + 2], alone.covariance, 1e-9)
        close(together.variance[2 * i : 2 * i + 2], alone.variance, 1e-9)
    assert together.sample(3, torch.Generator().manual_seed(0)).shape == (3, 6, 3)


# --- lower precision -------------------------------------------------------------------------------------------------


@pytest.mark.quick(3)
@covering(["mlp", "cnn_bn_inplace", "attention"], ["mlp"], METHODS, "kfac")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 0.15)])
def test_lower_precision_is_close(name, dtype, tolerance, method):
    """Sums are kept in float32 whatever the model's dtype."""
    case = setup(name).case
    reference, model = case.build(), case.build().to(dtype)
    rounded = case.build().to(dtype).double()
    reference.load_state_dict(rounded.state_dict())  # the same weights, exactly
    x = case.inputs(9, 1).to(dtype)
    new, y = case.inputs(3, 2).to(dtype), case.targets(9, 1)
    options = {"params": EVERY, "likelihood": lw.Categorical(), "prior_precision": 2.0}
    wanted = lw.fit(reference, cut(x.double(), y, (5, 3, 1)), method, **options)
    fitted = lw.fit(model, cut(x, y, (5, 3, 1)), method, **options)
    assert fitted.covariance.dtype in (torch.float32, torch.float64)
    latent, exact = fitted.latent(new), wanted.latent(new.double())
    assert latent.variance.dtype == torch.float32
    assert psd(latent.covariance.double(), 1e-5)
    scale = exact.variance.max()
    assert (latent.variance.double() - exact.variance).abs().max() < tolerance * scale
    assert (fitted.predict(new).probs.double() - wanted.predict(new.double()).probs).abs().max() < tolerance / 2
    drawn = fitted.sample(2)
    assert all(value.dtype == dtype for value in drawn.values())
    assert fitted.latent(new, via=lw.MonteCarlo(draws=3)).mean.shape == (3, case.outputs)
    assert abs(fitted.log_marginal_likelihood() - wanted.log_marginal_likelihood()) < 10 * tolerance


def test_float32_residual_does_not_go_negative():
    """A residual subtracts nearly equal numbers: variances at training inputs, a tiny prior precision, float32."""
    model = setup("mlp_scalar").case.build().float()
    x = torch.linspace(-2, 2, 60)[:, None].expand(-1, 3).contiguous()
    y = torch.sin(x[:, :1])
    for method in (lw.Full(form="dual"), lw.ELLA(rank=10_000, rows="all", residual="prior")):
        fitted = lw.fit(model, [(x, y)], method, likelihood=lw.Gaussian(1e-4), prior_precision=1e-4)
        twin = lw.fit(
            setup("mlp_scalar").case.build().float().double(), [(x.double(), y.double())], lw.Full(form="primal"),
            likelihood=lw.Gaussian(1e-4), prior_precision=1e-4,
        )  # fmt: skip
        variance, wanted = fitted.latent(x).variance, twin.latent(x.double()).variance
        assert (variance > 0).all()
        assert ((variance.double() - wanted).abs() < 0.02 * wanted + 1e-9).all()


# --- inference mode --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [None, lw.MonteCarlo(draws=8), lw.Streamlined()])
def test_noise_by_the_inputs_of_a_layer_is_predicted_in_inference_mode(way: lw.Way | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(400, 1, generator=generator) * 4 - 2
    y = torch.sin(2 * x) + (0.05 + 0.1 * (x + 2)) * torch.randn(400, 1, generator=generator)
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    train(model, lambda: nn.functional.mse_loss(model(x), y), 300, 1e-2)
    posterior = lw.fit(model, (x, y), lw.KFAC(), likelihood=lw.Gaussian(noise="input"), validation=(x + 0.01, y))
    assert posterior.likelihood.input_noise is not None
    wanted = posterior.predict(x[:5], via=way).std
    with torch.inference_mode():
        for inputs in (x[:5], x[:5].clone(), [(x[:5], y[:5])]):
            torch.testing.assert_close(posterior.predict(inputs, via=way).std, wanted)
