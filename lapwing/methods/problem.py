"""The inputs of a method: the network, the likelihood, the prior, and the number of samples."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import LapwingError
from ..likelihoods import Likelihood
from ..linalg import double_device, generator_on
from ..network.positions import EXACT_OUTPUTS
from ..tangent import Cotangents, FisherParts, Tangent
from .prior import Prior
from .state import DataSummary

log = logging.getLogger("lapwing")

EXACT_FISHER_OUTPUTS = EXACT_OUTPUTS  # maximum number of outputs with an exact Λ; above, draws approximate it
POSITION_DRAWS = 8  # columns that are drawn for an input whose outputs have positions; each has noise at all positions


@dataclass(frozen=True)
class Scale:
    """Factors of the likelihood and of the curvature, which are sums over samples at unit noise.

    The covariance is `(s G + Δ)⁻¹` with `s = of_curvature`, and the log joint is `k log p(y|θ) + log p(θ)` with
    `k = of_likelihood`.
    """

    samples: float  # n, number of samples in the sums; 1 for a mean over samples
    data_size: float  # N, number of samples of the whole data set; for `SubsetOfData` n N/n_loader
    temperature: float  # τ
    noise_variance: Any = None  # σ², a number or a scalar tensor; None counts as 1: there is no σ², or it is not known

    @property
    def of_likelihood(self) -> float:
        """`k = N/(n τ)`, the factor of the log likelihood: the weight of each of the n samples."""
        return self.data_size / self.samples / self.temperature

    @property
    def of_curvature(self) -> Any:
        """`s = N/(n σ² τ)`, the factor of the curvature at unit noise; a tensor if σ² is one."""
        return self.of_likelihood if self.noise_variance is None else self.of_likelihood / self.noise_variance

    @property
    def effective_samples(self) -> float:
        """`N/τ`, how many samples the log likelihood counts, whatever their weights."""
        return self.data_size / self.temperature


def _root(likelihood: Likelihood, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Returns the likelihood's root (B, C, R) at outputs (B, C), or with a generator one random column (B, C, 1)."""
    if generator is None:
        root, name, shape = likelihood.fisher_root(outputs), "fisher_root", "(B, C, R)"
    else:
        drawn = likelihood.sampled_fisher_root(outputs, generator_on(outputs.device, generator))
        root, name, shape = drawn, "sampled_fisher_root", "(B, C, 1)"
    if root.ndim != 3 or root.shape[:2] != outputs.shape:
        raise LapwingError(
            f"{name} of {type(likelihood).__name__} returned {tuple(root.shape)} and must return {shape}, with "
            f"(B, C) = {tuple(outputs.shape)}. Use torch.diag_embed for a diagonal root."
        )
    return root


