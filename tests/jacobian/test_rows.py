"""Rows of layers against autograd's: each layer between two linear ones, in float64, at batches and one sample."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.tangent import Tangent
from tests import oracle
from tests.conformance import close, jacobian


class Function(nn.Module):
    """A function of the inputs and of parameters of these shapes."""

    def __init__(self, function: Callable, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function, self.weights = function, nn.ParameterList([0.4 * torch.randn(shape) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)


def attention(x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Four heads of queries share two heads of keys and values."""
    q, k, v = (F.linear(x, w).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, bool]] = {
    "conv3d": (lambda: nn.Conv3d(2, 4, (2, 1, 3), stride=(1, 2, 1), groups=2), (2, 3, 3, 4), "conv", True),
    "transposed1d": (lambda: nn.ConvTranspose1d(4, 6, 3, 2, 2, 1, groups=2, dilation=2), (4, 5), "conv", True),
    "transposed2d": (lambda: nn.ConvTranspose2d(2, 3, (3, 2), (1, 3), (2, 1), (0, 2)), (2, 3, 4), "conv", True),
    "transposed3d": (lambda: nn.ConvTranspose3d(2, 2, 2, 2, bias=False), (2, 2, 3, 2), "conv", True),
    "transposed-cut": (lambda: nn.ConvTranspose2d(2, 3, 2, 2, padding=2), (2, 4, 4), "conv", True),
    "transposed-depthwise": (lambda: nn.ConvTranspose1d(3, 3, 4, 2, groups=3), (3, 4), "conv", True),
    "instance-norm": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 3, 4), "norm", False),
    "instance-norm-tracked": (
        lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (3, 5), "norm", False,
    ),
    "prelu": (lambda: nn.PReLU(3), (3, 4, 2), "prelu", False),
    "prelu-shared": (nn.PReLU, (4, 3), "prelu", False),
    "matmul": (lambda: Function(lambda x, w: x @ w, (4, 3)), (5, 4), "linear", True),
    "matmul-transposed": (lambda: Function(lambda x, w: x @ w.mT, (3, 4)), (5, 4), "linear", True),
    "linear-transposed": (lambda: Function(lambda x, w, b: F.linear(x, w.t(), b), (4, 3), (3,)), (4,), "linear", True),
    "addmm-transposed": (lambda: Function(lambda x, w, b: torch.addmm(b, x, w.T), (3, 4), (3,)), (4,), "linear", True),
    "square": (lambda: Function(lambda x, w: x @ w.T + x @ w, (4, 4)), (4,), "linear", False),
    "mixer": (lambda: Function(lambda x, w: w @ x, (3, 5)), (5, 4), "einsum", False),
    "heads": (lambda: Function(lambda x, w: x[:, None] @ w, (3, 4, 2)), (5, 4), "generic", False),
    "heads-of-each": (lambda: Function(lambda x, w: x @ w, (3, 4, 2)), (3, 5, 4), "einsum", False),
    "bmm": (lambda: Function(lambda x, w: torch.bmm(x.transpose(0, 1), w).transpose(0, 1), (3, 4, 2)), (3, 4),
            "einsum", False),
    "einsum": (lambda: Function(lambda x, w: torch.einsum("btd,hdk->bhtk", x, w), (2, 4, 3)), (5, 4), "einsum", False),
    "einsum-ellipsis": (lambda: Function(lambda x, w: torch.einsum("oi,...i->...o", w, x), (3, 4)), (5, 4),
                        "einsum", False),
    "einsum-sums": (lambda: Function(lambda x, w: torch.einsum("bst,tu->bu", x, w), (4, 3)), (5, 4), "einsum", False),
    "einsum-diagonal": (lambda: Function(lambda x, w: torch.einsum("bi,ii->bi", x, w), (4, 4)), (4,), "generic", False),
    "grouped-attention": (lambda: Function(attention, (8, 6), (4, 6), (4, 6)), (5, 6), "linear", True),
}  # fmt: skip
"""Name -> layer, shape of a sample, the family that covers its parameters, and whether it has a matrix."""


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", CASES)
def test_rows_are_autograds(name):
    if name == "instance-norm-tracked" and torch.__version__ < "2.7":
        pytest.skip("instance norm of torch 2.6 writes its statistics in evaluation too")
    build, shape, family, has_matrix = CASES[name]
    x = torch.randn(9, *shape, dtype=torch.float64)
    before = nn.Linear(shape[-1], shape[-1])
    model = nn.Sequential(before, build(), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)).double().eval()
    model(x)
    tangent = Tangent.survey(model, x[:5])
    mine = [block for block in tangent.blocks if block.name.startswith("1")]
    assert {block.family for block in mine} == {family}
    assert {block.matrix is not None for block in mine} == {has_matrix}
    for some in (x[5:8], x[8:], x):
        record = tangent.record(some)
        close(record.outputs.detach(), oracle.outputs(model, some), 1e-12)
        close(record.rows(), jacobian(model, some, tangent.blocks), 1e-11)
    model[1].requires_grad_(False)
    frozen = Tangent.survey(model, x[:5], lw.matching("1.*"))
    assert [block.family for block in frozen.blocks] == [block.family for block in mine]
    close(frozen.record(x[5:8]).rows(), jacobian(model, x[5:8], frozen.blocks), 1e-11)


@pytest.mark.parametrize("name", ["transposed1d", "transposed3d", "matmul-transposed", "heads-of-each"])
def test_the_layout_of_a_block_goes_both_ways(name):
    build, shape, *_ = CASES[name]
    layer, x = build(), torch.randn(4, *shape)
    (block,) = Tangent.survey(nn.Sequential(layer, nn.Flatten()).eval(), x).blocks
    parameters = {f"0.{key}": value.detach() for key, value in layer.named_parameters()}
    split = block.split(block.join(parameters))
    assert split.keys() == parameters.keys()
    assert all(torch.equal(split[key], value) for key, value in parameters.items())
    assert type(block).from_json(vars(block) | {"matrix": block.matrix and vars(block.matrix)} | {
        "parameters": list(block.parameters), "shapes": [list(shape) for shape in block.shapes],
    }) == block  # fmt: skip
