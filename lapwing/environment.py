"""What lapwing runs on: `lw.versions` and `python -m lapwing`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch


def versions() -> str:
    """Returns what a bug report needs, a line for each: versions, the system, devices and threads.

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
    return "\n".join(f"{name:<12} {value}" for name, value in lines.items())


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
