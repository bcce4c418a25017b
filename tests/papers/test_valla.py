"""Loaders and networks of the VaLLA experiments."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

import lapwing as lw
from papers.common.cifar import Cifar
from papers.common.data import Pictures, Table, batched
from papers.common.measures import cqm
from papers.common.training import Recipe
from papers.valla import figure4, figure5, published, published_images
from papers.valla.figure7 import CifarTask
from papers.valla.training import trained


class TestTraining:
    def test_kept_networks_are_the_same(self, tmp_path, monkeypatch):
        x = torch.linspace(-1, 1, 50)[:, None]
        recipe = Recipe(F.mse_loss, 30, batch=10)
        anew, other = (trained((1, 8, 1), (x, x.sin()), recipe, seed, "sine") for seed in (3, 4))
        monkeypatch.setenv("LAPWING_NETWORKS", str(tmp_path))
        made = trained((1, 8, 1), (x, x.sin()), recipe, 3, "sine")
        assert len(list(tmp_path.iterdir())) == 1
        read = trained((1, 8, 1), (x, x.sin()), recipe, 3, "sine")
        assert not read.training
        assert all(torch.equal(a, b) for a, b in zip(made.parameters(), read.parameters(), strict=True))
        assert torch.equal(anew(x), made(x))
        assert not torch.equal(other(x), made(x))


class TestScores:
    def test_against_the_definitions(self):
        mean, y = torch.zeros(400, 1), torch.randn(400, 1)
        latent = torch.full((400, 1), 0.75)
        found = figure4.regression_scores(mean, latent, 0.25, y, 10.0)
        assert found["nll"] == pytest.approx(-float(torch.distributions.Normal(0, 1).log_prob(y).mean()), rel=1e-5)
        assert found["nll, unit"] == pytest.approx(found["nll"] + math.log(10))
        assert found["latent share"] == pytest.approx(0.75)
        assert found["cqm"] == pytest.approx(float(cqm(mean, torch.ones(400, 1), y)))
        curve = torch.tensor(found["curve"]).double()
        assert curve[0] == 0
        assert curve[-1] == 1
        assert float((curve - figure4.LEVELS).abs().max()) < 0.1


def test_rows_of_the_resnet_table_at_a_small_network():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10)).eval()
    x, y = torch.randn(300, 3, 2, 2), torch.arange(300) % 10
    parts = [(x[i : i + 50], y[i : i + 50]) for i in range(0, 300, 50)]
    setup = Cifar(model, parts[:2], parts[2:4], parts[4:])
    corrupted = {severity: (torch.randn(38, 3, 2, 2), torch.arange(38) % 10) for severity in (1, 3)}
    task = CifarTask(setup, x[200:], y[200:], corrupted)
    alone = task.network_scores()
    one = task.one_temperature()
    assert one["softmax"]["accuracy"] == alone["softmax"]["accuracy"]
    assert one["corrupted"]["3"]["nll"] < alone["corrupted"]["3"]["nll"]
    rows = [task.row(lw.Diagonal(), lw.everything, lw.Validation(parts[2:4]), 0), task.sampled_row(0, (1e4, 1e12), 4)]
    for row in rows:
        assert set(row) >= {"probit", "Monte Carlo", "prior_precision", "seconds", "predict_seconds"}
        assert row["images"] == 100
        for severity in ("1", "3"):
            found = row["corrupted"][severity]
            assert len(found["nll by kind"]) == 19
            assert found["nll"] == pytest.approx(sum(found["nll by kind"]) / 19, rel=1e-5)
    assert rows[1]["prior_precision"] in (1e4, 1e12)
    certain = task.sampled_row(0, (1e12,), 4)
    assert certain["probit"]["nll"] == pytest.approx(alone["softmax"]["nll"], abs=1e-4)


def test_rows_of_the_published_fit(monkeypatch):
    """A small table and small images go through every row; the published fit says how it ended."""
    fit = published.published_fit
    monkeypatch.setattr(published, "published_fit", lambda val, **options: fit(val, steps=6, **options))
    monkeypatch.setattr(published, "EVERY", 2)
    x = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True).sin() + 0.3 * torch.randn(400, 1, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).eval()
    part = x[:200], y[:200]
    data = Table("small", part, (x[200:300], y[200:300]), (x[300:], y[300:]), 2.0, "1")
    rows = published.TableRows(figure4.TableTask(data, model, batched(*part, 50), batched(*data.val, 50), data.test), 0)
    found = rows.published(1.0)
    assert found["steps"] == 2 * (len(found["looks"]) - 1)
    assert bool(found["ended by the rise"]) == (found["looks"][-1] > found["looks"][-2])
    assert rows.network(rows.held_out)["noise"] == pytest.approx(float(rows.task.errors(data.val).mean()))
    assert rows.validated(None)["nll"] < rows.network(part)["nll"] + 1


def test_rows_of_images_of_the_published_fit(monkeypatch):
    monkeypatch.setattr(published_images, "STEPS", 2)
    x, y = torch.randn(120, 1, 2, 2, generator=torch.Generator().manual_seed(0)), torch.arange(120) % 10
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 10)).eval()
    loader = batched(x, y, 40)
    rows = published_images.ImageRows(figure5.ImageTask(model, Pictures(loader, loader, loader, 3 * x), x, y), 0)
    found = rows.published(7, 1.0)
    assert set(found) >= {"textbook probit", "Monte Carlo", "steps"}
    one, own = rows.one_temperature(), rows.network(1.0)
    assert one["nll"] < own["nll"]
    assert one["accuracy"] == own["accuracy"]
    assert own["rotated"]["0"]["nll"] == pytest.approx(own["nll"])
    assert own["rotated"]["90"]["nll"] != pytest.approx(own["nll"])
    assert list(found["textbook probit"]["rotated"]) == list(own["rotated"])
