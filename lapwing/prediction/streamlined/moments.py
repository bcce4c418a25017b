"""What streamlined prediction carries from layer to layer, and what a rule that carries it through a layer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from ...covariance import LayerBlock
from ...tangent import Block


@dataclass(frozen=True)
class Moments:
    """The Gaussian over one activation, independent between samples.

    Attributes:
        mean: (B, D); of any shape while the activation is certain.
        variance: variances (B, D), covariances (B, D, D), or None while the activation is certain.
    """

    mean: Tensor
    variance: Tensor | None = None


@dataclass(frozen=True)
class Treated:
    """The treated weights of one layer.

    Attributes:
        block: which of weight and bias they are, and their layout.
        covariance: their covariance.
    """

    block: Block
    covariance: LayerBlock

    def push(self, moments: Moments, full: bool) -> Tensor:
        """Returns what the weights add to the output's covariances (B, O, O) or variances (B, O).

        The input is [a, 1], a or 1 as weight and bias, the weight or the bias are treated; the one is certain.
        """
        mean, variance = moments.mean, moments.variance
        if not self.block.has_weight:
            return self.covariance.push(mean.new_ones(mean.shape[0], 1), None, full)
        if self.block.bias:
            mean = F.pad(mean, (0, 1), value=1.0)  # (B, I + 1)
            if variance is not None:
                variance = F.pad(variance, (0, 1) * (variance.ndim - 1))
        return self.covariance.push(mean, variance, full)


def _any(module: nn.Module) -> bool:
    return True


@dataclass(frozen=True)
class Rule:
    """How moments pass through one kind of module.

    Attributes:
        family: the family that may be treated there, named as in `tangent/layers`; "elementwise" has no weights.
        apply: `(module, moments, treated or None, full)` -> moments, where `full` asks for covariances.
        accepts: whether the module's options are covered.
    """

    family: str
    apply: Callable[[nn.Module, Moments, Treated | None, bool], Moments]
    accepts: Callable[[nn.Module], bool] = _any


def call_detached(module: nn.Module, inputs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Runs a module so that no gradient reaches its parameters, these cast to `dtype` where one is given."""
    parameters = {name: value.detach().to(dtype or value.dtype) for name, value in module.named_parameters()}
    return functional_call(module, parameters, (inputs,)) if parameters else module(inputs)
