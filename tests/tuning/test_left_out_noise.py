"""Without held-out data, training counts that are left out show the dispersion of counts."""

from __future__ import annotations

from dataclasses import replace

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

F64 = torch.float64


def counts(rows: int, seed: int, alpha: float = 0.5) -> tuple[Tensor, Tensor]:
    """Counts of mean rate 8 whose rates have noise of variance alpha; 0 means Poisson counts."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator, dtype=F64)
    rate = 8 * (0.5 * x[:, :1].sin() + 0.3 * x[:, 1:2]).exp()
    if alpha:
        spread = torch.tensor(1 + alpha, dtype=F64).log()
        rate = rate * (spread.sqrt() * torch.randn(rows, 1, generator=generator, dtype=F64) - spread / 2).exp()
    return x, torch.poisson(rate, generator=generator)


def network(x: Tensor, y: Tensor, steps: int, hidden: int = 30) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    model = model.double()
    return train(model, lambda: (model(x).exp() - y * model(x)).mean(), steps, 0.01)


def coverage(posterior: lw.Posterior, x: Tensor, y: Tensor) -> float:
    low, high = posterior.predict(x).interval(0.9)
    return float(((y >= low) & (y <= high)).double().mean())


@pytest.mark.parametrize("steps", [20, 1000])
def test_left_out_latents_are_those_of_the_dense_process(steps):
    x, y = counts(20, 0)
    model = network(x, y, steps, hidden=3)
    posterior = lw.fit(model, (x, y), lw.Full(), likelihood="poisson", tune=None)
    latent, targets, weights = left_out_latents(posterior, Training([(x, y)]), 2000)
    assert torch.equal(targets, y)
    assert weights.eq(1).all()
    assert latent.variance.eq(0).all()
    # C = J Jᵀ/δ + σ²I of the logarithms of counts, with the likeliest constant taken off the labels
    f, (process, _) = model(x).detach(), process_of(posterior, posterior.tangent, [Samples.of((x, y))])
    r = ((y + 0.5) / (f.exp() + 0.5)).log()
    J = jacobian(model, x).squeeze(1)
    labels = (r + J @ torch.cat([p.detach().flatten() for p in model.parameters()])[:, None]).squeeze(1)
    noise = process.unit * 10 ** process.best()
    inverse, ones = (J @ J.T + noise * torch.eye(20, dtype=F64)).inverse(), torch.ones(20, dtype=F64)
    labels = labels - (ones @ inverse @ labels) / (ones @ inverse @ ones)
    errors = ((inverse @ labels) / inverse.diagonal())[:, None]
    moved = errors * (1 - noise * inverse.diagonal())[:, None]  # minus the errors σ² C⁻¹r of seen counts
    overfitted = errors.square().sum() > (r + moved).square().sum()
    assert overfitted == (steps == 1000)
    torch.testing.assert_close(latent.mean, f + r - errors if overfitted else f - moved, rtol=1e-6, atol=1e-6)


def test_an_overfitted_network_gets_the_dispersion_of_new_counts():
    x, y = counts(300, 1)
    model, new = network(x, y, 400), counts(2000, 2)
    plain = lw.fit(model, (x, y), likelihood="poisson", tune=None)
    tuned = lw.fit(model, (x, y), likelihood="poisson")
    assert tuned.likelihood.alpha > 3 * max(plain.likelihood.alpha, 0.1)
    same = replace(tuned, likelihood=plain.likelihood)
    assert coverage(same, *new) < 0.7
    assert 0.8 < coverage(tuned, *new) < 0.97
    assert tuned.predict(new[0]).log_prob(new[1]).mean() > same.predict(new[0]).log_prob(new[1]).mean() + 0.5


def test_poisson_counts_of_a_network_that_has_not_overfitted_keep_small_intervals():
    x, y = counts(600, 3, alpha=0.0)
    posterior, new = lw.fit(network(x, y, 60), (x, y), likelihood="poisson"), counts(2000, 4, alpha=0.0)
    assert posterior.likelihood.alpha < 0.1
    assert 0.88 < coverage(posterior, *new) < 0.98


def test_the_dispersion_does_not_depend_on_order_batches_and_rows_without_weight():
    x, y = counts(120, 5)
    model = network(x, y, 200)
    alpha = lw.fit(model, (x, y), likelihood="poisson").likelihood.alpha
    order = torch.randperm(120, generator=torch.Generator().manual_seed(0))
    batches = list(zip(x[order].split(50), y[order].split(50), strict=True))
    assert lw.fit(model, batches, likelihood="poisson").likelihood.alpha == alpha
    more = torch.cat([x, x + 1]), torch.cat([y, 50 + y]), torch.ones(240).index_fill(0, torch.arange(120, 240), 0)
    assert lw.fit(model, [more], likelihood="poisson", sample_weights=True).likelihood.alpha == alpha


def test_an_update_and_a_file_keep_the_dispersion(tmp_path):
    x, y = counts(150, 6)
    model = network(x, y, 300)
    posterior = lw.fit(model, (x, y), lw.KFAC(), likelihood="poisson")
    assert posterior.update(counts(50, 7)).likelihood.alpha == posterior.likelihood.alpha
    posterior.save(tmp_path / "counts.safetensors")
    assert lw.load(tmp_path / "counts.safetensors", model).likelihood.alpha == posterior.likelihood.alpha


def test_a_far_row_does_not_decide():
    x, y = counts(150, 8)
    model = network(x, y, 200)
    alpha = lw.fit(model, (x, y), likelihood="poisson").likelihood.alpha
    far = torch.cat([x, 1e6 * x[:1]]), torch.cat([y, y[:1]])
    found = lw.fit(model, far, likelihood="poisson").likelihood.alpha
    assert alpha / 2 < found < 2 * alpha


@pytest.mark.parametrize("shape", ["three outputs", "positions", "refilled", "bfloat16", "frozen", "one row"])
def test_other_shapes_have_a_dispersion_too(shape):
    x, y = counts(120, 9, alpha=2.0)
    model = network(x, y, 40)
    wanted = lw.fit(model, (x, y), likelihood="poisson").likelihood.alpha
    data = x, y
    if shape == "three outputs":
        three = [nn.Parameter(part.detach().repeat_interleave(3, 0)) for part in model[-1].parameters()]
        model[-1].weight, model[-1].bias = three
        data = x, torch.poisson(y.expand(-1, 3), torch.Generator().manual_seed(0))  # they share most noise
    elif shape == "positions":
        data = x.unflatten(0, (60, 2)), y.unflatten(0, (60, 2))
    elif shape == "refilled":
        data = Refilling(zip(x.split(50), y.split(50), strict=True))
    elif shape == "bfloat16":
        model, data = model.bfloat16(), (x.bfloat16(), y)
    elif shape == "frozen":
        model[:-1].requires_grad_(False)
    else:
        data = x[:1], y[:1]
    posterior = lw.fit(model, data, likelihood="poisson")
    found, inputs = posterior.likelihood.alpha, x if shape == "refilled" else data[0]
    low, high = posterior.predict(inputs).interval(0.9)
    assert (low <= high).all()
    assert found == 0 if shape == "one row" else wanted / 2 < found < 2 * wanted
