"""Predictions within `torch.inference_mode()` equal the ones outside it, also if the noise depends on the input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing as lw
from tests.trained import train


@pytest.mark.parametrize("way", [None, lw.MonteCarlo(draws=8), lw.Streamlined()])
def test_noise_by_the_inputs_of_a_layer_is_predicted_in_inference_mode(way: lw.Way | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(400, 1, generator=generator) * 4 - 2
    y = torch.sin(2 * x) + (0.05 + 0.1 * (x + 2)) * torch.randn(400, 1, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
        train(model, lambda: nn.functional.mse_loss(model(x), y), 300, 1e-2)
    posterior = lw.fit(model, (x, y), lw.KFAC(), likelihood=lw.Gaussian(noise="input"), validation=(x + 0.01, y))
    assert posterior.likelihood.input_noise is not None
    wanted = posterior.predict(x[:5], via=way).std
    with torch.inference_mode():
        for inputs in (x[:5], x[:5].clone(), [(x[:5], y[:5])]):
            torch.testing.assert_close(posterior.predict(inputs, via=way).std, wanted)
