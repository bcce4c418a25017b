"""Runs an experiment of a paper, and lists what there is.

    python -m papers                       lists every experiment
    python -m papers ella                  lists those of one paper
    python -m papers ella table5           runs one: adds rows to papers/ella/results/table5.json, draws pictures
    python -m papers ella table5 --again   the same without the rows that the file has: all are computed
    python -m papers ella table5 --draw    draws its pictures again from the results
    python -m papers pages                 writes the tables of all pages from the ledger and the results
    python -m papers verify                computes what is fast anew, and compares it with the ledger
    python -m papers verify ella table5    the same for one paper, or for one experiment, whatever it takes

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

from papers import ledger, pages
from papers import verify as verification
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


def run(paper: str, name: str, again: bool = False) -> str:
    """Runs an experiment, writes its results and draws its pictures; returns what it did.

    Rows that the file of results has are kept, unless `again` deletes the file first.
    """
    keep_networks()
    torch.set_num_threads(getattr(importlib.import_module(f"papers.{paper}"), "THREADS", torch.get_num_threads()))
    experiment = importlib.import_module(f"papers.{paper}.{name}")
    published = {"published": experiment.PUBLISHED} if hasattr(experiment, "PUBLISHED") else {}
    file, start = str(experiment.__file__), time.perf_counter()
    if again:
        results.path_of(file).unlink(missing_ok=True)
    before = results.made(file)
    new = {**published, **experiment.run(), "seconds": time.perf_counter() - start}
    made = results.made(file)
    if not made or "commit" in made:  # `results.Rows` writes a record for each row itself
        seeds = inspect.signature(experiment.run).parameters.get("seeds")
        made, before = results.record((0,) if seeds is None else seeds.default), {}
    path = results.write(file, new, made)
    draw(experiment)
    kept, rows = (sum(1 for _ in results.records(of)) for of in (before, made))
    hint = "" if again or not kept else "; `--again` computes all anew"
    return f"{rows - kept} rows computed, {kept} kept{hint}. The results are in {path}."


def write_pages() -> str:
    """Writes the tables of the pages; returns their paths, and the numbers in their prose that no result has."""
    lines = []
    for path in pages.write():
        missing = pages.unsupported(path)
        lines.append(f"{path}" + f": no result has {', '.join(missing)}" * bool(missing))
    return "\n".join(lines)


def verify(paper: str = "", name: str = "") -> str:
    """Verifies the ledger, or a paper or an experiment of it; exits with an error if an entry does not agree."""
    if not verification.verify([entry for entry in ledger.read() if paper in ("", entry.paper)], name):
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
    verifies, names = names[:1] == ["verify"], names[names[:1] == ["verify"] :]
    if verifies and not names:
        return verify()
    if len(options) > 1 or options - {"--draw", "--again"} or len(names) not in (1, 2) or names[0] not in papers():
        raise SystemExit(f"Name a paper ({', '.join(papers())}) and one of its experiments.\n\n{listing(papers())}")
    paper, *name = names
    if not name:
        return verify(paper) if verifies else listing([paper])
    if name[0] not in experiments(paper):
        raise SystemExit(f"{paper} has no experiment {name[0]!r}. Name one of these.\n\n{listing([paper])}")
    if verifies:
        return verify(paper, name[0])
    if options == {"--draw"}:
        draw(importlib.import_module(f"papers.{paper}.{name[0]}"))
        return f"The pictures are in {HOME / paper / 'figures'}."
    return run(paper, name[0], bool(options))


if __name__ == "__main__":
    print(main(sys.argv[1:]))
