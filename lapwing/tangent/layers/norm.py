"""Norms, scales and shifts: weights that multiply or add to features one by one, `out = γ ⊙ x̂ + β`.

Their rows are explicit and small: `Σ_t g ⊙ x̂` for γ and `Σ_t g` for β.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..jacobian import Rows
from .use import BatchAxis, Handler, Use, Watched

Normalise = Callable[[Tensor], Tensor]


class NormUse(Use):
    """`out = γ ⊙ x̂ + β` where x̂ is the normalised input, its features the last `features` dimensions (or dimension 1).

    The normalised input is computed only when the Jacobian of γ is asked for.
    """

    family = "norm"

    def __init__(
        self, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, normalise: Normalise, features: int | None
    ) -> None:
        super().__init__(inputs, weight, bias)
        self._normalise = normalise
        self._features = features  # None: one channel dimension, dimension 1
        self.sample_dims = 1 if features is None else inputs.ndim - features

    def jacobian(
        self, g: Tensor | None, axis: BatchAxis, samples: int, roles: frozenset[str], dtype: torch.dtype
    ) -> Rows:
        """Sums over every dimension that is neither sample nor feature."""
        assert g is not None  # only linear layers are read as outputs
        parts = []
        if "weight" in roles:
            parts.append(self._rows(g.to(dtype) * self._normalise(self.inputs.to(dtype)), axis, samples))
        if "bias" in roles:
            parts.append(self._rows(g.to(dtype), axis, samples))
        return Rows(torch.cat(parts, -1))

    def _rows(self, products: Tensor, axis: BatchAxis, samples: int) -> Tensor:
        products = axis.front(products, samples, 1)  # (R, B, rest...)
        if self._features is None:
            channels = -(self.inputs.ndim - 1)  # the channels come first among the last dimensions
            keep = products.movedim(channels, -1)
            products = keep.reshape(*keep.shape[:2], -1, keep.shape[-1]).sum(2)
        else:
            products = products.reshape(*products.shape[:2], -1, *products.shape[products.ndim - self._features :])
            products = products.sum(2).flatten(2)
        return products.transpose(0, 1)  # (B, R, P)


class ScaleUse(NormUse):
    """`out = x ⊙ w`, with w spanning the last dimensions of x."""

    family = "scale"


class ShiftUse(NormUse):
    """`out = x + w`, with w spanning the last dimensions of x."""

    family = "shift"

    def jacobian(
        self, g: Tensor | None, axis: BatchAxis, samples: int, roles: frozenset[str], dtype: torch.dtype
    ) -> Rows:
        """The gradient at the output is the gradient of the weight."""
        assert g is not None
        return Rows(self._rows(g.to(dtype), axis, samples))


def _read(names: tuple[str, ...], args: tuple, kwargs: dict) -> dict:
    return dict(zip(names, args, strict=False)) | kwargs


def _shape(given: dict) -> list[int]:
    return list(given["shape"] if "shape" in given else given["normalized_shape"])


def _layer_norm(args: tuple, kwargs: dict, watched: Watched) -> Use:
    given = _read(("input", "shape", "weight", "bias", "eps"), args, kwargs)
    shape, eps = _shape(given), given.get("eps", 1e-5)
    return NormUse(
        given["input"], given.get("weight"), given.get("bias"), lambda x: F.layer_norm(x, shape, eps=eps), len(shape)
    )


def _rms_norm(args: tuple, kwargs: dict, watched: Watched) -> Use:
    given = _read(("input", "shape", "weight", "eps"), args, kwargs)
    shape, eps = _shape(given), given.get("eps")
    return NormUse(given["input"], given.get("weight"), None, lambda x: F.rms_norm(x, shape, eps=eps), len(shape))


def _group_norm(args: tuple, kwargs: dict, watched: Watched) -> Use:
    given = _read(("input", "num_groups", "weight", "bias", "eps"), args, kwargs)
    groups, eps = given["num_groups"], given.get("eps", 1e-5)
    return NormUse(
        given["input"], given.get("weight"), given.get("bias"), lambda x: F.group_norm(x, groups, eps=eps), None
    )


def _batch_norm(args: tuple, kwargs: dict, watched: Watched) -> Use | None:
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = _read(names, args, kwargs)
    mean, variance = given.get("running_mean"), given.get("running_var")
    if given.get("training", False) or mean is None or variance is None:
        return None
    eps = given.get("eps", 1e-5)

    def normalise(x: Tensor) -> Tensor:
        return F.batch_norm(x, mean.to(x.dtype), variance.to(x.dtype), eps=eps)

    return NormUse(given["input"], given.get("weight"), given.get("bias"), normalise, None)


def _elementwise(kind: type[NormUse]) -> Handler:
    def handler(args: tuple, kwargs: dict, watched: Watched) -> Use | None:
        if kwargs or len(args) != 2 or not all(isinstance(arg, Tensor) for arg in args):
            return None
        for x, weight in (args, args[::-1]):
            if not watched(weight) or watched(x):
                continue
            shape = tuple(weight.shape)
            while len(shape) > 1 and shape[0] == 1:
                shape = shape[1:]
            if weight.ndim <= x.ndim > len(shape) > 0 and tuple(x.shape[x.ndim - len(shape) :]) == shape:
                return kind(x, weight, None, lambda x: x, len(shape))
        return None

    return handler


HANDLERS: dict[object, Handler] = {
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    torch.mul: _elementwise(ScaleUse),
    torch.Tensor.mul: _elementwise(ScaleUse),
    torch.Tensor.__mul__: _elementwise(ScaleUse),
    torch.add: _elementwise(ShiftUse),
    torch.Tensor.add: _elementwise(ShiftUse),
    torch.Tensor.__add__: _elementwise(ShiftUse),
}
