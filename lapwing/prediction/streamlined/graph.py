"""The network as a graph of ATen calls, read by `torch.export` once for each tangent and structure of inputs."""

from __future__ import annotations

import logging
import operator
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from ...covariance import Covariance
from ...data.batches import copied, tree
from ...data.inputs import Inputs
from ...errors import LapwingError
from ...network.call import CallModule
from ...network.eager import modules_of
from ...tangent import Tangent
from .operations import named

aten = torch.ops.aten


@dataclass(frozen=True)
class Graph:
    """The calls of one network, in order, for inputs of one structure.

    Attributes:
        network: name of the class of the network, for messages.
        tensors: name of a placeholder -> the model's parameter or buffer, or a constant.
        parameters: name of a placeholder -> name of the parameter.
        leaves: placeholders of the leaves of the inputs; None for a leaf that is not a tensor.
        shapes: shape of each leaf, with names for the lengths that may vary; equal lengths have one name.
        programs: covariance -> its programs for this graph, a cache of `Streamlined`.
    """

    network: str
    nodes: tuple[fx.Node, ...]
    output: str
    tensors: dict[str, Tensor]
    parameters: dict[str, str]
    leaves: tuple[str | None, ...]
    shapes: tuple[tuple[int | str, ...], ...]
    max_lengths: dict[str, float]
    structure: str
    programs: weakref.WeakKeyDictionary[Covariance, dict[Any, Any]] = field(
        default_factory=weakref.WeakKeyDictionary, init=False, repr=False, compare=False
    )

    def accepts(self, inputs: Inputs) -> bool:
        """Whether the graph supports these inputs."""
        if _structure(inputs) != self.structure:
            return False
        lengths: dict[str, int] = {}
        for leaf, shape in zip(inputs.leaves, self.shapes, strict=True):
            actual = tuple(leaf.shape) if isinstance(leaf, Tensor) else ()
            if len(actual) != len(shape):
                return False
            for place, (length, wanted) in enumerate(zip(actual, shape, strict=True)):
                if isinstance(wanted, str):
                    low = 1 if place == 0 else 2
                    if lengths.setdefault(wanted, length) != length or not low <= length <= self.max_lengths[wanted]:
                        return False
                elif length != wanted:
                    return False
        return True

    def bind(self, inputs: Inputs) -> dict[str, Any]:
        """Returns the values of all placeholders."""
        named = zip(self.leaves, inputs.leaves, strict=True)
        return {**self.tensors, **{name: leaf for name, leaf in named if name is not None}}

    def run(self, inputs: Inputs) -> dict[str, Any]:
        """Returns every value of the calls on tensors."""
        values = self.bind(inputs)
        for node in self.nodes:
            values[node.name] = execute(node, values)
        return values


def _structure(inputs: Inputs) -> str:
    spec = pytree.tree_structure(tree(inputs.value))
    return repr((str(spec), [leaf.dtype if isinstance(leaf, Tensor) else leaf for leaf in inputs.leaves]))


_GRAPHS: dict[int, dict[tuple[int, ...], list[Graph]]] = {}
"""Id of a tangent -> numbers of the network's hooks -> a graph for each structure of inputs."""


def read(tangent: Tangent, inputs: Inputs) -> Graph:
    """Returns the network's graph for these inputs, read once for each structure of inputs: about a second.

    The batch and the lengths of integer inputs may vary if the network's code allows it. Other shapes may not. Call
    this under the lock of `without_compiled`.
    """
    if id(tangent) not in _GRAPHS:
        _GRAPHS[id(tangent)] = {}
        weakref.finalize(tangent, _GRAPHS.pop, id(tangent), None)
    modules = [module for _, module in modules_of(tangent.model)]
    hooks = tuple(hook for module in modules for hook in (*module._forward_pre_hooks, *module._forward_hooks))
    graphs = _GRAPHS[id(tangent)].setdefault(hooks, [])
    for graph in graphs:
        if graph.accepts(inputs):
            return graph
    graphs.append(_read(tangent, inputs))
    return graphs[-1]


