"""The contract of a tuning, and posteriors that are tuned, equal on all ranks, and checked."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .. import ranks
from ..covariance import has_prior, has_rank
from ..data.data import Data, other_size
from ..data.inputs import Samples
from ..data.progress import tracked
from ..errors import LapwingError
from ..linalg import are_finite, check_range
from ..methods import FitShape, Method
from ..options import Options
from ..tangent.retry import retried

if TYPE_CHECKING:
    from .posterior import Posterior

log = logging.getLogger("lapwing")


@dataclass(frozen=True)
class Training:
    """Inputs of a tuning, in addition to the posterior.

    `prefixes` are posteriors of the first n samples, by rising n, if the tuning sets `Tuning.prefixes`; with
    `data_size`, also the unscaled posterior of all samples.
    """

    loader: Iterable[Any] = ()  # training data
    prefixes: tuple[Posterior, ...] = ()
    count: int | None = None  # number of samples of the loader, if known; the posterior may be of fewer
    chosen: bool = False  # whether the loader holds only the samples that the tuning reads: `Tuning.training_samples`


def evenly_spaced_batches(
    training: Training, limit: int, posterior: Posterior, before: Sequence[int] | None = None
) -> Iterator[Samples]:
    """Yields batches on the posterior's device, spread evenly over the training data, `limit` samples in all.

    `before` holds the sizes of the batches of the processes before this one; None means a single process. Raises if the
    loader has no samples, or another number of samples than the fit read.
    """
    device, count = posterior.tangent.device, training.count
    whole = sum(Samples.of(batch).count for batch in training.loader) if training.chosen else count or posterior.samples
    start = taken = 0
    own = map(Samples.of, tracked(training.loader, "training data for the tuning"))
    for size, samples in chain(((size, None) for size in before or ()), ((each.count, each) for each in own)):
        some = min(size, limit - taken) if taken * whole <= start * limit else 0
        if some and samples is not None:
            every = slice(0, some * (size // some), size // some)
            yield (samples.take(every) if some < size else samples).to(device)
        taken, start = taken + some, start + size
        if taken >= limit:
            return
    read_whole = count == posterior.samples and not training.chosen
    if before is None and (not taken or (read_whole and start != whole)):
        raise other_size(start, "to the tuning", posterior.samples)


class Tuning(Options, ABC):
    """Chooses prior precision and noise variance if the user gave none."""

    prefixes: int = 0
    """Number of first parts of the data (a half, a quarter, ...) whose posteriors the tuning needs."""

    loader: Any = None
    """Held-out data. None means that the tuning reads none."""

    fits_noise: ClassVar[bool] = False
    """Whether it fits noise that depends on the input: `lw.Gaussian(noise="input")`."""

    tunes_updates: ClassVar[bool] = False
    """Whether `Posterior.update` can use it, which has only the further data and no `Training`."""

    reads_evidence: ClassVar[bool] = True
    """Whether it reads the lower bound of the evidence."""

    def falls(self) -> Callable[[Posterior, Posterior], bool] | None:
        """Returns a function that says whether the score of more samples has fallen, so that the fit ends, or None.

        Its arguments are the posterior of the first samples and the same scaled to all samples, for rising numbers.
        `lw.fit` calls it if `prefixes` is not 0.
        """
        return None

    def tunes_own_prior(self, posterior: Posterior) -> bool:
        """Whether it has numbers to choose for a posterior whose method chose the prior."""
        return False

    def check(self, method: Method, shape: FitShape) -> None:
        """Raises a LapwingError if the tuning cannot tune the method. `lw.fit` and `lw.plan` call it first."""

    def training_samples(self, posterior: Posterior) -> int:
        """Returns the maximum number of training samples that tuning this posterior reads.

        In a fit over several processes, rank 0 tunes, and gets only these.
        """
        return 0

    @abstractmethod
    def tune(self, posterior: Posterior, training: Training) -> Posterior:
        """Returns the tuned posterior. Values that the user gave are kept."""


def tuned(tune: Tuning, posterior: Posterior, training: Training) -> Posterior:
    """Returns the tuned posterior, over several processes on rank 0: see `checked`.

    Rank 0 tunes with training samples of all processes. Their held-out data are already there, see `on_first_rank`.
    """
    whole = training
    if ranks.several():
        limit, data, rows = tune.training_samples(posterior), training.loader, []
        if limit and isinstance(data, Data) and training.count is not None:
            rows = list(evenly_spaced_batches(training, limit, posterior, data.before))
        rows = ranks.gathered_on_first("training data of the tuning", rows)
        whole = replace(training, loader=rows, chosen=True)
    best = posterior if ranks.rank() else retried(posterior.tangent, lambda: tune.tune(posterior, whole))
    same = all(getattr(best, name) == getattr(posterior, name) for name in ("likelihood", "samples", "temperature"))
    if same and torch.equal(best.prior.precision, posterior.prior.precision):
        return best  # the user gave what the tuning could choose
    return replace(best, method=replace(best.method, tuning=repr(tune)))


def checked(posterior: Posterior, parts: Sequence[Posterior] = ()) -> Posterior:
    """Returns the posterior of rank 0; raises if it is not finite, and warns if some variances are rounding noise.

    `parts` are posteriors of the first samples. Rank 0 may have chosen one of them.
    """
    if ranks.several():
        posterior = _as_on_first(posterior, parts)
    tensors = (*posterior.covariance.tensors().values(), *posterior.statistics.values())
    if not are_finite(tensors):
        raise LapwingError(
            "The fit is not finite: sums of squared gradients or residuals exceed the range of "
            f"{posterior.tangent.dtype}. Scale the inputs and the targets to about 1, or fit the network in float64 "
            "with model.double()."
        )
    check_range("noise variance", posterior.likelihood.noise_variance, posterior.tangent.dtype)
    if posterior.covariance.has_rounding_noise():
        _tell_of_rounding(posterior)
    return posterior


def _tell_of_rounding(posterior: Posterior) -> None:
    log.log(
        logging.WARNING if posterior.prior.fixed else logging.INFO,  # a tuning scored these very variances
        "The prior precision is too weak for the digits of %s: variances of %s in directions of least curvature are "
        "rounding noise. Pass a larger prior_precision=, or fit the network in float64 with model.double().",
        posterior.tangent.dtype, posterior.method,
    )  # fmt: skip


def _as_on_first(posterior: Posterior, parts: Sequence[Posterior]) -> Posterior:
    """Returns the posterior with the values, the rank and the samples that rank 0 chose."""
    precision, likelihood, data, rank, method, aim, temperature = ranks.sent("the numbers that were tuned", (
        posterior.prior.precision.tolist(), posterior.likelihood, (posterior.samples, posterior.data_factor),
        getattr(posterior.covariance, "rank", None), posterior.method, posterior.aim, posterior.temperature,
    ))  # fmt: skip
    if not ranks.rank():
        return posterior
    chosen = next(one for one in (posterior, *parts) if (one.samples, one.data_factor) == data)
    if rank is not None and has_rank(chosen.covariance) and chosen.covariance.rank != rank:
        chosen = replace(chosen, covariance=chosen.covariance.with_rank(rank))
    chosen = replace(chosen, likelihood=likelihood, method=method, aim=aim, temperature=temperature)
    if has_prior(chosen.covariance):
        return chosen.at(chosen.prior.precision.new_tensor(precision))
    return chosen
