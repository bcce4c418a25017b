"""One forward pass that records the uses of the watched parameters: the layer's input and its node in the graph.

Calls of torch functions (`F.linear(x, W, b)`, `conv2d`, ...) are recorded, and calls of modules are not. So functional
reuse of a weight and attention projections count like any other layer. Parameters are recognised by identity. The
graph starts at the first watched output, and weights that are not watched are constants, so an untreated trunk costs a
plain forward pass. A table that is read once for the whole batch, such as position embeddings, is expanded over the
samples, so that it has one gradient per sample.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Parameter

from ..data.inputs import Inputs
from ..jacobian.layers import READERS, Use
from . import recurrent
from .eager import EagerMode, batching_quiet, swapped, transformed
from .positions import Positions
from .stamp import PreservedState

DIFFERENTIATES = frozenset((torch.autograd.grad, torch.autograd.backward, Tensor.backward))
"""Functions that compute gradients within a forward pass. Outputs may then depend on weights through gradients."""

ROUTING = frozenset(
    name + suffix
    for suffix in ("", "_")
    for name in (
        "allclose", "argsort", "argwhere", "bincount", "bucketize", "gather", "index_add", "index_copy", "index_fill",
        "index_put", "index_reduce", "index_select", "kthvalue", "masked_scatter", "masked_select", "median",
        "nonzero", "put", "repeat_interleave", "scatter", "scatter_add", "scatter_reduce", "searchsorted", "sort",
        "take", "take_along_dim", "topk", "unique", "unique_consecutive", "_pack_padded_sequence",
        "_pad_packed_sequence", "equal", "is_nonzero", "msort", "one_hot", "__array__", "__bool__", "__contains__",
        "__float__", "__index__", "__int__", "item", "numpy", "tolist",
    )
)  # fmt: skip
"""Names of functions whose output layout can depend on values, and not only on shapes."""

ENTRYWISE = frozenset(
    ("Abs", "Add", "Alias", "Atan", "Clamp", "ClampMax", "ClampMin", "Clone", "Div", "Elu", "Erf", "Exp", "Expm1",
     "Gelu", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyRelu", "Log", "Log1P", "LogSigmoid", "Mish", "Mul", "Neg",
     "Pow", "Reciprocal", "Relu", "Rsub", "Sigmoid", "Silu", "Sinh", "Softplus", "Sqrt", "Squeeze", "Sub", "Tanh",
     "ToCopy", "Unsqueeze", "UnsafeView", "View")
)  # fmt: skip
"""Nodes that may form a tail: they treat each entry alone, or keep the entries in order.

