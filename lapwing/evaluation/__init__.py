"""Measures of how good predictions and their error bars are; some need `pip install lapwing[eval]`.

It may import every room, and nothing but the package's `__init__` imports it. Begin with `comparison.py`, which puts
methods side by side, and `metrics.py`.
"""

from __future__ import annotations

from lapwing.evaluation import measures, metrics
from lapwing.evaluation.augmentation import AugmentedLoader, StrongAugmentation
from lapwing.evaluation.comparison import Comparison, compare
from lapwing.evaluation.corruptions import COMMON, CORRUPTIONS, DIGITS, corrupt
from lapwing.evaluation.rotations import RotatedLoader, rotate, rotation_curves
from lapwing.evaluation.sensitivity import Sensitivities, sensitivity

__all__ = [
    "COMMON", "CORRUPTIONS", "DIGITS", "AugmentedLoader", "Comparison", "RotatedLoader", "Sensitivities",
    "StrongAugmentation", "compare", "corrupt", "measures", "metrics", "rotate", "rotation_curves", "sensitivity",
]  # fmt: skip
