"""Noise that depends on the input: shapes and levels against scipy and dense oracles, and the guards of the choice."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from torch import Tensor

import lapwing as lw
from lapwing.likelihoods.input_noise import standardised
from lapwing.tuning.noise_shape import (
    FEW_HELD_OUT,
    LEAST_HELD_OUT,
    LEAST_TRAINING,
    PART_BEYOND,
    RIDGES,
    ResidualRows,
    chosen,
    level,
    loss,
    shapes,
)

INFINITE = math.inf


def rows_of(count: int, seed: int = 0, outputs: int = 1, slope: float = 1.0, df: float = INFINITE) -> ResidualRows:
    """Rows with 4 features. The last one is constant, and the log variance of output c is `slope φ_1 + 0.6 c`."""
    generator = np.random.default_rng(seed)
    features = torch.from_numpy(
        np.c_[generator.normal(size=(count, 3)) * [1.0, 2.0, 0.1] + [0.0, 5.0, 0.0], np.ones(count)]
    )
    if math.isinf(df):
        noise = generator.normal(size=(count, outputs))
    else:
        noise = generator.standard_t(df, size=(count, outputs)) * math.sqrt((df - 2) / df)
    deviation = (0.5 * slope * features[:, :1] + 0.3 * torch.arange(outputs)).exp()
    return of_residuals(features, torch.from_numpy(noise) * deviation)


def of_residuals(features: Tensor, residuals: Tensor, latent: float = 0.0) -> ResidualRows:
    return ResidualRows(features, residuals, torch.ones_like(residuals[:, 0]), torch.full_like(residuals, latent))


def floor_of(rows: ResidualRows) -> Tensor:
    return rows.residuals.square().nanmean(0)


def held_out_of(count: int, latent: float = 0.05, **options: Any) -> ResidualRows:
    return of_residuals(*rows_of(count, **options)[:2], latent)


@pytest.mark.parametrize("df", [INFINITE, 5.0])
def test_shapes_minimise_the_penalised_loss(df):
    rows = rows_of(150, outputs=2, df=4.0)
    rows.residuals[:40, 1] = math.nan
    found = shapes(rows, floor_of(rows), df=df)
    z = ((rows.features - rows.features.mean(0)) / rows.features.std(0, correction=0))[:, :3].clamp(-6, 6).numpy()
    for k, ridge in enumerate(RIDGES):
        for c in range(2):
            known = ~rows.residuals[:, c].isnan().numpy()
            residuals = rows.residuals[:, c].numpy()[known]

            def penalised(point, known=known, residuals=residuals, ridge=ridge):
                scale = np.exp(0.5 * (z[known] @ point[:3] + point[3]))
                scaled = stats.norm(scale=scale) if math.isinf(df) else stats.t(df, scale=scale * math.sqrt(1 - 2 / df))
                penalty = 0.0 if math.isinf(ridge) else ridge * (point[:3] ** 2).sum()
                return (penalty - scaled.logpdf(residuals).sum()) / known.sum()

            if math.isinf(ridge):
                constant = optimize.minimize_scalar(lambda b: penalised(np.array([0, 0, 0, b])))
                assert not found[k].weights.any()
                assert float(found[k].offset[c]) == pytest.approx(constant.x, abs=1e-2)
                continue
            best = optimize.minimize(penalised, np.zeros(4), tol=1e-10)
            ours = torch.cat([found[k].weights[c, :3], found[k].offset[c : c + 1]]).numpy()
            assert penalised(ours) <= best.fun + 2e-6
            assert np.abs(ours - best.x).max() < 0.01
        assert not found[k].weights[:, 3].any()  # the constant feature


def test_shapes_recover_the_slope_and_hold_its_range():
    rows = rows_of(4000, df=5.0)
    noise = shapes(rows, floor_of(rows))[2]
    assert torch.allclose(noise.weights[0], torch.tensor([1.0, 0.0, 0.0, 0.0]).double(), atol=0.08)
    slope = standardised(rows.features, noise.centre, noise.scale) @ noise.weights[0]
    assert float((slope < noise.low).double().mean()) == pytest.approx(PART_BEYOND, abs=1e-3)
    assert float((slope > noise.high).double().mean()) == pytest.approx(PART_BEYOND, abs=1e-3)
    far = rows.features[:5] + torch.tensor([100.0, 0.0, 0.0, 0.0])
    assert torch.allclose((noise.offset + noise.slope(far)), noise.offset + noise.high)


def test_more_than_256_features_are_projected():
    generator = torch.Generator().manual_seed(0)
    hidden, mixing = torch.randn(600, 5, generator=generator), torch.randn(5, 300, generator=generator)
    features = (hidden @ mixing + 0.01 * torch.randn(600, 300, generator=generator)).double()
    residuals = torch.randn(600, 1, generator=generator).double() * (0.7 * hidden[:, :1].double()).exp()
    noise = shapes(of_residuals(features, residuals), residuals.square().mean(0))[2]
    assert noise.weights.shape == (1, 300)
    assert noise.whitening.shape == (300, 256)
    fitted, wanted = (noise.offset + noise.slope(features))[:, 0], 1.4 * hidden[:, 0].double()
    assert float(torch.corrcoef(torch.stack([fitted, wanted]))[0, 1]) > 0.9


@pytest.mark.parametrize("df", [INFINITE, 6.0, None])
def test_level_minimises_the_loss(df):
    rows = held_out_of(120, df=5.0)
    rows = rows._replace(latent=0.2 * rows.features[:, 1:2].square() / 25)
    slopes, floor = rows.features[None, :, :1], floor_of(rows)
    ones, far = torch.ones(1, 120).double(), torch.zeros(120, 1, dtype=torch.bool)

    def objective(point):
        nu = df if df is not None else min(3 + 4 * math.exp(point[2]), 1000.0)
        noise, latent = (slopes[0, :, 0] + point[0]).exp(), rows.latent[:, 0] * math.exp(point[1])
        total = (noise + latent).numpy()
        if math.isinf(nu):
            logs = stats.norm(scale=np.sqrt(total)).logpdf(rows.residuals[:, 0])
        else:
            each = nu * total / noise.numpy()
            logs = stats.t(each, scale=np.sqrt(total * (each - 2) / each)).logpdf(rows.residuals[:, 0])
        return -logs.mean() + (0.25 * point[1] ** 2 + 0.1 * point[2] ** 2) / 120

    best = optimize.minimize(objective, np.array([-0.5, 0.0, 0.0]), method="Nelder-Mead", options={"maxiter": 2000})
    offset, spread, nu, losses = level(slopes, rows, ones, df, floor, far)
    tail = 0.0 if df is not None else math.log((float(nu) - 3) / 4)
    assert objective([float(offset), math.log(float(spread)), tail]) <= best.fun + 5e-6
    prior = (0.25 * math.log(float(spread)) ** 2 + 0.1 * tail**2) / 120
    assert float(losses.mean()) + prior == pytest.approx(objective([float(offset), math.log(float(spread)), tail]))
    assert df is None or float(nu) == df


@pytest.mark.parametrize("df", [3.0, 5.0])
def test_loss_is_close_to_the_sum_of_student_noise_and_a_normal(df):
    """KL divergence from a mixture of 20 000 normals, which is the exact law, at several shares of the noise."""
    grid = torch.linspace(-60, 60, 24_001).double()
    weights = stats.chi2.ppf((np.arange(5_000) + 0.5) / 5_000, df) / df
    for noise in (1.0, 0.7, 0.4, 0.1):
        total = noise * (df - 2) / df / weights + 1 - noise
        exact = np.array([stats.norm.pdf(x, scale=np.sqrt(total)).mean() for x in grid[::60].tolist()])
        ours = -loss(grid[::60].square(), torch.tensor(noise).double(), df, torch.tensor(1 - noise).double()).numpy()
        assert abs(integrate.trapezoid(exact * (np.log(exact) - ours), grid[::60])) < 0.004


def test_weights_count_as_repeated_rows():
    rows = rows_of(80, outputs=2)
    counts = torch.arange(80) % 3
    repeated, weighted = rows.taken(torch.arange(80).repeat_interleave(counts)), rows._replace(weights=counts.double())
    floor = floor_of(repeated)
    for one, other in zip(shapes(repeated, floor), shapes(weighted, floor), strict=True):
        for name, value in one.tensors.items():
            assert torch.allclose(value, other.tensors[name], atol=2e-3), name  # the minimiser stops early
    both = []
    for part in (repeated, weighted):
        slopes, far = torch.zeros(1, len(part.features), 2).double(), torch.zeros(len(part.features), 1).bool()
        both.append(level(slopes, part, torch.ones(1, len(part.features)), None, floor, far))
    assert torch.allclose(both[0][0], both[1][0], atol=1e-3)
    assert torch.allclose(both[0][2], both[1][2], rtol=0.02)


def test_held_out_rows_choose_the_input_and_the_tails():
    train, held_out = rows_of(1000, df=4.0, outputs=3), held_out_of(400, df=4.0, outputs=3, seed=1)
    train.residuals[::7, 1] = math.nan
    held_out.residuals[::5, 2] = math.nan
    floor = floor_of(held_out)
    noise = chosen(train, floor, held_out)
    assert noise is not None
    assert 3 <= float(noise.df) < 8
    fresh = held_out_of(2000, df=4.0, outputs=3, seed=2)
    ours = loss(
        fresh.residuals.square(), noise.variance(fresh.features, noise.spread * fresh.latent), noise.df,
        noise.spread * fresh.latent,
    )  # fmt: skip
    total = floor + fresh.latent
    normal = 0.5 * (2 * math.pi * total).log() + 0.5 * fresh.residuals.square() / total
    assert float(normal.nansum(1).mean() - ours.sum(1).mean()) > 0.5
    wanted = fresh.features[:, :1] + 0.6 * torch.arange(3)
    middle = (fresh.features[:, 0].abs() < 1.5) & ~noise.is_far(fresh.features)[:, 0]
    assert float(((noise.offset + noise.slope(fresh.features)) - wanted)[middle].abs().mean()) < 0.35
    again = chosen(train, floor, held_out)
    assert again is not None
    assert all(torch.equal(value, again.tensors[name]) for name, value in noise.tensors.items())


@pytest.mark.parametrize("part", [0.5, 1.0])
def test_a_wide_covariance_does_not_hide_the_noise(part):
    """One noise variance may ask for a wide latent. Other noise is compared at a factor of the latent of its own."""
    train = rows_of(2000, seed=1)
    residual = floor_of(train)
    noise = chosen(train, 0.1 * residual, held_out_of(150, latent=part * float(residual), seed=2))
    assert noise is not None
    assert noise.spread < 0.3


@pytest.mark.parametrize("seed", range(4))
def test_constant_normal_noise_stays(seed):
    train, held_out = rows_of(500, slope=0.0, seed=seed), held_out_of(250, latent=0.01, slope=0.0, seed=100 + seed)
    assert chosen(train, floor_of(held_out), held_out) is None
    assert chosen(train, floor_of(train)) is None


def test_few_rows_keep_todays_law():
    few = held_out_of(LEAST_HELD_OUT - 1, slope=3.0, seed=1)
    assert chosen(rows_of(1000, slope=3.0), floor_of(few), few) is None
    train = rows_of(LEAST_TRAINING - 1, slope=3.0)
    assert chosen(train, floor_of(train)) is None
    student = chosen(train, floor_of(train), normal=False)  # a Student was asked for
    assert student is not None
    assert not student.weights.any()


def test_few_held_out_rows_must_gain_more():
    """A gain between 1 and `FEW_ERRORS` standard errors counts from `FEW_HELD_OUT` rows."""
    kept = []
    for seed in range(12):
        train, held_out = rows_of(300, slope=0.4), held_out_of(FEW_HELD_OUT, slope=0.4, seed=seed + 1)
        fewer = held_out.taken(torch.arange(FEW_HELD_OUT - 1))
        kept.append([chosen(train, floor_of(rows), rows) is not None for rows in (held_out, fewer)])
    enough, few = map(sum, zip(*kept, strict=True))
    assert few < enough


def test_without_held_out_rows_the_level_grows_from_training_rows_to_new_ones():
    train = rows_of(1500, df=4.0)
    floor = floor_of(train)
    noise, wider, narrower = (chosen(train, factor * floor) for factor in (1.0, 4.0, 0.25))
    assert noise is not None
    assert float(noise.spread) == 1
    assert 3 <= float(noise.df) < 10
    torch.testing.assert_close(wider.offset, noise.offset + math.log(4))
    torch.testing.assert_close(narrower.offset, noise.offset)


def test_each_output_has_its_own_level():
    """An output that the network knows by heart does not widen another one; their units differ."""
    train = rows_of(1500, outputs=2)
    both = torch.cat([train.residuals[:, :1], 1e-6 * train.residuals[:, 1:]], 1)
    known, plain = (chosen(train._replace(residuals=both), floor_of(train) * torch.tensor([1.0, scale]).double())
                    for scale in (1.0, 1e-12))  # fmt: skip
    torch.testing.assert_close(known.offset[0], plain.offset[0], rtol=0, atol=0.1)


def test_a_few_rows_of_large_noise_do_not_decide_the_level():
    train = rows_of(1500)
    residuals = train.residuals.clone()
    residuals[:30] *= 30  # gross errors
    train = train._replace(residuals=residuals)
    noise = chosen(train, floor_of(train))
    typical = (noise.offset + noise.slope(train.features)).exp()[30:]
    assert 0.3 < (residuals[30:].square() / typical).mean() < 1.5
    assert typical.mean() < 0.1 * floor_of(train)  # their mean square


def test_given_options_are_kept():
    train, held_out = rows_of(600, slope=0.0), held_out_of(250, slope=0.0, seed=1)
    floor = floor_of(held_out)
    forced = chosen(train, floor, held_out, noise="input", df=INFINITE)
    assert forced is not None
    assert forced.weights.any()
    assert math.isinf(float(forced.df))
    constant = chosen(train, floor, held_out, noise="constant", df=4.5, normal=False)
    assert constant is not None
    assert not constant.weights.any()
    assert float(constant.df) == 4.5
    student = chosen(rows_of(600), floor, held_out_of(250, seed=1), normal=False)
    assert student is not None
    assert student.weights.any()


@pytest.mark.parametrize(("spread", "df"), [(0.2, 3.0), (3.0, 4.0), (0.5, INFINITE)])
def test_far_from_the_data_no_interval_is_narrower_than_todays(spread, df):
    rows = rows_of(400)
    noise = shapes(rows, torch.tensor([0.7]).double())[3]
    noise = replace(noise, spread=spread, df=df)
    far = rows.features[:20] + torch.tensor([-9.0, 0.0, 0.0, 0.0])  # where wᵀz is least
    assert noise.is_far(far).all()
    assert 0 < float(noise.is_far(rows.features).double().mean()) <= PART_BEYOND
    for today in (0.01, 0.5, 20.0):
        latent = torch.full((20, 1), spread * today).double()
        assert ((noise.offset + noise.slope(far)).exp() < 0.3).all()
        variance = float(noise.variance(far, latent)[0, 0])
        draws = stats.norm.ppf((np.arange(4_000) + 0.5) / 4_000) * math.sqrt(spread * today)
        tail = stats.norm if math.isinf(df) else stats.t(df)
        scale = math.sqrt(variance if math.isinf(df) else variance * (df - 2) / df)
        for level_ in (0.5, 0.9, 0.99):
            half = stats.norm.ppf(0.5 + level_ / 2) * math.sqrt(0.7 + today)
            inside = (tail.cdf((half - draws) / scale) - tail.cdf((-half - draws) / scale)).mean()
            assert inside <= level_ + 2e-3


def test_a_gap_between_the_data_is_far():
    x = torch.cat([torch.linspace(-3, -1, 300), torch.linspace(1, 3, 300)]).double()

    def features(x: Tensor) -> Tensor:
        return torch.relu(x[:, None] - torch.linspace(-3, 3, 13).double())

    noise = shapes(of_residuals(features(x), torch.ones_like(x)[:, None]), torch.ones(1).double())[0]
    assert noise.is_far(features(torch.linspace(-0.6, 0.6, 9).double())).all()
    assert noise.is_far(features(torch.tensor([-30.0, 6.0, 30.0]).double()))[1:].all()


@pytest.mark.parametrize("likelihood", [lw.Gaussian(noise="input"), lw.StudentT()], ids=repr)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_fit_of_one_row_has_constant_noise(likelihood, rows):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).eval()
    x, y = torch.randn(rows, 3), torch.randn(rows, 1)
    assert lw.fit(model, (x, y), likelihood=likelihood).predict(torch.randn(5, 3)).std.isfinite().all()
