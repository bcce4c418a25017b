"""The exact linearised model of a regression, or of logarithms of counts: the kernel of samples, and their labels."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from ..data.inputs import Inputs, Samples
from ..likelihoods import curvature_weights
from ..linalg import doubled, symmetric_eigen
from ..methods.passes import Batch
from ..posterior import Posterior
from ..tangent import Tangent
from ..tangent.anchors import Anchors
from .gaussian_process import Process
from .held_out import WIDTH_OUTPUTS
from .noise_shape import REPEATED

log = logging.getLogger("lapwing")

MAX_ROWS = 2000  # maximum number of rows of the kernel: pairs of a sample and an output
MIN_INPUTS = 20  # minimum number of inputs that are read, however many positions they have
LEFT_OUT_ROWS = 64  # approximate maximum number of rows of the kernel that are left out with a window of a series
ROWS_OF_MAPS = 500  # the same if a sample has more than `WIDTH_OUTPUTS` outputs: a pixel adds little to its neighbours
TABLE = 2**20  # maximum number of entries of inputs that are joined into one batch
SAME_SAMPLE = 0.98  # minimum cosine between the gradients of two samples that are copies, if their targets are equal
SAME_INPUT = 0.9999  # the same minimum if equal targets are common: rounded targets, ratings, counts
EQUAL_INPUT = 1 - 1e-9  # the same minimum for equal inputs, whose gradients differ by rounding only
MANY_EQUAL = 0.01  # if more than this fraction of different samples have equal targets, the targets are rounded

GRAIN = 1e-3  # steps are rounded to this fraction of their standard deviation, because means were taken off in float32
PLACES = 16  # maximum number of steps of a row that are compared
DIGITS = 12.0  # the compared steps must be able to tell 10^DIGITS rows apart
MANY_SHARED = 0.5  # rows are windows if more than this fraction of them share values with others


def most_rows(outputs: int) -> int:
    """Returns the maximum number of rows of the kernel, for this number of outputs of a sample over all positions."""
    return min(MAX_ROWS, ROWS_OF_MAPS) if outputs > WIDTH_OUTPUTS else MAX_ROWS


class TargetPairs(NamedTuple):
    """M pairs of a sample and one of its targets, in float64, (M,) each."""

    outputs: Tensor  # f that predicts the mean of y
    residuals: Tensor
    noise: Tensor  # noise ratio
    places: Tensor  # index among all targets of all samples, which follow each other


def process_of(posterior: Posterior, tangent: Tangent, parts: Sequence[Samples]) -> tuple[Process, TargetPairs]:
    """Returns the process of samples spread over the parts; if there are too many pairs, of some outputs per sample.

    A sample has the outputs of all its positions, so that outputs (B, T, C) give the process of outputs (B, T C).
    """
    # 1. y, f, r, w and noise ratios of all samples (n, C), shorter samples padded by zeros
    rows = [targets_of(posterior, part) for part in parts]
    own = rows[0][0].shape[-1]  # K targets of a row
    sizes = [part.count for part in parts]
    widths = [part[0].numel() // size for part, size in zip(rows, sizes, strict=True)]
    every = [
        [pad(values.reshape(size, width), (0, max(widths) - width)) for values in part]
        for part, size, width in zip(rows, sizes, widths, strict=True)
    ]
    targets, every_output, residuals, every_weight, noise = (torch.cat(part) for part in zip(*every, strict=True))
    # 2. M pairs: `count` samples with `times` outputs each, in turn if a sample has more
    outputs = min(widths)
    most = most_rows(outputs)
    count = min(len(residuals), max(MIN_INPUTS, most // outputs))
    times = min(outputs, most // count)
    chosen = torch.arange(count) * len(residuals) // count
    samples = chosen.repeat_interleave(times)
    width = torch.tensor(widths).repeat_interleave(torch.tensor(sizes))
    turns = torch.arange(len(samples)) % width[samples]
    # 3. rows of J at the pairs, from one batch of inputs if they fit
    inputs = tuple(part.inputs for part in parts)
    tables = [x.value for x in inputs if isinstance(x.value, Tensor) and x.value.is_floating_point()]
    few = len(tables) == len(inputs) and sum(x.numel() for x in tables) <= TABLE
    fits = len(residuals) * tangent.bytes_per_sample(times, tangent.contraction_dtype) <= tangent.memory // 16
    if few and fits and len({(x.shape[1:], x.dtype) for x in tables}) == 1:
        inputs = (Inputs(torch.cat(tables)),)  # one batch, since the kernel reads all pairs of batches
    anchors = Anchors(tangent, inputs, samples, turns // own * tangent.outputs + turns % own)
    weights = {block.name: 1.0 for block in tangent.blocks}
    # 4. r + J(θ̂ - μ0) (M,)
    mean = posterior.prior.mean if tangent is posterior.tangent else {}
    offset = {
        name: (value - mean.get(name, 0.0)).to(tangent.contraction_dtype)[None]
        for name, value in tangent.mean().items()
    }
    at, places = (samples, turns), (width.cumsum(0) - width)[samples] + turns
    counts, pairs = every_weight[at], TargetPairs(every_output[at], residuals[at], noise[at], places)
    labels = pairs.residuals + doubled(anchors.inner(offset)[0])
    biased = turns if times == outputs else turns % own  # few rows have the same output at the same position
    # 5. K = JJᵀ (M, M), and the eigenpairs of √w K √w, with w divided by the noise ratio of the output
    gram = anchors.gram(weights, tangent.contraction_dtype)
    same, repeats = _copies(gram, targets[chosen], times)
    weight = _number_of_copies(counts, repeats)
    if posterior.method.sample_weights and counts.any():
        weight *= float(counts[counts > 0].mean())
    counts = counts / weight
    roots = (counts / pairs.noise).sqrt()
    values, vectors = symmetric_eigen(roots[:, None] * gram * roots)
    # 6. A: a column of √w for each output (M, C)
    constants = roots[:, None] * one_hot(biased.unique(return_inverse=True)[1]).to(roots)
    windows = overlapping([part.inputs for part in parts], chosen, max(8, LEFT_OUT_ROWS // times))
    return Process(
        values, vectors, roots * labels, constants, counts, same, tangent.size, sum(widths) / len(widths) / times,
        weight, same | windows.to(same.device),
    ), pairs  # fmt: skip


def targets_of(posterior: Posterior, samples: Samples) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns y, f, the residual r, w and the noise ratio of all targets (B, K), or (B T, K), in float64.

    f are the outputs that predict the mean, the first K of C. r is `y - f` for a regression, and as `lw.Poisson`
    defines it for counts. Missing and censored targets have zeros.
    """
    likelihood: Any = posterior.likelihood
    rows = Batch.of(posterior.tangent, samples).rows()
    outputs, targets, weights = rows["outputs"], rows["targets"], rows["weights"]
    likelihood.check(outputs, targets)
    outputs = doubled(outputs)
    targets, weights = targets.to(outputs.device), None if weights is None else weights.to(outputs.device)
    every = curvature_weights(likelihood, outputs, targets, weights)
    residuals = likelihood.residuals(outputs, targets)
    noise, count = likelihood.ratios(outputs).expand_as(residuals), residuals.shape[-1]
    y, f = targets.reshape(len(residuals), -1)[:, :count].to(outputs), outputs[:, :count]
    weights = torch.ones_like(f) if every is None else every.double().expand_as(outputs)[:, :count]
    weights = torch.where(residuals.isnan(), 0.0, weights)
    return torch.where(weights == 0, 0.0, y), f, torch.where(weights == 0, 0.0, residuals), weights, noise


