"""Covariances of attention's values between the features of a head, against dense formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.prediction.streamlined_oracle import F64, propagate


class Attention(nn.Module):
    """Scores of z, values of x: linear in x and in the weights of the values."""

    def __init__(self, heads: int, packed: bool = False, first: bool = True, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.first, self.causal, self.packed = heads, first, causal, packed
        self.scores = nn.Linear(4, 12)
        self.values = nn.Linear(4, 18 if packed else 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x, z):
        if not self.first:
            x = x.transpose(0, 1)
        v = self.values(x)
        if not self.first:
            v = v.transpose(0, 1)
        v = v.unflatten(-1, (3, 6)).unbind(2)[2] if self.packed else v
        q, k = self.scores(z).chunk(2, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2)).flatten(1)


def case(**options):
    torch.manual_seed(0)
    return Attention(**options).double().eval(), (torch.randn(2, 5, 4, dtype=F64), torch.randn(2, 5, 4, dtype=F64))


OPTIONS = [{"heads": 1}, {"heads": 2}, {"heads": 3, "packed": True}, {"heads": 2, "first": False, "causal": True}]


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_features_of_a_head_that_share_inputs_equal_loops(options):
    """Equation 74: the covariances of the weights within a head, independent heads."""
    model, (x, z) = case(**options)
    v = torch.rand(2, 5, 4, dtype=F64)
    inputs, spreads = (x, z), {0: v}
    _, found, _ = propagate(model, inputs, spreads, attention="features", positions="independent")
    heads, size = options["heads"], 6 // options["heads"]
    W = model.values.weight.detach()[-6:]
    U = model.out.weight.detach()
    q, k = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in model.scores(z).chunk(2, -1))
    eye = torch.eye(5, dtype=F64).expand(2, heads, 5, 5)
    P = F.scaled_dot_product_attention(q, k, eye, is_causal=options.get("causal", False)).detach()
    expected = torch.zeros(2, 5, 3, dtype=F64)
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        cov = torch.einsum("ei,bsi,fi->bsef", W[part], v, W[part])  # of the values' features, token by token
        mixed = torch.einsum("bts,bsef->btef", P[:, h].square(), cov)
        expected += torch.einsum("me,btef,mf->btm", U[:, part], mixed, U[:, part])
    torch.testing.assert_close(found, expected.flatten(1))
    _, plain, _ = propagate(model, inputs, spreads, positions="independent")
    assert (plain - found).abs().max() > 0.01 * found.mean()
