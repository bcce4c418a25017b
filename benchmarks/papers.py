"""The papers' tables and figures on what is at hand; results go to `benchmarks/results/paper_*.json`.

`python -m benchmarks.papers ella_errors` runs one of them, without a name all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import paper_ella, paper_ella_cost, paper_subspace
from benchmarks.measure import write

EXPERIMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        paper_ella.ella_regression,
        paper_ella.ella_errors,
        paper_ella.ella_cifar,
        paper_ella.ella_rows,
        paper_ella.ella_last_layer,
        paper_ella.ella_corruptions,
        paper_ella_cost.ella_cost,
        paper_ella_cost.ella_memory,
        paper_subspace.subspace_images,
        paper_subspace.subspace_given,
        paper_subspace.subspace_tables,
        paper_subspace.subspace_resnet,
    )
}


def main(names: Sequence[str]) -> None:
    """Runs the named experiments, all of them when none is named."""
    for name in names or EXPERIMENTS:
        start = time.perf_counter()
        results = EXPERIMENTS[name]()
        path = write(f"paper_{name}", {**results, "seconds": time.perf_counter() - start}, seed=0)
        print(f"{name}: {time.perf_counter() - start:.0f} s, {path}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
