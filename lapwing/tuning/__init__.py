"""Tuning: prior precision and noise variance by the evidence or on validation data."""

from __future__ import annotations

from .evidence import Evidence, Tuning
from .validation import Validation

__all__ = ["Evidence", "Tuning", "Validation"]
