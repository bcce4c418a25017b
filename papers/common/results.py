"""Results of an experiment: a JSON file beside it, written row by row if rows take minutes.

The file has two parts. "results" holds the numbers, with five digits. "made" says what made them: commit, date,
versions, machine and seeds, in one record for a script that writes all its rows at once, and in records with the
seconds of each run and row otherwise. On the disk what repeats is written once: rows of the same numbers are a table
with "columns" and "rows", and the averages of "runs" are computed when a file is read.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import lapwing
from lapwing import LapwingError
from papers.common.scores import averaged

DIGITS = 5
"""Significant digits of a number in a file."""
WIDTH = 160
"""Characters of a line; only what cannot be broken is longer."""
COLUMNS = 30
"""Most columns of a table whose rows are nested: rows with more are tables themselves."""


def path_of(experiment: str) -> Path:
    """Returns where the results of an experiment are.

    Args:
        experiment: its `__file__`.
    """
    file = Path(experiment)
    return file.parent / "results" / f"{file.stem}.json"


def read(experiment: str) -> dict[str, Any]:
    """Returns the results of an experiment."""
    return load(path_of(experiment))["results"]


def made(experiment: str) -> dict[str, Any]:
    """Returns what made the results of an experiment: one record, or run -> row -> record; empty without a file."""
    path = path_of(experiment)
    return load(path)["made"] if path.exists() else {}


def load(path: Path) -> dict[str, Any]:
    """Returns the contents of a file: "results", and "made" if the file has it."""
    contents = _unpacked(json.loads(path.read_text(encoding="utf-8")))
    found, records = contents["results"], contents.get("made")
    if "runs" in found and "table" not in found:
        found["table"] = table(found["runs"])
    if isinstance(records, list):
        made: dict[str, Any] = {}
        for record in records:
            for run, rows in record["seconds"].items():
                made.setdefault(run, {}).update({row: {**record, "seconds": seconds} for row, seconds in rows.items()})
        contents["made"] = made
    return contents


def records(made: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the records of what `made` returns."""
    if "commit" in made:
        yield made
    else:
        yield from (record for rows in made.values() for record in rows.values())


def record(seeds: Sequence[int], packages: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the record of results that this process makes: commit, date, versions, machine, seeds.

    Args:
        seeds: of the results.
        packages: others that are measured, whose versions count too.
    """
    threads = torch.get_num_threads()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "lapwing": lapwing.__version__,
        **{package: version(package) for package in ("torch", "numpy", *packages)},
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores, {device}, {threads} thread{'s' * (threads > 1)}",
        "seeds": ", ".join(map(str, seeds)),
    }


@functools.cache
def commit() -> str:
    """Returns the commit of the checkout, with a plus if its code differs, or an empty string outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[2]), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "lapwing", "benchmarks/*.py", "papers/*.py")
    return git("rev-parse", "--short", "HEAD") + "+" * bool(changed)


def write(experiment: str, results: Mapping[str, Any], made: Mapping[str, Any]) -> Path:
    """Writes the results of an experiment; returns their path.

    Args:
        experiment: its `__file__`.
        results: numbers by name.
        made: a record, or run -> row -> record.
    """
    path, found = path_of(experiment), dict(results)
    if "runs" in found and found.get("table") == table(found["runs"]):
        del found["table"]
    path.parent.mkdir(exist_ok=True)
    path.write_text(_laid_out(_packed({"made": _grouped(made), "results": _rounded(found)})) + "\n", encoding="utf-8")
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
        self.commit = commit()

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
        print(f"{run} {row}: {seconds:.0f} s {short(new)}", flush=True)
        write(self.experiment, self.all(), self.made)

    def filled(self, add: Callable[..., None], *values: Iterable[Any]) -> dict[str, Any]:
        """Returns `all()` after `add(rows, a, b)` for every a and b of two lists of values; there may be any number."""
        for chosen in itertools.product(*values):
            add(self, *chosen)
        return self.all()

    def all(self) -> dict[str, Any]:
        """Returns facts, rows, and means with standard errors over runs that differ in the seed alone."""
        return {**self.facts, "table": table(self.runs), "runs": self.runs}


