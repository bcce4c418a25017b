"""Whether a network is still what it was, in this process (`Stamp`) or in another (`fingerprint`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from .eager import LOCK, parameters_of

SAMPLED = 8
"""Entries of each tensor that a stamp keeps: writes through `.data` leave no other trace."""


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns what a network's outputs depend on: name -> every parameter, and every saved real buffer."""
    with LOCK:
        found = parameters_of(model)
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                saved = buffer is not None and name not in module._non_persistent_buffers_set
                if saved and buffer.is_floating_point():
                    found[f"{path}.{name}" if path else name] = buffer
    return found


@dataclass(frozen=True)
class Stamp:
    """Which modules and tensors a network held, how often the tensors had been written, and a few of their values.

    Attributes:
        modules: every module, what modules it held, and what tensors.
        tensors: the tensors of `state_of` by name.
        versions: their write counters.
        shapes: their shapes.
        values: `SAMPLED` entries of each.
    """

    modules: tuple[tuple[nn.Module, list[Any], list[Any]], ...] = field(repr=False)
    tensors: dict[str, Tensor] = field(repr=False)
    versions: tuple[int, ...] = field(repr=False)
    shapes: tuple[torch.Size, ...] = field(repr=False)
    values: Tensor = field(repr=False)

    @classmethod
    def of(cls, model: nn.Module) -> Stamp:
        """Takes the stamp of a network. Time O(number of tensors)."""
        with LOCK:
            modules, tensors = tuple((module, *_holdings(module)) for module in model.modules()), state_of(model)
        shapes = tuple(value.shape for value in tensors.values())
        return cls(modules, tensors, _versions(tensors), shapes, torch.cat(_parts(tensors)).nan_to_num())

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the views out, which a copy takes of its own tensors."""
        return {name: value for name, value in self.__dict__.items() if name != "_places"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes up the write counters of the copies: `copy.deepcopy` and pickle copy the network with its posterior."""
        self.__dict__.update(state, versions=_versions(state["tensors"]))

    @cached_property
    def _places(self) -> tuple[list[tuple[Any, ...]], list[Tensor]]:
        """Where each tensor lies, and views of its kept entries; nothing where layouts or devices forbid views."""
        tensors = list(self.tensors.values())
        if len({value.device for value in tensors}) > 1 or not all(value.is_contiguous() for value in tensors):
            return [], []
        return _layout(tensors), _parts(self.tensors)

    def untouched(self, model: nn.Module) -> bool:
        """Says in little time that nothing changed and no module is in training mode; False says nothing."""
        if model is not self.modules[0][0]:
            return False
        with LOCK:
            for module, children, tensors in self.modules:
                inside, held = _holdings(module)
                same = len(held) == len(tensors) and all(map(is_, held, tensors))
                if module.training or inside != children or not same:
                    return False
        layout, views = self._places
        if not layout or layout != _layout(list(self.tensors.values())):
            self.__dict__.pop("_places", None)  # the views would keep memory alive that the network has left
            return False
        now = torch.cat(views)
        return (
            _versions(self.tensors) == self.versions
            and (now.dtype, now.device) == (self.values.dtype, self.values.device)
            and torch.equal(now, self.values)
        )

    def changed(self, model: nn.Module) -> str | None:
        """Returns what is no longer as stamped: a tensor's name, or None."""
        state = state_of(model)
        for (name, tensor), shape in zip(self.tensors.items(), self.shapes, strict=True):
            if state.get(name) is not tensor or tensor.shape != shape:
                return name
        now = _versions(state)
        if now != self.versions:
            return next(name for name, old, new in zip(self.tensors, self.versions, now, strict=True) if old != new)
        values, before = torch.cat(_parts(state)), self.values
        if (values.dtype, values.device) != (before.dtype, before.device):
            return "the dtype or device of its weights"
        if torch.equal(values := values.nan_to_num(), before):
            return None
        counts = [min(SAMPLED, shape.numel()) for shape in self.shapes]
        parts = zip(self.tensors, values.split(counts), before.split(counts), strict=True)
        return next(name for name, new, old in parts if not torch.equal(new, old))


def fingerprint(value: Tensor) -> Tensor:
    """Returns three float64 sums that tell a tensor from another one, also across devices and files."""
    value = value.detach().double().flatten()
    spread = (torch.arange(len(value), dtype=torch.float64, device=value.device) * 0.6180339887498949).frac()
    return torch.stack([value.sum(), value.square().sum(), value @ spread]).cpu()  # the last one tells permutations


def _versions(state: Mapping[str, Tensor]) -> tuple[int, ...]:
    return tuple(-1 if value.is_inference() else value._version for value in state.values())


def _holdings(module: nn.Module) -> tuple[list[Any], list[Any]]:
    """Returns the modules and the tensors that a module holds itself."""
    return list(module._modules.values()), [*module._parameters.values(), *module._buffers.values()]


def _layout(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    return [(value.data_ptr(), value.shape, value.stride(), value.dtype, value.is_neg()) for value in tensors]


def _parts(state: Mapping[str, Tensor]) -> list[Tensor]:
    """Returns `SAMPLED` entries of each tensor on one device: views of contiguous tensors."""
    device = next(iter(state.values())).device
    parts = []
    with torch.no_grad():
        for value in state.values():
            step = max(1, value.numel() // SAMPLED)
            part = value.detach().flatten()[: SAMPLED * step : step]
            parts.append(part if part.device == device else part.to(device))
    return parts
