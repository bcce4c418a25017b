"""plan(): the memory of a fit and its approximate time, before anything is fitted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from ..data.batches import Forward
from ..data.inputs import Inputs
from ..display import Displayed
from ..errors import LapwingError, shown
from ..likelihoods import Likelihood
from ..likelihoods.inferred import check_logits
from ..linalg import double_device
from ..methods import Method
from ..network.entry import outside_modes
from ..network.probe import PROBED_SAMPLES
from ..tangent import LastLayer, Predicate, Tangent
from ..tuning import Tuning
from .choice import advice_on_memory, check_batch, choose
from .fit_data import FitData
from .options import DEFAULT_TUNING, FitOptions
from .registry import METHODS

HEADER = f"{'weights':>13}  {'passes':>9}  {'kept MiB':>12}  {'peak MiB':>12}  {'seconds':>9}  method"

PRODUCT_SIZE = 512
"""Width of the matrices of the timed product."""

UNITS = (  # the explanation below a table
    "passes: length of the fit in forward passes of its data. kept, peak: memory of the posterior and of the fit.\n"
    "seconds: passes and products of wide matrices, perhaps off by a factor of four. Setup and tuning come on top."
)


@dataclass(frozen=True, repr=False)
class Plan(Displayed):
    """What a fit would need; `print(plan)` shows a table. A number is None if the method has no footprint.

    Attributes:
        method: the method and its options.
        parameters: number P of weights that are treated.
        outputs: number C of outputs.
        passes: length of the fit in forward passes of its data, without tuning.
        kept_bytes: memory of the posterior in addition to the network; exact unless rounding removes directions.
        peak_bytes: maximum memory of the fit in addition to the weights, without tuning; within a factor of 2.5.
        seconds: time of the passes and of products and decompositions of wide matrices, from a timed forward pass and a
            timed product; rough, and may be off by a factor of four.
        advice: what does not fit into memory and what to use instead, or why `lw.fit` refuses the method, or None.
    """

    method: str
    parameters: int | None = None
    outputs: int | None = None
    passes: float | None = None
    kept_bytes: int | None = None
    peak_bytes: int | None = None
    seconds: float | None = None
    advice: str | None = None

    def __repr__(self) -> str:
        return repr(Plans([self]))


class Plans(Displayed, tuple[Plan, ...]):
    """Plans of several methods; `print(plans)` shows a table."""

    def __repr__(self) -> str:
        """Returns a row for each plan, the units, and each piece of advice once."""
        rows = [
            "  ".join([
                _cell(one.parameters, 13), _cell(one.passes, 9, 1), _cell(one.kept_bytes, 12, 3, 2**20),
                _cell(one.peak_bytes, 12, 3, 2**20), _cell(one.seconds, 9, 2), one.method,
            ])
            for one in self
        ]  # fmt: skip
        advice = dict.fromkeys(one.advice for one in self if one.advice is not None)
        return "\n".join([HEADER, *rows, UNITS, *advice])


def _cell(number: float | None, width: int, digits: int = 0, unit: int = 1) -> str:
    return ("?" if number is None else f"{number / unit:,.{digits}f}").rjust(width)


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

    Accepts the arguments of `lw.fit`, and `method` may be a list of methods, or "all" for the default and every
    method of the package. If `lw.fit` refuses some of them, their plans say why. `data_size` is used if the loader does
    not know its length.

    Returns:
        A frozen `Plan`, or a tuple of them if `method` is a list or "all". Both print as a table.

    Raises:
        LapwingError: if `lw.fit` refuses the data or all methods, with the same sentence. A fit that exceeds the memory
            of the machine or the budget is not an error here: its plan has `advice`.

    Cost: for each method a survey, and a few forward passes of the first batch. Loaders without a length are read once
        to count their samples.

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
    every = isinstance(method, str) and method == "all"
    if every:
        method = (None, *METHODS)
    several = isinstance(method, (list, tuple))
    methods: Any = method if several else [method]
    if not len(methods):
        raise LapwingError(
            f"method={shown(method)} names no method. Write lw.plan(model, loader, [lw.KFAC(), lw.Diagonal()]) or "
            'lw.plan(model, loader, "all"), or leave it out for the default.'
        )
    data = FitData.of(options, model, loader)
    plans, errors = list[Plan](), list[LapwingError]()
    for one in methods:
        try:
            planned = _planned(replace(options, method=one), model, data, warn=not plans)
            known = [(plan.method, plan.parameters) for plan in plans if every]  # the default is one of the methods
            plans += [planned] if (planned.method, planned.parameters) not in known else []
        except LapwingError as error:
            errors.append(error)
            plans.append(Plan("the default" if one is None else repr(one), advice=f"{error}"))
    if len(errors) == len(plans):  # the methods are not the cause
        raise errors[0]
    return Plans(plans) if several else plans[0]


def _planned(options: FitOptions, model: nn.Module, data: FitData, warn: bool) -> Plan:
    """Returns the plan of a fit with these options; `warn` says whether its survey warns."""
    choice = choose(options, model, data, data.training.count, data.training.count(), warn)
    method, shape, tangent = choice.method, choice.shape, choice.shape.tangent
    rows = check_batch(tangent, data.likelihood, data.first)
    check_logits(data.likelihood, *rows, next(iter(tangent.parameters.values())).dtype)
    total, largest = _activations(tangent, data.first.inputs)
    shape = replace(shape, activations=2 * largest if tangent.treats_output_alone else total)
    footprint = method.footprint(shape)
    if footprint is None:
        return Plan(repr(method), tangent.size, tangent.outputs)
    probed = 4 * total * min(shape.batch, PROBED_SAMPLES)  # two graphs of a few samples, and their gradients
    seconds = footprint.passes * shape.samples * _forward_seconds(tangent, data.first.inputs)
    seconds += footprint.products * _product_seconds(tangent.device) if footprint.products else 0.0
    return Plan(
        method=repr(method), parameters=tangent.size, outputs=tangent.outputs, passes=footprint.passes,
        kept_bytes=footprint.kept, peak_bytes=max(footprint.peak, probed), seconds=seconds,
        advice=advice_on_memory(method, shape),
    )  # fmt: skip


def _activations(tangent: Tangent, inputs: Inputs) -> tuple[int, int]:
    """Returns the bytes of the outputs of all modules for one sample, and the bytes of the largest output."""
    one, sizes = Inputs.of(inputs.take(slice(0, 1)), tangent.device), [0]

    def note(module: nn.Module, _: Any, output: Any) -> None:
        if next(module.children(), None) is None:
            sizes.append(sum(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, Tensor)))

    handle = register_module_forward_hook(note)
    try:
        tangent.traced(tangent.check(one))
    finally:
        handle.remove()
    return sum(sizes), max(sizes)


def _forward_seconds(tangent: Tangent, inputs: Inputs) -> float:
    """Returns the seconds of a forward pass of the first batch, per sample."""
    inputs = Inputs.of(inputs, tangent.device)
    return _seconds(lambda: tangent.outputs_of(inputs), tangent.device) / inputs.samples


def _product_seconds(device: torch.device) -> float:
    """Returns the seconds of a multiply-add within a product of matrices in float64."""
    matrix = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.float64, device=double_device(device))
    return min(_seconds(lambda: matrix @ matrix, matrix.device) for _ in range(3)) / PRODUCT_SIZE**3


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Returns the seconds of a call, with the work of its device."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
