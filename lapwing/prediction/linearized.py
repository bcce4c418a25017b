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

from ..covariance import (
    AnyLatent,
    Covariance,
    JointLatent,
    Latent,
    LinearDraws,
    SelectedLatent,
    Term,
    is_selected,
)
from ..covariance.latent_at_positions import LatentAtPositions
from ..covariance.terms import DenseTerm, multiplied_out, selected
from ..data import batches
from ..errors import LapwingError, is_whole, plain_numbers, shown
from ..network.gate import Checked
from ..network.tracing import wants_gradient
from ..options import LIMIT, SEED, at_least, option
from ..tangent import Record, Tangent
from .linearized_positions import at_positions
from .uncertain import carried, separate
from .way import Way
from .weight_draws import latent_of_draws

log = logging.getLogger("lapwing")


@dataclass(frozen=True)
class Linearized(Way):
    """`f(x) ~ N(f(x, θ̂), J(x) Σ J(x)ᵀ)` (Immer et al. 2021, equation 6), without forming J where a layer allows.

    With `draws=S` the covariance is that of S draws, `f_s = f(x, θ̂) + J(x)(θ_s - θ̂)` with `θ_s ~ N(θ̂, Σ)`, for networks
    with very many outputs: no C x C matrix is formed, all draws are joint over outputs and inputs, and the mean is the
    network's output. A variance has a relative standard error of `√(2/S)`, 18 % at 64 draws (`standard_error` of the
    latent). Every call draws the same weights.

    With `outputs=k` the latent has the k outputs of largest mean alone, for each input its own, and with a list of
    numbers those outputs: `latent.outputs` (B, k) says which, means and variances are (B, k). Regressions and yes-or-no
    predictions are of these outputs. Class probabilities are of all classes: the k logits have their covariance, about
    their average, and the other logits keep their means; `lw.Probit()` scales all by the mean variance of the k.

    Args:
        draws: S, at least 2; None computes the covariance itself.
        outputs: k, or a list of outputs counted from 0; None takes all.
        seed: of the draws.

    Raises:
        LapwingError: for numbers out of range; with `draws`, for `lw.Uncertain` inputs and for networks whose products
            `J δ` neither forward mode nor two backward passes give.

    Cost: one forward and C backward passes of activations, and the structure's contractions; chunked under the memory
    budget, joint covariances for every pair of chunks. Differentiable in inputs that require gradients. Uncertain
    inputs (`lw.Uncertain`) add `J_x Σ_x J_xᵀ` by one more forward and C backward passes. With draws: S weight draws a
    call, and about two to four forward passes a draw, whatever C is, beside the draw of the weights. It keeps
    S numbers for each output of each input. With outputs: k backward passes instead of C, none for the last layer.

    Example:
        >>> import lapwing as lw
        >>> lw.Linearized(), lw.Linearized(draws=64), lw.Linearized(outputs=10)
        (Linearized(), Linearized(draws=64), Linearized(outputs=10))
    """

    draws: int | None = option(None, at_least(2, LIMIT), write="64")
    outputs: int | Sequence[int] | None = None
    seed: int = option(0, SEED)

    def __post_init__(self) -> None:
        """Checks the outputs, and keeps a list as a tuple."""
        super().__post_init__()
        if self.outputs is None:
            return
        if self.draws is not None:
            raise LapwingError(
                "Linearized takes draws=... or outputs=..., not both. Write lw.Linearized(outputs=10) for few outputs, "
                "and lw.Linearized(draws=64) for all of very many."
            )
        values = plain_numbers(self.outputs)
        if is_whole(values, 1):
            object.__setattr__(self, "outputs", values)
            return
        listed = tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else ()
        if not listed or not all(is_whole(value, 0) for value in listed) or len(set(listed)) < len(listed):
            raise LapwingError(
                f"Linearized(outputs={shown(self.outputs)}) needs a number of outputs, at least 1, or a list of "
                "different outputs counted from 0. Write lw.Linearized(outputs=10) or lw.Linearized(outputs=[0, 3])."
            )
        object.__setattr__(self, "outputs", listed)

    def __repr__(self) -> str:
        """Shows what is not the default."""
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Linearized({', '.join(changed)})"

    def latent(self, tangent: Tangent, covariance: Covariance, inputs: Any, joint: bool) -> AnyLatent:
        """Returns the latent Gaussian; with covariances (B, C, B, C) when joint."""
        values, spreads = separate(inputs)
        if self.draws is not None:
            return self._of_draws(tangent, covariance, values, spreads, joint)
        if tangent.positions is not None:
            self._check_positions(bool(spreads))
            return at_positions(tangent, covariance, tangent.check(values), joint)
        selection = None if self.outputs is None else Selection(self.outputs, tangent.outputs)
        if selection is not None and selection.listed is None and joint:
            raise LapwingError(
                f"{self} selects other outputs for each input, which have no joint covariance of use. List the "
                "outputs: write via=lw.Linearized(outputs=[0, 3])."
            )
        if not spreads:
            return _of_weights(tangent, covariance, values, joint, selection)
        checked = tangent.check(values)
        mean, added = carried(tangent, values, spreads, wants_gradient(values))
        batches.check_outputs(mean, "these inputs")
        if not tangent.blocks:
            terms = (DenseTerm(added),)
            return Latent(mean, terms) if selection is None else _selected(mean, terms, selection, late=True)
        latent = _of_weights(tangent, covariance, checked, joint, selection)
        if selection is not None:  # as the recorded pass ordered them
            added = selected(added, latent.outputs if is_selected(latent) else selection.of(mean))
        return latent.plus(added)

    def _check_positions(self, uncertain: bool) -> None:
        """Raises for what outputs with positions do not allow."""
        if self.outputs is not None:
            raise LapwingError(
                f"The outputs have positions, of which {self} selects none. Pass via=lw.Linearized(), or "
                "via=lw.Linearized(draws=64) for very many outputs."
            )
        if uncertain:
            raise LapwingError(
                "The outputs have positions, and uncertain inputs are not carried to them. Pass "
                "via=lw.MonteCarlo(draws=50), which draws the inputs too."
            )

    def width(self, outputs: int) -> int:
        """Returns k, or C."""
        return outputs if self.outputs is None else Selection(self.outputs, outputs).columns

    def _of_draws(
        self, tangent: Tangent, covariance: Covariance, values: Any, spreads: Any, joint: bool
    ) -> LinearDraws | LatentAtPositions:
        """Returns the Gaussian of draws; refuses inputs and networks that cannot have it."""
        if spreads:
            raise LapwingError(
                f"{self} does not take lw.Uncertain inputs. Write via=lw.Linearized(), or via=lw.MonteCarlo(draws=50)."
            )
        assert self.draws is not None
        latent = latent_of_draws(tangent, covariance, values, self.draws, self.seed, joint)
        if latent is None:
            raise LapwingError(
                f"{self} needs products of the Jacobian with weights, and {type(tangent.model).__name__} calls an "
                "operation that has neither forward mode nor a second derivative. Write via=lw.MonteCarlo(draws=50), "
                "or via=lw.Linearized() for the exact covariance."
            )
        return latent


