"""plan(): what a fit and its predictions would take, counted from shapes before anything is fitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import LapwingError, check_count, shown
from ..likelihoods import Likelihood, resolve
from ..likelihoods.inferred import inferred_likelihood
from ..linalg import MEMORY
from ..methods import KFAC, Diagonal, Method, Outline, Work
from ..methods.cost import CALL, MOVE
from ..network import batches
from ..network.batches import Forward
from ..network.data import as_loader
from ..network.eager import outside_modes
from ..network.loaders import first_batch, known_size
from ..tangent import LastLayer, Predicate, Tangent
from ..tangent.anchors import output_width
from .default_method import default_fit, method_and_params
from .runner import Runner

RECORD_CALLS, LAYER_CALLS = 100, 8
"""Operations of one batch beside those of the network: to record it, and to contract each layer."""


@dataclass(frozen=True)
class Plan:
    """What a fit would take; `print(plan)` shows a table. All is None that a method of your own does not state.

    Attributes:
        method: the method and its options.
        parameters: P, how many weights are treated.
        outputs: C.
        passes: of the fit, in forward passes of its data; tuning comes on top.
        predict_passes: of a prediction, in forward passes of its inputs.
        kept_bytes: what the posterior keeps beside the network, exact where rounding cuts no direction.
        peak_bytes: what the fit holds at most beside the weights: the network's activations on one chunk of samples and
            the workspace of decompositions are counted, tuning is left out.
    """

    method: str
    parameters: int
    outputs: int
    passes: float | None = None
    predict_passes: float | None = None
    kept_bytes: int | None = None
    peak_bytes: int | None = None

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
    method: Method | Sequence[Method | None] | None = None,
    *,
    likelihood: str | Likelihood | None = None,
    params: Predicate | LastLayer | None = None,
    data_size: int | None = None,
    forward: Forward | None = None,
    memory: int | None = None,
) -> Any:
    """Says what `lw.fit` would take with the same arguments: time in forward passes, and memory in bytes.

    Nothing is fitted. The network is surveyed on the first batch, and its operations are counted on one sample. Passes
    come from a count of multiply-adds and of moved numbers: a guide to within a factor of about two.

    Args:
        model: the trained network, in eval mode.
        loader: the training data, as in `lw.fit`.
        method: as in `lw.fit`, where None is the default; or a list of methods.
        likelihood: as in `lw.fit`.
        params: as in `lw.fit`.
        data_size: as in `lw.fit`; counts where the loader does not know its length.
        forward: as in `lw.fit`.
        memory: as in `lw.fit`.

    Returns:
        A frozen `Plan`, or a tuple of them where `method` is a list. Both print as a table.

    Raises:
        LapwingError: for bad input, as `lw.fit`.

    Cost: that of a survey and three runs on one sample. The loader is read to count samples if it has no length.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(32, 4), torch.randint(3, (32,))
        >>> model = torch.nn.Linear(4, 3).eval()
        >>> lw.plan(model, [(x, y)], lw.Diagonal()).kept_bytes  # 15 variances, and the prior precision
        68
    """
    if isinstance(method, (list, tuple)):
        options: dict[str, Any] = {"likelihood": likelihood, "params": params, "data_size": data_size}
        return Plans(plan(model, loader, one, **options, forward=forward, memory=memory) for one in method)
    if data_size is not None:
        check_count("lw.plan", "data_size", data_size)
    is_default = method is None and params is None
    method, params = method_and_params(method, params)
    loader = as_loader(loader, model)
    inputs, targets = batches.split(first_batch(loader))
    likelihood = inferred_likelihood(targets, loader) if likelihood is None else resolve(likelihood)
    runner = Runner(loader, False)

    def count() -> int:
        return known_size(loader) or runner.shown() or data_size or runner.count()

    chosen = default_fit(model, inputs, likelihood, forward, memory, count) if is_default else None
    method, tangent = chosen or (method, Tangent.survey(model, inputs, params, forward, memory, targets=targets))
    passes, activations = _network(tangent, inputs)
    cost = method.cost(Outline.of(tangent, inputs, count(), activations))
    if cost is None:
        return Plan(repr(method), tangent.size, tangent.outputs)
    return Plan(
        repr(method), tangent.size, tangent.outputs, passes(cost.fit), passes(cost.predict), cost.kept, cost.peak
    )


def check_room(method: Method, outline: Outline) -> None:
    """Raises where the peak of a fit exceeds the memory of its device, and names a method that does not.

    The machine's whole memory counts, since what others hold of it may be given back; of a GPU what is free counts.
    """
    cost, device = method.cost(outline), outline.tangent.device
    if cost is None or cost.peak <= outline.tangent.memory:
        return
    available, where = MEMORY, "this machine has"
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        available, where = torch.cuda.mem_get_info(device)[0] + cached, "the GPU has free"
    if cost.peak <= available:
        return
    instead = "Treat fewer weights: write params=lw.last_layer."
    for other in (Diagonal(), KFAC()):
        peak = other.cost(outline).peak
        if peak <= available:
            instead = f"Use lw.{type(other).__name__}(), which needs {peak / 2**30:.3g} GiB."
    raise LapwingError(
        f"{shown(method)} needs {cost.peak / 2**30:.3g} GiB for {outline.tangent.size} weights, and {where} "
        f"{available / 2**30:.3g} GiB. {instead}"
    )


def _network(tangent: Tangent, inputs: Any) -> tuple[Callable[[Work], float | None], int]:
    """Returns a function that gives work in forward passes, None where it is not known, and the bytes of activations.

    The operations of one sample are counted: of a forward pass, and of records with one and two cotangents.
    """
    samples = batches.size(inputs)
    one = batches.plain(batches.take(inputs, slice(0, 1)), tangent.device)
    with _Operations() as forward:
        tangent.outputs_of(one)
    records = []
    for columns in (1, 2):
        with _Operations() as operations:
            record = tangent.record(one, torch.zeros(1, output_width(tangent, one), columns, device=tangent.device))
            for name in record:
                record[name]  # takes the gradients
        records.append(operations)
    backward = records[1].work - records[0].work
    calls = records[0].calls + RECORD_CALLS + LAYER_CALLS * len(tangent.blocks)
    recorded = records[0].work - backward + CALL * calls / samples

    def passes(work: Work) -> float | None:
        total = work.records * recorded + work.backwards * backward + work.products
        return None if math.isnan(total) else total / (forward.work + CALL * forward.calls / samples)

    return passes, forward.bytes // 2  # about half of what is written lives at once


class _Operations(TorchDispatchMode):
    """Counts operations: their multiply-adds and the numbers they write (`work`), and how many there are (`calls`).

    Attributes:
        bytes: what they write.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # not needed to import lapwing

        super().__init__()
        self.work, self.calls, self.bytes, self._flops = 0.0, 0, 0, flop_registry

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import it, for seconds

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        self.calls += 1
        flops = self._flops.get(function.overloadpacket)
        if flops is not None:
            self.work += flops(*args, **kwargs, out_val=out) / 2
        if not function.is_view:
            written = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
            self.work += MOVE * sum(value.numel() for value in written)
            self.bytes += sum(value.nbytes for value in written)
        return out


def _table(plans: Sequence[Plan]) -> str:
    """Returns a row for each plan, the method at its end."""
    head = ("weights", "outputs", "fit", "predict", "kept", "peak", "method")
    rows = [head, *map(_row, plans)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    lines = ["  ".join([*map(str.rjust, row, widths), row[-1]]) for row in rows]
    units = "fit and predict in forward passes, kept and peak in MiB"
    return "\n".join([*lines, units])


def _row(one: Plan) -> tuple[str, ...]:
    """Returns the cells of a plan."""
    passes = ["?" if count is None else f"{count:,.1f}" for count in (one.passes, one.predict_passes)]
    sizes = ["?" if size is None else f"{size / 2**20:,.2f}" for size in (one.kept_bytes, one.peak_bytes)]
    return f"{one.parameters:,}", f"{one.outputs:,}", *passes, *sizes, one.method
