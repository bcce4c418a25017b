"""The transformer experiments of the streamlined paper: data, training, and tiny networks through the whole code."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

import lapwing as lw
from lapwing.covariance import LatentDraws

pytest.importorskip("transformers")

from papers.common.scores import probabilities
from papers.streamlined import baselines, figure11
from papers.streamlined import setting as st
from papers.streamlined import transformers as small


@pytest.fixture(scope="module")
def images():
    """Images whose class is the index of their brightest quarter."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(120, 1, 8, 8, generator=generator), torch.randint(3, (120,), generator=generator)
    for i, label in enumerate(y.tolist()):
        x[i, 0, 4 * (label // 2) : 4 * (label // 2) + 4, 4 * (label % 2) : 4 * (label % 2) + 4] += 1
    parts = [(x[a:b], y[a:b]) for a, b in pairwise((0, 60, 80, 120))]
    foreign = torch.rand(30, 1, 8, 8)
    task = small.Task("quarters", *parts, foreign, lambda: small.vit(8, 4, 8, 3, 3), small.Recipe(60, 1e-2, 20))
    return st.Setting.of(task, small.trained(task, 0), 0, 60, 40, 20)


@pytest.fixture(scope="module")
def texts():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(2, 9, (60, 7), generator=generator)
    lengths = torch.randint(2, 8, (60,), generator=generator)
    x[torch.arange(7) >= lengths[:, None]] = small.PADDING
    y = (x[:, 0] > 5).long()
    parts = [(x[a:b], y[a:b]) for a, b in pairwise((0, 30, 45, 60))]
    task = small.Task("words", *parts, x[:20].flip(0), lambda: small.gpt2(9, 7, 8, 3), small.Recipe(3, 1e-2, 10))
    return st.Setting.of(task, small.trained(task, 0), 0, 30, 15, 15)


class TestTexts:
    def test_vocabulary_and_padding(self):
        pytest.importorskip("tokenizers")
        tokeniser = small.vocabulary(["the cat sat", "the hat sat"] * 5, 40)
        found = small.tokens(tokeniser, ["The cat", "sat the hat sat the", "", "zzz"], 4)
        assert found.shape == (4, 4)
        known = {word: tokeniser.token_to_id(word) for word in ("the", "cat", "sat", "hat")}
        assert None not in known.values()
        assert found[0].tolist() == [known["the"], known["cat"], 0, 0]  # lower case, padded behind
        assert found[1].tolist() == [known[word] for word in ("the", "hat", "sat", "the")]  # the last ones are kept
        assert found[2].tolist() == [small.UNKNOWN, 0, 0, 0]  # never padding alone
        assert small.UNKNOWN in found[3].tolist()

    def test_batches_by_length_keep_texts_with_labels(self):
        x = torch.tensor([[5, 6, 7], [5, 0, 0], [6, 7, 0], [8, 0, 0]])
        found = st.batches_of((x, torch.tensor([0, 1, 2, 3])), size=2)
        assert [part.tolist() for part, _ in found] == [[[5], [8]], [[6, 7, 0], [5, 6, 7]]]
        assert st.labels(found).tolist() == [1, 3, 2, 0]


@pytest.mark.slow
def test_what_is_treated(images, texts):
    for setting, attention, mlp in ((images, "vit.layers.{}.attention", "vit.layers.{}.mlp"),
                                    (texts, "transformer.h.{}.attn", "transformer.h.{}.mlp")):  # fmt: skip
        names = [name for name, _ in setting.model.named_parameters()]
        for part, pattern in (("attention", attention), ("MLPs", mlp)):
            chosen = {name for name in names if st.treated(setting.model)[part](name, torch.zeros(()))}
            assert chosen == {n for n in names if n.startswith((pattern.format(1) + ".", pattern.format(2) + "."))}
            assert len(chosen) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["images", "texts"])
def test_rows_of_a_table(kind, request):
    setting = request.getfixturevalue(kind)
    part = "attention" if kind == "images" else "MLPs"
    params = st.treated(setting.model)[part]
    laplace, variational = setting.laplace(params, lw.Validation(setting.val)), setting.variational(params, 10)
    for posterior in (laplace, variational):
        for way in (lw.MonteCarlo(3), lw.Linearized(), lw.Streamlined()):
            found = setting.row(posterior, way)
            assert {"plain", "scaled", "factor", "seconds"} <= set(found)
            for scores in (found["plain"], found["scaled"]):
                assert all(math.isfinite(value) for value in scores.values())
                assert 0 <= scores["auroc"] <= 1
    own = setting.own_row(laplace, lw.Linearized(), [0.0, 1.0, 2.0])
    losses = [st.loss(laplace.with_prior(10.0**e), lw.Linearized(), setting.val) for e in range(3)]
    assert own["prior_precision"] == 10.0 ** losses.index(min(losses))
    assert own["nlpd"] == pytest.approx(
        st.loss(laplace.with_prior(own["prior_precision"]), lw.Linearized(), setting.test)
    )


@pytest.mark.slow
def test_rows_to_beat(images):
    """One temperature divides the logits; the prior alone is fitted to the part that the row names."""
    network, tempered, prior = (
        baselines.transformer(images, row) for row in ("as it is", "one temperature", "prior alone, last layer")
    )
    with torch.no_grad():
        logits = torch.cat([st.outputs(images.model, x) for x, _ in images.test]) / tempered["temperature"]
    expected = st.scores(logits.softmax(-1), st.labels(images.test))
    assert {name: tempered[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert network["accuracy"] == tempered["accuracy"]
    assert "temperature" not in network
    assert prior["prior precision"] > 0


class TestScores:
    def test_against_the_definitions(self):
        probs = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75], [0.9, 0.1]])
        found = st.scores(probs, torch.tensor([0, 0, 0, 0]))
        lost = torch.tensor([0.75, 0.5, 0.25, 0.9]).log().neg()
        assert found["accuracy"] == 0.75
        assert found["accuracy error"] == pytest.approx(0.25)  # std of (1, 1, 0, 1) is 1/2
        assert found["nlpd"] == pytest.approx(float(lost.mean()))
        assert found["nlpd error"] == pytest.approx(float(lost.std()) / 2)

    def test_histogram_is_a_density(self):
        found = st.histogram(torch.tensor([0.0, 0.01, 0.5, 1.0, 1.1]) * math.log(3), 3)  # rounding may exceed the top
        assert sum(found) / st.BINS * math.log(3) == pytest.approx(1, abs=1e-3)
        assert found[0] == pytest.approx(8 / math.log(3), abs=1e-3)
        assert found[-1] == pytest.approx(8 / math.log(3), abs=1e-3)

    def test_draws_in_disjoint_groups(self, images):
        posterior = images.laplace(st.treated(images.model)["last layer"], None)
        found = figure11.over_draws(posterior, images.test, (2, 4), 8, repeats=3)
        assert found["2"]["groups"] == 3
        assert found["4"]["groups"] == 2
        draws = posterior.latent(images.test, lw.MonteCarlo(8)).draws
        halves = [st.scores(probabilities(posterior, LatentDraws(part)), st.labels(images.test))["nlpd"]
                  for part in (draws[:4], draws[4:])]  # fmt: skip
        assert found["4"]["nlpd"] == pytest.approx(sum(halves) / 2)
        assert found["4"]["nlpd between groups"] == pytest.approx(float(torch.tensor(halves).std()), rel=1e-4)
