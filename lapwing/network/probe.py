"""The probe finds the layer family of each parameter and the sample axis of its tensors, and checks both.

On a few samples it compares `Jᵀu` from the recorded uses with autograd, and requires that the gradients of one sample's
outputs are zero at all other samples. A parameter that fails becomes generic; the coverage report has the reason.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from ..data.batches import JOINED, check_outputs
from ..data.inputs import Inputs
from ..errors import LapwingError
from ..jacobian.blocks import Block
from ..jacobian.layers import BatchAxis
from ..linalg import accumulation_dtype
from .call import Call, output_tensor
from .call_errors import CallRefused, OutputsWithPositions
from .eager import modules_of, real, without_compiled
from .functional import FirstCall
from .output_layers import output_layers
from .recording_plan import RecordingPlan, planned
from .selection import LastLayer, Predicate, select, with_entries
from .stamp import PreservedState
from .tracing import RecordedUse, Recording, output_gradients

log = logging.getLogger("lapwing")

PROBED_SAMPLES = 4
"""Maximum number of samples of the first batch that the probe runs, unless they leave layers unused."""

Probed = tuple[RecordedUse, Tensor, BatchAxis | None]
"""A use, the gradients of the cotangents at its output, and the axis of its samples; None if no axis holds them."""

SHARED_INPUT = (
    " If an input that all samples share, such as a grid, is as long as the first batch, let forward= add it instead."
)

# Reasons of the coverage report why a parameter is generic:
MIXED = "no dimension of its layer holds the samples"
UNSEEN = "no layer family covers it"
CONDITIONAL = "layers of its shape do not run on every sample"
IDLE = (
    "no output of the first batch has a gradient for it: it is not used there, within torch.no_grad(), or in what the "
    "network keeps of an earlier call"
)


def probe(
    call: Call,
    parameters: dict[str, Tensor],
    inputs: Inputs,
    params: Predicate | LastLayer,
    max_numbers: int,
    warn: bool = True,
    rows: int = PROBED_SAMPLES,
) -> tuple[tuple[Block, ...], RecordingPlan, dict[str, str], int]:
    """Surveys a network in eval mode on at most `rows` samples of the first batch.

    If it chooses layers by values, and not all of these samples use all layers, the whole batch is surveyed instead.
    Returns the blocks, the plan that reads recordings, why blocks are generic (by name), and C (or T C:
    `Tangent.survey` divides it). `max_numbers` limits the entries of a strip. Raises if outputs change between calls or
    with other rows.
    """
    few, kind = _few(call, inputs, rows), type(call.model).__name__
    try:
        names, idle, recording, first = _recorded(call, few, parameters, params)
        outputs, eps = recording.outputs, torch.finfo(recording.outputs.dtype).eps
        tolerance = 3 * eps**0.5 * outputs.detach().abs().max().clamp_min(1.0)  # of two calls: fused kernels differ
        if recording.rounds or not _repeats(call, few, outputs.detach(), first.outputs.detach(), tolerance):
            _check_repeatable(call, few, outputs.detach(), tolerance, parameters)
    except CallRefused as error:
        raise _of_few_rows(call, inputs, error) from error

    samples, generator = len(outputs), torch.Generator(outputs.device).manual_seed(0)
    u = torch.randn(samples, outputs.shape[1], 3, generator=generator, dtype=outputs.dtype, device=outputs.device)
    u[1:, :, 0] = 0  # cotangent 0 is zero except at the first sample, 1 except at the last one, 2 has all samples
    u[: samples - 1, :, 1] = 0  # with cotangents given, no gradient below is None
    noted = [use for use in recording.noted if set(use.names.values()) & set(names)]
    with _explained(call.model):
        gradients = [g for g in output_gradients(outputs, noted, u, differentiable=False) if g is not None]  # all
        truth = first.gradients(names, u[:, :, 2], kind)
    probed = list(zip(noted, gradients, _batch_axes(noted, gradients, samples), strict=True))

    reasons = _reasons(names, truth.keys(), probed, recording)
    conditional = _conditional(probed, parameters, samples, inputs) if recording.routed else []
    unused = [name for name in names if reasons[name] == IDLE]
    if recording.chosen and (conditional or unused or idle) and samples < inputs.samples:
        return probe(call, parameters, inputs, params, max_numbers, warn, inputs.samples)
    for name in conditional:
        if not reasons.get(name, IDLE):
            reasons[name] = CONDITIONAL
    if warn and isinstance(params, LastLayer):
        log.info("The last layer of %s is treated: %s.", kind, ", ".join(names))
    _compare_with_autograd(probed, samples, truth, reasons, max_numbers)
    generic = {name: reason for name, reason in reasons.items() if reason}
    covered = reasons.keys() - generic.keys()
    pairs = [(use, axis or BatchAxis()) for use, _, axis in probed if covered & set(use.names.values())]
    order, blocks = planned(pairs, covered, samples, parameters)
    blocks += [Block(name, (name,), (tuple(real(parameters[name]).shape),), "generic") for name in generic]
    plan = RecordingPlan.of(
        order, blocks, single_sample=samples == 1, spread=any(use.spread for use, _ in pairs),
        last=tuple(i for i, (use, _) in enumerate(pairs) if use.is_output),
        tail=any(use.slopes is not None for use, _ in pairs),
        shared=inputs.shared, unseen=not first.unseen.isdisjoint(names), idle=idle,
    )  # fmt: skip
    if generic and warn and not isinstance(params, LastLayer):
        warn_of_idle(call.model, generic)
    return tuple(blocks), plan, generic, outputs.shape[1]


def _recorded(
    call: Call, few: Inputs, parameters: dict[str, Tensor], params: Predicate | LastLayer
) -> tuple[tuple[str, ...], tuple[str, ...], Recording, FirstCall]:
    """Returns the names of the treated and the idle parameters, a recording, and a call with leaves."""
    names = () if isinstance(params, LastLayer) else select(params, parameters, type(call.model).__name__)
    watched = {name: value for name, value in parameters.items() if not value.is_complex()}  # layers are real
    frozen = [watched[name] for name in names if name in watched and not watched[name].requires_grad]
    with _explained(call.model):
        recording = _recorded_spread(call, few, watched, frozen)
    check_outputs(recording.outputs, "the first batch")
    if not isinstance(params, LastLayer):
        leaves = {name: real(parameters[name].detach()).requires_grad_() for name in names}
        with torch.enable_grad(), _explained(call.model):
            return names, (), recording, FirstCall(call, {name: parameters[name] for name in names}, leaves, few)
    names, idle, first = output_layers(call, few, parameters, recording)
    names = with_entries(names, parameters)
    late = {name: watched[name] for name in names if name in watched and not watched[name].requires_grad}
    if late:  # only these frozen parameters need gradients; masks and tables may not accept them
        elsewhere = call.traced(few, late, frozen=list(late.values())).elsewhere
        recording = recording._replace(elsewhere=recording.elsewhere | elsewhere)
    return names, idle, recording, first


def _recorded_spread(call: Call, inputs: Inputs, watched: Mapping[str, Tensor], frozen: Sequence[Tensor]) -> Recording:
    """Records the network with tables expanded over the samples, unless this changes its outputs."""
    try:
        outputs, noted, *_ = recording = call.traced(inputs, watched, inputs.samples, frozen)
    except OutputsWithPositions:
        raise
    except (LapwingError, RuntimeError, TypeError, ValueError, IndexError):  # it may reject the table's new shape
        return call.traced(inputs, watched, frozen=frozen)
    if any(use.spread for use in noted):
        with torch.no_grad(), without_compiled():
            plain = call.rows(inputs)
        tolerance = torch.finfo(plain.dtype).eps ** 0.5 * plain.abs().max().clamp_min(1.0)
        if plain.shape != outputs.shape or not (plain - outputs).abs().max() <= tolerance:
            return call.traced(inputs, watched, frozen=frozen)
    return recording


def _reasons(names: Sequence[str], used: Set[str], probed: Sequence[Probed], recording: Recording) -> dict[str, str]:
    """Returns name -> reason why the parameter is generic, or "" if a layer family may treat it."""
    reasons = {name: UNSEEN if name in used else IDLE for name in names}
    for use, _, axis in probed:
        for name in used & set(use.names.values()) if use.reached else ():
            if use.stale:
                reasons[name] = "its layer's input is modified in place"
            elif axis is None:
                reasons[name] = MIXED
            elif reasons[name] == UNSEEN:  # one use that is ruled out makes the parameter generic
                reasons[name] = ""
    for name in names:
        if recording.differentiated and not reasons[name]:
            reasons[name] = "the network takes gradients itself, which outputs may contain"
        elif name in recording.elsewhere and not reasons[name]:
            reasons[name] = "it also reaches the outputs by functions of no layer family"
    return reasons


def _conditional(probed: Sequence[Probed], parameters: Mapping[str, Tensor], samples: int, inputs: Inputs) -> list[str]:
    """Returns the names in layers shaped like one that not all samples reach, such as an expert.

    A layer that none of them reaches counts only if they are a part of the inputs, the first batch.
    """
    partial, some = set[str](), samples < inputs.samples
    for use, g, axis in probed:
        if use.reached and (some or g[2].any()) and not _reaches_all(use, g, axis, samples):
            partial.update(use.names.values())
    shapes = {parameters[name].shape for name in partial if parameters[name].ndim > 1}
    used = {name for use, *_ in probed for name in use.names.values()}
    layers = {name.rpartition(".")[0] for name in used if parameters[name].shape in shapes}
    return [name for name in used if name.rpartition(".")[0] in layers]


def _reaches_all(noted: RecordedUse, g: Tensor, axis: BatchAxis | None, samples: int) -> bool:
    """Whether each sample has a gradient g at a use. Without an axis only sizes and the two end samples show it."""
    if axis is not None:
        return bool(axis.front(g[2:], samples, 1)[0].flatten(1).any(1).all())
    return bool(g[0].any() and g[1].any()) and max(noted.out.shape[: noted.use.sample_dims]) >= samples


def warn_of_idle(model: nn.Module, reasons: Mapping[str, str]) -> None:
    """Warns of selected parameters that the outputs do not depend on."""
    idle = [name for name, reason in reasons.items() if reason == IDLE]
    if idle:
        log.warning(
            "%s has no gradient on the first batch for %d of the parameters to treat (%s): not used there, within "
            "torch.no_grad(), or in what the network keeps of an earlier call (which model.train().eval() may empty); "
            "they make every step slower, so leave them out if no other data use them: write %s.",
            type(model).__name__, len(idle), ", ".join(idle[:3]) + (", ..." if len(idle) > 3 else ""),
            f"params=lambda name, parameter: name not in {idle}" if len(idle) < 4 else "params=lw.last_layer",
        )  # fmt: skip


@contextlib.contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Replaces two errors of autograd by messages with a remedy."""
    try:
        yield
    except RuntimeError as error:
        explained = _explanation(str(error), type(model).__name__)
        if explained is None:
            raise
        raise explained from error


