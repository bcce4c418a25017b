"""The last layer: the first weights on each path from the outputs back through the network.

They are read off the graph of one more run. A node that has no weights, such as a pooling, passes on the layers that
its inputs come from. A node that multiplies by weights is a layer. Norms, activations and one learned number count as
constants. A product of two tensors that come from different layers, such as a gate, has no last layer. If the network
takes a gradient itself, such as a force, the last layer is that of the function that it differentiates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from graphlib import TopologicalSorter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from ..data import batches
from ..data.batches import Forward
from ..errors import LapwingError
from .eager import EagerMode
from .functional import FirstCall, first_call
from .module_state import modules_of
from .refusals import quantized_layers
from .selection import check_real
from .tracing import Recording, graph_leaves

log = logging.getLogger("lapwing")

JOINING = frozenset(
    ("Add", "Sub", "Rsub", "Stack", "Cat", "Where", "MaskedFill", "MaskedScatter", "CopySlices", "IndexAdd",
     "IndexCopy", "IndexFill", "IndexPut", "IndexPutImpl", "Scatter", "ScatterAdd", "ScatterReduce", "SliceScatter",
     "SelectScatter", "DiagonalScatter", "Maximum", "Minimum", "Logaddexp", "Cdist", "EuclideanDist")
)  # fmt: skip
"""Nodes that add or join their inputs. All others multiply them if they have several."""

SUMMED_FIRST = frozenset(("Addmm", "Baddbmm", "Addbmm", "Addmv", "Addr", "Addcmul", "Addcdiv"))
"""Nodes that add their first input to a product of the others."""

ELEMENTWISE = frozenset(("Mul", "Div", "Pow", "Lerp", "Addcmul", "Addcdiv"))
"""Nodes that multiply entry by entry. One learned number is then a scale; several numbers are no layer of their own."""

RESCALING = frozenset(
    ("NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "FusedRmsNorm",
     "PreluKernel")
)  # fmt: skip
"""Norms and activations, whose weights count as constants."""


def output_layers(
    model: nn.Module,
    inputs: Any,
    forward: Forward | None,
    parameters: Mapping[str, Tensor],
    recording: Recording,
    warn: bool = True,
) -> tuple[tuple[str, ...], FirstCall]:
    """Returns the names of the parameters that `lw.last_layer` treats, and the call that showed them.

    Raises:
        LapwingError: if no layer is the last, with the line to write.

    Cost: one forward pass with its graph.
    """
    kind = type(model).__name__
    scripted = [(prefix, module) for prefix, module in modules_of(model) if isinstance(module, torch.jit.ScriptModule)]
    if any(not prefix for prefix, _ in scripted):
        raise _refused_scripted(model, "The network")
    norms = {name for use in recording.noted if use.use.normalises for name in use.names.values()}
    leaves = {
        name: value.detach().requires_grad_(name not in norms)
        for name, value in parameters.items()
        if value.is_floating_point() or value.is_complex()
    }
    tensors = batches.tensors(inputs)
    origins = _Origins([*parameters.values(), *leaves.values()], tensors)
    with torch.enable_grad(), origins:
        first = first_call(model, forward, parameters, leaves, inputs)
    outputs = first.outputs
    if outputs.grad_fn is None:
        raise _refused_without_gradient(model, kind)
    owners = {id(tensor): name for named in (parameters, leaves) for name, tensor in named.items()}
    reached = {owners[id(leaf)] for leaf in graph_leaves(outputs, tensors)[0] if id(leaf) in owners}
    last = _Walk(outputs.grad_fn, origins, tensors, parameters, owners).last()
    names = tuple(name for name in parameters if name in last.layers & reached)  # an energy's bias has no force
    for prefix, module in scripted:
        if any(name.startswith(prefix) for name in names):
            raise _refused_scripted(module, f"The part {prefix[:-1]} of {kind}")
    if last.product:
        raise LapwingError(
            f"The outputs of {kind} are a product of what several of its weights give, so no layer is the last. Name "
            f"the weights to treat: write {_matching_line(last.product, parameters)}."
        )
    idle = _siblings(names, parameters, reached) if recording.routed else []
    if idle:
        raise LapwingError(
            f"{kind} chooses layers by its inputs, and {idle[0]}, in a layer of the shape of its last ones, was not "
            f"used on the first batch. Name the weights to treat: write {_matching_line({*names, *idle}, parameters)}."
        )
    check_real(names, parameters)
    if warn:
        log.info("The last layer of %s is treated: %s.", kind, ", ".join(names))
    return names, first


class _Origins(EagerMode):
    """Notes which tensors depend on the inputs, and which of them are gradients that the network takes itself.

    Attributes:
        nodes: nodes of the graph whose results depend on the inputs, except nodes within torch functions.
        gradients: node of each gradient that the network takes -> nodes of the tensors that it differentiates.
    """

    def __init__(self, weights: Iterable[Tensor], inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._known = {id(tensor): (tensor, False) for tensor in weights}  # keeps tensors, so that ids stay unique
        self._known |= {id(tensor): (tensor, True) for tensor in inputs}
        self.nodes = {tensor.grad_fn for tensor in inputs}
        self.gradients: dict[Node, list[Node | None]] = {}

    def intercept(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs the function; notes whether its results depend on the inputs."""
        try:
            out = function(*args, **kwargs)
        except (RuntimeError, BufferError):  # such as numpy(), which refuses tensors that require gradients
            args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            out = function(*args, **kwargs)
        made = _tensors(args[0] if out is None and args else out)
        if not made:
            return out
        if function is torch.autograd.grad:
            self._note_gradients(made, _tensors(args[0], kwargs.get("grad_outputs")))
        arguments = _tensors(*args, *kwargs.values())
        depends = any([self._depends(tensor) for tensor in arguments])
        if depends or any(id(tensor) in self._known for tensor in arguments):
            self._known.update((id(tensor), (tensor, depends)) for tensor in made)
        if depends:
            self.nodes.update(tensor.grad_fn for tensor in made)
        return out

    def _note_gradients(self, made: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        nodes = [tensor.grad_fn for tensor in sources]
        earlier = set().union(*(graph_leaves(tensor, ())[1] for tensor in sources))  # a cotangent may be the gradient
        for tensor in made:
            if tensor.grad_fn is not None and tensor.grad_fn not in earlier:
                self.gradients[tensor.grad_fn] = nodes

    def _depends(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the inputs. If no function here made it, scripted code may have."""
        if id(tensor) in self._known:
            return self._known[id(tensor)][1]
        if tensor.requires_grad:
            self.nodes.add(tensor.grad_fn)
        return tensor.requires_grad


def _tensors(*values: Any) -> list[Tensor]:
    """Returns the tensors among arguments or results, without the wrappers of torch.func's transformations."""
    tensors = []
    for value in values:
        leaves = pytree.tree_leaves(value) if isinstance(value, (tuple, list, dict)) else (value,)
        for tensor in leaves:
            if isinstance(tensor, Tensor):
                while _functorch.is_functorch_wrapped_tensor(tensor):
                    tensor = _functorch.get_unwrapped(tensor)
                tensors.append(tensor)
    return tensors


class _Last(NamedTuple):
    """The last layers of one node's result.

    Attributes:
        layers: names of the parameters in the first layers on each path back from the node.
        product: names of those that are multiplied by one another on the way; empty if none are.
    """

    layers: frozenset[str] = frozenset()
    product: frozenset[str] = frozenset()

    @staticmethod
    def joined(parts: Iterable[_Last]) -> _Last:
        """Returns the last layers of a sum of several results."""
        parts = list(parts)
        return _Last(
            frozenset().union(*(part.layers for part in parts)), frozenset().union(*(part.product for part in parts))
        )

    @staticmethod
    def multiplied(parts: Iterable[_Last]) -> _Last:
        """Returns the last layers of a product of several results."""
        parts = [part for part in parts if part.layers]
        whole = _Last.joined(parts)
        return whole if len({part.layers for part in parts}) < 2 else whole._replace(product=whole.layers)


class _Walk:
    """Goes through the graph of the outputs, beginning with the weights and the inputs.

    Args:
        root: the node of the outputs.
        origins: the nodes that depend on the inputs, and the gradients that the network takes.
        inputs: the tensors of the inputs, which may have a graph of their own.
        parameters: name -> parameter.
        owners: id of a leaf -> name of its parameter.
    """

    def __init__(
        self,
        root: Node,
        origins: _Origins,
        inputs: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        owners: Mapping[int, str],
    ) -> None:
        self._root, self._gradients, self._parameters, self._owners = root, origins.gradients, parameters, owners
        self._branches: dict[Node, list[Node | None]] = {}
        starts, left = {tensor.grad_fn for tensor in inputs}, [root]
        while left:
            node = left.pop()
            if node not in self._branches:
                after = [] if node in starts else [branch for branch, _ in node.next_functions]
                self._branches[node] = self._gradients.get(node, after)
                left += filter(None, self._branches[node])
        self._depending = {node for node in origins.nodes if node in self._branches}

    def last(self) -> _Last:
        """Returns the last layers of the outputs."""
        last: dict[Node, _Last] = {}
        graph = {node: list(filter(None, branches)) for node, branches in self._branches.items()}
        for node in TopologicalSorter(graph).static_order():
            if self._depending.isdisjoint((node, *graph[node])):
                name = self._owners.get(id(getattr(node, "variable", None)))
                weight = _Last(frozenset((name,) if name else ()))
                last[node] = _Last.joined([weight, *(last[branch] for branch in graph[node])])
            else:
                self._depending.add(node)
                last[node] = self._at(node, last)
        return last[self._root]

    def _at(self, node: Node, last: Mapping[Node, _Last]) -> _Last:
        """Returns the last layers of a node that depends on the inputs.

        Args:
            node: the node.
            last: node -> its last layers; for nodes that do not depend on the inputs, the weights that they come from.
        """
        kind = "" if node in self._gradients else type(node).__name__.rstrip("0123456789").removesuffix("Backward")
        branches = [branch for branch in self._branches[node] if branch is not None]
        if kind in JOINING or self._depending.isdisjoint(branches):
            return _Last.joined(last[branch] for branch in branches)
        added = [branch for branch in self._branches[node][:1] if branch is not None and kind in SUMMED_FIRST]
        factors = [branch for branch in branches if branch not in added]
        weights = _Last.joined(last[branch] for branch in factors if branch not in self._depending)
        if kind in RESCALING or (kind in ELEMENTWISE and self._count(weights.layers) == 1):
            weights = _Last()
        result = weights
        if kind in ELEMENTWISE or not weights.layers:
            result = _Last.multiplied([weights, *(last[branch] for branch in factors if branch in self._depending)])
        return _Last.joined([result, *(last[branch] for branch in added)])

    def _count(self, names: Iterable[str]) -> int:
        return sum(self._parameters[name].numel() for name in names)


def _siblings(names: Sequence[str], parameters: Mapping[str, Tensor], reached: Container[str]) -> list[str]:
    """Returns unused parameters in layers of the shape of a last one, such as experts, if several layers are last."""
    if len({name.rpartition(".")[0] for name in names}) < 2:
        return []
    shapes = {parameters[name].shape for name in names if parameters[name].ndim > 1}
    idle = [name for name in parameters if name not in reached]
    modules = {name.rpartition(".")[0] for name in idle if parameters[name].shape in shapes}
    return [name for name in idle if name.rpartition(".")[0] in modules]


def _matching_line(names: Set[str], parameters: Mapping[str, Tensor]) -> str:
    """Returns the text `params=lw.matching(...)` that selects parameters, by one pattern for each whole module."""
    patterns: dict[str, None] = {}  # in order
    for name in parameters:
        if name in names:
            parts = name.split(".")
            modules = [".".join(parts[:i]) + "." for i in range(1, len(parts))]
            whole = (m for m in modules if all(other in names for other in parameters if other.startswith(m)))
            patterns[next((f"{module}*" for module in whole), name)] = None
    return f"params=lw.matching({', '.join(map(repr, patterns))})"


def _refused_scripted(module: nn.Module, what: str) -> LapwingError:
    how = "traced" if isinstance(module, torch.jit.TopLevelTracedModule) else "scripted"
    return LapwingError(
        f"{what} is {how}, so it shows no layers and none can be taken for the last. Treat all weights: "
        f"write lw.fit(model, loader, lw.Diagonal(), params=lw.everything), or fit the network before it is {how}."
    )


def _refused_without_gradient(model: nn.Module, kind: str) -> LapwingError:
    quantized = quantized_layers(model)
    if quantized:
        return LapwingError(
            f"The outputs of {kind} come out of quantized layers (such as {quantized[0]}), which have no gradients. "
            "Keep its last layer in floating point when you quantize it, or fit it before it is quantized."
        )
    return LapwingError(
        f"The outputs of {kind} have no gradient for any of its weights, so it has no last layer to treat. Compute "
        "them outside torch.no_grad() and without detach(), at least in the last layer."
    )
