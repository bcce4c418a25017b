"""The contract between a method and `fitting/runner.py`: what a pass over the data is.

A method is a frozen dataclass whose `passes` is a generator: it yields passes, receives the finished state of each, and
returns a covariance. There are two kinds of pass:

- a **sum** pass has a state that adds over data. So a method does nothing for batches, ranks, checkpoints and resuming.
- an **iterate** pass has a state, a random generator and a step. It runs in one process, and a checkpoint keeps only
  its end.

A state is a dataclass of tensors (`state.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor

from ..covariance import Covariance, PriorCovariance, has_prior
from ..data import batches
from ..errors import LapwingError, shown
from ..likelihoods import Likelihood, apply_weights, curvature_weights
from ..network.gate import Checked
from ..options import Options
from ..tangent import Record, Tangent
from .footprint import FitShape, Footprint
from .problem import FisherByParts, FisherRoot, Problem
from .state import DataSummary, S


@dataclass
class Batch:
    """One batch of a pass.

    Attributes:
        tangent: the network.
        inputs: B samples that have passed the gate.
        targets: their targets.
        start: the number of samples before this batch.
        counted: of outputs with positions, which targets count, as `Likelihood.labelled` says; None for all.
        weights: sample weights w (B,); None for ones.
        likelihood: p(y|f), whose weights of targets count too; None where they do not.
        round: how often the data were gone through before.
    """

    tangent: Tangent
    inputs: Any
    targets: Tensor
    start: int
    counted: Tensor | None = None
    weights: Tensor | None = None
    likelihood: Likelihood | None = None
    round: int = 0
    _outputs: list[tuple[slice, Tensor]] = field(default_factory=list)
    _rows: Tensor | None = None
    _kept: Tensor | None = None
    _sizes: tuple[int, ...] | None = None

    @property
    def checked(self) -> Checked:
        """The inputs, for what would check them again."""
        return Checked(self.inputs, batches.size(self.inputs))

    @property
    def count(self) -> int:
        """The number of samples, B."""
        return batches.size(self.inputs)

    def records(
        self, cotangents: Any = None, dtype: torch.dtype | None = None, scratch_per_sample: int = 0
    ) -> Iterator[tuple[slice, Record]]:
        """Yields records of the batch's chunks, as `Tangent.records` does; cotangents are multiplied by √w.

        Where positions are samples, those of the fit's Fisher root are of positions alone whose targets count.
        """
        positions, self._rows = self.tangent.positions, None
        if positions is None:
            for part, record in self.tangent.records(self.checked, cotangents, dtype, scratch_per_sample):
                self.note(record.outputs, part)
                self._weigh(record, None if cotangents is None else self.curvature_weights(record.outputs, part))
                yield part, record
            return
        kept = self.counted if positions.direct and isinstance(cotangents, (FisherRoot, FisherByParts)) else None
        kept = None if kept is None else kept.flatten(1)
        noted: list[Tensor] = []
        for part, record in self.tangent.records(self.checked, cotangents, dtype, scratch_per_sample, kept):
            if cotangents is not None:
                noted.append(record.outputs.reshape(-1, positions.outputs))
                self._weigh(record, self._weights_at(record, part, kept))
            self._sizes = record.sizes
            yield part, record
        self._rows, self._kept = (torch.cat(noted), kept) if noted else (None, None)

    def _weigh(self, record: Record, weights: Tensor | None) -> None:
        """Multiplies a record's cotangents by the roots of weights (B, 1) or (B, C), which it keeps."""
        if weights is not None:
            record.weigh(weights.sqrt())
            record.weights = weights

    def _weights_at(self, record: Record, part: slice, kept: Tensor | None) -> Tensor | None:
        """Returns what multiplies Λ of a record with positions, of rows (N, 1) or (N, C), or of samples (B, T C)."""
        if self.likelihood is None and self.weights is None:
            return None
        positions, sizes = self.tangent.positions, record.sizes
        assert positions is not None
        assert sizes is not None
        places = positions.places(batches.size(self.inputs), sizes)
        weights = None if self.weights is None else self.weights.repeat_interleave(places.count)
        rows = part if positions.direct else slice(part.start * places.count, part.stop * places.count)
        targets = places.targets(self.targets, positions.outputs)
        if kept is not None:
            targets = targets[kept.flatten()]
            weights = None if weights is None else weights[kept.flatten()]
        some, outputs = None if weights is None else weights[rows], record.outputs.reshape(-1, positions.outputs)
        if self.likelihood is None:
            every = None if some is None else some[:, None]
        else:
            every = curvature_weights(self.likelihood, outputs, targets[rows], some)
        return every if every is None or positions.direct else every.expand_as(outputs).reshape_as(record.outputs)

    def curvature_weights(self, outputs: Tensor, part: slice = slice(None)) -> Tensor | None:
        """Returns what multiplies Λ, for each sample of a part (B, 1) or each of its outputs (B, C); None for ones."""
        weights = None if self.weights is None else self.weights[part]
        if self.likelihood is None:
            return None if weights is None else weights[:, None]
        return curvature_weights(self.likelihood, outputs, self.targets[part].to(outputs.device), weights)

    def weighted(self, values: Tensor, part: slice = slice(None)) -> Tensor:
        """Returns values of a part (B, ...), each times its sample's weight."""
        return values if self.weights is None else apply_weights(values, self.weights[part])

    def take(self, rows: Tensor, start: int) -> Batch:
        """Returns the batch of some of the samples."""
        weights = None if self.weights is None else self.weights[rows.to(self.weights.device)]
        inputs = batches.take(self.inputs, rows)
        counted = None if self.counted is None else self.counted[rows]
        return Batch(self.tangent, inputs, self.targets[rows], start, counted, weights, self.likelihood)

    def note(self, outputs: Tensor, part: slice | None = None) -> None:
        """Keeps outputs that a pass has computed, of all samples or a part, so that `outputs` need not run again."""
        self._outputs.append((part or slice(0, len(outputs)), outputs))

    def outputs(self) -> Tensor:
        """Returns the network's outputs (B, C): those that the pass has noted, or else those of a forward pass."""
        if sum(part.stop - part.start for part, _ in self._outputs) == batches.size(self.inputs):
            return torch.cat([outputs for _, outputs in sorted(self._outputs, key=lambda item: item[0].start)])
        outputs = self.tangent.outputs_of(self.inputs)
        batches.check_outputs(outputs, "these inputs")
        self._outputs = [(slice(0, len(outputs)), outputs)]
        return outputs

    def rows(self) -> dict[str, Any]:
        """Returns outputs (N, C), targets and weights of samples, or of positions of samples, as `DataSummary.add` has.

        Labels that do not count may be among them, with a log probability of 0.
        """
        positions, samples = self.tangent.positions, batches.size(self.inputs)
        if positions is None:
            return {"outputs": self.outputs(), "targets": self.targets, "weights": self.weights, "samples": samples}
        outputs, kept = self._rows, self._kept
        if outputs is None or self._sizes is None:
            shaped = self.outputs()
            self._sizes, outputs, kept = positions.sizes(shaped.shape), positions.rows(shaped), None
        places = positions.places(samples, self._sizes)
        targets = places.targets(self.targets, positions.outputs)
        weights = None if self.weights is None else self.weights.repeat_interleave(places.count)
        if kept is not None:
            targets, weights = targets[kept.flatten()], None if weights is None else weights[kept.flatten()]
        return {"outputs": outputs, "targets": targets, "weights": weights, "samples": samples}


