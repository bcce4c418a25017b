"""Links: pure functions from the latent Gaussian over the outputs to class probabilities, in log space.

Probit and the Laplace bridge read only the mean and variances of a latent, so no (B, C, C) covariance is built.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, reduce
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..covariance import AnyLatent
from ..linalg import at_least_float32, cholesky, doubled, possible, seeded
from ..options import Options, at_least, integer, option
from . import classwise, quadrature
from .mixtures import NORMAL_NODES, normal_nodes
from .quadrature import LEAST_VARIANCE

_DRAWN_NUMBERS = 2**23  # latent values in memory at once while averaging over draws: 64 MiB in float64

MAX_DRAWS = 10**9
"""Maximum of `SampledLink(draws=...)`."""


def draw_chunks(latent: AnyLatent, count: int, generator: torch.Generator | None) -> Iterator[Tensor]:
    """Yields latent draws of at least float32 in chunks (s, B, C), with `count` draws in total, or all weight draws."""
    step = max(1, _DRAWN_NUMBERS // max(1, latent.mean.numel()))
    if latent.draws is not None:
        yield from (at_least_float32(chunk) for chunk in latent.draws.split(max(1, step // 8)))
        return
    generator = seeded(generator, latent.mean.device)
    for start in range(0, count, step):
        yield at_least_float32(latent.sample(min(step, count - start), generator))


def latent_draws(latent: AnyLatent, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Returns `draw_chunks` as one tensor (S, B, C)."""
    return torch.cat(list(draw_chunks(latent, count, generator)))


DENSE_OUTPUTS = 32
"""Maximum number of outputs whose covariance matrices `latent_points` decomposes."""


