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
from papers.common.results import Rows, once
from papers.common.scores import class_scores
from papers.common.tables import grid, shown
from papers.common.training import kept_tensors
from papers.ella.shared import ella_latent
from papers.ella.table1 import OneSpan, Whole, best_prior, fitted, joined, prior_latent, tempered

Predict = Callable[[Any], Tensor]
"""Features (n, 64), or contracted images, to class probabilities by the default link."""

LAST_LAYER = (
    "network", "network, one temperature", "last layer, prior alone", "last layer, KFAC, validation",
    "last layer, KFAC, early stopping", "recommended call",
)  # fmt: skip
ALL_WEIGHTS = ("ELLA", "ELLA, prior alone", "diagonal", "KFAC")
"""Tuned on the validation images: the prior precision, and for ELLA the number of its images."""


def run(
    severities: Sequence[int] = (1, 3, 5),
    images: int = 500,
    fewer: int = 50,
    seeds: Sequence[int] = (0, 1),
    shown: int = 1000,
) -> dict[str, Any]:
    """Returns scores by kind of corruption, and errors against confidence, of the network and of posteriors.

    Args:
        severities: strengths of the corruptions.
        images: test images of each kind and severity, the same for all kinds.
        fewer: the first of these images, for the posteriors of all weights, whose predictions cost more.
        seeds: of ELLA's rows.
        shown: training images of the posteriors of all weights.
    """
    rows = Rows(__file__, {"images of each kind": images, "images of each kind, all weights": fewer})
    setup = once(lambda: LastLayer.load(0))
    last = once(lambda: last_layer_methods(setup()))
    for severity in severities:
        part = once(partial(corrupted_features, setup, severity, images))
        for name in LAST_LAYER:
            rows.add(f"severity {severity}", name, partial(_scored, last, name, part, images))
    confident = once(lambda: clean_and_foreign(setup(), 2000))
    for name in LAST_LAYER:
        rows.add("confidence", name, partial(_confident, last, name, confident))

    whole = once(lambda: Whole([(512, seed) for seed in seeds], shown, 500))
    methods = [once(partial(all_weights_methods, whole, i)) for i in range(len(seeds))]
    for severity in severities:
        part = once(partial(corrupted_features, setup, severity, images))
        features = once(partial(_first_of_each_kind, part, fewer))
        seen = once(lambda severity=severity: contracted_by(whole(), corrupted(severity, fewer)))  # type: ignore[misc]
        _add_all(rows, f"all weights, severity {severity}", seeds, last, methods, _scored, features, seen, fewer)
    features = once(lambda: clean_and_foreign(setup(), 500))
    seen = once(lambda: clean_and_foreign_contracted(whole(), 500))
    _add_all(rows, "all weights, confidence", seeds, last, methods, _confident, features, seen)
    return rows.all()


def _add_all(
    rows: Rows,
    run: str,
    seeds: Sequence[int],
    last: Callable[[], dict[str, Predict]],
    methods: Sequence[Callable[[], dict[str, Predict]]],
    score: Callable[..., Any],
    features: Callable[[], Any],
    seen: Callable[[], Any],
    *arguments: Any,
) -> None:
    """Adds the rows of all weights; the others are on the same images, and do not depend on the seed."""
    for name in LAST_LAYER:
        rows.add(f"{run}, seed {seeds[0]}", name, partial(score, last, name, features, *arguments))
    for i, seed in enumerate(seeds):
        for name in ALL_WEIGHTS if i == 0 else ALL_WEIGHTS[:2]:
            rows.add(f"{run}, seed {seed}", name, partial(score, methods[i], name, seen, *arguments))


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


def all_weights_methods(whole: Callable[[], Whole], place: int) -> dict[str, Predict]:
    """Returns the methods of `ALL_WEIGHTS`, of contracted images; ELLA on the span at a place in the order of seeds."""
    span, shown = OneSpan.of(whole, place), slice(place * Whole.rank, place * Whole.rank + 20)

    def ella(counts: Sequence[int]) -> Predict:
        _, delta, _, n = span.chosen(counts)
        curvature = span.curvatures[n][:20, :20]

        def predict(part: Mapping[str, Tensor]) -> Tensor:
            mine = {**part, "features": part["features"][..., shown]}
            return lw.Categorical().predict(ella_latent(mine, curvature, delta)).probs

        return predict

    def dense(name: str) -> Predict:
        return lambda part: lw.Categorical().predict(Latent(part["outputs"], (DenseTerm(part[name]),))).probs

    return {
        "ELLA": ella(span.counts), "ELLA, prior alone": ella([0]),
        **{name: dense(f"{name}, validation") for name in ("diagonal", "KFAC")},
    }  # fmt: skip


