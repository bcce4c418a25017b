"""Measures of how good predictions and their error bars are; some need `pip install lapwing[eval]`.

It may import every folder but `integrations`, and nothing but the package's `__init__` imports it. Begin with
`comparison.py`, which puts methods side by side, and `metrics.py`.
"""

from __future__ import annotations

from . import metrics
from .comparison import Comparison, compare
from .sensitivity import Sensitivities, sensitivity

__all__ = ["Comparison", "Sensitivities", "compare", "metrics", "sensitivity"]
