"""`prediction.covariance`: covariances of the targets of one input, against dense J Σ Jᵀ plus the noise, and draws."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests import oracle
from tests.conformance import close, psd, sampled_from

TARGETS = 3


def network(outputs: int = TARGETS, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).double().eval()


def data(count: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 2, generator=generator).double()
    noise = torch.randn(count, TARGETS, generator=generator).double() * (0.3 + 0.5 * x[:, :1].exp())
    return x, x.sum(1, keepdim=True).sin() + noise * torch.tensor([1.0, 0.3, 2.0])


X, Y = data()
TEST = data(4)[0] + 0.5
GIVEN = {"prior_precision": 0.1, "tune": None}
FITS = {
    "constant": (lw.Gaussian(0.3), GIVEN),
    "per output": (lw.Gaussian([0.1, 0.2, 0.7]), GIVEN),
    "of residuals": (lw.Gaussian(noise="input"), {"prior_precision": 0.1}),
    "student t": (lw.StudentT(df=4.0), {"prior_precision": 0.1}),
    "predicted": (lw.HeteroscedasticGaussian(), GIVEN),
}
WAYS = [None, lw.Linearized(draws=20), lw.MonteCarlo(draws=20)]


def fitted(kind: str) -> lw.Posterior:
    likelihood, options = FITS[kind]
    return lw.fit(network(6 if kind == "predicted" else 3), (X, Y), lw.Full(), likelihood=likelihood, **options)


def dense(posterior: lw.Posterior, x: Tensor) -> Tensor:
    """Returns `J Σ Jᵀ` (B, C, C)."""
    columns = [posterior.tangent.named_blocks[b.name] for b in posterior.tangent.blocks]
    names = [name for block in columns for name in block.parameters]
    model, slices = posterior.model, oracle.parameter_slices(posterior.model, names)
    named = dict(model.named_parameters())
    index = {name: torch.arange(s.start, s.stop).reshape(named[name].shape) for name, s in slices.items()}
    order = torch.cat([block.join(index) for block in columns], -1)
    J = oracle.jacobian(model, x, names)[..., order]
    return J @ posterior.covariance.to_dense() @ J.mT


@pytest.mark.parametrize("kind", FITS)
def test_covariances_are_those_of_the_dense_posterior_plus_the_noise(kind):
    posterior = fitted(kind)
    prediction = posterior.predict(TEST)
    wanted = dense(posterior, TEST)
    if kind == "predicted":
        spread = wanted.diagonal(dim1=1, dim2=2)[:, 3:]
        noise = (posterior.model(TEST)[:, 3:] + 0.5 * spread).exp().detach()
        wanted = wanted[:, :3, :3]
    elif kind in ("of residuals", "student t"):
        noise = prediction.aleatoric_variance
        assert noise.std() > 0.01
    else:
        noise = torch.tensor([0.3] * 3 if kind == "constant" else [0.1, 0.2, 0.7], dtype=torch.float64)
    close(prediction.covariance, wanted + noise.expand(4, 3).diag_embed(), 1e-8)
    off = wanted - wanted.diagonal(dim1=1, dim2=2).diag_embed()
    assert off.abs().max() > 1e-3


@pytest.mark.parametrize("via", WAYS, ids=["exact", "linear draws", "draws"])
@pytest.mark.parametrize("kind", FITS)
def test_the_diagonal_is_the_variance_and_draws_have_the_covariance(kind, via):
    prediction = fitted(kind).predict(TEST, via=via)
    covariance = prediction.covariance
    assert psd(covariance)
    close(covariance.diagonal(dim1=1, dim2=2), prediction.std.square())
    if via is not None and via.draws == 20 and isinstance(via, lw.MonteCarlo):
        covariance = covariance - prediction.latent.own_covariance[:, :3, :3] / 20  # of 20 equally likely functions
    if kind in ("student t", "of residuals", "predicted"):  # fourth moments are larger, or infinite
        y = prediction.sample(400_000) - prediction.mean
        found = torch.einsum("sbi,sbj->bij", y, y) / len(y)
        scale = prediction.std[:, :, None] * prediction.std[:, None]
        assert ((found - covariance).abs() <= 0.03 * scale).all()
        return
    for row in range(4):
        y = prediction.sample(100_000)[:, row] - prediction.mean[row]
        sampled_from(y, covariance[row], 12)  # weight draws are no Gaussian


def test_scaled_predictions_and_selected_outputs():
    posterior = fitted("per output")
    prediction, std = posterior.predict(TEST), torch.tensor([2.0, 5.0, 0.1]).double()
    moved = prediction.scaled(torch.ones(3), std)
    close(moved.covariance, std[:, None] * prediction.covariance * std)
    close(moved.covariance.diagonal(dim1=1, dim2=2), moved.variance)
    some = posterior.predict(TEST, via=lw.Linearized(outputs=[2, 0])).covariance
    close(some, prediction.covariance[:, [2, 0]][:, :, [2, 0]])
    joint = posterior.likelihood.predict(posterior.latent(TEST, joint=True))
    close(joint.covariance, prediction.covariance)


def test_the_covariance_of_a_mixture_is_the_law_of_total_covariance():
    members = [lw.fit(network(3, seed), (X, Y), lw.KFAC(), likelihood=lw.Gaussian(0.3), **GIVEN) for seed in range(3)]
    prediction, parts = lw.mixture(members).predict(TEST), [member.predict(TEST) for member in members]
    means = torch.stack([part.mean for part in parts])
    between = torch.stack([torch.cov(means[:, row].T, correction=0) for row in range(4)])
    close(prediction.covariance, sum(part.covariance for part in parts) / 3 + between)
    close(prediction.covariance.diagonal(dim1=1, dim2=2), prediction.variance)
    y = prediction.sample(200_000) - prediction.mean
    found = torch.einsum("sbi,sbj->bij", y, y) / len(y)
    assert (found - prediction.covariance).abs().max() <= 0.02 * prediction.variance.max()


def test_positions_and_heads_have_covariances_of_their_targets():
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    x = torch.randn(6, 4, 2).double()
    posterior = lw.fit(model, (x, torch.randn(6, 4, 3).double()), lw.KFAC(), likelihood=lw.Gaussian(0.2), **GIVEN)
    prediction = posterior.predict(x)
    assert prediction.covariance.shape == (6, 4, 3, 3)
    close(prediction.covariance, posterior.latent(x).covariance + 0.2 * torch.eye(3).double())
    heads = lw.Joint({"pair": lw.Gaussian(0.2), "kind": lw.Categorical()}, {"pair": [2, 0], "kind": [1, 3]})
    y = {"pair": Y[:, :2], "kind": (Y[:, 0] > 0).long()}
    joint = lw.fit(network(4), [(X, y)], lw.KFAC(), likelihood=heads, **GIVEN)
    wanted = joint.latent(TEST).covariance[:, [2, 0]][:, :, [2, 0]] + 0.2 * torch.eye(2).double()
    close(joint.predict(TEST)["pair"].covariance, wanted)


def test_float32_and_gradients():
    model = network().float()
    posterior = lw.fit(model, (X.float(), Y.float()), lw.KFAC(), likelihood=lw.Gaussian(0.3), **GIVEN)
    x = TEST.float().requires_grad_()
    covariance = posterior.predict(x).covariance
    assert covariance.dtype == torch.float32
    (gradient,) = torch.autograd.grad(covariance[:, 0, 1].sum(), x)
    assert math.isfinite(float(gradient.abs().sum()))
    assert gradient.abs().sum() > 0
