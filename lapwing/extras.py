"""Packages that come with an extra, imported where they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import LapwingError

PACKAGES = {
    "PIL": ("Pillow", "eval"),
    "matplotlib": ("matplotlib", "eval"),
    "sklearn": ("scikit-learn", "eval"),
    "torchmetrics": ("torchmetrics", "eval"),
    "onnx": ("onnx", "export"),
    "onnxscript": ("onnxscript", "export"),
}
"""Name to import -> the package's name, and the extra of lapwing that brings it."""


def extra(module: str) -> Any:
    """Returns a module of a package that comes with an extra.

    Args:
        module: its full name, of one of `PACKAGES`.

    Raises:
        LapwingError: where the package is not installed, with the line that installs it.
    """
    top = module.partition(".")[0]
    package, name = PACKAGES[top]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != top:
            raise  # the package is there, and one that it needs is not
        raise LapwingError(f"This needs {package}, which is not installed. Run pip install lapwing[{name}].") from error
