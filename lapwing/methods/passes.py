"""The contract between a method and `running/runner.py`: passes over the data.

A method is a frozen dataclass. Its `passes` is a generator, which yields passes, receives the finished state of each
pass, and returns a covariance. It may also yield a question about the data. There are two kinds of pass:

- The state of a **sum** pass adds over data. So the runner handles batches, ranks, checkpoints and resuming.
- An **iterate** pass has a state, a random generator and a step. Over several processes it raises, and a
  checkpoint keeps only its end.

A state is a dataclass of tensors (`state.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor

from ..covariance import Covariance, PriorCovariance, has_prior
from ..data import batches
from ..data.inputs import Inputs, Samples
from ..errors import LapwingError, shown
from ..likelihoods import Likelihood, curvature_weights
from ..options import Options
from ..tangent import EVERY_OUTPUT, Cotangents, Reading, Record, Tangent
from .footprint import FitShape, Footprint
from .problem import Problem
from .state import DataSummary, S


@dataclass
class Batch:
    """One batch of a pass."""

    tangent: Tangent
    inputs: Inputs  # B samples that have passed the gate
    targets: Tensor
    start: int  # number of samples before this batch
    counted: Tensor | None = None  # mask of the targets that count, from `Likelihood.labelled`; None means all
    weights: Tensor | None = None  # sample weights w (B,); None means ones
    likelihood: Likelihood | None = None  # set if its `target_weights` multiply Λ
    epoch: int = 0  # number of times that this pass has read all data before
    _outputs: list[Tensor] = field(default_factory=list, init=False)  # outputs (N, C) of the latest `records`, by chunk
    _kept: Tensor | None = field(default=None, init=False)  # mask (B, T) of the positions in them; None means all
    _sizes: tuple[int, ...] = field(default=(), init=False)  # sizes of their positions: (T,), (H, W), ...

    @classmethod
    def of(cls, tangent: Tangent, samples: Samples, counted: Tensor | None = None, **more: Any) -> Batch:
        """Returns the batch of samples on the device."""
        return cls(tangent, samples.inputs, samples.targets, samples.start, counted, samples.weights, **more)

    @property
    def count(self) -> int:
        """The number of samples, B."""
        return self.inputs.samples

    def records(
        self, cotangents: Cotangents = EVERY_OUTPUT, dtype: torch.dtype | None = None, scratch_per_sample: int = 0
    ) -> Iterator[tuple[slice, Record]]:
        """Yields records of the chunks of the batch, as `Tangent.records` does, with cotangents times √w.

        Records for `EVERY_OUTPUT` are not weighted. If positions are samples, records for the Fisher root of the fit
        hold only positions whose targets count.
        """
        outputs, weights = [], None
        kept = self.counted if self.tangent.positions.rows_are_positions and cotangents.skips_uncounted else None
        kept = None if kept is None else kept.flatten(1)
        for part, record in self.tangent.records(self.inputs, cotangents, dtype, Reading(scratch_per_sample, kept)):
            if part.step is None:  # all positions of these samples, not one of each
                outputs.append(record.outputs.reshape(-1, self.tangent.outputs))
            weighted = self.likelihood is not None or self.weights is not None
            if weighted and cotangents.columns is not None:
                weights = self.curvature_weights(record.outputs, part, record.sizes, kept)
            if weights is not None:
                record = record.weighted(weights)
            sizes = record.sizes
            yield part, record
        if outputs:
            self._outputs, self._kept, self._sizes = outputs, kept, sizes

    def curvature_weights(
        self, outputs: Tensor, part: slice, sizes: tuple[int, ...] = (), kept: Tensor | None = None
    ) -> Tensor | None:
        """Returns factors of Λ for the outputs of a part: (N, 1) or (N, C) for rows, (B, T C) for samples.

        None means ones. `sizes` are the sizes of the positions, and `kept` a mask (B, T) of the recorded positions.
        """
        count, targets, weights = self.targets_of_rows(sizes, kept)
        # one row of targets for each entry of `part`
        row_per_part = self.tangent.positions.rows_are_positions or count == 1
        rows = part if row_per_part else slice(part.start * count, part.stop * count)
        some, flat = None if weights is None else weights[rows], outputs.reshape(-1, self.tangent.outputs)
        if self.likelihood is None:
            factors = None if some is None else some[:, None]
        else:
            factors = curvature_weights(self.likelihood, flat, targets[rows].to(outputs.device), some)
        return factors if factors is None or row_per_part else factors.expand_as(flat).reshape_as(outputs)

    def targets_of_rows(self, sizes: tuple[int, ...], kept: Tensor | None = None) -> tuple[int, Tensor, Tensor | None]:
        """Returns the number of positions of a sample, and targets and weights of all positions, or of `kept` ones."""
        if not sizes:
            return 1, self.targets, self.weights
        places = self.tangent.positions.places(self.count, sizes)
        targets = places.targets(self.targets, self.tangent.outputs)
        weights = None if self.weights is None else self.weights.repeat_interleave(places.count)
        if kept is not None:
            targets, weights = targets[kept.flatten()], None if weights is None else weights[kept.flatten()]
        return places.count, targets, weights

    def take(self, rows: Tensor, start: int) -> Batch:
        weights = None if self.weights is None else self.weights[rows.to(self.weights.device)]
        inputs, targets = self.inputs.take(rows), self.targets[rows]
        counted = None if self.counted is None else self.counted[rows]
        return replace(self, inputs=inputs, targets=targets, start=start, counted=counted, weights=weights)

    def note(self, outputs: Tensor) -> None:
        """Keeps the next outputs (B, C) that a pass has computed, so that `rows` need not run the network again."""
        self._outputs.append(outputs)

    def rows(self, shaped: Tensor | None = None) -> dict[str, Any]:
        """Returns the arguments of `DataSummary.add`, for samples or their positions.

        `shaped` are the outputs in their own shape, if they are known. Rows may include labels that do not count, which
        have a log probability of 0.
        """
        if not self._outputs:
            shaped = self.tangent.outputs_of(self.inputs) if shaped is None else shaped
            batches.check_outputs(shaped, "these inputs")
            positions = self.tangent.positions
            self._outputs, self._sizes = [positions.rows(shaped)], positions.sizes(shaped.shape)
        _, targets, weights = self.targets_of_rows(self._sizes, self._kept)
        counted = self.counted if self._kept is None else None
        outputs = torch.cat(self._outputs)
        return {"outputs": outputs, "targets": targets, "weights": weights, "samples": self.count, "counted": counted}


class SumPass(ABC, Generic[S]):
    """A pass whose state adds over data."""

    label: str  # name of the pass on the progress bar
    limit: int | None = None  # number of the first samples that the pass needs; None means all

    in_iteration: ClassVar[bool] = False
    """Whether the pass is one step of an iteration, such as conjugate gradients. Over several processes it raises, and
    a checkpoint keeps neither this pass nor a later one."""

    def basis_tensors(self) -> Iterable[Tensor]:
        """Returns tensors, such as an eigenbasis, that the runner overwrites with the values of rank 0 on all ranks."""
        return ()

    @abstractmethod
    def init(self) -> S:
        """Returns the state of no data."""

    @abstractmethod
    def update(self, state: S, batch: Batch) -> None:
        """Adds a batch to the state, in place."""


class CurvaturePass(SumPass[S]):
    """A pass whose state is the curvature of the samples so far."""

    is_final = False
    """Whether it gives the covariance of the fit. Then early stopping repeats it for the first n samples."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    @abstractmethod
    def finish(self, state: S) -> Covariance:
        """Returns the covariance of a state, which may be overwritten. Its δ and s are provisional.

        The posterior sets both.
        """


