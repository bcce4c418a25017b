"""Moments of attention: uncertain values with certain scores, or with scores linearised too.

`attention="features"` adds the covariances of values between the features of a head, which share inputs. For it a
linear layer attaches an `Origin` to its outputs, views keep it, and the layer after the attention reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ....network.eager import attention_products
from ..moments import Moments, Value, mean_of, sum_correlation, total_of
from ..operations import Kind, Operation, register_aten, same_along, shape_of
from ..sites import Site


def attended(site: Site, arguments: dict[str, Any]) -> Moments:
    """Returns the moments of `softmax(Q Kᵀ c + mask) V` (Streamlined Prediction, equations 7 and 71).

        P = softmax(E[Q] E[K]ᵀ c + mask)        E = P E[V]        Var = P² Var[V]

    With `attention="scores"` independent queries and keys are uncertain too, to first order, with `S = Q Kᵀ c`:

        Var += Σ_sd (∂out_te/∂K_sd)² Var[K_sd] + Σ_d (∂out_te/∂Q_td)² Var[Q_td],    ∂out_te/∂S_ts = P_ts (V_se - E_te)

    Attention written by hand uses the rules of its calls then, with independent scores. Uncertain scores cost three
    more products (B, H, T, T), and one per feature of a head.
    """
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if arguments["enable_gqa"] and mean_of(query).shape[-3] != mean_of(key).shape[-3]:
        times = mean_of(query).shape[-3] // mean_of(key).shape[-3]
        key, value = _repeated(key, times), _repeated(value, times)
    means = {"query": mean_of(query), "key": mean_of(key), "value": mean_of(value)}
    mean, weights = attention_products(**{**arguments, **means})
    parts, common = [], None
    if isinstance(value, Moments):
        parts.append(weights.square() @ value.individual)
        if value.correlation is not None:
            common = (weights @ value.common).square()
            parts.append(common)
    if site.attention == "scores":
        scale = mean_of(query).shape[-1] ** -0.5 if arguments["scale"] is None else arguments["scale"]
        parts.extend(part * scale**2 for part in _from_scores(query, key, mean_of(value), mean, weights))
    total = total_of(parts)
    result = Moments(mean, total, None if common is None else sum_correlation(total, [(common, 1.0)]))
    # the origin gets P (B, H, T, S) and the heads' rows (H, d) of W_V
    source, layout = value.origin if isinstance(value, Moments) else None, site.layout_of("value")
    if source is None or layout is None or layout.batch != 0 or layout.channels.ndim != 4:
        return result
    if layout.channels.shape[2] != 1:
        return result
    rows = layout.channels[0, :, 0, :].to(weights.device)  # of values (B, H, S, d)
    rows = rows.repeat_interleave(weights.shape[1] // len(rows), 0)  # for heads of queries that share values
    return replace(result, origin=replace(source, rows=rows, probabilities=weights))


def _from_scores(query: Value, key: Value, v: Tensor, mean: Tensor, weights: Tensor) -> Iterator[Tensor]:
    """Yields the variances of the output from uncertain keys and from queries, for scores without the factor c."""
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
    """Returns keys or values with each head repeated, for queries with more heads."""
    if isinstance(value, Moments):
        return replace(value.moved(lambda part: _repeated(part, times)), origin=value.origin)
    return value.repeat_interleave(times, -3)


def _attended_label(node: fx.Node, labels: Mapping[str, Any]) -> Any:
    """Returns the labels of the values, constant over tokens, with heads repeated if queries have more."""
    values, shape = node.args[2], shape_of(node)
    label = labels.get(values.name) if isinstance(values, fx.Node) else None
    if label is None or label.ndim != len(shape) or not same_along(label, -2):
        return None
    label = label.narrow(-2, 0, 1)
    if label.ndim > 3 and label.shape[-3] not in (1, shape[-3]):
        label = label.repeat_interleave(shape[-3] // label.shape[-3], -3)
    return label.expand(shape)


@dataclass(frozen=True)
class Origin:
    """The linear layer that returned the values of an attention, with inputs x (B, S, I) and W (O, I).

    The attention sets the rows of W that the heads read (H, d), and P (B, H, T, S).
    """

    x: Value
    weight: Tensor
    rows: Tensor | None = None
    probabilities: Tensor | None = None


def origin(site: Site, x: Value, weight: Tensor) -> Origin | None:
    """Returns the origin of a linear layer's outputs if `attention="features"`; None if its inputs are not tokens."""
    if site.attention != "features":
        return None
    layout = site.layouts.get(site.node.name)
    if layout is None or layout.merged or mean_of(x).ndim != 3:
        return None
    if layout.batch != 0:
        x = x.moved(lambda part: part.transpose(0, 1)) if isinstance(x, Moments) else x.transpose(0, 1)
    return Origin(x, weight)


def between_features(site: Site, argument: str, x: Value, weight: Tensor) -> Tensor | None:
    """Returns the variances (B, T, O) after the output layer U from covariances of a head's values (equation 74).

        Σ_h Σ_s (P^h_ts)² Σ_i [(U_h W_h)_mi² - Σ_d U_md² W_di²] Var[a_si]

    `argument` is the name of the layer's input x, and `weight` U (O, H d).
    """
    source, layout = x.origin if isinstance(x, Moments) else None, site.layout_of(argument)
    if not isinstance(source, Origin) or source.probabilities is None or not isinstance(source.x, Moments):
        return None
    rows = source.rows
    if rows is None or layout is None or layout.channels.numel() != layout.channels.shape[-1]:
        return None
    order = layout.channels.flatten().to(weight.device)  # of each entry of x, as the layer that made it numbers them
    crossed = site.constant("crossed", lambda: _crossed(weight, source.weight, rows, order))
    if crossed is None:
        return None
    spread = source.x.variance[:, None] @ crossed.mT  # (B, H, S, O)
    return (source.probabilities.square() @ spread).sum(1)


def _crossed(weight: Tensor, values: Tensor, rows: Tensor, order: Tensor) -> Tensor | None:
    """Returns `(U_h W_h)² - U_h² W_h²` (H, O, I), or None if the columns of U do not match the rows of W.

    `order` has the row of W for each column of U. Heads that share rows have the same order in both.
    """
    if not torch.equal(order.sort()[0], rows.flatten().sort()[0]):
        return None
    columns = torch.empty_like(order)
    columns[rows.flatten().argsort(stable=True)] = order.argsort(stable=True)
    u = weight[:, columns.reshape(rows.shape)].movedim(1, 0)  # (H, O, d)
    w = values[rows]  # (H, d, I)
    return (u @ w).square() - u.square() @ w.square()


register_aten(Operation(Kind.ATTENTION, attended, _attended_label), "scaled_dot_product_attention.default")
