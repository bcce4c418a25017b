"""Every option of every public dataclass refuses a wrong value, and the message ends with a line that works."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
import pytest
import torch

import lapwing as lw
from lapwing import options
from lapwing.likelihoods import links
from lapwing.options import Options, Rule, at_least, between, integer, labels_of, number, option, positive, required

PUBLIC = [getattr(lw, name) for name in lw.__all__]
KINDS = [
    kind for kind in PUBLIC if isinstance(kind, type) and issubclass(kind, Options) and hasattr(kind, "__match_args__")
]
NAMES = {
    "lw": lw, "via": lw.Linearized(), "factor": 1.0, "size": 3, "loader": [(torch.zeros(1, 1), torch.zeros(1, 1))],
    "torch": torch, "function": torch.distributions.Poisson, "x_val": torch.zeros(1, 1), "y_val": torch.zeros(1, 1),
    "likelihoods": {"kind": lw.Gaussian(), "size": lw.Gaussian()}, "outputs": {"kind": slice(0, 3), "size": [3]},
}  # fmt: skip
"""What the lines to write may refer to."""

UNDECLARED = {
    "lw.Validation(loader)", "lw.EarlyStopping(loader)", "lw.AlphaDivergence(validation)", "lw.Linearized(outputs)",
    "lw.OptimalSubspace(at)",
}  # fmt: skip
"""Data, and options that are checked with the network at hand."""


class Wrong:
    """No option accepts it."""


def cases() -> Iterator[Any]:
    for kind in KINDS:
        for item in fields(kind):
            if item.init and f"lw.{kind.__name__}({item.name})" not in UNDECLARED:
                yield pytest.param(kind, item.name, id=f"{kind.__name__}-{item.name}")


@pytest.mark.parametrize(("kind", "name"), list(cases()))
def test_every_option_refuses_what_it_does_not_accept(kind: Any, name: str) -> None:
    needed = {item.name: NAMES[item.name] for item in fields(kind) if options._is_required(item)}
    for wrong in (Wrong(), "Wrong", math.nan, torch.zeros(3), np.zeros(3), 10**400, -1.5):
        try:
            kind(**{**needed, name: wrong})
        except lw.LapwingError as error:
            message = str(error)
            assert f"({name}=" in message
            assert " must be " in message
            line = message.rpartition("Write ")[2].removesuffix(".")
            made = eval(line, dict(NAMES))
            assert isinstance(made, kind)
        else:
            assert not isinstance(wrong, (Wrong, str))
            assert wrong is not math.nan


def test_whatever_is_not_declared_is_known() -> None:
    known = set()
    for kind in KINDS:
        for item in fields(kind):
            if item.init and not item.metadata.get("rule") and not labels_of(kind, item.name):
                known.add(f"lw.{kind.__name__}({item.name})")
    assert known == UNDECLARED


@pytest.mark.parametrize(
    ("rule", "accepted", "refused"),
    [
        (at_least(2), [2, 2**63 - 1, np.int64(2)], [1, 2**63, 2.0, True, "2", None]),
        (positive(), [1, 0.5, np.float32(0.5), 1e300], [0, -1.0, math.nan, math.inf, True, "1", 10**400]),
        (positive(limit=1.0), [1, 0.5], [1.5, 0.0]),
        (number(0), [0, 0.0, 5], [-1e-9, math.inf, math.nan, True, 10**400]),
        (number(0, below=1), [0, 0.99], [1, 1.0, -0.1]),
        (between(0, 1), [0.5], [0, 1, True]),
        (integer(-3, 3), [-3, 2, np.int64(1)], [3, -4, 1.0, True]),
        (options.SEED, [0, 2**63 - 1], [2**63, -1, 0.0]),
        (options.POSITIVE_NUMBERS, [1, [1, 2.5], np.ones(2), torch.ones(2)], [[], [0.0], "ab", [1, None], np.zeros(2)]),
    ],
)  # fmt: skip
def test_rules(rule: Rule, accepted: list[Any], refused: list[Any]) -> None:
    assert all(rule.accepts(value) for value in accepted)
    assert not any(rule.accepts(value) for value in refused)


@dataclass(frozen=True)
class Mine(Options):
    size: int = field(metadata=required(at_least(1), "3"))
    rank: int | Literal["all"] = option(20, at_least(1))
    rate: float | None = option(None, positive(), write="0.1")
    residual: Literal["prior"] | None = None
    rescale: bool = False
    label: str = "free"


def test_options_outside_the_package() -> None:
    mine = Mine(3, rank="all", rate=np.float32(0.5))
    assert (mine.rank, mine.rate, type(mine.rate)) == ("all", 0.5, float)
    for wrong, message in (
        ({"rank": 0}, "Mine(rank=0) is not valid: rank must be a whole number of at least 1 or 'all'. Write "
                      "Mine(size, rank=20)."),
        ({"rate": -1}, "Mine(rate=-1) is not valid: rate must be a positive finite number or None. Write "
                       "Mine(size, rate=0.1)."),
        ({"residual": "x"}, "Mine(residual='x') is not valid: residual must be 'prior' or None. Write "
                            "Mine(size, residual=None)."),
        ({"rescale": 1}, "Mine(rescale=1) is not valid: rescale must be True or False. Write Mine(size, "
                         "rescale=False)."),
        ({"size": 0}, "Mine(size=0) is not valid: size must be a whole number of at least 1. Write Mine(3)."),
    ):  # fmt: skip
        with pytest.raises(lw.LapwingError, match=f"^{re.escape(message)}$"):
            Mine(**{"size": 3, **wrong})
    assert Mine(3, label=Wrong()).size == 3  # type: ignore[arg-type]


def test_an_option_keeps_a_plain_number() -> None:
    """Files store options as JSON, which has no numbers of numpy's."""
    assert type(lw.Categorical(label_smoothing=np.float32(0.5)).label_smoothing) is float
    assert type(lw.Categorical(ignore_index=np.int64(3)).ignore_index) is int
    assert lw.Bernoulli(pos_weight=np.array([2.0, 3.0])).pos_weight == (2.0, 3.0)
    assert lw.SampledLink(links.MAX_DRAWS).draws == links.MAX_DRAWS
