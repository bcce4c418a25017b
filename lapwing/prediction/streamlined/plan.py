"""The plan: which calls of a network carry moments, grouped into functions of one uncertain tensor."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from .fusion import IDENTITIES, Fused, aten, is_pointwise, keeps_dims
from .graph import Graph, users_of

PRODUCTS = frozenset({aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default})
SOFTMAXES = frozenset({aten.softmax.int, aten._softmax.default, aten._safe_softmax.default})
VIEWS = frozenset(
    {
        aten.view.default, aten.reshape.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default,
        aten.squeeze.dim, aten.expand.default, aten.flatten.using_ints, aten.unflatten.int,
    }
)  # fmt: skip


_EMPTY = frozenset(
    {
        aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.empty_like.default,
        aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.new_empty.default,
        aten.floor.default, aten.ceil.default, aten.round.default, aten.sign.default, aten.trunc.default,
    }
)  # fmt: skip
"""Calls that take a tensor's shape, or give steps: their values have no slope."""


@dataclass(frozen=True)
class Item:
    """One step of the plan.

    Attributes:
        node: the call whose value it gives.
        fused: the function of one uncertain tensor that it is, if it is one.
        uncertain: names of its uncertain arguments; none for a step that is executed on means.
        worked: whether it depends on uncertain values, so that it runs in the dtype of the moments.
    """

    node: fx.Node
    fused: Fused | None
    uncertain: tuple[str, ...]
    worked: bool

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of everything it reads."""
        if self.fused is not None:
            return (self.fused.source, *self.fused.others)
        return tuple(node.name for node in self.node.all_input_nodes)


@dataclass(frozen=True)
class Plan:
    """All steps of a network in order.

    Attributes:
        items: the steps.
        output: name of the output's value.
        uncertain: names of all uncertain values.
        users: how often each treated parameter is read.
    """

    items: tuple[Item, ...]
    output: str
    uncertain: frozenset[str]
    users: Mapping[str, list[fx.Node]]


def plan(graph: Graph, treated: frozenset[str], inputs: frozenset[str], attention: str) -> Plan:
    """Decides what carries moments.

    Args:
        graph: the network's calls.
        treated: names of treated parameters.
        inputs: names of uncertain inputs.
        attention: "scores" where they are uncertain; else they are certain.
    """
    users, calls, output = users_of(graph.nodes), graph.nodes, graph.output
    uncertain = set(treated) | set(inputs)
    pinned = _scores(calls, users, uncertain) if attention != "scores" else frozenset[str]()
    for node in calls:
        if node.name not in pinned and _floats(node) and any(s.name in uncertain for s in node.all_input_nodes):
            uncertain.add(node.name)
    worked = _reached(calls, set(uncertain))
    uncertain = _wanted(calls, output, uncertain, attention)
    moving = _reached(calls, set(filter(None, graph.leaves)))
    root, members = _roots(calls, users, frozenset(uncertain), moving, output)
    items = []
    for node in calls:
        mine = tuple(s.name for s in carriers(node, attention) if s.name in uncertain)
        if node.name not in uncertain:
            items.append(Item(node, None, (), node.name in worked))
        elif root[node.name] == node.name:
            items.append(Item(node, None, mine, True))
        elif _escapes(node, users, root, output, uncertain):
            fused = _fused(node, root[node.name], members)
            items.append(Item(node, fused, (fused.source,), True))
    return Plan(tuple(_needed(items, output)), output, frozenset(uncertain), users)


def carriers(node: fx.Node, attention: str) -> list[fx.Node]:
    """Returns the arguments whose uncertainty a call carries on: all, but of an attention's only the values."""
    if node.target is aten.scaled_dot_product_attention.default and attention != "scores":
        return [node.args[2]]  # type: ignore[list-item]
    return node.all_input_nodes


def _reached(calls: Sequence[fx.Node], names: set[str]) -> set[str]:
    """Returns the calls that depend on these values."""
    for node in calls:
        if any(source.name in names for source in node.all_input_nodes):
            names.add(node.name)
    return names


def _wanted(calls: Sequence[fx.Node], output: str, uncertain: set[str], attention: str) -> set[str]:
    """Returns the uncertain values whose uncertainty reaches the output."""
    wanted = {output} & uncertain
    for node in reversed(calls):
        if node.name in wanted:
            wanted.update(s.name for s in carriers(node, attention) if s.name in uncertain)
    return wanted


