"""fit(): runs a method's passes over the data, tunes what is None, and returns a posterior."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from . import batches
from .batches import Forward
from .covariance import Covariance
from .errors import LapwingError
from .likelihoods import Categorical, Gaussian, Likelihood, resolve
from .methods import KFAC, Batch, FisherRoot, IteratePass, Method, Pass, Problem, State, SumPass
from .posterior import Posterior, Prior
from .tangent import LastLayer, Predicate, Tangent, everything, last_layer
from .tuning import Evidence, Tuning

log = logging.getLogger("lapwing")


def fit(
    model: nn.Module,
    loader: Iterable[Any],
    method: Method | None = None,
    *,
    likelihood: str | Likelihood | None = None,
    params: Predicate | LastLayer | None = None,
    prior_precision: float | Mapping[str, float] | None = None,
    prior_mean: float | Mapping[str, Tensor] = 0.0,
    tune: Tuning | None = Evidence(),  # noqa: B008 (frozen)
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
        tune: how what is None is tuned: `Evidence()`, `Validation(loader)`, or None (δ = 1, σ² = mean squared residual).
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
    first = _first_batch(loader)
    inputs, targets = batches.split(first)
    likelihood = _infer_likelihood(targets) if likelihood is None else resolve(likelihood)
    tangent = Tangent.survey(model, inputs, params, forward, memory)
    counted: list[int] = []

    def count() -> int:
        if not counted:
            counted.append(sum(batches.size(batches.split(batch)[0]) for batch in loader))
        return counted[0]

    if weight_decay is not None:
        prior_precision = (data_size or count()) * weight_decay
    prior = Prior.read(tangent, prior_precision, prior_mean)
    scale = 1.0 if likelihood.needs_noise else likelihood.curvature_scale
    generator = torch.Generator(tangent.device).manual_seed(seed)
    root = FisherRoot(likelihood, tangent.outputs, generator)
    if tangent.outputs > root.columns:
        log.info("%d outputs: the Fisher information is sampled, one draw an input", tangent.outputs)
    problem = Problem(
        tangent, likelihood, root, prior.precision, scale / temperature, isinstance(tune, Evidence), seed, count
    )
    runner = _Runner(problem, loader, progress)
    covariance = runner.run(method)
    posterior = Posterior.assemble(
        tangent, covariance, likelihood, prior, runner.statistics, runner.samples, data_size, temperature, method
    )
    return posterior if posterior.tuned else (tune.tune(posterior) if tune is not None else posterior.with_defaults())


class _Runner:
    """Drives a method's generator: goes through the data for each pass, and sums the likelihood's statistics once.

    It is the one place that knows batches consumed and states, so checkpoints and ranks belong here and nowhere else.
    """

    def __init__(self, problem: Problem, loader: Iterable[Any], progress: bool | None) -> None:
        self._problem, self._loader = problem, loader
        self._bar = sys.stderr.isatty() if progress is None else progress
        self.statistics: dict[str, Tensor] = {}
        self.samples = 0

    def run(self, method: Method) -> Covariance:
        """Runs all passes; returns what the method makes of them."""
        passes = method.passes(self._problem)
        state: State | None = None
        while True:
            try:
                step = passes.send(state)
            except StopIteration as stop:
                return stop.value
            state = self._sum(step) if isinstance(step, SumPass) else self._iterate(step)

    def _sum(self, step: SumPass) -> State:
        state = step.init()
        start = 0
        with torch.no_grad():
            for inputs, targets in self._batches(step):
                batch = Batch(self._problem.tangent, inputs, targets, start)
                step.update(state, batch)
                start += batches.size(inputs)
                if not self.samples:
                    self._note(batch)
        self._check_size(start, step)
        return state

    def _iterate(self, step: IteratePass) -> State:
        state = step.init()
        generator = torch.Generator(self._problem.tangent.device).manual_seed(self._problem.seed)
        taken = 0
        while taken < step.steps:
            start = 0
            for inputs, targets in self._batches(step):
                if taken == step.steps and self.samples:
                    return state
                batch = Batch(self._problem.tangent, inputs, targets, start)
                if taken < step.steps:
                    step.step(state, batch, generator)
                start, taken = start + batches.size(inputs), taken + 1
                if not self.samples:
                    self._note(batch)
            self._check_size(start, step)
        return state

    def _batches(self, step: Pass) -> Iterator[tuple[Any, Tensor]]:
        total = len(self._loader) if hasattr(self._loader, "__len__") else None
        for batch in tqdm(self._loader, desc=step.label, total=total, disable=not self._bar, leave=False):
            yield batches.split(batch)

    def _note(self, batch: Batch) -> None:
        """Checks a batch's targets and adds its statistics, from outputs met on the way or a forward pass."""
        met = sum(part.stop - part.start for part, _ in batch.outputs)
        if met == batches.size(batch.inputs):
            outputs = torch.cat([outputs for _, outputs in sorted(batch.outputs, key=lambda item: item[0].start)])
        else:
            batches.check_inputs(batch.inputs, next(iter(batch.tangent.parameters.values())), "the inputs")
            outputs = batch.tangent.outputs_of(batch.inputs)
            batches.check_outputs(outputs, "these inputs")
        likelihood = self._problem.likelihood
        likelihood.check(outputs, batch.targets)
        for name, value in likelihood.statistics(outputs, batch.targets).items():
            self.statistics[name] = self.statistics.get(name, 0) + value

    def _check_size(self, samples: int, step: Pass) -> None:
        """Notes n after the first pass; raises when a later pass shows another number (case 9)."""
        if not self.samples:
            self.samples = samples
        if samples == self.samples:
            return
        raise LapwingError(
            f"Asked to go through the loader again for the pass '{step.label}', found {samples} samples after "
            f"{self.samples} the first time; every pass needs the same data: pass a DataLoader or a list of batches, not "
            "a generator."
        )


