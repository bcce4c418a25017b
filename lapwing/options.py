"""Options of dataclasses, each declared with what it accepts: one check and one form of message for all of them.

    @dataclass(frozen=True)
    class Method(Options):
        rank: int = option(20, at_least(1))
        sampling: Literal["uniform", "balanced"] = "uniform"
        rescale: bool = False

A `Literal` is the list of its labels, and a `bool` is True or False. Other options without a rule are not checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from math import inf, isfinite
from numbers import Integral, Real
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from .errors import LapwingError, is_one_of, is_positive, plain_numbers, shown

INT64_LIMIT = 2**63  # 64-bit integers are smaller


@dataclass(frozen=True)
class Rule:
    """What an option accepts."""

    accepts: Callable[[Any], bool]
    text: str  # what is accepted, to follow "must be": "a whole number of at least 1"
    convert: Callable[[Any], Any] = lambda value: value  # returns the value that the option keeps

    def or_else(self, other: Rule) -> Rule:
        """Accepts what either rule accepts, without conversion."""
        return Rule(lambda value: self.accepts(value) or other.accepts(value), f"{self.text} or {other.text}")


def positive(limit: float = inf) -> Rule:
    """Accepts positive finite numbers up to `limit`, and keeps them as floats."""
    bound = "" if limit == inf else f" of at most {limit:g}"
    return Rule(lambda value: is_positive(value) and value <= limit, f"a positive finite number{bound}", float)


def number(low: float, below: float = inf) -> Rule:
    """Accepts finite numbers from `low` to less than `below`, and keeps them as floats."""
    text = f"a finite number of at least {low:g}" if below == inf else f"a number from {low:g} to less than {below:g}"
    return Rule(lambda value: _is_real(value) and low <= value < below, text, float)


def between(low: float, high: float) -> Rule:
    """Accepts numbers above `low` and below `high`, and keeps them as floats."""
    return Rule(lambda value: _is_real(value) and low < value < high, f"a number between {low:g} and {high:g}", float)


def _numbers(value: Any) -> tuple[Any, ...]:
    plain = plain_numbers(value)
    return tuple(plain) if isinstance(plain, (list, tuple)) else (plain,)


POSITIVE_NUMBERS = Rule(
    lambda value: _numbers(value) != () and all(map(is_positive, _numbers(value))),
    "a positive finite number or a list of them",
    lambda value: tuple(map(float, _numbers(value))),
)
"""One number or several, such as weights of classes; kept as a tuple of floats."""


def _number_or_tuple(value: Any) -> float | tuple[float, ...]:
    numbers = POSITIVE_NUMBERS.convert(value)
    return numbers if isinstance(plain_numbers(value), (list, tuple)) else numbers[0]


POSITIVE_OF_EACH = replace(POSITIVE_NUMBERS, convert=_number_or_tuple)
"""One number for all outputs, kept as a float, or one for each output, kept as a tuple of floats."""


def integer(low: int, below: int = INT64_LIMIT, text: str | None = None) -> Rule:
    """Accepts integers from `low` to below `below`, numpy's included, and keeps them as `int`; `text` says which."""

    def accepts(value: Any) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) < below

    return Rule(accepts, text or f"an integer from {low} to {below - 1}", int)


def at_least(low: int) -> Rule:
    """Accepts integers of 64 bits from `low`."""
    return integer(low, text=f"a whole number of at least {low}")


SEED = integer(0, text="a whole number from 0 to 2**63 - 1")
"""The seed of a random generator."""


def instance_of(text: str, *classes: type) -> Rule:
    """Accepts instances of some classes; `text` says what they are."""
    return Rule(lambda value: isinstance(value, classes), text)


