"""lapwing: calibrated error bars for a trained PyTorch network, after training.

`import lapwing as lw`, then `posterior = lw.fit(model, loader)` and `prediction = posterior.predict(x)`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .data.picked import batches
from .environment import versions
from .errors import LapwingError
from .fitting import SWAG, MeanField, Novelty, fit, mixture, novelty, plan
from .likelihoods import (
    Bernoulli,
    Categorical,
    Censored,
    FromDistribution,
    Gaussian,
    HeteroscedasticGaussian,
    Joint,
    LaplaceBridge,
    Likelihood,
    Ordinal,
    Poisson,
    Probit,
    Quadrature,
    SampledLink,
    StudentT,
)
from .methods import (
    EKFAC,
    ELLA,
    KFAC,
    Diagonal,
    Full,
    Method,
    OptimalSubspace,
    SubsetOfData,
    SubsetOfWeights,
    TemperatureScaling,
)
from .methods.sampled_lla import SampledLLA
from .methods.sampled_lla.conjugate_gradients import ConjugateGradients
from .methods.valla import ClosedForm, NaturalGradient, VaLLA
from .methods.valla.alpha_divergence import AlphaDivergence
from .methods.valla.moving_points import VariationalBound
from .methods.valla.points import InducingPoints
from .posterior import Posterior, load
from .prediction import Linearized, MonteCarlo, Scaled, Uncertain, propagate
from .prediction.streamlined import Streamlined
from .tangent import coverage, everything, last_layer, matching
from .tuning import BoundedEvidence, EarlyStopping, Evidence, Refit, Validation, amortize, scale_factor

if TYPE_CHECKING:
    from . import evaluation
    from .deployment import deploy
    from .evaluation import compare

__version__ = "0.3.0"

_LATER = {"compare": ".evaluation", "deploy": ".deployment"}


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Imports `lw.evaluation`, `lw.compare` and `lw.deploy` when asked for: `import lapwing` stays light."""
        if name == "evaluation":
            return import_module(".evaluation", __name__)
        if name in _LATER:
            return getattr(import_module(_LATER[name], __name__), name)
        raise AttributeError(f"module 'lapwing' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names, and nothing that is imported to make them."""
    return sorted(__all__)


__all__ = [
    "EKFAC", "ELLA", "KFAC", "SWAG", "AlphaDivergence", "Bernoulli", "BoundedEvidence", "Categorical", "Censored",
    "ClosedForm", "ConjugateGradients", "Diagonal", "EarlyStopping", "Evidence", "FromDistribution", "Full",
    "Gaussian", "HeteroscedasticGaussian", "InducingPoints", "Joint", "LaplaceBridge", "LapwingError", "Likelihood",
    "Linearized", "MeanField", "Method", "MonteCarlo", "NaturalGradient", "Novelty", "OptimalSubspace", "Ordinal",
    "Poisson", "Posterior", "Probit", "Quadrature", "Refit", "SampledLLA", "SampledLink", "Scaled", "Streamlined",
    "StudentT", "SubsetOfData", "SubsetOfWeights", "TemperatureScaling", "Uncertain", "VaLLA", "Validation",
    "VariationalBound", "amortize", "batches", "compare", "coverage", "deploy", "evaluation", "everything", "fit",
    "last_layer", "load", "matching", "mixture", "novelty", "plan", "propagate", "scale_factor", "versions",
]  # fmt: skip
