"""Figures 3 and 4 (a, c): corrupted images, error against confidence, and time, for ELLA and the other methods."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.tuning import Tuning
from papers.common import drawing
from papers.common.cifar import Cifar, normalised, pixels
from papers.common.corruptions import COMMON, corrupt
from papers.common.data import images as read_images
from papers.common.scores import averaged, class_scores, probabilities
from papers.common.tables import grid, shown


def run(seeds: Sequence[int] = (0, 1), images: int = 30) -> dict[str, Any]:
    """Returns scores on clean and corrupted images, errors against confidence, and times, for every method."""
    runs = [_corruptions(seed, images) for seed in seeds]
    return {"images per kind and severity": images, "seeds": len(seeds), "runs": runs, **averaged(runs)}


def _corruptions(seed: int, images: int) -> dict[str, Any]:
    """Scores every method; on corrupted images, the mean over kinds of each strength."""
    setup = Cifar.load(seed, 2048)
    posteriors, fits = fitted(setup, seed)
    clean_x, labels = (torch.cat(part)[:1000] for part in zip(*setup.test, strict=True))
    foreign = fashion_as_cifar(1000)
    found: dict[str, Any] = {"fits": fits, "clean": {}, "error against confidence": {}, "corrupted": {}}
    with torch.no_grad():
        setup.model(clean_x[:100])
        start = time.perf_counter()
        for part in clean_x.split(100):
            setup.model(part)
        forward = time.perf_counter() - start
    for name, predict in posteriors.items():
        start = time.perf_counter()
        probs = torch.cat([predict(part) for part in clean_x.split(100)])
        seconds = time.perf_counter() - start
        outside = torch.cat([predict(part) for part in foreign.split(100)])
        found["clean"][name] = {**class_scores(probs, labels), "forward passes": seconds / forward}
        rows = error_against_confidence(probs, labels, outside)
        found["error against confidence"][name] = {f"{row['confidence']:g}": row for row in rows}
        print(name, found["clean"][name], flush=True)
    raw = pixels(clean_x)
    for severity in range(1, 6):
        scored: dict[str, list[dict[str, float]]] = {name: [] for name in posteriors}
        for i, kind in enumerate(COMMON):
            chosen = slice(images * i, images * (i + 1))
            x = normalised(corrupt(raw[chosen], kind, severity, seed=seed))
            for name, predict in posteriors.items():
                scored[name].append(class_scores(predict(x), labels[chosen]))
        mean = {name: averaged(kinds) for name, kinds in scored.items()}
        found["corrupted"][str(severity)] = {
            name: {key: value["mean"] for key, value in row.items()} for name, row in mean.items()
        }
        print(severity, found["corrupted"][str(severity)], flush=True)
    return found


def fitted(setup: Cifar, seed: int) -> tuple[dict[str, Callable[[Tensor], Tensor]], dict[str, dict[str, Any]]]:
    """Fits every method to the ResNet-20, tuned on the validation images.

    ELLA chooses the number of its training images too (section 5.2); for the others, whose features cost more,
    the prior precision alone is chosen, on 500 of the validation images.

    Returns:
        method -> images to class probabilities, MAP among them; and method -> what was chosen.
    """
    prior_alone = lw.Validation(setup.val[:5], tempered=False, tolerance=0.0)
    methods: dict[str, tuple[lw.Method, Any, Tuning]] = {
        "ELLA": (lw.ELLA(rank=20, rows=2000), lw.everything, lw.EarlyStopping(setup.val)),
        "last layer, KFAC": (lw.KFAC(), lw.last_layer, prior_alone),
        "last layer, full, early stopping": (lw.Full(), lw.last_layer, lw.EarlyStopping(setup.val)),
        "diagonal": (lw.Diagonal(), lw.everything, prior_alone),
        "KFAC": (lw.KFAC(), lw.everything, prior_alone),
    }

    def plain(x: Tensor) -> Tensor:
        with torch.no_grad():
            return setup.model(x).softmax(-1)

    predict: dict[str, Callable[[Tensor], Tensor]] = {"MAP": plain}
    chosen: dict[str, dict[str, Any]] = {}
    for name, (method, params, tune) in methods.items():
        start = time.perf_counter()
        posterior = lw.fit(
            setup.model, setup.train, method, params=params, tune=tune, data_size=50_000, seed=seed, memory=2**32
        )
        chosen[name] = {
            "fit_seconds": time.perf_counter() - start, "prior_precision": posterior.prior_precision,
            "images": posterior.samples,
        }  # fmt: skip
        predict[name] = partial(_predicted, posterior)
    return predict, chosen


def _predicted(posterior: lw.Posterior, x: Tensor) -> Tensor:
    return probabilities(posterior, posterior.latent(x))


def error_against_confidence(probs: Tensor, labels: Tensor, foreign: Tensor) -> list[dict[str, float]]:
    """Returns the error of inputs predicted above each confidence, foreign ones always being errors (Figure 4 a)."""
    confidence = torch.cat([probs.amax(-1), foreign.amax(-1)])
    wrong = torch.cat([probs.argmax(-1) != labels, torch.ones(len(foreign), dtype=torch.bool)])
    rows = []
    for i in range(10):
        above = confidence >= i / 10
        rows.append(
            {"confidence": i / 10, "error": float(wrong[above].double().mean()), "kept": float(above.double().mean())}
        )
    return rows


def fashion_as_cifar(count: int) -> Tensor:
    """Returns Fashion-MNIST test images padded to 32 x 32, in three channels, normalised as the ResNet-20 expects."""
    x = read_images("fashion_mnist").x_test[:count]
    x = nn.functional.pad(x, (2, 2, 2, 2)).expand(-1, 3, -1, -1)
    return normalised(x)


def draw(results: Mapping[str, Any]) -> None:
    """Draws scores over the severity, and errors over the confidence."""
    figure, ((*axes,),) = drawing.panels(1, 3, (13, 3.6))
    for measure, axis in zip(("nll", "ece"), axes, strict=False):
        for name in results["clean"]:
            rows = {0: results["clean"][name][measure]}
            rows |= {int(strength): row[name][measure] for strength, row in results["corrupted"].items()}
            means, errors = ([row[part] for row in rows.values()] for part in ("mean", "standard_error"))
            axis.errorbar(list(rows), means, errors, fmt=".-", label=name)
        axis.set(xlabel="severity (mean over 19 corruptions)", title=measure)
    for name, rows in results["error against confidence"].items():
        points = [(row["confidence"]["mean"], row["error"]["mean"]) for row in rows.values()]
        axes[2].plot(*zip(*points, strict=True), ".-", label=name)
    axes[2].set(xlabel="confidence above", title="error, half of the inputs Fashion-MNIST")
    axes[0].legend(frameon=False, fontsize=8)
    drawing.save(figure, __file__)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the scores on clean and corrupted images, errors at high confidence, and costs."""
    rows = {}
    for name, clean in results["clean"].items():
        worse = (results["corrupted"][strength][name] for strength in "135")
        pairs = [f"{shown(row['nll'], 2)} / {shown(row['ece'], 2)}" for row in worse]
        error = results["error against confidence"][name]["0.9"]["error"]
        cells = [shown(clean["nll"]), shown(clean["ece"]), *pairs, shown(error, 2), shown(clean["forward passes"], 1)]
        rows[name] = cells
    strengths = [f"NLL / ECE at strength {strength}" for strength in "135"]
    columns = ["clean NLL", "clean ECE", *strengths, "error above confidence .9", "prediction, forward passes"]
    return {"scores": grid(columns, rows)}
