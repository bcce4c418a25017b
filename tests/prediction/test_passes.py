"""The printed number of forward passes of a prediction, against counted multiply-adds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lapwing as lw
from tests.zoo_modules import Net, SpatialMean


def mlp(*tail):
    return nn.Sequential(nn.Linear(64, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 10), *tail)


def two_heads():
    together = lambda net, x: torch.cat([net.first(h := net.body(x)), net.second(h)], 1)  # noqa: E731
    return Net(together, body=mlp()[:-1], first=nn.Linear(60, 4), second=nn.Linear(60, 6))


def pooled_head():
    body = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *body, nn.Conv2d(16, 10, 1), SpatialMean())


FORMS = {
    "plain": (mlp, lw.last_layer, 1.5),
    "log_softmax": (lambda: mlp(nn.LogSoftmax(1)), lw.last_layer, 1.5),
    "softplus": (lambda: mlp(nn.Softplus()), lw.last_layer, 1.5),
    "cat": (two_heads, lw.last_layer, 1.5),
    "pooling": (pooled_head, lw.last_layer, 1.5),
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
