"""Moments through attention: scores from means, values uncertain; or the scores' uncertainty linearised as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .fusion import aten
from .layout import share
from .moments import Moments, Rule, Site, Value, mean_of
from .values import marked, mixed


def attended(site: Site, given: dict[str, Any]) -> Moments:
    """Passes moments through `softmax(Q Kᵀ c + mask) V` (Streamlined Prediction, equations 7 and 71).

        P = softmax(E[Q] E[K]ᵀ c + mask)        E = P E[V]        Var = P² Var[V]

    With `attention="scores"` queries and keys, taken as independent, are uncertain too, to first order, `S = Q Kᵀ c`:

        Var += Σ_sd (∂out_te/∂K_sd)² Var[K_sd] + Σ_d (∂out_te/∂Q_td)² Var[Q_td],    ∂out_te/∂S_ts = P_ts (V_se - E_te)

    Attention written by hand is taken call by call there, with its scores independent.

    Cost: beside one attention of the means, a product of P² (B, H, T, T) with the variances; with scores three more,
    and as many as a head has features.
    """
    query, key, value = given["query"], given["key"], given["value"]
    q, k, v = (mean_of(part) for part in (query, key, value))
    if given["enable_gqa"] and q.shape[-3] != k.shape[-3]:
        times = q.shape[-3] // k.shape[-3]
        query, key, value = query, *(_repeated(part, times) for part in (key, value))
        k, v = mean_of(key), mean_of(value)
    scale = q.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
    scores = _masked(q @ k.mT * scale, given["attn_mask"], given["is_causal"])
    weights = scores.softmax(-1).nan_to_num(0.0) if given["attn_mask"] is not None else scores.softmax(-1)
    mean, square = weights @ v, weights.square()
    parts = []
    common = None
    if site.attention == "tokens" and isinstance(value, Moments):
        found = mixed(site, value, weights, square)
        if found is not None:
            return found
    if isinstance(value, Moments):
        parts.append(square @ value.own)
        if value.correlation is not None:
            common = (weights @ value.common).square()
            parts.append(common)
    if site.attention == "scores":
        parts.extend(part * scale**2 for part in _from_scores(query, key, v, mean, weights))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    found = Moments(mean, total, None if common is None else share(total, [(common, 1.0)]))
    return marked(site, found, value, weights)


def _from_scores(query: Value, key: Value, v: Tensor, mean: Tensor, weights: Tensor) -> Iterator[Tensor]:
    """Yields what uncertain keys and queries add to the variances of the output, for scores without a factor."""
    q, k = mean_of(query), mean_of(key)
    if isinstance(key, Moments):
        shared = weights.square() * (q.square() @ key.variance.mT)  # P² Var[S], (B, H, T, T)
        # Σ_s P² Var[S] (V - E)², multiplied out
        yield shared @ v.square() - 2 * mean * (shared @ v) + mean.square() * shared.sum(-1, keepdim=True)
    if isinstance(query, Moments):
        total = torch.zeros_like(mean)
        for spread, column in zip(query.variance.split(1, -1), k.split(1, -1), strict=True):  # one feature d
            slope = weights @ (v * column) - mean * (weights @ column)  # Σ_s P (V - E) K_sd
            total = total + slope.square() * spread
        yield total


def _repeated(value: Any, times: int) -> Any:
    if isinstance(value, Moments):
        rho = None if value.correlation is None else value.correlation.expand_as(value.variance)
        rho = None if rho is None else rho.repeat_interleave(times, -3)
        mean, variance = (part.repeat_interleave(times, -3) for part in (value.mean, value.variance))
        return Moments(mean, variance, rho, value.origin)
    return value.repeat_interleave(times, -3)


def _masked(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


RULES: dict[Any, Rule] = {aten.scaled_dot_product_attention.default: attended}
