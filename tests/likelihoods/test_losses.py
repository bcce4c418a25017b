"""Class weights, label smoothing, pos_weight, soft and missing targets: values, Hessians and fits against torch's."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.covariance import LatentDraws
from tests import oracle
from tests.conformance import close

F64 = torch.float64
W = [0.5, 3.0, 1.5]


def logits(batch=7, size=3, seed=0):
    return torch.randn(batch, size, generator=torch.Generator().manual_seed(seed), dtype=F64)


LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2])
SOFT = logits(seed=1).softmax(-1)
ANSWERS = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [1, 0, 0], [1, 1, 0], [0, 0, 1]])
CASES = {
    "weights": (lw.Categorical(class_weights=W), LABELS),
    "smoothing": (lw.Categorical(label_smoothing=0.2), LABELS),
    "both": (lw.Categorical(class_weights=W, label_smoothing=0.2), LABELS),
    "soft": (lw.Categorical(), SOFT),
    "soft and both": (lw.Categorical(class_weights=W, label_smoothing=0.2), SOFT),
    "pos": (lw.Bernoulli(pos_weight=4.0), ANSWERS),
    "pos each": (lw.Bernoulli(pos_weight=torch.tensor(W)), ANSWERS),
    "probabilities": (lw.Bernoulli(pos_weight=W, soft_targets=True), SOFT),
    "missing": (lw.Bernoulli(missing=True), torch.where(SOFT > 0.5, torch.nan, ANSWERS.double())),
}
EVERY = pytest.mark.parametrize(("likelihood", "y"), [pytest.param(*case, id=name) for name, case in CASES.items()])


def torch_loss(likelihood, f, y):
    """Losses of torch (B,)."""
    if isinstance(likelihood, lw.Categorical):
        weight = None if likelihood.class_weights is None else torch.tensor(likelihood.class_weights, dtype=F64)
        return F.cross_entropy(f, y, weight, reduction="none", label_smoothing=likelihood.label_smoothing)
    weight = None if likelihood.pos_weight is None else torch.tensor(likelihood.pos_weight, dtype=F64)
    losses = F.binary_cross_entropy_with_logits(f, y.double().nan_to_num(), pos_weight=weight, reduction="none")
    return torch.where(y.double().isnan(), 0.0, losses).sum(-1)


@EVERY
def test_values_are_those_of_torch_losses(likelihood, y):
    """`test_fits.py` has their curvature."""
    f = logits()
    likelihood.check(f, y)
    torch.testing.assert_close(likelihood.log_prob(f, y), -torch_loss(likelihood, f, y))
    torch.testing.assert_close(likelihood.statistics(f, y)["log_likelihood"], likelihood.log_prob(f, y).sum())


def fitted(likelihood, y, method=None, outputs=None, **options):
    torch.manual_seed(0)
    x, outputs = torch.randn(7, 2, dtype=F64), outputs or (y.shape[1] if y.ndim > 1 else 3)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double().eval()
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    return lw.fit(model, batches, method, likelihood=likelihood, **options), model, x


@pytest.mark.quick(3)
@EVERY
def test_default_fits_predict_by_the_plain_likelihood(likelihood, y):
    posterior, _, x = fitted(likelihood, y)
    prediction = posterior.predict(x)
    kind = type(likelihood)
    torch.testing.assert_close(prediction.probs, kind().predict(posterior.latent(x)).probs)
    assert bool(prediction.log_prob(y).isfinite().all())
    values = prediction.for_metrics(y)
    assert len(values["labels"]) == len(values["probs"])
    lw.compare({"it": posterior}, [(x, y)])


@pytest.mark.parametrize(
    "method", [lw.KFAC(), lw.EKFAC(), lw.Diagonal(), lw.ELLA(residual="prior"), lw.VaLLA(5)], ids=repr
)
def test_class_weights_are_sample_weights(method):
    """For every structure: weights of classes are those of their samples."""
    by_class, model, x = fitted(lw.Categorical(class_weights=W), LABELS, method, prior_precision=2.0)
    w = torch.tensor(W, dtype=F64)[LABELS]
    by_sample = lw.fit(
        model, [(x, LABELS, w)], method, likelihood="categorical", prior_precision=2.0, sample_weights=True
    )
    close(by_class.latent(x).covariance, by_sample.latent(x).covariance, 1e-7)


@pytest.mark.quick(3)
@pytest.mark.parametrize("fit", [lw.VariationalBound(2), lw.AlphaDivergence(steps=2)], ids=["bound", "alpha"])
@EVERY
def test_moving_points_take_every_loss(likelihood, y, fit):
    posterior, _, _ = fitted(likelihood, y, lw.VaLLA(4, fit))
    assert bool(posterior.history["objective"].isfinite().all())


def test_a_pseudo_evidence_is_named(caplog):
    with caplog.at_level(logging.INFO, "lapwing"):
        fitted(lw.Categorical(class_weights=W), LABELS, prior_precision=1.0)
    assert "Categorical(class_weights=(0.5, 3.0, 1.5)) weighs the loss" in caplog.text
    assert "pseudo-evidence" in caplog.text


def holes(size=2):
    """A regression of two targets with a third of them missing, one sample of both."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(24, 3, generator=generator, dtype=F64)
    y = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], -1)[:, :size] + 0.1 * logits(24, size)
    gone = torch.rand(24, size, generator=generator) < 0.3
    gone[5] = True
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, size)).double().eval()
    return model, x, torch.where(gone, torch.nan, y)


