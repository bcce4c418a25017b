"""Tuning: prior precision and noise variance by the evidence or on held-out data."""

from __future__ import annotations

from .base import Training, Tuning
from .bounded_evidence import BoundedEvidence
from .early_stopping import EarlyStopping
from .evidence import Evidence
from .validation import Validation

__all__ = ["BoundedEvidence", "EarlyStopping", "Evidence", "Training", "Tuning", "Validation"]
