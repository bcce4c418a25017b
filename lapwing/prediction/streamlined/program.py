"""The program: a schedule with the rule of each call, run on one chunk of samples in a Python loop without branches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ...network import batches
from .axes import SampleAxes
from .forward_mode import Branches, find_branches, linearised
from .functions import carry, carry_covariance
from .graph import Graph, execute
from .moments import Layout, Moments, Value, mean_of
from .operations import Kind, is_a, length_of, operation_of, shape_of
from .rules.linear import linear_with_covariances
from .schedule import Schedule, Step
from .sites import Site, Treated, resolve, run

if TYPE_CHECKING:
    from . import Streamlined


@dataclass
class Program:
    """A network's moments as a list of steps.

    Attributes:
        graph: the calls.
        schedule: which of them carry moments.
        sites: name of a call -> what its rule knows.
        treated: parameter's placeholder -> (its block, its name).
        dtype: the dtype of the moments.
        network: name of the network's class.
        way: the options that it was built for.
        axes: where the samples are, for the correlations of branches and calls without a rule.
        layouts: name of a value -> its dimensions, where positions are correlated.
        ends: names of the steps at the end that have covariances.
        bytes_per_sample: what the largest step holds for one sample, estimated.
    """

    graph: Graph
    schedule: Schedule
    sites: Mapping[str, Site]
    treated: Mapping[str, tuple[Treated, str]]
    dtype: torch.dtype
    network: str
    way: Streamlined
    axes: SampleAxes | None = None
    layouts: Mapping[str, Layout] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Reads the end of the network, and after which step each value is no longer needed."""
        steps = self.schedule.steps
        self.ends = _ends(self.schedule)
        self.bytes_per_sample = self._numbers_per_sample() * self.dtype.itemsize
        tracked = self.axes is not None and self.way.tracks_branches
        self._branches: dict[str, Branches] = find_branches(self.schedule, self.axes) if tracked else {}  # type: ignore[arg-type]
        last_reads: dict[str, int] = {}
        for place, step in enumerate(steps):
            branches = self._branches.get(step.node.name)
            last_reads.update(dict.fromkeys((*step.sources, *(branches.reads if branches else ())), place))
        self._frees: list[list[str]] = [[] for _ in steps]
        for name, place in last_reads.items():
            if name != self.schedule.output and name not in self.graph.tensors:
                self._frees[place].append(name)
        self._casts: dict[str, tuple[Any, Tensor]] = {}

    def run(self, inputs: Any, variances: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Carries moments to the output.

        Args:
            inputs: B samples.
            variances: place of an uncertain input among the leaves -> its variances, in its shape.

        Returns:
            Means (B, C) and covariances (B, C, C), diagonal unless the last layer gives others.
        """
        samples = batches.size(inputs)
        values = self.start(inputs, variances)
        for step, freed in zip(self.schedule.steps, self._frees, strict=True):
            values[step.node.name] = self.step(step, values, samples)
            for name in freed:
                values.pop(name, None)
        output: Moments = values[self.schedule.output]
        return output.mean, torch.diag_embed(output.variance) if output.covariance is None else output.covariance

    def start(self, inputs: Any, variances: Mapping[int, Tensor]) -> dict[str, Value]:
        """Returns the values of all placeholders, treated parameters and uncertain inputs with their moments."""
        values: dict[str, Value] = {**self.graph.bind(inputs), **self.weights()}
        for place, variance in variances.items():
            name = self.graph.leaves[place] or ""
            values[name] = Moments(values[name].to(self.dtype), variance.to(self.dtype))
        return values

    def weights(self) -> dict[str, Value]:
        """Returns the network's tensors, treated parameters with their moments."""
        values: dict[str, Value] = {name: value.detach() for name, value in self.graph.tensors.items()}
        for name, (treated, parameter) in self.treated.items():
            if name in self.schedule.uncertain:
                values[name] = Moments(self.cast(name, values[name]), treated.marginals[parameter])
        return values

    def step(self, step: Step, values: Mapping[str, Value], samples: int) -> Value:
        """Returns the value of one step."""
        node = step.node
        if not step.in_moment_dtype:
            return execute(node, lambda n: values[n.name])
        read = {name: self.cast(name, values[name]) for name in step.sources}
        if not step.uncertain:
            return run(node, {name: means_of(value) for name, value in read.items()}, self.dtype)
        read = {name: value if name in step.uncertain else means_of(value) for name, value in read.items()}
        if node.name in self.ends:
            result = self._with_covariances(step, read, samples)
            if result is not None:
                return result
        if step.fused is not None:
            return carry(step.fused, read, self.way.activations, self.layouts.get(node.name))
        site, rule = self.sites[node.name], operation_of(node).rule
        if rule is None:
            assert self.axes is not None
            return linearised(step, site, read, self.axes, samples, self.dtype)
        arguments = site.named(*resolve(node, read, self.dtype))
        result = rule(site.at(samples) if site.layouts else site, arguments)
        if node.name in self._branches:
            return self._correlated(node.name, result, values, arguments, samples)
        return result

    def _with_covariances(self, step: Step, read: dict[str, Value], samples: int) -> Moments | None:
        """Returns the value of a step at the end of the network with covariances, None where it has none."""
        (name, *_), node = step.uncertain, step.node
        source = read[name]
        if isinstance(source, Moments) and source.covariance is not None:
            if step.fused is not None:
                return carry_covariance(step.fused, source, read) if self.way.activations == "linear" else None
            mean = run(node, {**read, name: source.mean}, self.dtype)
            return Moments.joint(mean, source.covariance) if mean.numel() == source.mean.numel() else None
        if not is_a(node, Kind.LINEAR):
            return None
        site = self.sites[node.name]
        return linear_with_covariances(site, site.named(*resolve(node, read, self.dtype)), samples)

    def _correlated(
        self, name: str, result: Moments, values: Mapping[str, Value], arguments: Mapping[str, Any], samples: int
    ) -> Moments:
        """Adds `2 α Cov[x, h]` to the variances of `x + α h`."""
        assert self.axes is not None
        branches, site = self._branches[name], self.sites[name]
        read = {name: self.cast(name, values[name]) for name in branches.reads + branches.sides}
        sign = arguments.get("alpha", 1) * (-1 if "sub" in str(site.node.target) else 1)
        shared = branches.covariance(read, self.axes, samples, self.dtype, site)
        return Moments(result.mean, (result.variance + 2 * sign * shared).clamp_min(0), result.correlation)

    def cast(self, name: str, value: Value) -> Value:
        """Returns a certain value in the dtype of the moments; the network's tensors are kept in it."""
        if not isinstance(value, Tensor) or value.dtype == self.dtype or not value.is_floating_point():
            return value
        if name not in self.graph.tensors:
            return value.to(self.dtype)
        stamp = (value.data_ptr(), value._version)
        known = self._casts.get(name)
        if known is None or known[0] != stamp:
            known = self._casts[name] = (stamp, value.to(self.dtype))
        return known[1]

    @property
    def largest(self) -> int:
        """The numbers per sample of the largest uncertain tensor, estimated."""
        nodes = [step.node for step in self.schedule.steps if step.uncertain]
        samples = max(2, _batch_length(nodes[0]))
        return max(prod(shape_of(n)) // samples for n in nodes if isinstance(n.meta.get("val"), Tensor)) or 1

    def _numbers_per_sample(self) -> int:
        steps = self.schedule.steps
        largest = max(map(_numbers, steps), default=1)
        outputs = max((shape_of(step.node)[-1] for step in steps[-1:] if shape_of(step.node)), default=1)
        sources = (s.name for step in steps if step.node.name in self.ends for s in step.node.all_input_nodes)
        weights = max((self.graph.tensors[name].numel() for name in sources if name in self.graph.tensors), default=0)
        return 8 * largest + 4 * outputs**2 + 2 * weights


def means_of(value: Value) -> Value:
    """Returns the means of an uncertain value, or of each in a tuple."""
    return tuple(map(mean_of, value)) if isinstance(value, (tuple, list)) else mean_of(value)


def _ends(schedule: Schedule) -> frozenset[str]:
    """Returns the names of the steps from the last linear layer on, none where something else is between.

    Element-wise functions and views may follow it; the values between must have one reader.
    """
    steps = {step.node.name: step for step in schedule.steps}
    readers: dict[str, int] = {}
    for step in schedule.steps:
        for name in step.sources:
            readers[name] = readers.get(name, 0) + 1
    ends, name = [], schedule.output
    while name in steps:
        step = steps[name]
        ends.append(name)
        if step.fused is not None and not step.fused.statistics:
            name = step.fused.source
        elif step.uncertain and is_a(step.node, Kind.ORDERED):
            name = step.uncertain[0]
        else:
            return frozenset(ends) if step.uncertain and is_a(step.node, Kind.LINEAR) else frozenset()
        if readers[name] > 1:
            return frozenset()
    return frozenset()


def _numbers(step: Step) -> int:
    """Estimates the numbers that one step holds a sample: its tensors, patches and attention scores."""
    if not step.in_moment_dtype:
        return 0
    nodes = [n for n in (*step.node.all_input_nodes, step.node) if isinstance(n.meta.get("val"), Tensor)]
    sizes = [shape_of(node) for node in nodes]
    count = sum(prod(size) for size in sizes)
    if is_a(step.node, Kind.CONVOLUTION) and len(sizes) > 2:
        count += prod(sizes[1]) // max(1, sizes[1][0]) * prod(sizes[-1]) // max(1, sizes[-1][1])
    if is_a(step.node, Kind.ATTENTION) and len(sizes) > 2:
        count += prod(sizes[0][:-1]) * sizes[1][-2]
    return -(-count // max(2, _batch_length(step.node)))


def _batch_length(node: fx.Node) -> int:
    """Returns the length of the batch that the network was read with."""
    *_, value = (n.meta.get("val") for n in node.graph.nodes if n.op == "placeholder")
    return length_of(value.shape[0]) if isinstance(value, Tensor) and value.ndim else 2
