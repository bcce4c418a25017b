"""Checks of the number of random draws and of their memory, and the generators of draws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral

import torch

from ..environment import memory_limit
from ..errors import LapwingError, shown


def check_memory(what: str, count: int, numbers: int) -> None:
    """Raises if `count` float32 tensors with `numbers` entries each exceed the memory of this process."""
    needed, limit = 4 * int(count) * numbers, memory_limit()
    if needed > limit:
        raise LapwingError(
            f"{what} needs {min(needed, 2**99) / 2**30:.3g} GiB, and this process may use {limit / 2**30:.3g} GiB. Ask "
            "for fewer draws at a time."
        )


def check_draws(caller: str, name: str, count: int, numbers: int = 0) -> None:
    """Raises unless `count` is a positive whole number and `count` draws of `numbers` entries fit into memory."""
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
        raise LapwingError(
            f"{caller}({name}={shown(count)}) is not a number of draws. Pass a whole number of at least 1: "
            f"{caller}({name}=512)."
        )
    check_memory(f"{caller}({count})", int(count), numbers)


def seeded(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """Returns the generator, or a new one with seed 0 on `device`, so that equal calls give equal results."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise LapwingError(
            f"The generator is {shown(generator)}. Pass torch.Generator().manual_seed(0), or leave it out for seed 0."
        )
    return torch.Generator(device=device).manual_seed(0) if generator is None else generator


def generator_on(device: torch.device, generator: torch.Generator) -> torch.Generator:
    """Returns a generator on the device: the given one, or a new one that the given one seeds."""
    if generator.device.type == device.type:
        return generator
    seed = torch.randint(2**62, (), generator=generator, device=generator.device)
    return torch.Generator(device).manual_seed(int(seed))


@contextmanager
def seeded_torch(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds torch's own generators on the CPU and the device in a block, for functions without a generator argument."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed all devices
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
