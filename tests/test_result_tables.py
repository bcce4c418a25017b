"""`python -m benchmarks`: it lists and runs every benchmark, and tables on pages are those of the results."""

from __future__ import annotations

import inspect
import math
import re
import types
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import answers, counts, ood, peers, positions_data, quantities, regression_rivals
from benchmarks.grid import summary
from papers.common import drawing, experiments, results

BENCHMARKS = experiments.found(command.HOME, "parts")
DOCS = command.HOME.parent / "docs"
MARKED = [path for path in command.PAGES if "<!-- table of " in path.read_text(encoding="utf-8")]


def stored(name: str) -> dict[str, Any]:
    return results.load(command.HOME / "results" / f"{name}.json")["results"]


def test_every_benchmark_has_a_line_and_results() -> None:
    lines = command.main([]).splitlines()
    assert [line.split()[0] for line in lines] == list(BENCHMARKS)
    assert all(len(line.split()) > 5 for line in lines)
    grids = {"defaults_best", "defaults_best_classes", "defaults_best_large", "defaults_tables"}
    assert {path.stem for path in (command.HOME / "results").glob("*.json")} == set(BENCHMARKS) | grids


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_option_has_a_type_and_pictures_need_results_alone(name: str) -> None:
    module = command.module(name)
    for option in inspect.signature(module.parts).parameters.values():
        assert type(option.default) in (int, float, str)
    assert not hasattr(module, "draw") or len(inspect.signature(module.draw).parameters) == 1


@pytest.mark.parametrize("name", ["answers", "peers", "positions_data", "quantities", "real_networks", "regression"])
def test_results_are_those_of_parts(name: str) -> None:
    assert set(stored(name)) <= set(command.module(name).parts())


