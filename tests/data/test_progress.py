"""Progress: one bar for each pass, or a line in the log for a long pass without a bar."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import pytest
import torch
import tqdm.auto
from torch import nn

import lapwing as lw
from lapwing.data import progress


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the bars that a test would show."""
    every: list[Any] = []

    class Bar(tqdm.auto.tqdm):  # type: ignore[type-arg]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options, file=io.StringIO())
            every.append(self)

    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    return every


def fit(method: lw.Method | None = None, **options: Any) -> lw.Posterior:
    torch.manual_seed(0)
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    return lw.fit(nn.Linear(4, 3).eval(), [*zip(x.split(4), y.split(4), strict=True)], method, **options)


def test_each_pass_has_a_bar_that_counts_its_batches(bars: list[Any]) -> None:
    fit(lw.EKFAC(), tune=None, progress=True)
    fit(lw.MeanField(steps=7), progress=True).predict([torch.randn(2, 4)] * 5, progress=True)
    assert [(bar.n, bar.total) for bar in bars] == [(3, 3), (3, 3), (7, 7), (3, 3), (5, 5)]
    assert all(bar.disable and not bar.leave for bar in bars)  # a closed bar is disabled


def test_an_error_closes_the_bar(bars: list[Any]) -> None:
    with pytest.raises(lw.LapwingError, match="batch number 2"):
        lw.fit(nn.Linear(4, 3).eval(), [(torch.randn(2, 4) * bad, torch.arange(2)) for bad in (1, torch.nan)],
               progress=True)  # fmt: skip
    assert [bar.disable for bar in bars] == [True]


def test_bars_by_default_only_on_a_terminal_and_in_a_notebook(
    bars: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    fit()
    monkeypatch.setattr(sys, "stderr", type("Writer", (), {"write": lambda self, text: None})())  # no isatty
    fit()
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        fit(progress=True)
    assert not bars
    monkeypatch.undo()
    shell = type("Shell", (), {"config": {"IPKernelApp": {}}})
    monkeypatch.setitem(sys.modules, "IPython", type("IPython", (), {"get_ipython": staticmethod(shell)}))
    fit(progress=False)
    with progress.show_progress(None):
        assert progress._SHOWN.get()


def test_long_passes_have_a_line_in_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOGGED_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "lapwing"):
        fit(lw.KFAC())
    assert "Kronecker factors took 0 s." in caplog.text
    assert any(line.startswith("Tuned in 0.") and " s of 0." in line for line in caplog.messages)
