"""The methods that `lw.plan(model, loader, "all")` plans, wings included."""

from __future__ import annotations

from ..methods import EKFAC, ELLA, KFAC, Diagonal, Full, Method, OptimalSubspace, SubsetOfData, SubsetOfWeights
from ..methods.sampled_lla import SampledLLA
from ..methods.valla import VaLLA
from .mean_field import MeanField

METHODS: tuple[Method, ...] = (
    Diagonal(), KFAC(), EKFAC(), Full(), ELLA(), OptimalSubspace(), SubsetOfWeights(size=100), VaLLA(), SubsetOfData(),
    SampledLLA(), MeanField(),
)  # fmt: skip
"""Each method with its default options. `lw.SWAG` is made without `lw.fit`, and `TemperatureScaling` has no Σ."""
