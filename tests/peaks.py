"""Peaks of the resident memory of public calls, each in a fresh process: `python -m tests.peaks NAME ...` prints them.

The parent imports lapwing and forks a process for each name. The child prepares a call, runs it on a few samples, which
loads all code, and measures it on many samples. With `MALLOC_MMAP_THRESHOLD_=65536` freed tensors go back to the
system, so that the peak counts what the call holds, and not the gaps of the heap.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw

BUDGET = 2**24

MANY = 20000
"""Number of samples of a measured call, unless its data have fewer."""

Call = Callable[[int], Any]
"""A public call on the first samples of its data."""


def network(inputs: int = 20, hidden: int = 50, outputs: int = 10) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).eval()


def data(count: int, inputs: int = 20, outputs: int = 10) -> tuple[Tensor, Tensor]:
    return torch.randn(count, inputs), torch.arange(count) % outputs


def fitted(
    inputs: int = 20, hidden: int = 50, outputs: int = 10, method: Any = None, count: int = 100, **options: Any
) -> lw.Posterior:
    model, (x, y) = network(inputs, hidden, outputs), data(count, inputs, outputs)
    options = {"prior_precision": 1.0, "params": lw.everything, "memory": BUDGET} | options
    return lw.fit(model, (x, torch.randn(count, 1) if outputs == 1 else y), method or lw.KFAC(), **options)


def loader(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(200), y.split(200), strict=True))


def fit_of(**options: Any) -> Call:
    x, y = data(20000)
    return lambda n: lw.fit(network(), loader(x[:n], y[:n]), memory=BUDGET, **options)


def prediction(**options: Any) -> Call:
    posterior, x = fitted(), torch.randn(20000, 20)
    return lambda n: posterior.predict(x[:n], **options)


def from_snapshots() -> Call:
    model, (x, y) = network(hidden=1500), data(2000)
    snapshots = lw.SWAG.collector(model)
    for _ in range(3):
        snapshots.snapshot()
    return lambda n: lw.SWAG.from_snapshots(snapshots, loader(x[:n], y[:n]), memory=BUDGET)


def from_variances() -> Call:
    model, (x, y) = network(hidden=1500), data(2000)
    variances = {name: torch.full_like(weight, 0.1) for name, weight in model.named_parameters()}
    return lambda n: lw.MeanField.from_variances(model, variances, loader(x[:n], y[:n]), memory=BUDGET)


def loaded() -> Call:
    path = Path(tempfile.mkdtemp()) / "posterior.safetensors"
    posterior = fitted(hidden=1500)
    posterior.save(path)
    return lambda n: lw.load(path, posterior.model, memory=BUDGET)


def saved() -> Call:
    path, posterior = Path(tempfile.mkdtemp()) / "posterior.safetensors", fitted(hidden=1500)
    return lambda n: posterior.save(path)


def propagated() -> Call:
    model, x = network(), torch.randn(20000, 20)
    return lambda n: lw.propagate(model, lw.Uncertain(x[:n], 0.1), memory=BUDGET)


def joint() -> Call:
    posterior, x = fitted(), torch.randn(300, 20)
    return lambda n: posterior.latent(x[:n], joint=True)


def evidence() -> Call:
    posterior, (x, y) = fitted(count=20000), data(20000)
    return lambda n: posterior.log_marginal_likelihood(linearised_mode=True, loader=loader(x, y))


def of(observed: bool = False, method: Any = None) -> Call:
    inputs, hidden, q = (20, 50, 500) if method else (600, 500, 11)
    posterior, x = fitted(inputs, hidden, 1, method), torch.randn(2000, inputs)
    weights = torch.randn(q, len(x))
    return lambda n: posterior.of(lambda f: (weights[:, :n] @ f(x[:n])).squeeze(1), observed=observed)


def explained(outputs: int = 10, train: bool = True) -> Call:
    posterior, (x, y) = fitted(outputs=outputs, hidden=50 if train else 1000), data(1000)
    at = torch.randn(200 if train else 2, 20)
    return lambda n: posterior.explain(at[:n], (x[:n], y[:n]) if train else None)


def influence() -> Call:
    posterior, (x, y), at = fitted(), data(2000), torch.randn(100, 20)
    return lambda n: posterior.influence((x[:n], y[:n]), at[:n])


def value(given: int = 0) -> Call:
    posterior, x = fitted(), torch.randn(300, 20)
    return lambda n: posterior.value(x[:n], x[:n], x[:given])


def updated() -> Call:
    posterior, (x, y) = fitted(), data(20000)
    return lambda n: posterior.update(loader(x[:n], y[:n]))


def penalised() -> Call:
    posterior, other = fitted(hidden=1500), network(hidden=1500)
    return lambda n: posterior.penalty(other)


def novelty(by: Any) -> Call:
    x, y = data(5000)
    detector = lw.novelty(network(), (x, y), by=by)
    detector = replace(detector, tangent=replace(detector.tangent, memory=BUDGET))
    return lambda n: detector(x[:n])


def scaled() -> Call:
    posterior, (x, y) = fitted(), data(5000)
    return lambda n: lw.scale_factor(posterior, loader(x[:n], y[:n]))


def compared() -> Call:
    posterior, (x, y) = fitted(), data(5000)
    return lambda n: lw.compare({"K": posterior}, loader(x[:n], y[:n]), repeats=1)


def sensitive() -> Call:
    posterior, x = fitted(), torch.randn(8, 20)
    return lambda n: lw.evaluation.sensitivity(posterior, x[:n])


def mixed() -> Call:
    ensemble, (x, y) = [fitted(), fitted()], data(5000)
    return lambda n: lw.mixture(ensemble, loader(x[:n], y[:n])).predict(x[:n])


def deployed() -> Call:
    posterior, x = fitted(), torch.randn(2000, 20)
    return lambda n: lw.deploy(posterior, x[:8])(x[:n])


def amortized(hidden: int) -> Call:
    posterior, (x, y) = fitted(hidden=hidden), data(4000)
    amortized = sys.modules["lapwing.tuning.amortized"]
    amortized.HEAD_STEPS = 20  # type: ignore[attr-defined]
    return lambda n: lw.amortize(posterior, loader(x[: n + 200], y[: n + 200]))


def function_draws() -> Call:
    posterior, x = fitted(), torch.randn(5000, 20)
    return lambda n: posterior.sample_function(n=20)(x[:n])


def on_posterior(method: str, *arguments: Any) -> Call:
    posterior = fitted(hidden=500)
    return lambda n: getattr(posterior, method)(*arguments)


CASES: dict[str, tuple[Callable[..., Call], dict[str, Any]]] = {
    "fit": (fit_of, {}),
    "fit: KFAC": (fit_of, {"method": lw.KFAC(), "params": lw.everything}),
    "plan": (lambda: lambda n: lw.plan(network(), data(n), "all", memory=BUDGET), {}),
    "load": (loaded, {}),
    "SWAG.from_snapshots": (from_snapshots, {}),
    "MeanField.from_variances": (from_variances, {}),
    "propagate": (propagated, {}),
    "latent": (joint, {}),
    "predict": (prediction, {}),
    "predict: draws": (prediction, {"via": lw.Linearized(draws=64)}),
    "predict: streamlined": (prediction, {"via": lw.Streamlined()}),
    "predict: Monte Carlo": (prediction, {"via": lw.MonteCarlo(40)}),
    "of": (of, {}),
    "of: observed": (of, {"observed": True}),
    "of: Full": (of, {"method": lw.Full()}),
    "explain": (explained, {}),
    "explain: many outputs": (explained, {"outputs": 200, "train": False}),
    "influence": (influence, {}),
    "value": (value, {}),
    "value: given": (value, {"given": 50}),
    "sample": (lambda: on_posterior("sample", 700), {}),
    "weight_std": (lambda: on_posterior("weight_std"), {}),
    "sample_function": (function_draws, {}),
    "diagnose": (lambda: on_posterior("diagnose"), {}),
    "with_prior": (lambda: on_posterior("with_prior", 2.0), {}),
    "log_marginal_likelihood": (evidence, {}),
    "update": (updated, {}),
    "penalty": (penalised, {}),
    "save": (saved, {}),
    "novelty: knn": (novelty, {"by": "knn"}),
    "novelty: mahalanobis": (novelty, {"by": "mahalanobis"}),
    "scale_factor": (scaled, {}),
    "compare": (compared, {}),
    "sensitivity": (sensitive, {}),
    "mixture": (mixed, {}),
    "deploy": (deployed, {}),
    "amortize": (amortized, {"hidden": 50}),
    "amortize: wide": (amortized, {"hidden": 500}),
}


def storages(value: Any, seen: set[int] | None = None) -> dict[int, int]:
    """Returns the bytes of every storage that a result keeps."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, nn.Module):
        return {}
    seen.add(id(value))
    if isinstance(value, Tensor):
        return {value.untyped_storage()._cdata: value.untyped_storage().nbytes()}
    parts: Any = ()
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif isinstance(value, lw.Posterior):
        parts = [*value.covariance.tensors().values()]
    elif is_dataclass(value):
        parts = vars(value).values()
    return {key: size for part in parts for key, size in storages(part, seen).items()}


def status(key: str) -> int:
    """Returns an entry of the status of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def measured(name: str) -> dict[str, int]:
    """Returns the peak of a call above the memory before it, and the size of its result, in bytes."""
    make, options = CASES[name]
    call = make(**options)
    start = time.process_time()
    call(8)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    result = call(MANY)
    return {
        "peak": status("VmHWM") - before,
        "seconds": round(time.process_time() - start, 1),
        "result": sum(storages(result).values()),
    }


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        child = os.fork()
        if child == 0:
            try:
                print(json.dumps({"name": name, **measured(name)}), flush=True)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1:] or [*CASES])
