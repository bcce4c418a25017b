"""What tunings and scale factors refuse: each row is a call and words of its message."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import lapwing as lw
from tests.refused import each_row, refused

X, Y = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
HELD_OUT, HEADS = (X + 1, Y), {"a": slice(0, 2), "b": [2]}
TARGETS, DRAWS = {"a": Y % 2, "b": X[:, 0]}, lw.MonteCarlo(draws=8)
ALL = lw.Linearized()


def network(outputs=3):
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).eval()


def fit(method=None, targets=Y, **options):
    return lw.fit(network(), (X, targets), method or lw.KFAC(), **options)


def factor(via=None, data=HELD_OUT, method=None, **options):
    """A scale factor of a classifier."""
    return lw.scale_factor(fit(method, prior_precision=1.0), data, via or lw.Streamlined(), **options)


def with_map(*numbers):
    """A classifier whose likelihood has a map of its logits."""
    return replace(fit(prior_precision=1.0), likelihood=lw.Categorical(logit_map=numbers))


def joint(**options):
    """A posterior of a class and a number."""
    return fit(targets=TARGETS, likelihood=lw.Joint({"a": lw.Categorical(), "b": lw.Gaussian()}, HEADS), **options)


def flat():
    """A posterior without a prior."""
    return lw.MeanField.from_variances(network(), {"2.weight": torch.full((3, 5), 0.1)}, [(X, Y)])


def first(f, x=X[:2]):
    """The first output, a quantity."""
    return f(x)[:, 0]


MANY = (X, torch.arange(40) + 61)  # 101 classes
REFUSED = [
    (lambda: lw.Validation(HELD_OUT, via=factor(data=X, to=ALL)), "a way of all outputs that was not fitted to a post"),
    (lambda: lw.Validation(HELD_OUT, via=lw.Linearized(outputs=(1, 0))), "a way of all outputs"),
    (lambda: lw.Validation(HELD_OUT, via="draws"), "via must be a way … or None. Write lw.Validation"),
    (lambda: lw.Validation(HELD_OUT, calibration="vector"), "calibration='temperature'"),
    (
        lambda: fit(tune=lw.Validation(HELD_OUT, calibration="matrix", via=DRAWS)),
        "Leave via= and link= out … calibration='matrix'",
    ),
    (
        lambda: joint(tune=lw.Validation((X, TARGETS), via=DRAWS)),
        "The heads of lw.Joint are tuned for linearised predictions",
    ),
    (lambda: fit(targets=X, tune=lw.Validation((X, X), calibration="matrix")), "is for classifiers"),
    (lambda: lw.Validation((X, X), calibration="matrix").tune(fit(targets=X, prior_precision=1.0)), "is for classif"),
    (lambda: lw.Validation((X, TARGETS), via=DRAWS).tune(joint()), "The heads of lw.Joint are tuned for linearised"),
    (lambda: lw.fit(network(101), MANY, tune=lw.Validation(MANY, calibration="matrix")), "at most 100 outputs"),
    (lambda: lw.Categorical(logit_map=(1.0, 2.0, 3.0)), "C rows of C + 1 finite numbers"),
    (lambda: with_map(*range(12)).predict(X, via=lw.Linearized(outputs=2)), "Leave outputs= out"),
    (lambda: with_map(1.0, 0.0).predict(X), "is for 1 outputs, and there are 3"),
    (lambda: lw.Gaussian().with_logit_temperature(2.0), "The gaussian likelihood has no logit temperature."),
    (lambda: fit(tune=lw.Refit()), "lw.Refit chooses the width of a regression … Leave tune out"),
    (lambda: fit(validation=(X[:, :1], Y)), "held-out data do not fit. … shapes cannot be multiplied"),
    (lambda: fit(validation=(X / 0, Y)), "held-out data do not fit. … NaN or infinite values in 40 samples"),
    (lambda: factor(data=X, to=ALL, by="evidence"), "have no effect"),
    (lambda: factor(data=X, of=first), "of= has neither via= nor to="),
    (lambda: lw.scale_factor(flat(), HELD_OUT, of=first, by="evidence"), "have no effect"),
    (lambda: lw.scale_factor(flat(), HELD_OUT, of=3), "posterior.of(3) needs a function"),
    (lambda: lw.scale_factor(flat(), HELD_OUT, of=lambda f, x: f(x)),
     "numbers of shape … values of shape … one number for each"),
    (lambda: lw.scale_factor(flat(), [(X, X.mean(1) / 0 * 0)], of=first), "None of the held-out values counts"),
    (lambda: flat().of(first, via=lw.Scaled(lw.Streamlined(), 2.0)), "via= … a way of lw.scale_factor(..., of=)"),
    (lambda: lw.scale_factor(flat(), HELD_OUT, of=lambda f: f(X)), "function of posterior.of takes f and a batch"),
    (lambda: fit(prior_precision=1.0).predict(X, via=lw.Scaled(lw.Linearized(), (1, 2, 1))), "differ between logits"),
    (lambda: fit(prior_precision=1.0).predict(X, via=lw.Scaled(lw.Linearized(), (1, 2))), "3 outputs … has 2 factors"),
    (lambda: fit(prior_precision=1.0).predict(X, via=lw.Scaled(lw.Linearized(outputs=2), (1, 1, 1))), "for 2 of them"),
    (lambda: lw.Scaled(lw.Linearized(), (1.0, -2.0)), "a positive finite number or a list of them"),
    (lambda: flat().of(first, via=lw.Scaled(lw.Linearized(), (2.0,))), "must be a way of lw.scale_factor"),
    (lambda: flat().of(first, via=2.0), "via=2.0 … must be a way of lw.scale_factor"),
    (lambda: factor(data=X, to=lw.Linearized(outputs=2)), "variances of all outputs … Leave outputs= out"),
    (lambda: factor(to=ALL), "Pass what this call takes, without targets"),
    (lambda: factor(ALL, link=lw.LaplaceBridge()), "stay as they are"),
    (lambda: factor(ALL, method=lw.ELLA(5, 12), by="evidence"), "Write by='validation'"),
    (lambda: factor(ALL, method=lw.SampledLLA(4), by="evidence"), "Write by='validation'"),
    (lambda: lw.scale_factor(flat(), HELD_OUT, by="evidence"), "no prior or has directions of variance 0"),
]  # fmt: skip


@each_row(REFUSED)
def test_a_call_is_refused_in_these_words(call, words):
    refused(call, words)


def test_held_out_data_are_looked_at_before_the_fit(monkeypatch):
    monkeypatch.setattr(lw.KFAC, "passes", None)
    refused(lambda: fit(validation=(X, Y + 5)), "held-out data do not fit. Categorical accepts labels 0 to 2")
