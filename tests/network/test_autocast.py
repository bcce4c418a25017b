"""Under the caller's autocast the network runs as the caller's calls do, and the contractions in full precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw

CAST = torch.autocast("cpu", dtype=torch.bfloat16)
HALF = torch.autocast("cpu", dtype=torch.float16)
METHODS: dict[str, lw.Method] = {
    "diagonal": lw.Diagonal(), "KFAC": lw.KFAC(), "full": lw.Full(), "ELLA": lw.ELLA(rank=6, rows=20),
}  # fmt: skip
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)),
    "cnn": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
    "transformer": lambda: nn.Sequential(
        nn.Flatten(2),
        nn.Linear(36, 8),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        nn.Flatten(),
        nn.Linear(8, 3),
    ),
}


def under(cast: Any) -> Callable[[nn.Module, Any], Tensor]:
    """Calls the network alone under autocast."""

    def forward(model: nn.Module, inputs: Any) -> Tensor:
        with cast:
            return model(inputs)

    return forward


def problem(name: str) -> tuple[nn.Module, Tensor, list[tuple[Tensor, Tensor]]]:
    """A network, inputs and training batches."""
    torch.manual_seed(0)
    x = torch.randn(24, 1, 6, 6)
    return NETWORKS[name]().eval(), x[:5], [(x, torch.randint(3, (24,)))]


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_autocast_is_for_the_network_alone(name: str, method: str) -> None:
    """Bit for bit what a network gives that switches autocast on for itself; also for what is read within."""
    model, x, loader = problem(name)
    wanted = lw.fit(model, loader, METHODS[method], prior_precision=1.0, forward=under(CAST))
    with CAST:
        fitted = lw.fit(model, loader, METHODS[method], prior_precision=1.0)
        inside = fitted.latent(x)
        read = inside.variance, inside.covariance, inside.sample(3)
        probs = fitted.predict(x).probs
    expected = wanted.latent(x)
    for found, other in zip(read, (expected.variance, expected.covariance, expected.sample(3)), strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, other)
    assert torch.equal(probs, wanted.predict(x).probs)
    assert torch.equal(inside.mean, under(CAST)(model, x).float())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_layers_under_autocast_are_covered(name: str, method: str) -> None:
    """The recorded uses agree with autograd up to bfloat16, so KFAC stays KFAC. Variances have the rounding's error."""
    model, x, loader = problem(name)
    plain, cast = (
        lw.fit(model, loader, METHODS[method], params=lw.everything, prior_precision=1.0, **options)
        for options in ({}, {"forward": under(CAST)})
    )
    assert "generic" not in {line.family for line in cast.tangent.coverage.lines}
    torch.testing.assert_close(cast.latent(x).variance, plain.latent(x).variance, rtol=0.15, atol=0)


def test_a_posterior_fitted_outside_predicts_inside() -> None:
    """The variances differ from those outside by the network's rounding alone, and the caller's autocast stays on."""
    model, x, loader = problem("mlp")
    fitted = lw.fit(model, loader, lw.KFAC(), params=lw.everything, prior_precision=1.0)
    with CAST:
        inside = fitted.latent(x)
        assert torch.is_autocast_enabled("cpu")
        assert (x.flatten(1) @ x.flatten(1).T).dtype == torch.bfloat16
        drawn = fitted.latent(x, via=lw.MonteCarlo(20))
    torch.testing.assert_close(inside.variance, fitted.latent(x).variance, rtol=0.03, atol=0)
    torch.testing.assert_close(drawn.mean, fitted.latent(x, via=lw.MonteCarlo(20)).mean, rtol=0.05, atol=0.02)


def test_small_variances_survive_float16() -> None:
    """Below the smallest number of float16 they were zero."""
    model, x, loader = problem("mlp")
    fitted = lw.fit(model, loader, lw.Diagonal(), params=lw.everything, prior_precision=1e9)
    with HALF:
        variance = fitted.latent(x).variance
    torch.testing.assert_close(variance, fitted.latent(x).variance, rtol=0.01, atol=0)
    assert variance.max() < 2**-24


def test_errors_leave_autocast_on() -> None:
    """An exception in the middle puts back what the caller had."""
    model, x, loader = problem("mlp")
    fitted = lw.fit(model, loader, prior_precision=1.0)
    with CAST:
        with pytest.raises(lw.LapwingError, match="NaN"):
            fitted.latent(x * float("nan"))
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
