"""What a fit without a method treats: by likelihood and price, said in the log, and as calibrated as promised."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.fitting.choice import default_method
from lapwing.likelihoods import NoiselessLikelihood
from lapwing.posterior import MethodInfo
from tests.trained import made_once, train
from tests.zoo_modules import Net


def tangent(size, outputs=1, explicit=0, memory=2**30):
    """What the choice reads of a tangent."""
    return SimpleNamespace(
        size=size, outputs=outputs, width=outputs, plan=SimpleNamespace(explicit_size=explicit), memory=memory,
        contraction_dtype=torch.float64, positions=SimpleNamespace(several=False), device=torch.device("cpu"),
    )  # fmt: skip


def gammas(f):
    return torch.distributions.Gamma(f.exp(), f.exp())


def classes(f):
    return torch.distributions.Categorical(logits=f @ torch.eye(f.shape[-1]).to(f))


def double_classes(f):
    """For networks in float64 only."""
    return torch.distributions.Categorical(logits=f @ torch.eye(f.shape[-1]).double())


@dataclass(frozen=True)
class Own(NoiselessLikelihood):
    """A likelihood by docs/extending.md, of counts."""

    name: ClassVar[str] = "own"

    def check(self, outputs, targets):
        lw.Poisson().check(outputs, targets)

    def log_prob(self, outputs, targets):
        return lw.Poisson().log_prob(outputs, targets)

    def fisher_root(self, outputs):
        return lw.Poisson().fisher_root(outputs)

    def predict(self, latent, link=None, generator=None):
        return lw.Poisson().predict(latent, link, generator)


@dataclass(frozen=True)
class OwnClasses(Own):
    """One of class numbers, which its shape of targets declares."""

    def target_shape(self, outputs):
        return ()


@pytest.mark.parametrize(
    ("made", "samples", "expected"),
    [
        (tangent(1000), 200, lw.Full()),
        (tangent(1000), 5000, lw.Full()),
        (tangent(1000), 10**6, lw.KFAC()),  # its fit takes too long
        (tangent(5000), 200, lw.Full()),  # in its dual form
        (tangent(5000), 1000, lw.KFAC()),
        (tangent(1000, memory=2**20), 200, lw.KFAC()),
        (tangent(900_000, 10), 200, lw.KFAC()),
        (tangent(900_000, 11), 200, None),
        (tangent(900_000, explicit=2000), 200, None),
        (tangent(2_000_000), 10, None),
    ],
    ids=str,
)
def test_a_regression_is_treated_as_a_whole_where_that_is_cheap(made, samples, expected):
    for likelihood in (lw.Gaussian(), lw.Gaussian(0.1), lw.Poisson(), lw.FromDistribution(gammas)):
        assert default_method(made, likelihood, samples) == expected
    for likelihood in (lw.Categorical(), lw.Ordinal(), lw.FromDistribution(double_classes), OwnClasses()):
        assert default_method(made, likelihood, samples) is None
    one_answer = made.outputs == 1  # follows the rule of regressions: all weights cost one backward pass
    assert default_method(made, lw.Bernoulli(), samples) == (expected if one_answer else None)


@made_once
def trained():
    """A small network that overfits, its data in an uneven last batch, and other data."""
    x = torch.randn(260, 3)
    y = (x[:, :1] * x[:, 1:2]).sin() + 0.3 * torch.randn(len(x), 1)
    model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 1))
    train(model, lambda: (model(x[:60]) - y[:60]).square().mean(), 500, 0.01)
    return model, list(zip(x[:60].split(40), y[:60].split(40), strict=True)), (x[60:], y[60:])


def test_the_default_is_logged_and_covers(caplog):
    model, loader, (x, y) = trained()
    with caplog.at_level(logging.INFO, "lapwing"):
        posterior = lw.fit(model, loader)
    (line,) = [one.getMessage() for one in caplog.records if "the default" in one.getMessage()]
    assert "Full(form='auto') over all 101 trained weights, the default" in line
    assert "params=lw.last_layer" in line
    kept = lw.plan(model, loader).kept_bytes
    assert "takes about 2 forward passes of the data" in line
    assert f"keeps {kept:,} bytes" in line
    assert posterior.tangent.size == 101
    low, high = posterior.predict(x).interval(0.9)
    assert 0.8 < ((low <= y) & (y <= high)).float().mean() < 0.97


LABELS, NUMBERS = torch.arange(30) % 2, torch.arange(30.0)[:, None] % 2
ANSWERS = NUMBERS.expand(30, 2)
HEADS = {"a": slice(0, 1), "b": slice(1, 3)}
CASES = {  # likelihood, targets, outputs, and whether the rule of classes holds
    "counts": (lw.Poisson(), NUMBERS, 1, False),
    "predicted noise": (lw.HeteroscedasticGaussian(), NUMBERS, 2, False),
    "gammas": (lw.FromDistribution(gammas), ANSWERS + 1, 2, False),
    "own": (Own(), ANSWERS, 2, False),
    "one answer": (lw.Bernoulli(), NUMBERS, 1, False),
    "answers": (lw.Bernoulli(), ANSWERS, 2, True),
    "classes": (lw.Categorical(), LABELS, 2, True),
    "ordered classes": (lw.Ordinal(), LABELS, 2, True),
    "classes of a distribution": (lw.FromDistribution(classes), LABELS, 2, True),
    "heads without classes": (lw.Joint({"a": lw.Gaussian(), "b": lw.Poisson()}, HEADS), (NUMBERS, ANSWERS), 3, False),
    "one head of classes": (lw.Joint({"a": lw.Poisson(), "b": lw.Categorical()}, HEADS), (NUMBERS, LABELS), 3, False),
    "heads of classes": (lw.Joint({"a": lw.Ordinal(), "b": lw.Categorical()}, HEADS), (LABELS, LABELS), 3, True),
}


@pytest.mark.parametrize("case", CASES)
def test_all_targets_but_classes_follow_the_rule_of_regressions_which_is_printed(case):
    likelihood, y, outputs, classified = CASES[case]
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).eval()
    data = [(torch.randn(30, 3), dict(zip("ab", y, strict=True)) if isinstance(y, tuple) else y)]
    posterior = lw.fit(model, data, likelihood=likelihood)
    assert posterior.tangent.size == 5 * outputs + (0 if classified else 16)
    assert lw.plan(model, data, likelihood=likelihood).parameters == posterior.tangent.size
    assert f"), the default for {'classes' if classified else 'targets that are not classes'}, 30 samples" in repr(
        posterior
    )
    assert "the default" not in repr(lw.fit(model, data, lw.Diagonal(), likelihood=likelihood, prior_precision=1.0))


def test_a_file_keeps_the_rule_and_older_files_have_none(reloaded):
    model, loader, _ = trained()
    posterior = lw.fit(model, loader)
    assert repr(reloaded(posterior, model)) == repr(posterior)
    assert MethodInfo.from_json({"name": "Full", "text": "Full()"}).rule is None


def test_given_options_are_used():
    model, loader, _ = trained()
    assert lw.fit(model, loader, params=lw.last_layer).tangent.size == 21
    assert lw.fit(model, loader, lw.KFAC()).method.name == "KFAC"
    assert lw.fit(model, loader, params=lw.everything).method.name == "KFAC"
    labels = [(x, (y[:, 0] > 0).long()) for x, y in loader]
    head = nn.Sequential(model[0], nn.Tanh(), nn.Linear(20, 2)).eval()
    assert lw.fit(head, labels).tangent.size == 42


def test_frozen_weights_are_left_out_and_the_last_layer_remains(caplog):
    model, loader, _ = trained()
    model[0].requires_grad_(False)
    assert lw.fit(model, loader).tangent.size == 21
    model.requires_grad_(False)
    with caplog.at_level(logging.INFO, "lapwing"):
        assert lw.fit(model, loader).tangent.size == 21
    assert "Only the last layer is treated, because all trained weights cannot be" in caplog.text
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("labels", [False, True])
def test_a_network_that_is_frozen_is_warned_of_unless_the_parameters_are_named(labels, caplog):
    model, loader, _ = trained()
    if labels:
        model, loader = nn.Sequential(*model, nn.Linear(1, 2)).eval(), [(x, (y[:, 0] > 0).long()) for x, y in loader]
    line = "All weights of Sequential are frozen, so lapwing treats only the last layer."
    lw.fit(model, loader)
    assert line not in caplog.text
    model.requires_grad_(False)
    lw.fit(model, loader, params=lw.last_layer)
    lw.fit(model, loader, params=lw.matching("*"))
    assert line not in caplog.text
    lw.fit(model, loader)
    assert [record.levelname for record in caplog.records if line in record.getMessage()] == ["WARNING"]


def test_expensive_weights_are_logged(caplog, monkeypatch):
    model, loader, _ = trained()
    monkeypatch.setattr("lapwing.fitting.choice.FULL_NUMBERS", 100)
    assert lw.fit(model, loader).tangent.size == 101
    monkeypatch.setattr("lapwing.fitting.choice.MAX_WEIGHTS", 100)
    with caplog.at_level(logging.INFO, "lapwing"):
        posterior = lw.fit(model, loader)
    assert (posterior.tangent.size, posterior.method.name) == (21, "KFAC")
    assert "all 101 weights cost too much" in caplog.text


def token_network():
    """A head over tokens, whose outputs have positions."""
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).eval()


def test_many_outputs_are_treated_by_their_diagonal(caplog, monkeypatch):
    monkeypatch.setattr("lapwing.fitting.choice.EXACT_OUTPUTS", 4)
    flat = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5)).eval()
    x, y, tokens = torch.randn(20, 3), torch.randint(5, (20,)), torch.randint(7, (20, 4))
    cases = [(flat, (x, y)), (flat, (x, torch.randn(20, 5))), (token_network(), (tokens, tokens % 5))]
    for model, data in cases:
        with caplog.at_level(logging.INFO, "lapwing"):
            posterior = lw.fit(model, [data])
        whole = data[1].is_floating_point()  # a small regression
        assert str(posterior.method) == ("Full(form='auto')" if whole else "Diagonal()")
        assert lw.plan(model, [data]).method == str(posterior.method)
        asked = lw.fit(model, [data], lw.KFAC(), params=lw.last_layer)
        assert asked.method.name == "KFAC"
        assert str(lw.fit(model, [data], params=lw.last_layer).method) == "Diagonal()"
        assert lw.fit(model, [data], params=lw.everything).method.name == "KFAC"
        held_out = (data[0].roll(1, 0), data[1])
        assert str(lw.fit(model, [data], params=lw.last_layer, validation=[held_out]).method) == "Diagonal()"
    assert "a matrix of 5 rows" in caplog.text
    assert "lw.fit(model, loader, lw.KFAC(), params=lw.last_layer)" in caplog.text
    few = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).eval()
    assert lw.fit(few, [(x, y % 4)]).method.name == "KFAC"


def test_a_regression_of_many_outputs_is_treated_by_its_diagonal(monkeypatch):
    monkeypatch.setattr("lapwing.fitting.choice.EXACT_OUTPUTS", 4)
    monkeypatch.setattr("lapwing.fitting.choice.FULL_NUMBERS", 10)
    monkeypatch.setattr("lapwing.fitting.choice.KFAC_OUTPUTS", 4)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5)).eval()
    assert str(lw.fit(model, [(torch.randn(20, 3), torch.randn(20, 5))]).method) == "Diagonal()"


def test_trained_weights_below_a_frozen_last_layer_are_treated(caplog):
    tokens = torch.randint(7, (20, 4))
    for model, data in [
        (nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5)).eval(), (torch.randn(20, 3), tokens[:, 0] % 5)),
        (token_network(), (tokens, tokens % 5)),
    ]:
        model[-1].requires_grad_(False)
        with caplog.at_level(logging.INFO, "lapwing"):
            posterior = lw.fit(model, [data], validation=[(data[0].roll(1, 0), data[1])])
        assert posterior.method.name == "KFAC"
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert set(posterior.tangent.parameters) == trained
        last = f"{len(model) - 1}.weight, {len(model) - 1}.bias"
        assert caplog.text.count("if the last layer is frozen") == 1  # all weights are not fitted again
        assert f"For that layer, {last}, write lw.fit(model, loader, lw.KFAC(), params=lw.last_layer)" in caplog.text
        assert "The last layer of" not in caplog.text
        assert lw.plan(model, [data]).parameters == posterior.tangent.size
        model[-1].bias.requires_grad_(True)
        assert set(lw.fit(model, [data]).tangent.parameters) == {f"{len(model) - 1}.{x}" for x in ("weight", "bias")}
        caplog.clear()


def test_a_frozen_last_layer_is_treated_where_nothing_that_is_trained_reaches_the_outputs(caplog):
    model = Net(lambda net, x: net.head(x), head=nn.Linear(3, 5).requires_grad_(False), other=nn.Linear(3, 3))
    with caplog.at_level(logging.INFO, "lapwing"):
        posterior = lw.fit(model.eval(), [(torch.randn(20, 3), torch.arange(20) % 5)])
    assert list(posterior.tangent.parameters) == ["head.weight", "head.bias"]
    assert "Only the last layer is treated, because all trained weights cannot be" in caplog.text


def test_the_default_for_all_weights_names_weights_that_the_outputs_do_not_depend_on(caplog):
    detached = lambda net, x: net.last(net.first(x).tanh().detach())  # noqa: E731
    lw.fit(
        Net(detached, first=nn.Linear(4, 8), last=nn.Linear(8, 1)).eval(),
        (torch.randn(30, 4), torch.randn(30, 1)),
        prior_precision=1.0,
    )
    assert caplog.text.count("has no gradient on the first batch for 2 of the parameters to treat (first.weight") == 1
