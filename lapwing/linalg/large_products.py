"""Products with a large float32 matrix.

On a CPU torch multiplies float32 matrices by Intel's MKL, which leaves half of the AVX-512 of other makers' processors
unused. oneDNN, which torch carries for convolutions and half precision, does not. Its product is reached by an operator
of torch's compiler that has no guarantee, so it is tried once; where it fails, products go to torch.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

LARGE_PRODUCT = 2**22
"""Multiply-adds from which on a product goes to oneDNN: its first one of a shape takes half a millisecond more."""


def matmul(x: Tensor, matrix: Tensor) -> Tensor:
    """Returns `x M` (..., O) for x (..., I) and M (I, O)."""
    return linear(x, matrix.mT)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `x Wᵀ + b` (..., O) for x (..., I), W (O, I) and b (O,).

    Cost: where either W or its transpose is contiguous, half of `F.linear`'s on some processors.
    """
    if x.numel() * weight.shape[0] >= LARGE_PRODUCT and suits_onednn(x, weight):
        product = onednn()
        if product is not None:
            return product(x, weight, bias if bias is None else bias.contiguous())  # it reads no strides of a bias
    return F.linear(x, weight, bias)


def suits_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN takes these: it has no derivatives, and is a thousand times slower for slices of rows.

    Code that is compiled or exported keeps to public operators.
    """
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or x.device.type != "cpu":
        return False
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        return False
    return weight.is_contiguous() or weight.mT.is_contiguous()


@cache
def onednn() -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """Returns oneDNN's `F.linear`, or None where MKL is as fast or torch no longer has it."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or "GenuineIntel" in _maker():
        return None

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    try:
        right = torch.equal(product(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)), torch.full((2, 4), 4.0))
    except (AttributeError, RuntimeError, TypeError):
        return None
    return product if right else None


def _maker() -> str:
    """Returns text that names the processor's maker."""
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text(errors="replace")
    return platform.processor()
