"""A pretended accelerator: tensors that say they are on "cuda" or "mps", and compute on the CPU.

Numbers are right, so that whole fits run. What would fail on the device fails here: operations on tensors of both
places, generators of the other place, and, on "mps", numbers in float64. Reads by the host are counted.

    with Device("cuda") as device:
        model = device.module(network)
        lw.fit(model, loader)
    device.reads  # how often the host waited for the device
"""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # which torch imports within a mode, and not while functions are patched
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

aten = torch.ops.aten

CROSSING = {aten._to_copy, aten.copy_, aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
"""Operations that take tensors of both places: an index may be on the CPU."""

JOINING = {aten.cat, aten.stack, aten.mm, aten.bmm, aten.addmm, aten.mv, aten.dot}
"""Operations that take no number of the CPU beside tensors of the device; all others take one."""

READING = {aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten._unique2, aten.is_nonzero}
"""Operations whose result the host waits for."""


class OnDevice(Tensor):
    """A tensor of the pretended device; `inner` holds its numbers on the CPU."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, kind: str) -> OnDevice:
        return Tensor._make_wrapper_subclass(  # autograd knows the meta device on every machine
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device="meta"
        )

    def __init__(self, inner: Tensor, kind: str) -> None:
        self.inner, self.kind = inner, kind

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(self.kind, 0)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.kind == "cuda"

    is_meta = False

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], self.device.type

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], kind: str, size: Any, stride: Any) -> OnDevice:
        return OnDevice(inner["inner"], kind)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} ran outside the pretended device")


class HereGenerator(torch.Generator):
    """A generator of the pretended device."""

    kind: str

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(self.kind, 0)


class Device(TorchDispatchMode):
    """Runs a block with the pretended device.

    Attributes:
        reads: operation -> how often the host read a result of it.
        uploads: how often numbers came from the host.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.reads, self.uploads = kind, Counter[str](), 0
        self._patches, self._generators = ExitStack(), dict[int, torch.Generator]()

    def __enter__(self) -> Device:
        def generator(device: Any = "cpu") -> torch.Generator:
            if torch.device(device).type != self.kind:
                return real()
            made = HereGenerator()
            made.kind = self.kind
            self._generators[made._cdata] = made
            return made

        real = torch.Generator
        self._patches.enter_context(mock.patch.object(torch.cuda, "_lazy_init", lambda: None))
        state = lambda device=None: torch.zeros(0)  # noqa: E731
        for module in (torch.cuda, torch.mps):
            self._patches.enter_context(mock.patch.object(module, "get_rng_state", state))
        self._patches.enter_context(mock.patch.object(torch, "Generator", _Meta("Generator", (), {"make": staticmethod(generator), "real": real})))
        self._lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(x, device=...) makes it on the CPU, and then moves it
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._lifts)
        self._patches.close()

    def put(self, x: Any) -> Any:
        """Returns tensors on the device, without counting that."""
        return tree_map_only(Tensor, lambda t: OnDevice(t.detach().clone(), self.kind), x)

    def module(self, model: nn.Module) -> nn.Module:
        """Returns a copy of a network on the device."""
        model = copy.deepcopy(model)
        done: dict[int, Tensor] = {}
        for module in model.modules():
            for name, value in module._parameters.items():
                if value is not None:
                    if id(value) not in done:
                        done[id(value)] = nn.Parameter(self.put(value), value.requires_grad)
                    module._parameters[name] = done[id(value)]
            for name, value in module._buffers.items():
                if value is not None:
                    module._buffers[name] = self.put(value)
        return model

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = function.overloadpacket
        leaves = [x for x in tree_flatten((args, kwargs))[0]]
        mine = [x for x in leaves if isinstance(x, OnDevice)]
        others = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, OnDevice)]
        target = kwargs.get("device")
        target = None if target is None else torch.device(target)
        if target is not None and target.type in (self.kind, "meta"):
            kwargs = {**kwargs, "device": torch.device("cpu")}
            wrap = True
        else:
            wrap = bool(mine) and target is None
        if mine and packet not in CROSSING:
            mixed = [x for x in others if x.ndim or packet in JOINING]
            if mixed:
                raise RuntimeError(
                    f"{function} met tensors of {self.kind} and of cpu: "
                    f"{[(x.device.type, tuple(x.shape)) for x in mine + others]}"
                )
        generator = kwargs.get("generator")
        if isinstance(generator, torch._C.Generator) and (generator._cdata in self._generators) != wrap:
            raise RuntimeError(f"{function} on {'the device' if wrap else 'cpu'} took a generator of the other place")
        self._count(packet, function, args, mine, wrap)
        plain = lambda x: x.inner if isinstance(x, OnDevice) else x  # noqa: E731
        out = function(*tree_map(plain, args), **tree_map(plain, kwargs))
        if not wrap or packet in (aten._local_scalar_dense, aten.equal):
            return out
        if packet is aten.copy_ and not isinstance(args[0], OnDevice):
            return args[0]
        wrapped = tree_map_only(Tensor, self._wrapped, out)
        return return_and_correct_aliasing(function, args, kwargs, wrapped) if mine else wrapped

    def _wrapped(self, x: Tensor) -> OnDevice:
        if self.kind == "mps" and x.dtype in (torch.float64, torch.complex128):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")
        return OnDevice(x, self.kind)

    def _count(self, packet: Any, function: Any, args: Any, mine: list[OnDevice], wrap: bool) -> None:
        if not mine:
            self.uploads += packet is aten._to_copy and wrap
            return
        reads = packet in READING
        if packet is aten.index:
            reads = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        elif packet is aten.repeat_interleave:
            reads = True
        elif packet is aten._to_copy:
            reads = not wrap
        elif packet is aten.copy_:
            reads = not isinstance(args[0], OnDevice)
            self.uploads += not isinstance(args[1], OnDevice)
        if reads:
            self.reads[packet.__name__] += 1
            self.note(packet.__name__)

    def note(self, name: str) -> None:
        pass


class _Meta(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.make(*args, **kwargs)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.real)
