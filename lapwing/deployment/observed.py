"""From moments at the outputs to what a deployed network returns, as functions of tensors alone."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..covariance import MarginalLatent
from ..errors import LapwingError, shown
from ..likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Link, Quadrature, quadrature
from ..likelihoods.links import BinaryLink, ClassLink, LatentLike, Probit, at_least_float32
from .tracing import Observe


def observing(likelihood: Likelihood, outputs: str, link: Link | None, factor: float) -> tuple[Observe, bool]:
    """Returns what is made of means and variances, and whether it reads the variances of centred outputs.

    Args:
        likelihood: p(y|f).
        outputs: "prediction" or "latent".
        link: of a classification; None for the likelihood's own.
        factor: of the variances.

    Raises:
        LapwingError: links that draw; likelihoods without a closed form.
    """

    def scaled(variance: Tensor) -> Tensor:
        return variance if factor == 1 else variance * factor

    if outputs == "latent":
        return (lambda mean, plain, centred: (mean, scaled(plain))), False
    if isinstance(likelihood, Gaussian):
        likelihood.choose_link(_none(), link)
        noise = likelihood.noise_variance or 0.0
        return (lambda mean, plain, centred: (mean, scaled(plain) + noise)), False
    if not isinstance(likelihood, (Categorical, Bernoulli)):
        raise LapwingError(
            f"Asked to deploy predictions of the {likelihood.name} likelihood, found no closed form; accepted are "
            "Gaussian, Categorical and Bernoulli: write lw.deploy(posterior, x, outputs='latent')."
        )
    chosen = likelihood.choose_link(_none(), link)
    if chosen.reads_covariance:
        raise LapwingError(
            f"Asked to deploy link={shown(chosen)}, found that it draws; accepted are closed forms: write "
            "link=lw.Probit(), or leave link=None."
        )
    if isinstance(likelihood, Categorical):
        assert isinstance(chosen, ClassLink)
        reads = not (isinstance(chosen, Probit) and chosen.marginal)

        def classes(mean: Tensor, plain: Tensor, centred: Tensor) -> tuple[Tensor, ...]:
            return (chosen.log_probs(_latent(mean, scaled(plain), scaled(centred))).exp(),)

        return classes, reads
    assert isinstance(chosen, BinaryLink)

    def answers(mean: Tensor, plain: Tensor, centred: Tensor) -> tuple[Tensor, ...]:
        if isinstance(chosen, Quadrature):
            mean = at_least_float32(mean)
            return (torch.sigmoid(_log_odds(mean.double(), scaled(plain).double(), chosen.nodes).to(mean.dtype)),)
        return (torch.sigmoid(chosen.log_odds(_latent(mean, scaled(plain), scaled(centred)))),)

    return answers, False


def _none() -> LatentLike:
    """Returns a Gaussian latent without samples, for which links are chosen."""
    empty = torch.empty(0, 1)
    return _latent(empty, empty, empty)


def _latent(mean: Tensor, variance: Tensor, centred: Tensor) -> LatentLike:
    """Returns all that a link in closed form reads."""
    return cast("LatentLike", MarginalLatent(mean, variance, centred))


def _log_odds(mean: Tensor, variance: Tensor, nodes: int) -> Tensor:
    """Returns `log E[σ(f)] - log E[σ(-f)]` as `quadrature.log_odds` does, at once for all samples."""
    signs = torch.where(mean < 0, -1.0, 1.0).to(mean.dtype)
    points, weights = quadrature.rule(-signs * mean, variance, 1.0, nodes)
    smaller = torch.logsumexp(F.logsigmoid(points) + weights, -1)
    return signs * (torch.log1p(-smaller.exp()) - smaller)
