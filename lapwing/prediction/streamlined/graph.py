"""The network as a graph of ATen calls, read by `torch.export` and kept for each tangent and structure of inputs."""

from __future__ import annotations

import operator
import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from ... import batches
from ...batches import Forward
from ...errors import LapwingError
from ...tangent import Tangent
from .heads import pick_first

aten = torch.ops.aten

INTACT = frozenset({aten.detach_.default, aten.copy_.default})
"""In-place calls that need no rewriting: on fresh constants only, or undone by the rewriting of others."""

COMPILER_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True)
class Graph:
    """One network at inputs of one structure.

    Attributes:
        nodes: calls in order, dead ones left out.
        output: name of the outputs' value.
        tensors: name of a placeholder -> the model's own parameter or buffer, or a constant.
        parameters: name of a placeholder -> name of the parameter.
        leaves: names of the placeholders of the inputs, in the order of their leaves; None where a leaf is no tensor.
        shapes: shape of each leaf; a text where any length does, the same text where lengths agree.
        most: text -> the largest length that does.
        nest: structure of the inputs, their dtypes, and what is no tensor.
    """

    nodes: tuple[fx.Node, ...]
    output: str
    tensors: dict[str, Tensor]
    parameters: dict[str, str]
    leaves: tuple[str | None, ...]
    shapes: tuple[tuple[int | str, ...], ...]
    most: dict[str, float]
    nest: str

    def accepts(self, inputs: Any) -> bool:
        """Whether the graph was read for inputs like these."""
        if _nest(inputs) != self.nest:
            return False
        lengths: dict[str, int] = {}
        for leaf, shape in zip(_leaves(inputs), self.shapes, strict=True):
            found = tuple(leaf.shape) if isinstance(leaf, Tensor) else ()
            if len(found) != len(shape):
                return False
            for place, (length, wanted) in enumerate(zip(found, shape, strict=True)):
                if isinstance(wanted, str):
                    low = 1 if place == 0 else 2
                    if lengths.setdefault(wanted, length) != length or not low <= length <= self.most[wanted]:
                        return False
                elif length != wanted:
                    return False
        return True

    def bind(self, inputs: Any) -> dict[str, Any]:
        """Returns the values of all placeholders."""
        given = zip(self.leaves, _leaves(inputs), strict=True)
        return {**self.tensors, **{name: leaf for name, leaf in given if name is not None}}


def _leaves(inputs: Any) -> list[Any]:
    return pytree.tree_leaves(dict(inputs) if isinstance(inputs, dict) else _plain(inputs))


def _plain(inputs: Any) -> Any:
    return dict(inputs) if hasattr(inputs, "keys") else inputs


def _nest(inputs: Any) -> str:
    leaves, spec = pytree.tree_flatten(_plain(inputs))
    return repr((str(spec), [leaf.dtype if isinstance(leaf, Tensor) else leaf for leaf in leaves]))


class _Outputs(nn.Module):
    """What is exported: the network as a map from inputs to a matrix (B, C)."""

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        super().__init__()
        self.model, self.call = model, forward

    def forward(self, inputs: Any) -> Tensor:
        return batches.call(self.model, inputs, self.call)


_GRAPHS: dict[int, list[tuple[Any, Graph]]] = {}


def read(tangent: Tangent, inputs: Any) -> Graph:
    """Returns the network's graph at inputs like these, read anew for new structures only.

    The batch and the lengths of integer inputs may vary where the network's own code allows it; other shapes may not.
    Call it under the lock of `without_compiled`.

    Args:
        tangent: the network and how it is called.
        inputs: B samples.

    Raises:
        LapwingError: a network whose forward `torch.export` cannot read.

    Cost: about a second for a network of a few hundred calls, once; two forward passes to check it.
    """
    stamp = _stamp(tangent.model)
    if id(tangent) not in _GRAPHS:
        _GRAPHS[id(tangent)] = []
        weakref.finalize(tangent, _GRAPHS.pop, id(tangent), None)
    for found, graph in _GRAPHS[id(tangent)]:
        if found == stamp and graph.accepts(inputs):
            return graph
    graph = _read(tangent, inputs)
    _GRAPHS[id(tangent)].append((stamp, graph))
    return graph


def _stamp(model: nn.Module) -> Any:
    """Returns what may change about a network without a new tangent: its modules, their hooks and modes."""
    return [
        (id(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m))
        for m in model.modules()
    ]


def _read(tangent: Tangent, inputs: Any) -> Graph:
    inputs = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, _plain(inputs))
    example = inputs
    if batches.size(inputs) == 1:  # a length of one would be taken as fixed
        example = batches.take(inputs, torch.zeros(2, dtype=torch.long, device=tangent.device))
    wrapped = _Outputs(tangent.model, tangent.forward)
    wrapped.training = tangent.model.training  # train() would reach into the network
    failed: Exception | None = None
    for dynamic in (True, False):
        given = example if dynamic else inputs
        try:
            with quiet(), torch.no_grad():
                program = _exported(wrapped, given, dynamic)
                graph = _graph(tangent, program, given)
            if graph.accepts(inputs) and _agrees(tangent, graph, given):
                return graph
        except Exception as error:  # whatever the network's code raises when it meets shapes without numbers
            if isinstance(error, LapwingError) and dynamic is False:
                raise
            failed = error
    found = f"{type(failed).__name__} ({str(failed).strip().partition(chr(10))[0]})" if failed else "other outputs"
    raise LapwingError(
        f"Asked for streamlined prediction through {type(tangent.model).__name__}, found that torch.export cannot read "
        f"its forward: {found}; a forward without control flow that depends on data is accepted: write "
        "via=lw.Linearized() instead."
    ) from failed