def _floats(node: fx.Node) -> bool:
    """Whether a call gives floating-point values of its arguments; others are executed on means."""
    if node.target in _EMPTY:
        return False
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(v, Tensor) and v.is_floating_point() for v in values)


def _scores(calls: Sequence[fx.Node], users: Mapping[str, list[fx.Node]], uncertain: set[str]) -> frozenset[str]:
    """Returns the softmaxes of products that weight a further product: attention written by hand."""
    found = set()
    for node in calls:
        if node.target in SOFTMAXES and _from_product(node.args[0]) and _into_product(node, users):
            found.add(node.name)
    return frozenset(found)


def _from_product(node: object) -> bool:
    """Whether a value is a product of two tensors, up to element-wise calls and views."""
    seen: list[object] = [node]
    while seen:
        node = seen.pop()
        if not isinstance(node, fx.Node) or node.op != "call_function":
            continue
        if node.target in PRODUCTS:
            return True
        if is_pointwise(node) or node.target in VIEWS:
            seen.extend(node.all_input_nodes)
    return False


def _into_product(node: fx.Node, users: Mapping[str, list[fx.Node]]) -> bool:
    seen = list(users.get(node.name, ()))
    return bool(seen) and all(
        user.target in PRODUCTS or ((user.target in IDENTITIES or user.target in VIEWS) and _into_product(user, users))
        for user in seen
    )


def _roots(
    calls: Sequence[fx.Node],
    users: Mapping[str, list[fx.Node]],
    uncertain: frozenset[str],
    moving: set[str],
    output: str,
) -> tuple[dict[str, str], dict[str, list[fx.Node]]]:
    """Finds, for every uncertain value, the one uncertain tensor that it is a function of, or itself; and who they are.

    A statistic takes part unless it, or what is made of statistics alone, is needed outside.
    """
    alone: set[str] = set()
    while True:
        root = {name: name for name in uncertain}
        members: dict[str, list[fx.Node]] = {}
        for node in calls:
            sources = [s.name for s in node.all_input_nodes if s.name in uncertain]
            roots = {root[name] for name in sources}
            if node.name not in uncertain or len(roots) != 1 or not moving.issuperset(sources):  # weights: no samples
                continue
            if node.target is operator.getitem and root[sources[0]] == sources[0]:
                continue
            if is_pointwise(node) or (keeps_dims(node) and node.name not in alone):
                (source,) = roots
                root[node.name] = source
                members.setdefault(source, []).append(node)
        found = {name for source, some in members.items() for name in _outside(source, some, users, root, output)}
        if not found:
            return root, members
        alone |= found


def _outside(
    source: str, members: Sequence[fx.Node], users: Mapping[str, list[fx.Node]], root: Mapping[str, str], output: str
) -> set[str]:
    """Returns the statistics of a tensor that reach other calls than functions of the tensor itself."""
    whole, made_of = {source}, dict[str, set[str]]()
    found = set[str]()
    for node in members:
        sources = [s.name for s in node.all_input_nodes]
        if not keeps_dims(node) and not whole.isdisjoint(sources):
            whole.add(node.name)
            continue
        made_of[node.name] = {node.name} if keeps_dims(node) else set()
        made_of[node.name].update(*(made_of.get(name, ()) for name in sources))
        if node.name == output or any(root.get(user.name) != source for user in users.get(node.name, ())):
            found |= made_of[node.name]
    return found


def _escapes(
    node: fx.Node, users: Mapping[str, list[fx.Node]], root: Mapping[str, str], output: str, uncertain: set[str]
) -> bool:
    """Whether a value is needed outside the function that it is a part of."""
    mine = root[node.name]
    return node.name == output or any(
        user.name not in uncertain or root[user.name] != mine for user in users.get(node.name, ())
    )


def _fused(node: fx.Node, source: str, members: Mapping[str, list[fx.Node]]) -> Fused:
    inside = {member.name: member for member in members[source]}
    needed, waiting = set[str](), [node]
    while waiting:
        found = waiting.pop()
        if found.name not in needed:
            needed.add(found.name)
            waiting.extend(inside[s.name] for s in found.all_input_nodes if s.name in inside)
    body = tuple(member for member in members[source] if member.name in needed)
    return Fused(source, body, tuple(member.name for member in body if keeps_dims(member)))


def _needed(items: list[Item], output: str) -> list[Item]:
    """Leaves out what no later step reads."""
    needed, kept = {output}, []
    for item in reversed(items):
        if item.node.name in needed:
            kept.append(item)
            needed.update(item.sources)
    return kept[::-1]


__all__ = ["Item", "Plan", "plan"]
