"""Data, optimiser and scores of the streamlined experiments."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lapwing as lw
from papers.common import data
from papers.common.networks import mlp
from papers.common.training import Recipe
from papers.streamlined import baselines, decay, factors, figure13, nearness, table1, table2, table17
from papers.streamlined.figure8 import ANGLES, rotations
from papers.streamlined.ivon import IVON


class TestSplits:
    def made(self, fold, count=53):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(count, 3, generator=generator).double()
        x[:, 1] = torch.where(torch.arange(count) % 3 > 0, torch.nan, x[:, 1])  # two thirds missing
        x[4, 2] = torch.nan
        return table1.fold_of("drawn", x, torch.arange(float(count)).double(), fold)

    def rows(self, found, part):
        """Which rows a part holds, from their targets."""
        y = torch.cat([p[1] for p in (found.train, found.val, found.test)])[:, 0]
        order = y.argsort().argsort()
        start = {"train": 0, "val": len(found.train[0]), "test": len(found.train[0]) + len(found.val[0])}[part]
        return set(order[start : start + len(getattr(found, part)[0])].tolist())

    def test_every_row_is_tested_once_and_never_trained_on(self):
        tested = []
        for fold in range(5):
            found = self.made(fold)
            parts = [self.rows(found, part) for part in ("train", "val", "test")]
            assert [len(part) for part in parts] == [34, 8, 11] if fold < 3 else [35, 8, 10]
            assert len(set.union(*parts)) == 53
            tested += list(parts[2])
        assert sorted(tested) == list(range(53))


def small_task():
    """A task of 60 drawn rows, its network trained for 200 steps."""
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0)).double()
    found = table1.fold_of("SERVO", x, x.sum(1) + 0.3 * torch.randn(100).double(), 0)
    model = Recipe(F.mse_loss, 200, 1e-2, batch=32, falling=1.0).train(mlp(3, 8, 1, activation=nn.ReLU), found.train, 0)
    loader, val = [found.train], [found.val]
    return table1.RegressionTask(found, model, loader, val)


def test_rows_of_a_table():
    task = small_task()
    found = task.laplace(draws=20)
    posterior = lw.fit(task.model, task.loader, lw.Full(), likelihood="gaussian", tune=lw.Evidence())
    x, y = task.data.test
    for name, way in (("GLM", lw.Linearized()), ("streamlined", lw.Streamlined(covariance="full"))):
        factor = found[name]["factor"]
        for kind, chosen in (("plain", way), ("scaled", lw.Scaled(way, factor))):
            nlpd = -float(posterior.predict(x, via=chosen).log_prob(y).mean())
            assert found[name][kind]["nlpd"] == pytest.approx(nlpd, rel=1e-2)
        assert found[name]["plain"]["rmse"] == pytest.approx(
            float((task.model(x).detach() - y).square().mean().sqrt()), rel=1e-4
        )
    assert found["streamlined"]["scaled"]["nlpd difference"] == 0
    plain, ours = found["GLM"]["plain"], found["streamlined"]["scaled"]
    assert plain["nlpd difference"] == pytest.approx(plain["nlpd"] - ours["nlpd"], abs=1e-4)
    assert set(found) == {"streamlined", "streamlined, diagonal", "GLM", "sampling", "no spread", "noise", "δ"}
    values = table1.p_values({"SERVO, seed 0": {"LA": found}, "SERVO, seed 1": {"LA": found}})["SERVO"]
    assert values["LA streamlined, scaled"] == 1.0
    assert 0 <= values["LA sampling, plain"] < 1


def differentiated(optimiser, loss):
    optimiser.zero_grad()
    loss.backward()
    return loss


class TestIVON:
    def test_one_step_is_the_algorithm(self):
        model = nn.Linear(2, 1).double()
        x, y = torch.randn(8, 2).double(), torch.randn(8, 1).double()
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        optimiser = IVON(model.parameters(), ess=50.0, rate=0.2, decay=0.01, hessian=0.5, betas=(0.9, 0.99), seed=3)
        loss = optimiser.step(lambda: differentiated(optimiser, F.mse_loss(model(x), y)))
        noise = torch.randn(3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        variance = 1 / (50 * (0.5 + 0.01))
        theta = (start + variance**0.5 * noise).requires_grad_()
        expected = F.mse_loss(x @ theta[:2, None] + theta[2], y)
        (gradient,) = torch.autograd.grad(expected, theta)
        seen = gradient * (theta.detach() - start) / variance
        hess = 0.99 * 0.5 + 0.01 * seen + 0.5 * 0.01**2 * (0.5 - seen) ** 2 / 0.51
        mean = start - 0.2 * (0.1 * gradient / 0.1 + 0.01 * start) / (hess + 0.01)
        assert float(loss) == pytest.approx(float(expected.detach()))
        torch.testing.assert_close(optimiser.param_groups[0]["hess"], hess)
        torch.testing.assert_close(torch.cat([p.detach().flatten() for p in model.parameters()]), mean)


def test_an_mlp_task_scores_its_posteriors():
    """The whole chain on drawn images: training, Laplace, IVON, ways with factors, rotations."""
    x = torch.rand(400, 1, 28, 28)
    y = (x[:, 0, :14].mean((1, 2)) > x[:, 0, 14:].mean((1, 2))).long()
    cut = list(zip(x.split(100), y.split(100), strict=True))
    task = table2.MLPTask(data.Pictures(cut[:2], cut[2:3], cut[3:], 1 - x[:50]), 0, epochs=4, draws=3)
    own = task.network()  # trains first
    posterior = task.laplace(lw.KFAC(), None)
    assert posterior.data_factor == 1.0
    found = task.scores(posterior, task.ways("streamlined, diagonal", "GLM", "sampling"))
    way = lw.Scaled(lw.Linearized(), found["GLM"]["factor"])
    nlpd = -float(posterior.predict(task.tested[0], via=way).log_prob(task.tested[1]).mean())
    assert found["GLM"]["scaled"]["nlpd"] == pytest.approx(nlpd, rel=1e-2)
    assert set(own) == set(found["GLM"]["plain"])
    exact, shifted = (factors.row(lambda: task, lambda: posterior, label) for label in (factors.EXACT, factors.SHIFTED))
    assert exact["GLM"] == found["GLM"]
    entropies = [of["plain"]["entropy inside"] for of in (shifted["GLM"], exact["GLM"])]
    assert own["entropy inside"] < entropies[0] < entropies[1]  # equation 10 is narrower
    variational = task.variational
    assert variational.model is not task.model
    curve = rotations(task, variational, lw.Streamlined(), 20)
    assert len(curve["nlpd"]) == len(ANGLES)
    upright = variational.predict(
        task.tested[0][:20], via=lw.scale_factor(variational, task.data.val, lw.Streamlined())
    )
    assert curve["nlpd"][0] == pytest.approx(-float(upright.log_prob(task.tested[1][:20]).mean()), rel=1e-2)


def test_nearness_of_a_linear_network(monkeypatch):
    """Streamlined prediction of one layer is exact, so the ratio and the correlation are 1."""
    model = nn.Linear(3, 2).eval()
    x = torch.randn(12, 3)
    monkeypatch.setattr(nearness, "network", lambda *_: (model, [(x, torch.arange(12) % 2)], 12, torch.randn(5, 3)))
    for found in nearness.nearness("MLP", 1.0, 0).values():
        assert found["ratio"] == pytest.approx(1, rel=1e-4)
        assert found["correlation"] == pytest.approx(1, rel=1e-4)


def test_one_noise_variance_against_its_formula():
    """NLPD of `N(f, σ²)` with σ² the mean squared residual of the validation rows, written out."""
    parts = [(torch.randn(n, 2), torch.randn(n, 1)) for n in (30, 300, 25)]
    model = nn.Linear(2, 1).eval()
    table = data.Table("a table", *parts, 1.0, "1")
    task = table1.RegressionTask(table, model, [parts[0]], [parts[1]])
    found = {row: baselines.regression(task, row) for row in (*baselines.NOISES, "prior alone", baselines.CALL)}
    model.requires_grad_(False)
    noise = float((model(parts[1][0]) - parts[1][1]).square().mean())
    density = torch.distributions.Normal(model(parts[2][0]), noise**0.5).log_prob(parts[2][1])
    assert found["noise of validation residuals"]["nlpd"] == pytest.approx(-float(density.mean()), rel=1e-5)
    assert found["noise of training residuals"]["noise"] < noise * 3
    assert found["prior alone"]["nlpd"] == pytest.approx(prior_alone(task, **found["prior alone"]), rel=1e-3)


def prior_alone(task, nlpd, noise, **chosen):
    """Returns the NLPD of `N(f, (‖x‖² + 1)/δ + σ²)`, written out for a linear network."""
    del nlpd
    x, y = task.data.test
    variance = (x.square().sum(1, keepdim=True) + 1) / chosen["prior precision"] + noise
    return -float(torch.distributions.Normal(task.model(x), variance.sqrt()).log_prob(y).mean())


def test_gains_over_one_noise_variance_are_paired_by_fold():
    runs, posteriors = {}, {}
    for fold, (base, glm) in enumerate([(1.0, 0.8), (3.0, 2.6)]):
        runs[f"SERVO, seed {fold}"] = {"noise of validation residuals": {"nlpd": base}}
        ways = {"GLM": {"scaled": {"nlpd": glm}}, "streamlined": {"scaled": {"nlpd": base}}}
        posteriors[f"SERVO, seed {fold}"] = {"LA": ways}
    found = baselines.gains(runs, posteriors)["SERVO"]
    assert found["GLM"] == {"mean": pytest.approx(0.3), "standard_error": pytest.approx(0.1)}
    assert found["streamlined"] == {"mean": 0.0, "standard_error": 0.0}


def test_weight_decay_is_that_of_the_lowest_validation_error(monkeypatch):
    def load(name, fold, recipe):
        task = small_task()
        with torch.no_grad():
            task.model[-1].bias += (recipe.decay - 0.01) * 100  # the error is lowest at 0.01
        return task

    monkeypatch.setattr(decay.RegressionTask, "load", load)
    assert decay.decayed("FF", 0)[1] == {"decay": 0.01}


def test_draws_and_scores_of_a_posterior_by_ivon():
    """IVON learns the table; groups of draws and factors give the NLPD of `predict`."""
    task = small_task()
    posterior = figure13.ivon(task, "SERVO", 0, steps=300)
    x, y = task.data.test
    with torch.no_grad():
        assert float((posterior.model(x) - y).square().mean()) < 0.5 * float(y.var())
    found = figure13.over_draws(posterior, task, counts=(5, 10), repeats=2)
    whole = posterior.predict(x, via=lw.MonteCarlo(10)).log_prob(y)
    assert found["10"] == pytest.approx(-float(whole.mean()), rel=1e-4)
    assert found["10"] < found["5"]  # by Jensen's inequality: the mean of two halves against the whole
    row = figure13.scores(posterior, task)["streamlined"]
    way = lw.Scaled(lw.Streamlined(covariance="full"), row["factor"])
    assert row["scaled nlpd"] == pytest.approx(-float(posterior.predict(x, via=way).log_prob(y).mean()), rel=1e-3)


def test_times_are_in_forward_passes():
    model = mlp(3, 4, 10, activation=nn.ReLU).eval()
    found = table17.times(model, torch.randn(20, 3), lw.everything, table17.LAST, 0.01)
    assert found["network"]["passes"] == 1
    assert found["sampling"]["passes"] > 10
    assert found["GLM"]["passes"] == pytest.approx(found["GLM"]["milliseconds"] / found["network"]["milliseconds"])
    assert set(found) == {"network", *table17.LAST, "streamlined, deployed"}
