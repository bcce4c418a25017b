"""What likelihoods and predictions refuse: the words of every message, in one table."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import distributions as dist
from torch import nn

import lapwing as lw
from lapwing.covariance import LatentDraws
from lapwing.data.batches import packed
from lapwing.likelihoods import (
    Bernoulli,
    Categorical,
    ExactLink,
    Gaussian,
    MixturePrediction,
    Poisson,
    Probit,
    Quadrature,
    register_likelihood,
    resolve,
)
from tests.likelihoods.latents import dense_latent, joint_latent, random_latent
from tests.likelihoods.test_censored import KNOWN
from tests.likelihoods.test_censored import X as INPUTS
from tests.likelihoods.test_divergence import CASES as POWER_MEANS
from tests.likelihoods.test_from_distribution import DRAWN, EXACT, GAMMA
from tests.likelihoods.test_from_distribution import fitted as fitted_family
from tests.likelihoods.test_joint import GIVEN, HELD_OUT, JOINT, Y, fitted, network, overconfident
from tests.likelihoods.test_joint import X as ROWS
from tests.likelihoods.test_likelihoods import Counts
from tests.likelihoods.test_losses import ANSWERS, LABELS, SOFT, logits
from tests.likelihoods.test_predictions import normals
from tests.refused import each_row, refused

X, REAL, NAN = torch.randn(9, 3), torch.randn(9, 2), torch.nan
LATENT = random_latent(batch=4, size=2)
BELOW = torch.stack([torch.full((80,), -math.inf), INPUTS[:, 0] - 100], 1)
HETEROSCEDASTIC = lw.HeteroscedasticGaussian()


@dataclass(frozen=True)
class AnotherCategorical(Counts):
    name: ClassVar[str] = "categorical"


def root_of(*shape: int) -> lw.Likelihood:
    """A likelihood whose Fisher root has another shape."""

    class Rooted(Counts):
        def fisher_root(self, outputs: torch.Tensor) -> torch.Tensor:
            return outputs.new_ones(shape)

    return Rooted()


def fit(y: torch.Tensor, likelihood: Any, outputs: int = 2, **options: Any) -> lw.Posterior:
    return lw.fit(nn.Linear(3, outputs).eval(), (X[: len(y)], y), lw.Diagonal(), likelihood=likelihood, **options)


def family(function: Any, y: torch.Tensor | None = None) -> lw.Posterior:
    return fitted_family(lw.FromDistribution(function), torch.ones(20) if y is None else y)[0]


def fit_intervals(y: torch.Tensor) -> lw.Posterior:
    return lw.fit(nn.Linear(3, 1).double().eval(), [(INPUTS, y)], lw.KFAC(), likelihood="censored")


def power_mean(case: str, alpha: Any, *noise: float, **options: Any) -> torch.Tensor:
    likelihood, size, targets = POWER_MEANS[case]
    latent = random_latent(batch=3, size=size)
    return likelihood.log_power_mean(latent.mean, latent.covariance, targets(3), alpha, *noise, **options)


def transformed(function: Any) -> Any:
    return Gaussian(0.2).predict(LATENT).transformed(function)


def held_out(joint: lw.Joint, **unknown: torch.Tensor) -> lw.Posterior:
    """A fit of two heads with held-out targets of which some are unknown."""
    model, y = overconfident()
    return fitted(model, joint=joint, validation=(HELD_OUT, {**y, **unknown}))


DROP = "Drop those rows with `keep = (y >= 0) & (y < 3); x, y = x[keep], y[keep]`."
EACH_ENTRY = "is NaN or infinite in torch.float64 at some values of y"
UNTUNED = "noise_variance=None is still to be tuned. Write Gaussian(noise_variance=0.1)"
OTHER = {"kind": Y["kind"], "size": Y["box"]}
"""Targets whose columns, in the order of keys, differ from those of the fit."""

OF_ONE_DTYPE = "fails at outputs … expected … torch.eye(2).to(f)"
REFUSED = [
    # names and noise
    (lambda: resolve("softmax"), "'softmax' is not a likelihood … 'categorical' … 'bernoulli' … 'gaussian'"),
    (lambda: resolve(Gaussian), "the class Gaussian.  … likelihood=Gaussian()"),
    (lambda: resolve(3), "3 is not a likelihood"),
    (lambda: register_likelihood(AnotherCategorical),
     "'categorical' of AnotherCategorical belongs to lapwing.likelihoods.categorical.Categorical"),
    (lambda: register_likelihood(Counts()), "a frozen dataclass that extends Likelihood"),
    (lambda: register_likelihood(int), "a frozen dataclass that extends Likelihood"),
    (lambda: resolve(type("Nameless", (Counts,), {"name": None})()), 'Nameless has no name … "nameless"'),
    (lambda: Categorical().with_noise_variance(0.1), "categorical … no noise variance. Leave out noise_variance=0.1"),
    (lambda: Gaussian().log_prob(X[:1, :1], X[:1, 0]), UNTUNED),
    (lambda: Gaussian().log_likelihood(Gaussian().statistics(X[:1, :1], X[:1, 0])), UNTUNED),
    (lambda: Gaussian().predict(LATENT), UNTUNED),
    (lambda: fit(REAL, Gaussian(noise_ratios=[1.0, 2.0, 3.0])),
     "noise variances of 3 outputs, and the outputs have shape … 1 / variance)], sample_weights=True"),
    (lambda: fit(torch.stack([REAL[:, 0], torch.full((9,), NAN)], 1), None),
     "9 of 18 values of shape (9, 2) … (0, 1): nan … missing=True"),
    (lambda: Gaussian([0.1, 0.5, 2.0]).predict(joint_latent()), "noise variances of 3 outputs"),
    *((lambda shape=shape: fit(torch.ones(9, 1), root_of(*shape), 1),
       f"fisher_root of Rooted returned {shape} and must return (B, C, R)") for shape in ((9,), (9, 1), (9, 2, 1))),
    # targets
    (lambda: fit(REAL, Gaussian(0.1, noise="input")),
     "noise='input' needs … noise_variance=0.1 … write likelihood=lw.Gaussian(noise='input')"),
    (lambda: fit(REAL, lw.StudentT(noise_variance=0.1, noise="input")), "noise_variance=0.1 and tune="),
    (lambda: fit(REAL, Gaussian(noise="input"), tune=lw.Evidence()),
     "tune=Evidence(per_layer=False, rank_gap=None). Leave both out"),
    (lambda: fit(REAL, Gaussian(noise="input"), tune=None), "tune=None. Leave both out … validation=held_out"),
    (lambda: Gaussian(1.0).log_prob(X[:4, :2], X[:4, 0]), "(4, 2)"),
    (lambda: Categorical(class_weights=[1.0, 2.0]).check(logits(), LABELS), "one weight for each of 3 classes"),
    (lambda: Bernoulli(pos_weight=[1.0, 2.0]).check(logits(), ANSWERS), "one for each of 3 outputs"),
    (lambda: Categorical().check(logits(), 2 * SOFT), "7 of 7 rows do not"),
    (lambda: Categorical().check(logits(), SOFT - 1), "7 of 7 rows do not"),
    (lambda: Bernoulli().check(logits(), SOFT), "lw.Bernoulli(soft_targets=True)"),
    (lambda: Bernoulli(soft_targets=True).check(logits(), 2 * SOFT), "between 0 and 1"),
    (lambda: Bernoulli().check(logits(), torch.full((7, 3), NAN)), "lw.Bernoulli(missing=True)"),
    (lambda: Bernoulli().predict(LATENT).log_prob(torch.full((4, 2), 2)),
     "BernoulliPrediction.log_prob accepts targets 0 and 1"),
    (lambda: Poisson().check(X[:2, :1], torch.tensor([1.5, 2.0])), "Poisson accepts counts"),
    (lambda: Poisson().check(X[:2, :1], torch.tensor([-1, 2])), "Poisson accepts counts"),
    (lambda: Poisson().check(X[:2, :1], torch.tensor([True, False])), "Poisson accepts targets of a real dtype"),
    (lambda: fit(torch.zeros(9), HETEROSCEDASTIC, 1), "Linear(features, 2)"),
    (lambda: fit(torch.zeros(9), HETEROSCEDASTIC, 3), "Linear(features, 6)"),
    (lambda: fit(torch.full((9,), NAN), "heteroscedastic"), "lw.HeteroscedasticGaussian(missing=True)"),
    # intervals
    *((lambda y=y: fit_intervals(y), words) for y, words in (
        (KNOWN[:, 0], "targets (lower, upper) of shape (80, 2)"), (KNOWN[:, :1], "torch.stack"),
        (KNOWN.flip(1), "are no interval"), (torch.full((80, 2), math.inf), "are no interval"),
        (torch.stack([torch.arange(80) + 2.0, torch.ones(80)], 1), "For (time, event) write"),
        (KNOWN * NAN, "Pass lower <= upper"))),
    (lambda: lw.Censored(1.0).log_prob(REAL[:, :2], KNOWN[:9]), "one output"),
    *((lambda y=y: fit_intervals(y), "do not determine the noise variance")  # the outputs miss all, or none
      for y in (BELOW, -BELOW.flip(1), KNOWN[:, :1] + torch.tensor([-100.0, 100.0]))),
    # links and draws
    (lambda: Categorical().predict(LatentDraws(torch.zeros(5, 4, 3)), Probit()),
     "categorical … weight draws … link=Probit(scale='mean'). Write link=lw.SampledLink()"),
    (lambda: Categorical().predict(LATENT, ExactLink()),
     "a Gaussian latent … lw.LaplaceBridge() or lw.Quadrature() or lw.SampledLink()"),
    (lambda: Gaussian(0.3).predict(LATENT, Probit()), "a Gaussian latent … Probit(scale='mean'). Leave link=None."),
    (lambda: Categorical().predict(LATENT, Probit), "Probit (a class, not an instance)"),
    (lambda: fit(torch.arange(9) % 8, None, 8, prior_precision=1.0).predict(X, lw.Linearized(outputs=3), Quadrature()),
     "link=lw.Probit()"),
    (lambda: Categorical().predict(LATENT).mutual_information(draws=0), "draws=0"),
    (lambda: Bernoulli().predict(LATENT).mutual_information(8), "nodes=8"),
    (lambda: fit(torch.arange(9) % 3, None, forward=lambda net, x: nn.functional.pad(net(x), (0, 1), value=math.inf)),
     "NaN or infinite"),
    # power means
    *((lambda case=case, alpha=alpha: power_mean(case, alpha), "finite alpha of at least 0, not alpha=")
      for case in POWER_MEANS for alpha in (-0.1, math.inf, NAN, True, "1")),
    *((lambda case=case: power_mean(case, 1.0, 0.1), "no noise variance. Leave out noise_variance=0.1")
      for case in POWER_MEANS if case != "gaussian"),
    *((lambda case=case: power_mean(case, 1.0, link=ExactLink()), "power mean … link=ExactLink()")
      for case in POWER_MEANS if case != "gaussian"),
    (lambda: power_mean("three classes", 0.5, link=Probit()),
     "alpha=0.5 with link=Probit(scale='mean'). Write link=lw.SampledLink()"),
    # predictions in other units, and mixtures
    (lambda: Poisson().predict(LATENT).scaled(0, 2), "CountPrediction predicts counts"),
    (lambda: MixturePrediction(dist.Independent(dist.Poisson(torch.ones(4, 5, 2)), 1)).scaled(0, 2),
     "MixturePrediction predicts counts"),
    *((lambda wrong=wrong: Gaussian(0.3).predict(LATENT).scaled(wrong, 1.0), "The mean of scaled() is  … of shape (2,)")
      for wrong in (torch.ones(3), "a", NAN, torch.ones(4, 2))),
    (lambda: Gaussian(0.3).predict(LATENT).scaled(0.0, [1.0, 0.0]), "not positive"),
    *((lambda shape=shape: normals(False)[0].log_prob(torch.zeros(shape)), "shape (4,) … y.reshape")
      for shape in ((3,), (1, 4), ())),
    (lambda: normals(False)[0].log_prob(torch.zeros(4, 2)), "shape (4,) … (4, 2) … density="),
    (lambda: normals(False)[0].interval(90), "between 0 and 1"),
    *((lambda wrong=wrong: normals(False)[0].quantile(wrong),
       f"The probability of quantile() is {wrong!r}. Pass a number between 0 and 1")
      for wrong in (0, 1, 90, "0.5", None, NAN, [0.5])),
    (lambda: MixturePrediction(dist.Categorical(torch.ones(50, 6, 3))), "ClassPrediction.mixture"),
    # functions of y
    (lambda: transformed(torch.cos), "is not monotone"),
    (lambda: transformed(lambda y: 0.0 * y), "is not monotone"),
    (lambda: transformed(torch.log), EACH_ENTRY),
    (lambda: transformed(lambda y: (1000.0 * (y + 5.0)).exp()), EACH_ENTRY),
    (lambda: transformed(torch.sum), "tensor of the shape of y"),
    (lambda: transformed(3), "tensor of the shape of y"),
    (lambda: transformed(lambda y: y.cumsum(-1)), "mixes outputs or inputs"),
    (lambda: transformed(lambda y: (y - y.mean(0)) / y.std(0)), "mixes outputs or inputs"),
    (lambda: transformed(lambda y: y.flip(0)), "mixes outputs or inputs"),
    (lambda: Poisson().predict(LATENT).transformed(torch.exp), "function(prediction.sample"),
    (lambda: Gaussian(0.01).predict(dense_latent(torch.tensor([[100.0]]), torch.ones(1, 1, 1))).transformed(torch.exp),
     "is NaN or infinite in torch.float32 … or use draws"),
    # families of torch.distributions
    (lambda: lw.FromDistribution(dist.Normal(0.0, 1.0)), "function must be a function from outputs to a"),
    (lambda: family(lambda f: dist.Gamma(f[:, 0].exp(), f[:, 1].exp())), "fails at outputs … f[..., 0]"),
    (lambda: family(lambda f: dist.Normal(f[..., 0], -f[..., 1].exp())), "parameter scale … f[..., 0].exp()"),
    (lambda: family(lambda f: f), "Return a torch.distributions object"),
    (lambda: family(lambda f: dist.Normal(f.mean(0), 1.0)), "of shape (1, 2) … Return a torch"),
    (lambda: family(lambda f: dist.Categorical(logits=f.unsqueeze(-1))), "not for a Categorical"),
    (lambda: family(lambda f: dist.Normal(f @ torch.eye(2), 1.0), REAL), OF_ONE_DTYPE),
    (lambda: family(lambda f: dist.Normal(f @ torch.eye(2).double(), 1.0), REAL),
     OF_ONE_DTYPE),
    (lambda: family(lambda f: dist.MultivariateNormal(f, torch.eye(2)), REAL), OF_ONE_DTYPE),
    (lambda: family(lambda f: dist.Normal(f.detach()[..., 0], 1.0)),
     "FromDistribution(<lambda>, draws=256) has no gradient by the outputs f"),
    (lambda: family(lambda f: dist.Normal(0 * f[..., 0].numpy(), 1.0)), "FromDistribution(<lambda>, draws=256)"),
    (lambda: family(DRAWN["gamma"][0], torch.ones(20).index_fill(0, torch.tensor(3), -1.0)),
     "FromDistribution: 1 of 20 targets  … under Gamma,  … its support  … Move"),
    (lambda: family(DRAWN["beta"][0], torch.linspace(0, 1, 20)), "2 of 20 targets have no finite log density"),
    (lambda: family(EXACT["categorical"][0], torch.arange(20) % 3), "labels 0 to 1"),
    (lambda: GAMMA.log_prob(torch.zeros(3, 2), torch.ones(2)), "one target for each output and input"),
    (lambda: GAMMA.log_prob(torch.zeros(3, 2), torch.ones(3, 2)), "of shape"),
    # ordered classes, in the training loss and in a fit
    (lambda: lw.Ordinal().log_prob(torch.zeros(3, 2), torch.tensor([0.0, 1.7, 2.0])), "integer dtype"),
    (lambda: lw.Ordinal().log_prob(torch.zeros(3, 2), torch.tensor([0, 3, 1])), "outputs, `torch.nn.Linear"),
    (lambda: lw.Ordinal().log_prob(torch.zeros(3, 2), torch.tensor([0, -1, 1])), DROP),
    (lambda: lw.Ordinal().log_prob(torch.zeros(3, 2), torch.tensor([0, -100, 1])), DROP),
    (lambda: lw.Ordinal().log_prob(torch.zeros(3, 2), torch.tensor([0, 1])), "one label for each input"),
    (lambda: fitted_family("ordinal", torch.arange(40) % 4 + 1, outputs=3), "labels 0 to 3"),
    # several heads
    (lambda: lw.Joint({"a": Gaussian()}, {"a": slice(1)}), "at least two keys"),
    (lambda: lw.Joint({"a": Gaussian(), "b": Poisson()}, {"a": slice(1), "c": slice(1)}), "for the same keys"),
    (lambda: fitted(network(), joint=replace(JOINT, likelihoods={**JOINT.likelihoods, "box": Gaussian(noise="input")}),
                    tune=None),
     "noise='input' needs an open noise variance, and a tuning"),
    (lambda: packed({"a": X, "b": X[:3]}), "the same B"),
    (lambda: fitted(network(), joint=None), "keys ['box', 'kind'], and the likelihood has no heads … lw.Joint"),
    (lambda: fitted(network(), {"kind": Y["kind"], "other": Y["box"]}), "keys ['kind', 'other'], and the"),
    (lambda: fitted(network(), validation=[(ROWS, OTHER)], prior_precision=None), "heads ['box', 'kind']"),
    (lambda: fitted(network(), tune=lw.Validation((ROWS, OTHER)), prior_precision=None), "heads ['box', 'kind']"),
    (lambda: lw.compare({"a": fitted(network())}, [(ROWS, OTHER)]), "keys ['kind', 'size'] … NaN for unknown"),
    (lambda: lw.compare({"a": fitted(network())}, (ROWS, {"kind": Y["kind"]})), "keys ['kind'], and the"),
    (lambda: fitted(network()).update((ROWS, OTHER)), "heads ['box', 'kind']"),
    (lambda: fitted(network()).influence((ROWS, OTHER), ROWS), "heads ['box', 'kind']"),
    (lambda: fitted(network(), {"kind": Y["kind"], "box": Y["box"][:, 0]}),
     "Joint has 3 targets per sample … all keys in every batch"),
    (lambda: lw.fit(network(), [(ROWS[:, None].expand(-1, 2, 3), Y)], likelihood=JOINT), "heads of lw.Joint have not"),
    (lambda: fitted(network(), {**Y, "box": torch.zeros(30, 2, 2)}), "lw.Joint have no positions"),
    (lambda: fitted(network(), {**Y, "kind": Y["kind"] + 1}), "The target 'kind' does not fit.  … labels 0 to 2"),
    (lambda: fitted(network(), {**Y, "kind": torch.rand(30)}),
     "The target 'kind' does not fit.  … Write `likelihood=\"gaussian\"` for real"),
    (lambda: fitted(network(3)), "outputs from 0 to 2 that no other head has"),
    (lambda: fitted(network()).predict(ROWS).uncertainty(), "prediction['box'].uncertainty()"),
    (lambda: lw.compare({"a": fitted(network())}, [(ROWS, Y)], foreign={"far": 9 * ROWS}), "prediction['box']"),
    (lambda: held_out(JOINT, kind=torch.full((40,), NAN)), "held-out targets 'kind' counts: there are none, or all"),
    (lambda: held_out(GIVEN, kind=torch.full((40,), NAN), box=torch.full((40, 2), NAN)),
     "held-out targets 'box' counts"),
    (lambda: lw.scale_factor(fit(REAL, Gaussian(0.3, missing=True)), (X, REAL * NAN)), "held-out targets counts"),
]  # fmt: skip


@each_row(REFUSED)
def test_a_call_is_refused_in_these_words(call, words):
    refused(call, words)


OF_LABELS = [
    # outputs' shape, labels, what the message must say
    (
        (4, 3),
        torch.tensor([0, -1, 2, -1]),
        ["labels 0 to 2", "2 of 4", "index 1: -1", "keep = (y >= 0)", "ignore_index=-1"],
    ),
    ((4, 3), torch.tensor([0, 1, -1, 2]), ["1 of 4", "index 2: -1", "keep = (y >= 0) & (y < 3)"]),
    ((4, 3), torch.tensor([0, 255, 1, 255]), ["2 of 4", "index 1: 255", "lw.Categorical(ignore_index=255)"]),
    ((4, 3), torch.tensor([0, 5, 1, 7]), ["2 of 4", "features, 8)`, or correct the labels"]),
    ((4, 3), torch.tensor([1, 2, 3, 3]), ["2 of 4", "index 2: 3", "y = y - 1"]),
    ((4, 2), torch.tensor([-1, 1, 1, -1]), ["2 of 4", "index 0: -1", "y = (y + 1) // 2"]),
    ((4, 3), torch.tensor([0, 7, 1, 2], dtype=torch.int32), ["1 of 4", "index 1: 7", "torch.int32", "features, 8)"]),
    ((4, 3), torch.tensor([0, 7, 1, 2], dtype=torch.uint16), ["1 of 4", "index 1: 7", "torch.uint16", "y = y.long()"]),
    ((4, 3), torch.tensor([0.0, 1.0, 2.0, 0.0]), ["torch.float32", "(4,)", "y.long()", '"gaussian"']),
    ((4, 3), torch.tensor([0.0, 0.5, 2.0, 0.0]), ["torch.float32", 'Write `likelihood="gaussian"` for real targets.']),
    ((4, 2), torch.tensor([True, False, True, True]), ["torch.bool", "y.long()"]),
    ((4, 3), torch.eye(3, dtype=torch.bool)[[0, 1, 2, 0]], ["(4,)", "bool", "y.long().argmax(1)"]),
    ((4, 3), torch.tensor([0.0, float("nan"), 1.0, float("nan")]), ["2 of 4", "NaN", "index 1", "~y.isnan()"]),
    ((4, 3), torch.tensor([[0], [1], [2], [0]]), ["(4,)", "(4, 1)", "torch.int64", "y.squeeze(1)"]),
    ((4, 3), torch.eye(3, dtype=torch.long)[[0, 1, 2, 0]], ["(4,)", "(4, 3)", "y.argmax(1)"]),
    ((4, 3), torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 0], [1, 1, 1]]), ["(4, 3)", "likelihood='bernoulli'"]),
    ((4, 3), 20 + torch.eye(3, dtype=torch.long)[[0, 1, 2, 0]], ["(4, 3)", "likelihood='gaussian'` for numbers"]),
    ((4, 3), torch.tensor([0, 1]), ["(4,)", "(2,)", "one label for each input"]),
    ((4, 1), torch.tensor([0, 1, 0, 1]), ["at least 2 outputs", "(4, 1)", "'bernoulli'", "features, 2)"]),
    ((4, 5, 3), torch.zeros(4, 5, dtype=torch.long), ["(4, 5, 3)", "(4, 5)", "f.reshape(-1, C)"]),
    ((4, 3), torch.zeros(4, dtype=torch.long, device="meta"), ["cpu", "meta", 'y.to("cpu")']),
    ((4, 3), [0, 1, 2, 0], ["list", "torch.as_tensor(y)"]),
]
OF_REAL_TARGETS = [
    ((4, 1), torch.tensor([0.0, float("nan"), 1.0, float("inf")]), ["2 of 4", "index 1: nan", "keep = y.isfinite()"]),
    (
        (4, 2),
        torch.tensor([[0.0, 1], [1, float("inf")], [0, 0], [0, 0]]),
        ["1 of 8", "(1, 1): inf", "isfinite().all(1)"],
    ),
    ((4, 2), torch.tensor([0.0, 1, 1, 0]), ["(4, 2)", "(4,)", "y.long()", "torch.nn.Linear(features, 1)"]),
    (
        (4, 2),
        torch.full((4,), 0.5),
        ["(4, 2)", "(4,)", "torch.float32", "Give the network one output, `torch.nn.Linear"],
    ),
    ((4, 3), torch.zeros(4, dtype=torch.long), ["(4, 3)", "(4,)", "torch.int64", '"categorical"']),
    ((4, 1), torch.zeros(3, 1), ["(4, 1) or (4,)", "(3, 1)", "one target for each output"]),
    ((4, 1), torch.zeros(4, 2), ["(4, 1) or (4,)", "(4, 2)"]),
    ((4, 1), torch.zeros(1, 4), ["(1, 4)", "y.T"]),
    ((4, 2), torch.zeros(2, 4), ["(2, 4)", "y.T"]),
    ((4, 6), torch.zeros(4, 2, 3), ["(4, 2, 3)", "y.reshape(len(y), 6)"]),
    ((4, 1), torch.zeros(4, dtype=torch.bool), ["torch.bool", "y.float()"]),
    ((4, 1), torch.zeros(4, dtype=torch.complex64), ["torch.complex64", "y.real"]),
    ((4, 1), torch.zeros(4, device="meta"), ["meta", 'y.to("cpu")']),
]
OF_ANSWERS = [
    ((4, 1), torch.tensor([0, 1, 2, 1]), ["1 of 4", "index 2: 2", "neither", '"categorical"']),
    ((4, 1), torch.tensor([-1, 1, 1, -1]), ["2 of 4", "index 0: -1", "(y + 1) // 2"]),
    ((4, 1), torch.tensor([-1.0, 1.0, 1.0, -1.0]), ["index 0: -1.0", "(y + 1) / 2"]),
    ((4, 1), torch.tensor([-1.0, 1.0, 0.0, -1.0]), ["2 of 4", '"gaussian"']),
    ((4, 2), torch.tensor([[0.0, 1], [0.25, 0], [1, 1], [0, 0.75]]), ["2 of 8", "(1, 0): 0.25", "y > 0.5"]),
    ((4, 1), torch.tensor([0.0, float("nan"), 1.0, 1.0]), ["1 of 4", "index 1: nan", "keep = ~y.isnan()"]),
    ((4, 2), torch.full((4, 2), float("nan")), ["8 of 8", "~y.isnan().any(1)"]),
    ((4, 1), torch.tensor([0.0, 3.7, 1.0, 1.0]), ["1 of 4", "index 1: 3.7", '"gaussian"']),
    ((4, 3), torch.zeros(4, dtype=torch.long), ["(4, 3)", "(4,)", '"categorical"']),
    ((4, 2), torch.zeros(4, dtype=torch.bool), ["(4, 2)", "(4,)", "`y.long()` and", '"categorical"']),
    ((4, 2), torch.zeros(2, 4, dtype=torch.bool), ["(4, 2)", "(2, 4)", "torch.bool", "y.T"]),
    ((4, 1), torch.zeros(1, 4), ["(4, 1) or (4,)", "(1, 4)"]),
    ((4, 1), torch.zeros(4, dtype=torch.complex64), ["torch.complex64", "y.real"]),
    ((4, 1), torch.zeros(4, device="meta"), ["meta", 'y.to("cpu")']),
    ((4, 1), [0, 1, 0, 1], ["list", "torch.as_tensor(y)"]),
]


CASES = {Categorical(): OF_LABELS, Gaussian(): OF_REAL_TARGETS, Bernoulli(): OF_ANSWERS}


@pytest.mark.parametrize(
    ("likelihood", "shape", "targets", "said"),
    [(likelihood, *case) for likelihood, cases in CASES.items() for case in cases],
)
def test_errors_say_what_is_wrong_and_what_to_write(likelihood, shape, targets, said):
    with pytest.raises(lw.LapwingError) as caught:
        likelihood.check(torch.zeros(shape), targets)
    message = str(caught.value)
    assert message.startswith(type(likelihood).__name__)
    assert all(part in message for part in said), message
