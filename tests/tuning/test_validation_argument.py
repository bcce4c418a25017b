"""`lw.fit(model, loader, validation=held_out)`: a loader or a pair of tensors, and what is wrong with training data."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import lapwing as lw


def data(outputs=3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.Tanh(), torch.nn.Linear(6, outputs)).double().eval()
    x = torch.randn(90, 2, dtype=torch.float64)
    y = (model(x) + torch.randn(90, outputs)).detach()
    return model, x, y if outputs == 1 else y.argmax(1)


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_pair_a_loader_and_the_tuning_agree(outputs):
    model, x, y = data(outputs)
    loader, pair = [(x[:40], y[:40])], (x[40:], y[40:])
    uneven = DataLoader(TensorDataset(*pair), batch_size=16)
    fits = [lw.fit(model, loader, lw.KFAC(), validation=held_out) for held_out in (pair, uneven)]
    fits.append(lw.fit(model, loader, lw.KFAC(), tune=lw.Validation([pair])))
    for other in fits[1:]:
        for name in ("prior_precision", "noise_variance" if outputs == 1 else "logit_temperature"):
            assert getattr(other, name) == pytest.approx(getattr(fits[0], name), rel=1e-6)


def test_a_regression_keeps_its_default_method():
    model, x, y = data(1)
    posterior = lw.fit(model, [(x[:40], y[:40])], validation=(x[40:], y[40:]))
    assert posterior.method == lw.fit(model, [(x[:40], y[:40])]).method
    assert posterior.tangent.size == 25


def test_training_data_are_noticed(caplog):
    model, x, y = data()
    loader, dataset = [(x[:20], y[:20]), (x[20:40], y[20:40])], TensorDataset(x[:40], y[:40])
    shuffled = DataLoader(dataset, batch_size=20, shuffle=True)

    def warnings(loader, held_out):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "lapwing"):
            lw.fit(model, loader, lw.KFAC(), params=lw.last_layer, validation=held_out)
        return sum("The validation data are the training data." in one.getMessage() for one in caplog.records)

    assert warnings(loader, loader) == 1
    assert warnings(loader, (x[:40], y[:40])) == 1
    assert warnings(shuffled, DataLoader(dataset, batch_size=7)) == 1
    assert warnings(shuffled, shuffled) == 1
    assert warnings(loader, (x[40:], y[40:])) == 0
    assert warnings(loader, (x[:40], (y[:40] + 1) % 3)) == 0
    parts = [
        DataLoader(dataset, batch_size=20, sampler=SubsetRandomSampler(part)) for part in (range(20), range(20, 40))
    ]
    assert warnings(*parts) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tune": lw.Evidence()}, r"validation= and tune=Evidence exclude each other.*Leave one of them out\."),
        ({"validation": 3}, r"Validation needs an iterable of \(inputs, targets\) batches, not"),
        ({"validation": []}, "yields no batch"),
    ],
)
def test_messages(options, message):
    model, x, y = data()
    with pytest.raises(lw.LapwingError, match=message):
        lw.fit(model, [(x[:40], y[:40])], **{"validation": (x[40:], y[40:]), **options})


def test_a_method_with_a_prior_of_its_own_gets_a_temperature():
    model, x, y = data()
    with torch.no_grad():
        model[2].weight.mul_(10)
    method = lw.SampledLLA()
    posterior = lw.fit(model, [(x[:40], y[:40])], method, validation=(x[40:], y[40:]))
    assert posterior.logit_temperature > 1
