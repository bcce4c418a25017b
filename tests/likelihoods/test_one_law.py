"""The law `y = f + √(r σ²) e` with normal or Student t noise, and quantiles, PIT and CRPS of all real predictions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy import integrate, stats
from torch import distributions as dist

import lapwing as lw
from lapwing.covariance import JointLatent, LatentDraws, LinearDraws
from lapwing.covariance.latent import SelectedLatent
from lapwing.covariance.terms import DenseTerm
from lapwing.likelihoods import HeteroscedasticGaussian, MixturePrediction, Poisson
from lapwing.likelihoods.ensemble import mixed
from lapwing.likelihoods.regression import RegressionPrediction
from lapwing.likelihoods.student import noise_nodes, student_normals
from tests.likelihoods.latents import dense_latent

F64 = torch.float64
NOISE = 0.5
KINDS = ("dense", "joint", "draws", "joint draws", "linear", "joint linear")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def latent_of(kind, size=2, batch=3):
    mean, root, draws = random(batch, size), random(batch * size, batch * size, seed=1), random(9, batch, size, seed=2)
    covariance = (root @ root.T / size).reshape(batch, size, batch, size)
    return {
        "dense": lambda: dense_latent(mean, covariance.diagonal(dim1=0, dim2=2).movedim(-1, 0)),
        "joint": lambda: JointLatent(mean, covariance),
        "draws": lambda: LatentDraws(draws),
        "joint draws": lambda: LatentDraws(draws, joint=True),
        "linear": lambda: LinearDraws(mean, draws),
        "joint linear": lambda: LinearDraws(mean, draws, joint=True),
    }[kind]()


def prediction_of(kind="dense", df=4.0, size=2, missing=False, batch=3):
    latent = latent_of(kind, size, batch)
    ratios = torch.linspace(0.2, 3.0, latent.mean.numel(), dtype=F64).reshape(latent.mean.shape)
    return RegressionPrediction(latent, NOISE, missing, ratios, df)


# ---- the mixture of 16 normals


@pytest.mark.parametrize(
    ("df", "density", "below"), [(3, 7e-3, 5e-4), (4, 1e-3, 1e-4), (6, 1e-4, 1e-5), (10, 1e-4, 1e-6), (30, 1e-2, 1e-6)]
)
def test_sixteen_normals_are_a_student_t(df, density, below):
    weights, variances = student_normals(df)
    assert len(weights) == 16
    assert float(weights.sum()) == pytest.approx(1, rel=1e-14)
    assert float((weights * variances).sum()) == pytest.approx(1, rel=1e-14)
    exact = stats.t(df, scale=math.sqrt(1 - 2 / df))
    y = torch.linspace(0, 10, 101, dtype=F64)
    logs = (weights * dist.Normal(0.0, variances.sqrt()).log_prob(y[:, None]).exp()).sum(1).log()
    torch.testing.assert_close(logs, torch.from_numpy(exact.logpdf(y)), rtol=0, atol=density)
    y = torch.from_numpy(exact.ppf(torch.linspace(0.005, 0.5, 50, dtype=F64)))
    mass = (weights * torch.special.ndtr(y[:, None] / variances.sqrt())).sum(1)
    torch.testing.assert_close(mass, torch.from_numpy(exact.cdf(y)), rtol=0, atol=below)
    nodes, chances = noise_nodes(y, float(df))
    assert float((chances * nodes.square()).sum()) == pytest.approx(1, rel=1e-6)


# ---- one law


@pytest.mark.parametrize("df", [None, 3.0, 6.0])
@pytest.mark.parametrize("kind", KINDS)
def test_all_results_of_one_output_come_from_one_density(kind, df):
    """Integrates the density of each of two inputs."""
    prediction = prediction_of(kind, df, size=1, batch=2)
    y = torch.tensor([[0.3], [-1.4]], dtype=F64)
    t, step = torch.linspace(-200, 200, 80_001, dtype=F64), 400 / 80_000
    for b in range(2):
        means, variances, weights = (values[:, b % len(values[0])] for values in prediction._normals)
        density = (weights * (-0.5 * (t - means).square() / variances).exp() / (2 * math.pi * variances).sqrt()).sum(0)
        at = int(((y[b, 0] + 200) / step).round())
        assert float(prediction.log_prob(y)[b]) == pytest.approx(float(density[at].log()), abs=1e-9)
        assert float(density.sum() * step) == pytest.approx(1, abs=1e-4)
        assert float(prediction.pit(y)[b]) == pytest.approx(
            float(density[:at].sum() + density[at] / 2) * step, abs=1e-5
        )
        below = density.cumsum(0) * step - density * step / 2
        score = (below - (t >= y[b]).double()).square().sum() * step
        assert float(prediction.crps(y)[b]) == pytest.approx(float(score), abs=6e-3)
        if "draws" not in kind:  # their variance is the unbiased one
            square = (density * (t - prediction.mean[b]).square()).sum() * step
            assert float(prediction.variance[b]) == pytest.approx(float(square), rel=2e-2 if df == 3 else 1e-4)
    if "joint" not in kind:
        torch.testing.assert_close(prediction.distribution().log_prob(y), prediction.log_prob(y))


@pytest.mark.parametrize("df", [None, 3.0])
@pytest.mark.parametrize("kind", KINDS)
def test_quantiles_intervals_draws_and_pit_agree(kind, df):
    prediction = prediction_of(kind, df)
    for p in (0.005, 0.3, 0.5, 0.995):
        torch.testing.assert_close(
            prediction.pit(prediction.quantile(p)), torch.full_like(prediction.mean, p), rtol=1e-9, atol=0
        )
    torch.testing.assert_close(torch.stack(prediction.interval(0.9)),
                               torch.stack([prediction.quantile(0.05), prediction.quantile(0.95)]))  # fmt: skip
    draws = prediction.sample(8000)
    ranks = torch.stack([prediction.pit(y) for y in draws[:1000]])
    for c in range(2):
        assert stats.kstest(ranks[:, 1, c].numpy(), "uniform").pvalue > 1e-3
    scores = torch.stack([(draws - y).abs().mean(0) for y in draws[:2]])
    spread = (draws[:4000] - draws[4000:]).abs().mean(0)
    torch.testing.assert_close(prediction.crps(draws[0]), scores[0] - 0.5 * spread, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_distribution_has_the_density_and_the_draws(kind):
    prediction = prediction_of(kind, 6.0)
    family, joint = prediction.distribution(), prediction.latent.joint
    assert family.batch_shape + family.event_shape == ((6,) if joint else (3, 2))
    y = prediction.sample(3)
    if not joint:
        for one in y:
            torch.testing.assert_close(family.log_prob(one), prediction.log_prob(one))
        assert family.log_prob(y).shape == (3, 3)
    torch.manual_seed(0)
    draws = family.sample((20_000,)).reshape(20_000, 3, 2)
    assert draws.dtype == F64
    second = draws.flatten(1).T.cov(correction=0)
    wanted = prediction.sample(20_000).flatten(1).T.cov(correction=0)
    if not joint:  # inputs are independent there, and in draws of the latent of weight draws they are not
        keep = torch.block_diag(*[torch.ones(2, 2)] * 3)
        second, wanted = keep * second, keep * wanted
    torch.testing.assert_close(second, wanted, rtol=0.12, atol=0.12)
    torch.testing.assert_close(family.variance.reshape(3, 2), wanted.diagonal().reshape(3, 2), rtol=0.12, atol=0)


# ---- several outputs


def exact_log_prob(prediction, y):
    """The sum over all 16^C combinations of normals of the C outputs."""
    weights, variances = student_normals(prediction.df)
    size = y.shape[-1]
    picked = torch.cartesian_prod(*[torch.arange(16)] * size)
    logs = []
    for b in range(len(y)):
        noise = NOISE * prediction.noise_ratios[b] * variances[picked]  # (16^C, C)
        covariance = prediction.latent.own_covariance[b] + noise.diag_embed()
        family = dist.MultivariateNormal(prediction.mean[b], covariance)
        logs.append((family.log_prob(y[b]) + weights.log()[picked].sum(-1)).logsumexp(0))
    return torch.stack(logs)


@pytest.mark.parametrize("kind", ["dense", "joint", "linear", "joint linear"])
@pytest.mark.parametrize(("size", "atol"), [(2, 0.02), (3, 0.1)])
def test_density_of_several_outputs_against_all_combinations(kind, size, atol):
    prediction = prediction_of(kind, 4.0, size)
    errors = []
    for y in prediction.sample(20, torch.Generator().manual_seed(1)):
        errors.append(prediction.log_prob(y) - exact_log_prob(prediction, y))
    errors = torch.stack(errors)
    assert errors.abs().max() < 5 * atol
    assert errors.mean().abs() < atol


def test_independent_outputs_have_the_product_of_densities():
    """Exact for 8 outputs: the marginals of one output, and their sum of logarithms."""
    mean, variances = random(3, 8), random(3, 8, seed=1).square()
    prediction = RegressionPrediction(dense_latent(mean, variances.diag_embed()), NOISE, df=3.0)
    y = prediction.sample(1)[0]
    alone = [
        RegressionPrediction(dense_latent(mean[:, c : c + 1], variances[:, c : c + 1, None]), NOISE, df=3.0).log_prob(
            y[:, c]
        )
        for c in range(8)
    ]
    torch.testing.assert_close(prediction.log_prob(y), torch.stack(alone).sum(0))


def test_an_outlier_of_one_output_does_not_move_the_others():
    """With a common scale of all outputs the density of the second output would widen."""
    prediction = prediction_of("linear", 3.0)
    y = prediction.mean.clone()
    usual = prediction.log_prob(y)
    y[:, 0] += 1e4
    with_hole = y.clone()
    with_hole[:, 0] = torch.nan
    missing = replace(prediction, missing=True)
    rest = missing.log_prob(with_hole)
    y[:, 1] = torch.nan
    first = missing.log_prob(y)
    y[:, 1] = prediction.mean[:, 1]
    torch.testing.assert_close(missing.log_prob(y), first + rest, rtol=1e-3, atol=1e-3)
    assert (usual > first).all()


# ---- noise that depends on the input


@pytest.mark.parametrize("df", [None, 5.0])
def test_ratios_of_each_input_are_those_of_predictions_of_one_input(df):
    for kind in ("dense", "draws", "linear"):
        whole = prediction_of(kind, df, 3, missing=True)
        y = whole.sample(1)[0]
        y[1, 2] = torch.nan
        for b in range(3):
            latent, row = whole.latent, slice(b, b + 1)
            if kind == "dense":
                part = latent.taken(torch.tensor([b]))
            elif kind == "draws":
                part = LatentDraws(latent.draws[:, row])
            else:
                part = LinearDraws(latent.mean[row], latent.deviations[:, row])
            one = RegressionPrediction(part, NOISE, True, tuple(whole.noise_ratios[b].tolist()), df)
            for name in ("log_prob", "pit", "crps"):
                torch.testing.assert_close(
                    getattr(whole, name)(y)[row], getattr(one, name)(y[row]), equal_nan=True, rtol=1e-9, atol=1e-9
                )
            for name in ("mean", "variance", "aleatoric_variance"):
                torch.testing.assert_close(getattr(whole, name)[row], getattr(one, name))
            torch.testing.assert_close([end[row] for end in whole.interval()], [*one.interval()])
            moved = [p.transformed(torch.tanh) for p in (whole, one)]
            torch.testing.assert_close(moved[0].mean[row], moved[1].mean)
            torch.testing.assert_close(moved[0].aleatoric_variance[row], moved[1].aleatoric_variance)
            scaled = [p.scaled(2.0, 3.0).log_prob(2 + 3 * part) for p, part in ((whole, y), (one, y[row]))]
            torch.testing.assert_close(scaled[0][row], scaled[1])
            both = [mixed((p, replace(p, noise_variance=2 * NOISE))) for p in (whole, one)]
            torch.testing.assert_close(both[0].log_prob(y)[row], both[1].log_prob(y[row]))
            torch.testing.assert_close(both[0].quantile(0.2)[row], both[1].quantile(0.2))
            torch.testing.assert_close(both[0].variance[row], both[1].variance)
        assert whole.pit(y).isnan().sum() == whole.crps(y).isnan().sum() == 1
        assert len(whole.for_metrics(y)["crps"]) == 8


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["joint", "joint linear", "joint draws"])
def test_ratios_of_each_input_in_joint_distributions(kind, batch):
    prediction = prediction_of(kind, None, batch=batch)
    noise = (NOISE * prediction.noise_ratios).flatten()
    y = random(2 * batch, seed=4)
    if kind == "joint draws":
        draws = prediction.latent.draws.flatten(1)
        wanted = dist.Normal(draws, noise.sqrt()).log_prob(y).sum(1).logsumexp(0) - math.log(len(draws))
    else:
        covariance = prediction.latent.covariance.reshape(2 * batch, -1) + noise.diag()
        wanted = dist.MultivariateNormal(prediction.mean.flatten(), covariance).log_prob(y)
    torch.testing.assert_close(prediction.distribution().log_prob(y), wanted)


@pytest.mark.parametrize("df", [None, 5.0])
def test_ratios_of_selected_outputs(df):
    whole = prediction_of("dense", df, 3)
    outputs = torch.tensor([[0, 2], [1, 0], [2, 1]])
    covariance = torch.stack([k[i][:, i] for k, i in zip(whole.latent.covariance, outputs, strict=True)])
    latent = SelectedLatent(
        whole.mean.gather(1, outputs), (DenseTerm(covariance),), outputs=outputs, every_mean=whole.mean
    )
    part = replace(whole, latent=latent)
    for name in ("mean", "variance", "aleatoric_variance"):
        torch.testing.assert_close(getattr(part, name), getattr(whole, name).gather(1, outputs))
    torch.testing.assert_close(part.quantile(0.9), whole.quantile(0.9).gather(1, outputs))
    ratios = (1.0, 4.0, 9.0)  # of each output
    part, whole = replace(part, noise_ratios=ratios), replace(whole, noise_ratios=ratios)
    torch.testing.assert_close(part.variance, whole.variance.gather(1, outputs))


# ---- ensembles


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", ["dense", "draws", "linear"])
def test_ensembles_of_student_t_noise(kind, size):
    members = tuple(prediction_of(kind, df, size) for df in (3.0, 8.0, None))
    mixture = mixed(members)
    y = members[0].sample(1)[0]
    logs = torch.stack([member.log_prob(y) for member in members]).logsumexp(0) - math.log(3)
    torch.testing.assert_close(mixture.log_prob(y), logs)
    torch.testing.assert_close(mixture.distribution().log_prob(y), logs, rtol=0, atol=1e-4)
    torch.testing.assert_close(mixture.mean, members[0].mean)
    torch.testing.assert_close(mixture.pit(y), torch.stack([member.pit(y) for member in members]).mean(0))
    torch.testing.assert_close(mixture.pit(mixture.quantile(0.07)), torch.full_like(y, 0.07))
    draws = mixture.sample(9000)
    torch.testing.assert_close((draws <= y).double().mean(0), mixture.pit(y), rtol=0, atol=0.025)
    spread = (draws[:4500] - draws[4500:]).abs().mean(0)
    torch.testing.assert_close(mixture.crps(y), (draws - y).abs().mean(0) - spread / 2, rtol=0.05, atol=0.05)


# ---- all predictions of real values


def real_predictions():
    mean, root = random(3, 2), random(3, 2, 2, seed=1)
    latent = dense_latent(mean, root @ root.mT)
    gamma = dist.Gamma(1 + random(3, 5, 2).square(), torch.ones(3, 5, 2, dtype=F64))
    normals = dist.Normal(random(3, 5, 2), 0.1 + random(3, 5, 2, seed=1).square())
    regression = prediction_of("dense", 8.0)
    return {
        "normal": prediction_of("dense", None),
        "student": regression,
        "draws": prediction_of("draws", None),
        "scaled": regression.scaled([1.0, 9.0], [2.0, 0.1]),
        "rising": regression.transformed(lambda y: y + y.abs().sqrt() * y.sign()),
        "falling": regression.scaled(1.0, 2.0).transformed(lambda y: torch.cat([-y[..., :1], -y[..., 1:].tanh()], -1)),
        "heteroscedastic": HeteroscedasticGaussian().predict(latent_of("dense", 4)),
        "heteroscedastic draws": HeteroscedasticGaussian().predict(latent_of("draws", 4)),
        "poisson": Poisson().predict(latent),
        "poisson draws": Poisson().predict(latent_of("draws")),
        "gamma": MixturePrediction(dist.Independent(gamma, 1)),
        "normals": MixturePrediction(dist.Independent(normals, 1)),
        "ensemble": mixed((regression, prediction_of("dense", None))),
    }


@pytest.mark.parametrize("name", real_predictions())
def test_quantile_pit_and_crps_against_draws(name):
    """Bounds are four standard errors of 8 000 draws, and those of the 4 096 draws of families without formulas."""
    prediction = real_predictions()[name]
    draws = prediction.sample(8000, torch.Generator().manual_seed(3))
    y = draws[0]
    torch.testing.assert_close(prediction.pit(y).double(), (draws <= y).double().mean(0), rtol=0, atol=0.04)
    for p in (0.05, 0.5, 0.8):
        quantile = prediction.quantile(p)
        assert quantile.shape == prediction.mean.shape
        inside = (draws <= quantile).double().mean(0)
        before = (draws < quantile).double().mean(0)
        assert ((inside > p - 0.04) & (before < p + 0.04)).all()
        assert (prediction.pit(quantile) > p - 0.02).all()
    torch.testing.assert_close(torch.stack(prediction.interval(0.6)),
                               torch.stack([prediction.quantile(0.2), prediction.quantile(0.8)]))  # fmt: skip
    spread = (draws[:4000] - draws[4000:]).abs().mean(0)
    torch.testing.assert_close(prediction.crps(y), (draws - y).abs().mean(0) - spread / 2, rtol=0.08, atol=0.08)
    torch.testing.assert_close(prediction.for_metrics(y)["crps"], prediction.crps(y))
    if name in ("gamma", "normals"):
        y[0, 0] = torch.nan
        assert prediction.pit(y).isnan().sum() == prediction.crps(y).isnan().sum() == 1


def test_normal_crps_and_pit_are_the_closed_forms():
    prediction = prediction_of("dense", None)
    y = random(3, 2, seed=5)
    z = (y - prediction.mean) / prediction.std
    density, below = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi), torch.special.ndtr(z)
    crps = prediction.std * (z * (2 * below - 1) + 2 * density - 1 / math.sqrt(math.pi))
    torch.testing.assert_close(prediction.crps(y), crps)
    torch.testing.assert_close(prediction.pit(y), below)


def test_functions_of_y_beyond_their_range():
    prediction = prediction_of("dense", 4.0).transformed(torch.tanh)
    assert bool((prediction.pit(torch.full((3, 2), 1.5, dtype=F64)) == 1).all())
    assert bool((prediction.pit(torch.full((3, 2), -1.5, dtype=F64)) == 0).all())
    falling = prediction_of("dense", 4.0).transformed(lambda y: -torch.tanh(y))
    assert bool((falling.pit(torch.full((3, 2), 1.5, dtype=F64)) == 1).all())


def test_positions_have_the_shape_of_the_outputs():
    x, y = random(20, 4, 3).float(), random(20, 4, 2, seed=1).float()
    prediction = lw.fit(torch.nn.Linear(3, 2).eval(), [(x, y)], lw.Full(), prior_precision=1.0).predict(x)
    for name in ("pit", "crps"):
        values = getattr(prediction, name)(y)
        assert values.shape == y.shape
        assert torch.equal(values.flatten(0, 1), getattr(prediction.rows, name)(y.flatten(0, 1)))
    assert prediction.quantile(0.1).shape == y.shape
    torch.testing.assert_close(prediction.pit(prediction.quantile(0.1)), torch.full_like(y, 0.1))


# ---- brute force


@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("df", [3.0, 10.0])
def test_against_the_exact_student_t(df, ratio):
    """The convolution of a Student t and a normal, integrated by scipy."""
    latent = dense_latent(torch.zeros(1, 1, dtype=F64), torch.full((1, 1, 1), ratio, dtype=F64))
    prediction = RegressionPrediction(latent, 1.0, df=df)
    noise = stats.t(df, scale=math.sqrt(1 - 2 / df))
    nodes = torch.linspace(-8, 8, 401, dtype=F64)
    weights = (-0.5 * nodes.square()).softmax(0)
    at = math.sqrt(ratio) * nodes

    def below(y):
        return float((weights * torch.from_numpy(noise.cdf(y - at))).sum())

    atol = 1e-3 if df == 3 else 1e-6
    for y in (0.0, 0.7, 3.0, 10.0):
        target = torch.tensor([[y]], dtype=F64)
        density = float((weights * torch.from_numpy(noise.pdf(y - at))).sum())
        assert float(prediction.log_prob(target)) == pytest.approx(math.log(density), abs=8 * atol if df == 3 else 1e-3)
        assert float(prediction.pit(target)) == pytest.approx(below(y), abs=atol)
        if y < 10:
            parts = [(-math.inf, -10), (-10, y), (y, y + 10), (y + 10, math.inf)]
            score = sum(
                integrate.quad(lambda t, y=y: (below(t) - (t >= y)) ** 2, *ends, limit=100)[0] for ends in parts
            )
            assert float(prediction.crps(target)) == pytest.approx(score, abs=3 * atol)


# ---- dtypes and gradients


def test_float32_and_bfloat16():
    for dtype in (torch.float32, torch.bfloat16):
        latent = dense_latent(random(3, 2).to(dtype), torch.eye(2).expand(3, 2, 2).to(dtype))
        prediction = RegressionPrediction(latent, NOISE, df=4.0)
        y = random(3, 2).to(dtype)
        mixture = mixed((prediction, prediction))
        results = [prediction.log_prob(y), prediction.pit(y), prediction.crps(y), prediction.quantile(0.3),
                   prediction.sample(2), prediction.variance, prediction.distribution().log_prob(y.float()),
                   prediction.distribution().sample((2,)), mixture.quantile(0.3), mixture.crps(y), mixture.sample(2),
                   prediction.transformed(torch.tanh).mean,
                   prediction.transformed(torch.tanh).pit(y.tanh())]  # fmt: skip
        assert {result.dtype for result in results} == {torch.float32}
        assert all(result.isfinite().all() for result in results)


@pytest.mark.parametrize("kind", ["dense", "draws", "linear"])
def test_results_are_differentiable(kind):
    whole = prediction_of(kind, 4.0)
    latent, y = whole.latent, random(3, 2, seed=3)
    leaf = (latent.draws if kind == "draws" else latent.mean).clone().requires_grad_()

    def of(values):
        moved = LatentDraws(values) if kind == "draws" else replace(latent, mean=values)
        prediction = replace(whole, latent=moved)
        return (
            prediction.log_prob(y),
            prediction.pit(y),
            prediction.quantile(0.8),
            mixed((prediction, whole)).quantile(0.2),
        )

    assert torch.autograd.gradcheck(of, (leaf,))
    if kind != "draws":
        crps = replace(whole, latent=replace(latent, mean=leaf)).crps(y).sum()
        (gradient,) = torch.autograd.grad(crps, leaf)
        torch.testing.assert_close(gradient, 1 - 2 * whole.pit(y))  # d/dm ∫ (F(t - m) - 1[t ≥ y])² dt
