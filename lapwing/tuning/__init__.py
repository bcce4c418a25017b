"""Tuning: prior precision, noise variance and scale factor by the evidence or on held-out data."""

from __future__ import annotations

from .base import Training, Tuning
from .bounded_evidence import BoundedEvidence
from .early_stopping import EarlyStopping
from .evidence import Evidence
from .scale_factor import scale_factor
from .validation import Validation

__all__ = ["BoundedEvidence", "EarlyStopping", "Evidence", "Training", "Tuning", "Validation", "scale_factor"]