def table_of(posterior: Posterior, parts: Sequence[Samples]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns inputs (N, D), targets (N, C) in units of the roots of their noise ratios, and their weights (N, C).

    Returns None if the inputs are not a table of floats. C counts the outputs of all positions.
    """
    tables = [part.inputs.value for part in parts if isinstance(part.inputs.value, Tensor)]
    if len(tables) < len(parts) or any(x.ndim != 2 or not x.is_floating_point() for x in tables):
        return None
    targets, _, _, weights, noise = map(torch.cat, zip(*(targets_of(posterior, part) for part in parts), strict=True))
    x = torch.cat(tables)
    return x, (targets / noise.sqrt()).reshape(len(x), -1), weights.reshape(len(x), -1)


def _number_of_copies(counts: Tensor, repeats: Tensor) -> float:
    """Returns the mean number of copies of a sample, without targets of weight 0, by w (M,) and `repeats` (N, N)."""
    known = (counts > 0).to(counts).unflatten(0, (len(repeats), -1))
    different = float((known / (repeats.to(counts) @ known).clamp_min(1.0)).sum())
    return float(known.sum()) / different if different else 1.0


def _copies(gram: Tensor, targets: Tensor, times: int) -> tuple[Tensor, Tensor]:
    """Returns whether two samples are nearly copies or the same (N, N), by `JJᵀ` (M, M) and y (N, C).

    Also returns whether one is repeated as the other (N, N), by itself if equal inputs were measured again: then they
    have another target now and then.
    """
    count, outputs = targets.shape
    itself = torch.eye(count, dtype=torch.bool, device=gram.device)
    if times < outputs:  # the kernel holds only some of their outputs
        return itself, itself
    # 1. k_nm = Σ_c J_nc J_mcᵀ (n, n)
    kernel = gram.unflatten(0, (count, times)).unflatten(2, (count, times)).diagonal(dim1=1, dim2=3).sum(-1)  # (N, N)
    # 2. the cosines k_nm/√(k_nn k_mm), and which samples have equal targets
    size = kernel.diagonal().clamp_min(torch.finfo(kernel.dtype).tiny).sqrt()
    cosine, equal = kernel / (size * size[:, None]), (targets == targets[:, None]).all(-1)
    distinct = cosine < SAME_SAMPLE
    rounded = (equal & distinct).sum() > MANY_EQUAL * distinct.sum()
    alike = cosine >= EQUAL_INPUT
    several, repeated = alike.sum() - count, (alike & equal).sum() - count
    repeats = alike & equal & (repeated >= REPEATED * several) | itself
    return itself | ((cosine >= (SAME_INPUT if rounded else SAME_SAMPLE)) & equal), repeats


def overlapping(inputs: Sequence[Inputs], chosen: Tensor, most: int) -> Tensor:
    """Returns whether chosen rows (n,) among all N rows share values with each other or are the same, (n, n).

    A tensor (N, T), (N, T, C) or (N, C, T) among the inputs holds windows if most rows have the steps of other rows,
    moved by k <= T/2 places, `x_i[t + k + 1] - x_i[t + k] = x_j[t + 1] - x_j[t]`: a window may have lost its own mean.
    Rows may have any order, and are related to at most about `most` rows, those that share most. Codes and rounded
    tables do not count, because few different steps are equal by chance.
    Cost: time O(n T²), and O(n² T) for windows.
    """
    for place, first in inputs[0].per_sample.items():
        tensors = [part.per_sample.get(place) for part in inputs]
        alike = [one for one in tensors if one is not None and one.shape[1:] == first.shape[1:]]
        if len(alike) < len(tensors) or first.ndim not in (2, 3) or first.is_complex():
            continue
        x = torch.cat(alike)[chosen.to(first.device)].cpu()
        for windows in (x[..., None],) if x.ndim == 2 else (x, x.mT):
            shared = _sharing_steps(windows, most)
            if (shared.sum(1) > 1).float().mean() > MANY_SHARED:
                return shared
    return torch.eye(len(chosen), dtype=torch.bool)


def _sharing_steps(x: Tensor, most: int) -> Tensor:
    """Returns whether rows (n, T, C) share steps, (n, n)."""
    count, length, channels = x.shape
    shared = torch.eye(count, dtype=torch.bool)
    # 1. the steps as whole numbers (n, T - 1, C), and the number of them that must be equal
    steps = x.double().nan_to_num(0.0, 0.0, 0.0).diff(dim=1)
    deviation = float(steps.std(correction=0)) if steps.numel() else 0.0
    if not deviation:
        return shared
    codes = (steps / (GRAIN * deviation)).round().long()
    least = DIGITS / math.log10(max(2, len(codes.unique())))
    random = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (PLACES, channels), generator=random)
    # 2. for each k the rows that have the steps of another row, k places later: equal steps have equal sums
    for k in range(1, min(length // 2, length - 2) + 1):
        places = torch.linspace(0, length - 2 - k, PLACES).long().unique()
        if len(places) * channels < least:
            break
        later, earlier = codes[:, k:][:, places], codes[:, places]
        sums = [(part * factors[: len(places)]).sum((1, 2)) for part in (later, earlier)]
        if torch.isin(*sums).any():
            several = (later.flatten(1).sort(1).values.diff(dim=1) != 0).double().mean(1) >= 0.5  # constants are equal
            moved = (sums[0][:, None] == sums[1]) & several[:, None]
            shared |= moved | moved.T
            if shared.sum() >= most * count:
                break
    return shared
