"""The network as a function of its weights: calls with other values for some parameters, without writing them.

A function mode replaces the parameters, which it recognises by identity, in every torch function that the network
calls. The mode is local to the thread: another thread that calls the network, copies it or reads its `state_dict()`
meanwhile sees the trained weights.

Some code bypasses function modes: scripted modules, `torch.autograd.Function`, transformations of torch.func in a
forward. The survey detects this (`first_call`). Use within `torch.no_grad()` counts as a bypass too, to be safe. For
such a network `torch.func.functional_call` sets the values in the module itself, under lapwing's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..data.batches import Forward
from .calling import call
from .eager import EagerMode, eager_math, swapped, without_compiled
from .module_state import preserved_state


class StandIns(EagerMode):
    """Replaces parameters by other tensors in every torch function that the network calls.

    Args:
        parameters: name -> parameter of the network.
        values: name -> tensor that replaces it.
    """

    def __init__(self, parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._values = {id(parameters[name]): value for name, value in values.items()}

    def intercept(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs the function with the replaced parameters, also inside lists and tuples."""
        if kwargs:
            kwargs = dict(zip(kwargs, swapped(tuple(kwargs.values()), self._values), strict=True))
        return function(*swapped(args, self._values), **kwargs)

    def replaced(self, args: tuple) -> tuple:
        return swapped(args, self._values)


class _WithoutGradients(StandIns):
    """Also collects the parameters that are used while gradients are off, as in a forward of `autograd.Function`."""

    def __init__(self, parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        super().__init__(parameters, values)
        self.used: set[int] = set()

    def intercept(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        out = super().intercept(function, args, kwargs)
        if not torch.is_grad_enabled() and (isinstance(out, Tensor) or function is Tensor.data_ptr):
            self.used.update(self._values.keys() & map(id, pytree.tree_leaves((args, kwargs))))
        return out


class _Reads(TorchDispatchMode):
    """Collects the given tensors that any operation of torch reads, also inside scripted code."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch._dynamo, which takes seconds

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._tensors = set(map(id, tensors))
        self.read: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.read.update(self._tensors.intersection(map(id, pytree.tree_leaves((args, kwargs)))))
        return function(*args, **(kwargs or {}))


def call_with(
    model: nn.Module,
    forward: Forward | None,
    parameters: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    inputs: Any,
    unseen: bool = False,
) -> Tensor:
    """Runs the network with other values for some parameters; returns its outputs (B, C).

    Args:
        model: the uncompiled network.
        forward: the user's way to call the network, or None.
        parameters: name -> parameter of the network, at least for the names in `values`.
        values: name -> value for this call.
        inputs: a batch.
        unseen: whether the network bypasses function modes. Then the values are set in the module during the call.
    """
    if not unseen:
        with without_compiled():
            return call(model, inputs, forward, StandIns(parameters, values))
    with eager_math(), preserved_state(model):
        values = {f"model.{name}": value for name, value in values.items()}
        return functional_call(_Wrapped(model, forward), values, (inputs,))


class _Wrapped(nn.Module):
    """Module that calls the network by the user's `forward=`, since `functional_call` needs a module."""

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, inputs: Any) -> Tensor:
        return call(self.model, inputs, self._forward)


class FirstCall(NamedTuple):
    """Result of running the network with leaves of a graph instead of some parameters.

    Attributes:
        outputs: f (B, C), with their graph.
        leaves: name -> leaf that replaced the parameter.
        unseen: names of parameters that bypass function modes: an operation read the parameter itself, or a function
            used it while gradients were off, as a custom `autograd.Function` does.
    """

    outputs: Tensor
    leaves: Mapping[str, Tensor]
    unseen: Set[str]


def first_call(
    model: nn.Module,
    forward: Forward | None,
    parameters: Mapping[str, Tensor],
    leaves: Mapping[str, Tensor],
    inputs: Any,
) -> FirstCall:
    """Runs the network with a leaf for each parameter, and finds the parameters that bypass function modes.

    The arguments are those of `call_with`, with `leaves` as the values.
    """
    mode, reads = _WithoutGradients(parameters, leaves), _Reads(parameters.values())
    with without_compiled(), reads:
        outputs = call(model, inputs, forward, mode)
    unseen = {name for name, parameter in parameters.items() if id(parameter) in reads.read | mode.used}
    if unseen:
        outputs = call_with(model, forward, parameters, leaves, inputs, unseen=True)
    return FirstCall(outputs, leaves, unseen)
