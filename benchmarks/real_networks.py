"""Trained networks with error bars: the MNIST CNN and the CIFAR-10 ResNet-20 of the data folder.

Each posterior is fitted on 2 000 training images scaled to the whole training set, its prior precision chosen on the
first 2 000 test images, and reported on the other 8 000; MAP is the network itself on the same images. What the
evidence would choose stands beside it, with its loss on 500 of the validation images.

`real_network_defaults.json` has what the default tuning, without held-out data, does on the same images: the last
layer, which is what `lw.fit(model, loader)` takes, on all that are reported on, the others on 500 of those to validate.

    python -m benchmarks.real_networks [mnist] [cifar10] [defaults]
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn

import lapwing as lw
from benchmarks.measure import write
from lapwing.tuning.held_out import at_precision, sample_scores
from papers.common.data import batched, images, random_rows
from papers.common.networks import cifar_resnet20, mnist_cnn
from papers.common.scores import class_scores

SEED = 0
SHOWN, VALIDATION = 2000, 2000
NETWORKS = {"mnist": (mnist_cnn, 60_000), "cifar10": (cifar_resnet20, 50_000)}
METHODS: dict[str, tuple[lw.Method | None, Any]] = {
    "last layer": (lw.KFAC(), lw.last_layer),
    "diagonal": (lw.Diagonal(), lw.everything),
    "KFAC": (lw.KFAC(), lw.everything),
    "ELLA": (lw.ELLA(rank=20, rows=500), lw.everything),
}


def held_out_scores(posterior: lw.Posterior, precisions: list[Any], loader: Any) -> list[float]:
    """Returns the mean log likelihood of held-out data at scalar prior precisions."""
    scores = sample_scores([posterior], lambda one: [at_precision(one, delta) for delta in precisions], loader)
    return scores.mean(-1, dtype=torch.float64)[0, :, 0].tolist()


def study(model: nn.Module, name: str, data_size: int) -> dict[str, Any]:
    """Fits and scores every method on one network."""
    data = images(name)
    picked = random_rows(data.x_train, SHOWN, SEED)
    train = batched(data.x_train[picked], data.y_train[picked])
    validation = batched(data.x_test[:VALIDATION], data.y_test[:VALIDATION])
    test, labels = batched(data.x_test[VALIDATION:], data.y_test[VALIDATION:]), data.y_test[VALIDATION:]
    start = time.perf_counter()
    with torch.no_grad():
        logits = torch.cat([model(x) for x, _ in test])
    forward = time.perf_counter() - start
    with torch.no_grad():
        held_out = torch.cat([model(x) for x, _ in validation[:5]]).double()
    results: dict[str, Any] = {"MAP": {**class_scores(logits.softmax(-1), labels), "predict_seconds": forward}}
    on_validation = nn.functional.cross_entropy(held_out, data.y_test[: len(held_out)])
    results["MAP"]["nll_on_500_validation_images"] = float(on_validation)
    for label, (method, params) in METHODS.items():
        start = time.perf_counter()
        fitted = lw.fit(model, train, method, params=params, tune=lw.Evidence(), data_size=data_size, seed=SEED)
        row: dict[str, Any] = {"fit_seconds": time.perf_counter() - start, "weights": fitted.tangent.size}
        start = time.perf_counter()
        validated = lw.Validation(validation, tempered=False, tolerance=0.0).tune(fitted)
        row["validation_seconds"] = time.perf_counter() - start
        deltas = {"evidence": fitted.prior_precision, "validation": validated.prior_precision}
        on_validation = held_out_scores(fitted, list(deltas.values()), validation[:5])
        for (tuned, delta), score in zip(deltas.items(), on_validation, strict=True):
            row[tuned] = {"prior_precision": delta, "nll_on_500_validation_images": -score}
        start = time.perf_counter()
        probs = validated.predict(test).probs
        row["validation"] |= {**class_scores(probs, labels), "predict_seconds": time.perf_counter() - start}
        results[label] = row
        print(label, row, flush=True)
        write(f"real_network_{name}", results, SEED)
    return results


def defaults(model: nn.Module, name: str, data_size: int) -> dict[str, Any]:
    """Fits every method with the default tuning and scores it."""
    data = images(name)
    picked = random_rows(data.x_train, SHOWN, SEED)
    train = batched(data.x_train[picked], data.y_train[picked])
    some = batched(data.x_test[:500], data.y_test[:500])
    with torch.no_grad():
        logits = torch.cat([model(x) for x, _ in some])
    results: dict[str, Any] = {"MAP": {"nll_on_500_validation_images": float(nn.functional.cross_entropy(
        logits, data.y_test[:500]))}}  # fmt: skip
    for label, (method, params) in METHODS.items():
        fitted = lw.fit(model, train, method, params=params, data_size=data_size, seed=SEED)
        (score,) = held_out_scores(fitted, [fitted.prior_precision], some)
        results[label] = {"prior_precision": fitted.prior_precision, "nll_on_500_validation_images": -score}
        if label == "last layer":
            test = batched(data.x_test[VALIDATION:], data.y_test[VALIDATION:])
            results[label] |= class_scores(fitted.predict(test).probs, data.y_test[VALIDATION:])
        print(name, label, results[label], flush=True)
    return results


def main(names: list[str]) -> None:
    """Studies the named networks, all of them when none is named."""
    names = names or [*NETWORKS, "defaults"]
    if "defaults" in names:
        print(write("real_network_defaults", {name: defaults(build().eval(), name, size) for name, (build, size) in
                                              NETWORKS.items()}, SEED))  # fmt: skip
    for name in [name for name in names if name in NETWORKS]:
        build, data_size = NETWORKS[name]
        print(name, flush=True)
        print(write(f"real_network_{name}", study(build().eval(), name, data_size), SEED))


if __name__ == "__main__":
    main(sys.argv[1:])
