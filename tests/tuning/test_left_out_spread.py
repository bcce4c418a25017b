"""Without held-out data, left-out training targets widen the spread of predicted noise, and the noise of censored y."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.inputs import Samples
from lapwing.tuning import Training
from lapwing.tuning.leave_one_out import left_out_latents
from lapwing.tuning.training_kernel import process_of
from tests.oracle import jacobian
from tests.refilling import Refilling
from tests.trained import train
from tests.tuning.test_left_out_noise import coverage

F64 = torch.float64
LIKELIHOODS: dict[str, Any] = {
    "predicted": lw.HeteroscedasticGaussian(),
    "censored": lw.Censored(),
    "tails": lw.Censored(df=4.0),
}
SHAPES = ["two targets", "missing", "positions", "bfloat16", "last layer", "one row"]
each = pytest.mark.parametrize("name", LIKELIHOODS)


class Both(nn.Module):
    """Two networks of one target each: outputs (m_1, m_2, s_1, s_2)."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts], -1).flatten(1)


def rows(name: str, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (N, 4), y (N, 1) with noise of standard deviation 0.5, and targets: y, or intervals, a third censored."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=F64)
    y = x[:, :1].sin() + 0.5 * x[:, 1:2] * x[:, 2:3]
    y = y + 0.5 * torch.randn(count, 1, generator=generator, dtype=F64)
    end = 2.5 * torch.rand(count, 1, generator=generator, dtype=F64) - 0.5
    return x, y, y if name == "predicted" else torch.cat([y.minimum(end), torch.where(y > end, torch.inf, y)], 1)


def network(name: str, x: Tensor, targets: Tensor, steps: int, hidden: int = 32) -> nn.Module:
    torch.manual_seed(0)
    likelihood = LIKELIHOODS[name]
    model = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2 if name == "predicted" else 1)).double()
    if name == "predicted":
        return train(model, lambda: -likelihood.log_prob(model(x), targets).mean(), steps, 0.01)
    model.log_noise = nn.Parameter(torch.zeros((), dtype=F64))
    train(model, lambda: -likelihood.log_prob(model[:3](x), targets, model.log_noise.exp()).mean(), steps, 0.01)
    return model[:3]


def factor(posterior: Any) -> float:
    """How much left-out targets have multiplied the spread, or the noise of censored targets."""
    law = posterior.likelihood
    return posterior.temperature if law.left_out_decides == "spread" else law.fitted_noise / law.noise_variance


