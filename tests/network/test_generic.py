"""Parameters without a family: gradients that are zero but for rounding, and forward mode."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.tangent import Tangent
from tests import oracle

EVERY = lw.matching("*")


class Unmoved(nn.Module):
    """Generic parameters of which one has no gradient but rounding: a bias before a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        up = nn.ConvTranspose2d(1, 4, 2, stride=2)
        self.up = nn.utils.parametrizations.weight_norm(up)
        self.norm = nn.InstanceNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.up(x))).mean((2, 3)))


@pytest.mark.quick(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_are_nothing_but_rounding(seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    model, x = Unmoved().to(dtype).eval(), torch.randn(20, 1, 5, 5, dtype=dtype)
    tangent = Tangent.survey(model, x, EVERY)
    record, names = tangent.record(x), ["up.parametrizations.weight.original1", "up.bias"]
    found = torch.cat([record[name].rows() for name in names], -1)
    wanted = oracle.jacobian(model.double(), x.double(), names)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("trained", [True, False])
def test_generic_parameters_that_reach_no_output(trained: bool) -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.scale, self.unused = nn.Linear(4, 3), nn.Parameter(torch.ones(3)), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.scale.exp()
            return self.head(x) * scale

    model, x = Aside().double().eval().requires_grad_(trained), torch.randn(6, 4).double()
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
