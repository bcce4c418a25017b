"""What a fit and a prediction cost on a GPU, beside laplace-torch where it is installed.

Networks with random weights, since cost does not depend on them: a CNN of two convolutions on 28 x 28 pixels, and
a ResNet-20 and a ResNet-18 on 32 x 32. A fit sees all batches at a fixed prior precision; a prediction gives the class
probabilities of one batch. Each is also given in forward passes of the same data, timed in turn; medians of several
rounds. *Memory* is the peak that torch allocates above the network and its data. laplace-torch has no KFAC for networks
with norm layers, and on an H100 its diagonal needs more than 80 GB for the ResNet-20 and ends with an error of CUDA for
the ResNet-18.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks.cost import cnn
from benchmarks.large import resnet18
from papers.common.measure import timed
from papers.common.networks import ResNet20

SEED, ROUNDS, DELTA = 0, 3, 1e4
MIB = 2**20


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "cnn": (cnn, (1, 28, 28), 128, 16),
    "resnet20": (ResNet20, (3, 32, 32), 128, 16),
    "resnet18": (resnet18, (3, 32, 32), 128, 8),
}
"""Name -> what makes it, shape of an image, batch size, number of batches."""

METHODS: dict[str, tuple[lw.Method | None, Any]] = {
    "last layer, KFAC": (lw.KFAC(), lw.last_layer),
    "diagonal": (lw.Diagonal(), lw.everything),
    "KFAC": (lw.KFAC(), lw.everything),
    "KFAC, streamlined": (lw.KFAC(), lw.everything),
    "ELLA": (lw.ELLA(rank=20, rows=500), lw.everything),
}
THEIRS = {
    "last layer, KFAC": {"subset_of_weights": "last_layer", "hessian_structure": "kron"},
    "diagonal": {"subset_of_weights": "all", "hessian_structure": "diag"},
    "KFAC": {"subset_of_weights": "all", "hessian_structure": "kron"},
}


def measured(call: Callable[[], Any], forward: Callable[[], Any], rounds: int = ROUNDS) -> tuple[Any, dict[str, float]]:
    """Returns what a call returns, and its cost; the first round is not timed."""
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = call()
    peak = torch.cuda.max_memory_allocated() - base
    del out
    times: list[float] = []
    forwards: list[float] = []
    for _ in range(rounds):
        forwards.append(timed(forward)[1])
        out, seconds = timed(call)
        times.append(seconds)
    seconds, passes = median(times), median(times) / median(forwards)
    return out, {"seconds": seconds, "forward_passes": passes, "memory_mib": peak / MIB}


def ours(model: nn.Module, label: str) -> Callable[[list[Any]], Callable[[Tensor], Tensor]]:
    """Returns a function that fits lapwing, and returns what predicts."""
    method, params = METHODS[label]
    via = lw.Streamlined() if "streamlined" in label else None

    def fit(data: list[Any]) -> Callable[[Tensor], Tensor]:
        posterior = lw.fit(model, data, method, params=params, prior_precision=DELTA, progress=False)
        return lambda x: posterior.predict(x, via).probs

    return fit


def theirs(model: nn.Module, options: dict[str, str]) -> Callable[[list[Any]], Callable[[Tensor], Tensor]]:
    """Returns a function that fits laplace-torch, and returns what predicts."""
    from laplace import Laplace

    class Loader(list):
        dataset: Any

    def fit(data: list[Any]) -> Callable[[Tensor], Tensor]:
        loader = Loader(data)
        loader.dataset = torch.cat([y for _, y in data])
        posterior = Laplace(model, "classification", prior_precision=DELTA, **options)
        posterior.fit(loader)
        return lambda x: posterior(x)

    return fit


def study(name: str) -> dict[str, Any]:
    """Returns method -> step -> cost for one network."""
    torch.manual_seed(SEED)
    build, shape, batch, count = NETWORKS[name]
    model = build().eval().cuda()
    data = [(torch.randn(batch, *shape).cuda(), torch.randint(10, (batch,)).cuda()) for _ in range(count)]

    @torch.no_grad()
    def forward(batches: list[Any] = data) -> None:
        for x, _ in batches:
            model(x)

    candidates = {f"lapwing: {label}": ours(model, label) for label in METHODS}
    try:
        candidates |= {
            f"laplace-torch: {label}": theirs(copy.deepcopy(model), options) for label, options in THEIRS.items()
        }
    except ModuleNotFoundError:
        print("laplace-torch is not installed", flush=True)
    results: dict[str, Any] = {"weights": sum(p.numel() for p in model.parameters()), "batch": batch, "batches": count}
    for label, fit in candidates.items():
        row = results[label] = {}
        try:
            predict, row["fit"] = measured(lambda fit=fit: fit(data), forward)
            _, row["prediction"] = measured(lambda p=predict: p(data[0][0]), lambda: forward(data[:1]), 10)
        except torch.OutOfMemoryError:
            row["out of memory"] = True
        except Exception as error:  # of laplace-torch on networks that it does not take
            if label.startswith("lapwing"):
                raise
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        print(name, label, row, flush=True)
        predict = None
        if "error" in row and "CUDA" in row["error"]:  # nothing runs on the GPU after that
            break
        torch.cuda.empty_cache()
    return results


def parts() -> dict[str, Callable[[], Any]]:
    """Returns a study of each network."""
    return {name: partial(study, name) for name in NETWORKS}
