"""ELLA's experiments: one pass over images gives the posteriors of `lw.fit`, and the toy is the authors'."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing as lw
from papers.common.images import resized_crops
from papers.ella import by_draws, figure2, table5
from papers.ella.shared import balanced_directions, contracted, curvatures, directions_of, ella_latent


@pytest.fixture
def task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    return model, torch.randn(30, 4).double(), torch.arange(30) % 3


def fit(task, method, delta=2.0, **options):
    model, x, y = task
    return lw.fit(model, [(x, y)], method, params=lw.everything, prior_precision=delta, **options)


def test_one_pass_gives_what_each_posterior_gives(task):
    _, x, _ = task
    diagonal, kfac, full = (fit(task, method) for method in (lw.Diagonal(), lw.KFAC(), lw.Full()))
    ones = {block.name: torch.ones(block.size).double() for block in full.tangent.blocks}
    wide = kfac.with_prior(0.1)
    found = contracted(
        full.tangent, x, None, {"prior": ones, "diagonal": diagonal.covariance.diagonal()},
        {"KFAC": [kfac.covariance, wide.covariance]},
    )  # fmt: skip
    assert torch.allclose(found["diagonal"], diagonal.latent(x).covariance)
    for i, posterior in enumerate((kfac, wide)):
        assert torch.allclose(found[f"KFAC, {i}"], posterior.latent(x).covariance)
    rows = torch.cat([record.rows() for _, record in full.tangent.records(x)])
    assert torch.allclose(found["prior"], rows @ rows.mT)


@pytest.mark.parametrize("residual", [None, "prior"])
def test_ella_from_features_is_the_posterior_of_a_fit(task, residual):
    _, x, _ = task
    posterior = fit(task, lw.ELLA(rank=5, rows="all", residual=residual), delta=0.7)
    samples, outputs = torch.arange(30).repeat_interleave(3), torch.arange(3).repeat(30)
    directions = directions_of(posterior.tangent, x, samples, outputs, 8)
    ones = {block.name: torch.ones(block.size).double() for block in posterior.tangent.blocks}
    part = contracted(posterior.tangent, x, directions, {"prior": ones})
    curvature = curvatures(part["outputs"], part["features"], [0, 30])
    assert not curvature[0].any()
    latent = ella_latent(part, curvature[30][:5, :5], 0.7, residual is not None)
    assert torch.allclose(latent.covariance, posterior.latent(x).covariance)


def test_balanced_rows_have_the_same_number_of_each_class(task):
    _, x, y = task
    posterior = fit(task, lw.Full())
    y = torch.where(y == 2, 1, y)  # 10 and 20 samples
    first, second = (balanced_directions(posterior.tangent, x, y, 6, 4, seed) for seed in (0, 1))
    assert first.shape == (4, posterior.tangent.size)
    assert torch.allclose(first @ first.T, torch.eye(4).double())
    assert not torch.allclose(first, second)
    assert balanced_directions(posterior.tangent, x, y, 60, 4, 0).shape == first.shape  # more rows than samples


def test_the_toy_has_the_network_and_the_divergence_of_the_paper(monkeypatch):
    assert set(table5.METHODS) >= set(table5.PUBLISHED)
    monkeypatch.setattr(table5, "STEPS", 3)
    monkeypatch.setattr(table5, "METHODS", {"KFAC": table5.METHODS["KFAC"]})
    found = table5.illustrative_regression(0)
    std = {name: torch.tensor(found["picture"]["std"][name]) for name in ("LLA", "KFAC")}
    ratio = (std["LLA"] / std["KFAC"]).square()  # of variances, as in the authors' program
    expected = ((ratio - 1 - ratio.log()) / 2).mean()
    assert found["KL(LLA || method)"]["equal noise"]["KFAC"] == pytest.approx(float(expected), rel=1e-4)
    swapped = ((1 / ratio - 1 + ratio.log()) / 2).mean()
    assert found["KL(method || LLA)"]["equal noise"]["KFAC"] == pytest.approx(float(swapped), rel=1e-4)


class TestResizedCrops:
    def test_whole_images_stay(self):
        x = torch.rand(3, 1, 8, 10)
        assert torch.allclose(resized_crops(x, 0, share=(1, 1), ratio=(1, 1), mirror=0), x, atol=1e-6)
        assert torch.allclose(resized_crops(x, 0, share=(1, 1), ratio=(1, 1), mirror=1), x.flip(3), atol=1e-6)

    def test_ramps_show_the_rectangles(self):
        """A ramp stays a ramp: its slope is the side of the rectangle, and its values are those of the image."""
        across = torch.arange(32.0).expand(2000, 1, 32, 32)
        x = torch.cat([across, across.mT], 1)
        crops = resized_crops(x, 1, mirror=0)
        middle = slice(8, 24)  # away from the border, where values are repeated
        wide = crops[:, 0, 16, middle].diff(dim=-1)
        high = crops[:, 1, middle, 16].diff(dim=-1)
        assert torch.allclose(wide, wide[:, :1].expand_as(wide), atol=1e-3)
        area, ratio = wide[:, 0] * high[:, 0], wide[:, 0] / high[:, 0]
        assert 0.08 - 1e-3 <= area.min() < 0.1
        assert area.max() > 0.9
        assert float(area.mean()) == pytest.approx(0.53, abs=0.02)
        assert 3 / 4 - 1e-2 <= ratio.min() < 0.8
        assert 1.25 < ratio.max() <= 4 / 3 + 1e-2
        assert crops.min() >= 0
        assert crops.max() <= 31


def test_the_exact_covariance_of_figure_2_is_that_of_full_laplace(task):
    model, x, _ = task
    exact = figure2.exact_reference(model, x, x[:5], (2.0, 0.5))
    for delta, found in exact.covariances.items():
        torch.testing.assert_close(found, fit(task, lw.Full(), delta).latent(x[:5]).covariance, rtol=0, atol=1e-5)


def test_draws_choose_the_prior_precision_of_the_lowest_nll():
    outputs, features = 4 * torch.randn(80, 5), 2 * torch.randn(80, 5, 3)
    labels = (outputs + 3 * torch.randn(80, 5)).argmax(1)
    part = {"outputs": outputs, "features": features}

    def latent(delta):
        return ella_latent(part, torch.zeros(3, 3).double(), delta)

    def loss(delta):
        prediction = lw.Categorical().predict(latent(delta), by_draws.LINK)
        return -float(prediction.log_prob(labels).double().mean())

    every = [(loss(delta), delta) for delta in by_draws.DELTAS]
    assert by_draws.by_draws(latent, labels) == pytest.approx(min(every))
