"""Figures 5 and 10 by the numbers of appendix B.3: Adam, a rate of 5e-3, and a stop at a rise of .01."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from lapwing.evaluation.sensitivity import Sensitivities
from lapwing.prediction import Way
from papers.common.results import Rows, once
from papers.common.tables import grid, shown
from papers.streamlined.figure5 import DigitTask, agreement, draw_maps, stretched, summary

START, RATE = 1e-5, 5e-3
"""Variances at the start, and the rate of Adam."""

RISE = 0.01
"""Of the NLPD; section 4.3 has .1, as `figure5`."""

STEPS = 4000
"""Most steps. The paper names about 700."""

WAY, IMAGES = lw.Streamlined(), 30
"""As in `figure5` for Figure 10. A step by hidden covariances takes thirty times as long: `figure10_full` has it."""

CERTAIN = 1e12
"""Prior precision whose posterior is the network alone."""


def run(seeds: Sequence[int] = range(3)) -> dict[str, Any]:
    """Returns what the maps say in numbers, of three networks, and the maps of the first seed."""
    rows = Rows(__file__, {"rise": RISE, "most steps": STEPS})
    for seed in seeds:
        task = once(lambda seed=seed: DigitTask.load(seed))  # type: ignore[misc]
        rows.add(f"seed {seed}", "log variance", both, task, seed == seeds[0])
    return rows.all()


def both(
    task: Callable[[], DigitTask], drawn: bool, images: int = IMAGES, ways: tuple[Way, Way] = (WAY, WAY)
) -> dict[str, Any]:
    """Returns what the maps of the network and of the posterior say, and the first six maps if they are drawn.

    Args:
        task: network and images.
        drawn: whether the maps are drawn.
        images: number of images.
        ways: through the network alone, and through the posterior.
    """
    posterior = task().candidates["last layer"]
    assert isinstance(posterior, lw.Posterior)
    candidates = {"MAP": posterior.with_prior(CERTAIN), "last layer": posterior}
    found = {
        name: by_adam(one, task().x[:images], task().y[:images], way)
        for (name, one), way in zip(candidates.items(), ways, strict=True)
    }
    rows: dict[str, Any] = {}
    for name, of_one in found.items():
        rows[name] = {**summary(task(), of_one), "agreement with MAP": agreement(found["MAP"].values, of_one.values)}
        if drawn:
            kept = {"curve of maps": stretched(of_one.values[:6]), "curve of images": of_one.inputs[:6]}
            rows[name] |= {key: [[round(v, 3) for v in x] for x in part.tolist()] for key, part in kept.items()}
    return rows


def by_adam(posterior: lw.Posterior, x: Tensor, y: Tensor, way: Way, steps: int = STEPS) -> Sensitivities:
    """Learns the noise that inputs tolerate by equation 11: `NLPD(y | N(x, diag v)) - H(N(x, diag v))`.

    Adam steps on log v; the paper does not say on what.

    Args:
        posterior: of the weights.
        x: inputs (B, n); each sample stops at the last step before its NLPD has changed by more than `RISE`.
        y: classes (B,).
        way: through the network.
        steps: most steps.
    """
    log_v = torch.full_like(x, math.log(START)).requires_grad_()
    optimiser = torch.optim.Adam([log_v], RATE)
    with torch.no_grad():
        first = nlpd = -posterior.predict(lw.Uncertain(x, START), way).log_prob(y)
    variance, active, taken = torch.full_like(x, START), torch.ones(len(x), dtype=torch.bool), torch.zeros(len(x))
    for _ in range(steps):
        tried = log_v.exp()
        loss = -posterior.predict(lw.Uncertain(x, tried), way).log_prob(y)
        active = active & ((loss.detach() - first).abs() <= RISE)
        variance = torch.where(active[:, None], tried.detach(), variance)
        nlpd, taken = torch.where(active, loss.detach(), nlpd), taken + active
        if not active.any():
            break
        optimiser.zero_grad()
        (loss.sum() - tried.log().sum() / 2).backward()
        optimiser.step()
    values = (variance.amin(1, keepdim=True) / variance).sqrt()
    return Sensitivities(values, variance, x, ~active, taken.long(), {"nlpd": torch.stack([first, nlpd])})


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns what the maps say, with means of the networks."""
    columns = {
        "steps": ("steps", 0), "stopped": ("stopped", 2), "median σ": ("std", 2),
        "smallest / largest": ("smallest", 5), "strong pixels, far from ink": ("strong, far", 4),
        "agreement with MAP": ("agreement with MAP", 3),
    }  # fmt: skip
    found = results["table"][""]["log variance"]
    rows = {name: [shown(row[key], digits) for key, digits in columns.values()] for name, row in found.items()}
    return {"maps": grid(list(columns), rows)}


def draw(results: Mapping[str, Any]) -> None:
    """Draws maps of the first seed, stretched, from one half on."""
    found = results["runs"]["seed 0"]["log variance"]
    rows = {f"{name}, equation 11": row for name, row in found.items()}
    maps = {name: torch.tensor(row["curve of maps"]) for name, row in rows.items()}
    draw_maps(maps, torch.tensor(rows["MAP, equation 11"]["curve of images"]), __file__)
