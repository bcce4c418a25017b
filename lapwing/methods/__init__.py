"""The methods: each chooses a structure of Σ and finds it in passes over the data."""

from __future__ import annotations

from .diagonal import Diagonal
from .ella import ELLA
from .full import Full
from .kfac import EKFAC, KFAC
from .optimal_subspace import OptimalSubspace
from .passes import Batch, CurvaturePass, FisherRoot, Found, IteratePass, Method, Pass, Passes, Problem, State, SumPass
from .snapshots import SnapshotCollector
from .subset_of_weights import SubsetOfWeights
from .swag import SWAG

__all__ = [
    "EKFAC", "ELLA", "KFAC", "SWAG", "Batch", "CurvaturePass", "Diagonal", "FisherRoot", "Found", "Full", "IteratePass",
    "Method", "OptimalSubspace", "Pass", "Passes", "Problem", "SnapshotCollector", "State", "SubsetOfWeights",
    "SumPass",
]  # fmt: skip
