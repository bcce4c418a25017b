"""`lw.Linearized(draws=S)`: draws through the Jacobian, against the oracle's J and the exact covariance."""

from __future__ import annotations

import logging
import weakref

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.covariance import Latent, LinearDraws
from lapwing.prediction import linearized, weight_draws
from tests.conformance import Setup, close, jacobian, sampled_from
from tests.zoo import ZOO

METHODS = {
    "diagonal": lw.Diagonal(),
    "kfac": lw.KFAC(),
    "ekfac": lw.EKFAC(),
    "full": lw.Full(),
    "ella": lw.ELLA(rank=6, rows=12),
    "ella_prior": lw.ELLA(rank=6, rows=12, residual="prior"),
    "sampled_lla": lw.SampledLLA(draws=5, em_steps=0),
    "mean_field": lw.MeanField(steps=2),
    "some_weights": lw.SubsetOfWeights(10),
}
TUNED = ("mean_field", "sampled_lla")


def fitted(method: str, name: str = "mlp", **options: object) -> tuple[Setup, lw.Posterior]:
    setup = Setup(ZOO[name])
    return setup, setup.fit(METHODS[method], **({"tune": None} if method in TUNED else {}), **options)


def weights_of(posterior: lw.Posterior, draws: int, seed: int) -> torch.Tensor:
    """Returns the deviations of the weights (S, P) that the way draws."""
    steps = posterior.covariance.sample(draws, torch.Generator().manual_seed(seed))
    return torch.cat([steps[block.name] for block in posterior.tangent.blocks], -1)


@pytest.mark.quick(3)
@pytest.mark.parametrize("method", METHODS)
def test_deviations_are_products_of_the_jacobian_with_weight_draws(method):
    setup, posterior = fitted(method)
    latent = posterior.latent(setup.test, via=lw.Linearized(draws=5, seed=3))
    J = jacobian(posterior.model, setup.test, posterior.tangent.blocks)
    d = torch.einsum("bcp,sp->sbc", J, weights_of(posterior, 5, 3))
    close(latent.deviations, d)
    close(latent.mean, posterior.latent(setup.test).mean)
    close(latent.covariance, torch.einsum("sbc,sbd->bcd", d, d) / 5)
    close(latent.variance, d.square().mean(0))
    close(latent.centred_variance, (d - d.mean(-1, keepdim=True)).square().mean(0))
    close(latent.standard_error, d.square().mean(0) * (2 / 5) ** 0.5)


@pytest.mark.parametrize("name", ["embedding_bag_of_tokens", "weight_norm", "tied", "shared_module", "cnn_bn_inplace"])
def test_networks_with_and_without_forward_mode(name):
    """The first two have no correct forward mode and use two backward passes instead."""
    setup = Setup(ZOO[name])
    posterior = setup.fit(lw.Diagonal(), tune=None)
    latent = posterior.latent(setup.test, via=lw.Linearized(draws=4))
    J = jacobian(setup.model, setup.test, posterior.tangent.blocks)
    close(latent.deviations, torch.einsum("bcp,sp->sbc", J, weights_of(posterior, 4, 0)))


def test_all_draws_of_sampled_lla_are_its_covariance_where_few_fit_the_budget():
    setup, posterior = fitted("sampled_lla")
    object.__setattr__(posterior.tangent, "memory", 2 * 2 * posterior.tangent.size * 8)  # two draws at once
    close(posterior.latent(setup.test, via=lw.Linearized(draws=64)).covariance, posterior.latent(setup.test).covariance)


def test_chunks_of_inputs_and_of_draws_change_nothing_but_the_random_numbers(monkeypatch):
    setup, posterior = fitted("kfac")
    whole = posterior.latent(setup.x, via=lw.Linearized(draws=7), joint=True)
    monkeypatch.setattr(lw.tangent.Tangent, "chunk_length", lambda *_: 2)
    close(posterior.latent(setup.x, via=lw.Linearized(draws=7)).deviations, whole.deviations)
    object.__setattr__(posterior.tangent, "memory", 3 * 2 * posterior.tangent.size * 8)  # three draws at once
    latent = posterior.latent(setup.x, via=lw.Linearized(draws=7))
    generator = torch.Generator().manual_seed(0)
    parts = [posterior.covariance.sample(count, generator) for count in (3, 3, 1)]
    steps = torch.cat([torch.cat([part[b.name] for b in posterior.tangent.blocks], -1) for part in parts])
    close(
        latent.deviations, torch.einsum("bcp,sp->sbc", jacobian(setup.model, setup.x, posterior.tangent.blocks), steps)
    )


def test_draws_of_weights_are_kept_as_long_as_their_posterior():
    setup, posterior = fitted("diagonal")
    first = posterior.latent(setup.test, via=lw.Linearized(draws=3))
    for way in (lw.Linearized(draws=4), lw.Linearized(draws=3, seed=1), lw.Linearized(draws=3)):
        latent = posterior.latent(setup.test, via=way)
        assert latent.deviations.equal(first.deviations) == (way == lw.Linearized(draws=3))
    other = posterior.with_prior(50.0)
    assert (other.latent(setup.test, via=lw.Linearized(draws=3)).variance < first.variance).all()
    covariance = weakref.ref(posterior.covariance)
    assert covariance() in weight_draws._LATEST_STEPS
    del posterior
    assert covariance() is None


