"""The one exception that lapwing raises, the helpers that its messages are written with, and checks of options."""

from __future__ import annotations

import importlib
import reprlib
from collections.abc import Iterable
from difflib import get_close_matches
from math import inf
from numbers import Real
from typing import Any

import torch


class LapwingError(ValueError):
    """The one exception of lapwing: input that it cannot use, or a network that it cannot describe.

    A message says what is wrong, then what to do: "The model is in training mode. Call model.eval() first." It names
    shapes and dtypes where they help, and prints no tensor. docs/errors.md explains some further. A long message has a
    function of its own, which returns the error, so that a check reads as one condition.

    It is a ``ValueError``, so code that guards a call with ``except ValueError`` keeps working.

    Example:
        >>> import lapwing as lw
        >>> try:
        ...     lw.MonteCarlo(draws=0)
        ... except lw.LapwingError as error:
        ...     print("draws=0" in str(error))
        True
    """


class _Short(reprlib.Repr):
    """Writes values briefly: shapes of arrays, a few entries of containers, the first line of other values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring = 3, 80
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = 4

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, type) or not (hasattr(x, "shape") and hasattr(x, "dtype")):
            return _cut(repr(x).partition("\n")[0], 140)
        return f"{type(x).__name__} {tuple(x.shape)} {x.dtype}".replace("torch.", "")


_SHORT = _Short()


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


ELSEWHERE = {
    **dict.fromkeys(("val_loader", "valid_loader", "val_data", "validation_data"), "write validation="),
    "device": "lapwing computes where the network is: write model.to(device)",
    "subset_of_weights": "write params=lw.last_layer or params=lw.everything",
    "hessian_structure": "write a method: lw.fit(model, loader, lw.KFAC()), or lw.Diagonal(), lw.Full(), lw.ELLA()",
    "sigma_noise": "write likelihood=lw.Gaussian(noise_variance=...), a variance",
    "prior_structure": "write prior_precision=: a number, or a dict {block: number}",
    "backend": "lapwing has its own: leave it out",
    "subnetwork_indices": "write params=lw.matching(...), or a method such as lw.SubsetOfWeights(size=100)",
}
"""Options that people look for and lapwing does not have -> what to do."""


def unknown_option(function: str, name: str, known: Iterable[str]) -> LapwingError:
    """Returns the error for a keyword that a function does not have, with the option that it resembles."""
    near = get_close_matches(name, known, 1)
    hint = ELSEWHERE.get(name) or (f"did you mean {near[0]}=" if near else f"it has {', '.join(known)}")
    return LapwingError(f"{function}() has no option {name}=: {hint}.")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory has run out. torch has no class for this on a CPU, so text is matched."""
    words = "DefaultCPUAllocator", "bad_alloc"
    says_so = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return says_so or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def is_one_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Whether a value is one of the accepted labels, of the same type. Arrays are not compared entry by entry."""
    return any(type(value) is type(one) and value == one for one in accepted)


def shown(value: Any) -> str:
    """Returns a user's value as text for messages: at most one line, without entries of arrays."""
    try:
        return _cut(_SHORT.repr(value), 160)
    except Exception:  # its __repr__ fails, or the integer has too many digits
        return f"a {type(value).__name__}"


def is_positive(value: Any) -> bool:
    """Whether a value is a positive finite number, of Python or NumPy."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < inf
    except OverflowError:  # an integer above the largest float
        return False


def plain_numbers(value: Any) -> Any:
    """Converts a dense array or tensor to nested lists; returns any other value unchanged."""
    try:
        return value.tolist() if hasattr(value, "tolist") else value
    except RuntimeError:  # a sparse tensor, or one on the meta device
        return value


def check_flag(subject: str, name: str, value: Any) -> None:
    """Raises unless an option is True or False."""
    if not isinstance(value, bool):
        raise LapwingError(f"{subject}({name}={shown(value)}) is neither True nor False. Write {name}=True.")


def check_choice(method: str, name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    """Raises for an option that is not one of the accepted labels."""
    if not is_one_of(value, accepted):
        raise LapwingError(
            f"{method}({name}={shown(value)}) is not an option. {name} is one of {', '.join(map(repr, accepted))}: "
            f"write {method}({name}={accepted[0]!r})."
        )


PACKAGES = {
    "jinja2": ("Jinja2", "eval"),
    "matplotlib": ("matplotlib", "eval"),
    "jsonargparse": ("jsonargparse", "cli"),
    "pandas": ("pandas", "eval"),
    "sklearn": ("scikit-learn", "eval"),
    "onnx": ("onnx", "export"),
    "onnxscript": ("onnxscript", "export"),
    "botorch": ("botorch", "botorch"),
    "lightning": ("lightning", "lightning"),
    "transformers": ("transformers", "huggingface"),
    "mapie": ("mapie", "mapie"),
    "ase": ("ase", "ase"),
}
"""Import name -> (name of the package, extra of lapwing that installs it)."""


def extra(module: str, group: str | None = None) -> Any:
    """Returns a module of one of `PACKAGES`. If it is not installed, raises with the line that installs the extra."""
    top = module.partition(".")[0]
    package, name = PACKAGES[top]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != top:
            raise  # the package is installed, but one of its dependencies is missing
        raise LapwingError(
            f'This needs {package}, which is not installed. Run pip install "lapwing-torch[{group or name}]".'
        ) from error
