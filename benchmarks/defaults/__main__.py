"""Trains the grid, runs arms on it, and prints the averages of each family and the aims.

    python -m benchmarks.defaults --train            trains what the cache lacks, and does no more
    python -m benchmarks.defaults                    runs network, temperature, default and validated
    python -m benchmarks.defaults --arms all --cells 'boston*' --out boston.json

Data sets are read from the folder that LAPWING_DATA names. The cache keeps networks and rows, so that a run goes on
where another has ended; rows are kept by the code of lapwing.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import time
from pathlib import Path

from benchmarks import measure
from benchmarks.defaults import measures, run
from benchmarks.defaults.networks import CELLS

CACHE = Path.home() / ".cache" / "lapwing-defaults"


def main() -> None:
    """Does what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.defaults", description=__doc__.partition("\n")[0])
    parser.add_argument("--train", action="store_true", help="train what the cache lacks, and do no more")
    parser.add_argument("--arms", default="network,temperature,default,validated", help="names, or all")
    parser.add_argument("--cells", default="*", help="patterns of names, such as 'mnist*,boston*', run in this order")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--out", type=Path, default=measure.RESULTS / "defaults.json")
    parser.add_argument("--cache", type=Path, default=CACHE)
    asked = parser.parse_args()
    arms = list(measures.ARMS) if asked.arms == "all" else asked.arms.split(",")
    patterns = asked.cells.split(",")
    cells = list(dict.fromkeys(cell for pattern in patterns for cell in CELLS if fnmatch.fnmatch(cell.name, pattern)))
    if unknown := set(arms) - set(measures.ARMS):
        parser.error(f"There is no arm {', '.join(unknown)}. Name some of {', '.join(measures.ARMS)}.")
    if not cells:
        parser.error(f"No cell has a name like {asked.cells}. The cells are {', '.join(cell.name for cell in CELLS)}.")
    asked.cache.mkdir(parents=True, exist_ok=True)
    os.environ["LAPWING_NETWORKS"] = str(asked.cache)
    rows = run.Rows(asked.cache / "rows.jsonl")
    for seed in range(asked.seeds):
        for cell in cells:
            if not asked.train:
                run.evaluate(cell, seed, arms, rows)
            elif cell.fit is not None and not (asked.cache / f"{cell.name}-{seed}.safetensors").exists():
                start = time.perf_counter()
                cell.trained(cell.data(seed), seed)
                print(f"{cell.name} {seed}: {time.perf_counter() - start:.1f} s", flush=True)
    if not asked.train:
        reported = {"network", "temperature", *arms}  # all others are judged by these two
        seeds = range(asked.seeds)
        shown = [row for cell in cells for row in rows.rows
                 if row["cell"] == cell.name and row["seed"] in seeds and row["arm"] in reported]  # fmt: skip
        found = run.results(shown)
        print("", run.table(found["families"]), "", run.verdicts(found["aims"]), sep="\n")
        print(measure.write(asked.out.stem, found, asked.seeds - 1, asked.out.parent))


if __name__ == "__main__":
    main()
