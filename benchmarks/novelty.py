"""What novelty and the uncertainty of a posterior find: unlike anything seen, or seen but undecided.

*foreign* is the AUROC of out-of-distribution inputs against test inputs, for each set. *errors* is the AUROC of test
inputs that the network classifies wrongly against the others. Image networks and sets are those of
`benchmarks.ood`. *texts* are the six text networks of `benchmarks.grid`, with texts of another data set. All
detectors and posteriors are fitted to the training data; `validation=` has the held-out data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks.grid.networks import CELLS
from benchmarks.ood import REPEATS, SEED, Task, cifar10, fashion, of_posterior
from lapwing.evaluation.metrics import auroc
from papers.common.data import batched
from papers.common.scores import averaged


def by_parts(score: Any, x: Tensor, size: int = 100) -> Tensor:
    """Returns the scores of inputs, batch by batch."""
    return torch.cat([score(part) for part in x.split(size)])


@torch.no_grad()
def report(
    models: list[nn.Module], loader: Any, held_out: Any, inputs: Mapping[str, Tensor], y: Tensor, **options: Any
) -> dict[str, Any]:
    """Returns score -> AUROC of each out-of-distribution set and of the network's errors; test inputs come first."""
    posterior = lw.fit(models[0], loader, validation=held_out, progress=False, **options)
    found = {place: of_posterior(posterior, x) for place, x in inputs.items()}
    for by in ("mahalanobis", "knn"):
        detector = lw.novelty(models[0], loader, by)  # type: ignore[arg-type]
        for place, x in inputs.items():
            found[place][f"novelty, {by}"] = by_parts(detector, x)
    known, *strange = found.values()
    wrong = by_parts(models[0], next(iter(inputs.values()))).argmax(1) != y
    rows = {}
    for score in [*known][1:]:
        rows[score] = {f"foreign {place}": float(auroc(known[score], other[score]))
                       for place, other in zip([*inputs][1:], strange, strict=True)}  # fmt: skip
        rows[score]["errors"] = float(auroc(known[score][~wrong], known[score][wrong]))
        print(score, rows[score], flush=True)
    return rows


def texts(name: str) -> Task:
    """Returns a text network of the grid, trained, with its data."""
    cell = next(cell for cell in CELLS if cell.name == name)
    data = cell.data(SEED)
    assert data.foreign is not None
    inputs = {"test": data.test[0], "other texts": data.foreign}
    return [cell.trained(data, SEED)], batched(*data.train), data.val, inputs, data.test[1]


def parts(repeats: int = REPEATS) -> dict[str, Callable[[], Any]]:
    """Returns the tasks, with means, standard errors and each run."""
    tasks: dict[str, list[Callable[[], Task]]] = {
        "fashion": [partial(fashion, SEED + repeat, 1) for repeat in range(repeats)],
        "cifar10": [cifar10],
        "texts": [partial(texts, cell.name) for cell in CELLS if cell.family == "texts"],
    }

    def scored(name: str) -> dict[str, Any]:
        options = {"data_size": 50_000} if name == "cifar10" else {}
        runs = [report(*task(), **options) for task in tasks[name]]
        return {"rows": averaged(runs), "runs": runs}

    return {name: partial(scored, name) for name in tasks}
