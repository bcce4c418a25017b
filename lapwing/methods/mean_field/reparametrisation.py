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

from ...jacobian.layers import READERS, BatchAxis
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
        mean, shift = use.parameters["weight"], use.parameters.get("bias")
        weight, bias = self._stds[name], self._stds.get(self._names.get(id(shift), ""))

        def called(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            """The layer's function, called as it was, with another input, weight and bias (zeros for None)."""
            other = {id(use.inputs): inputs, id(mean): weight}
            if shift is not None:
                other[id(shift)] = torch.zeros_like(shift) if bias is None else bias
            return function(
                *(other.get(id(arg), arg) for arg in args),
                **{key: other.get(id(arg), arg) for key, arg in kwargs.items()},
            )

        if use.features is None:  # shared: one draw of weight and bias
            drawn = shift if shift is None or bias is None else shift + bias * self.normal(bias)
            return called(use.inputs, mean + weight * self.normal(weight), drawn)
        if out.numel() == self._samples * matrix.groups * matrix.outputs:  # local: `√(a² (σ²)ᵀ + σ_b²) ε`
            squares = called(use.inputs.square(), weight.square(), None if bias is None else bias.square())
            tiny = torch.finfo(squares.dtype).tiny  # a variance of 0 has a root without a slope
            return out + squares.clamp_min(tiny).sqrt() * self.normal(squares)
        # flipped: `((a ∘ s) ΔWᵀ) ∘ r + σ_b ε`, with one s, r and ε a sample for all its positions
        signs = self._by_sample(use.inputs, axis, use.features, self._signs)
        noise = called(use.inputs * signs, weight * self.normal(weight), None)
        noise = noise * self._by_sample(noise, axis, use.features, self._signs)
        if bias is not None:
            noise = noise + self._by_sample(noise, axis, use.features, lambda like: self.normal(like) * bias)
        return out + noise

    def _by_sample(self, like: Tensor, axis: BatchAxis, channels: int, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """Draws numbers (B, channels), laid along the samples and channels of a layer's tensor."""
        drawn = draw(like.new_empty(self._samples, like.shape[channels]))
        positions = like.shape[axis.axis] // self._samples
        drawn = drawn.repeat(positions, 1) if axis.inner else drawn.repeat_interleave(positions, 0)
        shape = [1] * like.ndim
        shape[axis.axis], shape[channels] = drawn.shape
        return drawn.reshape(shape)

    def normal(self, like: Tensor) -> Tensor:
        """Draws standard normal numbers in the shape of a tensor."""
        return torch.randn(like.shape, generator=self._generator, dtype=like.dtype, device=like.device)

    def _signs(self, like: Tensor) -> Tensor:
        return torch.randint(0, 2, like.shape, generator=self._generator, device=like.device).to(like.dtype) * 2 - 1


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
    with torch.enable_grad():
        drawing = Drawing(means, stds, axes, batches.size(inputs), generator)
        weights = {name: m if name in axes else m + stds[name] * drawing.normal(m) for name, m in means.items()}
        with drawing:
            return tangent.call_with(weights, inputs)
