"""What every test gets: a fixed seed, one thread, and the folder of data sets where there is one."""

from __future__ import annotations

import gc
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lapwing as lw

try:
    import resource
except ModuleNotFoundError:  # on Windows
    resource = None

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs the data sets, so that ``-m "not data"`` leaves it out; and as slow what takes long.

    `slow.txt` lists single cases that take seconds, and whose function has faster ones, or that others cover. A line
    that ends with "(" is the start of a name, since the `repr` of a method changes with its options. Of the other cases
    of a function with the mark `quick(n)`, n that are spread evenly are quick.
    """
    listed = (Path(__file__).parent / "slow.txt").read_text(encoding="utf-8").splitlines()
    whole, starts = set(listed), tuple(line for line in listed if line.endswith("("))
    for item in items:
        if item.nodeid in whole or item.nodeid.startswith(starts):
            item.add_marker("slow")
        if "data_folder" in getattr(item, "fixturenames", ()):
            item.add_marker("data")
    groups = defaultdict(list)
    for item in items:
        if item.get_closest_marker("quick") and not item.get_closest_marker("slow"):
            groups[item.nodeid.partition("[")[0]].append(item)
    for cases in groups.values():
        (count,) = cases[0].get_closest_marker("quick").args
        step = max(1, (len(cases) - 1) / max(1, count - 1))
        quick = {round(step * place) for place in range(count)}
        for place, item in enumerate(cases):
            if place not in quick:
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of garbage collections: it lives as long as the process."""
    gc.freeze()


PEAKS: list[float] = []
"""Peak resident memory of each worker, in GiB."""


def peak() -> float:
    """Returns the peak resident memory of this process, or of its largest child, in GiB."""
    who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    unit = 1 if sys.platform == "darwin" else 2**10
    return max(resource.getrusage(each).ru_maxrss for each in who) * unit / 2**30


def pytest_sessionfinish(session: pytest.Session) -> None:
    if resource and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak"] = peak()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    PEAKS.append(getattr(node, "workeroutput", {}).get("peak", math.nan))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the peak memory, so that a test that needs too much is noticed."""
    peaks = PEAKS or ([peak()] if resource else [])
    terminalreporter.write_line(f"peak resident memory, in GiB: {', '.join(f'{each:.1f}' for each in peaks)}")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def pretended_device() -> Iterator[None]:
    """Pretend a device in all tests where LAPWING_DEVICE is "pretended"."""
    if os.environ.get("LAPWING_DEVICE") != "pretended":
        yield
        return
    from tests.conformance import PRETENDED

    assert PRETENDED is not None
    with PRETENDED:
        yield


@pytest.fixture
def reloaded(tmp_path: Path) -> Callable[..., lw.Posterior]:
    """Give a function that saves a posterior and loads it for a network, by default its own."""

    def load(posterior: lw.Posterior, model: torch.nn.Module | None = None, **options: Any) -> lw.Posterior:
        path = tmp_path / "posterior.safetensors"
        posterior.save(path)
        return lw.load(path, posterior.model if model is None else model, **options)

    return load


@pytest.fixture
def data_folder(request: pytest.FixtureRequest) -> Path:
    """Give the folder of data sets that LAPWING_DATA names; without one the test is skipped by its name."""
    named = os.environ.get("LAPWING_DATA")
    if not named:
        pytest.skip(f"{request.node.name} needs data sets: set LAPWING_DATA to their folder")
    folder = Path(named)
    if not folder.is_dir():
        pytest.fail(f"LAPWING_DATA is {named!r}, which is not a folder")
    return folder