class IteratePass(ABC, Generic[S]):
    """A pass that takes one step per batch and cycles through the data; it may end anywhere in the data.

    Over several processes it raises. A fit that was killed during the pass begins the pass again.
    """

    label: str  # name of the pass on the progress bar
    limit: ClassVar[None] = None  # it may read all samples
    steps: int  # maximum number of steps

    @abstractmethod
    def init(self) -> S:
        """Returns the first state."""

    @abstractmethod
    def step(self, state: S, batch: Batch, generator: torch.Generator) -> None:
        """Takes one step, in place."""

    def converged(self, state: S) -> bool:
        """Whether no further step is needed."""
        return False


class LabelsOfData:
    """A question: the class labels (n,) of all samples, -1 for other targets. The first one asked reads the loader."""


class SamplesSeen:
    """A question: the `Seen` of the passes so far. Before the first pass it reads a loader without a length."""


Pass = SumPass[Any] | IteratePass[Any]

Step = Pass | LabelsOfData | SamplesSeen
"""What a method yields. The answer to a pass is its finished state."""


def with_seen(problem: Problem) -> Generator[Step, Any, Problem]:
    """Returns the problem with what the passes have read so far, which its noise and its scale need."""
    return replace(problem, read=(yield SamplesSeen()))


def with_size(problem: Problem) -> Generator[Step, Any, Problem]:
    """Returns the problem with n, or unchanged if N is given: a stream may have no end."""
    return problem if problem.data_size else (yield from with_seen(problem))


