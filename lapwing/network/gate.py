"""What is asked of a budget, of a network, and of each batch before the tangent reads them.

A network must have weights, be in eval mode, and do on every batch what it did on the first. Whether its layers also
hold the samples alike is `attribution.py`'s to say.
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
    """Returns the budget in bytes (case 15 otherwise)."""
    memory = DEFAULT_MEMORY if memory is None else memory
    if not isinstance(memory, int) or memory < 2**24:
        raise LapwingError(
            f"Asked to work within memory={shown(memory)} bytes; an int of at least {2**24} (16 MiB) is needed: "
            "write memory=2**30 for 1 GiB."
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
            f"Asked to treat a model of type {type(model).__name__}; a torch.nn.Module with trained weights is needed: "
            "pass the module itself, with forward=lambda model, inputs: ... where it is not called as model(x)."
        )
    model = uncompiled(model)
    named = parameters_of(model)
    _check_quantized(model, last_layer)
    if not named:
        raise LapwingError(
            f"Asked to treat the parameters of {type(model).__name__}, found that it has none; a network with trained "
            "weights is needed: pass the nn.Module that holds them."
        )
    for name, value in named.items():
        if value.is_meta or isinstance(value, nn.UninitializedParameter):
            raise LapwingError(
                f"Asked to treat {type(model).__name__}, found that its parameter {name} holds no numbers "
                f"({'on the meta device' if value.is_meta else 'not initialised'}); trained weights are needed: write "
                "model.load_state_dict(torch.load(path), assign=True) first."
            )
        if value.is_inference():
            raise LapwingError(
                f"Asked to treat {type(model).__name__}, found that its parameter {name} was made in "
                "torch.inference_mode(), where no gradients exist; ordinary parameters are needed: build and load the "
                "network outside it."
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
    """Raises for batch norm (case 12) and dropout (case 11) in training mode, and for layers that write themselves."""
    for prefix, module in modules_of(model):
        normalises = isinstance(module, nn.modules.batchnorm._BatchNorm)
        renormalises = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
        if not (normalises or renormalises or module.training):
            continue
        kind = type(module).__name__
        name = prefix[:-1] or kind
        if renormalises:
            raise LapwingError(
                f"Asked to treat {type(model).__name__}, found its layer {name} ({kind}) with max_norm="
                f"{module.max_norm}, which writes the weights at every call, also after model.eval(); weights that "
                f"stay are needed: write model.get_submodule({prefix[:-1]!r}).max_norm = None, once they are within it."
            )
        if normalises and module.running_mean is None:
            raise LapwingError(
                f"Asked to treat {type(model).__name__}, found its layer {name} ({kind}) without running "
                "statistics, so that a sample's output depends on the rest of the batch also after model.eval(); "
                f"running statistics are needed: train with {kind}({module.num_features}, track_running_stats=True)."
            )
        if not module.training:
            continue
        if normalises:
            raise LapwingError(
                f"Asked to treat {type(model).__name__}, found its layer {name} ({kind}) in training mode, "
                "where a sample's output depends on the rest of the batch; running statistics are needed: call "
                "model.eval() first."
            )
        if isinstance(module, WRITERS) and getattr(module, "track_running_stats", True):
            raise LapwingError(
                f"Asked to treat {type(model).__name__}, found its layer {name} ({kind}) in training mode, where every "
                "call writes its statistics; a network that stays as it is is needed: call model.eval() first."
            )
        rate = _dropout_rate(module)
        if rate > 0:
            raise LapwingError(
                f"Asked to treat {type(model).__name__}, found its layer {name} ({kind}, p={rate}) in training "
                "mode, where two identical calls differ; a deterministic network is needed: call model.eval() first."
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


def check_inputs(model: nn.Module, inputs: Any, shared: Sequence[bool], where: str) -> Checked:
    """Lets a batch through before the network runs on it.

    Args:
        model: the network.
        inputs: the batch.
        shared: which tensors of the first batch all its samples shared.
        where: what an error calls the batch.

    Raises:
        LapwingError: for tensors that are not dense or not finite, and for tensors that the samples share and whose
            length is the number of samples.
    """
    batches.check_inputs(inputs, where)
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


def check_recording(model: nn.Module, inputs: Any, recording: Recording, outputs: int) -> None:
    """Checks what the network did: outputs of the first batch's width, and weights that count as they did there.

    Args:
        model: the network.
        inputs: the batch.
        recording: of that batch.
        outputs: C of the first batch.

    Raises:
        LapwingError: for outputs that are not finite or of another shape; where covered parameters, or what their
            layers saw, count in ways that the first batch did not show.
    """
    batches.check_outputs(recording.outputs, "these inputs")
    name = type(model).__name__
    if recording.outputs.shape[1] != outputs:
        raise LapwingError(
            f"Asked for the {outputs} outputs of {name} at {batches.describe(inputs)}, "
            f"found outputs of shape {tuple(recording.outputs.shape)}; as many as on the first batch are needed: check "
            "the shape of the inputs, and give a single sample as x[None]."
        )
    stale = [min(use.names.values()) for use in recording.noted if use.stale]
    found = ""
    if recording.elsewhere:
        found = f"it also uses {min(recording.elsewhere)} in another way"
    elif recording.differentiated and recording.noted:
        found = "it takes gradients"
    elif stale:
        found = f"the input of the layer of {stale[0]} is written in place after the call"
    if found:
        raise LapwingError(
            f"Asked to run {name} as on the first batch, found that {found}, which was not so "
            "there; the same on every batch is needed: put a batch that shows it first, or leave the parameter out "
            "with params=lambda name, parameter: ..."
        )
