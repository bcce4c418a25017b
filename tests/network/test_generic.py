"""Parameters without a family: gradients that are zero but for rounding, and forward mode."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.tangent import Tangent
from tests import oracle
from tests.zoo_modules import Net

EVERY = lw.matching("*")


@pytest.mark.quick(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_are_nothing_but_rounding(seed: int, dtype: torch.dtype) -> None:
    """Generic parameters of which one has no gradient but rounding: a bias before a normalisation."""
    torch.manual_seed(seed)
    up = nn.utils.parametrizations.weight_norm(nn.ConvTranspose2d(1, 4, 2, stride=2))
    together = lambda net, x: net.head(torch.relu(net.norm(net.up(x))).mean((2, 3)))  # noqa: E731
    model = Net(together, up=up, norm=nn.InstanceNorm2d(4), head=nn.Linear(4, 3)).to(dtype).eval()
    x = torch.randn(20, 1, 5, 5, dtype=dtype)
    tangent = Tangent.survey(model, x, EVERY)
    record, names = tangent.record(x), ["up.parametrizations.weight.original1", "up.bias"]
    found = torch.cat([record[name].rows() for name in names], -1)
    wanted = oracle.jacobian(model.double(), x.double(), names)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("trained", [True, False])
def test_generic_parameters_that_reach_no_output(trained: bool) -> None:
    scaled = lambda net, x: net.head(x) * net.scale.exp().detach()  # noqa: E731
    parts = {"head": nn.Linear(4, 3), "scale": nn.Parameter(torch.ones(3)), "unused": nn.Linear(2, 2)}
    model, x = Net(scaled, **parts).double().eval().requires_grad_(trained), torch.randn(6, 4).double()
    posterior = lw.fit(model, [(x, torch.arange(6) % 3)], lw.Full(), params=EVERY, prior_precision=1.0)
    record = posterior.tangent.record(x)
    for name in ("scale", "unused"):
        assert not any(record[block].rows().any() for block in record if block.startswith(name))
    rows, wanted = record.rows().flatten(0, 1), oracle.jacobian(model, x, ["head.weight", "head.bias"]).flatten(0, 1)
    torch.testing.assert_close(rows @ rows.T, wanted @ wanted.T)


@pytest.mark.slow
def test_forward_mode_is_quiet() -> None:
    """Torch scripts its rules at the first use of forward mode and warns of that; a fresh process shows it."""
    code = (
        "import torch; from lapwing.network.generic import jvp; x = torch.ones(2); "
        "assert torch.allclose(jvp(torch.sin, (x,), (x,))[1], x.cos())"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


class Spectral(nn.Module):
    """A spectral convolution with complex weights, or with the same weights as pairs of real numbers."""

    def __init__(self, pairs: bool, positions: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        waves = torch.randn(4, 2, dtype=torch.float64)
        self.first, self.head = nn.Linear(6, 6).double(), nn.Linear(6, 3).double()
        self.waves = nn.Parameter(waves if pairs else torch.view_as_complex(waves))
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        waves = self.waves if self.waves.is_complex() else torch.view_as_complex(self.waves)
        modes = torch.fft.rfft(torch.tanh(self.first(x))) * self.scale
        out = self.head(torch.tanh(torch.fft.irfft(modes * waves, n=6)))
        return out[..., None].expand(-1, -1, 2) if self.positions else out


WAYS: dict[str, dict[str, Any]] = {
    "the default": {},
    "the width of a last layer": {"params": lw.last_layer},
    "complex weights alone": {"method": lw.Full(), "params": lw.matching("waves")},
    "a diagonal": {"method": lw.Diagonal(), "params": lw.everything},
    "mean field": {"method": lw.MeanField(steps=2)},
    "a prior mean": {"method": lw.Full(), "params": lw.everything, "prior_precision": 2.0, "prior_mean": {"waves"}},
}


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_complex_weight_counts_as_pairs_of_real_numbers(way: str, positions: bool) -> None:
    x, found = torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), []
    for pairs in (False, True):
        model = Spectral(pairs, positions).eval()
        y = (model(x) + 0.1 * torch.cos(5 * x[:, :1, None] if positions else 5 * x[:, :1])).detach()
        options = dict(WAYS[way])
        if "prior_mean" in options:
            options["prior_mean"] = {"waves": 0.5 * model.waves.detach()}
        posterior = lw.fit(model, [(x, y)], options.pop("method", None), **options)
        prediction = posterior.predict(x[:3])
        drawn = posterior.predict(x[:3], via=lw.MonteCarlo(draws=2))
        found.append((posterior.noise_variance, prediction.variance, drawn.variance, posterior.tangent.size))
    torch.testing.assert_close(*found, rtol=1e-10, atol=0)


def test_complex_weights_go_in_and_out_as_complex_numbers(reloaded: Any) -> None:
    model, pairs = Spectral(False).eval(), Spectral(True).eval()
    x, posteriors, penalties = torch.randn(8, 6, dtype=torch.float64), [], []
    for network in (model, pairs):
        options = {"likelihood": lw.Gaussian(0.1), "prior_precision": 1.0, "params": lw.everything}
        posterior = lw.fit(network, [(x, network(x).detach())], lw.Full(), **options)
        other = copy.deepcopy(network)
        with torch.no_grad():
            other.waves *= 1.1
        posterior.penalty(other).backward()
        penalties.append(other.waves.grad)
        posteriors.append(copy.deepcopy(posterior))
    assert f"over all {posteriors[0].tangent.size:,} weights" in repr(posteriors[0])
    draws = [posterior.sample(2)["waves"] for posterior in posteriors]
    assert draws[0].is_complex()
    torch.testing.assert_close(torch.view_as_real(draws[0]), draws[1])
    torch.testing.assert_close(torch.view_as_real(penalties[0]), penalties[1])
    torch.testing.assert_close(reloaded(posteriors[0], model).latent(x).variance, posteriors[1].latent(x).variance)


def test_swag_moves_complex_weights() -> None:
    x, found = torch.randn(8, 6, dtype=torch.float64), []
    for pairs in (False, True):
        model = Spectral(pairs).eval()
        collector = lw.SWAG.collector(model)
        for _ in range(3):
            with torch.no_grad():
                model.waves *= 1.1
            collector.add(model.state_dict())
        posterior = lw.SWAG.from_snapshots(collector, [(x, model(x).detach())], likelihood=lw.Gaussian(0.1))
        found.append((posterior.model(x).detach(), posterior.latent(x).variance))
    torch.testing.assert_close(*found)
