"""Detects that a network has changed, in this process (`Stamp`) or in another one (`fingerprint`).

A stamp compares identities, shapes, torch's write counters, and up to `SAMPLED` entries of each tensor. Torch does not
count writes through `.data` or a NumPy view, by an optimiser with `fused=True`, by another process, or to tensors made
in `torch.inference_mode()`: a stamp detects these only if a sampled entry changes. It computes no sums, because every
prediction checks it. `fingerprint` sums over all entries, when a posterior is saved and loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ..jacobian.plain_functions import transformed
from ..linalg import SLICE_NUMBERS, doubled
from .eager import LOCK, real
from .module_state import modules_of

SAMPLED = 8
"""Maximum number of entries of each tensor that a stamp keeps, evenly spaced, for writes that torch does not count."""


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns name -> tensor that a stamp compares: all parameters, and saved floating-point or complex buffers."""
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    met = set()  # a tied parameter counts under its first name
    with LOCK:
        for prefix, module in modules_of(model):
            for name, value in module._parameters.items():
                if value is not None and id(value) not in met:
                    met.add(id(value))
                    parameters[prefix + name] = value
            for name, buffer in module._buffers.items():
                if buffer is None or name in module._non_persistent_buffers_set:
                    continue
                if buffer.is_floating_point() or buffer.is_complex():
                    buffers[prefix + name] = buffer
    return {**parameters, **buffers}


@dataclass(frozen=True)
class Stamp:
    """Tensors, write counters and sampled values of a network. Integer and unsaved buffers are not compared."""

    tensors: dict[str, Tensor] = field(repr=False)
    marks: list[tuple[int, torch.Size]] = field(repr=False)  # write counter and shape of each tensor
    values: Tensor = field(repr=False)
    views: tuple[list[tuple], list[Tensor]] = field(default=([], []), init=False, repr=False, compare=False)

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> Stamp:
        """Makes the stamp of `Tangent.state()`. Cost: time O(number of tensors)."""
        return cls(dict(state), _marks(state), torch.cat(_parts(state)).nan_to_num())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "views": ([], [])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Reads new write counters, since `copy.deepcopy` and pickle copy the network with its posterior."""
        self.__dict__.update(state, marks=_marks(state["tensors"]))

    def changed(self, state: Mapping[str, Tensor]) -> str | None:
        """Returns the name of a tensor that has changed, or None."""
        mine = self.tensors
        if len(state) != len(mine) or not all(map(is_, state.values(), mine.values())):
            other = [name for name in (*mine, *state) if state.get(name) is not mine.get(name)]
            if other:
                return other[0]
        now = _marks(mine)
        if now != self.marks:
            return next(name for name, old, new in zip(mine, self.marks, now, strict=True) if old != new)
        values, before = torch.cat(self._views()), self.values
        if (values.dtype, values.device) != (before.dtype, before.device):
            return f"the dtype or device of {next(iter(mine))}"
        if torch.equal(values, before) or torch.equal(values := values.nan_to_num(), before):
            return None
        counts = [min(SAMPLED, shape.numel()) for _, shape in self.marks]
        parts = zip(mine, values.split(counts), before.split(counts), strict=True)
        return next(name for name, new, old in parts if not torch.equal(new, old))

    def _views(self) -> list[Tensor]:
        """Returns the sampled entries of the tensors at present, by views that are kept as long as the memory stays."""
        memory = [(x.data_ptr(), x.stride(), x.dtype, x.is_neg(), x.is_conj()) for x in self.tensors.values()]
        if self.views[0] != memory:
            parts = _parts(self.tensors)
            if transformed() or any(part.data_ptr() != place[0] for part, place in zip(parts, memory, strict=True)):
                return parts  # some are copies
            object.__setattr__(self, "views", (memory, parts))
        return self.views[1]


def fingerprint(value: Tensor) -> Tensor:
    """Returns three float64 sums (3,) over the entries of a tensor, which identify it on any device and in files."""
    value = real(value.detach())
    sums, start = torch.zeros(3, dtype=torch.float64, device="cpu"), 0
    for part in value.flatten().split(SLICE_NUMBERS):
        part, stop = doubled(part), start + len(part)
        spread = (torch.arange(start, stop, dtype=torch.float64, device=part.device) * 0.6180339887498949).frac()
        sums += torch.stack([part.sum(), part @ part, part @ spread]).cpu()  # the third sum depends on the order
        start = stop
    return sums


def _marks(state: Mapping[str, Tensor]) -> list[tuple[int, torch.Size]]:
    return [(-1 if value.is_inference() else value._version, value.shape) for value in state.values()]


def _parts(state: Mapping[str, Tensor]) -> list[Tensor]:
    """Returns up to `SAMPLED` entries of each tensor, on one device."""
    device = next(iter(state.values())).device
    parts = []
    for value in state.values():
        value, step = value.detach(), max(1, value.numel() // SAMPLED)
        if value.is_contiguous() or value.is_contiguous(memory_format=torch.channels_last):
            part = value.as_strided((min(SAMPLED, value.numel()),), (step,))  # one view; the slices below make three
        else:
            part = value.flatten()[: SAMPLED * step : step]
        parts.append(part if part.device == device else part.to(device))
    return parts
