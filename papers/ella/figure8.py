"""Figures 4 (a) and 8: corruptions by kind, and error against confidence, with the network at one temperature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.covariance import Latent
from lapwing.covariance.terms import DenseTerm
from papers.common import drawing
from papers.common.cifar import LastLayer, normalised, pixels
from papers.common.corruptions import COMMON, corrupt
from papers.common.data import images as read_images
from papers.common.results import Rows, once
from papers.common.scores import class_scores
from papers.common.tables import grid, shown
from papers.common.training import kept_tensors
from papers.ella.shared import contracted, ella_latent
from papers.ella.table1 import COUNTS, OneSpan, Whole, fitted, tempered

Predict = Callable[[Mapping[str, Tensor]], Tensor]
"""What a method needs of images, to class probabilities by the default link."""


def run(severities: Sequence[int] = (1, 3, 5), images: int = 500, few: int = 10) -> dict[str, Any]:
    """Returns scores by kind of corruption, and errors against confidence.

    Args:
        severities: strengths of the corruptions.
        images: test images of each kind and severity, the same for all kinds, for the network and the last layer.
        few: the first of them, for all methods: a prediction by all weights costs 25 to 45 forward passes.
    """
    rows = Rows(__file__, {"images of each kind": images, "of each kind, for all methods": few})
    setup = once(lambda: LastLayer.load(0))
    cheap = once(lambda: last_layer_methods(setup()))
    for severity in severities:
        part = once(partial(corrupted_features, setup, severity, images))
        for name in LAST_LAYER:
            rows.add(f"severity {severity}", name, partial(_scored, cheap, name, part, images))
    for name in LAST_LAYER:
        rows.add("confidence", name, lambda n: error_against_confidence(cheap()[n], setup()), name)
    whole = once(lambda: Whole((0, 1, 2), 500, 1000))
    costly = once(lambda: whole_methods(whole()))
    for severity in severities:
        run = f"severity {severity}, all methods"
        part = once(partial(corrupted_features, setup, severity, few))
        for name in LAST_LAYER:
            rows.add(run, name, partial(_scored, cheap, name, part, few))
        spanned = once(partial(_on_span, whole, severity, few))
        rows.add(run, ELLA, partial(_scored, costly, ELLA, spanned, few))
    for severity in severities:
        every = once(partial(_on_all_weights, whole, severity, few))
        for name in ALL_WEIGHTS:
            rows.add(f"severity {severity}, all methods", name, partial(_scored, costly, name, every, few))
    return rows.all()


LAST_LAYER = (
    "network", "network, one temperature", "last layer, KFAC, validation", "last layer, KFAC, early stopping",
    "recommended call",
)  # fmt: skip
ELLA = "ELLA, n and prior validated"
ALL_WEIGHTS = ("diagonal, validation", "KFAC, validation")


def last_layer_methods(setup: LastLayer) -> dict[str, Predict]:
    """Returns the methods of `LAST_LAYER`, tuned on the 2 000 validation images; they read "features"."""
    prior_alone = lw.Validation(setup.val, tempered=False, tolerance=0.0)
    posteriors = {
        "network, one temperature": tempered(setup, 2000),
        "last layer, KFAC, validation": fitted(setup, lw.KFAC(), tune=prior_alone),
        "last layer, KFAC, early stopping": fitted(setup, lw.KFAC(), tune=lw.EarlyStopping(setup.val)),
        "recommended call": fitted(setup, validation=setup.val),
    }

    def plain(part: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return setup.layer(part["features"]).softmax(-1)

    def of(posterior: lw.Posterior) -> Predict:
        return lambda part: posterior.predict(part["features"]).probs

    return {"network": plain, **{name: of(posterior) for name, posterior in posteriors.items()}}


def whole_methods(whole: Whole) -> dict[str, Predict]:
    """Returns ELLA and the methods of `ALL_WEIGHTS`, tuned as in Table 1; ELLA has its first seed."""
    span = OneSpan.of(whole, 0, 1024)
    counts = [n for n in COUNTS if n <= 1024]
    _, delta, _, n = span.chosen(counts)
    curvature = span.curvatures[n][:20, :20]

    def ella(part: Mapping[str, Tensor]) -> Tensor:
        return lw.Categorical().predict(ella_latent(part, curvature, delta)).probs

    def of(name: str) -> Predict:
        return lambda part: lw.Categorical().predict(Latent(part["outputs"], (DenseTerm(part[name]),))).probs

    return {ELLA: ella, **{name: of(name) for name in ALL_WEIGHTS}}


def corrupted(severity: int, images: int) -> Tensor:
    """Returns the first reported images with each kind of corruption, one kind after the other."""
    raw = pixels(reported_images()[0][:images])
    return torch.cat([normalised(corrupt(raw, kind, severity)) for kind in COMMON])


@cache
def reported_images() -> tuple[Tensor, Tensor]:
    """Returns the reported test images and their labels; the first 2 000 of the test images validate."""
    data = read_images("cifar10")
    return data.x_test[2000:], data.y_test[2000:]


def corrupted_features(setup: Callable[[], LastLayer], severity: int, images: int) -> dict[str, Tensor]:
    """Returns the features of corrupted images."""
    make = lambda: {"features": setup().trunk(corrupted(severity, images))}  # noqa: E731
    return kept_tensors(f"resnet20_corrupted_features_{severity}_{images}", make)


def _on_span(whole: Callable[[], Whole], severity: int, images: int) -> dict[str, Tensor]:
    """Returns corrupted images on ELLA's directions."""
    make = lambda: contracted(whole().tangent, corrupted(severity, images), whole().directions)  # noqa: E731
    return kept_tensors(f"resnet20_span_{severity}_{images}", make)


def _on_all_weights(whole: Callable[[], Whole], severity: int, images: int) -> dict[str, Tensor]:
    """Returns the covariances of all posteriors for corrupted images."""
    make = lambda: whole().all_of(corrupted(severity, images))  # noqa: E731
    return kept_tensors(f"resnet20_all_{severity}_{images}", make)


def _scored(
    methods: Callable[[], dict[str, Predict]], name: str, part: Callable[[], Mapping[str, Tensor]], images: int
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
    probs, outside = (predict({"features": part}) for part in (x, foreign))
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
    severities = [run for run in results["runs"] if run.startswith("severity") and "all methods" not in run]
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
    table = results["table"]
    found = {}
    for name, suffix, methods in (
        ("last layer", "", LAST_LAYER),
        ("all methods", ", all methods", (*LAST_LAYER, ELLA, *ALL_WEIGHTS)),
    ):
        runs = [run for run in table if run.startswith("severity") and ("all" in run) == bool(suffix)]
        rows = {}
        for method in methods:
            made = [table[run][method] for run in runs if method in table[run]]
            rows[method] = [f"{shown(row['nll'], 2)} / {shown(row['ece'], 2)}" for row in made]
            if not suffix:
                rows[method].append(shown(table["confidence"][method]["above 0.9"]["error"], 2))
        columns = [f"NLL / ECE at {run.removesuffix(suffix)}" for run in runs]
        found[name] = grid([*columns, "error above confidence .9"][: len(columns) + (not suffix)], rows)
    return found
