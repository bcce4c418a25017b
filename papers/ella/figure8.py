"""Figures 4 (a) and 8: corruptions by kind, and error against confidence, with the network at one temperature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from lapwing.covariance import Latent
from lapwing.covariance.terms import DenseTerm
from papers.common import drawing
from papers.common.cifar import LastLayer, fashion_as_cifar, normalised, pixels
from papers.common.corruptions import COMMON, corrupt
from papers.common.data import images as read_images
from papers.common.data import joined
from papers.common.results import Rows, once
from papers.common.scores import averaged, class_scores
from papers.common.tables import grid, shown
from papers.common.training import kept_tensors
from papers.ella.shared import ella_latent
from papers.ella.table1 import OneSpan, Whole, best_prior, fitted, prior_latent, tempered

Predict = Callable[[Any], Tensor]
"""Features (n, 64), or contracted images, to class probabilities by the default link."""

LAST_LAYER = (
    "network", "network, one temperature", "last layer, prior alone", "last layer, KFAC, validation",
    "last layer, KFAC, early stopping", "recommended call",
)  # fmt: skip
ALL_WEIGHTS = ("diagonal", "KFAC")
SPANS = ("ELLA", "ELLA, prior alone")
"""Methods of all weights, `SPANS` on ELLA's directions.

All are tuned on the validation images: the prior precision, and for ELLA the number of its images.
"""

CONFIDENT = 500
"""Test images, and as many foreign ones, whose errors are counted by confidence."""


def run(
    severities: Sequence[int] = (1, 3, 5), images: int = 500, seeds: Sequence[int] = range(5), shown: int = 14_000
) -> dict[str, Any]:
    """Returns scores by kind of corruption, and errors against confidence, of the network and of posteriors.

    Args:
        severities: strengths of the corruptions.
        images: test images of each kind and severity, the same for all kinds.
        seeds: of ELLA's rows.
        shown: training images of the posteriors of all weights.
    """
    rows = Rows(__file__, {"images of each kind": images})
    setup = once(lambda: LastLayer.load(0))
    whole = once(lambda: Whole([(512, seed) for seed in seeds], shown, CONFIDENT))
    last = once(lambda: last_layer_methods(setup()))
    spans = [once(partial(ella_methods, whole, i)) for i in range(len(seeds))]

    def add(run: str, score: Callable[..., Any], features: Callable[[], Any], seen: Callable[[], Any]) -> None:
        def row(methods: Callable[[], dict[str, Predict]], name: str, part: Callable[[], Any]) -> Any:
            return score(methods()[name], part())

        for name in LAST_LAYER:
            rows.add(run, name, row, last, name, features)
        for name in ALL_WEIGHTS:
            rows.add(run, name, row, dense_methods, name, seen)
        for seed, span in zip(seeds, spans, strict=True):
            for name in SPANS:
                rows.add(f"{run}, seed {seed}", name, row, span, name, seen)

    for severity in severities:
        features = once(partial(corrupted_features, setup, severity, images))
        seen = once(lambda severity=severity: contracted_by(whole(), corrupted(severity, images)))  # type: ignore[misc]
        add(f"severity {severity}", partial(_scored, images), features, seen)
    features = once(lambda: clean_and_foreign(setup()))
    seen = once(lambda: (whole().test, contracted_by(whole(), fashion_as_cifar(CONFIDENT))))
    add("confidence", _confident, features, seen)
    rows.facts["gains of ELLA"] = gains(rows.all()["table"])
    return rows.all()


def gains(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns by severity and method how much lower ELLA's NLL is, mean and standard error over the kinds."""
    found = {}
    for run, rows in table.items():
        if run.startswith("severity"):
            by_kind = {name: [kind["nll"]["mean"] for kind in row["by kind"].values()] for name, row in rows.items()}
            found[run] = {
                name: averaged([a - b for a, b in zip(losses, by_kind["ELLA"], strict=True)])
                for name, losses in by_kind.items()
            }
    return found


def last_layer_methods(setup: LastLayer) -> dict[str, Predict]:
    """Returns the methods of `LAST_LAYER`, tuned on the 2 000 validation images; of features."""
    prior_alone, delta = lw.Validation(setup.val, tempered=False, tolerance=0.0), best_prior(setup)[1]
    posteriors = {
        "network, one temperature": tempered(setup, 2000),
        "last layer, KFAC, validation": fitted(setup, lw.KFAC(), tune=prior_alone),
        "last layer, KFAC, early stopping": fitted(setup, lw.KFAC(), tune=lw.EarlyStopping(setup.val)),
        "recommended call": fitted(setup, validation=setup.val),
    }

    def plain(part: Tensor) -> Tensor:
        with torch.no_grad():
            return setup.layer(part).softmax(-1)

    def prior(part: Tensor) -> Tensor:
        return lw.Categorical().predict(prior_latent(setup, part, delta)).probs

    def of(posterior: lw.Posterior) -> Predict:
        return lambda part: posterior.predict(part).probs

    found = {name: of(posterior) for name, posterior in posteriors.items()}
    return {"network": plain, "last layer, prior alone": prior, **found}


def ella_methods(whole: Callable[[], Whole], place: int) -> dict[str, Predict]:
    """Returns the methods of `SPANS`, of contracted images, on the span at a place in the order of seeds."""
    span, shown = OneSpan.of(whole, place), slice(place * Whole.rank, place * Whole.rank + 20)

    def ella(counts: Sequence[int]) -> Predict:
        _, delta, _, n = span.chosen(counts)
        curvature = span.curvatures[n][:20, :20]

        def predict(part: Mapping[str, Tensor]) -> Tensor:
            mine = {**part, "features": part["features"][..., shown]}
            return lw.Categorical().predict(ella_latent(mine, curvature, delta)).probs

        return predict

    return dict(zip(SPANS, (ella(span.counts), ella([0])), strict=True))


