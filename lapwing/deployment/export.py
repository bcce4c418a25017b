"""Exports the moments of a network as one flat graph of ATen calls, with folded constants and copied weights."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ..covariance import Covariance, Latent
from ..covariance.terms import DenseTerm, EigenTerm
from ..data.inputs import Inputs
from ..errors import LapwingError
from ..fitting.novelty import Novelty, features_of
from ..linalg import possible
from ..network.call import finite
from ..network.eager import without_compiled
from ..prediction.streamlined import Streamlined
from ..prediction.streamlined.graph import Graph, name_of, quiet, read, where
from ..prediction.streamlined.moments import Moments, mean_of
from ..prediction.streamlined.operations import Kind, is_a, operation_of
from ..prediction.streamlined.program import Program, build, keeps_order
from ..prediction.streamlined.sites import run as run_call
from ..tangent import Tangent
from ..tangent.features import features_at
from ..tuning.amortized import Amortized, joined_rows, product
from .head import latent_of, moments_of, read_head, squares_of_weights

log = logging.getLogger("lapwing")

Observe = Callable[[Latent, Tensor | None], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Results:
    """What a deployed network returns: `observe` maps a latent with its first `kinds` of moments to tensors.

    It also gets the features of the block `layer` (see `features_at`; None: no features). The score or the p-value of
    `novelty` is one more result. If it has a posterior, the last tensor of `observe` is the doubt, for the p-value.
    """

    observe: Observe
    kinds: int
    novelty: Novelty | None = None
    layer: str | None = None


Traced = tuple[fx.GraphModule, Any, tuple[dict[int, str], ...]]
"""A module of calls on leaves of the inputs, its example, and for every leaf: dimension -> name of a free length."""


def trace(
    tangent: Tangent,
    covariance: Covariance,
    via: Streamlined | Amortized,
    inputs: Inputs,
    wanted: Results,
    linearised: bool,
) -> Traced:
    """Exports the results as calls on tensors, which need rules or slopes in closed form.

    With `linearised` only the last layer may be uncertain, as for `Linearized`.
    """
    inputs = Inputs.of(inputs, tangent.device)
    inputs = _with_distinct_lengths(inputs.with_leaves({place: x.detach() for place, x in enumerate(inputs.leaves)}))
    with torch.no_grad(), without_compiled():
        graph = read(tangent, inputs)
        if not graph.accepts(inputs.take(slice(0, 1))):
            raise _one_size(tangent)
        run: Run
        if isinstance(via, Amortized):
            run = AmortizedRun(via, graph, inputs, wanted, tangent)
        else:
            program = _program(tangent, covariance, graph, via, inputs)
            run = StreamlinedRun(program, inputs, wanted, tangent)
            steps = [step.node for step in program.schedule.steps if step.uncertain]
            known = run.complete and program.joint_steps.issuperset(map(str, steps))
            if linearised and (not known or any(is_a(node, Kind.JOIN) for node in steps)):
                names = [block.name for block in tangent.blocks]
                raise LapwingError(
                    f"lw.Linearized() deploys the uncertain weights of one linear layer at the end, and "
                    f"{type(tangent.model).__name__} has uncertain weights in {', '.join(names[:3])}"
                    f"{', ...' if len(names) > 3 else ''}, or other calls after that layer. Write "
                    "via=lw.Streamlined()."
                )
            if not run.complete and wanted.kinds > 1:
                log.warning(
                    "%s changes the outputs of its last linear layer by calls that lapwing deploys without "
                    "covariances: probabilities may be much flatter than those of posterior.predict. Let one layer "
                    "give all outputs, for instance with the rows of its weights in the order of the classes.",
                    type(tangent.model).__name__,
                )  # fmt: skip
        with quiet():
            shapes = tuple({d: Dim.AUTO for d, n in enumerate(s) if isinstance(n, str)} or None for s in graph.shapes)
            exported = torch.export.export(run, tuple(inputs.leaves), dynamic_shapes=(shapes,), strict=False)
        module = _flat(exported)
        _compare(run, module, inputs, tangent)
    return module, inputs, _free(exported)


def _with_distinct_lengths(inputs: Inputs) -> Inputs:
    """Repeats samples until their number differs from every other length, because the export unites equal lengths."""
    count = inputs.samples
    lengths = {length for leaf in inputs.tensors for length in leaf.shape[1:]}
    wanted = next(n for n in range(max(2, count), max(2, count) + len(lengths) + 1) if n not in lengths)
    return inputs.take(torch.arange(wanted, device=inputs.tensors[0].device) % count)


def _program(tangent: Tangent, covariance: Covariance, graph: Graph, via: Streamlined, inputs: Inputs) -> Program:
    program = build(tangent, covariance, graph, via, inputs, decompose=squares_of_weights)
    program.graph = _copied(graph)
    for step in program.schedule.steps:
        node, fused = step.node, step.fused
        place = f"{name_of(node)} in {where(node)} of {graph.network}"
        if step.uncertain and fused is None and operation_of(node).rule is None:
            raise LapwingError(
                f"A deployed network needs moment rules, and {place} has no moment rule. Give it one "
                "(lapwing.prediction.streamlined.register_operation), or leave out the weights before it with "
                "params=lw.matching(...). Or predict with posterior.predict(x, via=lw.Streamlined())."
            )
        if fused is not None and via.activations == "linear" and not fused.closed:
            names = sorted({name_of(node) for node in fused.body if operation_of(node).slope is None})
            raise LapwingError(
                f"A deployed network needs slopes in closed form, and a function of {graph.network} has none: "
                f"{', '.join(names) or 'statistics over several dimensions'}. Give it one "
                "(lapwing.prediction.streamlined.register_operation). Or predict with "
                "posterior.predict(x, via=lw.Streamlined())."
            )
    return program


def _copied(graph: Graph) -> Graph:
    return replace(graph, tensors={name: value.detach().clone() for name, value in graph.tensors.items()})


def _compare(run: Run, module: fx.GraphModule, inputs: Inputs, tangent: Tangent) -> None:
    """Compares the calls with the program for another number of samples."""
    leaves = inputs.take(slice(0, 1)).leaves
    expected, actual = run(*leaves), module(*leaves)
    actual = actual if isinstance(actual, tuple) else (actual,)
    for ours, theirs in zip(actual, expected, strict=True):
        ours, theirs = (part.to(tangent.dtype) if part.dtype == torch.bool else part for part in (ours, theirs))
        tolerance = torch.finfo(theirs.dtype).eps ** 0.5 * theirs.abs().max().clamp_min(1e-6)
        if ours.shape != theirs.shape or not bool((ours - theirs).abs().max() <= tolerance):
            raise _one_size(tangent)


def _one_size(tangent: Tangent) -> LapwingError:
    return LapwingError(
        f"The exported calls of {type(tangent.model).__name__} are right for one batch size only. Write a forward that "
        "accepts any batch. Or predict with posterior.predict(x, via=lw.Streamlined())."
    )


class Run(nn.Module, ABC):
    """The module that is exported: moments of the outputs, and the results that are wanted of them.

    `values` are the values of the network's calls at the example, by name.
    """

    def __init__(
        self, graph: Graph, values: Mapping[str, Any], inputs: Inputs, wanted: Results, tangent: Tangent
    ) -> None:
        super().__init__()
        self.graph, self.dtype = graph, tangent.dtype
        self.observe, self.kinds, self.novelty, self.layer = wanted.observe, wanted.kinds, wanted.novelty, wanted.layer
        self.activation = tangent.call.activation
        if self.novelty is not None:
            otherwise = (
                "No exported tensor has the features of novelty=. If the detector is of another network, write "
                "novelty=lw.novelty(posterior.model, loader). Otherwise it averages them over positions, or joins "
                "those of several layers, which is not exported: deploy without it, and call detector(x) too."
            )
            self.features = _equal_value(values, features_of(self.novelty.tangent, inputs), otherwise)
        self.of_noise = _read_by(values, tangent, self.layer, inputs) if self.layer else graph.output

    @abstractmethod
    def moments(self, *leaves: Tensor) -> tuple[Tensor, Tensor, dict[str, Any], tuple[Tensor, ...]]:
        """Returns means, `moments_of` the latent, the values of the network's calls by name, and further outputs."""

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Returns the results of `observe`, further outputs, and the novelty."""
        mean, moments, values, more = self.moments(*leaves)
        of_noise = None
        if self.layer is not None:
            of_noise = mean if not self.layer else mean_of(values[self.of_noise])
        results = self.observe(latent_of(mean.to(self.dtype), moments.to(self.dtype)), of_noise)
        if self.novelty is None:
            return (*results, *more)
        score, count = self.novelty.score(mean_of(values[self.features])), len(results)
        if self.novelty.held_out is None:
            return (*results, *more, score.to(self.dtype))
        count -= self.novelty.posterior is not None
        return (*results[:count], *more, self.novelty.joined([*results[count:], score]))


class AmortizedRun(Run):
    """The network's calls, and the head of an amortised way. Beyond the guard variances are the largest of the fit."""

    def __init__(self, way: Amortized, graph: Graph, inputs: Inputs, wanted: Results, tangent: Tangent) -> None:
        graph = _copied(graph)
        values = graph.run(inputs)
        super().__init__(graph, values, inputs, wanted, tangent)
        self.head, self.inputs = way.head, inputs
        self.read = _read_by(values, tangent, way.layer, inputs) if way.layer else graph.output

    def moments(self, *leaves: Tensor) -> tuple[Tensor, Tensor, dict[str, Any], tuple[Tensor, ...]]:
        inputs = self.inputs.with_leaves(dict(enumerate(leaves)))
        values = self.graph.run(inputs)
        mean = finite(values[self.graph.output], self.activation, looks=False)
        rows = joined_rows(values[self.read], mean, inputs)
        variance, factor = self.head(rows)
        beyond = self.head.beyond(rows)
        variance = torch.where(beyond[:, None], self.head.largest, variance)
        return mean, moments_of(DenseTerm(product(variance, factor)), self.kinds), values, (beyond,)


