"""The state of a network: a `Stamp` detects that it has changed, and a `PreservedState` restores its attributes.

A stamp compares identities, shapes, torch's write counters, and all or `SAMPLED` entries of each tensor. Torch does not
count writes through `.data` or a NumPy view, by an optimiser with `fused=True`, by another process, or to tensors made
in `torch.inference_mode()`: a stamp detects these only if such an entry changes. It computes no sums, because every
prediction checks it. `fingerprint` sums over all entries, when a posterior is saved and loaded in another process.

Networks store activations, weights made by hooks, tables and flags. These would keep the graph of our forward pass in
memory, and after a pass with drawn weights they would change the outputs. Hooks that a pass registers are removed, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from ..linalg import SLICE_NUMBERS, doubled
from .eager import LOCK, modules_of, real, transformed
from .gate import check_layers

SAMPLED, WHOLE = 8, 64
"""Number of entries of a large tensor that a stamp keeps, evenly spaced, and maximum number of which it keeps all."""

MEMORY = Tensor.data_ptr, Tensor.stride, Tensor.is_neg, Tensor.is_conj
"""Functions that say where and how a tensor is stored."""

VALUES = methodcaller("values")  # of dicts, and of what a scripted module has instead


class PreservedState(AbstractContextManager["PreservedState", None]):
    """Restores the attributes of all modules after a block, and the entries of attributes that are dicts or lists.

    It looks no deeper. One object may serve several blocks, as long as `is_same`.
    """

    restored = False  # whether the latest block changed something

    def __init__(self, model: nn.Module) -> None:
        self.modules = [module for _, module in modules_of(model)]
        attributes = [*map(vars, self.modules)]
        inner = [value for held in attributes for value in held.values() if isinstance(value, (dict, list))]
        self._containers = [*attributes, *inner]
        self._former = [dict(each) if isinstance(each, dict) else list(each) for each in self._containers]
        self._empty = [each for each in self._containers if not each]  # most, such as dicts of hooks
        self._filled, self._before = ([each for each in held if each] for held in (self._containers, self._former))
        own = chain.from_iterable((one._parameters, one._buffers, one._modules) for one in self.modules)
        self._members = [each for each in own if each]
        self._tensors_and_children = [*chain.from_iterable(map(VALUES, self._members))]

    def is_equal(self) -> bool:
        """Whether the modules have the same tensors and children, and equal other attributes."""
        members = chain.from_iterable(map(VALUES, self._members))
        try:
            equal = self._filled == self._before  # identical values are equal, so this compares no tensors
        except Exception:  # but other tensors and arrays have no truth value
            return False
        return equal and not any(self._empty) and all(map(is_, members, self._tensors_and_children))

    def is_same(self) -> bool:
        """Whether all attributes are the same objects, in the same order."""
        held = zip(self._filled, self._before, strict=True)
        pairs = ((VALUES(one), VALUES(other)) if isinstance(one, dict) else (one, other) for one, other in held)
        return self.is_equal() and all(all(map(is_, one, other)) for one, other in pairs)

    def __exit__(self, *_: object) -> None:
        self.restored = not self.is_same()
        if self.restored:
            self._put_back()

    @contextmanager
    def after_errors(self) -> Iterator[None]:
        """Restores the attributes only after an exception, for a block that is known to change nothing otherwise."""
        try:
            yield
        except BaseException:
            self._put_back()
            raise

    def _put_back(self) -> None:
        for container, entries in zip(self._containers, self._former, strict=True):
            if isinstance(container, list):
                container[:] = entries
                continue
            for name in [name for name in container if name not in entries]:
                del container[name]
            container.update(entries)  # without clear(), because other threads may read the other entries


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


@dataclass(eq=False)
class Stamp:
    """Tensors, write counters and sampled values of a network. Integer and unsaved buffers are not compared."""

    model: nn.Module = field(repr=False)
    tensors: dict[str, Tensor] = field(repr=False)  # small ones first
    marks: list[tuple[int, torch.Size]] = field(repr=False)  # write counter and shape of each tensor
    values: Tensor = field(repr=False)
    modules: PreservedState | None = field(repr=False)  # in which the network had these tensors, and no refused layer
    views: tuple[list[list], list[list[Tensor]]] = field(default=([], []), init=False, repr=False)

    @classmethod
    def of(cls, model: nn.Module) -> Stamp:
        """Makes the stamp of a network at present. Raises if a layer is refused. Cost: time O(number of tensors)."""
        with LOCK:
            check_layers(model)
            tensors = dict(sorted(state_of(model).items(), key=lambda item: item[1].numel() > WHOLE))
            values = torch.cat(_parts(tensors)).nan_to_num()
            return cls(model, tensors, _marks(tensors), values, PreservedState(model))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "modules": None, "views": ([], [])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Reads new write counters, since `copy.deepcopy` and pickle copy the network with its posterior."""
        self.__dict__.update(state, marks=_marks(state["tensors"]))

    def changed(self) -> str | None:
        """Returns the name of a tensor of the network that has changed, or None. Raises if a layer is refused.

        Layers and the set of tensors are compared again only if an attribute of a module has changed.
        """
        mine = self.tensors
        with LOCK:
            if self.modules is None or not self.modules.is_equal():
                check_layers(self.model)
                state = state_of(self.model)
                other = [name for name in (*mine, *state) if state.get(name) is not mine.get(name)]
                if other:
                    return other[0]
                self.modules = PreservedState(self.model)
        now = _marks(mine)
        if now != self.marks:
            return next(name for name, old, new in zip(mine, self.marks, now, strict=True) if old != new)
        values, before = self._values(), self.values
        if (values.dtype, values.device) != (before.dtype, before.device):
            return f"the dtype or device of {next(iter(mine))}"
        if torch.equal(values, before) or torch.equal(values := values.nan_to_num(), before):
            return None
        counts = [*map(len, _parts(mine))]
        parts = zip(mine, values.split(counts), before.split(counts), strict=True)
        return next(name for name, new, old in parts if not torch.equal(new, old))

    def _values(self) -> Tensor:
        """Returns the entries at present, by views that are kept as long as the memory stays."""
        memory = [[*map(read, self.tensors.values())] for read in MEMORY]
        if self.views[0] != memory:
            parts = _parts(self.tensors)
            if transformed() or [part.data_ptr() for part in parts] != memory[0]:
                return torch.cat(parts)  # some are copies
            small = sum(shape.numel() <= WHOLE for _, shape in self.marks)
            self.views = memory, [parts[:small], parts[small:]]
        return torch.cat([torch.cat(group) for group in self.views[1] if group])  # contiguous ones join fast


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
    try:
        return [*map(attrgetter("_version", "shape"), state.values())]
    except RuntimeError:  # tensors of inference mode have no counter
        return [(-1 if value.is_inference() else value._version, value.shape) for value in state.values()]


def _parts(state: Mapping[str, Tensor]) -> list[Tensor]:
    """Returns all entries of each small tensor, and `SAMPLED` entries of a large one, on one device."""
    device = next(iter(state.values())).device
    parts = []
    for value in state.values():
        value, size = value.detach(), value.numel()
        count, step = (size, 1) if size <= WHOLE else (SAMPLED, size // SAMPLED)
        if value.is_contiguous() or value.is_contiguous(memory_format=torch.channels_last):
            part = value.as_strided((count,), (step,))  # one view; the slices below make three
        else:
            part = value.flatten()[: count * step : step]
        parts.append(part if part.device == device else part.to(device))
    return parts
