"""Streamlined prediction at its level: noise that patches share, correlated features before the last layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.inputs import Inputs
from lapwing.prediction.streamlined import features
from tests.quick import others_slow
from tests.refused import refused
from tests.zoo_modules import SpatialMean

LAYERS = {
    "plain": nn.Conv2d(2, 3, 3, padding=1), "strided": nn.Conv2d(2, 3, 3, stride=2, padding=1),
    "dilated groups": nn.Conv2d(2, 4, 2, dilation=2, groups=2), "transposed": nn.ConvTranspose2d(2, 3, 3, stride=2),
}  # fmt: skip


@pytest.mark.parametrize("kind", others_slow(LAYERS, ("strided", "transposed")))
def test_the_mean_over_positions_counts_the_inputs_that_patches_share(kind: str) -> None:
    """Independent noise of one variance at every pixel: the exact variance of the mean is that of the linear map."""
    model = nn.Sequential(LAYERS[kind], SpatialMean()).double().eval()
    for weight in model.parameters():
        weight.data.abs_()
    x = lw.Uncertain(torch.randn(2, 2, 7, 6).double(), 0.3)
    found, exact = (lw.propagate(model, x, via=via).variance for via in (lw.Streamlined(), lw.Linearized()))
    torch.testing.assert_close(found, exact)


@pytest.fixture
def fitted() -> tuple[lw.Posterior, Tensor]:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Tanh()
    model = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3))
    x = torch.randn(8, 1, 7, 7).double()
    return lw.fit(model.double().eval(), [(x, torch.arange(8) % 3)], lw.Diagonal(), prior_precision=20.0), x


@pytest.mark.slow
def test_the_correlation_is_that_of_the_features(fitted: tuple[lw.Posterior, Tensor], monkeypatch) -> None:
    """Against dense Jacobians of the features, within the error of 400 draws."""
    posterior, x = fitted
    monkeypatch.setattr(features, "DRAWS", 400)
    found = lw.Streamlined().fitted(posterior.tangent, posterior.covariance, Inputs(x)).features
    body, weights = posterior.model[:-1], {n: w for n, w in posterior.tangent.parameters.items() if n[0] != "6"}
    jacobian = torch.func.jacrev(lambda values: torch.func.functional_call(body, values, (x,)))(weights)
    covariance = posterior.covariance.layer_block
    spread = {n: covariance(n[0]).rotation()[1] for n in weights if n.endswith("weight")}  # (1, O, I + 1) with the bias
    total = 0
    for name, variances in spread.items():
        kernel, bias = variances[0, :, :-1].flatten(), variances[0, :, -1]
        for part, v in ((name, kernel), (name.replace("weight", "bias"), bias)):
            rows = jacobian[part].flatten(2)
            total = total + (rows * v) @ rows.mT
    total = (total / total.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]).sum(0)
    sizes = total.diagonal().sqrt()
    torch.testing.assert_close(
        found.factor @ found.factor.T + found.rest.diag(), total / sizes / sizes[:, None], rtol=0, atol=0.2
    )


def test_the_last_layer_uses_the_correlation_in_predictions_and_deployed(fitted: tuple[lw.Posterior, Tensor]) -> None:
    posterior, x = fitted
    way = lw.scale_factor(posterior, x, lw.Streamlined(), to=lw.Linearized())
    assert "features=FeatureCorrelation()" in repr(way)  # says that they are set, without their numbers
    torch.testing.assert_close(posterior.latent(x, way).variance.mean(), posterior.latent(x).variance.mean())
    none = replace(way.via.features, factor=torch.zeros(5, 1).double(), rest=torch.ones(5).double())
    plain, alone = (posterior.latent(x, lw.Streamlined(features=found)) for found in (None, none))
    torch.testing.assert_close(alone.covariance, plain.covariance)
    latent = posterior.latent(x, way)
    mean, variance = lw.deploy(posterior, x, via=way, outputs="latent")(x[:3])
    torch.testing.assert_close(variance, latent.variance[:3])
    torch.testing.assert_close(mean, latent.mean[:3])


def test_a_fitted_way_belongs_to_its_posterior_which_may_come_from_a_file(
    fitted: tuple[lw.Posterior, Tensor], reloaded: Any
) -> None:
    posterior, x = fitted
    way = lw.scale_factor(posterior, x, lw.Streamlined(), to=lw.Linearized())
    loaded = reloaded(posterior)
    torch.testing.assert_close(loaded.latent(x, way).variance, posterior.latent(x, way).variance)
    other = posterior.with_prior(21.0)
    refused(lambda: other.latent(x, way), "another posterior of … Write via=lw.scale_factor(posterior, x")
    again = lw.scale_factor(other, x, way.via, to=lw.Linearized())  # the way may start from another posterior's
    torch.testing.assert_close(other.latent(x, again).variance.mean(), other.latent(x).variance.mean())


def test_the_covariance_of_a_last_layer_with_correlated_inputs() -> None:
    """`W diag(√v) R diag(√v) Wᵀ` at the inputs' noise v, by hand; the trained weights of the layer are certain."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double().eval()
    factor = torch.randn(4, 2).double()
    rest = 0.5 * torch.rand(4).double()
    x, noise = torch.randn(5, 4).double(), torch.rand(5, 4).double()
    way = lw.Streamlined(features=features.FeatureCorrelation(factor, rest, torch.zeros(0, 3).double()))
    latent = lw.propagate(model, lw.Uncertain(x, noise), via=way)
    v = noise @ model[0].weight.square().T
    half = model[1].weight * v.sqrt()[:, None]
    wanted = half @ (factor @ factor.T + rest.diag()) @ half.mT
    torch.testing.assert_close(latent.covariance, wanted)
    centre = torch.eye(3).double() - 1 / 3
    torch.testing.assert_close(latent.centred_variance, (centre @ wanted @ centre).diagonal(dim1=1, dim2=2))
