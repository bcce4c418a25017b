"""The program: a schedule with the rule of each call, built once and run on chunks of samples."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ...covariance import Covariance
from ...covariance.terms import DenseTerm, EigenTerm, Term
from ...data.inputs import Inputs
from ...errors import LapwingError
from ...network.stamp import fingerprint
from ...tangent import Tangent
from . import rules  # noqa: F401 (fills the table)
from .axes import SampleAxes, read_axes, read_layouts
from .forward_mode import linearised
from .functions import carry, carry_covariance
from .graph import Graph, execute
from .moments import Layout, Moments, Value, mean_of
from .operations import Kind, has_forward_mode, is_a, length_of, operation_of, shape_of
from .rules.linear import linear_with_covariances
from .rules.norm import log_softmax_with_covariances
from .schedule import Schedule, Step, reached, schedule
from .sites import Site, Treated, arguments_of, refusal, roles_of, run, weights_of

if TYPE_CHECKING:
    from . import Streamlined

log = logging.getLogger("lapwing")


def build(
    tangent: Tangent,
    covariance: Covariance,
    graph: Graph,
    way: Streamlined,
    example: Inputs,
    decompose: Callable[[Treated], tuple[Tensor, Tensor]] | None = None,
) -> Program:
    """Builds the program of a network, for inputs like the example, of which the same leaves are uncertain."""
    dtype = covariance.record_dtype or tangent.dtype
    if dtype == torch.float64 and tangent.contraction_dtype != dtype:
        raise LapwingError(
            f"The moments of this {type(covariance).__name__} need float64, which {tangent.device.type} does not "
            "have. Write via=lw.Linearized(), or move the model to the CPU: model.cpu()."
        )
    full, correlated = way.covariance == "full", way.positions == "correlated"
    treated = _treated(tangent, covariance, graph, dtype, decompose)
    inputs = frozenset(name for place in example.spreads if (name := graph.leaves[place]) is not None)
    steps = schedule(graph, frozenset(treated), inputs, way.attention)
    _check_uses(graph, steps, treated)
    _check_forward_mode(graph.network, steps, full)
    calls = [step.node for step in steps.steps if step.uncertain and step.fused is None]
    ruleless = any(operation_of(node).rule is None for node in calls)
    axes = read_axes(graph, example) if full or ruleless else None
    of_values = not full and way.attention == "features"
    if of_values and not any(is_a(n, Kind.ATTENTION) for n in graph.nodes):
        log.warning(
            "%s calls no scaled_dot_product_attention, so Streamlined(attention=%r) works as with 'values'. The same "
            "holds for attention written by hand and for nn.MultiheadAttention with need_weights=True.",
            graph.network, way.attention,
        )  # fmt: skip
    layouts = read_layouts(steps, graph, example) if of_values or (correlated and not full) else {}
    varying = reached(graph.nodes, set(filter(None, graph.leaves)))  # computed from the inputs
    options = way.attention, graph.network, layouts, correlated
    sites = {n.name: Site(n, roles_of(n, treated), *options, weights_of(n) in varying) for n in calls}
    width = tangent.outputs if tangent.positions.several else None
    program = Program(graph, steps, sites, treated, dtype, way, axes, layouts if correlated else {}, width)
    if way.features is not None:
        found, fitted = program.fingerprints(), way.features.posterior
        # on another device the sums of variances of the same posterior differ by up to 1e-5
        if found.shape != fitted.shape or not torch.allclose(found, fitted, rtol=1e-5, atol=0):
            raise LapwingError(
                f"This Streamlined(features=...) was fitted to another posterior of {graph.network}, or to another "
                "prior or noise. Write via=lw.scale_factor(posterior, x, lw.Streamlined(), to=lw.Linearized()) again."
            )
    return program


def _check_forward_mode(network: str, steps: Schedule, full: bool) -> None:
    """Refuses operators from outside torch without a derivative in the table."""
    for step in steps.steps:
        if not step.uncertain:
            continue
        closed = operation_of(step.node).rule is not None if step.fused is None else step.fused.closed
        for node in (step.node,) if step.fused is None else step.fused.body:
            if not has_forward_mode(node) and (full or not closed):
                raise refusal(
                    network,
                    node,
                    "it is an operator from outside torch, and forward mode does not pass through it",
                    "Register a rule for it, or a slope if it is element-wise with certain weights "
                    "(lapwing.prediction.streamlined.register_operation), and pass lw.Streamlined() without full mode.",
                )


def _treated(
    tangent: Tangent, covariance: Covariance, graph: Graph, dtype: torch.dtype, decompose: Any
) -> dict[str, tuple[Treated, str]]:
    """Returns placeholder -> treated parameter, matched by tensors because tied parameters have several names."""
    diagonal, owners = covariance.diagonal(), dict[int, tuple[Treated, str]]()
    for block in covariance.blocks:
        marginals = block.split(diagonal[block.name].to(dtype))
        treated = Treated(block, covariance.layer_block(block.name), marginals, decompose)
        owners.update((id(tangent.parameters[name]), (treated, name)) for name in block.parameters)
    ids = {placeholder: id(graph.tensors[placeholder]) for placeholder in graph.parameters}
    return {placeholder: owners[key] for placeholder, key in ids.items() if key in owners}


def _check_uses(graph: Graph, steps: Schedule, treated: Mapping[str, tuple[Treated, str]]) -> None:
    """Refuses parameters that several calls share: variances cannot represent the correlation of their outputs."""
    uses: dict[str, list[fx.Node]] = {}
    for placeholder, (_, name) in treated.items():
        readers = (node for node in graph.nodes if placeholder in map(str, node.all_input_nodes))
        uses.setdefault(name, []).extend(node for node in readers if node.name in steps.uncertain)
    for name, carrying in uses.items():
        if len(carrying) > 1:
            raise LapwingError(
                f"{len(carrying)} calls of {graph.network} share the treated parameter {name}, so their outputs are "
                "correlated, which streamlined prediction does not support. Treat other parameters with "
                "params=lw.matching(...). Or predict with via=lw.Linearized()."
            )
    if graph.output not in steps.uncertain:
        raise LapwingError(
            f"No treated parameter of {graph.network} reaches its outputs in streamlined prediction. Treat values, or "
            "layers after an attention. Or predict with via=lw.Linearized()."
        )


@dataclass
class Program:
    """A network's moments as a list of steps.

    Attributes:
        treated: placeholder of a parameter -> (its block, its name).
        dtype: the dtype of the moments.
        axes: the dimensions of the samples, for full mode and calls without a rule.
        layouts: name of a value -> its dimensions, if positions are correlated.
        width: C for outputs with positions, (B, T C); otherwise None.
    """

    graph: Graph
    schedule: Schedule
    sites: Mapping[str, Site]
    treated: Mapping[str, tuple[Treated, str]]
    dtype: torch.dtype
    way: Streamlined
    axes: SampleAxes | None = None
    layouts: Mapping[str, Layout] = field(default_factory=dict, repr=False)
    width: int | None = None

    def __post_init__(self) -> None:
        """Finds the steps at the end that have covariances, and the step after which each value is not needed."""
        steps = self.schedule.steps
        self.joint_steps = _joint_steps(self.schedule)
        largest = max(map(_numbers, steps), default=1)
        ends = [step.node for step in steps if step.node.name in self.joint_steps] or [steps[-1].node]
        outputs = max((shape_of(node)[-1] for node in ends if shape_of(node)), default=1)
        sources = (s.name for step in steps if step.node.name in self.joint_steps for s in step.node.all_input_nodes)
        weights = max((self.graph.tensors[name].numel() for name in sources if name in self.graph.tensors), default=0)
        numbers = 8 * largest + 4 * outputs * (self.width or outputs) + 2 * weights
        self.bytes_per_sample = numbers * self.dtype.itemsize  # estimated for the largest step
        last_reads = {name: place for place, step in enumerate(steps) for name in step.sources}
        self._frees: list[list[str]] = [[] for _ in steps]
        for name, place in last_reads.items():
            if name != self.graph.output and name not in self.graph.tensors:
                self._frees[place].append(name)
        self._casts: dict[str, Tensor] = {}

    def run(self, inputs: Inputs) -> tuple[Tensor, Term]:
        """Returns means (B, C) and B covariances, or for outputs with positions means (B, T C) and B T covariances.

        They are diagonal unless a linear layer is last, or is followed only by views, picked entries and linearised
        element-wise functions.
        """
        samples, values = inputs.samples, self.start(inputs)
        for step, freed in zip(self.schedule.steps, self._frees, strict=True):
            values[step.node.name] = self.step(step, values, samples)
            for name in freed:
                values.pop(name, None)
        output: Moments = values[self.graph.output]
        if output.covariance is not None:
            return output.mean, DenseTerm(output.covariance, output.centred)
        variance = output.variance if self.width is None else output.variance.reshape(-1, self.width)
        return output.mean, EigenTerm(None, variance)

    def start(self, inputs: Inputs) -> dict[str, Value]:
        """Returns the values of all placeholders, with moments of treated parameters and uncertain inputs."""
        values: dict[str, Value] = {**self.graph.bind(inputs), **self.weights()}
        for place, variance in inputs.spreads.items():
            name = self.graph.leaves[place] or ""
            values[name] = Moments(values[name].to(self.dtype), variance.to(self.dtype))
        return values

    def weights(self) -> dict[str, Value]:
        """Returns the network's tensors, with moments of treated parameters."""
        values: dict[str, Value] = {name: value.detach() for name, value in self.graph.tensors.items()}
        for name, (treated, parameter) in self.treated.items():
            if name in self.schedule.uncertain:
                values[name] = Moments(self.cast(name, values[name]), treated.marginals[parameter])
        return values

    def fingerprints(self) -> Tensor:
        """Returns the fingerprints (P, 3) of the variances of P treated parameters, which identify the posterior."""
        prints = [fingerprint(treated.marginals[name]) for treated, name in self.treated.values()]
        return torch.stack(prints) if prints else torch.zeros(0, 3).double()

    def step(self, step: Step, values: Mapping[str, Value], samples: int) -> Value:
        node = step.node
        if not step.in_moment_dtype:
            return execute(node, values)
        read = {name: self.cast(name, values[name]) for name in step.sources}
        read = {name: value if name in step.uncertain else mean_of(value) for name, value in read.items()}
        if not step.uncertain:
            return run(node, read, self.dtype)
        if node.name in self.joint_steps:
            result = self._with_covariances(step, read, samples)
            if result is not None:
                return result
        if step.fused is not None:
            return carry(step.fused, read, self.way.activations, self.layouts.get(node.name))
        site, rule = self.sites[node.name], operation_of(node).rule
        if rule is None:
            assert self.axes is not None
            return linearised(step, site, read, self.axes, samples, self.dtype)
        arguments = arguments_of(node, read, self.dtype)
        return rule(replace(site, samples=samples) if site.layouts else site, arguments)

    def _with_covariances(self, step: Step, read: dict[str, Value], samples: int) -> Moments | None:
        """Returns the value of a step at the end of the network with covariances, or None if it has none."""
        (name, *_), node = step.uncertain, step.node
        if is_a(node, Kind.JOIN):
            return self._joined(node, read)
        source = read[name]
        if isinstance(source, Moments) and source.covariance is not None:
            if step.fused is not None:
                return carry_covariance(step.fused, source, read) if self.way.activations == "linear" else None
            if is_a(node, Kind.LOG_SOFTMAX):
                return log_softmax_with_covariances(source)
            mean = run(node, {**read, name: source.mean}, self.dtype)
            if keeps_order(node):
                return Moments.joint(mean, source.covariance, source.centred)
            # the places of the picked entries among the n entries of a sample (B, m), and their rows and columns
            count = source.covariance.shape[1]
            every = torch.arange(count, device=mean.device).expand(samples, -1).reshape(source.mean.shape)
            at = run(node, {**read, name: every}, self.dtype).reshape(samples, -1)
            rows = source.covariance.gather(1, at[:, :, None].expand(-1, -1, count))
            return Moments.joint(mean, rows.gather(2, at[:, None].expand(-1, at.shape[1], -1)))
        if not is_a(node, Kind.LINEAR):
            return None
        site = self.sites[node.name]
        return linear_with_covariances(site, arguments_of(node, read, self.dtype), samples, self.way.features)

    def _joined(self, node: fx.Node, read: dict[str, Value]) -> Moments | None:
        """Returns joined outputs, uncorrelated between parts; None if a part has no covariances, or comes twice."""
        tensors: Any = node.args[0]
        parts = [read[tensor.name] for tensor in tensors]
        unknown = any(isinstance(part, Moments) and part.covariance is None for part in parts)
        if unknown or len(set(tensors)) < len(parts):
            return None
        mean = run(node, {name: mean_of(value) for name, value in read.items()}, self.dtype)
        count, start, total = mean.shape[1], 0, mean.new_zeros(())
        for part in parts:
            end = start + mean_of(part).shape[1]
            if isinstance(part, Moments) and part.covariance is not None:
                total = total + F.pad(part.covariance, (start, count - end, start, count - end))
            start = end
        return Moments.joint(mean, total)

    def cast(self, name: str, value: Value) -> Value:
        """Returns a certain value in the dtype of the moments; tensors of the network are converted once."""
        if not isinstance(value, Tensor) or value.dtype == self.dtype or not value.is_floating_point():
            return value
        if name not in self.graph.tensors:
            return value.to(self.dtype)
        if name not in self._casts:
            self._casts[name] = value.to(self.dtype)
        return self._casts[name]

    @property
    def features(self) -> str | None:
        """The name of the uncertain inputs of a last layer with covariances, or None if there is no such layer."""
        layers = (step for step in self.schedule.steps if step.node.name in self.joint_steps and step.fused is None)
        sources = (name for step in layers if is_a(step.node, Kind.LINEAR) for name in step.uncertain)
        return next((name for name in sources if name not in self.treated), None)

    @property
    def largest(self) -> int:
        """The estimated number of entries per sample of the largest uncertain tensor."""
        nodes = [step.node for step in self.schedule.steps if step.uncertain]
        samples = max(2, _batch_length(nodes[0]))
        return max(prod(shape_of(n)) // samples for n in nodes if isinstance(n.meta.get("val"), Tensor)) or 1


def keeps_order(node: fx.Node) -> bool:
    """Whether a call keeps all entries of a sample in their order."""
    return is_a(node, Kind.ORDERED) and prod(shape_of(node)) == prod(shape_of(node.all_input_nodes[0]))


def _joint_steps(schedule: Schedule) -> frozenset[str]:
    """Returns the names of the last linear layers and the steps after them, or none if other calls come after them.

    Only element-wise functions, views, picked entries, log softmaxes and the join of several layers may follow them,
    and each value must have one reader.
    """
    steps = {step.node.name: step for step in schedule.steps}
    readers = Counter(name for step in schedule.steps for name in step.sources)
    found, names = [], [schedule.steps[-1].node.name]
    while names:
        step = steps.get(names.pop())
        if step is None or not step.uncertain:
            return frozenset()
        found.append(step.node.name)
        kept = [Kind.ORDERED, Kind.PICK]
        if len(shape_of(step.node)) == 2:  # outputs (B, C)
            kept += [Kind.LOG_SOFTMAX, Kind.JOIN]
        if step.fused is not None and not step.fused.statistics:
            sources = [step.fused.source]
        elif step.fused is None and is_a(step.node, *kept):
            sources = list(step.uncertain)
        elif step.fused is None and is_a(step.node, Kind.LINEAR):
            continue
        else:
            return frozenset()
        if any(readers[name] > 1 for name in sources):
            return frozenset()
        names += sources
    return frozenset(found)


def _numbers(step: Step) -> int:
    """Estimates the number of entries per sample of one step: its tensors, patches and attention scores."""
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
    """Returns the length of the batch at the time of reading the network."""
    *_, value = (n.meta.get("val") for n in node.graph.nodes if n.op == "placeholder")
    return length_of(value.shape[0]) if isinstance(value, Tensor) and value.ndim else 2
