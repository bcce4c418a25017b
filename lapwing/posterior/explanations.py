"""Why a prediction is uncertain: its noise, its layers, the training rows behind it, and the labels that would help."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..covariance.base import split_blocks
from ..data import batches
from ..data.data import Data
from ..data.inputs import Inputs
from ..data.progress import tracked
from ..display import Displayed
from ..errors import LapwingError, shown
from ..linalg import cholesky, doubled, total
from ..prediction.linearized import Selection
from ..prediction.quantities import noise_of, one_batch
from ..tangent import EVERY_OUTPUT, Cotangents, MemoryNeed, Reading, Record
from ..tangent.cotangents import ComputedCotangents, GivenCotangents

if TYPE_CHECKING:
    from .posterior import Posterior

log = logging.getLogger("lapwing")

LISTED_ROWS = 5
"""Maximum number of training rows that an explanation lists for each input."""


@dataclass(frozen=True, repr=False, eq=False)
class Explanation(Displayed):
    """The parts of the uncertainty at B inputs. `Posterior.explain` makes it.

    Attributes:
        noise: variance of each component of y around the network's output, (B, C), in squared units of y: the noise
            variance, or `p (1 - p)` of class probabilities, which are calibrated as in `predict`. More data do not
            reduce it. For `lw.Joint` the components of all heads, in the order of the keys.
        weights: layer -> its share `J_l (Σ Jᵀ)_l` (B, C) of the variance of the outputs, in their squared units. Shares
            add up to the variance. They can be negative if Σ couples layers, as `lw.Full()` does.
        novelty: score of a detector (B,), larger for inputs unlike the training data; None without a detector.
        rows: numbers of the training rows whose removal changes the outputs most, (B, 5), the strongest first, in the
            order of the training data; None without them.
    """

    noise: Tensor
    weights: dict[str, Tensor]
    novelty: Tensor | None = None
    rows: Tensor | None = None

    @property
    def variance(self) -> Tensor:
        """Variance of the outputs, (B, C): the sum of the layers' shares."""
        return total(self.weights.values())

    def __repr__(self) -> str:
        parts = [f"{name} {float(share.sum() / self.variance.sum()):.0%}" for name, share in self.weights.items()]
        negative = any(float(share.sum()) < 0 for share in self.weights.values())
        note = "; below 0%: the layer offsets errors of other layers" if negative else ""
        return f"Explanation({len(self.noise)} inputs; variance of the outputs by layer: {', '.join(parts)}{note})"


