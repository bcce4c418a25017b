"""The prior over the weights, and its construction from the options of the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..errors import LapwingError, is_positive, shown
from ..linalg import check_range, double_device
from ..network.eager import real
from ..options import positive, refusal
from ..tangent import Tangent, Vectors, join


@dataclass(frozen=True)
class Prior:
    """`θ ~ N(μ0, Δ⁻¹)` with one precision for each block."""

    precision: Tensor  # δ (n_blocks,) float64, in 1/weight²
    mean: Vectors = field(repr=False)  # μ0, (P_block,) by block
    fixed: bool  # whether the user or the method chose δ; otherwise it is tuned

    @classmethod
    def read(
        cls, tangent: Tangent, precision: float | Mapping[str, float] | None, mean: float | Mapping[str, Tensor] = 0.0
    ) -> Prior:
        """Returns the prior from δ, a number or {block or parameter pattern: number}, and μ0 as in `lw.fit`.

        None for δ means 1 and still to be tuned. Raises if a pattern matches nothing, a block has no precision, or a
        precision is not positive or rounds to 0 or infinity in the dtype of the weights.
        """
        values = torch.ones(len(tangent.blocks), dtype=torch.float64, device=double_device(tangent.device))
        if isinstance(precision, Mapping):
            values = _by_pattern(tangent, precision, values * torch.nan)
        elif precision is not None:
            values = values * float(precision)
        check_range("prior precision", values, tangent.dtype)
        if isinstance(mean, Mapping):
            means = _mean_by_parameter(tangent, mean)
        elif isinstance(mean, Real) and not isinstance(mean, bool) and abs(mean) <= torch.finfo(tangent.dtype).max:
            number = torch.tensor(float(mean), dtype=tangent.dtype, device=tangent.device)
            means = {block.name: number.expand(block.size) for block in tangent.blocks}
        else:
            raise _no_mean(mean, tangent.dtype)
        return cls(values, means, precision is not None)


def _by_pattern(tangent: Tangent, precision: Mapping[str, float], values: Tensor) -> Tensor:
    names = ", ".join(block.name for block in tangent.blocks)
    for pattern, value in precision.items():
        hits = []
        for i, block in enumerate(tangent.blocks) if isinstance(pattern, str) else ():
            found = [name for name in block.parameters if fnmatchcase(name, pattern)]
            if fnmatchcase(block.name, pattern) or len(found) == len(block.parameters):
                hits.append(i)
            elif found:
                together = ", ".join(block.parameters)
                raise LapwingError(
                    f"prior_precision={{{pattern!r}: {shown(value)}}} names {found[0]}, and {together} share one prior "
                    f"precision. Write prior_precision={{{block.name!r}: {shown(value)}}}."
                )
        if not hits:
            raise LapwingError(
                f"prior_precision={{{shown(pattern)}: {shown(value)}}} matches no block or parameter: the blocks are "
                f"{names}. Write prior_precision={{{tangent.blocks[0].name!r}: 1.0}}."
            )
        if not is_positive(value):
            line = "lw.fit(model, loader, prior_precision={'*': 1.0})"
            raise refusal("lw.fit", f"prior_precision[{shown(pattern)}]", value, positive().text, line)
        values[hits] = float(value)
    missing = [block.name for block, value in zip(tangent.blocks, values.tolist(), strict=True) if value != value]
    if missing:
        raise LapwingError(
            f"prior_precision has no value for {', '.join(missing)}. Add '*': 1.0 as its first entry; later patterns "
            "override it."
        )
    return values


def _no_mean(mean: Any, dtype: torch.dtype) -> LapwingError:
    return LapwingError(
        f"prior_mean={shown(mean)} must be a finite number in the range of {dtype}, or {{parameter: tensor}}. Write "
        "prior_mean=0.0."
    )


def _mean_by_parameter(tangent: Tangent, mean: Mapping[str, Tensor]) -> Vectors:
    parameters, dtype = tangent.parameters, tangent.dtype
    mean = {name: real(value) if isinstance(value, Tensor) else value for name, value in mean.items()}
    wrong = [
        str(name) for name, value in mean.items()
        if name not in parameters or not isinstance(value, Tensor) or value.shape != parameters[name].shape
        or not value.to(dtype).isfinite().all()
    ]  # fmt: skip
    if wrong:
        accepted = ", ".join(f"{name} {tuple(value.shape)}" for name, value in list(parameters.items())[:4])
        raise LapwingError(
            f"prior_mean of {', '.join(wrong)} is not finite, or no treated parameter has its name and shape. "
            f"The parameters are {accepted}, ... Write prior_mean={{name: tensor}}."
        )
    values = {
        name: mean.get(name, torch.zeros_like(value)).detach().to(value.device, dtype)
        for name, value in parameters.items()
    }
    return join(tangent.blocks, values)
