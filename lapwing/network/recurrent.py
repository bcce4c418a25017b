"""Recurrent layers as plain operations, so that layer families see the weights of `torch.lstm`, `gru` and `rnn_tanh`.

The fused kernels have no batched backward pass. Here one linear layer multiplies the inputs of all T steps by
`weight_ih`. The products of the states with `weight_hh` are recorded once for all steps: each step adds a row of zeros
Z (T, B, O) to its product, so the gradients at Z are the gradients at the products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..jacobian.layers import Watched, register_reader
from ..jacobian.layers.linear import LinearUse

Intercept = Callable[[Callable, tuple, dict], Any]
"""Function that calls another one with (args, kwargs), and records the use of a weight."""

States = tuple[Tensor, ...]
"""States (B, H) of a layer or cell; those of an LSTM are its outputs and its cells."""

Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Weights of the inputs and of the states in one layer and direction, their biases, and the weights of a projection."""

Step = Callable[[Tensor, Tensor, States], States]
"""Contributions of inputs and of states to the gates (B, gates H), and the states before a step -> those after."""


def _lstm(inputs: Tensor, states: Tensor, before: States) -> States:
    i, f, g, o = (inputs + states).chunk(4, 1)
    cell = torch.sigmoid(f) * before[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru(inputs: Tensor, states: Tensor, before: States) -> States:
    width = before[0].shape[1]
    reset, update = torch.sigmoid(inputs[:, : 2 * width] + states[:, : 2 * width]).chunk(2, 1)
    new = torch.tanh(inputs[:, 2 * width :] + reset * states[:, 2 * width :])
    return (new + update * (before[0] - new),)


def _rnn_tanh(inputs: Tensor, states: Tensor, before: States) -> States:
    return (torch.tanh(inputs + states),)


def _rnn_relu(inputs: Tensor, states: Tensor, before: States) -> States:
    return (torch.relu(inputs + states),)


LAYERS: dict[Callable, Step] = {
    torch.lstm: _lstm, torch.gru: _gru, torch.rnn_tanh: _rnn_tanh, torch.rnn_relu: _rnn_relu,
}  # fmt: skip
"""Recurrent layer of torch -> its step."""

CELLS: dict[Callable, Step] = {
    torch.lstm_cell: _lstm, torch.gru_cell: _gru, torch.rnn_tanh_cell: _rnn_tanh, torch.rnn_relu_cell: _rnn_relu,
}  # fmt: skip
"""Recurrent cell of torch, which does one step per call -> its step."""


def tensors_of(args: tuple) -> list[Tensor]:
    """Returns the tensors among the arguments of a call, also inside lists and tuples."""
    values = [value for arg in args for value in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return [value for value in values if isinstance(value, Tensor)]


def _noted_product(states: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Returns `out`, the zeros Z that represent `states Wᵀ + b` of all steps in the graph. `_Steps` computes them."""
    return out


register_reader(lambda args, kwargs, watched: LinearUse(args[0], args[1], args[2], False), _noted_product)


class _Steps:
    """Products of a weight W (O, H) with the states of T steps, recorded together. `like` (T, B, any) shows T and B."""

    def __init__(self, weight: Tensor, bias: Tensor | None, like: Tensor, watched: Watched) -> None:
        self._parameters, self._states = (weight, bias), list[Tensor]()
        self._noted = watched(weight) or watched(bias)
        self._weight = weight.detach() if watched(weight) else weight
        if bias is not None and watched(bias):
            bias = bias.detach()
        if self._noted:
            self._zeros = like.new_zeros(*like.shape[:2], len(weight)).requires_grad_().clone()
            self._added: Sequence[Tensor] = (self._zeros if bias is None else self._zeros + bias).unbind()
        else:
            self._added = [like.new_zeros(len(weight)) if bias is None else bias] * len(like)

    def product(self, step: int, states: Tensor) -> Tensor:
        """Returns `states Wᵀ + b` (B, O)."""
        if self._noted:
            self._states.append(states)
        return torch.addmm(self._added[step], states, self._weight.T)

    def note(self, intercept: Intercept) -> None:
        if self._noted:
            intercept(_noted_product, (torch.stack(self._states), *self._parameters, self._zeros), {})


def opened(function: Callable, args: tuple, watched: Watched, intercept: Intercept) -> Any:
    """Runs a recurrent layer or cell as plain operations; `intercept` records the uses of its weights.

    Returns NotImplemented for dropout, and for packed sequences: the call does not show the order of their samples.
    Cost: about the fused forward pass, plus one operation for each gate and step.
    """
    if function in CELLS:  # one step: two linear layers and the gates
        x, before, weight_ih, weight_hh, bias_ih, bias_hh = args
        states = before if function is torch.lstm_cell else (before,)
        inputs = intercept(F.linear, (x, weight_ih, bias_ih), {})
        after = CELLS[function](inputs, intercept(F.linear, (states[0], weight_hh, bias_hh), {}), states)
        return after if function is torch.lstm_cell else after[0]
    if len(args) != 9 or not isinstance(args[3], bool):  # packed sequences have their weights there
        return NotImplemented
    x, start, flat, biases, layers, dropout, training, bidirectional, batch_first = args
    if dropout and training:
        return NotImplemented
    starts = start if function is torch.lstm else (start,)
    if batch_first:
        x = x.transpose(0, 1)
    size = len(flat) // (layers * (1 + bidirectional))
    weights = [_weights(flat[i : i + size], biases) for i in range(0, len(flat), size)]
    ends: list[States] = []
    for _ in range(layers):
        directions = []
        for reverse in (False, True)[: 1 + bidirectional]:
            place = len(ends)
            begin = tuple(state[place] for state in starts)
            values, end = _direction(LAYERS[function], x, begin, weights[place], reverse, watched, intercept)
            directions.append(values)
            ends.append(end)
        x = torch.cat(directions, -1) if bidirectional else directions[0]
    return x.transpose(0, 1) if batch_first else x, *(torch.stack(states) for states in zip(*ends, strict=True))


def _weights(flat: Sequence[Tensor], biases: bool) -> Weights:
    """Returns the weights of one layer and direction from torch's flat list."""
    inputs, states, *rest = flat
    inputs_bias, states_bias = rest[:2] if biases else (None, None)
    return inputs, states, inputs_bias, states_bias, rest[-1] if len(rest) % 2 else None


def _direction(
    step: Step, x: Tensor, states: States, weights: Weights, reverse: bool, watched: Watched, intercept: Intercept
) -> tuple[Tensor, States]:
    """Runs one layer in one direction over x (T, B, I); returns the outputs (T, B, H) and the final states."""
    of_inputs, of_states, inputs_bias, states_bias, projected = weights
    inputs = intercept(F.linear, (x, of_inputs, inputs_bias), {})
    hidden = _Steps(of_states, states_bias, inputs, watched)
    projection = None if projected is None else _Steps(projected, None, inputs, watched)
    outputs: list[Tensor] = []
    for t, gates in enumerate(reversed(inputs.unbind()) if reverse else inputs.unbind()):
        states = step(gates, hidden.product(t, states[0]), states)
        if projection is not None:
            states = projection.product(t, states[0]), *states[1:]
        outputs.append(states[0])
    for steps in (hidden, projection):
        if steps is not None:
            steps.note(intercept)
    return torch.stack(outputs[::-1] if reverse else outputs), states