def _read(tangent: Tangent, inputs: Inputs) -> Graph:
    leaves = {place: x.detach() for place, x in enumerate(inputs.leaves) if isinstance(x, Tensor)}
    inputs = inputs.certain.with_leaves(leaves)
    example = inputs.take(slice(0, tangent.chunk_length(1)))
    if example.samples == 1:  # torch.export fixes a length of one
        example = inputs.take(torch.zeros(2, dtype=torch.long, device=tangent.device))
    with torch.no_grad():
        tangent.call_with({}, copied(example.value))  # says what is wrong with inputs that the network refuses
    wrapped = CallModule(replace(tangent.call, activation=None))
    wrapped.training = tangent.model.training  # train() would reach into the network
    failure: BaseException | None = None
    for dynamic in (True, False):
        batch = example if dynamic else inputs
        try:
            with quiet(), torch.no_grad():
                program = _exported(wrapped, batch, dynamic)
                graph = _graph(tangent, program, batch)
            if graph.accepts(inputs) and _agrees(tangent, graph, batch):
                return graph
        except Exception as error:  # any error of the network's code at symbolic shapes
            cause = error.__cause__ if isinstance(error, LapwingError) else error  # what the network's own code raised
            if cause is None and dynamic is False:
                raise
            failure = error if cause is None else cause
    problem = "The outputs of its graph differ from the network's."
    if failure is not None:
        problem = f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"
    raise LapwingError(
        f"torch.export cannot read the forward of {type(tangent.model).__name__}, as streamlined prediction needs. "
        "Write a forward without control flow that depends on data. Or predict with via=lw.Linearized(). "
        f"({problem})"
    ) from failure


def _exported(wrapped: nn.Module, inputs: Inputs, dynamic: bool) -> ExportedProgram:
    count, value = inputs.samples, tree(inputs.value)

    def lengths(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None
        free = range(leaf.ndim) if not leaf.is_floating_point() else range(min(leaf.ndim, 1))
        return {dim: Dim.AUTO for dim in free if leaf.shape[dim] > 1 and (dim or leaf.shape[0] == count)}

    shapes = (pytree.tree_map(lengths, value),) if dynamic else None
    program = torch.export.export(wrapped, (value,), dynamic_shapes=shapes, strict=False)
    schemas = {node.target: getattr(node.target, "_schema", None) for node in program.graph.nodes}
    harmless = aten.detach_.default, aten.copy_.default  # on fresh constants only, or undone by rewriting others
    if any(s is not None and s.is_mutable and target not in harmless for target, s in schemas.items()):
        program = program.run_decompositions({})
    return program


@contextmanager
def quiet() -> Iterator[None]:
    """Turns off fused fast paths, which have no graph, and what torch warns and logs about exports.

    Also the search of opt_einsum, which reads the number of samples of the example: a graph would hold for it only.
    """
    fast, loggers = torch.backends.mha.get_fastpath_enabled(), list(map(logging.getLogger, ("torch.onnx", "onnx_ir")))
    levels = [logger.level for logger in loggers]
    torch.backends.mha.set_fastpath_enabled(False)
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.backends.opt_einsum.flags(enabled=False):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        torch.backends.mha.set_fastpath_enabled(fast)


def _graph(tangent: Tangent, program: ExportedProgram, inputs: Inputs) -> Graph:
    network = type(tangent.model).__name__
    parameters_by_name = dict(tangent.model.named_parameters(remove_duplicate=False))
    buffers = dict(tangent.model.named_buffers(remove_duplicate=False))
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, str] = {}
    leaves: list[str | None] = []
    for spec in program.graph_signature.input_specs:
        name, target = spec.arg.name, (spec.target or "").removeprefix("model.")
        if spec.kind == InputKind.USER_INPUT:
            leaves.append(name)
        elif spec.kind == InputKind.PARAMETER:
            tensors[name], parameters[name] = parameters_by_name[target], target
        elif spec.kind == InputKind.BUFFER:
            tensors[name] = buffers[target]
        else:
            tensors[name] = program.constants[spec.target or ""]
    _pick_first(program.graph)
    nodes = list(program.graph.nodes)
    for node in nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # moments and labels may have other strides than in the network
    kinds = [spec.kind for spec in program.graph_signature.output_specs]  # inputs written in place are outputs too
    output: Any = nodes[-1].args[0][kinds.index(OutputKind.USER_OUTPUT)]
    kept, needed = [], {output}
    for node in reversed(nodes):
        if node in needed and node.op != "placeholder":
            if node.op != "call_function":
                raise LapwingError(
                    f"The graph of {network} contains {node.target}, and streamlined prediction "
                    "supports only plain calls. Predict with via=lw.Linearized()."
                )
            kept.append(node)
            needed.update(node.all_input_nodes)
    placeholders = {node.name: node for node in nodes if node.op == "placeholder"}
    max_lengths: dict[str, float] = {}

    def length_of(length: Any) -> int | str:
        if not isinstance(length, torch.SymInt):
            return length
        symbol = length.node.expr
        if symbol.is_number:  # fixed by the network's code
            return int(symbol)
        bounds = program.range_constraints.get(symbol)
        largest = float("inf") if bounds is None or bounds.upper > 2**40 else float(int(bounds.upper))
        max_lengths[str(symbol)] = largest
        return str(symbol)

    shapes: list[tuple[int | str, ...]] = []
    for name, leaf in zip(leaves, inputs.leaves, strict=True):
        value = placeholders[name].meta.get("val") if name else None
        known = isinstance(leaf, Tensor) and isinstance(value, Tensor)
        shapes.append(tuple(map(length_of, value.shape)) if known else ())  # type: ignore[union-attr]
    return Graph(
        network, tuple(reversed(kept)), output.name, tensors, parameters, tuple(leaves), tuple(shapes), max_lengths,
        _structure(inputs),
    )  # fmt: skip


