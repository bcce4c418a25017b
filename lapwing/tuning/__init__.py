"""Tuning of prior precision, noise variance, logit temperature and scale factor, by the evidence or on held-out data.

This room imports `posterior` and the rooms below it. Begin with `evidence.py`; `posterior/tuned.py` has the contract.
"""

from __future__ import annotations

from ..posterior.tuned import Training, Tuning
from .amortized import Amortized, amortize
from .bounded_evidence import BoundedEvidence
from .evidence import Evidence
from .refit import Refit
from .scale_factor import scale_factor
from .validation import EarlyStopping, Validation

__all__ = [
    "Amortized",
    "BoundedEvidence",
    "EarlyStopping",
    "Evidence",
    "Refit",
    "Training",
    "Tuning",
    "Validation",
    "amortize",
    "scale_factor",
]
