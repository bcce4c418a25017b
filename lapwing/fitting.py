"""fit(): runs a method's passes over the data, tunes what is None, and returns a posterior."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from . import batches
from .batches import Forward
from .covariance import Covariance
from .errors import LapwingError
from .likelihoods import Categorical, Gaussian, Likelihood, resolve
from .methods import KFAC, Batch, CurvaturePass, FisherRoot, IteratePass, Method, Pass, Problem, State, SumPass
from .methods.passes import class_labels
from .posterior import Posterior
from .prior import Prior, is_positive
from .tangent import LastLayer, Predicate, Tangent, everything, last_layer
from .tangent.eager import outside_inference
from .tuning import BoundedEvidence, Training, Tuning

log = logging.getLogger("lapwing")


@outside_inference
def fit(
    model: nn.Module,
    loader: Iterable[Any],
    method: Method | None = None,
    *,
    likelihood: str | Likelihood | None = None,
    params: Predicate | LastLayer | None = None,
    prior_precision: float | Mapping[str, float] | None = None,
    prior_mean: float | Mapping[str, Tensor] = 0.0,
    tune: Tuning | None = BoundedEvidence(),  # noqa: B008 (frozen)
    data_size: int | None = None,
    weight_decay: float | None = None,
    temperature: float = 1.0,
    forward: Forward | None = None,
    memory: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Posterior:
    """Fits a Gaussian `N(θ̂, Σ)` over the weights of a trained network, which is not touched.

    Args:
        model: the trained network, in eval mode. Outputs (B, C).
        loader: the training data: an iterable of (inputs, targets) batches that can be gone through several times.
        method: the structure of Σ and how it is found; KFAC when None.
        likelihood: "categorical", "gaussian" or an instance; None infers it from the targets' dtype.
        params: which parameters to treat; None means the last layer where `method` is None, else everything.
        prior_precision: δ, in 1/weight²: a number, or {block or parameter pattern: number}; None is tuned.
        prior_mean: μ0, a number for all weights or {parameter: tensor} (others 0).
        tune: how what is None is tuned: `BoundedEvidence()` and `Evidence()` without held-out data, with them
            `Validation(loader)` or `EarlyStopping(loader)`; None for δ = 1 and σ² the mean squared residual.
        data_size: N where the loader shows only n of N training points: G and the likelihood are scaled by N/n.
        weight_decay: γ, sets `δ = N γ`.
        temperature: τ, `Σ = (G/τ + Δ)⁻¹`; above 1 widens.
        forward: `forward(model, inputs)` where `model(x)`, `model(*x)` or `model(**x)` does not do.
        memory: budget in bytes for one chunk of samples and for a method's own large tensors; 1 GiB when None.
        seed: of every random choice.
        progress: show a bar; None shows one on a terminal.

    Returns:
        An immutable posterior.

    Raises:
        LapwingError: for bad input, in one sentence; nothing is left half-written.

    Cost: the method's passes over the data, each about 1 + C passes of the network; see the method.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(32, 4), torch.randint(3, (32,))
        >>> model = torch.nn.Linear(4, 3).eval()
        >>> lw.fit(model, [(x, y)]).predict(x).probs.shape
        torch.Size([32, 3])
    """
    method, params = _method_and_params(method, params)
    _check_numbers(prior_precision, weight_decay, temperature, data_size, seed)
    _check_choices(tune, forward)
    seed = int(seed)
    first = _first_batch(loader)
    inputs, targets = batches.split(first)
    likelihood = _infer_likelihood(targets) if likelihood is None else resolve(likelihood)
    tangent = Tangent.survey(model, inputs, params, forward, memory)
    runner = _Runner(loader, progress, 0 if tune is None else tune.prefixes)
    if weight_decay is not None:
        prior_precision = (data_size or len(runner.labels())) * weight_decay
    prior = Prior.read(tangent, prior_precision, prior_mean)
    scale = 1.0 if likelihood.needs_noise else likelihood.curvature_scale
    generator = torch.Generator(tangent.device).manual_seed(seed)
    root = FisherRoot(likelihood, tangent.outputs, generator)
    if tangent.outputs > root.columns:
        log.info("%d outputs: the Fisher information is sampled, one draw an input", tangent.outputs)

    def curvature_scale() -> float:
        noise = likelihood.residual_variance(runner.statistics) if likelihood.needs_noise else likelihood.noise_variance
        factor = 1.0 if data_size is None else data_size / runner.samples
        return likelihood.with_noise_variance(noise).curvature_scale * factor / temperature

    traces = tune is not None and tune.reads_evidence(not prior.given, likelihood.needs_noise)
    problem = Problem(
        tangent, likelihood, root, prior.precision, scale / temperature, traces, seed, runner.labels,
        curvature_scale,
    )  # fmt: skip
    covariance = runner.run(method, problem)

    def posterior(covariance: Covariance, statistics: dict[str, Tensor], samples: int, size: int | None) -> Posterior:
        return Posterior.assemble(
            tangent, covariance, likelihood, prior, statistics, samples, size, float(temperature), method
        )

    whole = posterior(covariance, runner.statistics, runner.samples, data_size)
    if tune is None:
        return whole if whole.tuned else whole.with_defaults()
    parts = sorted(runner.prefixes().items())
    unscaled = parts if whole.data_factor > 1 else parts[:-1]  # all of the data is a part where `whole` is scaled
    prefixes = tuple(posterior(*found, samples, None) for samples, found in unscaled)
    return tune.tune(whole, Training(loader, prefixes))


class _Runner:
    """Drives a method's generator: goes through the data for each pass, and sums the likelihood's statistics once.

    It is the one place that knows batches consumed and states, so checkpoints and ranks belong here and nowhere else.
    """

    def __init__(self, loader: Iterable[Any], progress: bool | None, prefixes: int = 0) -> None:
        self._loader = loader
        self._bar = sys.stderr.isatty() if progress is None else progress
        self._parts = prefixes
        self._expected: int | None = None
        self._labels: Tensor | None = None
        self._statistics_at: dict[int, dict[str, Tensor]] = {}
        self._covariance_at: dict[int, Covariance] = {}
        self.statistics: dict[str, Tensor] = {}
        self.samples = 0

    def labels(self) -> Tensor:
        """Returns the n class labels, -1 where targets are none; goes through the loader the first time."""
        if self._labels is None:
            found = [torch.zeros(0, dtype=torch.int64)]
            for batch in self._loader:
                found.append(class_labels(*batches.split(batch)))
            self._labels = torch.cat(found)
            self._check_size(len(self._labels), "to count its samples")
        return self._labels

    def prefixes(self) -> dict[int, tuple[Covariance, dict[str, Tensor]]]:
        """Returns covariance and statistics of the first samples alone, by their number."""
        kept = self._covariance_at.items()
        return {n: (covariance, self._statistics_at[n]) for n, covariance in kept if n in self._statistics_at}

    def run(self, method: Method, problem: Problem) -> Covariance:
        """Runs all passes; returns what the method makes of them."""
        passes = method.passes(problem)
        state: State | None = None
        while True:
            try:
                step = next(passes) if state is None else passes.send(state)
            except StopIteration as stop:
                if not self.samples:
                    self._sum(_NoPass(), problem)
                return stop.value
            state = self._sum(step, problem) if isinstance(step, SumPass) else self._iterate(step, problem)

    def _sum(self, step: SumPass, problem: Problem) -> State:
        state = step.init()
        start = 0
        with torch.no_grad():
            for batch in self._batches(step, problem):
                step.update(state, batch)
                start += batches.size(batch.inputs)
                if not self.samples:
                    self._note(batch, problem)
                if start in self._stops():
                    self._keep(start, step, state)
        self._finish(start, step)
        return state

    def _stops(self) -> frozenset[int]:
        """Numbers of samples after which sums are kept: n, a half, a quarter, ... of them."""
        if not self._parts:
            return frozenset()
        return frozenset(max(1, len(self.labels()) >> i) for i in range(self._parts + 1))

    def _keep(self, samples: int, step: SumPass, state: State) -> None:
        if not self.samples:
            self._statistics_at[samples] = {name: value.clone() for name, value in self.statistics.items()}
        if isinstance(step, CurvaturePass):
            self._covariance_at[samples] = step.finish({name: value.clone() for name, value in state.items()})

    def _iterate(self, step: IteratePass, problem: Problem) -> State:
        state = step.init()
        generator = torch.Generator(problem.tangent.device).manual_seed(problem.seed)
        taken = 0
        while taken < step.steps:
            start = 0
            for batch in self._batches(step, problem):
                if taken >= step.steps and self.samples:
                    return state
                if taken < step.steps:
                    step.step(state, batch, generator)
                start, taken = start + batches.size(batch.inputs), taken + 1
                if not self.samples:
                    self._note(batch, problem)
            self._finish(start, step)
        return state

    def _batches(self, step: Pass, problem: Problem) -> Iterator[Batch]:
        """Goes through the loader once."""
        try:
            total = len(self._loader)  # type: ignore[arg-type]
        except TypeError:  # none, or a DataLoader over an iterable data set
            total = None
        start, weight = 0, next(iter(problem.tangent.parameters.values()))
        stops = self._stops() if isinstance(step, SumPass) else frozenset()
        bar = tqdm(self._loader, desc=step.label, total=total, disable=not self._bar, leave=False)
        for number, raw in enumerate(bar, 1):
            inputs, targets = batches.split(raw)
            samples = batches.size(inputs)
            batches.check_inputs(inputs, weight, f"the inputs of batch number {number}")
            if self._expected is not None and start + samples > self._expected:
                self._check_size(start + samples, f"for the pass '{step.label}'")
            cuts = sorted({0, samples, *(stop - start for stop in stops if start < stop < start + samples)})
            for first, end in pairwise(cuts):
                rows = slice(first, end)
                part = inputs if end - first == samples else batches.take(inputs, rows)
                yield Batch(problem.tangent, part, targets[rows], start + first)
            start += samples

    def _note(self, batch: Batch, problem: Problem) -> None:
        """Checks a batch's targets and adds its statistics, from outputs met on the way or a forward pass."""
        met = sum(part.stop - part.start for part, _ in batch.outputs)
        if met == batches.size(batch.inputs):
            outputs = torch.cat([outputs for _, outputs in sorted(batch.outputs, key=lambda item: item[0].start)])
        else:
            outputs = batch.tangent.outputs_of(batch.inputs)
            batches.check_outputs(outputs, "these inputs")
        likelihood = problem.likelihood
        likelihood.check(outputs, batch.targets)
        for name, value in likelihood.statistics(outputs, batch.targets).items():
            self.statistics[name] = self.statistics.get(name, 0) + value

    def _finish(self, samples: int, step: Pass) -> None:
        self._check_size(samples, f"for the pass '{step.label}'")
        self.samples = samples

    def _check_size(self, samples: int, why: str) -> None:
        """Notes n the first time; raises when the loader shows nothing, or another number (case 9)."""
        if samples and samples == (self._expected or samples):
            self._expected = samples
            return
        before = "a first batch" if self._expected is None else f"{self._expected} samples"
        raise LapwingError(
            f"Asked to go through the loader again {why}, found {samples} samples after {before} the first time; every "
            "pass needs the same data: pass a DataLoader or a list of batches, not a generator."
        )