def table(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the means and standard errors of rows, over runs that differ in the seed alone."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run, rows in runs.items():
        groups.setdefault(run.partition("seed")[0].rstrip(" ,"), []).append(rows)
    return {
        group: {
            row: averaged([_numbers(rows[row]) for rows in some if row in rows])
            for row in dict.fromkeys(row for rows in some for row in rows)
        }
        for group, some in groups.items()
    }


def once(make: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that makes its value at its first call, so that what no new row needs is never made."""
    return functools.cache(make)


def short(value: Any) -> str:
    """Returns the numbers of a row as a line to print."""
    if isinstance(value, Mapping):
        shown = {key: short(part) for key, part in value.items() if not isinstance(part, (list, str))}
        return "{" + ", ".join(f"{key} {part}" for key, part in shown.items() if key != "rotated") + "}"
    return f"{value:.4g}" if isinstance(value, (int, float)) else ""


def _numbers(value: Any) -> Any:
    """Returns nested numbers alone, lists as mappings."""
    if isinstance(value, Mapping):
        parts = {key: _numbers(part) for key, part in value.items() if not str(key).startswith("curve of")}
        return {key: part for key, part in parts.items() if part is not None}
    if isinstance(value, (list, tuple)):
        return {str(i): _numbers(part) for i, part in enumerate(value)}
    return float(value) if isinstance(value, (int, float)) else None


# how a file is written


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(key): _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, (list, tuple)) else value


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _laid_out(value: Any, indent: int = 0) -> str:
    """Returns JSON with what fits on one line on one line."""
    line = _text(value)
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if indent + len(line) <= WIDTH or not any(isinstance(part, (dict, list)) for part in parts):
        return line
    names = [f"{_text(name)}:" for name in value] if isinstance(value, dict) else [""] * len(parts)
    lines = [f"{' ' * indent} {name}{_laid_out(p, indent + 1)}" for name, p in zip(names, parts, strict=True)]
    start, end = "{}" if isinstance(value, dict) else "[]"
    return f"{start}\n" + ",\n".join(lines) + f"\n{' ' * indent}{end}"


def _grouped(made: Mapping[str, Any]) -> Any:
    """Returns one record, or a list of records with the seconds of their runs and rows."""
    if "commit" in made:
        return made
    groups: dict[str, dict[str, Any]] = {}
    for run, rows in made.items():
        for row, one in rows.items():
            seconds = groups.setdefault(_text({**one, "seconds": 0}), {**one, "seconds": {}})["seconds"]
            seconds.setdefault(run, {})[row] = one["seconds"]
    return list(groups.values())


def _packed(value: Any) -> Any:
    """Returns values with rows of the same numbers as tables: "columns", and "rows" without their names."""
    rows = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not rows:
        return value
    if all(isinstance(row, dict) for row in rows):
        flat = [dict(_leaves(row)) for row in rows]
        columns = list(dict.fromkeys(column for row in flat for column in row))
        cells = [[row.get(column) for column in columns] for row in flat]
        packed = {
            "columns": columns,
            "rows": dict(zip(value, cells, strict=True)) if isinstance(value, dict) else cells,
        }
        nested = any(isinstance(part, dict) for row in rows for part in row.values())
        shorter = (not nested or len(columns) <= COLUMNS) and len(_text(packed)) < len(_text(value))
        if shorter and _text(_unpacked(packed)) == _text(value):  # in the same order too
            return packed
    if isinstance(value, dict):
        return {key: _packed(part) for key, part in value.items()}
    return [_packed(part) for part in value]


def _leaves(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, part in row.items():
        if isinstance(part, dict):
            yield from _leaves(part, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", part


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(part) for part in value]
    if not isinstance(value, dict):
        return value
    if set(value) != {"columns", "rows"}:
        return {key: _unpacked(part) for key, part in value.items()}
    rows, places = value["rows"], [column.split("/") for column in value["columns"]]
    if isinstance(rows, dict):
        return {name: _row(places, cells) for name, cells in rows.items()}
    return [_row(places, cells) for cells in rows]


def _row(places: Sequence[Sequence[str]], cells: Sequence[Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for (*outer, name), cell in zip(places, cells, strict=True):
        if cell is not None:
            part = row
            for key in outer:
                part = part.setdefault(key, {})
            part[name] = cell
    return row
