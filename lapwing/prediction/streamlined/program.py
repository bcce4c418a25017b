"""The program: a plan with the rule of each call, run on one chunk of samples in a Python loop without branches."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from ... import batches
from ...covariance import Covariance
from ...errors import LapwingError
from ...tangent import Block, Tangent
from . import (
    arithmetic,
    attention,
    branches,
    conv,
    elementwise,
    embedding,
    generic,
    linear,
    norm,
    pooling,
    shapes,
    tail,
)
from .branches import Branches
from .fusion import call, resolve
from .graph import Graph
from .layout import Layout
from .moments import Moments, Rule, Site, Treated, Value, mean_of
from .plan import Item, Plan, plan
from .positions import layouts
from .rows import Rows, read_rows

log = logging.getLogger("lapwing")

_TOLD: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

RULES: dict[Any, Rule] = {
    **shapes.RULES, **arithmetic.RULES, **linear.RULES, **conv.RULES, **pooling.RULES, **norm.RULES, **embedding.RULES,
    **attention.RULES,
}  # fmt: skip
"""ATen call -> its moment rule. A new family adds its own here."""


@dataclass(frozen=True)
class Options:
    """What a program is built for: see `Streamlined`; and the places of uncertain inputs among their leaves."""

    full: bool
    correlated: bool
    attention: str
    activations: str
    inputs: tuple[int, ...] = ()
    positions: str = "independent"


@dataclass
class Program:
    """A network's moments as a list of steps.

    Attributes:
        graph: the calls.
        plan: which of them carry moments.
        sites: name of a call -> what its rule knows.
        treated: parameter's placeholder -> (its block, its name).
        dtype: the dtype of the moments.
        network: name of the network's class.
        options: what it was built for.
        rows: where the samples are, for the correlations of branches.
        layouts: name of a value -> its dimensions, where positions are correlated.
    """

    graph: Graph
    plan: Plan
    sites: Mapping[str, Site]
    treated: Mapping[str, tuple[Treated, str]]
    dtype: torch.dtype
    network: str
    options: Options
    rows: Rows | None = None
    layouts: Mapping[str, Layout] = field(default_factory=dict, repr=False)
    _branches: dict[str, Branches] = field(default_factory=dict, repr=False)
    _tail: frozenset[str] = frozenset()
    _numbers: int = 1
    _end_numbers: int = 1
    _frees: list[list[str]] = field(default_factory=list, repr=False)
    _cast: dict[str, tuple[Any, Tensor]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Finds after which step each value is no longer needed, and where the end of the network starts."""
        self._tail = tail.find(self.plan)
        self._numbers = max(map(_numbers, self.plan.items), default=1)
        shapes = [x.shape for item in self.plan.items[-1:] if isinstance(x := item.node.meta.get("val"), Tensor)]
        outputs = max((_hint(shape[-1]) for shape in shapes), default=1)
        weights = (
            self.graph.tensors.get(s.name)
            for i in self.plan.items
            if i.node.name in self._tail
            for s in i.node.all_input_nodes
        )
        self._end_numbers = 4 * outputs**2 + 2 * max((w.numel() for w in weights if w is not None), default=0)
        tracked = self.rows is not None and self.options.correlated
        self._branches = {} if self.rows is None or not tracked else branches.find(self.plan, self.rows)
        last: dict[str, int] = {}
        for place, item in enumerate(self.plan.items):
            kept = self._branches[item.node.name].reads if item.node.name in self._branches else ()
            last.update(dict.fromkeys((*item.sources, *kept), place))
        self._frees = [[] for _ in self.plan.items]
        for name, place in last.items():
            if name != self.plan.output and name not in self.graph.tensors:
                self._frees[place].append(name)

    @property
    def ends(self) -> frozenset[str]:
        """Names of the steps at the end that have covariances."""
        return self._tail

    @property
    def largest(self) -> int:
        """Returns the numbers a sample of the largest uncertain tensor, estimated."""
        values = [(item.node, item.node.meta.get("val")) for item in self.plan.items if item.uncertain]
        samples = max(2, _batch_hint(values[0][0]))
        return max(prod(map(_hint, v.shape)) // samples for _, v in values if isinstance(v, Tensor)) or 1

    @property
    def bytes_per_sample(self) -> int:
        """Estimates what the largest step holds for one sample."""
        return (8 * self._numbers + self._end_numbers) * self.dtype.itemsize

    def run(self, inputs: Any, variances: Mapping[int, Tensor]) -> tail.Joint:
        """Carries moments to the output.

        Args:
            inputs: B samples.
            variances: place of an uncertain input among the leaves -> its variances, in its own shape.

        Returns:
            Means (B, C) and covariances (B, C, C), diagonal unless the last layer gives others.
        """
        samples = batches.size(inputs)
        values = self.start(inputs, variances)
        for item, freed in zip(self.plan.items, self._frees, strict=True):
            values[item.node.name] = self.step(item, values, samples)
            for name in freed:
                values.pop(name, None)
        found = values[self.plan.output]
        if isinstance(found, tail.Joint):
            return found
        return tail.Joint(found.mean, torch.diag_embed(found.variance))

    def start(self, inputs: Any, variances: Mapping[int, Tensor]) -> dict[str, Value]:
        """Returns the values of all placeholders, treated parameters and uncertain inputs with their moments."""
        values: dict[str, Value] = {**self.graph.bind(inputs), **self.weights()}
        for place, variance in variances.items():
            name = self.graph.leaves[place] or ""
            values[name] = Moments(values[name].to(self.dtype), variance.to(self.dtype))
        return values

    def weights(self) -> dict[str, Value]:
        """Returns the network's own tensors, treated parameters with their moments."""
        values: dict[str, Value] = {name: value.detach() for name, value in self.graph.tensors.items()}
        for name, (treated, parameter) in self.treated.items():
            if name in self.plan.uncertain:
                values[name] = Moments(self.worked(name, values[name]), treated.marginals[parameter])
        return values

    def step(self, item: Item, values: Mapping[str, Value], samples: int) -> Value:
        """Returns the value of one step."""
        node = item.node
        if not item.worked:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n.name])
            return node.target(*args, **kwargs)  # type: ignore[operator]
        given = {name: self.worked(name, values[name]) for name in item.sources}
        if not item.uncertain:
            return call(node, {name: means(value) for name, value in given.items()}, self.dtype)
        if node.name in self._tail:
            found = self._end(item, given, samples)
            if found is not None:
                return found
        given = {name: _marginal(v) if name in item.uncertain else means(v) for name, v in given.items()}
        if item.fused is not None:
            layout = self.layouts.get(node.name)
            return elementwise.carried(item.fused, given, self.options.activations, layout)
        site = self.sites[node.name]
        if node.target not in RULES:
            assert self.rows is not None
            return generic.linearised(item, site, given, self.rows, samples, self.dtype)
        arguments = site.named(*resolve(node, given, self.dtype))
        found = RULES[node.target](site.at(samples) if site.layouts else site, arguments)
        if node.name in self._branches:
            return self._correlated(self._branches[node.name], found, values, site, arguments, samples)
        return found

    def _correlated(
        self,
        sides: Branches,
        found: Moments,
        values: Mapping[str, Value],
        site: Site,
        arguments: Mapping[str, Any],
        samples: int,
    ) -> Moments:
        """Adds `2 α Cov[x, h]` to the variances of `x + α h`."""
        assert self.rows is not None
        given = {name: self.worked(name, values[name]) for name in sides.reads + sides.sides}
        sign = arguments.get("alpha", 1) * (-1 if "sub" in str(site.node.target) else 1)
        shared = sides.covariance(given, self.rows, samples, self.dtype, site)
        return Moments(found.mean, (found.variance + 2 * sign * shared).clamp_min(0), found.correlation)

    def _end(self, item: Item, given: dict[str, Value], samples: int) -> tail.Joint | None:
        """Returns the value of a step at the end of the network with covariances, if it has them."""
        source = given[item.uncertain[0]]
        if isinstance(source, tail.Joint):

            def viewed(x: Tensor) -> Tensor:
                return call(item.node, {**given, item.uncertain[0]: x}, self.dtype)

            if item.fused is not None and self.options.activations != "linear":
                return None
            return tail.continued(item, source, given, viewed)
        if item.node.name not in self.sites or not tail.is_layer(item.node):
            return None
        site = self.sites[item.node.name]
        given = {name: value if name in item.uncertain else means(value) for name, value in given.items()}
        return tail.last_layer(site, site.named(*resolve(item.node, given, self.dtype)), samples)

    def worked(self, name: str, value: Value) -> Value:
        """Returns a certain value in the dtype of the moments."""
        if not isinstance(value, Tensor) or value.dtype == self.dtype or not value.is_floating_point():
            return value
        if name not in self.graph.tensors:
            return value.to(self.dtype)
        stamp = (value.data_ptr(), value._version)
        found = self._cast.get(name)
        if found is None or found[0] != stamp:
            found = self._cast[name] = (stamp, value.to(self.dtype))
        return found[1]