class _NoPass(SumPass):
    """What a method that needs no pass still gets: the likelihood's statistics."""

    label = "likelihood"

    def init(self) -> State:
        return {}

    def update(self, state: State, batch: Batch) -> None:
        """Adds nothing."""


def _method_and_params(method: Any, params: Any) -> tuple[Method, Predicate | LastLayer]:
    if isinstance(method, type) and issubclass(method, Method):
        raise LapwingError(
            f"Asked for method={method.__name__}, found the class; an instance with its options is needed: write "
            f"lw.{method.__name__}()."
        )
    if method is not None and not isinstance(method, Method):
        raise LapwingError(
            f"Asked for method={method!r}; accepted are lw.Full(), lw.Diagonal(), lw.KFAC(), lw.EKFAC(), "
            "lw.ELLA(rank=20, rows=200), lw.OptimalSubspace(rank=20) and lw.SubsetOfWeights(size=100): write "
            "method=lw.KFAC()."
        )
    if params is None:
        params = last_layer if method is None else everything
    return method or KFAC(), params


def _check_numbers(
    prior_precision: Any, weight_decay: float | None, temperature: float, data_size: int | None, seed: Any
) -> None:
    """Raises for numbers out of range (case 15)."""
    numbers = {"weight_decay": weight_decay, "temperature": temperature}
    if not isinstance(prior_precision, Mapping):
        numbers["prior_precision"] = prior_precision
    for name, value in numbers.items():
        if not (is_positive(value) or (value is None and name != "temperature")):
            raise LapwingError(
                f"Asked for {name}={value!r}; a positive finite number is needed: write {name}=1.0, or leave it out."
            )
    if data_size is not None and not (is_positive(data_size) and isinstance(data_size, Integral)):
        raise LapwingError(
            f"Asked for data_size={data_size!r}; a whole number, the size of the training set, is needed: write "
            "data_size=len(dataset), or leave it out."
        )
    if prior_precision is not None and weight_decay is not None:
        raise LapwingError(
            f"Asked for prior_precision={prior_precision} and weight_decay={weight_decay}; one of them is accepted, "
            "since weight_decay sets the prior precision to N times itself: leave one out."
        )
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**63:
        raise LapwingError(f"Asked for seed={seed!r}; a whole number from 0 to 2**63 - 1 is needed: write seed=0.")


