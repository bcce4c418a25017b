"""Overlapping windows of a series are left out together."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.inputs import Inputs, Samples
from lapwing.tuning.leave_one_out import leave_one_out
from lapwing.tuning.training_kernel import overlapping, process_of
from tests.oracle import jacobian
from tests.trained import train

F64 = torch.float64
T, COUNT = 20, 60


def windows(channels: int = 0) -> Tensor:
    """All windows of a series, moving averages of noise, (N, T) or (N, T, C)."""
    shape = (COUNT + T + 4, max(1, channels))
    series = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=F64).unfold(0, 5, 1).mean(-1)
    every = series.unfold(0, T, 1).mT[:COUNT]
    return every if channels else every[..., 0]


def near(order: Tensor) -> Tensor:
    """Whether windows have moved by at most T/2 steps, (n, n)."""
    return (order[:, None] - order).abs() <= T // 2


@pytest.mark.parametrize("form", ["(N, T)", "(N, T, C)", "(N, C, T)", "float32", "without means", "dict", "batches"])
def test_windows_in_any_order_are_related(form):
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(1))
    x = windows(3 if form in ("(N, T, C)", "(N, C, T)") else 0)[order]
    x = x.mT if form == "(N, C, T)" else x.float() if form == "float32" else x
    x = x - x.mean(1, keepdim=True) if form == "without means" else x
    whole: Any = {"codes": torch.arange(COUNT), "past": x} if form == "dict" else x
    inputs = [Inputs(part) for part in x.split(17)] if form == "batches" else [Inputs(whole)]
    assert torch.equal(overlapping(inputs, torch.arange(COUNT), COUNT), near(order))
    some = torch.arange(0, COUNT, 2)
    assert torch.equal(overlapping(inputs, some, COUNT), near(order[some]))


@pytest.mark.parametrize(
    "kind", ["floats", "rounded", "codes", "answers", "constant", "copies", "images", "shared", "short", "holes"]
)
def test_rows_of_a_table_are_not_windows(kind):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(COUNT, T, generator=generator, dtype=F64)
    tables: dict[str, Any] = {
        "floats": x,
        "rounded": x.round(decimals=1),
        "codes": torch.eye(T, dtype=F64)[torch.arange(COUNT) % T],
        "answers": torch.randint(1, 6, (COUNT, T), generator=generator),
        "constant": torch.ones(COUNT, T),
        "copies": x[torch.arange(COUNT) % 5],
        "images": windows()[:, None, None].expand(-1, 3, T, -1),
        "short": (x[:, :1], x[:, :2], x[:, :3], x[:, :2, None].expand(-1, -1, 50), x[:, None]),
        "holes": torch.where(x > 1, torch.nan, x),
        "shared": {"x": x, "edges": windows()[:40], "phases": torch.complex(windows(), windows())},
    }
    assert torch.equal(
        overlapping([Inputs(tables[kind])], torch.arange(COUNT), COUNT), torch.eye(COUNT, dtype=torch.bool)
    )


@pytest.fixture(scope="module")
def forecaster() -> tuple[nn.Module, Tensor, Tensor]:
    """A network that has overfitted the four values after each window."""
    torch.manual_seed(0)
    x, model = windows(), nn.Sequential(nn.Linear(T, 40), nn.Tanh(), nn.Linear(40, 4)).double()
    y = torch.stack([x.roll(-step, 0)[:, -1] for step in range(1, 5)], 1)
    return train(model, lambda: (model(x) - y).square().mean(), 300, 0.01), x, y


def test_left_out_windows_are_those_of_the_dense_process(forecaster):
    model, x, y = forecaster
    posterior = lw.fit(model, (x, y), lw.Full(), likelihood=lw.Gaussian(0.1), prior_precision=1.0)
    process, _ = process_of(posterior, posterior.tangent, [Samples.of((x, y))])
    log10 = process.best()
    errors, _ = process.left_out_errors()
    J = jacobian(model, x).flatten(0, 1)
    kernel = J @ J.T + process.unit * 10**log10 * torch.eye(4 * COUNT, dtype=F64)
    labels = process.vectors @ process.at(log10)[2]
    assert 16 <= process.related.sum(1).double().mean() < 18
    related = process.related.repeat_interleave(4, 0).repeat_interleave(4, 1)
    for row in range(4 * COUNT):
        others = ~related[row]
        predicted = kernel[row, others] @ torch.linalg.solve(kernel[others][:, others], labels[others])
        torch.testing.assert_close(errors[row], labels[row] - predicted, rtol=1e-6, atol=1e-8)


def test_intervals_of_windows_are_wider_and_do_not_depend_on_order(forecaster, caplog):
    model, x, y = forecaster
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(1))
    with caplog.at_level(logging.WARNING, "lapwing"):
        wide = [lw.fit(model, data, tune=lw.BoundedEvidence()) for data in ((x, y), (x[order], y[order]))]
    assert caplog.text.count("overlapping windows of a series") == 1  # the second fit says nothing new
    torch.testing.assert_close(wide[0].predict(x).std, wide[1].predict(x).std)
    codes = torch.cat([x, torch.arange(COUNT, dtype=F64)[:, None]], 1)  # the same inputs, as a table
    narrow = lw.fit(model, (codes, y), tune=lw.BoundedEvidence(), forward=lambda net, rows: net(rows[:, :-1]))
    parts = [Samples.of((x, y))], [Samples.of((codes, y))]
    widths = [leave_one_out(fit, part).width for fit, part in zip((wide[0], narrow), parts, strict=True)]
    assert widths[0] > 1.1 * widths[1]


def test_held_out_data_need_no_warning(forecaster, caplog):
    model, x, y = forecaster
    with caplog.at_level(logging.WARNING, "lapwing"):
        lw.fit(model, (x[:40], y[:40]), validation=(x[48:], y[48:]))
    assert "windows" not in caplog.text
