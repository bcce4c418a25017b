"""Positions that share weights: exact limits, what comes near the linearised variances, and where they are found."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lapwing as lw
from lapwing import tangent as tn
from lapwing.data.inputs import Inputs
from lapwing.network.eager import without_compiled
from lapwing.prediction.linearized import Linearized
from lapwing.prediction.streamlined import Streamlined
from lapwing.prediction.streamlined.moments import Moments
from lapwing.prediction.uncertain import prepared
from papers.common.networks import BasicBlock
from tests.prediction.streamlined_oracle import F64, Function, build, surveyed
from tests.prediction.test_streamlined_networks import NAMES, QUICK, covariance_of
from tests.quick import others_slow
from tests.zoo import ZOO
from tests.zoo_modules import Net

SURE = {"scale": 1e7, "precision": 1e8}  # products of weights with uncertain inputs do not count


def mean_of_tokens():
    return Function(lambda x: x.mean(1))


def mean_of_pixels():
    return Function(lambda x: x.mean((2, 3)))


# ---- exact limits


@pytest.mark.quick(3)
@pytest.mark.parametrize(("kind", "positive"), [("diagonal", True), ("kronecker", False), ("dense block", True)])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: [nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()],
        lambda: [nn.Conv2d(2, 3, 3, stride=2, padding=1, dilation=2, bias=False), Function(lambda x: x.mean((2, 3)))],
        lambda: [nn.Conv2d(2, 4, 3, padding="same", groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten()],
        lambda: [nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), mean_of_pixels()],
        lambda: [nn.ConvTranspose2d(2, 4, (3, 2), stride=(1, 3), dilation=2, groups=2), mean_of_pixels()],
        lambda: [nn.Flatten(2), nn.Linear(36, 4), mean_of_tokens()],
    ],
    ids=["conv", "strided conv", "grouped conv", "transposed conv", "grouped transposed conv", "tokens"],
)
def test_mean_over_the_positions_of_one_layer_is_exact(layer, positive, kind):
    """Where positions move together at all: with inputs of both signs ρ may have to be negative, and is 0."""
    model = nn.Sequential(*layer()).double().eval()
    if kind == "dense block" and getattr(model[0], "groups", 1) > 1:
        pytest.skip("refused by name")
    x = torch.randn(3, 2, 6, 6, dtype=F64)
    x = x.abs() + 0.1 if positive else x
    tangent = tn.Tangent.survey(model, x, tn.matching("*"))
    covariance = build(tangent, kind)
    expected = Linearized().latent(tangent, covariance, prepared(x), joint=False).variance
    found = Streamlined().latent(tangent, covariance, prepared(x)).variance
    if positive and kind != "dense block":  # a dense block may turn weights against each other
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert (found >= expected * (1 - 1e-9)).all()


def one_equals_several(model, x, shape, kind="diagonal"):
    """Asserts that equal positions in this shape give the covariances of one."""
    results = []
    for inputs in (x, x.expand(shape).contiguous()):
        tangent = tn.Tangent.survey(model, inputs, tn.matching("*"))
        torch.manual_seed(1)
        results.append(Streamlined().latent(tangent, build(tangent, kind), prepared(inputs)).covariance)
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["diagonal", "kronecker"])
def test_equal_positions_are_one(kind):
    """A network of pixels that are all alike is the network of one pixel, whatever its activations."""
    deep = nn.Sequential(
        nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.GELU(), nn.Conv2d(6, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(5, 2),
    ).double().eval()  # fmt: skip
    one_equals_several(deep, torch.randn(4, 3, 1, 1, dtype=F64), (4, 3, 5, 4), kind)


def test_attention_and_residuals_of_equal_tokens_are_one():
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, activation="gelu")
    model = nn.Sequential(nn.Linear(3, 8), layer, mean_of_tokens(), nn.Linear(8, 2)).double().eval()
    one_equals_several(model, torch.randn(4, 1, 3, dtype=F64), (4, 6, 3))


# ---- nearer the linearised variances


def convolutions():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), BasicBlock(8, 8, 1), BasicBlock(8, 16, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def vision_transformer():
    torch.manual_seed(0)
    patches = [nn.Conv2d(3, 12, 2, 2), nn.Flatten(2), Function(lambda x: x.transpose(1, 2))]
    layers = [nn.TransformerEncoderLayer(12, 3, 24, batch_first=True, norm_first=True)]
    return nn.Sequential(*patches, *layers, nn.LayerNorm(12), mean_of_tokens(), nn.Linear(12, 4))


@pytest.mark.parametrize("make", [convolutions, vision_transformer])
def test_correlated_positions_are_nearer(make):
    model, x = make().double().eval(), torch.rand(6, 3, 8, 8).double()
    tangent = tn.Tangent.survey(model, x, tn.matching("*"))
    covariance = covariance_of(tangent, **SURE)
    exact = Linearized().latent(tangent, covariance, prepared(x), joint=False).variance
    errors = [
        (Streamlined(positions=p).latent(tangent, covariance, prepared(x)).variance / exact).log().abs().mean()
        for p in ("independent", "correlated")
    ]
    assert errors[1] < 0.5 * errors[0]
    assert errors[1] < 0.7


@pytest.mark.parametrize("name", others_slow(NAMES, QUICK[:2]))
def test_correlations_are_between_zero_and_one(name):
    tangent, x = surveyed(name), ZOO[name].inputs(3, 0)
    with without_compiled():
        program = Streamlined().program(tangent, covariance_of(tangent), Inputs(x))
    values = program.start(Inputs(x))
    for step in program.schedule.steps:
        value = values[step.node.name] = program.step(step, values, 3)
        if isinstance(value, Moments) and value.correlation is not None:
            assert ((value.correlation >= 0) & (value.correlation <= 1)).all()


# ---- where positions are


HELD = {
    "plain": lambda layer, x: layer(x),
    "merged": lambda layer, x: layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]),
    "second": lambda layer, x: layer(x.transpose(0, 1)).transpose(0, 1),
    "merged fastest": lambda layer, x: layer(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (6, -1)).transpose(0, 1),
    "fixed": lambda layer, x: layer(x) + torch.zeros(len(x), 1, 1, dtype=x.dtype),
}
"""Tokens merged with samples, as Hugging Face's Conv1D does, and samples second."""


