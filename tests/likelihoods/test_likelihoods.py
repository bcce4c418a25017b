"""The likelihood protocol: constants, Fisher roots against autograd, statistics, and a likelihood added by a user."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import distributions as dist

import lapwing as lw
from lapwing.errors import LapwingError
from lapwing.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    MixturePrediction,
    NoiselessLikelihood,
    Poisson,
    aligned_targets,
    check_real_targets,
    latent_draws,
    register_likelihood,
    resolve,
)
from lapwing.likelihoods.registry import REGISTERED
from tests.test_drawn_conformance import hessian

F64 = torch.float64


@dataclass(frozen=True)
class Counts(NoiselessLikelihood):
    """Counts with a log link, ``y ~ Poisson(e^f)``, from the protocol alone."""

    name: ClassVar[str] = "counts"

    def check(self, outputs, targets):
        check_real_targets("Counts", outputs.shape, outputs.device, targets)

    def log_prob(self, outputs, targets):
        return dist.Poisson(outputs.exp()).log_prob(aligned_targets("Counts", outputs, targets)).sum(-1)

    def fisher_root(self, outputs):
        return torch.diag_embed((0.5 * outputs).exp())

    def predict(self, latent, link=None, generator=None):
        draws = latent_draws(latent, self.choose_link(latent, link).draws, generator).transpose(0, 1)
        return MixturePrediction(dist.Independent(dist.Poisson(draws.exp()), 1))


def outputs_and_targets(likelihood, batch=5, size=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(batch, size, generator=generator, dtype=F64)
    if likelihood.name == "categorical":
        return outputs, torch.randint(size, (batch,), generator=generator)
    if likelihood.name == "bernoulli":
        return outputs, torch.rand(batch, size, generator=generator) < 0.5
    if likelihood.name == "heteroscedastic":
        outputs = outputs[:, [0, 1, 2, 2, 0, 1]][:, : 2 * ((size + 1) // 2)] * 0.7 + 0.1
        return outputs, torch.randn(batch, outputs.shape[1] // 2, generator=generator, dtype=F64)
    if likelihood.name in ("counts", "poisson"):
        return outputs, torch.poisson(outputs.exp(), generator)
    return outputs, torch.randn(batch, size, generator=generator, dtype=F64)


ALL = pytest.mark.parametrize(
    "likelihood",
    [Gaussian(0.3), Categorical(), Bernoulli(), Counts(), Poisson(), HeteroscedasticGaussian()],
    ids=lambda value: value.name,
)


@ALL
def test_fisher_root_is_a_root_of_the_expected_hessian(likelihood):
    """The Hessian is affine in y, or does not depend on y, so that one or two targets give its average."""
    outputs, targets = outputs_and_targets(likelihood)
    root = likelihood.fisher_root(outputs)
    fisher = root @ root.mT / (likelihood.noise_variance or 1.0)
    expected = [hessian(likelihood, *pair) for pair in zip(outputs, targets, strict=True)]
    torch.testing.assert_close(fisher, torch.stack(expected))


@pytest.mark.parametrize(
    "likelihood",
    [Gaussian(0.3), Gaussian(noise_ratios=(1, 2, 4)), Categorical(), Bernoulli(), Poisson(), HeteroscedasticGaussian()],
    ids=lambda value: value.name,
)
def test_fisher_parts_make_up_the_fisher_information(likelihood):
    outputs, _ = outputs_and_targets(likelihood)
    root, (diagonal, column) = likelihood.fisher_root(outputs), likelihood.fisher_parts(outputs)
    fisher = torch.zeros_like(root) if column is None else -column[:, :, None] * column[:, None, :]
    torch.testing.assert_close(fisher.diagonal_scatter(diagonal, 0, 1, 2), root @ root.mT)


def test_fisher_parts_of_a_confident_network_are_accurate_in_float32():
    outputs = torch.tensor([[20.0, 0.0, -1.0]])
    diagonal, _ = Categorical().fisher_parts(outputs)
    exact, _ = Categorical().fisher_parts(outputs.double())
    torch.testing.assert_close(diagonal, exact.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("classes", [1, 2, 3, 10])
def test_the_root_of_c_classes_has_c_minus_1_columns(classes):
    outputs = 3 * torch.randn(5, classes, dtype=F64)
    root, p = Categorical().fisher_root(outputs), outputs.softmax(-1)
    assert root.shape == (5, classes, max(1, classes - 1))
    torch.testing.assert_close(root @ root.mT, torch.diag_embed(p) - p[:, :, None] * p[:, None, :])


@pytest.mark.parametrize("outputs", [(20, 0, -1), (0, 20, -1), (-1, 0, 20), (20, 0), (0, 20), (60, 0, 3, 1)])
def test_the_root_of_a_confident_network_is_accurate_in_float32(outputs):
    """The error is relative to the square roots of the diagonal: every logit may have its own scale."""
    outputs = torch.tensor([outputs], dtype=F64)
    roots, p = Categorical().fisher_root(outputs.float())[0].double(), outputs[0].softmax(-1)
    others = torch.stack([torch.cat([p[:c], p[c + 1 :]]).sum() for c in range(len(p))])
    wanted = (-p[:, None] * p).diagonal_scatter(p * others)
    scale = wanted.diagonal().rsqrt()
    torch.testing.assert_close(scale[:, None] * (roots @ roots.T) * scale, scale[:, None] * wanted * scale)
    assert (roots.sum(0).abs() <= 1e-6 * roots.abs().amax(0)).all()


@pytest.mark.parametrize("outputs", [(1e4, 0, -1e4), (-1e4, 0, 1e4), (0, 0, -1e4), (-1e4, 0, 0), (-math.inf, 0, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_classes_with_probability_0_add_zeros_to_the_root(outputs, dtype):
    outputs = torch.tensor([outputs], dtype=dtype)
    roots, p = Categorical().fisher_root(outputs)[0].double(), outputs[0].double().softmax(-1)
    bound = torch.finfo(dtype).eps
    torch.testing.assert_close(roots @ roots.T, p.diag() - p[:, None] * p, rtol=2 * bound, atol=2 * bound)


@ALL
def test_sampled_root_has_the_right_expectation(likelihood):
    """100 000 draws; the tolerance of each entry is six standard errors of the draws."""
    outputs, _ = outputs_and_targets(likelihood, batch=2)
    many = outputs.repeat_interleave(100_000, 0)
    column = likelihood.sampled_fisher_root(many, torch.Generator().manual_seed(1))
    size = outputs.shape[1]
    assert column.shape == (200_000, size, 1)
    products = (column @ column.mT).reshape(2, 100_000, size, size)
    root = likelihood.fisher_root(outputs)
    error = (products.mean(1) - root @ root.mT).abs()
    assert (error <= 6 * products.std(1) / math.sqrt(100_000) + 1e-12).all()


@ALL
def test_statistics_add_over_batches_and_give_the_log_likelihood(likelihood):
    outputs, targets = outputs_and_targets(likelihood, batch=11)
    whole = likelihood.statistics(outputs, targets)
    parts = [likelihood.statistics(f, y) for f, y in zip(outputs.split(4), targets.split(4), strict=True)]
    added = {key: sum(part[key] for part in parts) for key in whole}
    half = likelihood.statistics(outputs.bfloat16(), targets)
    assert all(value.dtype == F64 for value in (*whole.values(), *half.values()))
    for statistics in (whole, added):
        total = likelihood.log_likelihood(statistics)
        assert total.shape == ()
        torch.testing.assert_close(total, likelihood.log_prob(outputs, targets).sum())


@ALL
def test_scores_are_gradients_of_log_probabilities(likelihood):
    outputs, targets = outputs_and_targets(likelihood)
    outputs.requires_grad_()
    (wanted,) = torch.autograd.grad(likelihood.log_prob(outputs, targets).sum(), outputs)
    with torch.no_grad():
        torch.testing.assert_close(likelihood.score(outputs, targets), wanted)


@pytest.mark.parametrize("likelihood", [Gaussian(0.3), Categorical(), Bernoulli()], ids=lambda value: value.name)
def test_roots_keep_the_dtype_of_the_outputs_and_log_probs_do_not(likelihood):
    outputs, targets = outputs_and_targets(likelihood)
    outputs = outputs.bfloat16()
    assert likelihood.fisher_root(outputs).dtype == torch.bfloat16
    assert likelihood.sampled_fisher_root(outputs, torch.Generator().manual_seed(0)).dtype == torch.bfloat16
    assert likelihood.log_prob(outputs, targets).dtype == torch.float32


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()], ids=lambda value: value.name)
def test_roots_are_finite_and_differentiable_at_certainty(likelihood):
    outputs = torch.tensor([[500.0, 0.0, -500.0]], requires_grad=True)
    root = likelihood.fisher_root(outputs)
    root.square().sum().backward()
    assert root.isfinite().all()
    assert outputs.grad.isfinite().all()


def test_noise_variance():
    assert Gaussian().noise_variance is None
    assert Gaussian().with_noise_variance(0.5) == Gaussian(0.5)
    assert Gaussian(0.5).with_noise_variance(None) == Gaussian()
    assert Categorical().noise_variance is None
    assert Categorical().with_noise_variance(None) == Categorical()
    assert Gaussian(np.float32(0.5)) == Gaussian(0.5)
    assert type(Gaussian(np.float32(0.5)).noise_variance) is float


def test_resolve():
    assert resolve("gaussian") == Gaussian(tails=None)
    assert resolve("categorical") == Categorical()
    assert resolve("bernoulli") == Bernoulli()
    counts = Counts()
    assert resolve(counts) is counts


def test_a_registered_likelihood_is_found_by_its_name(monkeypatch):
    monkeypatch.setitem(REGISTERED, Counts.name, Counts)
    assert resolve("counts") == Counts()
    assert register_likelihood(Counts) is Counts  # again, as a notebook does
    model = torch.nn.Linear(2, 1).double().eval()
    x = torch.randn(9, 2, dtype=F64)
    fitted = lw.fit(model, [(x, torch.poisson(x[:, :1].exp()))], lw.Diagonal(), likelihood="counts", tune=None)
    assert fitted.likelihood == Counts()
    with pytest.raises(LapwingError, match=r"SampledLink.* has no closed form\. Write lw\.deploy\(.*outputs='latent'"):
        lw.deploy(fitted, x)


def test_a_class_that_extends_gaussian_stays_itself_when_its_noise_is_tuned():
    @dataclass(frozen=True)
    class Measured(Gaussian):
        name: ClassVar[str] = "measured"

    x = torch.randn(9, 2, dtype=F64)
    model = torch.nn.Linear(2, 1).double().eval()
    assert type(lw.fit(model, [(x, x[:, :1])], likelihood=Measured()).likelihood) is Measured
    assert Measured(0.5).with_noise_variance(0.1) == Measured(0.1)


@pytest.mark.parametrize("method", [lw.Full("primal"), lw.Full("dual"), lw.KFAC(), lw.Diagonal()], ids=str)
def test_a_root_may_have_any_number_of_columns(method):
    class Twice(Counts):
        name = "twice"

        def fisher_root(self, outputs):
            return super().fisher_root(outputs).repeat(1, 1, 2) / 2**0.5

    x = torch.randn(9, 2, dtype=F64)
    model, data = torch.nn.Linear(2, 2).double().eval(), [(x[:4], x[:4].round().abs()), (x[4:], x[4:].round().abs())]
    once, twice = (
        lw.fit(model, data, method, likelihood=kind, tune=None).latent(x).covariance for kind in (Counts(), Twice())
    )
    torch.testing.assert_close(once, twice)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_good_answers_pass_in_every_dtype(dtype, shape):
    outputs, answers = torch.arange(-2.0, 2.0)[:, None], torch.tensor([0, 1, 1, 0])
    targets = answers.to(dtype).reshape(shape)
    Bernoulli().check(outputs, targets)
    wanted = torch.where(answers == 1, outputs[:, 0].sigmoid(), (-outputs[:, 0]).sigmoid()).log()
    torch.testing.assert_close(Bernoulli().log_prob(outputs, targets), wanted)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.int64, torch.uint64])
def test_good_labels_pass_in_every_integer_dtype(dtype):
    labels = torch.tensor([0, 2, 1], dtype=dtype)
    Categorical().check(torch.zeros(3, 3), labels)
    assert Categorical().log_prob(torch.zeros(3, 3), labels).shape == (3,)


def test_targets_never_broadcast_against_outputs():
    outputs, targets = torch.arange(4.0)[:, None], torch.arange(4.0)
    assert Gaussian(1.0).statistics(outputs, targets)["squared_error"] == 0


def test_empty_batches_pass():
    cases = (
        (Categorical(), 3, torch.zeros(0, dtype=torch.long)),
        (Gaussian(1.0), 1, torch.zeros(0)),
        (Bernoulli(), 1, torch.zeros(0)),
    )
    for likelihood, outputs, targets in cases:
        likelihood.check(torch.zeros(0, outputs), targets)
        assert likelihood.log_prob(torch.zeros(0, outputs), targets).shape == (0,)
