"""Several heads in one posterior: against dense oracles and separate fits; missing targets, noise, tables, files."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

import lapwing as lw
from lapwing.data.batches import packed

F64 = torch.float64
torch.manual_seed(0)
X = torch.randn(30, 3, dtype=F64)
Y = {"kind": torch.arange(30) % 3, "box": torch.randn(30, 2, dtype=F64)}
OUTPUTS = {"kind": slice(0, 3), "box": [4, 3]}  # output 4 is for column 0
JOINT = lw.Joint({"kind": lw.Categorical(), "box": lw.Gaussian(0.3)}, outputs=OUTPUTS)


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
    torch.testing.assert_close(posterior.likelihood.log_prob(model(X), Y).sum(),
                               p.log()[torch.arange(30), Y["kind"]].sum()
                               + lw.Gaussian(0.3).log_prob(model(X)[:, [4, 3]], Y["box"]).sum())  # fmt: skip


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind, self.box = network(3), network(2)

    def forward(self, x):
        return torch.cat([self.kind(x), self.box(x).flip(1)], 1)


@pytest.mark.parametrize("way", [lw.Linearized(), lw.MonteCarlo(400)])
def test_heads_of_disjoint_networks_equal_two_fits(way):
    model = Two().eval()
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
    model = Two().eval()
    joint = fitted(model, y)
    kind = lw.fit(model.kind, [(X[8:], Y["kind"][8:])], lw.Full(), prior_precision=2.0)
    box = lw.fit(model.box, [(X, y["box"])], lw.Full(), likelihood=lw.Gaussian(0.3, missing=True), prior_precision=2.0)
    torch.testing.assert_close(joint.predict(X)["kind"].probs, kind.predict(X).probs)
    torch.testing.assert_close(joint.predict(X)["box"].std, box.predict(X).std)
    table = lw.compare({"joint": joint}, [(X, y)])["joint"]
    assert table["kind: accuracy"] == pytest.approx(lw.compare({"a": kind}, [(X[8:], Y["kind"][8:])])["a"]["accuracy"])
    assert table["box: RMSE"] == pytest.approx(lw.compare({"a": box}, [(X, y["box"])])["a"]["RMSE"])


def test_open_noise_tuning_and_file(tmp_path):
    joint, model = lw.Joint({"kind": lw.Categorical(), "box": lw.Gaussian()}, outputs=OUTPUTS), network()
    residual = (model(X)[:, [4, 3]] - Y["box"]).detach().square()
    loader = [
        (X[:20], {key: y[:20] for key, y in Y.items()}),
        {"x": X[20:], "y": {key: y[20:] for key, y in Y.items()}},
    ]
    posterior = lw.fit(
        model, loader, likelihood=joint, forward=lambda model, x: model(x["x"] if isinstance(x, dict) else x)
    )
    noise = posterior.likelihood.noises
    assert noise == {"box": pytest.approx(float(residual.mean()))}
    held_out = fitted(
        model, joint=joint, prior_precision=None, validation=(X[:9], {key: y[:9] for key, y in Y.items()})
    )
    assert held_out.likelihood.noises == {"box": pytest.approx(float(residual[:9].mean()))}
    assert fitted(model, joint=joint, prior_precision=None, tune=lw.Evidence()).prior_precision > 0
    held_out.save(tmp_path / "joint.safetensors")
    again = lw.load(tmp_path / "joint.safetensors", model, likelihood=joint)  # whose noise is open
    torch.testing.assert_close(again.predict(X)["box"].std, held_out.predict(X)["box"].std)
    weighted = lw.fit(model, [(X, Y, torch.ones(30))], lw.Full(), likelihood=joint, sample_weights=True)
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


def test_what_does_not_fit_is_refused():
    model, short = network(), {"kind": Y["kind"], "box": Y["box"][:, 0]}
    for call, match in (
        (lambda: lw.Joint({"a": lw.Gaussian()}, {"a": slice(1)}), "at least two keys"),
        (
            lambda: lw.Joint({"a": lw.Gaussian(), "b": lw.Poisson()}, {"a": slice(1), "c": slice(1)}),
            "for the same keys",
        ),
        (lambda: fitted(model, joint=None), r"keys \['box', 'kind'\]. Pass likelihood=lw.Joint"),
        (lambda: fitted(model, {"kind": Y["kind"], "other": Y["box"]}), r"keys \['kind', 'other'\]"),
        (lambda: fitted(model, short), "Joint has 3 targets per sample"),
        (lambda: fitted(model, {**Y, "kind": Y["kind"] + 1}), "The target 'kind' does not fit. .*labels 0 to 2"),
        (lambda: fitted(network(3)), "outputs from 0 to 2 that no other head has"),
        (lambda: packed({"a": X, "b": X[:3]}), "the same B"),
        (lambda: fitted(model).predict(X).uncertainty(), r"prediction\['box'\].uncertainty\(\)"),
        (lambda: lw.compare({"a": fitted(model)}, [(X, Y)], foreign={"far": 9 * X}), r"prediction\['box'\]"),
    ):
        with pytest.raises(lw.LapwingError, match=match):
            call()
