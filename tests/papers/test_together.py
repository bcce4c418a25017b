"""The comparison of all methods: its tuning, its rows, and divergences from full LLA."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import lapwing as lw
from lapwing.covariance import LatentDraws, without_spread
from papers.__main__ import HOME
from papers.common import results
from papers.common.data import batched
from papers.common.networks import mlp
from papers.common.scores import averaged
from papers.common.training import Recipe
from papers.together import comparison, each_way, matrix, methods, more_rows, nearness, noise
from papers.together import pages as comparison_pages
from papers.together.tasks import Task, Training


def task(regression: bool = True) -> Task:
    x = torch.randn(120, 3, generator=torch.Generator().manual_seed(0))
    y = x[:, :1].sin() + 0.1 * x[:, 1:2] if regression else (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
    loss = F.mse_loss if regression else F.cross_entropy
    training = Training(
        (x[:80], y[:80]), lambda: mlp(3, 8, y.shape[1] if regression else 3), Recipe(loss, 60, 1e-2, batch=20)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = training.recipe.train(training.build(), training.data, 0)
    foreign = None if regression else 3 * x[:30]
    loader, val = batched(x[:80], y[:80], 40), batched(x[80:100], y[80:100], 10)
    return Task("toy", 0, model, loader, 80, val, (x[100:], y[100:]), foreign, training)


def test_the_search_finds_the_noise_in_closed_form():
    """Without spread the best noise variance is the mean squared residual, up to the grid of 10 %."""
    y = 0.3 * torch.randn(400, 1, generator=torch.Generator().manual_seed(1))
    likelihood, _ = methods.best(lw.Gaussian(1.0), without_spread(torch.zeros(400, 1)), y)
    assert likelihood.noise_variance == pytest.approx(float(y.square().mean()), rel=0.06)


def test_the_search_finds_the_factor_that_a_brute_search_finds():
    generator = torch.Generator().manual_seed(2)
    draws = LatentDraws(torch.randn(20, 60, 3, generator=generator))
    labels = torch.randint(3, (60,), generator=generator)
    likelihood, factor = methods.best(lw.likelihoods.Categorical(), draws, labels)
    found = float(likelihood.predict(draws.scaled(factor)).log_prob(labels).mean())
    coarse = max(
        float(lw.likelihoods.Categorical().with_logit_temperature(t).predict(draws.scaled(f)).log_prob(labels).mean())
        for t in methods.RATIOS[::5] for f in methods.FACTORS[::4]
    )  # fmt: skip
    assert found >= coarse - 1e-6


@pytest.mark.parametrize(("name", "regression"), [
    ("KFAC", True), ("ensemble of three", True), ("temperature or noise", False),
])  # fmt: skip
def test_rows(name, regression):
    found = task(regression)
    way = "one pass each" if name in methods.NETWORKS else "GLM"
    base = comparison.losses(found, methods.fitted(comparison.BASE, found))
    row = comparison.row(lambda: found, lambda: methods.fitted(name, found), way, lambda: base)
    assert "refused" not in row
    x, y = found.test
    assert row["gain"] == pytest.approx(float(base.mean()) - row["validated"]["nll"], abs=1e-6)
    assert math.isfinite(row["gain"])
    assert ("coverage 0.9" in row["validated"]) == regression
    assert ("auroc" in row["fitted"]) == (not regression)
    if name == "temperature or noise":
        with torch.no_grad():
            logs = (found.model(x) / row["temperature"]).log_softmax(-1)
        assert row["validated"]["nll"] == pytest.approx(float(F.nll_loss(logs, y)), rel=1e-5)
    assert (row["bytes"] > 0) == (name != "temperature or noise")


def test_swag_reads_the_snapshots_of_further_training():
    found = task(regression=False)
    posterior = found.swag(rank=3, every=2)
    moved, start = (
        torch.cat([w.detach().flatten() for w in model.parameters()]) for model in (posterior.model, found.model)
    )
    assert 0 < float((moved - start).abs().max()) < 1


def test_a_method_that_does_not_apply_says_why():
    def refuse() -> methods.Fitted:
        raise lw.LapwingError("No.\nWrite yes.")

    assert comparison.row(task, refuse, "GLM", task) == {"refused": "No."}


def test_gains_are_paired_differences_to_one_number():
    rows = {"KFAC, GLM": (1.0, 3.0), "temperature or noise": (1.5, 3.7)}
    runs = {
        f"toy, seed {seed}": {name: {"validated": {"nll": values[seed]}} for name, values in rows.items()}
        for seed in (0, 1)
    }
    found = comparison.gains({**runs, "other, seed 0": {"KFAC, GLM": {"refused": "No."}}})
    assert found == {"toy": {"KFAC, GLM": {"mean": pytest.approx(0.6), "standard_error": pytest.approx(0.1)}}}


@pytest.mark.parametrize("name", ["classification", "given"])
def test_all_rows_of_a_run_are_of_one_network(name):
    """Each row records its gain over one temperature; the NLLs in the file give the same gain."""
    runs = results.load(HOME / "together" / "results" / f"{name}.json")["results"]["runs"]
    rows = [(run[comparison.BASE], row) for run in runs.values() for row in run.values() if "gain" in row]
    assert rows
    for base, row in rows:
        gain = base["validated"]["nll"] - row["validated"]["nll"]
        assert gain == pytest.approx(row["gain"], rel=1e-3, abs=1e-4)


def test_matrix_scaling_repairs_what_one_temperature_cannot():
    """The logits of two classes are exchanged: a map of the logits puts them back, a temperature does not."""
    found = task(regression=False)
    exchanged = torch.nn.Sequential(found.model, torch.nn.Linear(3, 3, bias=False)).eval()
    with torch.no_grad():
        exchanged[1].weight.copy_(torch.eye(3)[[1, 0, 2]])
    found = replace(found, model=exchanged, val=found.loader)
    rows = {label: matrix.row(lambda: found, label) for label in matrix.ROWS}
    assert [rows[label]["mapped"] for label in matrix.ROWS] == [False, True, False, True]
    assert rows[matrix.MATRIX]["temperature"] == rows[matrix.BASE]["temperature"]
    assert rows[matrix.MATRIX]["accuracy"] > rows[matrix.BASE]["accuracy"] + 0.3
    gained = matrix.gains({"toy, seed 0": rows})["toy"]
    assert gained[matrix.MATRIX]["mean"] > 0.2
    assert set(gained) == {matrix.MATRIX, matrix.CALL, matrix.BOTH}


def test_the_choice_for_draws_predicts_held_out_data_better_by_draws():
    """KFAC's prior precision of linearised prediction is far too small for draws here."""
    found = task()
    y = torch.cat([y for _, y in found.val])
    x = torch.cat([x for x, _ in found.val])
    losses = []
    for via in ("GLM", "sampling"):
        fit = each_way.fitted(lambda: found, "KFAC", via)
        losses.append(-float(fit.likelihood.predict(fit.latent(x, methods.WAYS["sampling"])).log_prob(y).mean()))
    assert losses[1] < losses[0] - 0.1


