"""What `lw.fit` refuses by its arguments `lw.plan` refuses too, with the same sentence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing as lw
from tests.fitting.test_plan import mlp, regression

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


def refused(model, data, method, **options):
    """The sentence by which a plan refuses, which is that of the fit."""
    of_plan, of_fit = (sentence(call, model, data, method, **options) for call in (lw.plan, lw.fit))
    assert of_plan == of_fit
    return of_plan or ""


HELD_OUT = labelled(40)


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
    ],
)  # fmt: skip
def test_of_a_classifier(method, options, message):
    assert message in refused(mlp(), labelled(), method, **options)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (lw.TemperatureScaling(), {}, "TemperatureScaling is for classifiers"),
        (lw.KFAC(), {"likelihood": lw.Gaussian(1e-50)}, "A noise variance of"),
        (lw.KFAC(), {"likelihood": "categorical"}, "Categorical accepts"),
    ],
)
def test_of_a_regression(method, options, message):
    assert message in refused(mlp(), regression((12,)), method, **options)


def test_of_maps_and_of_a_posterior_over_other_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)).eval()
    maps = [(torch.randn(3, 2, 5, 5), torch.randint(3, (3, 5, 5)))]
    assert "have positions" in refused(model, maps, lw.Full("dual"))
    network, data = mlp(), labelled()
    last = lw.fit(network, data, lw.Diagonal(), params=lw.last_layer)
    assert "make it with the params= of this fit" in refused(network, data, lw.SubsetOfWeights(9, by=last))


@pytest.mark.parametrize("method", [lw.VaLLA(9, lw.AlphaDivergence(steps=2)), lw.TemperatureScaling()])
def test_a_prior_of_the_methods_own_leaves_early_stopping_out(method):
    assert refused(mlp(), labelled(), method, tune=lw.EarlyStopping(HELD_OUT)) == ""


@pytest.mark.quick(1)
@pytest.mark.parametrize("method", [lw.SubsetOfWeights(30), lw.Full("dual"), lw.ELLA(5, 20)], ids=repr)
def test_subspaces_have_ranks(method):
    for tune in (lw.EarlyStopping(HELD_OUT, ranks=(2,)), lw.Evidence(rank_gap=1.0)):
        assert refused(mlp(), labelled(20), method, tune=tune) == ""
