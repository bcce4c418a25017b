"""The contract between a method and `fitting/fit.py`: what a pass over the data is, and what a method may know.

A method is a frozen dataclass whose `passes` is a generator: it yields passes, receives the finished state of each, and
returns a covariance. Two kinds of pass:

- a **sum** pass has a state that adds over data. That one fact gives batching, several processes (sum the states over
  ranks), checkpoints (write state and number of batches consumed) and resuming; none of it is the method's business.
- an **iterate** pass has a state of tensors and a step; gradients, not states, are summed over ranks.

A state is a dict of tensors and nothing else, so that one piece of code writes and reads it, and one adds it
(`add_states`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..covariance import Covariance
from ..errors import LapwingError, is_one_of, shown
from ..likelihoods import Likelihood
from ..network import batches
from ..network.gate import Checked
from ..posterior.prior import Prior
from ..tangent import Record, Tangent

State = dict[str, Tensor]

EXACT_FISHER_OUTPUTS = 1000
"""Up to this many outputs Λ is exact; above, one Monte-Carlo draw a sample stands for it."""


class FisherRoot:
    """Cotangents R (B, C, R) with `R Rᵀ = Λ` at the outputs: exact, or one Monte-Carlo column where they are many.

    Attributes:
        columns: R.
    """

    def __init__(self, likelihood: Likelihood, outputs: int, generator: torch.Generator) -> None:
        self._likelihood, self._generator = likelihood, generator
        self._exact = outputs <= EXACT_FISHER_OUTPUTS
        self.columns = outputs if self._exact else 1

    def __call__(self, outputs: Tensor) -> Tensor:
        """Returns the root at outputs (B, C)."""
        if self._exact:
            return self._likelihood.fisher_root(outputs)
        return self._likelihood.sampled_fisher_root(outputs, self._generator)


@dataclass
class Batch:
    """One batch of a pass.

    Attributes:
        tangent: the network.
        inputs: B samples that have passed the gate.
        targets: their targets.
        start: the number of samples before this batch.
        outputs: outputs met on the way, as (samples, f) for the bookkeeping of `fitting/fit.py`.
    """

    tangent: Tangent
    inputs: Any
    targets: Tensor
    start: int
    outputs: list[tuple[slice, Tensor]] = field(default_factory=list)

    @property
    def checked(self) -> Checked:
        """The inputs, for what would check them again."""
        return Checked(self.inputs, batches.size(self.inputs))

    def records(
        self, cotangents: Any = None, dtype: torch.dtype | None = None, rows_held: int = 0
    ) -> Iterator[tuple[slice, Record]]:
        """Yields records of the batch's chunks, as `Tangent.records` does."""
        for part, record in self.tangent.records(self.checked, cotangents, dtype, rows_held):
            self.outputs.append((part, record.outputs))
            yield part, record


class SumPass(ABC):
    """A pass whose state adds over data.

    Attributes:
        limit: the first so many samples are enough; None takes all.
    """

    label: str
    limit: int | None = None

    @abstractmethod
    def init(self) -> State:
        """Returns the state of no data."""

    @abstractmethod
    def update(self, state: State, batch: Batch) -> None:
        """Adds a batch to the state, in place."""


class CurvaturePass(SumPass):
    """The last pass of a method, whose state is the curvature of the data seen so far.

    So the method's covariance after the first n samples can be had for every n on the way: early stopping needs no
    more than this.
    """

    @abstractmethod
    def finish(self, state: State) -> Covariance:
        """Returns the covariance of a state, which may be used up."""


class IteratePass(ABC):
    """A pass that takes steps, cycling through the data; it ends with the last step, wherever in the data that is.

    Attributes:
        steps: how many, at most.
    """

    label: str
    steps: int

    @abstractmethod
    def init(self) -> State:
        """Returns the first state."""

    @abstractmethod
    def step(self, state: State, batch: Batch, generator: torch.Generator) -> None:
        """Takes one step, in place."""

    def converged(self, state: State) -> bool:
        """Whether no further step is needed."""
        return False


Pass = SumPass | IteratePass


def add_states(first: State, second: State) -> State:
    """Returns the state of both parts of the data: tensors add, and what one part alone has is taken as it is."""
    both = {name: first[name] + second[name] for name in first.keys() & second.keys()}
    return {**first, **second, **both}


@dataclass(frozen=True)
class Found:
    """What a method returns that chooses its own prior or noise, or has more to tell than its covariance.

    Attributes:
        covariance: Σ, at the prior precision found.
        precision: δ (n_blocks,) that the method chose; None leaves the prior to the tuning.
        noise_variance: σ² that the method chose; None leaves it to the tuning.
        history: numbers by name, such as an objective step by step: `posterior.history`.
        seen: the part of the data that curvature and evidence are of, where the method chose one; None for all.
        data_factor: what multiplies them, beside the N/n of `data_size`.
        tangent: the network at the mean that the method moved to, a copy of the user's; None leaves it where it is.
    """

    covariance: Covariance
    precision: Tensor | None = None
    noise_variance: float | None = None
    history: Mapping[str, Tensor] = field(default_factory=dict)
    seen: Seen | None = None
    data_factor: float = 1.0
    tangent: Tangent | None = None


