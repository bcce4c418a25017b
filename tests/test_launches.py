"""Ceilings on the operations that predictions and fits dispatch: `benchmarks/launches.py` counts and explains them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.launches import NETWORKS, calls_of, operations

CEILINGS = {
    ("MLP", "last layer"): {"fit": 395, "probs": 49, "mutual information": 160},
    ("MLP", "KFAC, all weights"): {"fit": 504, "probs": 75},
    ("CNN", "KFAC, all weights"): {"fit": 584, "probs": 116, "mutual information": 229},
    ("ResNet-20 on 8 x 8 pixels", "last layer"): {"probs": 133},
    ("ResNet-20 on 8 x 8 pixels", "Diagonal, all weights"): {"fit": 6137, "probs": 1223},
    ("ResNet-20 on 8 x 8 pixels", "KFAC, all weights"): {"fit": 4737, "probs": 1273},
}
"""The most operations of each call, with the pinned torch."""


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="other versions of torch dispatch other operations"
)
@pytest.mark.parametrize(("name", "way"), CEILINGS, ids=" ".join)
def test_no_call_dispatches_more_operations(name: str, way: str) -> None:
    model, x, classes = NETWORKS[name]()
    calls = calls_of(model.eval(), x, classes, way)
    found = {call: operations(calls[call]) for call in CEILINGS[name, way]}
    assert all(0 < found[call] <= most for call, most in CEILINGS[name, way].items()), found
