"""Batches come to the model's device: inputs and targets of loaders, and what is given to a prediction.

`Elsewhere` stands for a tensor on another device. It says where it is, can be cut and moved, and refuses all else, as
torch does where tensors of two devices meet.
"""

from __future__ import annotations

import itertools
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


METHODS = [
    None, lw.KFAC(), lw.Full(form="dual"), lw.ELLA(rank=3, rows=6), lw.OptimalSubspace(3, lw.KFAC(), "all"),
    lw.SubsetOfData(6), lw.SampledLLA(draws=2), lw.MeanField(steps=2),
    lw.VaLLA(4, lw.AlphaDivergence(steps=2, validation=THERE), initial="data"), lw.VaLLA(lw.InducingPoints(away(X))),
]  # fmt: skip


@pytest.mark.quick(4)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_fits_of_a_loader_elsewhere(method: lw.Method | None) -> None:
    expected = lw.fit(network(), HERE, method).latent(X)
    found = lw.fit(network(), THERE, method).latent(away(X))
    assert type(found.mean) is type(found.covariance) is Tensor
    torch.testing.assert_close(found.covariance, expected.covariance)


@pytest.mark.parametrize("tuning", ["BoundedEvidence", "Validation", "EarlyStopping"])
def test_tunings_of_a_loader_elsewhere(tuning: str) -> None:
    def fitted(data: Any) -> lw.Posterior:
        options = {} if tuning == "BoundedEvidence" else {"loader": data, "points": 3}
        return lw.fit(network(1), data, lw.Diagonal(), tune=getattr(lw, tuning)(**options))

    here, there = fitted([(X, REAL)]), fitted([(away(X), away(REAL))])
    assert there.prior_precision == pytest.approx(here.prior_precision)
    assert there.noise_variance == pytest.approx(here.noise_variance)


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


@pytest.mark.parametrize(("likelihood", "y"), [("gaussian", REAL), ("bernoulli", (REAL > 0).float())])
def test_targets_of_every_likelihood_elsewhere(likelihood: str, y: Tensor) -> None:
    posterior = lw.fit(network(1), [(away(X), away(y))], likelihood=likelihood)
    prediction = posterior.predict(away(X))
    torch.testing.assert_close(prediction.log_prob(away(y)), prediction.log_prob(y))


def test_evaluations_elsewhere() -> None:
    posterior = lw.fit(network(), HERE, lw.KFAC(), prior_precision=1.0)
    tables = [lw.compare({"KFAC": posterior, "alone": network()}, data, {"near": foreign}, repeats=1)
              for data, foreign in ((HERE, X + 1), (THERE, away(X + 1)))]  # fmt: skip
    for name, column in itertools.product(("KFAC", "alone"), ("NLL", "accuracy", "near: AUROC by entropy")):
        assert tables[0][name][column] == pytest.approx(tables[1][name][column])
    factors = [lw.scale_factor(posterior, data, lw.Linearized()).factor for data in (HERE, THERE)]
    assert factors[0] == pytest.approx(factors[1])
    assert str(lw.coverage(network(), away(X))) == str(lw.coverage(network(), X))
    found = sensitivity(posterior, away(X), targets=away(Y), via=lw.Linearized(), steps=2)
    torch.testing.assert_close(found.values, sensitivity(posterior, X, targets=Y, via=lw.Linearized(), steps=2).values)


def test_constructed_posteriors_elsewhere() -> None:
    variances = {"2.bias": torch.full((3,), 0.1)}
    expected = lw.MeanField.from_variances(network(), variances, HERE).statistics
    for name, value in lw.MeanField.from_variances(network(), variances, THERE).statistics.items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", METHODS[:8], ids=lambda method: type(method).__name__)
def test_a_model_on_a_gpu_with_batches_on_the_cpu(method: lw.Method | None) -> None:
    posterior = lw.fit(network().cuda(), HERE, method)
    latent = posterior.latent(X)
    assert latent.mean.device.type == latent.covariance.device.type == "cuda"
    torch.testing.assert_close(posterior.predict(HERE).probs, posterior.predict(X.cuda()).probs)
    assert posterior.predict(X).log_prob(Y).device.type == "cuda"
