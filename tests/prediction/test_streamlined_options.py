"""Attention by scores or values, matched activations, branches, against loops, draws and quadrature."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import jacrev
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import lapwing as lw
from lapwing import tangent as tn
from lapwing.prediction.linearized import Linearized
from lapwing.prediction.streamlined import Streamlined
from lapwing.prediction.uncertain import prepared
from tests.prediction.streamlined_oracle import F64, propagate
from tests.prediction.test_streamlined_networks import covariance_of
from tests.refused import refused
from tests.zoo_modules import Net

# ---- attention


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def masked_and_scaled(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(4, 4, dtype=torch.bool).tril(), scale=0.7)


def biased(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.tensor([[0.3, -1.0, 0.0, 2.0]], dtype=F64))


def by_hand(q, k, v):
    weights = torch.softmax(q @ k.transpose(-1, -2) / 3**0.5, -1)
    return F.dropout(weights, 0.1, False) @ v


def by_einsum(q, k, v):
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * 0.5
    return torch.einsum("bhts,bhsd->bhtd", scores.masked_fill(torch.eye(4, dtype=torch.bool), -1e9).softmax(-1), v)


KINDS = [fused, masked_and_scaled, biased, by_hand, by_einsum]


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_with_certain_scores(kind):
    q, k, v, s = (torch.randn(2, 2, 4, 3, dtype=F64) for _ in range(4))
    s = s.square()
    mean, variance, model = propagate(kind, (q, k, v), {0: s + 1, 1: s + 2, 2: s})
    P = kind(q, k, torch.eye(4, dtype=F64).expand(2, 2, 4, 4))  # the weights themselves
    torch.testing.assert_close(variance, (P.square() @ s).flatten(1))
    torch.testing.assert_close(mean, model(q, k, v).detach())


@pytest.mark.parametrize("kind", KINDS[:3])
def test_attention_with_uncertain_scores_equals_jacobians(kind):
    q, k, v = (torch.randn(2, 2, 4, 3, dtype=F64) for _ in range(3))
    spreads = [torch.rand(2, 2, 4, 3, dtype=F64) for _ in range(3)]
    mean, variance, model = propagate(kind, (q, k, v), dict(enumerate(spreads)), attention="scores")
    expected = torch.zeros_like(variance)
    with sdpa_kernel(SDPBackend.MATH):
        for b in range(2):
            one = tuple(part[b] for part in (q, k, v))
            for J, spread in zip(
                jacrev(lambda *x: model(*(y[None] for y in x))[0], (0, 1, 2))(*one), spreads, strict=True
            ):
                expected[b] += J.detach().flatten(1).square() @ spread[b].flatten()
    torch.testing.assert_close(variance, expected)
    torch.testing.assert_close(mean, model(q, k, v).detach())


# ---- covariances of attention's values between the features of a head


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


OPTIONS = [{"heads": 1}, {"heads": 2}, {"heads": 3, "packed": True}, {"heads": 2, "first": False, "causal": True}]


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_features_of_a_head_that_share_inputs_equal_loops(options):
    """Equation 74: the covariances of the weights within a head, independent heads."""
    model = Attention(**options).double().eval()
    x, z, v = *torch.randn(2, 2, 5, 4, dtype=F64), torch.rand(2, 5, 4, dtype=F64)
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


# ---- matched activations


def on_a_grid(function, m, v):
    """Means and variances of a function of normal numbers by fine quadrature."""
    grid = torch.linspace(-9, 9, 200_001, dtype=F64)
    weights = (-grid.square() / 2).exp()
    weights = weights / weights.sum()
    values = function(m[..., None] + v.sqrt()[..., None] * grid)
    mean = values @ weights
    return mean, (values - mean[..., None]).square() @ weights


@pytest.mark.parametrize("size", [1e-12, 1e-4, 1.0, 30.0, -30.0])
def test_matched_relu_keeps_its_precision(size):
    from lapwing.prediction.streamlined.functions import relu_moments
    from lapwing.prediction.streamlined.moments import Moments

    m = torch.tensor([size, -size, 1.0], dtype=F64)
    v = torch.tensor([1.0, 1.0, 1e-12], dtype=F64)
    found, (mean, variance) = relu_moments(Moments(m, v)), on_a_grid(torch.relu, m, v)
    torch.testing.assert_close(found.mean, mean, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(found.variance, variance, rtol=1e-5, atol=1e-12)
    assert (found.variance >= 0).all()


@pytest.mark.parametrize("kind", [nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Softplus])
def test_matched_smooth_activations_equal_fine_quadrature(kind):
    x, v = torch.randn(3, 4, dtype=F64), torch.rand(3, 4, dtype=F64)
    module = nn.Sequential(nn.BatchNorm1d(4), kind()).double().eval()
    mean, variance, _ = propagate(module, x, {0: v}, activations="moments")
    first, second = on_a_grid(lambda h: module[1](h / (1 + 1e-5) ** 0.5), x, v)
    torch.testing.assert_close(mean, first, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(variance, second, rtol=1e-4, atol=1e-5)


# ---- branches


def test_correlated_branches_bring_variances_nearer_the_linearised_ones():
    branch = lambda net, x: x + net.down(torch.tanh(net.up(x)))  # noqa: E731
    blocks = [Net(branch, up=nn.Linear(5, 10), down=nn.Linear(10, 5)) for _ in range(3)]
    with torch.no_grad():
        for block in blocks:  # branches that point along the shortcut, as identity-like blocks do
            block.down.weight.copy_(block.up.weight.T)
    model = nn.Sequential(nn.Linear(4, 5), *blocks, nn.Linear(5, 2)).double().eval()
    x = torch.randn(6, 4, dtype=F64)
    tangent = tn.Tangent.survey(model, x, tn.matching("*"))
    covariance = covariance_of(tangent, precision=1e6)
    exact = Linearized().latent(tangent, covariance, prepared(x), joint=False)
    errors = []
    for residual in ("independent", "correlated"):
        latent = Streamlined("full", residual=residual).latent(tangent, covariance, prepared(x))
        errors.append(float((latent.variance / exact.variance).log().abs().mean()))
    assert errors[1] < 0.5 * errors[0]
    assert errors[1] < 1e-4
    torch.testing.assert_close(latent.covariance, exact.covariance, rtol=1e-3, atol=1e-12)
    torch.testing.assert_close(
        Streamlined("full").latent(tangent, covariance, prepared(x)).covariance, latent.covariance
    )


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_variances_that_overflow_are_refused(covariance):
    """The posterior is so wide that the products of ten layers overflow float32."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(10)]).eval()
    x = torch.randn(4, 8)
    posterior = lw.fit(model, [(x, x)], lw.Diagonal(), likelihood=lw.Gaussian(1e9), prior_precision=1e-6)
    words = "Sequential at Tensor (4, 8) … NaN or infinite … with_prior(100.0)"
    refused(lambda: posterior.predict(x, via=Streamlined(covariance)), words)
    narrow = posterior.with_prior(100.0)
    assert narrow.predict(x, via=Streamlined(covariance)).std.isfinite().all()


def test_hooks_that_come_and_go_between_predictions_count():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval(), torch.randn(5, 3, dtype=F64)
    tangent = tn.Tangent.survey(model, x)
    covariance = covariance_of(tangent, precision=4.0)
    before = Streamlined().latent(tangent, covariance, prepared(x))
    handle = model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    torch.testing.assert_close(Streamlined().latent(tangent, covariance, prepared(x)).mean, model(x).detach())
    handle.remove()
    torch.testing.assert_close(Streamlined().latent(tangent, covariance, prepared(x)).mean, before.mean)
