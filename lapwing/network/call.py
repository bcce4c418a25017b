"""A network, how a batch calls it, and what its outputs are. A `Call` runs the network in three ways.

Plainly (`rows`, `shaped`), with other values of some parameters (`rows_with`), and with a `Recording` of the parameters
that are used (`traced`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..data.batches import Forward
from ..data.inputs import Inputs
from ..errors import LapwingError, shown
from ..linalg import possible
from .call_errors import blames_inputs, of_inputs, of_outputs
from .eager import eager_math, native, transformed, without_compiled
from .entry import network_precision
from .functional import StandIns
from .positions import Positions
from .stamp import PreservedState
from .tracing import KnownCalls, Recorder, Recording

OUTPUT_KEYS = "logits", "out"
"""Keys of the outputs in a returned dict, as Hugging Face and torchvision (segmentation) name them."""

EXCLUDED = -3e4
"""Logit of an impossible class, relative to the mean of the possible ones near 0. float16 can express it."""

_DIFFERENTIATING: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Networks that take gradients in their forward pass, for example to get forces. They run under `enable_grad`."""


@dataclass(frozen=True)
class Call:
    """Calls a network on a batch's inputs: `model(x)`, `model(*x)`, `model(**x)`, or the user's `forward`."""

    model: nn.Module
    forward: Forward | None = None  # the user's `forward(model, inputs)`, or None
    activation: str | None = None  # from logits to probabilities: "softmax", or "sigmoid" for each output on its own
    layout: Positions | None = None  # of outputs with positions; None if they are not known to have any
    looks: bool = True  # outputs without impossible classes stay the same object, which waits for the device
    known: KnownCalls = field(default_factory=KnownCalls, init=False, repr=False, compare=False)

    def __call__(self, inputs: Inputs) -> Any:
        """Calls the network and returns its result unchanged."""
        model, forward, value = self.model, self.forward, inputs.value
        if forward is None and isinstance(value, Tensor):
            return model(value)
        if callable(forward):
            return forward(model, value)
        return self._unpacked(value)

    def _unpacked(self, value: Any) -> Any:
        """Calls the network with a tuple or a dict of inputs; raises for other inputs, and a wrong `forward`."""
        model, forward = self.model, self.forward
        if forward is not None:
            raise LapwingError(
                f"forward={shown(forward)} is not a function of the model and a batch's inputs. Write forward=lambda "
                "model, inputs: model(inputs)."
            )
        if isinstance(value, Mapping):
            if not all(isinstance(name, str) for name in value):
                raise LapwingError(
                    f"The inputs are a dict with the keys {shown(list(value))}, and {type(model).__name__} is called "
                    "as model(**inputs). Name each input by a string: {'x': x}."
                )
            translates = hasattr(model, "prepare_decoder_input_ids_from_labels")
            if translates and not any(name.startswith("decoder_input") for name in value):
                raise LapwingError(
                    f"{type(model).__name__} also reads the tokens before each label, and the labels are only targets "
                    "here. Let the batches hold decoder_input_ids: transformers.DataCollatorForSeq2Seq(tokenizer, "
                    "model=model) adds them."
                )
            return model(**value)
        if isinstance(value, (tuple, list)):
            return model(*value)
        raise LapwingError(
            f"The inputs have the type {type(value).__name__}, and {type(model).__name__} is called with a tensor, a "
            "tuple or a dict of tensors. Pass forward=lambda model, inputs: model(...) to say how it is called."
        )

    def shaped(
        self, inputs: Inputs, mode: AbstractContextManager | None = None, state: AbstractContextManager | None = None
    ) -> Tensor:
        """Runs the network and returns its outputs (B, C), or outputs with positions in their own shape.

        Outputs (B,) become (B, 1). If the network returns an object, the outputs are its `.logits`; if it returns a
        dict, they are the entry of the first of `OUTPUT_KEYS`. Only the network runs in the context `mode`: a function
        mode would also see the checks of its outputs. `state` restores the modules; None means a new `PreservedState`.
        """
        plain = not torch.is_grad_enabled() and not transformed()
        graph = plain and self.model in _DIFFERENTIATING
        state = state or PreservedState(self.model)
        try:
            with network_precision(), state, torch.enable_grad() if graph else nullcontext():
                with mode or nullcontext():
                    returned = self(inputs)
                out = output_tensor(returned)  # which may be the network's own attribute
            out = out.detach() if graph and isinstance(out, Tensor) else out
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            if plain and not graph and "does not require grad" in str(error):
                _DIFFERENTIATING.add(self.model)
                return self.shaped(inputs, mode, state)
            if blames_inputs(inputs, error):
                raise of_inputs(self.model, self.forward, inputs, error) from error
            raise
        dims, samples = out.ndim if isinstance(out, Tensor) and out.is_floating_point() else 0, inputs.samples
        laid_out = dims == 2 or (self.layout is not None and 3 <= dims <= 5)
        if not laid_out or out.shape[0] != samples or (samples and not out.numel()):
            raise of_outputs(self.model, self.forward, inputs, returned, out)
        return finite(out, self.activation, self.looks, -1 if self.layout is None or dims == 2 else self.layout.axis)

    def rows(
        self, inputs: Inputs, mode: AbstractContextManager | None = None, state: AbstractContextManager | None = None
    ) -> Tensor:
        """Runs the network as `shaped` does, and returns a matrix (B, C), or (B, T C) with positions."""
        outputs = self.shaped(inputs, mode, state)
        return outputs if self.layout is None else self.layout.matrix(outputs)

    def rows_with(
        self, values: Mapping[str, Tensor], own: Mapping[str, Tensor], inputs: Inputs, unseen: bool = False
    ) -> Tensor:
        """Returns the rows with other values of some of the network's own parameters; `real` ones if those are complex.

        If the network bypasses function modes (`unseen`), the values are set in the module during the call.
        """
        values = native(values, own)
        if not unseen:
            with without_compiled():
                return self.rows(inputs, StandIns(own, values))
        with eager_math(), PreservedState(self.model):
            named = {f"model.{name}": value for name, value in values.items()}
            return functional_call(CallModule(self), named, (inputs.value,))

    def traced(
        self,
        inputs: Inputs,
        watched: Mapping[str, Tensor],
        spread: int = 1,
        frozen: Sequence[Tensor] = (),
        repeats: bool = False,
    ) -> Recording:
        """Runs the uncompiled network once, recording the watched parameters.

        Embeddings of a single row of tokens are expanded over `spread` samples. `frozen` are watched parameters without
        requires_grad whose use the graph must show. With `repeats`, the call may repeat a known one of these `watched`.
        """
        with torch.enable_grad(), without_compiled():
            module, uses = self.known.find(watched, inputs) if repeats else (None, 0)
            state = self.known.state
            if module is not None and state is not None:
                recorder = Recorder(watched, spread, frozen)
                shaped = self.shaped(inputs, recorder.since_call_of(module), state.after_errors())
                recording = recorder.recording_of(shaped, self.layout, inputs)
                if len(recording.noted) == uses and recording.plain and not recording.routed:
                    return recording
            if state is None or not state.is_same():
                state = PreservedState(self.model)
            recorder = Recorder(watched, spread, frozen)
            recording = recorder.recording_of(self.shaped(inputs, recorder, state), self.layout, inputs)
            if repeats:
                self.known.add(watched, inputs, state, recording, whole=recorder.rounds or module is not None)
        return recording


