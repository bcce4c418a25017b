"""Moments through linear layers and products of matrices, with weights and inputs uncertain and independent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...covariance import LayerBlock
from .arithmetic import product
from .fusion import aten
from .moments import Moments, Rule, Site, Treated, Value, mean_of, variance_of


def linear(site: Site, given: dict[str, Any]) -> Moments:
    """`F.linear(a, W, b)`, `a W + b` (Hugging Face's Conv1D), `a W`; and the product of two uncertain tensors."""
    if given.get("beta", 1) != 1 or given.get("alpha", 1) != 1:
        raise site.refusal("with factors", "are addmm(b, a, W) with none")
    x, weight, bias, transposed = layer_of(site, given)
    if site.node.target not in _WITH_BIAS and site.treated("other", "mat2") is None:
        return product(x, weight, torch.matmul)
    return through(site, x, weight, bias, transposed)


def layer_of(site: Site, given: dict[str, Any]) -> tuple[Value, Value, Value | None, bool]:
    """Returns a, W, b of a linear layer, and whether W is stored as (I, O)."""
    if site.node.target is aten.linear.default:
        return given["input"], given["weight"], given["bias"], False
    if site.node.target is aten.addmm.default:
        return given["mat1"], given["mat2"], given["self"], True
    return given["self"], given.get("other", given.get("mat2")), None, True


def baddbmm(site: Site, given: dict[str, Any]) -> Moments:
    """`β c + α x y` with a certain c."""
    if isinstance(given["self"], Moments):
        raise site.refusal("with an uncertain summand", "is a certain one")
    found = product(given["batch1"], given["batch2"], torch.matmul)
    alpha, beta = given["alpha"], given["beta"]
    summand = given["self"] * beta if beta else 0
    return Moments(summand + alpha * found.mean, alpha**2 * found.variance)


def einsum(site: Site, given: dict[str, Any]) -> Moments:
    """`einsum(equation, x, y)`."""
    operands, equation = given["tensors"], given["equation"]
    if len(operands) == 1:
        if "..." in equation or len(set(equation.partition("->")[0])) != len(equation.partition("->")[0]):
            raise site.refusal(f"with {equation!r}", "are distinct letters")
        return Moments(torch.einsum(equation, operands[0].mean), torch.einsum(equation, operands[0].variance))
    if len(operands) != 2:
        raise site.refusal(f"of {len(operands)} tensors", "are two")
    x, y = operands
    return product(x, y, lambda x, y: torch.einsum(equation, x, y))


def through(site: Site, x: Value, weight: Value, bias: Value | None, transposed: bool) -> Moments:
    """Passes moments through a linear layer (Streamlined Prediction, equations 2 to 4, the diagonal of the output).

        E[h] = W m + b        Var[h]_j = Σ_i W_ji² v_i + Σ_ii' (m mᵀ + diag v)_ii' Cov[W_ji, W_ji']

    Cost: one product for the mean, one for v with W² + Var[W], and `variance_from` for m.
    """
    mean, variance = mean_of(x), variance_of(x)
    w, b, spread = mean_of(weight), mean_of(bias), variance_of(weight)
    h = _product(mean, w, b) if transposed else F.linear(mean, w, b)
    parts = []
    if variance is not None:
        second = site.constant("second", lambda: w.square() if spread is None else w.square() + spread, w, spread)
        parts.append(_product(variance, second if transposed else second.mT, None))
    treated = own_weights(site)
    if treated is None:
        if spread is not None:
            parts.append(_product(mean.square(), spread if transposed else spread.mT, None))
        if isinstance(bias, Moments):
            parts.append(bias.variance.expand_as(h))
    else:
        shared = isinstance(bias, Moments) and treated.block.bias
        parts.append(variance_from(site, treated, mean, shared))
        if isinstance(bias, Moments) and not shared:
            parts.append(bias.variance.expand_as(h))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return Moments(h, total)


def _product(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return x @ w if b is None else torch.addmm(b, x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[-1])


def own_weights(site: Site) -> Treated | None:
    """Returns the treated weights of a linear layer, None where they are not laid out as this call reads them."""
    treated = site.treated("weight", "mat2", "other")
    if treated is None or treated.block.family != "linear" or treated.block.matrix is None:
        return None
    stored = site.node.target is not aten.linear.default  # as (I, O)
    return treated if treated.block.matrix.transposed == stored else None


def variance_from(site: Site, treated: Treated, mean: Tensor, bias: bool) -> Tensor:
    """Returns `Σ_ii' a_i a_i' Cov[W_ji, W_ji']` for certain rows a = [m, 1], (..., O)."""
    rows = F.pad(mean, (0, 1), value=1.0) if bias else mean
    flat = rows.reshape(-1, rows.shape[-1])  # (N, I)
    rotated = site.constant("rotated", lambda: rotation(treated.covariance, mean.dtype))
    if rotated is None:
        found = treated.covariance.push(flat, None, False)
    else:
        basis, spread = rotated
        found = (flat if basis is None else flat @ basis).square() @ spread.mT
    return found.reshape(*mean.shape[:-1], -1)


def rotation(covariance: LayerBlock, dtype: torch.dtype) -> tuple[Tensor | None, Tensor] | None:
    """Returns a basis and variances in it with `Var[W a]_j = Σ_q (aᵀ V)_q² s_jq`, where there is one for all j."""
    found = covariance.rotation()
    if found is None:
        return None
    basis, spread = found
    return (None if basis is None else basis[0].to(dtype)), spread[0].to(dtype)


_WITH_BIAS = (aten.linear.default, aten.addmm.default)

RULES: dict[Any, Rule] = {
    aten.linear.default: linear,
    aten.addmm.default: linear,
    aten.matmul.default: linear,
    aten.mm.default: linear,
    aten.bmm.default: linear,
    aten.baddbmm.default: baddbmm,
    aten.einsum.default: einsum,
}
