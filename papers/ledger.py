"""The ledger: what each paper claims, result by result, and whether lapwing reproduces it.

`papers/ledger.toml` has an entry for each table, figure, algorithm and theorem. `papers/pages.py` writes its tables
into the pages.

The rule for statements: "a < b" holds if b - a exceeds two standard errors of the difference, and fails if a - b does.
Between them it is a tie, which decides nothing. "a ≈ b" holds if the difference and two errors stay within a margin,
`TOLERANCE` of the larger number, and fails if the difference without two errors exceeds it. Differences are paired by
seed where both numbers have seeds. Rows that the paper does not have decide nothing either.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import statistics
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from papers.common import results

HOME = Path(__file__).parent
PAPERS = {"ella": "ELLA", "valla": "VaLLA", "optimal_subspace": "Optimal subspaces", "streamlined": "Streamlined"}
"""Folder of a paper -> its heading on the page."""
VERDICTS = (
    "reproduced", "order only", "partly", "undecided", "contradicts", "not run: compute", "not run: no data", "tested"
)  # fmt: skip
TOLERANCE = 0.05
"""Relative difference of two numbers that a statement may call level, "a ≈ b"."""
ERRORS = 2.0
"""Standard errors of a difference that decide a statement."""


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
        ties: statements of the paper that our numbers neither confirm nor refute.
        beyond: statements about rows that the paper does not have, which hold or are ties. They decide no verdict.
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
    ties: tuple[str, ...] = ()
    beyond: tuple[str, ...] = ()
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
        if self.verdict == "undecided" and (self.holds or self.fails or not self.ties):
            raise ValueError(f"{name}: 'undecided' needs ties alone")

    def disagreements(self) -> list[str]:
        """Returns the statements that stand in another list than our numbers decide."""
        decided = {"holds": ("holds",), "fails": ("fails",), "ties": ("tie",), "beyond": ("holds", "tie")}
        return [
            text for name, outcomes in decided.items() for text in getattr(self, name)
            if self.outcome(text) not in outcomes
        ]  # fmt: skip

    def outcome(self, statement: str) -> str:
        """Returns what our numbers say of a statement: "holds", "fails" or "tie".

        Args:
            statement: labels or numbers in rising order, "a < b < 3", or of two that are level, "a ≈ b".

        Raises:
            KeyError: for a part that is neither a label nor a number.
        """
        if " ≈ " in statement:
            one, other = statement.split(" ≈ ")
            difference, error = self.difference(one, other)
            margin = TOLERANCE * max(abs(self._number(one)), abs(self._number(other)))
            if abs(difference) + ERRORS * error <= margin:
                return "holds"
            return "fails" if abs(difference) - ERRORS * error > margin else "tie"
        parts = statement.split(" < ")
        if len(parts) < 2:
            raise KeyError(f"{statement!r} compares nothing")
        steps = [self.difference(one, other) for one, other in itertools.pairwise(parts)]
        if any(difference < -ERRORS * error for difference, error in steps):
            return "fails"
        return "holds" if all(difference > ERRORS * error for difference, error in steps) else "tie"

    def difference(self, one: str, other: str) -> tuple[float, float]:
        """Returns `other - one` and its standard error, paired by seed if both numbers have several common seeds."""
        first, second = (by_seed(self.ours[part]) if part in self.ours else {} for part in (one, other))
        both = [second[seed] - first[seed] for seed in first if seed in second]
        if len(both) > 1:
            return statistics.fmean(both), statistics.stdev(both) / math.sqrt(len(both))
        errors = [standard_error(value(self.ours[part])) for part in (one, other) if part in self.ours]
        return self._number(other) - self._number(one), math.hypot(*errors)

    def _number(self, part: str) -> float:
        if part in self.ours and (found := mean(value(self.ours[part]))) is not None:
            return found
        try:
            return float(part)
        except ValueError:
            raise KeyError(f"{part!r} of {self.item!r} is no label of a number") from None


def read(path: Path = HOME / "ledger.toml") -> list[Entry]:
    """Returns the entries of the ledger; raises TypeError if one lacks a field or has an unknown one."""
    rows: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))["entry"]
    for row in rows:
        row |= {key: tuple(part) for key, part in row.items() if isinstance(part, list)}
    return [Entry(**row) for row in rows]


def value(key: str, home: Path | None = None) -> Any:
    """Returns what a place of `Entry.ours` points to; raises KeyError, IndexError or OSError if there is nothing."""
    file, _, path = key.partition(": ")
    found = _results((home or HOME) / file)
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


def standard_error(found: Any) -> float:
    """Returns the standard error of a number; 0 without one."""
    return float(found.get("standard_error", 0.0)) if isinstance(found, Mapping) else 0.0


def by_seed(key: str) -> dict[str, float]:
    """Returns the numbers that a place of "table" averages, by the seed's part of the run; empty without runs."""
    file, _, path = key.partition(": ")
    first, *parts = path.split("/")
    runs = _results(HOME / file).get("runs", {})
    found = {}
    for run, rows in runs.items() if first == "table" else ():
        group, _, seed = run.partition("seed")
        if group.rstrip(" ,") != parts[0]:
            continue
        try:
            found[seed] = float(functools.reduce(lambda row, name: row[name], parts[1:], rows))
        except (KeyError, TypeError):  # a row that this seed lacks, or no number
            continue
    return found


def has_test(name: str) -> bool:
    """Returns whether a file of tests defines every function and class of "file::name" or "file::class::name"."""
    file, *parts = name.split("::")
    text = (HOME.parent / file).read_text(encoding="utf-8")
    return bool(parts) and all(re.search(rf"^ *(def|class) {part}\b", text, re.MULTILINE) for part in parts)