def test_missing_targets_have_the_density_of_the_known_ones():
    model, x, y = holes()
    known = ~y.isnan()
    likelihood = lw.Gaussian(0.2, missing=True)
    posterior = lw.fit(model, [(x[:9], y[:9]), (x[9:], y[9:])], lw.Full(), likelihood=likelihood, prior_precision=2.0)
    f, covariance = oracle.outputs(model, x), posterior.latent(x).covariance
    normal = torch.distributions.Normal(f, 0.2**0.5)
    close(likelihood.log_prob(f, y), torch.where(known, normal.log_prob(y.nan_to_num()), 0).sum(-1))
    close(likelihood.log_likelihood(posterior.statistics), likelihood.log_prob(f, y).sum())
    logs, drawn = posterior.predict(x).log_prob(y), torch.randn(5, 24, 2, dtype=F64)
    means = likelihood.log_power_mean(f, covariance, y, 1.0)
    mixed = likelihood.predict(LatentDraws(drawn)).log_prob(y)
    for n in range(24):
        at, k = known[n], int(known[n].sum())
        if not k:
            assert abs(logs[n]) < 1e-7
            assert means[n] == 0
            continue
        noisy = covariance[n][at][:, at] + 0.2 * torch.eye(k, dtype=F64)
        wanted = torch.distributions.MultivariateNormal(f[n, at], noisy).log_prob(y[n, at])
        torch.testing.assert_close(logs[n], wanted)
        torch.testing.assert_close(means[n], wanted)
        one = torch.distributions.Normal(drawn[:, n, at], 0.2**0.5).log_prob(y[n, at]).sum(-1)
        torch.testing.assert_close(mixed[n], one.logsumexp(0) - torch.tensor(5.0).log())


@pytest.mark.quick(1)
@pytest.mark.parametrize("method", [None, lw.KFAC(), lw.Diagonal()], ids=repr)
def test_one_missing_target_is_a_sample_left_out(method):
    """In the tuning too: δ, σ² and the width by leaving out, and the choice by held-out data."""
    model, x, y = holes(1)
    order = (~y.isnan()[:, 0]).int().argsort()
    x, y = torch.cat([x[order[4:]], x[order[:4]]]), torch.cat([y[order[4:]], y[order[:4]]])
    known, middle = ~y.isnan()[:, 0], slice(8, 20)  # whose batch has no holes
    assert bool(known[middle].all())
    loader = [(x[:8], y[:8]), (x[middle], y[middle]), (x[20:], y[20:])]
    for options in ({}, {"tune": lw.Evidence()}, {"validation": (x[:12], y[:12])}):
        given = lw.fit(model, loader, method, likelihood=lw.Gaussian(missing=True), **options)
        if "validation" in options:
            options = {"validation": (x[:12][known[:12]], y[:12][known[:12]])}
        wanted = lw.fit(model, [(x[known], y[known])], method, likelihood=lw.Gaussian(), **options)
        assert given.prior_precision == pytest.approx(wanted.prior_precision, rel=1e-3)
        assert given.noise_variance == pytest.approx(wanted.noise_variance, rel=1e-3)
    values = given.predict(x).for_metrics(y)
    assert len(values["mean"]) == int(known.sum())
    lw.compare({"it": given}, [(x, y)])


@pytest.mark.parametrize(
    "method",
    [lw.SampledLLA(4, linearised_mode=True), lw.MeanField(steps=3), lw.VaLLA(4, lw.VariationalBound(2))],
    ids=repr,
)
def test_other_methods_take_missing_targets(method):
    model, x, y = holes()
    posterior = lw.fit(model, [(x, y)], method, likelihood=lw.Gaussian(missing=True))
    assert bool(posterior.predict(x).log_prob(y).isfinite().all())


@pytest.mark.parametrize("likelihood", [lw.Gaussian(missing=True), lw.Bernoulli(missing=True)], ids=repr)
def test_targets_that_are_all_missing_are_refused(likelihood):
    model, x, y = holes(1)
    for method in (None, lw.KFAC()):
        with pytest.raises(lw.LapwingError, match="None of the labels counts"):
            lw.fit(model, [(x, torch.full_like(y, torch.nan))], method, likelihood=likelihood)
    none = (y.clamp(0, 1).round(), torch.full_like(y, torch.nan))
    half = [(x, values) for values in none[::-1]]  # one batch without any is fine
    assert lw.fit(model, half, lw.KFAC(), likelihood=likelihood).samples == 2 * len(x)
