"""Every likelihood from the fit to the file: against the dense curvature and evidence, by every way, and deployed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests import oracle
from tests.conformance import close
from tests.likelihoods.test_losses import CASES, F64, fitted
from tests.test_drawn_conformance import hessian

REAL = torch.randn(7, 3, generator=torch.Generator().manual_seed(2), dtype=F64)
HOLES = torch.where(REAL > 0.8, torch.nan, REAL).index_fill(0, torch.tensor(5), torch.nan)
FITS: dict[str, tuple[lw.Likelihood, Tensor]] = CASES | {
    "real": (lw.Gaussian(0.3), REAL),
    "noise of each output": (lw.Gaussian([0.1, 0.5, 2.0]), REAL),
    "missing real targets": (lw.Gaussian([0.1, 0.5, 2.0], missing=True), HOLES),
    "predicted noise": (lw.HeteroscedasticGaussian(), REAL[:, :2]),
    "predicted noise, missing": (lw.HeteroscedasticGaussian(missing=True), HOLES[:, 1:]),
    "answers": (lw.Bernoulli(), REAL > 0),
    "counts": (lw.Poisson(), torch.arange(21).reshape(7, 3) % 4),
    "ordered": (lw.Ordinal(), torch.arange(7) % 4),
}
"""The losses of `test_losses.py`, and others with their targets."""

EVERY = pytest.mark.parametrize("name", FITS)
WAYS = lw.Linearized(), lw.MonteCarlo(5), lw.Streamlined()


def fit(name: str, method: lw.Method, precision: float) -> tuple[lw.Posterior, nn.Module, Tensor]:
    likelihood, y = FITS[name]
    outputs = 2 * y.shape[1] if likelihood.name == "heteroscedastic" else None
    return fitted(likelihood, y, method, outputs=outputs, prior_precision=precision)


def moments(prediction: Any) -> tuple[Tensor, ...]:
    return (prediction.probs,) if hasattr(prediction, "probs") else (prediction.mean, prediction.variance)


@EVERY
def test_the_curvature_and_the_evidence_are_the_dense_ones(name: str) -> None:
    likelihood, y = FITS[name]
    posterior, model, x = fit(name, lw.Full(), 2.0)
    J, f = oracle.jacobian(model, x), oracle.outputs(model, x)
    if likelihood.name == "ordinal":  # whose Fisher information is an average over the labels
        root = likelihood.fisher_root(f)
        fisher = root @ root.mT
    else:
        fisher = torch.stack([hessian(likelihood, *pair) for pair in zip(f, y, strict=True)])
    G = oracle.ggn(J, fisher)
    close(posterior.latent(x).covariance, oracle.output_covariance(J, oracle.laplace_covariance(G, 2.0)), 1e-8)
    evidence = oracle.evidence(likelihood.log_prob(f, y).sum(), oracle.flat_parameters(model), G, 2.0)
    assert posterior.log_marginal_likelihood() == pytest.approx(float(evidence))


@pytest.mark.quick(9)
@EVERY
def test_files_ways_comparisons_and_deployments(name: str, reloaded: Any) -> None:
    likelihood, y = FITS[name]
    posterior, model, x = fit(name, lw.KFAC(), 1.0)
    again = reloaded(posterior, model)
    assert again.likelihood == likelihood == posterior.likelihood
    for via in WAYS:
        prediction = posterior.predict(x, via=via)
        torch.testing.assert_close(moments(again.predict(x, via=via)), moments(prediction))
        assert bool(prediction.log_prob(y).isfinite().all())
    lw.compare({"it": posterior}, [(x, y)])
    likelihood.check(model(x), prediction.point)
    if likelihood.name != "ordinal":  # it has no link in closed form
        predictor = lw.deploy(posterior, x)
        deployed = predictor(x)
        deployed = (deployed,) if isinstance(deployed, Tensor) else deployed
        torch.testing.assert_close(deployed, moments(posterior.predict(x, via=predictor.via)))
