"""Monte Carlo: the network itself under draws of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ..covariance import AnyLatent, Covariance, LatentDraws
from ..data.inputs import Inputs
from ..linalg import check_memory
from ..options import SEED, at_least, option
from ..tangent import Tangent, split
from .uncertain import drawn
from .way import Way
from .weight_draws import draws_at_positions


@dataclass(frozen=True)
class MonteCarlo(Way):
    """`f(x, θ_s)` for draws `θ_s ~ N(θ̂, Σ)`. The weights are passed in, and the model is never written.

    Every call draws the same weights (same seed), so predictions for different inputs are joint. Uncertain inputs
    (`lw.Uncertain`) are drawn too, once for each draw of the weights.

    Args:
        draws: S, at least 2.
        seed: seed of the draws.

    Cost: S forward passes, chunked under the memory budget; memory O(P), plus S numbers for each output of each input.

    Example:
        >>> import lapwing as lw
        >>> lw.MonteCarlo(draws=30)
        MonteCarlo(draws=30, seed=0)
    """

    draws: int = option(50, at_least(2))
    seed: int = option(0, SEED)

    def latent(self, tangent: Tangent, covariance: Covariance, inputs: Inputs, joint: bool) -> AnyLatent:
        """Returns the outputs under each draw."""
        tangent.check(inputs.certain)
        outputs = self._outputs(tangent, covariance, inputs)
        first = next(outputs)
        if first.requires_grad:
            draws = torch.stack([first, *outputs])
        else:  # each is copied into the result at once, which saves memory
            check_memory(f"MonteCarlo(draws={self.draws})", self.draws, first.numel())
            draws = first.new_empty(self.draws, *first.shape)
            for i, part in enumerate(chain([first], outputs)):
                draws[i] = part
        return draws_at_positions(tangent, LatentDraws(draws, joint), inputs)

    def _outputs(self, tangent: Tangent, covariance: Covariance, inputs: Inputs) -> Iterator[Tensor]:
        """Yields the outputs (B, C) under each draw."""
        generator = torch.Generator(covariance.device).manual_seed(self.seed)
        # another seed for draws of inputs, so that uncertain inputs leave the draws of the weights unchanged
        noise = torch.Generator(tangent.device).manual_seed((self.seed + 0x9E3779B97F4A7C15) % 2**63)
        parameters, mean = tangent.parameters, tangent.mean()
        for _ in range(self.draws):
            steps = covariance.sample(1, generator)
            moved = {name: mean[name] + step[0].to(mean[name]) for name, step in steps.items()}
            weights = split(tangent.blocks, moved)
            weights = {name: value.to(parameters[name].dtype) for name, value in weights.items()}
            draw = drawn(inputs, noise) if inputs.spreads else inputs
            chunks = draw.chunks(tangent.chunk_length(1))
            parts = [tangent.call_with(weights, chunk).to(tangent.dtype) for _, chunk in chunks]
            yield parts[0] if len(parts) == 1 else torch.cat(parts)
