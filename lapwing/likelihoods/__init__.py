"""Likelihoods: the meaning of the network's outputs, their Fisher information, links, and the distribution of y.

This room imports `covariance` (the latent Gaussian that a link reads), `network`, `linalg`, `options` and `errors`.
Begin with `base.py`, then `gaussian.py`. `docs/extending.md` adds a likelihood from outside the package.
"""

from __future__ import annotations

from .base import Likelihood, NoiselessLikelihood, apply_weights, curvature_weights
from .bernoulli import Bernoulli, BernoulliPrediction
from .categorical import Categorical, ClassPrediction
from .censored import Censored, CensoredPrediction
from .families import MixturePrediction
from .from_distribution import FamilyLikelihood, FromDistribution, Ordinal
from .gaussian import Gaussian, RegressionPrediction
from .heteroscedastic import HeteroscedasticGaussian, HeteroscedasticPrediction
from .joint import Joint, JointPrediction
from .links import BinaryLink, ClassLink, ExactLink, LaplaceBridge, Link, Probit, Quadrature, SampledLink, latent_draws
from .logits import LogitLikelihood
from .poisson import CountPrediction, Poisson
from .predictions import DiscretePrediction, P, Prediction, RealPrediction
from .registry import register_likelihood, resolve
from .student_t import StudentT
from .targets import aligned_targets, check_real_targets

__all__ = [
    "Bernoulli", "BernoulliPrediction", "BinaryLink", "Categorical", "Censored", "CensoredPrediction", "ClassLink",
    "ClassPrediction", "CountPrediction", "DiscretePrediction", "ExactLink", "FamilyLikelihood", "FromDistribution",
    "Gaussian", "HeteroscedasticGaussian", "HeteroscedasticPrediction", "Joint", "JointPrediction", "LaplaceBridge",
    "Likelihood", "Link", "LogitLikelihood", "MixturePrediction", "NoiselessLikelihood", "Ordinal", "P", "Poisson",
    "Prediction", "Probit", "Quadrature", "RealPrediction", "RegressionPrediction", "SampledLink", "StudentT",
    "aligned_targets", "apply_weights", "check_real_targets", "curvature_weights", "latent_draws",
    "register_likelihood", "resolve",
]  # fmt: skip
