"""Tuning: prior precision, noise variance and scale factor by the evidence or on held-out data.

It imports `posterior`, the checks of options in `methods`, and what is below them. Begin with `base.py` (the contract),
then `evidence.py`.
"""

from __future__ import annotations

from .base import Training, Tuning
from .bounded_evidence import BoundedEvidence
from .evidence import Evidence
from .scale_factor import scale_factor
from .validation import EarlyStopping, Validation

__all__ = ["BoundedEvidence", "EarlyStopping", "Evidence", "Training", "Tuning", "Validation", "scale_factor"]
