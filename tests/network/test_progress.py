"""The progress of a call: one bar with one total, or lines in the log."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any, ClassVar

import pytest
import torch
import tqdm.auto
from torch import nn

import lapwing as lw
from lapwing.network import progress

EVERY: list[Bar] = []


class Bar(tqdm.auto.tqdm):
    """A bar that nobody sees, and that keeps what it was told."""

    def __init__(self, total: int, leave: bool) -> None:
        super().__init__(total=total, leave=leave, file=io.StringIO())
        self.stages: list[tuple[str, int, int]] = []
        self.closed = False
        EVERY.append(self)

    def set_description(self, desc: str | None = None, refresh: bool | None = True) -> None:
        self.stages.append((desc or "", self.n, self.total))

    def update(self, n: float | None = 1) -> bool | None:
        assert self.n < self.total
        return super().update(n)

    def close(self) -> None:
        self.closed = True
        super().close()


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    EVERY.clear()
    return EVERY


def problem() -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(0)
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    return nn.Linear(4, 3).eval(), list(zip(x.split(4), y.split(4), strict=True))


METHODS = [
    (lw.KFAC(), 6, 6), (lw.EKFAC(), 9, 9), (lw.MeanField(steps=7), 13, 13), (lw.VaLLA(3), 9, 9),
    (lw.ELLA(3, rows=6), 12, 12), (lw.SampledLLA(2, em_steps=0, solver=lw.ConjugateGradients(1)), 9, 9),
]  # fmt: skip


@pytest.mark.parametrize(("method", "first", "last"), METHODS, ids=lambda value: str(value)[:10])
def test_one_bar_counts_all_passes_and_the_tuning(method: lw.Method, first: int, last: int, bars: list[Bar]) -> None:
    model, loader = problem()
    lw.fit(model, loader, method, progress=True)
    (bar,) = bars
    assert (bar.stages[0][2], bar.n, bar.total) == (first, last, last)
    assert (bar.closed, bar.leave) == (True, False)


def test_held_out_data_predictions_and_comparisons_are_on_one_bar_each(bars: list[Bar]) -> None:
    model, loader = problem()
    deep = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).eval()
    posterior = lw.fit(deep, loader, validation=loader, progress=True)  # fits the last layer, and all weights
    posterior.predict(loader, progress=True)
    lw.compare({"KFAC": posterior}, loader, torch.randn(2, 4), progress=True)
    posterior.update(loader, progress=True)
    lw.MeanField.from_variances(model, {"weight": torch.ones(3, 4)}, loader, progress=True)
    posterior.predict(loader[0][0], progress=True)  # of a batch there is none
    assert [(bar.n, bar.total, bar.closed) for bar in bars] == [(n, n, True) for n in (18, 3, 8, 3, 3)]


def test_an_error_closes_the_bar_and_the_next_call_has_its_own(bars: list[Bar]) -> None:
    model, loader = problem()
    x, y = loader[1]
    with pytest.raises(lw.LapwingError, match="batch number 2"):
        lw.fit(model, [loader[0], (x * torch.nan, y)], progress=True)
    lw.fit(model, loader, progress=True)
    assert [bar.closed for bar in bars] == [True, True]


def test_no_bar_without_a_terminal(bars: list[Bar], monkeypatch: pytest.MonkeyPatch) -> None:
    model, loader = problem()
    lw.fit(model, loader)
    lw.fit(model, loader, progress=False)
    monkeypatch.setattr(sys, "stderr", None)
    lw.fit(model, loader, progress=True)
    monkeypatch.setattr(sys, "stderr", type("Writer", (), {"write": lambda self, text: None})())  # no isatty
    lw.fit(model, loader)
    assert not bars


class Shell:
    config: ClassVar = {"IPKernelApp": {}}


def test_a_bar_in_a_notebook(bars: list[Bar], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", type("IPython", (), {"get_ipython": staticmethod(Shell)}))
    model, loader = problem()
    lw.fit(model, loader)
    lw.fit(model, loader, progress=False)
    assert len(bars) == 1


def test_long_passes_have_a_line_in_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOGGED_SECONDS", 0.0)
    model, loader = problem()
    with caplog.at_level(logging.INFO, "lapwing"):
        lw.fit(model, loader, lw.KFAC())
    assert "Kronecker factors: 3 batches in 0 s." in caplog.text
    assert any(line.startswith("Tuned in 0.") and " s of 0." in line for line in caplog.messages)
