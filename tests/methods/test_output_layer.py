"""Sums over a last layer that gives the outputs take Λ by its parts; they are those of its root."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing as lw
from tests.conformance import close

by_class = lambda method: type(method).__name__  # noqa: E731
METHODS = pytest.mark.parametrize("method", [lw.Diagonal(), lw.KFAC(), lw.EKFAC()], ids=by_class)
CLASSES = 7


class RootAlone(lw.Categorical):
    """The same likelihood, by its root."""

    name = "root alone"

    def fisher_root(self, outputs):
        return super().fisher_root(outputs)


LIKELIHOODS = lw.Categorical(), RootAlone()


def network(bias=True, dtype=torch.float64):
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES, bias=bias)).to(dtype).eval()


def batches(weights=False):
    x, y = torch.randn(11, 4, dtype=torch.float64), torch.arange(11) % CLASSES
    columns = [x, y, torch.arange(11.0)] if weights else [x, y]
    return list(zip(*[column.split(4) for column in columns], strict=True))


def check_likelihoods_agree(model, data, method, x, likelihoods=LIKELIHOODS, **options):
    options = {"params": lw.last_layer, "tune": None} | options
    first, second = (
        lw.fit(model, data, method, likelihood=likelihood, **options).predict(x).latent.covariance
        for likelihood in likelihoods
    )
    close(first, second)


@pytest.mark.quick(4)
@METHODS
@pytest.mark.parametrize(
    ("likelihood", "by_root", "weights"),
    [
        (lw.Categorical(), RootAlone(), False),
        (lw.Categorical(), RootAlone(), True),
        (lw.Categorical(class_weights=tuple(range(1, 8))), RootAlone(class_weights=tuple(range(1, 8))), False),
        (lw.Categorical(ignore_index=2), RootAlone(ignore_index=2), False),
    ],
    ids=["plain", "sample weights", "class weights", "labels that do not count"],
)
def test_parts_give_what_the_root_gives(method, likelihood, by_root, weights):
    model, data, x = network(), batches(weights), torch.randn(3, 4, dtype=torch.float64)
    check_likelihoods_agree(model, data, method, x, (likelihood, by_root), sample_weights=weights)


def test_parts_are_those_of_the_class_that_defines_the_root():
    class Further(RootAlone):
        name = "further"

    class Both(RootAlone):
        name = "both"

        def fisher_parts(self, outputs):
            return lw.Categorical.fisher_parts(self, outputs)

    outputs = torch.zeros(1, 3)
    assert RootAlone().fisher_parts(outputs) is None
    assert Further().fisher_parts(outputs) is None
    assert Both().fisher_parts(outputs) is not None


@METHODS
@pytest.mark.parametrize("which", ["2.weight", "2.bias"])
def test_parts_of_a_weight_or_a_bias_alone(method, which):
    x = torch.randn(3, 4, dtype=torch.float64)
    check_likelihoods_agree(network(), batches(), method, x, params=lw.matching(which))


@METHODS
def test_parts_of_positions(method):
    model, x = network(), torch.randn(5, 3, 4, dtype=torch.float64)
    labels = (torch.arange(15) % CLASSES).reshape(5, 3)
    labels[0, 1] = -100
    check_likelihoods_agree(model, [(x, labels)], method, x)


@pytest.mark.parametrize("method", [lw.Diagonal(), lw.KFAC()], ids=by_class)
def test_above_a_thousand_classes_the_last_layer_is_exact(method, caplog):
    caplog.set_level("INFO", "lapwing")
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1003)).double().eval(), torch.randn(6, 3).double()
    posterior = lw.fit(model, [(x, torch.arange(6))], method, params=lw.last_layer, tune=None)
    probs = model(x).softmax(-1).detach()
    expected = torch.diag(probs.sum(0)) - probs.T @ probs  # Γ
    if isinstance(method, lw.KFAC):
        factors = next(iter(posterior.covariance.structures.values()))
        gamma = (factors.outputs * factors.output_eigenvalues[:, None]) @ factors.outputs.mT
        close(gamma[0], expected)
    else:
        features = torch.cat([model[1](model[0](x)), torch.ones(6, 1)], 1).detach().double()
        (structure,) = posterior.covariance.structures.values()
        close(structure.eigenvalues, ((probs * (1 - probs)).T @ features.square()).flatten())
    assert "sampled" not in caplog.text