class StreamlinedRun(Run):
    """The steps of a program. A last layer needs no C x C matrix.

    The program runs once at an example, which fills its constants. Values that do not depend on the inputs are stored.
    `observe` gets a latent of this dtype. `complete` is whether the program computes the covariances of the outputs.
    """

    def __init__(self, program: Program, inputs: Inputs, wanted: Results, tangent: Tangent) -> None:
        samples, fixed = inputs.samples, dict(program.weights())
        values = {**program.graph.bind(inputs), **fixed}
        outputs = program.graph.run(inputs)[program.graph.output]
        masked = tangent.call.activation is not None and not possible(outputs).all()  # averages need covariances
        end = tuple(step for step in program.schedule.steps if step.node.name in program.joint_steps)
        if masked or not all(step.fused is None and keeps_order(step.node) for step in end[1:]):
            end = ()  # only views may follow a last layer without matrices
        head, steps = None, []
        for step in program.schedule.steps:
            name = step.node.name
            if end and step is end[0]:
                head = read_head(program, step, values, samples, wanted.kinds)
            values[name] = program.step(step, values, samples)
            if all(source in fixed for source in step.sources) and step.sources:
                fixed[name] = values[name]
            elif head is None or step not in end:
                steps.append(step)
        super().__init__(program.graph, values, inputs, wanted, tangent)
        self.program, self.values, self.steps, self.head, self.end = program, fixed, tuple(steps), head, end
        self.complete = head is not None or values[program.graph.output].covariance is not None

    def moments(self, *leaves: Tensor) -> tuple[Tensor, Tensor, dict[str, Any], tuple[Tensor, ...]]:
        program = self.program
        inputs = zip(program.graph.leaves, leaves, strict=True)
        values: dict[str, Any] = {**self.values, **{name: leaf for name, leaf in inputs if name is not None}}
        samples = leaves[0].shape[0]
        for step in self.steps:
            values[step.node.name] = program.step(step, values, samples)
        if self.head is None:
            mean, moments = _whole(values[program.graph.output], self.kinds, self.activation)
        else:
            mean, moments = self.head(program.cast(self.head.source, values[self.head.source]))
            for step in self.end[1:]:
                mean = run_call(step.node, {**values, step.uncertain[0]: mean}, program.dtype)
            moments = moments.expand(mean.shape[0], -1)
        return mean, moments, values, ()


