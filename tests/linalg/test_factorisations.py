"""Orthonormal rows, taken whole and by slices."""

from __future__ import annotations

import pytest
import torch

import lapwing as lw
from lapwing.linalg import factorisations, orthonormal_rows, values


@pytest.mark.parametrize("shape", [(30, 200), (200, 30), (40, 40), (1, 9), (9, 1), (4, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_by_slices_are_those_of_the_svd(shape, dtype, monkeypatch):
    """Singular values over nine decades, of which a Gram matrix in float64 would lose the last."""
    for module in (factorisations, values):
        monkeypatch.setattr(module, "SLICE_NUMBERS", 400)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(side, min(shape), generator=generator, dtype=torch.float64) for side in shape)
    decades = 10 ** -torch.linspace(0, 9, min(shape), dtype=torch.float64)
    rows = ((torch.linalg.qr(left)[0] * decades) @ torch.linalg.qr(right)[0].T).to(dtype)
    for rank in (None, 1, 20):
        whole, found = (orthonormal_rows(rows, rank, whole=way) for way in (True, False))
        assert found.shape == whole.shape
        noise = 1e-5 if dtype == torch.float32 else 1e-6
        torch.testing.assert_close((found.double() @ whole.T).abs(), torch.eye(len(whole)).double(), rtol=0, atol=noise)
        torch.testing.assert_close(found @ found.T, torch.eye(len(whole)).to(found.dtype), rtol=0, atol=noise)
    assert orthonormal_rows(torch.zeros(shape), whole=False).shape == (0, shape[1])


def test_gradients_that_are_not_finite_get_a_sentence():
    with pytest.raises(lw.LapwingError, match="has 2 NaN or infinite entries"):
        orthonormal_rows(torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]]))
