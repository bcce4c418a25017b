"""Posteriors of regressions whose noise depends on the input, without a tuning."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import lapwing as lw
from lapwing.data.inputs import Inputs
from lapwing.likelihoods.input_noise import InputNoise
from lapwing.tangent.features import features_at


def with_input_noise(posterior: lw.Posterior, x: Tensor, layer: str, df: float = 4.0) -> lw.Posterior:
    """Returns the posterior with noise by the inputs of a layer, which is bounded at about half of the inputs x."""
    features = features_at(posterior.tangent, layer, Inputs.of(x)).double()
    centre, scale = features.mean(0), 1 / features.std(0).clamp_min(1e-3)
    distances, ones = ((features - centre) * scale).square().sum(1), torch.ones(posterior.tangent.outputs).double()
    weights = torch.randn(len(ones), len(centre), generator=torch.Generator().manual_seed(0)).double()
    noise = InputNoise(
        centre, scale, weights, -3 * ones, 2 * ones, ones.cumsum(0) - 5, 0.01 * ones, torch.eye(len(centre)).double(),
        1.01 * distances.median(), 0.2, df, layer,
    )  # fmt: skip
    return replace(posterior, likelihood=replace(posterior.likelihood, input_noise=noise))