def dense_methods() -> dict[str, Predict]:
    """Returns the methods of `ALL_WEIGHTS`, of contracted images."""

    def predict(name: str, part: Mapping[str, Tensor]) -> Tensor:
        return lw.Categorical().predict(Latent(part["outputs"], (DenseTerm(part[f"{name}, validation"]),))).probs

    return {name: partial(predict, name) for name in ALL_WEIGHTS}


def corrupted(severity: int, images: int) -> Tensor:
    """Returns the first reported images with each kind of corruption, one kind after the other."""
    raw = pixels(reported_images()[0][:images]).cpu()
    return torch.cat([normalised(corrupt(raw, kind, severity)) for kind in COMMON])


@cache
def reported_images() -> tuple[Tensor, Tensor]:
    """Returns the reported test images and their labels; the first 2 000 of the test images validate."""
    data = read_images("cifar10")
    return data.test(slice(2000, None))


def corrupted_features(setup: Callable[[], LastLayer], severity: int, images: int) -> Tensor:
    """Returns the features of corrupted images."""
    make = lambda: {"features": setup().trunk(corrupted(severity, images))}  # noqa: E731
    return kept_tensors(f"resnet20_corrupted_features_{severity}_{images}", make)["features"]


def contracted_by(whole: Whole, x: Tensor) -> dict[str, Tensor]:
    """Contracts images with the posteriors of `ALL_WEIGHTS`."""
    return whole.of(x, ("diagonal, validation", "KFAC, validation"))


def _scored(images: int, predict: Predict, part: Any) -> dict[str, Any]:
    """Returns the scores of all corrupted images, and scores by kind."""
    labels = reported_images()[1][:images]
    probs = predict(part)
    kinds = dict(zip(COMMON, probs.split(images), strict=True))
    by_kind = {kind: class_scores(one, labels) for kind, one in kinds.items()}
    return {**class_scores(probs, labels.repeat(len(COMMON))), "by kind": by_kind}


def clean_and_foreign(setup: LastLayer) -> tuple[Tensor, Tensor]:
    """Returns the features of the first test images, and of as many of Fashion-MNIST."""
    foreign = kept_tensors("resnet20_foreign", lambda: {"features": setup.trunk(fashion_as_cifar(2000))})["features"]
    return joined(setup.test)[0][:CONFIDENT], foreign[:CONFIDENT]


def _confident(predict: Predict, parts: tuple[Any, Any]) -> dict[str, dict[str, float]]:
    """Returns the error of inputs predicted above each confidence (Figure 4 a), foreign ones always being errors."""
    probs, outside = (predict(part) for part in parts)
    confidence = torch.cat([probs.amax(-1), outside.amax(-1)])
    wrong = torch.cat([probs.argmax(-1) != reported_images()[1][: len(probs)], torch.ones_like(outside[:, 0]).bool()])
    found = {}
    for i in range(10):
        above = confidence >= i / 10
        if above.any():
            error, kept = (float(part.double().mean()) for part in (wrong[above], above))
            found[f"above {i / 10:g}"] = {"error": error, "kept": kept}
    return found


DRAWN = (
    "network", "network, one temperature", "last layer, KFAC, early stopping", "ELLA", "diagonal", "KFAC",
)  # fmt: skip


def draw(results: Mapping[str, Any]) -> None:
    """Draws boxes over the kinds of corruption, by severity, and errors over the confidence, means over seeds."""
    table = results["table"]
    figure, ((*axes,),) = drawing.panels(1, 3, (15, 4.2))
    severities = [run for run in table if run.startswith("severity")]
    for measure, axis in zip(("nll", "ece"), axes, strict=False):
        groups = {
            name: [[kind[measure]["mean"] for kind in table[run][name]["by kind"].values()] for run in severities]
            for name in DRAWN
        }
        drawing.boxes(axis, groups, [run.removeprefix("severity ") for run in severities])
        axis.set(xlabel="severity (boxes over 19 kinds)", ylabel={"nll": "NLL (nats)", "ece": "ECE"}[measure])
    for i, name in enumerate(DRAWN):
        rows = table["confidence"][name].items()
        points = [(float(key.removeprefix("above ")), row["error"]["mean"]) for key, row in rows]
        axes[2].plot(*zip(*points, strict=True), ".-", color=f"C{i}")
    axes[2].set(xlabel="confidence above", ylabel="error, half of the inputs Fashion-MNIST", ylim=(0, None))
    drawing.legend_below(figure, len(DRAWN))
    drawing.save(figure, __file__)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns scores on the corrupted images by severity, and errors at high confidence."""
    table, lines = results["table"], {}
    severities = [run for run in table if run.startswith("severity")]
    for name in (*LAST_LAYER, *SPANS, *ALL_WEIGHTS):
        cells = [f"{shown(table[run][name]['nll'], 2)} / {shown(table[run][name]['ece'], 2)}" for run in severities]
        lines[name] = [*cells, shown(table["confidence"][name]["above 0.9"]["error"], 2)]
    return {"corruptions": grid([*(f"NLL / ECE at {run}" for run in severities), "error above confidence .9"], lines)}
