"""The ledger: what each paper claims, result by result, and whether lapwing reproduces it.

`papers/ledger.toml` has an entry for each table, figure, algorithm and theorem. `papers/pages.py` writes its tables
into the pages. Reading it needs Python 3.11.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib

from papers.common import results

HOME = Path(__file__).parent
PAPERS = {"ella": "ELLA", "valla": "VaLLA", "optimal_subspace": "Optimal subspaces", "streamlined": "Streamlined"}
"""Folder of a paper -> its heading on the page."""
VERDICTS = ("reproduced", "order only", "partly", "contradicts", "not run: compute", "not run: no data", "tested")
TOLERANCE = 0.05
"""Relative difference of two numbers that a statement may call level, "a ≈ b"."""


@dataclass(frozen=True)
class Entry:
    """A result of a paper.

    Attributes:
        paper: folder of the paper in `papers/`.
        item: name of the result in the paper.
        claim: what the paper claims, with its numbers.
        setting: how our setting differs from the paper's, or why the result was not run.
        verdict: one of `VERDICTS`.
        ours: our numbers, label -> place, "KFAC" -> "ella/results/table5.json: noise variance 0.01/KFAC".
        holds: statements of the paper that our numbers confirm, "ELLA < last layer < 2.5" or "GLM ≈ streamlined".
        fails: statements of the paper that our numbers refute.
        test: tests that hold us to the result, "tests/methods/test_valla.py::test_titsias".
    """

    paper: str
    item: str
    claim: str
    setting: str
    verdict: str
    ours: Mapping[str, str] = field(default_factory=dict)
    holds: tuple[str, ...] = ()
    fails: tuple[str, ...] = ()
    test: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError if the verdict has another name, or lacks the evidence that it needs."""
        name = f"{self.paper}, {self.item}"
        if self.paper not in PAPERS or self.verdict not in VERDICTS:
            raise ValueError(f"{name}: {self.verdict!r} is none of {', '.join(VERDICTS)}")
        if bool(self.ours or self.test) == self.verdict.startswith("not run"):
            raise ValueError(f"{name}: name keys or tests if and only if the result was run")
        if self.verdict in ("reproduced", "order only", "partly") and not (self.holds or self.test):
            raise ValueError(f"{name}: {self.verdict!r} needs a statement that holds, or a test")
        if (self.verdict in ("reproduced", "order only") and self.fails) or (
            self.verdict == "contradicts" and not self.fails
        ):
            raise ValueError(f"{name}: {self.verdict!r} and the statements that fail disagree")

    def disagreements(self, home: Path = HOME) -> list[str]:
        """Returns the statements that the results of a folder refute: false ones of `holds`, true ones of `fails`."""
        numbers = {label: mean(value(key, home)) for label, key in self.ours.items()}
        return [text for text in self.holds if not is_true(text, numbers)] + [
            text for text in self.fails if is_true(text, numbers)
        ]


def read(path: Path = HOME / "ledger.toml") -> list[Entry]:
    """Returns the entries of the ledger; raises TypeError if one lacks a field or has an unknown one."""
    rows: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))["entry"]
    for row in rows:
        row |= {key: tuple(part) for key, part in row.items() if isinstance(part, list)}
    return [Entry(**row) for row in rows]


def value(key: str, home: Path = HOME) -> Any:
    """Returns what a place of `Entry.ours` points to; raises KeyError, IndexError or OSError if there is nothing."""
    file, _, path = key.partition(": ")
    found = _results(home / file)
    for part in path.split("/"):
        found = found[int(part)] if isinstance(found, list) else found[part]
    return found


@functools.cache
def _results(path: Path) -> Any:
    return results.load(path)["results"]


def mean(found: Any) -> float | None:
    """Returns a number, the mean of one with a standard error, or None for anything else."""
    if isinstance(found, Mapping) and "mean" in found:
        return float(found["mean"])
    return float(found) if isinstance(found, (int, float)) else None


def is_true(statement: str, numbers: Mapping[str, float | None]) -> bool:
    """Returns whether a statement is true of numbers by label.

    Args:
        statement: labels or numbers in rising order, "a < b < 3", or of two that are level, "a ≈ b".
        numbers: by label.

    Raises:
        KeyError: for a part that is neither a label nor a number.
    """

    def number(part: str) -> float:
        if (found := numbers.get(part)) is not None:
            return found
        try:
            return float(part)
        except ValueError:
            raise KeyError(f"{part!r} in {statement!r} is no label of a number") from None

    if " ≈ " in statement:
        one, other = (number(part) for part in statement.split(" ≈ "))
        return abs(one - other) <= TOLERANCE * max(abs(one), abs(other))
    parts = [number(part) for part in statement.split(" < ")]
    if len(parts) < 2:
        raise KeyError(f"{statement!r} compares nothing")
    return all(one < other for one, other in itertools.pairwise(parts))


def has_test(name: str) -> bool:
    """Returns whether a file of tests defines every function and class of "file::name" or "file::class::name"."""
    file, *parts = name.split("::")
    text = (HOME.parent / file).read_text(encoding="utf-8")
    return bool(parts) and all(re.search(rf"^ *(def|class) {part}\b", text, re.MULTILINE) for part in parts)
