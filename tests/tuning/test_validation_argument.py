"""`lw.fit(model, loader, validation=held_out)`: a loader or a pair of tensors, and what is wrong with training data."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import lapwing as lw
from tests.zoo_modules import Net

pandas = pytest.importorskip("pandas")


def data(outputs=3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.Tanh(), torch.nn.Linear(6, outputs)).double().eval()
    x = torch.randn(90, 2, dtype=torch.float64)
    y = (model(x) + torch.randn(90, outputs)).detach()
    return model, x, y if outputs == 1 else y.argmax(1)


@pytest.mark.quick(1)
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
    assert str(posterior.method) == str(lw.fit(model, [(x[:40], y[:40])]).method)
    assert posterior.tangent.size == 25


@pytest.mark.quick(1)
@pytest.mark.parametrize("outputs", [1, 3])
def test_few_held_out_samples_are_warned_of_once(outputs, caplog):
    model, x, y = data(outputs)
    for count, times in ((29, 1), (30, 0)):
        caplog.clear()
        held_out = [(x[40:50], y[40:50]), (x[50 : 40 + count], y[50 : 40 + count])]
        lw.fit(model, [(x[:40], y[:40])], validation=held_out)
        assert sum("29 held-out samples are too few" in one.getMessage() for one in caplog.records) == times


def known(caplog, model, loader, held_out, **options):
    """Returns the percentages in the warnings of held-out samples that are training samples."""
    caplog.clear()
    lw.fit(copy.deepcopy(model), loader, lw.KFAC(), params=lw.last_layer, validation=held_out, **options)
    texts = [one.getMessage() for one in caplog.records]
    return [int(text.split(" %")[0]) for text in texts if "of the validation samples are training samples." in text]


def test_training_data_are_noticed(caplog):
    model, x, y = data()
    loader, dataset = [(x[:20], y[:20]), (x[20:40], y[20:40])], TensorDataset(x[:40], y[:40])
    shuffled = DataLoader(dataset, batch_size=20, shuffle=True)

    class Noisy(TensorDataset):
        def __getitem__(self, index):
            inputs, target = super().__getitem__(index)
            return inputs + 0.1 * torch.randn_like(inputs), target

    noisy = Noisy(x[:40], y[:40])
    for training, held_out in (
        (DataLoader(noisy, 20, shuffle=True), DataLoader(noisy, 40)), (loader, loader), (loader, (x[:40], y[:40])),
        (shuffled, DataLoader(dataset, batch_size=7)), (shuffled, shuffled),
    ):  # fmt: skip
        assert known(caplog, model, training, held_out) == [100]
    lw.fit(copy.deepcopy(model), loader, lw.KFAC(), params=lw.last_layer, tune=lw.Validation(loader))
    assert "100 % of the validation samples are training samples." in caplog.messages[-1]
    parts = [DataLoader(dataset, 20, sampler=SubsetRandomSampler(part)) for part in (range(20), range(20, 40))]
    other = x[40:], y[40:]
    for training, held_out in ((shuffled, other), (loader, other), (loader, (x[:40], (y[:40] + 1) % 3)), parts):
        assert known(caplog, model, training, held_out) == []


def test_held_out_samples_among_the_training_samples(caplog):
    model, x, y = data()
    one_more = [(x[20:40], y[20:40]), (x[:20], y[:20])]
    for count, found in ((40, [100]), (20, [50]), (3, [8]), (2, []), (0, [])):
        rows = torch.arange(40 - count, 80 - count)
        assert known(caplog, model, one_more, (x[rows], y[rows])) == found
    pairs = DataLoader(TensorDataset(x[:40], y[:40]), 7, shuffle=True, generator=torch.Generator().manual_seed(0))
    frames = (pandas.DataFrame(x[20:60].numpy(), columns=["a", "b"]), y[20:60].numpy())
    assert known(caplog, model, pairs, frames) == [50]
    weighted = [(x[:40], y[:40], torch.ones(40))]
    assert known(caplog, model, weighted, (x[30:70], y[30:70]), sample_weights=True) == [25]
    dicts = [{"a": x[i : i + 20], "b": {"c": x[i : i + 20, 0]}, "labels": y[i : i + 20]} for i in (0, 20, 40)]
    assert known(caplog, model, dicts[:2], dicts[1:], forward=lambda model, batch: model(batch["a"])) == [50]


@pytest.mark.parametrize("values", [2, 3])
def test_samples_that_are_equal_by_chance_are_no_training_samples(values, caplog):
    """Held-out samples of a few discrete inputs are among the training samples as often as these among themselves."""
    model = data()[0]
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(values, (90, 2), generator=generator).double()
        x = torch.where(torch.rand(90, 1, generator=generator) < 0.3, x, x + torch.rand(90, 2, generator=generator))
        y = torch.randint(3, (90,), generator=generator)
        assert known(caplog, model, (x[:50], y[:50]), (x[50:], y[50:])) == []
        assert known(caplog, model, (x[:50], y[:50]), (x[:40], y[:40])) == [100]


def test_copies_of_rows_with_real_targets_are_training_samples(caplog):
    """A random split of a table whose rows occur twice: few targets may be equal by chance, and real ones are not."""
    model, x, _ = data()
    y = x.sum(1, keepdim=True).repeat(1, 3) + 0.1 * torch.randn(90, 3)
    rows = torch.arange(90).repeat(2)[torch.randperm(180)]
    assert known(caplog, model, (x[rows[:120]], y[rows[:120]]), (x[rows[120:]], y[rows[120:]]))[0] > 50


def test_held_out_labels_of_positions_are_looked_at_too():
    model = torch.nn.Conv2d(2, 3, 1).eval()
    x, y = torch.randn(8, 2, 4, 5), torch.randint(3, (8, 4, 5))
    loader = [(x[:5], y[:5])]
    assert lw.fit(model, loader, validation=(x[5:, :, :3], y[5:, :3])).samples == 5  # of another size
    with pytest.raises(lw.LapwingError, match=r"held-out data do not fit. The targets have the shape \(3, 3, 5\)"):
        lw.fit(model, loader, validation=(x[5:], y[5:, :3]))


def test_a_method_with_a_prior_of_its_own_gets_a_temperature():
    model, x, y = data()
    with torch.no_grad():
        model[2].weight.mul_(10)
    method = lw.SampledLLA()
    posterior = lw.fit(model, [(x[:40], y[:40])], method, validation=(x[40:], y[40:]))
    assert posterior.logit_temperature > 1


def test_held_out_data_leave_a_classifier_its_cheap_posterior():
    """All weights would cost a backward pass per class; users name lw.KFAC() for them."""
    model, x, y = data()
    loader, held_out = [(x[:40], y[:40])], (x[40:], y[40:])
    chosen = lw.fit(model, loader, validation=held_out)
    last = lw.fit(model, loader, lw.KFAC(), params=lw.last_layer, validation=held_out)
    assert [*chosen.tangent.parameters] == ["2.weight", "2.bias"]
    assert chosen.prior_precision == last.prior_precision
    assert lw.fit(model, loader, lw.KFAC(), validation=held_out).tangent.size == 39


def test_held_out_data_and_checkpoints_with_a_sparse_matrix_that_all_samples_share(tmp_path):
    x, y, matrix = torch.randn(60, 37), torch.arange(60) % 3, torch.eye(37).to_sparse()
    training, held_out = [((x[:37], matrix), y[:37])], [((x[37:], matrix), y[37:])]  # as many samples as rows
    model = Net(lambda net, x, matrix: net.head((matrix @ x.mT).mT), head=torch.nn.Linear(37, 3)).eval()
    posterior = lw.fit(model, training, validation=held_out, checkpoint=tmp_path / "fit")
    assert posterior.samples == 37
    assert posterior.predict((x[:37], matrix)).probs.shape == (37, 3)
