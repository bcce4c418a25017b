"""`python -m papers`: every experiment is listed, has its results, and draws its pictures from them."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from papers import __main__ as command
from papers.common import drawing, results

EXPERIMENTS = [(paper, name) for paper in command.papers() for name in command.experiments(paper)]


def test_every_paper_and_experiment_has_a_line():
    assert command.papers() == ["ella", "optimal_subspace", "streamlined", "together", "valla"]
    text = command.main([])
    lines = [line.split() for line in text.splitlines()]
    for paper, name in EXPERIMENTS:
        assert any(line[:2] == [paper, name] and len(line) > 4 for line in lines), (paper, name)
    assert "ella table5" in command.main(["ella"])
    assert "valla" not in command.main(["ella"])


def test_every_experiment_can_be_run_and_results_have_one():
    for paper, name in EXPERIMENTS:
        experiment = importlib.import_module(f"papers.{paper}.{name}")
        parameters = inspect.signature(experiment.run).parameters.values()
        assert all(parameter.default is not parameter.empty for parameter in parameters), (paper, name)
    files = {(path.parts[-3], path.stem) for path in command.HOME.glob("*/results/*.json")}
    assert files == set(EXPERIMENTS)


def test_a_run_writes_results_and_draws(tmp_path, monkeypatch, capsys):
    experiment = importlib.import_module("papers.ella.table5")
    seen = []
    monkeypatch.setenv("LAPWING_NETWORKS", str(tmp_path))  # `run` would set it for all tests that follow
    monkeypatch.setattr(experiment, "__file__", str(tmp_path / "table5.py"))
    monkeypatch.setattr(experiment, "run", lambda: {"KFAC": 0.3})
    monkeypatch.setattr(experiment, "draw", seen.append, raising=False)
    assert str(tmp_path) in command.main(["ella", "table5"])
    assert results.read(experiment.__file__) == {"published": experiment.PUBLISHED, "KFAC": 0.3} | {
        "seconds": seen[0]["seconds"]
    }


def test_a_run_says_which_rows_it_computed_and_again_computes_all(tmp_path, monkeypatch):
    experiment = importlib.import_module("papers.ella.table5")
    asked = []

    def run():
        rows = results.Rows(experiment.__file__, {})
        for seed in range(2):
            rows.add(f"seed {seed}", "KFAC", lambda seed=seed: asked.append(seed) or {"nll": 0.3})
        return rows.all()

    monkeypatch.setenv("LAPWING_NETWORKS", str(tmp_path))
    monkeypatch.setattr(experiment, "__file__", str(tmp_path / "table5.py"))
    monkeypatch.setattr(experiment, "draw", lambda results: None, raising=False)
    monkeypatch.setattr(experiment, "run", run)
    assert command.main(["ella", "table5"]).startswith("2 rows computed, 0 kept. The results are in ")
    assert command.main(["ella", "table5"]).startswith("0 rows computed, 2 kept; `--again` computes all anew.")
    assert asked == [0, 1]
    assert command.main(["ella", "table5", "--again"]).startswith("2 rows computed, 0 kept. ")
    assert asked == [0, 1, 0, 1]
    monkeypatch.setattr(experiment, "run", lambda: {"KFAC": 0.3})  # without rows: one, which is always computed
    assert command.main(["ella", "table5", "--again"]).startswith("1 rows computed, 0 kept. ")
    assert command.main(["ella", "table5"]).startswith("1 rows computed, 0 kept. ")


@pytest.mark.parametrize("picture", sorted(command.HOME.glob("*/figures/*.png")), ids=lambda path: path.name)
def test_no_picture_is_older_than_its_results(picture):
    found = drawing.sources(picture)
    assert found
    for file, digest in found.items():
        assert drawing.digest(str(picture.parents[1] / file)) == digest, f"draw {picture} again with `--draw`"


@pytest.mark.slow
def test_pictures_are_drawn_from_the_results(monkeypatch):
    """Only what the results hold is drawn, so every committed picture can be drawn again."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []

    def save(figure, experiment, name="", sources=()):
        drawn.append(f"{Path(experiment).parent.name}/{name or Path(experiment).stem}")
        pyplot.close(figure)

    monkeypatch.setattr(drawing, "save", save)
    for paper, name in EXPERIMENTS:
        experiment = importlib.import_module(f"papers.{paper}.{name}")
        if results.path_of(str(experiment.__file__)).exists():
            command.draw(experiment)
    pictures = {f"{path.parts[-3]}/{path.stem}" for path in command.HOME.glob("*/figures/*.png")}
    assert set(drawn) == pictures
