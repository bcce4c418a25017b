"""What a tensor holds: in which dtype and on which device it is summed, and whether its values are finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import LapwingError

SLICE_NUMBERS = 2**19  # of a tensor, taken at once where its copy in another form would be as large

RESOLVED = 1e14  # curvature over prior precision above which float64 sums of float32 Jacobians lose small curvatures


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype sums are kept in: float32, or float64 where the model is float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def double_device(device: torch.device) -> torch.device:
    """Returns where float64 numbers of a device live: on the CPU for Apple's, which has none."""
    return torch.device("cpu") if device.type == "mps" else device


def placed(values: Tensor, device: torch.device) -> Tensor:
    """Returns values on a device, those in float64 where it has them."""
    return values.to(double_device(device) if values.dtype == torch.float64 else device)


def doubled(values: Tensor) -> Tensor:
    """Returns values in float64, on a device that has it."""
    device = double_device(values.device)
    return (values if device == values.device else values.to(device)).double()


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite: one fast sum, and a look at each where that overflows or is not finite."""
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def check_finite(matrix: Tensor) -> None:
    """Raises for a matrix that holds NaN or infinite entries."""
    if not matrix.numel() or torch.stack(matrix.aminmax()).isfinite().all():  # NaN is the least and the largest
        return
    bad = int((~torch.isfinite(matrix)).sum())
    raise LapwingError(
        f"A matrix of shape {tuple(matrix.shape)} that is made of gradients has {bad} NaN or infinite entries. Scale "
        "the inputs and the targets to about 1, check the weights for overflow, or use model.float() or model.double()."
    )


def nonnegative(values: Tensor) -> Tensor:
    """Returns values with rounding below 0 cut off; the derivative at 0 is 1, where that of `clamp_min` may be 0."""
    return torch.where(values < 0, 0.0, values) if values.requires_grad else values.clamp_min(0.0)
