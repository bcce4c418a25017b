"""Which family covers each parameter of the zoo: a family that no longer covers its layers is slow, not wrong."""

from __future__ import annotations

import pytest

import lapwing as lw
from tests.zoo import ZOO

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
