"""Measuring how good predictions and their error bars are; needs ``pip install lapwing[eval]`` for some of it."""

from __future__ import annotations

from lapwing.evaluation import measures, metrics
from lapwing.evaluation.approximations import ApproximationErrors, approximation_errors
from lapwing.evaluation.augmentation import AugmentedLoader, StrongAugmentation
from lapwing.evaluation.comparison import Comparison, compare
from lapwing.evaluation.corruptions import COMMON, CORRUPTIONS, DIGITS, corrupt
from lapwing.evaluation.dead_weights import dead_parameters
from lapwing.evaluation.rotations import RotatedLoader, rotate, rotation_curves
from lapwing.evaluation.sensitivity import Sensitivities, sensitivity

__all__ = [
    "COMMON", "CORRUPTIONS", "DIGITS", "ApproximationErrors", "AugmentedLoader", "Comparison", "RotatedLoader",
    "Sensitivities", "StrongAugmentation", "approximation_errors", "compare", "corrupt", "dead_parameters", "measures",
    "metrics", "rotate", "rotation_curves", "sensitivity",
]  # fmt: skip