def _numbers(item: Item) -> int:
    """Estimates the numbers that one step holds a sample: its tensors, patches and attention scores."""
    if not item.worked:
        return 0
    tensors = [node.meta.get("val") for node in (*item.node.all_input_nodes, item.node)]
    sizes = [[_hint(length) for length in value.shape] for value in tensors if isinstance(value, Tensor)]
    samples = max(2, _batch_hint(item.node))
    count = sum(prod(size) for size in sizes)
    if item.node.target in conv.RULES and len(sizes) > 2:
        count += prod(sizes[1]) // max(1, sizes[1][0]) * prod(sizes[-1]) // max(1, sizes[-1][1])
    if item.node.target in attention.RULES and len(sizes) > 2:
        count += prod(sizes[0][:-1]) * sizes[1][-2]
    return -(-count // samples)


def _batch_hint(node: fx.Node) -> int:
    placeholders = (n for n in node.graph.nodes if n.op == "placeholder")
    *_, last = (n.meta.get("val") for n in placeholders)
    return _hint(last.shape[0]) if isinstance(last, Tensor) and last.ndim else 2


def _hint(length: Any) -> int:
    """Returns a length, or the one it had when the network was read."""
    return length if isinstance(length, int) else int(length.node.hint or 1)


def _marginal(value: Value) -> Value:
    return value.marginal if isinstance(value, tail.Joint) else value


def means(value: Value) -> Value:
    """Returns the means of an uncertain value, or of each in a tuple."""
    return tuple(map(mean_of, value)) if isinstance(value, (tuple, list)) else mean_of(value)


def build(tangent: Tangent, covariance: Covariance, graph: Graph, options: Options, example: Any) -> Program:
    """Builds the program of a network.

    Args:
        tangent: the network and its treated blocks.
        covariance: Σ.
        graph: the network's calls.
        options: see `Options`.
        example: inputs that the graph is for.

    Raises:
        LapwingError: a call without a rule; a treated parameter that is used twice, or not at all.
    """
    dtype, network = covariance.record_dtype or tangent.dtype, type(tangent.model).__name__
    treated = _treated(tangent, covariance, graph, dtype)
    inputs = frozenset(name for place in options.inputs if (name := graph.leaves[place]) is not None)
    planned = plan(graph, frozenset(treated), inputs, options.attention)
    _check_uses(network, planned, treated)
    calls = [item.node for item in planned.items if item.uncertain and item.fused is None]
    unruled = any(node.target not in RULES for node in calls)
    rows = read_rows(graph, example, network) if not options.full and (options.correlated or unruled) else None
    together = options.positions == "correlated"
    between = not options.full and options.attention in ("tokens", "features")
    if between and not any(node.target in attention.RULES for node in graph.nodes) and tangent.model not in _TOLD:
        _TOLD.add(tangent.model)
        log.warning(
            "%s calls no scaled_dot_product_attention: Streamlined(attention=%r) is the same as 'values' there, also "
            "for attention written by hand, and for nn.MultiheadAttention that is asked for its weights.",
            network, options.attention,
        )  # fmt: skip
    asked = not options.full and (together or between)
    found = layouts(planned, graph, example, network) if asked else {}
    sites = {node.name: Site.of(node, treated, options.attention, network, found, together) for node in calls}
    kept = found if together else {}
    return Program(graph, planned, sites, treated, dtype, network, options, rows, kept)


def _treated(
    tangent: Tangent, covariance: Covariance, graph: Graph, dtype: torch.dtype
) -> dict[str, tuple[Treated, str]]:
    """Finds the placeholders of treated parameters; a tied one is known by its tensor, not by its name."""
    diagonal = covariance.diagonal()
    owned: dict[int, tuple[Block, str]] = {}
    for block in covariance.blocks:
        for name in block.parameters:
            owned[id(tangent.parameters[name])] = block, name
    blocks: dict[str, Treated] = {}
    found = {}
    for placeholder in graph.parameters:
        owner = owned.get(id(graph.tensors[placeholder]))
        if owner is not None:
            block, name = owner
            if block.name not in blocks:
                blocks[block.name] = Treated.of(block, covariance, diagonal, dtype)
            found[placeholder] = blocks[block.name], name
    return found


def _check_uses(network: str, planned: Plan, treated: Mapping[str, tuple[Treated, str]]) -> None:
    """Refuses parameters that several calls share: their outputs are correlated, which variances cannot hold."""
    uses: dict[str, list[fx.Node]] = {}
    for placeholder, (_, name) in treated.items():
        uses.setdefault(name, []).extend(planned.users.get(placeholder, ()))
    for name, nodes in uses.items():
        carrying = [node for node in nodes if node.name in planned.uncertain]
        if len(carrying) > 1:
            raise LapwingError(
                f"Asked for streamlined prediction through {network}, found that {len(carrying)} of its calls share "
                f"the treated parameter {name}, so that they are not independent; each treated parameter may be used "
                "once: treat others with params=lw.matching(...), or write via=lw.Linearized() instead."
            )
    if planned.output not in planned.uncertain:
        raise LapwingError(
            f"Asked for streamlined prediction through {network}, found that no treated parameter reaches its outputs "
            "with what is carried; treated values, or layers after an attention, are needed: write "
            "via=lw.Linearized() instead."
        )