def _equal_value(values: Mapping[str, Any], wanted: Tensor, otherwise: str) -> str:
    """Returns the name of the last value that equals a tensor: a ReLU may equal its input at the example.

    Raises an error with the message `otherwise` if there is none.
    """
    relative = max(1e-3, 4 * torch.finfo(wanted.dtype).eps)
    close = partial(torch.allclose, rtol=relative, atol=relative / 10)
    for name, value in reversed(list(values.items())):
        mean = mean_of(value) if isinstance(value, (Tensor, Moments)) else None
        if mean is not None and mean.shape == wanted.shape and close(mean.to(wanted), wanted):
            return name
    raise LapwingError(otherwise)


def _read_by(values: Mapping[str, Any], tangent: Tangent, layer: str, inputs: Inputs) -> str:
    """Returns the name of the value that equals the inputs of a layer."""
    otherwise = (
        f"No exported tensor has the inputs of layer {layer} of {type(tangent.model).__name__}, which the noise of "
        "each input, or an amortised way, reads. Fit with likelihood=lw.Gaussian(noise='constant') or write "
        "lw.deploy(posterior, x, outputs='latent'); and leave out via=."
    )
    return _equal_value(values, features_at(tangent, layer, inputs), otherwise)


def _whole(output: Moments, kinds: int, activation: str | None) -> tuple[Tensor, Tensor]:
    """Returns the means and `moments_of` a program's output, minus the average over possible classes if centred."""
    matrix = output.covariance
    term = EigenTerm(None, output.variance) if matrix is None else DenseTerm(matrix, output.centred)
    if activation != "softmax":
        return finite(output.mean, activation, looks=False), moments_of(term, kinds)
    mean, variance = output.mean, term.variance()
    mask = possible(mean).to(variance)
    share = mask / mask.sum(-1, keepdim=True)
    rows = term.times(share.unsqueeze(1)).squeeze(1)
    parts = [variance, mask * (variance - 2 * rows + (rows * share).sum(-1, keepdim=True))]
    if kinds > 2:  # the others follow the average
        move = torch.diag_embed(mask) + (1 - mask)[..., None] * share[:, None]
        parts.append((move @ term.dense() @ move.mT).flatten(1))
    return finite(mean, activation, looks=False), torch.cat(parts[:kinds], -1)


