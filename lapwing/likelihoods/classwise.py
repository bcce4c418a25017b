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
from ..linalg import doubled, nonnegative
from . import quadrature

CLASSES = 100
"""Maximum number of classes for which the mutual information uses this approximation."""

CLASS_NODES = 24
"""Nodes of the mutual information and of the search for κ."""

_STEEPEST = 8.0  # largest 1/scale of the probit approximation at which the search for κ has a = 1
_IMPOSSIBLE = -1e30  # logit of an impossible class


def contrasts(latent: AnyLatent) -> tuple[Tensor, Tensor]:
    """Returns the means and variances (B, C) of g, in float64."""
    odds, variance, shift, scale = _expansion(latent)
    share = quadrature.in_chunks(lambda *some: _solved(*some)[0], CLASS_NODES, odds, variance, shift, scale)
    return torch.addcmul(odds, share, shift, value=-0.5), variance


def information(latent: AnyLatent) -> Tensor:
    """Returns the mutual information of label and logits in nats, (B,)."""

    def of(odds: Tensor, variance: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        _, g, weights = _solved(odds, variance, shift, scale)
        return quadrature.information_at(g.unsqueeze(1), weights, variance)

    return quadrature.in_chunks(of, CLASS_NODES, *_expansion(latent))


def _expansion(latent: AnyLatent) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns g_c(m), v_c and t_c (B, C), and the scale (B, 1) of the probit approximation."""
    mean, spread = doubled(latent.mean).clamp_min(_IMPOSSIBLE), doubled(latent.centred_variance)
    largest, place = mean.max(-1, keepdim=True)
    mean = mean - largest
    far = (-20.0 * largest.abs()).clamp_max(-500.0)  # as in `possible`, with fewer operations
    classes = (mean >= far).sum(-1, keepdim=True, dtype=mean.dtype)
    scale = (classes / torch.add(classes, spread.sum(-1, keepdim=True), alpha=math.pi / 8.0)).sqrt()
    # 1. the logits, and the logits without the top class, whose q and log(1 - p) come from the others (B, 2, C)
    logits = torch.stack([mean, mean.scatter(-1, place, _IMPOSSIBLE)], 1)
    top = logits[:, 1] < mean
    # 2. p, and q of the top class (B, 2, C); `S (q - 1/C)`, which is the centred `S q` plus its own mean
    q, even = (scale.unsqueeze(1) * logits).softmax(-1), 1.0 / mean.shape[-1]
    product = latent.covariance_times((q - even).to(latent.mean)).to(q)
    # 3. the centred `S_kk - 2 (S q)_k + qᵀS q` (B, 2, C), and its average over q, `Σ_k q_k S_kk - qᵀS q` (B, 2, 1)
    square = torch.einsum("brc,brc->br", q + even, product).unsqueeze(-1)
    variance = torch.sub(spread.unsqueeze(1), product, alpha=2.0) + square
    gaps = torch.einsum("brc,brc->br", q, variance).unsqueeze(-1)
    # 4. v_c and t_c (B, C): for other classes q_k = p_k/(1 - p_c), so f_c - qᵀf is (f_c - pᵀf)/(1 - p_c)
    others = q[:, 0].masked_fill(top, 0.0)
    rest = 1.0 - others
    variance = nonnegative(torch.where(top, variance[:, 1], variance[:, 0]) / rest.square())
    shift = torch.addcmul(torch.where(top, gaps[:, 1], gaps[:, 0]) / rest, others, variance, value=-1.0)
    # 5. g_c(m) = f_c - log Σ_{k≠c} e^{f_k} (B, C), with f = 0 for the top class
    sizes = logits[:, 1].exp()
    sums = torch.log1p(sizes.sum(-1, keepdim=True) - sizes)
    odds = mean - torch.where(top, logits[:, 1].logsumexp(-1, keepdim=True), sums)
    return odds, variance, shift, scale


def _solved(odds: Tensor, variance: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns 2κ (B, 1) >= 0 with `Σ_c E[σ(a g_c)] = 1`, by two steps of Newton's method, and nodes of g and weights.

    a is 1, or less at large S: then only ratios matter, and Newton's steps would become too long. κ is at most a. The
    steps begin at `2κ = scale`, and move 2κ by -δ, which moves the nodes by `δ/2 t_c`.
    """
    slope = (_STEEPEST * scale).clamp_max(1.0)
    least = torch.sub(scale, slope, alpha=2.0)  # δ at κ = a
    start = torch.addcmul(odds, scale, shift, value=-0.5)
    g, log_weights = quadrature.rule(start, variance, 0.0, CLASS_NODES)
    weights, moves, slope = log_weights.exp(), (slope * shift)[..., None], slope[..., None]
    scaled, slopes = slope * g, weights * moves

    def needed(nodes: Tensor) -> tuple[Tensor, Tensor]:  # 2 (1 - Σ_c E[σ]), and its decrease with δ
        sigmoids = torch.sigmoid(nodes)  # (B, C, nodes)
        lack = torch.rsub(torch.einsum("bck,bck->b", weights, sigmoids), 2.0, alpha=2.0)
        falls = torch.addcmul(sigmoids, sigmoids, sigmoids, value=-1.0)  # σ (1 - σ)
        return lack[:, None], torch.einsum("bck,bck->b", slopes, falls)[:, None].clamp_min(1e-12)

    lack, fall = needed(scaled)
    delta = torch.clamp(lack / fall, least, scale)
    lack, fall = needed(torch.addcmul(scaled, delta[..., None], moves, value=0.5))
    delta = torch.clamp(torch.addcdiv(delta, lack, fall), least, scale)
    return scale - delta, torch.addcmul(g, delta[..., None], shift[..., None], value=0.5), weights
