"""What the weights of one layer add to its outputs, against the sum over its covariance matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lapwing.covariance.layer_block import FactorLayer

BATCH, OUTPUTS, INPUTS = 3, 4, 5


def layer(rows: int, kind: str) -> tuple[FactorLayer, Tensor]:
    """Returns a layer with K = `rows` factors, and its covariance (O, I, O, I)."""
    factor = torch.randn(rows, OUTPUTS, INPUTS, dtype=torch.float64)
    matrix = torch.einsum("koi,kpj->oipj", factor, factor)
    if kind == "factors":
        return FactorLayer(factor), matrix
    variances = torch.rand(OUTPUTS, INPUTS, dtype=torch.float64) + (factor.square().sum() if kind == "removed" else 0)
    diagonal = torch.diag(variances.flatten()).reshape(OUTPUTS, INPUTS, OUTPUTS, INPUTS)
    removed = kind == "removed"
    return FactorLayer(factor, variances, removed), diagonal - matrix if removed else diagonal + matrix


@pytest.mark.parametrize("inputs", ["certain", "variances", "covariances"])
@pytest.mark.parametrize("kind", ["factors", "added", "removed"])
@pytest.mark.parametrize("rows", [2, 7])  # fewer than outputs, and more: then by the covariance matrix
def test_a_layer_of_factors_is_its_covariance_matrix(rows: int, kind: str, inputs: str) -> None:
    block, covariance = layer(rows, kind)
    mean, root = torch.randn(BATCH, INPUTS).double(), torch.randn(BATCH, INPUTS, INPUTS).double()
    given: dict[str, Any] = {"certain": None, "variances": root[0, :BATCH].square(), "covariances": root @ root.mT}
    variance = given[inputs]
    moment = mean[:, :, None] * mean[:, None]
    if variance is not None:
        moment = moment + (torch.diag_embed(variance) if variance.ndim == 2 else variance)
    wanted = torch.einsum("bij,oipj->bop", moment, covariance)
    torch.testing.assert_close(block.push(mean, variance, True), wanted)
    torch.testing.assert_close(block.push(mean, variance, False), wanted.diagonal(dim1=1, dim2=2))
    term = block.covariances(mean, variance)
    torch.testing.assert_close(term.dense(), wanted)
    centre = torch.eye(OUTPUTS).double() - 1 / OUTPUTS
    torch.testing.assert_close(term.centred_variance(), (centre @ wanted @ centre).diagonal(dim1=1, dim2=2))
