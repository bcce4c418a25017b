"""What metrics, pictures, comparisons and sensitivities refuse: each row is a call and words of its message."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Normal

import lapwing as lw
from lapwing.evaluation import Comparison, metrics, plots, sensitivity
from lapwing.likelihoods import MixturePrediction
from tests.evaluation.test_plots import CASES, regression
from tests.refused import each_row, refused

X, Y, P = torch.rand(6), torch.arange(6) % 3, torch.full((6, 3), 1 / 3)
HALVES, ZEROS = torch.full((3, 2), 0.5), torch.zeros(3, dtype=torch.long)
ROW, COLUMN, NAN = torch.ones(4), torch.ones(4, 1), math.nan
INPUTS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
UNCERTAIN = lw.Uncertain(INPUTS, 0.1)


def network(outputs: int = 3) -> nn.Module:
    return nn.Linear(4, outputs).double().eval()


def compared(posteriors: Any = None, loader: Any = ((INPUTS, Y),), *foreign: Any, **options: Any) -> Comparison:
    posteriors = {"net": network()} if posteriors is None else posteriors
    return lw.compare(posteriors, loader, *foreign, repeats=1, **options)


def labels_and_numbers(likelihood: Any, outputs: int) -> Comparison:
    numbers = lw.fit(network(1), (INPUTS, X.double()), likelihood="gaussian", prior_precision=1.0)
    labels = lw.fit(network(outputs), (INPUTS, Y), likelihood=likelihood, prior_precision=1.0)
    return compared({"numbers": numbers, "labels": labels, "again": labels})


def of_weights(*weights: Any, given: Any = True) -> Comparison:
    return compared(None, [(INPUTS, Y, *weights)], sample_weights=given)


DIFFER = "shapes differ: … y (4 … nothing is broadcast"
REFUSED = [
    # metrics
    *((lambda metric=metric, probs=probs, y=y: metric(probs, y), f"{metric.__name__} needs … {words}")
      for metric in (metrics.accuracy, metrics.brier, metrics.expected_calibration_error) for probs, y, words in (
        (HALVES[:, 0], ZEROS, "shape (3,) … torch.stack"), (torch.ones(3, 1), ZEROS, "shape (3, 1) … C > 1"),
        (HALVES[:0], ZEROS[:0], "shape (0, 2) … N > 0"), (HALVES, ZEROS[:, None], "labels is Tensor (3, 1)"),
        (HALVES, torch.zeros(3), "float32 … labels.long"), (HALVES, torch.arange(3), "in 0..1 … from 0 to 2"),
        (HALVES, torch.tensor([0, 1, -1]), "from -1 to 1"),
        (torch.tensor([[0.5, 0.5], [2.0, -1.0]]), torch.tensor([0, 1]), "1 of 2 rows … row 1 … logits.softmax"),
        (torch.tensor([[NAN, 0.5], [0.5, 0.5]]), torch.tensor([0, 1]), "1 of 2 rows … row 0"))),
    (lambda: metrics.rmse(COLUMN, ROW), DIFFER),
    (lambda: metrics.crps_gaussian(COLUMN, ROW, ROW), DIFFER),
    (lambda: metrics.interval_coverage(ROW, ROW, COLUMN), DIFFER),
    (lambda: metrics.rmse(ROW, torch.tensor([1.0, NAN, math.inf, 1.0])),
     "rmse needs finite values, and 2 of 4 values of y"),
    (lambda: metrics.crps_gaussian(ROW, -ROW, ROW), "needs a positive std, and 4 of 4 … predict(x).std"),
    (lambda: metrics.interval_coverage(ROW, -ROW, ROW), "4 of 4 intervals"),
    (lambda: metrics.interval_coverage(torch.tensor([NAN, 0.0, 0.0, 0.0]), ROW, ROW), "1 of 4 intervals"),
    (lambda: metrics.aurc(ROW, ROW[:2]), "aurc … uncertainty (4,), errors (2,)"),
    *((lambda components=components: MixturePrediction(components), "batch shape (inputs, draws)")
      for components in ([1, 2], None, Normal(0.0, 1.0), Normal(torch.zeros(4), torch.ones(4)))),
    # pictures
    (lambda: plots.reliability_diagram(torch.randn(6, 3), Y), "Pass logits.softmax(1)"),
    (lambda: plots.reliability_diagram(P, Y[:5]), "labels of shape (6,)"),
    (lambda: plots.reliability_diagram(X, Y[:5]), "needs"),
    (lambda: plots.reliability_diagram(P, torch.full((6,), -100)), "N > 0"),
    (lambda: plots.risk_coverage(X, X), "labels.long()"),
    (lambda: plots.reliability_diagram(P, Y, bins=0), "bins=10"),
    (lambda: plots.reliability_diagram(*regression()), "interval_calibration"),
    (lambda: plots.risk_coverage("x", Y), "probs is 'x'"),
    (lambda: plots.ood_scores(X * NAN, X), "finite"),
    (lambda: plots.ood_scores(X[:0], X), "scores_in (0,)"),
    (lambda: plots.interval_calibration(CASES["classes"]()[0], Y), "Pass posterior.predict"),
    (lambda: plots.interval_calibration((X, 0 * X), X), "std > 0"),
    (lambda: plots.scaled_residuals((X, X + 1), X[:5]), "Pass posterior.predict"),
    (lambda: plots.scaled_residuals((X, X + 1), X * NAN), "Pass posterior.predict"),
    (lambda: plots.bands(torch.rand(40), regression()[0]), "one output"),
    (lambda: plots.bands(X, X), "one output"),
    (lambda: plots.uncertainty_map(torch.rand(2, 3, 3)), "of one image"),
    (lambda: plots.uncertainty_map(torch.rand(3, 3), torch.rand(3, 4)), "of one image"),
    (lambda: plots.sensitivity_bars(P, ["a", "b"]), "Pass one for each column"),
    # comparisons and their reports
    (lambda: compared({}), "a dict of at least one"),
    (lambda: compared({"a": 3}), "is int"),
    (lambda: compared([]), "a dict"),
    (lambda: compared(loader=[]), "no samples"),
    (lambda: compared(score="entropie"), "score is one of 'mutual_information', 'entropy', 'confidence'"),
    (lambda: compared().plot("kfac"), "Its rows are net"),
    *((lambda foreign=foreign: compared(None, [(INPUTS, Y)], foreign),
       'foreign of compare is … foreign={"noise": torch.randn') for foreign in (
        INPUTS, [(INPUTS, Y)], {1: INPUTS})),
    (lambda: of_weights(), "holds no sample weights"),
    (lambda: of_weights(X, given=None), "neither True nor False"),
    *((lambda likelihood=likelihood, outputs=outputs: labels_and_numbers(likelihood, outputs),
       'The row "network" has no … in two tables') for likelihood, outputs in ((None, 3), (lw.Ordinal(), 2))),
    (lambda: Comparison(("NLL",), {"a": {"NLL": 1.0}}).report("r.html"),
     "no predictions … let lw.compare make the table"),
    # sensitivities
    *((lambda inputs=inputs: sensitivity(network(), inputs, likelihood="categorical"), words) for inputs, words in (
        ((UNCERTAIN, UNCERTAIN), "hold 2 uncertain ones"), ({"x": INPUTS}, "hold 0 uncertain ones"),
        (lw.Uncertain(INPUTS, covariance=torch.eye(4).double()), "whose variances are positive"),
        (lw.Uncertain(INPUTS, 0.0), "variances are positive"), (INPUTS[:0], "holds no samples"),
        (torch.ones(3, 4, dtype=torch.long), "Integer inputs"), (INPUTS / 0, "NaN or infinite"))),
    (lambda: sensitivity(network(), (UNCERTAIN, torch.nested.nested_tensor([*INPUTS])), likelihood="categorical"),
     "Tensor nested"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@each_row(REFUSED)
def test_a_call_is_refused_in_these_words(call, words):
    refused(call, words)
