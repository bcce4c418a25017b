"""The methods: each chooses a structure of Σ and fits it in passes over the data.

It imports `posterior` and the rooms below it, never `tuning` or `fitting`. Begin with `passes.py` (the contract), then
`diagonal.py`, the simplest method.
"""

from __future__ import annotations

from .diagonal import Diagonal
from .ella import ELLA
from .footprint import FitShape, Footprint
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
from .problem import FisherRoot, MemoryNeed, Problem
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

METHODS: tuple[Method, ...] = (
    Diagonal(), KFAC(), EKFAC(), Full(), ELLA(), OptimalSubspace(), SubsetOfWeights(size=100), VaLLA(), SubsetOfData(),
    SampledLLA(), MeanField(),
)  # fmt: skip
"""The methods of `lw.fit`, each with its default options: `lw.plan(model, loader, "all")` plans them."""

__all__ = [
    "EKFAC", "ELLA", "KFAC", "METHODS", "SWAG", "AlphaDivergence", "Batch", "BlockSums", "ClosedForm",
    "ConjugateGradients", "CurvaturePass", "DataSummary", "Diagonal", "FisherRoot", "FitResult", "FitShape",
    "Footprint", "Full", "InducingPoints", "IteratePass", "MeanField", "MemoryNeed", "Method", "NaturalGradient",
    "OptimalSubspace", "Pass", "Passes", "Problem", "SampledLLA", "SnapshotCollector", "State", "SubsetOfData",
    "SubsetOfWeights", "SumPass", "TemperatureScaling", "VaLLA", "VariationalBound", "run_curvature_pass",
]  # fmt: skip
