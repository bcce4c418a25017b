"""The last layer: the weights after which no others come on the way to the outputs.

It is read off the graph of one more run, from the outputs back. What takes one tensor passes on what it gets, and so
does what adds up or joins several. What multiplies by weights alone is a layer, however its weights were made. What
multiplies two tensors that both depend on the inputs and on different layers, such as a gate, has no last layer. A
gradient that the network takes itself, such as a force, has the last layer of what it is the gradient of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from ..errors import LapwingError
from . import batches
from .batches import Forward
from .eager import EagerMode
from .functional import FirstCall, first_call
from .gate import quantized_layers
from .module_state import modules_of
from .selection import check_real
from .tracing import Recording, graph_leaves

log = logging.getLogger("lapwing")

ADDING = frozenset(("Add", "Sub", "Rsub", "Lerp", "IndexAdd", "ScatterAdd"))
"""Nodes that add branches up: of these, one that others are computed from is a skip connection."""

ASSEMBLING = frozenset(
    ("Stack", "Where", "MaskedScatter", "CopySlices", "IndexPut", "IndexPutImpl", "IndexCopy", "IndexAdd", "Scatter",
     "ScatterAdd", "ScatterReduce", "SliceScatter", "SelectScatter", "DiagonalScatter")
)  # fmt: skip
"""Nodes that may put samples together that went through different layers."""

JOINING = ADDING | ASSEMBLING | frozenset(
    ("Cat", "MaskedFill", "IndexFill", "Maximum", "Minimum", "Logaddexp", "Cdist", "EuclideanDist")
)  # fmt: skip
"""Nodes whose branches all go on to the outputs."""

SUMMED_FIRST = frozenset(("Addmm", "Baddbmm", "Addbmm", "Addmv", "Addr", "Addcmul", "Addcdiv"))
"""Nodes that add a product of the later branches to the first."""

ELEMENTWISE = frozenset(("Mul", "Div", "Pow", "Addcmul", "Addcdiv"))
"""Nodes that multiply entry by entry: by one learned number they rescale, by more they may be anything."""

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
    """Returns the names of the parameters that `lw.last_layer` treats, and the call that showed which they are.

    Raises:
        LapwingError: where no layer is the last, with the line to write.

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
    graph = _Graph(outputs.grad_fn, origins, tensors, parameters, owners)
    layer, product = graph.last()
    names = tuple(name for name in parameters if name in layer & reached)  # an energy's bias has no force
    for prefix, module in scripted:
        if any(name.startswith(prefix) for name in names):
            raise _refused_scripted(module, f"The part {prefix[:-1]} of {kind}")
    idle = _siblings(product or layer, parameters, reached) if recording.routed and graph.assembled else []
    if product:
        raise LapwingError(
            f"The outputs of {kind} are a product of what several of its weights give, so no layer is the last. Name "
            f"the weights to treat: write {matching_line({*product, *idle}, parameters)}."
        )
    if idle:
        raise LapwingError(
            f"{kind} chooses layers by its inputs, and {idle[0]}, in a layer of the shape of its last one, was not "
            "used on the first batch. Put a batch first that uses all such layers (its first four samples count), or "
            f"name the weights to treat: write {matching_line({*layer, *idle}, parameters)}."
        )
    check_real(names, parameters)
    if warn:
        log.info("The last layer of %s is treated: %s.", kind, ", ".join(names))
    return names, first


