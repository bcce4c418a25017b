"""The prior over the weights, and how what the user wrote for it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import inf
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..errors import LapwingError, is_positive, shown
from ..linalg import double_device
from ..tangent import Tangent, Vectors, join


@dataclass(frozen=True)
class Prior:
    """`θ ~ N(μ0, Δ⁻¹)`, one precision a block.

    Attributes:
        precision: δ (n_blocks,) float64, in 1/weight².
        mean: μ0, one vector a block.
        fixed: whether δ was given or chosen by the method; otherwise it is tuned.
    """

    precision: Tensor
    mean: Vectors = field(repr=False)
    fixed: bool

    @classmethod
    def read(
        cls, tangent: Tangent, precision: float | Mapping[str, float] | None, mean: float | Mapping[str, Tensor] = 0.0
    ) -> Prior:
        """Reads what the user wrote: a number, {block or parameter pattern: number}, or None.

        Raises:
            LapwingError: for a pattern that matches nothing, a block without a precision, or a number that is
                not positive or that the weights' dtype cannot express.
        """
        values = torch.ones(len(tangent.blocks), dtype=torch.float64, device=double_device(tangent.device))
        if isinstance(precision, Mapping):
            values = _by_pattern(tangent, precision, values * torch.nan)
        elif precision is not None:
            values = values * float(precision)
        check_range("prior precision", values, tangent.dtype)
        return cls(values, _prior_mean(tangent, mean), precision is not None)


def check_positive(name: str, value: Any, example: str) -> None:
    """Raises for an argument that is not a positive finite number, with the line to write."""
    if not is_positive(value):
        raise LapwingError(f"{name}={shown(value)} is not a positive finite number. Write {example}.")


def check_range(what: str, values: Tensor, dtype: torch.dtype) -> None:
    """Raises for precisions or variances that are 0 or infinite in a dtype, or whose inverses are."""
    rounded = torch.stack([values, 1 / values]).to(dtype)
    if not ((rounded > 0) & (rounded < inf)).all():
        low, high = values.min().item(), values.max().item()
        numbers = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        raise LapwingError(
            f"A {what} of {numbers} or its inverse is 0 or infinite in {dtype}. Use one between 1e-30 and 1e30: scale "
            "the inputs and the targets to about 1."
        )


def _by_pattern(tangent: Tangent, precision: Mapping[str, float], values: Tensor) -> Tensor:
    names = ", ".join(block.name for block in tangent.blocks)
    for pattern, value in precision.items():
        hits = [
            i
            for i, block in enumerate(tangent.blocks)
            if isinstance(pattern, str) and any(fnmatchcase(name, pattern) for name in (block.name, *block.parameters))
        ]
        if not hits:
            raise LapwingError(
                f"prior_precision={{{shown(pattern)}: {shown(value)}}} matches no block or parameter: the blocks are "
                f"{names}. Write prior_precision={{{tangent.blocks[0].name!r}: 1.0}}."
            )
        check_positive(f"prior_precision[{shown(pattern)}]", value, "prior_precision={'*': 1.0}")
        values[hits] = float(value)
    missing = [block.name for block, value in zip(tangent.blocks, values.tolist(), strict=True) if value != value]
    if missing:
        raise LapwingError(
            f"prior_precision has no number for {', '.join(missing)}. Add '*': 1.0 as its first entry; later patterns "
            "override it."
        )
    return values


def _fits(value: Any, parameter: Tensor, dtype: torch.dtype) -> bool:
    same = isinstance(value, Tensor) and value.shape == parameter.shape
    return same and bool(value.to(dtype).isfinite().all())


def _prior_mean(tangent: Tangent, mean: float | Mapping[str, Tensor]) -> Vectors:
    parameters, dtype = tangent.parameters, tangent.dtype
    if isinstance(mean, Mapping):
        wrong = [
            str(name) for name, value in mean.items()
            if name not in parameters or not _fits(value, parameters[name], dtype)
        ]  # fmt: skip
        if wrong:
            accepted = ", ".join(f"{name} {tuple(value.shape)}" for name, value in list(parameters.items())[:4])
            raise LapwingError(
                f"prior_mean of {', '.join(wrong)} has the name and shape of no treated parameter, or is not finite. "
                f"The parameters are {accepted}, ... Write prior_mean={{name: tensor}}."
            )
        values = {
            name: mean.get(name, torch.zeros_like(value)).detach().to(value.device, dtype)
            for name, value in parameters.items()
        }
    elif isinstance(mean, Real) and not isinstance(mean, bool) and abs(mean) <= torch.finfo(dtype).max:
        number = torch.tensor(float(mean), dtype=dtype, device=tangent.device)
        return {block.name: number.expand(block.size) for block in tangent.blocks}
    else:
        raise LapwingError(
            f"prior_mean={shown(mean)} is neither a finite number in the range of {dtype} nor {{parameter: tensor}}. "
            "Write prior_mean=0.0."
        )
    return join(tangent.blocks, values)
