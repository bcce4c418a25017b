"""Detectors of pytorch-ood next to the rows of `benchmarks.ood`: the same networks and out-of-distribution inputs.

    python -m benchmarks.ood_detectors [fashion] [cifar10]    # needs pytorch-ood, and LAPWING_DATA

The detectors read the logits or the features before the last layer. They are fitted to the same images as the
posteriors, with the defaults of pytorch-ood. ViM has no default number of directions: it gets half of them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import RESULTS, ratio, write
from benchmarks.ood import REPEATS, SEED, Task, cifar10, fashion, logits_of, of_logits
from lapwing.evaluation.metrics import auroc
from papers.common.scores import averaged


@torch.no_grad()
def features_of(model: nn.Module, x: Tensor) -> Tensor:
    """Returns the inputs (N, D) of the last layer."""
    found: list[Tensor] = []
    with last_layer(model).register_forward_pre_hook(lambda _, inputs: found.append(inputs[0])):
        logits_of([model], x)
    return torch.cat(found)


def last_layer(model: nn.Module) -> nn.Linear:
    """Returns the last linear layer."""
    return [layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1]


def report(task: Task) -> dict[str, Any]:
    """Returns AUROCs and costs of the detectors."""
    from pytorch_ood import detector as ood

    (model, *_), loader, _, inputs, _ = task
    calls: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {}
    network, encoder, last = lambda x: logits_of([model], x)[0], partial(features_of, model), last_layer(model)
    vim = ood.ViM(encoder, d=last.in_features // 2, w=last.weight, b=last.bias)
    for one in (ood.MaxLogit(network), ood.EnergyBased(network), ood.Mahalanobis(encoder), ood.KNN(encoder), vim):
        one.fit(loader)
        calls[f"pytorch-ood, `{type(one).__name__}`"] = lambda x, one=one: {"its own": one.predict(x)}
    rows: dict[str, Any] = {}
    for name, call in calls.items():
        known, *strange = (call(x) for x in inputs.values())
        rows[name] = {
            f"AUROC {place}": {key: float(auroc(known[key], other[key])) for key in known if key != "probs"}
            for place, other in zip(list(inputs)[1:], strange, strict=True)
        }
        some = next(iter(inputs.values()))[:300]
        cost = ratio(partial(call, some), lambda: of_logits(logits_of([model], some)), 3, time.process_time)  # noqa: B023
        rows[name]["prediction"] = cost["ratio"]
        print(name, rows[name], flush=True)
    return rows


def main(names: list[str]) -> None:
    """Runs the named tasks, or both. Writes means, standard errors and each run."""
    torch.set_num_threads(1)
    path = RESULTS / "ood_detectors.json"
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    for name in names or ["cifar10", "fashion"]:
        runs: list[dict[str, Any]] = []
        for repeat in range(REPEATS if name == "fashion" else 1):
            small = name == "fashion"
            runs.append(report(fashion(SEED + repeat, 1) if small else cifar10()))
            results[name] = {"rows": averaged(runs), "runs": runs}
            packages = {package: version(package) for package in ("pytorch-ood", "scikit-learn")}
            print(write("ood_detectors", results, SEED, **packages), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
