"""Figures 2 (c), 4 (b) and 6: ELLA with M = 2 000 on the CIFAR-10 ResNet-20, over K and n."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lapwing.covariance import LowRank
from papers.common import drawing
from papers.common.cifar import Cifar
from papers.common.results import read
from papers.common.scores import class_scores
from papers.ella import table1, table4
from papers.ella.stopping import best, best_stop, cifar_ella, features

PUBLISHED = {"ELLA": 0.233, "MAP": 0.282}
"""NLL, on other weights of that network."""


def run(seeds: Sequence[int] = (0, 1), shown: int = 4096) -> dict[str, Any]:
    """Returns scores by K, and by n at K = 20; n and prior precision are chosen on validation images."""
    ranks, found = (4, 8, 16, 20, 32, 64), []
    for seed in seeds:
        setup = Cifar.load(seed, shown)
        keep, posterior, seconds = cifar_ella(setup, rows=2000, rank=max(ranks), seed=seed)
        val, test = (features(posterior, part) for part in (setup.val, setup.test))
        stops = best_stop(keep.found, val, ranks)
        run: dict[str, Any] = {"seed": seed, "fit_seconds": seconds, "feature_seconds": val.seconds + test.seconds}
        run["MAP"] = class_scores(test.outputs.softmax(-1), test.labels)
        run["K, best n and prior"] = {}
        for rank in ranks:
            n, loss, covariance = best(stops, rank)
            run["K, best n and prior"][rank] = {
                "n": n, "prior_precision": float(covariance.precision[0]), "validation_nll": loss,
                **class_scores(test.predict(covariance).probs, test.labels),
            }  # fmt: skip
        run["n at K=20"] = {}
        for part in keep.found:
            at = {"best prior": stops[part.samples][20][1]}
            assert isinstance(part.covariance, LowRank)
            shorter = part.covariance.with_rank(20)
            for delta in (0.5, 5.0, 50.0):
                precision = torch.full_like(shorter.precision, delta)
                at[f"prior precision {delta:g}"] = shorter.with_prior(precision, 1.0)
            run["n at K=20"][part.samples] = {
                name: class_scores(test.predict(c).probs, test.labels) for name, c in at.items()
            }
        found.append(run)
        print(run, flush=True)
    return {"images": shown, "rows": 2000, "runs": found}


LABELS = {"nll": "NLL (nats)", "ece": "ECE", "accuracy": "accuracy"}
LIMITS = {"nll": (0.24, 0.42), "ece": (0.0, 0.08), "accuracy": (0.88, 0.93)}


def draw(results: Mapping[str, Any]) -> None:
    """Draws scores over n and over K, means with both seeds as points; and with the results of `table4` over M.

    The temperature of the network is that of `table1`, on the same images.
    """
    runs = results["runs"]
    temperature = read(table1.__file__)["table"]["network and last layer"]["network, one temperature"]
    figure, ((*axes,),) = drawing.panels(1, 5, (19, 4))
    kinds = list(next(iter(runs[0]["n at K=20"].values())))
    for measure, axis in zip(("nll", "ece", "accuracy"), axes, strict=False):
        for i, kind in enumerate(kinds):
            curves = [{int(n): row[kind][measure] for n, row in run["n at K=20"].items()} for run in runs]
            _curve(axis, curves, f"C{i}", kind)
        axis.set(xscale="log", xlabel="n, images in the curvature (K = 20)")
    chosen = [{int(k): row["nll"] for k, row in run["K, best n and prior"].items()} for run in runs]
    _curve(axes[3], chosen, f"C{len(kinds)}", "n and prior chosen on validation images")
    axes[3].set(xlabel="K (M = 2 000)")
    for measure, axis in zip(("nll", "ece", "accuracy", "nll"), axes, strict=False):
        axis.axhline(runs[0]["MAP"][measure], color="#555555", linestyle=":", label="network")
        axis.axhline(temperature[measure]["mean"], color="black", linestyle="--", label="network, one temperature")
        axis.set(ylabel=LABELS[measure], ylim=LIMITS[measure])
    over_rows: dict[int, list[tuple[int, float, float]]] = {}
    for name, row in read(table4.__file__)["table"].items():
        if name != "MAP":
            rows, rank = (int(part.partition("=")[2]) for part in name.split(", "))
            over_rows.setdefault(rank, []).append((rows, row["nll"]["mean"], row["nll"]["standard_error"]))
    for i, (rank, found) in enumerate(sorted(over_rows.items())):
        x, y, error = zip(*sorted(found), strict=True)
        axes[4].errorbar(x, y, error, fmt=".-", color=f"C{len(kinds) + 1 + i}", label=f"K = {rank} (Table 4)")
    axes[4].set(xscale="log", xlabel="M", ylabel=LABELS["nll"])
    drawing.legend_below(figure, 6)
    drawing.save(figure, __file__)


def _curve(axis: Any, runs: Sequence[Mapping[int, float]], colour: str, label: str) -> None:
    """Draws the mean of the seeds as a line, and every seed as a point."""
    axis.plot(list(runs[0]), [sum(run[x] for run in runs) / len(runs) for x in runs[0]], color=colour, label=label)
    for run in runs:
        axis.plot(list(run), list(run.values()), ".", color=colour)
