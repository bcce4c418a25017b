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

from ..errors import LapwingError, shown
from ..tangent import Tangent, Vectors, join


@dataclass(frozen=True)
class Prior:
    """`θ ~ N(μ0, Δ⁻¹)`, one precision a block.

    Attributes:
        precision: δ (n_blocks,) float64, in 1/weight².
        mean: μ0, one vector a block.
        given: whether the user gave δ; otherwise it is tuned.
    """

    precision: Tensor
    mean: Vectors = field(repr=False)
    given: bool

    @classmethod
    def read(
        cls, tangent: Tangent, precision: float | Mapping[str, float] | None, mean: float | Mapping[str, Tensor] = 0.0
    ) -> Prior:
        """Reads what the user wrote: a number, {block or parameter pattern: number}, or None.

        Raises:
            LapwingError: for a pattern that matches nothing, a block without a precision, or a number that is
                not positive or that the weights' dtype cannot express.
        """
        values = torch.ones(len(tangent.blocks), dtype=torch.float64, device=tangent.device)
        if isinstance(precision, Mapping):
            values = _by_pattern(tangent, precision, values * torch.nan)
        elif precision is not None:
            values = values * float(precision)
        check_range("prior precision", values, tangent.dtype)
        return cls(values, _prior_mean(tangent, mean), precision is not None)


def is_positive(value: Any) -> bool:
    """Whether a value is a positive finite number, numpy's included."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < inf
    except OverflowError:  # an integer of more digits than a float has
        return False


def check_range(what: str, values: Tensor, dtype: torch.dtype) -> None:
    """Raises for precisions or variances that are 0 or infinite in a dtype, or whose inverses are."""
    rounded = torch.stack([values, 1 / values]).to(dtype)
    if not ((rounded > 0) & (rounded < inf)).all():
        least, most = values.min().item(), values.max().item()
        shown = f"{least:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
        raise LapwingError(
            f"A {what} of {shown} or its inverse is 0 or infinite in {dtype}. Use one between 1e-30 and 1e30: scale "
            "the inputs and the targets to about 1."
        )


def _by_pattern(tangent: Tangent, precision: Mapping[str, float], values: Tensor) -> Tensor:
    for pattern, value in precision.items():
        hits = [
            i
            for i, block in enumerate(tangent.blocks)
            if isinstance(pattern, str) and any(fnmatchcase(name, pattern) for name in (block.name, *block.parameters))
        ]
        if not hits or not is_positive(value):
            raise LapwingError(
                f"Asked for prior_precision={{{shown(pattern)}: {shown(value)}}}, found {len(hits)} treated blocks "
                "that match; a "
                "pattern must match a block or parameter and its number be positive and finite: the blocks are "
                f"{', '.join(block.name for block in tangent.blocks)}, write {{{tangent.blocks[0].name!r}: 1.0}}."
            )
        values[hits] = float(value)
    missing = [block.name for block, value in zip(tangent.blocks, values.tolist(), strict=True) if value != value]
    if missing:
        raise LapwingError(
            f"Asked for prior_precision by block, found none for {', '.join(missing)}; every treated block needs one: "
            "add '*': 1.0 first, later patterns override it."
        )
    return values


def _fits(value: Any, parameter: Tensor, dtype: torch.dtype) -> bool:
    same = isinstance(value, Tensor) and value.shape == parameter.shape
    return same and bool(value.to(dtype).isfinite().all())


def _prior_mean(tangent: Tangent, mean: float | Mapping[str, Tensor]) -> Vectors:
    own = tangent.parameters
    if isinstance(mean, Mapping):
        unknown = [str(name) for name in mean if name not in own]
        wrong = [name for name, value in mean.items() if name in own and not _fits(value, own[name], tangent.dtype)]
        if unknown or wrong:
            accepted = ", ".join(f"{name} {tuple(value.shape)}" for name, value in list(own.items())[:4])
            raise LapwingError(
                f"Asked for prior_mean of {', '.join(unknown + wrong)}, found no treated parameter of that name and "
                f"shape, or values that are not finite; accepted are {accepted}...: write prior_mean={{name: tensor}}."
            )
        full = {n: mean.get(n, torch.zeros_like(p)).detach().to(p.device, tangent.dtype) for n, p in own.items()}
    elif isinstance(mean, Real) and not isinstance(mean, bool) and abs(mean) <= torch.finfo(tangent.dtype).max:
        full = {n: torch.full_like(p, float(mean), dtype=tangent.dtype, requires_grad=False) for n, p in own.items()}
    else:
        raise LapwingError(
            f"Asked for prior_mean={shown(mean)}; a finite number in the range of {tangent.dtype} "
            "or {parameter: tensor} is accepted: write prior_mean=0.0."
        )
    return join(tangent.blocks, full)
