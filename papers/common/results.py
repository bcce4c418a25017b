"""Results of an experiment: a JSON file beside it, written row by row where rows take minutes."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import measure
from papers.common.scores import averaged


def path_of(experiment: str) -> Path:
    """Returns where the results of an experiment are.

    Args:
        experiment: its `__file__`.
    """
    file = Path(experiment)
    return file.parent / "results" / f"{file.stem}.json"


def read(experiment: str) -> dict[str, Any]:
    """Returns the results of an experiment."""
    return json.loads(path_of(experiment).read_text(encoding="utf-8"))["results"]


def write(experiment: str, results: Mapping[str, Any]) -> Path:
    """Writes the results of an experiment, with what made them; returns their path."""
    path = path_of(experiment)
    return measure.write(path.stem, dict(results), seed=0, folder=path.parent)


class Rows:
    """Results by run and row, written after every row; rows that the file has are kept: delete it to begin anew.

    Args:
        experiment: its `__file__`.
        facts: what is true of all runs.
    """

    def __init__(self, experiment: str, facts: Mapping[str, Any]) -> None:
        self.experiment, self.facts = experiment, dict(facts)
        self.runs: dict[str, dict[str, Any]] = read(experiment)["runs"] if path_of(experiment).exists() else {}

    def add(self, run: str, row: str, make: Callable[..., Any], *arguments: Any) -> None:
        """Makes a row by `make(*arguments)` unless it is there; prints and writes it."""
        if row in self.runs.get(run, {}):
            return
        start = time.perf_counter()
        made = make(*arguments)
        self.runs.setdefault(run, {})[row] = made
        print(f"{run} {row}: {time.perf_counter() - start:.0f} s {_short(made)}", flush=True)
        write(self.experiment, self.all())

    def all(self) -> dict[str, Any]:
        """Returns facts, rows, and means with standard errors over runs that differ in the seed alone."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for run, rows in self.runs.items():
            groups.setdefault(run.partition("seed")[0].rstrip(" ,"), []).append(rows)
        table = {
            group: {
                row: averaged([_numbers(rows[row]) for rows in runs if row in rows])
                for row in dict.fromkeys(row for rows in runs for row in rows)
            }
            for group, runs in groups.items()
        }
        return {**self.facts, "table": table, "runs": self.runs}


def once(make: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that makes its value at its first call, so that what no new row needs is never made."""
    return functools.cache(make)


def _numbers(value: Any) -> Any:
    """Returns nested numbers alone, lists as mappings."""
    if isinstance(value, Mapping):
        parts = {key: _numbers(part) for key, part in value.items() if not str(key).startswith("curve of")}
        return {key: part for key, part in parts.items() if part is not None}
    if isinstance(value, (list, tuple)):
        return {str(i): _numbers(part) for i, part in enumerate(value)}
    return float(value) if isinstance(value, (int, float)) else None


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        shown = {key: _short(part) for key, part in value.items() if not isinstance(part, (list, str))}
        return "{" + ", ".join(f"{key} {part}" for key, part in shown.items() if key != "rotated") + "}"
    return f"{value:.4g}" if isinstance(value, (int, float)) else ""