class LikelihoodPass(SumPass[DataSummary]):
    """Sums the statistics of the likelihood, for the network of the fit if `tangent` is None."""

    label = "likelihood"

    def __init__(self, problem: Problem, tangent: Tangent | None = None, limit: int | None = None) -> None:
        self.limit, self._likelihood, self._tangent = limit, problem.likelihood, tangent

    def init(self) -> DataSummary:
        return DataSummary()

    def update(self, state: DataSummary, batch: Batch) -> None:
        batch = batch if self._tangent is None else replace(batch, tangent=self._tangent)
        state.add(self._likelihood, **batch.rows())


@dataclass(frozen=True)
class FitResult:
    """The result of a method that chooses its own prior or noise, or that returns more than a covariance.

    If δ, σ² or T is None, the tuning chooses it.
    """

    covariance: Covariance  # Σ at `precision`, or at a provisional δ if that is None
    precision: Tensor | None = None  # δ (n_blocks,) that the method chose
    noise_variance: float | None = None  # σ² that the method chose
    history: Mapping[str, Tensor] = field(default_factory=dict)  # for `posterior.history`, such as objectives
    summary: DataSummary | None = None  # statistics of the samples that the method chose; None means all samples
    data_factor: float = 1.0  # factor of curvature and evidence, in addition to the N/n of `data_size`
    tangent: Tangent | None = None  # a copy of the network at the new mean, if the method moved the mean
    logit_temperature: float | None = None  # T that the method chose, if it declares `chooses_temperature`


Passes = Generator[Step, Any, Covariance | FitResult]


def run_curvature_pass(step: CurvaturePass[Any]) -> Generator[Step, Any, Covariance]:
    """Yields the final pass of a method; returns its covariance."""
    step.is_final = True
    return step.finish((yield step))


class Method(Options, ABC):
    """A structure of Σ and the passes that fit it; subclasses are frozen dataclasses of options.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch, lapwing as lw
        >>> @dataclass(frozen=True)
        ... class DiagonalForMany(lw.Method):
        ...     limit: int = 1000
        ...     def passes(self, problem):
        ...         method = lw.KFAC() if problem.tangent.size <= self.limit else lw.Diagonal()
        ...         return (yield from method.passes(problem))
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> lw.fit(torch.nn.Linear(4, 3).eval(), [(x, y)], DiagonalForMany(10)).predict(x).probs.shape
        torch.Size([32, 3])
    """

    treats_last_layer: ClassVar[bool] = False
    """Whether `lw.fit` with `params=None` treats only the last layer."""

    can_change_prior: ClassVar[bool] = True
    """Whether its covariance is a `PriorCovariance`, which other methods can use at any prior."""

    chooses_temperature: ClassVar[bool] = False
    """Whether the method fits the logit temperature, so that held-out data have nothing to choose."""

    accepts_further_data: ClassVar[bool] = False
    """Whether `Posterior.update` can add data. True only if Σ is made of plain GGN sums, unlike in `EKFAC`."""

    @abstractmethod
    def passes(self, problem: Problem) -> Passes:
        """Yields passes, receives their finished states, and returns the covariance or a `FitResult`."""

    def check(self, tangent: Tangent, likelihood: Likelihood) -> None:
        """Raises if it does not support the network or likelihood. `lw.fit`, `lw.plan` and `check_within` call it."""

    def allows_early_stopping(self) -> bool:
        """Returns whether `EarlyStopping` may fit the first n samples for several n.

        True requires a final `run_curvature_pass` without a `limit`, or a method that chooses its prior.
        """
        return True

    def footprint(self, shape: FitShape) -> Footprint | None:
        """Returns the memory and the passes of a fit, from shapes, or None if they are unknown."""
        return None


def prior_covariance(method: Method, problem: Problem, option: str) -> Generator[Step, Any, PriorCovariance]:
    """Yields the passes of a method that is an option of another method; returns its covariance."""
    passes = method.passes(problem)
    try:
        step = next(passes)
        while True:
            if isinstance(step, CurvaturePass):
                step.is_final = False
            step = passes.send((yield step))
    except StopIteration as end:
        covariance = end.value.covariance if isinstance(end.value, FitResult) else end.value
    if not has_prior(covariance):
        raise _without_prior(method, option)
    return covariance


def check_within(method: Method, option: str, tangent: Tangent, likelihood: Likelihood) -> None:
    """Raises if the method cannot be an option of another method."""
    method.check(tangent, likelihood)
    if not method.can_change_prior:
        raise _without_prior(method, option)


def _without_prior(method: Method, option: str) -> LapwingError:
    return LapwingError(
        f"{option}={shown(method)} makes a covariance whose prior cannot be changed. Write {option}=lw.KFAC()."
    )
