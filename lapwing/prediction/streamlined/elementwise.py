"""Moments through functions of one uncertain tensor: linearised at its mean, or matched to the function's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .fusion import Fused, aten
from .layout import Layout, constant
from .moments import Moments, Value

NODES = 20
"""Points of the quadrature for functions without a closed form."""


def carried(fused: Fused, given: Mapping[str, Value], activations: str, layout: Layout | None = None) -> Moments:
    """Passes moments through one function (Streamlined Prediction, equations 5 and 6).

        E[g(h)] = g(m)        Var[g(h)] = g'(m)² Var[h]

    Args:
        fused: g.
        given: the uncertain tensor and the certain values that take part, by name.
        activations: "linear" for the above, "moments" for the moments of g(h) themselves. Functions with statistics of
            the tensor, as norms, are linearised in either case.
        layout: the dimensions of the result, where positions are correlated: slopes leave correlations as they are.
    """
    source: Any = given[fused.source]
    relu = fused.node.target is aten.relu.default
    if relu and len(fused.body) == 1 and activations == "linear":
        mean = source.mean.relu()
        return Moments(mean, source.variance * (mean > 0), source.correlation)
    if activations == "linear" or fused.statistics:
        found = Moments(*fused.moments(source.mean, source.variance, given))
    elif relu:
        inner = Fused(fused.source, fused.body[:-1], ())
        found = relu_moments(Moments(*inner.moments(source.mean, source.variance, given)) if inner.body else source)
    else:
        found = quadrature(lambda x: fused(x, given), source)
    rho = source.correlation
    if layout is not None and found.mean.shape != source.mean.shape and one_for_all(source.variance, layout, found):
        rho = torch.ones_like(source.variance)
    return found if rho is None else Moments(found.mean, found.variance, rho)


def one_for_all(variance: Tensor, layout: Layout, found: Moments) -> bool:
    """Whether a value is the same at all positions of what it is broadcast to."""
    return layout.shared and constant(variance, found.mean.ndim, layout.positions)


def relu_moments(h: Moments) -> Moments:
    """Returns the moments of `max(h, 0)`, with `z = m/s`.

    E = m Φ(z) + s φ(z)        E[.²] = (m² + s²) Φ(z) + m s φ(z)
    """
    m, v = h.mean, h.variance.clamp_min(torch.finfo(h.variance.dtype).tiny)
    s = v.sqrt()
    z = m / s
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    below = torch.special.ndtr(z)
    mean = m * below + s * density
    # E[.²] - E², in a form without the difference of large numbers
    other = torch.special.ndtr(-z)
    variance = v * (below - density * (z * (below - other) + density) + z.square() * below * other)
    return Moments(mean, variance.clamp_min(0))


def quadrature(function: Callable[[Tensor], Tensor], h: Moments) -> Moments:
    """Returns the moments of `g(h)` by Gauss-Hermite quadrature: exact for polynomials of degree 20.

    Cost: twenty evaluations of g.
    """
    points, weights = _rule()
    s = h.variance.sqrt()
    centre = function(h.mean)
    first, second = torch.zeros_like(centre), torch.zeros_like(centre)
    for point, weight in zip(points, weights, strict=True):
        shifted = function(h.mean + point * s) - centre
        first, second = first + weight * shifted, second + weight * shifted.square()
    return Moments(centre + first, (second - first.square()).clamp_min(0))


@lru_cache
def _rule() -> tuple[list[float], list[float]]:
    """Returns points and weights for the standard normal, by the eigenvalues of the recurrence of its polynomials."""
    off = torch.arange(1, NODES, dtype=torch.float64).sqrt()
    points, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return points.tolist(), vectors[0].square().tolist()