@pytest.mark.parametrize("kind", others_slow(["merged", "second", "merged fastest", "fixed"], ["merged fastest"]))
def test_samples_anywhere_give_the_same(kind):
    x = torch.randn(3, 6, 4, dtype=F64)
    results = []
    for label in ("plain", kind):
        torch.manual_seed(0)
        together = lambda net, x, label=label: net.b(HELD[label](net.a, x).mean(1))  # noqa: E731
        model = Net(together, a=nn.Sequential(nn.Linear(4, 5), nn.ReLU()), b=nn.Linear(5, 2)).double().eval()
        tangent = tn.Tangent.survey(model, x, tn.matching("*"))
        torch.manual_seed(1)
        results.append(Streamlined().latent(tangent, covariance_of(tangent), prepared(x)).covariance)
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


# ---- products and gates


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=1.0)


BY_HAND = {
    "matmul": lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
    "other side": lambda q, k, v: (v.mT @ (k @ q.mT).softmax(-2)).mT,
    "einsum": lambda q, k, v: torch.einsum("bhts,bhsd->bhtd", torch.einsum("bhtd,bhsd->bhts", q, k).softmax(-1), v),
    "bmm": lambda q, k, v: torch.bmm(
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).softmax(-1), v.flatten(0, 1)
    ).unflatten(0, (-1, 2)),
}


def crossed(net, x):
    """Three learned queries; values of another width than the keys."""
    k, v = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (net.key, net.value))
    found = net.attention(net.query.expand(x.shape[0], -1, -1, -1), k, v)
    return net.out(found.transpose(1, 2).flatten(2)).mean(1)


@cache
def cross(function, groups):
    """The network with this attention, surveyed once for all tests, and its inputs."""
    torch.manual_seed(0)
    layers = {"key": nn.Linear(4, 4), "value": nn.Linear(4, 6), "out": nn.Linear(6 * groups, 2)}
    model = Net(crossed, attention=function, query=nn.Parameter(torch.randn(1, 2 * groups, 3, 2)), **layers)
    model, x = model.double().eval(), torch.rand(3, 5, 4, dtype=F64)
    return tn.Tangent.survey(model, x, tn.matching("key.*", "value.*", "out.*")), x


def cross_attended(function, positions="correlated", groups=1, **options):
    tangent, x = cross(function, groups)
    torch.manual_seed(1)
    return Streamlined(positions=positions, **options).latent(tangent, covariance_of(tangent), prepared(x)).variance