class _Origins(EagerMode):
    """Tells tensors that depend on the inputs from those made of weights and constants alone.

    Attributes:
        nodes: of the graph, those whose results depend on the inputs, all but those within torch functions.
        gradients: nodes of gradients that the network took itself -> those of what it took them of.
    """

    def __init__(self, weights: Iterable[Tensor], inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._weights = {id(tensor): tensor for tensor in weights}  # tensors are kept, so that no id is used again
        self._data = {id(tensor): tensor for tensor in inputs}
        self.nodes: list[Node | None] = [tensor.grad_fn for tensor in inputs]
        self.gradients: dict[Node, list[Node]] = {}

    def intercept(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs the function; notes what its results depend on."""
        try:
            out = function(*args, **kwargs)
        except (RuntimeError, BufferError):  # what takes no leaf of a graph, such as numpy(), passes no gradient on
            args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            out = function(*args, **kwargs)
        made = _tensors(args[0] if out is None and args else out)
        if not made:
            return out
        arguments = _tensors(*args, *kwargs.values())
        if function is torch.autograd.grad:
            self._note_gradients(made, _tensors(args[0], kwargs.get("grad_outputs")))
        if any(self._varies(tensor) for tensor in arguments):
            self._data.update((id(tensor), tensor) for tensor in made)
            self.nodes += [tensor.grad_fn for tensor in made]
        elif any(id(tensor) in self._weights for tensor in arguments):
            self._weights.update((id(tensor), tensor) for tensor in made)
        return out

    def _note_gradients(self, made: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        nodes = [tensor.grad_fn for tensor in sources if tensor.grad_fn is not None]
        earlier = set().union(*(graph_leaves(tensor, ())[1] for tensor in sources))  # may come back as it is
        for tensor in made:
            if tensor.grad_fn is not None and tensor.grad_fn not in earlier:
                self.gradients[tensor.grad_fn] = nodes

    def _varies(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the inputs; one that no function here made may have come from scripted code."""
        if id(tensor) in self._data:
            return True
        unseen = tensor.requires_grad and id(tensor) not in self._weights
        if unseen:
            self.nodes.append(tensor.grad_fn)
        return unseen


def _tensors(*values: Any) -> list[Tensor]:
    """Lists the tensors among arguments or results; of those within a transformation, what they wrap."""
    tensors = []
    for value in values:
        leaves = pytree.tree_leaves(value) if isinstance(value, (tuple, list, dict)) else (value,)
        for tensor in leaves:
            if isinstance(tensor, Tensor):
                while _functorch.is_functorch_wrapped_tensor(tensor):
                    tensor = _functorch.get_unwrapped(tensor)
                tensors.append(tensor)
    return tensors


class _Step(NamedTuple):
    """What the walk does at a node.

    Attributes:
        weights: the names of parameters that come in here as a layer or as what is added to one.
        onward: the branches that it follows.
        behind: what a layer that ends it is computed from.
        product: whether the branches that it follows may be multiplied by each other, or by these weights.
    """

    weights: frozenset[str]
    onward: list[Node]
    behind: list[Node]
    product: bool


class _Graph:
    """The graph of the outputs.

    Args:
        root: the node of the outputs.
        origins: which nodes depend on the inputs. Gradients that the network took have as branches what they are of.
        inputs: the tensors of the inputs, which may have a graph of their own.
        parameters: name -> parameter.
        owners: id of a leaf -> name of its parameter.

    Attributes:
        assembled: whether samples may have gone through different last layers, once `last` was called.
    """

    def __init__(
        self,
        root: Node,
        origins: _Origins,
        inputs: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        owners: Mapping[int, str],
    ) -> None:
        self._root, self._parameters, self._owners = root, parameters, owners
        self._gradients, self.assembled = origins.gradients, False
        self._branches: dict[Node, tuple[Node | None, ...]] = {}
        parents: dict[Node, list[Node]] = {}
        stops = [tensor.grad_fn for tensor in inputs]
        left = [root]
        while left:
            node = left.pop()
            if node in self._branches:
                continue
            after = tuple(branch for branch, _ in node.next_functions)
            self._branches[node] = () if node in stops else tuple(self._gradients.get(node, after))
            for branch in filter(None, self._branches[node]):
                parents.setdefault(branch, []).append(node)
                left.append(branch)
        self._varying: set[Node] = set()
        left = [node for node in origins.nodes if node in self._branches]
        while left:
            node = left.pop()
            if node not in self._varying:
                self._varying.add(node)
                left += parents.get(node, ())

    def last(self) -> tuple[set[str], set[str]]:
        """Returns the names of the last layer's parameters, and those of a product of several layers, if there is one.

        A layer met through a skip connection, from which another one is computed too, is not the last.
        """
        steps: dict[Node, _Step] = {}
        names: dict[Node, frozenset[str]] = {}  # of the layers that a node's result was made by
        products: dict[Node, frozenset[str]] = {}
        left = [self._root]
        while left:  # without recursion, which recurrent networks would exhaust
            node = left[-1]
            if node not in steps:
                steps[node] = self._step(node)
            step = steps[node]
            missing = [branch for branch in step.onward if branch not in names]
            if missing:
                left += missing
                continue
            left.pop()
            factors = {layers for layers in (step.weights, *(names[branch] for branch in step.onward)) if layers}
            names[node] = factors.pop() if len(factors) == 1 else frozenset().union(*factors)
            if step.product and len(factors) > 1:
                products[node] = names[node]
        behind = self._below([branch for step in steps.values() for branch in step.behind])
        met: set[tuple[Node, bool]] = set()  # nodes, and whether a sum led to them
        ways = [(self._root, False)]
        while ways:
            node, summed = way = ways.pop()
            if way not in met:
                met.add(way)
                summed = summed or (len(steps[node].onward) > 1 and _kind(node) in ADDING | SUMMED_FIRST)
                ways += [(branch, summed) for branch in steps[node].onward]
        self.assembled = any(_kind(node) in ASSEMBLING for node in steps)
        layers = [steps[node].weights for node, summed in met if not (summed and node in behind)]
        product = [made for node, made in products.items() if node not in behind]
        return set().union(*layers), set().union(*product)

    def _step(self, node: Node) -> _Step:
        kind = "" if node in self._gradients else _kind(node)
        branches = self._branches[node]
        varying = [branch for branch in branches if branch in self._varying]
        fixed = [branch for branch in branches if branch is not None and branch not in self._varying]
        if not varying:
            return _Step(self._names([node]), [], [], False)
        if kind in JOINING:
            shares = [branch for branch in branches[2:] if branch is not None] if kind == "Lerp" else []
            gated = any(branch in self._varying for branch in shares) or self._count(self._names(shares)) > 1
            return _Step(self._names(fixed if gated else set(fixed).difference(shares)), varying, [], gated)
        first = branches[:1] if kind in SUMMED_FIRST else ()
        added = self._names(branch for branch in fixed if branch in first)
        onward = [branch for branch in varying if branch in first]
        factors = [branch for branch in varying if branch not in first]
        names = self._names(branch for branch in fixed if branch not in first)
        if not names or kind in RESCALING:
            return _Step(added, onward + factors, [], len(factors) > 1)
        if kind not in ELEMENTWISE:
            return _Step(added | names, onward, factors, False)
        if self._count(names) == 1:
            return _Step(added, onward + factors, [], len(factors) > 1)
        return _Step(added | names, onward + factors, [], bool(factors))

    def _count(self, names: Iterable[str]) -> int:
        return sum(self._parameters[name].numel() for name in names)

    def _names(self, nodes: Iterable[Node]) -> frozenset[str]:
        """Returns the names of the parameters that some nodes are computed from."""
        leaves = [id(getattr(node, "variable", None)) for node in self._below(nodes)]
        return frozenset(self._owners[leaf] for leaf in leaves if leaf in self._owners)

    def _below(self, nodes: Iterable[Node]) -> set[Node]:
        """Returns some nodes and all that they are computed from."""
        met: set[Node] = set()
        left = list(nodes)
        while left:
            node = left.pop()
            if node not in met:
                met.add(node)
                left += filter(None, self._branches[node])
        return met


def _kind(node: Node) -> str:
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")


def _siblings(names: Iterable[str], parameters: Mapping[str, Tensor], reached: Container[str]) -> list[str]:
    """Returns the names of parameters not used, of layers with a matrix of the shape of one named, such as experts."""
    shapes = {parameters[name].shape for name in names if parameters[name].ndim > 1}
    idle = [name for name in parameters if name not in reached]
    modules = {name.rpartition(".")[0] for name in idle if parameters[name].shape in shapes}
    return [name for name in idle if name.rpartition(".")[0] in modules]


def matching_line(names: Set[str], parameters: Mapping[str, Tensor]) -> str:
    """Returns `params=lw.matching(...)` for some parameters, a module's by one pattern where all of its are meant."""
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
