"""Runs a benchmark, and lists what there is.

    python -m benchmarks                        lists every benchmark
    python -m benchmarks answers                runs one: writes results/answers.json, its tables and pictures
    python -m benchmarks answers topics         runs one of its parts; the others keep their numbers
    python -m benchmarks regression_rivals '*: lapwing'   runs the parts whose names have this pattern
    python -m benchmarks narrow --missing --minutes 45    runs parts without results, and starts none after 45 minutes
    python -m benchmarks answers --share 0.02 --dry       prints results, and writes nothing
    python -m benchmarks pages                  writes the tables of all pages, and draws pictures, from the results
    python -m benchmarks bench                  runs what `make bench` runs

A benchmark is a file with a function `parts(...)`: name of a part -> function that returns its results. Its arguments
are options of the command line. It may also have `tables(results)`, name -> table for a page; `draw(results)`, for
pictures; SEED, THREADS, and PACKAGES, which are measured too. A page has the place of a table between
`<!-- table of answers: topics -->` and `<!-- end -->`. Data sets are read from the folder that LAPWING_DATA names.
Trained networks are kept in the folder that LAPWING_NETWORKS names.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import inspect
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from papers.common import experiments, results
from papers.common.data import available
from papers.common.tables import filled

HOME = Path(__file__).parent
PAGES = [HOME / "README.md", *sorted((HOME.parent / "docs").rglob("*.md"))]


def module(name: str) -> ModuleType:
    """Returns the module of a benchmark."""
    return importlib.import_module(f"benchmarks.{name}")


def listing() -> str:
    """Returns a line for each benchmark."""
    return "\n".join(f"{name:<20} {line}" for name, line in experiments.found(HOME, "parts").items())


def written(text: str) -> str:
    """Returns the text of a page with the tables of its markers."""
    return filled(text, lambda _, of: table(*of.split(": ", 1)))


def table(name: str, of: str) -> str:
    """Returns a table of a benchmark from its results."""
    benchmark = module(name)
    return benchmark.tables(results.read(str(benchmark.__file__)))[of]


def write_pages() -> None:
    """Writes the tables into the pages."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            path.write_text(new, encoding="utf-8")


def run(name: str, chosen: Sequence[str] = (), **asked: Any) -> str:
    """Runs parts of a benchmark, writes their results after each, and then its tables and pictures.

    Args:
        name: of the benchmark.
        chosen: patterns of the names of parts to run; empty means all.
        asked: "missing", "minutes", "dry" and "into" of the command line, and arguments of `parts`.
    """
    benchmark = module(name)
    missing, minutes, dry, into = (asked.pop(key, None) for key in ("missing", "minutes", "dry", "into"))
    experiments.keep_networks()
    torch.set_num_threads(getattr(benchmark, "THREADS", 1))
    seed, parts = getattr(benchmark, "SEED", 0), benchmark.parts(**asked)
    if unknown := [pattern for pattern in chosen if not fnmatch.filter(parts, pattern)]:
        raise SystemExit(f"{name} has no part {', '.join(unknown)}. Name some of {', '.join(parts)}.")
    file = str(Path(str(benchmark.__file__)).with_stem(into or name))
    path, end = results.path_of(file), time.monotonic() + 60 * (minutes or float("inf"))
    found, made = (results.read(file), results.made(file)) if path.exists() and not dry else ({}, {})
    record = results.record((seed,), getattr(benchmark, "PACKAGES", ()))  # raises if a package is not there
    for part in parts:
        left_out = chosen and not any(fnmatch.fnmatch(part, pattern) for pattern in chosen)
        if left_out or (missing and part in found) or time.monotonic() > end:
            continue
        torch.manual_seed(seed)
        start = time.perf_counter()
        new = parts[part]()
        seconds = round(time.perf_counter() - start, 1)
        print(f"{part}: {seconds} s {results.short(new)}", flush=True)
        if new is not None and not dry:  # a part that only draws has no results
            found[part], made.setdefault("", {})[part] = new, {**record, "seconds": seconds}
            ordered = [*(one for one in parts if one in found), *(one for one in found if one not in parts)]
            results.write(file, {one: found[one] for one in ordered}, made)
    if dry:
        return ""
    if not into:
        experiments.draw(benchmark)
        write_pages()
    return f"The results are in {path}."


def bench() -> str:
    """Runs the cost benchmarks, on a GPU too if there is one, and trained networks if their data are there."""
    run("cost")
    run("streamlined_cost")
    if torch.cuda.is_available():
        run("gpu")
    if available(*(f"uci_{name}.npz" for name in module("regression").TABLES)):
        run("regression")
    networks = {"mnist": ("mnist_cnn_ella",), "cifar10": ("cifar10_resnet20_optionA",)}
    for name, weights in networks.items():
        if available(f"{name}.npz", *(f"{one}.safetensors" for one in weights)):
            run("real_networks", [name])
    return f"The results are in {HOME / 'results'}."


def main(arguments: Sequence[str]) -> str:
    """Does what the arguments ask for; returns what there is to print."""
    name, *rest = arguments or [""]
    if not name:
        return listing()
    if name == "bench":
        return bench()
    if name == "pages":
        for benchmark in experiments.found(HOME, "parts"):
            experiments.draw(module(benchmark))
        write_pages()
        return ""
    if name not in experiments.found(HOME, "parts"):
        raise SystemExit(f"There is no benchmark {name!r}. Name one of these.\n\n{listing()}")
    about = module(name)
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", description=about.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("chosen", nargs="*", metavar="part", help="parts, or patterns of their names; all by default")
    parser.add_argument("--missing", action="store_true", help="run parts without results alone")
    parser.add_argument("--minutes", type=float, help="start no part after so long")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    parser.add_argument("--into", metavar="NAME", help="write results/NAME.json instead")
    for option in inspect.signature(about.parts).parameters.values():
        parser.add_argument(f"--{option.name}", type=type(option.default), default=option.default)
    return run(name, **vars(parser.parse_args(rest)))


if __name__ == "__main__":
    print(main(sys.argv[1:]))
