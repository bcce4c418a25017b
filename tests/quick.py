"""Which cases of a parametrised test are quick: `make test-slow` runs the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

NETWORKS = (
    "mlp", "mlp_scalar", "prelu", "cnn_bn_inplace", "grouped_strided_conv", "transposed_conv", "groupnorm_rms",
    "mha_seq_first", "gpt2", "tied", "embedding_bag_of_tokens", "lstm", "functional_reuse", "frozen_trunk",
)  # fmt: skip
"""Networks of the zoo that have, between them, every kind of layer, of output and of shared weight."""


def others_slow(cases: Iterable[Any], quick: Collection[Any] = NETWORKS) -> list[Any]:
    """Marks as slow all cases but the quick ones."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
