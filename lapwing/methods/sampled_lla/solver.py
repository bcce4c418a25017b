"""What both solvers of sampled LLA's systems share: what they return, a residual, and checks of their options."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import LapwingError, is_positive, shown
from ...tangent import Vectors
from ..passes import Method, Pass
from .system import LinearSystem, inner


class Solved(NamedTuple):
    """What a solver returns.

    Attributes:
        solution: Z (S, P_block) by block.
        products: `G Z` (S, P_block) by block, from a separate pass.
        residuals: `‖b - A z‖ / ‖b‖` (S,) float64, of these products.
        errors: what the solver's tolerance bounds (S,) float64.
        iterations: products or steps that it took.
    """

    solution: Vectors
    products: Vectors
    residuals: Tensor
    errors: Tensor
    iterations: int


Solving = Generator[Pass, Any, Solved]


def residual_of(system: LinearSystem, solution: Vectors, products: Vectors) -> tuple[Vectors, Tensor]:
    """Returns `b - A Z` and `‖b‖` (S,), 1 where b is 0."""
    residual = system.right_hand_sides()
    norms, prior = inner(residual, residual).sqrt(), system.prior()
    for name, b in residual.items():
        b.add_(products[name], alpha=-system.scale).addcmul_(solution[name], prior[name], value=-1)
    return residual, torch.where(norms > 0, norms, 1.0)


def check_solver(name: str, tolerance: Any, preconditioner: Any) -> None:
    """Raises for a tolerance that is not between 0 and 1, or a preconditioner that is not a method."""
    if not is_positive(tolerance) or not tolerance < 1:
        raise LapwingError(
            f"{name}(tolerance={shown(tolerance)}) needs a number between 0 and 1. Write {name}(tolerance=0.01)."
        )
    if preconditioner is not None and not isinstance(preconditioner, Method):
        raise LapwingError(
            f"{name}(preconditioner={shown(preconditioner)}) needs a method with a prior, or None. Write "
            "preconditioner=lw.KFAC()."
        )
