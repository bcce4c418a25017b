"""Sensitivities against what equation 11 gives for linear networks, and the rule that ends them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.evaluation import sensitivity
from tests.input_noise import with_input_noise
from tests.zoo_modules import Net

F64 = torch.float64
W = torch.tensor([[2.0, -1.0, 0.5, 0.1]], dtype=F64)


def linear(weight: torch.Tensor) -> nn.Linear:
    model = nn.Linear(weight.shape[1], weight.shape[0], bias=False).double().eval()
    model.weight.data.copy_(weight)
    return model


def mlp(factor: float = 10.0) -> nn.Sequential:
    """A network that is sure of its classes."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    model[2].weight.data.mul_(factor)
    return model


NOISE = lw.Gaussian(0.5)


class TestLinearNetworks:
    @pytest.mark.parametrize(
        ("via", "options"),
        [
            (lw.Streamlined(), {"rate": 0.05, "steps": 5000}),
            (lw.Streamlined("full"), {}),
            (lw.Linearized(), {"variance": 1e-8}),
        ],
    )
    def test_variances_are_inverse_squares_of_the_weights(self, via, options):
        """With the targets on the mean NLPD is ½ log(2π s²), s² = σ² + Σ w_i² v_i: every w_i² v_i is the same u."""
        found = sensitivity(linear(W), torch.randn(3, 4, dtype=F64), likelihood=NOISE, via=via, **options)
        torch.testing.assert_close(found.values, (W.abs() / W.abs().max()).expand(3, 4), rtol=0.02, atol=1e-3)
        total = (W.square() * found.variance).sum(1)
        rises = 0.5 * torch.log1p(total / 0.5)
        assert bool((rises <= 0.1 + 1e-6).all())
        assert bool((rises >= 0.08).all())
        assert bool(found.stopped.all())
        torch.testing.assert_close(found.history["nlpd"][-1] - found.history["nlpd"][0], rises, rtol=1e-3, atol=1e-4)

    def test_an_ignored_input_tolerates_noise_without_bound(self):
        """Nothing limits its entropy, so log v grows by the rate each step."""
        found = sensitivity(linear(torch.tensor([[1.0, 0.0]])), torch.randn(2, 2, dtype=F64), likelihood=NOISE)
        assert bool((found.values[:, 1] < 1e-4).all())
        torch.testing.assert_close(found.variance[:, 1], 1e-5 * (0.1 * found.steps.double()).exp())
        longer = sensitivity(linear(torch.zeros(1, 2)), torch.randn(2, 2, dtype=F64), likelihood=NOISE, steps=50)
        assert not bool(longer.stopped.any())
        torch.testing.assert_close(longer.variance, torch.full((2, 2), 1e-5 * math.exp(5.0), dtype=F64))

    def test_equation_11_with_a_weight_ends_in_its_stationary_point(self):
        """λ u / s² = 1 and s² = σ² + d u, so u = σ² / (λ - d)."""
        found = sensitivity(
            linear(W), torch.randn(2, 4, dtype=F64), likelihood=NOISE, weight=12.0, rise=0.5, rate=0.3, steps=600
        )
        assert not bool(found.stopped.any())
        torch.testing.assert_close(W.square() * found.variance, torch.full((2, 4), 0.5 / (12 - 4), dtype=F64))

    def test_two_classes_see_the_difference_of_their_rows(self):
        weight = torch.tensor([[1.0, 2.0, 3.0], [4.0, 2.5, 3.1]], dtype=F64)
        x = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.5, 0.0]], dtype=F64)
        wanted = torch.tensor([1.0, 0.5 / 3, 0.1 / 3], dtype=F64).expand(2, 3)
        found = sensitivity(linear(weight), x, likelihood="categorical")
        torch.testing.assert_close(found.values, wanted, rtol=0.03, atol=2e-3)

    def test_the_noise_of_each_input(self):
        """With little spread of the weights, the tolerated variance is in proportion to σ²(x), without a bound."""
        x = torch.randn(40, 4, dtype=F64)
        model = linear(W)
        posterior = lw.fit(model, (x, model(x).detach()), lw.Full(), likelihood=NOISE, prior_precision=1e6)
        noisy = with_input_noise(posterior, x, "", df=math.inf)
        rows = (~noisy.likelihood.input_noise.is_far(model(x).detach()))[:, 0].nonzero()[:6, 0]
        found = sensitivity(noisy, x[rows])
        ratio = (W.square() * found.variance).sum(1) / noisy.predict(x[rows]).aleatoric_variance[:, 0]
        torch.testing.assert_close(ratio, ratio.mean().expand(6), rtol=0.05, atol=0.0)
        noise = noisy.predict(x[rows]).aleatoric_variance
        assert noise.amax() > 1.5 * noise.amin()

    def test_yes_or_no(self):
        found = sensitivity(linear(3 * W), torch.ones(2, 4, dtype=F64), likelihood="bernoulli")
        torch.testing.assert_close(found.values, (W.abs() / 2).expand(2, 4), rtol=0.03, atol=2e-3)

    def test_uncertain_weights_add_their_variance(self):
        """Var[w x] has v_i (w_i² + Var[w_i]), so that the sensitivities are their roots."""
        model, x = linear(W), torch.randn(20, 4, dtype=F64)
        posterior = lw.fit(model, [(x, x @ W.T)], lw.Diagonal(), likelihood=NOISE, prior_precision=1.0)
        (spread,) = posterior.covariance.diagonal().values()
        assert bool((spread > 0.1 * W.square().min()).all())
        wanted = (W.square() + spread).sqrt()
        found = sensitivity(posterior, x[:3], via=lw.Streamlined())
        torch.testing.assert_close(found.values, (wanted / wanted.max()).expand(3, 4), rtol=0.02, atol=1e-3)


