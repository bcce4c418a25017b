"""The system that posterior draws solve, `(s G + Δ) z = √s JᵀRε + Δ^(1/2) ε₀`, for S right-hand sides at once.

Then `Cov[z] = (sG + Δ)⁻¹ (sG + Δ) (sG + Δ)⁻¹ = Ψ`: z is an exact draw. G is used in products alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...covariance import PriorCovariance
from ...linalg import row_products, total
from ...tangent import Vectors
from ..passes import Pass
from ..problem import Problem
from .curvature_products import CurvatureProducts, DataNoise, PositionedRoot, prior_noise

Products = Generator[Pass, Any, Vectors]


def inner(first: Vectors, second: Vectors) -> Tensor:
    """Returns `u_k · v_k` (S,) in float64, one row at a time so that no copy of all is made."""
    return total(inner_by_block(first, second))


def inner_by_block(first: Vectors, second: Vectors) -> Tensor:
    """Returns the blocks' parts of `u_k · v_k`, (n_blocks, S) in float64."""
    return torch.stack(
        [
            torch.stack([u.double() @ v.double() for u, v in zip(first[name], second[name], strict=True)])
            for name in first
        ]
    )


def gram(first: Vectors, second: Vectors) -> Tensor:
    """Returns `u_k · v_l` (S, S') in float64, a slice of weights at a time."""
    return total(row_products(first[name], second[name]) for name in first)


def recombine(weights: Tensor, vectors: Vectors) -> Vectors:
    """Puts `W V` (r, P_block) in the place of V (S, P_block), block by block; returns the same dict."""
    for name, value in vectors.items():
        vectors[name] = weights.to(value.dtype) @ value
    return vectors


@dataclass(frozen=True)
class LinearSystem:
    """`A = s G + Δ` and its right-hand sides at one prior and noise.

    Attributes:
        problem: the fit's.
        root: R.
        noise: `JᵀRε` (S, P_block) by block.
        features: g (P_block,) by block with `Δ = δ g`, or None for ones.
        curvature: an approximation of G from another method, or None.
        precision: δ (n_blocks,) float64.
        scale: s.
        extra: a further right-hand side (1, P_block) by block, or None.
    """

    problem: Problem
    root: PositionedRoot
    noise: Vectors
    features: Vectors | None
    curvature: PriorCovariance | None
    precision: Tensor
    scale: float
    extra: Vectors | None = None

    @property
    def count(self) -> int:
        """S."""
        return len(next(iter(self.noise.values())))

    def at(self, precision: Tensor, scale: float) -> LinearSystem:
        """Returns the system at another prior and scale of the curvature."""
        return replace(self, precision=precision, scale=scale)

    def prior(self) -> Vectors:
        """Returns Δ, (P_block,) or (1,) by block."""
        dtype, names = self.problem.tangent.dtype, list(self.noise)
        deltas = {name: delta[None] for name, delta in zip(names, self.precision, strict=True)}
        if self.features is not None:
            deltas = {name: delta * self.features[name] for name, delta in deltas.items()}
        return {name: delta.to(dtype) for name, delta in deltas.items()}

    def trace(self) -> Tensor:
        """Returns the estimate `E‖JᵀRε‖²` of tr G, or of that between features."""
        scaled = self.noise
        if self.features is not None:
            scaled = {name: v / self.features[name] for name, v in self.noise.items()}
        return inner(self.noise, scaled).mean()

    def right_hand_sides(self) -> Vectors:
        """Returns `√s JᵀRε + Δ^(1/2) ε₀`, made anew: only `JᵀRε` is kept."""
        prior = self.prior()
        sides = {
            name: noise.mul_(prior[name].sqrt()).add_(self.noise[name], alpha=self.scale**0.5)
            for name, noise in prior_noise(self.problem, self.count)
        }
        return sides if self.extra is None else {name: torch.cat([b, self.extra[name]]) for name, b in sides.items()}

    def products(self, vectors: Vectors) -> Products:
        """Yields the pass that gives `G V`; returns that."""
        return (yield CurvatureProducts(self.problem, self.root, vectors)).blocks

    def completed(self, vectors: Vectors, products: Vectors) -> Vectors:
        """Returns `A V` from V and `G V`, written over the latter."""
        prior = self.prior()
        return {name: products[name].mul_(self.scale).addcmul_(v, prior[name]) for name, v in vectors.items()}

    def preconditioner(self) -> Callable[[Vectors], Vectors]:
        """Returns multiplication by `(s G̃ + Δ)⁻¹`; by Δ⁻¹ where there is no G̃.

        G̃ has one precision per block; beside features it is the mean.
        """
        if self.curvature is None:
            prior = self.prior()
            return lambda vectors: {name: v / prior[name] for name, v in vectors.items()}
        covariance, dtype = self.curvature.with_prior(self.mean_precision(), self.scale), self.problem.tangent.dtype
        return lambda vectors: {name: v.to(dtype) for name, v in covariance.mv(vectors).items()}

    def mean_precision(self) -> Tensor:
        """Returns the mean of Δ over each block, (n_blocks,)."""
        if self.features is None:
            return self.precision
        return self.precision * torch.stack([g.double().mean() for g in self.features.values()])


def noise_of_data(problem: Problem, root: PositionedRoot, count: int) -> Products:
    """Yields the pass that gives `JᵀRε` for S draws of ε; returns that."""
    return (yield DataNoise(problem, root, count)).blocks
