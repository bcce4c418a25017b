"""Likelihoods: what the network's outputs mean, their Fisher information, links, and the distribution of y.

It imports `covariance` (the latent Gaussian that a link takes), `network` and `errors`. Begin with `base.py`, then
`gaussian.py`, the plainest likelihood.
"""

from __future__ import annotations

from lapwing.errors import LapwingError, shown
from lapwing.likelihoods.base import Likelihood, NoiselessLikelihood
from lapwing.likelihoods.bernoulli import Bernoulli
from lapwing.likelihoods.bernoulli_prediction import BernoulliPrediction
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.likelihoods.links import (
    BinaryLink,
    ClassLink,
    ExactLink,
    LaplaceBridge,
    Link,
    Probit,
    Quadrature,
    SampledLink,
)
from lapwing.likelihoods.mixture_prediction import MixturePrediction
from lapwing.likelihoods.predictions import ClassPrediction, Prediction, RegressionPrediction

__all__ = [
    "Bernoulli",
    "BernoulliPrediction",
    "BinaryLink",
    "Categorical",
    "ClassLink",
    "ClassPrediction",
    "ExactLink",
    "Gaussian",
    "LaplaceBridge",
    "Likelihood",
    "Link",
    "MixturePrediction",
    "NoiselessLikelihood",
    "Prediction",
    "Probit",
    "Quadrature",
    "RegressionPrediction",
    "SampledLink",
    "resolve",
]

BY_NAME: dict[str, type[Likelihood]] = {
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
}


def resolve(likelihood: str | Likelihood) -> Likelihood:
    """Return the likelihood for a plain label, or the given one.

    Args:
        likelihood: "categorical", "bernoulli", "gaussian", or an instance.

    Returns:
        The likelihood.

    Raises:
        LapwingError: for an unknown label, a class in place of an instance, or anything else.

    Example:
        >>> resolve("gaussian")
        Gaussian(noise_variance=None)
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    if isinstance(likelihood, str) and likelihood in BY_NAME:
        return BY_NAME[likelihood]()
    labels = ", ".join(f'"{label}"' for label in BY_NAME)
    if isinstance(likelihood, type):
        raise LapwingError(
            f"A likelihood is an instance, found the class {likelihood.__name__}; write `{likelihood.__name__}()`."
        )
    raise LapwingError(
        f"A likelihood is one of {labels} or an instance of Likelihood, found {shown(likelihood)}; "
        'write likelihood="categorical" for integer labels, likelihood="bernoulli" for yes or no, '
        'likelihood="gaussian" for real targets.'
    )
