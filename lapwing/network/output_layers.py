"""The last layer: the first weights on each path from the outputs back through the network.

They are read off the graph of one more run. A node that has no weights, such as a pooling, passes on the layers that
its inputs come from. A node that multiplies by weights is a layer. Norms, activations and one learned number count as
constants. A product of two tensors that come from different layers, such as a gate, has no last layer. If the network
takes a gradient itself, such as a force, the last layer is the last one of the function that it differentiates.

A product of weights and constants counts as one weight, such as a low-rank product. But data may reach the network
past torch: rows looked up by number, NumPy, texts that become tokens in the forward. So tensors that are multiplied by
weights, and are not made of weights, count as data if several matrices would otherwise be one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from graphlib import TopologicalSorter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from ..data.inputs import Inputs
from ..errors import LapwingError
from .call import Call
from .eager import EagerMode, modules_of, real
from .functional import FirstCall
from .gate import is_quantized
from .tracing import Recording, graph_leaves, kind_of

JOINING = frozenset(
    ("Add", "Sub", "Rsub", "Stack", "Cat", "Where", "MaskedFill", "MaskedScatter", "CopySlices", "IndexAdd",
     "IndexCopy", "IndexFill", "IndexPut", "IndexPutImpl", "Scatter", "ScatterAdd", "ScatterReduce", "SliceScatter",
     "SelectScatter", "DiagonalScatter", "Maximum", "Minimum", "Logaddexp", "Cdist", "EuclideanDist")
)  # fmt: skip
"""Nodes that add or join their inputs. All others multiply them if they have several."""

SUMMED_FIRST = frozenset(("Addmm", "Baddbmm", "Addbmm", "Addmv", "Addr", "Addcmul", "Addcdiv"))
"""Nodes that add their first input to a product of the others."""

ELEMENTWISE = frozenset(("Mul", "Div", "Pow", "Lerp", "Addcmul", "Addcdiv"))
"""Nodes that multiply entry by entry. One learned number is then a scale; several are not a layer of their own."""

RESCALING = frozenset(("NativeLayerNorm", "NativeGroupNorm", "FusedRmsNorm", "PreluKernel"))
"""Norms and activations that `torch.vmap` runs, unseen by the recording. Their weights count as constants too."""

NONE = frozenset[str]()

PRODUCT = ""
"""Stands among the names of the last layers if some of them are multiplied by one another on the way."""


def output_layers(
    call: Call, inputs: Inputs, parameters: Mapping[str, Tensor], recording: Recording
) -> tuple[tuple[str, ...], tuple[str, ...], FirstCall]:
    """Returns the names of the last layer, of idle parameters that other inputs may use instead, and the call."""
    model, kind = call.model, type(call.model).__name__
    norms = {name for use in recording.noted if use.use.normalises for name in use.names.values()}
    leaves = {
        name: real(value.detach()).requires_grad_(name not in norms)
        for name, value in parameters.items()
        if value.is_floating_point() or value.is_complex()
    }
    origins = _Origins(leaves.values(), inputs.tensors)
    with torch.enable_grad(), origins:
        first = FirstCall(call, parameters, leaves, inputs)
    outputs = first.outputs
    if outputs.grad_fn is None:
        raise _refused_without_gradient(model, kind)
    reached = set(map(id, graph_leaves(outputs, inputs.tensors)[0]))
    last = _last_layers(outputs.grad_fn, inputs.tensors, origins, leaves)
    names = tuple(name for name in leaves if name in last and id(leaves[name]) in reached)  # an energy's bias is not
    like = {name: (name.rpartition(".")[2], leaf.ndim, leaf.shape[:1]) for name, leaf in leaves.items()}  # experts are
    unused = [name for name, leaf in leaves.items() if leaf.requires_grad and id(leaf) not in reached]
    idle = tuple(name for name in unused if recording.chosen and like[name] in {like[other] for other in names})
    for prefix, module in modules_of(model):
        if isinstance(module, torch.jit.ScriptModule) and any(name.startswith(prefix) for name in names):
            what = f"The part {prefix[:-1]} of {kind}" if prefix else "The network"
            raise LapwingError(
                f"{what} is scripted or traced, so it shows no layers and none can be taken for the last. Treat all "
                "weights: write lw.fit(model, loader, lw.Diagonal(), params=lw.everything), or fit the network before "
                "you script or trace it."
            )
    if PRODUCT in last:
        raise LapwingError(
            f"The outputs of {kind} are a product of what several of its weights give, so no layer is the last. Name "
            f"the weights to treat: write {_matching_line({*names, *idle}, parameters)}."
        )
    return names, idle, first


class _Origins(EagerMode):
    """Notes which tensors depend on the inputs, and which of them are gradients that the network takes itself."""

    def __init__(self, weights: Iterable[Tensor], inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._known = {id(tensor): (tensor, False, True) for tensor in weights}  # keeps tensors: ids stay unique
        self._weights = set(self._known)
        self._known |= {id(tensor): (tensor, True, True) for tensor in inputs}
        self.nodes = {tensor.grad_fn for tensor in inputs}  # depend on the inputs; without nodes within torch functions
        self.constant = set[Node | None]()  # functions of weights and of tensors that are neither
        self.gradients: dict[Node, list[Node | None]] = {}  # each gradient that the network takes -> of these tensors

    def intercept(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        try:
            out = function(*args, **kwargs)
        except (RuntimeError, BufferError):  # such as numpy(), which refuses tensors that require gradients
            args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            out = function(*args, **kwargs)
        made = _tensors(args[0] if out is None and args else out)
        if function is torch.autograd.grad:
            sources = [tensor.grad_fn for tensor in _tensors((args[0], kwargs.get("grad_outputs")))]
            nodes = {tensor.grad_fn for tensor in made}.difference(sources)  # a cotangent may be the gradient
            self.gradients.update((node, sources) for node in nodes if node is not None)
        used = _tensors((args, kwargs))
        depends = any([self._depends(tensor) for tensor in used])
        self._known.update((id(tensor), (tensor, depends, tensor.requires_grad)) for tensor in made)
        if depends or not all(tensor.requires_grad or id(tensor) in self._weights for tensor in used):
            (self.nodes if depends else self.constant).update(tensor.grad_fn for tensor in made)
        return out

    def _depends(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the inputs. If no function here made it, scripted code may have.

        Scripted code and an `autograd.Function` set the node of their result after the functions that they call.
        """
        _, depends, had_graph = self._known.get(id(tensor), (tensor, tensor.requires_grad, True))
        if depends:
            self.nodes.add(tensor.grad_fn)
        elif not had_graph:
            self.constant.add(tensor.grad_fn)
        return depends