def test_the_own_choice_is_compared_seed_by_seed():
    keys = [each_way.label("KFAC", "sampling", choice) for choice in each_way.CHOSEN]
    runs = {
        f"toy, seed {seed}": {key: {"fitted": {"nll": value}} for key, value in zip(keys, values, strict=True)}
        for seed, values in enumerate([(3.0, 1.0), (7.0, 4.0)])
    }
    found = each_way.differences(runs, "fitted")
    assert found == {"toy": {"KFAC, sampling": {"mean": pytest.approx(2.5), "standard_error": pytest.approx(0.5)}}}


@pytest.mark.parametrize("kind", noise.LIKELIHOODS)
def test_the_noise_without_a_covariance_is_that_of_the_network(kind, monkeypatch):
    monkeypatch.setattr(noise.tasks, "table", lambda name, seed: task())
    found = noise.noisy("toy", 0, kind)
    x, y = found.test
    posterior = noise.FITS[noise.BASE](found)
    assert float(posterior.predict(x).epistemic_variance.max()) < 1e-6
    outputs = found.model(x).detach()
    likelihood = lw.Gaussian(posterior.noise_variance) if kind == noise.ONE else posterior.likelihood
    if kind != noise.RESIDUALS:
        expected = -float(likelihood.log_prob(outputs, y).mean())
        assert noise.row(lambda: found, noise.BASE)["nll"] == pytest.approx(expected, rel=1e-4)
    assert outputs.shape[1] == 1 + (kind == noise.OUTPUT)


def test_gains_of_noise_and_covariance_are_paired_by_seed():
    first, second = noise.label(noise.ONE, noise.BASE), noise.label(noise.OUTPUT, noise.BASE)
    runs = {
        f"toy, seed {seed}": {first: {"nll": a}, second: {"nll": b}, noise.label(noise.OUTPUT, "KFAC"): {"nll": c}}
        for seed, (a, b, c) in enumerate([(3.0, 1.0, 0.5), (7.0, 4.0, 3.5)])
    }
    assert noise.gains(runs, lambda kind: first)["toy"][second]["mean"] == pytest.approx(2.5)
    by_covariance = noise.gains(runs, lambda kind: noise.label(kind, noise.BASE))["toy"]
    assert by_covariance[noise.label(noise.OUTPUT, "KFAC")] == {"mean": pytest.approx(0.5), "standard_error": 0.0}


