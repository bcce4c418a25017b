"""Covariances of attention's values: between tokens, which share W_V, and between features, which share inputs.

A linear layer leaves with its outputs where they come from; views keep that; an attention, or the layer after it, reads
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .layout import quotient, root
from .moments import Moments, Site, Value, mean_of


@dataclass(frozen=True)
class Origin:
    """Where the values of an attention come from.

    Attributes:
        x: the inputs (B, S, I) of the layer that gave them.
        weight: its W (O, I).
        added: rows (..., I) -> what its uncertain weights and biases add to the variances (..., O), if there are any.
        rows: rows of W that the heads read (H, d), once known.
        probabilities: P (B, H, T, S), after the attention.
    """

    x: Value
    weight: Tensor
    added: Callable[[Tensor], Tensor] | None
    rows: Tensor | None = None
    probabilities: Tensor | None = None


def origin(site: Site, x: Value, weight: Tensor, added: Callable[[Tensor], Tensor] | None) -> Origin | None:
    """Returns where a linear layer's outputs come from, if an attention may ask; None for inputs that are no tokens."""
    found = site.layouts.get(site.node.name)
    if site.attention not in ("tokens", "features") or found is None or found.merged or mean_of(x).ndim != 3:
        return None
    if found.batch == 0:
        return Origin(x, weight, added)
    if isinstance(x, Moments):
        turned: Value = Moments(x.mean.transpose(0, 1), x.variance.transpose(0, 1))
    else:
        turned = x.transpose(0, 1)
    return Origin(turned, weight, added)


def mixed(site: Site, value: Moments, weights: Tensor, square: Tensor) -> Moments | None:
    """Returns the moments of `P V` with W_V's covariances between tokens: mixed inputs `P a` go through its own rule.

        Var[out_te] = Σ_s P_ts² (Var[v_se] - s_se) + Σ_ii' (P a)_ti (P a)_ti' Cov[W_ei, W_ei']

    with `s_se` what W_V adds at token s. None where the values come from no layer with uncertain weights.

    Cost: P a for each head, which is O(T² I), and W_V's variances at it: a linear layer a head.
    """
    source, rows = value.origin, _rows(site, "value", weights.shape[1])
    if not isinstance(source, Origin) or source.added is None or rows is None or rows.numel() == 0:
        return None
    a, heads = mean_of(source.x), len(rows)
    own = _picked(source.added(a)[:, None].expand(-1, heads, -1, -1), rows)  # (B, H, S, d)
    blend = weights @ a[:, None]  # (B, H, T, I)
    exact = _picked(source.added(blend), rows)
    rest = (value.variance - own).clamp_min(0)
    if value.correlation is None:
        return Moments(weights @ value.mean, square @ rest + exact)
    together = _picked(source.added(a.mean(1, keepdim=True))[:, None].expand(-1, heads, -1, -1), rows)
    rho = quotient(together, root(own).mean(-2, keepdim=True).square())
    common = torch.minimum((value.correlation * value.variance - rho * own).clamp_min(0), rest)
    inherited = (weights @ root(common)).square()
    total = square @ (rest - common) + inherited + exact
    pooled = _picked(source.added(blend.mean(-2, keepdim=True)), rows)
    along = quotient(pooled, root(exact).mean(-2, keepdim=True).square())
    return Moments(weights @ value.mean, total, quotient(inherited + along * exact, total))


def marked(site: Site, found: Moments, value: Value, weights: Tensor) -> Moments:
    """Notes P and the heads' rows of W_V with an attention's outputs, for the layer that comes after."""
    source = value.origin if isinstance(value, Moments) else None
    rows = _rows(site, "value", weights.shape[1])
    if site.attention != "features" or not isinstance(source, Origin) or rows is None:
        return found
    return replace(found, origin=replace(source, rows=rows, probabilities=weights))


def between_features(site: Site, argument: str, x: Value, weight: Tensor) -> Tensor | None:
    """Returns what covariances of a head's values add after an attention's output layer U (equation 74), (B, T, O).

        Σ_h Σ_s (P^h_ts)² Σ_i [(U_h W_h)_mi² - Σ_d U_md² W_di²] Var[a_si]

    Args:
        site: the output layer.
        argument: name of its input among its arguments.
        x: its input.
        weight: U (O, H d).

    Cost: a linear layer a head for a, and P² of its outputs.
    """
    source = x.origin if isinstance(x, Moments) else None
    if not isinstance(source, Origin) or source.probabilities is None or not isinstance(source.x, Moments):
        return None
    order = _channels(site, argument)
    rows = source.rows
    if order is None or rows is None:
        return None
    crossed = site.constant("crossed", lambda: _crossed(weight, source.weight, rows, order), weight, source.weight)
    if crossed is None:
        return None
    spread = source.x.variance[:, None] @ crossed.mT  # (B, H, S, O)
    return (source.probabilities.square() @ spread).sum(1)


def _crossed(weight: Tensor, values: Tensor, rows: Tensor, order: Tensor) -> Tensor | None:
    """Returns `(U_h W_h)² - U_h² W_h²` (H, O, I), with the columns of U in an order of W's rows, None for other rows.

    Heads that share rows are in one order in both.
    """
    if not torch.equal(order.sort()[0], rows.flatten().sort()[0]):
        return None
    columns = torch.empty_like(order)
    columns[rows.flatten().argsort(stable=True)] = order.argsort(stable=True)
    u = weight[:, columns.reshape(rows.shape)].movedim(1, 0)  # (H, O, d)
    w = values[rows]  # (H, d, I)
    return (u @ w).square() - u.square() @ w.square()


def _channels(site: Site, argument: str) -> Tensor | None:
    """Returns the channel of each entry of an argument's last dimension, as the layer that made it numbers them."""
    found = site.source(argument)
    if found is None or found.channels.numel() != found.channels.shape[-1]:
        return None
    return found.channels.flatten().to(site.device)


def _rows(site: Site, argument: str, heads: int) -> Tensor | None:
    """Returns the channels of values (B, H, S, d) as (H, d), repeated where queries have more heads."""
    found = site.source(argument)
    if found is None or found.batch != 0 or found.channels.ndim != 4 or found.channels.shape[2] != 1:
        return None
    rows = found.channels[0, :, 0, :].to(site.device)
    return rows.repeat_interleave(heads // len(rows), 0)


def _picked(x: Tensor, rows: Tensor) -> Tensor:
    """Returns of the outputs (B, H, T, O) those that each head reads, (B, H, T, d)."""
    index = rows[None, :, None, :].expand(x.shape[0], -1, x.shape[2], -1)
    return x.gather(-1, index)


__all__ = ["Origin", "between_features", "marked", "mixed", "origin"]
