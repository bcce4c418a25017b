"""Networks of 11 to 124 million weights, with random weights: time, memory and file sizes of their posteriors.

GPT-2 needs `pip install transformers` beside lapwing; nothing is downloaded. Each case runs in a process of its own, on
one thread. *Peak* is the most resident memory of a step above that before the fit. *Kept* is what the covariance holds.
The memory budget of a fit is 256 MiB. Forward passes are of the same data. ResNet-18 sees 64 images of 64 x 64 pixels
in 10 classes, and in one case 5 000; GPT-2 sees 32 texts of 64 tokens in 2 classes. CPU seconds say more than seconds
on a machine with other tenants.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw

SEED = 0
BUDGET = 2**28
GIB = 2**30


class Residual(nn.Module):
    """Two 3 x 3 convolutions with batch norm and a shortcut (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        projected = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = projected if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, outputs, H / stride, W / stride)."""
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + self.shortcut(x))


def resnet18() -> nn.Module:
    """Returns ResNet-18 for images of three channels and 10 classes."""
    stem = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
    widths = (64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)
    blocks = [Residual(*width) for width in (*widths, (512, 512, 1))]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def gpt2(blocks: int = 12) -> nn.Module:
    """Returns GPT-2 with a classification head for two classes."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(n_layer=blocks, num_labels=2, pad_token_id=50256, use_cache=False)
    return GPT2ForSequenceClassification(config)


def images(samples: int) -> list[Any]:
    """Returns batches of 32 labelled images."""
    labels = torch.randint(10, (samples,))
    return list(zip(torch.randn(samples, 3, 64, 64).split(32), labels.split(32), strict=True))


def texts(samples: int) -> list[Any]:
    """Returns batches of 8 labelled texts of 64 tokens, none of them padding."""
    tokens, labels = torch.randint(50_000, (samples, 64)), torch.randint(2, (samples,))
    return [({"input_ids": x}, y) for x, y in zip(tokens.split(8), labels.split(8), strict=True)]


Network = tuple[Callable[[], nn.Module], Callable[[int], list[Any]], int]
NETWORKS: dict[str, Network] = {
    "resnet18": (resnet18, images, 64),
    "gpt2": (gpt2, texts, 32),
    "gpt2 of one block": (lambda: gpt2(1), texts, 32),
}
CASES = [*(f"{network}-KFAC" for network in NETWORKS), "resnet18_5000-KFAC"]


def resident(what: str = "VmRSS") -> int:
    """Returns the bytes of this process that are in memory now, or at most since the last `forget_peak` (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))


def forget_peak() -> None:
    """Lets the most memory so far be that of now (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def measured(call: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Returns what a call returns, its seconds, and the peak of resident memory."""
    forget_peak()
    start, cpu = time.perf_counter(), time.process_time()
    out = call()
    row = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    return out, {**row, "peak": float(resident("VmHWM"))}


def case(name: str) -> dict[str, Any]:
    """Fits, predicts and saves one case in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    network, _, count = name.removesuffix("-KFAC").partition("_")
    build, make, samples = NETWORKS[network]
    model, data = build().eval(), make(int(count or samples))
    x = data[0][0]

    @torch.no_grad()
    def forward() -> None:
        model(**x) if isinstance(x, dict) else model(x)

    forward()  # what torch keeps of a first run is not the fit's
    _, batch = measured(forward)
    base = resident()
    posterior, fit = measured(lambda: lw.fit(model, data, lw.KFAC(), memory=BUDGET, progress=False))
    kept = sum(tensor.nbytes for tensor in posterior.covariance.tensors().values())
    posterior.predict(x)
    _, predict = measured(lambda: posterior.predict(x))
    with tempfile.TemporaryDirectory(dir=os.environ.get("LAPWING_SCRATCH")) as folder:
        path = Path(folder) / "posterior.safetensors"
        _, save = measured(lambda: posterior.save(path))
        size = path.stat().st_size
        _, load = measured(lambda: lw.load(path, model))
    steps = {"fit": fit, "prediction": predict, "save": save, "load": load}
    for row, batches in ((fit, len(data)), (predict, 1)):
        row["forward_passes"] = row["cpu_seconds"] / batches / batch["cpu_seconds"]
    for row in steps.values():
        row["peak_gib"] = (row.pop("peak") - base) / GIB
    weights = sum(p.numel() for p in model.parameters())
    return {"weights": weights, "kept_gib": kept / GIB, "file_gib": size / GIB, "budget_gib": BUDGET / GIB, **steps}


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the cases, each in a process of its own."""

    def separate(name: str) -> Any:
        code = f"import json; from benchmarks.large import case; print(json.dumps(case({name!r})))"
        out = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
        return json.loads(out.splitlines()[-1])

    return {name: partial(separate, name) for name in CASES}
