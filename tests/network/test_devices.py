"""Batches come to the model's device: inputs and targets of loaders, and what is given to a prediction.

The network is on the CPU, and the data on a pretended GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.data import batches
from lapwing.evaluation import sensitivity
from tests.pretended_device import Device
from tests.trained import small_network as network

CUDA = Device("cuda")
X, Y, REAL = torch.randn(8, 4), torch.arange(8) % 3, torch.randn(8, 1)
HERE = [(X[:5], Y[:5]), (X[5:], Y[5:])]
AWAY, THERE = CUDA.put(X), CUDA.put(HERE)


@pytest.fixture
def cuda() -> Iterator[None]:
    with CUDA:
        yield


@pytest.mark.usefixtures("cuda")
def test_plain_moves_what_is_elsewhere_and_keeps_the_rest() -> None:
    cpu = torch.device("cpu")
    inputs = {"x": X, "more": (CUDA.put(REAL), "text", [Y])}
    moved = batches.plain(inputs, cpu)
    assert moved["x"] is X
    assert moved["more"][2][0] is Y
    assert type(moved["more"][0]) is Tensor
    assert torch.equal(moved["more"][0], REAL)
    assert batches.plain({"x": X}, cpu)["x"] is X
    kept = (X, [Y])
    assert batches.plain(kept, cpu) is kept
    assert batches.plain(X) is X


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    "method",
    [lw.VaLLA(4, lw.AlphaDivergence(steps=2, validation=THERE), initial="data"), lw.VaLLA(lw.InducingPoints(AWAY))],
    ids=["validation", "points"],
)
def test_options_elsewhere(method: lw.Method) -> None:
    """What the ways in of tests/data/test_loaders.py do not give."""
    expected = lw.fit(network(), HERE, method).latent(X)
    found = lw.fit(network(), THERE, method).latent(AWAY)
    assert type(found.mean) is type(found.covariance) is Tensor
    torch.testing.assert_close(found.covariance, expected.covariance)


@pytest.mark.usefixtures("cuda")
def test_predictions_elsewhere() -> None:
    posterior = lw.fit(network(), HERE, lw.KFAC(), prior_precision=1.0)
    for via in (lw.Linearized(), lw.MonteCarlo(draws=3), lw.Streamlined()):
        expected = posterior.predict(X, via).probs
        for x in (AWAY, [AWAY[:3], AWAY[3:]], THERE):
            found = posterior.predict(x, via)
            torch.testing.assert_close(found.probs, expected)
        torch.testing.assert_close(found.log_prob(CUDA.put(Y)), found.log_prob(Y))
        moved = posterior.latent(lw.Uncertain(AWAY, 0.1), via)
        torch.testing.assert_close(moved.variance, posterior.latent(lw.Uncertain(X, 0.1), via).variance)
    torch.testing.assert_close(
        lw.propagate(network(), lw.Uncertain(AWAY, 0.1)).covariance,
        lw.propagate(network(), lw.Uncertain(X, 0.1)).covariance,
    )
    joint = posterior.latent(AWAY, joint=True).covariance
    torch.testing.assert_close(joint, posterior.latent(X, joint=True).covariance)
    score = posterior.log_marginal_likelihood(linearised_mode=True, loader=HERE)
    assert posterior.log_marginal_likelihood(linearised_mode=True, loader=THERE) == pytest.approx(score)
    assert lw.deploy(posterior, AWAY)(X).shape == (8, 3)


@pytest.mark.parametrize("method", [lw.KFAC(), lw.ELLA(2), lw.VaLLA(4), lw.SampledLLA(4)], ids=repr)
def test_a_default_device_changes_nothing(method: lw.Method) -> None:
    """A tensor that lapwing makes on the default device would be on meta, without numbers."""

    model = network()

    def answers() -> list[Tensor]:
        posterior = lw.fit(model, HERE, method, params=lw.everything, validation=HERE)
        ways = (None, lw.MonteCarlo(3), lw.Streamlined())[: 3 if isinstance(method, lw.KFAC) else 2]
        return [posterior.latent(X).covariance, *(posterior.predict(X, via).probs for via in ways)]

    expected = answers()
    with torch.device("meta"):
        found = answers()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("likelihood", "y"), [("gaussian", REAL), ("bernoulli", (REAL > 0).float())])
def test_targets_of_every_likelihood_elsewhere(likelihood: str, y: Tensor) -> None:
    posterior = lw.fit(network(outputs=1), [(AWAY, CUDA.put(y))], likelihood=likelihood)
    prediction = posterior.predict(AWAY)
    torch.testing.assert_close(prediction.log_prob(CUDA.put(y)), prediction.log_prob(y))


@pytest.mark.usefixtures("cuda")
def test_evaluations_elsewhere() -> None:
    posterior = lw.fit(network(), HERE, lw.KFAC(), prior_precision=1.0)
    assert str(lw.coverage(network(), AWAY)) == str(lw.coverage(network(), X))
    found = sensitivity(posterior, AWAY, targets=CUDA.put(Y), via=lw.Linearized(), steps=2)
    torch.testing.assert_close(found.values, sensitivity(posterior, X, targets=Y, via=lw.Linearized(), steps=2).values)
