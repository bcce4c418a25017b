"""Networks in bfloat16 and data of one sample: the same numbers as in float64, for features with code of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests.quick import others_slow

GAMMA = lw.FromDistribution(lambda f: torch.distributions.Gamma(f[..., 0].exp(), f[..., 1].exp()), draws=10_000)
POISSON = lw.FromDistribution(lambda f: torch.distributions.Poisson(f[..., 0].exp()), draws=10_000)
JOINT = lw.Joint({"kind": lw.Categorical(), "size": lw.Gaussian()}, outputs={"kind": slice(0, 2), "size": [2]})


def fitted(model: nn.Module, x: Tensor, outputs: int, **options: Any) -> tuple[lw.Posterior, Tensor]:
    y = torch.linspace(-1, 1, outputs * len(x)).reshape(len(x), outputs).to(x)
    return lw.fit(model, (x, y), **{"likelihood": lw.Gaussian(0.5), "prior_precision": 2.0, **options}), y


def of(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    posterior, _ = fitted(model, x, outputs)
    total = posterior.of(lambda f: f(x).sum(0), observed=True)
    return [total.mean, total.covariance, posterior.of(lambda f: f.weight["0.weight"]).std]


def explain(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    posterior, y = fitted(model, x, outputs)
    explanation = posterior.explain(x, train=(x, y))
    assert explanation.rows is not None
    assert explanation.rows.shape == (len(x), min(5, len(x)))
    return [explanation.noise, *explanation.weights.values()]


def influence(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    posterior, y = fitted(model, x, outputs, method=lw.Full())
    return [posterior.influence((x, y), x[:1])]


def value(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    posterior, _ = fitted(model, x, outputs)
    return [posterior.value(x, x[:1]), posterior.value(x, x, given=x[:1])]


def sampled(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    return [fitted(model, x, outputs, method=lw.KFAC(fisher="sampled"))[0].predict(x).std]


def matrix(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_val = torch.randn(60, 4, generator=generator).to(x)
    y_val = torch.bernoulli((model(x_val).detach().double() * 2 + 1).sigmoid(), generator=generator)
    posterior = lw.fit(
        model, (x, y_val[: len(x)] > 0), likelihood="bernoulli", prior_precision=2.0,
        tune=lw.Validation((x_val, y_val), calibration="matrix"),
    )  # fmt: skip
    return [posterior.predict(x).probs]


def distribution(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    likelihood, y = (POISSON, torch.arange(len(x))) if outputs == 1 else (GAMMA, 0.5 + torch.arange(len(x)).to(x) / 8)
    forward = lambda model, x: model(x)[:, :2]  # noqa: E731
    posterior = lw.fit(model, (x, y), likelihood=likelihood, prior_precision=2.0, forward=forward)
    return [posterior.predict(x).log_prob(y), posterior.explain(x).noise, posterior.influence((x, y), x)]


def joint(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    y = {"kind": torch.arange(len(x)) % 2, "size": torch.linspace(-1, 1, len(x)).to(x)}
    likelihood = JOINT if outputs == 3 else lw.Joint(JOINT.likelihoods, {"kind": slice(0, 2), "size": [2]})
    options: Any = {"likelihood": likelihood, "forward": lambda model, x: torch.cat([model(x)] * 3, 1)[:, :3]}
    posterior = lw.fit(model, [(x, y)], prior_precision=2.0, validation=[(x, y)], **options)
    kind = posterior.predict(x)["kind"].probs
    explanation = posterior.explain(x, train=[(x, y)])
    torch.testing.assert_close(explanation.noise.shape, torch.Size([len(x), 3]))
    return [kind, explanation.variance, posterior.value(x, x), posterior.of(lambda f: f(x).sum(0)).std]


def novelty(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    labels = torch.arange(len(x)) % 2
    return [lw.novelty(model, [(x, labels)], by=by)(2 * x[:1]).log1p() for by in ("mahalanobis", "knn")]


def information(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    y = torch.arange(len(x)) % 3 if outputs == 3 else torch.arange(len(x))[:, None] % 2 > 0
    prediction = lw.fit(model, (x, y), prior_precision=2.0).predict(x, link=lw.Quadrature())
    return [prediction.probs, prediction.mutual_information()]


def mixture(model: nn.Module, x: Tensor, outputs: int) -> list[Tensor]:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[2].bias += 1.0
    found = lw.mixture([fitted(one, x, outputs)[0] for one in (model, other)]).predict(x)
    return [found.mean, found.variance, found.variance_between_members, found.variance_within_members]


FEATURES = [of, explain, influence, value, sampled, matrix, distribution, joint, novelty, information, mixture]


@pytest.mark.parametrize("size", others_slow([(1, 1), (12, 3), (1, 3), (12, 1)], [(1, 1), (12, 3)]), ids=str)
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_a_network_in_bfloat16_has_the_numbers_of_float64(feature: Any, size: tuple[int, int]) -> None:
    samples, outputs = size
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, outputs)).bfloat16().eval()
    x = torch.randn(samples, 4).bfloat16()
    found = feature(model, x, outputs)
    wanted = feature(copy.deepcopy(model).double(), x.double(), outputs)
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one.double(), other, rtol=0.05, atol=0.05 * float(other.abs().max()))