def _explanation(error: str, name: str) -> LapwingError | None:
    if "modified by an inplace operation" in error:
        return LapwingError(
            f"{name} overwrites a tensor that the gradients of an earlier call need, such as the input of a layer. Let "
            "forward() make a new tensor: write h = h * 2 instead of h.mul_(2)."
        )
    if "torch.utils.checkpoint" in error:
        return LapwingError(
            f"{name} calls torch.utils.checkpoint.checkpoint around parameters to treat, so it would run a second "
            "time, unseen. Turn checkpointing off, by model.gradient_checkpointing_disable(), "
            "model.set_grad_checkpointing(False) or a test of self.training in forward(), or leave these parameters "
            "out, for instance by params=lw.last_layer."
        )
    return None


def _few(call: Call, inputs: Inputs, rows: int) -> Inputs:
    """Returns the samples to probe. A single sample is repeated, if the network accepts two, to show the batch axis."""
    if inputs.samples > 1:
        few = torch.arange(min(rows, inputs.samples))
        return inputs.take(few)  # copies, because the network may write its inputs
    twice = inputs.take(torch.tensor([0, 0]))
    try:
        with torch.no_grad(), without_compiled():
            call.rows(twice)
    except (RuntimeError, TypeError, ValueError, IndexError):  # for instance a text model without padding
        return inputs
    return twice


