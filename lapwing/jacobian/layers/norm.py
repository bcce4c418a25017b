"""Norms, scales and shifts, `out = γ ⊙ x̂ + β`. Their rows are explicit: `Σ_t g ⊙ x̂` for γ and `Σ_t g` for β."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ...linalg import joined, total
from ..jacobian import Rows
from ..strips import at, boxes
from .use import BatchAxis, Reader, Use, Watched, aten, by_name, register_reader

Normalise = Callable[[Tensor], Tensor]


class ElementwiseUse(Use):
    """`out = γ ⊙ x̂ + β`, where x̂ is a function of the input, such as the normalised input.

    x̂ is computed only for the Jacobian of γ, at some positions (..., P) at a time by `normalise`, or for all of x by
    `whole` if its statistics go over positions. The last `features` dimensions are features; None means dimension 1,
    and 0 that γ has one entry.
    """

    def __init__(
        self,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        normalise: Normalise,
        features: int | None,
        whole: Normalise | None = None,
        family: str = "norm",
    ) -> None:
        super().__init__(inputs, weight, bias)
        self.family, self.normalises = family, family == "norm"
        self._normalise, self._whole = normalise, whole
        self._features = features
        self.sample_dims = 1 if features is None else inputs.ndim - max(1, features)

    def jacobian(
        self, g: Tensor | None, axis: BatchAxis, samples: int, roles: frozenset[str], dtype: torch.dtype, limit: int
    ) -> Rows:
        assert g is not None  # only linear layers give the outputs
        parts = []
        if "weight" in roles:
            parts.append(self._scaled(g, axis, samples, dtype, limit))
        if "bias" in roles:
            parts.append(_over_positions(self._laid_out(g, axis, samples, 1), dtype).transpose(0, 1))
        return Rows(joined(parts, -1))

    def _scaled(self, g: Tensor, axis: BatchAxis, samples: int, dtype: torch.dtype, limit: int) -> Tensor:
        """Returns `Σ_t g ⊙ x̂` (B, R, P), by slices of samples and boxes of positions."""
        g = self._laid_out(g, axis, samples, 1)  # (R, B, *grid, P)
        x = self.inputs if self._whole is None else self._whole(self.inputs.to(dtype))
        x = self._laid_out(x, axis, samples, 0)
        numbers = (len(g) + 3) * x.shape[-1]  # entries per position
        limit = min(limit, 2**20) if g.device.type == "cpu" else limit  # products with x̂ that fit its cache
        step = max(1, limit // max(1, numbers * prod(x.shape[1:-1])))
        rows = [
            total(
                _over_positions(at(part, box, 2) * self._normalise(at(some, box, 1).to(dtype)), dtype)
                for box in boxes(x.shape[1:-1], limit // (numbers * len(some)))
            )
            for some, part in zip(x.split(step), g.split(step, 1), strict=True)
        ]
        return joined(rows, 1).transpose(0, 1)

    def _laid_out(self, values: Tensor, axis: BatchAxis, samples: int, lead: int) -> Tensor:
        """Returns a view (lead..., B, *grid, features)."""
        values = axis.front(values, samples, lead)
        if self._features is None:  # the channels come first among the last dimensions
            return values.movedim(1 - self.inputs.ndim, -1)
        return values.flatten(-self._features) if self._features else values.unsqueeze(-1)


def _over_positions(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums (R, B, *grid, features) over the grid."""
    grid = tuple(range(2, values.ndim - 1))
    return values.sum(grid, dtype=dtype) if grid else values.to(dtype)


def _over_last(norm: Callable, *names: str) -> Reader:
    """Returns the reader of a norm over the last dimensions, with these names of its arguments after the shape."""

    def reader(args: tuple, kwargs: dict, watched: Watched) -> Use:
        named = by_name(("input", "normalized_shape", *names), args, kwargs)
        options = {"eps": named["eps"]} if "eps" in named else {}

        def normalise(x: Tensor) -> Tensor:
            return norm(x, x.shape[-1:], **options)

        features = len(named["normalized_shape"])
        return ElementwiseUse(named["input"], named.get("weight"), named.get("bias"), normalise, features)

    return reader


