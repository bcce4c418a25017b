"""The methods that `lw.plan(model, loader, "all")` plans, wings included."""

from __future__ import annotations

from ..methods.diagonal import Diagonal
from ..methods.ella import ELLA
from ..methods.full import Full
from ..methods.kfac import EKFAC, KFAC
from ..methods.optimal_subspace import OptimalSubspace
from ..methods.passes import Method
from ..methods.sampled_lla import SampledLLA
from ..methods.subset_of_data import SubsetOfData
from ..methods.subset_of_weights import SubsetOfWeights
from ..methods.valla import VaLLA
from .mean_field import MeanField

METHODS: tuple[Method, ...] = (
    Diagonal(), KFAC(), EKFAC(), Full(), ELLA(), OptimalSubspace(), SubsetOfWeights(size=100), VaLLA(), SubsetOfData(),
    SampledLLA(), MeanField(),
)  # fmt: skip
"""Each method with its default options. `lw.SWAG` is made without `lw.fit`, and `TemperatureScaling` has no Σ."""
