"""Where the variance that the factor of Tables 1 and 8 takes away comes from, and what factor the evidence finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import lapwing as lw
from papers.common.results import Rows
from papers.common.tables import grid, shown
from papers.streamlined.table1 import RegressionTask, points_of


def run(
    names: Sequence[str] = ("SERVO", "LD", "AM", "REV", "FF", "CCS", "ASN"), folds: Sequence[int] = range(5)
) -> dict[str, Any]:
    """Returns variances, and scores with factors found in three ways; "seed" is the fold that is tested."""
    rows = Rows(__file__, {})
    for name in names:
        for fold in folds:
            rows.add(
                f"{name}, seed {fold}", "LA", lambda *at: where_the_variance_is(RegressionTask.load(*at)), name, fold
            )
    return rows.all()


def where_the_variance_is(task: RegressionTask) -> dict[str, Any]:
    """Returns the mean variance of f at test rows, in units of σ², and scores with factors found in three ways.

    `blocks` is the linearised network under the layers' own blocks of Σ, all that streamlined prediction sees. The
    factors are 1, that of the validation rows, and that of the bound of the evidence on training rows.
    """
    posterior = task.posterior()
    x, y = task.data.test
    noise = posterior.noise_variance
    assert noise is not None
    dense = posterior.covariance.to_dense().double()
    rows = posterior.tangent.record(x).rows()[:, 0].double()  # (B, P)
    sizes, parts, start = [block.size for block in posterior.tangent.blocks], torch.zeros(len(x)).double(), 0
    for size in sizes:
        part = slice(start, start + size)
        parts += torch.einsum("bp,pq,bq->b", rows[:, part], dense[part, part], rows[:, part])
        start += size
    found: dict[str, Any] = {"variance, blocks": float(parts.mean()) / noise}
    for name, way in {**task.ways(2, True)}.items():
        if name == "sampling":
            continue
        latent = posterior.latent(x, via=way)
        found[f"variance, {name}"] = float(latent.variance.mean()) / noise
        factors = {
            "one": 1.0,
            "validation": lw.scale_factor(posterior, task.val, way).factor,
            "evidence": lw.scale_factor(posterior, task.loader, way, by="evidence").factor,
        }
        for kind, factor in factors.items():
            nlpd = float(points_of(posterior, latent.scaled(factor), y)[0].mean())
            found[f"{name}, {kind}"] = {"factor": float(f"{factor:.4g}"), "nlpd": float(f"{nlpd:.5g}")}
    return found


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns variances in units of σ², and factors and NLPD of streamlined prediction by two ways."""
    rows = {}
    for name, found in results["table"].items():
        la = found["LA"]
        variances = [f"{la[f'variance, {kind}']['mean']:.3g}" for kind in ("GLM", "blocks", "streamlined")]
        parts = [la[f"streamlined, {kind}"] for kind in ("one", "validation", "evidence")]
        cells = [shown(part["nlpd"], 2) for part in parts]
        rows[name] = [*variances, f"{parts[2]['factor']['mean']:.2g}", *cells]
    columns = ["variance, GLM", "layers' own blocks", "streamlined", "factor by the evidence"]
    return {"scale": grid([*columns, "NLPD without", "by validation", "by the evidence"], rows)}
