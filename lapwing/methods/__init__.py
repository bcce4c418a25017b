"""The methods: each chooses a structure of Σ and fits it in passes over the data.

It imports `posterior` and what is below it, never `tuning` or `fitting`. Begin with `passes.py` (the contract), then
`diagonal.py`, the plainest method.
"""

from __future__ import annotations

from .diagonal import Diagonal
from .ella import ELLA
from .full import Full
from .kfac import EKFAC, KFAC
from .mean_field import MeanField
from .optimal_subspace import OptimalSubspace
from .passes import Batch, CurvaturePass, FisherRoot, Found, IteratePass, Method, Pass, Passes, Problem, State, SumPass
from .sampled_lla import SampledLLA
from .sampled_lla.conjugate_gradients import ConjugateGradients
from .sampled_lla.stochastic_gradient import StochasticGradient
from .snapshots import SnapshotCollector
from .subset_of_data import SubsetOfData
from .subset_of_weights import SubsetOfWeights
from .swag import SWAG
from .valla import VaLLA
from .valla.alpha_divergence import AlphaDivergence
from .valla.inducing_points import InducingPoints
from .valla.natural_gradient import ClosedForm, NaturalGradient
from .valla.variational_bound import VariationalBound

__all__ = [
    "EKFAC", "ELLA", "KFAC", "SWAG", "AlphaDivergence", "Batch", "ClosedForm", "ConjugateGradients", "CurvaturePass",
    "Diagonal", "FisherRoot", "Found", "Full", "InducingPoints", "IteratePass", "MeanField", "Method",
    "NaturalGradient", "OptimalSubspace", "Pass", "Passes", "Problem", "SampledLLA", "SnapshotCollector", "State",
    "StochasticGradient", "SubsetOfData", "SubsetOfWeights", "SumPass", "VaLLA", "VariationalBound",
]  # fmt: skip
