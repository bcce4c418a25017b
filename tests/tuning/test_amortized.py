"""`lw.amortize`: variances learned from exact ones, which it gives back beyond its guard and in deployed networks."""

from __future__ import annotations

import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.inputs import Inputs
from lapwing.tuning import amortized
from lapwing.tuning.amortized import Amortized, codes_of, product
from tests.refilling import Refilling
from tests.refused import each_row, refused
from tests.zoo_modules import Net


@pytest.fixture(autouse=True)
def fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the rows, and a tenth of the steps: enough for small networks."""
    monkeypatch.setattr(amortized, "HEAD_ROWS", 1000)
    monkeypatch.setattr(amortized, "HEAD_STEPS", 800)


def inputs(count: int, seed: int) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


def joined(net: Any, tokens: Tensor, numbers: Tensor) -> Tensor:
    """Tokens and numbers to three logits."""
    return net.head(torch.tanh(net.hidden(torch.cat([net.embedding(tokens).mean(1), numbers], 1))))


def words(count: int, seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(9, (count, 5), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "numbers": inputs(count, seed)}


@cache
def fitted(kind: str) -> tuple[lw.Posterior[Any], Amortized]:
    """A posterior over all weights, and its amortised way."""
    torch.manual_seed(0)
    outputs = {"mean": 1, "means": 2}.get(kind, 3)
    if kind == "words":
        model: Any = Net(joined, embedding=nn.Embedding(9, 6), hidden=nn.Linear(10, 12), head=nn.Linear(12, 3))
    else:
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, outputs))
    x: Any = words(400, 1) if kind == "words" else inputs(400, 1)
    y: Any = inputs(400, 2)[:, :outputs] if kind in ("mean", "means") else torch.arange(400) % 3
    data: Any = [({key: value for key, value in x.items()}, y)] if kind == "words" else (x, y)
    likelihood = lw.Gaussian(noise="constant") if kind in ("mean", "means") else None
    posterior = lw.fit(
        model.eval(), data, lw.KFAC(), params=lw.everything, prior_precision=5.0, likelihood=likelihood
    )  # fmt: skip
    return posterior, lw.amortize(posterior, data)


def some(kind: str, count: int, seed: int = 3) -> Any:
    return words(count, seed) if kind == "words" else inputs(count, seed)


KINDS = ("mean", "means", "classes", "words")


def test_codes_hold_a_covariance() -> None:
    root = torch.randn(5, 4, 4, dtype=torch.float64)
    wanted = root @ root.mT
    codes = codes_of(wanted)
    factor = torch.zeros(5, 4, 4)
    row, column = torch.tril_indices(4, 4)
    factor[:, row, column] = codes[:, 4:]
    found = product(codes[:, :4].exp(), nn.functional.normalize(factor, dim=2))
    torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_variances_agree_with_exact_ones_at_new_inputs(kind: str) -> None:
    posterior, way = fitted(kind)
    found = way.check(posterior, some(kind, 300))
    assert 0.9 < found.ratio < 1.1
    assert found.rank > 0.9
    assert found.beyond < 0.1
    prediction, exact = (posterior.predict(some(kind, 300), via=via) for via in (way, None))
    if kind in ("mean", "means"):
        torch.testing.assert_close(prediction.mean, exact.mean)
        torch.testing.assert_close(prediction.std.log(), exact.std.log(), rtol=0, atol=0.1)
    else:
        torch.testing.assert_close(prediction.probs, exact.probs, rtol=0, atol=0.02)
        found_mi, exact_mi = prediction.mutual_information(), exact.mutual_information()
        assert float(torch.corrcoef(torch.stack([found_mi, exact_mi]))[0, 1]) > 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_beyond_the_guard_the_way_is_exact(kind: str) -> None:
    posterior, way = fitted(kind)
    x = some(kind, 40)
    far = {**x, "numbers": 40 * x["numbers"]} if kind == "words" else 40 * x
    assert way.check(posterior, far).beyond == 1
    found, exact = (posterior.latent(far, via=via) for via in (way, None))
    torch.testing.assert_close(found.centred_variance, exact.centred_variance, rtol=1e-3, atol=1e-6)
    mixed = {key: torch.cat([value, far[key]]) for key, value in x.items()} if kind == "words" else torch.cat([x, far])
    both = posterior.latent(mixed, via=way).centred_variance
    torch.testing.assert_close(both[40:], found.centred_variance)
    torch.testing.assert_close(both[:40], posterior.latent(x, via=way).centred_variance, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["mean", "means", "classes"])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_way_is_deployed(kind: str, scaled: bool, tmp_path: Path) -> None:
    posterior, way = fitted(kind)
    via = lw.Scaled(way, 2.0) if scaled else way
    detector = lw.novelty(posterior.model, (inputs(99, 1), inputs(99, 2)))
    predictor = lw.deploy(posterior, inputs(10, 4), via=via, novelty=detector)
    x = torch.cat([inputs(20, 5), 40 * inputs(20, 6)])
    found, wanted = dict(zip(predictor.returns, predictor(x), strict=True)), posterior.predict(x, via=via)
    inside = ~found["beyond"]
    assert int(inside[:20].sum()) > 15
    assert not inside[20:].any()
    torch.testing.assert_close(found["novelty"], detector(x).to(x))
    known = (inputs(99, 1), inputs(99, 2)) if kind != "classes" else (inputs(99, 1), torch.arange(99) % 3)
    detector = lw.novelty(posterior, known, held_out=(inputs(60, 7), known[1][:60]), via=via)
    detector.save(path := tmp_path / "detector.safetensors")
    refused(lambda: lw.Novelty.load(path, posterior), "another way. Pass the way")
    detector = lw.Novelty.load(path, posterior, via=via)
    p_value = lw.deploy(posterior, inputs(10, 4), novelty=detector)(x)[-1]
    assert ((p_value - detector.p_value(x))[inside].abs() < 2.1 / 61).all()  # a rounded score may change its rank
    assert p_value[~inside].max() <= 0.2
    if kind == "classes":
        torch.testing.assert_close(found["probabilities"][inside], wanted.probs[inside], rtol=1e-4, atol=1e-5)
        return
    torch.testing.assert_close(found["variance"][inside], wanted.variance[inside], rtol=1e-4, atol=1e-6)
    largest = float(via.factor if isinstance(via, lw.Scaled) else 1.0) * way.head.largest + posterior.noise_variance
    torch.testing.assert_close(found["variance"][~inside], largest.expand(int((~inside).sum()), -1), rtol=1e-4, atol=0)


def test_the_way_and_its_deployed_network_are_copied_by_pickle() -> None:
    posterior, way = fitted("mean")
    x = inputs(10, 4)
    wanted = posterior.predict(x, via=way).variance
    assert torch.equal(posterior.predict(x, via=pickle.loads(pickle.dumps(way))).variance, wanted)
    predictor = lw.deploy(posterior, x, via=way)
    for ours, theirs in zip(pickle.loads(pickle.dumps(predictor))(x), predictor(x), strict=True):
        assert torch.equal(ours, theirs)


def test_noise_by_the_inputs_is_deployed_too() -> None:
    x = inputs(500, 1)
    y = x[:, :1] + x[:, 1:2].exp() * inputs(500, 2)[:, :1]
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).eval()
    posterior = lw.fit(
        model, (x, y), lw.KFAC(), params=lw.everything, likelihood=lw.Gaussian(noise="input"), tune=lw.BoundedEvidence()
    )  # fmt: skip
    way = lw.amortize(posterior, (x, y))
    found = dict(zip(*((p := lw.deploy(posterior, x[:9], via=way)).returns, p(x[:50])), strict=True))
    wanted, inside = posterior.predict(x[:50], via=way), ~found["beyond"]
    torch.testing.assert_close(found["variance"][inside], wanted.variance[inside], rtol=1e-4, atol=1e-6)


def test_one_input_many_batches_and_low_precision() -> None:
    posterior, way = fitted("means")
    x = inputs(30, 7)
    whole = posterior.latent(x, via=way).variance
    torch.testing.assert_close(posterior.latent(x[:1], via=way).variance, whole[:1])
    torch.testing.assert_close(posterior.latent([x[:7], x[7:]], via=way).variance, whole)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).bfloat16().eval()
    data = inputs(400, 1).bfloat16(), inputs(400, 2)[:, :1].bfloat16()
    coarse = lw.fit(model, data, lw.KFAC(), prior_precision=5.0, likelihood=lw.Gaussian(0.5))
    low = lw.amortize(coarse, data)
    assert 0.85 < low.check(coarse, inputs(200, 3).bfloat16()).ratio < 1.15
    assert coarse.predict(x.bfloat16(), via=low).std.shape == (30, 1)


def test_a_loader_that_refills_its_tensors_gives_the_same_way() -> None:
    posterior, way = fitted("mean")
    x, y = inputs(400, 1), inputs(400, 2)[:, :1]
    batches = list(zip(x.split(50), y.split(50), strict=True))
    for given in (Refilling(batches), batches):
        again = lw.amortize(posterior, given)
        assert again.check(posterior, inputs(100, 3)).rank > 0.95
        found, wanted = (posterior.latent(inputs(100, 3), via=each).variance for each in (again, way))
        torch.testing.assert_close(found.log(), wanted.log(), rtol=0, atol=0.2)


def test_unlabelled_inputs_widen_the_guard() -> None:
    posterior, way = fitted("mean")
    data, new = (inputs(400, 1), inputs(400, 2)[:, :1]), 5 + inputs(400, 8)
    wide = lw.amortize(posterior, data, unlabelled=[(new[:200],), (new[200:],)])
    x = 5 + inputs(100, 9)
    assert way.check(posterior, x).beyond > 0.9
    assert wide.check(posterior, x).beyond < 0.1
    assert 0.9 < wide.check(posterior, x).ratio < 1.1


def test_corrupted_inputs_of_equal_samples_are_these_samples() -> None:
    """Mixed, stretched and exchanged samples are combinations of samples, with weights that sum to one."""
    x = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64).expand(9, 3)
    generator = torch.Generator().manual_seed(0)
    changed = [inputs.value for inputs in amortized._corrupted(Inputs((x, torch.arange(9))), generator)]
    assert len(changed) == 4
    for found, numbers in changed:
        torch.testing.assert_close(found, x)
        assert torch.equal(numbers, torch.arange(9))


def test_a_poor_head_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    posterior, _ = fitted("mean")
    monkeypatch.setattr(amortized, "HEAD_STEPS", 3)
    lw.amortize(posterior, (inputs(400, 1), inputs(400, 2)[:, :1]))
    (line,) = [one for one in caplog.records if "times the exact ones" in one.getMessage()]
    assert line.levelname == "WARNING"
    left_out = int(line.getMessage().split(" left-out rows")[0].split()[-1])
    assert left_out == pytest.approx(400 * amortized.HEAD_LEFT_OUT, abs=20)


def test_the_same_way_for_the_same_data_and_torchs_generator_stays() -> None:
    posterior, way = fitted("mean")
    before = torch.get_rng_state()
    again = lw.amortize(posterior, (inputs(400, 1), inputs(400, 2)[:, :1]))
    assert torch.equal(torch.get_rng_state(), before)
    assert again.agreement == way.agreement


def of(model: nn.Module, y: Tensor) -> lw.Posterior[Any]:
    return lw.fit(model.eval(), (inputs(30, 1), y), prior_precision=1.0)


LABELS, AT_POSITIONS = torch.arange(60).reshape(30, 2) % 3, nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)))


def changed() -> lw.Posterior[Any]:
    """A posterior whose network was trained further."""
    posterior = of(nn.Linear(4, 1), inputs(30, 2)[:, :1])
    with torch.no_grad():
        posterior.model.weight.mul_(2)
    return posterior


OTHER = "belongs to another posterior"
REFUSED = [
    (lambda posterior, way: posterior.with_prior(3.0).predict(inputs(5, 1), via=way), OTHER),
    (lambda posterior, way: posterior.with_prior(5.0, noise_variance=2.0).predict(inputs(5, 1), via=way), OTHER),
    (lambda posterior, way: way.check(posterior.with_prior(3.0), inputs(5, 1)), OTHER),
    (lambda posterior, way: posterior.latent(inputs(5, 1), way, joint=True), "has no covariances across inputs"),
    (lambda posterior, way: posterior.latent(inputs(5, 1).requires_grad_(), way), "has no gradients at inputs"),
    (lambda posterior, way: posterior.latent(lw.Uncertain(inputs(5, 1), 0.1), way), "ncertain"),
    (lambda posterior, way: lw.amortize(posterior, (inputs(50, 1), inputs(50, 2)[:, :1])), "from 50 inputs"),
    (lambda posterior, way: lw.amortize(posterior.model, (inputs(50, 1),)), "takes a posterior first"),
    (lambda posterior, way: lw.amortize(of(nn.Linear(4, 30), torch.arange(30)), inputs(30, 1)), "are 30 for each"),
    (lambda posterior, way: lw.amortize(of(AT_POSITIONS, LABELS), (inputs(30, 1), LABELS)), "have positions"),
    (lambda posterior, way: lw.amortize(changed(), (inputs(99, 1), inputs(99, 2))), "after the fit"),
]
"""Calls of a posterior and its way."""


@each_row(REFUSED)
def test_a_call_is_refused_in_these_words(call: Any, words: str) -> None:
    refused(lambda: call(*fitted("mean")), words)
