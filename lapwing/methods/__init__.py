"""The methods: each chooses a structure of Σ and fits it in passes over the data.

It imports `posterior` and what is below it, never `tuning` or `fitting`. Begin with `passes.py` (the contract), then
`diagonal.py`, the plainest method.
"""

from __future__ import annotations

from .cost import Cost, Outline, Work
from .diagonal import Diagonal
from .ella import ELLA
from .full import Full
from .kfac import EKFAC, KFAC
from .mean_field import MeanField
from .optimal_subspace import OptimalSubspace
from .passes import (
    Batch,
    CurvaturePass,
    FitResult,
    IteratePass,
    Method,
    Pass,
    Passes,
    SumPass,
    run_curvature_pass,
)
from .problem import FisherRoot, Problem
from .sampled_lla import SampledLLA
from .sampled_lla.conjugate_gradients import ConjugateGradients
from .state import BlockSums, DataSummary, State
from .subset_of_data import SubsetOfData
from .subset_of_weights import SubsetOfWeights
from .swag import SWAG, SnapshotCollector
from .temperature_scaling import TemperatureScaling
from .valla import ClosedForm, NaturalGradient, VaLLA
from .valla.alpha_divergence import AlphaDivergence
from .valla.moving_points import VariationalBound
from .valla.points import InducingPoints

__all__ = [
    "EKFAC", "ELLA", "KFAC", "SWAG", "AlphaDivergence", "Batch", "BlockSums", "ClosedForm", "ConjugateGradients",
    "Cost", "CurvaturePass", "DataSummary", "Diagonal", "FisherRoot", "FitResult", "Full", "InducingPoints",
    "IteratePass", "MeanField", "Method", "NaturalGradient", "OptimalSubspace", "Outline", "Pass", "Passes", "Problem",
    "SampledLLA", "SnapshotCollector", "State", "SubsetOfData", "SubsetOfWeights", "SumPass",
    "TemperatureScaling", "VaLLA", "VariationalBound", "Work", "run_curvature_pass",
]  # fmt: skip
