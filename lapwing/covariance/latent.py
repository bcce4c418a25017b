"""Latents: the distribution of the network's outputs, which a link turns into a distribution of y.

There are four kinds: a Gaussian for each input (`Latent`), one Gaussian over all inputs (`JointLatent`), a Gaussian
with the covariance of draws (`LinearDraws`), and outputs under draws of the weights (`LatentDraws`). `SelectedLatent`
is a `Latent` of some of the outputs. All have the same methods. `scaled` multiplies the covariance by a factor >= 0,
or outputs by the roots of C factors.
`with_checks` gives the latent to the user: moments that are not finite raise a LapwingError. `draws` is None except in
`LatentDraws`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from ..errors import LapwingError
from ..linalg import check_draws, doubled, is_finite, nonnegative, possible, seeded, total
from ..network.entry import full_precision
from .terms import (
    DenseTerm,
    EigenTerm,
    MarginalTerm,
    SelectedTerm,
    Terms,
    concatenate,
    multiplied_out,
    standard_deviation,
)

Factor = float | tuple[float, ...]
"""A factor of a covariance, or one for each output."""


class BaseLatent:
    """A latent that prints as its kind and shape. `has_positions(latent)` and its siblings say what else it has."""

    if TYPE_CHECKING:  # what some latents have, for the code of users who asked for it

        @property
        def standard_error(self) -> Tensor: ...

        @property
        def outputs(self) -> Tensor: ...

    @property
    def std(self: Any) -> Tensor:
        """Marginal standard deviations, in the shape of the mean."""
        return standard_deviation(self.variance)

    @property
    def own_covariance(self: Any) -> Tensor:
        """Covariances of the outputs of each input (B, C, C), without covariances between inputs."""
        return self.covariance.diagonal(dim1=0, dim2=2).movedim(-1, 0) if self.joint else self.covariance

    def covariance_times(self: Any, vectors: Tensor) -> Tensor:
        """Returns the covariance of each input's outputs times its K vectors (B, K, C), without other inputs."""
        return torch.bmm(vectors, self.own_covariance)

    def tempered(self: Any, temperature: float) -> Any:
        """Returns the latent with its mean divided by a temperature and the same covariance."""
        return replace(self, mean=self.mean / temperature)

    def mapped(self: Any, matrix: Tensor, shift: Tensor) -> Any:
        """Returns the latent of `M f + b` for M (C, C) and b (C,); logits of impossible classes stay."""
        raise LapwingError(
            f"Matrix scaling mixes all logits, and a {type(self).__name__} holds only some. Leave outputs= out of "
            "lw.Linearized(outputs=...)."
        )

    def compact(self: Any, covariances: bool) -> Any:
        """Returns a detached float64 copy; a `Latent` keeps its covariances, or only its variances."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: doubled(value.detach()) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def without_wide_factors(self: Any) -> Any:
        """Returns the latent with wide factors multiplied out. Most latents have none."""
        return self

    def __repr__(self: Any) -> str:
        return f"{type(self).__name__}(mean and variance {tuple(self.mean.shape)})"


def affine_logits(values: Tensor, matrix: Tensor, shift: Tensor) -> Tensor:
    """Returns `M f + b` for outputs f (..., C). Logits of impossible classes stay, and enter no other logit."""
    mask = possible(values)
    return torch.where(mask, torch.where(mask, values, 0.0) @ matrix.T + shift, values)


@dataclass(frozen=True, repr=False)
class Latent(BaseLatent):
    """`f(x) ~ N(mean, Σ terms)` independently for each of B inputs: mean (B, C), terms (B, C, C)."""

    mean: Tensor  # the network's outputs
    terms: Terms  # covariances whose sum is the covariance
    checked: bool = False  # whether moments that are not finite raise an error; tuning skips such candidates
    joint = False
    draws = None
    _row_names: ClassVar[tuple[str, ...]] = ("mean",)

    @cached_property
    @full_precision
    def variance(self) -> Tensor:
        """Marginal variances (B, C), computed without the covariance matrix."""
        return check_finite(nonnegative(total(term.variance() for term in self.terms)), self.checked)

    @cached_property
    @full_precision
    def centred_variance(self) -> Tensor:
        """Variances (B, C) of the outputs minus their average, the only part a softmax depends on."""
        return check_finite(nonnegative(total(term.centred_variance() for term in self.terms)), self.checked)

    @cached_property
    @full_precision
    def covariance(self) -> Tensor:
        """Covariances of the outputs of each input (B, C, C), computed at the first access."""
        return check_finite(total(term.dense() for term in self.terms), self.checked)

    @full_precision
    def covariance_times(self, vectors: Tensor) -> Tensor:
        return total(term.times(vectors) for term in self.terms)

    @full_precision
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws outputs (n, B, C), independently for each input. `generator=None` means seed 0."""
        generator = generator_for(n, generator, self.mean)
        moved = total(term.sample(n, generator) for term in self.without_wide_factors().terms)
        return check_finite(self.mean + moved, self.checked)

    def plus(self, covariance: Tensor) -> Latent:
        """Returns the latent with another covariance (B, C, C) added for each input."""
        return replace(self, terms=(*self.terms, DenseTerm(covariance)))

    def scaled(self, factor: Factor) -> Latent:
        if isinstance(factor, tuple):
            root = self.mean.new_tensor(factor).sqrt()
            return replace(self, terms=tuple(term.stretched(root) for term in self.terms))
        return replace(self, terms=tuple(term.scaled(factor) for term in self.terms))

    def mapped(self, matrix: Tensor, shift: Tensor) -> Latent:
        term = DenseTerm(matrix @ self.covariance @ matrix.T)
        return replace(self, mean=affine_logits(self.mean, matrix, shift), terms=(term,))

    def compact(self, covariances: bool) -> Latent:
        kind, values = (DenseTerm, self.covariance) if covariances else (MarginalTerm, self.variance)
        mean, values, centred = (doubled(part.detach()) for part in (self.mean, values, self.centred_variance))
        return replace(self, mean=mean, terms=(kind(values, centred),))

    def widened(self, variances: Tensor) -> Latent:
        """Returns the latent with variances (C,) added to each output."""
        return replace(self, terms=(DenseTerm(self.covariance + torch.diag_embed(variances)),))

    def without_wide_factors(self) -> Latent:
        return replace(self, terms=multiplied_out(self.terms, times=8))  # wider factors than 8 C need more memory

    def with_checks(self) -> Latent:
        return replace(self, checked=True)

    def without_impossible(self) -> Latent:
        """Returns the latent in which outputs of impossible classes follow the average of the other outputs."""
        mask = possible(self.mean)
        if mask.all():
            return self
        mask = mask.to(self.mean)
        share = mask / mask.sum(-1, keepdim=True)
        move = torch.diag_embed(mask) + (1.0 - mask).unsqueeze(2) * share.unsqueeze(1)  # (B, C, C)
        return replace(self, terms=(DenseTerm(move @ self.covariance @ move.mT),))

    @staticmethod
    def concatenate(parts: Sequence[Latent]) -> Latent:
        """Joins the latents of consecutive batches."""
        first: Any = parts[0]
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in first._row_names}
        return replace(first, terms=concatenate([part.terms for part in parts]), **joined)

    @staticmethod
    def gather(parts: Iterator[Latent], samples: int) -> Latent:
        """Joins the latents of consecutive chunks. Each chunk is copied into tensors for all samples when it comes."""
        whole: Latent | None = None
        start = 0
        for part in parts:
            count = len(part.mean)
            if count == samples:
                return part
            part = part.without_wide_factors()
            if whole is None and not any(rows.requires_grad for rows in part._rows):
                whole = part._with_rows([rows.new_empty(samples, *rows.shape[1:]) for rows in part._rows])
            if whole is None or [term.layout for term in whole.terms] != [term.layout for term in part.terms]:
                done = [] if whole is None else [whole._with_rows([rows[:start] for rows in whole._rows])]
                remaining = (later.without_wide_factors() for later in parts)
                return Latent.concatenate([*done, part, *remaining])  # gradients, or texts of different lengths
            for all_rows, rows in zip(whole._rows, part._rows, strict=True):
                all_rows[start : start + count] = rows
            start += count
            del part, rows  # freed before the next chunk is computed
        assert whole is not None
        return whole

    def taken(self, rows: Tensor) -> Latent:
        """Returns the latent of the samples at these indices."""
        return self._with_rows([values[rows] for values in self._rows])

    @property
    def _rows(self) -> list[Tensor]:
        """All tensors with one row per sample."""
        own = [getattr(self, name) for name in self._row_names]
        return own + [rows for term in self.terms for rows in term.rows]

    def _with_rows(self, rows: Sequence[Tensor]) -> Latent:
        """Returns the latent with other tensors instead of `_rows`."""
        remaining, whole = iter(rows), cast("Any", self)
        named = {name: next(remaining) for name in self._row_names}
        terms = tuple(term.with_rows(*[next(remaining) for _ in term.rows]) for term in self.terms)
        return replace(whole, terms=terms, **named)