class SumPass(ABC, Generic[S]):
    """A pass whose state adds over data.

    Attributes:
        label: what the progress bar calls it.
        limit: how many of the first samples it needs; None for all.
        in_iteration: whether the pass is one step of an iteration, such as conjugate gradients. Then it runs in one
            process, and a checkpoint keeps neither this pass nor a later one.
    """

    label: str
    limit: int | None = None
    in_iteration: ClassVar[bool] = False

    def basis_tensors(self) -> Iterable[Tensor]:
        """Returns tensors that the pass reads and that rounding may change between machines, such as an eigenbasis.

        Before the pass, rank 0's numbers are written into them on all ranks.
        """
        return ()

    @abstractmethod
    def init(self) -> S:
        """Returns the state of no data."""

    @abstractmethod
    def update(self, state: S, batch: Batch) -> None:
        """Adds a batch to the state, in place."""


class CurvaturePass(SumPass[S]):
    """The final pass of a method, whose state is the curvature of the samples so far.

    So the covariance of the first n samples is available for every n on the way, which early stopping uses.
    """

    @abstractmethod
    def finish(self, state: S) -> Covariance:
        """Returns the covariance of a state; the state may be overwritten."""


class IteratePass(ABC, Generic[S]):
    """A pass that takes steps and cycles through the data; it ends after its final step, anywhere in the data.

    It runs in one process. A fit that was killed during the pass begins the pass again.

    Attributes:
        label: what the progress bar calls it.
        steps: how many, at most.
    """

    label: str
    steps: int

    @abstractmethod
    def init(self) -> S:
        """Returns the first state."""

    @abstractmethod
    def step(self, state: S, batch: Batch, generator: torch.Generator) -> None:
        """Takes one step, in place."""

    def converged(self, state: S) -> bool:
        """Whether no further step is needed."""
        return False


