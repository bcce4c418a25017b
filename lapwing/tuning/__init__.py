"""Tuning of prior precision, noise variance, logit temperature and scale factor, by the evidence or on held-out data.

This room may import `methods`, `posterior` and the rooms below them. Begin with `evidence.py`: it has the contract.
"""

from __future__ import annotations

from .bounded_evidence import BoundedEvidence
from .evidence import Evidence, Training, Tuning
from .refit import Refit
from .scale_factor import scale_factor
from .validation import EarlyStopping, Validation

__all__ = ["BoundedEvidence", "EarlyStopping", "Evidence", "Refit", "Training", "Tuning", "Validation", "scale_factor"]
