"""Ceilings on the path that a reader follows from a public call to the mathematics.

Each call is profiled on a tiny network and four batches. The code in `lapwing/` that runs counts: its functions, the
classes with a method among them, their files, and the lines of the functions' bodies, without signatures,
docstrings and comments. A lambda or a comprehension counts with the function that holds it. Code that is run by an
import does not count.

Every call runs twice, and only the second run is measured: what the first run imports and caches depends on the tests
that ran before. The measured prediction is still the first one of its posterior. Numbers do not depend on how often a
function runs, except for the two counts of calls, so that they are the same with other versions of Python and torch.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.data.inputs import Samples
from tests.test_rooms import FILES, ROOT, imports

BATCHES = 4
"""Number of batches of the loader, with 8 samples each."""


class Ran(NamedTuple):
    """Size of the code that a call runs."""

    lines: int
    functions: int
    classes: int
    files: int


CEILINGS = {
    "fit with a given prior": Ran(lines=2050, functions=273, classes=46, files=50),
    "fit with its default tuning": Ran(lines=2494, functions=340, classes=57, files=63),
    "fit without options": Ran(lines=2753, functions=366, classes=59, files=64),
    "first prediction": Ran(lines=891, functions=125, classes=30, files=35),
}
"""The most code that each call runs. The first two fits are of `lw.KFAC()`, and the third chooses the method.
CONTRIBUTING.md says who may raise a number."""

SPLITS = 4
"""The most batches that the fit with a given prior parses: each batch of the list once, also for the first look."""

CALLS_OUTSIDE_PASSES = 4
"""The most calls of the network in the fit with a given prior, in addition to one for each batch of its one pass."""


class MLP(nn.Module):
    """A network whose calls the profile counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())


class Function(NamedTuple):
    """A function in a file: its first and last line, the lines of its body, and the class that holds it."""

    start: int
    stop: int
    body: tuple[int, ...]
    kind: str | None


@cache
def functions(path: Path) -> list[Function]:
    """Returns the functions of a file, each before the functions inside it."""
    text = path.read_text(encoding="utf-8")
    comments = {i for i, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith("#")}
    found = []

    def visit(node: ast.AST, kind: str | None) -> None:
        if isinstance(node, ast.ClassDef):
            kind = node.name
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = range(body[0].lineno, node.end_lineno + 1) if body else range(0)
            lines = tuple(line for line in lines if line not in comments)
            start = min(part.lineno for part in (node, *node.decorator_list))
            found.append(Function(start, node.end_lineno, lines, kind))
        for child in ast.iter_child_nodes(node):
            visit(child, kind)

    visit(ast.parse(text), None)
    return found


def profiled(call: Callable[[], Any]) -> tuple[Any, Counter[CodeType]]:
    """Returns the result of a call, and the number of runs of each piece of Python code in it."""
    counts: Counter[CodeType] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            counts[frame.f_code] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        return call(), counts
    finally:
        sys.setprofile(before)


def size_of(codes: Iterable[CodeType], root: Path = ROOT) -> Ran:
    """Returns the size of the code below a folder that ran. The lines of an inner function count once."""
    ran = set()
    for code in codes:
        path = Path(code.co_filename)
        if path.is_relative_to(root):
            around = [each for each in functions(path) if each.start <= code.co_firstlineno <= each.stop]
            ran.update((path, innermost) for innermost in around[-1:])
    return Ran(
        lines=len({(path, line) for path, function in ran for line in function.body}),
        functions=len(ran),
        classes=len({(path, function.kind) for path, function in ran if function.kind}),
        files=len({path for path, _ in ran}),
    )


def largest_circle(graph: Mapping[str, set[str]]) -> set[str]:
    """Returns the largest set of nodes that all reach one another; an empty set if there is no circle."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            new = graph.get(ahead.pop(), set()) - seen
            seen |= new
            ahead += new
        return seen

    after = {name: reached(name) for name in graph}
    return max(({other for other in after[name] if name in after.get(other, ())} for name in graph), key=len)


@pytest.fixture(scope="module")
def profiles() -> dict[str, Counter[CodeType]]:
    """The profiles of the four calls."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x, y = torch.randn(8 * BATCHES, 4), torch.arange(8 * BATCHES) % 3
        model = MLP().eval()
    loader = list(zip(x.split(8), y.split(8), strict=True))
    for _ in range(2):
        posterior, given = profiled(lambda: lw.fit(model, loader, lw.KFAC(), prior_precision=1, progress=False))
        _, tuned = profiled(lambda: lw.fit(model, loader, lw.KFAC(), progress=False))
        _, chosen = profiled(lambda: lw.fit(model, loader, progress=False))
        _, predicted = profiled(lambda posterior=posterior: posterior.predict(x))
    return dict(zip(CEILINGS, (given, tuned, chosen, predicted), strict=True))


@pytest.mark.parametrize("call", CEILINGS)
def test_no_call_runs_more_code_than_its_ceiling(profiles, call):
    ran = size_of(profiles[call])
    above = [name for name in Ran._fields if getattr(ran, name) > getattr(CEILINGS[call], name)]
    assert not above, f"the {call} runs more {', '.join(above)} than its ceiling: {ran}"
    assert all(ran)


def test_a_batch_is_not_parsed_more_often(profiles):
    splits = profiles["fit with a given prior"][Samples.of.__func__.__code__]
    assert BATCHES <= splits <= SPLITS


def test_the_network_is_not_called_more_often(profiles):
    calls = profiles["fit with a given prior"][MLP.forward.__code__]
    assert 0 <= calls - BATCHES <= CALLS_OUTSIDE_PASSES


def test_no_modules_import_one_another_in_a_circle():
    circle = largest_circle({name: imports(name) for name in FILES if name != "__init__"})
    assert not circle, f"{len(circle)} modules import one another: {', '.join(sorted(circle))}"


SAMPLE = '''
import functools


@functools.cache
def outer(x):
    """Has three lines, of which one is the inner function's."""
    def inner():
        return [y for y in (x, x)]
    return Kind().method() + len(inner())


class Kind:
    def method(
        self,
    ):
        """Has a docstring of

        three lines, and a body of two.
        """
        double = lambda x: 2 * x
        # a comment on a line of its own does not count
        return double(1)

    def never(self):
        return 0
'''


def test_the_profile_counts_functions_with_their_lambdas_and_comprehensions(tmp_path):
    path = tmp_path / "sample.py"
    path.write_text(SAMPLE)
    names: dict[str, Any] = {}
    result, counts = profiled(lambda: exec(compile(SAMPLE, str(path), "exec"), names) or names["outer"](1))
    assert result == 4
    assert size_of(counts, tmp_path) == Ran(lines=5, functions=3, classes=1, files=1)
    assert size_of(counts) == Ran(0, 0, 0, 0)


def test_a_circle_is_found():
    assert largest_circle({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {"b", "c"}
    assert largest_circle({"a": {"b"}, "b": set()}) == set()
