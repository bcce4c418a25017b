"""Every contraction of every network of the zoo against the dense Jacobian of `torch.func.jacrev`."""

from __future__ import annotations

import pytest
import torch

import lapwing as lw
from lapwing import batches
from lapwing import tangent as tn
from tests import oracle
from tests.zoo import ZOO

EVERY = tn.matching("*")


def survey(case, samples: int = 5, params=EVERY):
    model = case.build()
    x = case.inputs(samples, 1)
    return model, x, tn.Tangent.survey(model, x, params)


def dense(model, x, tangent) -> torch.Tensor:
    """The oracle's Jacobian (B, C, P), columns in the order of the tangent's blocks."""
    names = [name for block in tangent.blocks for name in block.parameters]
    jacobian = oracle.jacobian(model, x, names)
    sizes = [tangent.parameters[name].numel() for name in names]
    parts = dict(zip(names, jacobian.split(sizes, -1), strict=True))
    shaped = {n: p.unflatten(-1, tangent.parameters[n].shape) for n, p in parts.items()}
    return torch.cat([block.join(shaped) for block in tangent.blocks], -1)


@pytest.mark.parametrize("name", ZOO)
def test_rows_equal_jacrev(name):
    model, x, tangent = survey(ZOO[name])
    record = tangent.record(x)
    expected = dense(model, x, tangent)
    torch.testing.assert_close(record.rows(), expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(record.outputs, oracle.outputs(model, x).reshape(record.outputs.shape))


@pytest.mark.parametrize("name", ZOO)
def test_contractions_equal_dense_products(name):
    case = ZOO[name]
    _, x, tangent = survey(case)
    other = case.inputs(3, 7)
    u = torch.randn(5, case.outputs, 2, dtype=torch.float64)
    for cotangents in (None, u):
        record, second = tangent.record(x, cotangents), tangent.record(other)
        for block in tangent.blocks:
            jacobian = record[block.name]
            rows = jacobian.rows()  # (B, R, P)
            theirs = second[block.name]
            weights = torch.rand(block.size, dtype=torch.float64) + 0.1
            vectors = torch.randn(4, block.size, dtype=torch.float64)
            weighted = (rows * weights) @ rows.mT
            flat = rows.flatten(0, 1)
            close = lambda found, wanted: torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)  # noqa: E731
            close(jacobian.weighted_gram(weights), weighted)
            factor = jacobian.weighted_factor(weights)
            if factor is not None:
                close(factor @ factor.mT, weighted)
            close(jacobian.squared_sum(), rows.square().sum((0, 1)))
            close(jacobian.squared_norm(), rows.square().sum())
            close(jacobian.sum_rows(), rows.sum(0))
            close(jacobian.jvp(vectors), rows @ vectors.T)
            close(jacobian.joint_weighted_gram(weights).flatten(2).flatten(0, 1), (flat * weights) @ flat.T)
            close(jacobian.gram(theirs).flatten(2).flatten(0, 1), flat @ theirs.rows().flatten(0, 1).T)


@pytest.mark.parametrize("name", ["mlp", "cnn_bn_inplace", "attention", "vit", "tied"])
def test_chunks_and_order_do_not_matter(name):
    case = ZOO[name]
    _, x, tangent = survey(case, 7)
    whole = tangent.record(x).rows()
    small = torch.cat([tangent.record(c).rows() for _, c in batches.chunks(x, 3)])
    torch.testing.assert_close(small, whole, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ZOO)
def test_products_with_vectors_by_either_mode(name, monkeypatch):
    """K = 1 direction and C > 2 outputs take forward mode; both modes equal the dense product, cotangents applied."""
    case = ZOO[name]
    model, x, tangent = survey(case)
    vectors = {b.name: torch.randn(1, b.size, dtype=torch.float64) for b in tangent.blocks}
    flat = torch.cat(list(vectors.values()), -1)
    jacobian, calls = dense(model, x, tangent), []
    plain = tn.chunk.forward_products

    def noted(*args):
        found = plain(*args)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(tn.chunk, "forward_products", noted)
    u = torch.randn(5, case.outputs, 4, dtype=torch.float64)
    for cotangents, rows in ((None, jacobian), (u, u.mT @ jacobian)):
        found = tangent.record(x, cotangents).jvp(vectors)
        torch.testing.assert_close(found, rows @ flat.T, rtol=1e-8, atol=1e-9)
    assert len(calls) == 1 + (case.outputs > 2)
    if name in ("mlp", "cnn_bn_inplace", "attention", "vit", "mha", "residual_block"):
        assert all(calls)


class SoftAndHardTokens(torch.nn.Module):
    """One table read by token and multiplied with soft tokens: two uses of one layout, of two families."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
        self.head = torch.nn.Linear(4, 3).double()

    def forward(self, tokens: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
        hard = torch.nn.functional.embedding(tokens, self.table).mean(1)
        return self.head(torch.tanh(hard + soft @ self.table))


def test_a_table_used_by_two_families():
    model = SoftAndHardTokens().eval()
    inputs = (torch.randint(6, (5, 3)), torch.randn(5, 6, dtype=torch.float64))
    tangent = tn.Tangent.survey(model, inputs, EVERY)
    assert not tangent.coverage.generic
    torch.testing.assert_close(tangent.record(inputs).rows(), dense(model, inputs, tangent), rtol=1e-9, atol=1e-10)
    posterior = lw.fit(model, [(*inputs, torch.randint(3, (5,)))], lw.KFAC(), params=EVERY, tune=None)
    assert posterior.latent(inputs).variance.min() > 0
