"""Regression with tails: the Student t likelihood."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from ..options import POSITIVE_OF_EACH, number, option
from .gaussian import Gaussian
from .registry import register_likelihood


@register_likelihood
@dataclass(frozen=True, repr=False)
class StudentT(Gaussian):
    """`y = f + e`, where e is a Student t with ν degrees of freedom and the variance σ².

    The fit equals the fit of `lw.Gaussian`: Λ and the evidence have normal noise of variance σ². The tails enter only
    predictions of y: their density, intervals, quantiles, draws and CRPS. A smaller ν means more very large errors.

    Args:
        df: ν, at least 3. None: a tuning chooses it; without a tuning the predictions are normal.
        noise_variance: σ², the **variance** of the noise for every ν. Other options are as in `lw.Gaussian`.

    Raises:
        LapwingError: if an option is not valid.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(50, 2), torch.randn(50, 1)
        >>> likelihood = lw.StudentT(df=4, noise_variance=1.0)
        >>> posterior = lw.fit(torch.nn.Linear(2, 1).eval(), (x, y), likelihood=likelihood)
        >>> posterior.predict(x).df
        4.0
    """

    df: float | None = option(None, number(3), write="4.0")
    _: KW_ONLY
    noise_variance: float | None = option(None, POSITIVE_OF_EACH, write="0.1")
    tails: Literal["student"] = "student"  # type: ignore[assignment]
    name: ClassVar[str] = "student_t"
    by_name: ClassVar[dict[str, Any]] = {}

    @property
    def tails_to_fit(self) -> tuple[float | None, bool]:
        return self.df, False

    def __repr__(self) -> str:
        return super().__repr__().replace("StudentT(", f"StudentT(df={self.df}, ", 1)

    def at_features(self, prediction: Any, features: Tensor | None) -> Any:
        """Returns the prediction with the tails that are given or fitted; normal if ν is still open."""
        return super().at_features(replace(prediction, df=self.df), features)