def _check_choices(tune: Any, forward: Any) -> None:
    """Raises for a tuning or a forward that is none (case 15)."""
    if tune is not None and not isinstance(tune, Tuning):
        raise LapwingError(
            f"Asked for tune={tune!r}; accepted are lw.BoundedEvidence(), lw.Evidence(), lw.Validation(loader), "
            "lw.EarlyStopping(loader) and None: write tune=lw.BoundedEvidence()."
        )
    if forward is not None and not callable(forward):
        raise LapwingError(
            f"Asked for forward={forward!r}; a function of the model and a batch's inputs is needed: write "
            "forward=lambda model, inputs: model(inputs)."
        )


def _first_batch(loader: Any) -> Any:
    """Returns the first batch, and makes sure that the loader begins again (cases 8 and 9)."""
    if not hasattr(loader, "__iter__") or isinstance(loader, (Tensor, Mapping)):
        raise LapwingError(
            f"Asked to fit on a loader, found {batches.describe(loader)}; an iterable of (inputs, targets) batches is "
            "needed: write [(x, y)] for one batch, or torch.utils.data.DataLoader(dataset, batch_size=100)."
        )
    if isinstance(loader, tuple) and len(loader) == 2 and all(isinstance(item, Tensor) for item in loader):
        raise LapwingError(
            f"Asked to fit on a loader, found one batch, {batches.describe(loader)}; an iterable of batches is needed: "
            "write [(x, y)]."
        )
    iterator = iter(loader)
    if iterator is loader or (not isinstance(loader, DataLoader) and iter(loader) is iterator):
        raise LapwingError(
            f"Asked to fit on a loader of type {type(loader).__name__}, found that it can be gone through once only; "
            "every pass needs the same data: pass a DataLoader or a list of batches, not a generator."
        )
    for batch in iterator:
        if batches.size(batches.split(batch)[0]) == 0:
            raise LapwingError(
                "Asked to fit on a loader, found a first batch without samples; at least one is needed: check the "
                "dataset's length and filters."
            )
        return batch
    raise LapwingError(
        f"Asked to fit on a loader of type {type(loader).__name__}, found no batch in it; at least one is needed: "
        "check the dataset's length, and drop_last=True with a batch size above it."
    )


def _infer_likelihood(targets: Any) -> Likelihood:
    if isinstance(targets, Tensor):
        return Gaussian() if targets.is_floating_point() else Categorical()
    raise LapwingError(
        f"Asked to infer the likelihood from targets, found {batches.describe(targets)}; a tensor is needed: floats "
        "for likelihood='gaussian', integers for likelihood='categorical'."
    )
