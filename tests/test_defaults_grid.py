"""The grid of the defaults: its arms and measures on tiny data, its rows and its aims."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch.distributions import Categorical, Independent, Normal
from torch.nn import functional as F

import lapwing as lw
from benchmarks import defaults_links as links
from benchmarks import defaults_subspaces as subspaces
from benchmarks.grid import measures, summary
from benchmarks.grid.networks import Cell, Data, TextCNN, TextTransformer, hashed
from lapwing.evaluation.metrics import auroc
from papers.common.networks import mlp
from papers.common.training import Recipe

FIRST = ("network", "temperature", "default", "validated")


def regression() -> Cell:
    def data(seed: int) -> Data:
        x = torch.randn(90, 2)
        y = x.sum(1, keepdim=True).sin() + 0.3 * torch.randn(90, 1)
        parts = zip(x.split([40, 20, 30]), y.split([40, 20, 30]), strict=True)
        return Data(*parts)

    recipe = Recipe(F.mse_loss, 40, 1e-2, batch=0)
    return Cell("waves", "tables, tiny", data, lambda _: mlp(2, 8, 1), recipe.train)


def classification() -> Cell:
    def data(seed: int) -> Data:
        x = torch.randn(90, 2)
        y = (x[:, 0] + 0.5 * torch.randn(90) > 0).long()
        parts = zip(x.split([40, 20, 30]), y.split([40, 20, 30]), strict=True)
        return Data(*parts, foreign=5 + torch.randn(25, 2))

    recipe = Recipe(F.cross_entropy, 40, 1e-2, batch=0)
    return Cell("halves", "points, tiny", data, lambda _: mlp(2, 8, 2), recipe.train)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LAPWING_NETWORKS", str(tmp_path))


def test_arms_of_cells_become_rows_and_aims(cache):
    cells = (regression(), classification())
    rows = summary.rows_of({f"{cell.name}, seed 0": summary.evaluate(cell, 0, FIRST) for cell in cells})
    assert [row.get("error") for row in rows] == [None] * 8
    for row in rows:
        if row["arm"] in ("network", "temperature"):
            assert row[f"nll_minus_{row['arm']}"] == row[f"nll_minus_{row['arm']}_error"] == 0.0
    assert {row["classes_changed"] for row in rows if row["cell"] == "halves"} == {0}
    aims, families = summary.aims(rows), summary.families(rows)
    assert len(aims) == 9
    assert families["tables, tiny"]["default"]["cells"] == 1
    assert "auroc_entropy" in families["points, tiny"]["validated"]
    assert {aim["of"] for aim in aims} == {1, 2}


def test_an_arm_that_raises_has_a_row(cache, monkeypatch):
    monkeypatch.setitem(measures.ARMS, "default", lambda model, data: 1 / 0)
    rows = summary.evaluate(regression(), 0, FIRST)
    assert rows["default"] == {"family": "tables, tiny", "error": "ZeroDivisionError: division by zero"}
    assert "nll" in rows["validated"]


def test_the_best_candidate_is_a_row():
    tried = [{"cell": "a", "seed": 0, "arm": arm, "nll": nll}
             for arm, nll in (("kfac", 1.0), ("ella-validated", 0.5), ("default", 0.1))]  # fmt: skip
    best = summary.with_best([*tried, {"cell": "a", "seed": 0, "arm": "full", "error": "?"}])[-1]
    assert (best["arm"], best["of"], best["nll"]) == ("best", "ella-validated", 0.5)


def test_scores_are_those_of_the_formulas():
    mean, y = torch.zeros(4, 1, dtype=torch.float64), torch.tensor([[0.0], [1.0], [2.0], [-3.0]])
    row = measures.scores(Independent(Normal(mean, 1.0), 1), y)
    assert row["nll"] == pytest.approx(0.5 * math.log(2 * math.pi) + 0.5 * 14 / 4)
    assert row["coverage"] == 0.5
    assert row["squared_error"] == 14 / 4
    assert row["width_over_residual"] == pytest.approx(1 / math.sqrt(14 / 4))
    probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.2, 0.8]], dtype=torch.float64)
    row = measures.scores(Categorical(probs), torch.tensor([0, 1, 1]), Categorical(torch.full((2, 2), 0.5)))
    assert row["ece"] == pytest.approx((abs(1 - 1.8) + 0.2) / 3)
    assert row["accuracy"] == pytest.approx(2 / 3)
    assert row["auroc_entropy"] == row["auroc_confidence"] == 1.0


def test_the_error_of_a_difference_in_auroc_is_that_of_other_draws():
    test, foreign = torch.randn(150, 2, dtype=torch.float64), 0.5 + torch.randn(100, 2, dtype=torch.float64)
    test[:, 1] += test[:, 0]
    foreign[:, 1] += foreign[:, 0]

    def difference(some, others):
        one, other = (float(auroc(some[:, k], others[:, k])) for k in (0, 1))
        return one - other

    row = measures.paired_auroc((test[:, 0], foreign[:, 0]), (test[:, 1], foreign[:, 1]), "it")
    assert row["auroc_minus_it"] == pytest.approx(difference(test, foreign))
    drawn = [difference(test[torch.randint(150, (150,))], foreign[torch.randint(100, (100,))]) for _ in range(100)]
    assert row["auroc_minus_it_error"] == pytest.approx(statistics.stdev(drawn), rel=0.3)
    assert set(measures.paired_auroc(*[(test[:, 0], foreign[:, 0])] * 2, "it").values()) == {0.0}


def test_temperature_scaling_undoes_a_factor():
    logits = torch.randn(4000, 3)
    y = Categorical(logits=logits).sample()
    data = Data((logits, y), (4 * logits, y), (logits, y))
    _, facts = measures.temperature(torch.nn.Identity(), data)
    assert facts["temperature"] == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("network", [TextCNN, TextTransformer])
def test_networks_of_texts_have_posteriors(network):
    tokens, y = hashed(["a b c", "d e", "f g h i"]).repeat(4, 1), torch.arange(12) % 2
    predict, _ = measures.default(network(2).eval(), Data((tokens, y), (tokens, y), (tokens, y)))
    assert predict(tokens).probs.shape == (12, 2)


def test_links_are_those_of_the_last_layers_posterior(cache):
    def data(seed: int) -> Data:
        x = torch.randn(200, 2)
        y = (x + torch.randn(200, 2)).argmax(1) + (x[:, 0] < -0.5).long()
        parts = zip(x.split([60, 60, 80]), y.split([60, 60, 80]), strict=True)
        return Data(*parts, foreign=5 + torch.randn(25, 2), size=90)

    made, long = data(0), Recipe(F.cross_entropy, 600, 3e-2, batch=0)
    cell = Cell("thirds", "points, tiny", lambda _: made, lambda _: mlp(2, 8, 3), long.train)
    rows = links.rows_of(cell)
    assert len(rows) == 6
    model, (x, y) = cell.trained(made, 0), made.test
    for row in rows:
        posterior = lw.fit(
            model, made.train, params=lw.last_layer, prior_precision=row["prior_precision"], data_size=90,
            likelihood=lw.Categorical(logit_temperature=row["logit_temperature"]),
        )  # fmt: skip
        link = lw.Probit(scale=row["link"])
        prediction = posterior.predict(x, link=link)
        assert row["nll"] == pytest.approx(-float(prediction.log_prob(y).mean()), rel=1e-4)
        assert row["classes_changed"] == int((prediction.classes != model(x).argmax(1)).sum())
        score = -float(posterior.predict(made.val[0], link=link).log_prob(made.val[1]).mean())
        for precision in (1e-4, 1e-2, 1.0, 1e2):  # none is better on validation rows
            other = posterior.with_prior(precision).predict(made.val[0], link=link)
            assert score < -float(other.log_prob(made.val[1]).mean()) + 1e-5
    assert len({row["nll"] for row in rows}) > 3


def test_subspaces_are_scored_beside_kfac(cache):
    rows = subspaces.rows_of(regression())
    assert [row["method"] for row in rows[::2]] == list(subspaces.METHODS)
    assert [row["tuning"] for row in rows[:2]] == ["default", "validated"]
    assert rows[4]["width_over_residual"] > 0
    line = subspaces.tables({"waves": rows})["subspaces"].splitlines()[2]
    assert line.startswith(f"| tables, tiny | `KFAC()` | {rows[0]['nll']:.3f}, {rows[1]['nll']:.3f} |")
