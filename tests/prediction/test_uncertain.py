"""Uncertain inputs through every way, against dense Jacobians and draws of x."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.prediction.propagation import certain_latent, untreated
from tests.input_noise import with_input_noise
from tests.prediction.streamlined_oracle import (
    assert_within_monte_carlo_error,
    jacobians,
    mlp_by_loops,
    psd,
    weight_covariances,
)
from tests.refused import refused
from tests.zoo_modules import Net

F64 = torch.float64
WAYS = [lw.Linearized(), lw.Streamlined(), lw.Streamlined("full"), lw.MonteCarlo(20)]
NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
    "one output": (lambda: nn.Sequential(nn.Linear(4, 5), nn.SiLU(), nn.Linear(5, 1)), (4,)),
    "in place": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)), (4,)),
    "norm": (lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3)), (4,)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)), (2, 5, 5)
    ),
}  # fmt: skip


def two_inputs() -> nn.Module:
    """A network of two named inputs, and optional tokens."""

    def forward(net: nn.Module, a: Tensor, b: Tensor, tokens: Tensor | None = None) -> Tensor:
        out = torch.tanh(net.first(a)) + net.second(b)
        return out if tokens is None else out + net.table(tokens).mean(1)

    layers = {"first": nn.Linear(4, 3), "second": nn.Linear(2, 3, bias=False), "table": nn.Embedding(6, 3)}
    return Net(forward, **layers).double().eval()


def made(name: str) -> tuple[nn.Module, Tensor]:
    make, shape = NETWORKS[name]
    return make().double().eval(), torch.randn(3, *shape, dtype=F64)


def fitted(model: nn.Module, x: Tensor, **options) -> lw.Posterior:
    with torch.no_grad():
        outputs = model(x).shape[1]
    return lw.fit(model, [(x, torch.randn(len(x), outputs, dtype=F64))], lw.KFAC(), likelihood=lw.Gaussian(0.5),
                  prior_precision=1.0, **options)  # fmt: skip


def certain(model: nn.Module):
    """Returns `lw.propagate` for a network that is read once."""
    certain = untreated(model, None, None)
    return lambda inputs, via: certain_latent(*certain, inputs, via)


@pytest.mark.parametrize("via", [lw.Linearized(), lw.Streamlined("full")], ids=["linearized", "full"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.quick(2)
def test_covariances_with_certain_weights(name, via):
    model, x = made(name)
    v, s = torch.rand_like(x), psd(3, x[0].numel())
    j = jacobians(model, x)
    given = [({"variance": v}, v.flatten(1).diag_embed()), ({"covariance": s}, s), ({"covariance": s[0]}, s[0])]
    for options, covariance in given:
        found = lw.propagate(model, lw.Uncertain(x, **options), via)
        torch.testing.assert_close(found.covariance, j @ covariance @ j.mT)
    torch.testing.assert_close(found.mean, model(x).detach())
    assert not found.covariance.requires_grad


@pytest.mark.parametrize("name", ["mlp", "one output", "convolution"])
def test_linearized_adds_to_the_weights_part(name):
    model, x = made(name)
    posterior, v = fitted(model, x), torch.rand_like(x)
    j = jacobians(model, x)
    added = (j * v.flatten(1)[:, None]) @ j.mT
    certain, found = posterior.latent(x), posterior.latent(lw.Uncertain(x, v))
    torch.testing.assert_close(found.covariance, certain.covariance + added)
    torch.testing.assert_close(found.mean, certain.mean)
    joint = posterior.latent(lw.Uncertain(x, v), joint=True).covariance - posterior.latent(x, joint=True).covariance
    for a in range(3):
        for b in range(3):
            torch.testing.assert_close(joint[a, :, b], added[a] if a == b else torch.zeros_like(added[a]))


def test_full_mode_with_weights_equals_loops():
    """Equations 3 and 4, starting from Cov[x]."""
    model, x = made("mlp")
    posterior, s = fitted(model, x), psd(3, 4)
    found = posterior.latent(lw.Uncertain(x, covariance=s), via=lw.Streamlined("full")).covariance
    weights = weight_covariances(posterior.tangent, posterior.covariance)
    torch.testing.assert_close(found, mlp_by_loops(model, weights, x, diagonal=False, of_x=s))


def test_diagonal_mode_with_certain_weights_is_a_product_of_squares():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double().eval()
    x, v = torch.randn(3, 4, dtype=F64), torch.rand(3, 4, dtype=F64)
    found = lw.propagate(model, lw.Uncertain(x, v), lw.Streamlined()).covariance
    hidden = v @ model[0].weight.square().T
    expected = torch.einsum("ci,bi,di->bcd", model[1].weight, hidden, model[1].weight)  # covariances in the last layer
    torch.testing.assert_close(found, expected.detach())


class TestMonteCarlo:
    def test_linear_network(self):
        model = nn.Linear(4, 3).double().eval()
        x, s = torch.randn(2, 4, dtype=F64), psd(2, 4)
        w = model.weight.detach()
        for given, wanted in (({"covariance": s}, s), ({"variance": 0.3}, 0.3 * torch.eye(4, dtype=F64))):
            latent = lw.propagate(model, lw.Uncertain(x, **given), lw.MonteCarlo(2000))
            assert_within_monte_carlo_error(latent.draws, model(x).detach(), (w @ wanted @ w.T).expand(2, 3, 3))

    def test_the_weights_draws_are_the_same_with_and_without(self):
        model, x = made("mlp")
        posterior = fitted(model, x)
        plain = posterior.latent(x, via=lw.MonteCarlo(5))
        torch.testing.assert_close(posterior.latent(lw.Uncertain(x, 0.0), via=lw.MonteCarlo(5)).draws, plain.draws)
        noisy = posterior.latent(lw.Uncertain(x, 0.5), via=lw.MonteCarlo(1000)).variance
        assert bool((noisy > posterior.latent(x, via=lw.MonteCarlo(1000)).variance).all())


@pytest.mark.parametrize("via", WAYS, ids=lambda via: repr(via)[:32])
class TestEveryWay:
    @pytest.mark.quick(2)
    def test_broadcasting(self, via):
        model, x = made("mlp")
        for given in (torch.rand(4, dtype=F64), torch.rand(3, 1, dtype=F64), torch.tensor(0.5, dtype=F64)):
            found = lw.propagate(model, lw.Uncertain(x, given), via)
            whole = lw.propagate(model, lw.Uncertain(x, given.expand(3, 4).clone()), via)
            torch.testing.assert_close(found.variance, whole.variance)

    @pytest.mark.quick(2)
    def test_nested_inputs(self, via):
        model = two_inputs()
        a, b, tokens = torch.randn(3, 4, dtype=F64), torch.randn(3, 2, dtype=F64), torch.randint(6, (3, 5))
        u = lw.Uncertain(b, 0.2)
        w = model.second.weight.detach()
        found = [
            lw.propagate(model, (a, u), via),
            lw.propagate(model, {"a": a, "b": u}, via),
            lw.propagate(model, {"tokens": tokens, "b": u, "a": a}, via),
            lw.propagate(
                model, {"x": [a, {"y": (u, None)}]}, via, forward=lambda m, i: m(i["x"][0], i["x"][1]["y"][0])
            ),
        ]
        for each in found:
            if isinstance(via, lw.MonteCarlo):
                torch.testing.assert_close(each.variance, found[0].variance)
            else:
                torch.testing.assert_close(each.variance, 0.2 * w.square().sum(1).expand(3, 3))
        both = lw.propagate(model, (lw.Uncertain(a, 0.1), u), via)
        assert bool((both.variance > found[0].variance).any())

    @pytest.mark.quick(2)
    def test_posterior_with_nested_inputs(self, via):
        model = two_inputs()
        a, b = torch.randn(8, 4, dtype=F64), torch.randn(8, 2, dtype=F64)
        batch = {"tokens": torch.randint(6, (8, 5)), "a": a, "b": b}
        posterior = lw.fit(model, [{**batch, "labels": torch.arange(8) % 3}], lw.Diagonal(), prior_precision=1.0)
        noisy = {**batch, "b": lw.Uncertain(b, 5.0)}
        assert bool((posterior.latent(noisy, via=via).variance > posterior.latent(batch, via=via).variance).any())
        torch.testing.assert_close(
            posterior.predict([noisy, noisy], via=via).probs[8:], posterior.predict(noisy, via=via).probs
        )

    @pytest.mark.quick(1)
    def test_chunks_change_nothing(self, via):
        model, x = made("mlp")
        posterior = fitted(model, x)
        one = 2000 if via == lw.Streamlined("full") else 1  # bytes; full covariances of a sample must fit
        sliced = replace(posterior, tangent=replace(posterior.tangent, memory=one))
        given = [lw.Uncertain(x, torch.rand_like(x))]
        if via != lw.Streamlined():
            given.append(lw.Uncertain(x, covariance=psd(3, 4)))
        for u in given:
            torch.testing.assert_close(sliced.latent(u, via=via).variance, posterior.latent(u, via=via).variance)
            tangent, covariance = untreated(model, None, None)
            alone = certain_latent(replace(tangent, memory=one), covariance, u, via)
            torch.testing.assert_close(alone.variance, lw.propagate(model, u, via).variance)

    def test_a_loader_of_uncertain_batches(self, via):
        model, x = made("mlp")
        posterior, u = fitted(model, x), lw.Uncertain(x, 0.1)
        found = posterior.predict([u, (u, torch.zeros(3, 3, dtype=F64))], via=via)
        torch.testing.assert_close(found.variance[3:], found.variance[:3])


@pytest.mark.parametrize("via", [lw.Linearized(), lw.Streamlined(), lw.Streamlined("full"), lw.MonteCarlo(5)], ids=repr)
def test_the_noise_is_that_of_the_certain_inputs(via):
    """Noise that depends on the input reads the mean of an uncertain input, and its bound the variances of the way."""
    model, x = made("mlp")
    x = torch.cat([x, 3 * x])
    posterior = with_input_noise(fitted(model, x), x, "2")
    noise = posterior.likelihood.input_noise
    features = model[:2](x).detach()
    assert 0 < noise.is_far(features).sum() < len(x)
    for given in (x, lw.Uncertain(x, 0.1)):
        latent, prediction = posterior.latent(given, via=via), posterior.predict(given, via=via)
        torch.testing.assert_close(prediction.aleatoric_variance, noise.variance(features, latent.variance))
        torch.testing.assert_close(prediction.epistemic_variance, latent.variance)
        assert prediction.df == 4.0


@pytest.mark.quick(3)
@pytest.mark.parametrize("via", [lw.Linearized(), lw.Streamlined(), lw.Streamlined("full")])
@pytest.mark.parametrize("bayes", [False, True])
def test_derivatives(via, bayes):
    model, x = made("mlp")
    posterior = fitted(model, x) if bayes else None
    latent = certain(model)
    v = torch.rand_like(x)

    def variance(x: Tensor, v: Tensor) -> Tensor:
        u = lw.Uncertain(x, v)
        return (posterior.latent(u, via=via) if posterior else latent(u, via)).variance

    assert torch.autograd.gradcheck(variance, (x.requires_grad_(), v.requires_grad_()))
    at_zero = torch.zeros_like(x).requires_grad_()
    (slope,) = torch.autograd.grad(variance(x.detach(), at_zero).sum(), at_zero)
    assert bool(torch.isfinite(slope).all())
    assert bool((slope > 0).any())


def test_derivatives_in_covariances_and_for_draws():
    model, x = made("mlp")
    s = psd(3, 4).requires_grad_()
    latent = certain(model)
    for via in (lw.Linearized(), lw.Streamlined("full")):

        def total(s: Tensor, via: lw.Linearized | lw.Streamlined = via) -> Tensor:
            return latent(lw.Uncertain(x, covariance=(s + s.mT) / 2), via).covariance

        assert torch.autograd.gradcheck(total, (s,))
    v = torch.zeros_like(x).requires_grad_()
    latent = lw.propagate(model, lw.Uncertain(x, v), lw.MonteCarlo(3))
    assert bool(torch.isfinite(torch.autograd.grad(latent.mean.sum(), v)[0]).all())


def test_a_network_that_detaches_its_inputs_is_refused():
    """Draws need no gradient."""
    model = Net(lambda net, x: net.layer(x.detach()), layer=nn.Linear(3, 2)).double().eval()
    noisy = lw.Uncertain(torch.randn(4, 3, dtype=F64), 0.1)
    refused(lambda: lw.propagate(model, noisy), "No gradient leads … of Net to its uncertain inputs … detach()")
    drawn = lw.propagate(model, noisy, lw.MonteCarlo(draws=1000)).variance
    wanted = 0.1 * model.layer.weight.square().sum(1).detach()
    torch.testing.assert_close(drawn, wanted.expand(4, 2), rtol=0.2, atol=0.0)


def test_an_input_that_no_output_depends_on_adds_nothing():
    model = two_inputs()
    x, z = (torch.randn(3, 4, dtype=F64) for _ in range(2))
    forward = lambda model, inputs: model(inputs[0], inputs[0][:, :2])  # noqa: E731
    both = lw.propagate(model, (lw.Uncertain(x, 0.1), lw.Uncertain(z, 0.1)), forward=forward)
    torch.testing.assert_close(
        both.covariance, lw.propagate(model, (lw.Uncertain(x, 0.1), z), forward=forward).covariance
    )
