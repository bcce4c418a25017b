"""Checkpoints: a fit that was interrupted goes on, to the same posterior bit by bit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
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


def interrupted(model: nn.Module, every: list[Any], path: Path, after: int, **options: Any) -> lw.Posterior:
    """Fits until it is killed after so many batches, and again with the same path, until it has ended."""
    while True:
        try:
            return lw.fit(model, Loader(every, after), checkpoint=path, **{"every": 1, **options})
        except Killed:
            after += 1  # so that even a fit that counts its samples first goes on in the end


@pytest.mark.parametrize("method", [*METHODS, *STEPS], ids=str)
def test_every_method_goes_on_to_the_same_posterior(method: lw.Method, tmp_path: Path) -> None:
    model, every = pieces()
    options = {"method": method, "params": EVERY}
    expected = lw.fit(model, every, **options)
    for after in (3, 5, 8, 13, 21):
        check_same(interrupted(model, every, tmp_path / "fit", after, **options), expected)
        assert not list(tmp_path.iterdir())
