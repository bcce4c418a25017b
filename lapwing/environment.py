"""The environment of lapwing: versions (`lw.versions`, `python -m lapwing`), available memory, and old Pythons."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch

try:
    import resource
except ModuleNotFoundError:  # on Windows
    resource = None  # type: ignore[assignment]

T = TypeVar("T")


class unlocked_property(cached_property[T]):
    """A cached property without the lock that Python 3.11 and older hold while they compute it, for all instances.

    A function that takes another lock can otherwise wait for a thread that holds it and reads the property.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        super().__init__(function)
        self.lock = nullcontext()


def versions() -> str:
    """Returns the lines of a bug report: versions, the system, devices and threads.

    Example:
        >>> import lapwing as lw
        >>> lw.versions().split()[:2] == ["lapwing", lw.__version__]
        True
    """
    import lapwing

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    lines = {
        "lapwing": lapwing.__version__,
        "torch": torch.__version__,
        **{name: _installed(name) for name in ("numpy", "safetensors", "tqdm")},
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.platform()}, {platform.machine()}",
        "devices": ", ".join(["cpu " + torch.backends.cpu.get_cpu_capability(), *devices]),
        "threads": str(torch.get_num_threads()),
    }
    if (other := _installed("lapwing")) != "not installed":
        lines["conflict"] = (
            f"the distribution lapwing {other} is installed too, with a folder lapwing/ of its own. Run pip uninstall "
            "lapwing lapwing-torch, and install lapwing-torch again"
        )
    return "\n".join(f"{name:<12} {value}" for name, value in lines.items())


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def memory_limit(root: Path = Path("/")) -> int:
    """Returns the memory limit of this process in bytes.

    The limit is the smallest of the machine's memory, `RLIMIT_AS` and the limits of control groups, whose files are
    read below `root`. If the machine's memory is unknown, 1 TiB replaces it.
    """
    limits = [2**40]
    if hasattr(os, "sysconf"):
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    if resource is not None and (space := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        limits.append(space)
    return min([*limits, *_limits_of_control_groups(root)])


def _limits_of_control_groups(root: Path) -> Iterator[int]:
    """Yields the limits in bytes of this process's control group and its parents (versions 1 and 2)."""
    with suppress(OSError):  # not on Linux
        for line in os.fsdecode((root / "proc/self/cgroup").read_bytes()).splitlines():
            controllers, path = line.split(":", 2)[1:]
            if "memory" in controllers.split(","):
                folder, name = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            elif not controllers:
                folder, name = "sys/fs/cgroup", "memory.max"
            else:
                continue
            group = PurePosixPath(path.lstrip("/"))
            for place in (group, *group.parents):
                with suppress(OSError, ValueError):  # a container sees only part of the path; "max" means unlimited
                    yield int((root / folder / place / name).read_bytes())
