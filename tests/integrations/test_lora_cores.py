"""Cores of LoRA: the same network with r² trained weights per adapter, in the layout of peft and in a plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.integrations.huggingface import lora_cores
from tests.refused import each_row, refused


class Adapter(nn.Module):
    """A frozen layer with one adapter: plain layers, or dicts as in peft."""

    def __init__(self, dicts: bool, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(5, 4).requires_grad_(False)
        down, up = nn.Linear(5, rank, bias=False), nn.Linear(rank, 4, bias=dicts)
        self.lora_A: nn.Module = nn.ModuleDict({"default": down}) if dicts else down
        self.lora_B: nn.Module = nn.ModuleDict({"default": up}) if dicts else up
        self.scaling = {"default": 3.0} if dicts else 0.5

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.scaling, dict):
            return self.base(x) + self.scaling["default"] * self.lora_B["default"](self.lora_A["default"](x))
        return self.base(x) + self.scaling * self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("dicts", [True, False], ids=["peft", "plain"])
def test_the_copy_has_the_same_outputs_and_trains_only_its_cores(dicts: bool) -> None:
    model = nn.Sequential(Adapter(dicts), nn.Tanh(), nn.Linear(4, 3).requires_grad_(False)).double().eval()
    x, before = torch.randn(9, 5).double(), {name: (w.clone(), w.requires_grad) for name, w in model.named_parameters()}
    state = torch.get_rng_state()
    network = lora_cores(model)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(network(x), model(x), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(w, before[n][0]) and w.requires_grad == before[n][1] for n, w in model.named_parameters())
    assert network[2].weight is model[2].weight
    trained = {name: w for name, w in network.named_parameters() if w.requires_grad and not name.endswith("bias")}
    ((name, core),) = trained.items()
    assert "core" in name
    assert core.shape == (2, 2)
    first, last = (part["default"] if dicts else part for part in (network[0].lora_A, network[0].lora_B))
    scale = 3.0 if dicts else 0.5
    for basis in (first.weight.T, scale * last.up.weight):  # U and V
        torch.testing.assert_close(basis.T @ basis, torch.eye(2).double())
    posterior = lw.fit(network, [(x, torch.arange(9) % 3)], lw.Full(), params=lw.matching("*core*"))
    assert posterior.tangent.size == 4


def changed(**parts: Any) -> nn.Module:
    adapter = Adapter(dicts="merged" in parts)
    for name, part in parts.items():
        setattr(adapter, name, part)
    return nn.Sequential(adapter)


REFUSED = [
    (lambda: lora_cores(nn.Linear(2, 2)), "no modules with lora_A and lora_B"),
    (lambda: lora_cores(changed(merged=True)), "unmerge_adapter"),
    (lambda: lora_cores(changed(lora_A=nn.Conv1d(5, 2, 3))), "plain linear adapters"),
    (
        lambda: lora_cores(changed(lora_A=nn.ParameterDict(), lora_B=nn.ParameterDict(), scaling={"default": 1.0})),
        "plain linear adapters",
    ),  # as AdaLoRA
]


@each_row(REFUSED)
def test_a_call_is_refused_in_these_words(call, words):
    refused(call, words)