Pass = SumPass[Any] | IteratePass[Any]


class LikelihoodPass(SumPass[DataSummary]):
    """Sums the likelihood's statistics.

    Args:
        problem: for the likelihood.
        tangent: the network; None for the fit's.
        limit: how many of the first samples; None for all.
    """

    label = "likelihood"

    def __init__(self, problem: Problem, tangent: Tangent | None = None, limit: int | None = None) -> None:
        self.limit, self._likelihood, self._tangent = limit, problem.likelihood, tangent

    def init(self) -> DataSummary:
        return DataSummary()

    def update(self, state: DataSummary, batch: Batch) -> None:
        if self._tangent is not None:
            batch = Batch(
                self._tangent, batch.inputs, batch.targets, batch.start, batch.counted, batch.weights, batch.likelihood
            )
        state.add(self._likelihood, **batch.rows())


@dataclass(frozen=True)
class FitResult:
    """What a method returns that chooses its own prior or noise, or that returns more than a covariance.

    Attributes:
        covariance: Σ, at the prior precision chosen.
        precision: δ (n_blocks,) that the method chose; None leaves the prior to the tuning.
        noise_variance: σ² that the method chose; None leaves it to the tuning.
        history: numbers by name, such as an objective step by step: `posterior.history`.
        summary: of the samples whose curvature and evidence these are, if the method chose them; None for all.
        data_factor: a factor of both, beside the N/n of `data_size`.
        tangent: the network at the mean that the method moved to, a copy of the user's; None leaves it where it is.
        logit_temperature: T that the method chose, which it declares by `chooses_temperature`; None leaves it to the
            tuning.
    """

    covariance: Covariance
    precision: Tensor | None = None
    noise_variance: float | None = None
    history: Mapping[str, Tensor] = field(default_factory=dict)
    summary: DataSummary | None = None
    data_factor: float = 1.0
    tangent: Tangent | None = None
    logit_temperature: float | None = None


Passes = Generator[Pass, Any, Covariance | FitResult]
CurvaturePasses = Generator[Pass, Any, Covariance]


def run_curvature_pass(step: CurvaturePass[Any]) -> CurvaturePasses:
    """Yields a method's final pass; returns its covariance."""
    return step.finish((yield step))


class Method(Options, ABC):
    """A structure of Σ and the passes that fit it; subclasses are frozen dataclasses of hyper-parameters.

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
    """Whether `lw.fit` treats the last layer in place of everything where `params` is None."""

    can_change_prior: ClassVar[bool] = True
    """Whether its covariance is a `PriorCovariance`, so that other methods can take it at any prior."""

    chooses_temperature: ClassVar[bool] = False
    """Whether it takes the logit temperature from the data of the fit, so that held-out data have nothing to choose."""

    accepts_further_data: ClassVar[bool] = True
    """Whether `Posterior.update` can add data: the curvature is a sum over the data, on a structure that stays."""

    @abstractmethod
    def passes(self, problem: Problem) -> Passes:
        """Yields passes, receives their finished states, and returns the covariance or a `FitResult`."""

    def check(self, tangent: Tangent, likelihood: Likelihood) -> None:
        """Raises for a network or a likelihood that the method is not for. `lw.plan` calls it, and `passes` begins so.

        Raises:
            LapwingError: says what is wrong and what to do.
        """

    def allows_early_stopping(self) -> bool:
        """Returns whether `EarlyStopping` may fit the first n samples for several n.

        It may where the last pass is a `CurvaturePass` over all data, which sums their curvature on the way, or where
        the method chooses the prior itself, and no tuning follows.
        """
        return True

    def footprint(self, shape: FitShape) -> Footprint | None:
        """Returns the memory and the passes of a fit, from shapes, or None if they are unknown."""
        return None


def prior_covariance(method: Method, problem: Problem, option: str) -> Generator[Pass, Any, PriorCovariance]:
    """Yields the passes of the method in another one's option; returns its covariance, whose prior can be changed.

    Raises:
        LapwingError: for a method that makes a covariance without a prior.
    """
    result = yield from method.passes(problem)
    covariance = result.covariance if isinstance(result, FitResult) else result
    if not has_prior(covariance):
        raise _without_prior(method, option)
    return covariance


def check_within(method: Method, option: str, tangent: Tangent, likelihood: Likelihood) -> None:
    """Raises where the method cannot be another one's option, by what it declares."""
    method.check(tangent, likelihood)
    if not method.can_change_prior:
        raise _without_prior(method, option)


def _without_prior(method: Method, option: str) -> LapwingError:
    return LapwingError(
        f"{option}={shown(method)} makes a covariance whose prior cannot be changed. Write {option}=lw.KFAC()."
    )
