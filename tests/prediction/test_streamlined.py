"""Streamlined prediction through linear layers and activations, against loops over weights and weight draws."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lapwing import tangent as tn
from lapwing.prediction.streamlined import Streamlined
from lapwing.prediction.uncertain import prepared
from tests.prediction.streamlined_oracle import (
    F64,
    KINDS,
    assert_within_monte_carlo_error,
    build,
    draw_outputs,
    mlp_by_loops,
    survey,
    weight_covariances,
)

KINDS_IN_MODES = [*((kind, "full") for kind in KINDS), ("kronecker", "diagonal"), ("low rank", "diagonal")]


# ---- exact limits


PARTS = [("*.weight",), ("*.bias",), ("0.weight", "2.bias"), ("0.*",), ("2.weight",), ("0.*", "4.*")]


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    ("kind", "mode", "patterns"),
    [
        *((kind, mode, ("*",)) for kind, mode in KINDS_IN_MODES),
        *(("kronecker", mode, part) for part in PARTS for mode in ("diagonal", "full")),
    ],
)
def test_two_hidden_layers_equal_loops(kind, mode, patterns):
    x = torch.randn(2, 3, dtype=F64)
    layers = (nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model = nn.Sequential(*layers).double()
    tangent = survey(model, x, tn.matching(*patterns))
    covariance = build(tangent, kind)
    found, S = weight_covariances(tangent, covariance), {}
    for block in tangent.blocks:
        layer = block.parameters[0][0]
        outputs, inputs = model[int(layer)].weight.shape
        columns = slice(0 if block.has_weight else inputs, inputs + block.bias)
        S[layer] = torch.zeros(outputs, inputs + 1, outputs, inputs + 1, dtype=F64)
        S[layer][:, columns, :, columns] = found[block.name]
    latent = Streamlined(mode).latent(tangent, covariance, prepared(x), joint=False)
    expected = mlp_by_loops(model, S, x, mode == "diagonal")
    torch.testing.assert_close(latent.covariance, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["kronecker", "diagonal", "dense block"])
def test_product_of_two_independent_layers_is_exact_in_full_mode(kind):
    x = torch.randn(4, 4, dtype=F64)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6, bias=False), nn.Linear(6, 3)).double()
    tangent = survey(model, x, tn.matching("0.*", "1.*"))
    covariance = build(tangent, kind, scale=0.3)
    latent = Streamlined("full").latent(tangent, covariance, prepared(x), joint=False)
    S = weight_covariances(tangent, covariance)
    W, V, U = (model[k].weight.detach() for k in (0, 1, 2))
    a = torch.cat([x, torch.ones(4, 1, dtype=F64)], 1)
    b = x @ W.T + model[0].bias.detach()
    hh = b[:, :, None] * b[:, None, :] + torch.einsum("bi,bl,jikl->bjk", a, a, S["0"])  # E[h hᵀ]
    VV = torch.einsum("ji,kl->jikl", V, V) + S["1"]  # E[V_ji V_kl]
    mean = b @ V.T
    cov = torch.einsum("jikl,bil->bjk", VV, hh) - mean[:, :, None] * mean[:, None, :]
    torch.testing.assert_close(latent.covariance, U @ cov @ U.T, rtol=1e-10, atol=1e-10)
    assert_within_monte_carlo_error(draw_outputs(model, tangent, covariance, x), latent.mean, latent.covariance)


# ---- which parameters, which networks


def test_inputs_and_model_are_left_alone():
    x = torch.randn(3, 4, dtype=F64)
    layers = (nn.Linear(4, 4), nn.Linear(4, 5), nn.ELU(inplace=True), nn.PReLU(), nn.Linear(5, 2))
    model = nn.Sequential(nn.ReLU(inplace=True), *layers).double()
    tangent = survey(model, x.clone(), tn.matching("2.*"))
    before = x.clone().requires_grad_()
    latent = Streamlined().latent(tangent, build(tangent, "kronecker"), prepared(before), joint=False)
    torch.testing.assert_close(before.detach(), x)
    latent.variance.sum().backward()
    assert before.grad is not None
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_models(dtype):
    x = torch.randn(6, 4)
    model = nn.Sequential(nn.Linear(4, 5), nn.PReLU(), nn.Linear(5, 3)).to(dtype)
    tangent = survey(model, x.to(dtype), tn.matching("0.*", "2.*"))
    covariance = build(tangent, "low rank with residual")
    latent = Streamlined().latent(tangent, covariance, prepared(x.to(dtype)), joint=False)
    model = model.double()
    tangent = survey(model, x.to(dtype).double(), tn.matching("0.*", "2.*"))
    expected = Streamlined().latent(tangent, covariance, prepared(x.to(dtype).double()), joint=False)
    assert latent.mean.dtype == torch.float32
    torch.testing.assert_close(latent.mean, expected.mean.float())
    torch.testing.assert_close(latent.covariance, expected.covariance.float())
