"""plan(): what a fit and its predictions would take, counted from shapes before anything is fitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Literal

from torch import nn

from ..errors import LapwingError, check_flag, shown
from ..likelihoods import Likelihood, resolve
from ..likelihoods.inferred import inferred_likelihood
from ..methods import (
    EKFAC,
    ELLA,
    KFAC,
    Diagonal,
    Full,
    MeanField,
    Method,
    OptimalSubspace,
    Outline,
    SampledLLA,
    SubsetOfData,
    SubsetOfWeights,
    VaLLA,
    Work,
)
from ..methods.cost import Cost
from ..network import batches
from ..network.batches import Forward
from ..network.data import as_loader
from ..network.entry import outside_modes
from ..network.loaders import WeightedLoader, first_batch, known_size
from ..posterior.prior import Prior
from ..tangent import LastLayer, Predicate, Tangent
from ..tuning import BoundedEvidence, Tuning, Validation
from .default_method import check_method, method_and_tangent
from .network_cost import NetworkCost
from .options import DEFAULT_TUNING, check_data_size, check_fit, check_numbers, check_tuning
from .room import advice_on_memory, with_holes
from .runner import Runner
from .speed import Speed
from .validation import all_weights, check_batch, check_held_out

METHODS: tuple[Method | None, ...] = (
    None, Diagonal(), KFAC(), EKFAC(), Full(), ELLA(), OptimalSubspace(), SubsetOfWeights(size=100), VaLLA(),
    SubsetOfData(), SampledLLA(), MeanField(),
)  # fmt: skip
"""What `plan(model, loader, "all")` plans: the default, and every method that `fit` takes."""


@dataclass(frozen=True)
class Plan:
    """What a fit would take; `print(plan)` shows a table. All is None that the method does not state.

    Attributes:
        method: the method and its options.
        parameters: P, how many weights are treated.
        outputs: C.
        passes: of the fit, in forward passes of its data; tuning comes on top.
        tuning_passes: of the tuning, in the same; 0 where it reads eigenvalues alone.
        predict_passes: of a prediction, in forward passes of its inputs.
        kept_bytes: what the posterior keeps beside the network, exact where rounding cuts no direction.
        peak_bytes: what the fit holds at most beside the weights: the network's activations on one chunk of samples,
            the workspace of decompositions and what the allocator keeps are counted, tuning is left out.
        seconds: of the fit on this machine, its decompositions and the tuning included. Loading the data is left out.
        advice: what to do where the peak exceeds the memory of the machine, or a part that is never cut the budget.
        note: what the numbers leave open: where they are the most, where they are of two fits, where a larger budget
            makes the fit cheaper, and why there are none.
    """

    method: str
    parameters: int | None = None
    outputs: int | None = None
    passes: float | None = None
    tuning_passes: float | None = None
    predict_passes: float | None = None
    kept_bytes: int | None = None
    peak_bytes: int | None = None
    seconds: float | None = None
    advice: str | None = None
    note: str | None = None

    def __str__(self) -> str:
        """Returns a table of one row."""
        return _table([self])


class Plans(tuple[Plan, ...]):
    """Plans of several methods; `print(plans)` shows a table."""

    def __str__(self) -> str:
        """Returns a table with a row for each method."""
        return _table(self)


@outside_modes
def plan(
    model: nn.Module,
    loader: Any,
    method: Method | Sequence[Method | None] | Literal["all"] | None = None,
    *,
    likelihood: str | Likelihood | None = None,
    params: Predicate | LastLayer | None = None,
    prior_precision: float | Mapping[str, float] | None = None,
    tune: Tuning | None = DEFAULT_TUNING,
    validation: Any = None,
    data_size: int | None = None,
    weight_decay: float | None = None,
    sample_weights: bool = False,
    forward: Forward | None = None,
    memory: int | None = None,
) -> Any:
    """Says what `lw.fit` would take with the same arguments: time in seconds and forward passes, and memory in bytes.

    Nothing is fitted, and the other arguments of `lw.fit` hardly change its cost. The network is surveyed on the first
    batch, and its operations are counted on one sample. Passes come from a count of multiply-adds and of moved numbers:
    a guide to within a factor of about two. So are seconds, for which forward passes of the first two batches, a
    product and a decomposition are timed.

    The arguments are those of `lw.fit`, and `method` may be a list of methods. "all" plans the default and every method
    with its own default options (`lapwing.fitting.plan.METHODS`), and says of one that `lw.fit` refuses why. A prior
    precision that is passed is not tuned, and `data_size` counts where the loader does not know its length. Where
    `validation` has a classifier fitted twice, time is that of both fits and of the comparison, and memory, weights and
    predictions are those of the larger posterior.

    Returns:
        A frozen `Plan`, or a tuple of them where `method` is a list or "all". Both print as a table.

    Raises:
        LapwingError: for what `lw.fit` refuses by its arguments and the first batch, with the same sentence. What
            exceeds the memory of the machine or the budget is no error here: the plan has `advice`.

    Cost: that of a survey, three runs on one sample with up to eight backward passes, a forward pass of the first
        batch, and a fifth of a second or one forward pass of each of two batches. Loaders without a length are read to
        count their samples, held-out data anew for each fit.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(32, 4), torch.randint(3, (32,))
        >>> model = torch.nn.Linear(4, 3).eval()
        >>> lw.plan(model, [(x, y)], lw.Diagonal()).kept_bytes  # 15 variances, and the prior precision
        68
    """
    check_flag("lw.plan", "sample_weights", sample_weights)
    check_numbers(prior_precision, weight_decay, 1.0, data_size, 0)
    check_tuning(tune, validation)
    every, single = isinstance(method, str) and method == "all", not isinstance(method, (list, tuple))
    methods: Any = METHODS if every else [method] if single else method
    if not len(methods):
        raise LapwingError(
            f"method={shown(method)} names no method. Write lw.plan(model, loader, [lw.KFAC(), lw.Diagonal()]) or "
            'lw.plan(model, loader, "all"), or leave it out for the default.'
        )
    loader = as_loader(loader, model)
    first = first_batch(loader)
    inputs, targets = batches.split(batches.weighted(first) if sample_weights else first)
    if validation is not None:
        validation = as_loader(validation, model, "val")
        tune = Validation(validation)
    training = WeightedLoader(loader) if sample_weights else loader
    likelihood = inferred_likelihood(targets, training) if likelihood is None else resolve(likelihood)
    runner = Runner(training)
    if data_size is not None:
        check_data_size(data_size, known_size(loader) or 0)
    survey = partial(Tangent.survey, model, inputs, forward=forward, memory=memory, targets=targets)

    def count() -> int:
        return known_size(loader) or runner.shown() or data_size or runner.count()

    planner = _Planner(
        model, training, (inputs, targets), likelihood, params, prior_precision, weight_decay, data_size, tune,
        validation, survey, count,
    )  # fmt: skip
    plans = Plans(map(planner.attempted if every else planner.chosen, methods))
    if len(planner.refused) == len(plans):  # it is not the method
        raise planner.refused[0]
    return plans[0] if single and not every else plans


@dataclass
class _Planner:
    """Plans the methods of one call of `plan`, which share surveys, counts and the speed of the machine.

    Attributes:
        first: inputs and targets of the first batch.
        survey: `Tangent.survey` of the network on it.
        count: returns N.
        surveyed: what `survey` returned, by the parameters that are treated and whether it may warn.
        counted: a network and what it takes, by the identity of the former.
        speed: that of the machine, once it is timed.
        refused: why methods are not planned.
    """

    model: nn.Module
    training: Any
    first: tuple[Any, Any]
    likelihood: Likelihood
    params: Predicate | LastLayer | None
    prior_precision: float | Mapping[str, float] | None
    weight_decay: float | None
    data_size: int | None
    tune: Tuning | None
    validation: Any
    survey: Callable[..., Tangent]
    count: Callable[[], int]
    surveyed: dict[tuple[int, bool], Tangent] = field(default_factory=dict)
    counted: dict[int, tuple[Tangent, NetworkCost]] = field(default_factory=dict)
    speed: Speed | None = None
    refused: list[LapwingError] = field(default_factory=list)

    def attempted(self, method: Method | None) -> Plan:
        """Returns the plan of what `lw.fit` would do with the method, or of why it would refuse."""
        try:
            return self.chosen(method)
        except LapwingError as error:
            self.refused.append(error)
            return Plan("the default" if method is None else repr(method), note=f"{error}")

    def chosen(self, method: Method | None) -> Plan:
        """Returns the plan of what `lw.fit` would do with the method."""
        is_default = method is None and self.params is None
        check_method(method)
        method, tangent, _ = method_and_tangent(
            self.model, self._survey, method, self.params, self.likelihood, self.count
        )
        if self.validation is not None:
            check_held_out(tangent, self.likelihood, *batches.split(first_batch(self.validation)))
        if not is_default or self.validation is None or self.likelihood.logit_temperature is None:
            return self._planned(method, tangent)
        wide = self._of_all_weights(tangent)
        narrow = self._planned(method, tangent, compared=wide is not None)
        return narrow if wide is None else _of_both(narrow, wide)

    def _survey(self, params: Predicate | LastLayer, warn: bool = True) -> Tangent:
        key = id(params), warn
        if key not in self.surveyed:
            self.surveyed[key] = self.survey(params=params, warn=warn)
        return self.surveyed[key]

    def _planned(self, method: Method, tangent: Tangent, compared: bool = False) -> Plan:
        """Returns the plan of one fit; `compared` with another on the held-out data."""
        (inputs, targets), samples, tune = self.first, self.count(), self.tune
        precision = self.prior_precision
        if self.weight_decay is not None:
            precision = (self.data_size or samples) * self.weight_decay
        outline = Outline.of(tangent, self.likelihood, inputs, samples, not Prior.read(tangent, precision).fixed)
        check_fit(method, outline, tune, inputs, self.validation is not None)
        check_batch(tangent, self.likelihood, inputs, targets)
        if id(tangent) not in self.counted:
            self.counted[id(tangent)] = tangent, NetworkCost.of(tangent, inputs)
        network = self.counted[id(tangent)][1]
        outline = replace(
            outline, activations=network.activations, gradients=network.gradients, patches=network.patches
        )
        cost = method.cost(outline)
        if cost is None:
            return Plan(repr(method), tangent.size, tangent.outputs)
        self.speed = self.speed or Speed.of(tangent, islice(self.training, 2))
        tuning = _tuning_work(tune, outline, cost)
        if compared and tuning is not None and isinstance(tune, Validation):
            tuning += cost.predict.times(tune.held_out_samples(self.model) / samples)
        return Plan(
            repr(method), tangent.size, tangent.outputs, network.passes(cost.fit),
            None if tuning is None else network.passes(tuning), network.passes(cost.predict), cost.kept,
            with_holes(max(cost.peak, network.survey), tangent.device),
            None if tuning is None else network.seconds(cost.fit + tuning, self.speed, samples),
            advice_on_memory(method, cost, outline), cost.note,
        )  # fmt: skip

    def _of_all_weights(self, last: Tangent) -> Plan | None:
        """Returns the plan of the fit that held-out data compare with that of the last layer; None without it."""
        whole = all_weights(last, self.first[0], self.count())
        try:
            wide = None if whole is None else self._planned(KFAC(), whole, compared=True)
        except LapwingError:  # of a prior that names the last layer alone: then `lw.fit` leaves it out too
            return None
        return None if wide is None or wide.advice is not None else wide


def _tuning_work(tune: Tuning | None, outline: Outline, cost: Cost) -> Work | None:
    """Returns the work of tuning a fit, as a part of each sample's; None where the tuning does not state it."""
    if tune is not None and cost.tuned:
        return tune.work(outline, cost)
    beside = replace(outline, prior_open=False)  # a prior of the method's own
    tempered = isinstance(tune, Validation) and outline.likelihood.logit_temperature == 1
    if tempered or (outline.likelihood.needs_noise and isinstance(tune, (BoundedEvidence, Validation))):
        assert tune is not None
        return tune.work(beside, cost)
    return Work()


