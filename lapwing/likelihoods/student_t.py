"""Regression with tails: the Student t likelihood."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from ..covariance import AnyLatent
from ..options import number, option
from .gaussian import Gaussian
from .links import Link
from .registry import register_likelihood
from .regression import RegressionPrediction


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
    tails: Literal["student"] = "student"  # type: ignore[assignment]
    name: ClassVar[str] = "student_t"

    @classmethod
    def by_name(cls) -> StudentT:
        return cls()

    @property
    def tail_candidates(self) -> tuple[float | None, ...]:
        return (self.df,)

    def __repr__(self) -> str:
        """One line as for `lw.Gaussian`, with ν."""
        return super().__repr__().replace("StudentT(", f"StudentT(df={self.df}, ", 1)

    def predict(
        self, latent: AnyLatent, link: Link | None = None, generator: torch.Generator | None = None
    ) -> RegressionPrediction:
        """Returns the predictive distribution, latent plus noise, with the given tails; normal if ν is still open."""
        return replace(super().predict(latent, link, generator), df=self.df)
