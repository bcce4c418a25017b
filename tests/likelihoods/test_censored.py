"""`lw.Censored` against scipy and autograd, and intervals of event times that are not seen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import nn

import lapwing as lw
from tests import oracle
from tests.likelihoods.latents import dense_latent
from tests.refused import refused
from tests.trained import train

F64 = torch.float64
SEED = torch.Generator().manual_seed(0)
X = torch.randn(80, 3, generator=SEED, dtype=F64)
Y = X[:, 0] + 0.5 * torch.randn(80, generator=SEED, dtype=F64)
END = torch.randn(80, generator=SEED, dtype=F64) + 0.5


KNOWN = torch.stack([Y.minimum(END), torch.where(Y > END, torch.inf, Y)], 1)  # right-censored targets
CASES = torch.tensor(
    [[0.3, 0.3], [0.2, torch.inf], [-torch.inf, -0.4], [0.1, 0.9], [7, torch.inf], [-9, -8.5], [-torch.inf, torch.inf]],
    dtype=F64,
)


def network(dtype: torch.dtype = F64) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    return train(model, lambda: -lw.Censored(0.3).log_prob(model(X.to(dtype)), KNOWN.to(dtype)).mean(), rate=0.01)


def by_scipy(law: Any, low: float, high: float) -> float:
    if low == high:
        return float(law.logpdf(low))
    if low > law.mean():
        return math.log(law.sf(low) - law.sf(high))
    return math.log(law.cdf(high) - law.cdf(low))


def test_log_probabilities_equal_those_of_scipy() -> None:
    f, likelihood = torch.linspace(-1, 1, len(CASES), dtype=F64)[:, None], lw.Censored(0.5)
    expected = [by_scipy(stats.norm(float(m), 0.5**0.5), *row) for m, row in zip(f, CASES.tolist(), strict=True)]
    torch.testing.assert_close(likelihood.log_prob(f, CASES), torch.tensor(expected, dtype=F64), rtol=1e-12, atol=1e-12)
    latent = dense_latent(f, torch.full((len(f), 1, 1), 0.7, dtype=F64))
    expected = [by_scipy(stats.norm(float(m), 1.2**0.5), *row) for m, row in zip(f, CASES.tolist(), strict=True)]
    found = likelihood.predict(latent).log_prob(CASES)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=1e-12)
    far = likelihood.log_prob(torch.zeros(1, 1, dtype=F64), torch.tensor([[1e3, torch.inf]], dtype=F64))
    assert abs(float(far) / stats.norm.logsf(1e3 / 0.5**0.5) - 1) < 1e-12


@pytest.mark.parametrize(("df", "error"), [(3.0, 6e-3), (4.0, 1e-3), (6.0, 1e-4)])
def test_student_t_noise(df: float, error: float) -> None:
    """The mixture of 16 normals is as near to scipy's t as for known y."""
    f, likelihood = torch.linspace(-1, 1, len(CASES), dtype=F64)[:, None].requires_grad_(), lw.Censored(0.5, df=df)
    scale = (0.5 * (df - 2) / df) ** 0.5
    laws = [stats.t(df, float(mean.detach()), scale) for mean in f]
    expected = [by_scipy(law, *row) for law, row in zip(laws, CASES.tolist(), strict=True)]
    found = likelihood.log_prob(f, CASES)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64), rtol=0, atol=error)
    noise = torch.tensor(0.5, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *given: likelihood.log_prob(given[0], CASES, given[1]), (f, noise))
    normal = lw.Censored(0.5).target_weights(f.detach(), CASES)
    assert torch.equal(likelihood.target_weights(f.detach(), CASES), normal)

    known = lw.fit(network(), (X, torch.stack([Y, Y], 1)), likelihood=likelihood, prior_precision=1.0)
    student = lw.fit(network(), (X, Y[:, None]), likelihood=lw.StudentT(df, noise_variance=0.5), prior_precision=1.0)
    mine, theirs = known.predict(X), student.predict(X)
    torch.testing.assert_close(mine.std, theirs.std)
    torch.testing.assert_close(mine.log_prob(Y), theirs.log_prob(Y))
    torch.testing.assert_close(mine.interval(0.9), theirs.interval(0.9))
    between = mine.log_prob(torch.stack([Y, Y + 0.5], 1)).exp()
    torch.testing.assert_close(between, (theirs.pit(Y + 0.5) - theirs.pit(Y)).squeeze(1))


def test_the_curvature_is_the_observed_information() -> None:
    f, likelihood = torch.linspace(-1, 1, len(CASES), dtype=F64)[:, None].requires_grad_(), lw.Censored(0.5)
    (slope,) = torch.autograd.grad(likelihood.log_prob(f, CASES).sum(), f, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), f)
    noise = torch.tensor(0.5, dtype=F64, requires_grad=True)
    (by_noise,) = torch.autograd.grad(likelihood.log_prob(f, CASES, noise).sum(), noise)
    up, down = (lw.Censored(0.5 + step).log_prob(f, CASES).sum() for step in (1e-6, -1e-6))
    assert float(by_noise) == pytest.approx(float((up - down).detach()) / 2e-6, rel=1e-6)
    weights = likelihood.target_weights(f.detach(), CASES)
    torch.testing.assert_close(weights, -0.5 * bend, rtol=1e-8, atol=1e-8)
    assert weights[0] == 1
    assert weights[-1] == 0
    torch.testing.assert_close(likelihood.score(f, CASES), slope.detach())


