"""Refusals of layers: functions that look at one layer, each for the kinds of layers that it concerns.

`probe.py` finds other layers that depend on the rest of the batch or on chance by running the network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn
from torch.nn.modules import batchnorm, dropout, instancenorm
from torch.nn.utils import parametrizations

from ..errors import LapwingError
from .module_state import modules_of

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
    """Returns the error for the first refusal, with the layers that it concerns."""
    reason, remedy, _ = found[0][0]
    first, *others = [layer for refusal, layer in found if refusal.reason == reason]
    if len(others) > 2:
        others[2:] = [f"{len(others) - 2} more"]
    also = f" (also {', '.join(others)})" if others else ""
    return LapwingError(f"The layer {first} of {type(model).__name__}{also} {reason}. {remedy}")


def quantized_layers(model: nn.Module) -> list[str]:
    """Returns the names of the quantized layers."""
    return [prefix[:-1] or type(layer).__name__ for prefix, layer in modules_of(model) if is_quantized(layer)]


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
