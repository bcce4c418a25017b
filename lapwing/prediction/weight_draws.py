"""Draws of the weights: through the network itself, and through its Jacobian.

`MonteCarlo` runs the network. `Linearized(draws=S)` and functions that keep their draws use the Jacobian.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..covariance import AnyLatent, Covariance, LatentDraws, LinearDraws
from ..covariance.latent_at_positions import LatentAtPositions
from ..data.batches import check_outputs
from ..data.inputs import Inputs
from ..errors import LapwingError
from ..jacobian.jacobian import SLICE_BYTES
from ..linalg import check_memory
from ..network.generic import DIRECTIONS, Group, WeightProducts, direction_groups
from ..options import SEED, at_least, option
from ..tangent import Tangent, split
from .uncertain import drawn
from .way import Way

AnyDraws = TypeVar("AnyDraws", LinearDraws, LatentDraws)

SomeDraws = tuple[slice, list[Group]]
"""Which of S draws of the weights these are, and the draws, laid out for products."""


@dataclass(frozen=True)
class MonteCarlo(Way):
    """`f(x, θ_s)` for draws `θ_s ~ N(θ̂, Σ)`. The weights are passed in, and the model is never written.

    Every call draws the same weights (same seed), so predictions for different inputs are joint. Uncertain inputs
    (`lw.Uncertain`) are drawn too, once for each draw of the weights.

    Args:
        draws: S, at least 2.
        seed: seed of the draws.

    Cost: S forward passes, chunked under the memory budget; memory O(P), plus S numbers for each output of each input.

    Example:
        >>> import lapwing as lw
        >>> lw.MonteCarlo(draws=30)
        MonteCarlo(draws=30, seed=0)
    """

    draws: int = option(50, at_least(2))
    seed: int = option(0, SEED)

    def latent(self, tangent: Tangent, covariance: Covariance, inputs: Inputs, joint: bool) -> AnyLatent:
        tangent.check(inputs.certain)
        outputs = self._outputs(tangent, covariance, inputs)
        first = next(outputs)
        if first.requires_grad:
            draws = torch.stack([first, *outputs])
        else:  # each is copied into the result at once, which saves memory
            check_memory(f"MonteCarlo(draws={self.draws})", self.draws, first.numel())
            draws = first.new_empty(self.draws, *first.shape)
            for i, part in enumerate(chain([first], outputs)):
                draws[i] = part
        return draws_at_positions(tangent, LatentDraws(draws, joint), inputs)

    def _outputs(self, tangent: Tangent, covariance: Covariance, inputs: Inputs) -> Iterator[Tensor]:
        """Yields the outputs (B, C) under each draw."""
        generator = torch.Generator(covariance.device).manual_seed(self.seed)
        # another seed for draws of inputs, so that uncertain inputs leave the draws of the weights unchanged
        noise = torch.Generator(tangent.device).manual_seed((self.seed + 0x9E3779B97F4A7C15) % 2**63)
        parameters, mean = tangent.parameters, tangent.mean()
        for _ in range(self.draws):
            steps = covariance.sample(1, generator)
            moved = {name: mean[name] + step[0].to(mean[name]) for name, step in steps.items()}
            weights = split(tangent.blocks, moved)
            weights = {name: value.to(parameters[name].dtype) for name, value in weights.items()}
            draw = drawn(inputs, noise) if inputs.spreads else inputs
            chunks = draw.chunks(tangent.chunk_length(1))
            parts = [tangent.call_with(weights, chunk).to(tangent.dtype) for _, chunk in chunks]
            yield parts[0] if len(parts) == 1 else torch.cat(parts)


def latent_of_draws(
    tangent: Tangent, covariance: Covariance, inputs: Inputs, draws: int, seed: int, joint: bool
) -> LinearDraws | LatentAtPositions | None:
    """Returns `N(f(x, θ̂), 1/S Σ_s d_s d_sᵀ)` with `d_s = J(x)(θ_s - θ̂)`, or None without such products.

    A covariance of few draws (`lw.SampledLLA`) gives at most its own draws.
    """
    count = min(draws, covariance.distinct_draws or draws)
    check_memory(f"lw.Linearized(draws={draws})", count, inputs.samples * tangent.width)
    mean, deviations = _products(tangent, _weight_draws(tangent, covariance, count, seed), inputs, count)
    return None if deviations is None else draws_at_positions(tangent, LinearDraws(mean, deviations, joint), inputs)


def deviations_of(tangent: Tangent, covariance: Covariance, count: int, seed: int) -> dict[str, Tensor]:
    """Returns draws of `θ - θ̂ ~ N(0, Σ)`: parameter name -> (count, *shape), in the accumulation dtype."""
    generator = torch.Generator(covariance.device).manual_seed(seed)
    weights, dtype = tangent.parameters, tangent.dtype
    draws = {name: weight.new_empty((count, *weight.shape), dtype=dtype) for name, weight in weights.items()}
    length = tangent.memory // (8 * tangent.size * covariance.dtype.itemsize)
    for rows, steps in covariance.samples(count, generator, length):
        for name, step in split(tangent.blocks, steps).items():
            draws[name][rows] = step.to(draws[name])
    return draws


@dataclass(frozen=True, eq=False, repr=False)
class KeptDraws(Way):
    """The way of `Posterior.sample_function`: `f(x, θ̂) + J(x)(θ_s - θ̂)` with the same draws θ_s at every call."""

    draws: dict[str, Tensor]  # θ_s - θ̂: parameter name -> (S, *shape)

    def latent(self, tangent: Tangent, covariance: Covariance, inputs: Inputs, joint: bool) -> AnyLatent:
        """Returns the values (S, B, C) of the functions."""
        count = len(next(iter(self.draws.values())))
        parts = (slice(start, start + DIRECTIONS) for start in range(0, count, DIRECTIONS))
        groups = ((rows, direction_groups({name: draw[rows] for name, draw in self.draws.items()})) for rows in parts)
        mean, deviations = _products(tangent, groups, inputs, count)
        if deviations is None:
            raise no_products("posterior.sample_function", tangent, "posterior.latent(x, joint=True).sample(1)")
        return draws_at_positions(tangent, LatentDraws(mean + deviations, joint), inputs)


def no_products(caller: str, tangent: Tangent, instead: str) -> LapwingError:
    """Returns the error for a network without products of its Jacobian."""
    return LapwingError(
        f"{caller} needs products of the Jacobian with weights, and {type(tangent.model).__name__} calls an operation "
        f"that has neither forward mode nor a second derivative. Write {instead}."
    )


def draws_at_positions(tangent: Tangent, latent: AnyDraws, inputs: Inputs) -> AnyDraws | LatentAtPositions:
    """Returns a latent of draws (S, B, T C), with one row per position if the outputs have positions."""
    places = tangent.places_of(inputs)
    if not places.sizes:
        return latent
    values = {f.name: getattr(latent, f.name) for f in fields(latent)}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    rows = {name: value.unflatten(-1, (places.count, -1)).flatten(-3, -2) for name, value in tensors.items()}
    return LatentAtPositions(replace(latent, **rows), places)


def _products(tangent: Tangent, draws: Iterable[SomeDraws], inputs: Inputs, count: int) -> tuple[Tensor, Tensor | None]:
    """Returns the outputs (B, C), and the products (S, B, C) of their Jacobian with draws, or None without products."""
    largest = max([tangent.outputs, *(use.out for use in tangent.plan.order)])
    # Tangents of at most 16 MiB make convolutions twice as fast. But a chunk has at least as many entries as the
    # weights, which each chunk reads.
    length = max(SLICE_BYTES // (DIRECTIONS * largest * tangent.dtype.itemsize), tangent.size // largest)
    chunks = list(tangent.check(inputs).chunks(max(1, min(tangent.chunk_length(DIRECTIONS), length))))
    mean = torch.cat([tangent.call_with({}, chunk).to(tangent.dtype) for _, chunk in chunks])
    check_outputs(mean, "these inputs")
    products = [WeightProducts(tangent.call_with, tangent.parameters) for _ in chunks]
    whole = None
    for group, steps in draws:
        for product, (rows, chunk) in zip(products, chunks, strict=True):
            part = product(steps, chunk)
            if part is None:
                return mean, None
            part = part.to(tangent.dtype)
            if len(part) == count and len(chunks) == 1:
                return mean, part
            whole = part.new_empty(count, *mean.shape) if whole is None else whole
            whole[group, rows] = part
        del steps  # frees them before the next draws
    return mean, whole


_LATEST_STEPS: WeakKeyDictionary[Covariance, tuple[int, int, list[Group]]] = WeakKeyDictionary()
"""A posterior's covariance -> the number of draws, their seed, and the draws."""


def _weight_draws(tangent: Tangent, covariance: Covariance, count: int, seed: int) -> Iterator[SomeDraws]:
    """Yields draws of `N(0, Σ)` that fit half of the memory budget.

    Draws that fit a quarter are kept: drawing the weights of wide layers costs more than multiplying with them.
    """
    generator = torch.Generator(covariance.device).manual_seed(seed)
    if 4 * count * covariance.size * tangent.dtype.itemsize <= tangent.memory:
        latest = _LATEST_STEPS.get(covariance)
        if latest is None or latest[:2] != (count, seed):
            steps = direction_groups(split(covariance.blocks, covariance.sample(count, generator)))
            latest = _LATEST_STEPS[covariance] = count, seed, steps
        yield slice(0, count), latest[2]
        return
    length = tangent.memory // (2 * covariance.size * tangent.dtype.itemsize)
    length -= length % DIRECTIONS if length > DIRECTIONS else 0
    for rows, draws in covariance.samples(count, generator, length):
        yield rows, direction_groups(split(covariance.blocks, draws))
