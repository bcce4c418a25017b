"""Moments through element-wise modules, linearised at the mean, and through modules that leave vectors as they are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import jvp

from .moments import Moments, Rule, Treated, call_detached


def elementwise(moments: Moments, function: Callable[[Tensor], Tensor]) -> Moments:
    """Passes moments through an element-wise function g (Streamlined Prediction, equations 5 and 6).

        E[g(h)] = g(m)        Cov[g(h)] = diag(g'(m)) Cov[h] diag(g'(m))

    Args:
        moments: of the input, (B, D).
        function: g, differentiable; g' comes from one forward-mode pass.

    Cost: two evaluations of g, time O(B D) for variances and O(B D²) for covariances.
    """
    mean, variance = moments.mean, moments.variance
    if variance is None:
        return Moments(function(mean))
    mean, slope = jvp(function, (mean,), (torch.ones_like(mean),))  # type: ignore[misc]
    if variance.ndim == 3:
        return Moments(mean, slope[:, :, None] * variance * slope[:, None, :])
    return Moments(mean, slope.square() * variance)


def _elementwise(module: nn.Module, moments: Moments, treated: Treated | None, full: bool) -> Moments:
    def function(inputs: Tensor) -> Tensor:
        return call_detached(module, inputs.clone(), inputs.dtype)  # in-place modules write to the clone

    return elementwise(moments, function)


def _unchanged(module: nn.Module, moments: Moments, treated: Treated | None, full: bool) -> Moments:
    return moments


def _keeps_vectors(module: nn.Module) -> bool:
    return module.start_dim in (1, -1)


ACTIVATIONS = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid,
    nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign,
    nn.Tanh, nn.Tanhshrink, nn.Threshold,
)  # fmt: skip

RULES: dict[type[nn.Module], Rule] = {
    **{kind: Rule("elementwise", _elementwise) for kind in ACTIVATIONS},
    nn.Identity: Rule("elementwise", _unchanged),
    nn.Dropout: Rule("elementwise", _unchanged),  # in eval mode, which is checked
    nn.AlphaDropout: Rule("elementwise", _unchanged),
    nn.Flatten: Rule("elementwise", _unchanged, _keeps_vectors),
}
"""Module class -> its rule. A new element-wise module adds its class."""