def _of_few_rows(call: Call, inputs: Inputs, error: CallRefused) -> LapwingError:
    """Returns the error of the whole batch if the network rejects it, or else the error of the first few rows."""
    name = type(call.model).__name__
    try:
        with torch.no_grad(), without_compiled():
            outputs = call.rows(inputs)
    except CallRefused as whole:
        return whole
    with contextlib.suppress(Exception), torch.no_grad(), without_compiled():
        single = output_tensor(call(inputs.take(slice(1))))
        if single.numel() == outputs[0].numel() and single.shape[:1] != (1,):
            return LapwingError(
                f"The outputs of {name} have the shape {tuple(outputs.shape)} at {len(outputs)} samples, and no "
                "dimension of the batch at one sample: squeeze() removes it. Write squeeze(-1), or leave it out."
            )
    return LapwingError(
        f"{name} accepts the first batch, {inputs}, but not a few of its rows: "
        f"{error.reason}. Each row of the first dimension is a sample, and the network must accept any number. {JOINED}"
    )


def _repeats(call: Call, inputs: Inputs, outputs: Tensor, again: Tensor, tolerance: Tensor) -> bool:
    """Whether a second call, and calls of the first and the last sample, give the same outputs without random numbers.

    The call of the last sample finds the state that the network keeps of the first one, such as a hidden state.
    """
    with contextlib.suppress(Exception), torch.no_grad(), without_compiled(), PreservedState(call.model):
        before, parts = _generator_state(outputs.device), [(again, outputs)]
        for i in (0, len(outputs) - 1):
            single = call.rows(inputs.take(slice(i, i + 1)), state=contextlib.nullcontext())
            parts.append((single, outputs[i : i + 1]))
        drew = not torch.equal(before, _generator_state(outputs.device))
        same = all(one.shape == other.shape and (one - other).abs().max() <= tolerance for one, other in parts)
        return same and not drew
    return False


