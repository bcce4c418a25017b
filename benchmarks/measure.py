"""Timing and memory of one run: ratios to a plain forward pass measured side by side, and JSON with what made them."""

from __future__ import annotations

import json
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lapwing

RESULTS = Path(__file__).parent / "results"


def seconds(function: Callable[[], Any], reference: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Times a function and its reference in turns; returns the fastest run of each.

    The fastest of many is what the machine can do; medians measure its other tenants.
    """
    best = [float("inf"), float("inf")]
    for _ in range(2):
        function(), reference()
    for _ in range(rounds):
        for i, call in enumerate((function, reference, reference, reference)):
            start = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            best[min(i, 1)] = min(best[min(i, 1)], time.perf_counter() - start)
    return best[0], best[1]


def ratio(function: Callable[[], Any], reference: Callable[[], Any], rounds: int = 30) -> dict[str, float]:
    """Returns milliseconds of both and their ratio."""
    mine, theirs = seconds(function, reference, rounds)
    return {"milliseconds": 1e3 * mine, "reference_milliseconds": 1e3 * theirs, "ratio": mine / theirs}


class PeakMemory:
    """Samples the process's resident memory in a thread; `.bytes` is the growth from entry to the highest sample."""

    def __enter__(self) -> PeakMemory:
        self._start = self._peak = _resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self._peak = max(self._peak, _resident())

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.bytes = max(self._peak, _resident()) - self._start


def _resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def write(name: str, results: dict[str, Any], seed: int) -> Path:
    """Writes results with versions, seed and device to `benchmarks/results/name.json`."""
    RESULTS.mkdir(exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {torch.get_num_threads()} threads"
    header = {
        "lapwing": lapwing.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
        "machine": platform.machine(),
        "seed": seed,
        "date": time.strftime("%Y-%m-%d"),
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**header, "results": results}, indent=2) + "\n")
    return path
