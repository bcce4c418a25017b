"""Streamlined prediction's tables and figures (Li et al. 2025); results go to `benchmarks/results/`.

`python -m benchmarks.paper_streamlined uci` runs one experiment, without a name all. Rows that a results file has are
kept: delete it to begin anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.measure import write
from benchmarks.paper_valla import CACHE, Results, once, run_named


def uci(names: Sequence[str] = (), folds: Sequence[int] = range(5)) -> None:
    """Tables 1 and 8: NLPD and RMSE on eleven UCI tables, five folds; "seed" is the fold that is tested."""
    from lapwing.reproduce import streamlined_tables as tables

    results = Results("streamlined_uci", {"paper": {"columns": tables.COLUMNS, **tables.PAPER}})
    for name in names or tables.NETWORKS:
        for fold in folds:
            task = once(lambda name=name, fold=fold: tables.RegressionTask.load(name, fold))
            run = f"{name}, seed {fold}"
            results.add(run, "LA", lambda task=task: task().laplace())
            results.add(run, "MFVI", lambda task=task: task().mean_field())
    results.facts["p values"] = tables.p_values(results.runs)
    results.write()


def scale(
    names: Sequence[str] = ("SERVO", "LD", "AM", "REV", "FF", "CCS", "ASN"), folds: Sequence[int] = range(3)
) -> None:
    """Where the variance that the factor takes away comes from, and what factor the evidence finds."""
    from lapwing.reproduce import streamlined_tables as tables

    results = Results("streamlined_scale", {})
    for name in names:
        for fold in folds:
            results.add(
                f"{name}, seed {fold}", "LA",
                lambda name=name, fold=fold: tables.where_the_variance_is(tables.RegressionTask.load(name, fold)),
            )  # fmt: skip


def mlp(seeds: Sequence[int] = (0, 1), names: Sequence[str] = ("mnist", "fashion_mnist")) -> None:
    """Tables 2 and 3, figure 9: accuracy, NLPD, ECE of MLPs, entropies of the other data set's images."""
    import lapwing as lw
    from lapwing.reproduce import streamlined_mlp as digits

    results = Results("streamlined_mlp", {"paper": digits.PAPER, "bins": digits.BINS, "tested": 5000})
    for seed in seeds:
        for name in names:
            task = once(lambda name=name, seed=seed: digits.MLPTask.load(name, seed))
            run = f"{name}, seed {seed}"
            results.add(run, "network", lambda task=task: task().network())

            def laplace(method: lw.Method, tune: Any, *ways: str, task: Any = task) -> Callable[[], Any]:
                return lambda: task().scores(task().laplace(method, tune), task().ways(*ways))

            results.add(run, "LA, KFAC", laplace(lw.KFAC(), lw.Evidence()))
            bounded = laplace(lw.KFAC(), lw.BoundedEvidence(), "streamlined", "GLM", "sampling")
            results.add(run, "LA, KFAC, bounded evidence", bounded)
            both = ("streamlined, diagonal", "moments", "GLM")
            results.add(run, "LA, diagonal", laplace(lw.Diagonal(), lw.Evidence(), *both))
            results.add(run, "MFVI", lambda task=task: task().scores(task().variational, task().ways()))


def rotations(seeds: Sequence[int] = (0, 1)) -> None:
    """Figure 8: accuracy and NLPD of the MNIST network on rotated test images; factors from upright ones."""
    import lapwing as lw
    from lapwing.reproduce import streamlined_mlp as digits

    results = Results("streamlined_rotations", {"angles": digits.ANGLES, "images": 500})
    for seed in seeds:
        task = once(lambda seed=seed: digits.MLPTask.load("mnist", seed))
        laplace = once(lambda task=task: task().laplace(lw.KFAC(), lw.Evidence()))
        run = f"seed {seed}"
        results.add(run, "network", lambda task=task: task().rotations(None, lw.Linearized()))
        for name in ("streamlined", "GLM", "sampling"):
            for label, posterior in (("LA", laplace), ("MFVI", lambda task=task: task().variational)):
                results.add(
                    run, f"{label} {name}",
                    lambda t=task, p=posterior, n=name: t().rotations(p(), t().ways(n)[n]),
                )  # fmt: skip


def products(seeds: Sequence[int] = (0, 1)) -> None:
    """Figure 6: how far products of weights and activations, and their sums, are from Gaussians."""
    import lapwing as lw
    from lapwing.reproduce import streamlined_mlp as digits
    from lapwing.reproduce.streamlined_products import products as measured

    results = Results("streamlined_products", {"network": "784-128-64-10, MNIST", "draws": 2000})
    for seed in seeds:
        task = once(lambda seed=seed: digits.MLPTask.load("mnist", seed))
        for name, tune in (("evidence", lw.Evidence()), ("bounded evidence", lw.BoundedEvidence())):
            results.add(
                f"KFAC, seed {seed}", name,
                lambda t=task, tune=tune: measured(t().model, t().laplace(lw.KFAC(), tune), t().tested[0][:1]),
            )  # fmt: skip


def sensitivity(seeds: Sequence[int] = (0, 1)) -> None:
    """Figures 5 and 10: maps of digits, bars of table columns, and what noise they stand for."""
    from benchmarks.figures import FIGURES
    from lapwing.reproduce import streamlined_sensitivity

    write("paper_streamlined_sensitivity", streamlined_sensitivity.experiment(seeds, CACHE, FIGURES), seed=0)


EXPERIMENTS: dict[str, Callable[[], None]] = {
    "uci": uci,
    "scale": scale,
    "mlp": mlp,
    "rotations": rotations,
    "products": products,
    "sensitivity": sensitivity,
}


if __name__ == "__main__":
    run_named(EXPERIMENTS, sys.argv[1:])
