"""`lw.plan` with tunings, held-out data and a given prior: passes beside the operations that the fit does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import lapwing as lw
from lapwing.fitting.network_cost import Operations
from lapwing.fitting.speed import Speed
from lapwing.methods.cost import CALL, EIGEN
from lapwing.tuning import Tuning
from tests.fitting.test_plan import cnn, mlp, regression


@pytest.fixture(autouse=True)
def speed(monkeypatch):
    """One machine for all plans: others use this one too."""
    monkeypatch.setattr(Speed, "of", lambda *_: Speed(1e-6, 1e-10, 1e-9))


def labelled(shape, samples):
    """Batches of which the last is smaller."""
    torch.manual_seed(samples)
    x, y = torch.randn(samples, *shape), torch.arange(samples) % 3
    return list(zip(x.split(50), y.split(50), strict=True))


class Counted(Operations):
    """Operations of a program, with the eigenpairs that no count of products shows."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "linalg_eigh" in str(function):
            self.work += EIGEN * args[0].shape[-1] ** 3
        return super().__torch_dispatch__(function, types, args, kwargs)


def work_of(run):
    """The multiply-adds, moved numbers and calls of a program."""
    with Counted() as counted:
        run()
    return counted.work + CALL * counted.calls


def passes_of(model, data, run):
    """The forward passes of the data that a program takes."""
    model(data[0][0])
    return work_of(run) / sum(work_of(lambda x=x: model(x)) for x, _ in data)


def problem(name, samples, held_out):
    """A network, training data and held-out data."""
    torch.manual_seed(0)
    model, shape = (cnn(), (2, 6, 6)) if name == "cnn" else (mlp(), (12,))
    make = regression if name == "regression" else labelled
    return model, make(shape, samples), make(shape, held_out)


@pytest.mark.parametrize("tuning", ["bounded", "validation", "early"])
@pytest.mark.parametrize("method", [lw.KFAC(), lw.ELLA(10, 40)], ids=["KFAC", "ELLA"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "regression"])
def test_passes_of_a_tuning_are_near_those_of_the_fit(name, method, tuning):
    model, data, held_out = problem(name, 200, 150)
    tune = {
        "bounded": lw.BoundedEvidence(), "validation": lw.Validation(held_out),
        "early": lw.EarlyStopping(held_out, prefixes=3),
    }[tuning]  # fmt: skip
    planned = lw.plan(model, data, method, tune=tune)
    with_tuning, alone = (passes_of(model, data, lambda t=t: lw.fit(model, data, method, tune=t)) for t in (tune, None))
    assert (with_tuning - alone) / 2.5 < planned.tuning_passes < 2.5 * (with_tuning - alone)


@pytest.mark.parametrize("params", [lw.everything, lw.last_layer], ids=["everything", "last_layer"])
def test_passes_over_maps_are_near_those_of_the_fit(params):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 5, 1)).eval()
    x, y = torch.randn(40, 2, 24, 24), torch.randint(5, (40, 24, 24))
    data = list(zip(x.split(10), y.split(10), strict=True))
    planned = lw.plan(model, data, lw.KFAC(), params=params)
    alone, with_tuning = (
        passes_of(model, data, lambda t=t: lw.fit(model, data, lw.KFAC(), params=params, **t))
        for t in ({"tune": None}, {})
    )
    assert alone / 2.5 < planned.passes < 2.5 * alone
    assert (with_tuning - alone) / 2.5 < planned.tuning_passes < 2.5 * (with_tuning - alone)


def test_held_out_data_that_choose_between_two_fits_are_planned_as_both():
    model, data, held_out = problem("mlp", 200, 150)
    both, alone = lw.plan(model, data, validation=held_out), lw.plan(model, data)
    last, every = (
        lw.plan(model, data, lw.KFAC(), params=params, validation=held_out) for params in (lw.last_layer, lw.everything)
    )
    for name in ("passes", "seconds"):
        assert getattr(both, name) >= getattr(last, name) + getattr(every, name) > 2 * getattr(alone, name)
    scored = 0.75 * (last.predict_passes + every.predict_passes)  # 150 samples of 200, to compare both
    assert both.tuning_passes == pytest.approx(last.tuning_passes + every.tuning_passes + scored)
    for name in ("parameters", "predict_passes", "kept_bytes", "peak_bytes"):
        assert getattr(both, name) == max(getattr(last, name), getattr(every, name))
    assert f"{last.parameters:,} weights) and all {every.parameters:,} trained weights" in str(both).splitlines()[-1]
    counted = passes_of(model, data, lambda: lw.fit(model, data, validation=held_out))
    planned = both.passes + both.tuning_passes
    assert counted / 2.5 < planned < 2.5 * counted