def _group_norm(args: tuple, kwargs: dict, watched: Watched) -> Use:
    named = by_name(("input", "num_groups", "weight", "bias", "eps"), args, kwargs)
    groups, eps = named["num_groups"], named.get("eps", 1e-5)
    weight, bias = named.get("weight"), named.get("bias")
    return ElementwiseUse(named["input"], weight, bias, lambda x: x, None, lambda x: F.group_norm(x, groups, eps=eps))


def _batch_norm(args: tuple, kwargs: dict, watched: Watched) -> Use | None:
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    named = by_name(names, args, kwargs)
    mean, variance = named.get("running_mean"), named.get("running_var")
    if named.get("training", False) or mean is None or variance is None:
        return None
    eps = named.get("eps", 1e-5)

    def normalise(x: Tensor) -> Tensor:
        return (x - mean.to(x)) * (variance.to(x) + eps).rsqrt()

    return ElementwiseUse(named["input"], named.get("weight"), named.get("bias"), normalise, None)


def _exported_batch_norm(args: tuple, kwargs: dict, watched: Watched) -> Use | None:
    inputs, weight, bias, mean, variance, *rest = args
    return _batch_norm((inputs, mean, variance, weight, bias, *rest), kwargs, watched)


def _instance_norm(args: tuple, kwargs: dict, watched: Watched) -> Use | None:
    names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
    named = by_name(names, args, kwargs)
    if not named.get("use_input_stats", True):
        return _batch_norm((), named, watched)
    if named.get("running_mean") is not None or named.get("running_var") is not None or named["input"].ndim < 3:
        return None
    return _group_norm((), named | {"num_groups": named["input"].shape[1]}, watched)


def _prelu(args: tuple, kwargs: dict, watched: Watched) -> Use | None:
    named = by_name(("input", "weight"), args, kwargs)
    x, weight = named["input"], named["weight"]
    if x.ndim < 2:
        return None
    features = 0 if weight.numel() == 1 else None
    return ElementwiseUse(x, weight, None, lambda x: x.clamp(max=0), features, family="prelu")


def _elementwise(family: Literal["scale", "shift"]) -> Reader:
    """Returns the reader of `x ⊙ w` or `x + w`, with w spanning the last dimensions of x."""

    def reader(args: tuple, kwargs: dict, watched: Watched) -> Use | None:
        if kwargs or len(args) != 2 or not all(isinstance(arg, Tensor) for arg in args):
            return None
        for x, weight in (args, args[::-1]):
            if not watched(weight) or watched(x):
                continue
            shape = tuple(weight.shape)
            while len(shape) > 1 and shape[0] == 1:
                shape = shape[1:]
            if weight.ndim <= x.ndim > len(shape) > 0 and tuple(x.shape[x.ndim - len(shape) :]) == shape:
                factor, shift = (weight, None) if family == "scale" else (None, weight)
                return ElementwiseUse(x, factor, shift, lambda x: x, len(shape), family=family)
        return None

    return reader


register_reader(_over_last(F.layer_norm, "weight", "bias", "eps"), F.layer_norm, aten.layer_norm.default)
register_reader(_over_last(F.rms_norm, "weight", "eps"), F.rms_norm)
register_reader(_group_norm, F.group_norm, aten.group_norm.default)
register_reader(_batch_norm, F.batch_norm)
register_reader(_exported_batch_norm, aten.batch_norm.default)
register_reader(_instance_norm, F.instance_norm)
register_reader(_prelu, F.prelu, torch.prelu)
register_reader(_elementwise("scale"), torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, aten.mul.Tensor)
register_reader(_elementwise("shift"), torch.add, torch.Tensor.add, torch.Tensor.__add__, aten.add.Tensor)