@pytest.mark.parametrize("path", sorted((command.HOME / "results").glob("*.json")), ids=lambda path: path.stem)
def test_every_part_says_what_made_it(path: Path) -> None:
    contents = results.load(path)
    (rows,) = contents["made"].values()
    assert set(rows) == set(contents["results"])
    for record in rows.values():
        assert {"commit", "date", "lapwing", "torch", "machine", "seeds"} <= set(record)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A benchmark of two parts, in a folder of its own."""
    module = types.ModuleType("tiny", "What a tiny benchmark measures.")
    module.__file__ = str(tmp_path / "tiny.py")
    module.parts = lambda scale=1.0: {name: lambda name=name: {"x": scale * len(name)} for name in ("one", "three")}  # type: ignore[attr-defined]
    (tmp_path / "tiny.py").write_text('"""What a tiny benchmark measures."""\n\ndef parts():\n    pass\n')
    monkeypatch.setattr(command, "HOME", tmp_path)
    monkeypatch.setattr(command, "PAGES", ())
    monkeypatch.setattr(command, "module", lambda name: module)
    monkeypatch.setenv("LAPWING_NETWORKS", str(tmp_path))
    return module


def test_parts_that_are_not_named_keep_their_numbers(tiny: types.ModuleType) -> None:
    assert "tiny.json" in command.main(["tiny"])
    command.main(["tiny", "th*", "--scale", "2"])
    assert results.read(str(tiny.__file__)) == {"one": {"x": 3.0}, "three": {"x": 10.0}}
    command.main(["tiny", "--scale", "4", "--missing"])
    command.main(["tiny", "--scale", "4", "--dry"])
    command.main(["tiny", "--scale", "4", "--minutes", "-1"])
    command.main(["tiny", "one", "--scale", "4", "--into", "other"])
    assert results.read(str(tiny.__file__)) == {"one": {"x": 3.0}, "three": {"x": 10.0}}
    assert results.read(str(tiny.__file__).replace("tiny.py", "other.py")) == {"one": {"x": 12.0}}
    (rows,) = results.made(str(tiny.__file__)).values()
    assert {"commit", "machine", "seconds"} <= set(rows["one"])


@pytest.mark.parametrize("there", [True, False])
def test_make_bench_runs_what_can_run(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    asked = []
    monkeypatch.setattr(command, "run", lambda name, parts=(): asked.append((name, *parts)))
    monkeypatch.setattr(command, "available", lambda *files: there)
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: there)
    command.main(["bench"])
    trained = [("gpu",), ("regression",), ("real_networks", "mnist"), ("real_networks", "cifar10")]
    assert asked == [("cost",), ("streamlined_cost",), *(trained if there else [])]


@pytest.mark.parametrize("arguments", [["another"], ["tiny", "two"]])
def test_unknown_names_are_refused_with_those_there_are(tiny: types.ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="no (benchmark|part) .*\n*(tiny|.*one, three)"):
        command.main(arguments)


@pytest.mark.parametrize("path", MARKED, ids=lambda path: path.name)
def test_the_tables_of_a_page_are_those_of_the_results(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert command.written(text) == text, "`python -m benchmarks pages` writes the tables"
    assert len(re.findall("<!-- table of", text)) == text.count("<!-- end -->")


def test_the_tables_of_the_readme_are_those_of_the_results() -> None:
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert ood.tables(stored("ood"))["fashion"] in text
    assert regression_rivals.tables(stored("regression_rivals"))["README"] in text


def test_every_task_has_its_table() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in MARKED)
    for module in (answers, peers, positions_data):
        name = module.__name__.rpartition(".")[2]
        assert all(f"<!-- table of {name}: {part} -->" in text for part in module.parts())
    assert len(MARKED) == 3


@pytest.mark.parametrize("picture", ["defaults", "line", "line_prior", "line_classes"])
def test_no_picture_is_older_than_its_results(picture: str) -> None:
    name = picture.partition("_")[0]
    found = drawing.sources(command.HOME / "figures" / f"{picture}.png")
    assert found == {f"{name}.json": drawing.digest(str(command.HOME / f"{name}.py"))}


def test_pictures_of_the_page_on_posteriors_show_what_it_says() -> None:
    """In a gap the band is wide, and mutual information tells the gap from labels that overlap; entropy does not."""
    curve, found = stored("line")["curve"], stored("line")["classes"]
    deviations = dict(zip(curve["grid"], curve["of weights"], strict=True))
    assert deviations[0.0] > 5 * deviations[-2.0]
    middle = len(found["grid"]) // 2 - 6  # between the overlap on the left and the gap on the right, at -0.5
    entropy, information = ([max(found[score][:middle]), max(found[score][middle:-30])]
                            for score in ("entropy", "mutual information"))  # fmt: skip
    assert entropy == pytest.approx([math.log(2)] * 2, abs=0.01)
    assert information[1] > 5 * information[0]


def test_the_counts_of_convolutions_are_ratios() -> None:
    for row in stored("counts").values():
        for what in ("fit", "predict"):
            assert row[what]["ratio"] == pytest.approx(row[what]["forward_passes"] / row[what]["floor"], rel=1e-3)
    assert counts.tables(stored("counts"))["floors"].count("\n") == 8


def families(name: str) -> dict[str, dict[str, summary.Row]]:
    return summary.families(summary.with_best(summary.rows_of(stored(name))))


@pytest.mark.parametrize("name", ["defaults_best", "defaults_best_large"])
def test_the_best_of_all_methods_is_that_of_the_results(name: str) -> None:
    page = (command.HOME / "README.md").read_text(encoding="utf-8")
    arms = ("default", "validated", "last-layer", "diagonal", "kfac", "ella", "best")
    for family, of in families(name).items():
        row = " | ".join(f"{of[arm]['nll']:.3f}" for arm in arms)
        assert f"| {family} | {row} |" in page


def test_the_methods_of_classifiers_are_those_of_the_results() -> None:
    page = (command.HOME / "README.md").read_text(encoding="utf-8")
    for family, of in families("defaults_best_classes").items():
        cells = [f"{of['default']['cells']}", f"{of['default']['nll']:.3f}", f"{of['validated']['nll']:.3f}"]
        for arm in ("diagonal", "kfac", "ella"):
            cells.append(f"{of[arm]['nll']:.3f}, {of[f'{arm}-validated']['nll']:.3f}")
        assert f"| {family} | {' | '.join([*cells, format(of['best']['nll'], '.3f')])} |" in page


def test_every_network_is_exact() -> None:
    assert max(row["error"] for row in stored("networks").values() if "error" in row) < 1e-9


def test_totals_are_those_of_the_results() -> None:
    page = (DOCS.parent / "examples" / "tasks" / "plot_quantities.py").read_text(encoding="utf-8")
    assert "\n".join(quantities.rows_of_totals(stored("quantities"))) in page


def test_botorch_and_value_agree_on_the_same_process_and_train_the_same_networks() -> None:
    found = stored("quantities")
    for table, of in stored("labels_botorch").items():
        assert of["agreement"]["largest difference / largest value"] < 1e-10
        assert of["agreement"]["same order"]
        assert of["agreement"]["same ten rows"]
        assert of["network"]["RMSE"][0] == found[f"labels, {table}"]["random"]["RMSE"][0]


@pytest.mark.slow
def test_a_small_run_of_the_tagger(data_folder: Path) -> None:
    rows = positions_data.tagging(0.02)
    assert len(rows) == 5
    for row in rows.values():
        assert math.isfinite(row["NLL"])
        assert 0 <= row["ECE"] <= 1
        assert 0 <= row["accuracy"] <= 1
    alone, validated = rows["network alone"], rows["`lw.fit(..., validation=)`"]
    assert abs(validated["accuracy"] - alone["accuracy"]) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("task", answers.parts())
def test_a_small_run_of_answers(data_folder: Path, task: str) -> None:
    rows = answers.parts(0.02)[task]()
    assert len(rows) == 6
    for row in rows.values():
        assert math.isfinite(row["NLL"])
        assert all(0 <= error <= 1 for error in row["ECE of each label"])
