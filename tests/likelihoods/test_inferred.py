"""The likelihood inferred from the targets of a loader, and whether the network's outputs suit it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lapwing as lw
from lapwing.data.inputs import Samples
from lapwing.likelihoods.inferred import MAX_SAMPLES, inferred_likelihood
from tests.jacobian.test_rows import Function
from tests.refused import refused

SOFT = torch.tensor([[0.2, 0.8], [0.5, 0.5], [1.0, 0.0]])
LABELS = {
    "binary": (torch.tensor([0.0, 1.0, 1.0, 0.0]), ["all 0 or 1 in float32", "'bernoulli'", "'gaussian'", "y.long()"]),
    "binary column": (torch.tensor([[0.0], [1.0]], dtype=torch.bfloat16), ["all 0 or 1 in bfloat16", "'bernoulli'"]),
    "several labels": (torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 1.0]]), ["all 0 or 1", "'bernoulli'"]),
    "one-hot": (torch.eye(3)[[0, 2, 1, 0]], ["one-hot rows of shape (4, 3)", "y.argmax(1)", "'gaussian'"]),
    "soft": (SOFT, ["sum to one", "(3, 2)", "y.argmax(1)"]),
    "soft in bfloat16": (torch.rand(9, 10).softmax(1).bfloat16(), ["sum to one", "bfloat16"]),
}
REAL = {
    "counts": torch.tensor([0.0, 1.0, 2.0, 1.0]),
    "zeros": torch.zeros(4, 1),
    "shares in one column": torch.tensor([[0.2], [0.8]]),
    "nearly one-hot": torch.tensor([[0.0, 1.0], [0.3, 0.9]]),
    "signed rows that sum to one": torch.tensor([[2.0, -1.0], [0.5, 0.5]]),
    "not finite": torch.tensor([0.0, 2.5, float("nan")]),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_as_floats_are_no_regression(name: str) -> None:
    targets, parts = LABELS[name]
    model = nn.Linear(2, targets[0].numel()).to(targets.dtype).eval()
    x = torch.randn(len(targets), 2, dtype=targets.dtype)
    with pytest.raises(lw.LapwingError) as caught:
        lw.fit(model, [(x, targets)])
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert lw.fit(model, [(x, targets)], likelihood="gaussian").likelihood.name == "gaussian"


def test_one_hot_rows_of_bools_are_no_answers() -> None:
    x, y = torch.randn(300, 2), torch.eye(3)[torch.arange(300) % 3].bool()
    model = nn.Linear(2, 3).eval()
    refused(lambda: lw.fit(model, (x, y)), "one-hot rows … in bool … y.long().argmax(1) … likelihood='bernoulli'")
    assert lw.fit(model, (x, y), likelihood="bernoulli").likelihood.name == "bernoulli"  # the line that it says
    y[150, 1] = True  # in the second batch
    assert lw.fit(model, (x, y)).likelihood.name == "bernoulli"


@pytest.mark.parametrize("name", REAL)
def test_real_targets_are_a_regression(name: str) -> None:
    assert inferred_likelihood(REAL[name], [Samples(REAL[name], REAL[name])]).name == "gaussian"


def test_missing_labels_are_no_regression() -> None:
    x, y = torch.randn(40, 2), torch.arange(40.0).remainder(2)[:, None]
    y[::5] = float("nan")
    refused(lambda: lw.fit(nn.Linear(2, 1).eval(), (x, y)), "0, 1 or NaN … lw.Bernoulli(missing=True)")
    lw.fit(nn.Linear(2, 1).eval(), (x, y), likelihood=lw.Bernoulli(missing=True))  # the line that it says
    classes = torch.where(y[:, 0].isnan(), y[:, 0], torch.arange(40.0).remainder(3))
    refused(lambda: lw.fit(nn.Linear(2, 3).eval(), (x, classes)), "y.nan_to_num(-100).long()")
    assert lw.fit(nn.Linear(2, 3).eval(), (x, classes.nan_to_num(-100).long())).likelihood.name == "categorical"


def test_all_batches_decide() -> None:
    """A first batch of one real target that happens to be 0 or 1 says nothing; nor does one of ones alone."""
    x, y = torch.randn(40, 2), torch.randint(0, 2, (40, 1)).float()
    singles = DataLoader(list(zip(x, y, strict=True)), batch_size=1)
    refused(lambda: lw.fit(nn.Linear(2, 1).eval(), singles), "all 0 or 1")
    y[30] = 0.5
    assert lw.fit(nn.Linear(2, 1).eval(), singles, tune=None).likelihood.name == "gaussian"
    rows = [(x[:1], torch.tensor([[0.0, 1.0]])), (x[1:3], torch.tensor([[1.0, 1.0], [0.0, 0.0]]))]
    refused(lambda: lw.fit(nn.Linear(2, 2).eval(), rows), "all 0 or 1")


class _Endless(IterableDataset):
    def __init__(self) -> None:
        self.shown = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            self.shown += 1000
            yield torch.zeros(1000, 2), torch.arange(1000.0).remainder(2)


def test_a_stream_without_end_is_looked_at_for_a_while() -> None:
    stream = _Endless()
    refused(lambda: lw.fit(nn.Linear(2, 1).eval(), DataLoader(stream, batch_size=None)), "all 0 or 1")
    assert stream.shown < 2 * MAX_SAMPLES


def test_a_loader_of_real_targets_is_not_gone_through_to_infer() -> None:
    class Once(list):
        def __iter__(self) -> Any:
            raise AssertionError("the first batch is enough")

    assert inferred_likelihood(torch.randn(3, 1), Once()).name == "gaussian"


# --- outputs that are probabilities already --------------------------------------------------------------------------


def _classifier(*end: nn.Module) -> tuple[nn.Sequential, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), *end).eval()
    return model, torch.randn(30, 4), torch.arange(30) % 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_softmax_at_the_end_is_refused(dtype: torch.dtype) -> None:
    model, x, y = _classifier(nn.Softmax(1))
    model, x = model.to(dtype), x.to(dtype)
    refused(lambda: lw.fit(model, [(x, y)]), "sum to one … model[:-1](inputs) … model(inputs).log()")
    fitted = lw.fit(model, [(x, y)], forward=lambda model, inputs: model[:-1](inputs))  # the lines that it says
    assert fitted.likelihood.name == "categorical"
    lw.fit(model, [(x, y)], forward=lambda model, inputs: model(inputs).log())
    assert lw.fit(model, [(x, x[:, :3])]).likelihood.name == "gaussian"  # a regression on anything


def test_log_softmax_at_the_end_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """`J` is multiplied by `I - 1 pᵀ`, which Λ and class probabilities do not see."""
    model, x, y = _classifier(nn.LogSoftmax(1))
    model, x = model.double(), x.double()
    with_it, without = (lw.fit(network, [(x, y)], lw.Full(), prior_precision=0.5) for network in (model, model[:-1]))
    assert not caplog.records
    torch.testing.assert_close(with_it.predict(x).probs, without.predict(x).probs, rtol=1e-9, atol=1e-12)
    assert float(with_it.log_marginal_likelihood()) == pytest.approx(float(without.log_marginal_likelihood()), rel=1e-9)


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_sigmoid_at_the_end_is_warned_of_once(outputs: int, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, outputs), nn.Sigmoid()).eval()
    x = torch.randn(60, 4)
    y = torch.randint(2, (60, 1)).bool() if outputs == 1 else torch.arange(60) % 3
    loader = [(x[:30], y[:30]), (x[30:], y[30:])]
    with caplog.at_level(logging.WARNING, "lapwing"):
        lw.fit(model, loader)
        assert len([r for r in caplog.records if "like probabilities" in r.getMessage()]) == 1
        caplog.clear()
        lw.fit(model, loader, forward=lambda model, inputs: model(inputs).logit())
        lw.fit(nn.Linear(4, outputs).eval(), [(x[:1], y[:1])])  # a few outputs may lie anywhere
        lw.fit(model, [(x, torch.randn(60, outputs))])
    assert not [r for r in caplog.records if "like probabilities" in r.getMessage()]


class _Percent(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return 100 * (logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(1))


def test_probabilities_of_answers_are_warned_of_if_they_fit_better(caplog: pytest.LogCaptureFixture) -> None:
    generator = torch.Generator().manual_seed(0)
    x, model = torch.randn(200, 2, generator=generator), nn.Linear(2, 1).eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[4.0, -3.0]]))
        model.bias.zero_()
        y = torch.rand(200, 1, generator=generator) < model(x).sigmoid()  # answers that the network fits
    sigmoid, percent = nn.Sequential(model, nn.Sigmoid()).eval(), nn.Sequential(model, _Percent()).eval()
    for network, line in ((sigmoid, "model(inputs).logit()"), (percent, "(model(inputs) / 100).logit()")):
        caplog.clear()
        lw.fit(network, (x, y))
        assert caplog.text.count("look like p") == caplog.text.count(line) == 1
    caplog.clear()
    lw.fit(model, (x, y))
    lw.fit(sigmoid, (x, y), forward=lambda model, inputs: model(inputs).logit())
    lw.fit(percent, (x, y), forward=lambda model, inputs: (model(inputs) / 100).logit())
    assert "look like" not in caplog.text
    logs = nn.Sequential(model, nn.LogSigmoid()).eval()
    lw.fit(logs, (x, y))
    assert "look like log probabilities" in caplog.text
    caplog.clear()
    lw.fit(logs, (x, y), forward=lambda model, inputs: -(-model(inputs)).expm1().log())
    assert not caplog.text
    three, x, y = _classifier(_Percent())
    refused(lambda: lw.fit(three, [(x, y)]), "percentages … (model(inputs) / 100).log()")


# --- outputs that are not means of the targets -----------------------------------------------------------------------


def test_outputs_that_are_no_means_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 2, generator=generator)
    model = nn.Linear(2, 1).eval()
    rate = model(x).detach().exp()
    counts = torch.poisson(2 * rate, generator=generator)
    with torch.no_grad():
        model.bias.add_(0.6931)
    noise = torch.rand(300, 1, generator=generator)
    logits = nn.Linear(2, 1).eval()
    with torch.no_grad():
        logits.weight.mul_(5)
    cases = {
        "targets are counts, and exp": (model, counts, "likelihood='poisson'"),
        "targets are positive, and exp": (model, 4 * rate * noise, "model(x).exp()"),
        "targets are between 0 and 1": (logits, (logits(x).detach() + noise).sigmoid(), "soft_targets=True"),
        "worse than their mean": (model, model(x).detach() + 50, "in the units of the outputs"),
    }
    for text, (network, y, line) in cases.items():
        caplog.clear()
        assert lw.fit(network, (x, y), tune=None).likelihood.name == "gaussian"
        assert len(caplog.records) == 1, caplog.text
        assert text in caplog.text
        assert line in caplog.text
    caplog.clear()
    for y in (noise - 0.5, (model(x).detach() - model(x).detach().min() + 4 * noise).round()):
        trained = nn.Linear(2, 1).eval()
        with torch.no_grad():
            solution = torch.linalg.lstsq(torch.cat([x, torch.ones(300, 1)], 1), y).solution[:, 0]
            trained.weight.copy_(solution[None, :2])
            trained.bias.copy_(solution[2:])
        lw.fit(trained, (x, y), tune=None)  # noise, and counts of a network for their means
    assert not caplog.text


@pytest.mark.parametrize("level", [0.05, 1.0, 30.0])
def test_rates_instead_of_their_logarithms_are_warned_of(level: float, caplog: pytest.LogCaptureFixture) -> None:
    x, logs = torch.randn(1000, 2), nn.Linear(2, 1).eval()
    with torch.no_grad():
        logs.bias.fill_(math.log(level))
        y = torch.poisson(logs(x).exp())
    lw.fit(logs, (x, y), likelihood="poisson")
    assert "rates" not in caplog.text
    rates = nn.Sequential(logs, Function(torch.exp)).eval()
    lw.fit(rates, (x, y), likelihood="poisson")
    assert caplog.text.count("look like rates") == 1
    caplog.clear()
    lw.fit(rates, (x, y), likelihood="poisson", forward=lambda model, inputs: model(inputs).clamp_min(1e-6).log())
    assert "rates" not in caplog.text


def test_held_out_data_in_other_units_or_another_order_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    x, model = torch.randn(200, 2), nn.Linear(2, 1).eval()
    y = model(x).detach() + 0.1 * torch.randn(200, 1)
    train, held_out = (x[:100], y[:100]), (x[100:], y[100:])
    lw.fit(model, train, validation=held_out)
    assert "worse" not in caplog.text
    lw.fit(model, train, validation=(x[100:], 50 * y[100:] + 300))
    assert "the held-out targets worse than their mean" in caplog.text
    assert "the training targets worse" not in caplog.text
    classes = nn.Linear(2, 3).eval()
    with torch.no_grad():
        classes.weight.mul_(20)
    labels = classes(x).detach().argmax(1)
    for moved, warned in ((0, False), (1, True)):
        caplog.clear()
        lw.fit(classes, (x[:100], labels[:100]), validation=(x[100:], (labels[100:] + moved) % 3))
        assert ("The best temperature of Validation" in caplog.text) == warned


def test_labels_that_the_network_was_not_trained_for_are_warned_of(caplog):
    x, model = torch.randn(200, 2), nn.Linear(2, 3).eval()
    lw.fit(model, (x, torch.arange(200) % 3), prior_precision=1.0)  # not trained: about as good as equal probabilities
    with torch.no_grad():
        model.weight.mul_(20)
    logits = model(x).detach()
    y = logits.argmax(1)
    answers = logits > 0
    for labels, likelihood in ((y, None), (answers, "bernoulli")):
        lw.fit(model, (x, labels), prior_precision=1.0, likelihood=likelihood)
    unsure = torch.distributions.Categorical(logits=logits / 20).sample()  # of an overconfident network
    assert lw.fit(model, (x, unsure), lw.TemperatureScaling()).logit_temperature > 10
    assert not caplog.text
    wrong = ((y + 1) % 3, None, "model(x).argmax(1)"), (~answers, "bernoulli", "model(x) > 0")
    for labels, likelihood, line in wrong:
        lw.fit(model, (x, labels), prior_precision=1.0, likelihood=likelihood)
        assert "equal probabilities" in caplog.text
        assert line in caplog.text
        caplog.clear()
