"""The printed number of forward passes of a prediction, against counted multiply-adds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lapwing as lw


def mlp(*tail):
    return nn.Sequential(nn.Linear(64, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 10), *tail)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = mlp()[:-1], nn.Linear(60, 4), nn.Linear(60, 6)

    def forward(self, x):
        h = self.body(x)
        return torch.cat([self.first(h), self.second(h)], 1)


class PooledHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(16, 10, 1)

    def forward(self, x):
        return self.head(self.body(x.unflatten(1, (1, 8, 8)))).mean((2, 3))


FORMS = {
    "plain": (mlp, lw.last_layer, 1.5),
    "log_softmax": (lambda: mlp(nn.LogSoftmax(1)), lw.last_layer, 1.5),
    "softplus": (lambda: mlp(nn.Softplus()), lw.last_layer, 1.5),
    "cat": (TwoHeads, lw.last_layer, 1.5),
    "pooling": (PooledHead, lw.last_layer, 1.5),
    "two layers": (lambda: mlp(nn.LogSoftmax(1)), lw.matching("2.*", "4.*"), 1.5),
    "all": (lambda: mlp(nn.LogSoftmax(1)), lw.everything, 1.6),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_printed_number_of_passes_is_about_the_counted_one(name):
    build, params, within = FORMS[name]
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(200, 64)
    posterior = lw.fit(model, (x[:20], torch.arange(20) % 10), lw.KFAC(), params=params, prior_precision=1.0)
    printed = int(repr(posterior).partition("costs about ")[2].split()[0])
    counts = []
    for call in (posterior.predict, model):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            call(x)
        counts.append(counter.get_total_flops())
    assert 1 / within < printed * counts[1] / counts[0] < within