def test_the_posterior_equals_a_dense_one() -> None:
    model, likelihood = network(), lw.Censored(0.3)
    posterior = lw.fit(
        model, [(X[:50], KNOWN[:50]), (X[50:], KNOWN[50:])], lw.Full(), likelihood=likelihood, prior_precision=2.0
    )
    j = oracle.jacobian(model, X)[:, 0]
    weights = likelihood.target_weights(model(X).detach(), KNOWN)[:, 0] / 0.3
    precision = (j * weights[:, None]).T @ j + 2 * torch.eye(j.shape[1], dtype=F64)
    expected = torch.einsum("bp,pq,bq->b", j, precision.inverse(), j)
    torch.testing.assert_close(posterior.latent(X).variance[:, 0], expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("held_out", "df"), [(False, None), (True, None), (True, 4.0)])
def test_the_data_decide_on_an_open_noise(held_out: bool, df: float | None) -> None:
    model = network()
    mine, rest = (X[:40], KNOWN[:40]), (X[40:], KNOWN[40:])
    options: dict[str, Any] = {"validation": rest} if held_out else {}
    posterior = lw.fit(
        model, [mine, rest] if not held_out else [mine], lw.KFAC(), likelihood=lw.Censored(df=df), **options
    )
    x, y = rest if held_out else (X, KNOWN)
    candidates = torch.linspace(0.05, 1.5, 3000, dtype=F64).tolist()
    logs = torch.stack([lw.Censored(c, df=df).log_prob(model(x), y).sum() for c in candidates])
    assert posterior.noise_variance == pytest.approx(candidates[int(logs.argmax())], rel=0.01)
    assert math.isfinite(posterior.log_marginal_likelihood())
    refused(lambda: posterior.with_noise(2.0), "fit again with likelihood=lw.Censored(noise_variance=2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_methods_and_files(dtype: torch.dtype, reloaded: Any) -> None:
    model = network(dtype)
    for method in (lw.KFAC(), lw.Diagonal(), lw.ELLA(rank=5), lw.VaLLA(5)):
        data = [(X.to(dtype), KNOWN.to(dtype))]
        posterior = lw.fit(model, data, method, likelihood=lw.Censored(df=5.0), prior_precision=1.0)
        assert torch.isfinite(posterior.predict(X.to(dtype)).log_prob(KNOWN)).all()
    again = reloaded(posterior, model)
    assert again.likelihood == posterior.likelihood
    assert torch.equal(again.predict(X.to(dtype)).log_prob(KNOWN), posterior.predict(X.to(dtype)).log_prob(KNOWN))


@pytest.mark.parametrize(("noise", "df"), [(0.3, None), (None, 4.0)])
def test_heads_deployed_networks_and_times(noise: float | None, df: float | None) -> None:
    model, torso = network(), network()
    model[2] = nn.Linear(8, 2).double()
    with torch.no_grad():
        model[0].load_state_dict(torso[0].state_dict())
        for mine, theirs in zip(model[2].parameters(), torso[2].parameters(), strict=True):
            mine[:1] = theirs
    heads = lw.Joint({"time": lw.Censored(noise, df=df), "size": lw.Gaussian(0.7)}, outputs={"time": [0], "size": [1]})
    options: dict[str, Any] = {"params": lw.last_layer, "prior_precision": 1.0}
    both = lw.fit(model, [(X, {"time": KNOWN, "size": Y[:, None]})], lw.Full(), likelihood=heads, **options)
    alone = lw.fit(torso, [(X, KNOWN)], lw.Full(), likelihood=lw.Censored(noise, df=df), **options)
    found, expected = both.predict(X)["time"], alone.predict(X)
    torch.testing.assert_close(found.variance, expected.variance)
    torch.testing.assert_close(found.log_prob(KNOWN), expected.log_prob(KNOWN))
    mean, variance, *tails = lw.deploy(alone, X)(X)
    assert [float(one) for one in tails] == ([] if df is None else [df])
    torch.testing.assert_close((mean, variance), (expected.mean, expected.variance))
    torch.testing.assert_close(expected.log_prob(Y), expected.log_prob(torch.stack([Y, Y], 1)))
    scaled = expected.scaled(10.0, 2.0).log_prob(10 + 2 * Y[:, None])
    torch.testing.assert_close(scaled, expected.log_prob(Y) - math.log(2))
    refused(lambda: expected.log_prob(KNOWN[:3]), "Pass one target for each output")
    ends_of_time = expected.transformed(torch.exp).interval(0.9)
    torch.testing.assert_close(ends_of_time, tuple(end.exp() for end in expected.interval(0.9)))


def test_comparisons_have_the_log_density_alone() -> None:
    posterior = lw.fit(network(), [(X, KNOWN)], likelihood="censored")
    table = lw.compare({"fit": posterior}, [(X, KNOWN)], repeats=1)
    assert float(table["fit"]["NLL"]) == pytest.approx(-float(posterior.predict(X).log_prob(KNOWN).mean()), rel=1e-5)