@pytest.mark.parametrize("method", more_rows.METHODS)
def test_the_first_budget_is_that_of_the_comparison(method):
    found = task()
    x, _ = found.test
    same = more_rows.fitted(lambda: found, more_rows.METHODS[method](more_rows.FIRST)), methods.fitted(method, found)
    first, second = (fit.likelihood.predict(fit.latent(x, lw.Linearized())) for fit in same)
    assert torch.equal(first.std, second.std)


def test_more_rows_are_compared_with_the_first_budget():
    few, more = (more_rows.label("ELLA", "GLM", budget) for budget in (more_rows.FIRST, more_rows.MORE[1]))
    runs = {
        f"toy, seed {seed}": {few: {"validated": {"nll": a}}, more: {"validated": {"nll": b}}}
        for seed, (a, b) in enumerate([(3.0, 1.0), (7.0, 4.0)])
    }
    expected = {more: {"mean": pytest.approx(2.5), "standard_error": pytest.approx(0.5)}}
    assert more_rows.differences(runs) == {"toy": expected}


def test_every_task_has_the_methods_that_apply():
    assert "full LLA" not in methods.names(trains=True, regression=False)
    assert not set(methods.TRAIN) & set(methods.names(trains=False, regression=True))
    assert len(set(methods.names(True, True))) == len(methods.names(True, True))


def test_full_lla_is_at_distance_zero_from_itself():
    reference = nearness.Reference(task())
    row = reference.row(lw.Full(), lw.everything)
    assert row["KL(LLA || method)"] < 1e-6
    assert reference.row(lw.Diagonal(), lw.everything)["KL(LLA || method)"] > 1e-5


def test_tables_of_the_page():
    """Gains have the error over networks, or of few networks the error over test samples, and a mark without spread."""

    def rows(*values: float) -> dict[str, dict[str, float]]:
        return {"nll": averaged(values), "coverage 0.9": averaged([0.9] * len(values))}

    base = {"temperature or noise": {"validated": rows(1.0, 1.2, 1.1), "passes": averaged([1.0, 1.0, 1.0])}}
    number, plain = {"temperature or noise": {"validated": {"nll": 1.0}}}, "KFAC, no held-out data, GLM"
    found = {
        "table": {
            "three": {**base, "KFAC, GLM": {"validated": rows(0.8, 0.8, 0.8), "passes": averaged([9.0, 10.0, 11.0])}},
            "one": {**base, "KFAC, GLM": {"validated": rows(0.9), "gain error": averaged([0.05])}},
        },
        "runs": {
            "three, seed 0": {**number, "KFAC, GLM": {"factor": 1.0, "fitted": {"nll": 1.2}}},
            "three, seed 1": {**number, "KFAC, GLM": {"factor": 1e-3, "fitted": {"nll": 1.4}}},
            "three, seed 2": {**number, "KFAC, GLM": {"factor": 1.0, "fitted": {"nll": 1.3}}},
            "one, seed 0": {**number, "KFAC, GLM": {"factor": 0.1}, plain: {"fitted": {"nll": 1.3}}},
        },
        "gains": {"three": {"KFAC, GLM": averaged([0.2, 0.3, 0.4])}, "one": {"KFAC, GLM": averaged([0.1])}},
    }
    made = comparison_pages.tables(found)
    assert "| KFAC | 0.300 ± 0.058 † | 0.100 ± 0.050 |" in made["gains, GLM"]
    assert "| KFAC | -0.300 ± 0.058 |  |" in made["gains as fitted, GLM"]
    assert "| KFAC, fitted without held-out data |  | -0.300 |" in made["gains as fitted, GLM"]
    assert "| | three: coverage 0.9 | one: coverage 0.9 |" in made["scores"]
    assert "| KFAC | 0.900 | 0.900 |" in made["scores"]
    assert "| KFAC |  | 10 |" in made["costs"]


def test_the_conclusion_is_the_same_everywhere():
    """The page of the verdicts repeats the conclusion of the comparison, with its numbers."""
    text = (HOME / "together" / "README.md").read_text(encoding="utf-8")
    sentences = text.partition("<!-- conclusion -->")[2].partition("<!-- ")[0].split()
    assert 30 < len(sentences) < 200
    assert " ".join(sentences) in " ".join((HOME / "README.md").read_text(encoding="utf-8").split())
