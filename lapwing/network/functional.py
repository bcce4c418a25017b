"""The network as a function of its weights: called with other values for some of them, and never written.

A function mode hands the values in wherever the network uses its own parameters, which are known by identity. The mode
is local to the thread: another one that calls the network, copies it or reads its `state_dict()` meanwhile sees the
trained weights. Some code takes parameters past function modes: scripted modules, `torch.autograd.Function`,
transformations of torch.func in a forward. The survey finds that (`first_call`); of use within `torch.no_grad()` it
cannot be sure. Such a network is called with the values set in the module itself, as `torch.func.functional_call` does
it, under lapwing's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ..data.batches import Forward
from .calling import call
from .eager import EagerMode, OperationMode, eager_math, swapped, without_compiled
from .module_state import preserved_state


class StandIns(EagerMode):
    """Hands other tensors to every function that the network calls with some of its parameters.

    Args:
        parameters: name -> the network's parameter.
        values: name -> what stands in for it.
    """

    def __init__(self, parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._values = {id(parameters[name]): value for name, value in values.items()}

    def intercept(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs the function with the stand-ins, also those in lists and tuples."""
        if kwargs:
            kwargs = dict(zip(kwargs, swapped(tuple(kwargs.values()), self._values), strict=True))
        return function(*swapped(args, self._values), **kwargs)

    def stand_ins(self, args: tuple) -> tuple:
        return swapped(args, self._values)


class _WithoutGradients(StandIns):
    """Notes the parameters used where gradients are off, as the forward of an `autograd.Function` is run."""

    def __init__(self, parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        super().__init__(parameters, values)
        self.used: set[int] = set()

    def intercept(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        out = super().intercept(function, args, kwargs)
        if not torch.is_grad_enabled() and (isinstance(out, Tensor) or function is Tensor.data_ptr):
            self.used.update(self._values.keys() & map(id, pytree.tree_leaves((args, kwargs))))
        return out


class _Reads(OperationMode):
    """Notes which of some tensors any operation is called with, by whatever code."""

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

    `parameters` are the network's own by name, these and maybe others. `unseen` says that it takes parameters past
    function modes, so that the values must be set in the module for the length of the call.
    """
    if not unseen:
        with without_compiled():
            return call(model, inputs, forward, StandIns(parameters, values))
    with eager_math(), preserved_state(model):
        values = {f"model.{name}": value for name, value in values.items()}
        return functional_call(_Wrapped(model, forward), values, (inputs,))


class _Wrapped(nn.Module):
    """Lets `functional_call` reach a network through the user's own `forward=`."""

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, inputs: Any) -> Tensor:
        return call(self.model, inputs, self._forward)


class FirstCall(NamedTuple):
    """The network, run with leaves of a graph for some parameters.

    Attributes:
        outputs: f (B, C), with their graph.
        leaves: name -> what stood in for the parameter.
        unseen: the parameters that the network takes past function modes: an operation sees the parameter itself, or
            it is used where gradients are off, as within functions that have a backward pass of their own.
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
    """Runs the network with leaves in the place of all these parameters, and finds out how it must be run from now on.

    The other arguments are those of `call_with`.
    """
    mode, reads = _WithoutGradients(parameters, leaves), _Reads(parameters.values())
    with without_compiled(), reads:
        outputs = call(model, inputs, forward, mode)
    unseen = {name for name, parameter in parameters.items() if id(parameter) in reads.read | mode.used}
    if unseen:
        outputs = call_with(model, forward, parameters, leaves, inputs, unseen=True)
    return FirstCall(outputs, leaves, unseen)
