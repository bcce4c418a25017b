"""Several heads in one posterior: against dense oracles and separate fits; missing targets, noise, tables, files."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

import lapwing as lw
from tests.refilling import Refilling
from tests.zoo_modules import Net

F64 = torch.float64
torch.manual_seed(0)
X = torch.randn(30, 3, dtype=F64)
Y = {"kind": torch.arange(30) % 3, "box": torch.randn(30, 2, dtype=F64)}
OUTPUTS = {"kind": slice(0, 3), "box": [4, 3]}  # output 4 is for column 0
JOINT = lw.Joint({"kind": lw.Categorical(), "box": lw.Gaussian(0.3)}, outputs=OUTPUTS)
OPEN = lw.Joint({"kind": lw.Categorical(), "box": lw.Gaussian()}, outputs=OUTPUTS)
"""The same heads with a noise that a fit finds."""


def network(outputs=5):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double().eval()


def fitted(model, y=Y, joint=JOINT, **options):
    return lw.fit(model, [(X, y)], lw.Full(), likelihood=joint, **{"prior_precision": 2.0, **options})


def test_covariances_are_those_of_a_dense_laplace_approximation():
    model = network()
    jacobian = jacrev(lambda weights: functional_call(model, weights, X))(dict(model.named_parameters()))
    rows = torch.cat([part.flatten(2) for part in jacobian.values()], -1)  # (N, C, P)
    p = model(X)[:, :3].softmax(-1)
    fisher = torch.zeros(30, 5, 5, dtype=F64)
    fisher[:, :3, :3] = p.diag_embed() - p[:, :, None] * p[:, None]
    fisher[:, 3, 3] = fisher[:, 4, 4] = 1 / 0.3
    precision = torch.einsum("nip,nij,njq->pq", rows, fisher, rows) + 2.0 * torch.eye(rows.shape[-1], dtype=F64)
    wanted = rows @ precision.inverse() @ rows.mT
    posterior = fitted(model)
    torch.testing.assert_close(posterior.latent(X).covariance, wanted)
    prediction = posterior.predict(X)
    torch.testing.assert_close(prediction["box"].variance, 0.3 + wanted.diagonal(dim1=1, dim2=2)[:, [4, 3]])
    torch.testing.assert_close(prediction["box"].mean, model(X)[:, [4, 3]])
    noise = torch.cat([torch.full((30, 2), 0.3, dtype=F64), (p - p.square()).detach()], 1)  # of all heads, by key
    torch.testing.assert_close(posterior.explain(X).noise, noise)
    torch.testing.assert_close(posterior.likelihood.log_prob(model(X), Y).sum(),
                               p.log()[torch.arange(30), Y["kind"]].sum()
                               + lw.Gaussian(0.3).log_prob(model(X)[:, [4, 3]], Y["box"]).sum())  # fmt: skip


def two():
    """A network for each head."""
    return Net(lambda net, x: torch.cat([net.kind(x), net.box(x).flip(1)], 1), kind=network(3), box=network(2)).eval()


@pytest.mark.parametrize("way", [lw.Linearized(), lw.MonteCarlo(400)])
def test_heads_of_disjoint_networks_equal_two_fits(way):
    model = two()
    joint = fitted(model)
    kind = lw.fit(model.kind, [(X, Y["kind"])], lw.Full(), prior_precision=2.0)
    box = lw.fit(model.box, [(X, Y["box"])], lw.Full(), likelihood=lw.Gaussian(0.3), prior_precision=2.0)
    prediction = joint.predict(X, via=way)
    evidences = [posterior.log_marginal_likelihood() for posterior in (joint, kind, box)]
    assert evidences[0] == pytest.approx(evidences[1] + evidences[2])
    if isinstance(way, lw.Linearized):
        torch.testing.assert_close(prediction["kind"].probs, kind.predict(X).probs)
        torch.testing.assert_close(prediction["box"].interval(), box.predict(X).interval())
        torch.testing.assert_close(prediction.log_prob(Y),
                                   kind.predict(X).log_prob(Y["kind"]) + box.predict(X).log_prob(Y["box"]))  # fmt: skip
    else:
        torch.testing.assert_close(prediction["box"].std, box.predict(X, via=way).std, rtol=0.15, atol=0)


def test_a_missing_target_is_the_head_without_the_sample():
    y = {"kind": torch.where(torch.arange(30) < 8, torch.nan, Y["kind"].double()), "box": Y["box"].clone()}
    y["box"][5:12, 1] = torch.nan
    model = two()
    joint = fitted(model, y)
    kind = lw.fit(model.kind, [(X[8:], Y["kind"][8:])], lw.Full(), prior_precision=2.0)
    box = lw.fit(model.box, [(X, y["box"])], lw.Full(), likelihood=lw.Gaussian(0.3, missing=True), prior_precision=2.0)
    torch.testing.assert_close(joint.predict(X)["kind"].probs, kind.predict(X).probs)
    torch.testing.assert_close(joint.predict(X)["box"].std, box.predict(X).std)
    table = lw.compare({"joint": joint}, [(X, y)])["joint"]
    assert table["kind: accuracy"] == pytest.approx(lw.compare({"a": kind}, [(X[8:], Y["kind"][8:])])["a"]["accuracy"])
    assert table["box: RMSE"] == pytest.approx(lw.compare({"a": box}, [(X, y["box"])])["a"]["RMSE"])


HELD_OUT = torch.randn(40, 3, dtype=F64)


def overconfident():
    """Returns two disjoint networks whose logits are four times those of the labels, and held-out targets."""
    model = two()
    kind = torch.multinomial(model.kind(HELD_OUT).softmax(1), 1, generator=torch.Generator().manual_seed(0))[:, 0]
    with torch.no_grad():
        model.kind[2].weight *= 4
        model.kind[2].bias *= 4
        box = model.box(HELD_OUT) + 0.5 * torch.randn(40, 2, dtype=F64, generator=torch.Generator().manual_seed(1))
    return model, {"kind": kind, "box": box}


def test_held_out_data_calibrate_each_head_as_a_fit_of_its_own():
    model, y = overconfident()
    posterior = fitted(model, joint=OPEN, validation=(HELD_OUT, y))
    kind = lw.fit(model.kind, (X, Y["kind"]), lw.Full(), prior_precision=2.0, validation=(HELD_OUT, y["kind"]))
    heads, residual = posterior.likelihood.likelihoods, posterior.likelihood.estimated["box"]
    assert 1 < heads["kind"].logit_temperature == pytest.approx(kind.logit_temperature)
    torch.testing.assert_close(posterior.predict(X)["kind"].probs, kind.predict(X).probs)
    assert posterior.tuned
    assert posterior.with_prior(3.0).tuned
    assert residual == pytest.approx(float((model.box(HELD_OUT) - y["box"]).detach().square().mean()))
    box = lw.fit(model.box, (X, Y["box"]), lw.Full(), likelihood=lw.Gaussian(residual), prior_precision=2.0)
    latent = box.latent(HELD_OUT)  # the curvature keeps the residual
    torch.testing.assert_close(posterior.predict(HELD_OUT)["box"].epistemic_variance, latent.variance)

    def nll(noise):
        covariance = latent.covariance + noise * torch.eye(2, dtype=F64)
        normal = torch.distributions.MultivariateNormal(latent.mean, covariance)
        return -float(normal.log_prob(y["box"]).mean())

    noise = heads["box"].noise_variance
    assert noise < residual
    assert nll(noise) < min(nll(noise * 1.1), nll(noise / 1.1))
    assert lw.compare({"a": posterior}, [(HELD_OUT, y)]).rows["network"]["box: NLL"] == pytest.approx(
        -float(lw.Gaussian(residual).log_prob(model.box(HELD_OUT), y["box"]).detach().mean())
    )


def test_prior_precisions_are_compared_at_the_best_numbers_of_the_heads(reloaded):
    model, y = overconfident()
    tune = lw.Validation((HELD_OUT, y), decades=(-1.0, 3.0), points=5, tolerance=0)
    scores = {}
    for delta in (0.1, 1.0, 10.0, 100.0, 1000.0):
        given = fitted(model, joint=OPEN, prior_precision=delta, tune=tune)
        scores[float(given.predict(HELD_OUT).log_prob(y).mean())] = given
    best, chosen = scores[max(scores)], fitted(model, joint=OPEN, prior_precision=None, tune=tune)
    assert chosen.prior_precision == pytest.approx(best.prior_precision)
    assert chosen.likelihood.head_numbers == {
        key: pytest.approx(numbers) for key, numbers in best.likelihood.head_numbers.items()
    }
    again = reloaded(chosen, model, likelihood=OPEN)
    assert again.likelihood.head_numbers == chosen.likelihood.head_numbers
    more = again.update((X, Y), tune=tune)  # the noise and T are chosen again
    assert all(more.likelihood.likelihoods[key] != chosen.likelihood.likelihoods[key] for key in OUTPUTS)
    untempered = fitted(model, joint=OPEN, tune=lw.Validation((HELD_OUT, y), tempered=False))
    assert untempered.likelihood.likelihoods["kind"].logit_temperature == 1
    field = lw.fit(model, (X, Y), lw.MeanField(steps=2), likelihood=OPEN, validation=(HELD_OUT, y))
    assert field.likelihood.likelihoods["kind"].logit_temperature > 1


def test_loaders_that_refill_their_buffers_and_frozen_layers_give_the_same_heads():
    model, y = overconfident()
    for parameter in model.kind[0].parameters():
        parameter.requires_grad_(False)
    y["kind"] = torch.where(torch.arange(40) < 10, torch.nan, y["kind"].double())  # unknown in the first batch
    rows = [slice(i, i + 10) for i in (0, 10, 20, 30)]
    train = [(X[part], {key: value[part] for key, value in Y.items()}) for part in rows[:3]]
    held_out = [(HELD_OUT[part], {key: value[part] for key, value in y.items()}) for part in rows]
    fits = [
        lw.fit(model, kind(train), lw.KFAC(), likelihood=OPEN, validation=kind(held_out)) for kind in (list, Refilling)
    ]
    assert fits[0].likelihood.head_numbers == fits[1].likelihood.head_numbers
    torch.testing.assert_close(fits[0].latent(X).covariance, fits[1].latent(X).covariance)
    tables = [lw.compare({"a": fits[0]}, kind(held_out), repeats=1).rows["a"] for kind in (list, Refilling)]
    assert all(tables[0][name] == tables[1][name] for name in tables[0] if name != "passes")


GIVEN = lw.Joint({"kind": lw.Categorical(logit_temperature=2.0), "box": lw.Gaussian(0.3)}, outputs=OUTPUTS)


def test_held_out_data_need_no_target_of_a_head_whose_numbers_are_given():
    model, y = overconfident()
    without = {**y, "kind": torch.full((40,), torch.nan)}
    assert fitted(model, joint=GIVEN, prior_precision=None, validation=(HELD_OUT, without)).prior_precision > 0


def test_open_noise_tuning_and_file(tmp_path):
    model = network()
    residual = (model(X)[:, [4, 3]] - Y["box"]).detach().square()
    loader = [
        (X[:20], {key: y[:20] for key, y in Y.items()}),
        {"x": X[20:], "y": {key: y[20:] for key, y in Y.items()}},
    ]
    posterior = lw.fit(
        model, loader, likelihood=OPEN, forward=lambda model, x: model(x["x"] if isinstance(x, dict) else x)
    )
    assert posterior.likelihood.estimated == {"box": pytest.approx(float(residual.mean()))}
    assert posterior.likelihood.likelihoods["box"].noise_variance == pytest.approx(float(residual.mean()))
    held_out = fitted(model, joint=OPEN, prior_precision=None, validation=(X[:9], {key: y[:9] for key, y in Y.items()}))
    assert held_out.likelihood.estimated == {"box": pytest.approx(float(residual[:9].mean()))}
    assert fitted(model, joint=OPEN, prior_precision=None, tune=lw.Evidence()).prior_precision > 0
    held_out.save(tmp_path / "joint.safetensors")
    again = lw.load(tmp_path / "joint.safetensors", model, likelihood=OPEN)  # whose noise is open
    torch.testing.assert_close(again.predict(X)["box"].std, held_out.predict(X)["box"].std)
    other = lw.Joint({"kind": lw.Categorical(), "size": lw.Gaussian()}, {"kind": slice(0, 3), "size": [4, 3]})
    with pytest.raises(lw.LapwingError, match=r"heads \['box', 'kind'\], and Joint has \['kind', 'size'\]"):
        lw.load(tmp_path / "joint.safetensors", model, likelihood=other)
    weighted = lw.fit(model, [(X, Y, torch.ones(30))], lw.Full(), likelihood=OPEN, sample_weights=True)
    assert math.isfinite(weighted.log_marginal_likelihood())


def test_heads_of_other_likelihoods():
    heads = {
        "grade": lw.Ordinal(), "noisy": lw.HeteroscedasticGaussian(), "yes": lw.Bernoulli(), "count": lw.Poisson(),
        "gamma": lw.FromDistribution(lambda f: torch.distributions.Gamma(f[..., 0].exp(), f[..., 1].exp())),
    }  # fmt: skip
    outputs = {"grade": slice(0, 2), "noisy": slice(2, 4), "yes": [4], "count": range(5, 6), "gamma": slice(6, 8)}
    y = {
        "grade": Y["kind"],
        "noisy": Y["box"][:, 0],
        "yes": Y["kind"] > 0,
        "count": Y["kind"],
        "gamma": Y["kind"] + 1.0,
    }
    posterior = fitted(network(8), y, lw.Joint(heads, outputs))
    prediction = posterior.predict(X)
    assert prediction.log_prob(y).shape == (30,)
    assert {key: head.point.shape for key, head in prediction.items()} == {
        "count": (30, 1), "gamma": (30,), "grade": (30,), "noisy": (30, 1), "yes": (30, 1),
    }  # fmt: skip
    table = lw.compare({"joint": posterior}, [(X, y)])
    assert {"grade: accuracy", "count: RMSE", "yes: ECE", "gamma: CRPS"} <= set(table.columns)
    assert {*prediction.sample(2)} == {*prediction.distribution()} == {*heads}


def test_real_numbers_are_no_labels():
    """Cut off, 0.5 would count as class 0."""
    heads = [lw.Categorical(), lw.Ordinal(), lw.FromDistribution(lambda f: torch.distributions.Categorical(logits=f))]
    for head in heads:
        joint = lw.Joint({"kind": head, "box": lw.Gaussian(0.3)}, outputs=OUTPUTS)
        whole = fitted(network(), {**Y, "kind": Y["kind"].float()}, joint)
        torch.testing.assert_close(whole.predict(X).log_prob(Y), fitted(network(), Y, joint).predict(X).log_prob(Y))
        for wrong in (0.5, -0.9, 1.5, torch.inf, 1e20):
            y = {**Y, "kind": torch.where(torch.arange(30) == 29, wrong, Y["kind"].double())}
            y["kind"][0] = torch.nan  # a missing label hides nothing
            for refused in (
                lambda y=y, joint=joint: fitted(network(), y, joint),
                lambda y=y, whole=whole: whole.predict(X).log_prob(y),
                lambda y=y, whole=whole: lw.compare({"a": whole}, [(X, y)]),
            ):
                with pytest.raises(lw.LapwingError):
                    refused()


@pytest.mark.parametrize("df", [None, 4.0])
def test_a_censored_head_keeps_the_noise_of_highest_likelihood(df):
    """Its curvature depends on σ², so a tuning cannot move it."""
    model, head = network(4), lw.Censored(df=df)
    y = model(X)[:, 3].detach() + 0.3 * Y["box"][:, 0]
    ends = torch.stack([y.clamp(max=1.0), torch.where(y > 1, torch.inf, y)], 1)
    joint = lw.Joint({"kind": lw.Categorical(), "time": head}, outputs={"kind": slice(0, 3), "time": [3]})
    targets = {"kind": Y["kind"], "time": ends}
    found = lw.fit(model, (X[:15], {key: one[:15] for key, one in targets.items()}), likelihood=joint,
                   validation=(X[15:], {key: one[15:] for key, one in targets.items()}))  # fmt: skip
    alone = lw.fit(model, (X[:15], ends[:15]), likelihood=head, validation=(X[15:], ends[15:]),
                   forward=lambda model, x: model(x)[:, 3:])  # fmt: skip
    assert found.likelihood.likelihoods["time"] == replace(alone.likelihood, fitted_noise=None)
    assert found.predict(X)["time"].log_prob(ends).isfinite().all()


def test_missing_targets_do_not_count():
    kind, box = Y["kind"].double(), Y["box"].clone()
    kind[:6], box[3:9] = torch.nan, torch.nan  # of three rows all three targets are missing
    posterior = fitted(network(), {"kind": kind, "box": box})
    assert float(posterior.statistics["weight"]) == pytest.approx(30 - (6 + 12) / 3)
    with pytest.raises(lw.LapwingError, match="None of the labels counts"):
        fitted(network(), {"kind": kind * torch.nan, "box": box * torch.nan})