@torch.no_grad()
def explained(posterior: Posterior, x: Any, train: Any, novelty: Callable[[Any], Tensor] | None) -> Explanation:
    """Returns the parts of the uncertainty at some inputs: see `Posterior.explain`."""
    tangent, covariance, checked = posterior.tangent, posterior.covariance, _checked(posterior, x)
    usable = callable(novelty) and not isinstance(novelty, type)
    scores: Any = novelty(x) if usable else None  # type: ignore[misc]
    if novelty is not None and (not isinstance(scores, Tensor) or scores.shape != (checked.samples,)):
        raise LapwingError(
            f"explain(novelty={shown(novelty)}) is not a detector. Pass a function of x that returns scores (B,), such "
            "as lambda x: (x - mean).norm(dim=1)."
        )
    # J_l (Σ Jᵀ)_l (B, C) of each layer, from rows of J and their products with Σ
    outputs, dtype, noise = tangent.outputs, covariance.record_dtype, []
    zeros = torch.zeros(checked.samples, outputs, dtype=tangent.dtype, device=tangent.device)
    shares = {block.name: zeros.clone() for block in tangent.blocks}
    copies = 8 * tangent.size  # numbers for each row of J
    length = max(1, tangent.memory // (copies * covariance.dtype.itemsize))
    for columns in (slice(first, min(first + length, outputs)) for first in range(0, outputs, length)):
        chosen = range(outputs)[columns]
        cotangents = EVERY_OUTPUT if len(chosen) == outputs else Selection(chosen, outputs)
        for part, record in tangent.records(checked, cotangents, dtype, Reading(len(chosen) * copies)):
            if not columns.start:
                at, places = record.outputs.detach(), tangent.positions.places(record.samples, ())
                noise.append(noise_of(tangent, covariance, posterior.likelihood, at, places, checked.take(part)))
            rows = split_blocks(covariance.blocks, record.rows().detach().flatten(0, 1).to(covariance.dtype))
            products = covariance.mv(rows)
            for name, share in shares.items():
                share[part, columns] = (rows[name] * products[name]).sum(-1).view(-1, len(chosen)).to(share)
    pulling = None if train is None else _strongest(posterior, train, checked)
    return Explanation(torch.cat(noise), shares, scores, pulling)


def _strongest(posterior: Posterior, train: Any, inputs: Inputs) -> Tensor:
    """Returns the numbers of the training rows with the largest sums over outputs of squared influences, (B, 5)."""
    data, steps = _steps(posterior, train)
    best = torch.full((inputs.samples, LISTED_ROWS), -1.0, dtype=steps.dtype, device=steps.device)
    numbers = torch.zeros_like(best, dtype=torch.long)
    for part, rows, changes in _changes(posterior, data, steps, inputs):
        new = torch.arange(rows.start, rows.stop, device=steps.device).expand(len(changes), -1)
        every = torch.cat([best[part], changes.square().sum(1).to(best)], 1)
        best[part], order = every.topk(LISTED_ROWS)
        numbers[part] = torch.cat([numbers[part], new], 1).gather(1, order)
    return numbers[:, : len(steps)]


@torch.no_grad()
def influence(posterior: Posterior, train: Any, x: Any) -> Tensor:
    """Returns the change of f(x) if a training row is removed, (B, C, n): see `Posterior.influence`."""
    inputs = _checked(posterior, x)
    data, steps = _steps(posterior, train)
    every = steps.new_empty(inputs.samples, posterior.tangent.outputs, len(steps))
    for part, rows, changes in _changes(posterior, data, steps, inputs):
        every[part, :, rows] = changes
    return every


def _steps(posterior: Posterior, train: Any) -> tuple[Data, Tensor]:
    """Returns the training data and `u = (I - ΛV)⁻¹ r` (n, C) of each row: `-Σ Jᵀ u` is the step of the weights."""
    tangent, likelihood = posterior.tangent, posterior.likelihood
    moved, scores, leverages = [], [], []
    data = Data.of(train, posterior, posterior.method.sample_weights)
    batches.check_loader(data.loader, "posterior.influence")
    data.first_of_rank("the numbers of training rows need")
    for samples in tracked(data, "training rows"):
        samples = samples.to(tangent.device)
        targets, weights = samples.targets, samples.weights
        for part, record in _records(posterior, tangent.check(samples.inputs)):
            # 1. r = k ∂log p(y_n|f_n) (n, C, 1), and R (n, C, R) with Λ = R Rᵀ; r and Λ times the weight of the row
            score = posterior.scale.of_likelihood * doubled(likelihood.score(record.outputs, targets[part]))[..., None]
            root = _root(posterior, record.outputs, targets[part])
            if weights is not None:
                times = doubled(weights[part])[:, None, None]
                score, root = times * score, times.sqrt() * root
            # 2. (Σ⁻¹ - JᵀΛJ)⁻¹ Jᵀ r = Σ Jᵀ (I - ΛV)⁻¹ r, the step of the weights from which the row is removed
            half = root.mT @ _covariance(posterior, record)  # RᵀV (n, R, C)
            inner = half @ root
            # 3. (I - R RᵀV)⁻¹ r = r + R (I - RᵀVR)⁻¹ RᵀV r
            each = score + root @ torch.linalg.solve(_eye(inner) - inner, half @ score)
            moved.append(each[..., 0].to(tangent.dtype))
            scores.append(score[..., 0].to(tangent.dtype))
            leverages.append(torch.linalg.eigvalsh(inner)[:, -1])
    if not moved:
        raise LapwingError("The training data of posterior.influence yield no row. Check the dataset's length.")
    highest = torch.cat(leverages)
    above = int((highest >= 1).sum())
    if above:
        log.warning(
            "%d of %d rows have a leverage of 1 or more, which no row of a fit has under its exact covariance. So the "
            "influence leaves out (I - ΛV)⁻¹, and is the effect of slightly less weight of a row, per unit of weight. "
            "Pass the rows of the fit, and fit lw.Full(), or params=lw.last_layer if the network is too large for it.",
            above, len(highest),
        )  # fmt: skip
    return data, torch.cat(scores if above else moved)


def _changes(posterior: Posterior, data: Data, steps: Tensor, inputs: Inputs) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yields slices of the inputs and of the training rows, and the changes `-Cov(f(x), f_n) u_n` (b, C, n)."""
    tangent, covariance = posterior.tangent, posterior.covariance
    for samples in tracked(data, "influence of training rows"):
        vectors = GivenCotangents(steps[samples.start : samples.start + samples.count, :, None])
        for part, record in _records(posterior, tangent.check(samples.to(tangent.device).inputs), vectors):
            rows = slice(samples.start + part.start, samples.start + part.stop)
            for here, other in _records(posterior, inputs, others=1):
                yield here, rows, -covariance.joint_output_covariance(other, record)[..., 0].to(steps)


def value(posterior: Posterior, candidates: Any, targets: Any, given: Any) -> Tensor:
    """Returns the expected fall of the variance of the targets by a label, (n,): see `Posterior.value`."""
    pool = _checked(posterior, candidates)
    with torch.set_grad_enabled(pool.wants_gradient):
        return _value(posterior, pool, _checked(posterior, targets), given)


def _value(posterior: Posterior, pool: Inputs, inputs: Inputs, given: Any) -> Tensor:
    tangent = posterior.tangent
    none = given is None or tuple(getattr(given, "shape", ())[:1]) == (0,)
    known: Any = None if none else _checked(posterior, given)
    falls = doubled(torch.zeros(pool.samples, device=tangent.device))
    root = ComputedCotangents(partial(_root, posterior), tangent.outputs)
    joint = posterior.covariance.joint_output_covariance

    def coupled(record: Record) -> Tensor:
        """Returns `Rᵀ C_gx` (g R', x R) for the labels g that will be known and the samples x of a record."""
        parts = [doubled(joint(labels, record)) for _, labels in _records(posterior, known, root)]
        return torch.cat(parts).flatten(2).flatten(0, 1)

    if known is not None:
        # 1. L Lᵀ = I + RᵀV_ggR (g R', g R')
        needed, what = 24 * (known.samples * tangent.outputs) ** 2, f"the covariance of {known.samples} given inputs"
        tangent.require(MemoryNeed("posterior.value", needed, what, "pass fewer of them"))
        among = torch.cat([coupled(record) for _, record in _records(posterior, known, root)], 1)
        factor = cholesky(_eye(among) + among)
    for part, record in tracked(_records(posterior, pool, root), "candidates"):
        # 2. RᵀV_aaR (n, R', R') of the candidates a, without what the given labels explain
        inner = _covariance(posterior, record)
        if known is not None:
            of_rows = _whitened(factor, coupled(record))  # L⁻¹ Rᵀ C_ga R
            each = of_rows.unflatten(1, (record.samples, -1))
            inner = inner - torch.einsum("knr,kns->nrs", each, each)
        lower = cholesky(_eye(inner) + inner)
        for _, other in _records(posterior, inputs):
            # 3. C_ta R (t, C, n, R') of some targets t, also without that: C_ta R - C_tg R (L Lᵀ)⁻¹ Rᵀ C_ga R
            between = doubled(joint(other, record))
            if known is not None:
                between -= (_whitened(factor, coupled(other)).T @ of_rows).view_as(between)
            # 4. the fall tr[C_ta R (I + RᵀVR)⁻¹ Rᵀ C_at], by a Cholesky factor of I + RᵀVR
            falls[part] += _whitened(lower, between.permute(2, 3, 0, 1).flatten(2)).square().sum((1, 2))
    return falls.to(tangent.dtype)


def _checked(posterior: Posterior, x: Any) -> Inputs:
    """Returns one batch of inputs, or inputs that are checked already."""
    if posterior.tangent.positions.several:
        raise LapwingError(
            f"The outputs of {type(posterior.model).__name__} have positions, which explain, influence and value do "
            "not support. Fit one position, such as the last: lw.fit(..., forward=lambda model, x: model(x)[:, -1]). "
            "Or write posterior.of(lambda f: f(x).sum((1, 2))) for the error of numbers of several positions."
        )
    return one_batch(posterior.tangent, x, posterior.columns, "Pass one tensor of inputs.")


def _records(
    posterior: Posterior, inputs: Inputs, cotangents: Cotangents = EVERY_OUTPUT, others: int | None = None
) -> Iterator[tuple[slice, Record]]:
    """Yields records of chunks, which fit the budget with another of C or `others` cotangents and their covariance."""
    tangent, covariance = posterior.tangent, posterior.covariance
    dtype = covariance.record_dtype
    columns = cotangents.columns or tangent.outputs
    length = tangent.chunk_length(cotangents.columns, dtype, columns * covariance.scratch_per_row)
    length = min(length // 2, isqrt(tangent.memory // (64 * columns * (others or tangent.outputs))))
    for part, chunk in inputs.chunks(max(1, length)):
        yield part, tangent.record(chunk, cotangents.take(part), dtype)


def _covariance(posterior: Posterior, record: Record) -> Tensor:
    """Returns the covariance of the outputs of each sample, (n, R, R)."""
    return total(doubled(term.dense()) for term in posterior.covariance.output_covariance(record))


def _root(posterior: Posterior, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
    """Returns a root (n, C, R) of the Fisher information Λ at outputs (n, C), as it counts in the fit."""
    likelihood = posterior.likelihood
    root = doubled(likelihood.fisher_root(outputs)) * posterior.scale.of_curvature**0.5
    weights = None if targets is None else likelihood.target_weights(outputs, targets)
    return root if weights is None else root * doubled(weights).sqrt()[..., None]


def _whitened(factor: Tensor, values: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(factor, values, upper=False)


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
