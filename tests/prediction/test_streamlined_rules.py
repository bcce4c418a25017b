"""Each moment rule of the diagonal mode against dense Jacobians, one rule at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

import lapwing as lw
from lapwing import tangent as tn
from lapwing.prediction.linearized import Linearized
from lapwing.prediction.streamlined import Streamlined
from lapwing.prediction.uncertain import Uncertain, prepared
from tests.prediction.streamlined_oracle import F64, KINDS, Function, build, jacobians, propagate
from tests.quick import others_slow
from tests.zoo_modules import Net


def through(operation: nn.Module, x: Tensor, v: Tensor, **options):
    """Means and variances of an operation whose weights, if any, are positive, and it as a module."""
    for parameter in operation.parameters():
        nn.init.uniform_(parameter, 0.2, 1.0)
    return propagate(operation, x, {0: v}, **options)


class GPTGelu(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * torch.pow(x, 3.0))))


class HandSoftmax(nn.Module):
    def forward(self, x):
        e = (x - x.amax(-1, keepdim=True)).exp()
        return e / e.sum(-1, keepdim=True)


class ChannelNorm(nn.Module):
    """Statistics along the second dimension, as ConvNeXt has them."""

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        return (x - u) / torch.sqrt(s + 1e-6)


RAMP = torch.ones(4, 3, dtype=F64).cumsum(0)


def joined(x):
    return F.pad(torch.cat([x[:, :1], torch.ones_like(x)], 1), (1, 2), value=3.0)


def shaped(x):
    return x.permute(0, 2, 1).unflatten(2, (2, 2))[:, 1:, 0].flip(1).roll(1, 1)


OPERATIONS = {
    "gpt gelu": (GPTGelu, (5,)),
    "in-place relu": (lambda: Function(lambda x: 3 * (2 * x).relu_()), (6,)),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 6)),
    "layer norm over two": (lambda: nn.LayerNorm((4, 6), bias=False), (4, 6)),
    "channel norm": (ChannelNorm, (4, 2, 3)),
    "rms norm": (lambda: nn.RMSNorm(6), (4, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 6), (6, 3, 2)),
    "instance norm": (lambda: nn.GroupNorm(4, 4), (4, 5)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (3, 2, 4)),
    "layer norm of certain shape": (lambda: nn.LayerNorm(6, elementwise_affine=False), (6,)),
    "log softmax": (lambda: nn.LogSoftmax(-1), (6,)),
    "average pool 1d": (lambda: nn.AvgPool1d(3, 2, 1), (2, 7)),
    "adaptive average 1d": (lambda: nn.AdaptiveAvgPool1d(3), (2, 7)),
    "largest with place": (lambda: Function(lambda x: x.max(2).values), (4, 3)),
    "softmax": (lambda: nn.Softmax(-1), (2, 5)),
    "softmax over channels": (lambda: nn.Softmax(1), (4, 3)),
    "hand softmax": (HandSoftmax, (2, 5)),
    "average pool": (lambda: nn.AvgPool2d(3, 2, 1), (2, 7, 6)),
    "average pool up": (lambda: nn.AvgPool2d((3, 2), 2, 1, ceil_mode=True), (2, 6, 7)),
    "average pool without padding": (lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), (2, 6, 7)),
    "average pool divided": (lambda: nn.AvgPool2d(2, divisor_override=3), (2, 4, 4)),
    "adaptive average": (lambda: nn.AdaptiveAvgPool2d((3, 2)), (2, 7, 5)),
    "adaptive average to one": (lambda: nn.AdaptiveAvgPool2d(1), (2, 3, 3)),
    "max pool": (lambda: nn.MaxPool2d(3, 2, 1), (2, 7, 6)),
    "max pool 1d": (lambda: nn.MaxPool1d(2), (2, 7)),
    "adaptive max": (lambda: nn.AdaptiveMaxPool2d(2), (2, 5, 5)),
    "largest": (lambda: Function(lambda x: x.amax(1)), (4, 3)),
    "mean": (lambda: Function(lambda x: x.mean((2, 3))), (2, 3, 4)),
    "sum kept": (lambda: Function(lambda x: x.sum(1, keepdim=True)), (4, 3)),
    "linear": (lambda: nn.Linear(5, 3), (4, 5)),
    "weights times input": (lambda: Function(lambda x: torch.arange(12.0, dtype=F64).reshape(3, 4) @ x), (4, 2)),
    "einsum": (lambda: Function(lambda x: torch.einsum("btd,de->bet", x, RAMP)), (2, 4)),
    "einsum of one": (lambda: Function(lambda x: torch.einsum("b...tt->b...", x)), (2, 3, 3)),
    "conv 1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 9)),
    "conv 2d": (lambda: nn.Conv2d(2, 3, (3, 2), stride=2, padding=(1, 0), dilation=2), (2, 8, 7)),
    "conv same": (lambda: nn.Conv2d(2, 3, (3, 5), padding="same"), (2, 5, 5)),
    "circular conv": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 4, 5)),
    "transposed conv": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), (2, 3, 4)),
    "cat and pad": (lambda: Function(joined), (2, 3)),
    "shapes": (lambda: Function(shaped), (4, 3)),
    "split": (lambda: Function(lambda x: torch.cat([part for part in reversed(x.split([1, 3], 1))], 1)), (4, 3)),
    "chunk and stack": (lambda: Function(lambda x: torch.stack(x.chunk(2, 1), -1).unbind(1)[0]), (4, 3)),
    "index": (lambda: Function(lambda x: x[:, [2, 0, 1]]), (4, 3)),
    "pixel shuffle": (lambda: nn.PixelShuffle(2), (8, 2, 3)),
    "nearest": (lambda: nn.Upsample(scale_factor=2), (2, 3, 2)),
    "sort": (lambda: Function(lambda x: x.sort(-1).values), (6,)),
    "cumulative sum": (lambda: Function(lambda x: x.cumsum(1)), (5, 2)),
    "bilinear upsampling": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 2)),
    "second of two values": (lambda: Function(lambda x: torch.var_mean(x, 1)[1]), (5, 2)),
    "prelu": (lambda: nn.PReLU(4), (4, 2)),
    "dropout": (lambda: nn.Dropout(0.4), (6,)),
    "sum": (lambda: Product(lambda x, y: x + 2 * y), (6,)),
    "quotient": (lambda: Product(lambda x, y: x / (2 + y.sigmoid())), (6,)),
}  # fmt: skip


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_without_treated_weights_equals_its_squared_jacobian(name):
    torch.manual_seed(3)
    make, shape = OPERATIONS[name]
    x, v = torch.randn(3, *shape, dtype=F64), torch.rand(3, *shape, dtype=F64)
    mean, variance, model = through(make(), x, v)
    torch.testing.assert_close(mean, model(x).detach())
    expected = (jacobians(model, x).square() @ v.flatten(1)[..., None])[..., 0]  # `Σ_j J_ij² v_j`
    torch.testing.assert_close(variance, expected, rtol=1e-9, atol=1e-12)


# ---- products of uncertain values


class Product(Function):
    def forward(self, x):
        return self.function(*x.chunk(2, 1))


PRODUCTS = {
    "mul": lambda x, y: x * y,
    "matmul": lambda x, y: x.unflatten(1, (2, 3)) @ y.unflatten(1, (3, 2)),
    "einsum": lambda x, y: torch.einsum("bij,bjk->bki", x.unflatten(1, (2, 3)), y.unflatten(1, (3, 2))),
    "bmm": lambda x, y: torch.bmm(x.unflatten(1, (2, 3)), y.unflatten(1, (3, 2))),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_product_of_independent_values_has_exact_variances(name):
    x, v = torch.randn(2, 12, dtype=F64), torch.rand(2, 12, dtype=F64)
    operation = Product(PRODUCTS[name])
    mean, variance, model = through(operation, x, v)
    first = (jacobians(model, x).square() @ v[..., None])[..., 0]
    second = jacrev(jacrev(lambda one: model(one[None])[0]))(x[0]).detach()  # constant: (n, 12, 12)
    crossed = torch.einsum("nij,bi,bj->bn", second.square(), v, v) / 2  # each pair twice
    torch.testing.assert_close(variance, first + crossed)
    torch.testing.assert_close(mean, model(x).detach())


def test_gated_linear_unit_is_a_product_with_a_linearised_gate():
    x, v = torch.randn(2, 6, dtype=F64), torch.rand(2, 6, dtype=F64)
    mean, variance, model = through(nn.GLU(1), x, v)
    (a, b), (va, vb) = x.chunk(2, 1), v.chunk(2, 1)
    gate = b.sigmoid()
    spread = (gate * (1 - gate)) ** 2 * vb
    torch.testing.assert_close(variance, va * gate**2 + a**2 * spread + va * spread)
    torch.testing.assert_close(mean, model(x).detach())


# ---- layers with treated weights: `h` is linear in weights and in inputs


def layer_by_derivatives(model, tangent, covariance, x: Tensor, v: Tensor | None) -> Tensor:
    """Variances of an output that is linear in the input and in the treated weights, sample by sample."""
    names = [name for block in tangent.blocks for name in block.parameters]
    Sigma = covariance.to_dense()

    def outputs(inputs, flat):
        pieces = flat.split([block.size for block in tangent.blocks])
        parts = tn.split(tangent.blocks, {b.name: piece for b, piece in zip(tangent.blocks, pieces, strict=True)})
        return functional_call(model, {name: parts[name] for name in names}, (inputs,))

    size = x[0].numel()
    units = torch.cat([torch.zeros(1, size), torch.eye(size)]).to(x).reshape(-1, *x[0].shape)
    without = outputs(units, torch.zeros(len(Sigma)).to(x))
    changes = [outputs(units, weight) - without for weight in torch.eye(len(Sigma)).to(x)]
    crossed = torch.stack([(found[1:] - found[0]).T for found in changes], 1).detach()  # (n, P, inputs): bilinear
    rows = []
    for place, sample in enumerate(x):
        flat = torch.cat([tangent.mean()[block.name] for block in tangent.blocks])
        J, Jx = (jacrev(outputs, argument)(sample[None], flat)[0] for argument in (1, 0))
        variance = torch.einsum("ni,ij,nj->n", J, Sigma, J)
        if v is not None:
            spread = v[place].flatten()
            of_both = torch.einsum("npi,pq,nqi,i->n", crossed, Sigma, crossed, spread)
            variance = variance + Jx.reshape(len(J), -1).square() @ spread + of_both
        rows.append(variance.detach())
    return torch.stack(rows)


def affine():
    return Net(lambda net, x: x * net.scale + net.shift, **{n: nn.Parameter(torch.rand(4)) for n in ("scale", "shift")})


LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "linear at tokens": (lambda: nn.Linear(4, 3, bias=False), (2, 4)),
    "conv 1d": (lambda: nn.Conv1d(2, 3, 2, stride=2, padding=1), (2, 5)),
    "conv 2d": (lambda: nn.Conv2d(2, 3, (2, 3), padding=(1, 0), dilation=(2, 1), bias=False), (2, 4, 4)),
    "conv same": (lambda: nn.Conv2d(2, 2, 3, padding="same"), (2, 3, 3)),
    "grouped conv": (lambda: nn.Conv2d(4, 6, 2, groups=2, stride=2), (4, 4, 4)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(3, 2, 4, stride=3, padding=1), (3, 5)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(2, 3, 3, 2, padding=1, output_padding=1, bias=False), (2, 3, 4)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), (2, 2, 3, 2)),
    "grouped transposed": (
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=(1, 2), dilation=2, groups=2), (4, 3, 2)
    ),
    "scale and shift": (affine, (4,)),
}  # fmt: skip
TREATED = [
    *((name, "kronecker", "*") for name in LAYERS if name != "scale and shift"),
    *((name, kind, "*") for name in ("conv 1d", "transposed 2d") for kind in KINDS if kind != "kronecker"),
    ("grouped transposed", "diagonal", "*"),
    *(("grouped conv", kind, params) for kind in ("kronecker", "diagonal") for params in ("*.weight", "*.bias")),
    ("grouped conv", "diagonal", "*"), ("scale and shift", "diagonal", "*"),
]  # fmt: skip


QUICK_TREATED = [
    ("conv 1d", "kronecker", "*"), ("conv 1d", "low rank", "*"), ("grouped conv", "kronecker", "*.weight"),
    ("transposed 2d", "dense block", "*"), ("grouped transposed", "diagonal", "*"),
    ("scale and shift", "diagonal", "*"),
]  # fmt: skip


@pytest.mark.parametrize("uncertain", [False, True])
@pytest.mark.parametrize("case", others_slow(TREATED, QUICK_TREATED), ids=str)
def test_treated_layer_equals_derivatives(case, uncertain):
    name, kind, params = case
    make, shape = LAYERS[name]
    model = nn.Sequential(make(), nn.Flatten()).double().eval()
    x, v = torch.randn(3, *shape, dtype=F64), torch.rand(3, *shape, dtype=F64) if uncertain else None
    tangent = tn.Tangent.survey(model, x, tn.matching(params))
    covariance = build(tangent, kind)
    latent = Streamlined().latent(tangent, covariance, prepared(x if v is None else Uncertain(x, v)))
    expected = layer_by_derivatives(model, tangent, covariance, x, v)
    torch.testing.assert_close(latent.variance, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(latent.mean, model(x).detach())
    if v is None:
        full, exact = (
            way.latent(tangent, covariance, prepared(x), joint=False) for way in (Streamlined("full"), Linearized())
        )
        torch.testing.assert_close(full.covariance, exact.covariance)


@pytest.mark.quick(3)
@pytest.mark.parametrize("params", ["*", "*.weight", "*.bias"])
@pytest.mark.parametrize("kind", ["diagonal", "dense block"])
@pytest.mark.parametrize("norm", ["layer", "batch", "group", "rms"])
def test_treated_norm_equals_derivatives(norm, kind, params):
    if norm == "rms" and params == "*.bias":
        pytest.skip("no bias")
    make = {
        "layer": lambda: nn.LayerNorm(4), "batch": lambda: nn.BatchNorm1d(4), "group": lambda: nn.GroupNorm(2, 4),
        "rms": lambda: nn.RMSNorm(4),
    }[norm]  # fmt: skip
    model = nn.Sequential(make(), nn.Flatten()).double().eval()
    x = torch.randn(3, 4, dtype=F64)
    tangent = tn.Tangent.survey(model, x, tn.matching(params))
    covariance = build(tangent, kind)
    latent = Streamlined().latent(tangent, covariance, prepared(x))
    expected = layer_by_derivatives(model, tangent, covariance, x, None)
    torch.testing.assert_close(latent.variance, expected, rtol=1e-9, atol=1e-12)
    v = torch.rand(3, 4, dtype=F64)
    latent = Streamlined().latent(tangent, covariance, prepared(Uncertain(x, v)))
    plain = nn.Sequential(make(), nn.Flatten()).double().eval()
    with torch.no_grad():
        variances = tn.split(tangent.blocks, covariance.diagonal())
        gamma_v = variances.get("0.weight", torch.zeros_like(model[0].weight))
        inner = (jacobians(plain, x).square() @ v[..., None])[..., 0]  # of x̂: the plain norm has γ = 1, β = 0
        expected = expected + (model[0].weight.square() + gamma_v) * inner
    torch.testing.assert_close(latent.variance, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
@pytest.mark.parametrize("kept", ["scales", "shifts", "both"])
def test_treated_norm_of_few_weights(kept, dtype):
    """A subset of the weights leaves scales or shifts without variance: both batches and one sample are still right."""
    model = nn.Sequential(nn.BatchNorm1d(40), nn.Flatten()).to(dtype).eval()
    with torch.no_grad():
        model[0].weight.uniform_(0.5, 2.0)
        model[0].bias.uniform_(0.5, 2.0)
        weight, bias = model[0].weight, model[0].bias
        weight[::2] *= 0.01 if kept == "shifts" else 1.0
        bias[1::2] *= 0.01 if kept == "scales" else 1.0
        if kept == "both":
            weight[::2], bias[1::3] = 0.01, 0.02
    x, y = torch.randn(30, 40, dtype=dtype), torch.randint(40, (30,))
    method = lw.SubsetOfWeights(30, by="magnitude")
    posterior = lw.fit(model, [(x, y)], method, prior_precision=0.3, tune=None, params=lw.everything)
    for part in (x, 2 * x, x[:1]):
        found, exact = (posterior.latent(part, via=way).variance for way in (lw.Streamlined(), lw.Linearized()))
        torch.testing.assert_close(found, exact, rtol=0.05 if dtype == torch.bfloat16 else 1e-3, atol=1e-5)


def test_treated_embedding_gives_its_rows():
    model = nn.Sequential(nn.Embedding(6, 3, padding_idx=0), nn.Flatten()).double().eval()
    tokens = torch.tensor([[1, 5, 0], [2, 2, 4]])
    tangent = tn.Tangent.survey(model, tokens, tn.matching("*"))
    covariance = build(tangent, "diagonal")
    latent = Streamlined().latent(tangent, covariance, prepared(tokens))
    table = tn.split(tangent.blocks, covariance.diagonal())["0.weight"].clone()
    table[0] = 0
    torch.testing.assert_close(latent.variance, table[tokens].flatten(1))
    torch.testing.assert_close(latent.mean, model(tokens).detach())