class FisherRoot(Cotangents):
    """Cotangents (B, C, R), `root rootᵀ = Λ` at the outputs: exact, or drawn if `sampled` or if there are many outputs.

    For outputs (B, T C), Λ is block-diagonal over the T positions. A drawn root has `draws` columns of independent
    noise at all positions, divided by `√draws`, so `E[root rootᵀ] = Λ`: `draws` backward passes, not T C. `positions`
    is T on the first batch, or 1 if each is a sample. `columns` is R at T positions; `rank` limits the rank of a Λ.
    """

    columns: int
    skips_uncounted = True

    def __init__(
        self,
        likelihood: Likelihood,
        outputs: int,
        generator: torch.Generator,
        positions: int = 1,
        sampled: bool = False,
        columns: int | None = None,
    ) -> None:
        self._likelihood, self.generator, self._outputs, self._positions = likelihood, generator, outputs, positions
        self.sampled, self.exact = sampled, not sampled and outputs * positions <= EXACT_FISHER_OUTPUTS
        self.draws = 1 if positions == 1 else POSITION_DRAWS
        if columns is None:
            zero = torch.zeros(1, outputs, device=generator.device)
            columns = positions * _root(likelihood, zero).shape[-1] if self.exact else self.draws
        self.columns = self.rank = columns
        self._logged = sampled  # as asked for

    @classmethod
    def of(cls, tangent: Tangent, likelihood: Likelihood, seed: int, columns: int | None = None) -> FisherRoot:
        """Returns the root for a network, with a generator of its own; None asks the likelihood for `columns`."""
        generator = torch.Generator(tangent.device).manual_seed(seed % 2**63)
        positions = 1 if tangent.positions.rows_are_positions else tangent.positions.count
        return cls(likelihood, tangent.outputs, generator, positions, columns=columns)

    def drawn(self, generator: torch.Generator | None = None) -> FisherRoot:
        """Returns a root that is drawn for any number of outputs, with the same generator or another one."""
        generator = generator or self.generator
        return FisherRoot(self._likelihood, self._outputs, generator, self._positions, sampled=True)

    def __call__(self, outputs: Tensor) -> Tensor:
        """Returns the root at outputs (B, C), or (B, T C)."""
        count, drawn = outputs.shape[1] // self._outputs, self.is_drawn_at(outputs)
        if drawn and not self._logged:
            where = f" at {count} positions" if count > 1 else ""
            times = "one draw" if self.draws == 1 else f"{self.draws} draws"
            log.info("%d outputs%s: the Fisher information is sampled, %s per input", outputs.shape[1], where, times)
            self._logged = True
        generator = self.generator if drawn else None
        if count == 1:
            return _root(self._likelihood, outputs, generator)
        return self._at_positions(outputs, generator)

    def _at_positions(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Returns the root at outputs (B, T C): block-diagonal over T positions, or drawn with a generator."""
        count, drawn = outputs.shape[1] // self._outputs, generator is not None
        rows, shape = outputs.reshape(-1, self._outputs), (len(outputs), count, self._outputs)
        if drawn:
            draws = [_root(self._likelihood, rows, generator) for _ in range(self.draws)]
            return (torch.cat(draws, -1) / self.draws**0.5).unflatten(0, shape[:2]).flatten(1, 2)
        each = _root(self._likelihood, rows).unflatten(0, shape[:2])  # (B, T, C, R)
        whole = each.new_zeros(*shape, count, each.shape[-1])
        places = torch.arange(count, device=each.device)
        whole[:, places, :, places] = each.transpose(0, 1)
        return whole.flatten(3).flatten(1, 2)

    def is_drawn_at(self, outputs: Tensor) -> bool:
        """Whether the root at outputs (B, C), or (B, T C), is drawn."""
        return self.sampled or outputs.shape[1] > EXACT_FISHER_OUTPUTS


class FisherByParts(Cotangents):
    """Λ as a diagonal plus a second part, for sums over a layer that gives the outputs; exact for any C."""

    skips_uncounted = True
    columns = 1  # per sample, in estimates of memory: the gradients of single outputs are not formed

    def __init__(self, likelihood: Likelihood, outputs: int) -> None:
        self._likelihood, self.rank = likelihood, outputs

    def __call__(self, outputs: Tensor) -> FisherParts:
        parts = self._likelihood.fisher_parts(outputs)
        assert parts is not None
        return FisherParts(*parts)


@dataclass(frozen=True)
class Seen:
    """What the passes have read so far."""

    count: int  # n; if n is unknown and N is given, the number of samples read so far
    summary: DataSummary  # likelihood statistics of the samples that were read


@dataclass(frozen=True)
class Problem:
    """The inputs of a method: plain data."""

    tangent: Tangent
    likelihood: Likelihood  # its noise variance may still be None
    root: FisherRoot  # cotangents whose outer products give Λ at unit noise
    prior: Prior  # δ (ones if it is to be tuned) and μ0
    traces_wanted: bool  # whether the tuning reads the lower bound of the evidence
    seed: int
    temperature: float = 1.0  # τ
    data_size: int | None = None  # N if the user gave it
    read: Seen | None = None  # what the passes have read, set by `with_seen`

    @cached_property
    def summed_root(self) -> FisherRoot | FisherByParts:
        """The root for sums over rows; Λ by its parts if only the layer that gives the outputs is treated."""
        outputs, in_parts = self.tangent.outputs, self.tangent.treats_output_alone and not self.root.sampled
        if in_parts and self.likelihood.fisher_parts(self.zeros(1, outputs)) is not None:
            return FisherByParts(self.likelihood, outputs)
        return self.root

    def with_drawn_root(self) -> Problem:
        return replace(self, root=self.root.drawn())

    @property
    def precision(self) -> Tensor:
        """Prior precision (n_blocks,) float64: the user's, or ones to be tuned."""
        return self.prior.precision

    @property
    def scale(self) -> Scale:
        """A provisional scale, n = N = 1, and σ² = 1 if it is open; `Posterior.scale` replaces it later."""
        return Scale(1, 1, self.temperature, self.likelihood.noise_variance)

    def noise_variance(self) -> float | None:
        """Returns σ², or the mean squared residual of the samples that were read if σ² is to be tuned."""
        if self.likelihood.needs_noise:
            return self.likelihood.residual_variance(self.seen.summary.statistics)
        return self.likelihood.noise_variance

    @property
    def seen(self) -> Seen:
        if self.read is None:
            raise TypeError("The samples that were read are not known: write problem = yield from with_seen(problem).")
        return self.read

    def scale_of_means(self) -> Scale:
        """Returns the scale of means over samples (n = 1), at unit noise."""
        return Scale(1, self.data_size or self.seen.count, self.temperature)

    def scale_at(self, noise_variance: float | None) -> Scale:
        """Returns the scale of sums over all samples that were read."""
        return replace(self.scale_of_means(), samples=self.seen.summary.samples, noise_variance=noise_variance)

    def curvature_scale(self) -> float:
        """Returns s at the user's σ², or at the mean squared residual of the samples that were read."""
        return self.scale_at(self.noise_variance()).of_curvature

    def generator(self) -> torch.Generator:
        """Returns a fresh CPU generator with the fit's seed."""
        return torch.Generator().manual_seed(self.seed)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns zeros in the accumulation dtype, on the device of the weights, or on the device for float64."""
        device = double_device(self.tangent.device) if dtype == torch.float64 else self.tangent.device
        return torch.zeros(shape, dtype=dtype or self.tangent.dtype, device=device)

    def block_zeros(self, *shape: int, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Returns zeros (*shape, P_block) for each block, see `zeros`."""
        return {block.name: self.zeros(*shape, block.size, dtype=dtype) for block in self.tangent.blocks}
