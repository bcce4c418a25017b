"""Layer families from outside the package: registered functions are covered, contracted, saved and loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.jacobian import BlockJacobian, Matrix, Outer, Rows, Use, register_reader
from lapwing.jacobian.jacobian import SumOfUses
from lapwing.jacobian.layers import READERS, BatchAxis
from lapwing.tangent import Block, Tangent
from tests import oracle
from tests.jacobian.test_contractions import kronecker_factors
from tests.zoo_modules import Net

EVERY = lw.matching("*")


@torch.overrides.wrap_torch_function(lambda x, weight: (x, weight))
def quadratic(x: Tensor, weight: Tensor) -> Tensor:
    """Linear in its weight, but not in its input."""
    return x.square() @ weight.T


@torch.overrides.wrap_torch_function(lambda x, left, right: (x, left, right))
def low_rank(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Two parameters, neither of which is a bias."""
    return x @ right.T @ left.T


class QuadraticUse(Use):
    family = "quadratic"
    sample_dims = 1

    def matrix(self) -> Matrix:
        return Matrix.of(self.parameters["weight"].shape)

    def jacobian(
        self, g: Tensor | None, axis: BatchAxis, samples: int, roles: frozenset[str], dtype: torch.dtype, limit: int
    ) -> BlockJacobian:
        assert g is not None
        a, g = axis.front(self.inputs, samples).square(), axis.front(g, samples, 1).transpose(0, 1)
        return Outer(a.to(dtype), g.to(dtype), self.matrix().outputs)


class LowRankUse(Use):
    family = "low rank"
    sample_dims = 1

    def __init__(self, x: Tensor, left: Tensor, right: Tensor) -> None:
        super().__init__(x, None)
        self.left, self.right, self.parameters = left.detach(), right.detach(), {"left": left, "right": right}

    def jacobian(
        self, g: Tensor | None, axis: BatchAxis, samples: int, roles: frozenset[str], dtype: torch.dtype, limit: int
    ) -> BlockJacobian:
        assert g is not None
        x, g = axis.front(self.inputs, samples), axis.front(g, samples, 1).transpose(0, 1)  # (B, I), (B, R, O)
        (role,) = roles
        if role == "left":
            rows = torch.einsum("bro,bk->brok", g, x @ self.right.T)
        else:
            rows = torch.einsum("brk,bi->brki", g @ self.left, x)
        return Rows(rows.flatten(2).to(dtype))


def forward(net: Net, x: Tensor) -> Tensor:
    """A quadratic layer used as often as asked, then a low-rank one."""
    for _ in range(net.times):
        x = torch.tanh(quadratic(x, net.weight))
    return net.head(low_rank(x, net.left, net.right))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_reader(lambda args, kwargs, watched: None if kwargs else QuadraticUse(*args), quadratic)
    register_reader(lambda args, kwargs, watched: None if kwargs else LowRankUse(*args), low_rank)
    yield
    del READERS[quadratic], READERS[low_rank]


def network(times: int = 1) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = {"weight": (4, 4), "left": (5, 2), "right": (2, 4)}
    weights = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    model = Net(forward, **weights, head=nn.Linear(5, 3), times=times).double().eval()
    return model, torch.randn(7, 4).double(), torch.arange(7) % 3


@pytest.mark.parametrize("times", [1, 2])
def test_rows_equal_jacrev(times: int) -> None:
    model, x, _ = network(times)
    tangent = Tangent.survey(model, x, EVERY)
    families = {line.block: line.family for line in tangent.coverage.lines}
    assert families == {"weight": "quadratic", "left": "low rank", "right": "low rank", "head": "linear"}
    rows = torch.cat([tangent.record(x)[block.name].rows() for block in tangent.blocks[:3]], -1)
    names = [name for block in tangent.blocks[:3] for name in block.parameters]
    torch.testing.assert_close(rows, oracle.jacobian(model, x, names))


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    "method", [lw.KFAC(), lw.Diagonal(), lw.MeanField(steps=3)], ids=lambda method: str(method)[:4]
)
def test_a_posterior_is_saved_and_loaded(method: lw.Method, times: int, reloaded: Any) -> None:
    model, x, y = network(times)
    posterior = lw.fit(model, [(x, y)], method, prior_precision=1.0)
    loaded = reloaded(posterior)
    torch.testing.assert_close(loaded.latent(x).covariance, posterior.latent(x).covariance)


def test_kfac_factors_the_block_of_a_matrix() -> None:
    """With one sample KFAC is exact for a layer with one position: Γ ⊗ A is the GGN."""
    model, x, y = network()
    posterior = lw.fit(model, [(x[:1], y[:1])], lw.KFAC(), params=lw.matching("weight"), prior_precision=1.0)
    exact = lw.fit(model, [(x[:1], y[:1])], lw.Full(), params=lw.matching("weight"), prior_precision=1.0)
    torch.testing.assert_close(posterior.latent(x).covariance, exact.latent(x).covariance)


def test_without_a_reader_the_layers_are_generic() -> None:
    model, x, y = network()
    covered = lw.fit(model, [(x, y)], lw.Diagonal(), prior_precision=1.0).latent(x)
    reader, other = READERS.pop(quadratic), READERS.pop(low_rank)
    try:
        assert {line.block for line in lw.coverage(model, x).generic} == {"weight", "left", "right"}
        generic = lw.fit(model, [(x, y)], lw.Diagonal(), prior_precision=1.0).latent(x)
    finally:
        READERS.update({quadratic: reader, low_rank: other})
    torch.testing.assert_close(covered.covariance, generic.covariance)


def test_uses_that_cannot_be_joined_are_summed() -> None:
    """The sum of two uses has the products of their joined positions, as KFAC's expand form has them."""
    first, second = (Outer(torch.randn(3, 4).double(), torch.randn(3, 2, 5).double(), 5) for _ in range(2))
    uses, joined = SumOfUses([first, second]), first.plus([second])
    inputs, outputs = (torch.linalg.qr(torch.randn(1, n, n).double())[0] for n in (4, 5))
    torch.testing.assert_close(uses.rows(), joined.rows())
    torch.testing.assert_close(uses.rotate(inputs, outputs).rows(), joined.rotate(inputs, outputs).rows())
    weights = torch.rand(20).double()
    torch.testing.assert_close(uses.weighted_gram(weights), joined.weighted_gram(weights))
    block = Block("", ("",), ((5, 4),), "linear", Matrix.of((5, 4)))
    factors = (kronecker_factors(block, one, False) for one in (uses, joined))
    for mine, theirs in zip(*factors, strict=True):
        torch.testing.assert_close(mine, theirs)
