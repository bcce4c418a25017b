"""Estimators for MAPIE whose X is the matrix of predictions, so the inputs of the network may be of any kind."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import LapwingError, extra
from ..likelihoods import Prediction

__all__ = ["PredictionClassifier", "PredictionRegressor", "matrix_of"]

base: Any = extra("sklearn.base", "mapie")
extra("mapie")


def matrix_of(prediction: Prediction) -> np.ndarray:
    """Returns a prediction of N inputs as the X of the two estimators, in float64.

    X holds class probabilities (N, C); probabilities of no and yes (N, 2) if the output is yes or no; mean and standard
    deviation (N, 2) of a regression. Each position of outputs with positions is a row.

    Raises:
        LapwingError: if an input has several targets.
    """
    prediction = getattr(prediction, "rows", prediction)  # with positions
    summary = {name: value.detach().cpu().double().numpy() for name, value in prediction.summary().items()}
    if "mean" in summary:
        columns = [summary["mean"], np.sqrt(summary["variance"])]
    elif prediction.point.ndim == 1:
        return summary["probabilities"]
    else:
        columns = [1 - summary["probabilities"], summary["probabilities"]]
    if columns[0].ndim > 1 and columns[0].shape[1] > 1:
        raise LapwingError(
            f"MAPIE has one target for each input, and this is {prediction!r}. Make a matrix (N, 2) for each output: "
            "np.stack([prediction.mean[:, 0], prediction.std[:, 0]], 1)."
        )
    return np.concatenate([column.reshape(-1, 1) for column in columns], 1)


class PredictionClassifier(base.ClassifierMixin, base.BaseEstimator):
    """A classifier of the labels 0 to C - 1 that returns its X (N, C), for `prefit=True`."""

    def __init__(self, classes: int = 2) -> None:
        self.classes = classes
        self.classes_ = np.arange(classes)

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        """Returns X, the class probabilities (N, C)."""
        return np.asarray(X)

    def predict(self, X: np.ndarray) -> np.ndarray:
        """Returns the most probable labels (N,)."""
        return np.asarray(X).argmax(1)


class PredictionRegressor(base.RegressorMixin, base.BaseEstimator):
    """A regressor that returns its X (N, 2), for `prefit=True`. `StdConformityScore` reads the standard deviations."""

    is_fitted = True  # MAPIE warns without it

    def fit(self, X: np.ndarray, y: Any) -> PredictionRegressor:
        """Returns the estimator itself: it has nothing to learn."""
        return self

    def predict(self, X: np.ndarray, return_std: bool = False) -> Any:
        """Returns the means (N,), or the means and the standard deviations."""
        mean, std = np.asarray(X).T
        return (mean, std) if return_std else mean
