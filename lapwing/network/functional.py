"""The network as a function of its weights: calls with other values for some parameters, without writing them.

A function mode replaces the parameters, which it recognises by identity, in every torch function that the network
calls. It is local to the thread: other threads see the trained weights.

Some code bypasses function modes: scripted modules, `torch.autograd.Function`, torch.func within a forward. The survey
detects this (`FirstCall`; to be safe, use within `torch.no_grad()` counts too). For such a network
`torch.func.functional_call` sets the values in the module itself, under lapwing's lock. A network that reads its own
parameters even then, as in a backward pass that runs a module again, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from ..data.inputs import Inputs
from ..errors import LapwingError
from .eager import EagerMode, native, swapped, without_compiled

if TYPE_CHECKING:
    from .call import Call


class StandIns(EagerMode):
    """Replaces parameters by other tensors (`values`, by name) in every torch function that the network calls.

    With `in_graph`, it replaces them only while gradients are on: `FirstCall` then sees the forward of an
    `autograd.Function`.
    """

    def __init__(self, parameters: Mapping[str, Tensor], values: Mapping[str, Tensor], in_graph: bool = False) -> None:
        super().__init__()
        self._values = {id(parameters[name]): value for name, value in values.items()}
        self._in_graph = in_graph

    def intercept(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        if self._in_graph and not torch.is_grad_enabled():
            if function is Tensor.data_ptr:  # for a kernel that reads the memory itself
                args[0].detach()
            return function(*args, **kwargs)
        if kwargs:
            kwargs = dict(zip(kwargs, swapped(tuple(kwargs.values()), self._values), strict=True))
        return function(*swapped(args, self._values), **kwargs)

    def replaced(self, args: tuple) -> tuple:
        return swapped(args, self._values)


class FirstCall(TorchDispatchMode):
    """A call with `leaves` of a graph instead of some parameters.

    Meanwhile it collects the names of the parameters that any operation of torch reads, also inside scripted code.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch._dynamo, which takes seconds

    def __init__(
        self, call: Call, parameters: Mapping[str, Tensor], leaves: Mapping[str, Tensor], inputs: Inputs
    ) -> None:
        super().__init__()
        self.leaves = leaves
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._reads: set[str] = set()  # parameters that the network reads instead of their leaves
        self._checkpointed: set[str] = set()  # those that a re-entrant checkpoint reads, without a graph
        with without_compiled(), self:
            outputs = call.rows(inputs, StandIns(parameters, native(leaves, parameters), in_graph=True))
        self.unseen = frozenset(self._reads)  # names of parameters that bypass function modes
        if self.unseen:
            self._reads.clear()
            with self:
                outputs = call.rows_with(leaves, parameters, inputs, unseen=True)
        self.outputs = outputs  # f (B, C), with their graph

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        met = {self._names[one] for one in self._names.keys() & map(id, pytree.tree_leaves((args, kwargs)))}
        self._reads |= met
        if met and any(frame.f_code is CheckpointFunction.forward.__code__ for frame, _ in walk_stack(None)):
            self._checkpointed |= met
        return function(*args, **(kwargs or {}))

    def gradients(self, names: Sequence[str], u: Tensor, kind: str) -> dict[str, Tensor]:
        """Returns `Jᵀu` by name if the outputs depend on it. Raises if the network read a parameter itself."""
        if self._checkpointed.intersection(names):  # the message of a backward pass through a checkpoint
            raise RuntimeError("torch.utils.checkpoint has no graph of the parameters")
        if not self.outputs.requires_grad:
            raise _no_gradient(kind, names)
        gradients: tuple[Tensor | None, ...] = ()
        error = None
        try:
            with self:
                gradients = torch.autograd.grad(self.outputs, [self.leaves[n] for n in names], u, allow_unused=True)
        except RuntimeError as raised:  # the backward pass of such a function may miss the leaves
            error = raised
        own = [name for name in names if name in self._reads]
        if own:
            raise _uses_itself(kind, own[0]) from error
        if error is not None:
            raise error
        return {name: g for name, g in zip(names, gradients, strict=True) if g is not None}


def _no_gradient(kind: str, names: Sequence[str]) -> LapwingError:
    return LapwingError(
        f"The outputs have no gradient for any of the {len(names)} parameters of {kind} ({', '.join(names[:3])}) to "
        "treat. Take @torch.no_grad() off forward(), or choose other parameters with params=."
    )


def _uses_itself(kind: str, name: str) -> LapwingError:
    return LapwingError(
        f"{kind} uses {name} in a torch.autograd.Function whose backward pass runs a module again, or by a reference "
        "from outside of the module, so lapwing cannot replace it there. Call the module itself in eval mode (odeint "
        "instead of odeint_adjoint), or leave such parameters out, for instance by params=lw.last_layer."
    )