@pytest.mark.parametrize("kind", others_slow(BY_HAND, ["einsum"]))
def test_attention_by_hand_takes_what_positions_share_through(kind):
    expected = cross_attended(fused)
    torch.testing.assert_close(cross_attended(BY_HAND[kind]), expected, rtol=1e-9, atol=1e-12)
    assert (expected > cross_attended(fused, "independent")).all()


def shared_values(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=1.0, enable_gqa=True)


def repeated_values(q, k, v):
    return fused(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


@pytest.mark.parametrize("positions", ["independent", "correlated"])
@pytest.mark.parametrize("attention", others_slow(["values", "scores", "features"], ["values"]))
def test_heads_that_share_values_equal_repeated_ones(attention, positions):
    both = [cross_attended(values, positions, 2, attention=attention) for values in (shared_values, repeated_values)]
    torch.testing.assert_close(*both, rtol=1e-9, atol=1e-12)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: F.glu(torch.cat([a, b], -1), -1),
        lambda a, b: F.glu(torch.cat([a, b], -1).mT, 1).mT,
        lambda a, b: a / (1 + b.exp()),
        lambda a, b: 2.0 / (1 + b.exp()) + a,
    ],
    ids=["gate", "gate of rows", "quotient", "denominator"],
)
def test_equal_positions_stay_one_in_gates_and_quotients(function):
    model = Net(lambda net, x: function(net.a(x), net.b(x)).mean(1), a=nn.Linear(3, 4), b=nn.Linear(3, 4))
    one_equals_several(model.double().eval(), torch.randn(4, 1, 3, dtype=F64), (4, 6, 3))


def test_differentiable_in_inputs_where_variances_are_zero():
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Conv2d(2, 2, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.randn(2, 1, 5, 5, dtype=F64)
    model = model.double().eval()
    tangent = tn.Tangent.survey(model, x, tn.matching("*"))
    covariance = covariance_of(tangent)

    def variance(inputs):
        return Streamlined().latent(tangent, covariance, prepared(inputs)).variance

    assert torch.autograd.gradcheck(variance, (x.requires_grad_(),))
    assert F.relu(model[0](x)).eq(0).any()


# ---- the order of images in memory


def images():
    """Convolutions with and without groups, a transposed one, and images of one channel."""
    first = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1), nn.MaxPool2d(2)]
    groups = [nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(
        *first, *groups, nn.ConvTranspose2d(4, 2, 3, stride=2), nn.Flatten(), nn.Linear(2 * 9 * 9, 3)
    ).eval()


@pytest.mark.quick(2)
@pytest.mark.parametrize("samples", [1, 3])
def test_order_of_images_in_memory_does_not_matter(samples):
    """Convolutions in float32 on a CPU put the channels last; those in float64 do not."""
    model, x, latents = images(), torch.randn(3, 1, 16, 16), []
    for dtype in (torch.float32, F64):
        model, x = model.to(dtype), x.to(dtype)
        shown = [(x, torch.arange(3))]
        posterior = lw.fit(model, shown, lw.Diagonal(), params=lw.everything, prior_precision=10.0)
        latents.append(posterior.latent(x[:samples], via=Streamlined()))
    narrow, precise = latents
    torch.testing.assert_close(narrow.mean.double(), precise.mean.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(narrow.variance.double(), precise.variance.double(), rtol=1e-4, atol=0)


def over_tokens(net, tokens):
    """Two convolutions over tokens."""
    return net.head(net.second(net.first(net.table(tokens).mT).relu()).mean(2))


@pytest.mark.quick(2)
def test_texts_of_another_length_have_their_own_means_over_positions():
    """The means over positions of a first batch's length were kept for other lengths."""
    first, second = nn.Conv1d(3, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)
    model = Net(over_tokens, table=nn.Embedding(9, 3), first=first, second=second, head=nn.Linear(4, 3)).double().eval()
    long, short = torch.randint(9, (4, 7)), torch.randint(9, (4, 3))
    shown = [(long, torch.tensor([0, 1, 2, 0]))]
    some = lw.matching("first.*", "second.*")
    found = []
    for order in ((short,), (long, short)):
        posterior = lw.fit(copy.deepcopy(model), shown, lw.Diagonal(), params=some, prior_precision=1.0)
        found.append([posterior.latent(tokens, via=Streamlined()).variance for tokens in order][-1])
    torch.testing.assert_close(*found)