MANY_OUTPUTS = 1000
"""With more outputs than these the default way draws, unless the last layer alone is treated."""

DEFAULT_DRAWS = 64


@dataclass(frozen=True)
class DefaultWay(Way):
    """`Linearized()`, or `Linearized(draws=64)` for more than 1 000 outputs of a network treated beyond its last layer.

    Inputs that are uncertain, and networks that do not allow draws, get the exact covariance in any case.
    """

    def latent(self, tangent: Tangent, covariance: Covariance, inputs: Any, joint: bool) -> AnyLatent:
        """Returns the latent by the way that suits the number of outputs."""
        outputs = tangent.outputs * (1 if tangent.positions is None else tangent.positions.count)
        if outputs > MANY_OUTPUTS and not tangent.treats_output_alone and not separate(inputs)[1]:
            latent = latent_of_draws(tangent, covariance, inputs, DEFAULT_DRAWS, 0, joint)
            if latent is not None:
                _say_draws(outputs, tangent.positions is None)
                return latent
        return Linearized().latent(tangent, covariance, inputs, joint)


@cache
def _say_draws(outputs: int, exact: bool) -> None:
    """Says once what the default way does for so many outputs, and where the exact one is to be had."""
    log.info(
        "%d outputs: predictions take %d draws of the weights, so that variances have an error of %.0f %%.%s",
        outputs, DEFAULT_DRAWS, 100 * (2 / DEFAULT_DRAWS) ** 0.5,
        f" via=lw.Linearized() gives the exact ones, by {outputs} backward passes." if exact else "",
    )  # fmt: skip