def _tensors(values: Any) -> list[Tensor]:
    """Returns the tensors among arguments or results, without the wrappers of torch.func's transformations."""
    tensors = []
    for tensor in pytree.tree_leaves(values):
        if isinstance(tensor, Tensor):
            while _functorch.is_functorch_wrapped_tensor(tensor):
                tensor = _functorch.get_unwrapped(tensor)
            tensors.append(tensor)
    return tensors


def _last_layers(
    root: Node, inputs: Sequence[Tensor], origins: _Origins, leaves: Mapping[str, Tensor]
) -> frozenset[str]:
    """Returns the names of the parameters in the last layers of the outputs, and `PRODUCT` if layers are multiplied."""
    graph: dict[Node, list[Node]] = {tensor.grad_fn: [] for tensor in inputs if tensor.grad_fn is not None}
    left = [root]
    while left:
        node = left.pop()
        if node not in graph:
            branches = origins.gradients.get(node, [branch for branch, _ in node.next_functions])
            graph[node] = [branch for branch in branches if branch is not None]
            left += graph[node]
    owners = {id(leaf): frozenset((name,)) for name, leaf in leaves.items()}
    last = dict[Node | None, frozenset[str]]({None: NONE})

    def layers(node: Node, dependent: Set[Node | None]) -> frozenset[str]:
        """Returns the last layers at a node if these branches depend on data."""
        kind = "" if node in origins.gradients else kind_of(node)
        added: Sequence[Node | None] = ()
        if kind in JOINING or not dependent:  # also a weight, and tensors that are computed from weights only
            added = graph[node]
        elif kind in SUMMED_FIRST:
            added = (node.next_functions[0][0],)
        factors = [branch for branch in graph[node] if branch not in added]
        weights = NONE.union(*(last[branch] for branch in factors if branch not in dependent))
        single = [leaves[name].numel() for name in weights] == [1]
        if kind in RESCALING or (kind in ELEMENTWISE and single):
            weights = NONE
        parts = {weights}
        if kind in ELEMENTWISE or not weights:
            parts.update(last[branch] for branch in factors if branch in dependent)
        product = (PRODUCT,) if len(parts - {NONE}) > 1 else ()
        own = owners.get(id(getattr(node, "variable", None)), NONE)
        return own.union(product, *parts, *(last[branch] for branch in added))

    depending, touched = set(origins.nodes), set[Node | None]()
    for node in TopologicalSorter(graph).static_order():
        dependent, constant = depending.intersection(graph[node]), touched.intersection(graph[node])
        last[node] = layers(node, dependent)
        if not dependent and constant and sum(leaves[name].ndim > 1 for name in last[node]) > 1:
            fewer = layers(node, constant)
            if PRODUCT not in fewer and fewer < last[node]:
                last[node], dependent = fewer, constant
        depending.update((node,) if dependent else ())
        if constant or (node in origins.constant and kind_of(node) not in JOINING | ELEMENTWISE):
            touched.add(node)
    return last[root]


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


def _refused_without_gradient(model: nn.Module, kind: str) -> LapwingError:
    quantized = [prefix[:-1] or type(layer).__name__ for prefix, layer in modules_of(model) if is_quantized(layer)]
    if quantized:
        return LapwingError(
            f"The outputs of {kind} come out of quantized layers (such as {quantized[0]}), which have no gradients. "
            "Keep its last layer in floating point when you quantize it, or fit it before it is quantized."
        )
    return LapwingError(
        f"The outputs of {kind} have no gradient for any of its weights, so it has no last layer to treat. Compute "
        "them outside torch.no_grad() and without detach(), at least in the last layer."
    )