def _of_both(narrow: Plan, wide: Plan) -> Plan:
    """Returns the plan of a fit that has held-out data choose between the last layer and all weights."""
    sums = {name: getattr(narrow, name) + getattr(wide, name) for name in ("passes", "tuning_passes", "seconds")}
    names = "parameters", "predict_passes", "kept_bytes", "peak_bytes"
    sizes = {name: max(getattr(narrow, name), getattr(wide, name)) for name in names}
    note = (
        f"Without a method, held-out data choose between the last layer ({narrow.parameters:,} weights) and all "
        f"{wide.parameters:,} trained weights: fit, tune and seconds are of both, the rest is of the larger."
    )
    return replace(wide, **sums, **sizes, note=note)


def _table(plans: Sequence[Plan]) -> str:
    """Returns a row for each plan, the method at its end."""
    head = ("weights", "outputs", "fit", "tune", "predict", "seconds", "kept", "peak", "method")
    rows = [head, *map(_row, plans)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    lines = ["  ".join([*map(str.rjust, row, widths), row[-1]]) for row in rows]
    units = "fit, tune and predict in forward passes, seconds of the fit with its tuning, kept and peak in MiB"
    sentences = dict.fromkeys(text for one in plans for text in (one.note, one.advice) if text)
    return "\n".join([*lines, units, *sentences])


def _row(one: Plan) -> tuple[str, ...]:
    """Returns the cells of a plan."""
    counts = one.passes, one.tuning_passes, one.predict_passes
    passes = ["?" if count is None else f"{count:,.1f}" for count in counts]
    sizes = ["?" if size is None else f"{size / 2**20:,.2f}" for size in (one.kept_bytes, one.peak_bytes)]
    seconds = "?" if one.seconds is None else f"{one.seconds:,.2f}"
    counts_of_network = ["?" if count is None else f"{count:,}" for count in (one.parameters, one.outputs)]
    return *counts_of_network, *passes, seconds, *sizes, one.method