def _exported(wrapped: nn.Module, inputs: Any, dynamic: bool) -> ExportedProgram:
    count = batches.size(inputs)

    def lengths(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None
        free = range(leaf.ndim) if not leaf.is_floating_point() else range(min(leaf.ndim, 1))
        return {dim: Dim.AUTO for dim in free if leaf.shape[dim] > 1 and (dim or leaf.shape[0] == count)}

    shapes = (pytree.tree_map(lengths, inputs),) if dynamic else None
    program = torch.export.export(wrapped, (inputs,), dynamic_shapes=shapes, strict=False)
    if any(_writes(node) for node in program.graph.nodes):
        program = program.run_decompositions({})
    return program


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and node.target not in INTACT


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps fused fast paths, which have no graph, and torch's warnings about reading, out.

    Torch also writes a folder of its compiler, which nothing here uses, into the environment; it is taken out again.
    """
    folder = os.environ.get(COMPILER_FOLDER)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        if folder is None:
            os.environ.pop(COMPILER_FOLDER, None)


def _graph(tangent: Tangent, program: ExportedProgram, inputs: Any) -> Graph:
    named = dict(tangent.model.named_parameters(remove_duplicate=False))
    buffers = dict(tangent.model.named_buffers(remove_duplicate=False))
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, str] = {}
    leaves: list[str | None] = []
    for spec in program.graph_signature.input_specs:
        name, target = spec.arg.name, (spec.target or "").removeprefix("model.")
        if spec.kind == InputKind.USER_INPUT:
            leaves.append(name)
        elif spec.kind == InputKind.PARAMETER:
            tensors[name], parameters[name] = named[target], target
        elif spec.kind == InputKind.BUFFER:
            tensors[name] = buffers[target]
        else:
            tensors[name] = program.constants[spec.target or ""]
    pick_first(program.graph)
    nodes = list(program.graph.nodes)
    kinds = [spec.kind for spec in program.graph_signature.output_specs]  # inputs written in place are outputs too
    output: Any = nodes[-1].args[0][kinds.index(OutputKind.USER_OUTPUT)]
    kept, needed = [], {output}
    for node in reversed(nodes):
        if node in needed and node.op != "placeholder":
            if node.op != "call_function":
                raise LapwingError(
                    f"Asked for streamlined prediction through {type(tangent.model).__name__}, found {node.target} in "
                    "its graph; plain calls are accepted: write via=lw.Linearized() instead."
                )
            kept.append(node)
            needed.update(node.all_input_nodes)
    placeholders = {node.name: node for node in nodes if node.op == "placeholder"}
    shapes: list[tuple[int | str, ...]] = []
    most: dict[str, float] = {}
    for name, leaf in zip(leaves, _leaves(inputs), strict=True):
        value = placeholders[name].meta.get("val") if name else None
        shape: list[int | str] = []
        for length in value.shape if isinstance(leaf, Tensor) and isinstance(value, Tensor) else ():
            if isinstance(length, torch.SymInt):
                symbol = length.node.expr
                if symbol.is_number:  # the network's code fixed it
                    shape.append(int(symbol))
                    continue
                found = program.range_constraints.get(symbol)
                most[str(symbol)] = float("inf") if found is None or found.upper > 2**40 else float(int(found.upper))
                shape.append(str(symbol))
            else:
                shape.append(length)
        shapes.append(tuple(shape))
    return Graph(
        tuple(reversed(kept)), output.name, tensors, parameters, tuple(leaves), tuple(shapes), most, _nest(inputs)
    )


def execute(node: fx.Node, lookup: Any) -> Any:
    """Runs one call on the values that `lookup` gives for nodes."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lookup)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _agrees(tangent: Tangent, graph: Graph, inputs: Any) -> bool:
    """Whether the graph gives the network's outputs."""
    with torch.no_grad():
        copy = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, inputs)  # it may write to them
        wanted = batches.call(tangent.model, copy, tangent.forward)
        found = run_all(graph, inputs)[graph.output]
    tolerance = torch.finfo(wanted.dtype).eps ** 0.5 * wanted.abs().max().clamp_min(1.0)
    return found.shape == wanted.shape and bool((found - wanted).abs().max() <= tolerance)


def run_all(graph: Graph, inputs: Any) -> dict[str, Any]:
    """Runs the calls as they are; returns every value."""
    values = graph.bind(inputs)
    for node in graph.nodes:
        values[node.name] = execute(node, lambda n: values[n.name])
    return values


def users_of(nodes: Sequence[fx.Node]) -> dict[str, list[fx.Node]]:
    """Returns, for every name, the nodes among these that use it, once each."""
    users: dict[str, list[fx.Node]] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            users.setdefault(source.name, []).append(node)
    return users


def where(node: fx.Node) -> str:
    """Names the module that a call is in, for messages: `'layers.0.norm' (LayerNorm)`."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "the network itself"
    path, kind = stack[-1][0], stack[-1][1]
    path = str(path).removeprefix("L['self'].").removeprefix("model").removeprefix(".")
    kind = (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2].rpartition("@")[0] or str(
        kind if isinstance(kind, str) else kind.__name__
    ).rpartition(".")[2]
    return f"{path!r} ({kind})" if path else f"the network itself ({kind})"


def operation(node: fx.Node) -> str:
    """Names a call's function, for messages: `aten.softmax`."""
    if node.target is operator.getitem:
        return "indexing"
    return ".".join(str(node.target).split(".")[:2])


__all__ = ["Graph", "execute", "operation", "quiet", "read", "run_all", "users_of", "where"]
