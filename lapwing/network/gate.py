"""The gate: what a budget, a network and a batch must be, checked once before the tangent uses them.

A network must have weights, be in eval mode, and do on every batch what it did on the first. Whether its layers also
hold the samples on the same dimension is checked in `sample_axis.py`. What has passed is `Checked`, and is not checked
again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrizations

from ..errors import LapwingError, shown
from . import batches
from .eager import parameters_of, uncompiled
from .module_state import modules_of
from .tracing import Recording

DEFAULT_MEMORY = 2**30
"""Budget in bytes for what the library holds of one chunk of samples: 1 GiB."""

WRITERS = (nn.modules.instancenorm._InstanceNorm, parametrizations._SpectralNorm)
"""Layers besides batch norm that write buffers in training mode; instance norm only where it tracks statistics."""


def checked_memory(memory: int | None) -> int:
    """Returns the budget in bytes."""
    memory = DEFAULT_MEMORY if memory is None else memory
    if not isinstance(memory, int) or not 2**24 <= memory < 2**63:
        raise LapwingError(
            f"memory={shown(memory)} is not an int of at least {2**24} bytes (16 MiB). Write memory=2**30 for 1 GiB."
        )
    return memory


def checked_network(model: Any, last_layer: bool = True) -> nn.Module:
    """Returns the uncompiled network, checked to be one with weights and in eval mode.

    Args:
        model: what the user gave.
        last_layer: whether its last layer alone is treated, before which layers with fixed scales may be quantized.
    """
    if not isinstance(model, nn.Module):
        raise LapwingError(
            f"The model has the type {type(model).__name__} and must be a torch.nn.Module with trained weights. Pass "
            "the module itself, with forward=lambda model, inputs: ... where it is not called as model(x)."
        )
    model = uncompiled(model)
    named = parameters_of(model)
    sharded = any(kind.__name__ == "FSDPModule" for module in model.modules() for kind in type(module).__mro__)
    _check_quantized(model, last_layer)
    if not named:
        raise LapwingError(
            f"{type(model).__name__} has no parameters. Pass the nn.Module that holds the trained weights."
        )
    for name, value in named.items():
        if value.is_meta or isinstance(value, nn.UninitializedParameter):
            raise LapwingError(
                f"The parameter {name} of {type(model).__name__} holds no numbers ("
                f"{'on the meta device' if value.is_meta else 'not initialised'}). Load trained weights first: "
                "model.load_state_dict(torch.load(path), assign=True)."
            )
        if type(value).__name__ == "DTensor" or sharded:
            raise LapwingError(
                f"The weights of {type(model).__name__} (such as {name}) are sharded over processes, and lapwing needs "
                "whole weights: fit its last layer on its features as docs/scaling.md shows, or load its full state "
                "dict into a network that is not sharded."
            )
        if value.is_inference():
            raise LapwingError(
                f"The parameter {name} of {type(model).__name__} was made in torch.inference_mode(), where no "
                "gradients exist. Build and load the network outside it."
            )
    check_mode(model)
    return model


def quantized_layers(model: nn.Module) -> list[str]:
    """Returns the names of the layers whose weights are quantized."""
    named = model.named_modules()
    return [name or type(module).__name__ for name, module in named if ".quantized" in type(module).__module__]


def _check_quantized(model: nn.Module, last_layer: bool) -> None:
    """Raises for quantized layers, through which no gradients pass."""
    quantized = quantized_layers(model)
    if not quantized:
        return
    where = f"The layer {quantized[0]} of {type(model).__name__} is quantized"
    if any(".quantized.dynamic" in type(module).__module__ for module in model.modules()):
        raise LapwingError(
            f"{where} dynamically: no gradients pass through it, and its rounding of one sample depends on the rest of "
            "the batch. Fit the network before it is quantized. Or fit a head that is kept in floating point as a "
            "network of its own, on features that the layers before it give: lw.fit(head, [(features, targets)])."
        )
    if not last_layer:
        raise LapwingError(
            f"{where}, and no gradients pass through it. Fit the network before it is quantized, or treat a last layer "
            "that is kept in floating point: params=lw.last_layer."
        )


def check_mode(model: nn.Module) -> None:
    """Raises for batch norm and dropout in training mode, and for layers that write themselves."""
    for prefix, module in modules_of(model):
        normalises = isinstance(module, nn.modules.batchnorm._BatchNorm)
        renormalises = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
        if not (normalises or renormalises or module.training):
            continue
        kind = type(module).__name__
        rate = _dropout_rate(module) if module.training else 0.0
        dropping = f", p={rate}" if rate > 0 else ""
        layer = f"The layer {prefix[:-1] or kind} ({kind}{dropping}) of {type(model).__name__}"
        if renormalises:
            raise LapwingError(
                f"{layer} has max_norm={module.max_norm}, which writes the weights at every call, also after "
                f"model.eval(). Write model.get_submodule({prefix[:-1]!r}).max_norm = None, once they are within it."
            )
        if normalises and module.running_mean is None:
            raise LapwingError(
                f"{layer} has no running statistics, so a sample's output depends on the rest of the batch also after "
                f"model.eval(). Train with {kind}({module.num_features}, track_running_stats=True)."
            )
        if not module.training:
            continue
        if normalises:
            raise LapwingError(
                f"{layer} is in training mode, where a sample's output depends on the rest of the batch. Call "
                "model.eval() first."
            )
        if isinstance(module, WRITERS) and getattr(module, "track_running_stats", True):
            raise LapwingError(
                f"{layer} is in training mode, where every call writes its statistics. Call model.eval() first."
            )
        if rate > 0:
            raise LapwingError(
                f"{layer} is in training mode, where two identical calls differ. Call model.eval() first."
            )


def check_constant(model: nn.Module, written: str | None) -> None:
    """Raises where calls of the network in eval mode have written one of its parameters or buffers, by that name."""
    if written is not None:
        raise LapwingError(
            f"{type(model).__name__} writes {written} whenever it is called, also in eval mode, but a posterior "
            "describes fixed weights. Let forward() write it only if self.training, or register it by "
            "register_buffer(..., persistent=False) if it is a buffer that the outputs do not depend on."
        )


def _dropout_rate(module: nn.Module) -> float:
    """Returns how much a layer in training mode drops."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p
    if isinstance(module, nn.MultiheadAttention) or (isinstance(module, nn.RNNBase) and module.num_layers > 1):
        return module.dropout
    return 0.0