Masks do not count: what `call.finite` writes for an impossible class depends on the other classes.
"""


@dataclass
class RecordedUse:
    """One use of watched parameters. The last four fields are known after the forward pass."""

    use: Use  # the layer's input, parameters and family
    names: dict[str, str]  # role -> name of the watched parameter
    edge: GradientEdge  # place of the layer's output in the graph
    out: Tensor  # the layer's output
    version: int  # write counter of the input at the call
    spread: bool = False  # a table's single row of tokens was expanded over the samples
    reached: bool = True  # the outputs depend on this use: not if its output was detached, for instance
    stale: bool = False  # the layer's input was modified in place after the call
    is_output: bool = False  # the layer gives the network's output, maybe through a tail (`find_output`)
    slopes: Tensor | None = None  # of that tail, entry by entry; None if there is no tail


class Recording(NamedTuple):
    """One recorded forward pass."""

    outputs: Tensor  # f (B, C), or (B, T C) for T positions, with their graph
    noted: list[RecordedUse]  # the uses in order
    routed: bool  # the layout of a row may depend on values (`ROUTING`) or on its text
    chosen: bool  # the layout may depend on these, or on a plain number or text of all rows
    differentiated: bool  # the network computed gradients itself, which its outputs may contain
    elsewhere: set[str]  # names of watched parameters that may reach the outputs outside the recorded uses
    shaped: Tensor  # the outputs in the network's own shape, with positions if it has any
    sizes: tuple[int, ...]  # of their positions, such as (H, W), or () for outputs (B, C)
    plain: bool  # the outputs depend on all recorded uses, and on watched parameters in no other way
    rounds: bool  # as in `EagerMode`: a plain call may give other outputs


class Recorder(EagerMode):
    """Function mode that records the uses of parameters. `Call.traced` explains the arguments."""

    def __init__(self, watched: Mapping[str, Tensor], spread: int = 1, frozen: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._watched = {id(parameter): name for name, parameter in watched.items()}
        self._stand_ins = {id(p): p.detach().requires_grad_() for p in frozen}
        self._watched |= {id(self._stand_ins[id(p)]): self._watched[id(p)] for p in frozen}  # readers meet their views
        self._spread = spread
        self.noted: list[RecordedUse] = []
        self.routed = self.differentiated = False

    @contextlib.contextmanager
    def since_call_of(self, module: nn.Module) -> Iterator[None]:
        """Runs the block without gradients until this thread calls the module, and records from there on."""
        thread = get_ident()

        def begin(*_: Any) -> None:
            if get_ident() == thread and not recording:
                torch.set_grad_enabled(True)
                recording.append(stack.enter_context(self))

        recording: list[Recorder] = []
        with torch.no_grad(), contextlib.ExitStack() as stack:
            stack.callback(module.register_forward_pre_hook(begin).remove)
            yield

    def intercept(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs a function. If it uses watched parameters, records the use and starts the graph at its output."""
        use, reader = None, READERS.get(function)
        if reader is not None and torch.is_grad_enabled() and not transformed():  # the network may turn gradients off
            use = reader(args, kwargs, lambda value: id(value) in self._watched)
        used = {} if use is None else use.parameters
        names = {role: self._watched[id(p)] for role, p in used.items() if id(p) in self._watched}
        if use is None or not names or use.inputs.is_complex():  # layers are real
            self.routed = self.routed or _routes(function, args)
            self.differentiated = self.differentiated or function in DIFFERENTIATES
            if self._stand_ins:
                return self._with_stand_ins(function, args, kwargs)
            if self._watched and Parameter in map(type, (*args, *kwargs.values())):
                args, kwargs = self._with_constants(function, args, kwargs)
            return function(*args, **kwargs)
        constant = {id(p): p.detach() for p in use.parameters.values()}
        if use.view is not None:
            constant[id(use.view)] = use.view.detach()
        args = tuple([constant.get(id(arg), arg) for arg in args])
        kwargs = {key: constant.get(id(arg), arg) for key, arg in kwargs.items()} if kwargs else kwargs
        out = function(*args, **kwargs)
        spread = use.one_hot and self._spread > 1 and use.inputs.ndim > 1 and use.inputs.shape[0] == 1
        if spread:
            use.inputs, out = (x.expand(self._spread, *x.shape[1:]) for x in (use.inputs, out))
        if not out.requires_grad:
            out = out.detach().requires_grad_().clone()  # the clone may be modified in place, a leaf may not
        self.noted.append(RecordedUse(use, names, get_gradient_edge(out), out, use.inputs._version, spread))
        return out

    def recurrent(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs a recurrent layer or cell as plain operations if its weights are watched or gradients pass through."""
        out, plain = NotImplemented, torch.is_grad_enabled() and not transformed() and not kwargs
        if plain and any(id(value) in self._watched or value.requires_grad for value in recurrent.tensors_of(args)):
            out = recurrent.opened(function, args, lambda value: id(value) in self._watched, self.intercept)
        return super().recurrent(function, args, kwargs) if out is NotImplemented else out

    def _with_constants(self, function: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Detaches weights that are not watched, so that no graph keeps the inputs of their layers."""
        if getattr(function, "__name__", "") == "__get__":  # an attribute, such as requires_grad
            return args, kwargs
        constant = {id(x): x.detach() for x in (*args, *kwargs.values()) if type(x) is Parameter}
        constant = {key: value for key, value in constant.items() if key not in self._watched}
        return tuple([constant.get(id(x), x) for x in args]), {key: constant.get(id(x), x) for key, x in kwargs.items()}

    def _with_stand_ins(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs a function with leaves of the graph instead of frozen parameters, so that the graph shows their use."""
        replaced, named = swapped(args, self._stand_ins), swapped(tuple(kwargs.values()), self._stand_ins)
        if replaced is not args or any(map(operator.is_not, named, kwargs.values())):
            with contextlib.suppress(RuntimeError, BufferError):  # numpy() and writes do not accept a leaf
                out = function(*replaced, **dict(zip(kwargs, named, strict=True)))
                if isinstance(out, (Tensor, list, tuple)):  # not requires_grad, for instance
                    return next((value for value in args if out is self._stand_ins.get(id(value))), out)
        return function(*args, **kwargs)

    def recording_of(self, shaped: Tensor, layout: Positions | None, inputs: Inputs) -> Recording:
        """Returns the recording of a call, from its outputs in their own shape, and their layout.

        If the graph of the outputs ends at watched parameters, these are used `elsewhere`, since recorded uses have
        constants instead. The graph behind the inputs does not count.
        """
        outputs, sizes = (shaped, ()) if layout is None else (layout.matrix(shaped), layout.sizes(shaped.shape))
        ends, met = graph_leaves(outputs, inputs.tensors)
        elsewhere = {self._watched[id(leaf)] for leaf in ends if id(leaf) in self._watched}
        for use in self.noted:
            use.reached, use.stale = use.edge.node in met, use.use.inputs._version != use.version
        find_output([use for use in self.noted if use.use.is_product], outputs, inputs.wants_gradient)
        plain = not (self.differentiated or elsewhere) and all(use.reached for use in self.noted)
        values = [leaf for leaf in inputs.leaves if isinstance(leaf, (str, int))]
        texts = sum(isinstance(leaf, str) for leaf in values)
        routed = self.routed or texts >= max(2, inputs.samples)
        chosen = routed or bool(values)
        return Recording(
            outputs, self.noted, routed, chosen, self.differentiated, elsewhere, shaped, sizes, plain, self.rounds
        )


def _routes(function: Callable, args: tuple) -> bool:
    """Whether the function's output layout can depend on values (indexing, sorting)."""
    name = getattr(function, "__name__", "")
    if name in ("__getitem__", "__setitem__"):
        places = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(place, (Tensor, list)) or hasattr(place, "__array__") for place in places)
    return name in ROUTING or (name == "where" and len(args) == 1)


def graph_leaves(outputs: Tensor, inputs: Sequence[Tensor]) -> tuple[list[Tensor], set[Node | None]]:
    """Returns the leaves and the nodes of the graph of the outputs, without the graph behind the inputs."""
    leaves: list[Tensor] = []
    left, met = [outputs.grad_fn], {leaf.grad_fn for leaf in inputs}
    while left:
        node = left.pop()
        if node is None or node in met:
            continue
        met.add(node)
        after = node.next_functions
        if not after and (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        left += [node for node, _ in after]
    return leaves, met


def kind_of(node: Node | None) -> str:
    """Returns the name of a node's function, such as Addmm; "" for a function that is written in Python."""
    name = "" if isinstance(node, BackwardCFunction) else type(node).__name__
    return name.rstrip("0123456789").removesuffix("Backward")


def reaches(start: Node, ends: Container[Node]) -> bool:
    """Whether some path of a graph leads from a node back to one of the ends."""
    left, met = [start], set[Node]()
    while left:
        node = left.pop()
        if node in ends:
            return True
        met.add(node)
        left += [each for each, _ in node.next_functions if each is not None and each not in met]
    return False


def find_output(uses: Iterable[RecordedUse], outputs: Tensor, differentiable: bool) -> None:
    """Marks the uses whose outputs h give the network's output f through a tail: `f = φ(h)` entry by entry.

    Row c of the Jacobian of f is row c of the Jacobian of h times the slope `∂φ_c/∂h_c`. Slopes keep their graph if
    `differentiable`. So such a last layer needs no backward pass for each output. Examples of tails are a temperature
    and the mean of two heads. A single layer without a tail has no slopes. Cost: a backward pass of the tail.
    """
    ends = {use.edge.node: use for use in uses if use.out.shape == outputs.shape}
    ahead, met, found = [outputs.grad_fn], set[Node | None](), dict[Node, RecordedUse]()
    while ahead:
        step = ahead.pop()
        if step in ends:
            found[step] = ends[step]
        elif step not in met:
            before = [] if step is None else [node for node, _ in step.next_functions if node is not None]
            before = before if len(before) < 2 else [node for node in before if reaches(node, ends)]
            if not before or kind_of(step) not in ENTRYWISE:
                return
            met.add(step)
            ahead += before
    if len(found) > 1:
        names = [name for use in found.values() for name in use.names.values()]
        behind = [node for end in found for node, _ in end.next_functions if node is not None]
        if len(set(names)) < len(names) or any(reaches(node, found) for node in behind):
            return  # two uses of one weight, or a layer that feeds another one
    for use in found.values():
        use.is_output = True
    if outputs.grad_fn not in found:
        ones, options = torch.ones_like(outputs), {"retain_graph": True, "create_graph": differentiable}
        slopes = torch.autograd.grad(outputs, [use.edge for use in found.values()], ones, **options)
        for use, slope in zip(found.values(), slopes, strict=True):
            use.slopes = slope


@dataclass(eq=False, repr=False)
class KnownCalls:
    """Recorded calls of one network, which later calls repeat.

    The functions that a forward pass calls depend on the shapes of its inputs, on the attributes of its modules, and on
    values that it reads (`ROUTING`). If a call reads no value, calls with inputs of the same shapes repeat it as long
    as the modules have the same attributes. So if all watched parameters belong to one module, the next recording may
    begin where that module is called. What comes before runs without gradients and without a function mode.
    """

    state: PreservedState | None = None  # of the modules, before all of these calls
    calls: dict[Hashable, tuple[nn.Module | None, int]] = field(default_factory=dict)  # where to begin, number of uses

    def __reduce__(self) -> tuple[type[KnownCalls], tuple[()]]:
        return KnownCalls, ()  # a copy of the network has other modules

    def find(self, watched: Iterable[str], inputs: Inputs) -> tuple[nn.Module | None, int]:
        """Returns the module at which the recording of a known call may begin, or None, and its number of uses."""
        module, uses = self.calls.get((*watched, inputs.form), (None, 0))
        return (module, uses) if module is None or (self.state and self.state.is_equal()) else (None, 0)

    def add(
        self, watched: Mapping[str, Tensor], inputs: Inputs, state: PreservedState, recording: Recording, whole: bool
    ) -> None:
        """Adds the call of a recording, unless it read a value or changed the modules, which had this state before.

        With `whole`, its recordings may never begin at a module.
        """
        form = inputs.form
        call = *watched, form
        if form is None or recording.chosen or not recording.plain or state.restored:
            return
        if state is not self.state:
            self.state, self.calls = state, {}
        if call in self.calls and not whole:
            return
        ids = {*map(id, watched.values())}
        owners = [one for one in state.modules if not ids.isdisjoint(map(id, one._parameters.values()))]
        self.calls[call] = owners[0] if len(owners) == 1 and not whole else None, len(recording.noted)


def output_gradients(
    outputs: Tensor, noted: Sequence[RecordedUse], cotangents: Tensor | None, differentiable: bool, batched: bool = True
) -> list[Tensor | None]:
    """Returns the gradients g (R, *out.shape) of cotangents u (B, C, R) at the outputs of the noted uses.

    u=None means the C outputs themselves; a layer that gives them then has g None, and its slopes count apart. With
    `differentiable`, g keeps its graph. With `batched`, one backward pass may handle all cotangents.
    """
    exact = None if cotangents is None else cotangents.permute(2, 0, 1)  # (R, B, C)
    behind = [use for use in noted if not use.is_output]
    gradients = iter(_backward(outputs, behind, exact, differentiable, batched) if behind else ())
    given = [exact if exact is None or use.slopes is None else exact * use.slopes for use in noted]
    return [g if use.is_output else next(gradients) for use, g in zip(noted, given, strict=True)]


def _backward(
    outputs: Tensor, noted: Sequence[RecordedUse], u: Tensor | None, differentiable: bool, batched: bool
) -> list[Tensor]:
    """Returns g (R, *out.shape) at each use, for cotangents u (R, B, C); u=None means the C outputs."""
    if u is None:
        eye = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
        u = eye.unsqueeze(1).expand(-1, *outputs.shape)
    u, count = u.to(outputs), len(u)
    if not (count and outputs.requires_grad):
        return [use.out.new_zeros(count, *use.out.shape) for use in noted]
    options = {"retain_graph": True, "create_graph": differentiable, "allow_unused": True}
    edges, reached, rows = [use.edge for use in noted], list[int](), None

    def back(row: Tensor) -> list[Tensor]:
        parts = torch.autograd.grad(outputs, edges, row, **options)
        reached[:] = [i for i, part in enumerate(parts) if part is not None]
        return [parts[i] for i in reached]

    if batched and count > 1:  # `is_grads_batched` of autograd would run each convolution R times
        with batching_quiet(), contextlib.suppress(RuntimeError):  # an operation that cannot be batched
            rows = torch.func.vmap(back)(u.contiguous())
    if rows is None:
        first = back(u[0])
        rows = [g.new_empty(len(g), count, *g.shape[1:]).transpose(0, 1) if count > 1 else g[None] for g in first]
        for n in range(count if count > 1 else 0):
            for whole, part in zip(rows, back(u[n]) if n else first, strict=True):
                whole[n] = part
    found = dict(zip(reached, rows, strict=True))
    return [found[i] if i in found else use.out.new_zeros(count, *use.out.shape) for i, use in enumerate(noted)]
