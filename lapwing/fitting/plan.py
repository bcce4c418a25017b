"""plan(): the memory of a fit and its approximate time, before anything is fitted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from ..data import batches
from ..data.batches import Forward
from ..errors import LapwingError, shown
from ..likelihoods import Likelihood
from ..methods import KFAC, FitShape, Method
from ..methods.registry import METHODS
from ..network.entry import outside_modes
from ..network.probe import PROBED_SAMPLES
from ..posterior.prior import Prior
from ..tangent import LastLayer, Predicate, Tangent
from ..tuning import Tuning
from .checks import check_batch, check_fit
from .default_method import method_and_tangent
from .fit_data import FitData
from .memory_check import advice_on_memory
from .options import DEFAULT_TUNING, FitOptions
from .runner import Runner
from .validation import all_weights

UNITS = (
    "passes: length of the fit in forward passes of its data. kept, peak: memory of the posterior and of the fit.\n"
    "time: passes times a timed forward pass. It may be off by a factor of four. Setup and tuning come on top."
)
"""The explanation below a table."""


@dataclass(frozen=True)
class Plan:
    """What a fit would need; `print(plan)` shows a table. A number is None if the method has no footprint.

    Attributes:
        method: the method and its options.
        parameters: number P of weights that are treated.
        outputs: number C of outputs.
        passes: length of the fit in forward passes of its data, without tuning.
        kept_bytes: memory of the posterior in addition to the network; exact unless rounding removes directions.
        peak_bytes: maximum memory of the fit in addition to the weights: the posterior, the activations and gradients
            of one chunk of samples, and the workspace of decompositions. Tuning is not counted.
        seconds: `passes` times a timed forward pass; rough, and may be off by a factor of four.
        advice: what does not fit into memory, and what to use instead; None if everything fits.
        note: what the numbers leave open, or why there are none.
    """

    method: str
    parameters: int | None = None
    outputs: int | None = None
    passes: float | None = None
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
    """Returns the memory and the approximate time that `lw.fit` would need with the same arguments.

    Nothing is fitted. The network is surveyed on the first batch, the activations of one sample are measured, and one
    forward pass of the first batch is timed. Memory is computed from the shapes of the layers.

    The arguments are those of `lw.fit`, and `method` may be a list of methods. "all" plans the default and every method
    of `lapwing.methods.registry.METHODS`; if `lw.fit` refuses a method, its plan says why. `data_size` is used if the
    loader does not know its length. If `validation` makes `lw.fit` fit a classifier twice, the plan is that of the
    larger fit, and its note says so.

    Returns:
        A frozen `Plan`, or a tuple of them if `method` is a list or "all". Both print as a table.

    Raises:
        LapwingError: if `lw.fit` refuses the arguments or the first batch, with the same sentence. A fit that exceeds
            the memory of the machine or the budget is no error here: its plan has `advice`.

    Cost: a survey, and three forward passes of the first batch. Loaders without a length are read once to count their
        samples.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(32, 4), torch.randint(3, (32,))
        >>> model = torch.nn.Linear(4, 3).eval()
        >>> lw.plan(model, [(x, y)], lw.Diagonal()).kept_bytes  # 15 variances, and the prior precision
        68
    """
    options = FitOptions(
        likelihood=likelihood, params=params, prior_precision=prior_precision, tune=tune, validation=validation,
        data_size=data_size, weight_decay=weight_decay, sample_weights=sample_weights, forward=forward, memory=memory,
    )  # fmt: skip
    every, single = isinstance(method, str) and method == "all", not isinstance(method, (list, tuple))
    methods: Any = (None, *METHODS) if every else [method] if single else method
    if not len(methods):
        raise LapwingError(
            f"method={shown(method)} names no method. Write lw.plan(model, loader, [lw.KFAC(), lw.Diagonal()]) or "
            'lw.plan(model, loader, "all"), or leave it out for the default.'
        )
    planner = _Planner(options, FitData.of(options, model, loader))
    plans = Plans(map(planner.attempted if every else planner.chosen, methods))
    if len(planner.refused) == len(plans):  # the methods are not the cause
        raise planner.refused[0]
    return plans[0] if single and not every else plans


class _Planner:
    """Plans the methods of one call of `plan`, which share surveys and measurements.

    Attributes:
        refused: the errors of methods that `lw.fit` refuses.
    """

    def __init__(self, options: FitOptions, data: FitData) -> None:
        self._options, self._data = options, data
        self._runner, self._survey_of = Runner(data.training), data.survey(options)
        self._surveyed: dict[tuple[int, bool], Tangent] = {}
        self.refused: list[LapwingError] = []

    def attempted(self, method: Method | None) -> Plan:
        """Returns the plan of a method, or the reason why `lw.fit` would refuse it."""
        try:
            return self.chosen(method)
        except LapwingError as error:
            self.refused.append(error)
            return Plan("the default" if method is None else repr(method), note=f"{error}")

    def chosen(self, method: Method | None) -> Plan:
        """Returns the plan of a method, or of the default method if it is None."""
        options, data = replace(self._options, method=method), self._data
        method, tangent, _ = method_and_tangent(
            data.model, self._survey, options.method, options.params, data.likelihood, self._count
        )
        data.check_held_out(tangent)
        if not options.compares or data.likelihood.logit_temperature is None:
            return self._planned(method, tangent)
        return self._of_all_weights(tangent) or self._planned(method, tangent)

    def _count(self) -> int:
        """Returns N."""
        return self._runner.shown() or self._options.data_size or self._runner.count()

    def _survey(self, params: Predicate | LastLayer, warn: bool = True) -> Tangent:
        key = id(params), warn
        if key not in self._surveyed:
            self._surveyed[key] = self._survey_of(params=params, warn=warn)
        return self._surveyed[key]

    def _planned(self, method: Method, tangent: Tangent) -> Plan:
        """Returns the plan of one fit."""
        data, samples = self._data, self._count()
        Prior.read(tangent, self._options.precision(self._count))  # raises for a precision that the fit would refuse
        shape = FitShape.of(tangent, data.likelihood, data.inputs, samples)
        check_fit(method, shape, data.tune, data.inputs, data.held_out is not None)
        check_batch(tangent, data.likelihood, data.inputs, data.targets)
        every, largest = _activations(tangent, data.inputs)
        shape = replace(shape, activations=2 * largest if tangent.treats_output_alone else every)
        footprint = method.footprint(shape)
        if footprint is None:
            return Plan(repr(method), tangent.size, tangent.outputs)
        surveyed = 4 * every * min(shape.batch, PROBED_SAMPLES)  # two graphs of a few samples, and gradients
        return Plan(
            method=repr(method), parameters=tangent.size, outputs=tangent.outputs, passes=footprint.passes,
            kept_bytes=footprint.kept, peak_bytes=max(footprint.peak, surveyed),
            seconds=footprint.passes * samples * _forward_seconds(tangent, data.inputs),
            advice=advice_on_memory(method, footprint, shape),
        )  # fmt: skip

    def _of_all_weights(self, last: Tangent) -> Plan | None:
        """Returns the plan of the fit that held-out data compare with the last layer's; None if there is none."""
        whole = all_weights(last, self._data.inputs, self._count())
        try:
            wide = None if whole is None else self._planned(KFAC(), whole)
        except LapwingError:  # for instance a prior that names the last layer only: `lw.fit` leaves this fit out too
            return None
        if wide is None or wide.advice is not None:
            return None
        note = f"lw.fit also fits the last layer ({last.size:,} weights), and held-out data choose between both fits."
        return replace(wide, note=note)


