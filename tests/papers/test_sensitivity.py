"""Parts of the sensitivity experiments; the experiments themselves take minutes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.evaluation import Sensitivities, sensitivity
from papers.common import results
from papers.streamlined import figure5 as experiments
from papers.streamlined import figure10


def some(*shape: int) -> Sensitivities:
    values = torch.rand(shape)
    return Sensitivities(values, values + 0.1, torch.rand(shape), torch.ones(shape[0]).bool(), torch.ones(shape[0]), {})


def test_summary_of_a_linear_network():
    model = nn.Linear(784, 3).eval()
    with torch.no_grad():
        model.weight[:, :100] = 0
    x, y = torch.randn(6, 784), torch.arange(6) % 3
    empty = torch.arange(784) < 100
    task = experiments.DigitTask(model, {"MAP": model}, x, y, empty, 1.0)
    found = sensitivity(model, x, model(x).argmax(1), steps=300)
    numbers = experiments.summary(task, found, draws=20)
    assert numbers["empty share"] < 1e-3
    assert numbers["empty pixels"] == pytest.approx(100 / 784)
    assert numbers["strong, empty"] == 0 < numbers["strong"]
    assert numbers["smallest"] < 0.05 < numbers["median"]
    with torch.no_grad():
        before = F.cross_entropy(model(x), y)
    assert numbers["rise, drawn"] > -float(before)
    assert torch.equal(task.find("MAP", True, 2, steps=5).values, sensitivity(model, x[:2], y[:2], steps=5).values)


def test_adam_stops_before_the_loss_has_risen(monkeypatch):
    monkeypatch.setattr(figure10, "RATE", 0.1)
    model = nn.Linear(6, 3, bias=False).eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, -1.0, 0.5, 0.0, 0.0, 0.0]]) * torch.tensor([[1.0], [-1.0], [0.5]]))
    x = torch.randn(4, 6)
    posterior = lw.fit(model, [(x, model(x).argmax(1))], lw.KFAC(), prior_precision=figure10.CERTAIN)
    found = figure10.by_adam(posterior, x, model(x).argmax(1), lw.Streamlined(), 400)
    first, last = found.history["nlpd"]
    assert found.stopped.all()
    assert 0 < float((last - first).abs().max()) <= figure10.RISE
    assert torch.all(found.values[:, :2] > found.values[:, 3:].amax(1, keepdim=True))


def test_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "__file__", str(tmp_path / "figure5.py"))
    rows = [f"{name}, {objective}" for name in ("MAP", "last layer") for objective in experiments.OBJECTIVES]
    bars = {name: torch.rand(5, 2).tolist() for name in ("MAP", "last layer", "all layers")}
    curves = {"maps": {row: torch.rand(3, 784).tolist() for row in rows}, "images": torch.rand(3, 784).tolist()}
    found = {"curves": curves, "tables": {"a table, seed 0": {"features": ["a", "b"], "curves": bars}}}
    results.write(experiments.__file__, found, {})
    experiments.draw(results.read(experiments.__file__))
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["figure5.png", "figure5_tables.png"]
