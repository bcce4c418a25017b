"""Streamlined prediction through whole networks: the zoo, Hugging Face models, residual networks, odd inputs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lapwing as lw
from lapwing import tangent as tn
from lapwing.covariance import Blockwise, DiagonalBlock
from lapwing.prediction.linearized import Linearized
from lapwing.prediction.streamlined import Streamlined
from lapwing.prediction.uncertain import prepared
from tests import oracle
from tests.prediction.streamlined_oracle import F64, KINDS, build, surveyed
from tests.quick import others_slow
from tests.zoo import ZOO
from tests.zoo_modules import Net

SHARED = ("tied", "shared_module", "functional_reuse")
NAMES = [n for n in ZOO if n not in SHARED]
QUICK = ("mlp", "cnn_bn_inplace", "groupnorm_rms", "mha", "lstm")
LAST = (
    "mlp", "mlp_scalar", "mlp_relu_inplace", "grouped_strided_conv", "conv1d", "groupnorm_rms", "bilinear", "mha",
    "gpt2", "lstm", "embedding_bag_of_tokens", "patch_embedding", "all_frozen", "weight_norm", "compiled",
)  # fmt: skip


def covariance_of(tangent, scale=1.0, precision=50.0):
    """A diagonal posterior."""
    structures = {b.name: DiagonalBlock(torch.rand(b.size, dtype=F64)) for b in tangent.blocks}
    return Blockwise(tangent.blocks, structures, torch.full((len(tangent.blocks),), precision, dtype=F64), scale)


FEATURES = [f"{name}, features" for name in ("gpt2", "mha", "mha_seq_first")]


@pytest.mark.parametrize("label", others_slow([*NAMES, *FEATURES], (*QUICK, FEATURES[1])))
def test_zoo_keeps_means_and_does_not_depend_on_the_batch(label):
    name, way = label.partition(",")[0], Streamlined(attention="features" if label in FEATURES else "values")
    torch.manual_seed(1)
    case, tangent = ZOO[name], surveyed(name)
    model, x = tangent.model, case.inputs(4, 0)
    before = copy.deepcopy(getattr(model, "_orig_mod", model).state_dict())
    covariance = covariance_of(tangent)
    latent = way.latent(tangent, covariance, prepared(x))
    torch.testing.assert_close(latent.mean, oracle.call(model, x).detach(), rtol=1e-12, atol=1e-12)
    assert (latent.variance > 0).all()
    for rows in (slice(0, 1), slice(1, 4)):
        part = way.latent(tangent, covariance, prepared(oracle.take(x, rows)))
        torch.testing.assert_close(part.covariance, latent.covariance[rows], rtol=1e-9, atol=1e-12)
    other = way.latent(tangent, covariance, prepared(case.inputs(3, 7)))
    torch.testing.assert_close(other.mean, oracle.call(model, case.inputs(3, 7)).detach(), rtol=1e-12, atol=1e-12)
    after = getattr(model, "_orig_mod", model).state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.quick(8)
@pytest.mark.parametrize(
    ("name", "kind", "mode"),
    [
        *((name, "dense block", mode) for mode in ("full", "diagonal") for name in LAST),
        *(("mlp", kind, mode) for mode in ("full", "diagonal") for kind in KINDS if kind != "dense block"),
    ],
)
def test_last_layer_is_linearised(name, kind, mode):
    case = ZOO[name]
    x = case.inputs(3, 0)
    tangent = tn.Tangent.survey(case.build(), x, tn.last_layer)
    covariance = build(tangent, kind)
    expected = Linearized().latent(tangent, covariance, prepared(x), joint=False)
    found = Streamlined(mode).latent(tangent, covariance, prepared(x))
    torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", others_slow(NAMES, QUICK))
def test_full_mode_is_linearised_to_first_order(name):
    """With weights so sure that their products with uncertain inputs do not count."""
    torch.manual_seed(2)
    tangent, x = surveyed(name), ZOO[name].inputs(3, 0)
    covariance = covariance_of(tangent, scale=1e7, precision=1e8)
    expected = Linearized().latent(tangent, covariance, prepared(x), joint=False)
    found = Streamlined("full", attention="scores").latent(tangent, covariance, prepared(x))
    error = (found.covariance - expected.covariance).norm() / expected.covariance.norm()
    assert error < 1e-6
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-12, atol=1e-12)


# ---- Hugging Face


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=17, max_position_embeddings=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, num_labels=3, initializer_range=0.4,
    )  # fmt: skip
    torch.manual_seed(0)
    return BertForSequenceClassification(config).double().eval()


def tokens(samples, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 17, (samples, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:, length - 2 :] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.parametrize("make", [bert, ZOO["gpt2"].build], ids=["bert", "gpt2"])
def test_batches_of_another_length_need_no_other_reading(make):
    from lapwing.prediction.streamlined.graph import read

    model, x = make(), tokens(4, 6)
    tangent = tn.Tangent.survey(model, {**x, "attention_mask": torch.ones_like(x["attention_mask"])}, tn.matching("*"))
    covariance = covariance_of(tangent)
    first = Streamlined().latent(tangent, covariance, prepared(x))
    torch.testing.assert_close(first.mean, oracle.call(model, x).detach(), rtol=1e-12, atol=1e-12)
    other = tokens(3, 8, seed=3)
    second = Streamlined().latent(tangent, covariance, prepared(other))
    torch.testing.assert_close(second.mean, oracle.call(model, other).detach(), rtol=1e-12, atol=1e-12)
    assert read(tangent, prepared(x)) is read(tangent, prepared(other))
    one = Streamlined().latent(tangent, covariance, prepared(tokens(1, 5)))
    torch.testing.assert_close(one.mean, oracle.call(model, tokens(1, 5)).detach(), rtol=1e-12, atol=1e-12)


# ---- ways of calling


def test_own_forward_with_functional_operations():
    def own(net, x, scale):
        h = F.silu(net.a(x)) * scale
        h = h + F.relu(net.b(h)).clamp(max=2.0)
        return F.normalize(h, dim=-1) @ net.weight

    parts = {"a": nn.Linear(4, 6), "b": nn.Linear(6, 6), "weight": nn.Parameter(torch.randn(6, 2))}
    model = Net(own, **parts).double().eval()
    x = (torch.randn(5, 4, dtype=F64), torch.rand(5, 1, dtype=F64))
    tangent = tn.Tangent.survey(model, x, tn.matching("*"))
    covariance = covariance_of(tangent)
    latent = Streamlined().latent(tangent, covariance, prepared(x))
    torch.testing.assert_close(latent.mean, model(*x).detach())
    by_dict = {"x": x[0], "scale": x[1]}
    again = Streamlined().latent(tangent, covariance, prepared(by_dict))
    torch.testing.assert_close(again.covariance, latent.covariance)
    forward = lambda m, given: m(given["x"], given["scale"])  # noqa: E731
    called = tn.Tangent.survey(model, {**by_dict, "names": list("abcde")}, tn.matching("*"), forward=forward)
    again = Streamlined().latent(called, covariance, prepared({**by_dict, "names": list("abcde")}))
    torch.testing.assert_close(again.covariance, latent.covariance)


def steered(net, x, scale):
    """A convolution and a linear layer whose weights are scaled by a second input."""
    x = F.conv2d(net.first(x), net.kernel * scale.mean())
    return F.linear(x.flatten(1), net.matrix * scale.mean())


@pytest.mark.quick(2)
@pytest.mark.parametrize("positions", ["correlated", "independent"])
def test_weights_that_the_inputs_scale(positions):
    """The variances of a first batch's weights were kept for later batches."""
    weights = {"kernel": nn.Parameter(torch.randn(2, 2, 3, 3)), "matrix": nn.Parameter(torch.randn(3, 8))}
    model = Net(steered, first=nn.Conv2d(1, 2, 3), **weights).double().eval()
    x, scale = torch.randn(4, 1, 6, 6, dtype=F64), torch.ones(4, dtype=F64)
    shown = [((x, scale), torch.tensor([0, 1, 2, 0]))]
    posterior = lw.fit(model, shown, lw.Diagonal(), params=lw.matching("first.*"), prior_precision=1.0)
    once, twice = (posterior.latent((x, s), via=Streamlined(positions=positions)).variance for s in (scale, 2 * scale))
    torch.testing.assert_close(twice, 16 * once)
