"""The gate: checks the memory budget, the network and each batch once, before the tangent uses them.

A network must have weights and no layer that `REFUSALS` finds. `probe.py` finds other layers that depend on the rest of
the batch or on chance by running the network. `recording_plan.py` and `sample_axis.py` compare later calls with the
first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, dropout, instancenorm
from torch.nn.utils import parametrizations

from ..data.inputs import Inputs
from ..errors import LapwingError, shown
from .eager import modules_of, own_parameters, uncompiled

DEFAULT_MEMORY = 2**30
"""Default memory budget for one chunk of samples, in bytes: 1 GiB, or an eighth of a GPU's memory if that is more."""


def checked_memory(memory: int | None, model: nn.Module) -> int:
    """Returns the budget in bytes.

    On a GPU, short chunks wait for the launches of kernels: ResNet-20, KFAC and 128 images at once take an H100 96
    forward passes with 1 GiB and 31 with 4 GiB.
    """
    device = next(iter(own_parameters(model).values())).device
    if memory is None and device.type == "cuda":
        return max(DEFAULT_MEMORY, torch.cuda.mem_get_info(device)[1] // 8)
    memory = DEFAULT_MEMORY if memory is None else memory
    if not isinstance(memory, int) or not 2**24 <= memory < 2**63:
        raise LapwingError(
            f"memory={shown(memory)} is not an int of at least {2**24} bytes (16 MiB). Write memory=2**30 for 1 GiB."
        )
    return memory


def checked_network(model: Any, last_layer: bool = True) -> nn.Module:
    """Returns the network without its `torch.compile` wrapper, or raises a LapwingError.

    With `last_layer`, only that is treated, and layers before it may be quantized with fixed scales.
    """
    if not isinstance(model, nn.Module):
        raise _no_module(model)
    model = uncompiled(model)
    named = own_parameters(model)
    sharded = any(kind.__name__ == "FSDPModule" for module in model.modules() for kind in type(module).__mro__)
    check_layers(model, last_layer)
    if not named:
        raise LapwingError(
            f"{type(model).__name__} has no parameters. Pass the nn.Module that holds the trained weights."
        )
    for name, value in named.items():
        sharded = sharded or type(value).__name__ == "DTensor"
        if isinstance(value, nn.UninitializedParameter) or sharded or value.is_meta or value.is_inference():
            raise _unusable(type(model).__name__, name, value)
    return model


def _no_module(model: Any) -> LapwingError:
    return LapwingError(
        f"The model has the type {type(model).__name__} and must be a torch.nn.Module with trained weights. Pass "
        "the module itself, with forward=lambda model, inputs: ... where it is not called as model(x)."
    )


def _unusable(model: str, name: str, value: Tensor) -> LapwingError:
    empty = isinstance(value, nn.UninitializedParameter)
    if empty or value.is_meta:
        return LapwingError(
            f"The parameter {name} of {model} holds no numbers ("
            f"{'not initialised' if empty else 'on the meta device'}). Load trained weights first: "
            "model.load_state_dict(torch.load(path), assign=True)."
        )
    if value.is_inference():
        return LapwingError(
            f"The parameter {name} of {model} was made in torch.inference_mode(), where no "
            "gradients exist. Build and load the network outside it."
        )
    return LapwingError(
        f"The weights of {model} (such as {name}) are sharded over processes, and lapwing needs "
        "whole weights: fit its last layer on its features as docs/scaling.md shows, or load its full state "
        "dict into a network that is not sharded."
    )


EVAL = "Call model.eval() first."


class Refusal(NamedTuple):
    """Why lapwing cannot use a layer."""

    reason: str  # the end of a sentence that begins with the layer
    remedy: str  # a sentence that says what to do; `{path}` is the layer's path
    only_all_weights: bool = False  # whether the layer may stay if only the last layer is treated


def rescales_its_weights(layer: nn.Embedding | nn.EmbeddingBag) -> Refusal | None:
    """Refuses embeddings with max_norm."""
    if layer.max_norm is None:
        return None
    return Refusal(
        f"has max_norm={layer.max_norm}, which writes the weights at every call, also after model.eval()",
        "Write model.get_submodule({path!r}).max_norm = None, once the weights are within it.",
    )


def uses_statistics_of_the_batch(layer: batchnorm._BatchNorm) -> Refusal | None:
    """Refuses batch norm in training mode or without running statistics."""
    if layer.running_mean is None:
        return Refusal(
            "has no running statistics, so a sample's output depends on the rest of the batch also after model.eval()",
            f"Train with {type(layer).__name__}({layer.num_features}, track_running_stats=True).",
        )
    if layer.training:
        return Refusal("is in training mode, where a sample's output depends on the rest of the batch", EVAL)
    return None


def writes_its_statistics(layer: nn.Module) -> Refusal | None:
    """Refuses instance and spectral norm that update their statistics; instance norm may keep none."""
    if layer.training and getattr(layer, "track_running_stats", True):
        return Refusal("is in training mode, where every call writes its statistics", EVAL)
    return None


def drops_at_random(layer: nn.Module) -> Refusal | None:
    """Refuses active dropout."""
    if _dropout_rate(layer) > 0:
        return Refusal("is in training mode, where two identical calls differ", EVAL)
    return None


DYNAMIC = Refusal(
    "is quantized dynamically: no gradients pass through it, and its rounding of one sample depends on the rest of the "
    "batch",
    "Fit the network before it is quantized. Or fit a head that is kept in floating point as a network of its own, on "
    "features that the layers before it give: lw.fit(head, [(features, targets)]).",
)
QUANTIZED = Refusal(
    "is quantized, and no gradients pass through it",
    "Fit the network before it is quantized, or treat a last layer that is kept in floating point: "
    "params=lw.last_layer.",
    only_all_weights=True,
)


def is_quantized(layer: nn.Module) -> Refusal | None:
    """Refuses quantized layers. Layers with fixed scales may come before a last layer in floating point."""
    place = type(layer).__module__
    if ".quantized" not in place:
        return None
    return DYNAMIC if ".quantized.dynamic" in place else QUANTIZED


REFUSALS: tuple[tuple[tuple[type[nn.Module], ...], Callable[..., Refusal | None]], ...] = (
    ((nn.Embedding, nn.EmbeddingBag), rescales_its_weights),
    ((batchnorm._BatchNorm,), uses_statistics_of_the_batch),
    ((instancenorm._InstanceNorm, parametrizations._SpectralNorm), writes_its_statistics),
    ((dropout._DropoutNd, nn.MultiheadAttention, nn.RNNBase), drops_at_random),
    ((nn.Module,), is_quantized),
)
"""Kinds of layers, and the function that returns why a layer of these kinds is refused; None if it is not."""


def check_layers(model: nn.Module, last_layer: bool = True) -> None:
    """Raises for the first refusal that is found, with up to three of the layers that it concerns."""
    found: list[tuple[Refusal, str]] = []
    for prefix, layer in modules_of(model):
        for kinds, look in REFUSALS:
            refusal = look(layer) if isinstance(layer, kinds) else None
            if refusal is not None and not (last_layer and refusal.only_all_weights):
                path = prefix[:-1]
                found.append((refusal._replace(remedy=refusal.remedy.format(path=path)), _shown(path, layer)))
    if found:
        raise _refused(model, found)


def _refused(model: nn.Module, found: list[tuple[Refusal, str]]) -> LapwingError:
    reason, remedy, _ = found[0][0]
    first, *others = [layer for refusal, layer in found if refusal.reason == reason]
    if len(others) > 2:
        others[2:] = [f"{len(others) - 2} more"]
    also = f" (also {', '.join(others)})" if others else ""
    return LapwingError(f"The layer {first} of {type(model).__name__}{also} {reason}. {remedy}")


def _shown(path: str, layer: nn.Module) -> str:
    kind, rate = type(layer).__name__, _dropout_rate(layer)
    return f"{path or kind} ({kind}{f', p={rate}' if rate > 0 else ''})"


def _dropout_rate(layer: nn.Module) -> float:
    """Returns the probability with which a layer drops entries at present."""
    if not layer.training:
        return 0.0
    if isinstance(layer, dropout._DropoutNd):
        return layer.p
    if isinstance(layer, nn.MultiheadAttention) or (isinstance(layer, nn.RNNBase) and layer.num_layers > 1):
        return layer.dropout
    return 0.0


def writes_itself(model: nn.Module, written: str) -> LapwingError:
    """Returns the error for a network whose calls in eval mode write the parameter or buffer of this name."""
    return LapwingError(
        f"{type(model).__name__} writes {written} whenever it is called, also in eval mode, but a posterior "
        "describes fixed weights. Let forward() write it only if self.training, or register it by "
        "register_buffer(..., persistent=False) if it is a buffer that the outputs do not depend on."
    )


def check_inputs(inputs: Inputs, shared: Sequence[bool], where: str) -> Inputs:
    """Returns inputs marked as checked. Raises if a tensor is not dense or finite, or is shared although it has B rows.

    `shared` says for each tensor of the first batch whether all samples shared it. It is empty for the first batch.
    """
    if inputs.spreads:
        raise LapwingError("lw.Uncertain inputs are not supported here. Pass their values.")
    inputs.check_finite(where)
    if any(shared):
        _check_shared(inputs, shared)
    return replace(inputs, checked=True)


def _check_shared(inputs: Inputs, shared: Sequence[bool]) -> None:
    """Raises if a tensor that the samples of the first batch shared has as many rows as there are samples."""
    samples, now = inputs.samples, inputs.shared
    if samples > 1 and len(now) == len(shared) and any(was > still for was, still in zip(shared, now, strict=True)):
        raise LapwingError(
            f"A tensor that the samples of the first batch shared has the length {samples} of this batch, {inputs}, so "
            "it could also hold one row for each sample. Pass it in another shape, such as shared[None], or let "
            "forward=lambda model, inputs: model(inputs, shared) hold it."
        )