def without_spread(outputs: Tensor) -> Latent:
    """Returns the latent of outputs (n, C) that are certain."""
    return Latent(outputs, (EigenTerm(None, torch.zeros_like(outputs)),))


@dataclass(frozen=True, repr=False)
class SelectedLatent(Latent):
    """The latent of k of the C outputs of each input: `mean` (B, k) and terms (B, k, k)."""

    outputs: Tensor = field(kw_only=True)  # indices of the selected outputs, int64 (B, k)
    every_mean: Tensor = field(kw_only=True)  # means of all outputs, (B, C)
    _row_names: ClassVar[tuple[str, ...]] = ("mean", "outputs", "every_mean")

    def tempered(self, temperature: float) -> SelectedLatent:
        return replace(self, mean=self.mean / temperature, every_mean=self.every_mean / temperature)

    mapped = BaseLatent.mapped

    def of_classes(self) -> Latent:
        """Returns a latent of all C logits (B, C), for links to class probabilities. Raises if k is 1.

        The k logits keep their covariance relative to their average. The other C - k logits keep their means, and their
        variance is the average variance of the k.
        """
        if self.mean.shape[1] < 2:
            raise LapwingError(
                "A classifier's probabilities depend on differences between outputs, and one output is selected. Write "
                "via=lw.Linearized(outputs=10)."
            )
        mask = possible(self.every_mean)
        chosen = mask.gather(1, self.outputs)  # the others cannot be, and have no variance
        classes, count = (part.sum(-1, keepdim=True).clamp_min(2).to(self.mean) for part in (mask, chosen))
        share = self.mean.shape[1] / count
        gaps = self.centred_variance * (count / (count - 1) * (classes - 1) / classes).square()
        plain, centred = (
            (part.mean(-1, keepdim=True) * share * mask).scatter(1, self.outputs, part)
            for part in (self.variance, gaps)
        )
        rows = self.covariance - self.covariance.mean(-1, keepdim=True)
        term = SelectedTerm(plain, centred, self.outputs, rows - rows.mean(-2, keepdim=True))
        return Latent(self.every_mean, (term,), self.checked)


