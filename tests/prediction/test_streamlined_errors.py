"""Refusals of streamlined prediction, with the call and the line to write."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lapwing import tangent as tn
from lapwing.covariance import DenseCovariance
from lapwing.errors import LapwingError
from lapwing.prediction.streamlined import Streamlined
from tests.prediction.streamlined_oracle import F64, build, psd
from tests.zoo import ZOO


def refuse(model, x, message, params=None, way=None, **options):
    tangent = tn.Tangent.survey(model.double().eval(), x, params or tn.matching("*"), **options)
    covariance = DenseCovariance(tangent.blocks, psd(tangent.size), torch.ones(len(tangent.blocks), dtype=F64), 1.0)
    with pytest.raises(LapwingError, match=message) as caught:
        (way or Streamlined()).latent(tangent, covariance, x, joint=False)
    assert "lw.Linearized()" in str(caught.value)


class Sorted(nn.Module):
    def forward(self, x):
        return x.sort(-1).values


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


def test_large_calls_without_a_rule_are_named():
    x = torch.randn(3, 4, dtype=F64)
    model = nn.Sequential(nn.Linear(4, 5000), nn.Sequential(nn.Tanh(), Sorted()), nn.Linear(5000, 2))
    found = r"stops at aten.sort in '1.1' \(Sorted\): it has no moment rule, and its uncertain input has 5000 entries"
    tangent = tn.Tangent.survey(model.double().eval(), x, tn.matching("0.bias"))
    with pytest.raises(LapwingError, match=found) as caught:
        Streamlined().latent(tangent, build(tangent, "diagonal"), x)
    assert "lw.Linearized()" in str(caught.value)


def test_control_flow_on_data_is_named():
    refuse(Branching(), torch.ones(3, 4, dtype=F64), "torch.export cannot read the forward of Branching")


def test_inputs_that_the_network_refuses_are_named():
    """A tuple of inputs and labels, say: the network cannot take it, and its forward is not to blame."""
    x = torch.randn(3, 4, dtype=F64)
    tangent = tn.Tangent.survey(nn.Linear(4, 2).double().eval(), x, tn.matching("*"))
    covariance = DenseCovariance(tangent.blocks, psd(tangent.size), torch.ones(1, dtype=F64), 1.0)
    with pytest.raises(LapwingError, match=r"Linear, called as model\(\*inputs\) on tuple"):
        Streamlined().latent(tangent, covariance, (x, torch.zeros(3)))


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
def test_groups_with_correlated_weights_are_named(layer):
    model = nn.Sequential(layer(4, 6, 2, groups=2), nn.Flatten())
    refuse(model, torch.randn(2, 4, 3, 2, dtype=F64), "it has groups, and the posterior correlates all its weights")


@pytest.mark.quick(2)
@pytest.mark.parametrize("mode", ["diagonal", "full"])
@pytest.mark.parametrize("name", ["tied", "shared_module", "functional_reuse"])
def test_shared_weights_are_named(name, mode):
    names = {"tied": "embedding.weight", "shared_module": "shared.weight", "functional_reuse": "fc.weight"}
    case = ZOO[name]
    refuse(case.build(), case.inputs(3, 0), f"share the treated parameter {names[name]}", way=Streamlined(mode))
