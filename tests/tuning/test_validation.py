"""Validation: candidates scored together equal predictions made one by one, and the best of them is chosen."""

from __future__ import annotations

import math
import re

import pytest
import torch

import lapwing as lw
from lapwing.tuning.held_out import held_out_scores
from tests.zoo import ZOO

METHODS = [lw.Diagonal(), lw.KFAC(uncovered="dense"), lw.ELLA(rank=5, rows=12), lw.ELLA(5, 12, "prior"), lw.Full()]


def setup(name, method):
    case = ZOO[name]
    loader = [(case.inputs(6, 1), case.targets(6, 1)), (case.inputs(3, 2), case.targets(3, 2))]
    held_out = [(case.inputs(5, 3), case.targets(5, 3)), (case.inputs(2, 4), case.targets(2, 4))]
    likelihood = lw.Categorical() if case.classification else lw.Gaussian(0.5)
    posterior = lw.fit(case.build(), loader, method, likelihood=likelihood, params=lw.matching("*"), tune=None)
    return posterior, held_out


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("name", ["mlp_scalar", "cnn_bn_inplace", "conv1d", "gpt2"])
def test_candidates_scored_together_equal_predictions(name, method):
    posterior, held_out = setup(name, method)
    precisions = [0.1, 1.0, 30.0]
    scores = held_out_scores([posterior], precisions, held_out)[0, :, 0].tolist()
    for precision, score in zip(precisions, scores, strict=True):
        one = posterior.with_prior(precision)
        expected = torch.cat([one.predict(x).log_prob(y) for x, y in held_out]).mean()
        assert score == pytest.approx(float(expected), rel=1e-9)


def test_the_best_candidate_is_chosen():
    posterior, held_out = setup("cnn_bn_inplace", lw.KFAC())
    tuning = lw.Validation(held_out, decades=(-2.0, 4.0), points=13)
    free = lw.fit(
        posterior.tangent.model,
        [(ZOO["cnn_bn_inplace"].inputs(6, 1), ZOO["cnn_bn_inplace"].targets(6, 1))],
        lw.KFAC(),
        params=lw.matching("*"),
        tune=tuning,
    )
    grid = [10 ** (-2 + 0.5 * i) for i in range(13)]
    scores = held_out_scores([free], grid, held_out)[0, :, 0].tolist()
    best = grid[max(range(13), key=lambda i: scores[i])]
    assert abs(math.log10(free.prior_precision / best)) <= 0.25 + 1e-9
    assert float(held_out_scores([free], None, held_out)) >= max(scores) - 1e-3


@pytest.mark.parametrize("method", [lw.Diagonal(), lw.KFAC(), lw.ELLA(5, 12, "prior")], ids=repr)
@pytest.mark.parametrize("prior", [None, 2.0])
def test_open_noise_is_chosen_on_held_out_data_too(method, prior):
    """No pair (δ, σ²) around the chosen one predicts the held-out data better."""
    case = ZOO["conv1d"]
    loader = [(case.inputs(9, 1), case.targets(9, 1))]
    x, y = case.inputs(30, 3), case.targets(30, 3)
    fitted = lw.fit(
        case.build(), loader, method, params=lw.matching("*"), prior_precision=prior, tune=lw.Validation([(x, y)])
    )
    assert prior is None or fitted.prior_precision == prior

    def score(delta, noise):
        return float(fitted.with_prior(delta, noise_variance=noise).predict(x).log_prob(y).mean())

    chosen = score(fitted.prior_precision, fitted.noise_variance)
    by_evidence = lw.fit(case.build(), loader, method, params=lw.matching("*"), prior_precision=prior)
    assert chosen >= score(by_evidence.prior_precision, by_evidence.noise_variance) - 1e-6
    for factor in (0.5, 2.0):
        assert chosen >= score(fitted.prior_precision, fitted.noise_variance * factor) - 2e-2
        if prior is None:
            assert chosen >= score(fitted.prior_precision * factor, fitted.noise_variance) - 2e-2


@pytest.mark.parametrize(
    ("decades", "told"),
    [
        ((0.0, 2.0), r"the widest spread in the range; decades=\(-3, 5\) looks further\."),
        ((9.0, 11.0), r"3 candidates there differ by less than 0.0001 nats, so that it matters little\."),
        ((-4.0, 2.0), None),
    ],
)
def test_a_choice_at_the_edge_of_the_range_is_told(decades, told, caplog):
    """A network that is far too sure, whose best prior precision lies between 0.001 and 10."""
    torch.manual_seed(0)
    x = torch.randn(300, 3, dtype=torch.float64)
    y = (x[:, 0] + torch.randn(300, dtype=torch.float64) > 0).long()
    model = torch.nn.Linear(3, 2).double().eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-1.1, 0.4, 0.3], [1.1, -0.4, -0.3]]))
    held_out = [(x[200:], y[200:])]
    tuning = lw.Validation(held_out, decades=decades, points=3 if told else 11)
    with caplog.at_level("WARNING", "lapwing"):
        lw.fit(model, [(x[:5], y[:5])], lw.Full(), tune=tuning)
    shown = [record.getMessage() for record in caplog.records if "edge of its range" in record.getMessage()]
    assert len(shown) == (told is not None)
    if told is not None:
        assert re.search(told, shown[0])