@each
@pytest.mark.parametrize("steps", [20, 600])
def test_left_out_latents_are_those_of_the_dense_process(name, steps):
    x, _, targets = rows(name, 30, 0)
    model = network(name, x, targets, steps, hidden=3)
    likelihood = lw.Censored(0.3) if name == "censored" else LIKELIHOODS[name]
    posterior = lw.fit(model, (x, targets), lw.Full(), likelihood=likelihood, prior_precision=1.0)
    latent, found, weights = left_out_latents(posterior, Training([(x, targets)]), 2000)
    known, outputs = targets[:, 0] == targets[:, -1], model(x).detach()
    assert torch.equal(found, targets)
    assert weights.eq(1).all()
    # C = J Jᵀ/δ + σ² diag(exp s) of known y, without exp s if no output predicts noise
    J, f, r = jacobian(model, x)[known, 0], outputs[known, 0], (targets[:, 0] - outputs[:, 0])[known]
    ratios = outputs[known, 1].exp() if name == "predicted" else torch.ones_like(f)
    process, _ = process_of(posterior, posterior.tangent, [Samples.of((x, targets))])
    noise = process.unit * 10 ** process.best() * ratios
    inverse, ones = (J @ J.T + noise.diag()).inverse(), torch.ones_like(f)
    labels = r + J @ torch.cat([p.detach().flatten() for p in model.parameters()])
    labels = labels - (ones @ inverse @ labels) / (ones @ inverse @ ones)
    errors = inverse @ labels / inverse.diagonal()
    moved = errors * (1 - noise * inverse.diagonal())
    overfitted = (errors.square() / ratios).sum() > ((r + moved).square() / ratios).sum()
    assert overfitted == (steps == 600)
    torch.testing.assert_close(latent.mean[known, 0], f + r - errors if overfitted else f - moved, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(latent.mean[~known], outputs[~known])
    torch.testing.assert_close(latent.mean[:, 1:], outputs[:, 1:])
    spread = posterior.latent(x).covariance
    if name == "predicted":  # half the way to unseen inputs
        spread = spread * (noise * inverse.diagonal()).clamp_min(0.01).rsqrt()[:, None, None]
    torch.testing.assert_close(latent.covariance, spread, rtol=1e-5, atol=1e-8)


@each
def test_an_overfitted_network_gets_wider_intervals(name):
    x, _, targets = rows(name, 500, 1)
    model, (new, y, _) = network(name, x, targets, 500), rows(name, 3000, 2)
    posterior = lw.fit(model, (x, targets), likelihood=LIKELIHOODS[name])
    assert factor(posterior) > 1
    evidence = lw.fit(model, (x, targets), likelihood=LIKELIHOODS[name], tune=lw.Evidence())
    assert coverage(evidence, new, y) < 0.84
    assert 0.86 < coverage(posterior, new, y) < 0.97
    assert posterior.predict(new).log_prob(y).mean() > evidence.predict(new).log_prob(y).mean() + 0.02


@each
def test_a_network_that_has_not_overfitted_keeps_its_numbers(name):
    x, _, targets = rows(name, 500, 3)
    assert factor(lw.fit(network(name, x, targets, 40), (x, targets), likelihood=LIKELIHOODS[name])) == 1


@pytest.mark.parametrize("kind", ["grouped", "one-sided", "few known"])
def test_censored_targets_show_no_noise_that_they_do_not_have(kind):
    x, y, _ = rows("predicted", 400, 6)
    model = nn.Linear(4, 1).double()
    train(model, lambda: (model(x) - y).square().mean(), 200, 0.02)
    unknown = torch.full_like(y, torch.inf)
    targets = {
        "grouped": torch.cat([(2 * y).floor(), (2 * y).floor() + 1], 1) / 2,
        "one-sided": torch.where(y > 0, torch.cat([0 * y, unknown], 1), torch.cat([-unknown, 0 * y], 1)),
        "few known": torch.cat([y.clamp(max=-0.8), torch.where(y > -0.8, unknown, y)], 1),
    }[kind]
    assert factor(lw.fit(model, (x, targets), likelihood=lw.Censored())) == 1


@each
def test_order_batches_and_rows_without_weight_do_not_matter(name):
    x, _, y = rows(name, 120, 4)
    likelihood, model = LIKELIHOODS[name], network(name, x, y, 500)
    wanted = lw.fit(model, (x, y), likelihood=likelihood)
    assert factor(wanted) > 1
    order = torch.randperm(120, generator=torch.Generator().manual_seed(0))
    batches = list(zip(x[order].split(50), y[order].split(50), strict=True))
    for loader in (batches, Refilling(batches)):
        assert factor(lw.fit(model, loader, likelihood=likelihood)) == pytest.approx(factor(wanted), rel=1e-9)
    more = torch.cat([x, x + 1]), torch.cat([y, 50 + y]), torch.ones(240).index_fill(0, torch.arange(120, 240), 0)
    weighted = lw.fit(model, [more], likelihood=likelihood, sample_weights=True)
    assert factor(weighted) == pytest.approx(factor(wanted), rel=1e-9)


@each
def test_numbers_of_the_user_stay(name, tmp_path):
    x, _, y = rows(name, 120, 4)
    likelihood, model = LIKELIHOODS[name], network(name, x, y, 500)
    assert factor(lw.fit(model, (x, y), lw.KFAC(), likelihood=likelihood, prior_precision=2.0)) == 1
    if name == "predicted":
        assert lw.fit(model, (x, y), lw.KFAC(), likelihood=likelihood, temperature=0.5).temperature == 0.5
    else:
        given = lw.Censored(0.3, df=likelihood.df)
        assert lw.fit(model, (x, y), lw.KFAC(), likelihood=given).likelihood == given
    posterior = lw.fit(model, (x, y), lw.KFAC(), likelihood=likelihood)
    assert factor(posterior) > 1
    assert factor(posterior.update((x, y))) == factor(posterior)
    posterior.save(tmp_path / "posterior.safetensors")
    assert factor(lw.load(tmp_path / "posterior.safetensors", model)) == factor(posterior)


@pytest.mark.parametrize("shape", SHAPES)
def test_other_shapes_get_a_spread_too(shape):
    x, _, y = rows("predicted", 120, 5)
    model, likelihood = network("predicted", x, y, 500), LIKELIHOODS["predicted"]
    wanted = lw.fit(model, (x, y), likelihood=likelihood).temperature
    assert wanted > 1
    data: Any = x, y
    options: dict[str, Any] = {}
    if shape == "two targets":
        model, data = Both(model, network("predicted", x, -y, 500)), (x, torch.cat([y, -y], 1))
    elif shape == "missing":
        likelihood = lw.HeteroscedasticGaussian(missing=True)
        data = torch.cat([x, x[:20] + 1]), torch.cat([y, torch.full((20, 1), torch.nan, dtype=F64)])
    elif shape == "positions":
        data = x.unflatten(0, (60, 2)), y.unflatten(0, (60, 2))
    elif shape == "bfloat16":
        model, data = model.bfloat16(), (x.bfloat16(), y)
    elif shape == "last layer":
        options = {"params": lw.last_layer}
    else:
        data = x[:1], y[:1]
    posterior = lw.fit(model, data, likelihood=likelihood, **options)
    low, high = posterior.predict(data[0]).interval(0.9)
    assert (low <= high).all()
    assert wanted / 4 < posterior.temperature < 8 * wanted or shape == "one row"
