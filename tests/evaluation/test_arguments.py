"""Arguments of the wrong kind: one sentence that names the argument and what it is, never torch's own error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.evaluation import Comparison, metrics
from tests.refused import refused

P, Y, S = torch.full((6, 3), 1 / 3), torch.arange(6) % 3, torch.rand(6)
FUNCTIONS: dict[Callable[..., Any], dict[str, Tensor]] = {
    metrics.accuracy: {"probs": P, "labels": Y},
    metrics.nll: {"log_prob": S},
    metrics.brier: {"probs": P, "labels": Y},
    metrics.expected_calibration_error: {"probs": P, "labels": Y},
    metrics.auroc: {"scores_in": S, "scores_out": S},
    metrics.aurc: {"uncertainty": S, "errors": S},
    metrics.rmse: {"mean": S, "y": S},
    metrics.crps_gaussian: {"mean": S, "std": S + 1, "y": S},
    metrics.interval_coverage: {"lower": S, "upper": S + 1, "y": S},
}
WRONG = {
    "None": (None, "None"),
    "a text": ("x", "'x'"),
    "an object": (nn.ReLU(), "ReLU()"),
    "a dict": ({"a": S}, "{'a': Tensor (6,) float32}"),
    "a ragged list": ([[1.0, 2.0], [3.0]], "[[1.0, 2.0], [3.0]]"),
    "complex": (torch.zeros(6, 3, dtype=torch.complex64), "Tensor (6, 3) complex64"),
}
UNREADABLE = {
    "sparse": (torch.eye(3).to_sparse(), "Tensor (3, 3) float32 with layout torch.sparse_coo"),
    "without data": (torch.zeros(6, 3, device="meta"), "Tensor (6, 3) float32 with layout torch.strided on meta"),
    "eight bits": (torch.ones(6, 3).to(torch.float8_e4m3fn), "Tensor (6, 3) float8_e4m3fn"),
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_other_arguments_are_named(function: Callable[..., Any]) -> None:
    right = FUNCTIONS[function]
    function(**right)
    function(**{name: value.numpy() for name, value in right.items()})  # arrays are fine
    for name in right:
        for wrong, words in WRONG.values():
            message = refused(partial(function, **right | {name: wrong}))
            assert message == f"{function.__name__} needs a dense tensor of real numbers as {name}. {name} is {words}."
        for wrong, words in UNREADABLE.values():
            message = refused(partial(function, **right | {name: wrong}))
            assert message.startswith(f"The argument {name} of {function.__name__}, {words}")
        refused(partial(function, **right | {name: torch.zeros(2, 2, 2, 2, 2)}), "shape")


@pytest.fixture(scope="module")
def posterior() -> lw.Posterior:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, y = torch.randn(12, 4), torch.arange(12) % 3
        return lw.fit(nn.Linear(4, 3).eval(), [(x, y)], lw.Diagonal(), prior_precision=1.0)


def test_several_foreign_sets(posterior: lw.Posterior) -> None:
    sets: dict[str, Any] = {"MNIST": torch.randn(6, 4), "noise": [(9 * torch.randn(5, 4), Y[:5])]}
    held_out = [(torch.randn(6, 4), Y)]
    both = lw.compare({"KFAC": posterior}, held_out, sets, repeats=1)
    of_set = ("AUROC by MI", "AUROC by entropy", "FPR95", "AUPR")
    assert both.columns[-9:] == (*(f"{name}: {column}" for name in sets for column in of_set), "passes")
    for name, inputs in sets.items():
        one = lw.compare({"KFAC": posterior}, held_out, {name: inputs}, repeats=1)
        for column in [column for column in one.columns if column.startswith(name)]:
            assert {row: both[row].get(column) for row in both.rows} == {row: one[row].get(column) for row in one.rows}
    assert both["network"]["MNIST: AUROC by entropy"] != both["network"]["noise: AUROC by entropy"]
    assert lw.compare({"KFAC": posterior}, held_out, {}, repeats=1).columns[-1] == "passes"


def test_tables_in_other_forms() -> None:
    rows = {"a | b": {"accuracy": 0.5, "NLL": 1 / 3}, "<c>": {"NLL": 2.0}}
    table = Comparison(("accuracy", "NLL"), rows, ("1 < 2",))
    html = table._repr_html_()
    assert html.startswith("<table><tr><td></td><td>accuracy</td><td>NLL</td></tr>")
    assert html.endswith("<tr><td>&lt;c&gt;</td><td></td><td>2.0000</td></tr></table><p>1 &lt; 2</p>")
    pytest.importorskip("pandas")
    frame = table.to_pandas()
    assert (list(frame.index), list(frame.columns)) == (["a | b", "<c>"], ["accuracy", "NLL"])
    assert frame.loc["a | b", "NLL"] == 1 / 3
    assert frame.isna().to_numpy().tolist() == [[False, False], [True, False]]


def test_a_comparison_reads_weights_of_samples_and_leaves_them_out():
    model = torch.nn.Linear(3, 2).eval()
    x, y, w = torch.randn(12, 3), torch.arange(12) % 2, torch.arange(12.0)
    posterior = lw.fit(model, [(x, y, w)], sample_weights=True, prior_precision=1.0)
    weighted = [(x[:7], y[:7], w[:7]), (x[7:], y[7:], w[7:])]
    table = lw.compare({"one": posterior}, weighted, {"far": x + 3}, repeats=1, sample_weights=True)
    plain = lw.compare({"one": posterior}, [(x, y)], {"far": x + 3}, repeats=1)
    for column in set(table.columns) - {"passes"}:
        assert table["one"][column] == pytest.approx(plain["one"][column], rel=1e-5)
    assert "every sample counts once" in str(table)
    assert "every sample counts once" not in str(plain)