def _check_repeatable(
    call: Call, inputs: Inputs, outputs: Tensor, tolerance: Tensor, parameters: dict[str, Tensor]
) -> None:
    """Raises if outputs change with a second call, with a state that the network keeps, or with other samples."""
    name, versions = type(call.model).__name__, [leaf._version for leaf in inputs.tensors]
    with torch.no_grad(), without_compiled():
        before = _generator_state(outputs.device)
        with PreservedState(call.model):  # the second call finds what the first one kept, such as a hidden state
            old = {module: dict(vars(module)) for _, module in modules_of(call.model)}
            buffers = {path: buffer.clone() for path, buffer in call.model.named_buffers()}
            again = third = call.rows(inputs, state=contextlib.nullcontext())
            drew = not torch.equal(before, _generator_state(outputs.device))
            after = call.rows(inputs, state=contextlib.nullcontext())
            now = [(path, vars(module), old[module]) for path, module in modules_of(call.model) if module in old]
            kept = [path + name for path, held, was in now for name in held if held[name] is not was.get(name)]
            moved = [path for path, b in call.model.named_buffers() if path in buffers and not b.equal(buffers[path])]
        ends = [(call.rows(inputs.take(slice(i, i + 1))), outputs[i]) for i in sorted({0, outputs.shape[0] - 1})]
        if drew:
            third = call.rows(inputs)
    exact = 4 / 3 * torch.finfo(outputs.dtype).eps ** 0.5 * tolerance  # of identical calls with random numbers
    shapes = {again.shape, third.shape, outputs.shape}
    difference = max((again - outputs).abs().max(), (third - again).abs().max()) if len(shapes) == 1 else math.inf
    differs = difference > tolerance or (drew and (third - again).abs().max() > exact)
    continues = after.shape != again.shape or not torch.allclose(after, again, rtol=0.0, atol=float(tolerance))
    if moved and not drew and (differs or continues):
        raise LapwingError(
            f"Each call of {name} changes its buffers ({', '.join(moved[:3])}), and with them the outputs of the next "
            "one. Freeze them in eval mode: call model.apply(torch.ao.quantization.disable_observer) for observers, or "
            "write `if self.training:` above their update."
        )
    if differs:
        if versions != [leaf._version for leaf in inputs.tensors]:
            raise LapwingError(
                f"{name} writes its inputs in place, so that a second call on the same batch gives other outputs. Pass "
                "forward=lambda model, x: model(x.clone()), or write x = x + 1 instead of x += 1 in forward()."
            )
        same = drew or len(shapes) > 1 or (call.traced(inputs, parameters).outputs - outputs).abs().max() > tolerance
        if not same:
            raise LapwingError(
                f"{name} gives other outputs (by {float(difference):.2g}) if no gradient is needed, as the fast path "
                "of nn.TransformerEncoder does at padding. Leave the padding out of what follows, or call "
                "torch.backends.mha.set_fastpath_enabled(False)."
            )
        raise LapwingError(
            f"Two calls of {name} on the same batch give outputs that differ by {float(difference):.2g}. Call "
            "model.eval(), and turn off sampling, noise and augmentation inside forward(): write F.dropout(x, "
            "training=self.training) instead of F.dropout(x)."
        )
    if continues:
        path, _, attribute = (kept[0] if kept else "state").rpartition(".")
        owner = f"model.get_submodule({path!r})" if path else "model"
        raise LapwingError(
            f"{name} keeps a state from one call to the next ({', '.join(kept[:3]) or 'in a container'}"
            "), so its outputs depend on earlier calls. Reset it at each call: write forward=lambda model, inputs: "
            f"(setattr({owner}, {attribute!r}, None), model(inputs))[1]."
        )
    for single, in_batch in ends:  # also the last sample: a recurrence along the batch leaves the first one unchanged
        fits = single.shape[1:] == in_batch.shape
        distance = float((single[0] - in_batch).detach().abs().max()) if fits else math.inf
        if not distance <= tolerance:
            raise LapwingError(
                f"The output of {name} at one sample changes with the rest of the batch"
                f"{f' (by {distance:.2g})' if fits else ''}. Samples must be independent and lie along the first "
                "dimension of inputs and outputs: call model.eval(), use running statistics in batch norm, "
                "batch_first=True in recurrent layers, fixed steps in an adaptive solver, or wrap the model so that "
                f"the batch comes first.{SHARED_INPUT if sum(not each for each in inputs.shared) > 1 else ''}"
            )


