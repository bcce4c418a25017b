"""`benchmarks/regression_rivals.py`: its splits, its scores beside naive formulas, and its tables."""

from __future__ import annotations

import pytest
import torch

from benchmarks import regression_rivals as rivals


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(167, (74, 60, 33)), (506, (342, 63, 101)), (1599, (1081, 199, 319)), (17379, (5000, 500, 1000))],
)
def test_splits_follow_the_number_of_rows(count: int, sizes: tuple[int, int, int]) -> None:
    assert rivals.sizes(count) == sizes


def test_the_held_out_variance_is_the_most_likely_one() -> None:
    generator = torch.Generator().manual_seed(0)
    variance = 0.5 * torch.rand(300, generator=generator, dtype=torch.float64)
    squares = (variance + 0.3) * torch.randn(300, generator=generator, dtype=torch.float64).square()
    assert rivals.held_out_variance(squares) == pytest.approx(float(squares.mean()), rel=0.005)
    found = torch.tensor(rivals.held_out_variance(squares, variance), dtype=torch.float64, requires_grad=True)
    total = variance + found
    (slope,) = torch.autograd.grad((total.log() + squares / total).mean(), found)
    assert abs(float(slope)) < 0.01


def test_the_crps_of_quantiles_is_that_of_equal_masses() -> None:
    generator = torch.Generator().manual_seed(0)
    quantiles = torch.randn(7, 10, generator=generator, dtype=torch.float64).sort(1).values
    y = torch.randn(7, generator=generator, dtype=torch.float64)
    pairs = (quantiles[:, :, None] - quantiles[:, None]).abs().mean((1, 2))
    naive = ((quantiles - y[:, None]).abs().mean(1) - pairs / 2).mean()
    assert rivals.crps_of_quantiles(quantiles, y) == pytest.approx(float(naive), rel=1e-12)


def test_quarters_begin_with_the_smallest_spread() -> None:
    spread = torch.linspace(4, 1, 100, dtype=torch.float64)
    y = torch.where(torch.arange(100) < 25, 9.0, 0.0).double()  # the widest quarter misses
    zeros = torch.zeros_like(y)
    found = rivals.scores(zeros, -spread, spread, spread, y)
    assert found["quarters"] == [1, 1, 1, 0]
    assert found["coverage"] == 0.75
    assert "quarters" not in rivals.scores(zeros, -1 - zeros, 1 + zeros, 1 + zeros, y)
    assert "quarters" not in rivals.scores(zeros[:99], -spread[:99], spread[:99], spread[:99], y[:99])


def row(nll: float | None, coverage: float = 0.9, **others: list[float]) -> rivals.Row:
    numbers = {"crps": 0.5, "rmse": 1.0, "coverage": coverage, "width": 2.0, "training": 1.0, "fit": 0.5}
    return {**({} if nll is None else {"nll": nll}), **numbers, **others}


def test_tables_compare_rows_of_the_same_seed() -> None:
    found = rivals.tables(
        {
            "concrete 0: one variance": row(1.0),
            "concrete 1: one variance": row(3.0),
            "real estate 0: one variance": row(2.0),
            "concrete 1: lapwing": row(2.5, quarters=[0.9, 0.8, 0.9, 0.9]),
            "real estate 0: lapwing": row(1.9, 0.8),
            "real estate 0: conformal": row(None),
        }
    )
    assert "| `lw.fit(..., validation=)` | 2 | 0.300 | 0.100 | 1.000 | 85.0 % | 1 | 0 of 1 |" in found["medians"]
    assert "| split conformal (MAPIE) | 1 |  |  | 1.000 |" in found["medians"]
    assert "| `lw.fit(..., validation=)` | 0.300 | 85.0 % | 1 | 1.00 | 1.5 |" in found["summary"]
    assert "| real estate | 2.000 | 0.100 |\n| concrete | 2.000 | 0.500 |" in found["gains"]
