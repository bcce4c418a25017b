"""Shared parts of the experiments: training, data, and checkpoints with the numbers of their sources."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from papers.common import data, networks, results
from papers.common.scores import averaged
from papers.common.training import drawn, shuffled, train
from tests.refused import refused


class TestTraining:
    def test_every_row_is_seen_once_an_epoch(self):
        seen = list(islice(shuffled(10, 4), 6))
        assert [len(rows) for rows in seen] == [4, 4, 2] * 2
        for epoch in (seen[:3], seen[3:]):
            assert sorted(torch.cat(epoch).tolist()) == list(range(10))

    def test_steps_are_those_of_the_optimiser(self):
        """Against SGD written out: rates that fall, clipped gradients, a forward of its own."""
        x, y = torch.randn(20, 3), torch.randn(20, 1)
        model = nn.Linear(3, 1, bias=False)
        weight = model.weight.detach().clone().requires_grad_()
        optimiser = torch.optim.SGD(model.parameters(), 0.2)
        train(
            model, (x, y), drawn(20, 5, 4, 1), optimiser, F.mse_loss, lambda i: 1 / (i + 1), lambda x: model(2 * x), 0.5
        )
        for i, rows in enumerate(drawn(20, 5, 4, 1)):
            (gradient,) = torch.autograd.grad((2 * x[rows] @ weight.T - y[rows]).square().mean(), weight)
            step = gradient * min(1.0, 0.5 / float(gradient.norm()))
            weight = (weight - 0.2 / (i + 1) * step).detach().requires_grad_()
        torch.testing.assert_close(model.weight, weight, rtol=1e-4, atol=1e-6)
        assert not model.training


def test_averages_are_over_the_entries_of_all_runs():
    found = averaged([{"a": {"x": 1.0}, "b": 2}, {"a": {"x": 3.0, "y": 5.0}, "b": 2}])
    assert found == {"a": {"x": {"mean": 2.0, "standard_error": 1.0}}, "b": {"mean": 2.0, "standard_error": 0.0}}


class TestRows:
    def test_rows_are_written_kept_and_averaged(self, tmp_path):
        experiment = str(tmp_path / "table9.py")
        rows = results.Rows(experiment, {"draws": 5})
        for seed, value in ((0, 1.0), (1, 3.0)):
            rows.add(f"mnist, seed {seed}", "KFAC", lambda v: {"nll": v, "curve of x": [v]}, value)
        again = results.Rows(experiment, {"draws": 5})
        again.add("mnist, seed 1", "KFAC", lambda: pytest.fail("the row is there"))
        assert results.read(experiment) == again.all() == rows.all()
        assert again.all()["table"] == {"mnist": {"KFAC": {"nll": {"mean": 2.0, "standard_error": 1.0}}}}
        assert again.all()["draws"] == 5

    def test_rows_that_were_read_and_new_ones_are_averaged(self, tmp_path):
        experiment = str(tmp_path / "table9.py")
        for seed, error in enumerate((0.1, 0.3)):
            rows = results.Rows(experiment, {})
            rows.add(f"seed {seed}", "KFAC", lambda error=error: {10: {"error": error}})
        assert results.read(experiment)["table"][""]["KFAC"]["10"]["error"]["mean"] == pytest.approx(0.2)

    def test_every_row_says_what_made_it(self, tmp_path):
        rows = results.Rows(str(tmp_path / "table9.py"), {}, seeds=(7, 8))
        rows.add("mnist, seed 3", "KFAC", dict)
        rows.add("mnist", "KFAC", dict)
        made = results.made(rows.experiment)
        assert made["mnist, seed 3"]["KFAC"]["seeds"] == "3"
        assert made["mnist"]["KFAC"]["seeds"] == "7, 8"
        assert {record["commit"] for record in results.records(made)} == {results.commit()}
        assert {"date", "lapwing", "torch", "machine", "seconds"} <= set(made["mnist"]["KFAC"])

    def test_rows_of_another_commit_are_refused(self, tmp_path, monkeypatch):
        experiment = str(tmp_path / "table9.py")
        monkeypatch.setattr(results, "commit", lambda: "1111111")
        results.Rows(experiment, {}).add("seed 0", "KFAC", dict)
        monkeypatch.setattr(results, "commit", lambda: "2222222")
        rows = results.Rows(experiment, {})
        rows.add("seed 0", "KFAC", lambda: pytest.fail("the row is there"))
        refused(lambda: rows.add("seed 1", "KFAC", dict), "table9.json has rows of commit 1111111, … at 2222222")
        assert set(results.read(experiment)["runs"]) == {"seed 0"}


class TestFiles:
    def test_what_repeats_is_written_once_and_read_as_it_was(self, tmp_path):
        names = ("mean", "standard error of the seeds")
        rows = {f"row {i}": {"score": {name: i + 0.123456789 for name in names}, "n": i} for i in range(6)}
        rows["row 3"]["refused"] = "No."
        other = {"a/b": 1.0, "list": [{"x": 0.5}, {"y": 0.25}], "none": None, "odd": {"p": {}, "q": {"x": 1}}}
        given = {"rows": rows, **other, "nan": math.nan}
        path = results.write(str(tmp_path / "table9.py"), given, results.record((0,)))
        text, found = path.read_text(encoding="utf-8"), results.load(path)["results"]
        assert text.count("standard error of the seeds") == 1
        assert '"row 2":[2.1235,2.1235,2,null]' in text
        assert math.isnan(found.pop("nan"))
        assert list(found) == ["rows", *other]
        assert {name: found[name] for name in other} == other
        assert found["rows"]["row 2"] == {"score": dict.fromkeys(names, 2.1235), "n": 2}
        assert list(found["rows"]["row 3"]) == ["score", "n", "refused"]

    def test_records_that_differ_in_seconds_alone_are_one(self, tmp_path):
        made = {f"seed {i}": {row: {**results.record((i,)), "seconds": 0.1 * i} for row in "ab"} for i in range(3)}
        path = results.write(str(tmp_path / "table9.py"), {}, made)
        assert path.read_text(encoding="utf-8").count(results.record((0,))["date"]) == 3
        assert results.load(path)["made"] == made

    def test_a_table_of_its_own_is_kept(self, tmp_path):
        found = {"table": {"x": {"mean": 1.0}}, "runs": {"seed 0": {"KFAC": {"nll": 2.0}}}}
        path = results.write(str(tmp_path / "table9.py"), found, results.record((0,)))
        assert results.load(path)["results"] == found


def test_every_committed_row_says_what_made_it():
    """A commit with a plus is code that nobody can look up."""
    for path in Path(results.__file__).parents[1].glob("*/results/*.json"):
        contents = results.load(path)
        made, runs = contents["made"], contents["results"].get("runs")
        if "commit" not in made:
            assert {run: set(made[run]) for run in made} == {run: set(runs[run]) for run in runs}
        for record in results.records(made):
            assert re.fullmatch("[0-9a-f]{7,40}", record["commit"]), path
            assert {"date", "lapwing", "torch", "machine", "seeds"} <= set(record), path


# ---- data and checkpoints


def test_missing_data_say_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAPWING_DATA", str(tmp_path))
    refused(lambda: data.images("mnist"), "no file mnist.npz. Set LAPWING_DATA")
    assert not data.available("mnist.npz")
    monkeypatch.delenv("LAPWING_DATA")
    refused(networks.mnist_cnn, "LAPWING_DATA is not set")
    refused(lambda: data.images("imagenet"), "'cifar10'")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "name", "accuracy", "loss"),
    [(networks.mnist_cnn, "mnist", 0.9901, 0.0344), (networks.cifar_resnet20, "cifar10", 0.9173, 0.3727)],
)
def test_networks_on_all_test_images(
    network: Callable, name: str, accuracy: float, loss: float, data_folder: Path
) -> None:
    model, images = network(), data.images(name)
    with torch.no_grad():
        logits = torch.cat([model(x) for x in images.x_test.split(500)])
    assert float((logits.argmax(1) == images.y_test).double().mean()) == pytest.approx(accuracy, abs=5e-5)
    assert float(F.cross_entropy(logits, images.y_test)) == pytest.approx(loss, abs=5e-5)
