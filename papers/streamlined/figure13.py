"""Figure 13 and the MFVI columns of Table 1: draws on the regression tables, by LA and by MFVI trained with IVON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import lapwing as lw
from lapwing.covariance import LatentDraws
from papers.common.networks import mlp
from papers.common.results import Rows, once
from papers.common.tables import grid, shown
from papers.common.training import drawn, half_square, seeded, train
from papers.streamlined.ivon import IVON
from papers.streamlined.table1 import NETWORKS, PUBLISHED, RegressionTask, points_of

COUNTS = (10, 100, 1000, 5000)
"""Numbers of draws; the paper has 100 to 50 000 and reports 1 000."""

FAST = {"names": ("SERVO", "LD", "AM", "REV", "CCS"), "folds": (0,)}
"""Arguments of a run for `python -m papers verify`."""


def run(names: Sequence[str] = tuple(NETWORKS), folds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns the NLPD by the number of draws, and the scores of MFVI; "seed" is the fold that is tested."""
    rows = Rows(__file__, {})
    for name in names:
        for fold in folds:
            task = once(lambda name=name, fold=fold: RegressionTask.load(name, fold))  # type: ignore[misc]
            variational = once(lambda name=name, fold=fold, task=task: ivon(task(), name, fold))  # type: ignore[misc]
            run = f"{name}, seed {fold}"
            rows.add(run, "LA, draws", lambda task: over_draws(task().posterior(), task()), task)
            rows.add(run, "MFVI, draws", lambda task, q: over_draws(q(), task()), task, variational)
            rows.add(run, "MFVI", lambda task, q: scores(q(), task()), task, variational)
    return rows.all()


def ivon(task: RegressionTask, name: str, fold: int, steps: int = 4000) -> lw.Posterior:
    """Trains another network of the same start by IVON. The noise variance is the validation residual of the first."""
    x, y = task.data.train
    a, b = task.data.val
    with torch.no_grad():
        noise = float((task.model(a) - b).square().mean())
    with seeded(fold):
        model = mlp(x.shape[1], *NETWORKS[name][1], 1, activation=nn.ReLU)
    optimiser = IVON(model.parameters(), ess=len(x) / noise, rate=0.1, hessian=1.0, betas=(0.9, 0.999), seed=fold)
    rows = drawn(len(x), 32, steps, fold)
    train(model, (x, y), rows, optimiser, half_square, lambda i: 1 - i / steps)
    return lw.MeanField.from_optimizer(model, optimiser, task.loader, likelihood=lw.Gaussian(noise), progress=False)


def over_draws(
    posterior: lw.Posterior, task: RegressionTask, counts: Sequence[int] = COUNTS, repeats: int = 5
) -> dict[str, float]:
    """Returns number of draws -> NLPD of the test rows, the mean over at most `repeats` disjoint groups of draws."""
    x, y = task.data.test
    latent = posterior.latent(x, via=lw.MonteCarlo(max(counts)))
    assert isinstance(latent, LatentDraws)
    found = {}
    for count in counts:
        groups = latent.draws.split(count)[:repeats]
        nlpds = [float(points_of(posterior, LatentDraws(group), y)[0].mean()) for group in groups]
        found[str(count)] = sum(nlpds) / len(nlpds)
    return found


def scores(posterior: lw.Posterior, task: RegressionTask) -> dict[str, Any]:
    """Returns way -> NLPD and RMSE of the test rows, NLPD with the factor of the validation rows, and that factor."""
    x, y = task.data.test
    found = {}
    for name, way in (("sampling", lw.MonteCarlo(1000)), ("streamlined", lw.Streamlined(covariance="full"))):
        factor = lw.scale_factor(posterior, task.val, way).factor
        latent = posterior.latent(x, via=way)
        nlpd, squares = points_of(posterior, latent, y)
        scaled, _ = points_of(posterior, latent.scaled(factor), y)
        found[name] = {
            "nlpd": float(nlpd.mean()), "rmse": float(squares.mean().sqrt()), "scaled nlpd": float(scaled.mean()),
            "factor": factor,
        }  # fmt: skip
    return found


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the NLPD by the number of draws, and the columns of MFVI next to the paper's."""
    draws, mean_field = {}, {}
    for name in NETWORKS:
        found = results["table"][name]
        draws[name] = [shown(found[f"{kind}, draws"][str(count)], 3) for kind in ("LA", "MFVI") for count in COUNTS]
        paper = ", ".join(f"{number:.2f}" for number, _ in PUBLISHED["nlpd"][name][:2])
        ways = (found["MFVI"]["sampling"], found["MFVI"]["streamlined"])
        mean_field[name] = [paper, *(shown(way[key], 2) for way in ways for key in ("nlpd", "scaled nlpd", "rmse"))]
    fields = [f"{way}{part}" for way in ("sampling", "streamlined") for part in ("", " x factor", ", RMSE")]
    return {
        "draws": grid([f"{kind}, {count} draws" for kind in ("LA", "MFVI") for count in COUNTS], draws),
        "mean field": grid(["paper: sampling, streamlined x factor", *fields], mean_field),
    }
