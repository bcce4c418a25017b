"""Tasks that the command line names: their results in a file, and the tables of these on a page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import write

COLUMNS = {
    "accuracy": ".1%", "RMSE": ".4f", "NLL": ".4f", "ECE": ".2%", "90 % interval": ".1%", "AUROC": ".3f",
    "fit, s": ".2f", "predictions, ms": ".1f", "mean": ".3f", "best": ".3f", "worst": ".3f",
    "laplace-torch": "", "lapwing": "", "refusal": "",
}  # fmt: skip


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Returns the rows of a task as Markdown."""
    columns = [column for column in COLUMNS if any(column in row for row in rows.values())]
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for name, row in rows.items():
        cells = [format(row[column], COLUMNS[column]) if column in row else "" for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def with_tables(text: str, results: Mapping[str, Any]) -> str:
    """Returns the text of a page with the tables of the results."""
    for name, rows in results.items():
        start, end = f"<!-- table of {name} -->\n", "<!-- end of table -->"
        before, _, rest = text.partition(start)
        text = before + start + table(rows) + end + rest.partition(end)[2] if rest else text
    return text


def run_tasks(
    about: str | None,
    tasks: Mapping[str, Callable[[], Mapping[str, Any]]],
    path: Path,
    page: Path,
    seed: int,
    packages: Sequence[str] = (),
) -> None:
    """Runs the tasks that the command line names, or all; the others keep their results.

    Args:
        about: what `--help` says.
        tasks: name -> what returns the rows of its table.
        path: of the results, in `benchmarks/results/`.
        page: the page with the tables.
        seed: of each task.
        packages: others that are measured, whose versions are written beside the results.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help=f"which of {', '.join(tasks)}; all by default")
    parser.add_argument("--page", action="store_true", help="write the tables of the page alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    if not options.page:
        versions = {package: version(package) for package in packages}  # without a package nothing is measured
        for name in options.tasks or tasks:
            torch.manual_seed(seed)
            results[name] = tasks[name]()
            print(name, table(results[name]), sep="\n", flush=True)
            write(path.stem, {task: results[task] for task in tasks if task in results}, seed, **versions)
    page.write_text(with_tables(page.read_text(encoding="utf-8"), results), encoding="utf-8")
