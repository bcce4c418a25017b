"""Tuning: prior precision, noise variance and scale factor by the evidence or on held-out data.

It imports `methods` (costs and batches), `posterior` and what is below them. Begin with `evidence.py`, which
holds the contract.
"""

from __future__ import annotations

from .bounded_evidence import BoundedEvidence
from .evidence import Evidence, Training, Tuning
from .scale_factor import scale_factor
from .validation import EarlyStopping, Validation

__all__ = ["BoundedEvidence", "EarlyStopping", "Evidence", "Training", "Tuning", "Validation", "scale_factor"]
