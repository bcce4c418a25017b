"""The likelihoods that have a name: those of lapwing, and those that a user registers."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from ..errors import LapwingError, shown
from .base import Likelihood

Kind = TypeVar("Kind", bound=type[Likelihood])

REGISTERED: dict[str, type[Likelihood]] = {}
"""Names -> class."""


def register(kind: Kind) -> Kind:
    """Registers a class of likelihoods by its `name`: write `@register` above the class.

    `lw.fit(..., likelihood="name")` and `lw.load` then find it, once the module that holds the class is imported. A
    file stores the name and the noise variance of a likelihood, so a registered class has no other option.

    Returns:
        The class.

    Raises:
        LapwingError: for what is not a class of likelihoods, a name that another class has, or other options.
    """
    if not (isinstance(kind, type) and issubclass(kind, Likelihood) and is_dataclass(kind)):
        raise LapwingError(
            f"register takes a frozen dataclass that extends Likelihood, not {shown(kind)}. Write @register above "
            "@dataclass(frozen=True)."
        )
    options = [field.name for field in fields(kind) if field.name != "noise_variance"]
    if options:
        raise LapwingError(
            f"A file does not store the options {', '.join(options)} of {kind.__name__}. Leave the class unregistered, "
            "and pass an instance to lw.fit and lw.load."
        )
    other = REGISTERED.get(kind.name, kind)  # of the same module and name where a notebook's cell runs again
    if (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
        raise LapwingError(
            f"The name {kind.name!r} of {kind.__name__} belongs to {other.__module__}.{other.__qualname__}. Give the "
            "class another name."
        )
    REGISTERED[kind.name] = kind
    return kind


def resolve(likelihood: Any) -> Likelihood:
    """Returns the likelihood of a registered name; an instance as it is.

    Raises:
        LapwingError: for an unknown name, a class in place of an instance, or anything else.

    Example:
        >>> resolve("gaussian")
        Gaussian(noise_variance=None)
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    if isinstance(likelihood, str) and likelihood in REGISTERED:
        return REGISTERED[likelihood]()
    if isinstance(likelihood, type):
        raise LapwingError(
            f"The likelihood is the class {likelihood.__name__}. Pass an instance: likelihood={likelihood.__name__}()."
        )
    raise LapwingError(
        f"{shown(likelihood)} is not a likelihood. Pass likelihood='categorical' for integer labels, 'bernoulli' for "
        f"yes or no, 'gaussian' for real targets, or an instance. Registered are {', '.join(REGISTERED)}."
    )
