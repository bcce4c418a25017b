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
from papers.ella.shared import ella_latent
from papers.ella.table1 import ROWS, OneSpan, Whole, best_prior, fitted, prior_latent, tempered

Predict = Callable[[Any], Tensor]
"""Features (n, 64), or contracted images, to class probabilities by the default link."""

LAST_LAYER = (
    "network", "network, one temperature", "last layer, prior alone", "last layer, KFAC, validation",
    "last layer, KFAC, early stopping", "recommended call",
)  # fmt: skip
ALL_WEIGHTS = ("diagonal, validation", "KFAC, validation")
BY_SEED = ("ELLA", "ELLA, prior alone", "VaLLA", "sampled LLA")
"""The prior precision, and for ELLA the number of its images, are tuned on the validation images, as for the others."""

FOREIGN = 2000
"""Numbers of test images and of images of Fashion-MNIST whose confidence is compared."""


def run(
    severities: Sequence[int] = (1, 3, 5), images: int = 500, shown: int = 14_000, seeds: Sequence[int] = range(5)
) -> dict[str, Any]:
    """Returns scores by kind of corruption, and errors against confidence, of the network and of posteriors.

    This took a minute on a GPU, and takes hours on two cores.

    Args:
        severities: strengths of the corruptions.
        images: test images of each kind and severity, the same for all kinds.
        shown: training images.
        seeds: of ELLA's rows; the first two also of VaLLA and sampled LLA.
    """
    rows = Rows(__file__, {"images of each kind": images, "foreign": FOREIGN})
    setup = once(lambda: LastLayer.load(0, shown))
    whole = once(lambda: Whole([(ROWS[0], seed) for seed in seeds], shown, FOREIGN))
    last = once(lambda: last_layer_methods(setup()))
    others = [once(partial(all_weights_methods, whole, i)) for i in range(len(seeds))]

    def add(run: str, score: Callable[..., Any], *parts: Callable[[], Tensor]) -> None:
        """Adds a row for each method, on images that are read and contracted once."""
        features = [once(lambda x=x: setup().trunk(x())) for x in parts]  # type: ignore[misc]
        seen = [once(lambda x=x: whole().of(x(), ALL_WEIGHTS)) for x in parts]  # type: ignore[misc]
        for name in LAST_LAYER:
            rows.add(run, name, score, last, name, *features)
        for name in ALL_WEIGHTS:
            rows.add(run, name, score, others[0], name, *seen)
        for seed, methods in zip(seeds, others, strict=True):
            for name in BY_SEED[:2]:
                rows.add(f"{run}, seed {seed}", name, score, methods, name, *seen)
        for seed, methods in zip(seeds[:2], others, strict=False):
            for name in BY_SEED[2:]:
                rows.add(f"{run}, seed {seed}", name, score, methods, name, *parts)

    for severity in severities:
        add(f"severity {severity}", partial(_scored, images), once(partial(corrupted, severity, images)))
    add("confidence", _confident, lambda: reported_images()[0][:FOREIGN], once(lambda: fashion_as_cifar(FOREIGN)))
    return rows.all()


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
    """Returns the methods of all weights at a place in the order of seeds, of contracted images or of images."""
    span, shown = OneSpan.of(whole, place), slice(place * Whole.rank, place * Whole.rank + 20)
    seed = whole().spans[place][1]

    def ella(counts: Sequence[int]) -> Predict:
        _, delta, _, n = span.chosen(counts)
        curvature = span.curvatures[n][:20, :20]

        def predict(part: Mapping[str, Tensor]) -> Tensor:
            mine = {**part, "features": part["features"][..., shown]}
            return lw.Categorical().predict(ella_latent(mine, curvature, delta)).probs

        return predict

    def dense(name: str) -> Predict:
        return lambda part: lw.Categorical().predict(Latent(part["outputs"], (DenseTerm(part[name]),))).probs

    def of(posterior: Callable[[], lw.Posterior]) -> Predict:
        return lambda x: torch.cat([posterior().predict(part).probs for part in x.split(500)])

    return {
        **{name: dense(name) for name in ALL_WEIGHTS}, "ELLA": ella(span.counts), "ELLA, prior alone": ella([0]),
        "VaLLA": of(once(lambda: whole().valla(100, seed))), "sampled LLA": of(once(lambda: whole().sampled(seed))),
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


def _scored(
    images: int, methods: Callable[[], dict[str, Predict]], name: str, part: Callable[[], Any]
) -> dict[str, Any]:
    """Returns the scores of all corrupted images, and scores by kind."""
    labels = reported_images()[1][:images]
    probs = methods()[name](part())
    kinds = dict(zip(COMMON, probs.split(images), strict=True))
    by_kind = {kind: class_scores(one, labels) for kind, one in kinds.items()}
    return {**class_scores(probs, labels.repeat(len(COMMON))), "by kind": by_kind}


def _confident(
    methods: Callable[[], dict[str, Predict]], name: str, *parts: Callable[[], Any]
) -> dict[str, dict[str, float]]:
    """Returns the error of inputs predicted above each confidence (Figure 4 a), foreign ones always being errors."""
    probs, outside = (methods()[name](part()) for part in parts)
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
    "network", "network, one temperature", "last layer, KFAC, early stopping", *ALL_WEIGHTS, "ELLA", "VaLLA",
    "sampled LLA",
)  # fmt: skip


def draw(results: Mapping[str, Any]) -> None:
    """Draws boxes over the kinds of corruption, by severity, and errors over the confidence, of seed 0."""
    figure, ((*axes,),) = drawing.panels(1, 3, (15, 4.2))
    runs = {run: dict(rows) for run, rows in results["runs"].items() if "seed" not in run}
    for run, rows in runs.items():
        rows |= results["runs"][f"{run}, seed 0"]
    severities = [run for run in runs if run.startswith("severity")]
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
    drawing.legend_below(figure, 4)
    drawing.save(figure, __file__)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns scores on corrupted images by severity, and errors at high confidence."""
    table = results["table"]
    severities = [run for run in table if run.startswith("severity")]
    lines = {}
    for name in (*LAST_LAYER, *ALL_WEIGHTS, *BY_SEED):
        found = [table[run][name] for run in severities]
        cells = [f"{shown(row['nll'], 2)} / {shown(row['ece'], 2)}" for row in found]
        lines[name] = [*cells, shown(table["confidence"][name]["above 0.9"]["error"], 2)]
    return {"scores": grid([*(f"NLL / ECE at {run}" for run in severities), "error above confidence .9"], lines)}
