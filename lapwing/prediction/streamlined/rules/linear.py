"""Moments of linear layers `W a + b`, whose uncertain weights and inputs are independent, and of embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ....covariance.terms import DenseTerm, EigenTerm, Term
from ..moments import FeatureCorrelation, Moments, Value, layer_correlation, mean_of, root, total_of, variance_of
from ..operations import Kind, Operation, aten, numbered, register_aten
from ..sites import INPUTS, WEIGHTS, Site, Treated
from .arithmetic import contracted, contracted_label
from .attention import between_features, origin


@dataclass(frozen=True)
class Layer:
    """A call `a Wᵀ + b` with its uncertain arguments. `source` is the name of the argument a."""

    site: Site
    source: str
    x: Value
    weight: Value
    bias: Value | None
    transposed: bool
    """Whether W is stored as (I, O), as in Hugging Face's Conv1D."""
    treated: Treated | None
    """The treated weights; None if they are certain, or have another layout."""

    @classmethod
    def of(cls, site: Site, arguments: Mapping[str, Any]) -> Layer:
        """Returns the layer of a product with a matrix."""
        source, weight = (next(name for name in names if name in arguments) for names in (INPUTS, WEIGHTS))
        bias = arguments["self"] if source == "mat1" else arguments.get("bias")
        return cls(site, source, arguments[source], arguments[weight], bias, weight != "weight", site.weights)

    @property
    def matrix(self) -> Tensor:
        """The mean of W (O, I)."""
        w = mean_of(self.weight)
        return w.mT if self.transposed else w

    @property
    def bias_is_shared(self) -> bool:
        """Whether the bias is uncertain, in one block with the weights."""
        return self.treated is not None and isinstance(self.bias, Moments) and self.treated.block.bias

    def rows(self, mean: Tensor) -> Tensor:
        """Returns the inputs of the block of weights, with a one appended for its bias."""
        return F.pad(mean, (0, 1), value=1.0) if self.bias_is_shared else mean

    def added(self, mean: Tensor) -> list[Tensor]:
        """Returns the variances (..., O) from uncertain weights and biases, `Σ_ii' a_i a_i' Cov[W_ji, W_ji']`."""
        parts, shared = [], False
        if self.treated is not None and not self.treated.is_diagonal:
            rows, shared = self.rows(mean), self.bias_is_shared
            parts.append(self.treated.push(rows.reshape(-1, 1, rows.shape[-1])).reshape(*rows.shape[:-1], -1))
        elif isinstance(self.weight, Moments):
            parts.append(mean.square() @ self._inputs_first(self.weight.variance))
        if isinstance(self.bias, Moments) and not shared:
            parts.append(self.bias.variance.expand(*mean.shape[:-1], -1))
        return parts

    def second(self) -> Tensor:
        """Returns `W² + Var[W]` (I, O), which multiplies the variances of inputs."""
        w, spread = mean_of(self.weight), variance_of(self.weight)
        square = self.site.constant("second", lambda: total_of([w.square(), spread]))
        return self._inputs_first(square)

    def _inputs_first(self, matrix: Tensor) -> Tensor:
        return matrix if self.transposed else matrix.mT


def linear(site: Site, arguments: dict[str, Any]) -> Moments:
    """Returns the moments of `F.linear(a, W, b)`, `a W + b`, `a W` (Streamlined Prediction, equations 2 to 4).

        E[h] = W m + b        Var[h]_j = Σ_i W_ji² v_i + Σ_ii' (m mᵀ + diag v)_ii' Cov[W_ji, W_ji']

    Without a layer's weights it is a product of two independent tensors.
    """
    if arguments.get("beta", 1) != 1 or arguments.get("alpha", 1) != 1:
        raise site.refusal("it multiplies its terms by factors", "Write addmm(b, a, W) without alpha and beta.")
    layer = Layer.of(site, arguments)
    if layer.source == "self" and site.treated("other", "mat2") is None:
        return contracted(site, layer.x, layer.weight, torch.matmul)
    x, mean, variance = layer.x, mean_of(layer.x), variance_of(layer.x)
    h = site.apply({name: mean_of(value) for name, value in arguments.items()})
    parts: list[Tensor | None] = [] if variance is None else [variance @ layer.second()]
    parts.append(total_of(layer.added(mean)))
    if site.attention == "features":
        parts.append(between_features(site, layer.source, x, layer.matrix))
    total = total_of(parts)
    start = origin(site, x, layer.matrix)
    layout = site.layout
    if layout is None:
        return Moments(h, total, None, start)
    pooled = [part.expand(site.samples, -1) for part in layer.added(layout.mean(mean, site.samples))]
    if not pooled and (not isinstance(x, Moments) or x.correlation is None):
        return Moments(h, total, None, start)
    if isinstance(x, Moments):
        common, individual = x.averages(layout, site.samples)
        count = total.numel() // (site.samples * total.shape[-1])  # T
        shared = [] if common is None else [common.square()]
        pooled.append(total_of([individual / count, *shared]) @ layer.second())
    return Moments(h, total, layer_correlation(total, total_of(pooled), layout, site.samples, -1), start)


