"""`lw.Linearized(outputs=...)`: the latent and the predictions of some outputs, against slices of those of all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lapwing as lw
from tests.conformance import Setup, close
from tests.prediction.test_linear_draws import METHODS, fitted
from tests.zoo import ZOO


def block(covariance: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Returns the covariances of some outputs, by loops."""
    return torch.stack([matrix[index][:, index] for matrix, index in zip(covariance, outputs, strict=True)])


@pytest.mark.quick(5)
@pytest.mark.parametrize("params", ["all", "last"])
@pytest.mark.parametrize("method", METHODS)
def test_the_latent_is_a_slice_of_that_of_all_outputs(method, params):
    setup, posterior = fitted(method, params=lw.last_layer if params == "last" else lw.matching("*"))
    whole = posterior.latent(setup.x)
    for way in (lw.Linearized(outputs=np.int64(2)), lw.Linearized(outputs=[2, 0])):
        latent = posterior.latent(setup.x, via=way)
        index = torch.tensor([[2, 0]] * 9) if way.outputs == (2, 0) else whole.mean.topk(2).indices
        assert latent.outputs.equal(index)
        close(latent.mean, whole.mean.gather(1, index))
        close(latent.covariance, block(whole.covariance, index))
        close(latent.variance, whole.variance.gather(1, index))
        close(latent.every_mean, whole.mean)
        batches = posterior.latent([setup.x[:4], setup.x[4:8], setup.x[8:]], via=way)
        assert batches.outputs.equal(index)
        close(batches.covariance, latent.covariance)
        assert sum(rows[0].numel() for term in batches.terms for rows in term.rows) <= 2 * 2 + 2 + 2  # no wide factor


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["tied", "shared_module", "vit", "cnn_bn_inplace", "custom_parameter"])
def test_other_networks_and_chunks(name, monkeypatch):
    setup = Setup(ZOO[name])
    posterior = setup.fit(lw.Diagonal(), tune=None)
    whole = posterior.latent(setup.x, via=lw.Linearized())
    monkeypatch.setattr(lw.tangent.Tangent, "chunk_length", lambda *_, **__: 2)
    latent = posterior.latent(setup.x, via=lw.Linearized(outputs=2))
    close(latent.mean, whole.mean.topk(2).values)
    close(latent.covariance, block(whole.covariance, latent.outputs))


@pytest.mark.parametrize("params", [lw.last_layer, lw.matching("*")])
def test_all_outputs_in_another_order_are_the_same_prediction(params):
    setup, posterior = fitted("kfac", params=params)
    link = lw.SampledLink(20_000)
    for chosen in (None, lw.Probit(scale="weighted"), lw.Probit(scale="class"), lw.LaplaceBridge()):
        wanted = posterior.predict(setup.test, link=chosen)
        close(posterior.predict(setup.test, via=lw.Linearized(outputs=3), link=chosen).probs, wanted.probs)
    sampled = posterior.predict(setup.test, via=lw.Linearized(outputs=[1, 2, 0]), link=link)
    wanted = posterior.predict(setup.test, link=link)
    close(sampled.probs, wanted.probs, 0.03)
    close(sampled.mutual_information(20_000), wanted.mutual_information(20_000), 0.06)


def test_class_probabilities_are_of_all_classes():
    """By hand: one scale for all logits, from the variance of each of the k against the mean of the other."""
    setup, posterior = fitted("kfac")
    latent = posterior.latent(setup.test, via=lw.Linearized(outputs=2))
    covariance = latent.covariance
    gap = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
    scale = (1 + torch.pi / 8 * gap).rsqrt()[:, None]
    prediction = posterior.predict(setup.test, via=lw.Linearized(outputs=2))
    close(prediction.probs, torch.softmax(latent.every_mean * scale, -1))
    draws = prediction.latent.sample(50_000) - latent.every_mean  # the two move against each other, the third does not
    third = torch.ones(3, 3).scatter(1, latent.outputs, 0.0).bool()
    assert not draws[:, third].any()
    close(draws.gather(2, latent.outputs.expand(50_000, -1, -1)).var(0), gap[:, None].expand(-1, 2) / 4, 0.05)
    assert prediction.sample(4).shape == (4, 3)
    assert posterior.predict(setup.test, via=lw.Linearized(outputs=2)).log_prob(torch.tensor([0, 1, 2])).shape == (3,)


def test_the_temperature_of_logits_divides_every_mean():
    setup, posterior = fitted("kfac", likelihood=lw.Categorical(logit_temperature=2.0))
    way = lw.Linearized(outputs=3)
    close(posterior.predict(setup.test, via=way).probs, posterior.predict(setup.test).probs)


def test_regressions_and_answers_are_of_the_selected_outputs():
    setup, posterior = fitted("full", "deep_linear")
    prediction, whole = posterior.predict(setup.test, via=lw.Linearized(outputs=[1])), posterior.predict(setup.test)
    close(prediction.std, whole.std[:, 1:])
    close(prediction.interval()[0], whole.interval()[0][:, 1:])
    model, answers = setup.model, (setup.y > 0).double()
    posterior = lw.fit(model, [(setup.x, answers)], lw.Diagonal(), likelihood="bernoulli", prior_precision=1.0)
    close(
        posterior.predict(setup.test, via=lw.Linearized(outputs=[1])).probs, posterior.predict(setup.test).probs[:, 1:]
    )


def test_joint_scaled_compact_and_uncertain():
    setup, posterior = fitted("kfac")
    way = lw.Linearized(outputs=[2, 1])
    index = torch.tensor([2, 1])
    joint = posterior.latent(setup.test, via=way, joint=True)
    wanted = posterior.latent(setup.test, joint=True)
    close(joint.covariance, wanted.covariance[:, index][..., index])
    close(joint.mean, wanted.mean[:, index])
    latent = posterior.latent(setup.test, via=way)
    scaled = posterior.latent(setup.test, via=lw.Scaled(way, 0.5))
    close(scaled.covariance, latent.covariance / 2)
    for copy in (latent.compact(covariances=True), latent.compact(covariances=False)):
        assert copy.outputs.equal(latent.outputs)
        close(copy.variance, latent.variance)
    uncertain = lw.Uncertain(setup.test, 0.1 * torch.ones_like(setup.test))
    whole = posterior.latent(uncertain)
    close(posterior.latent(uncertain, via=way).covariance, whole.covariance[:, index][..., index])
    close(posterior.latent(uncertain, via=way, joint=True).variance, whole.variance[:, index])
    top = lw.propagate(setup.model, uncertain, via=lw.Linearized(outputs=1))
    close(top.variance, lw.propagate(setup.model, uncertain).variance.gather(1, top.outputs))


def test_gradients_in_the_inputs():
    setup, posterior = fitted("kfac")
    x, z = setup.test.clone().requires_grad_(), setup.test.clone().requires_grad_()
    latent = posterior.latent(x, via=lw.Linearized(outputs=2))
    whole = posterior.latent(z)
    (gradient,) = torch.autograd.grad((latent.variance + latent.mean).sum(), x)
    (wanted,) = torch.autograd.grad((whole.variance + whole.mean).gather(1, latent.outputs).sum(), z)
    close(gradient, wanted)