def option(default: Any, rule: Rule | None = None, *, write: str | None = None, **others: Any) -> Any:
    """Returns the field of an option: `dataclasses.field(**others)` with a default and a check.

    The option accepts its default, the labels of its annotation, and what `rule` accepts. If the default is a function,
    each object gets a new result of it. `write` is an accepted value as code, for messages; None means the default.
    """
    kind = "default_factory" if callable(default) else "default"
    return field(**{kind: default}, metadata={"rule": rule, "write": write}, **others)


def required(rule: Rule, write: str) -> Any:
    """Returns the metadata of an option without a default: write `size: int = field(metadata=required(...))`."""
    return {"rule": rule, "write": write}


class Options:
    """Base of dataclasses with options: checks each field when an object is made.

    A class with a rule about two options has a `__post_init__` of its own, which begins with `super().__post_init__()`.
    """

    call: ClassVar[str | None] = None  # the call in messages, with {} for the option; None means the constructor

    def __post_init__(self) -> None:
        """Raises if an option is not accepted; keeps converted values."""
        for item in fields(self):  # type: ignore[arg-type]
            if not item.init:
                continue
            value, rule = getattr(self, item.name), item.metadata.get("rule")
            labels = labels_of(type(self), item.name)  # type: ignore[arg-type]
            if is_one_of(value, (*labels, item.default)) or (rule is None and not labels):
                continue
            if rule is None or not rule.accepts(value):
                raise _refusal_of(self, item, value)
            object.__setattr__(self, item.name, rule.convert(value))


def _refusal_of(options: Any, item: Field[Any], value: Any) -> LapwingError:
    kind, rule, labels = type(options), item.metadata.get("rule"), labels_of(type(options), item.name)  # type: ignore[arg-type]
    none = (None,) if item.default is None and None not in labels else ()
    accepted = [*([rule.text] if rule else []), *map(repr, (*labels, *none))]
    write = item.metadata.get("write") or repr(item.default)
    needed = [write if one is item else one.name for one in fields(options) if _is_required(one)]
    line = ", ".join(needed if _is_required(item) else [*needed, f"{item.name}={write}"])
    if kind.call is not None:
        subject, line = kind.call.partition("(")[0], kind.call.format(line)
    else:
        subject, prefix = kind.__name__, "lw." if kind.__module__.startswith("lapwing.") else ""
        line = f"{prefix}{subject}({line})"
    *others, last = accepted
    return refusal(subject, item.name, value, f"{', '.join(others)} or {last}" if others else last, line)


def refusal(subject: str, name: str, value: Any, accepted: str, line: str) -> LapwingError:
    """Returns the error for a wrong value: what was given, what is accepted, and the line to write."""
    return LapwingError(f"{subject}({name}={shown(value)}) is not valid: {name} must be {accepted}. Write {line}.")


def check_argument(function: str, name: str, value: Any, rule: Rule, write: str) -> None:
    """Raises for an argument of a function that a rule does not accept; `write` is an accepted value as code."""
    if not rule.accepts(value):
        raise refusal(function, name, value, rule.text, f"{name}={write}")


def _is_required(item: Field[Any]) -> bool:
    return item.init and item.default is MISSING and item.default_factory is MISSING


@cache
def labels_of(kind: type, name: str) -> tuple[Any, ...]:
    """Returns the values that the annotation of an option lists: the labels of its `Literal`, or True and False."""
    for owner in kind.__mro__:
        annotation = vars(owner).get("__annotations__", {}).get(name)
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, vars(sys.modules[owner.__module__]))  # what `get_type_hints` does
            except NameError:  # it names a class that only type checkers import
                return ()
        if annotation is not None:
            return _labels(annotation)
    return ()


def _labels(annotation: Any) -> tuple[Any, ...]:
    """Returns the labels of an annotation; None counts only if there are other labels."""
    if annotation is bool:
        return True, False
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    labels = tuple(label for part in parts for label in _labels(part))
    return (*labels, None) if labels and type(None) in parts else labels


def _is_real(value: Any) -> bool:
    """Whether a value is a finite number, numpy's included."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:  # an integer of more digits than a float has
        return False
