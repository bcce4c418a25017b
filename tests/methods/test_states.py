"""What the contract of passes carries: data in parts, a state written half-way, sample weights, output positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods import (
    Batch,
    DataSummary,
    FisherRoot,
    LabelsOfData,
    Pass,
    Problem,
    SamplesSeen,
    Seen,
    State,
    SumPass,
)
from lapwing.methods.prior import Prior
from lapwing.tangent import Tangent
from tests.posterior.test_lifecycle import EVERY, METHODS, data


@dataclass
class Example(State):
    total: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    summary: DataSummary = field(default_factory=DataSummary)
    missing: Tensor | None = None
    taken: int = 0
    done: bool = False


def test_a_state_is_added_written_and_read_by_its_fields():
    first = Example(torch.ones(2), {"a/b": torch.ones(1)}, DataSummary(3, {"count": torch.tensor(3.0)}), taken=2)
    second = Example(torch.ones(2), {"c": torch.ones(1)}, DataSummary(4, {"count": torch.tensor(4.0)}), taken=1)
    added = first.added(second)
    flat = added.tensors()
    assert list(flat) == [
        "total",
        "parts/a/b",
        "parts/c",
        "summary/samples",
        "summary/statistics/count",
        "taken",
        "done",
    ]
    assert added.total.tolist() == [2.0, 2.0]
    assert (added.summary.samples, float(added.summary.statistics["count"]), added.taken) == (7, 7.0, 3)
    again = Example(torch.zeros(2)).with_tensors(flat)
    assert (again.missing, again.taken, again.done) == (None, 3, False)
    assert again.tensors().keys() == flat.keys()


def problem_of(model: nn.Module, x: Any, y: Tensor, likelihood: Any, **options: Any) -> Problem:
    tangent = Tangent.survey(model, x, EVERY, options.get("forward"))
    root = FisherRoot(likelihood, tangent.outputs, torch.Generator())
    summary = DataSummary()
    if "forward" not in options:
        summary.add(likelihood, tangent.outputs_of(x), y)
    prior = Prior.read(tangent, options.get("prior_precision"))
    return Problem(tangent, likelihood, root, prior, True, 0, read=Seen(len(y), summary))


def finish(method: lw.Method, problem: Problem, labels: Tensor, run: Callable[[Pass], State]) -> Any:
    """Runs every pass of a method by a function, and answers its questions; returns its result."""
    passes, answer = method.passes(problem), None
    try:
        while True:
            step = passes.send(answer)
            if isinstance(step, LabelsOfData):
                answer = labels
            elif isinstance(step, SamplesSeen):
                answer = problem.seen
            else:
                answer = run(step)
    except StopIteration as stop:
        return stop.value


def whole(problem: Problem, x: Any, y: Tensor) -> Callable[[Pass], State]:
    def run(step: Pass) -> State:
        assert isinstance(step, SumPass)
        state = step.init()
        step.update(state, Batch(problem.tangent, x, y, 0))
        return state

    return run


@pytest.mark.parametrize(
    ("name", "method"),
    [*(("mlp", method) for method in METHODS), ("cnn_bn_inplace", lw.KFAC()), ("custom_parameter", lw.KFAC())],
    ids=str,
)
def test_states_of_halves_add_up_to_the_whole(method: lw.Method, name: str) -> None:
    model, x, y, _ = data(name)
    problem = problem_of(model, x, y, lw.Categorical())

    def in_halves(step: Pass) -> State:
        assert isinstance(step, SumPass)
        first, second = step.init(), step.init()
        step.update(first, Batch(problem.tangent, x[:3], y[:3], 0))
        step.update(second, Batch(problem.tangent, x[3:], y[3:], 3))
        return first.added(second)

    joined = finish(method, problem, y, in_halves)
    expected = finish(method, problem, y, whole(problem, x, y))
    torch.testing.assert_close(joined.to_dense(), expected.to_dense(), rtol=1e-6, atol=1e-9)
