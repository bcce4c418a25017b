"""Draws of the weights through the Jacobian: what `Linearized(draws=S)` returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from ..covariance import Blockwise, Covariance, Draws, LinearDraws
from ..covariance.positions import LatentAtPositions
from ..covariance.structures import DiagonalBlock
from ..errors import LapwingError
from ..jacobian.jacobian import SLICE_BYTES
from ..linalg import check_memory
from ..network import batches
from ..network.gate import Checked
from ..network.generic import DIRECTIONS, Group, Network, WeightProducts, direction_groups
from ..tangent import Block, Tangent, split
from .positions import draws_at_positions

Chunks = Sequence[tuple[slice, Checked]]
"""Consecutive samples, and where they are among all."""


def latent_of_draws(
    tangent: Tangent, covariance: Covariance, inputs: Any, draws: int, seed: int, joint: bool
) -> LinearDraws | LatentAtPositions | None:
    """Returns `N(f(x, θ̂), 1/S Σ_s d_s d_sᵀ)` with `d_s = J(x)(θ_s - θ̂)`, or None where no route gives such products.

    Weights are drawn a group at a time, and each group goes through all inputs. What is a covariance of few draws
    itself, as that of `lw.SampledLLA`, gives no more than those.
    """
    checked = tangent.check(inputs)
    count = min(draws, covariance.count) if isinstance(covariance, Draws) else draws
    positions = 1 if tangent.positions is None else tangent.positions.count
    check_memory(f"lw.Linearized(draws={draws})", count, checked.samples * tangent.outputs * positions)
    largest = max([tangent.outputs, *(out for out, _ in tangent.plan.sizes)])
    chunks = list(checked.chunks(_length(tangent, largest, tangent.size)))
    mean = torch.cat([tangent.call_with({}, chunk.inputs).to(tangent.dtype) for _, chunk in chunks])
    batches.check_outputs(mean, "these inputs")
    wide = _wide_layer(tangent, covariance, count)
    deviations = None if wide is None else _through_wide_layer(tangent, covariance, wide, checked, mean, count, seed)
    if deviations is None:
        steps = _weight_draws(tangent, covariance, covariance, count, seed)
        deviations = _products(tangent.call_with, tangent.parameters, steps, chunks, count, tangent.dtype)
    if deviations is None:
        return None
    return draws_at_positions(tangent, LinearDraws(mean, deviations, joint), checked.inputs)


def _products(
    network: Network,
    parameters: Mapping[str, Tensor],
    draws: Iterable[tuple[slice, list[Group]]],
    chunks: Chunks,
    count: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Returns the products (S, B, C) of the network's Jacobian with draws of the parameters, or None."""
    products = [WeightProducts(network, parameters) for _ in chunks]
    whole = None
    for group, steps in draws:
        for product, (rows, chunk) in zip(products, chunks, strict=True):
            part = product(steps, chunk.inputs)
            if part is None:
                return None
            part = part.to(dtype)
            if len(part) == count and len(chunks) == 1:
                return part
            whole = part.new_empty(count, chunks[-1][0].stop, part.shape[-1]) if whole is None else whole
            whole[group, rows] = part
        del steps  # before the next are drawn
    return whole


