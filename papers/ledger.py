"""The ledger: what each paper claims, result by result, and whether lapwing reproduces it.

`papers/ledger.toml` has an entry for each table, figure, algorithm and theorem. `python -m papers ledger` checks the
entries against the results and the tests, and writes their tables into `papers/README.md`. It needs Python 3.11.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

HOME = Path(__file__).parent
PAGE = HOME / "README.md"
START = "<!-- verdicts -->\n"
PAPERS = {"ella": "ELLA", "valla": "VaLLA", "optimal_subspace": "Optimal subspaces", "streamlined": "Streamlined"}
"""Folder of a paper -> its heading on the page."""
VERDICTS = ("reproduced", "order only", "partly", "contradicts", "not run: compute", "not run: no data", "tested")


@dataclass(frozen=True)
class Entry:
    """A result of a paper.

    Attributes:
        paper: folder of the paper in `papers/`.
        item: name of the result in the paper.
        claim: what the paper claims.
        setting: how our setting differs from the paper's, or why the result was not run.
        ours: places of our numbers, "ella/results/table5.json: noise variance 0.01/ELLA".
        test: tests that hold us to the result, "tests/methods/test_valla.py::test_titsias".
        verdict: one of `VERDICTS`.
    """

    paper: str
    item: str
    claim: str
    setting: str
    ours: tuple[str, ...]
    test: tuple[str, ...]
    verdict: str

    def __post_init__(self) -> None:
        """Raises ValueError if the verdict has another name, or lacks the evidence that it needs."""
        if self.paper not in PAPERS or self.verdict not in VERDICTS:
            raise ValueError(f"{self.paper}, {self.item}: {self.verdict!r} is none of {', '.join(VERDICTS)}")
        if bool(self.ours or self.test) == self.verdict.startswith("not run"):
            raise ValueError(f"{self.paper}, {self.item}: name keys or tests if and only if the result was run")


def read(path: Path = HOME / "ledger.toml") -> list[Entry]:
    """Returns the entries of the ledger; raises KeyError or TypeError if one lacks a field or has an unknown one."""
    rows: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))["entry"]
    return [Entry(**{**row, "ours": tuple(row["ours"]), "test": tuple(row["test"])}) for row in rows]


def value(key: str) -> Any:
    """Returns what a key of `Entry.ours` points to; raises KeyError, IndexError or OSError if there is nothing."""
    file, _, path = key.partition(": ")
    found = json.loads((HOME / file).read_text(encoding="utf-8"))["results"]
    for part in path.split("/"):
        found = found[int(part)] if isinstance(found, list) else found[part]
    return found


def has_test(name: str) -> bool:
    """Returns whether a file of tests defines every function and class of "file::name" or "file::class::name"."""
    file, *parts = name.split("::")
    text = (HOME.parent / file).read_text(encoding="utf-8")
    return bool(parts) and all(re.search(rf"^ *(def|class) {part}\b", text, re.MULTILINE) for part in parts)


def evidence(entry: Entry) -> str:
    """Returns a cell of the page: our numbers with standard errors, or the files of whole tables, and the tests."""
    cells: dict[str, None] = {}
    for key in entry.ours:
        file, _, path = key.partition(": ")
        found, label = value(key), ", ".join(part for part in path.split("/") if part not in ("", "table", "runs"))
        if isinstance(found, Mapping) and set(found) == {"mean", "standard_error"}:
            cells[f"{label}: {found['mean']:.3g} ± {round(found['standard_error'], 4):.2g}"] = None
        else:
            cells[f"{label}: {found:.3g}" if isinstance(found, (int, float)) else f"`{file}`"] = None
    return "; ".join([*cells, *(f"`{name.rpartition('::')[2]}`" for name in entry.test)])


def tables(entries: Sequence[Entry]) -> str:
    """Returns the count of verdicts by paper, and a table of the entries of each paper, as Markdown."""
    papers = dict.fromkeys(entry.paper for entry in entries)
    lines = ["| | " + " | ".join(VERDICTS) + " |", "|---|" + "---|" * len(VERDICTS)]
    for paper in papers:
        counts = Counter(entry.verdict for entry in entries if entry.paper == paper)
        lines.append(f"| {PAPERS[paper]} | " + " | ".join(str(counts[verdict] or "") for verdict in VERDICTS) + " |")
    for paper in papers:
        lines += ["", f"## {PAPERS[paper]}", "", "| | the paper's claim | our setting | verdict | evidence |"]
        lines.append("|---|---|---|---|---|")
        for entry in entries:
            if entry.paper == paper:
                cells = (entry.item, entry.claim, entry.setting, f"**{entry.verdict}**", evidence(entry))
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page(entries: Sequence[Entry]) -> str:
    """Returns the text of the page with the tables of the entries."""
    return PAGE.read_text(encoding="utf-8").partition(START)[0] + START + tables(entries)


def write() -> Path:
    """Writes the tables of the ledger into the page; returns the path of the page."""
    PAGE.write_text(page(read()), encoding="utf-8")
    return PAGE
