"""Figures 4 (a) and 8: corruptions by kind, and error against confidence, with the network at one temperature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from papers.common import drawing
from papers.common.cifar import LastLayer, normalised, pixels
from papers.common.corruptions import COMMON, corrupt
from papers.common.data import images as read_images
from papers.common.results import Rows, once
from papers.common.scores import class_scores
from papers.common.tables import grid, shown
from papers.common.training import kept_tensors
from papers.ella.table1 import fitted, tempered

Predict = Callable[[Tensor], Tensor]
"""Features (n, 64) to class probabilities, by the default link."""


def run(severities: Sequence[int] = (1, 3, 5), images: int = 500) -> dict[str, Any]:
    """Returns scores by kind of corruption, and errors against confidence, of the network and the last layer.

    Args:
        severities: strengths of the corruptions.
        images: test images of each kind and severity, the same for all kinds.
    """
    rows = Rows(__file__, {"images of each kind": images})
    setup = once(lambda: LastLayer.load(0))
    methods = once(lambda: last_layer_methods(setup()))
    for severity in severities:
        part = once(partial(corrupted_features, setup, severity, images))
        for name in LAST_LAYER:
            rows.add(f"severity {severity}", name, partial(_scored, methods, name, part, images))
    for name in LAST_LAYER:
        rows.add("confidence", name, lambda n: error_against_confidence(methods()[n], setup()), name)
    return rows.all()


LAST_LAYER = (
    "network", "network, one temperature", "last layer, KFAC, validation", "last layer, KFAC, early stopping",
    "recommended call",
)  # fmt: skip


def last_layer_methods(setup: LastLayer) -> dict[str, Predict]:
    """Returns the methods of `LAST_LAYER`, tuned on the 2 000 validation images; of features."""
    prior_alone = lw.Validation(setup.val, tempered=False, tolerance=0.0)
    posteriors = {
        "network, one temperature": tempered(setup, 2000),
        "last layer, KFAC, validation": fitted(setup, lw.KFAC(), tune=prior_alone),
        "last layer, KFAC, early stopping": fitted(setup, lw.KFAC(), tune=lw.EarlyStopping(setup.val)),
        "recommended call": fitted(setup, validation=setup.val),
    }

    def plain(part: Tensor) -> Tensor:
        with torch.no_grad():
            return setup.layer(part).softmax(-1)

    def of(posterior: lw.Posterior) -> Predict:
        return lambda part: posterior.predict(part).probs

    return {"network": plain, **{name: of(posterior) for name, posterior in posteriors.items()}}


def corrupted(severity: int, images: int) -> Tensor:
    """Returns the first reported images with each kind of corruption, one kind after the other."""
    raw = pixels(reported_images()[0][:images])
    return torch.cat([normalised(corrupt(raw, kind, severity)) for kind in COMMON])


@cache
def reported_images() -> tuple[Tensor, Tensor]:
    """Returns the reported test images and their labels; the first 2 000 of the test images validate."""
    data = read_images("cifar10")
    return data.x_test[2000:], data.y_test[2000:]


def corrupted_features(setup: Callable[[], LastLayer], severity: int, images: int) -> Tensor:
    """Returns the features of corrupted images."""
    make = lambda: {"features": setup().trunk(corrupted(severity, images))}  # noqa: E731
    return kept_tensors(f"resnet20_corrupted_features_{severity}_{images}", make)["features"]


def _scored(
    methods: Callable[[], dict[str, Predict]], name: str, part: Callable[[], Tensor], images: int
) -> dict[str, Any]:
    """Returns the scores of all corrupted images, and scores by kind."""
    labels = reported_images()[1][:images]
    probs = methods()[name](part())
    kinds = dict(zip(COMMON, probs.split(images), strict=True))
    by_kind = {kind: class_scores(one, labels) for kind, one in kinds.items()}
    return {**class_scores(probs, labels.repeat(len(COMMON))), "by kind": by_kind}


def error_against_confidence(predict: Predict, setup: LastLayer, count: int = 2000) -> dict[str, dict[str, float]]:
    """Returns the error of inputs predicted above each confidence (Figure 4 a).

    The inputs are test images and as many of Fashion-MNIST, whose predictions are errors.
    """
    x, y = (torch.cat(part)[:count] for part in zip(*setup.test, strict=True))
    foreign = kept_tensors("resnet20_foreign", lambda: {"features": setup.trunk(fashion_as_cifar(count))})["features"]
    probs, outside = (predict(part) for part in (x, foreign))
    confidence = torch.cat([probs.amax(-1), outside.amax(-1)])
    wrong = torch.cat([probs.argmax(-1) != y, torch.ones(count, dtype=torch.bool)])
    found = {}
    for i in range(10):
        above = confidence >= i / 10
        if above.any():
            error, kept = (float(part.double().mean()) for part in (wrong[above], above))
            found[f"above {i / 10:g}"] = {"error": error, "kept": kept}
    return found


def fashion_as_cifar(count: int) -> Tensor:
    """Returns Fashion-MNIST test images padded to 32 x 32, in three channels, normalised as the ResNet-20 expects."""
    x = read_images("fashion_mnist").x_test[:count]
    return normalised(nn.functional.pad(x, (2, 2, 2, 2)).expand(-1, 3, -1, -1))


def draw(results: Mapping[str, Any]) -> None:
    """Draws boxes over the kinds of corruption, by severity, and errors over the confidence."""
    figure, ((*axes,),) = drawing.panels(1, 3, (15, 4.2))
    severities = [run for run in results["runs"] if run.startswith("severity")]
    for measure, axis in zip(("nll", "ece"), axes, strict=False):
        for i, name in enumerate(LAST_LAYER):
            values = [[kind[measure] for kind in results["runs"][run][name]["by kind"].values()] for run in severities]
            places = [j * (len(LAST_LAYER) + 1) + i for j in range(len(severities))]
            boxes = axis.boxplot(values, positions=places, widths=0.8, patch_artist=True, showfliers=False)
            for box, median in zip(boxes["boxes"], boxes["medians"], strict=True):
                box.set_facecolor(f"C{i}")
                median.set_color("black")
            axis.plot([], [], "s", color=f"C{i}", label=name)
        middles = [j * (len(LAST_LAYER) + 1) + (len(LAST_LAYER) - 1) / 2 for j in range(len(severities))]
        axis.set_xticks(middles, [run.removeprefix("severity ") for run in severities])
        axis.set(xlabel="severity (boxes over 19 kinds)", ylabel={"nll": "NLL (nats)", "ece": "ECE"}[measure])
    for i, name in enumerate(LAST_LAYER):
        rows = results["runs"]["confidence"][name]
        points = [(float(key.removeprefix("above ")), row["error"]) for key, row in rows.items()]
        axes[2].plot(*zip(*points, strict=True), ".-", color=f"C{i}")
    axes[2].set(xlabel="confidence above", ylabel="error, half of the inputs Fashion-MNIST", ylim=(0, None))
    drawing.legend_below(figure, len(LAST_LAYER))
    drawing.save(figure, __file__)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns scores on corrupted images by severity, and errors at high confidence."""
    table, rows = results["table"], {}
    runs = [run for run in table if run.startswith("severity")]
    for method in LAST_LAYER:
        cells = [f"{shown(table[run][method]['nll'], 2)} / {shown(table[run][method]['ece'], 2)}" for run in runs]
        rows[method] = [*cells, shown(table["confidence"][method]["above 0.9"]["error"], 2)]
    return {"last layer": grid([*(f"NLL / ECE at {run}" for run in runs), "error above confidence .9"], rows)}