def linear_with_covariances(
    site: Site, arguments: dict[str, Any], samples: int, features: FeatureCorrelation | None = None
) -> Moments | None:
    """Returns the outputs of a linear layer with their covariances, or None if it has several positions per sample.

        Cov[h] = W diag(√v) R diag(√v) Wᵀ + Σ_ii' (m mᵀ + diag v)_ii' Cov[W_ji, W_j'i']

    R is the correlation of the inputs, the identity if `features` is None.
    """
    layer = Layer.of(site, arguments)
    if not has_one_position(layer, samples):
        return None
    mean, variance, w = mean_of(layer.x), variance_of(layer.x), layer.matrix
    shape, mean = (*mean.shape[:-1], -1), mean.reshape(samples, -1)
    terms: list[Term] = []
    if variance is not None:
        variance = variance.reshape(samples, -1)
        alone = variance
        if features is not None:
            factor = (w * root(variance)[:, None, :]) @ features.factor.to(w)  # (B, O, K)
            centred = (factor - factor.mean(1, keepdim=True)).square().sum(-1)
            terms.append(DenseTerm(factor @ factor.mT, centred))
            alone = variance * features.rest.to(w)
        through = (w * alone[:, None, :]) @ w.mT  # (B, O, O)
        terms.append(DenseTerm(through, alone @ (w - w.mean(0)).square().mT))
    if layer.treated is not None:
        spread = F.pad(variance, (0, 1)) if variance is not None and layer.bias_is_shared else variance
        terms.append(layer.treated.covariance.covariances(layer.rows(mean), spread))
    bias = bias_term(layer)
    if bias is not None:
        terms.append(bias)
    matrix = total_of(term.dense() for term in terms).expand(samples, -1, -1)
    centred = total_of(term.centred_variance() for term in terms).expand(samples, -1)
    return Moments.joint(F.linear(mean, w, mean_of(layer.bias)).reshape(shape), matrix, centred)


def has_one_position(layer: Layer, samples: int) -> bool:
    """Whether a layer is applied once per sample, with weights that are certain or belong to a block."""
    x, w = mean_of(layer.x), mean_of(layer.weight)
    if isinstance(layer.weight, Moments) and layer.treated is None:
        return False
    return x.ndim > 1 and w.ndim == 2 and x.numel() == samples * x.shape[-1]


def bias_term(layer: Layer) -> Term | None:
    """Returns the covariance (1, O, O) of an uncertain bias outside the block of the weights, or None."""
    if not isinstance(layer.bias, Moments) or layer.bias_is_shared:
        return None
    alone = layer.site.treated("bias", "self")
    if alone is not None and not alone.block.has_weight:
        return alone.covariance.covariances(layer.bias.mean.new_ones(1, 1), None)
    return EigenTerm(None, layer.bias.variance[None])


def linear_label(node: fx.Node, labels: Mapping[str, Any]) -> Any:
    """Returns the labels of a layer's outputs, or `contracted_label` for another product."""
    transpositions = aten.t.default, aten.transpose.int, aten.numpy_T.default, aten.permute.default
    weight: Any = node.args[1]
    while isinstance(weight, fx.Node) and weight.target in transpositions:
        weight = weight.args[0]
    is_parameter = isinstance(weight, fx.Node) and weight.op == "placeholder" and weight.name.startswith("p_")
    if is_parameter or node.target in (aten.linear.default, aten.addmm.default):
        return numbered(node, -1)
    return contracted_label(node, labels)


def embedded(site: Site, arguments: dict[str, Any]) -> Moments:
    """Returns the means and variances of rows. The padding token has variance 0, as torch gives it no gradient."""
    table, tokens, padding = arguments["weight"], arguments["indices"], arguments["padding_idx"]
    mean, variance = (torch.embedding(part, tokens) for part in (table.mean, table.variance))
    if padding is not None and padding >= 0:
        variance = variance * (tokens != padding)[..., None]
    return Moments(mean, variance)


register_aten(Operation(Kind.LINEAR, linear, linear_label), "linear.default", "addmm.default", "mm.default")
register_aten(Operation(Kind.LINEAR | Kind.PRODUCT, linear, linear_label), "matmul.default")
register_aten(Operation(Kind.EMBEDDING, embedded, lambda node, labels: numbered(node, -1)), "embedding.default")
