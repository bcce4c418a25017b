"""The methods: each chooses a structure of Σ and fits it in passes over the data.

It imports `likelihoods` and the rooms below it. Begin with `passes.py` (the contract), then `diagonal.py`, the simplest
method. Mean field and SWAG are in `fitting/`, since they also make posteriors without passes. `valla/` and
`sampled_lla/` are wings: only `fitting/registry.py` and `lapwing/__init__.py` import them.
"""

from __future__ import annotations

from ..tangent import MemoryNeed
from .diagonal import Diagonal
from .ella import ELLA
from .footprint import FitShape, Footprint
from .full import Full
from .kfac import EKFAC, KFAC
from .optimal_subspace import OptimalSubspace
from .passes import (
    Batch,
    CurvaturePass,
    FitResult,
    IteratePass,
    LabelsOfData,
    Method,
    Pass,
    Passes,
    SamplesSeen,
    SumPass,
    run_curvature_pass,
    with_seen,
)
from .problem import FisherRoot, Problem, Seen
from .state import BlockSums, DataSummary, State
from .subset_of_data import SubsetOfData
from .subset_of_weights import SubsetOfWeights
from .temperature_scaling import TemperatureScaling

__all__ = [
    "EKFAC", "ELLA", "KFAC", "Batch", "BlockSums", "CurvaturePass", "DataSummary", "Diagonal", "FisherRoot",
    "FitResult", "FitShape", "Footprint", "Full", "IteratePass", "LabelsOfData", "MemoryNeed", "Method",
    "OptimalSubspace", "Pass", "Passes", "Problem", "SamplesSeen", "Seen", "State", "SubsetOfData", "SubsetOfWeights",
    "SumPass", "TemperatureScaling", "run_curvature_pass", "with_seen",
]  # fmt: skip
