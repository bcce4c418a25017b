"""The methods that `lw.plan(model, loader, "all")` plans, wings included."""

from __future__ import annotations

from .diagonal import Diagonal
from .ella import ELLA
from .full import Full
from .kfac import EKFAC, KFAC
from .mean_field import MeanField
from .optimal_subspace import OptimalSubspace
from .passes import Method
from .sampled_lla import SampledLLA
from .subset_of_data import SubsetOfData
from .subset_of_weights import SubsetOfWeights
from .valla import VaLLA

METHODS: tuple[Method, ...] = (
    Diagonal(), KFAC(), EKFAC(), Full(), ELLA(), OptimalSubspace(), SubsetOfWeights(size=100), VaLLA(), SubsetOfData(),
    SampledLLA(), MeanField(),
)  # fmt: skip
"""Each method with its default options. `lw.SWAG` is made without `lw.fit`, and `TemperatureScaling` has no Σ."""
