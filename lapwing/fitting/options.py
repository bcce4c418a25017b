"""The options of `lw.fit` and `lw.plan`, and the checks of them that need no network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch import Tensor

from .. import ranks
from ..data.batches import Forward
from ..errors import LapwingError, is_one_of, is_positive, shown
from ..likelihoods import Likelihood
from ..methods import Method
from ..options import SEED, Options, Rule, instance_of, integer, option, positive
from ..posterior import Posterior
from ..running.fingerprints import differences, fingerprint_of
from ..tangent import LastLayer, Predicate
from ..tuning import BoundedEvidence, Tuning

DEFAULT_TUNING = BoundedEvidence()  # a method that chooses its own prior ignores it without a warning

WITH_PRIOR = ("prior", "sample_weights", "forward", "memory", "checkpoint", "every", "progress")
"""Options that a user may pass together with `prior=`."""

PRECISION = Rule(
    lambda value: isinstance(value, Mapping) or is_positive(value), "a positive finite number, a dict of such numbers"
)
TUNING = instance_of(
    "a tuning, such as lw.BoundedEvidence(), lw.Evidence(), lw.Validation(loader) or lw.EarlyStopping(loader), or None",
    Tuning, type(None),
)  # fmt: skip


@dataclass(frozen=True)
class FitOptions(Options):
    """The options of one fit, checked. The docstring of `lw.fit` describes them."""

    call: ClassVar[str | None] = "lw.fit(model, loader, {})"

    method: Method | None = None
    likelihood: str | Likelihood | None = None
    params: Predicate | LastLayer | None = None
    prior_precision: float | Mapping[str, float] | None = option(None, PRECISION, write="1.0")
    prior_mean: float | Mapping[str, Tensor] = 0.0
    prior: Posterior | None = option(None, instance_of("a posterior of a former fit", Posterior), write="posterior")
    tune: Tuning | None = option(DEFAULT_TUNING, TUNING, write="lw.BoundedEvidence()")
    validation: Any = field(default=None, repr=False)
    data_size: int | None = option(None, integer(1, text="a whole number of training samples"), write="len(dataset)")
    weight_decay: float | None = option(None, positive(), write="1e-4")
    temperature: float = option(1.0, positive())
    sample_weights: bool = False
    forward: Forward | None = None
    memory: int | None = None
    seed: int = option(0, SEED)
    checkpoint: str | os.PathLike[str] | None = option(
        None, instance_of("a path", str, os.PathLike), write="'fit.safetensors'"
    )
    every: int | None = option(None, integer(1, text="a number of batches, at least 1"), write="100")
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.method is not None and not isinstance(self.method, Method):
            raise _no_method(self.method)
        super().__post_init__()
        if self.prior_precision is not None and self.weight_decay is not None:
            raise LapwingError(
                f"prior_precision={self.prior_precision} and weight_decay={self.weight_decay} exclude each other, "
                "since weight_decay sets the prior precision to N times itself. Leave one out."
            )
        if self.validation is not None and not (self.tune is None or self.tune is DEFAULT_TUNING):
            raise LapwingError(
                f"validation= and tune={type(self.tune).__name__} exclude each other, since validation= tunes by "
                "lw.Validation(loader). Leave one of them out."
            )
        if self.every is not None and self.checkpoint is None:
            raise LapwingError(
                f"every={self.every} needs a checkpoint, which it writes after that many batches. Write "
                "checkpoint='fit.safetensors', or leave every out."
            )
        if self.prior is not None:
            self._check_with_prior()

    def _check_with_prior(self) -> None:
        """Raises if an option is given that a former posterior decides."""
        given = [
            f"{each.name}=" for each in fields(self)
            if each.name not in WITH_PRIOR and not is_one_of(getattr(self, each.name), (each.default,))
        ]  # fmt: skip
        if given:
            raise LapwingError(
                f"prior=posterior decides the method, the parameters, the likelihood and the prior, and "
                f"{', '.join(given)} was given too. Write lw.fit(model, loader, prior=posterior)."
            )

    def described(self, functions: bool = True) -> dict[str, Any]:
        """Returns fingerprints of the options that decide the fit, as JSON, equal in all calls.

        Only the presence of held-out data is compared, since each process has different ones. Without `functions` the
        fingerprints are also equal in all processes of a fit.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values |= {name: values[name] is not None for name in ("validation", "checkpoint")}
        if self.prior is not None:
            values["prior"] = [self.prior.method, self.prior.samples, self.prior.covariance.tensors()]
        kept = {name: value for name, value in values.items() if name not in ("every", "progress")}
        return fingerprint_of(kept, functions)

    def check_same_on_ranks(self) -> None:
        """Raises if the processes of a fit got different options. Their data may differ."""
        texts = {each.name: shown(getattr(self, each.name)) for each in fields(self)}
        every = ranks.gathered("the options", (self.described(functions=False), texts))
        (first, text), *_ = every
        for other, (described, given) in enumerate(every):
            for name in differences(first, described)[:1]:
                raise LapwingError(
                    f"The processes were given different options: {name} is {text[name]} in process 0 and "
                    f"{given[name]} in process {other}. Call lw.fit with the same network, method and options in each "
                    "of them."
                )


def _no_method(method: Any) -> LapwingError:
    if isinstance(method, type) and issubclass(method, Method):
        return LapwingError(
            f"method={method.__name__} is the class. Pass an instance with its options: lw.{method.__name__}()."
        )
    if hasattr(method, "shape") and hasattr(method, "dtype"):
        return LapwingError(
            f"lw.fit takes a loader and then a method, and the third argument is {shown(method)}. Write lw.fit(model, "
            "[(x, y)]) to fit on inputs x and targets y."
        )
    if hasattr(method, "__iter__") and not isinstance(method, str):
        return LapwingError(
            f"lw.fit takes a loader and then a method, and the third argument is {shown(method)}. Write validation= "
            "before held-out data: lw.fit(model, loader, validation=held_out)."
        )
    return LapwingError(
        f"method={shown(method)} is not a method. Pass lw.Full(), lw.Diagonal(), lw.KFAC(), lw.EKFAC(), "
        "lw.ELLA(rank=20, rows=200), lw.OptimalSubspace(rank=20), lw.SubsetOfWeights(size=100), lw.VaLLA(), "
        "lw.SubsetOfData(size=500), lw.SampledLLA() or lw.MeanField(): write method=lw.KFAC(). lw.SWAG is made by "
        "lw.SWAG.from_snapshots."
    )
