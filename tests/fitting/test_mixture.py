"""Ensembles against naive sums over members in float64."""

from __future__ import annotations

import copy
import math
from functools import cache
from statistics import NormalDist

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Independent

import lapwing as lw
from lapwing.likelihoods.predictions import PSEUDO_WEIGHT
from tests.full_disk import full_disk
from tests.refused import refused
from tests.trained import train

SIZE = 40


def data(kind: str, size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    if kind == "categorical":
        return x, (x[:, :3] + noise).argmax(1)
    return x, (x[:, :3] + noise > 0).long() if kind == "bernoulli" else (x[:, :3].sin() + 0.3 * noise)


LOSSES = {
    "categorical": nn.functional.cross_entropy, "gaussian": nn.functional.mse_loss,
    "bernoulli": nn.functional.binary_cross_entropy_with_logits,
}  # fmt: skip


@cache
def trained(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = data(kind)
    return train(model, lambda: LOSSES[kind](model(x), y.double() if kind == "bernoulli" else y), 100, 0.05)


@cache
def member(kind: str, seed: int) -> lw.Posterior:
    likelihood = lw.Gaussian(noise_variance=0.02) if kind == "gaussian" else kind
    return lw.fit(trained(kind, seed), data(kind), lw.KFAC(), likelihood=likelihood, prior_precision=2.0)


def members(kind: str, count: int = 3) -> list[lw.Posterior]:
    return [member(kind, seed) for seed in range(count)]


@pytest.mark.parametrize(("kind", "name"), [("categorical", "ClassMixture"), ("bernoulli", "BernoulliMixture")])
def test_labels_get_the_mean_of_the_members_probabilities(kind, name):
    law = lambda p: Categorical(p) if kind == "categorical" else Independent(Bernoulli(p), 1)  # noqa: E731
    each, (x, y) = members(kind), data(kind, 30)
    prediction, parts = lw.mixture(each).predict(x), [member.predict(x) for member in each]
    probs = torch.stack([part.probs for part in parts])
    torch.testing.assert_close(prediction.probs, probs.mean(0))
    torch.testing.assert_close(prediction.log_prob(y), law(probs.mean(0)).log_prob(y.double()))
    torch.testing.assert_close(prediction.entropy(), law(probs.mean(0)).entropy())
    between, within = prediction.between_members(), prediction.within_members()
    torch.testing.assert_close(prediction.entropy(), law(probs).entropy().mean(0) + between)
    torch.testing.assert_close(within, torch.stack([part.mutual_information() for part in parts]).mean(0))
    torch.testing.assert_close(prediction.mutual_information(), between + within)
    assert float(between.min()) > 1e-5 < float(within.min())
    assert f"{name}(30 inputs" in repr(prediction)


@pytest.mark.parametrize("way", [None, lw.MonteCarlo(7)], ids=["gaussian", "weight draws"])
def test_a_regression_is_the_mixture_of_the_members_gaussians(way):
    each, (x, y) = members("gaussian"), data("gaussian", 30)
    prediction = lw.mixture(each).predict(x, via=way)
    parts = [member.predict(x, via=way) for member in each]
    means = torch.stack([part.mean for part in parts])
    torch.testing.assert_close(prediction.mean, means.mean(0))
    torch.testing.assert_close(prediction.variance_between_members, means.var(0, correction=0))
    within = torch.stack([part.epistemic_variance for part in parts]).mean(0)
    torch.testing.assert_close(prediction.variance_within_members, within)
    second = torch.stack([part.variance + part.mean.square() for part in parts]).mean(0)
    torch.testing.assert_close(prediction.variance, second - means.mean(0).square())  # law of total variance
    densities = torch.stack([part.log_prob(y) for part in parts]).exp()
    torch.testing.assert_close(prediction.log_prob(y), densities.mean(0).log())
    torch.testing.assert_close(prediction.distribution().log_prob(y), prediction.log_prob(y))
    draws = prediction.sample(4000)
    torch.testing.assert_close(draws.mean(0), prediction.mean, rtol=0, atol=0.12)
    torch.testing.assert_close(draws.var(0), prediction.variance, rtol=0.3, atol=0)
    low, high = prediction.interval(0.8)
    for n, c in ((0, 0), (7, 2), (29, 1)):
        for end, probability in ((low, 0.1), (high, 0.9)):
            below = []
            for part in parts:
                draws = part.latent.draws
                centres = part.mean[None] if draws is None else draws
                variance = (part.variance if draws is None else part.aleatoric_variance)[n, c]
                below += [NormalDist(float(m), float(variance.sqrt())).cdf(float(end[n, c])) for m in centres[:, n, c]]
            assert sum(below) / len(below) == pytest.approx(probability, abs=1e-6)


def test_missing_targets_do_not_count():
    x, y = data("gaussian")
    y[::3, 1] = torch.nan
    each = [
        lw.fit(trained("gaussian", k), (x, y), lw.KFAC(), likelihood=lw.Gaussian(missing=True), prior_precision=1.0)
        for k in range(2)
    ]
    logs = lw.mixture(each).predict(x).log_prob(y)
    naive = torch.stack([member.predict(x).log_prob(y) for member in each]).logsumexp(0) - math.log(2)
    torch.testing.assert_close(logs, naive)
    assert bool(logs.isfinite().all())


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_positions_keep_their_shape(kind):
    x = torch.randn(12, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x[..., :3].argmax(-1) if kind == "categorical" else x[..., :3]
    networks = [nn.Linear(4, 3).double().eval() for _ in range(3)]
    each = [lw.fit(model, (x, y), lw.KFAC(), likelihood=kind, prior_precision=1.0) for model in networks]
    prediction, parts = lw.mixture(each, (x, y)).predict(x), [member.predict(x) for member in each]
    assert prediction.log_prob(y).shape == (12, 5)
    if kind == "categorical":
        assert prediction.probs.shape == (12, 5, 3)
        assert prediction.between_members().shape == prediction.mutual_information().shape == (12, 5)
        unscaled = lw.mixture(each).predict(x).probs
        torch.testing.assert_close(unscaled, torch.stack([part.probs for part in parts]).mean(0))
    else:
        assert prediction.variance_between_members.shape == prediction.interval()[0].shape == (12, 5, 3)


@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "gaussian"])
def test_validation_chooses_the_factor_of_highest_likelihood(kind):
    each, held_out = members(kind), data(kind, 60)
    chosen = lw.mixture(each, validation=held_out)
    factor = (
        chosen.members[0].noise_variance / each[0].noise_variance if kind == "gaussian"
        else chosen.members[0].logit_temperature
    )  # fmt: skip

    def score(factor: float) -> float:
        """The log likelihood of the mixture if y is Gaussian, or if logits are divided by a temperature.

        It counts a row more, which pulls log c towards 0 (Gaussian), or a part of a row with a uniform label.
        """
        logs, count = [], len(held_out[1])
        for member in each:
            latent = member.latent(held_out[0])
            if kind == "gaussian":
                covariance = factor * (latent.covariance + member.noise_variance * torch.eye(3))
                logs.append(torch.distributions.MultivariateNormal(latent.mean, covariance).log_prob(held_out[1]))
            else:
                prediction = member.likelihood.predict(latent.tempered(factor))
                p = prediction.probs
                uniform = p.log().mean() if kind == "categorical" else 3 * (p.log() + (1 - p).log()).mean() / 2
                logs.append(prediction.log_prob(held_out[1]) + PSEUDO_WEIGHT * uniform / count)
        pulled = -3 / 4 * math.log(factor) ** 2 / count if kind == "gaussian" else 0.0
        return float(torch.stack(logs).logsumexp(0).mean()) + pulled

    assert 0.11 < factor < 9
    assert abs(math.log10(factor)) > 0.02  # the held-out data do change it
    best = score(factor)
    assert all(best >= score(factor * 10**step) for step in (-0.03, -0.01, 0.01, 0.03))
    assert all(one.method == other.method for one, other in zip(chosen.members, each, strict=True))
    if kind == "gaussian":
        x = held_out[0]
        torch.testing.assert_close(
            chosen.members[1].predict(x).variance, factor * each[1].predict(x).variance, rtol=1e-8, atol=0
        )


def test_a_shuffled_loader_has_one_order_for_all_members():
    x, y = data("gaussian")
    mixture = lw.mixture(members("gaussian", 2))
    dataset = torch.utils.data.TensorDataset(x, y)
    torch.manual_seed(1)
    shuffled = mixture.predict(torch.utils.data.DataLoader(dataset, 8, shuffle=True))
    torch.testing.assert_close(shuffled.mean.sort(0).values, mixture.predict(x).mean.sort(0).values)
    torch.testing.assert_close(mixture.predict(iter([x[:9], x[9:]])).mean, mixture.predict(x).mean)


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_members_with_frozen_layers(kind, tmp_path):
    """Members may treat other layers than each other, and frozen weights stay certain."""
    x, held_out = data(kind)[0], data(kind, 60)
    networks = [copy.deepcopy(trained(kind, seed)) for seed in range(2)]
    networks[0][0].requires_grad_(False)
    likelihood = lw.Gaussian(noise_variance=0.02) if kind == "gaussian" else kind
    each = [lw.fit(one, data(kind), lw.KFAC(), likelihood=likelihood, prior_precision=2.0) for one in networks]
    assert [one.tangent.size for one in each] == [21, 51]
    mixture = lw.mixture(each, validation=held_out)
    prediction, parts = mixture.predict(x), [one.predict(x) for one in mixture.members]
    if kind == "gaussian":
        torch.testing.assert_close(prediction.mean, torch.stack([part.mean for part in parts]).mean(0))
    else:
        torch.testing.assert_close(prediction.probs, torch.stack([part.probs for part in parts]).mean(0))
    mixture.save(tmp_path / "ensemble")
    again = lw.mixture([lw.load(tmp_path / "ensemble" / f"member-{n}.safetensors", networks[n]) for n in range(2)])
    torch.testing.assert_close(again.predict(x).log_prob(data(kind)[1]), prediction.log_prob(data(kind)[1]))
    assert not networks[0][0].weight.requires_grad
    assert networks[0][2].weight.requires_grad


def test_a_mixture_is_saved_to_a_folder_and_loaded(tmp_path):
    x = data("categorical")[0]
    mixture = lw.mixture(members("categorical"), validation=data("categorical", 60))
    mixture.save(tmp_path / "ensemble")
    models = [copy.deepcopy(trained("categorical", k)) for k in range(3)]
    files = sorted((tmp_path / "ensemble").iterdir())
    assert [file.name for file in files] == ["member-0.safetensors", "member-1.safetensors", "member-2.safetensors"]
    again = lw.mixture([lw.load(file, model) for file, model in zip(files, models, strict=True)])
    torch.testing.assert_close(again.predict(x).probs, mixture.predict(x).probs)
    assert again.members[1].logit_temperature == mixture.members[1].logit_temperature != 1
    refused(lambda: lw.load(files[0], models[1]), "other values than in the fit")
    refused(lambda: mixture.save(tmp_path / "ensemble"), "Pass the path of a new one")
    refused(lambda: lw.load(tmp_path / "ensemble", models[0]), "is a folder … member-0.safetensors', model), and join")


def test_a_full_disk_leaves_no_part_of_a_mixture(tmp_path):
    mixture = lw.mixture(members("categorical"))
    with full_disk(), pytest.raises(lw.LapwingError, match=r"The file \S*/ensemble cannot be written: .*large"):
        mixture.save(tmp_path / "ensemble")
    assert not list(tmp_path.iterdir())
    mixture.save(tmp_path / "ensemble")
    assert len(list((tmp_path / "ensemble").iterdir())) == 3
    (tmp_path / "other").mkdir()
    assert (tmp_path / "ensemble").stat().st_mode == (tmp_path / "other").stat().st_mode
    refused(lambda: mixture.save(tmp_path / "missing" / "ensemble"), "cannot be made")


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_compare_has_a_row_for_a_mixture(kind):
    each, (x, y) = members(kind, 2), data(kind, 30)
    mixture = lw.mixture(each)
    table = lw.compare({"mixture": mixture, "one": each[0]}, [(x[:20], y[:20]), (x[20:], y[20:])], {"far": 9 * x})
    assert table["mixture"]["NLL"] == pytest.approx(-float(mixture.predict(x).log_prob(y).mean()))
    assert table["mixture"]["passes"] > 1