def execute(node: fx.Node, values: Mapping[str, Any]) -> Any:
    """Returns the value of one call on values by name."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: values[source.name])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _agrees(tangent: Tangent, graph: Graph, inputs: Inputs) -> bool:
    """Whether the graph returns the network's outputs."""
    with torch.no_grad():
        copy = Inputs(copied(inputs.value))  # the network may write to its inputs
        expected = replace(tangent.call, activation=None).rows(copy)
        outputs = graph.run(inputs)[graph.output]
    size = expected.masked_fill(expected == -torch.inf, 0.0).abs().max().clamp_min(1.0)
    tolerance = torch.finfo(expected.dtype).eps ** 0.5 * float(size)
    return outputs.shape == expected.shape and torch.allclose(outputs, expected, rtol=0.0, atol=tolerance)


# ---- heads that are applied at every position, but read at only one


def _pick_first(graph: fx.Graph) -> None:
    """Moves picks of positions, and means over them, before the linear layer that they read: `linear(x[:, t])`.

    In this order the head's weights act once per sample, so their covariances count in full. Edits the graph.
    """
    changed = True
    while changed:
        changed = any([_moves(graph, node) for node in list(graph.nodes) if node.target is aten.linear.default])


def _moves(graph: fx.Graph, layer: fx.Node) -> bool:
    readers = [user for user in layer.users if user.target is not aten.sym_size.int]
    value = layer.meta.get("val")
    if len(readers) != 1 or len(layer.users) != 1 or not isinstance(value, Tensor):
        return False
    (reader,), x = readers, layer.args[0]
    if not isinstance(x, fx.Node) or not _keeps_features(reader, layer, value.ndim):
        return False
    with graph.inserting_before(reader):
        picked = graph.call_function(reader.target, (x, *reader.args[1:]), dict(reader.kwargs))  # type: ignore[arg-type]
        picked.meta = {**reader.meta, "val": execute(picked, {n.name: n.meta["val"] for n in picked.all_input_nodes})}
        applied = graph.call_function(layer.target, (picked, *layer.args[1:]), dict(layer.kwargs))  # type: ignore[arg-type]
        applied.meta = {**layer.meta, "val": reader.meta["val"]}
    reader.replace_all_uses_with(applied)
    graph.erase_node(reader)
    graph.erase_node(layer)
    return True


def _keeps_features(reader: fx.Node, layer: fx.Node, ndim: int) -> bool:
    """Whether a call picks or averages entries of the layer along dimensions other than the last."""
    arguments = named(reader)
    if arguments.get("self") is not layer:
        return False
    if reader.target in (aten.select.int, aten.slice.Tensor):
        return arguments["dim"] % ndim != ndim - 1
    if reader.target is aten.index.Tensor:
        return len(arguments["indices"]) < ndim and all(isinstance(index, fx.Node) for index in arguments["indices"])
    if reader.target is aten.mean.dim:
        dims = arguments["dim"]
        return bool(dims) and all(dim % ndim != ndim - 1 for dim in dims) and arguments["dtype"] is None
    return False


# ---- names of calls


def where(node: fx.Node) -> str:
    """Returns the module of a call, for messages: `'layers.0.norm' (LayerNorm)`."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "the network itself"
    path, kind = str(stack[-1][0]), stack[-1][1]
    path = path.removeprefix("L['self'].").removeprefix("model").removeprefix(".")
    kind = (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2].partition("@")[0]
    return f"{path!r} ({kind})" if path else f"the network itself ({kind})"


def name_of(node: fx.Node) -> str:
    """Returns the name of a call's function, for messages: `aten.softmax`."""
    if node.target is operator.getitem:
        return "indexing"
    return ".".join(str(node.target).split(".")[:2])
