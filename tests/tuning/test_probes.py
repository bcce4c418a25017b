"""Tuning where many outputs take a backward pass each: random combinations of them give their mean variance."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing import tangent as tn
from lapwing.tuning.held_out import PROBES, candidate_latents, sample_scores, spread_costs
from tests.quick import others_slow
from tests.zoo_modules import Net


def flat():
    """A network, and data in two batches."""
    x, y = torch.randn(30, 3).double(), torch.randint(5, (30,))
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5)).double().eval()
    return model, list(zip(x.split(20), y.split(20), strict=True))


def tied():
    """A language model whose head is its embedding: outputs with positions that take backward passes."""

    tokens = torch.randint(5, (12, 6))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    together = lambda net, tokens: torch.tanh(net.hidden(net.table(tokens))) @ net.table.weight.T  # noqa: E731
    model = Net(together, table=nn.Embedding(5, 4), hidden=nn.Linear(4, 4)).double().eval()
    return model, list(zip(tokens.split(7), labels.split(7), strict=True))


@pytest.mark.parametrize("make", others_slow([flat, tied], [flat]))
def test_many_probes_give_the_exact_scores(make, monkeypatch):
    model, data = make()
    posterior = lw.fit(model, data, lw.KFAC(), prior_precision=0.5)
    candidates = [posterior.with_prior(precision) for precision in (0.1, 1.0, 10.0)]
    exact = torch.tensor(spread_costs(candidates, data)[0])
    scores = sample_scores([posterior], lambda _: candidates, data, (0.0, 0.3))
    monkeypatch.setattr("lapwing.tuning.held_out.EXACT_OUTPUTS", 4)
    few = torch.tensor(spread_costs(candidates, data)[0])
    monkeypatch.setattr("lapwing.tuning.held_out.PROBES", 4000)
    probed = torch.tensor(spread_costs(candidates, data)[0])
    assert torch.allclose(probed, exact, rtol=0.03)
    assert not torch.equal(few, exact)  # probes were taken
    assert torch.allclose(few, exact, rtol=0.5)
    assert torch.allclose(sample_scores([posterior], lambda _: candidates, data, (0.0, 0.3)), scores, atol=0.02)


def test_covariances_of_many_outputs_are_exact(monkeypatch):
    """`Validation(calibration="matrix")` reads them."""
    model, data = flat()
    posterior = lw.fit(model, data, lw.KFAC(), prior_precision=0.5)
    monkeypatch.setattr("lapwing.tuning.held_out.EXACT_OUTPUTS", 4)
    latents = candidate_latents([posterior], lambda one: [one], data, "covariances")
    for (x, _), (_, _, latent, _, _) in zip(data, latents, strict=True):
        assert torch.allclose(latent.covariance, posterior.latent(x).covariance, rtol=1e-10)


def test_links_of_each_output_are_scored_exactly(monkeypatch):
    model, ((x, _), _) = flat()
    posterior = lw.fit(model, [(x, torch.rand(20, 5) > 0.5)], lw.KFAC(), params=lw.everything, prior_precision=0.5)
    head = lw.fit(model, [(x, torch.arange(20) % 5)], lw.KFAC(), params=lw.last_layer, prior_precision=0.5)
    for one, y in ((posterior, torch.rand(20, 5) > 0.5), (head, torch.arange(20) % 5)):
        with monkeypatch.context() as patch:
            exact = spread_costs([one], [(x, y)])[0]
            patch.setattr("lapwing.tuning.held_out.EXACT_OUTPUTS", 4)
            assert spread_costs([one], [(x, y)])[0] == exact


def test_outputs_of_all_positions_count_as_in_the_fit(monkeypatch):
    """5 outputs at each of 6 positions are more than 20: then each position takes 4 backward passes, not 5."""
    model, data = tied()
    posterior = lw.fit(model, data, lw.KFAC(), prior_precision=0.5)
    columns, plain = [], tn.record.output_gradients

    def counted(graph, noted, u, *options):
        columns.append(u.shape[-1])
        return plain(graph, noted, u, *options)

    monkeypatch.setattr(tn.record, "output_gradients", counted)
    monkeypatch.setattr("lapwing.tuning.held_out.EXACT_OUTPUTS", 20)
    spread_costs([posterior], data)
    assert set(columns) == {PROBES}


def test_random_combinations_differ_between_samples():
    """`(u·v)²` of a direction v is far from its mean in 4 combinations; close to it in 4 for each of 1 000 samples."""
    v = torch.randn(50)
    u = tn.RandomCotangents(50, PROBES)(torch.zeros(1000, 50))
    estimates = torch.einsum("ncr,c->nr", u, v).square()
    torch.testing.assert_close(estimates.mean(), v.var(correction=0), rtol=0.1, atol=0)
    assert tn.RandomCotangents(50, PROBES)(torch.zeros(2, 150)) is None  # positions are asked for one by one