@pytest.mark.parametrize("why", ["regression", "many outputs"])
def test_where_held_out_data_have_no_choice_one_fit_is_planned(why):
    model, data, held_out = problem("regression" if why == "regression" else "mlp", 100, 50)
    if why == "many outputs":
        model = nn.Sequential(model, nn.Tanh(), nn.Linear(3, 30)).eval()
    planned = lw.plan(model, data, validation=held_out)
    assert planned.note is None
    assert planned.tuning_passes > 0
    assert planned.kept_bytes == lw.plan(model, data).kept_bytes


def test_a_prior_of_the_last_layer_alone_leaves_out_all_weights():
    model, data, held_out = problem("mlp", 100, 50)
    options = {"prior_precision": {"3": 1.0}, "validation": held_out}
    planned = lw.plan(model, data, **options)
    assert planned.note is None
    assert planned.parameters == lw.fit(model, data, **options).tangent.size == 123


def test_what_is_given_is_not_tuned():
    model, data, held_out = problem("mlp", 200, 150)
    for options in ({"prior_precision": 1.0}, {"weight_decay": 1e-4}, {"tune": None}, {"tune": lw.Evidence()}):
        planned = lw.plan(model, data, lw.KFAC(), **options)
        assert planned.tuning_passes == 0
        assert 0 < planned.seconds < lw.plan(model, data, lw.KFAC()).seconds
    open_prior, given = (
        lw.plan(model, data, lw.KFAC(), prior_precision=delta, validation=held_out) for delta in (None, 1.0)
    )
    assert 0 < given.tuning_passes < open_prior.tuning_passes  # the temperature of logits alone
    fixed = lw.Validation(held_out, tempered=False)
    assert lw.plan(model, data, lw.KFAC(), prior_precision=1.0, tune=fixed).tuning_passes == 0


def test_scores_grow_with_the_held_out_samples_that_a_loader_shows():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(rows)

    model, data, held_out = problem("mlp", 200, 150)
    rows = [(x, y) for batch in held_out for x, y in zip(*batch, strict=True)]
    once, twice, counted = (
        lw.plan(model, data, lw.KFAC(), validation=v).tuning_passes
        for v in (held_out, held_out + held_out, DataLoader(Stream(), 50))
    )
    assert twice == pytest.approx(2 * once)
    assert counted == once


def test_beside_a_prior_of_the_methods_own_a_temperature_or_a_width_is_tuned():
    for name, by_default in (("mlp", False), ("regression", True)):
        model, data, held_out = problem(name, 100, 50)
        assert (lw.plan(model, data, lw.MeanField(5)).tuning_passes > 0) == by_default
        assert lw.plan(model, data, lw.MeanField(5), tune=None).tuning_passes == 0
        assert lw.plan(model, data, lw.MeanField(5), validation=held_out).tuning_passes > 0


def test_solves_are_planned_with_all_their_iterations():
    model, data, _ = problem("mlp", 200, 50)
    method = lw.SampledLLA(8, lw.ConjugateGradients(iterations=3, tolerance=1e-6), em_steps=0)
    planned = lw.plan(model, data, method)
    counted = passes_of(model, data, lambda: lw.fit(model, data, method))
    assert counted / 2.5 < planned.passes < 2.5 * counted
    assert planned.seconds > 0
    assert planned.note in str(planned).splitlines()
    many = lw.plan(model, data, lw.SampledLLA(8))  # an early end is usual
    assert many.passes > passes_of(model, data, lambda: lw.fit(model, data, lw.SampledLLA(8)))
    assert "at most, for all iterations of 9 solves;" in many.note
    given = lw.plan(model, data, lw.SampledLLA(8), prior_precision=1.0)
    assert "of its solve;" in given.note
    assert given.passes < many.passes / 8


def test_a_tuning_of_ones_own_without_its_work_says_so():
    class Mine(Tuning):
        def tune(self, posterior, training):
            return posterior

    model, data, _ = problem("mlp", 100, 50)
    planned = lw.plan(model, data, lw.KFAC(), tune=Mine())
    assert (planned.tuning_passes, planned.seconds) == (None, None)
    assert planned.passes > 0
    assert str(planned).splitlines()[1].split()[3] == "?"


def test_what_is_refused():
    model, data, held_out = problem("mlp", 100, 50)
    for empty in ([], ()):
        with pytest.raises(lw.LapwingError, match=r"names no method. Write lw.plan\(model, loader, \["):
            lw.plan(model, data, empty)
    with pytest.raises(lw.LapwingError, match="exclude each other"):
        lw.plan(model, data, tune=lw.Evidence(), validation=held_out)
    with pytest.raises(lw.LapwingError, match="The held-out data do not fit"):
        lw.plan(model, data, validation=[(x[:, :5], y) for x, y in held_out])
    with pytest.raises(lw.LapwingError, match="shows no batch"):
        lw.plan(model, data, tune=lw.Validation([]))
    with pytest.raises(lw.LapwingError, match="is not a tuning"):
        lw.plan(model, data, tune=3)
    with pytest.raises(lw.LapwingError, match="matches no block"):
        lw.plan(model, data, lw.KFAC(), prior_precision={"nowhere": 1.0})
