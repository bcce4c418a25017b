"""Which family covers each parameter of the zoo: a family that no longer covers its layers is slow, not wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing as lw
from tests.zoo import ZOO

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...], str]] = {
    "linear": (nn.Linear(6, 4), (6,), "linear"),
    "conv1d": (nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 9), "conv"),
    "conv2d": (nn.Conv2d(4, 6, 3, dilation=2, groups=2), (4, 7, 7), "conv"),
    "batch_norm": (nn.BatchNorm2d(3), (3, 4, 4), "norm"),
    "layer_norm": (nn.LayerNorm(6), (5, 6), "norm"),
    "group_norm": (nn.GroupNorm(2, 6), (6, 4, 4), "norm"),
    "rms_norm": (nn.RMSNorm(6), (5, 6), "norm"),
}

GENERIC = {
    "bilinear": {"bilinear.weight", "bilinear.bias"},
    "vit": {"vit.embeddings.cls_token"},
    "weight_norm": {f"0.parametrizations.weight.original{i}" for i in (0, 1)},
}
"""Blocks of the zoo that no family covers; every other one is covered."""


@pytest.mark.parametrize("name", ZOO)
def test_only_these_blocks_are_generic(name: str) -> None:
    case = ZOO[name]
    report = lw.coverage(case.build(), case.inputs(4, 0), lw.matching("*"))
    assert {line.block for line in report.generic} == GENERIC.get(name, set())


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_covered_by_its_family(name: str) -> None:
    layer, shape, family = LAYERS[name]
    torch.manual_seed(0)
    for value in layer.parameters():
        nn.init.normal_(value)
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).eval()
    x = torch.randn(5, *shape)
    model(x)
    found = {line.block: line.family for line in lw.coverage(model, x).lines if line.block.startswith("0")}
    assert set(found.values()) == {family}


def test_embeddings_are_covered_by_their_family() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(20, 3)).eval()
    found = {line.block: line.family for line in lw.coverage(model, torch.arange(20).reshape(4, 5) % 7).lines}
    assert found == {"0": "embedding", "2": "linear"}
