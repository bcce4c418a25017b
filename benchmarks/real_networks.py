"""Trained networks with error bars: the MNIST CNN and the CIFAR-10 ResNet-20 of the data folder.

Each posterior is fitted on 2 000 training images scaled to the whole training set, its prior precision chosen by the
evidence, by the bounded evidence, which is the default, and on the first 2 000 test images. The loss of each choice is
that on 500 of these. The validated ones, and the default of the last layer, which is what `lw.fit(model, loader)`
takes, are reported on the other 8 000 images; MAP is the network itself on the same images.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.tuning.held_out import sample_scores
from papers.common.data import batched, images, random_rows
from papers.common.measure import timed
from papers.common.networks import cifar_resnet20, mnist_cnn
from papers.common.scores import class_scores
from papers.common.tables import grid

SEED = 0
SHOWN, VALIDATION = 2000, 2000
LOSS = "nll_on_500_validation_images"
TUNINGS = ("evidence", "bounded evidence", "validation")
NETWORKS = {"mnist": (mnist_cnn, 60_000), "cifar10": (cifar_resnet20, 50_000)}
METHODS: dict[str, tuple[lw.Method | None, Any]] = {
    "last layer": (lw.KFAC(), lw.last_layer),
    "diagonal": (lw.Diagonal(), lw.everything),
    "KFAC": (lw.KFAC(), lw.everything),
    "ELLA": (lw.ELLA(rank=20, rows=500), lw.everything),
}


def held_out_scores(posterior: lw.Posterior, precisions: list[Any], loader: Any) -> list[float]:
    """Returns the mean log likelihood of held-out data at scalar prior precisions."""
    scores = sample_scores([posterior], lambda one: [one.at(delta) for delta in precisions], loader)
    return scores.mean(-1, dtype=torch.float64)[0, :, 0].tolist()


def study(name: str) -> dict[str, Any]:
    """Fits and scores every method on one network."""
    build, size = NETWORKS[name]
    model, data = build().eval(), images(name)
    picked = random_rows(data.x_train, SHOWN, SEED)
    train = batched(data.x_train[picked], data.y_train[picked])
    validation = batched(data.x_test[:VALIDATION], data.y_test[:VALIDATION])
    test, labels = batched(data.x_test[VALIDATION:], data.y_test[VALIDATION:]), data.y_test[VALIDATION:]

    @torch.no_grad()
    def outputs(batches: Any) -> Tensor:
        return torch.cat([model(x) for x, _ in batches])

    logits, forward = timed(lambda: outputs(test))
    held_out = outputs(validation[:5]).double()
    results: dict[str, Any] = {"MAP": {
        **class_scores(logits.softmax(-1), labels), "predict_seconds": forward,
        LOSS: float(nn.functional.cross_entropy(held_out, data.y_test[: len(held_out)])),
    }}  # fmt: skip
    for label, (method, params) in METHODS.items():
        fit = partial(lw.fit, model, train, method, params=params, data_size=size, seed=SEED)
        fitted, spent = timed(lambda fit=fit: fit(tune=lw.Evidence()))
        tune = lw.Validation(validation, tempered=False, tolerance=0.0).tune
        validated, validating = timed(lambda fitted=fitted, tune=tune: tune(fitted))
        row: dict[str, Any] = {"fit_seconds": spent, "weights": fitted.tangent.size, "validation_seconds": validating}
        tuned = {"evidence": fitted, "bounded evidence": fit(), "validation": validated}
        for tuning, posterior in tuned.items():
            precision = posterior.prior_precision
            (score,) = held_out_scores(posterior, [precision], validation[:5])
            row[tuning] = {"prior_precision": precision, LOSS: -score}
            if tuning == "validation" or (tuning, label) == ("bounded evidence", "last layer"):
                found, seconds = timed(lambda posterior=posterior: posterior.predict(test).probs)
                row[tuning] |= {**class_scores(found, labels), "predict_seconds": seconds}
        results[label] = row
        print(label, row, flush=True)
    return results


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the networks."""
    return {name: partial(study, name) for name in NETWORKS}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Returns the loss of each posterior by the evidence, the bounded evidence and validation."""
    columns = {"mnist": "MNIST CNN", "cifar10": "CIFAR-10 ResNet-20"}
    rows = {label: [", ".join(f"{results[name][label][tuning][LOSS]:.3f}" for tuning in TUNINGS) for name in columns]
            for label in METHODS}  # fmt: skip
    headings = [f"{text}, network {results[name]['MAP'][LOSS]:.3f}" for name, text in columns.items()]
    return {"loss": grid(headings, rows, corner="posterior")}
