"""Measuring how good predictions and their error bars are; needs ``pip install lapwing[eval]`` for some of it."""

from __future__ import annotations

from lapwing.evaluation import metrics
from lapwing.evaluation.comparison import Comparison, compare

__all__ = ["Comparison", "compare", "metrics"]
