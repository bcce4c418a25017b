"""Checkpoints: a fit that was interrupted goes on, to the same posterior bit by bit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.fitting import checkpoint
from tests.posterior.test_lifecycle import EVERY, METHODS, data

STEPS = [
    lw.VaLLA(3), lw.VaLLA(3, lw.NaturalGradient(steps=6, rate=0.3)), lw.VaLLA(3, lw.VariationalBound(steps=6)),
    lw.MeanField(steps=6), lw.SubsetOfData(4), lw.SubsetOfData(6, "balanced", rescale=True),
    lw.SampledLLA(2, lw.StochasticGradient(steps=6, tolerance=0.99), em_steps=1), lw.TemperatureScaling(),
    lw.SampledLLA(3, lw.ConjugateGradients(iterations=3, tolerance=0.5), em_steps=2, linearised_mode=True),
    lw.SampledLLA(3, lw.ConjugateGradients(preconditioner=lw.Diagonal()), em_steps=1, prior="g", per_block=True),
    lw.ELLA(rank=3, rows=5, sampling="balanced"),
]  # fmt: skip


class Killed(BaseException):
    """Stands for a signal."""


class Loader:
    """A list of batches that raises after so many."""

    def __init__(self, every: list[Any], left: int = 10**9) -> None:
        self.every, self.left = every, left

    def __len__(self) -> int:
        return len(self.every)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.every:
            if not self.left:
                raise Killed
            self.left -= 1
            yield batch


def pieces(name: str = "mlp", samples: int = 8, size: int = 3) -> tuple[nn.Module, list[Any]]:
    model, x, y, _ = data(name, samples)
    return model, list(zip(x.split(size), y.split(size), strict=True))


def bits(posterior: lw.Posterior) -> dict[str, Any]:
    """All that a posterior says."""
    tensors = {**posterior.covariance.tensors(), **posterior.statistics, **posterior.tangent.state()}
    tensors |= {f"history/{name}": value for name, value in posterior.history.items()}
    tensors |= {"prior": posterior.prior.precision}
    numbers = {name: getattr(posterior, name) for name in ("samples", "data_factor", "noise_variance", "method")}
    return {**tensors, **numbers, "temperature": posterior.logit_temperature, "at": str(posterior.covariance.extra())}


def check_same(one: lw.Posterior, other: lw.Posterior) -> None:
    first, second = bits(one), bits(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        if isinstance(value, Tensor):
            assert torch.equal(value.nan_to_num(), second[name].nan_to_num()), name
        else:
            assert value == second[name], name


def interrupted(model: nn.Module, every: list[Any], path: Path, *after: int, **options: Any) -> lw.Posterior:
    """Fits until it is killed after so many batches, again with the same path, ..., and in the end to the end."""
    for count in after:
        with suppress(Killed):
            return lw.fit(model, Loader(every, count), checkpoint=path, **{"every": 1, **options})
    return lw.fit(model, Loader(every), checkpoint=path, **{"every": 1, **options})


@pytest.mark.parametrize("method", [*METHODS, *STEPS], ids=str)
def test_every_method_goes_on_to_the_same_posterior(method: lw.Method, tmp_path: Path) -> None:
    model, every = pieces()
    options = {"method": method, "params": EVERY}
    expected = lw.fit(model, every, **options)
    check_same(interrupted(model, every, tmp_path / "fit", 4, 7, 11, **options), expected)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, *STEPS], ids=str)
def test_wherever_it_is_interrupted(method: lw.Method, tmp_path: Path) -> None:
    model, every = pieces()
    options = {"method": method, "params": EVERY}
    expected = lw.fit(model, every, **options)
    for count in range(2, 25):
        check_same(interrupted(model, every, tmp_path / "fit", count, count, **options), expected)
        check_same(interrupted(model, every, tmp_path / "fit", count, every=2, **options), expected)
        assert not list(tmp_path.iterdir())


HELD_OUT = data("mlp", 8)[3]
TUNINGS: dict[str, dict[str, Any]] = {
    "the default": {}, "all weights after the last layer": {"validation": HELD_OUT}, "none": {"tune": None},
    "evidence": {"tune": lw.Evidence(per_layer=True)}, "held-out data": {"tune": lw.Validation(HELD_OUT)},
    "early stopping": {"method": lw.EKFAC(), "tune": lw.EarlyStopping(HELD_OUT, prefixes=2)},
    "early stopping of a subspace": {"method": lw.ELLA(3, rows=5), "tune": lw.EarlyStopping(HELD_OUT, prefixes=3)},
    "a part of the data": {"method": lw.KFAC(), "data_size": 20, "weight_decay": 0.1, "temperature": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("options", TUNINGS.values(), ids=TUNINGS.keys())
def test_every_tuning_goes_on_to_the_same_posterior(options: dict[str, Any], tmp_path: Path) -> None:
    model, every = pieces()
    check_same(interrupted(model, every, tmp_path / "fit", 4, 7, 9, 11, **options), lw.fit(model, every, **options))


def test_a_regression_with_weights_and_missing_targets(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y, w = torch.randn(12, 3), torch.randn(12, 2), torch.rand(12)
    y[5, 0] = torch.nan
    every = list(zip(x.split(5), y.split(5), w.split(5), strict=True))
    options = {"method": lw.KFAC(), "sample_weights": True}
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    options["likelihood"] = lw.Gaussian(missing=True) if hasattr(lw.Gaussian(), "missing") else None
    expected = lw.fit(model, every, **options)
    check_same(interrupted(model, every, tmp_path / "fit", 3, 4, 5, **options), expected)


def test_many_outputs_are_sampled_by_the_same_generator(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(9, 4), torch.arange(9)
    model = nn.Linear(4, 1100).eval()
    every = list(zip(x.split(2), y.split(2), strict=True))
    for method in (lw.Diagonal(), lw.EKFAC(), lw.SampledLLA(2, em_steps=0)):
        options = {"method": method, "prior_precision": 1.0}
        check_same(interrupted(model, every, tmp_path / "fit", 4, 8, **options), lw.fit(model, every, **options))


def test_a_former_posterior_is_continued(tmp_path: Path) -> None:
    model, every = pieces()
    prior = lw.fit(model, every, lw.KFAC())
    expected = lw.fit(model, every, prior=prior)
    check_same(interrupted(model, every, tmp_path / "fit", 3, 4, prior=prior), expected)


def test_state_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default nothing is written for a minute, but what is done is saved when the loader raises."""
    model, every = pieces()
    monkeypatch.setattr(checkpoint, "write", lambda *_: pytest.fail("written"))
    lw.fit(model, every, lw.Diagonal(), tune=None, checkpoint=tmp_path / "fit") if False else None
    monkeypatch.undo()
    assert interrupted(model, every, tmp_path / "fit", 4, every=None).samples == 8
