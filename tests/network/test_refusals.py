"""Layers that are refused: each registered function has an example here, and a message says the first reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.network.refusals import REFUSALS, check_layers

EXAMPLES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "rescales_its_weights": (
        lambda: nn.Embedding(7, 5, max_norm=1.0).eval(),
        "The layer 1 (Embedding) of Sequential has max_norm=1.0, which writes the weights at every call, also after "
        "model.eval(). Write model.get_submodule('1').max_norm = None, once the weights are within it.",
    ),
    "uses_statistics_of_the_batch": (
        lambda: nn.BatchNorm1d(6, track_running_stats=False).eval(),
        "The layer 1 (BatchNorm1d) of Sequential has no running statistics, so a sample's output depends on the rest "
        "of the batch also after model.eval(). Train with BatchNorm1d(6, track_running_stats=True).",
    ),
    "writes_its_statistics": (
        lambda: nn.InstanceNorm1d(6, track_running_stats=True),
        "The layer 1 (InstanceNorm1d) of Sequential is in training mode, where every call writes its statistics. Call "
        "model.eval() first.",
    ),
    "drops_at_random": (
        lambda: nn.LSTM(4, 4, 2, dropout=0.3),
        "The layer 1 (LSTM, p=0.3) of Sequential is in training mode, where two identical calls differ. Call "
        "model.eval() first.",
    ),
    "is_quantized": (
        lambda: torch.ao.nn.quantized.dynamic.Linear(4, 3),
        "The layer 1 (Linear) of Sequential is quantized dynamically: no gradients pass through it, and its rounding "
        "of one sample depends on the rest of the batch. Fit the network before it is quantized. Or fit a head that is "
        "kept in floating point as a network of its own, on features that the layers before it give: lw.fit(head, "
        "[(features, targets)]).",
    ),
}


def said(*layers: nn.Module) -> str:
    with pytest.raises(lw.LapwingError) as error:
        check_layers(nn.Sequential(*layers))
    return str(error.value)


def test_every_function_has_an_example() -> None:
    assert {look.__name__ for _, look in REFUSALS} == EXAMPLES.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_layer_is_refused_in_a_sentence_and_a_line(name: str) -> None:
    make, message = EXAMPLES[name]
    assert said(nn.Linear(4, 6), make()) == message


def test_a_message_says_the_first_reason_with_three_layers() -> None:
    layers = [part for _ in range(5) for part in (nn.BatchNorm1d(6), nn.Dropout(0.5))]
    assert said(*layers[:3]) == (
        "The layer 0 (BatchNorm1d) of Sequential (also 2 (BatchNorm1d)) is in training mode, where a sample's output "
        "depends on the rest of the batch. Call model.eval() first."
    )
    assert "0 (BatchNorm1d) of Sequential (also 2 (BatchNorm1d), 4 (BatchNorm1d), 2 more)" in said(*layers)
    assert "Dropout" in said(*[layer.eval() if isinstance(layer, nn.BatchNorm1d) else layer for layer in layers])
