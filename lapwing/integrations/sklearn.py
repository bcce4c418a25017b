"""scikit-learn estimators around a network: `LaplaceClassifier` and `LaplaceRegressor`."""

from __future__ import annotations

import copy
import logging
import re
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw

from ..data.inputs import Inputs
from ..errors import LapwingError, extra, shown
from ..network.call import Call, output_tensor
from ..options import check_argument, integer, number

log = logging.getLogger("lapwing")

__all__ = ["LaplaceClassifier", "LaplaceRegressor"]

base: Any = extra("sklearn.base", "sklearn")
split_arrays = extra("sklearn.model_selection", "sklearn").train_test_split
check_random_state = extra("sklearn.utils", "sklearn").check_random_state
multiclass, validation = (extra(f"sklearn.utils.{name}", "sklearn") for name in ("multiclass", "validation"))


OPTION = "validation_fraction=0.2"
_ADVISED: set[str] = set()
"""Messages that were logged, without their numbers: a search fits many networks."""


def _in_own_words(record: logging.LogRecord) -> bool:
    """A logging filter during `lw.fit`: an estimator holds data out by its own option, advised once a process."""
    text = re.sub(r"lw\.fit\(model, loader, validation=held_out\)|validation=held_out", OPTION, record.getMessage())
    record.msg, record.args, advice = text, (), re.sub(r"\d[\d.,]*(e[+-]?\d+)?", "", text)
    new = OPTION not in text or advice not in _ADVISED
    _ADVISED.add(advice)
    return new


