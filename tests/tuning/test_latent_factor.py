"""Held-out data widen the outputs of likelihoods that have no number for it, such as Poisson and its counts."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests.trained import train

F64 = torch.float64
PLAIN = lw.Poisson(dispersion=0.0)


def counts(rows: int, seed: int, excess: float = 1.0) -> tuple[Tensor, Tensor]:
    """Counts whose log rate has normal errors of this standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    x, errors = torch.randn(rows, 3, generator=generator, dtype=F64), torch.randn(rows, 1, generator=generator)
    return x, torch.poisson((1 + x[:, :1] + excess * errors).exp(), generator=generator)


@cache
def network(excess: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double(), counts(400, 1, excess)
    return train(model, lambda: (model(x).exp() - y * model(x)).mean(), 150, 0.03)


@cache
def fitted(excess: float = 1.0, **options: Any) -> lw.Posterior:
    options = {"validation": counts(200, 2, excess), **options}
    return lw.fit(network(excess), counts(400, 1, excess), lw.KFAC(), likelihood=PLAIN, **options)


def score(posterior: lw.Posterior) -> float:
    x, y = counts(200, 2)
    return float(posterior.predict(x).log_prob(y).mean())


def test_the_covariance_is_multiplied_by_the_best_factor():
    posterior, x = fitted(), counts(30, 3)[0]
    factor = posterior.temperature
    assert factor > 3
    plain = lw.fit(network(), counts(400, 1), lw.KFAC(), likelihood=PLAIN,
                   prior_precision=posterior.prior_precision * factor, tune=None)  # fmt: skip
    torch.testing.assert_close(posterior.latent(x).covariance, factor * plain.latent(x).covariance)
    best = score(posterior)
    assert best > score(plain) + 0.1
    for other in (0.5 * factor, 2 * factor):
        wide = lw.fit(network(), counts(400, 1), lw.KFAC(), likelihood=PLAIN, temperature=other,
                      prior_precision=posterior.prior_precision * factor / other, tune=None)  # fmt: skip
        assert best > score(wide)
    x, y = counts(200, 4)
    assert posterior.predict(x).log_prob(y).mean() > plain.predict(x).log_prob(y).mean() + 0.1
    assert f"temperature={factor:g}" in str(posterior)


def test_a_given_prior_precision_and_a_given_temperature_stay():
    given = fitted(prior_precision=2.0)
    assert given.prior_precision == 2.0
    assert given.temperature > 3
    assert given.method.tuning is not None
    again = lw.fit(network(), counts(400, 1), lw.KFAC(), likelihood=PLAIN, prior_precision=2.0,
                   temperature=given.temperature, tune=None)  # fmt: skip
    x = counts(30, 3)[0]
    torch.testing.assert_close(given.latent(x).variance, again.latent(x).variance)
    assert fitted(temperature=2.0).temperature == 2.0
    assert fitted(prior_precision=2.0, temperature=2.0).tuned is False


def test_counts_of_a_poisson_distribution_need_no_factor():
    assert fitted(excess=0.0).temperature == 1


@pytest.mark.parametrize("likelihood", [lw.Categorical(), lw.Gaussian(), lw.Gaussian(0.3)], ids=repr)
def test_likelihoods_with_a_number_of_their_own_need_no_factor(likelihood):
    x, y = counts(200, 2)
    targets = y.flatten().long().clamp_max(2) if isinstance(likelihood, lw.Categorical) else y
    torch.manual_seed(0)
    model = nn.Linear(3, 3 if isinstance(likelihood, lw.Categorical) else 1).double().eval()
    data = (x[:100], targets[:100]), (x[100:], targets[100:])
    assert lw.fit(model, data[0], lw.KFAC(), likelihood=likelihood, validation=data[1]).temperature == 1


def test_the_factor_stays_in_files_and_updates(reloaded):
    posterior, x = fitted(), counts(30, 3)[0]
    loaded = reloaded(posterior)
    torch.testing.assert_close(loaded.predict(x).mean, posterior.predict(x).mean, rtol=1e-12, atol=0)
    further = posterior.update(counts(100, 5))
    assert further.temperature == posterior.temperature
    wanted = lw.fit(posterior.model, tuple(map(torch.cat, zip(counts(400, 1), counts(100, 5), strict=True))), lw.KFAC(),
                    likelihood=PLAIN, prior_precision=posterior.prior_precision,
                    temperature=posterior.temperature, tune=None)  # fmt: skip
    torch.testing.assert_close(further.latent(x).variance, wanted.latent(x).variance)
    tuned = posterior.update(counts(100, 5), tune=lw.Validation(counts(200, 2)))
    assert tuned.temperature == posterior.temperature
