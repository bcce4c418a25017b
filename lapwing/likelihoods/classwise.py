"""Softmax probabilities and mutual information of Gaussian logits, by quadrature over one class at a time.

The probability of class c is `σ(g_c)` with `g_c = f_c - log Σ_{k≠c} e^{f_k}`, and g_c is taken as Gaussian: exact for
two classes. Let q be the probabilities of the other classes, by the probit approximation, and m and S the mean and the
centred covariance of the logits:

    variance of g_c   v_c = Var[f_c - qᵀf]
    mean of g_c       g_c(m) - κ t_c    with t_c = Σ_k q_k S_kk - qᵀS q

κ = 1/2 is the Taylor expansion for small S. Large S need less, so κ is chosen for each input such that the
probabilities `E[σ(g_c)]` sum to 1. Factors of S are not multiplied out. On MNIST and Fashion-MNIST, each with images of
the other, 95 % of the relative errors of the mutual information are below 0.06 (512 draws: 0.25 and 0.5).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..covariance import AnyLatent
from ..linalg import doubled, nonnegative, possible
from . import quadrature

CLASSES = 100
"""Maximum number of classes for which the mutual information uses this approximation."""

CLASS_NODES = 24
"""Nodes of the mutual information and of the search for κ."""

_STEEPEST = 8.0  # largest 1/scale of the probit approximation in the search for κ
_IMPOSSIBLE = -1e30  # logit of an impossible class


def contrasts(latent: AnyLatent) -> tuple[Tensor, Tensor]:
    """Returns the means and variances (B, C) of g, in float64."""
    mean, spread = doubled(latent.mean), doubled(latent.centred_variance)
    scale = (1.0 + (math.pi / 8.0) * spread.sum(-1, keepdim=True) / possible(mean).sum(-1, keepdim=True)).rsqrt()
    mean = mean.clamp_min(_IMPOSSIBLE)
    top = mean.argmax(-1, keepdim=True)  # its q and log(1 - p) come from the others, since 1 - p would lose digits

    def moments(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `S q` (B, C), `qᵀS q` and `Σ_k q_k S_kk`, (B, 1) each."""
        product = latent.covariance_times((q - q.mean(-1, keepdim=True)).to(latent.mean)).to(q)
        product = product - product.mean(-1, keepdim=True)
        return product, (q * product).sum(-1, keepdim=True), (q * spread).sum(-1, keepdim=True)

    # 1. for all classes but the top one: q_k = p_k/(1 - p_c), from p (B, C) and S p
    probs = (scale * mean).softmax(-1)
    rest = 1.0 - probs.scatter(-1, top, 0.0)
    product, square, diagonal = moments(probs)  # f_c - qᵀf is (f_c - pᵀf) / (1 - p_c)
    variance = (spread - 2.0 * product + square) / rest.square()
    shift = (rest * diagonal - probs * (spread - 2.0 * product) - square) / rest.square()
    # 2. for the top class: q without it, (B, C)
    product, square, diagonal = moments((scale * mean).scatter(-1, top, _IMPOSSIBLE).softmax(-1))
    variance = nonnegative(variance.scatter(-1, top, (spread - 2.0 * product + square).gather(-1, top)))
    shift = shift.scatter(-1, top, diagonal - square)

    # 3. g_c(m) = log p_c - log(1 - p_c) (B, C), for the top class from the other logits
    others = mean.scatter(-1, top, _IMPOSSIBLE).logsumexp(-1, keepdim=True)
    logs = mean.log_softmax(-1)
    odds = (logs - torch.log1p(-logs.exp().scatter(-1, top, 0.0))).scatter(-1, top, mean.gather(-1, top) - others)
    # 4. κ (B, 1), and the means g_c(m) - κ t_c
    less = (_STEEPEST * scale).clamp_max(1.0)  # at larger S only ratios matter, and Newton's steps become too long
    share = _share(less * odds, less.square() * variance, less.square() * shift, 0.5 * scale / less)
    return odds - less * share * shift, variance


def _share(odds: Tensor, variance: Tensor, shift: Tensor, start: Tensor) -> Tensor:
    """Returns κ (B, 1) between 0 and 1, by Newton's method for `Σ_c E[σ(g_c)] = 1`."""

    def of(odds: Tensor, variance: Tensor, shift: Tensor, start: Tensor) -> Tensor:
        # nodes at the first κ; another κ moves them by its difference times -t_c
        f, log_weights = quadrature.rule(odds - start * shift, variance, 0.0, CLASS_NODES)
        weights, share = log_weights.exp(), start
        for _ in range(2):
            sigmoids = torch.sigmoid(f - ((share - start) * shift)[..., None])  # (B, C, nodes)
            masses = weights * sigmoids
            excess = masses.sum((-2, -1))[..., None] - 1.0
            slope = ((masses * (1.0 - sigmoids)).sum(-1) * shift).sum(-1, keepdim=True)
            share = (share + excess / slope.clamp_min(1e-12)).clamp(0.0, 1.0)
        return share

    return quadrature.in_chunks(of, CLASS_NODES, odds, variance, shift, start)
