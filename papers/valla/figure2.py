"""Figure 2: what early stopping of δ does in the gaps of the toy; a fifth of the points held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lapwing as lw
from lapwing.tuning import Tuning
from papers.common import drawing
from papers.common.results import Rows
from papers.common.tables import grid, shown
from papers.common.training import ONE_NOISE
from papers.valla.figure1 import GAPS, GRID, STEPS, Toy, bands, curve

FAST = {"seeds": (0,)}
"""Arguments of a run for `python -m papers verify`."""


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns standard deviations of the fits that stop, and of those that do not."""
    rows = Rows(__file__, {"grid": GRID[:, 0].tolist(), "gaps": GAPS})
    for seed in seeds:
        rows.add(f"seed {seed}", "fits", lambda seed: stopped_rows(Toy(seed, 0.2), seed), seed)
    return rows.all()


POINTS, LONGEST = 20, 1500
"""M, and most full batches; the paper has 20 000."""


def stopped_rows(task: Toy, seed: int) -> dict[str, Any]:
    """Fits Z, A, δ and σ² by the α-divergence from δ = 1, with and without stopping by held-out points (Figure 2).

    Returns:
        fit -> scores against full LLA of the same training points, δ, σ², NLL of the held-out points, steps taken; the
        variational bound, with δ and σ² of its maximum or of validation, beside the α-divergence.
    """
    val = [task.val]

    def alpha(start: float | None = 1.0, **options: Any) -> lw.VaLLA:
        return lw.VaLLA(POINTS, lw.AlphaDivergence(steps=LONGEST, initial_prior_precision=start, **options))

    stop: dict[str, Any] = {"validation": val, "every": 100, "patience": 1}
    fits: dict[str, tuple[lw.Method, Tuning | None]] = {
        "stopped": (alpha(**stop), None),
        "stopped, lapwing's start": (alpha(None, **stop), None),
        "not stopped": (alpha(), None),
        "bound, its own prior": (lw.VaLLA(POINTS, lw.VariationalBound(STEPS, 0.02)), lw.Evidence()),
        "bound, validated prior": (lw.VaLLA(POINTS, lw.VariationalBound(STEPS, 0.02)), lw.Validation(val)),
    }
    found: dict[str, Any] = {"LLA": {"validation nll": _loss(task.exact, task), **task.own_row()}}
    for name, (method, tune) in fits.items():
        posterior = lw.fit(task.model, [task.train], method, likelihood=ONE_NOISE, tune=tune, seed=seed)
        found[name] = {
            **task.score(posterior), "prior_precision": posterior.prior_precision, "curve of std": curve(posterior),
            "noise_variance": posterior.noise_variance, "validation nll": _loss(posterior, task),
            "steps": len(posterior.history.get("objective", ())),
        }  # fmt: skip
    return found


def _loss(posterior: lw.Posterior, task: Toy) -> float:
    x, y = task.val
    return -float(posterior.predict(x).log_prob(y).mean())


def draw(results: Mapping[str, Any]) -> None:
    """Draws two standard deviations of f, full LLA's dotted."""
    fits = results["runs"]["seed 0"]["fits"]
    own = fits["LLA"]
    names = [name for name in fits if name != "LLA"]
    figure, ((*axes,),) = drawing.panels(1, len(names), (3.5 * len(names), 3), sharey=True)
    for axis, name in zip(axes, names, strict=True):
        bands(axis, results["grid"], own, fits[name]["curve of std"])
        axis.plot(own["curve of validation x"], own["curve of validation y"], ".", color="#ff7f0e", markersize=3)
        axis.set(ylim=(-3, 3), xlabel="x", title=f"{name}, seed 0\nδ = {fits[name]['prior_precision']:.3g}")
    axes[0].set_ylabel("y")
    drawing.save(figure, __file__)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the standard deviation in the gaps relative to LLA's, δ and σ² of each fit."""
    rows = {}
    for name, fit in results["table"][""]["fits"].items():
        by_seed = (run["fits"][name]["prior_precision"] for run in results["runs"].values())
        cells = [shown(fit.get("ratio, gaps"), 2), ", ".join(f"{value:.3g}" for value in by_seed)]
        rows[name] = [*cells, shown(fit["noise_variance"], 4), shown(fit["validation nll"])]
    return {"fits": grid(["ratio in the gaps", "δ by seed", "σ²", "validation NLL"], rows)}