@dataclass(frozen=True)
class Checked:
    """Inputs that have passed the gate. What accepts them looks at them no more.

    Attributes:
        inputs: tensors that are dense and finite, alone or in tuples, lists and dicts.
        samples: B.
    """

    inputs: Any
    samples: int

    def take(self, rows: slice | Tensor) -> Checked:
        """Returns some of the samples."""
        part = batches.take(self.inputs, rows)
        return Checked(part, batches.size(part))

    def chunks(self, length: int) -> Iterator[tuple[slice, Checked]]:
        """Yields consecutive slices of at most `length` samples, with their inputs."""
        for rows, part in batches.chunks(self.inputs, length):
            yield rows, Checked(part, rows.stop - rows.start)


def check_inputs(inputs: Any, shared: Sequence[bool], where: str) -> Checked:
    """Lets a batch through before the network runs on it.

    Args:
        inputs: the batch.
        shared: which tensors of the first batch all its samples shared; empty for the first batch itself.
        where: what an error calls the batch.

    Raises:
        LapwingError: for tensors that are not dense or not finite, and for tensors that the samples share and whose
            length is the number of samples.
    """
    batches.check_finite(inputs, where)
    samples = batches.size(inputs)
    if samples > 1 and any(shared):
        now = batches.shared(inputs)
        if len(now) == len(shared) and any(was and not still for was, still in zip(shared, now, strict=True)):
            raise LapwingError(
                f"A tensor that the samples of the first batch shared has the length {samples} of this batch, "
                f"{batches.describe(inputs)}, so it could also hold one row for each sample. Pass it in another "
                f"shape, such as shared[None], or let forward=lambda model, inputs: model(inputs, shared) hold it."
            )
    return Checked(inputs, samples)


def check_recording(
    model: nn.Module, inputs: Any, recording: Recording, outputs: int, late: list[Tensor] | None = None
) -> None:
    """Checks what the network did: outputs of the first batch's width C, and weights that count as they did there.

    Where `late` is a list, it gets which samples have outputs that are not finite, for the caller to look at.

    Raises:
        LapwingError: for outputs that are not finite or of another shape; where covered parameters, or what their
            layers got, count in ways that the first batch did not show.
    """
    if late is None:
        batches.check_outputs(recording.outputs, "these inputs")
    else:
        late.append(~recording.outputs.isfinite().all(-1))
    name = type(model).__name__
    if recording.outputs.shape[1] != outputs:
        raise LapwingError(
            f"The outputs of {name} have the shape {tuple(recording.outputs.shape)} at {batches.describe(inputs)}, and "
            f"there were {outputs} for each sample on the first batch. Check the shape of the inputs, and pass a "
            "single sample as x[None]."
        )
    stale = [min(use.names.values()) for use in recording.noted if use.stale]
    difference = ""
    if recording.elsewhere:
        difference = f"also uses {min(recording.elsewhere)} in another way"
    elif recording.differentiated and recording.noted:
        difference = "takes gradients"
    elif stale:
        difference = f"writes the input of the layer of {stale[0]} in place after the call"
    if difference:
        raise LapwingError(
            f"{name} {difference}, which it did not do on the first batch. Put a batch that shows it first, or leave "
            "the parameter out with params=lambda name, parameter: ..."
        )