@dataclass(frozen=True, repr=False)
class JointLatent(BaseLatent):
    """`f(x_1..B) ~ N(mean, covariance)` with covariances between inputs: mean (B, C), covariance (B, C, B, C)."""

    mean: Tensor
    covariance: Tensor
    joint = True
    draws = None

    @property
    def variance(self) -> Tensor:
        """Marginal variances (B, C)."""
        return nonnegative(self.own_covariance.diagonal(dim1=-2, dim2=-1))

    @property
    def centred_variance(self) -> Tensor:
        """Variances (B, C) of the outputs minus their average, the only part a softmax depends on."""
        return nonnegative(DenseTerm(self.own_covariance).centred_variance())

    @full_precision
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws outputs (n, B, C), jointly across inputs and outputs. `generator=None` means seed 0."""
        size = self.mean.numel()
        term = DenseTerm(self.covariance.reshape(1, size, size))
        draws = term.sample(n, generator_for(n, generator, self.mean))
        return self.mean + draws.reshape(n, *self.mean.shape)

    def plus(self, covariance: Tensor) -> JointLatent:
        eye = torch.eye(len(self.mean), dtype=self.mean.dtype, device=self.mean.device)
        return JointLatent(self.mean, self.covariance + torch.einsum("bcd,be->bced", covariance, eye))

    def mapped(self, matrix: Tensor, shift: Tensor) -> JointLatent:
        covariance = torch.einsum("ij,bjdk,lk->bidl", matrix, self.covariance, matrix)
        return JointLatent(affine_logits(self.mean, matrix, shift), covariance)

    def scaled(self, factor: Factor) -> JointLatent:
        if isinstance(factor, tuple):
            root = self.mean.new_tensor(factor).sqrt()
            return JointLatent(self.mean, self.covariance * root[:, None, None] * root)
        return JointLatent(self.mean, self.covariance * factor)

    def with_checks(self) -> JointLatent:
        check_finite(self.covariance)
        return self


def check_finite(values: Tensor, checked: bool = True) -> Tensor:
    """Returns variances, covariances or draws of the outputs. If `checked`, raises unless they are finite."""
    if not checked or is_finite(values):
        return values
    raise LapwingError(
        f"The latent {tuple(values.shape)} is not finite: it exceeds the range of {values.dtype}. Scale the inputs and "
        "the targets to about 1, raise the prior precision, or fit the network in float64 with model.double()."
    )


def generator_for(n: int, generator: torch.Generator | None, mean: Tensor) -> torch.Generator:
    """Returns the generator for n draws of outputs. Raises a LapwingError if the draws do not fit into memory."""
    check_draws("sample", "n", n, mean.numel())
    return seeded(generator, mean.device)
