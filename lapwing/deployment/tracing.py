"""A program of moments as one flat graph of ATen calls: exported once, constants folded, weights copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from .. import batches
from ..covariance import Covariance
from ..covariance.output import Dense, Rotated
from ..errors import LapwingError
from ..prediction import Streamlined
from ..prediction.streamlined.fusion import call
from ..prediction.streamlined.graph import Graph, operation, quiet, read, where
from ..prediction.streamlined.moments import Moments, mean_of
from ..prediction.streamlined.plan import Item
from ..prediction.streamlined.program import RULES, Program, build
from ..prediction.streamlined.tail import VIEWS, Joint
from ..tangent import Tangent
from ..tangent.eager import without_compiled
from .forms import Deployed
from .head import Head, read_head

aten = torch.ops.aten

Observe = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""`(means, variances, variances of the centred outputs)`, (B, C) each -> what the deployed network returns."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """A network's moments as a module.

    Attributes:
        module: leaves of the inputs -> outputs; its buffers are copies.
        graph: the network's own calls, which know what inputs they accept.
        example: the inputs of the trace.
        free: for every leaf, dimension -> the name of its length, where that may vary.
    """

    module: fx.GraphModule
    graph: Graph
    example: Any
    free: tuple[dict[int, str], ...]


def trace(
    tangent: Tangent, covariance: Covariance, via: Streamlined, inputs: Any, observe: Observe, centred: bool, last: bool
) -> Traced:
    """Exports the moments at the outputs as calls on tensors.

    Args:
        tangent: the network.
        covariance: Σ.
        via: the way.
        inputs: an example, of any number of samples.
        observe: what is made of the moments.
        centred: whether it reads the variances of centred outputs.
        last: whether the last layer alone must be uncertain.

    Raises:
        LapwingError: calls without a rule or without closed slopes; with `last`, uncertain values before the last
            layer.

    Cost: a few times what the first batch of the way takes; a copy of the network's weights and a few constants of
    their size.
    """
    inputs = _lengths_apart(pytree.tree_map(lambda x: x.detach(), batches.plain(inputs, tangent.device)))
    with torch.no_grad(), without_compiled():
        graph = read(tangent, inputs)
        if not graph.accepts(batches.take(inputs, slice(0, 1))):
            raise _one_size(tangent)
        program = _program(tangent, Deployed(covariance, covariance.record_dtype or tangent.dtype), graph, via, inputs)
        run = Run.of(program, inputs, observe, centred, tangent.dtype)
        if last:
            _check_last(program, run, tangent)
        with quiet():
            exported = _exported(run, inputs, graph)
        module = _flat(exported)
        _compare(run, module, inputs, tangent)
    return Traced(module, graph, inputs, _free(exported, graph))


def _lengths_apart(inputs: Any) -> Any:
    """Repeats samples until their number is no other length: equal lengths are taken for one."""
    count = batches.size(inputs)
    others = {length for leaf in batches.tensors(inputs) for length in leaf.shape[1:]}
    wanted = next(n for n in range(max(2, count), max(2, count) + len(others) + 1) if n not in others)
    device = batches.tensors(inputs)[0].device
    return batches.take(inputs, torch.arange(wanted, device=device) % count)


def _program(tangent: Tangent, covariance: Any, graph: Graph, via: Streamlined, inputs: Any) -> Program:
    network = type(tangent.model).__name__
    program = build(tangent, covariance, graph, via.options(), inputs)
    copies = {name: value.detach().clone() for name, value in graph.tensors.items()}
    program.graph = dataclasses.replace(graph, tensors=copies)
    for item in program.plan.items:
        site = program.sites.get(item.node.name)
        if site is not None and item.node.target not in RULES:
            raise LapwingError(
                f"Asked to deploy {network}, found {operation(item.node)} in {where(item.node)}, which has no moment "
                "rule and goes by forward mode; linear, convolution, pooling, norm, attention, embedding, element-wise "
                "and shape operations are accepted: leave its weights out with params=lw.matching(...), or predict "
                "with posterior.predict(x, via=lw.Streamlined())."
            )
        if item.fused is not None and via.activations == "linear" and not item.fused.closed:
            names = ", ".join(sorted({str(node.target) for node in item.fused.body}))
            raise LapwingError(
                f"Asked to deploy {network}, found an element-wise function ({names}) without "
                "slopes in closed form; accepted are those of prediction/streamlined/slopes.py: predict with "
                "posterior.predict(x, via=lw.Streamlined()) instead."
            )
    return program


def _check_last(program: Program, run: Run, tangent: Tangent) -> None:
    """Refuses uncertain values before the last layer, and a last layer whose covariances are not complete."""
    early = [item for item in program.plan.items if item.uncertain and item.node.name not in program.ends]
    if early or not run.complete:
        names = ", ".join(block.name for block in tangent.blocks[:3]) + (", ..." if len(tangent.blocks) > 3 else "")
        raise LapwingError(
            f"Asked to deploy {type(tangent.model).__name__} via lw.Linearized(), found treated weights in {names}; "
            "the last layer alone is accepted there: write via=lw.Streamlined(), or fit with params=lw.last_layer."
        )


def _compare(run: Run, module: fx.GraphModule, inputs: Any, tangent: Tangent) -> None:
    """Checks the calls at another number of samples than the one they were traced with."""
    leaves = pytree.tree_leaves(batches.take(inputs, slice(0, 1)))
    wanted, found = run(*leaves), module(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    for ours, theirs in zip(found, wanted, strict=True):
        tolerance = torch.finfo(theirs.dtype).eps ** 0.5 * theirs.abs().max().clamp_min(1e-6)
        if ours.shape != theirs.shape or not bool((ours - theirs).abs().max() <= tolerance):
            raise _one_size(tangent)


def _one_size(tangent: Tangent) -> LapwingError:
    return LapwingError(
        f"Asked to deploy {type(tangent.model).__name__}, found that its exported calls are right for one "
        "batch size only; a forward that takes any batch is accepted: predict with "
        "posterior.predict(x, via=lw.Streamlined()) instead."
    )


class Run(nn.Module):
    """What is exported: the program's steps, without a C x C matrix at the end where a network ends with a layer.

    Args:
        program: the steps.
        values: what does not depend on the inputs, by name.
        steps: the steps that do, before the end.
        head: the last layer, or None.
        end: the last layer and the views after it; empty where `head` is None.
        observe: what is made of the moments.
        dtype: of what is observed.

    Attributes:
        complete: whether the covariances of the outputs are all there.
    """

    def __init__(
        self,
        program: Program,
        values: Mapping[str, Any],
        steps: tuple[Item, ...],
        head: Head | None,
        end: tuple[Item, ...],
        observe: Observe,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.program, self.values, self.steps, self.head, self.end = program, dict(values), steps, head, end
        self.observe, self.dtype = observe, dtype
        self.complete = head is not None

    @classmethod
    def of(cls, program: Program, inputs: Any, observe: Observe, centred: bool, dtype: torch.dtype) -> Run:
        """Runs the program once, which fills its constants, and keeps what does not depend on the inputs."""
        samples = batches.size(inputs)
        fixed = program.weights()
        values = {**program.graph.bind(inputs), **fixed}
        end = _end(program)
        head, steps = None, []
        for item in program.plan.items:
            name = item.node.name
            if end and item is end[0]:
                head = read_head(program, item, values, samples, centred)
            values[name] = program.step(item, values, samples)
            if all(source in fixed for source in item.sources) and item.sources:
                fixed[name] = values[name]
            elif head is None or item not in end:
                steps.append(item)
        run = cls(program, fixed, tuple(steps), head, end if head is not None else (), observe, dtype)
        run.complete = head is not None or isinstance(values[program.plan.output], Joint)
        return run

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Returns what is observed of the moments."""
        program = self.program
        values: dict[str, Any] = {
            **self.values,
            **{name: leaf for name, leaf in zip(program.graph.leaves, leaves, strict=True) if name is not None},
        }
        samples = leaves[0].shape[0]
        for item in self.steps:
            values[item.node.name] = program.step(item, values, samples)
        if self.head is None:
            mean, plain, centred = _whole(values[program.plan.output])
        else:
            source = self.head.source
            mean, spread = self.head(_worked(program, source, values[source]))
            for item in self.end[1:]:
                name = item.uncertain[0]
                mean = call(item.node, {**values, name: mean}, program.dtype)
            plain, _, centred = spread, None, spread
            if spread.shape[-1] == 2 * mean.shape[-1]:
                plain, centred = spread.chunk(2, -1)
            if plain.ndim == 1:
                plain, centred = (part.expand(mean.shape[0], -1) for part in (plain, centred))
        found = (mean, plain.clamp_min(0), centred.clamp_min(0))
        return self.observe(*(part.to(self.dtype) for part in found))


