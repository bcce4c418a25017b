"""What fits, updates, mixtures and detectors refuse: each row is a call and words of its message."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lapwing as lw
from tests.fitting.test_plan import mlp, regression
from tests.refused import each_row, refused

# --- what `lw.fit` refuses by its arguments `lw.plan` refuses too, with the same sentence -----------------------------

MEAN_FIELD, MANY = lw.MeanField(2), lw.SubsetOfWeights(10**6)


def labelled(samples=60):
    torch.manual_seed(0)
    return [(torch.randn(samples, 12), torch.arange(samples) % 3)]


def sentence(call, *arguments, **options):
    """The sentence of a refusal; None where there is none."""
    torch.manual_seed(0)
    try:
        call(*arguments, **options)
    except lw.LapwingError as error:
        return str(error)


def by_both(model, data, method, **options):
    """The sentence by which a plan refuses, which is that of the fit."""
    of_plan, of_fit = (sentence(call, model, data, method, **options) for call in (lw.plan, lw.fit))
    assert of_plan == of_fit
    return of_plan or ""


HELD_OUT, OF_NUMBERS = labelled(40), regression((12,))


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (lw.TemperatureScaling(), {"validation": HELD_OUT}, "validation= is not used. Write lw.fit(model, held_out,"),
        (lw.OptimalSubspace(4, MANY), {}, "asks for more weights than the"),
        (lw.OptimalSubspace(4, MEAN_FIELD), {}, "makes a covariance whose prior cannot be changed"),
        (lw.OptimalSubspace(4, "prior", at=torch.zeros(0, 12)), {}, "Write at=x."),
        (lw.SampledLLA(4, lw.ConjugateGradients(preconditioner=MEAN_FIELD)), {}, "Write preconditioner=lw.KFAC()."),
        (lw.VaLLA(lw.InducingPoints(torch.zeros(2, 12), torch.tensor([0, 3]))), {}, "name outputs 0 to 3"),
        (lw.SubsetOfData(20), {"tune": lw.EarlyStopping(HELD_OUT)}, "kept no sums of the first samples"),
        (lw.VaLLA(9, lw.NaturalGradient(4)), {"tune": lw.EarlyStopping(HELD_OUT)}, "kept no sums of the first"),
        (lw.KFAC(), {"tune": lw.EarlyStopping(HELD_OUT, ranks=(2,))}, "needs a subspace"),
        (MEAN_FIELD, {"tune": lw.Validation(HELD_OUT, ranks=(2,))}, "needs a subspace"),
        (lw.Diagonal(), {"tune": lw.Evidence(rank_gap=1.0)}, "needs a subspace"),
        (lw.KFAC(), {"data_size": 5}, "data_size=5 is below the 60 samples"),
        (lw.KFAC(), {"weight_decay": 1e-300}, "A prior precision of"),
        (lw.KFAC(), {"likelihood": "gaussian"}, "Gaussian accepts targets of shape"),
        (lw.KFAC(), {"forward": lambda model, x: model(x).softmax(1)}, "needs logits"),
        (lw.TemperatureScaling(), {"data": OF_NUMBERS}, "TemperatureScaling is for classifiers"),
        (lw.KFAC(), {"data": OF_NUMBERS, "likelihood": lw.Gaussian(1e-50)}, "A noise variance of"),
        (lw.KFAC(), {"data": OF_NUMBERS, "likelihood": "categorical"}, "Categorical accepts"),
    ],
)  # fmt: skip
def test_of_arguments(method, options, message):
    given = {"data": labelled(), **options}
    assert message in by_both(mlp(), given.pop("data"), method, **given)


def test_of_maps_and_of_a_posterior_over_other_weights():
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)).eval()
    maps = [(torch.randn(3, 2, 5, 5), torch.randint(3, (3, 5, 5)))]
    assert "have positions" in by_both(model, maps, lw.Full("dual"))
    network, data = mlp(), labelled()
    last = lw.fit(network, data, lw.Diagonal(), params=lw.last_layer)
    assert "make it with the params= of this fit" in by_both(network, data, lw.SubsetOfWeights(9, by=last))


@pytest.mark.parametrize("method", [lw.VaLLA(9, lw.AlphaDivergence(steps=2)), lw.TemperatureScaling()])
def test_a_prior_of_the_methods_own_leaves_early_stopping_out(method):
    assert by_both(mlp(), labelled(), method, tune=lw.EarlyStopping(HELD_OUT)) == ""


@pytest.mark.quick(1)
@pytest.mark.parametrize("method", [lw.SubsetOfWeights(30), lw.Full("dual"), lw.ELLA(5, 20)], ids=repr)
def test_subspaces_have_ranks(method):
    for tune in (lw.EarlyStopping(HELD_OUT, ranks=(2,)), lw.Evidence(rank_gap=1.0)):
        assert by_both(mlp(), labelled(20), method, tune=tune) == ""


# --- calls ------------------------------------------------------------------------------------------------------------

X, Y = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3
MODEL, OTHER = (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).eval() for _ in range(2))
EMBEDDING = nn.Sequential(nn.Embedding(9, 3), nn.Flatten(1)).eval()
HELD = (X + 1, Y)
NOT_COUNTED, NAN = torch.full_like(Y, -100), torch.full_like(X, torch.nan)


def fitted(method=None, **options):
    """A posterior of `MODEL`."""
    return lw.fit(MODEL, (X, Y), method or lw.KFAC(), **{"prior_precision": 1.0, **options})


def of(targets, likelihood, outputs=3):
    """A posterior of another network, with other targets."""
    return lw.fit(nn.Linear(4, outputs).eval(), (X, targets), likelihood=likelihood, prior_precision=1.0)


def continued(prior, **options):
    """A fit of another network with a former posterior as the prior."""
    return lw.fit(OTHER, (X, Y), prior=prior, **options)


def written():
    """A posterior whose network has changed since."""
    model = copy.deepcopy(MODEL)
    posterior = lw.fit(model, (X, Y), lw.KFAC(), prior_precision=1.0)
    model[0].weight.data.add_(1.0)
    return posterior


def weighted(weights):
    return lw.fit(MODEL, [(X, Y) if weights is None else (X, Y, weights)], prior_precision=1.0, sample_weights=True)


def labelled_maps(*validation):
    """A fit of three samples of pixels, of which none has a label that counts."""
    x, none = torch.randn(3, 2, 5, 5), torch.full((3, 5, 5), -100)
    training = torch.randint(3, (3, 5, 5)) if validation else none
    return lw.fit(nn.Conv2d(2, 3, 1).eval(), (x, training), validation=(x, none) if validation else None)


ANSWERS, NUMBERS = torch.arange(27).reshape(9, 3) % 2, torch.ones(9, 3)
CLASSES, SOME = "categorical likelihoods of 3 outputs", lw.Linearized(outputs=2)
POSTERIORS = "must be a list of at least two posteriors. Write posteriors=[lw.fit("
REFUSED = [
    # a former posterior as the prior
    (lambda: continued(fitted(), prior_precision=1.0), "prior_precision= was given"),
    (lambda: continued(fitted(), tune=lw.Evidence()), "tune= was given"),
    (lambda: continued(fitted(), params=lw.last_layer), "params= was given"),
    (lambda: continued(fitted(), method=lw.KFAC()), "method= was given"),
    (lambda: continued(2.0), "prior=2.0) is not valid: prior must be a posterior"),
    (lambda: continued(of(Y, "categorical")), "has other layers than the network of the former posterior"),
    (lambda: continued(fitted(lw.ELLA(4, "all", residual="prior"))), "only the directions of its own data"),
    (lambda: continued(fitted(lw.EKFAC())), "EKFAC is not a sum"),
    (lambda: continued(written()), "was written"),
    # a penalty
    (lambda: fitted().penalty(MODEL), "copy.deepcopy"),
    (lambda: fitted().penalty(nn.Linear(4, 3)), "same architecture"),
    (lambda: fitted().penalty("model"), "same architecture"),
    (lambda: fitted(lw.ELLA(4, "all")).penalty(OTHER), "no inverse without a factorisation"),
    (lambda: fitted(lw.SampledLLA(draws=2)).penalty(OTHER), "no inverse without a factorisation"),
    (lambda: written().penalty(OTHER), "was written"),
    # an update
    (lambda: fitted(lw.EKFAC()).update((X, Y)), "EKFAC is not a sum"),
    (lambda: fitted(lw.VaLLA(4)).update((X, Y)), "VaLLA is not a sum"),
    (lambda: fitted(lw.SubsetOfData(4)).update((X, Y)), "SubsetOfData is not a sum"),
    (lambda: fitted(lw.SampledLLA(draws=2)).update((X, Y)), "SampledLLA is not a sum"),
    (lambda: fitted(data_size=18).update((X, Y)), "counts each sample of its fit 2 times"),
    (lambda: fitted().update((X, Y), tune=lw.BoundedEvidence()), "needs the former data"),
    (lambda: fitted().update((X, Y), tune=lw.EarlyStopping((X, Y))), "needs the former data"),
    (lambda: fitted().update((X, Y), tune=3), "needs the former data"),
    (lambda: fitted().update(iter([(X, Y)])), "can be read only once"),
    (lambda: fitted().update((NAN, Y)), "NaN"),
    (lambda: fitted().update((X, Y), sample_weights=True), "holds no sample weights"),
    (lambda: written().update((X, Y)), "was written"),
    # weights of samples
    (lambda: weighted(torch.ones(5)), "not one number for each of 9 samples"),
    (lambda: weighted(-torch.ones(9)), "negative, NaN or infinite for 9 samples"),
    (lambda: weighted(torch.full((9,), torch.nan)), "negative, NaN or infinite for 9 samples"),
    (lambda: weighted(torch.zeros(9)), "All sample weights are 0"),
    (lambda: weighted(None), "holds no sample weights"),
    (lambda: lw.plan(MODEL, (X, Y), lw.KFAC(), sample_weights=True), "holds no sample weights"),
    # labels of which none counts
    (lambda: labelled_maps(), "None of the labels counts"),
    (lambda: labelled_maps("held out"), "None of the held-out targets counts"),
    # a plan
    (lambda: lw.plan(MODEL, (X, Y), []), "names no method. Write lw.plan(model, loader, ["),
    (lambda: lw.plan(MODEL, (X, Y), "all", validation=(X[:, 1:], Y)), "The held-out data do not fit"),
    # a mixture
    (
        lambda: lw.mixture([fitted(), of(ANSWERS, "bernoulli")]),
        f"{CLASSES} … bernoulli likelihoods of 3 … same data",
    ),
    (lambda: lw.mixture([fitted(), of(Y, "categorical", 5)]), f"{CLASSES} … of 5 outputs … same data"),
    (lambda: lw.mixture([of(NUMBERS, "poisson")] * 2), "poisson likelihoods … lw.Categorical()"),
    (lambda: lw.mixture([of(NUMBERS, "gaussian")] * 2).predict(X, via=SOME), "may select different outputs"),
    (lambda: lw.mixture([fitted()]), POSTERIORS),
    (lambda: lw.mixture(fitted()), POSTERIORS),
    (lambda: lw.mixture([fitted(), MODEL]), POSTERIORS),
    (lambda: lw.mixture(None), POSTERIORS),
    (lambda: lw.mixture([fitted(), written()], (X, Y)), "after the fit"),
    (lambda: lw.mixture([]), POSTERIORS),
    # a detector
    (lambda: lw.novelty(MODEL, (X, Y), by="cosine"), "'mahalanobis', 'knn'"),
    (lambda: lw.novelty(MODEL, X), "lw.novelty needs an iterable"),
    (lambda: lw.novelty(MODEL, (X, NOT_COUNTED)), "All labels are -100"),
    (lambda: lw.novelty(EMBEDDING, (Y[:, None], Y)), "nn.Linear"),
    (lambda: lw.novelty(MODEL, (X, Y))(X[:0]), "hold no samples"),
    (lambda: lw.novelty(MODEL, (X, Y))([]), "hold no samples"),
    (lambda: lw.novelty(MODEL, (X, Y))([(X[:0], Y[:0])]), "hold no samples"),
    (lambda: lw.deploy(fitted(), X, novelty=MODEL), "novelty=lw.novelty(model, loader)"),
    (
        lambda: lw.deploy(fitted(), X, lw.Linearized(), novelty=lw.novelty(OTHER, (X, Y))),
        "of another network, write novelty=lw.novelty(posterior.model",
    ),
    (lambda: lw.novelty(MODEL, (X, Y), held_out=HELD, via=lw.Streamlined()), "the way of a posterior's doubt"),
    # a detector of a posterior
    (lambda: lw.novelty(fitted(), (X, Y)), "lw.novelty(posterior, loader, held_out="),
    (lambda: lw.novelty(fitted(), (X, Y), held_out=(X, Y)), "100% of the held-out rows are training rows"),
    (
        lambda: lw.novelty(fitted(), (X, Y), held_out=(torch.cat([HELD[0], X[:1]]), torch.cat([Y, Y[:1]]))),
        "10% of the held-out rows",
    ),
    (lambda: lw.novelty(fitted(), (X, Y), held_out=HELD).p_value(NAN), "NaN or infinite"),
    (lambda: lw.novelty(fitted(), (X, Y), held_out=(NAN, Y)), "NaN or infinite"),
    (lambda: lw.novelty(fitted(), (X, Y), held_out=[(X[:0], Y[:0])]), "hold no samples"),
    (lambda: lw.novelty(fitted(), (X, Y), held_out=[]), "hold no samples"),
    (lambda: lw.novelty(fitted(), (X, Y), held_out=X), "an iterable of"),
]


@each_row(REFUSED)
def test_a_call_is_refused_in_these_words(call, words):
    refused(call, words)
