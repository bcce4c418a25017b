"""One fit over several processes of one CPU: its speed-up at two, and the bytes that each process sends at 2 to 4.

Wall clock, and the processor time of the busiest process, of which the machine's other work takes nothing. Every
process has one thread, also where it is alone. Random weights and inputs: neither time nor bytes depend on them.

    python -m benchmarks.ranks
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing, nn

import lapwing as lw
from benchmarks.measure import write

SEED = 0
SAMPLES, BATCH = 3000, 50
REPEATS = 2


def cnn() -> nn.Module:
    """28x28 pixels to 10 classes: 21 032 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(4), nn.Flatten(), nn.Linear(288, 26), nn.ReLU(), nn.Linear(26, 10),
    )  # fmt: skip


METHODS: dict[str, Callable[[], dict[str, Any]]] = {
    "last layer": lambda: {},
    "KFAC": lambda: {"method": lw.KFAC()},
    "KFAC without tuning": lambda: {"method": lw.KFAC(), "tune": None},
    "Diagonal": lambda: {"method": lw.Diagonal()},
}


class Sent(logging.Handler):
    """Reads the bytes and the collectives of a fit off the log."""

    def emit(self, record: logging.LogRecord) -> None:
        if "bytes" in str(record.msg):
            _, _, self.bytes, self.collectives = record.args  # type: ignore[misc]


def measured(rank: int, size: int, folder: str, names: list[str]) -> None:
    """Fits on one rank, and writes what that took."""
    torch.set_num_threads(1)
    if size > 1:
        distributed.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=size)
    sent, log = Sent(), logging.getLogger("lapwing")
    log.addHandler(sent)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    torch.manual_seed(SEED)
    model, x, y = cnn().eval(), torch.randn(SAMPLES, 1, 28, 28), torch.randint(10, (SAMPLES,))
    every = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, SAMPLES, BATCH)]
    mine, results = every[rank::size], {}
    lw.fit(model, mine[:1])
    for name in names:
        seconds, busy = [], []
        for _ in range(REPEATS):
            if size > 1:
                distributed.barrier()
            start, worked = time.perf_counter(), time.process_time()
            lw.fit(model, mine, **METHODS[name]())
            seconds.append(time.perf_counter() - start)
            busy.append(time.process_time() - worked)
        results[name] = {"seconds": min(seconds), "processor_seconds": min(busy)}
        if size > 1:
            results[name] |= {"sent_bytes": round(sent.bytes), "collectives": sent.collectives}
    torch.save(results, Path(folder) / f"{rank}.pt")


def over(size: int, names: list[str]) -> dict[str, dict[str, float]]:
    """Returns what fits over so many processes take: the slowest of them, and most bytes of one."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measured, (size, folder, names), nprocs=size)
        parts = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(size)]
    return {name: {key: max(part[name][key] for part in parts) for key in parts[0][name]} for name in names}


def main() -> None:
    names = list(METHODS)
    results: dict[str, Any] = {"processes": {str(size): over(size, names) for size in (1, 2, 3, 4)}}
    alone, two = results["processes"]["1"], results["processes"]["2"]
    for size in ("3", "4"):  # more processes than cores say nothing of time
        for part in results["processes"][size].values():
            del part["seconds"]
    for key in ("seconds", "processor_seconds"):  # the latter is what two cores without other work would show
        results[f"speed_up_at_2_in_{key}"] = {name: alone[name][key] / two[name][key] for name in names}
    results["samples"], results["weights"] = SAMPLES, sum(value.numel() for value in cnn().parameters())
    print(write("ranks", results, SEED).read_text())


if __name__ == "__main__":
    main()
