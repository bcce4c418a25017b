"""Exported programs: their layers are covered as those of their networks; `test_survey.py` has those of the zoo."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw


class Attending(nn.Module):
    """Layers of a small text network, with a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.scale = nn.Embedding(20, 8, padding_idx=0), nn.Parameter(torch.rand(8))
        self.layer, self.norm = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layer(self.embedding(tokens)).mean(1)) * self.scale)


CONVOLUTIONS = [
    nn.Conv2d(1, 4, 3, padding="same"), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2), nn.Flatten(),
    nn.LayerNorm(16), nn.Linear(16, 3),
]  # fmt: skip


@pytest.mark.parametrize("name", ["tokens", "images"])
def test_an_exported_program_has_the_layers_of_its_network(name: str) -> None:
    model, x = {
        "tokens": lambda: (Attending(), torch.randint(20, (40, 7))),
        "images": lambda: (nn.Sequential(*CONVOLUTIONS), torch.randn(40, 1, 6, 6)),
    }[name]()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    program = torch.export.export(model.eval(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    assert not lw.coverage(program, x).generic
    for params in (lw.everything, lw.last_layer):
        options = {"method": lw.KFAC(), "params": params, "prior_precision": 1.0}
        found, wanted = (lw.fit(one, (x, torch.arange(40) % 3), **options) for one in (program, model))
        torch.testing.assert_close(found.latent(x).variance, wanted.latent(x).variance, rtol=1e-4, atol=0)
