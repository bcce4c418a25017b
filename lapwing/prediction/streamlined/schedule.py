"""The schedule: the calls of a network that carry moments, grouped into functions of one uncertain tensor."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from .functions import Fused
from .graph import Graph
from .operations import Kind, is_a, is_elementwise, is_statistic


@dataclass(frozen=True)
class Step:
    """One step, with the call that returns its value, and its function if it is a function of one uncertain tensor."""

    node: fx.Node
    fused: Fused | None
    uncertain: tuple[str, ...]
    """Names of its uncertain arguments; empty for a step that runs on means."""
    in_moment_dtype: bool
    """Whether it depends on uncertain values."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of all its arguments."""
        if self.fused is not None:
            return (self.fused.source, *self.fused.certain)
        return tuple(node.name for node in self.node.all_input_nodes)


@dataclass(frozen=True)
class Schedule:
    """All steps of a network in order, and the names of all uncertain values."""

    steps: tuple[Step, ...]
    uncertain: frozenset[str]


def schedule(graph: Graph, treated: frozenset[str], inputs: frozenset[str], attention: str) -> Schedule:
    """Returns the steps, for the names of treated parameters and of uncertain inputs."""
    calls, output = graph.nodes, graph.output
    users: dict[str, list[fx.Node]] = {}
    for node in calls:
        for source in node.all_input_nodes:
            users.setdefault(source.name, []).append(node)
    uncertain = set(treated) | set(inputs)
    pinned = _hand_written_scores(calls, users) if attention != "scores" else frozenset[str]()
    for node in calls:
        values = () if is_a(node, Kind.FLAT) else tree_leaves(node.meta.get("val"))
        floats = any(isinstance(v, Tensor) and v.is_floating_point() for v in values)  # other calls run on means
        if floats and node.name not in pinned and any(s.name in uncertain for s in node.all_input_nodes):
            uncertain.add(node.name)
    in_moment_dtype = reached(calls, uncertain)
    wanted = {output} & uncertain
    for node in reversed(calls):
        if node.name in wanted:
            wanted.update(s.name for s in _carriers(node, attention) if s.name in uncertain)
    uncertain = wanted
    moving = reached(calls, set(filter(None, graph.leaves)))
    root, members = _functions(graph, users, frozenset(uncertain), moving)
    steps = []
    for node in calls:
        if node.name not in uncertain:
            steps.append(Step(node, None, (), node.name in in_moment_dtype))
        elif root[node.name] == node.name:
            sources = tuple(s.name for s in _carriers(node, attention) if s.name in uncertain)
            steps.append(Step(node, None, sources, True))
        else:
            fused = _fused(node, root[node.name], members)
            steps.append(Step(node, fused, (fused.source,), True))
    needed, kept = {output}, []
    for step in reversed(steps):
        if step.node.name in needed:
            kept.append(step)
            needed.update(step.sources)
    return Schedule(tuple(reversed(kept)), frozenset(uncertain))


def _carriers(node: fx.Node, attention: str) -> list[fx.Node]:
    """Returns the arguments whose moments a call uses: all of them, but only the values of an attention."""
    if attention != "scores" and is_a(node, Kind.ATTENTION):
        return [node.args[2]]  # type: ignore[list-item]
    return node.all_input_nodes


def reached(calls: Sequence[fx.Node], names: Set[str]) -> set[str]:
    """Returns these values, and the calls that depend on them."""
    names = set(names)
    for node in calls:
        if any(source.name in names for source in node.all_input_nodes):
            names.add(node.name)
    return names


def _hand_written_scores(calls: Sequence[fx.Node], users: Mapping[str, list[fx.Node]]) -> frozenset[str]:
    """Returns the softmaxes of attention written by hand: they follow a product and enter a product."""

    def from_product(node: fx.Node) -> bool:
        """Whether a value is a product of two tensors, up to element-wise calls and views."""
        passes = is_elementwise(node) or is_a(node, Kind.VIEW)
        return is_a(node, Kind.PRODUCT) or (passes and any(map(from_product, node.all_input_nodes)))

    def into_product(node: fx.Node) -> bool:
        readers = users.get(node.name, ())
        return bool(readers) and all(
            is_a(reader, Kind.PRODUCT) or (is_a(reader, Kind.IDENTITY, Kind.VIEW) and into_product(reader))
            for reader in readers
        )

    softmaxes = (node for node in calls if is_a(node, Kind.SOFTMAX))
    return frozenset(node.name for node in softmaxes if from_product(node.all_input_nodes[0]) and into_product(node))


def _functions(
    graph: Graph, users: Mapping[str, list[fx.Node]], uncertain: frozenset[str], moving: set[str]
) -> tuple[dict[str, str], dict[str, list[fx.Node]]]:
    """Returns uncertain value -> the uncertain tensor that it is a function of, or itself; that tensor -> its calls.

    A statistic belongs to such a function unless a call outside reads it, or a function of statistics only.
    """
    alone: set[str] = set()
    while True:
        root = {name: name for name in uncertain}
        members: dict[str, list[fx.Node]] = {}
        for node in graph.nodes:
            sources = [s.name for s in node.all_input_nodes if s.name in uncertain]
            roots = {root[name] for name in sources}
            if node.name not in uncertain or len(roots) != 1 or not moving.issuperset(sources):  # weights: no samples
                continue
            if node.target is operator.getitem and root[sources[0]] == sources[0]:
                continue
            if is_elementwise(node) or (is_statistic(node) and node.name not in alone):
                (source,) = roots
                root[node.name] = source
                members.setdefault(source, []).append(node)
        found = (_outside(source, some, users, root, graph.output) for source, some in members.items())
        outside = set[str]().union(*found)
        if not outside:
            return root, members
        alone |= outside


def _outside(
    source: str, members: Sequence[fx.Node], users: Mapping[str, list[fx.Node]], root: Mapping[str, str], output: str
) -> set[str]:
    """Returns the statistics of a tensor that reach calls outside the functions of the tensor."""
    whole, made_of = {source}, dict[str, set[str]]()
    outside = set[str]()
    for node in members:
        sources, statistic = [s.name for s in node.all_input_nodes], is_statistic(node)
        if not statistic and not whole.isdisjoint(sources):
            whole.add(node.name)
            continue
        made_of[node.name] = {node.name} if statistic else set()
        made_of[node.name].update(*(made_of.get(name, ()) for name in sources))
        if node.name == output or any(root.get(user.name) != source for user in users.get(node.name, ())):
            outside |= made_of[node.name]
    return outside


def _fused(node: fx.Node, source: str, members: Mapping[str, list[fx.Node]]) -> Fused:
    """Returns the function from a source to one value, with the members of its group that it needs."""
    needed, body = {node}, []
    for member in reversed(members[source]):
        if member in needed:
            body.append(member)
            needed.update(member.all_input_nodes)
    return Fused(source, tuple(reversed(body)))