def _method_and_params(method: Any, params: Any) -> tuple[Method, Predicate | LastLayer]:
    if isinstance(method, type) and issubclass(method, Method):
        raise LapwingError(
            f"Asked for method={method.__name__}, found the class; an instance with its options is needed: write "
            f"lw.{method.__name__}()."
        )
    if method is not None and not isinstance(method, Method):
        raise LapwingError(
            f"Asked for method={method!r}; accepted are lw.Full(), lw.Diagonal(), lw.KFAC(), lw.EKFAC() and "
            "lw.ELLA(rank=20, rows=200): write method=lw.KFAC()."
        )
    if params is None:
        params = last_layer if method is None else everything
    return method or KFAC(), params


def _check_numbers(
    prior_precision: Any, weight_decay: float | None, temperature: float, data_size: int | None, seed: Any
) -> None:
    """Raises for numbers out of range (case 15)."""
    numbers = {"weight_decay": weight_decay, "temperature": temperature, "data_size": data_size}
    if not isinstance(prior_precision, Mapping):
        numbers["prior_precision"] = prior_precision
    for name, value in numbers.items():
        good = value is None or (
            isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
        )
        if not good:
            raise LapwingError(
                f"Asked for {name}={value!r}; a positive finite number is needed: write {name}=1.0, or leave it out."
            )
    if prior_precision is not None and weight_decay is not None:
        raise LapwingError(
            f"Asked for prior_precision={prior_precision} and weight_decay={weight_decay}; one of them is accepted, "
            "since weight_decay sets the prior precision to N times itself: leave one out."
        )
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise LapwingError(f"Asked for seed={seed!r}; a whole number is needed: write seed=0.")


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
    for batch in loader:
        if iter(loader) is loader:
            raise LapwingError(
                f"Asked to fit on a loader of type {type(loader).__name__}, found that it can be gone through once only; "
                "every pass needs the same data: pass a DataLoader or a list of batches, not a generator."
            )
        if batches.size(batches.split(batch)[0]) == 0:
            raise LapwingError(
                "Asked to fit on a loader, found a first batch without samples; at least one is needed: check the "
                "dataset's length and filters."
            )
        return batch
    raise LapwingError(
        f"Asked to fit on a loader of type {type(loader).__name__}, found no batch in it; at least one is needed: check "
        "the dataset's length, and drop_last=True with a batch size above it."
    )


def _infer_likelihood(targets: Any) -> Likelihood:
    if isinstance(targets, Tensor):
        return Gaussian() if targets.is_floating_point() else Categorical()
    raise LapwingError(
        f"Asked to infer the likelihood from targets, found {batches.describe(targets)}; a tensor is needed: floats for "
        "likelihood='gaussian', integers for likelihood='categorical'."
    )