def latent_points(latent: AnyLatent, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Returns equally likely outputs (S, B, C) with the exact mean of a Gaussian latent, or all weight draws.

    One or two outputs have `count` points of a lattice, mapped by the inverse of Φ, with the exact covariance. More
    outputs have pairs `m ± L z` of draws z. Each input has the same z in another order. Joint latents, and more
    than `DENSE_OUTPUTS` outputs, have pairs of their own draws.
    """
    mean, outputs = at_least_float32(latent.mean), latent.mean.shape[-1]
    if latent.draws is not None or latent.joint or outputs > DENSE_OUTPUTS:
        draws = latent_draws(latent, count // 2, generator)
        return draws if latent.draws is not None else torch.cat([draws, 2.0 * mean - draws])
    generator = seeded(generator, mean.device)
    if outputs > 2:
        z = torch.randn(outputs, count // 2, generator=generator, device=mean.device, dtype=mean.dtype)
        z, count = torch.cat([z, -z], 1), count // 2 * 2
    else:
        # 1. points of a lattice, x_s = (s + 1/2)/S and g x_s mod 1, and z = Φ⁻¹ of them (C, S), symmetric around 0
        steps = doubled(torch.tensor([1.0, 2 * int(0.309 * count) + 1]))[:outputs, None] / count  # to the golden ratio
        z = torch.special.ndtri((steps * (torch.arange(count) + 0.5)).frac())
        # 2. z with mean 0 and z zᵀ/S = I, by the Cholesky factor of z zᵀ/S
        z = torch.linalg.solve_triangular(cholesky(z @ z.T / count), z, upper=False).to(mean)  # of unit covariance
    # 3. another order of the points for each input (B, S)
    order = torch.rand(len(mean), count, generator=generator, device=mean.device).argsort(1)
    # 4. m + L z (S, B, C) with Σ = L Lᵀ
    covariance = doubled(latent.covariance)
    root = cholesky(covariance + LEAST_VARIANCE * torch.eye(outputs).to(covariance)).to(mean)
    return mean + torch.einsum("bcd,dbs->sbc", root, z[:, order])


def latent_nodes(latent: AnyLatent, count: int = NORMAL_NODES) -> tuple[Tensor, Tensor]:
    """Returns outputs (S, B, C) and their weights (S, 1, 1) in float64: weight draws, or `count` nodes of an output."""
    if latent.draws is not None:
        draws = doubled(latent.draws)
        return draws, draws.new_full((len(draws), 1, 1), 1.0 / len(draws))
    mean, variance = doubled(latent.mean), doubled(latent.variance)
    z, weights = normal_nodes(mean, count)
    return mean + (variance + LEAST_VARIANCE).sqrt() * z, weights


def probit_logits(mean: Tensor, variance: Tensor) -> Tensor:
    """Returns `m / sqrt(1 + π/8 v)`: MacKay's probit approximation."""
    return mean * torch.rsqrt(1.0 + (math.pi / 8.0) * variance)


class Link(Options):
    """A map from the latent to the distribution of y; subclasses are frozen dataclasses of options."""

    accepts_draws: ClassVar[bool] = False
    """Whether the link accepts network outputs under weight draws, which are not Gaussian."""
    reads_covariance: ClassVar[bool] = True
    """Whether the link needs more than the mean and variances. See also `Likelihood.reads_covariance`."""
    closed_form: ClassVar[bool] = False
    """Whether tensor operations on means and variances give `Prediction.summary`, as `lw.deploy` needs."""

    @classmethod
    @cache
    def default(cls) -> Link:
        """Returns the link with its default options, the same object for all predictions."""
        return cls()


class ClassLink(Link, ABC):
    """A link that returns class probabilities."""

    @abstractmethod
    def log_probs(self, latent: AnyLatent, generator: torch.Generator | None = None) -> Tensor:
        """Returns log probabilities (B, C)."""


class BinaryLink(Link, ABC):
    """A link that returns the probability of yes for each output separately."""

    @abstractmethod
    def log_odds(self, latent: AnyLatent, generator: torch.Generator | None = None) -> Tensor:
        """Returns `log p - log(1 - p)`, (B, C)."""


@dataclass(frozen=True)
class Probit(ClassLink, BinaryLink):
    """Probit link in closed form, with one scale for each input: time and memory O(B C) in addition to the variances.

    `softmax(f / sqrt(1 + π/8 v̄))`, where v̄ is the mean over classes of `v_c = Var[f_c - mean_{k≠c} f_k]`. Because the
    scale is common to all outputs, the most probable class does not change. The softmax does not depend on a
    shift of all outputs, and the data do not determine this shift, so its prior variance is left out. For two classes
    this is the exact binary probit. For Bernoulli outputs it is `sigmoid(f / sqrt(1 + π/8 v))`, for every `scale`.

    Args:
        scale: the variance that scales the logits.

            - "mean": v̄.
            - "weighted": `Σ_c p_c v_c` with `p = softmax(f)`, which also keeps the most probable class.
            - "class": v_c, a different one for each of the centred logits `f - mean(f)`. It can change the classes.
            - "marginal": Σ_cc, the textbook form. It includes the variance of the shift, and can change the classes.

    Example:
        >>> import torch, lapwing as lw
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> model = torch.nn.Linear(4, 3).eval()
        >>> posterior = lw.fit(model, [(x, y)], prior_precision=1.0)
        >>> bool((posterior.predict(x, link=lw.Probit()).classes == model(x).argmax(1)).all())
        True
    """

    scale: Literal["mean", "weighted", "class", "marginal"] = "mean"
    reads_covariance: ClassVar[bool] = False
    closed_form: ClassVar[bool] = True

    def log_probs(self, latent: AnyLatent, generator: torch.Generator | None = None) -> Tensor:
        mean = at_least_float32(latent.mean)
        if self.scale == "marginal":
            return torch.log_softmax(probit_logits(mean, at_least_float32(latent.variance)), -1)
        # 1. Var[f_c - mean f] (B, C), over the possible classes; then one for each class, or one for each input (B, 1)
        mask = possible(mean)  # impossible classes have no variance
        classes = mask.sum(-1, keepdim=True, dtype=mean.dtype)
        variance = at_least_float32(latent.centred_variance)
        if self.scale == "class":
            mean = mean - torch.where(mask, mean, 0.0).sum(-1, keepdim=True) / classes
        elif self.scale == "weighted":
            variance = (mean.softmax(-1) * variance).sum(-1, keepdim=True)
        else:
            variance = variance.mean(-1, keepdim=True) * mean.shape[-1] / classes
        # 2. v_c = (C/(C-1))² Var[f_c - mean f], the variance of f_c - mean_{k≠c} f_k
        variance = variance * (classes / (classes - 1).clamp_min(1)).square()
        return torch.log_softmax(probit_logits(mean, variance), -1)

    def log_odds(self, latent: AnyLatent, generator: torch.Generator | None = None) -> Tensor:
        return probit_logits(at_least_float32(latent.mean), at_least_float32(latent.variance))


@dataclass(frozen=True)
class LaplaceBridge(ClassLink):
    """Laplace bridge: the mean of a Dirichlet distribution in closed form, with time and memory O(B C).

    `α_c = (1 - 2/C + e^{μ_c} / C² Σ_l e^{-μ_l}) / V_c` (Hobbhahn, Kristiadi and Hennig 2022, after MacKay 1998). μ and
    V are the mean and variance of the logits minus their average, because the bridge is defined on vectors that sum to
    0, and the softmax depends on nothing else. With this V the bridge is an exact inverse: `m = log α` and `v = 1/α` of
    a Dirichlet give α again. (The authors *condition* on a sum of 0 instead. This changes the distribution of the
    softmax unless all v are equal, and its error in the mean is several times larger.)

    The bridge reads the variances of the centred logits, not their correlations. It is accurate if the variances are
    similar to a Dirichlet's with these probabilities. It is too flat for confident outputs with very small or
    very large variances; prefer `Probit` or `SampledLink` for these.

    Example:
        >>> import torch, lapwing as lw
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> posterior = lw.fit(torch.nn.Linear(4, 3).eval(), [(x, y)], prior_precision=1.0)
        >>> concentration = lw.LaplaceBridge().concentration(posterior.latent(x))  # (B, C)
        >>> mean = concentration / concentration.sum(-1, keepdim=True)
        >>> torch.allclose(posterior.predict(x, link=lw.LaplaceBridge()).probs, mean, atol=1e-5)
        True
    """

    reads_covariance: ClassVar[bool] = False
    closed_form: ClassVar[bool] = True

    def log_probs(self, latent: AnyLatent, generator: torch.Generator | None = None) -> Tensor:
        """Returns `log α - log Σ α`, (B, C)."""
        return torch.log_softmax(self._log_concentration(latent), -1)

    def concentration(self, latent: AnyLatent) -> Tensor:
        """Returns the parameters α of the Dirichlet, (B, C)."""
        return self._log_concentration(latent).exp()

    def _log_concentration(self, latent: AnyLatent) -> Tensor:
        # 1. μ (B, C), the mean minus its average over the possible classes, and V (B, C) of the centred logits
        mean, variance = at_least_float32(latent.mean), at_least_float32(latent.centred_variance)
        mask = possible(mean)
        classes = mask.sum(-1, keepdim=True, dtype=mean.dtype)
        centred = mean - torch.where(mask, mean, 0.0).sum(-1, keepdim=True) / classes
        variance = variance.clamp_min(torch.finfo(variance.dtype).tiny)
        # 2. the log of e^{μ_c}/C² Σ_l e^{-μ_l} + (1 - 2/C) (B, C)
        inverse = torch.where(mask, -centred, -torch.inf).logsumexp(-1, keepdim=True)  # log Σ_l e^{-μ_l}
        grown = centred + inverse - 2.0 * classes.log()
        grown = torch.logaddexp(grown, torch.log((1.0 - 2.0 / classes).clamp_min(0.0)))  # -inf for two classes
        # 3. log α = that - log V; an impossible class keeps its logit
        return torch.where(mask, grown - variance.log(), centred)


@dataclass(frozen=True)
class Quadrature(ClassLink, BinaryLink):
    """Numerical integration: exact for Bernoulli outputs and for two classes, close for more classes.

    A Bernoulli output has `∫ σ(f) N(f; m, v) df`, by a trapezoidal rule in a stretched variable, because Gauss-Hermite
    rules fail at large variances (`lapwing.likelihoods.quadrature`). For every mean and variance the error of
    probabilities and of their logarithms is below 1e-4 with 32 nodes, 1e-7 with 48, 1e-10 with 64.

    A class has `E[σ(g)]` with its logit g relative to all others (`lapwing.likelihoods.classwise`). It reads the
    covariances of the logits, which `Probit` does not, is closer to the average of many draws, and can change the most
    probable class. Time O(nodes B C) in float64; memory is limited by chunks.

    Args:
        nodes: number of nodes, at least 16.

    Example:
        >>> import torch, lapwing as lw
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 2 == 0
        >>> posterior = lw.fit(torch.nn.Linear(4, 1).eval(), [(x, y)], prior_precision=1.0)
        >>> exact = posterior.predict(x, link=lw.Quadrature(nodes=64)).probs
        >>> bool((posterior.predict(x, link=lw.Quadrature(nodes=32)).probs - exact).abs().max() < 1e-4)
        True
    """

    nodes: int = option(quadrature.NODES, at_least(16))
    reads_covariance: ClassVar[bool] = False
    closed_form: ClassVar[bool] = True

    def log_probs(self, latent: AnyLatent, generator: torch.Generator | None = None) -> Tensor:
        logs = quadrature.log_sigmoid_mean(*classwise.contrasts(latent), self.nodes)
        return logs.log_softmax(-1).to(at_least_float32(latent.mean))

    def log_odds(self, latent: AnyLatent, generator: torch.Generator | None = None) -> Tensor:
        mean = at_least_float32(latent.mean)
        return quadrature.log_odds(mean, latent.variance, self.nodes).to(mean)


@dataclass(frozen=True)
class TabulatedQuadrature(Quadrature):
    """`Quadrature` from a table, for the many candidates of a tuning. Not differentiable."""

    def log_odds(self, latent: AnyLatent, generator: torch.Generator | None = None) -> Tensor:
        mean = at_least_float32(latent.mean)
        return quadrature.tabulated_log_odds(mean, latent.variance.to(mean))


@dataclass(frozen=True)
class SampledLink(ClassLink, BinaryLink):
    """Average of the softmax over joint draws of the latent, or over all weight draws of a latent that holds them.

    For Bernoulli outputs it averages the sigmoid of each output. The average is unbiased, with a standard error of at
    most `1 / (2 sqrt(draws))` per probability. Time O(draws B C) in addition to sampling the latent, in chunks.

    Args:
        draws: number of draws from a Gaussian latent, from 1 to a billion.

    Example:
        >>> import torch, lapwing as lw
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> posterior = lw.fit(torch.nn.Linear(4, 3).eval(), [(x, y)], prior_precision=1.0)
        >>> generator = torch.Generator().manual_seed(1)  # seed 0 without it
        >>> posterior.predict(x, link=lw.SampledLink(draws=1000), generator=generator).probs.shape
        torch.Size([32, 3])
    """

    draws: int = option(512, integer(1, MAX_DRAWS + 1))
    accepts_draws: ClassVar[bool] = True

    def log_probs(self, latent: AnyLatent, generator: torch.Generator | None = None) -> Tensor:
        """Returns `log 1/S Σ_s softmax(f_s)`, (B, C)."""
        chunks = draw_chunks(latent, self.draws, generator)
        sums = reduce(torch.logaddexp, (torch.log_softmax(draws, -1).logsumexp(0) for draws in chunks))
        return torch.log_softmax(sums, -1)

    def log_odds(self, latent: AnyLatent, generator: torch.Generator | None = None) -> Tensor:
        """Returns `log Σ_s σ(f_s) - log Σ_s σ(-f_s)`, (B, C)."""
        chunks = draw_chunks(latent, self.draws, generator)
        sums = (torch.stack([F.logsigmoid(f), F.logsigmoid(-f)]).logsumexp(1) for f in chunks)
        yes, no = reduce(torch.logaddexp, sums)
        return yes - no


@dataclass(frozen=True)
class ExactLink(Link):
    """No approximation: the likelihood computes the distribution of y exactly, such as Gaussian noise on the latent."""

    accepts_draws: ClassVar[bool] = True
    closed_form: ClassVar[bool] = True
