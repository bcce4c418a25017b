"""Moments through linear layers and products of matrices, with weights and inputs uncertain and independent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ...covariance import LayerBlock
from .arithmetic import contracted
from .fusion import aten
from .layout import together
from .moments import Moments, Rule, Site, Treated, Value, mean_of, variance_of
from .values import between_features, origin


def linear(site: Site, given: dict[str, Any]) -> Moments:
    """`F.linear(a, W, b)`, `a W + b` (Hugging Face's Conv1D), `a W`; and the product of two uncertain tensors."""
    if given.get("beta", 1) != 1 or given.get("alpha", 1) != 1:
        raise site.refusal("with factors", "are addmm(b, a, W) with none")
    x, weight, bias, transposed = layer_of(site, given)
    if site.node.target not in _WITH_BIAS and site.treated("other", "mat2") is None:
        return contracted(site, x, weight, torch.matmul)
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
    found = contracted(site, given["batch1"], given["batch2"], torch.matmul)
    alpha, beta = given["alpha"], given["beta"]
    summand = given["self"] * beta if beta else 0
    return Moments(summand + alpha * found.mean, alpha**2 * found.variance, found.correlation)


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
    return contracted(site, x, y, lambda x, y: torch.einsum(equation, x, y))


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

    def added(rows: Tensor) -> Tensor:
        """Returns what the layer's own weights add for certain inputs."""
        return total_of(_added(site, rows, spread, bias, transposed))

    if _added_at_all(site, spread, bias):
        parts.append(added(mean))
    if site.attention == "features":
        crossed = between_features(site, _input_name(site), x, w.mT if transposed else w)
        parts.extend([] if crossed is None else [crossed])
    total = total_of(parts)
    layout = site.layout
    where = origin(site, x, w.mT if transposed else w, added if _added_at_all(site, spread, bias) else None)
    if layout is None:
        return Moments(h, total, None, where)
    pooled: list[Tensor] = []
    own = None
    for part in _added(site, layout.mean(mean, site.samples), spread, bias, transposed):
        pooled.append(part.expand(site.samples, -1))
    if isinstance(x, Moments) and x.correlation is not None:
        pooled.append(x.amplitude(layout, site.samples).square() @ (second if transposed else second.mT))
    if not pooled:
        return Moments(h, total, None, where)
    if isinstance(x, Moments):
        own = x.mean_own(layout, site.samples) @ (second if transposed else second.mT)
    rho = together(total, total_of(pooled), own, layout, site.samples, -1)  # (B, O)
    return Moments(h, total, layout.spread(rho, total), where)


def _added_at_all(site: Site, spread: Tensor | None, bias: Value | None) -> bool:
    return own_weights(site) is not None or spread is not None or isinstance(bias, Moments)


def _input_name(site: Site) -> str:
    return (
        "input" if site.node.target is aten.linear.default else "mat1" if "addmm" in str(site.node.target) else "self"
    )


def _added(site: Site, mean: Tensor, spread: Tensor | None, bias: Value | None, transposed: bool) -> list[Tensor]:
    """Returns what uncertain weights and biases add to the variances, for certain inputs (..., I)."""
    treated = own_weights(site)
    shared = treated is not None and isinstance(bias, Moments) and treated.block.bias
    parts = []
    if treated is not None:
        parts.append(variance_from(site, treated, mean, shared))
    elif spread is not None:
        parts.append(_product(mean.square(), spread if transposed else spread.mT, None))
    if isinstance(bias, Moments) and not shared:
        parts.append(bias.variance.expand(*mean.shape[:-1], -1))
    return parts


def total_of(parts: Sequence[Tensor]) -> Tensor:
    """Returns the sum of some tensors."""
    found = parts[0]
    for part in parts[1:]:
        found = found + part
    return found


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


def is_layer(node: fx.Node) -> bool:
    """Whether a call is a linear layer: a product with a weight matrix of the network's own."""
    if node.target in _WITH_BIAS:
        return True
    return node.target in (aten.matmul.default, aten.mm.default) and _is_weight(node.args[1])


def _is_weight(node: Any) -> bool:
    """Whether a value is a parameter, up to transposition."""
    while isinstance(node, fx.Node) and node.op != "placeholder":
        if node.target not in (aten.t.default, aten.transpose.int, aten.numpy_T.default, aten.permute.default):
            return False
        node = node.args[0]
    return isinstance(node, fx.Node) and node.name.startswith("p_")


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