class _LaplaceEstimator(base.BaseEstimator):
    """Base of the classifier and the regressor: options, the copy of the network, training, fit and prediction."""

    def __init__(
        self,
        module: nn.Module | Callable[[int, int], nn.Module] | None = None,
        *,
        epochs: int = 100,
        learning_rate: float = 3e-3,
        weight_decay: float = 1e-4,
        batch_size: int = 32,
        method: lw.Method | None = None,
        params: Any = None,
        validation_fraction: float | None = None,
        random_state: Any = None,
    ) -> None:
        self.module = module
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.method = method
        self.params = params
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    @abstractmethod
    def _task(self, y: Any, outputs: int) -> tuple[Tensor, str, Callable[[Tensor, Tensor], Tensor]]:
        """Returns the targets, the likelihood and the loss of each row, or refuses this number of outputs."""

    def _fit(self, X: np.ndarray, y: Any, weights: np.ndarray | None, outputs: int, labels: Any = None) -> None:
        """Sets `module_` and `posterior_` from checked arrays; `labels` stratify the held-out rows."""
        name = type(self).__name__
        check_argument(name, "epochs", self.epochs, integer(0), "10")
        check_argument(name, "batch_size", self.batch_size, integer(1), "10")
        if self.validation_fraction is not None:
            check_argument(name, "validation_fraction", self.validation_fraction, number(0, 1), "0.2")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            self.module_ = self._network(X, outputs).eval()
            self._integers = X.dtype.kind in "iu" and self._accepts_integers(X[:1])
            x = self._tensor(X)
            with torch.no_grad():
                width = Call(self.module_).rows(Inputs(x[:1])).shape[1]
            targets, likelihood, loss = self._task(y, width)
            targets, train, held_out = targets.to(x.device), torch.arange(len(x)), None
            share = self.validation_fraction
            if share is None:  # a trained network has already seen these rows
                few = labels is None or len(x) < 1000 or np.bincount(labels).min() < 10
                share = 0.0 if few or not self.epochs else 0.1
            if share:
                train, rows = split_arrays(train, test_size=share, random_state=seed, stratify=labels)
                held_out = x[rows], targets[rows]
            columns = [x[train], targets[train]]
            if weights is not None:
                exact = torch.promote_types(x.dtype, torch.float32)
                columns.append(torch.tensor(weights, dtype=exact, device=x.device)[train])
            if self.epochs:
                self._train(loss, *columns)
        log.addFilter(_in_own_words)
        try:
            self.posterior_ = lw.fit(
                self.module_, list(zip(*(column.split(256) for column in columns), strict=True)), self.method,
                likelihood=likelihood, params=self.params, validation=held_out, sample_weights=weights is not None,
                seed=seed, progress=False,
            )  # fmt: skip
        finally:
            log.removeFilter(_in_own_words)

    def _rows(
        self, X: Any, y: Any, sample_weight: Any, **checks: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Returns checked arrays of the rows that count, and their weights or None."""
        self.__dict__.pop("posterior_", None)  # a failed fit leaves no posterior
        X, y = validation.validate_data(self, X, y, allow_nd=True, **checks)
        X = _numbers(X)
        if sample_weight is None:
            return X, y, None
        try:
            weights = np.array(sample_weight, dtype=np.float64)
        except (TypeError, ValueError):
            raise LapwingError("sample_weight does not hold numbers. Pass one number for each row of X.") from None
        if weights.shape != (len(X),):
            raise LapwingError(
                f"sample_weight has the shape {weights.shape}, and X has {len(X)} rows. Pass one number for each row."
            )
        wrong = int((~np.isfinite(weights) | (weights < 0)).sum())
        if wrong or not weights.any():
            what = f"negative, NaN or infinite for {wrong} rows" if wrong else "zero for every row"
            raise LapwingError(f"sample_weight is {what}. Pass finite weights of at least 0, and some above it.")
        counted = weights > 0
        return X[counted], y[counted], weights[counted]

    def _network(self, X: np.ndarray, outputs: int) -> nn.Module:
        if isinstance(self.module, nn.Module):
            return copy.deepcopy(self.module)
        if self.module is None:
            return nn.Sequential(
                nn.Flatten(), nn.Linear(X[0].size, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, outputs)
            )
        network = self.module(X.shape[1], outputs) if callable(self.module) else None
        if not isinstance(network, nn.Module):
            raise LapwingError(
                f"module={shown(self.module)} must be a torch.nn.Module or a function that makes one. Write "
                "module=lambda features, outputs: torch.nn.Linear(features, outputs)."
            )
        return network

    def _train(
        self, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, targets: Tensor, counts: Tensor | None = None
    ) -> None:
        network = self.module_.train()
        weights = [weight for weight in network.parameters() if weight.requires_grad]
        if not weights:
            raise LapwingError("No weight of the network requires a gradient. Write epochs=0 for a trained network.")
        shares = weights[0].new_ones(len(x)) if counts is None else (counts / counts.mean()).to(weights[0].dtype)
        optimiser = torch.optim.AdamW(weights, lr=self.learning_rate, weight_decay=self.weight_decay)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(x)).split(self.batch_size):
                if len(rows) > 1 or len(x) == 1:  # batch norm refuses a single sample
                    optimiser.zero_grad()
                    (shares[rows] * loss(output_tensor(self.module_(x[rows])), targets[rows])).mean().backward()
                    optimiser.step()
        optimiser.zero_grad()
        network.eval()

    def _accepts_integers(self, X: np.ndarray) -> bool:
        """Whether the network runs on integers, as one that begins with an embedding does; a linear layer does not."""
        weight = next(self.module_.parameters(), torch.empty(0))
        try:
            with torch.no_grad():
                self.module_(torch.tensor(X, dtype=torch.int64, device=weight.device))
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False
        return True

    def _tensor(self, array: np.ndarray) -> Tensor:
        """Returns an array on the device of the network, as integers or in the dtype of its weights."""
        weight = next(self.module_.parameters(), torch.empty(0))
        if self._integers and (array != array.astype(np.int64)).any():
            raise LapwingError("The estimator was fitted to integers, and X has fractions. Pass X.astype(int).")
        dtype = torch.int64 if self._integers else weight.dtype
        return torch.tensor(array, dtype=dtype, device=weight.device)

    def _predict(self, X: Any) -> Any:
        validation.check_is_fitted(self, "posterior_")
        X = _numbers(validation.validate_data(self, X, reset=False, allow_nd=True))
        return self.posterior_.predict(self._tensor(X))


class LaplaceClassifier(base.ClassifierMixin, _LaplaceEstimator):
    """A network with a Laplace posterior, as a scikit-learn classifier.

    `fit` trains a copy of the network by AdamW on the cross-entropy, and fits the posterior to the same data.
    `predict_proba` averages over the weights: `p(y|x) = ∫ softmax(f) N(f; f(x, θ̂), J Σ Jᵀ) df`.

    Args:
        module: network, which is copied, or a function `(features, outputs)` that makes one. It returns logits: one for
            each class in the order of `classes_`, or for two classes one logit of the second. None makes a perceptron
            with two hidden layers of 50 units. It gets integers of X as integers if it accepts them, as an embedding
            does, and otherwise in the dtype of its weights.
        epochs: number of passes of the training; 0 keeps the weights.
        learning_rate: learning rate of AdamW.
        weight_decay: weight decay of AdamW.
        batch_size: batch size of the training.
        method: method of `lw.fit`.
        params: treated weights, as in `lw.fit`.
        validation_fraction: share of each class that is held out of the training and calibrates the probabilities, as
            `validation=` of `lw.fit` does. None means 0.1 if `fit` trains on at least 1 000 rows with 10 of each class,
            and otherwise 0.
        random_state: a seed or a numpy `RandomState`, for the initial weights, the training and the fit.

    Attributes:
        classes_: sorted labels.
        module_: trained copy of the network, in eval mode.
        posterior_: the `lw.Posterior`.

    Example:
        >>> import numpy as np
        >>> X, y = np.random.randn(60, 4), np.repeat(["a", "b", "c"], 20)
        >>> classifier = LaplaceClassifier(torch.nn.Linear(4, 3), epochs=5).fit(X, y)
        >>> classifier.predict_proba(X).shape, classifier.classes_.tolist()
        ((60, 3), ['a', 'b', 'c'])
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LaplaceClassifier:
        """Trains the copy, by `epochs` forward and backward passes, and fits the posterior by `lw.fit`.

        Args:
            X: array or data frame (n, features); further dimensions are allowed.
            y: labels (n,), numbers or strings.
            sample_weight: weights (n,) of at least 0, for the loss and the posterior: a row of weight 2 counts as two
                equal rows. Rows of weight 0, and classes with only such rows, are left out. Held-out rows count once
                each. None means ones.

        Raises:
            LapwingError: if an option is out of range, there is one class, the numbers of outputs and classes differ,
                or the weights are not one number per row.
        """
        X, y, weights = self._rows(X, y, sample_weight)
        multiclass.check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            rows = "y has" if weights is None else "The rows of positive sample_weight have"
            raise LapwingError(f"{rows} one class. Pass labels of at least two classes.")
        self._fit(X, codes, weights, len(self.classes_), labels=codes)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Returns the probabilities of the classes (n, classes), in the order of `classes_`."""
        probs = self._predict(X).probs.double().cpu()
        if probs.shape[1] == 1:
            probs = torch.cat([1 - probs, probs], 1)
        return (probs / probs.sum(1, keepdim=True)).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """Returns the most probable label of each row (n,)."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def _task(self, y: Any, outputs: int) -> tuple[Tensor, str, Callable[[Tensor, Tensor], Tensor]]:
        codes, classes = torch.as_tensor(y), len(self.classes_)
        if outputs == classes:
            return codes, "categorical", lambda logits, y: F.cross_entropy(logits, y, reduction="none")
        if outputs == 1 and classes == 2:
            loss = F.binary_cross_entropy_with_logits
            return codes.bool(), "bernoulli", lambda logits, y: loss(logits[:, 0], y.to(logits.dtype), reduction="none")
        raise LapwingError(
            f"The network has {outputs} outputs and y has {classes} classes. Pass a network with {classes} outputs, or "
            "labels of all of its classes."
        )


def _numbers(X: np.ndarray) -> np.ndarray:
    """Returns an array of objects, such as a frame of categories, as numbers; a ValueError if some are no numbers."""
    return X.astype(np.float64) if X.dtype.kind == "O" else X


class LaplaceRegressor(base.RegressorMixin, _LaplaceEstimator):
    """A network with a Laplace posterior, as a scikit-learn regressor.

    `fit` trains a copy of the network by AdamW on the squared error of the standardised targets, and fits the posterior
    to the same data. Predictions are in the units of y: mean `f(x, θ̂)` and variance `J Σ Jᵀ + σ²(x)`, scaled back.
    Standardise inputs by a `Pipeline` with a `StandardScaler`.

    Args:
        module: network, which is copied, or a function `(features, outputs)` that makes one. It returns (n, 1), or
            (n, k) for k targets per row. None makes a perceptron with two hidden layers of 50 units.
        epochs: number of passes of the training; 0 keeps the weights of a network that predicts y in its units.
        learning_rate, weight_decay, batch_size, method, params, random_state: as in `LaplaceClassifier`.
        validation_fraction: share of the data that is held out of the training and tunes the posterior; None means 0,
            because leave-one-out predictions tune a regression.

    Attributes:
        module_: trained copy of the network, in eval mode, which predicts `(y - shift_) / scale_`.
        posterior_: the `lw.Posterior` of these outputs.
        shift_: mean of y, or 0 without training.
        scale_: standard deviation of y, or 1 without training.

    Example:
        >>> import numpy as np
        >>> X = np.random.randn(60, 4)
        >>> regressor = LaplaceRegressor(torch.nn.Linear(4, 1), epochs=5).fit(X, 100 + X[:, 0])
        >>> mean, std = regressor.predict(X, return_std=True)
        >>> mean.shape, std.shape
        ((60,), (60,))
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LaplaceRegressor:
        """Trains the copy, by `epochs` forward and backward passes, and fits the posterior by `lw.fit`.

        Args:
            X: array or data frame (n, features); further dimensions are allowed.
            y: targets (n,) or (n, k).
            sample_weight: as in `LaplaceClassifier.fit`; only their ratios change the intervals. `shift_` and `scale_`
                are moments of the weighted rows.

        Raises:
            LapwingError: if an option is out of range, the numbers of outputs and targets differ, or the weights are
                not one number per row.
        """
        X, y, weights = self._rows(X, y, sample_weight, multi_output=True, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        self.shift_, self.scale_ = np.zeros(y.shape[1:]), np.ones(y.shape[1:])
        if self.epochs:
            self.shift_ = np.average(y, 0, weights)
            std = np.average((y - self.shift_) ** 2, 0, weights) ** 0.5
            self.scale_ = np.where(std > 1e-12 * abs(y).max(0), std, 1.0)  # equal targets may leave a rounding error
        self._fit(X, (y - self.shift_) / self.scale_, weights, y[0].size)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Returns the mean of y for each row, in the shape of y.

        With `return_std` also returns the standard deviation of y, by the weights and the noise.
        """
        prediction = self._predict(X)
        mean = self._scaled(prediction.mean) + self.shift_
        return (mean, self._scaled(prediction.std)) if return_std else mean

    def predict_quantile(self, X: Any, probability: float) -> np.ndarray:
        """Returns the y with `P(Y <= y) = probability` for each row, in the shape of y.

        The quantiles at .05 and .95 are the ends of 90 % intervals. They have the tails of the noise, which a multiple
        of the standard deviation has not.
        """
        return self._scaled(self._predict(X).quantile(probability)) + self.shift_

    def _scaled(self, values: Tensor) -> np.ndarray:
        """Returns values (n, outputs) in the shape of y, times the scale of y."""
        return values.double().cpu().numpy().reshape(-1, *self.shift_.shape) * self.scale_

    def __sklearn_tags__(self) -> Any:
        """Declares that y may have columns."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _task(self, y: Any, outputs: int) -> tuple[Tensor, str, Callable[[Tensor, Tensor], Tensor]]:
        weight = next(self.module_.parameters(), torch.empty(0))
        targets = torch.tensor(y.reshape(len(y), -1), dtype=weight.dtype)
        if targets.shape[1] != outputs:
            raise LapwingError(
                f"The network has {outputs} outputs and y has {targets.shape[1]} targets per row. Pass a network with "
                f"{targets.shape[1]} outputs."
            )
        return targets, "gaussian", lambda outputs, y: (outputs - y).square().mean(1)
