"""A line and a curve with their bands: what a posterior is, for the pictures of docs/posterior.md.

*line* fits a straight line to twelve points, and *curve* a small network to eighty points with a gap. *prior* fits the
same network at the chosen prior precision, at a smaller and at a larger one. *classes* fits a classifier of two classes
that overlap on the left, with a gap on the right. All have one input. The results are the drawn curves.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from papers.common import drawing
from papers.common.training import train

DRAWS = 12
FACTORS = {"δ / 100": 0.01, "δ as chosen": 1.0, "100 δ": 100.0}


def rounded(values: Tensor) -> list[float]:
    """Returns values as a list, with the digits that a picture can show."""
    return [round(float(value), 4) for value in values.detach().flatten()]


def trained(model: nn.Module, x: Tensor, y: Tensor, loss: Any, steps: int = 1000) -> nn.Module:
    """Trains a network by Adam on all rows at once."""
    return train(model, (x, y), repeat(slice(None), steps), torch.optim.Adam(model.parameters(), 1e-2), loss)


def network(outputs: int = 1) -> nn.Module:
    """Returns an untrained network of one input."""
    return nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, outputs))


def with_gap() -> tuple[Tensor, Tensor]:
    """Returns eighty points on a sine, with none between -1 and 1."""
    x = torch.cat([torch.linspace(-3, -1, 40), torch.linspace(1, 3, 40)])[:, None]
    return x, torch.sin(2 * x) + 0.25 * torch.randn(80, 1)


def bands(posterior: Any, x: Tensor, y: Tensor, grid: Tensor, draws: int = DRAWS) -> dict[str, Any]:
    """Returns the data, and over a grid the mean, the standard deviations without and with noise, and draws."""
    prediction = posterior.predict(grid)
    drawn = posterior.latent(grid, joint=True).sample(draws, torch.Generator().manual_seed(0)) if draws else ()
    return {
        "x": rounded(x), "y": rounded(y), "grid": rounded(grid), "mean": rounded(prediction.mean),
        "of weights": rounded(prediction.epistemic_variance.sqrt()), "with noise": rounded(prediction.std),
        "draws": [rounded(draw) for draw in drawn],
    }  # fmt: skip


def line() -> dict[str, Any]:
    x = torch.linspace(-1.5, 1.5, 12)[:, None]
    y = 0.4 + 0.8 * x + 0.4 * torch.randn(12, 1)
    model = trained(nn.Linear(1, 1), x, y, nn.functional.mse_loss)
    return bands(lw.fit(model, (x, y), lw.Full(), progress=False), x, y, torch.linspace(-4, 4, 41)[:, None])


def curve() -> dict[str, Any]:
    x, y = with_gap()
    model = trained(network(), x, y, nn.functional.mse_loss)
    return bands(lw.fit(model, (x, y), progress=False), x, y, torch.linspace(-4, 4, 121)[:, None])


def prior() -> dict[str, Any]:
    x, y = with_gap()
    posterior = lw.fit(trained(network(), x, y, nn.functional.mse_loss), (x, y), progress=False)
    chosen, grid = float(posterior.prior_precision), torch.linspace(-4, 4, 121)[:, None]
    return {name: bands(posterior.with_prior(chosen * factor), x, y, grid, 0) for name, factor in FACTORS.items()}


def classes() -> dict[str, Any]:
    x = torch.cat([torch.linspace(-4, -1, 100), torch.linspace(2, 4, 50)])[:, None]
    y = ((x < 0) & (torch.rand(150, 1) < torch.sigmoid(4 * (x + 2.5)))).long().flatten()
    model = trained(network(2), x, y, nn.functional.cross_entropy, 300)
    prediction = lw.fit(model, (x, y), lw.Full(), progress=False).predict(grid := torch.linspace(-5, 5, 121)[:, None])
    return {
        "x": rounded(x), "y": [int(label) for label in y], "grid": rounded(grid),
        "network": rounded(model(grid).softmax(1)[:, 1]), "probability": rounded(prediction.probs[:, 1]),
        "entropy": rounded(prediction.entropy()), "mutual information": rounded(prediction.mutual_information()),
    }  # fmt: skip


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the fits of the pictures."""
    return {"line": line, "curve": curve, "prior": prior, "classes": classes}


def show(axis: Any, found: dict[str, Any], title: str) -> None:
    """Draws data, the mean, the bands of ± 2 standard deviations, and the draws."""
    grid, mean = torch.tensor(found["grid"]), torch.tensor(found["mean"])
    for name, alpha in (("with noise", 0.15), ("of weights", 0.35)):
        std = torch.tensor(found[name])
        axis.fill_between(grid, mean - 2 * std, mean + 2 * std, color="C0", alpha=alpha, lw=0, label=f"± 2 std {name}")
    for number, draw in enumerate(found["draws"]):
        axis.plot(grid, draw, color="C1", lw=0.6, label="draws of the posterior" if not number else None)
    axis.plot(grid, mean, color="C0", label="trained")
    axis.plot(found["x"], found["y"], "k.", ms=4, label="data")
    axis.set_ylim(-4.5, 4.5)
    axis.set_title(title, fontsize=10)


def draw(results: dict[str, Any]) -> None:
    """Draws a line and a curve; three prior precisions; and two classes."""
    figure, axes = drawing.panels(1, 2, (9, 3.4))
    show(axes[0, 0], results["line"], "a line: two weights")
    show(axes[0, 1], results["curve"], "a network: 91 weights")
    drawing.legend_below(figure, 5)
    drawing.save(figure, __file__, "line")

    figure, axes = drawing.panels(1, 3, (9, 2.9))
    for axis, (name, found) in zip(axes[0], results["prior"].items(), strict=True):
        show(axis, found, name)
    drawing.legend_below(figure, 4)
    drawing.save(figure, __file__, "line_prior")

    figure, axes = drawing.panels(1, 2, (9, 3.2))
    found = results["classes"]
    axes[0, 0].plot(found["x"], found["y"], "k|", ms=9, label="data")
    axes[0, 0].plot(found["grid"], found["network"], "C7--", label="network")
    axes[0, 0].plot(found["grid"], found["probability"], "C0", label="posterior")
    axes[0, 0].set_title("probability of the second class", fontsize=10)
    axes[0, 1].plot(found["grid"], found["entropy"], "C0", label="entropy")
    axes[0, 1].plot(found["grid"], found["mutual information"], "C1", label="mutual information")
    axes[0, 1].set_title("two scores, in nats", fontsize=10)
    for axis in axes[0]:
        axis.set_xlabel("input")
        axis.legend(fontsize=8, frameon=False)
    drawing.save(figure, __file__, "line_classes")