class CallModule(nn.Module):
    """A call as a module from inputs to rows (B, C)."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.model, self._call = call.model, call

    def forward(self, inputs: Any) -> Tensor:
        return self._call.rows(Inputs(inputs))


def output_tensor(out: Any) -> Any:
    """Returns the tensor of outputs in the result of a network, (B,) as (B, 1), or None if there is no such tensor."""
    if not isinstance(out, Tensor):
        named = next((out[key] for key in OUTPUT_KEYS if key in out), None) if isinstance(out, Mapping) else None
        out = getattr(out, "logits", named)
    return out[:, None] if isinstance(out, Tensor) and out.ndim == 1 else out


def finite(outputs: Tensor, activation: str | None, looks: bool = True, axis: int = -1) -> Tensor:
    """Returns outputs with other logits of impossible classes: -inf, or far below all others, such as masked actions.

    Masks may differ between samples and batches. Before a sigmoid only -inf is replaced. Before a softmax impossible
    logits become the mean of the possible ones minus 30 000 or more. So their probability stays 0, and their gradient
    is the mean gradient of the possible ones. Links subtract the average over all classes, which then equals the
    average over the possible ones. Outputs that are not logits stay.
    """
    if activation is None:
        return outputs
    softmax = activation == "softmax"
    mask = possible(outputs.detach(), axis) if softmax else outputs != -torch.inf
    if looks and bool(mask.all()):
        return outputs
    if not softmax:
        return torch.where(mask, outputs, EXCLUDED)
    mean = torch.where(mask, outputs, 0.0).sum(axis, keepdim=True) / mask.sum(axis, keepdim=True)
    return torch.where(mask, outputs, mean + (EXCLUDED - mean.detach().abs()))  # far below the mean of any size
