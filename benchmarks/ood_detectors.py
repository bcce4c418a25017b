"""Detectors of pytorch-ood next to the rows of `benchmarks.ood`: the same networks and out-of-distribution inputs.

Needs `pip install pytorch-ood`, and the data sets that LAPWING_DATA names.

The detectors read the logits or the features before the last layer. They are fitted to the same images as the
posteriors, with the defaults of pytorch-ood. ViM has no default number of directions: it gets half of them.
*difference* compares both scores of `lw.novelty` with `RMD` and `KNN`, on the same features in float64: the largest
difference over the standard deviation of the scores, with RMD's ridge, and its sums as means over the images.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks import ood as posteriors
from benchmarks.ood import REPEATS, SEED, SHORT, Task, cifar10, code, fashion, logits_of, of_logits
from lapwing.evaluation.metrics import auroc
from papers.common import results
from papers.common.measure import ratio
from papers.common.scores import averaged
from papers.common.tables import grid

PACKAGES = ("pytorch-ood", "scikit-learn")


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


def parts(repeats: int = REPEATS) -> dict[str, Callable[[], Any]]:
    """Returns the tasks, with means, standard errors and each run."""

    def scored(tasks: list[Callable[[], Task]]) -> dict[str, Any]:
        runs = []
        for make in tasks:
            runs.append(report(task := make()))
            found = differences(task[0][0], task[1], next(iter(task[3].values())))
        return {"rows": averaged(runs), "runs": runs, "difference": found}

    garments = [partial(fashion, SEED + repeat, 1) for repeat in range(repeats)]
    return {"cifar10": lambda: scored([cifar10]), "fashion": lambda: scored(garments)}


def tables(detectors: dict[str, Any]) -> dict[str, str]:
    """Returns the table of docs/ood.md: one line for each row and score, of the results of both benchmarks."""
    ood = results.read(posteriors.__file__)
    small, large = (ood[task]["rows"] | detectors[task]["rows"] | ood[task]["rows"] for task in ("fashion", "cifar10"))
    columns = ["score", "prediction", "digits", "grey CIFAR-10", "ResNet: Fashion-MNIST", "ResNet: MNIST"]
    lines = []
    for name, row in small.items():
        for score in row["AUROC MNIST"]:
            cells = [SHORT.get(score, score), f"{row['prediction']['mean']:.1f}"]
            for place in ("AUROC MNIST", "AUROC CIFAR-10"):
                cells.append(f"{row[place][score]['mean']:.3f} ± {row[place][score]['standard_error']:.3f}")
            for place in ("AUROC Fashion-MNIST", "AUROC MNIST"):
                cells.append(f"{large[name][place][score]['mean']:.3f}" if name in large else "")
            lines.append((code(name), cells))
    return {"scores": grid(columns, lines, right=True)}
