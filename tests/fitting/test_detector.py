"""`lw.novelty` of a posterior: p-values by counting, alarms, maps, files, other inputs, `lw.compare`, `lw.deploy`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.evaluation import metrics
from lapwing.fitting.novelty import doubt
from tests import oracle
from tests.fitting.test_novelty import X, Y, network
from tests.refused import refused
from tests.zoo_modules import Net

SEED = torch.Generator().manual_seed(1)
HELD = torch.randn(60, 5, generator=SEED).double(), torch.arange(60) % 3
NEW = torch.cat([torch.randn(20, 5, generator=SEED), 4 * torch.randn(20, 5, generator=SEED)]).double()
REAL = torch.randn(90, 2, generator=SEED).double()


def classes(**options: Any) -> lw.Posterior:
    return lw.fit(network(), (X, Y), prior_precision=1.0, **options)


def counted(held_out: Tensor, scores: Tensor) -> Tensor:
    """p-values by a loop over all pairs."""
    n = len(held_out)
    rows = [(1 + sum(bool(h >= s) for h in held_out)) / (n + 1) for s in scores]
    return torch.tensor(rows, dtype=torch.float64)


def neighbours(model: nn.Sequential, x: Tensor) -> Tensor:
    rows, z = (F.normalize(model[:-1](values).detach()) for values in (X, x))
    return torch.cdist(z, rows).sort(1).values[:, 49]


def variances(model: nn.Module, x: Tensor, noise: list[float]) -> Tensor:
    """`J (G + I)⁻¹ Jᵀ` (B, C) with dense rows J, of a fit to X with prior precision 1."""
    j, new = oracle.jacobian(model, X), oracle.jacobian(model, x)
    precision = torch.eye(j.shape[2]) + torch.einsum("ncp,c,ncq->pq", j, 1 / torch.tensor(noise), j)
    return torch.einsum("bcp,pq,bcq->bc", new, precision.double().inverse(), new)


def check(detector: lw.Novelty, of_doubt: Any, of_novelty: Any) -> None:
    """Compares p-values, alarms and strangeness with counts of the scores."""
    scores = [(score(HELD[0]), score(NEW)) for score in (of_doubt, of_novelty)]
    p = torch.stack([counted(*pair) for pair in scores])
    why = detector.why(NEW)
    assert list(why) == ["doubt", "novelty"]
    assert torch.equal(why["doubt"], p[0])
    assert torch.equal(why["novelty"], p[1])
    assert torch.equal(detector.p_value(NEW), (2 * p.amin(0)).clamp(max=1))
    assert torch.equal(detector.alarm(NEW, 0.4), 2 * p.amin(0) <= 0.4)
    # the order: the smaller p-value first, then the standardised scores
    z = torch.stack([(new - held.mean()) / held.std(correction=0) for held, new in scores]).amax(0)
    strangeness = detector(NEW)
    keys = [(-round(float(p[:, i].amin()), 6), round(float(z[i]), 6)) for i in strangeness.argsort()]
    assert keys == sorted(keys)
    assert ((strangeness - 1 + p.amin(0)) * 61 - 0.5).abs().max() < 0.5


def test_p_values_are_counts_of_held_out_scores() -> None:
    posterior = classes()
    detector = lw.novelty(posterior, (X, Y), held_out=HELD)
    assert detector.by == "knn"
    check(detector, lambda x: posterior.predict(x).mutual_information(), lambda x: neighbours(posterior.model, x))


def test_the_doubt_of_a_regression_is_the_variance_in_units_of_the_noise() -> None:
    posterior = lw.fit(network(1), (X, REAL[:, :1]), lw.Full(), likelihood=lw.Gaussian(0.3), prior_precision=1.0)
    detector, plain = lw.novelty(posterior, (X, REAL[:, :1]), held_out=HELD), lw.novelty(posterior.model, (X, REAL))
    assert detector.by == "mahalanobis"
    check(detector, lambda x: 0.5 * (variances(posterior.model, x, [0.3])[:, 0] / 0.3).log1p(), plain)
    two = lw.fit(network(2), (X, REAL), lw.Full(), likelihood=lw.Gaussian((0.3, 2.0)), prior_precision=1.0)
    expected = 0.5 * torch.log1p(variances(two.model, NEW, [0.3, 2.0]) / torch.tensor([0.3, 2.0])).sum(1)
    assert torch.allclose(doubt(two, NEW), expected, rtol=1e-6)


def test_noise_that_depends_on_the_input_does_not_enter_the_doubt() -> None:
    x = torch.randn(400, 5, generator=torch.Generator().manual_seed(1)).double()
    y = x[:, :1] + x[:, 1:2].exp() * torch.randn(400, 1, generator=torch.Generator().manual_seed(2))
    likelihood = lw.Gaussian(noise="input")
    posterior = lw.fit(network(1), (x[:200], y[:200]), validation=(x[200:], y[200:]), likelihood=likelihood)
    assert posterior.likelihood.input_noise is not None
    prediction = posterior.predict(NEW)
    assert torch.equal(doubt(posterior, NEW).argsort(), prediction.epistemic_variance[:, 0].argsort())
    by_input = prediction.epistemic_variance / prediction.aleatoric_variance
    assert not torch.equal(doubt(posterior, NEW).argsort(), by_input[:, 0].argsort())


def test_yes_or_no_counts_and_several_heads() -> None:
    yes = lw.fit(network(1), (X, Y > 0), likelihood="bernoulli", prior_precision=1.0)
    assert lw.novelty(yes, (X, Y > 0), held_out=(HELD[0], HELD[1] > 0)).by == "knn"
    assert torch.equal(doubt(yes, NEW), yes.predict(NEW).mutual_information())
    counts = lw.fit(network(1), (X, Y.double()[:, None]), likelihood="poisson", prior_precision=1.0)
    prediction = counts.predict(NEW)
    ratio = prediction.epistemic_variance / prediction.aleatoric_variance
    assert torch.allclose(doubt(counts, NEW), 0.5 * torch.log1p(ratio)[:, 0])
    heads = {"kind": lw.Categorical(), "size": lw.Gaussian(0.5)}
    joint = lw.Joint(heads, outputs={"kind": slice(0, 3), "size": [3]})
    targets = {"kind": Y, "size": REAL[:, 0]}
    posterior = lw.fit(network(4), (X, targets), likelihood=joint, prior_precision=1.0)
    both = posterior.predict(NEW)
    expected = both["kind"].mutual_information() + 0.5 * torch.log1p(both["size"].epistemic_variance[:, 0] / 0.5)
    assert torch.allclose(doubt(posterior, NEW), expected)
    detector = lw.novelty(posterior, (X, targets), held_out=(HELD[0], {"kind": HELD[1], "size": REAL[:60, 0]}))
    assert detector.p_value(NEW).shape == (40,)


def test_no_more_alarms_than_the_rate_if_each_input_is_left_out_in_turn() -> None:
    """Among n + 1 inputs at most a share of `rate` has an alarm against the n others. This is the guarantee."""
    posterior, pool = classes(params=lw.last_layer), torch.cat([HELD[0], NEW[:20]])
    whole = lw.novelty(posterior, (X, Y), held_out=(pool, torch.zeros(80, dtype=torch.long)))
    scores = torch.stack([part.double() for part in whole._scores(pool)])
    for rate in (0.05, 0.1, 0.25):
        alarms = 0
        for i in range(len(pool)):
            others = torch.cat([scores[:, :i], scores[:, i + 1 :]], 1).sort(1).values
            alarms += bool(replace(whole, held_out=others).joined(scores[:, i : i + 1].unbind())[0] <= rate)
        assert alarms <= rate * len(pool)


def test_a_rate_that_the_held_out_rows_cannot_resolve(caplog: Any) -> None:
    detector = lw.novelty(classes(), (X, Y), held_out=HELD)
    refused(lambda: detector.alarm(NEW, 0.03), "rate=0.03) needs 66 held-out rows, not 60")
    assert not caplog.records
    assert detector.alarm(NEW, 2 / 61).dtype == torch.bool
    assert "609 suffice." in caplog.text
    detector.alarm(NEW, 0.3)
    detector.alarm(NEW, 0.3)
    assert len(caplog.records) == 2  # one for each rate
    detector.alarm(NEW, 20 / 61)
    for rate in (0.0, 1.0, "5 %"):
        refused(lambda rate=rate: detector.alarm(NEW, rate), "a number between 0 and 1")


def test_a_network_with_held_out_data_has_p_values_of_its_novelty() -> None:
    model = network()
    detector = lw.novelty(model, (X, Y), held_out=HELD)
    expected = counted(detector(HELD[0]), detector(NEW))
    assert torch.equal(detector.p_value(NEW), expected)
    assert list(detector.why(NEW)) == ["novelty"]
    assert torch.equal(detector(NEW), lw.novelty(model, (X, Y))(NEW))
    refused(lambda: lw.novelty(model, (X, Y)).p_value(NEW), "lw.novelty(model, loader, held_out=")


def test_batches_and_single_inputs_have_the_p_values_of_one_batch() -> None:
    detector = lw.novelty(classes(), (X, Y), held_out=[(HELD[0][:25], HELD[1][:25]), (HELD[0][25:], HELD[1][25:])])
    expected = detector.p_value(NEW)
    assert torch.equal(detector.p_value([NEW[:7], (NEW[7:], Y[:33])]), expected)
    assert torch.equal(torch.cat([detector.p_value(one[None]) for one in NEW]), expected)


def test_half_precision() -> None:
    model = network().bfloat16()
    posterior = lw.fit(model, (X.bfloat16(), Y), params=lw.last_layer, prior_precision=1.0)
    detector = lw.novelty(posterior, (X.bfloat16(), Y), held_out=(HELD[0].bfloat16(), HELD[1]))
    assert detector.p_value(NEW.bfloat16()).dtype == torch.float64
    exact = lw.novelty(classes(params=lw.last_layer), (X, Y), held_out=HELD)
    assert (detector.p_value(NEW.bfloat16()) - exact.p_value(NEW)).abs().mean() < 0.1


def mixed(net: Any, tokens: Tensor) -> Tensor:
    """Outputs (B, T, 3) of tokens (B, T)."""
    h = net.embedding(tokens)
    return net.last(net.body(h + h.mean(1, keepdim=True)).tanh())


def test_outputs_with_positions_have_one_p_value_and_maps() -> None:
    generator = torch.Generator().manual_seed(3)
    x, held, new = (torch.randint(11, (n, 4), generator=generator) for n in (40, 30, 8))
    model = Net(mixed, embedding=nn.Embedding(11, 6), body=nn.Linear(6, 6), last=nn.Linear(6, 3)).eval()
    posterior = lw.fit(model, (x, x % 3), params=lw.last_layer, prior_precision=1.0)
    detector = lw.novelty(posterior, (x, x % 3), held_out=(held, held % 3))
    largest = posterior.predict(held).mutual_information().amax(1)
    scores = posterior.predict(new).mutual_information()
    why, maps = detector.why(new), detector.why(new, maps=True)
    assert torch.equal(why["doubt"], counted(largest, scores.amax(1)))
    assert torch.equal(maps["doubt"], torch.stack([counted(largest, row) for row in scores]))
    assert torch.equal(maps["doubt"].amin(1), why["doubt"])
    assert torch.equal(maps["novelty"], why["novelty"])
    loader = [new, new[:, :3]]  # texts of two lengths
    assert detector.p_value(loader).shape == (16,)
    alone = lw.novelty(posterior.model, (x, x % 3), held_out=(held, held % 3))
    refused(lambda: detector.why(loader, maps=True), "needs the detector of a posterior and one batch")
    refused(lambda: alone.why(new, maps=True), "needs the detector of a posterior and one batch")


def test_a_few_training_rows_among_the_held_out_ones_pass() -> None:
    held_out = torch.cat([HELD[0], X[:2]]), torch.cat([HELD[1], Y[:2]])
    assert lw.novelty(classes(), (X, Y), held_out=held_out).held_out.shape == (2, 62)  # type: ignore[union-attr]


def test_files_hold_the_held_out_scores_and_a_fingerprint_of_the_posterior(tmp_path: Path) -> None:
    posterior, path = classes(params=lw.last_layer), tmp_path / "detector.safetensors"
    detector = lw.novelty(posterior, (X, Y), held_out=HELD)
    detector.save(path)
    posterior.save(tmp_path / "posterior.safetensors")
    again = lw.Novelty.load(path, lw.load(tmp_path / "posterior.safetensors", posterior.model))
    assert torch.equal(again.p_value(NEW), detector.p_value(NEW))
    assert torch.equal(again(NEW), detector(NEW))
    refused(lambda: lw.Novelty.load(path, posterior.with_prior(2.0)), "a posterior, with another covariance")
    tempered = replace(posterior, likelihood=posterior.likelihood.with_logit_temperature(2.0))
    refused(lambda: lw.Novelty.load(path, tempered), "a posterior, with another likelihood")
    refused(lambda: lw.Novelty.load(path, posterior.model), "one of a posterior")
    alone = lw.novelty(posterior.model, (X, Y), held_out=HELD)
    alone.save(path)
    assert torch.equal(lw.Novelty.load(path, posterior.model).p_value(NEW), alone.p_value(NEW))
    refused(lambda: lw.Novelty.load(path, posterior), "one of a network, posterior.model")


def test_several_inputs_and_frames() -> None:
    pandas = pytest.importorskip("pandas")
    expected = lw.novelty(classes(), (X, Y), held_out=HELD).p_value(NEW)
    model = Net(lambda net, a, b: net.inner(a + b), inner=network()).eval()
    posterior = lw.fit(model, (X - 1, torch.ones_like(X), Y), prior_precision=1.0)
    detector = lw.novelty(
        posterior, (X - 1, torch.ones_like(X), Y), held_out=(HELD[0] - 1, torch.ones_like(HELD[0]), HELD[1])
    )
    assert torch.allclose(detector.p_value((NEW - 1, torch.ones_like(NEW))), expected)
    frame, held, new = (pandas.DataFrame(x.numpy(), columns=list("abcde")) for x in (X, HELD[0], NEW))
    posterior = lw.fit(network(), (frame, Y), prior_precision=1.0)
    detector = lw.novelty(posterior, (frame[list("edcba")], Y), held_out=(held[list("bacde")], HELD[1]))
    assert torch.equal(detector.p_value(new[list("cbade")]), expected)


def test_compare_and_its_report_have_the_share_of_alarms(tmp_path: Path) -> None:
    posterior = classes(params=lw.last_layer)
    detector = lw.novelty(posterior, (X, Y), held_out=HELD)
    table = lw.compare({"Full": posterior}, [(NEW[:20], Y[:20])], {"far": NEW[20:]}, score=detector, repeats=1)
    for name in table.rows:
        assert table[name]["far: AUROC by detector"] == float(metrics.auroc(detector(NEW[:20]), detector(NEW[20:])))
        assert set(table.predictions[name].p_values) == {"", "far"}
    shares = [float((p <= 0.05).double().mean()) for p in (detector.p_value(NEW[:20]), detector.p_value(NEW[20:]))]
    expected = f"an alarm for {shares[0]:.1%} of the held-out inputs, {shares[1]:.1%} of far."
    assert expected in " ".join(table.notes)
    page = table.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "p-value" in page
    assert "raises an alarm for" in page


@pytest.mark.parametrize("outputs", ["prediction", "scores", "latent"])
def test_a_deployed_network_returns_the_p_value(outputs: Any) -> None:
    posterior = classes(params=lw.last_layer)
    detector, alone = (lw.novelty(one, (X, Y), held_out=HELD) for one in (posterior, posterior.model))
    predictor = lw.deploy(posterior, X, outputs=outputs, novelty=detector)
    assert predictor.returns == (*lw.deploy(posterior, X, outputs=outputs).returns, "p_value")
    assert torch.equal(predictor(NEW)[-1], detector.p_value(NEW))
    predictor = lw.deploy(posterior, X, outputs=outputs, novelty=alone)
    assert torch.equal(predictor(NEW)[-1], alone.p_value(NEW))
    with pytest.raises(lw.LapwingError, match="by another way or posterior"):
        lw.deploy(posterior.with_prior(9.0), X, outputs=outputs, novelty=detector)


def test_rounded_doubts_of_a_last_layer_do_not_refuse_its_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = classes(params=lw.last_layer)
    detector = lw.novelty(posterior, (X, Y), held_out=HELD)
    noise = torch.linspace(0.9, 1.1, 8).double()  # small doubts of a weak prior differ by a percent in float32
    monkeypatch.setattr("lapwing.deployment.doubt", lambda posterior, x, via=None: noise if via else 1 / noise)
    assert lw.deploy(posterior, X, novelty=detector).returns[-1] == "p_value"
    refused(lambda: lw.deploy(posterior.with_prior(9.0), X, novelty=detector), "by another way or posterior")


@pytest.mark.parametrize("outputs", [0, 1, 2])
def test_a_deployed_network_has_the_p_values_of_its_way(outputs: int, tmp_path: Path) -> None:
    """For classes (0), and for regressions with noise."""
    targets = REAL[:, :outputs] if outputs else Y
    posterior = lw.fit(network(outputs or 3), (X, targets), lw.KFAC(), params=lw.everything, prior_precision=1.0)
    held = HELD[0], targets[:60]
    exact = lw.novelty(posterior, (X, targets), held_out=held)
    with pytest.raises(lw.LapwingError, match="Write detector = lw.novelty") as error:
        lw.deploy(posterior, X, novelty=exact)
    assert "via=way" in str(error.value)
    way = lw.deploy(posterior, X).via
    assert isinstance(way, lw.Scaled)
    detector = lw.novelty(posterior, (X, targets), held_out=held, via=way)
    predictor = lw.deploy(posterior, X, novelty=detector)
    assert predictor.via == way
    torch.testing.assert_close(predictor(NEW)[-1], detector.p_value(NEW), rtol=0, atol=1e-12)
    assert not torch.equal(detector.why(NEW)["doubt"], exact.why(NEW)["doubt"])
    detector.save(path := tmp_path / "detector.safetensors")
    again = lw.Novelty.load(path, posterior, via=way)
    assert torch.equal(again.p_value(NEW), detector.p_value(NEW))
    refused(lambda: lw.Novelty.load(path, posterior), "another way. Pass the way")


@pytest.mark.slow
def test_p_values_of_far_inputs_in_onnx(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model, x, far = network().float(), X.float(), torch.cat([NEW, 20 * NEW]).float()
    posterior = lw.fit(model, (x, Y), params=lw.last_layer, prior_precision=1.0)
    detector = lw.novelty(posterior, (x, Y), held_out=(HELD[0].float(), HELD[1]))
    predictor = lw.deploy(posterior, x, outputs="scores", novelty=detector)
    session = onnxruntime.InferenceSession(predictor.to_onnx(tmp_path / "network.onnx", x))
    information, p = session.run(["mutual_information", "p_value"], {"x": far.numpy()})
    expected = posterior.predict(far).mutual_information()
    assert torch.allclose(torch.from_numpy(information), expected, rtol=1e-3, atol=1e-5)  # NaN in earlier versions
    assert torch.allclose(torch.from_numpy(p), detector.p_value(far), atol=2.1 / 61)
