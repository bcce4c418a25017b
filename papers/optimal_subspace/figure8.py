"""Figure 8 and equation 31: the NLL of subspaces on simulated data, at the estimated and at the true noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from papers.common import drawing
from papers.common.data import batched
from papers.common.networks import mlp
from papers.common.results import Rows
from papers.common.scores import averaged
from papers.common.tables import grid, shown
from papers.common.training import Recipe, seeded
from papers.optimal_subspace.comparison import COLOURS, Task, compare_subspaces

NOISE = 0.1
"""Standard deviation of the noise of y."""
RANKS = (1, 10, 30, 100, 200)
LONG = (10, 100, 300, 1000)
"""s of the low-rank methods, and of the subsets."""
LOW_RANK = ("low rank, GGN", "low rank, KFAC", "low rank, diagonal", "low rank, prior")
SUBSETS = ("subset, magnitude", "subset, diagonal")
FAST = {"seeds": (0,)}
"""Arguments of a run for `python -m papers verify`."""


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns the NLL of each method over s, and of full Laplace, at both noise levels."""
    rows = Rows(__file__, {"noise": NOISE})
    for seed in seeds:
        rows.add(f"seed {seed}", "nll", simulated, seed)
    return rows.all()


def truth(x: Tensor) -> Tensor:
    """Returns the regression function of appendix F."""
    return torch.sin(x / 4) * torch.cos(x / 2)


def data(seed: int, train: int = 50, test: int = 500) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns inputs on [-10, 10] and noisy targets, to train and to test."""
    generator = torch.Generator().manual_seed(seed)
    x = 20 * torch.rand(train + test, 1, generator=generator) - 10
    y = truth(x) + NOISE * torch.randn(x.shape, generator=generator)
    return (x[:train], y[:train]), (x[train:], y[train:])


def simulated(seed: int) -> dict[str, Any]:
    """Returns the NLL by noise level, method and s, at λ = 1; the network underfits, as in the paper."""
    fitted, held_out = data(seed)
    with seeded(seed):
        model = mlp(1, 32, 32, 1, activation=nn.ReLU)
    Recipe(nn.functional.mse_loss, 200, rate=3e-3, batch=0).train(model, fitted, seed)
    with torch.no_grad():
        squares = {name: (model(x) - y).double().square() for name, (x, y) in (("train", fitted), ("test", held_out))}
    estimate = float(squares["train"].mean())
    found: dict[str, Any] = {"estimated noise": math.sqrt(estimate), "test error": float(squares["test"].mean().sqrt())}
    for name, variance in (("estimated", estimate), ("true", NOISE**2)):
        task = Task(model, batched(*fitted, 100), len(fitted[0]), lw.Gaussian(variance))
        low = compare_subspaces(task, {"test": held_out}, RANKS, 1.0, seed, LOW_RANK)["test"]
        subsets = compare_subspaces(task, {"test": held_out}, LONG, 1.0, seed, SUBSETS, exact=False)["test"]
        methods = {**low, **subsets}
        found[name] = {
            way: ranks["nll"] if way == "full" else {str(rank): row["nll"] for rank, row in ranks.items()}
            for way, ranks in methods.items()
        }
        found[name]["MAP"] = gaussian_nll(squares["test"], variance)
        best = best_spread(squares["test"], variance)
        found[name]["best constant spread"] = {"variance": best, "nll": gaussian_nll(squares["test"], variance, best)}
    return found


def gaussian_nll(squares: Tensor, noise: float, spread: float = 0.0) -> float:
    """Returns the NLL of Gaussian predictions with squared errors `squares` and variance `noise + spread`."""
    variance = noise + spread
    return float(squares.mean() / (2 * variance) + math.log(2 * math.pi * variance) / 2)


def best_spread(squares: Tensor, noise: float) -> float:
    """Returns the constant epistemic variance of the lowest NLL, `max(0, MSE_test - σ²)` (equation 31)."""
    return max(0.0, float(squares.mean()) - noise)


def differences(results: Mapping[str, Any], noise: str) -> dict[str, Any]:
    """Returns the NLL minus that of full Laplace for the same seed: method -> s -> mean and standard error."""
    found = []
    for run in results["runs"].values():
        nll = run["nll"][noise]
        methods = {way: ranks for way, ranks in nll.items() if way in COLOURS and way != "full"}
        methods["network"] = {"0": nll["MAP"]}
        found.append({way: {s: value - nll["full"] for s, value in ranks.items()} for way, ranks in methods.items()})
    return averaged(found)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the differences to full Laplace at some s at both noise levels."""
    rows: dict[str, list[str]] = {}
    for noise in ("estimated", "true"):
        for way, ranks in differences(results, noise).items():
            counts = {"network": ["0"]}.get(way, ["10", "100", "1000" if way in SUBSETS else "200"])
            cells = [shown(ranks[s], 3) for s in counts]
            rows[way] = rows.get(way, []) + cells + [""] * (3 - len(cells))
    columns = [
        f"{noise} noise, s = {s}" for noise in ("estimated", "true") for s in ("10", "100", "200 (subsets: 1 000)")
    ]
    return {"difference": grid(columns, rows)}


def draw(results: Mapping[str, Any]) -> None:
    """Draws the differences to full Laplace over s at both noise levels, means and standard errors of the seeds."""
    figure, ((*axes,),) = drawing.panels(1, 2, (10, 4))
    for axis, noise in zip(axes, ("estimated", "true"), strict=True):
        for way, ranks in differences(results, noise).items():
            if way == "network":
                axis.axhline(ranks["0"]["mean"], color="#222222", linestyle="-.", label=way)
                continue
            style = "--" if way.startswith("subset") else "-"
            drawing.curve(axis, ranks, fmt=f".{style}", color=COLOURS[way], label=way)
        axis.axhline(0, color="#222222", linestyle=":", label="full")
        axis.set(xscale="log", xlabel="s", title=f"{noise} noise")
    axes[0].set_ylabel("NLL minus that of full Laplace (nats)")
    figure.suptitle(f"means and standard errors of {len(results['runs'])} seeds", fontsize=10)
    drawing.legend_below(figure, 5)
    drawing.save(figure, __file__)
