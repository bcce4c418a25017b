"""Early stopping: a prefix's posterior is a fit on the first samples, and the best pair (n, δ) is chosen."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import lapwing as lw
from lapwing.running.runner import Runner
from lapwing.tuning import EarlyStopping, Training, Tuning
from lapwing.tuning.held_out import at_exponents, width_scores
from lapwing.tuning.held_out_choice import best_of
from tests import oracle
from tests.conformance import CUTS, close, cut, setup
from tests.trained import train

METHODS = [
    lw.Diagonal(), lw.KFAC(), lw.EKFAC(), lw.Full("primal"), lw.Full("dual"), lw.ELLA(5, 12), lw.ELLA(5, 12, "prior"),
]  # fmt: skip


class Keep(Tuning):
    """Keeps what a tuning is given."""

    prefixes = 3

    def tune(self, posterior: lw.Posterior, training: Training = Training()) -> lw.Posterior:  # noqa: B008
        self.training = training
        return posterior


@pytest.mark.quick(3)
@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("name", ["mlp", "cnn_bn_inplace", "mlp_scalar"])
def test_prefixes_are_fits_on_the_first_samples(name, method):
    problem, keep = setup(name), Keep()
    whole = problem.fit(method, tune=keep, data_size=90)
    assert [part.samples for part in keep.training.prefixes] == [1, 2, 4, 9]
    for part in keep.training.prefixes:
        if isinstance(method, lw.ELLA):  # its span is that of rows of all data
            close(part.covariance.with_prior(whole.prior.precision, 0.5).basis.rows()[problem.blocks[0].name],
                  whole.covariance.basis.rows()[problem.blocks[0].name])  # fmt: skip
            if method.residual is None:
                V = torch.cat([*whole.covariance.basis.rows().values()], -1)
                G = oracle.ggn(problem.J[: part.samples], problem.fisher[: part.samples])
                wanted = V.T @ torch.linalg.inv(V @ G @ V.T + 2 * V @ V.T) @ V
                close(part.covariance.to_dense(), wanted)
            continue
        if isinstance(method, lw.EKFAC):  # KFAC's eigenbasis is that of all data
            continue
        data = cut(oracle.take(problem.x, slice(0, part.samples)), problem.y[: part.samples], [part.samples])
        alone = problem.fit(method, loader=data)
        close(part.covariance.to_dense(), alone.covariance.to_dense())
        assert part.log_marginal_likelihood() == pytest.approx(alone.log_marginal_likelihood())
    assert whole.data_factor == 10


@pytest.mark.quick(1)
@pytest.mark.parametrize("method", [lw.ELLA(5, 12), lw.KFAC()], ids=repr)
def test_the_best_pair_is_chosen(method):
    problem = setup("cnn_bn_inplace")
    held_out = [(problem.case.inputs(7, 5), problem.case.targets(7, 5))]
    tune = lw.EarlyStopping(held_out, prefixes=3, decades=(-2.0, 2.0), points=5)
    chosen = problem.fit(method, prior_precision=None, tune=tune)
    keep = Keep()
    whole = problem.fit(method, prior_precision=None, tune=keep)

    def score(posterior):
        return float(posterior.predict(held_out[0][0]).log_prob(held_out[0][1]).mean())

    table = {
        (part.samples, exponent): score(part.with_prior(10.0**exponent))
        for part in (*keep.training.prefixes, whole)
        for exponent in range(-2, 3)
    }
    samples, _ = max(table, key=table.__getitem__)
    assert chosen.samples == samples
    assert score(chosen) >= max(table.values()) - 1e-2
    assert f"first {samples} of {sum(CUTS)}" in str(chosen.method)


def test_given_priors_are_kept_in_either_form():
    problem = setup("cnn_bn_inplace")
    held_out = [(problem.case.inputs(7, 5), problem.case.targets(7, 5))]
    published = problem.fit(lw.ELLA(5, 12), tune=lw.EarlyStopping(held_out), data_size=90)
    assert published.prior_precision == 2.0
    scaled = problem.fit(lw.ELLA(5, 12), tune=lw.EarlyStopping(held_out, form="scaled"), data_size=90)
    if scaled.data_factor == 1:
        assert scaled.prior_precision == pytest.approx(2.0 * scaled.samples / 90)


def test_open_noise_beside_a_given_prior():
    """Parts of the data have no noise of their own: it is sought on the held-out data."""
    problem = setup("mlp_scalar")
    held_out = [(problem.case.inputs(7, 5), problem.case.targets(7, 5))]
    for form in ("published", "scaled"):
        tune = lw.EarlyStopping(held_out, form, prefixes=3)
        chosen = problem.fit(lw.KFAC(), likelihood=lw.Gaussian(), prior_precision=2.0, tune=tune)
        assert chosen.noise_variance > 0
        assert form == "scaled" or chosen.prior_precision == 2.0


def narrow_task(noise):
    """A network whose labels are partly noise, so that a curvature of many samples makes the posterior too narrow."""
    torch.manual_seed(0)
    x = torch.randn(640, 2).double()
    y = torch.where(torch.rand(640) < noise, torch.randint(2, (640,)), (x[:, 0] > 0).long())
    model = torch.nn.Linear(2, 2).double().eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-6.0, 0.0], [6.0, 0.0]]))  # far too confident
        model.bias.zero_()
    return model, (x[:512], y[:512]), [(x[512:], y[512:])]


@pytest.mark.parametrize("method", [lw.KFAC(), lw.ELLA(3, 6), lw.Full()], ids=repr)
def test_the_first_fall_ends_the_pass(method):
    model, data, held_out = narrow_task(0.4)

    def score(posterior):
        return posterior.predict(held_out[0][0]).log_prob(held_out[0][1])

    keep = Keep()
    keep.prefixes = 9
    lw.fit(model, data, method, prior_precision=0.1, tune=keep, params=lw.everything)
    best, seen = None, []
    for part in keep.training.prefixes:
        now = score(part)
        seen.append(part)
        if best is not None and (best - now).mean() > (best - now).std(correction=0) / len(now) ** 0.5:
            break
        best = now if best is None or now.mean() > best.mean() else best
    assert 1 < len(seen) < len(keep.training.prefixes)  # it does fall, and not at once
    tune = lw.EarlyStopping(held_out, stop="first fall", prefixes=9)
    stopped = lw.fit(model, data, method, prior_precision=0.1, tune=tune, params=lw.everything)
    wanted = max(seen, key=lambda part: float(score(part).mean()))
    assert stopped.samples == wanted.samples
    assert torch.allclose(score(stopped), score(wanted))
    assert f"first {wanted.samples} of 512" in str(stopped.method)


def test_a_stopped_pass_reads_only_the_first_samples():
    model, (x, y), held_out = narrow_task(0.4)
    read = []

    class Counted(torch.utils.data.Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, i):
            read.append(i)
            return x[i], y[i]

    tune = lw.EarlyStopping(held_out, stop="first fall", prefixes=9)
    lw.fit(model, Counted(), lw.KFAC(), prior_precision=0.1, tune=tune)
    assert len(set(read)) <= 256


def test_without_a_fall_all_n_are_compared():
    model, data, held_out = narrow_task(0.0)
    fits = [
        lw.fit(model, data, lw.KFAC(), prior_precision=0.1, tune=lw.EarlyStopping(held_out, stop=stop, prefixes=4))
        for stop in ("best", "first fall")
    ]
    assert fits[0].samples == fits[1].samples
    close(fits[0].covariance.to_dense(), fits[1].covariance.to_dense())


def test_few_held_out_rows_take_the_best_n_in_the_mean_at_the_ratio_of_the_training_data():
    """δσ² is that of the training data, and one row that another n fits best does not choose n."""
    x = torch.randn(60, 3)
    y = x[:, :1].sin() + 0.3 * torch.randn(60, 1)
    model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 1))
    train(model, lambda: mse_loss(model(x[:40]), y[:40]), 300)
    parts = [lw.fit(model, (x[:n], y[:n]), lw.KFAC(), tune=None, likelihood=lw.Gaussian()) for n in (2, 10, 40)]
    found = []
    for start in range(40, 52):
        held_out, (delta, noise) = [(x[start : start + 8], y[start : start + 8])], (0.3, 0.1)
        residual = float((model(held_out[0][0]) - held_out[0][1]).square().mean().detach())
        at = at_exponents([math.log10(delta * noise / residual)])
        scores = width_scores([part.with_noise(residual) for part in parts], at, held_out)[0][:, 0]  # (n, rows)
        best = best_of(parts, (-5.0, 7.0), 25, held_out, trained=(delta, noise))
        assert best.samples == parts[int(scores.mean(1).argmax())].samples
        assert best.prior_precision * best.noise_variance == pytest.approx(delta * noise, rel=1e-3)
        found.append(int(scores.mean(1).argmax()) != int(scores.amax(1).argmax()))
    assert any(found)


@pytest.mark.parametrize("method", [lw.EKFAC(), lw.OptimalSubspace(3, curvature=lw.Diagonal())], ids=repr)
@pytest.mark.parametrize("stop", ["best", "first fall"])
def test_only_the_last_curvature_is_repeated(method, stop, monkeypatch):
    model, data, held_out = narrow_task(0.4)
    read, sums = [], Runner._sums

    def counted(runner, step, problem):
        read.append((step.label, step.limit))
        return sums(runner, step, problem)

    monkeypatch.setattr(Runner, "_sums", counted)
    tune = lw.EarlyStopping(held_out, stop=stop, prefixes=4)
    lw.fit(model, data, method, params=lw.everything, prior_precision=0.1, tune=tune)
    assert {label for label, limit in read if limit is not None} == {read[-1][0]}


def test_the_first_fall_compares_what_the_end_chooses_from(monkeypatch):
    model, data, held_out = narrow_task(0.0)
    compared, candidates = {}, EarlyStopping._candidates

    def noted(self, part, whole):
        found = candidates(self, part, whole)
        compared.setdefault(part.samples, []).append(found[0].prior_precision)
        return found

    monkeypatch.setattr(EarlyStopping, "_candidates", noted)
    tune = lw.EarlyStopping(held_out, form="scaled", stop="first fall", prefixes=3)
    lw.fit(model, data, lw.KFAC(), prior_precision=0.8, tune=tune)
    assert compared == {64: [0.1, 0.1], 128: [0.2, 0.2], 256: [0.4, 0.4], 512: [0.8]}