def _worked(program: Program, name: str, value: Any) -> Any:
    return value if isinstance(value, Moments) else program.worked(name, mean_of(value))


def _end(program: Program) -> tuple[Item, ...]:
    """Returns the last layer and what follows where that is views alone, else nothing."""
    end = tuple(item for item in program.plan.items if item.node.name in program.ends)
    plain = all(item.fused is None and item.node.target in VIEWS for item in end[1:])
    return end if end and plain else ()


def _whole(found: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns means, variances and centred variances of an output that is no layer's."""
    if isinstance(found, Joint):
        term = Dense(found.covariance)
        return found.mean, term.variance(), term.centred_variance()
    return found.mean, found.variance, Rotated(None, found.variance).centred_variance()


def _exported(run: Run, inputs: Any, graph: Graph) -> ExportedProgram:
    leaves = tuple(pytree.tree_leaves(inputs))
    shapes = tuple(
        {dim: Dim.AUTO for dim, length in enumerate(shape) if isinstance(length, str)} or None for shape in graph.shapes
    )
    return torch.export.export(run, leaves, dynamic_shapes=(shapes,), strict=False)


def _free(exported: ExportedProgram, graph: Graph) -> tuple[dict[int, str], ...]:
    names: dict[str, str] = {}
    placeholders = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    free = []
    for name in exported.graph_signature.user_inputs:
        found: dict[int, str] = {}
        value = placeholders[str(name)].meta["val"]
        for dim, length in enumerate(value.shape):
            if not isinstance(length, int):
                label = "batch" if dim == 0 else f"length{len(names) if 'batch' in names.values() else len(names) + 1}"
                found[dim] = names.setdefault(str(length), label)
        free.append(found)
    return tuple(free)


def _flat(exported: ExportedProgram) -> fx.GraphModule:
    """Returns the exported calls with their constants as buffers, those among them that need no input evaluated."""
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

    held: dict[fx.Node, Any] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            spec = kinds[node.name]
            if spec.kind == InputKind.USER_INPUT:
                new[node] = graph.placeholder(node.name)
            else:
                value = {**exported.state_dict, **exported.constants}[spec.target or ""]
                held[node] = value
        elif node.op == "output":
            places = [s.kind for s in signature.output_specs]
            outs = [out for out, kind in zip(node.args[0], places, strict=True) if kind == OutputKind.USER_OUTPUT]
            outs = [new[out] if out in new else keep(held[out], out.name) for out in outs]
            graph.output(tuple(outs) if len(outs) > 1 else outs[0])
        elif node.target in _CHECKS:
            continue
        elif _fixed(node, held):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: held[n])
            held[node] = node.target(*args, **kwargs)
        else:
            for source in node.all_input_nodes:
                if source not in new:
                    value = held[source]
                    name = f"constant_{len(attributes)}"
                    new[source] = keep(value, name) if isinstance(value, Tensor) else value
            new[node] = graph.node_copy(node, lambda n: new[n])
    graph.eliminate_dead_code()
    root = nn.Module()
    used = {node.target for node in graph.nodes if node.op == "get_attr"}
    for name, value in attributes.items():
        if name in used:
            root.register_buffer(name, value)
    return fx.GraphModule(root, graph)


_CHECKS = frozenset(
    packet.default
    for packet in (
        getattr(aten, name, None)
        for name in ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size")
    )
    if packet is not None
)
"""Calls that check what was true at the trace."""


def _fixed(node: fx.Node, held: Mapping[fx.Node, Any]) -> bool:
    """Whether a call is a function of constants alone, or of nothing."""
    return all(source in held for source in node.all_input_nodes)


__all__ = ["Observe", "Run", "Traced", "trace"]
