"""Measures of the quality of predictions and their error bars; some need `pip install "lapwing-torch[eval]"`.

This room may import every room except `integrations`, and only the package's `__init__` imports it. Begin with
`comparison.py`, which compares methods in a table, `metrics.py`, and `plots.py` for pictures.
"""

from __future__ import annotations

from . import metrics, plots
from .comparison import Comparison, compare
from .sensitivity import Sensitivities, sensitivity

__all__ = ["Comparison", "Sensitivities", "compare", "metrics", "plots", "sensitivity"]
