"""SWAG: the structure against dense matrices, the moments against numpy's, the posterior against loops."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.covariance.base import join_blocks, split_blocks
from lapwing.covariance.low_rank_diagonal import LowRankPlusDiagonal
from lapwing.fitting.swag import SWAG
from tests import oracle
from tests.conformance import Setup, block_columns, close, jacobian, pack, setup
from tests.covariance.test_structures import StructureConformance, on_two_kinds_of_block, random, spectrum
from tests.network.test_untouched import untouched
from tests.refused import refused
from tests.zoo import ZOO

NETWORKS = (
    "mlp", "squeezed", "bilinear", "cnn_bn_inplace", "grouped_strided_conv", "prelu", "transposed_conv", "gpt2",
    "tied", "shared_module", "frozen_trunk", "weight_norm", "compiled", "lstm",
)  # fmt: skip


class TestLowRankPlusDiagonal(StructureConformance):
    """The checks of any covariance; there is no prior to change."""

    test_with_prior_equals_rebuilding = test_several_priors_at_once = test_evidence_gap = None
    test_traces_of_several_priors_at_once = test_log_det_ratio = test_log_det_ratio_gradient = None
    rank = 3

    def make(self, problem, precision, scale):
        size = problem.tangent.size
        factor = split_blocks(problem.blocks, random(self.rank, size))
        return LowRankPlusDiagonal(problem.blocks, split_blocks(problem.blocks, spectrum(size)), factor)

    def oracle(self, problem, precision, scale):
        size = problem.tangent.size
        factor = random(self.rank, size)
        return torch.diag(spectrum(size)) + factor.T @ factor

    @on_two_kinds_of_block
    def test_round_trip(self, problem, built):
        covariance, sigma = built
        again = LowRankPlusDiagonal.from_tensors(problem.tangent, dict(covariance.tensors()), covariance.extra())
        close(again.to_dense(), sigma)


# --- the moments -----------------------------------------------------------------------------------------------------


def wander(model: nn.Module, count: int, size: float = 0.05) -> list[dict[str, Tensor]]:
    """Returns state dicts of trained weights moved at random, those that are not frozen."""
    states, generator = [], torch.Generator().manual_seed(7)
    for _ in range(count):
        moved = copy.deepcopy(model)
        for value in moved.parameters():
            if value.requires_grad:
                noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                value.data += size * noise.to(value.dtype)
        states.append(moved.state_dict())
    return states


def test_small_moves_of_large_weights_keep_their_digits():
    """In float32, moves of 1e-6 of a weight: E[θ²] - E[θ]² has no digit left, the collector nearly all."""
    model = nn.Linear(400, 1, bias=False)
    start = torch.rand(1, 400, generator=torch.Generator().manual_seed(0)) + 1
    values = []
    collector = SWAG.collector(model, rank=0)
    for step in range(30):
        model.weight.data = start + 1e-6 * torch.randn(1, 400, generator=torch.Generator().manual_seed(step))
        values.append(model.weight.detach().clone())
        collector.snapshot()
    stacked = torch.stack(values)
    wanted = stacked.double().numpy().var(0)
    np.testing.assert_allclose(collector.variance["weight"], wanted, rtol=1e-6, atol=1e-20)
    naive = stacked.square().mean(0) - stacked.mean(0).square()
    assert (naive.double() - torch.from_numpy(wanted)).abs().max() > wanted.max()


# --- the posterior ---------------------------------------------------------------------------------------------------


def posterior_of(problem: Setup, states: list[Any], rank: int = 4, **options: Any) -> lw.Posterior:
    collector = SWAG.collector(problem.model, rank, problem.params)
    for state in states:
        collector.add(state)
    given = {"loader": problem.loader, "likelihood": problem.likelihood, **options}
    return SWAG.from_snapshots(collector, **given)


@pytest.mark.quick(4)
@pytest.mark.parametrize(("name", "rank"), [*((name, 4) for name in NETWORKS), ("tied", 20), ("tied", 0)])
def test_posterior_equals_dense_formulas(name, rank):
    problem = Setup(ZOO[name], lw.everything)
    states = wander(oracle.uncompiled(problem.model), 6)
    posterior = posterior_of(problem, states, rank, batch_norm="keep")
    blocks = posterior.tangent.blocks
    names, order = [name for block in blocks for name in block.parameters], block_columns(blocks, problem.model)
    # the mean and Σ by the formulas of the paper, in numpy
    flat = np.stack([np.concatenate([s[n].double().numpy().ravel() for n in names]) for s in states])  # (T, P)
    sigma = np.diag(flat.var(0))
    if rank:
        running = np.cumsum(flat, 0) / np.arange(1, len(flat) + 1)[:, None]
        D = (flat - running)[-rank:]
        sigma = sigma + D.T @ D / (len(D) - 1)
    mean, sigma = torch.from_numpy(flat.mean(0))[order], torch.from_numpy(0.5 * sigma)[order][:, order]
    close(join_blocks(blocks, posterior.tangent.mean()), mean, 1e-12)
    close(posterior.covariance.to_dense(), sigma)

    average = problem.case.build()
    with torch.no_grad():
        for key, value in oracle.uncompiled(average).named_parameters():
            value.copy_(torch.stack([state[key] for state in states]).mean(0))
    assert not posterior.tangent.model.training
    latent = posterior.latent(problem.test)
    close(latent.mean, oracle.outputs(average, problem.test))
    J = jacobian(average, problem.test, posterior.tangent.blocks)
    close(latent.covariance, oracle.output_covariance(J, sigma), 1e-8)
    joint = posterior.latent(problem.test, joint=True)
    close(joint.covariance, oracle.joint_output_covariance(J, sigma), 1e-8)
    outputs = oracle.outputs(average, problem.x)
    if problem.case.classification:
        likelihood = oracle.categorical_log_likelihood(outputs, problem.y)
    else:
        likelihood = oracle.gaussian_log_likelihood(outputs, problem.y, problem.likelihood.noise_variance)
    assert float(posterior.likelihood.log_likelihood(posterior.statistics)) == pytest.approx(float(likelihood))
    assert posterior.samples == 9


@pytest.mark.parametrize("name", ["mlp", "gpt2", "compiled"])
def test_state_dicts_and_collector_agree(name):
    problem = Setup(ZOO[name], lw.everything)
    bare = oracle.uncompiled(problem.model)
    states = wander(bare, 5)
    saved = [{f"_orig_mod.{n}": v for n, v in s.items()} for s in states] if name == "compiled" else states
    from_states = posterior_of(problem, saved, 3)
    collector = SWAG.collector(problem.model, rank=3)
    for state in states:
        bare.load_state_dict(state)
        collector.snapshot()
    collected = SWAG.from_snapshots(collector, problem.loader, likelihood=problem.likelihood)
    assert torch.equal(collected.covariance.to_dense(), from_states.covariance.to_dense())
    assert torch.equal(collected.latent(problem.test).mean, from_states.latent(problem.test).mean)


# --- batch norm ------------------------------------------------------------------------------------------------------


def test_batch_norm_is_refreshed():
    """The statistics of the averaged network's own activations: the mean over batches of each batch's."""
    problem = Setup(ZOO["cnn_bn_inplace"], lw.everything)
    posterior = posterior_of(problem, wander(problem.model, 5))
    network = posterior.tangent.model
    convolution, norm = network[0], network[1]
    found = [convolution(x).transpose(0, 1).flatten(1) for x, _ in problem.loader]  # (channels, B H W)
    close(norm.running_mean, torch.stack([a.mean(1) for a in found]).mean(0).detach())
    close(norm.running_var, torch.stack([a.var(1) for a in found]).mean(0).detach())
    assert norm.momentum == problem.model[1].momentum
    assert not any(module.training for module in network.modules())
    kept = posterior_of(problem, wander(problem.model, 5), batch_norm="keep").tangent.model[1]
    assert torch.equal(kept.running_mean, problem.model[1].running_mean)


def test_a_batch_of_one_has_no_variance():
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    x, y, collector = torch.randn(6, 3), torch.randn(6, 2), SWAG.collector(model)
    for state in wander(model, 3):
        collector.add(state)
    uneven = [(x, y), (x[:1], y[:1])]
    refused(lambda: SWAG.from_snapshots(collector, uneven), "(1, 3) … Pass batches of at least 2 … batch_norm='keep'")
    assert SWAG.from_snapshots(collector, uneven, batch_norm="keep").samples == 7
    images = Setup(ZOO["cnn_bn_inplace"], lw.everything)  # several positions have a variance
    posterior_of(images, wander(images.model, 3), loader=[(images.x[:1], images.y[:1]), *images.loader])


# --- likelihood, and what needs a prior ------------------------------------------------------------------------------


def test_noise_variance_is_the_mean_squared_residual():
    problem = Setup(ZOO["conv1d"], lw.everything)
    states = wander(problem.model, 4)
    posterior = posterior_of(problem, states, likelihood=None)
    outputs = oracle.outputs(posterior.tangent.model, problem.x)
    assert posterior.noise_variance == pytest.approx(float((problem.y - outputs).square().mean()), rel=1e-9)
    prediction = posterior.predict(problem.test)
    close(prediction.variance, posterior.latent(problem.test).variance + posterior.noise_variance)
    assert posterior_of(problem, states, likelihood=lw.Gaussian(0.7)).noise_variance == 0.7


@pytest.mark.parametrize("labels", [True, False])
def test_held_out_data_tune_a_posterior_that_no_fit_made(labels):
    """The lines of the docstrings. Logits 20 times too large, and residuals 20 times the trained ones."""
    x, model = torch.randn(300, 3), nn.Linear(3, 2).eval()
    with torch.no_grad():
        y = (
            torch.distributions.Categorical(logits=model(x)).sample()
            if labels
            else model(x) + 0.1 * torch.randn(300, 2)
        )
        model.weight.mul_(20 if labels else 1)
        y[100:] = y[100:] if labels else y[100:] + 2 * torch.randn(200, 2)
    collector = SWAG.collector(model, rank=2)
    for state in wander(model, 3):
        collector.add(state)
    train, held_out, test = ((x[rows], y[rows]) for rows in (slice(100), slice(100, 200), slice(200, None)))
    flat = lw.MeanField.from_variances(model, {"weight": torch.full((2, 3), 1e-4)}, train)
    for posterior in (SWAG.from_snapshots(collector, train), flat):
        tuned, way = lw.Validation(held_out).tune(posterior), lw.scale_factor(posterior, held_out)
        before = posterior.predict(test[0]).log_prob(test[1]).mean()
        assert tuned.predict(test[0]).log_prob(test[1]).mean() > before + 0.1
        assert posterior.predict(test[0], via=way).log_prob(test[1]).mean() > before + 0.1
        assert (tuned.tuned, posterior.tuned) == (True, False)
        assert "tuned by Validation" in repr(tuned)
    given = lw.fit(model, train, likelihood=None if labels else lw.Gaussian(0.1), prior_precision=1.0)
    kept = lw.Validation(held_out, tempered=False).tune(given)
    assert not kept.tuned


def test_no_prior_and_no_evidence():
    problem = Setup(ZOO["mlp"], lw.everything)
    posterior = posterior_of(problem, wander(problem.model, 4))
    assert not isinstance(posterior.covariance, lw.covariance.PriorCovariance)
    assert not posterior.prior_precision
    refused(lambda: posterior.with_prior(2.0), "has no prior precision")
    refused(posterior.log_marginal_likelihood, "has no evidence")
    report = posterior.diagnose()
    assert report.log_evidence is report.effective_parameters is None
    assert "SWAG(rank=4, snapshots=4, scale=0.5)" in str(report)


# --- the user's network ----------------------------------------------------------------------------------------------


@pytest.mark.quick(4)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["cnn_bn_inplace", "gpt2", "tied", "frozen_trunk", "compiled", "weight_norm"])
def test_the_network_is_left_alone(name, training):
    problem = Setup(ZOO[name], lw.everything)
    problem.model.train(training)
    for parameter in oracle.uncompiled(problem.model).parameters():
        parameter.grad = torch.ones_like(parameter)
    states = wander(oracle.uncompiled(problem.model), 3)
    collector = SWAG.collector(problem.model, 2)

    def act() -> None:
        for state in states:
            collector.snapshot()
            collector.add(state)
        posterior = SWAG.from_snapshots(collector, problem.loader)
        posterior.predict(problem.test)
        posterior.sample(2)

    def fail() -> None:
        with pytest.raises(lw.LapwingError):
            SWAG.from_snapshots(collector, [pack(problem.x, problem.y + 10.5)], likelihood="categorical")

    untouched(problem.model, act, fail)


def test_the_posterior_does_not_follow_the_collector():
    problem = Setup(ZOO["mlp"], lw.everything)
    collector = SWAG.collector(problem.model, 3)
    states = wander(problem.model, 8)
    for state in states[:4]:
        collector.add(state)
    posterior = SWAG.from_snapshots(collector, problem.loader)
    before = posterior.latent(problem.test)
    sigma = posterior.covariance.to_dense()
    for state in states[4:]:
        collector.add(state)
    assert torch.equal(posterior.latent(problem.test).mean, before.mean)
    assert torch.equal(posterior.covariance.to_dense(), sigma)
    assert not torch.equal(SWAG.from_snapshots(collector, problem.loader).covariance.to_dense(), sigma)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_snapshots(count):
    problem = setup("mlp")
    with pytest.raises(lw.LapwingError, match=f"SWAG of {count} snapshots of Sequential .* at least 2"):
        posterior_of(problem, wander(problem.model, count))


def test_snapshots_of_another_network():
    model = ZOO["mlp"].build()
    collector = SWAG.collector(model)
    good = model.state_dict()
    before = {name: value.clone() for name, value in collector.mean.items()}
    for bad, said in (
        ({**good, "6.weight": torch.ones(2)}, "6.weight is only in the snapshot"),
        ({name: value for name, value in good.items() if name != "2.bias"}, "2.bias is only in the network"),
        ({**good, "2.weight": torch.ones(5, 7)}, r"shape \(5, 7\) in its 2.weight \(5, 6\)"),
        ({**good, "2.bias": torch.full((5,), torch.nan)}, "NaN or infinite values in its 2.bias"),
        (model, "not Sequential"),
    ):
        with pytest.raises(lw.LapwingError, match=said):
            collector.add(bad)
    assert collector.count == 0
    assert all(torch.equal(before[name], value) for name, value in collector.mean.items())
    with torch.no_grad():
        model[0].weight[0, 0] = torch.inf
    refused(collector.snapshot, "NaN or infinite values in its 0.weight")


def test_a_sample_weight_counts_samples() -> None:
    model, x, y = nn.Linear(3, 1).double(), torch.randn(6, 3).double(), torch.randn(6, 1).double()
    collector = lw.SWAG.collector(model, rank=2)
    for _ in range(3):
        with torch.no_grad():
            model.weight += 0.1
        collector.snapshot()
    counts = torch.tensor([1, 2, 0, 1, 3, 1])
    triples = [(x[:4], y[:4], counts[:4]), (x[4:], y[4:], counts[4:])]  # whole numbers are fine
    weighted = lw.SWAG.from_snapshots(collector, triples, sample_weights=True)
    repeated = lw.SWAG.from_snapshots(collector, [(x.repeat_interleave(counts, 0), y.repeat_interleave(counts, 0))])
    torch.testing.assert_close(weighted.noise_variance, repeated.noise_variance)
    torch.testing.assert_close(weighted.predict(x).std, repeated.predict(x).std)
