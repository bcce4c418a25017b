"""Why a prediction is uncertain: its noise, its layers, the training rows behind it, and the labels that would help."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from ..prediction.quantities import noise_of, one_batch
from ..tangent import Reading, Record

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
    noise, shares = [], []
    scratch = 3 * tangent.outputs * tangent.size
    for part, record in tangent.records(checked, None, covariance.record_dtype, Reading(scratch)):
        outputs = record.outputs.detach()
        places = tangent.positions.places(len(outputs), ())
        noise.append(noise_of(tangent, posterior.likelihood, outputs, places, checked.take(part)))
        rows = split_blocks(covariance.blocks, record.rows().detach().flatten(0, 1).to(covariance.dtype))
        products = covariance.mv(rows)
        shares.append({name: (rows[name] * products[name]).sum(-1).view_as(outputs) for name in rows})
    weights = {name: torch.cat([part[name] for part in shares]).to(tangent.dtype) for name in shares[0]}
    pulling = None
    if train is not None:
        pulls = influence(posterior, train, checked).square().sum(1)
        pulling = pulls.topk(min(LISTED_ROWS, pulls.shape[-1])).indices
    return Explanation(torch.cat(noise), weights, scores, pulling)


@torch.no_grad()
def influence(posterior: Posterior, train: Any, x: Any) -> Tensor:
    """Returns the change of f(x) if a training row is removed, (B, C, n): see `Posterior.influence`."""
    tangent, likelihood = posterior.tangent, posterior.likelihood
    inputs, changes, leverages = _checked(posterior, x), [], []
    data = Data.of(train, posterior, posterior.method.sample_weights)
    batches.check_loader(data.loader, "posterior.influence")
    data.first_of_rank("the numbers of training rows need")
    for samples in tracked(data, "training rows"):
        samples = samples.to(tangent.device)
        targets, weights = samples.targets, samples.weights
        for part, chunk, record in _records(posterior, tangent.check(samples.inputs)):
            # 1. r = k ∂log p(y_n|f_n) (n, C, 1), and R (n, C, R) with Λ = R Rᵀ; r and Λ times the weight of the row
            score = posterior.scale.of_likelihood * doubled(likelihood.score(record.outputs, targets[part]))[..., None]
            root = _root(posterior, record, targets[part])
            if weights is not None:
                times = doubled(weights[part])[:, None, None]
                score, root = times * score, times.sqrt() * root
            # 2. (Σ⁻¹ - JᵀΛJ)⁻¹ Jᵀ r = Σ Jᵀ (I - ΛV)⁻¹ r, the step of the weights from which the row is removed
            half, inner = _leverage(posterior, record, root)
            # 3. (I - R RᵀV)⁻¹ r = r + R (I - RᵀVR)⁻¹ RᵀV r
            moved = score + root @ torch.linalg.solve(_eye(inner) - inner, half @ score)
            # 4. -Cov(f(x), f_n) times it, and times r alone (B, C, n, 2)
            changes.append(-_products(posterior, inputs, chunk, torch.cat([moved, score], -1)))
            leverages.append(torch.linalg.eigvalsh(inner)[:, -1])
    if not changes:
        raise LapwingError("The training data of posterior.influence yield no row. Check the dataset's length.")
    every, highest = torch.cat(changes, 2), torch.cat(leverages)
    above = int((highest >= 1).sum())
    if above:
        log.warning(
            "%d of %d rows have a leverage of 1 or more, which no row of a fit has under its exact covariance. So the "
            "influence leaves out (I - ΛV)⁻¹, and is the effect of slightly less weight of a row, per unit of weight. "
            "Pass the rows of the fit, and fit lw.Full(), or params=lw.last_layer if the network is too large for it.",
            above, len(highest),
        )  # fmt: skip
    return every[..., 1 if above else 0].to(tangent.dtype)


@torch.no_grad()
def value(posterior: Posterior, candidates: Any, targets: Any, given: Any) -> Tensor:
    """Returns the expected fall of the variance of the targets by a label, (n,): see `Posterior.value`."""
    pool, inputs = _checked(posterior, candidates), _checked(posterior, targets)
    none = given is None or tuple(getattr(given, "shape", ())[:1]) == (0,)
    known = None if none else _checked(posterior, given)
    falls = []
    if known is not None:
        # 1. with the labels g that will be known: L Lᵀ = I + RᵀV_ggR (g R', g R') and L⁻¹ Rᵀ C_gt (g R', m C)
        labelled = posterior.tangent.record(known, dtype=posterior.covariance.record_dtype)
        at = _root(posterior, labelled)  # R (g, C, R')
        among = torch.einsum("gcr,gchs->grhs", at, _products(posterior, known, known, at))
        among = among.flatten(2).flatten(0, 1)
        factor = cholesky(_eye(among) + among)
        of_targets = _whitened(factor, _products(posterior, inputs, known, at).flatten(2).flatten(0, 1).T)
    for _, chunk, record in tracked(_records(posterior, pool), "candidates"):
        root = _root(posterior, record)
        # 2. C_ta R (m, C, n, R') and RᵀV_aaR (n, R', R') of the candidates a
        between = _products(posterior, inputs, chunk, root)
        _, inner = _leverage(posterior, record, root)
        if known is not None:
            # 3. both without what the given labels explain: C_ta - C_tg R (L Lᵀ)⁻¹ Rᵀ C_ga
            of_rows = torch.einsum("gcr,gcns->grns", at, _products(posterior, known, chunk, root))
            of_rows = _whitened(factor, of_rows.flatten(2).flatten(0, 1))
            between = between - (of_targets.T @ of_rows).view_as(between)
            each = of_rows.unflatten(1, (record.samples, -1))
            inner = inner - torch.einsum("knr,kns->nrs", each, each)
        # 4. the fall tr[C_ta R (I + RᵀVR)⁻¹ Rᵀ C_at], by a Cholesky factor of I + RᵀVR
        white = _whitened(cholesky(_eye(inner) + inner), between.permute(2, 3, 0, 1).flatten(2))
        falls.append(white.square().sum((1, 2)))
    return torch.cat(falls).to(posterior.tangent.dtype)


def _checked(posterior: Posterior, x: Any) -> Inputs:
    """Returns one batch of inputs, or inputs that are checked already."""
    if posterior.tangent.positions.several:
        raise LapwingError(
            f"The outputs of {type(posterior.model).__name__} have positions, which explain, influence and value do "
            "not support. Fit one position, such as the last: lw.fit(..., forward=lambda model, x: model(x)[:, -1]). "
            "Or write posterior.of(lambda f: f(x).sum((1, 2))) for the error of numbers of several positions."
        )
    return one_batch(posterior.tangent, x, posterior.columns, "Pass one tensor of inputs.")


def _records(posterior: Posterior, inputs: Inputs) -> Iterator[tuple[slice, Inputs, Record]]:
    """Yields records of chunks of samples, two of which fit the memory budget with their joint covariance."""
    tangent, covariance = posterior.tangent, posterior.covariance
    dtype, outputs = covariance.record_dtype, tangent.outputs
    length = tangent.chunk_length(dtype=dtype, scratch_per_sample=outputs * covariance.scratch_per_row)
    length = min(length // 2, isqrt(tangent.memory // 64) // outputs)
    for part, chunk in inputs.chunks(max(1, length)):
        yield part, chunk, tangent.record(chunk, dtype=dtype)


def _products(posterior: Posterior, inputs: Inputs, rows: Inputs, vectors: Tensor) -> Tensor:
    """Returns `Cov(f(x), f_n) u_n` (B, C, n, R) for one chunk of rows n and vectors u (n, C, R)."""
    record = posterior.tangent.record(rows, vectors, posterior.covariance.record_dtype)
    parts = (posterior.covariance.joint_output_covariance(one, record) for _, _, one in _records(posterior, inputs))
    return torch.cat([doubled(part) for part in parts])


def _root(posterior: Posterior, record: Record, targets: Tensor | None = None) -> Tensor:
    """Returns a root (n, C, R) of the Fisher information Λ of each sample, as it counts in the fit."""
    likelihood, outputs = posterior.likelihood, record.outputs
    root = doubled(likelihood.fisher_root(outputs)) * posterior.scale.of_curvature**0.5
    weights = None if targets is None else likelihood.target_weights(outputs, targets)
    return root if weights is None else root * doubled(weights).sqrt()[..., None]


def _leverage(posterior: Posterior, record: Record, root: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `Rᵀ V` (n, R, C) and `Rᵀ V R` (n, R, R), with the covariance V of the outputs of each sample."""
    half = root.mT @ total(doubled(term.dense()) for term in posterior.covariance.output_covariance(record))
    return half, half @ root


def _whitened(factor: Tensor, values: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(factor, values, upper=False)


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
