"""The device of images and of their networks, which LAPWING_PAPERS_DEVICE names, and a clock for it."""

from __future__ import annotations

import os
import time

import torch

DEVICE = torch.device(os.environ.get("LAPWING_PAPERS_DEVICE", "cpu"))


def clock() -> float:
    """Returns processor seconds on a CPU, and wall-clock seconds on a GPU, after its work is done."""
    if DEVICE.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()
