"""Table 4: NLL over M and K on the CIFAR-10 ResNet-20."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from papers.common.cifar import Cifar
from papers.common.scores import averaged, class_scores
from papers.common.tables import grid, shown
from papers.ella.stopping import best, best_stop, cifar_ella, shared_features

PUBLISHED = {
    "K": (4, 8, 16, 32),
    "M=8": (0.269, 0.256), "M=32": (0.266, 0.254, 0.239, 0.232), "M=128": (0.267, 0.254, 0.238, 0.231),
    "M=512": (0.268, 0.254, 0.238, 0.232), "M=2000": (0.267, 0.255, 0.238, 0.231),
}  # fmt: skip
"""NLL, on other weights of that network."""


def run(
    seeds: Sequence[int] = (0, 1), shown: int = 512, counts: Sequence[int] = (8, 32, 128, 512, 2000)
) -> dict[str, Any]:
    """Returns scores by M and K, n and prior precision chosen on 500 of the test images, scored on 2 000 others."""
    ranks, runs = (4, 8, 16, 32), []
    for seed in seeds:
        setup = Cifar.load(seed, shown, reported=2000)
        fits = [cifar_ella(setup, rows, min(max(ranks), rows), seed) for rows in counts]
        posteriors = [posterior for _, posterior, _ in fits]
        val, test = (shared_features(posteriors, part) for part in (setup.val[:5], setup.test))
        run: dict[str, Any] = {}
        for i, (keep, _, _) in enumerate(fits):
            stops = best_stop(keep.found, val[i], ranks)
            for rank in (rank for rank in ranks if rank <= counts[i]):
                n, _, covariance = best(stops, rank)
                run[f"M={counts[i]}, K={rank}"] = {
                    "n": n, "precision": float(covariance.precision[0]),
                    **class_scores(test[i].predict(covariance).probs, test[i].labels),
                }  # fmt: skip
        run["MAP"] = class_scores(test[0].outputs.softmax(-1), test[0].labels)
        runs.append(run)
        print(seed, run, flush=True)
    return {"images": shown, "seeds": len(seeds), "table": averaged(runs)}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns our NLL and the paper's by M and K."""
    rows = {}
    for name in (name for name in PUBLISHED if name != "K"):
        cells = zip(PUBLISHED["K"], PUBLISHED[name], strict=False)
        rows[name] = [f"{shown(results['table'][f'{name}, K={rank}']['nll'])} ({nll})" for rank, nll in cells]
    return {"nll": grid([f"K = {rank}" for rank in PUBLISHED["K"]], rows)}