def test_a_loader_and_two_calls_are_joint():
    setup, posterior = fitted("kfac")
    way = lw.Linearized(draws=6)
    whole = posterior.latent(setup.x, via=way)
    batches = posterior.latent([setup.x[:4], setup.x[4:8], setup.x[8:]], via=way)
    close(batches.deviations, whole.deviations)
    close(batches.sample(3), torch.cat([posterior.latent(part, via=way).sample(3) for part in setup.x.split(4)], 1))
    sampled_from(
        (whole.sample(20_000) - whole.mean).flatten(1),
        posterior.latent(setup.x, via=way, joint=True).covariance.reshape(27, 27),
    )


def test_links_and_predictions_read_what_they_need():
    setup, posterior = fitted("kfac")
    way = lw.Linearized(draws=50)
    latent = posterior.latent(setup.test, via=way)
    dense = Latent(latent.mean, ()).plus(latent.covariance)
    for link in (None, lw.Probit(scale="marginal"), lw.LaplaceBridge()):
        close(posterior.predict(setup.test, via=way, link=link).probs, posterior.likelihood.predict(dense, link).probs)
    many = lw.SampledLink(20_000)
    sampled = posterior.predict(setup.test, via=way, link=many)
    wanted = posterior.likelihood.predict(dense, many)
    close(sampled.probs, wanted.probs, 0.03)
    close(sampled.mutual_information(20_000), wanted.mutual_information(20_000), 0.05)
    assert sampled.sample(2).shape == (2, 3)
    joint = posterior.likelihood.predict(posterior.latent(setup.test, via=way, joint=True))
    assert joint.sample(2).shape == (2, 3)


def test_a_regression_never_expands_the_covariance(monkeypatch):
    setup, posterior = fitted("diagonal", "deep_linear")
    y = setup.case.targets(3, 2)
    latent = posterior.latent(setup.test, via=lw.Linearized(draws=9))
    wanted = posterior.likelihood.predict(Latent(latent.mean, ()).plus(latent.covariance))
    joint = posterior.latent(setup.test, via=lw.Linearized(draws=9), joint=True)
    flat = joint.covariance.reshape(6, 6) + posterior.noise_variance * torch.eye(6, dtype=torch.float64)
    normal = torch.distributions.MultivariateNormal(joint.mean.flatten(), flat)
    monkeypatch.setattr(LinearDraws, "covariance", property(lambda _: pytest.fail("the covariance was expanded")))
    prediction = posterior.predict(setup.test, via=lw.Linearized(draws=9))
    close(prediction.log_prob(y), wanted.log_prob(y))
    close(prediction.distribution().log_prob(y), wanted.log_prob(y))
    close(torch.stack(prediction.interval()), torch.stack(wanted.interval()))
    assert prediction.sample(2).shape == (2, 3, 2)
    close(posterior.likelihood.predict(joint).distribution().log_prob(y.flatten()), normal.log_prob(y.flatten()))


def test_variances_are_differentiable_in_the_inputs():
    setup, posterior = fitted("diagonal")
    x = setup.test.clone().requires_grad_()
    steps = weights_of(posterior, 3, 0)
    (gradient,) = torch.autograd.grad(posterior.latent(x, via=lw.Linearized(draws=3)).variance.sum(), x)
    (wanted,) = torch.autograd.grad(
        torch.einsum("bcp,sp->sbc", posterior.tangent.record(x).rows(), steps).square().mean(0).sum(), x
    )
    close(gradient, wanted)
    assert not posterior.latent(setup.test, via=lw.Linearized(draws=3)).variance.requires_grad


class _Once(torch.autograd.Function):
    """An operation without forward mode, whose backward pass has no derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].cos()


class _Sine(nn.Module):
    def forward(self, x):
        return _Once.apply(x)


@pytest.fixture
def many(monkeypatch):
    """Two outputs are many."""
    monkeypatch.setattr(linearized, "MANY_OUTPUTS", 2)
    linearized._log_draws.cache_clear()


def test_networks_without_such_products_are_refused_and_the_default_is_exact(many):
    model = nn.Sequential(nn.Linear(4, 5), _Sine(), nn.Linear(5, 3)).double().eval()
    setup = Setup(ZOO["mlp"])
    posterior = lw.fit(model, [(setup.x, setup.y)], lw.Diagonal(), prior_precision=1.0)
    with pytest.raises(lw.LapwingError, match=r"neither forward mode nor a second derivative. Write via=lw.MonteCarlo"):
        posterior.latent(setup.test, via=lw.Linearized(draws=8))
    close(posterior.latent(setup.test).covariance, posterior.latent(setup.test, via=lw.Linearized()).covariance)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_default_way_of_many_outputs(many, caplog):
    setup, posterior = fitted("kfac")
    with caplog.at_level(logging.INFO, "lapwing"):
        predictions = [posterior.predict(setup.test), posterior.predict(setup.test)]
    assert caplog.text.count("via=lw.Linearized() gives exact variances") == 1
    close(predictions[0].latent.deviations, posterior.latent(setup.test, via=lw.Linearized(draws=64)).deviations)
    uncertain = posterior.latent(lw.Uncertain(setup.test, 0.1 * torch.ones_like(setup.test)))
    assert isinstance(uncertain, Latent)
    last = setup.fit(lw.KFAC(), params=lw.last_layer)
    assert isinstance(last.latent(setup.test), Latent)