def _free(exported: ExportedProgram) -> tuple[dict[int, str], ...]:
    names: dict[str, str] = {}
    placeholders = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    free = []
    for name in exported.graph_signature.user_inputs:
        labels: dict[int, str] = {}
        value = placeholders[str(name)].meta["val"]
        for dim, length in enumerate(value.shape):
            if not isinstance(length, int):
                labels[dim] = names.setdefault(str(length), f"length{len(names)}" if dim else "batch")
        free.append(labels)
    return tuple(free)


def _flat(exported: ExportedProgram) -> fx.GraphModule:
    """Returns the exported calls, with constants evaluated and stored as buffers."""
    signature = exported.graph_signature
    graph, attributes = fx.Graph(), dict[str, Tensor]()
    new: dict[fx.Node, Any] = {}
    known: dict[tuple[int, str], str] = {}
    kinds = {spec.arg.name: spec for spec in signature.input_specs}

    def keep(value: Tensor, name: str) -> fx.Node:
        key = value.data_ptr(), str((value.dtype, tuple(value.shape), value.stride()))
        if key not in known or value.numel() == 0:
            known[key] = name
            attributes[name] = value.detach().clone()
        return graph.get_attr(known[key])

    constants: dict[fx.Node, Any] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            spec = kinds[node.name]
            if spec.kind == InputKind.USER_INPUT:
                new[node] = graph.placeholder(node.name)
            else:
                constants[node] = {**exported.state_dict, **exported.constants}[spec.target or ""]
        elif node.op == "output":
            places = [s.kind for s in signature.output_specs]
            outs = [out for out, kind in zip(node.args[0], places, strict=True) if kind == OutputKind.USER_OUTPUT]
            outs = [new[out] if out in new else keep(constants[out], out.name) for out in outs]
            graph.output(tuple(outs) if len(outs) > 1 else outs[0])
        elif str(node.target) in _CHECKS:
            continue
        elif all(source in constants for source in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: constants[n])
            constants[node] = node.target(*args, **kwargs)
        else:
            for source in node.all_input_nodes:
                if source not in new:
                    value = constants[source]
                    name = f"constant_{len(attributes)}"
                    new[source] = keep(value, name) if isinstance(value, Tensor) else value
            new[node] = graph.node_copy(node, lambda n: new[n])
    graph.eliminate_dead_code()
    return fx.GraphModule(attributes, graph)  # tensors that the graph reads become buffers


_CHECKS = frozenset(
    f"aten.{name}.default"
    for name in ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size")
)
"""Calls that repeat checks of the trace, by name: some are not in every torch."""
