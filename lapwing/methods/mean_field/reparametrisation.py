"""One forward pass at random weights `θ ~ N(m, diag σ²)`, with gradients in m and σ.

Three ways to draw, all of them exact: each sample's outputs have the distribution that one draw of the weights gives.

- **local** (Kingma et al. 2015, section 2.2): a linear layer or convolution with one position per sample. Its output is
  `N(a Mᵀ, a² (σ²)ᵀ)`, and is drawn itself, sample by sample.
- **flipped** (Wen et al. 2018, equation 4): one with several positions, whose outputs share the weights and so are not
  independent. One draw serves the batch, with random signs per sample, `W_n = M + ΔW ∘ r_n s_nᵀ`.
- **shared**: everything else, one draw for the batch, also for a layer that does not say where its features are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...jacobian.layers import READERS, BatchAxis, Use
from ...network import batches
from ...network.eager import EagerMode
from ...tangent import Tangent


def per_sample_axes(tangent: Tangent) -> dict[str, BatchAxis]:
    """Returns which parameters can be drawn for each sample alone, and on which axis their layer holds the samples.

    They are weights and biases of linear layers and convolutions that the network uses once: two uses share a draw.
    """
    plan = tangent.plan
    if plan.single_sample:  # the axes are guesses
        return {}
    names = [name for use in plan.order for _, name in use]
    axes: dict[str, BatchAxis] = {}
    for block in tangent.blocks:
        uses = plan.uses.get(block.name, [])
        if block.matrix is None or block.matrix.one_hot or len(uses) != 1:
            continue
        ((index, axis, _),) = uses
        weight = dict(plan.order[index]).get("weight")
        if weight is not None and names.count(weight) == 1:  # so that the recorded call is the weight's only one
            axes |= {name: axis for name in block.parameters if names.count(name) == 1}
    return axes


class Drawing(EagerMode):
    """Adds noise to the outputs of layers whose weights are drawn for each sample.

    Args:
        means: name -> m, the tensors that the network is called with.
        stds: name -> σ.
        axes: what `per_sample_axes` returns.
        samples: B.
        generator: of the draws.
    """

    def __init__(
        self,
        means: Mapping[str, Tensor],
        stds: Mapping[str, Tensor],
        axes: Mapping[str, BatchAxis],
        samples: int,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self._names = {id(means[name]): name for name in axes}
        self._stds, self._axes, self._samples, self._generator = stds, axes, samples, generator

    def intercept(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs a function; where it is a layer's and the weight is drawn for each sample, adds the noise."""
        reader = READERS.get(function)
        use = reader(args, kwargs, lambda value: id(value) in self._names) if reader is not None else None
        out = function(*args, **kwargs)
        name = None if use is None else self._names.get(id(use.parameters.get("weight")))
        if use is None or name is None:
            return out
        matrix, axis = use.matrix(), self._axes[name]
        assert matrix is not None
        weight, bias = self._stds[name], use.parameters.get("bias")
        spread = self._stds.get(self._names.get(id(bias), ""))
        if use.features is None:
            return self._shared(function, args, kwargs, use, weight, spread)
        if out.numel() == self._samples * matrix.groups * matrix.outputs:
            return out + self._local(function, args, kwargs, use, weight, spread)
        return out + self._flipped(function, args, kwargs, use, axis, weight, spread)

    def _local(
        self, function: Callable, args: tuple, kwargs: dict, use: Use, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Returns `√(a² (σ²)ᵀ + σ_b²) ε`."""
        squares = _called(function, args, kwargs, use, use.inputs.square(), weight.square(), _square(bias))
        tiny = torch.finfo(squares.dtype).tiny  # a variance of 0 has a root without a slope
        return squares.clamp_min(tiny).sqrt() * self._normal(squares)

    def _shared(
        self, function: Callable, args: tuple, kwargs: dict, use: Use, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Returns the outputs at one draw of weight and bias."""
        mean, shift = use.parameters["weight"], use.parameters.get("bias")
        drawn = shift if shift is None or bias is None else shift + bias * self._normal(bias)
        return _called(function, args, kwargs, use, use.inputs, mean + weight * self._normal(weight), drawn)

    def _flipped(
        self,
        function: Callable,
        args: tuple,
        kwargs: dict,
        use: Use,
        axis: BatchAxis,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """Returns `((a ∘ s) ΔWᵀ) ∘ r + σ_b ε`, with one s, r and ε a sample for all its positions."""
        assert use.features is not None
        channels = use.features
        signs = self._by_sample(use.inputs, axis, channels, self._signs)
        drawn = weight * self._normal(weight)
        noise = _called(function, args, kwargs, use, use.inputs * signs, drawn, None)
        noise = noise * self._by_sample(noise, axis, channels, self._signs)
        if bias is None:
            return noise
        shifts = self._by_sample(noise, axis, channels, lambda like: self._normal(like) * bias)
        return noise + shifts

    def _by_sample(self, like: Tensor, axis: BatchAxis, channels: int, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """Draws numbers (B, channels), laid along the samples and channels of a layer's tensor."""
        drawn = draw(like.new_empty(self._samples, like.shape[channels]))
        positions = like.shape[axis.axis] // self._samples
        drawn = drawn.repeat(positions, 1) if axis.inner else drawn.repeat_interleave(positions, 0)
        shape = [1] * like.ndim
        shape[axis.axis], shape[channels] = drawn.shape
        return drawn.reshape(shape)

    def _normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._generator, dtype=like.dtype, device=like.device)

    def _signs(self, like: Tensor) -> Tensor:
        return torch.randint(0, 2, like.shape, generator=self._generator, device=like.device).to(like.dtype) * 2 - 1


def _square(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.square()


def _called(
    function: Callable, args: tuple, kwargs: dict, use: Use, inputs: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Calls a layer's function as it was called, with another input, weight and bias (zeros for None)."""
    old = use.parameters.get("bias")
    other = {id(use.inputs): inputs, id(use.parameters["weight"]): weight}
    if old is not None:
        other[id(old)] = torch.zeros_like(old) if bias is None else bias
    return function(
        *(other.get(id(arg), arg) for arg in args), **{key: other.get(id(arg), arg) for key, arg in kwargs.items()}
    )


def drawn_outputs(
    tangent: Tangent,
    inputs: Any,
    means: Mapping[str, Tensor],
    stds: Mapping[str, Tensor],
    axes: Mapping[str, BatchAxis],
    generator: torch.Generator,
) -> Tensor:
    """Runs the network at random weights.

    Args:
        tangent: the network, which is not written.
        inputs: B samples.
        means: name -> m of every treated parameter, in the parameter's dtype.
        stds: name -> σ, likewise.
        axes: what `per_sample_axes` returns, or {} for one draw of everything.
        generator: of the draws.

    Returns:
        Outputs (B, C), differentiable in means and stds.

    Cost: the layers with own draws run twice.
    """

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)

    weights = {name: m if name in axes else m + stds[name] * normal(m) for name, m in means.items()}
    with torch.enable_grad(), Drawing(weights, stds, axes, batches.size(inputs), generator):
        return tangent.call_with(weights, inputs)