def _generator_state(device: torch.device) -> Tensor:
    if device.type == "mps":
        return torch.mps.get_rng_state()
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _batch_axes(noted: Sequence[RecordedUse], gradients: Sequence[Tensor], samples: int) -> list[BatchAxis | None]:
    """Returns the axis of each use along which gradients of the first and last sample's outputs are 0 at other samples.

    The first candidates of all uses are checked together, since they nearly always hold: one transfer from the device.
    """

    def hold(axes: Iterable[tuple[BatchAxis, Tensor]]) -> bool:
        pairs = [axis.front(g, samples, 1)[:2].flatten(2) for axis, g in axes]  # each (2, B, rest)
        others = [part for first, last in pairs for part in (first[1:], last[: samples - 1]) if part.numel()]
        return float(get_total_norm(others, math.inf)) == 0

    pairs = []
    for use, g in zip(noted, gradients, strict=True):
        shape, dims = use.out.shape, range(use.use.sample_dims if use.reached else 0)
        axes = [BatchAxis(axis, inner) for axis in dims for inner in (False, True)]
        axes = [one for one in axes if one.fits(shape, samples) and not (one.inner and shape[one.axis] == samples)]
        pairs.append((axes, g))
    if hold((axes[0], g) for axes, g in pairs if axes):
        return [axes[0] if axes else None for axes, _ in pairs]
    return [next((axis for axis in axes if hold([(axis, g)])), None) for axes, g in pairs]


def _compare_with_autograd(
    probed: Sequence[Probed], samples: int, truth: dict[str, Tensor], reasons: dict[str, str], max_numbers: int
) -> None:
    """Sets the reason of parameters whose recorded uses do not add up to autograd's gradient."""
    differences, sizes, tolerances = [], [], []  # of the parameters
    for name in truth:
        dtype, total = accumulation_dtype(truth[name].dtype), None
        for use, g, axis in probed:
            for role, used in use.names.items():
                if used == name and axis is not None:
                    jacobian = use.use.jacobian(g[2:], axis, samples, frozenset((role,)), dtype, max_numbers)
                    matrix = use.use.matrix()
                    bias = role == "bias" and matrix is not None
                    single = Block(name, (name,), (tuple(truth[name].shape),), use.use.family, matrix, bias)
                    part = single.split(jacobian.sum_rows()[0])[name]
                    total = part if total is None else total + part
        dtypes = {truth[name].dtype, *(use.out.dtype for use, *_ in probed if name in use.names.values())}  # autocast's
        eps, wanted = max(torch.finfo(one).eps for one in dtypes), truth[name].to(dtype)
        differences.append((wanted if total is None else total - wanted).norm())
        sizes.append(wanted.norm())
        tolerances.append((3 * eps**0.5, 100 * eps * wanted.numel() ** 0.5))
    every = [norm.to(differences[0].device) for norm in (*differences, *sizes)]  # layers may be on several devices
    norms = torch.stack(every).tolist() if every else []  # one transfer from the device
    for name, difference, size, (relative, absolute) in zip(
        truth, norms, norms[len(truth) :], tolerances, strict=False
    ):
        if not reasons[name] and difference > relative * size + absolute:
            reasons[name] = "its recorded uses do not add up to autograd's gradient"
