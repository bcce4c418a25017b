"""`explain`, `influence` and `value`, against refits of linear models, dense oracles and networks trained again."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import tqdm.auto
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import lapwing as lw
from lapwing.posterior import Explanation
from tests.conformance import close
from tests.refused import refused
from tests.trained import minimised

F64 = torch.float64
METHODS = [
    lw.Full(), lw.Diagonal(), lw.KFAC(), lw.ELLA(rank=5, rows=20), lw.ELLA(rank=5, rows=20, residual="prior"),
    lw.SubsetOfData(size=9), lw.SampledLLA(draws=5),
]  # fmt: skip
PRECISION, NOISE = 0.7, 0.3


def data(count: int = 24, features: int = 3, outputs: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(count, n, generator=generator, dtype=F64) for n in (features, outputs))
    return x, y


def ridge(x: Tensor, y: Tensor, w: Tensor | None = None) -> nn.Linear:
    """Returns the linear network at the optimum of `w |y - f|²/(2σ²) + δ/2 |θ|²`."""
    model, root = nn.Linear(x.shape[1], y.shape[1]).double().eval(), 1.0 if w is None else w.sqrt()[:, None]
    ones = root * torch.cat([x, torch.ones_like(x[:, :1])], 1)
    precision = ones.T @ ones / NOISE + PRECISION * torch.eye(ones.shape[1], dtype=F64)
    weights = torch.linalg.solve(precision, ones.T @ (root * y) / NOISE)
    model.weight.data, model.bias.data = weights[:-1].T.contiguous(), weights[-1].clone()
    return model


def fitted(model: nn.Module, x: Tensor, y: Tensor, method: Any = None, **options: Any) -> lw.Posterior:
    options = {"likelihood": lw.Gaussian(NOISE), "prior_precision": PRECISION} | options
    return lw.fit(model, (x, y), method or lw.Full(), **options)


def network(outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double().eval()


@pytest.mark.parametrize("copies", [1, 3])
def test_influence_is_exact_for_a_linear_model(copies: int) -> None:
    """With `data_size` a row is removed with all its copies."""
    (x, y), test = data(), torch.randn(5, 3, dtype=F64)

    def optimum(rows: Any) -> nn.Linear:
        return ridge(x[rows].repeat(copies, 1), y[rows].repeat(copies, 1))

    model, size = optimum(slice(None)), None if copies == 1 else copies * len(x)
    found = fitted(model, x, y, data_size=size).influence([(x[:10], y[:10]), (x[10:], y[10:])], test)
    keep = torch.eye(len(x), dtype=torch.bool).logical_not()
    again = torch.stack([(optimum(rows)(test) - model(test)).detach() for rows in keep], -1)
    close(found, again)


def test_a_temperature_and_noise_ratios_count_as_in_the_fit() -> None:
    """With τ a row counts 1/τ times, as with τ times its noise."""
    (x, y), test = data(), torch.randn(4, 3, dtype=F64)
    model = network()
    cold = fitted(model, x, y, temperature=2.0, likelihood=lw.Gaussian(NOISE, noise_ratios=(1.0, 4.0)))
    wide = fitted(model, x, y, likelihood=lw.Gaussian(2 * NOISE, noise_ratios=(1.0, 4.0)))
    close(cold.influence((x, y), test), wide.influence((x, y), test))
    close(cold.value(x, test), wide.value(x, test))


def test_influence_takes_the_sample_weights_of_the_fit(reloaded: Any) -> None:
    """A row of weight w is removed with its weight, so the weighted optimum without it is the reference."""
    (x, y), test = data(), torch.randn(5, 3, dtype=F64)
    w = 2 * torch.rand(len(x), generator=torch.Generator().manual_seed(0), dtype=F64)
    w[3] = 0

    model = ridge(x, y, w)
    options: Any = {"likelihood": lw.Gaussian(NOISE), "prior_precision": PRECISION, "sample_weights": True}
    posterior = lw.fit(model, [(x, y, w)], lw.Full(), **options)
    without = (torch.where(torch.arange(len(x)) == row, 0.0, w) for row in range(len(x)))
    again = torch.stack([(ridge(x, y, rest)(test) - model(test)).detach() for rest in without], -1)
    close(posterior.influence([(x[:9], y[:9], w[:9]), (x[9:], y[9:], w[9:])], test), again)
    assert not posterior.influence((x, y, w), test)[..., 3].any()
    assert 3 not in posterior.explain(test, [(x, y, w)]).rows
    loaded = reloaded(posterior, model)
    for one in (posterior, loaded, posterior.update((x, y))):
        refused(lambda one=one: one.influence((x, y), test), "no sample weights … targets, weights")


def trained(x: Tensor, labels: Tensor) -> nn.Module:
    """Returns the optimum of the cross entropy of a linear classifier, with weight decay 1."""
    model = nn.Linear(3, 3).double()

    def loss() -> Tensor:
        decay = sum(p.square().sum() for p in model.parameters()) / 2
        return nn.functional.cross_entropy(model(x), labels, reduction="sum") + decay

    return minimised(model, loss)


def test_influence_of_labels_is_close_to_training_again() -> None:
    """A linear classifier is not quadratic in its weights, so removal is one Newton step of it."""
    x, test = data(60)[0], torch.randn(5, 3, dtype=F64)
    labels = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    labels[:3] = (labels[:3] + 1) % 3
    model = trained(x, labels)
    posterior = fitted(model, x, labels, likelihood="categorical", prior_precision=1.0)
    found = posterior.influence((x, labels), test)
    keep = torch.eye(len(x), dtype=torch.bool).logical_not()[:4]
    again = torch.stack([(trained(x[rows], labels[rows])(test) - model(test)).detach() for rows in keep], -1)
    centred = [part - part.mean(1, keepdim=True) for part in (found[..., :4], again)]
    assert torch.corrcoef(torch.stack([part.flatten() for part in centred]))[0, 1] > 0.99


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(method).partition("(s")[0])
def test_formulas_of_every_structure(method: Any) -> None:
    x, y = data(12)
    test = torch.randn(3, 3, dtype=F64)
    posterior = fitted(network(), x, y, method)
    joint = posterior.latent(torch.cat([test, x]), joint=True).covariance
    cross, own = joint[:3, :, 3:], joint[3:, :, 3:].diagonal(dim1=0, dim2=2).movedim(-1, 0)  # (3, 2, 12, 2), (12, 2, 2)
    eye, score = torch.eye(2, dtype=F64), (y - posterior.model(x).detach()) / NOISE
    exact = bool((torch.linalg.eigvalsh(own / NOISE) < 1).all())
    moved = torch.linalg.solve(eye - own / NOISE, score[..., None])[..., 0] if exact else score
    close(posterior.influence((x, y), test), -torch.einsum("bcnd,nd->bcn", cross, moved), 1e-7)
    middle = torch.linalg.inv(own + NOISE * eye)
    close(posterior.value(x, test), torch.einsum("bcnd,nde,bcne->n", cross, middle, cross), 1e-7)
    explanation = posterior.explain(test)
    close(explanation.variance, posterior.latent(test).variance, 1e-7)
    close(explanation.noise, torch.full((3, 2), NOISE, dtype=F64))


def test_shares_are_those_of_dense_blocks() -> None:
    (x, y), test = data(), torch.randn(4, 3, dtype=F64)
    posterior = fitted(network(), x, y)
    rows = posterior.tangent.record(test, dtype=F64).rows()
    parts = rows.split([block.size for block in posterior.tangent.blocks], -1)
    products = (rows @ posterior.covariance.to_dense()).split([part.shape[-1] for part in parts], -1)
    found = posterior.explain(test).weights
    assert list(found) == ["0", "2"]
    negative = Explanation(torch.ones(1, 1), {"0": torch.full((1, 1), 3.0), "2": torch.full((1, 1), -1.0)})
    assert "0 150%, 2 -50%; below 0%: the layer offsets errors of other layers" in repr(negative)
    for share, part, product in zip(found.values(), parts, products, strict=True):
        close(share, (part * product).sum(-1))


def test_value_is_the_fall_after_a_fit_with_the_label() -> None:
    x, y = data()
    pool, test, given = x[:4] + 1, x[4:7] - 1, x[7:10] + 2
    model = network()
    posterior = fitted(model, x, y)
    before = posterior.latent(test).variance.sum()
    labelled = [fitted(model, torch.cat([x, row[None]]), torch.cat([y, y[:1]])) for row in pool]
    falls = [before - one.latent(test).variance.sum() for one in labelled]
    close(posterior.value(pool, test), torch.stack(falls), 1e-7)
    more = fitted(model, torch.cat([x, given]), torch.cat([y, y[:3]]))
    close(posterior.value(pool, test, given), more.value(pool, test), 1e-7)
    assert torch.equal(posterior.value(pool, test, given[:0]), posterior.value(pool, test))


@pytest.mark.parametrize("method", [lw.Full(), lw.KFAC(), lw.ELLA(rank=5, rows=20)], ids=str)
def test_value_is_differentiable_in_the_candidates(method: lw.Method) -> None:
    x, y = data()
    posterior, pool, step = fitted(network(), x, y, method), x[:2] + 1, 1e-5 * torch.eye(6, dtype=F64).view(6, 2, 3)
    (found,) = torch.autograd.grad(posterior.value(start := pool.clone().requires_grad_(), x, x[3:5]).sum(), start)
    ends = [
        posterior.value(pool + move, x, x[3:5]).sum() - posterior.value(pool - move, x, x[3:5]).sum() for move in step
    ]
    close(found.flatten(), torch.stack(ends) / 2e-5, 1e-6)


def test_chunks_change_nothing() -> None:
    (x, y), model = data(), network()
    many = fitted(model, x, y, lw.KFAC())
    few = replace(many, tangent=replace(many.tangent, memory=2**14))
    close(few.influence((x, y), x[:7]), many.influence((x, y), x[:7]))
    close(few.value(x, x[:7], x[:2]), many.value(x, x[:7], x[:2]))
    found, wanted = few.explain(x, (x, y)), many.explain(x, (x, y))
    for name, share in wanted.weights.items():
        close(found.weights[name], share)
    assert torch.equal(found.rows, wanted.rows)
    few = replace(many, tangent=replace(many.tangent, memory=2**10))  # one output at a time
    for name, share in many.explain(x).weights.items():
        close(few.explain(x).weights[name], share)
    refused(lambda: few.value(x, x[:7], x), "posterior.value needs … memory= … or pass fewer of them")


def test_explain_lists_rows_and_asks_the_detector() -> None:
    x, y = data()
    posterior = fitted(network(), x, y)
    found = posterior.explain(x[:3], (x, y), novelty=lambda at: at.square().sum(1))
    close(found.novelty, x[:3].square().sum(1))
    pulls = posterior.influence((x, y), x[:3]).norm(dim=1)
    assert torch.equal(found.rows, pulls.topk(5).indices)
    assert "0 " in repr(found)
    classes = lw.fit(network(3), (x, torch.arange(24) % 3), lw.KFAC())
    probabilities = classes.model(x[:3]).softmax(-1).detach()
    close(classes.explain(x[:3]).noise, probabilities * (1 - probabilities))
    assert classes.explain(x[:3]).rows is None
    tempered = lw.fit(classes.model, (x, torch.arange(24) % 3), likelihood=lw.Categorical(logit_temperature=2.5))
    calibrated = tempered.of(lambda f: (f(x[:3]) / tempered.logit_temperature).softmax(-1)).mean
    close(tempered.explain(x[:3]).noise, calibrated * (1 - calibrated))
    assert classes.explain(x[:3]).novelty is None


def test_a_coarse_covariance_is_told(caplog: pytest.LogCaptureFixture) -> None:
    x, y = data()
    posterior = fitted(network(), x, y, lw.KFAC(), prior_precision=1e-3, likelihood=lw.Gaussian(1e-3))
    with caplog.at_level(logging.WARNING, "lapwing"):
        found = posterior.influence((x, y), x[:2])
    assert "leverage of 1 or more" in caplog.text
    joint = posterior.latent(x, joint=True).covariance[:2]
    close(found, -torch.einsum("bcnd,nd->bcn", joint, (y - posterior.model(x).detach()) / 1e-3), 1e-6)


def test_refusals() -> None:
    x, y = data()
    posterior = fitted(network(), x, y)
    tagger = nn.Conv1d(3, 2, 1).double().eval()
    positions = lw.fit(tagger, (torch.randn(6, 3, 4, dtype=F64), torch.randn(6, 2, 4, dtype=F64)), lw.KFAC(),
                       likelihood=lw.Gaussian(0.1))  # fmt: skip
    at_positions = torch.randn(2, 3, 4, dtype=F64)
    last = lw.fit(tagger, (at_positions, torch.randn(2, 2, dtype=F64)), likelihood=lw.Gaussian(0.1),
                  forward=lambda model, x: model(x)[:, :, -1])  # fmt: skip
    assert last.explain(at_positions).variance.shape == (2, 2)  # as the message of the refusal says
    shuffled = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=torch.Generator())
    cases: list[tuple[Any, str]] = [
        (lambda: posterior.influence(shuffled, x), "numbers of training rows need the same order.*shuffle=False"),
        (lambda: posterior.influence(iter([(x, y)]), x), "generators.*a list of batches"),
        (lambda: posterior.explain(x, shuffled), "numbers of training rows need the same order"),
        (lambda: posterior.explain(x, novelty=3), "novelty=3.*detector"),
        (lambda: posterior.explain(x, novelty=lambda at: at), "detector.*\\(B,\\)"),
        (lambda: posterior.value([x], x), "One batch.*one tensor"),
        (lambda: posterior.explain(lw.Uncertain(x, 0.1)), "Uncertain"),
        (lambda: posterior.influence([], x), "no row"),
        (lambda: posterior.influence(x, x), "\\(x, y\\)"),
        (lambda: positions.value(at_positions, at_positions), "positions.*forward=lambda.*of\\("),
    ]
    for call, message in cases:
        with pytest.raises(lw.LapwingError, match=message):
            call()


def test_influence_multiplies_each_row_by_two_vectors_and_not_by_its_outputs() -> None:
    """All pairs of 10 outputs of 30 rows and 30 inputs would be 2 · 300² products for each of the 2 874 weights."""
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 10)).eval()
    x, y = torch.randn(30, 40), torch.arange(30) % 10
    posterior = lw.fit(model, (x, y), lw.KFAC(), prior_precision=1.0)
    with FlopCounterMode(display=False) as counter:
        posterior.influence((x, y), x)
    assert counter.get_total_flops() < 2 * 300**2 * posterior.tangent.size / 8


def test_influence_and_value_have_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []
    (x, y), real = data(), tqdm.auto.tqdm
    monkeypatch.setattr(tqdm.auto, "tqdm", lambda **options: labels.append(options["desc"]) or real(**options))
    posterior = fitted(network(), x, y)
    posterior.influence([(x[:10], y[:10]), (x[10:], y[10:])], x[:2], progress=True)
    posterior.value(x, x[:2], progress=True)
    posterior.value(x, x[:2], progress=False)
    assert labels == ["training rows", "influence of training rows", "candidates"]
