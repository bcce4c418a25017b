"""Moments through linear layers, `h = W a + b` with W, b and a uncertain and independent."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from .moments import Moments, Rule, Treated


def linear(moments: Moments, weight: Tensor, bias: Tensor | None, treated: Treated | None, full: bool) -> Moments:
    """Passes moments through a linear layer (Streamlined Prediction, equations 2 to 4).

        E[h] = W m + b        Cov[h] = W Cov[a] Wᵀ + Σ_ii' (m mᵀ + Cov[a])_ii' Cov[W_ji, W_j'i']

    Args:
        moments: of the input, (B, I).
        weight: W (O, I), the mean.
        bias: b (O,), the mean, or None.
        treated: the weights that are uncertain, if any.
        full: whether to return covariances (B, O, O), or variances (B, O).

    Cost: beside `LayerBlock.push`, time O(B O I) for variances, O(B O I (O + I)) from covariances to covariances.
    """
    mean = F.linear(moments.mean, weight, bias)
    parts = []
    if moments.variance is not None:
        parts.append(_carried(moments.variance, weight, full))
    if treated is not None:
        parts.append(treated.push(moments, full))
    return Moments(mean, sum(parts[1:], parts[0]) if parts else None)


def _carried(variance: Tensor, weight: Tensor, full: bool) -> Tensor:
    """Returns `W Cov[a] Wᵀ` or its diagonal, for variances (B, I) or covariances (B, I, I)."""
    if variance.ndim == 3:
        left = weight @ variance  # (B, O, I)
        return left @ weight.T if full else (left * weight).sum(-1)
    return (weight * variance[:, None, :]) @ weight.T if full else variance @ weight.square().T


def _linear(module: nn.Module, moments: Moments, treated: Treated | None, full: bool) -> Moments:
    layer, dtype = cast(nn.Linear, module), moments.mean.dtype
    bias = None if layer.bias is None else layer.bias.detach().to(dtype)
    return linear(moments, layer.weight.detach().to(dtype), bias, treated, full)


RULES: dict[type[nn.Module], Rule] = {nn.Linear: Rule("linear", _linear)}
