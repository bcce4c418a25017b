"""Figure 8: the MNIST network on rotated test images, with the factors of upright ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import lapwing as lw
from lapwing.evaluation import metrics
from lapwing.prediction import Way
from papers.common import drawing
from papers.common.results import Rows, once
from papers.common.rotations import rotate
from papers.common.scores import class_scores, probabilities
from papers.common.tables import grid, shown
from papers.streamlined.table2 import MLPTask

ANGLES = tuple(range(0, 181, 10))


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns accuracy and NLPD by angle, for every posterior and way."""
    return Rows(__file__, {"angles": ANGLES, "images": 500}).filled(_add, seeds)


def _add(rows: Rows, seed: int) -> None:
    run, task = f"seed {seed}", once(lambda: MLPTask.load("mnist", seed))
    laplace = once(lambda: task().laplace(lw.KFAC(), lw.Evidence()))
    tempered = once(lambda: lw.fit(task().model, task().data.val, lw.TemperatureScaling()))
    rows.add(run, "network", lambda: rotations(task(), None, lw.Linearized()))
    rows.add(run, "one temperature", lambda: rotations(task(), tempered(), lw.Linearized(), factor=1.0))
    for name in ("streamlined", "GLM", "sampling"):
        rows.add(run, f"LA {name}", lambda name: rotations(task(), laplace(), task().ways(name)[name]), name)
        rows.add(run, f"MFVI {name}", lambda name: rotations(task(), task().variational, task().ways(name)[name]), name)


def rotations(
    task: MLPTask, posterior: lw.Posterior | None, way: Way, shown: int = 500, factor: float | None = None
) -> dict[str, list[float]]:
    """Returns accuracy and NLPD of rotated test images by angle.

    Args:
        task: network and images.
        posterior: None for the network alone.
        way: through it.
        shown: number of test images, the first ones.
        factor: of the covariance; None means the factor of the validation images.
    """
    x, y = task.tested[0][:shown], task.tested[1][:shown]
    turned = torch.cat([rotate(x, angle) for angle in ANGLES])  # draws of the weights are shared
    if posterior is None:
        with torch.no_grad():
            probs = task.model(turned).softmax(-1)
    else:
        scale = lw.scale_factor(posterior, task.data.val, way).factor if factor is None else factor
        probs = probabilities(posterior, task.latent(posterior, turned, way).scaled(scale))
    parts = probs.split(len(x))
    return {
        "accuracy": [float(f"{metrics.accuracy(part, y):.4g}") for part in parts],
        "nlpd": [float(f"{class_scores(part, y)['nll']:.4g}") for part in parts],
    }


STYLES = {"streamlined": "-", "GLM": "--", "sampling": ":"}
COLOURS = {"network": "#555555", "one temperature": "#e377c2", "LA": "#1f77b4", "MFVI": "#d62728"}


def draw(results: Mapping[str, Any]) -> None:
    """Draws NLPD and accuracy over the angle, means of the seeds."""
    runs = list(results["runs"].values())
    figure, ((*axes,),) = drawing.panels(1, 2, (9, 3.2))
    for axis, measure in zip(axes, ("nlpd", "accuracy"), strict=True):
        for name in runs[0]:
            posterior, _, way = name.partition(" ")
            colour = COLOURS.get(name) or COLOURS[posterior]
            curves = [run[name][measure] for run in runs if name in run]
            mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
            axis.plot(results["angles"], mean, STYLES.get(way, "-"), color=colour, label=name)
        axis.set_xlabel("rotation in degrees")
        axis.set_ylabel({"nlpd": "NLPD"}.get(measure, measure))
    axes[0].legend(fontsize=7, frameon=False)
    drawing.save(figure, __file__)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the NLPD at four angles."""
    shown_angles = {str(ANGLES.index(angle)): f"{angle}°" for angle in (0, 30, 90, 180)}
    rows = {name: [shown(found["nlpd"][at], 2) for at in shown_angles] for name, found in results["table"][""].items()}
    return {"nlpd": grid(list(shown_angles.values()), rows)}