class TestRule:
    def test_each_sample_is_on_its_own(self):
        model, x = mlp(), torch.randn(5, 4, dtype=F64)
        whole = sensitivity(model, x, likelihood="categorical", rate=0.5)
        for i in range(2):
            alone = sensitivity(model, x[i : i + 1], likelihood="categorical", rate=0.5)
            torch.testing.assert_close(alone.variance[0], whole.variance[i])
            assert int(alone.steps[0]) == int(whole.steps[i])

    @pytest.mark.parametrize(("rise", "weight"), [(0.01, None), (0.2, 1.0)])
    def test_the_last_within_the_rule(self, rise, weight):
        model, x = mlp(), torch.randn(5, 4, dtype=F64)
        y = model(x).argmax(1)
        found = sensitivity(model, x, y, rise=rise, weight=weight)
        assert bool(found.stopped.all())
        at = [
            -lw.Categorical().predict(lw.propagate(model, lw.Uncertain(x, v))).log_prob(y)
            for v in (torch.full_like(x, 1e-5), found.variance, found.variance * math.exp(0.3))
        ]
        assert bool((at[1] - at[0] <= rise).all())
        assert bool((at[2] - at[0] > rise).all())
        torch.testing.assert_close(found.history["nlpd"][0], at[0].detach())
        torch.testing.assert_close(found.history["nlpd"][-1], at[1].detach())
        entropy = 0.5 * (2 * math.pi * math.e * found.variance).log().sum(1)
        torch.testing.assert_close(found.history["entropy"][-1], entropy)
        assert len(found.history["nlpd"]) == int(found.steps.max()) + 2

    def test_wrong_targets_stop_where_the_density_has_changed(self):
        """Noise helps there: the NLPD falls, by as much as the rule allows."""
        model, x = mlp(), 3 * torch.randn(5, 4, dtype=F64)
        y = model(x).argmin(1)
        found = sensitivity(model, x, y)
        change = found.history["nlpd"][-1] - found.history["nlpd"][0]
        assert bool((change < 0).all())
        assert bool((change >= -0.1).all())
        assert bool(found.stopped.all())

    def test_a_posterior_and_its_own_predictions(self):
        model, x = mlp(), torch.randn(20, 4, dtype=F64)
        posterior = lw.fit(model, [(x, torch.arange(20) % 3)], lw.KFAC(), prior_precision=1.0)
        found = sensitivity(posterior, x[:3], rate=0.5)
        given = sensitivity(posterior, x[:3], posterior.predict(x[:3]).classes, rate=0.5)
        assert torch.equal(found.variance, given.variance)
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_one_of_several_inputs(self):
        parts = {"a": nn.Linear(4, 1, bias=False), "table": nn.Embedding(5, 1)}
        model = Net(lambda net, x, tokens: net.a(x) + net.table(tokens).mean(1), **parts).double().eval()
        model.a.weight.data.copy_(W)
        x, tokens = torch.randn(2, 4, dtype=F64), torch.randint(5, (2, 3))
        found = sensitivity(model, {"x": lw.Uncertain(x, 1e-6), "tokens": tokens}, likelihood=NOISE)
        torch.testing.assert_close(found.values, (W.abs() / 2).expand(2, 4), rtol=0.02, atol=1e-3)
        assert torch.equal(found.inputs, x)