class Selection:
    """Which outputs a prediction is of, and their cotangents: one-hot columns (B, C, k).

    Args:
        outputs: k for those of largest mean, or a list.
        every: C.

    Attributes:
        columns: k, at most C.
        listed: the list, or None.
    """

    def __init__(self, outputs: int | Sequence[int], every: int) -> None:
        self.listed = None if isinstance(outputs, int) else tuple(outputs)
        self.columns = min(outputs, every) if isinstance(outputs, int) else len(outputs)
        if self.listed is not None and max(self.listed) >= every:
            raise LapwingError(
                f"There is no output {max(self.listed)}: the network has {every}, counted from 0. Write "
                f"lw.Linearized(outputs=[{every - 1}]) for the last one."
            )

    def of(self, means: Tensor) -> Tensor:
        """Returns the outputs (B, k), largest first where they are not listed, at means (B, C)."""
        if self.listed is None:
            means = means.detach()
            means = means.float() if means.dtype.itemsize < 4 else means  # as in a record: ties keep their order
            return means.topk(self.columns, -1).indices
        return torch.tensor(self.listed, device=means.device).expand(len(means), -1)

    def __call__(self, means: Tensor) -> Tensor:
        """Returns the cotangents."""
        hot = means.new_zeros(*means.shape, self.columns)
        return hot.scatter_(1, self.of(means).unsqueeze(1), 1.0)


def _selected(mean: Tensor, terms: tuple[Term, ...], selection: Selection, late: bool) -> SelectedLatent:
    """Returns the latent of the selected outputs, of means (B, C) and terms of these, or of all where it is `late`."""
    outputs = selection.of(mean)
    if late:
        terms = tuple(term.selected(outputs) for term in terms)
    return SelectedLatent(mean.gather(1, outputs), multiplied_out(terms), outputs=outputs, every_mean=mean)


def _of_weights(
    tangent: Tangent, covariance: Covariance, inputs: Any, joint: bool, selection: Selection | None = None
) -> Latent | JointLatent:
    """Returns `N(f(x, θ̂), J Σ Jᵀ)` at certain inputs."""
    dtype, checked = covariance.record_dtype, tangent.check(inputs)
    if joint:
        return _joint(tangent, covariance, checked, dtype, selection)
    # the layer that gives the outputs has all of them at once in its eigenbasis
    late = selection is not None and tangent.treats_output_alone and covariance.keeps_outputs
    cotangents = None if late else selection
    rows = tangent.outputs if cotangents is None else cotangents.columns

    def part(record: Record) -> Latent:
        terms = tuple(term.to(record.outputs) for term in covariance.output_covariance(record))
        if selection is None:
            return Latent(record.outputs, terms)
        return _selected(record.outputs, terms, selection, late)

    scratch = rows * covariance.scratch_per_row
    records = tangent.records(checked, cotangents, dtype=dtype, scratch_per_sample=scratch)
    parts = (part(record) for _, record in records)
    return Latent.gather(parts, checked.samples)


def _joint(
    tangent: Tangent, covariance: Covariance, inputs: Checked, dtype: torch.dtype | None, selection: Selection | None
) -> JointLatent:
    """Returns `N(f(x, θ̂), J Σ Jᵀ)` of all inputs jointly, for pairs of chunks that fit the memory budget."""
    count, outputs = inputs.samples, tangent.outputs if selection is None else selection.columns
    block = tangent.memory // (8 * tangent.dtype.itemsize)  # covariances of a pair, beside sums of a few such
    length = tangent.chunk_length(selection, dtype=dtype, scratch_per_sample=outputs * covariance.scratch_per_row) // 2
    length = max(1, min(length, isqrt(block) // outputs))

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
        for theirs, others in requests[: i + 1]:
            other = record if theirs == mine else tangent.record(others, selection, dtype=dtype)
            part = covariance.joint_output_covariance(record, other).to(matrix)
            matrix[mine, :, theirs] = part
            if other is not record:
                matrix[theirs, :, mine] = part.permute(2, 3, 0, 1)
    return JointLatent(torch.cat(means), matrix)
