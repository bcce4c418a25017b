"""`lw.plan` beside real fits: peaks and seconds of every method on five networks and an MLP for a regression.

A child process for each network. Seconds are CPU time on one thread, of the plan's probes too, so that other programs
on the machine count for little; tuning is the default, since the plan counts it. Peaks are of the resident memory
(VmHWM, reset before each fit) above that before the fit, without tuning, after a first fit of the method that loads
what LAPACK keeps. So they need Linux. Weights are random but for the ResNet-20, if the data folder has it:
cost does not depend on them.

    python -m benchmarks.plan [mlp regression cnn resnet20 vit gpt2 resnet18 gpt2_full]   # what is not measured yet
    python -m benchmarks.plan plans                                                        # plans all again
    python -m benchmarks.plan peaks [mlp ...]   # plans and measures peaks again, and keeps the seconds
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks.cost import cnn, mlp
from benchmarks.measure import RESULTS, write
from benchmarks.streamlined_cost import vit
from lapwing.fitting import speed
from papers.common.data import available
from papers.common.networks import ResNet20, cifar_resnet20
from papers.ella.memory import resnet18

SEED = 0
SMALLEST = {"seconds": 0.1, "peak": 2**23}
"""What is less is not compared: each fit takes some hundredths of a second besides, and resident memory counts what
libraries keep."""

METHODS: dict[str, tuple[lw.Method, Any]] = {
    "last layer": (lw.KFAC(), lw.last_layer),
    "Diagonal": (lw.Diagonal(), lw.everything),
    "KFAC": (lw.KFAC(), lw.everything),
    "ELLA": (lw.ELLA(rank=20, rows=200), lw.everything),
    "EKFAC": (lw.EKFAC(), lw.everything),
    "Full, last layer": (lw.Full(), lw.last_layer),
    "ELLA, residual": (lw.ELLA(rank=20, rows=200, residual="prior"), lw.everything),
    "OptimalSubspace": (lw.OptimalSubspace(rank=20, rows=200), lw.everything),
    "SubsetOfWeights": (lw.SubsetOfWeights(size=200), lw.everything),
    "VaLLA": (lw.VaLLA(inducing_points=50), lw.everything),
    "SubsetOfData": (lw.SubsetOfData(size=20), lw.everything),
    "MeanField": (lw.MeanField(steps=10), lw.everything),
    "SampledLLA": (lw.SampledLLA(8, lw.ConjugateGradients(iterations=3), em_steps=0), lw.everything),
}
LARGE = ("last layer", "Diagonal", "KFAC", "ELLA")
"""Those that are measured on networks of full size."""

BUDGETS = {("gpt2_full", "ELLA"): 2**34}
"""Budgets other than the default: 20 directions of 124 million weights take 10 GB."""


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def _gpt2(**size: int) -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(num_labels=4, pad_token_id=0, eos_token_id=1, bos_token_id=1, **size)
    return _Logits(GPT2ForSequenceClassification(config))


def gpt2() -> nn.Module:
    """Two blocks of width 128, for 2 000 tokens."""
    return _gpt2(vocab_size=2000, n_positions=64, n_embd=128, n_layer=2, n_head=4)


def gpt2_full() -> nn.Module:
    """Twelve blocks of width 768, for 50 257 tokens."""
    return _gpt2()


def regression() -> nn.Module:
    """8-50-50-1."""
    return nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))


def resnet20() -> nn.Module:
    """That of the data folder, or one with random weights."""
    return cifar_resnet20() if available("cifar10_resnet20_optionA.safetensors") else ResNet20()


def _tokens(samples: int) -> Tensor:
    return torch.randint(2, 2000, (samples, 64))


def _pixels(samples: int) -> Tensor:
    return torch.randn(samples, 3, 32, 32)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], int, int]] = {
    "mlp": (mlp, lambda samples: torch.randn(samples, 784), 1000, 100),
    "regression": (regression, lambda samples: torch.randn(samples, 8), 1000, 100),
    "cnn": (cnn, lambda samples: torch.randn(samples, 1, 28, 28), 100, 50),
    "resnet20": (resnet20, _pixels, 20, 10),
    "vit": (vit, _pixels, 20, 10),
    "gpt2": (gpt2, _tokens, 30, 10),
    "resnet18": (resnet18, _pixels, 50, 25),
    "gpt2_full": (gpt2_full, _tokens, 20, 10),
}
"""Name -> what makes it, what makes inputs, how many samples, how many in a batch."""


def data(name: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Returns a network and its batches."""
    make, inputs, samples, batch = NETWORKS[name]
    torch.manual_seed(SEED)
    model, x = make().eval(), inputs(samples)
    with torch.no_grad():
        classes = model(x[:2]).shape[1]
    y = torch.randn(samples, 1) if classes == 1 else torch.arange(samples) % classes
    return model, list(zip(x.split(batch), y.split(batch), strict=True))


