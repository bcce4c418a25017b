"""Checks of the options of methods: whole numbers, positive numbers and labels."""

from __future__ import annotations

from math import inf
from typing import Any

from ..errors import LapwingError, is_one_of, shown
from ..posterior.prior import is_positive


def check_count(method: str, name: str, value: Any) -> None:
    """Raises for an option that is not a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LapwingError(
            f"{method}({name}={shown(value)}) needs a whole number of at least 1. Write {method}({name}=20)."
        )


def check_choice(method: str, name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    """Raises for an option that is not one of the accepted labels."""
    if not is_one_of(value, accepted):
        raise LapwingError(
            f"{method}({name}={shown(value)}) is not an option. {name} is one of {', '.join(map(repr, accepted))}: "
            f"write {method}({name}={accepted[0]!r})."
        )


def check_positive(method: str, name: str, value: Any, example: float, limit: float = inf) -> None:
    """Raises for an option that is not a positive finite number of at most `limit`."""
    if not is_positive(value) or value > limit:
        bound = "" if limit == inf else f" of at most {limit:g}"
        raise LapwingError(
            f"{method}({name}={shown(value)}) needs a positive finite number{bound}. Write "
            f"{method}({name}={example:g})."
        )