def _length(tangent: Tangent, largest: int, weights: int) -> int:
    """Returns how many samples go through forward mode at once, at most `largest` numbers of a sample in a layer.

    Their tangents fit the budget, and a slice of 16 MiB, which takes half the time of larger ones for convolutions;
    unless the weights are more numbers, all of which each chunk reads.
    """
    length = SLICE_BYTES // (DIRECTIONS * largest * tangent.dtype.itemsize)
    return max(1, min(tangent.chunk_length(DIRECTIONS), max(length, weights // largest)))


_KEPT: WeakKeyDictionary[Covariance, tuple[int, int, int, list[Group]]] = WeakKeyDictionary()
"""A posterior's covariance -> how many draws of how many weights, by which seed, and the draws."""


def _weight_draws(
    tangent: Tangent, posterior: Covariance, covariance: Covariance, count: int, seed: int
) -> Iterator[tuple[slice, list[Group]]]:
    """Yields draws of `N(0, Σ)` laid out for products, as many at a time as fit half of the memory budget.

    Draws that fit a quarter of it are kept for the next prediction of the posterior: of wide layers they cost more than
    what they are multiplied with. Σ is the posterior's covariance, or that of some of its blocks.
    """
    generator = torch.Generator(covariance.device).manual_seed(seed)
    if _fits(tangent, covariance, count):
        kept = _KEPT.get(posterior)
        if kept is None or kept[:3] != (count, covariance.size, seed):
            steps = direction_groups(split(covariance.blocks, covariance.sample(count, generator)))
            kept = _KEPT[posterior] = count, covariance.size, seed, steps
        yield slice(0, count), kept[3]
        return
    length = max(1, tangent.memory // (2 * covariance.size * tangent.dtype.itemsize))
    length -= length % DIRECTIONS if length > DIRECTIONS else 0
    length = count if isinstance(covariance, Draws) else length  # all at once, so that none comes twice
    for start in range(0, count, length):
        rows = slice(start, min(start + length, count))
        yield rows, direction_groups(split(covariance.blocks, covariance.sample(rows.stop - start, generator)))


def _fits(tangent: Tangent, covariance: Covariance, count: int) -> bool:
    """Whether so many draws of the weights fit a quarter of the memory budget."""
    return 4 * count * covariance.size * tangent.dtype.itemsize <= tangent.memory


# A linear layer that gives very many outputs has nearly all of the weights. Drawing them and filling fresh memory with
# them takes longer than the products. Where they are independent, the deviations of its outputs are the sum of two
# products: W with the deviations of its inputs, which forward mode gives, and weight draws with its inputs. Both are
# taken for a slice of the outputs at a time, whose draws never leave the cache.


ALLOWED = 0.05
"""By how much the outputs may differ from W times the inputs: networks in half precision round both."""


def _wide_layer(tangent: Tangent, covariance: Covariance, count: int) -> Block | None:
    """Returns the linear layer that gives the outputs if its weights are independent and too many to keep, or None."""
    if not isinstance(covariance, Blockwise) or tangent.plan.unseen or tangent.positions is not None:
        return None
    ends = [block for block in tangent.blocks if block.family == "linear" and tangent.gives_outputs(block)]
    if len(ends) != 1 or len(tangent.blocks) == 1 or _fits(tangent, covariance, count):
        return None
    (block,) = ends
    alone = block.has_weight and len(block.shapes[0]) == 2 and block.matrix_shape[0] == 1
    return block if alone and isinstance(covariance.structures[block.name], DiagonalBlock) else None


def _through_wide_layer(
    tangent: Tangent, covariance: Covariance, block: Block, checked: Checked, mean: Tensor, count: int, seed: int
) -> Tensor | None:
    """Returns the deviations (S, B, C) at outputs (B, C) of such a layer, or None where it cannot be taken apart.

    The deviations of its inputs are held for as many samples as fit a quarter of the memory budget. Further samples see
    the same draws, made again.
    """
    assert isinstance(covariance, Blockwise)
    weights = tangent.mean_of(block).reshape(block.matrix_shape[1:])  # (C, I), the bias as one more column
    variances = covariance.diagonal()[block.name].reshape(weights.shape)
    generator = torch.Generator(mean.device).manual_seed(seed)
    other_seed = torch.randint(2**62, (), generator=generator, device=mean.device)  # the other layers have that one
    whole = mean.new_empty(count, *mean.shape)
    length = tangent.memory // (4 * count * weights.shape[1] * mean.dtype.itemsize)
    numbers = min(SLICE_BYTES, tangent.memory // 4) // (DIRECTIONS * mean.dtype.itemsize)
    outputs = max(1, numbers // weights.shape[1])  # the same for all batches, so that they see the same draws
    for rows, chunk in checked.chunks(max(1, length)):
        inputs = _inputs_of(tangent, covariance, block, chunk, count, seed)
        if inputs is None:
            return None
        a, moved = inputs
        generator.manual_seed(int(other_seed))
        u = torch.randn(len(weights), generator=generator, dtype=mean.dtype, device=mean.device)
        if not (a @ (weights.T @ u) - mean[rows] @ u).norm() <= ALLOWED * mean[rows].norm():
            return None
        into = whole[:, rows]
        for part, group, steps in _slices_of_noise(variances, count, outputs, generator):
            weight = weights[part, : moved.shape[-1]].contiguous()
            for low in range(0, len(a), max(1, numbers // outputs)):
                here = slice(low, low + max(1, numbers // outputs))
                direct = F.linear(a[here], steps.flatten(0, 1)).unflatten(1, steps.shape[:2])  # (b, k, c)
                into[group, here, part] = F.linear(moved[group, here], weight).add_(direct.transpose(0, 1))
            del steps  # before the next are drawn
        del inputs, a, moved
    return whole


def _slices_of_noise(
    variances: Tensor, count: int, outputs: int, generator: torch.Generator
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yields draws (K, c, I) of `N(0, variances)`, for some outputs and `DIRECTIONS` draws at a time.

    They are random signs, whose covariance is that of normal numbers. Their squares do not scatter.
    """
    for start in range(0, len(variances), outputs):
        part = slice(start, min(start + outputs, len(variances)))
        root = variances[part].sqrt()
        for first in range(0, count, DIRECTIONS):
            group = slice(first, min(first + DIRECTIONS, count))
            yield part, group, random_signs((group.stop - first, *root.shape), generator, root.dtype).mul_(root)


def _inputs_of(
    tangent: Tangent, covariance: Blockwise, block: Block, checked: Checked, count: int, seed: int
) -> tuple[Tensor, Tensor] | None:
    """Returns the inputs (B, I) of the layer, a one appended for the bias, and their deviations (S, B, I).

    Inputs and deviations, those of draws of the other layers, are what the network gives where the identity stands in
    for the layer's weight. None where it does not give them so.
    """
    width, like = block.matrix_shape[2] - block.bias, tangent.parameters[block.parameters[0]]
    stand_ins = {block.parameters[0]: torch.eye(width, dtype=like.dtype, device=like.device)}
    if block.bias:
        stand_ins[block.parameters[1]] = like.new_zeros(width)

    def network(weights: Mapping[str, Tensor], inputs: Any) -> Tensor:
        return tangent.call_with({**stand_ins, **weights}, inputs)

    others = covariance.without(block.name)
    parameters = {name: tangent.parameters[name] for other in others.blocks for name in other.parameters}
    largest = max([width, *(out for i, (out, _) in enumerate(tangent.plan.sizes) if i != tangent.plan.last)])
    chunks = list(checked.chunks(_length(tangent, largest, others.size)))
    moved = None
    with suppress(LapwingError, RuntimeError, ValueError, TypeError):  # a frozen bias has no stand-in
        a = torch.cat([network({}, chunk.inputs).to(tangent.dtype) for _, chunk in chunks])
        if a.shape[1] == width:
            steps = _weight_draws(tangent, covariance, others, count, seed)
            moved = _products(network, parameters, steps, chunks, count, tangent.dtype)
    if moved is None:
        return None
    return torch.cat([a, a.new_ones(len(a), 1)], 1) if block.bias else a, moved


def random_signs(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Returns numbers that are 1 or -1: a bit each, so that they take a tenth of the time of normal ones."""
    table = _signs_of_bytes(dtype, generator.device)
    numbers = torch.Size(shape).numel()
    words = torch.empty(-(-numbers // 64), dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)
    return table.index_select(0, words.view(torch.uint8).int()).flatten()[:numbers].view(shape)


@cache
def _signs_of_bytes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the signs (256, 8) that the bits of each byte stand for."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
    return (2 * (bits & 1) - 1).to(dtype)
