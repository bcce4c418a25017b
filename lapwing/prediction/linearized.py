"""Linearised prediction: `f(x) ~ N(f(x, θ̂), J(x) Σ J(x)ᵀ)`, exact for the linearised network."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from ..covariance import AnyLatent, Covariance, JointLatent, Latent, SelectedLatent, Term, is_selected
from ..covariance.latent_at_positions import LatentAtPositions
from ..covariance.terms import DenseTerm, multiplied_out, selected
from ..data.batches import check_outputs
from ..data.inputs import Inputs
from ..errors import LapwingError, plain_numbers, shown
from ..options import SEED, at_least, integer, option
from ..tangent import EVERY_OUTPUT, Cotangents, Reading, Record, Tangent
from .uncertain import carried
from .way import Way
from .weight_draws import latent_of_draws, no_products

log = logging.getLogger("lapwing")


@dataclass(frozen=True)
class Linearized(Way):
    """`f(x) ~ N(f(x, θ̂), J(x) Σ J(x)ᵀ)` (Immer et al. 2021, equation 6), without forming J where a layer allows.

    `draws=S` is for networks with very many outputs. The covariance is estimated from S draws
    `f_s = f(x, θ̂) + J(x)(θ_s - θ̂)` with `θ_s ~ N(θ̂, Σ)`, and the mean is the network's output. The draws are joint
    over outputs and inputs, and every call draws the same weights. A variance has a relative standard error of
    `√(2/S)`, which is 18 % at 64 draws (`standard_error` of the latent).

    `outputs=k` keeps, for each input, only the k outputs with the largest means. A list of numbers keeps those outputs.
    `latent.outputs` (B, k) lists them, and means and variances are (B, k). Predictions of regressions and Bernoulli
    likelihoods have these outputs only. Class probabilities cover all classes: the k logits have their covariance,
    about their average, and the others keep their means. `lw.Probit()` scales all by the mean variance of the k.

    Args:
        draws: S, at least 2; None computes the covariance itself. Not for `lw.Uncertain` inputs, or for networks that
            support neither forward mode nor two backward passes for the products `J δ`.
        outputs: k, or a list of outputs counted from 0; None means all outputs.
        seed: seed of the draws.

    Cost: one forward and C backward passes of activations, and the contractions with the covariance, in chunks that fit
    the memory budget (joint covariances: for every pair of chunks). Differentiable in inputs that require gradients.
    Uncertain inputs (`lw.Uncertain`) add `J_x Σ_x J_xᵀ`, for one more forward and C more backward passes. With draws:
    about two to four forward passes per draw for any C, and S numbers in memory for each output of each input. With
    outputs: k backward passes instead of C, and none for the last layer.

    Example:
        >>> import lapwing as lw
        >>> lw.Linearized(), lw.Linearized(draws=64), lw.Linearized(outputs=10)
        (Linearized(), Linearized(draws=64), Linearized(outputs=10))
    """

    draws: int | None = option(None, at_least(2), write="64")
    outputs: int | Sequence[int] | None = None
    seed: int = option(0, SEED)

    def __post_init__(self) -> None:
        """Checks `outputs`, and stores a list as a tuple."""
        super().__post_init__()
        if self.outputs is None:
            return
        if self.draws is not None:
            raise LapwingError(
                "Linearized takes draws=... or outputs=..., not both. Write lw.Linearized(outputs=10) for few outputs, "
                "and lw.Linearized(draws=64) for all of very many."
            )
        values = plain_numbers(self.outputs)
        if not integer(1).accepts(values):
            values = tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else ()
            if not values or not all(map(integer(0).accepts, values)) or len(set(values)) < len(values):
                raise LapwingError(
                    f"Linearized(outputs={shown(self.outputs)}) needs a number of outputs, at least 1, or a list of "
                    "different outputs counted from 0. Write lw.Linearized(outputs=10) or "
                    "lw.Linearized(outputs=[0, 3])."
                )
        object.__setattr__(self, "outputs", values)

    def __repr__(self) -> str:
        """Shows the options that are not the default."""
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Linearized({', '.join(changed)})"

    def latent(self, tangent: Tangent, covariance: Covariance, inputs: Inputs, joint: bool) -> AnyLatent:
        if tangent.positions.several:
            return self._of_positions(tangent, covariance, inputs)
        if self.draws is not None:
            return self._of_draws(tangent, covariance, inputs, joint)
        selection = None if self.outputs is None else self._selection(tangent.outputs, joint)
        if inputs.spreads:
            return self._of_uncertain(tangent, covariance, inputs, joint, selection)
        checked = tangent.check(inputs)
        if joint:
            return _joint(tangent, covariance, checked, selection)
        # a last layer computes all outputs at once in its eigenbasis
        late = selection is not None and tangent.treats_output_alone and covariance.keeps_outputs
        cotangents = EVERY_OUTPUT if late or selection is None else selection
        scratch = (cotangents.columns or tangent.outputs) * covariance.scratch_per_row
        records = tangent.records(checked, cotangents, covariance.record_dtype, Reading(scratch))
        parts = (_latent(covariance, record) for _, record in records)
        if selection is not None:
            parts = (_selected(part.mean, part.terms, selection, late) for part in parts)
        return Latent.gather(parts, checked.samples)

    def _of_positions(self, tangent: Tangent, covariance: Covariance, inputs: Inputs) -> AnyLatent:
        """Returns `N(f_t(x), J_t Σ J_tᵀ)` for each position t of each input.

        It costs a forward pass and contractions of B T samples for a last layer, and otherwise T C backward passes.
        """
        if inputs.spreads:
            raise LapwingError(
                "The outputs have positions, and this way has no uncertain inputs. Pass via=lw.MonteCarlo(draws=50)."
            )
        if self.draws is not None:
            return self._of_draws(tangent, covariance, inputs, False)
        if self.outputs is not None:
            raise LapwingError(
                f"{self} cannot select outputs at positions. Pass via=lw.Linearized(), or draws=64 for very many."
            )
        parts: list[tuple[slice, Latent]] = []
        sizes: tuple[int, ...] = ()
        scratch = tangent.outputs * covariance.scratch_per_row
        for rows, record in tangent.records(inputs, EVERY_OUTPUT, covariance.record_dtype, Reading(scratch)):
            parts.append((rows, _latent(covariance, record)))
            sizes = record.sizes
        latent = parts[0][1] if len(parts) == 1 else Latent.concatenate([part for _, part in parts])
        if any(rows.step is not None for rows, _ in parts):
            order = torch.cat([torch.arange(rows.start, rows.stop, rows.step or 1) for rows, _ in parts])
            latent = latent.taken(order.argsort().to(latent.mean.device))
        return LatentAtPositions(latent, tangent.positions.places(inputs.samples, sizes))

    def _of_uncertain(
        self, tangent: Tangent, covariance: Covariance, inputs: Inputs, joint: bool, selection: Selection | None
    ) -> AnyLatent:
        """Returns the latent of uncertain inputs: `J Σ Jᵀ` at their means, plus the spread that they carry."""
        checked = tangent.check(inputs.certain)
        mean, added = carried(tangent, inputs, checked.wants_gradient)
        check_outputs(mean, "these inputs")
        if not tangent.blocks:
            terms = (DenseTerm(added),)
            return Latent(mean, terms) if selection is None else _selected(mean, terms, selection, late=True)
        latent: Any = self.latent(tangent, covariance, checked, joint)
        if selection is not None:  # the outputs of the recorded pass, which may break ties differently
            added = selected(added, latent.outputs if is_selected(latent) else selection.of(mean))
        return latent.plus(added)

    def _selection(self, outputs: int, joint: bool) -> Selection:
        """Returns which of C outputs the latent has."""
        assert self.outputs is not None
        selection = Selection(self.outputs, outputs)
        if selection.listed is None and joint:
            raise LapwingError(
                f"{self} selects other outputs for each input, which have no joint covariance of use. List the "
                "outputs: write via=lw.Linearized(outputs=[0, 3])."
            )
        return selection

    def width(self, outputs: int) -> int:
        return outputs if self.outputs is None else Selection(self.outputs, outputs).columns

    def _of_draws(self, tangent: Tangent, covariance: Covariance, inputs: Inputs, joint: bool) -> AnyLatent:
        if inputs.spreads:
            raise LapwingError(
                f"{self} does not take lw.Uncertain inputs. Write via=lw.Linearized(), or via=lw.MonteCarlo(draws=50)."
            )
        assert self.draws is not None
        latent = latent_of_draws(tangent, covariance, inputs, self.draws, self.seed, joint)
        if latent is None:
            exact = "or via=lw.Linearized() for the exact covariance"
            raise no_products(f"{self}", tangent, f"via=lw.MonteCarlo(draws=50), {exact}")
        return latent


MANY_OUTPUTS = 1000
"""Maximum number of outputs for which the default way is exact if more than the last layer is treated."""

DEFAULT_DRAWS = 64


@dataclass(frozen=True)
class ForManyOutputs(Way):
    """`Linearized(draws=64)`, or `Linearized()` for uncertain inputs and for networks that do not support draws."""

    tuned_as = "Linearized"

    def latent(self, tangent: Tangent, covariance: Covariance, inputs: Inputs, joint: bool) -> AnyLatent:
        if not inputs.spreads:
            latent = latent_of_draws(tangent, covariance, inputs, DEFAULT_DRAWS, 0, joint)
            if latent is not None:
                _log_draws(tangent.width, not tangent.positions.several)
                return latent
        return EXACT.latent(tangent, covariance, inputs, joint)


EXACT, FOR_MANY_OUTPUTS = Linearized(), ForManyOutputs()


def default_way(tangent: Tangent) -> Way:
    """Returns `Linearized()`, unless more than 1 000 outputs (of all positions) depend on more than a last layer."""
    exact = tangent.width <= MANY_OUTPUTS or tangent.treats_output_alone
    return EXACT if exact else FOR_MANY_OUTPUTS


@cache
def _log_draws(outputs: int, exact: bool) -> None:
    """Logs once that the default way uses draws for this number of outputs, and how to get exact variances."""
    log.info(
        "%d outputs: predictions use %d draws of the weights, so that variances have an error of %.0f %%.%s",
        outputs, DEFAULT_DRAWS, 100 * (2 / DEFAULT_DRAWS) ** 0.5,
        f" via=lw.Linearized() gives exact variances, with {outputs} backward passes." if exact else "",
    )  # fmt: skip


class Selection(Cotangents):
    """The k outputs that a prediction keeps, and their cotangents: one-hot columns (B, C, k)."""

    def __init__(self, outputs: int | Sequence[int], every: int) -> None:
        self.listed = None if isinstance(outputs, int) else tuple(outputs)
        self.columns: int = min(outputs, every) if isinstance(outputs, int) else len(outputs)
        if self.listed is not None and max(self.listed) >= every:
            raise LapwingError(
                f"There is no output {max(self.listed)}: the network has {every}, counted from 0. Write "
                f"lw.Linearized(outputs=[{every - 1}]) for the last one."
            )

    def of(self, means: Tensor) -> Tensor:
        """Returns the outputs (B, k) at means (B, C): the list, or the largest first."""
        if self.listed is None:
            means = means.detach()
            means = means.float() if means.dtype.itemsize < 4 else means  # as in a record: ties break alike
            return means.topk(self.columns, -1).indices
        return torch.tensor(self.listed, device=means.device).expand(len(means), -1)

    def __call__(self, means: Tensor) -> Tensor:
        hot = means.new_zeros(*means.shape, self.columns)
        return hot.scatter_(1, self.of(means).unsqueeze(1), 1.0)


def _selected(mean: Tensor, terms: tuple[Term, ...], selection: Selection, late: bool) -> SelectedLatent:
    """Returns the latent of the selected outputs, from means (B, C) and terms of these outputs (of all if `late`)."""
    outputs = selection.of(mean)
    if late:
        terms = tuple(term.selected(outputs) for term in terms)
    return SelectedLatent(mean.gather(1, outputs), multiplied_out(terms), outputs=outputs, every_mean=mean)


def _latent(covariance: Covariance, record: Record) -> Latent:
    """Returns the latent of one record, in its dtype."""
    terms = covariance.output_covariance(record)
    if record.dtype != record.outputs.dtype:
        terms = tuple(term.to(record.outputs) for term in terms)
    return Latent(record.outputs, terms)


def _joint(tangent: Tangent, covariance: Covariance, inputs: Inputs, selection: Selection | None) -> JointLatent:
    """Returns `N(f(x, θ̂), J Σ Jᵀ)` of all inputs jointly, computed for pairs of chunks that fit the memory budget."""
    dtype, count = covariance.record_dtype, inputs.samples
    columns = None if selection is None else selection.columns
    outputs = tangent.outputs if columns is None else columns
    block = tangent.memory // (8 * tangent.dtype.itemsize)  # entries of a pair's covariances; a sum holds a few
    length = tangent.chunk_length(columns, dtype, outputs * covariance.scratch_per_row)
    length = max(1, min(length // 2, isqrt(block) // outputs))  # two records are in memory

    def mean(record: Record) -> Tensor:
        return record.outputs if selection is None else record.outputs.gather(1, selection.of(record.outputs))

    if length >= count:
        record = tangent.record(inputs, selection, dtype=dtype)
        return JointLatent(mean(record), covariance.joint_output_covariance(record, record).to(record.outputs))
    requests = list(inputs.chunks(length))
    means, matrix = [], torch.empty(count, outputs, count, outputs, dtype=tangent.dtype, device=tangent.device)
    for i, (mine, chunk) in enumerate(requests):
        record = tangent.record(chunk, selection, dtype=dtype)
        means.append(mean(record))
        for theirs, other_chunk in requests[: i + 1]:
            other = record if theirs == mine else tangent.record(other_chunk, selection, dtype=dtype)
            part = covariance.joint_output_covariance(record, other).to(matrix)
            matrix[mine, :, theirs] = part
            if other is not record:
                matrix[theirs, :, mine] = part.permute(2, 3, 0, 1)
    return JointLatent(torch.cat(means), matrix)
