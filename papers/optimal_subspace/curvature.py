"""Figure 2 on MNIST by Table 2 with the curvature of 400, 2 000 and 10 000 images: how the relative error falls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from papers.common.data import batched, random_rows
from papers.common.results import Rows, once
from papers.common.tables import grid, shown
from papers.optimal_subspace.comparison import compare_subspaces
from papers.optimal_subspace.table2 import ImageRows

IMAGES = (400, 2000, 10_000)
"""Training images that posteriors sum over."""
RANKS = (10, 50, 100, 200, 500)
WAYS = ("low rank, KFAC", "low rank, diagonal")


def run(seeds: Sequence[int] = range(5), images: Sequence[int] = IMAGES) -> dict[str, Any]:
    """Returns the relative error and NLL of two ways and of the optimum by s at λ = 1, for each number of images.

    The page has three seeds, each of which takes 35 minutes of a core and 5 GiB.
    """
    rows = Rows(__file__, {})
    for seed in seeds:
        task = once(lambda seed=seed: ImageRows("mnist", seed))  # type: ignore[misc]
        for count in images:
            rows.add(f"mnist, seed {seed}", f"{count} images", measures, task, count)
    return rows.all()


def measures(task: Callable[[], ImageRows], count: int) -> dict[str, Any]:
    """Returns the measures at the test images X of `table2`, with the first images of its random order."""
    found = task()
    picked = random_rows(found.data.x_train, count, found.seed)
    some = replace(found.task, train=batched(*found.data.train(picked)), swag=None)
    return compare_subspaces(some, {"test": (found.x, found.y)}, RANKS, 1.0, found.seed, WAYS)["test"]


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the relative errors by s, a row for each way and number of images."""
    (found,) = results["table"].values()
    lines = {}
    for way in ("optimal", *WAYS):
        for count in IMAGES:
            errors = found.get(f"{count} images", {}).get(way, {})
            lines[f"{way}, {count:,} images"] = [shown(errors.get(str(s), {}).get("relative_error")) for s in RANKS]
    return {
        "relative error": grid(
            [f"s = {s}" for s in RANKS], {name: cells for name, cells in lines.items() if any(cells)}
        )
    }
