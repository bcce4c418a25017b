"""Batches come to the model's device: inputs and targets of loaders, and what is given to a prediction.

`Elsewhere` stands for a tensor on another device. It says where it is, can be cut and moved, and refuses all else, as
torch does where tensors of two devices meet.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data import batches
from lapwing.evaluation import sensitivity

GETTERS = {
    getattr(Tensor, name).__get__
    for name in ("dtype", "is_meta", "is_nested", "is_quantized", "layout", "ndim", "shape")
}
HARMLESS = {Tensor.dim, Tensor.is_floating_point, Tensor.is_inference, Tensor.numel, Tensor.size, len, Tensor.__len__}


class Elsewhere(Tensor):
    """A tensor on the device "cuda:7"."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == Tensor.device.__get__:
            return torch.device("cuda", 7)
        with torch._C.DisableTorchFunctionSubclass():
            if function in (Tensor.to, Tensor.cpu):
                return function(args[0].as_subclass(Tensor), *args[1:], **(kwargs or {}))
            if function is Tensor.__getitem__:
                return args[0].as_subclass(Tensor)[args[1]].as_subclass(Elsewhere)
            if function in GETTERS or function in HARMLESS:
                return function(*args, **(kwargs or {}))
        raise RuntimeError(f"Expected all tensors to be on the same device, {function} met two")


def away(x: Tensor) -> Tensor:
    return x.as_subclass(Elsewhere)


X, Y, REAL = torch.randn(8, 4), torch.arange(8) % 3, torch.randn(8, 1)
HERE, THERE = [(X[:5], Y[:5]), (X[5:], Y[5:])], [(away(X[:5]), away(Y[:5])), (away(X[5:]), away(Y[5:]))]


def network(outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).eval()


def test_what_is_elsewhere_refuses_to_be_used() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        network()(away(X))


def test_plain_moves_what_is_elsewhere_and_keeps_the_rest() -> None:
    cpu = torch.device("cpu")
    inputs = {"x": X, "more": (away(REAL), "text", [Y])}
    moved = batches.plain(inputs, cpu)
    assert moved["x"] is X
    assert moved["more"][2][0] is Y
    assert type(moved["more"][0]) is Tensor
    assert torch.equal(moved["more"][0], REAL)
    assert batches.plain({"x": X}, cpu)["x"] is X
    kept = (X, [Y])
    assert batches.plain(kept, cpu) is kept
    assert batches.plain(X) is X


@pytest.mark.parametrize(
    "method",
    [lw.VaLLA(4, lw.AlphaDivergence(steps=2, validation=THERE), initial="data"), lw.VaLLA(lw.InducingPoints(away(X)))],
    ids=["validation", "points"],
)
def test_options_elsewhere(method: lw.Method) -> None:
    """What the ways in of tests/data/test_loaders.py do not give."""
    expected = lw.fit(network(), HERE, method).latent(X)
    found = lw.fit(network(), THERE, method).latent(away(X))
    assert type(found.mean) is type(found.covariance) is Tensor
    torch.testing.assert_close(found.covariance, expected.covariance)


def test_predictions_elsewhere() -> None:
    posterior = lw.fit(network(), HERE, lw.KFAC(), prior_precision=1.0)
    for via in (lw.Linearized(), lw.MonteCarlo(draws=3), lw.Streamlined()):
        expected = posterior.predict(X, via).probs
        for x in (away(X), [away(X[:3]), away(X[3:])], THERE):
            found = posterior.predict(x, via)
            torch.testing.assert_close(found.probs, expected)
        torch.testing.assert_close(found.log_prob(away(Y)), found.log_prob(Y))
        moved = posterior.latent(lw.Uncertain(away(X), 0.1), via)
        torch.testing.assert_close(moved.variance, posterior.latent(lw.Uncertain(X, 0.1), via).variance)
    torch.testing.assert_close(
        lw.propagate(network(), lw.Uncertain(away(X), 0.1)).covariance,
        lw.propagate(network(), lw.Uncertain(X, 0.1)).covariance,
    )
    joint = posterior.latent(away(X), joint=True).covariance
    torch.testing.assert_close(joint, posterior.latent(X, joint=True).covariance)
    score = posterior.log_marginal_likelihood(linearised_mode=True, loader=HERE)
    assert posterior.log_marginal_likelihood(linearised_mode=True, loader=THERE) == pytest.approx(score)
    assert lw.deploy(posterior, away(X))(X).shape == (8, 3)


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


@pytest.mark.parametrize(("likelihood", "y"), [("gaussian", REAL), ("bernoulli", (REAL > 0).float())])
def test_targets_of_every_likelihood_elsewhere(likelihood: str, y: Tensor) -> None:
    posterior = lw.fit(network(1), [(away(X), away(y))], likelihood=likelihood)
    prediction = posterior.predict(away(X))
    torch.testing.assert_close(prediction.log_prob(away(y)), prediction.log_prob(y))


def test_evaluations_elsewhere() -> None:
    posterior = lw.fit(network(), HERE, lw.KFAC(), prior_precision=1.0)
    assert str(lw.coverage(network(), away(X))) == str(lw.coverage(network(), X))
    found = sensitivity(posterior, away(X), targets=away(Y), via=lw.Linearized(), steps=2)
    torch.testing.assert_close(found.values, sensitivity(posterior, X, targets=Y, via=lw.Linearized(), steps=2).values)
