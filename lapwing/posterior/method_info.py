"""How a posterior was made: the record that a posterior carries and its file stores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any


@dataclass(frozen=True)
class MethodInfo:
    """How a posterior was made. `str` gives one line, such as "Diagonal()"."""

    name: str  # class name of the method, such as "KFAC"
    text: str  # `repr` of the method with its options
    options: Mapping[str, Any] = field(default_factory=dict)  # numbers, strings, bools, None; others are only in `text`
    accepts_further_data: bool = False  # whether `Posterior.update` can add data: `Method.accepts_further_data`
    tuning: str | None = None  # text of the tuning that chose δ, σ² or T
    first_samples: tuple[int, int] | None = None  # (n, N) if early stopping kept the curvature of the first n samples
    after_former: bool = False  # whether the prior was a former posterior
    sample_weights: bool = False  # whether the samples had weights
    calibrated: bool = False  # whether held-out data chose T and the map of the logits, and not the user
    rule: str | None = None  # targets whose default method and weights these are; None if the user chose

    @classmethod
    def of(cls, method: Any) -> MethodInfo:
        """Describes a `Method`."""
        options = {f.name: getattr(method, f.name) for f in fields(method)} if is_dataclass(method) else {}
        plain = {
            name: value for name, value in options.items()
            if value is None or isinstance(value, (int, str)) or (isinstance(value, float) and math.isfinite(value))
        }  # fmt: skip
        return cls(type(method).__name__, repr(method), plain, method.accepts_further_data)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MethodInfo:
        """Returns the record from a dict of `dataclasses.asdict`. Ignores unknown keys; missing keys have defaults."""
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        if known.get("first_samples") is not None:
            known["first_samples"] = tuple(known["first_samples"])
        return cls(**known)

    def __str__(self) -> str:
        """The method with its options, and any difference from a plain fit."""
        text = self.text
        if self.first_samples is not None:
            text += ", curvature of the first {} of {} samples".format(*self.first_samples)
        return text + " after a former posterior" if self.after_former else text
