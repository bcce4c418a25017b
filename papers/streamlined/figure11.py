"""Figure 11: scores of sampling over the number of draws; the ViT on Fashion-MNIST."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import lapwing as lw
from lapwing.covariance import LatentDraws
from papers.common.data import Batches
from papers.common.results import Rows, once
from papers.common.scores import probabilities
from papers.common.tables import grid, shown
from papers.streamlined.setting import WAYS, Setting, labels, scores, treated

COUNTS = (2, 5, 10, 20, 50, 100, 200)
"""Numbers of draws."""


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns scores by the number of draws, and those of the other ways."""
    return Rows(__file__, {"tested": 1000}).filled(_add, seeds)


def _add(rows: Rows, seed: int) -> None:
    setting = once(lambda: Setting.load("fashion_mnist", seed, tested=1000))
    params = once(lambda: treated(setting().model)["attention"])
    laplace = once(lambda: setting().laplace(params(), lw.Validation(setting().val, tempered=False, tolerance=0.0)))
    variational = once(lambda: setting().variational(params()))
    for method, posterior in (("LA", laplace), ("MFVI", variational)):
        run = f"ViT, attention, {method}, seed {seed}"
        rows.add(run, "sampling", lambda p: over_draws(p(), setting().test, COUNTS, COUNTS[-1]), posterior)
        for label in ("GLM", "streamlined"):
            rows.add(run, label, lambda p, w: setting().row(p(), w), posterior, WAYS[label])


def over_draws(
    posterior: lw.Posterior, part: Batches, counts: Sequence[int], most: int, repeats: int = 5
) -> dict[str, dict[str, float]]:
    """Scores Monte Carlo with n draws, n growing (Figures 11 and 12), each over some disjoint groups of the same draws.

    Returns:
        n -> scores, means over groups, and the standard deviation of the NLPD between groups.
    """
    latent = posterior.latent(part, lw.MonteCarlo(most))
    assert isinstance(latent, LatentDraws)
    found = {}
    for count in counts:
        groups = latent.draws.split(count)[: min(repeats, most // count)]
        each = [scores(probabilities(posterior, LatentDraws(group)), labels(part)) for group in groups]
        nlpd = torch.tensor([one["nlpd"] for one in each])
        found[str(count)] = {key: sum(one[key] for one in each) / len(each) for key in each[0]} | {
            "nlpd between groups": float(nlpd.std()) if len(each) > 1 else 0.0, "groups": len(each),
        }  # fmt: skip
    return found


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the NLPD by the number of draws."""
    counts = ("50", "100", "200")
    rows = {
        name: [shown(found["sampling"].get(count, {}).get("nlpd")) for count in counts]
        for name, found in results["table"].items()
    }
    return {"draws": grid([f"{count} draws" for count in counts], rows)}
