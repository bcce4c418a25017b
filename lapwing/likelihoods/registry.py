"""The registered likelihoods by name, and the options of a likelihood that files store."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from torch import Tensor

from ..errors import LapwingError, shown
from .base import Likelihood

Kind = TypeVar("Kind", bound=type[Likelihood])

REGISTERED: dict[str, type[Likelihood]] = {}
"""Name -> class."""

TUNED = ("noise_variance", "logit_temperature", "input_noise")
"""Fields of likelihoods that tuning chooses; posteriors and files store them separately from the options."""


def options_of(likelihood: Likelihood) -> dict[str, Any]:
    """Returns the options of a likelihood that differ from their defaults: all fields except those in `TUNED`."""
    every: Any = fields(likelihood)  # type: ignore[arg-type]
    options = [(field, getattr(likelihood, field.name)) for field in every if field.name not in TUNED]
    return {field.name: value for field, value in options if isinstance(value, Tensor) or value != field.default}


def register_likelihood(kind: Kind) -> Kind:
    """Registers a class of likelihoods by its `name`: write `@register_likelihood` above the class.

    After the import of the module, `lw.fit(..., likelihood="name")` and `lw.load` find the class. A file stores the
    name and all fields of the likelihood, which must be numbers, strings or tuples of them.

    Raises:
        LapwingError: if the argument is not a dataclass of likelihoods, or if another class has the name.
    """
    if not (isinstance(kind, type) and issubclass(kind, Likelihood) and is_dataclass(kind)):
        raise LapwingError(
            f"register_likelihood needs a frozen dataclass that extends Likelihood, not {shown(kind)}. Write "
            "@register_likelihood above @dataclass(frozen=True)."
        )
    _check_name(kind)
    other = REGISTERED.get(kind.name, kind)  # same module and class name if a notebook cell runs again
    if (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
        raise LapwingError(
            f"The name {kind.name!r} of {kind.__name__} belongs to {other.__module__}.{other.__qualname__}. Give the "
            "class another name."
        )
    REGISTERED[kind.name] = kind
    return kind


def resolve(likelihood: Any) -> Likelihood:
    """Returns a default instance for a registered name, or the given instance; raises for anything else."""
    if isinstance(likelihood, Likelihood):
        _check_name(type(likelihood))
        return likelihood
    if isinstance(likelihood, str) and likelihood in REGISTERED:
        kind = REGISTERED[likelihood]
        return kind(**kind.by_name)
    if isinstance(likelihood, type):
        raise LapwingError(
            f"The likelihood is the class {likelihood.__name__}. Pass an instance: likelihood={likelihood.__name__}()."
        )
    raise LapwingError(
        f"{shown(likelihood)} is not a likelihood. Pass likelihood='categorical' for integer labels, 'bernoulli' for "
        f"yes or no, 'gaussian' for real targets, or an instance. Registered are {', '.join(REGISTERED)}."
    )


def _check_name(kind: type[Likelihood]) -> None:
    """Raises if a class has no name, which would end a fit at its first message."""
    if not isinstance(getattr(kind, "name", None), str):
        raise LapwingError(
            f"The likelihood {kind.__name__} has no name. Write one in the class: name: ClassVar[str] = "
            f'"{kind.__name__.lower()}".'
        )
