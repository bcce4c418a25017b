"""Detectors of pytorch-ood next to the rows of `benchmarks.ood`: the same networks and out-of-distribution inputs.

    python -m benchmarks.ood_detectors [fashion] [cifar10]    # needs pytorch-ood, and LAPWING_DATA

The detectors read the logits or the features before the last layer. They are fitted to the same images as the
posteriors, with the defaults of pytorch-ood. ViM has no default number of directions: it gets half of them.
*difference* compares both scores of `lw.novelty` with `RMD` and `KNN`, on the same features in float64: the largest
difference over the standard deviation of the scores, with RMD's ridge, and its sums as means over the images.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
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


def differences(model: nn.Module, loader: Any, x: Tensor) -> dict[str, float]:
    """Returns the largest differences between the scores of `lw.novelty` and of pytorch-ood."""
    from pytorch_ood import detector as ood

    shown, y = torch.cat([part for part, _ in loader]), torch.cat([labels for _, labels in loader])
    shown, x = features_of(model, shown).double(), features_of(model, x).double()
    torch.set_default_dtype(torch.float64)  # that of RMD's sums
    theirs = {"mahalanobis": ood.RMD(None), "knn": ood.KNN(None)}
    expected = {by: one.fit_features(shown, y).predict_features(x) for by, one in theirs.items()}
    torch.set_default_dtype(torch.float32)
    expected["mahalanobis"] *= len(shown)
    identity = nn.Linear(shown.shape[1], 2).double().eval()  # its features are its inputs
    module = importlib.import_module("lapwing.fitting.novelty")
    module.RIDGE, kept = 1e-6 / len(shown) / float(shown.var(0, correction=0).mean()), module.RIDGE  # that of RMD
    mine = {by: lw.novelty(identity, (shown, y), by)(x) for by in expected}  # type: ignore[arg-type]
    module.RIDGE = kept
    return {by: float((mine[by] - value).abs().max() / value.std()) for by, value in expected.items()}


def report(task: Task) -> dict[str, Any]:
    """Returns AUROCs and costs of the detectors."""
    from pytorch_ood import detector as ood

    (model, *_), loader, _, inputs, _ = task
    calls: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {}
    network, encoder, last = lambda x: logits_of([model], x)[0], partial(features_of, model), last_layer(model)
    vim = ood.ViM(encoder, d=last.in_features // 2, w=last.weight, b=last.bias)
    logits = ood.MaxLogit(network), ood.EnergyBased(network)
    for one in (*logits, ood.Mahalanobis(encoder), ood.RMD(encoder), ood.KNN(encoder), vim):
        one.fit(loader)
        calls[f"pytorch-ood, `{type(one).__name__}`"] = lambda x, one=one: {"its own": one.predict(x)}
    for by, line in {"mahalanobis": "lw.novelty(model, loader)", "knn": 'lw.novelty(..., by="knn")'}.items():
        detector = lw.novelty(model, loader, by)  # type: ignore[arg-type]
        calls[line] = lambda x, detector=detector: {"its own": torch.cat([detector(part) for part in x.split(100)])}
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
            task = fashion(SEED + repeat, 1) if small else cifar10()
            runs.append(report(task))
            found = differences(task[0][0], task[1], next(iter(task[3].values())))
            print("difference", found, flush=True)
            results[name] = {"rows": averaged(runs), "runs": runs, "difference": found}
            packages = {package: version(package) for package in ("pytorch-ood", "scikit-learn")}
            print(write("ood_detectors", results, SEED, **packages), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