def _activations(tangent: Tangent, inputs: Any) -> tuple[int, int]:
    """Returns the bytes of the outputs of all modules for one sample, and those of the largest output."""
    one, sizes = batches.plain(batches.take(inputs, slice(0, 1)), tangent.device), [0]

    def note(module: nn.Module, _: Any, output: Any) -> None:
        if next(module.children(), None) is None:
            sizes.append(sum(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, Tensor)))

    handle = register_module_forward_hook(note)
    try:
        tangent.recording(tangent.check(one))
    finally:
        handle.remove()
    return sum(sizes), max(sizes)


def _forward_seconds(tangent: Tangent, inputs: Any) -> float:
    """Returns the seconds of a forward pass of the first batch, per sample."""
    inputs = batches.plain(inputs, tangent.device)
    start = time.perf_counter()
    tangent.outputs_of(inputs)
    if tangent.device.type == "cuda":
        torch.cuda.synchronize(tangent.device)
    return (time.perf_counter() - start) / batches.size(inputs)


def _table(plans: Sequence[Plan]) -> str:
    """Returns a row for each plan, the units, and every note and advice once."""
    rows = [("weights", "passes", "kept", "peak", "time", "method"), *map(_row, plans)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = ["  ".join([*map(str.rjust, row, widths), row[-1]]) for row in rows]
    sentences = dict.fromkeys(text for one in plans for text in (one.note, one.advice) if text)
    return "\n".join([*lines, UNITS, *sentences])


def _row(one: Plan) -> tuple[str, ...]:
    """Returns the cells of a plan; an unknown number is shown as "?"."""
    weights = "?" if one.parameters is None else f"{one.parameters:,}"
    passes = "?" if one.passes is None else f"{one.passes:,.1f}"
    return weights, passes, _size(one.kept_bytes), _size(one.peak_bytes), _duration(one.seconds), one.method


def _size(count: float | None) -> str:
    """Returns bytes in the largest unit of which there is at least one."""
    if count is None:
        return "?"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.3g} GiB"


def _duration(seconds: float | None) -> str:
    """Returns a rough time with one digit, in seconds, minutes or hours."""
    if seconds is None:
        return "?"
    size, unit = next((pair for pair in ((3600, "h"), (60, "min")) if seconds >= pair[0]), (1, "s"))
    return f"~{float(f'{seconds / size:.1g}'):g} {unit}"
