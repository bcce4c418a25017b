"""Results of an experiment: a JSON file beside it, written row by row if rows take minutes.

The file has two parts. "results" holds the numbers. "made" says what made them: commit, date, versions, machine and
seeds, in one record for a script that writes all its rows at once, and in a record for each run and row otherwise.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lapwing
from benchmarks import measure
from lapwing import LapwingError
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


def made(experiment: str) -> dict[str, Any]:
    """Returns what made the results of an experiment: one record, or run -> row -> record; empty without a file."""
    path = path_of(experiment)
    if not path.exists():
        return {}
    contents = json.loads(path.read_text(encoding="utf-8"))
    header = {key: value for key, value in contents.items() if key != "results"}  # of a benchmark
    return contents.get("made") or {**header, "seeds": str(header["seed"])}


def records(made: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the records of what `made` returns."""
    if "commit" in made:
        yield made
    else:
        yield from (record for rows in made.values() for record in rows.values())


def record(seeds: Sequence[int]) -> dict[str, Any]:
    """Returns the record of results that this process makes: commit, date, versions, machine, seeds."""
    threads = torch.get_num_threads()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "commit": measure.commit(),
        "date": time.strftime("%Y-%m-%d"),
        "lapwing": lapwing.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores, {device}, {threads} thread{'s' * (threads > 1)}",
        "seeds": ", ".join(map(str, seeds)),
    }


def write(experiment: str, results: Mapping[str, Any], made: Mapping[str, Any]) -> Path:
    """Writes the results of an experiment; returns their path.

    Args:
        experiment: its `__file__`.
        results: numbers by name.
        made: a record, or run -> row -> record.
    """
    path = path_of(experiment)
    path.parent.mkdir(exist_ok=True)
    path.write_text(measure.compact({"made": made, "results": results}), encoding="utf-8")
    return path


class Rows:
    """Results by run and row, written after every row. Rows that the file has are kept; delete it to begin again.

    Args:
        experiment: its `__file__`.
        facts: what is true of all runs.
        seeds: seeds of the rows of a run whose name has no "seed 3".
    """

    def __init__(self, experiment: str, facts: Mapping[str, Any], seeds: Sequence[int] = (0,)) -> None:
        self.experiment, self.facts, self.seeds = experiment, dict(facts), seeds
        self.runs: dict[str, dict[str, Any]] = read(experiment)["runs"] if path_of(experiment).exists() else {}
        self.made = made(experiment)
        self.commit = measure.commit()

    def add(self, run: str, row: str, make: Callable[..., Any], *arguments: Any) -> None:
        """Makes a row by `make(*arguments)` unless the file has it; prints and writes it.

        Raises:
            LapwingError: if the file has rows of another commit, since one table compares rows of one commit only.
        """
        if row in self.runs.get(run, {}):
            return
        others = {record["commit"] for record in records(self.made)} - {self.commit}
        if others:
            raise LapwingError(
                f"{path_of(self.experiment).name} has rows of commit {', '.join(sorted(others))}, and this checkout "
                f"is at {self.commit}. A table compares rows of one commit: delete the file to make all its rows "
                "again, or give the new rows an experiment of their own."
            )
        start = time.perf_counter()
        new = json.loads(json.dumps(make(*arguments)))  # keys are strings, as in rows that were read
        self.runs.setdefault(run, {})[row] = new
        seconds = time.perf_counter() - start
        seeds = [int(seed) for seed in re.findall(r"seed (\d+)", run)] or self.seeds
        self.made.setdefault(run, {})[row] = {**record(seeds), "commit": self.commit, "seconds": round(seconds, 1)}
        print(f"{run} {row}: {seconds:.0f} s {_short(new)}", flush=True)
        write(self.experiment, self.all(), self.made)

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