def child(name: str, kind: str, labels: list[str]) -> None:
    """Prints a line of JSON for each method: its plan, and what its fit took; of `kind` "peaks" no seconds."""
    torch.set_num_threads(1)
    speed.clock = time.process_time
    small, few = data("regression")
    model, batches = data(name)
    for label in labels:
        method, params = METHODS[label]
        row: dict[str, Any] = {"method": label}
        options: dict[str, Any] = {"params": params, "memory": BUDGETS.get((name, label))}
        try:
            plan = lw.plan(model, batches, method, **options)
            row["planned_peak"] = plan.peak_bytes
            if kind != "peaks":
                row["planned_seconds"] = plan.seconds
            if kind != "plans":
                lw.fit(small, few[:1], method, params=params, tune=None)  # loads libraries
                row["measured_peak"] = peak(model, batches, method, options)
            if kind == "measured":
                row["measured_seconds"] = seconds(model, batches, method, options)
        except lw.LapwingError as error:
            row["refused"] = str(error)
        print(json.dumps(row), flush=True)


def seconds(model: nn.Module, batches: list, method: lw.Method, options: dict[str, Any]) -> float:
    """Returns the CPU time of a fit, the fastest of three where it is short."""
    times: list[float] = []
    while len(times) < 1 or (len(times) < 3 and sum(times) < 1.5):
        start = time.process_time()
        lw.fit(model, batches, method, **options)
        times.append(time.process_time() - start)
    return min(times)


def peak(model: nn.Module, batches: list, method: lw.Method, options: dict[str, Any]) -> int:
    """Returns by how many bytes the resident memory rises in a fit."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before = _status("VmRSS")
    lw.fit(model, batches, method, **options, tune=None)
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def main() -> None:
    """Measures what is not in the results yet, of the networks that are named or all but the large ones."""
    names = sys.argv[1:]
    if names[:1] == ["child"]:
        child(names[1], names[2], names[3:])
        return
    torch.set_num_threads(1)
    path, kind = RESULTS / "plan.json", names.pop(0) if names and names[0] in ("plans", "peaks") else "measured"
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    known = [name for name in NETWORKS if name in results]
    for name in names or (list(NETWORKS)[:6] if kind == "measured" else known):
        rows, env = results.setdefault(name, {}), {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        labels = [label for label in _labels(name) if label not in rows] if kind == "measured" else [*rows]
        command = [sys.executable, "-m", "benchmarks.plan", "child", name, kind, *labels]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
            for row in map(json.loads, process.stdout or ()):
                label = row.pop("method")
                rows[label] = {**rows.get(label, {}), **row}
                results["factors"] = summary(results)
                write("plan", results, SEED)
                print(name, label, row, results["factors"], flush=True)
        if process.returncode:
            raise SystemExit(f"{name}: its process ended with {process.returncode}.")


def _labels(name: str) -> list[str]:
    return list(LARGE if name in ("resnet18", "gpt2_full") else METHODS)


def summary(results: dict[str, Any]) -> dict[str, float]:
    """Returns by which factor plans are off, whichever is larger, in the median and at worst."""
    factors: dict[str, float] = {}
    for what in ("seconds", "peak"):
        pairs = [
            (row[f"planned_{what}"], row[f"measured_{what}"])
            for name, rows in results.items() if name != "factors" for row in rows.values()
            if row.get(f"planned_{what}") and row.get(f"measured_{what}", 0) >= SMALLEST[what]
        ]  # fmt: skip
        off = [max(planned / measured, measured / planned) for planned, measured in pairs] or [1.0]
        factors |= {f"{what}, median": statistics.median(off), f"{what}, worst": max(off), f"{what}, count": len(pairs)}
    return factors


if __name__ == "__main__":
    main()
