"""The calls of full mode: functions of the uncertain tensors that they read, with what gives no sample put inside."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .fusion import aten, call, resolve
from .moments import Treated
from .plan import Item, Plan


@dataclass(frozen=True)
class Call:
    """One step and the steps inside it, whose values have no covariances: tuples, and functions of weights.

    Attributes:
        item: the step.
        inside: the steps inside, in order.
        leaves: names of the uncertain tensors that it is a function of.
        certain: names of the other values it reads.
        carries: whether its value has covariances.
    """

    item: Item
    inside: tuple[Item, ...]
    leaves: tuple[str, ...]
    certain: tuple[str, ...]
    carries: bool

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the values that the function reads."""
        return (*self.leaves, *self.certain)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of all values that the step needs, for its mean or its function."""
        return (*self.needs, *self.item.sources)

    def __call__(self, values: dict[str, Any], dtype: torch.dtype) -> Any:
        """Returns the step's value."""
        for item in self.inside:
            values[item.node.name] = evaluate(item, values, dtype)
        return evaluate(self.item, values, dtype)

    def blocks(
        self, treated: Mapping[str, tuple[Treated, str]], owned: frozenset[str]
    ) -> list[tuple[Treated, dict[str, str]]]:
        """Returns the treated blocks among the leaves that no layer owns, with placeholder -> parameter name."""
        found: dict[str, tuple[Treated, dict[str, str]]] = {}
        for leaf in self.leaves:
            if leaf in treated and leaf not in owned:
                block, parameter = treated[leaf]
                found.setdefault(block.block.name, (block, {}))[1][leaf] = parameter
        return list(found.values())


def calls_of(plan: Plan, samples: Collection[str]) -> tuple[Call, ...]:
    """Puts steps whose values have no samples (names outside `samples`), or are tuples, inside those that read them."""
    inner: dict[str, Item] = {}
    calls = []
    for item in plan.items:
        name = item.node.name
        inside: list[Item] = []
        leaves: dict[str, None] = {}
        certain: dict[str, None] = {}
        _visit(item, inner, inside, leaves, certain)
        carries = bool(item.uncertain)
        if carries and (name not in samples):
            inner[name], carries = item, False
        calls.append(Call(item, tuple(inside), tuple(leaves), tuple(certain), carries))
    return tuple(calls)


def _visit(
    item: Item, inner: Mapping[str, Item], inside: list[Item], leaves: dict[str, None], certain: dict[str, None]
) -> None:
    for name in item.sources:
        if name not in item.uncertain:
            certain[name] = None
        elif name in inner:
            _visit(inner[name], inner, inside, leaves, certain)
            if inner[name] not in inside:
                inside.append(inner[name])
        else:
            leaves[name] = None


def evaluate(item: Item, values: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Runs a step on tensors; attention by plain products, which have forward-mode derivatives."""
    if item.fused is not None:
        return item.fused(values[item.fused.source], values)
    if item.node.target is aten.scaled_dot_product_attention.default:
        args, kwargs = resolve(item.node, values, dtype)
        query, key, value = args[:3]
        names = ("attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args[3:], strict=False)), **kwargs}
        mask = given.get("attn_mask")
        if mask is not None and mask.dtype == torch.bool:  # the plain products add masks
            given["attn_mask"] = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
        return aten._scaled_dot_product_attention_math.default(query, key, value, **given)[0]
    return call(item.node, values, dtype)
