"""Random draws: whether so many fit into memory, and the generator that makes them."""

from __future__ import annotations

from numbers import Integral

import torch

from ..environment import memory_limit
from ..errors import LapwingError, shown


def check_memory(what: str, count: int, numbers: int) -> None:
    """Raises where so many float32 tensors of so many numbers exceed the memory of this process."""
    needed, limit = 4 * int(count) * numbers, memory_limit()
    if needed > limit:
        raise LapwingError(
            f"{what} takes {min(needed, 2**99) / 2**30:.3g} GiB, and this process may use {limit / 2**30:.3g} GiB. Ask "
            "for fewer draws at a time."
        )


def check_draws(caller: str, name: str, count: int, numbers: int = 0) -> None:
    """Raises where a count is not a positive whole number, or where so many draws do not fit into memory."""
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
        raise LapwingError(
            f"{caller}({name}={shown(count)}) is not a number of draws. Pass a whole number of at least 1: "
            f"{caller}({name}=512)."
        )
    check_memory(f"{caller}({count})", int(count), numbers)


def seeded(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """Returns the generator, or a new one with seed 0 on `device`: the same call gives the same answer.

    Raises:
        LapwingError: for what is not a generator.
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        raise LapwingError(
            f"The generator is {shown(generator)}. Pass torch.Generator().manual_seed(0), or leave it out for seed 0."
        )
    return torch.Generator(device=device).manual_seed(0) if generator is None else generator


def generator_on(device: torch.device, generator: torch.Generator) -> torch.Generator:
    """Returns the generator, or one on another device that it seeds."""
    if generator.device.type == device.type:
        return generator
    seed = torch.randint(2**62, (), generator=generator, device=generator.device)
    return torch.Generator(device).manual_seed(int(seed))
