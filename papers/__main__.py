"""Runs an experiment of a paper, and lists what there is.

    python -m papers                       lists every experiment
    python -m papers ella                  lists those of one paper
    python -m papers ella table5           runs one: writes papers/ella/results/table5.json, and draws its pictures
    python -m papers ella table5 --draw    draws its pictures again from the results
    python -m papers pages                 writes the tables of all pages from the ledger and the results
    python -m papers verify                computes what is fast anew, and compares it with the ledger

An experiment is a file in a paper's folder with a function `run()`, which returns its results. It may also have
`draw(results)`, which draws its pictures, `tables(results)`, which returns its tables for the page, and `PUBLISHED`,
which holds what the paper printed. Data sets are read from the folder that LAPWING_DATA names. Trained networks are
kept in the folder that LAPWING_NETWORKS names. Images and the networks for them are on the device that
LAPWING_PAPERS_DEVICE names, such as cuda: `ella table1` and `together given` take hours on a CPU.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from papers.common import results
from papers.common.experiments import draw, found, keep_networks

HOME = Path(__file__).parent


def papers() -> list[str]:
    """Returns the names of the papers."""
    return sorted(path.parent.name for path in HOME.glob("*/README.md"))


def experiments(paper: str) -> dict[str, str]:
    """Returns the experiments of a paper: name -> first line of the docstring."""
    return found(HOME / paper, "run")


def listing(names: Sequence[str]) -> str:
    """Returns a line for each experiment of the named papers."""
    lines = []
    for paper in names:
        title = importlib.import_module(f"papers.{paper}").__doc__ or ""
        lines += ["", title.partition("\n")[0]]
        lines += [f"  {paper} {name:<14} {line}" for name, line in experiments(paper).items()]
    return "\n".join(lines[1:])


def run(paper: str, name: str) -> Path:
    """Runs an experiment, writes its results and draws its pictures; returns the path of the results."""
    keep_networks()
    torch.set_num_threads(getattr(importlib.import_module(f"papers.{paper}"), "THREADS", torch.get_num_threads()))
    experiment = importlib.import_module(f"papers.{paper}.{name}")
    published = {"published": experiment.PUBLISHED} if hasattr(experiment, "PUBLISHED") else {}
    file, start = str(experiment.__file__), time.perf_counter()
    new = {**published, **experiment.run(), "seconds": time.perf_counter() - start}
    made = results.made(file)
    if not made or "commit" in made:  # `results.Rows` writes a record for each row itself
        seeds = inspect.signature(experiment.run).parameters.get("seeds")
        made = results.record((0,) if seeds is None else seeds.default)
    path = results.write(file, new, made)
    draw(experiment)
    return path


def write_pages() -> str:
    """Writes the tables of the pages; returns their paths, and the numbers in their prose that no result has."""
    pages = importlib.import_module("papers.pages")  # needs Python 3.11
    lines = []
    for path in pages.write():
        missing = pages.unsupported(path)
        lines.append(f"{path}" + f": no result has {', '.join(missing)}" * bool(missing))
    return "\n".join(lines)


def verify() -> str:
    """Verifies the ledger; returns nothing more to print, or exits with an error if an entry does not agree."""
    ledger, verification = (importlib.import_module(f"papers.{name}") for name in ("ledger", "verify"))
    if not verification.verify(ledger.read()):
        raise SystemExit(1)
    return ""


def main(arguments: Sequence[str]) -> str:
    """Does what the arguments ask for; returns what there is to print."""
    names = [argument for argument in arguments if not argument.startswith("-")]
    options = set(arguments) - set(names)
    if not names and not options:
        return listing(papers())
    if list(arguments) == ["pages"]:
        return write_pages()
    if list(arguments) == ["verify"]:
        return verify()
    if options - {"--draw"} or len(names) not in (1, 2) or names[0] not in papers():
        raise SystemExit(f"Name a paper ({', '.join(papers())}) and one of its experiments.\n\n{listing(papers())}")
    paper, *name = names
    if not name:
        return listing([paper])
    if name[0] not in experiments(paper):
        raise SystemExit(f"{paper} has no experiment {name[0]!r}. Name one of these.\n\n{listing([paper])}")
    if options:
        draw(importlib.import_module(f"papers.{paper}.{name[0]}"))
        return f"The pictures are in {HOME / paper / 'figures'}."
    return f"The results are in {run(paper, name[0])}."


if __name__ == "__main__":
    print(main(sys.argv[1:]))
