"""`KFAC(fisher="sampled")`: right in expectation, an error that falls as 1/√N, and one backward pass per sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.inputs import Inputs
from lapwing.methods.footprint import FitShape
from tests.running.test_checkpoint import check_same

SAMPLED = lw.KFAC(fisher="sampled")


def network(samples: int = 12) -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4)).double().eval()
    return model, torch.randn(samples, 2).double(), torch.arange(samples) % 4


def fit(model: nn.Module, *data: Any, method: lw.Method = SAMPLED, **options: Any) -> lw.Posterior:
    return lw.fit(model, list(data), method, params=lw.everything, prior_precision=1.0, progress=False, **options)


def output_factor(posterior: lw.Posterior) -> Tensor:
    """Γ of the first layer, per sample."""
    factors: Any = posterior.covariance.structures["0"]  # type: ignore[attr-defined]
    outputs = factors.outputs[0].double()
    return outputs @ (factors.output_eigenvalues[0, :, None] * outputs.T) / posterior.samples


@pytest.fixture
def no_exact_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """C backward passes per sample would need the exact root. (One row of zeros only counts its columns.)"""
    fisher_root = lw.Categorical.fisher_root

    def of_one_row(self: lw.Categorical, outputs: Tensor) -> Tensor:
        assert len(outputs) == 1
        return fisher_root(self, outputs)

    monkeypatch.setattr(lw.Categorical, "fisher_root", of_one_row)


def test_its_factors_are_right_in_expectation_and_inputs_exact() -> None:
    model, x, y = network()
    exact = fit(model, (x, y), method=lw.KFAC())
    drawn = [fit(model, (x, y), seed=seed) for seed in range(40)]
    factors = torch.stack([output_factor(posterior) for posterior in drawn])
    error = factors.std(0) / len(drawn) ** 0.5
    assert ((factors.mean(0) - output_factor(exact)).abs() < 4 * error).all()
    inputs = [p.covariance.structures["0"].input_eigenvalues for p in (exact, drawn[0])]  # type: ignore[attr-defined]
    torch.testing.assert_close(*inputs)


def test_its_error_falls_with_the_root_of_the_number_of_samples() -> None:
    model, x, y = network(25)
    exact = output_factor(fit(model, (x, y), method=lw.KFAC()))

    def error(times: int) -> float:
        """Root mean square error over seeds, on the same 25 samples shown several times: the exact factor stays."""
        data = (x.repeat(times, 1), y.repeat(times))
        errors = [output_factor(fit(model, data, seed=seed)) - exact for seed in range(20)]
        return float(torch.stack(errors).square().sum((1, 2)).mean().sqrt())

    assert error(1) / error(16) == pytest.approx(4, rel=0.3)


def test_one_backward_pass_per_sample_in_fits_updates_and_plans(no_exact_root: None, reloaded: Any) -> None:
    model, x, y = network()
    posterior = fit(model, (x[:8], y[:8]))
    loaded = reloaded(posterior, model)
    assert str(loaded.method) == str(SAMPLED)
    for former in (posterior, loaded):
        assert former.update([(x[8:], y[8:])]).samples == 12
    check_same(posterior.update([(x[8:], y[8:])]), loaded.update([(x[8:], y[8:])]))
    assert fit(model, (x, y), method=lw.EKFAC(fisher="sampled")).samples == 12
    shape = FitShape.of(posterior.tangent, posterior.likelihood, Inputs(x), 12)
    assert SAMPLED.footprint(shape).passes == 2
    assert lw.KFAC().footprint(shape).passes == 1 + shape.columns > 2