def corrupted(severity: int, images: int) -> Tensor:
    """Returns the first reported images with each kind of corruption, one kind after the other."""
    raw = pixels(reported_images()[0][:images]).cpu()
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


def _first_of_each_kind(part: Callable[[], Tensor], count: int) -> Tensor:
    return part().unflatten(0, (len(COMMON), -1))[:, :count].flatten(0, 1)


def contracted_by(whole: Whole, x: Tensor) -> dict[str, Tensor]:
    """Contracts images with the posteriors of `ALL_WEIGHTS`."""
    return whole.of(x, ("diagonal, validation", "KFAC, validation"))


def _scored(
    methods: Callable[[], dict[str, Predict]], name: str, part: Callable[[], Any], images: int
) -> dict[str, Any]:
    """Returns the scores of all corrupted images, and scores by kind."""
    labels = reported_images()[1][:images]
    probs = methods()[name](part())
    kinds = dict(zip(COMMON, probs.split(images), strict=True))
    by_kind = {kind: class_scores(one, labels) for kind, one in kinds.items()}
    return {**class_scores(probs, labels.repeat(len(COMMON))), "by kind": by_kind}


def clean_and_foreign(setup: LastLayer, count: int) -> tuple[Tensor, Tensor]:
    """Returns the features of the first test images, and of as many of Fashion-MNIST."""
    foreign = kept_tensors("resnet20_foreign", lambda: {"features": setup.trunk(fashion_as_cifar(2000))})["features"]
    return joined(setup.test)[0][:count], foreign[:count]


def clean_and_foreign_contracted(whole: Whole, count: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns what the posteriors of all weights need of the first test images, and of as many of Fashion-MNIST."""
    return {key: part[:count] for key, part in whole.test.items()}, contracted_by(whole, fashion_as_cifar(count))


def _confident(
    methods: Callable[[], dict[str, Predict]], name: str, parts: Callable[[], tuple[Any, Any]]
) -> dict[str, dict[str, float]]:
    """Returns the error of inputs predicted above each confidence (Figure 4 a), foreign ones always being errors."""
    probs, outside = (methods()[name](part) for part in parts())
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
    """Draws boxes over the kinds of corruption, by severity, and errors over the confidence, on the fewer images."""
    figure, ((*axes,),) = drawing.panels(1, 3, (15, 4.2))
    first = {name.removesuffix(", seed 0"): rows for name, rows in results["runs"].items() if "seed 0" in name}
    runs = {name.removeprefix("all weights, "): rows for name, rows in first.items()}
    severities = [run for run in results["table"] if run.startswith("severity")]
    for measure, axis in zip(("nll", "ece"), axes, strict=False):
        for i, name in enumerate(DRAWN):
            values = [[kind[measure] for kind in runs[run][name]["by kind"].values()] for run in severities]
            places = [j * (len(DRAWN) + 1) + i for j in range(len(severities))]
            boxes = axis.boxplot(values, positions=places, widths=0.8, patch_artist=True, showfliers=False)
            for box, median in zip(boxes["boxes"], boxes["medians"], strict=True):
                box.set_facecolor(f"C{i}")
                median.set_color("black")
            axis.plot([], [], "s", color=f"C{i}", label=name)
        middles = [j * (len(DRAWN) + 1) + (len(DRAWN) - 1) / 2 for j in range(len(severities))]
        axis.set_xticks(middles, [run.removeprefix("severity ") for run in severities])
        axis.set(xlabel="severity (boxes over 19 kinds)", ylabel={"nll": "NLL (nats)", "ece": "ECE"}[measure])
    for i, name in enumerate(DRAWN):
        points = [(float(key.removeprefix("above ")), row["error"]) for key, row in runs["confidence"][name].items()]
        axes[2].plot(*zip(*points, strict=True), ".-", color=f"C{i}")
    axes[2].set(xlabel="confidence above", ylabel="error, half of the inputs Fashion-MNIST", ylim=(0, None))
    drawing.legend_below(figure, len(DRAWN))
    drawing.save(figure, __file__)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns scores on the fewer corrupted images by severity, and errors at high confidence."""
    names = {name: name.removeprefix("all weights, ") for name in results["table"] if name.startswith("all weights, ")}
    table = {short: results["table"][name] for name, short in names.items()}
    severities = [run for run in table if run.startswith("severity")]
    lines = {}
    for name in (*LAST_LAYER, *ALL_WEIGHTS):
        cells = [f"{shown(table[run][name]['nll'], 2)} / {shown(table[run][name]['ece'], 2)}" for run in severities]
        lines[name] = [*cells, shown(table["confidence"][name]["above 0.9"]["error"], 2)]
    return {"all weights": grid([*(f"NLL / ECE at {run}" for run in severities), "error above confidence .9"], lines)}