@dataclass(frozen=True)
class Seen:
    """What the passes so far have seen of the data.

    Attributes:
        samples: n.
        statistics: the likelihood's sums over them.
    """

    samples: int
    statistics: Mapping[str, Tensor]


Passes = Generator[Pass, State, "Covariance | Found"]
CurvaturePasses = Generator[Pass, State, Covariance]


def last(step: CurvaturePass) -> CurvaturePasses:
    """Yields a method's last pass; returns its covariance."""
    return step.finish((yield step))


@dataclass(frozen=True)
class Problem:
    """What a method may know of the fit.

    Attributes:
        tangent: the network.
        likelihood: the likelihood, its noise possibly still None.
        root: cotangents whose outer products give Λ at unit noise.
        prior: δ (ones where it is to be tuned) and μ0.
        traces_wanted: whether the evidence's lower bound will be asked for.
        seed: of every random choice.
        labels: returns the class labels (n,) of the samples that the loader shows, -1 where targets are none (the first
            call goes through the loader).
        count: returns n, the number of samples that the loader shows, without going through it where it knows.
        seen: returns what the passes so far have seen; after the first one.
        temperature: τ.
        data_size: N, where the user gave it.
    """

    tangent: Tangent
    likelihood: Likelihood
    root: FisherRoot
    prior: Prior
    traces_wanted: bool
    seed: int
    labels: Callable[[], Tensor]
    count: Callable[[], int]
    seen: Callable[[], Seen]
    temperature: float = 1.0
    data_size: int | None = None

    @property
    def precision(self) -> Tensor:
        """Prior precision (n_blocks,) float64: the user's, or ones to be tuned."""
        return self.prior.precision

    @property
    def scale(self) -> float:
        """What multiplies a curvature of unit noise at that prior."""
        return (1.0 if self.likelihood.needs_noise else self.likelihood.curvature_scale) / self.temperature

    def noise_variance(self) -> float | None:
        """Returns σ², the mean squared residual where it is open; after the first pass."""
        if self.likelihood.needs_noise:
            return self.likelihood.residual_variance(dict(self.seen().statistics))
        return self.likelihood.noise_variance

    def scale_at(self, noise_variance: float | None) -> float:
        """Returns `s = N/(n σ² τ)`, what multiplies a curvature that was summed over the n samples seen."""
        factor = (self.data_size or self.count()) / self.seen().samples
        return self.likelihood.with_noise_variance(noise_variance).curvature_scale * factor / self.temperature

    def curvature_scale(self) -> float:
        """Returns s at the user's σ², or at the mean squared residual; after the first pass."""
        return self.scale_at(self.noise_variance())

    def generator(self) -> torch.Generator:
        """Returns a fresh CPU generator with the fit's seed."""
        return torch.Generator().manual_seed(self.seed)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns zeros in the accumulation dtype, where the weights are."""
        return torch.zeros(shape, dtype=dtype or self.tangent.dtype, device=self.tangent.device)

    def require(self, method: str, needed: int, what: str, instead: str) -> None:
        """Raises where a method's own tensors do not fit the memory budget."""
        if needed > self.tangent.memory:
            raise LapwingError(
                f"{method} needs {needed / 2**20:,.0f} MiB for {what}, found a budget of "
                f"{self.tangent.memory / 2**20:,.0f} MiB; pass memory={2 ** (needed - 1).bit_length()} if the machine "
                f"has it, or {instead}."
            )


class Method(ABC):
    """A structure of Σ and the way it is found; subclasses are frozen dataclasses of hyper-parameters.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch, lapwing as lw
        >>> @dataclass(frozen=True)
        ... class DiagonalForMany(lw.Method):
        ...     most: int = 1000
        ...     def passes(self, problem):
        ...         method = lw.KFAC() if problem.tangent.size <= self.most else lw.Diagonal()
        ...         return (yield from method.passes(problem))
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> lw.fit(torch.nn.Linear(4, 3).eval(), [(x, y)], DiagonalForMany(10)).predict(x).probs.shape
        torch.Size([32, 3])
    """

    @abstractmethod
    def passes(self, problem: Problem) -> Passes:
        """Yields passes, receives their finished states, and returns the covariance, or what was found with it."""


def class_labels(inputs: Any, targets: Any) -> Tensor:
    """Returns a batch's class labels (B,) int64 on the CPU, -1 where targets are none."""
    if isinstance(targets, Tensor) and targets.ndim == 1 and not (targets.is_floating_point() or targets.is_meta):
        return targets.cpu().long()
    return torch.full((batches.size(inputs),), -1)


def check_count(method: str, name: str, value: Any) -> None:
    """Raises for a hyper-parameter that is no positive whole number (case 15)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LapwingError(
            f"Asked for {method}({name}={shown(value)}); a whole number of at least 1 is needed: write "
            f"{method}({name}=20)."
        )


def check_choice(method: str, name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    """Raises for a hyper-parameter that is not one of the accepted labels (case 15)."""
    if not is_one_of(value, accepted):
        raise LapwingError(
            f"Asked for {method}({name}={shown(value)}); accepted are {', '.join(map(repr, accepted))}: write "
            f"{method}({name}={accepted[0]!r})."
        )
