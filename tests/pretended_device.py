"""A pretended accelerator: tensors that say they are on "cuda" or "mps", and compute on the CPU.

Numbers are right, so that whole fits run. What would fail on the device fails here: operations on tensors of both
places, generators of the other place and, on "mps", numbers in float64. Results that the host waits for are counted.

    with Device("cuda") as device:
        lw.fit(device.module(network), loader)
    device.reads.total()
"""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # torch imports it within a mode, which must not be while functions are patched
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

aten = torch.ops.aten

CROSSING = {aten._to_copy, aten.copy_, aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
"""Operations that take tensors of both places: an index may be on the CPU."""

JOINING = {aten.cat, aten.stack, aten.mm, aten.bmm, aten.addmm, aten.mv, aten.dot}
"""Operations that take no single number of the CPU beside tensors of the device, as others do."""

READING = {
    aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten._unique2, aten.is_nonzero,
    aten.repeat_interleave,
}  # fmt: skip
"""Operations whose result the host waits for."""


class OnDevice(Tensor):
    """A tensor of the pretended device; `inner` holds its numbers on the CPU."""

    inner: Tensor
    kind: str
    is_meta = False
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, kind: str) -> OnDevice:
        """Makes the tensor: in C++ on the meta device, where autograd runs on every machine."""
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device="meta"
        )

    def __init__(self, inner: Tensor, kind: str) -> None:
        self.inner, self.kind = inner, kind

    def __repr__(self) -> str:
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"

    @property
    def device(self) -> torch.device:
        return torch.device(self.kind, 0)

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=self.device)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} ran outside the pretended device")


class DeviceGenerator(torch.Generator):
    """A generator of the pretended device."""

    kind: str

    @property
    def device(self) -> torch.device:
        return torch.device(self.kind, 0)


class Device(TorchDispatchMode):
    """Runs a block with the pretended device.

    Attributes:
        kind: "cuda" or "mps".
        reads: operation -> how often the host waited for its result.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.reads = kind, Counter[str]()
        self._patches, self._generators = ExitStack(), dict[int, torch.Generator]()

    def __enter__(self) -> Device:
        real = torch.Generator

        class Generators(type):
            def __call__(cls, device: Any = "cpu") -> torch.Generator:
                return self._generator() if torch.device(device).type == self.kind else real()

            def __instancecheck__(cls, value: object) -> bool:
                return isinstance(value, real)

        stand_ins = (
            (torch, "Generator", Generators("Generator", (), {})),
            (torch.cuda, "_lazy_init", mock.Mock(return_value=None)),
            (torch.cuda, "get_rng_state", mock.Mock(return_value=torch.zeros(0))),
            (torch.cuda, "set_rng_state", mock.Mock()),
            (torch.cuda, "mem_get_info", mock.Mock(return_value=(2**34, 2**34))),
            (torch.cuda, "manual_seed", mock.Mock()),
            (torch.cuda, "device", mock.Mock(return_value=nullcontext())),
            (torch.mps, "get_rng_state", mock.Mock(return_value=torch.zeros(0))),
        )
        for owner, name, stand_in in stand_ins:
            self._patches.enter_context(mock.patch.object(owner, name, stand_in))
        self._patches.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(x, device=...) makes it on the CPU, and then moves it
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _generator(self) -> torch.Generator:
        made = DeviceGenerator()
        made.kind, self._generators[made._cdata] = self.kind, made
        return made

    def put(self, x: Any) -> Any:
        """Returns copies of tensors on the device."""
        return tree_map_only(Tensor, lambda t: self._wrapped(t.detach().clone()), x)

    def module(self, model: nn.Module) -> nn.Module:
        """Returns a copy of a network on the device."""
        model, done = copy.deepcopy(model), dict[int, Tensor]()
        for module in model.modules():
            for name, value in module._parameters.items():
                if value is not None:
                    moved = done.setdefault(id(value), nn.Parameter(self.put(value), value.requires_grad))
                    module._parameters[name] = moved
            for name, value in module._buffers.items():
                module._buffers[name] = value if value is None else self.put(value)
        return model

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = dict(kwargs or {}), function.overloadpacket
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        mine = [x for x in tensors if isinstance(x, OnDevice)]
        target = kwargs.get("device")
        here = bool(mine) if target is None else torch.device(target).type in (self.kind, "meta")
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        if mine and packet not in CROSSING:
            mixed = [x for x in tensors if not isinstance(x, OnDevice) and (x.ndim or packet in JOINING)]
            if mixed:
                raise RuntimeError(f"{function} met tensors of {self.kind} and of the CPU: {[x.shape for x in mixed]}")
        generator = kwargs.get("generator")
        if generator is not None and (generator._cdata in self._generators) != here:
            raise RuntimeError(f"{function} takes a generator of {'the CPU' if here else self.kind}")
        if mine and _reads(packet, args, here):
            self.reads[packet.__name__] += 1
        plain = tree_map_only(OnDevice, lambda x: x.inner, (args, kwargs))
        out = function(*plain[0], **plain[1])
        if not here:
            return out
        if packet is aten.copy_ and not isinstance(args[0], OnDevice):
            return args[0]
        wrapped = tree_map(lambda x: self._wrapped(x) if isinstance(x, Tensor) else x, out)
        return return_and_correct_aliasing(function, args, kwargs, wrapped) if mine else wrapped

    def _wrapped(self, x: Tensor) -> OnDevice:
        if self.kind == "mps" and x.dtype in (torch.float64, torch.complex128):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support it.")
        return OnDevice(x, self.kind)


def _reads(packet: Any, args: Any, here: bool) -> bool:
    """Whether the host waits for an operation on tensors of the device."""
    if packet is aten.index:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if packet is aten.copy_:
        return not isinstance(args[0], OnDevice)
    return packet in READING or (packet is aten._to_copy and not here)
