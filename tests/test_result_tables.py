"""Tables on pages are those of the results, and the scripts that made them run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import answers, counts, lora, measure, networks, ood, peers, positions_data, quantities, tables
from benchmarks.defaults import links, subspaces

DEFAULTS = Path(__file__).parents[1] / "docs" / "defaults.md"


@pytest.mark.parametrize(
    ("script", "tasks"),
    [
        (positions_data, set(positions_data.TASKS)),
        (answers, set(answers.TASKS)),
        (lora, {"lora"}),
        (peers, set(peers.TASKS)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_tables_of_a_page_are_those_of_the_results(script: ModuleType, tasks: set[str]) -> None:
    results = json.loads(script.RESULT.read_text())["results"]
    text = script.PAGE.read_text(encoding="utf-8")
    assert set(results) == tasks
    assert all(f"<!-- table of {task} -->" in text for task in tasks)
    assert text == tables.with_tables(text, results)


def test_the_counts_of_convolutions_are_those_of_the_results() -> None:
    results = json.loads((counts.RESULTS / "counts.json").read_text())["results"]
    page = Path(__file__).parents[1] / "docs" / "how-it-works.md"
    assert counts.table(results) in page.read_text(encoding="utf-8")
    for row in results.values():
        for what in ("fit", "predict"):
            assert row[what]["ratio"] == pytest.approx(row[what]["forward_passes"] / row[what]["floor"], rel=1e-3)


@pytest.mark.parametrize("script", [links, subspaces], ids=["links", "subspaces"])
def test_the_tables_of_links_and_subspaces_are_those_of_the_results(script: ModuleType) -> None:
    path = measure.RESULTS / f"defaults_{script.__name__.rpartition('.')[2]}.json"
    rows = json.loads(path.read_text())["results"]["rows"]
    assert script.table(rows) in DEFAULTS.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["defaults_best", "defaults_best_large"])
def test_the_best_of_all_methods_is_that_of_the_results(name: str) -> None:
    page = DEFAULTS.read_text(encoding="utf-8")
    arms = ("default", "validated", "last-layer", "diagonal", "kfac", "ella", "best")
    families = json.loads((measure.RESULTS / f"{name}.json").read_text())["results"]["families"]
    for family, of in families.items():
        row = " | ".join(f"{of[arm]['nll']:.3f}" for arm in arms)
        assert f"| {family} | {row} |" in page


def test_the_methods_of_classifiers_are_those_of_the_results() -> None:
    page = DEFAULTS.read_text(encoding="utf-8")
    for family, of in json.loads((measure.RESULTS / "defaults_best_classes.json").read_text())["results"][
        "families"
    ].items():
        cells = [f"{of['default']['cells']}", f"{of['default']['nll']:.3f}", f"{of['validated']['nll']:.3f}"]
        for arm in ("last-layer", "diagonal", "kfac", "ella"):
            cells.append(f"{of[arm]['nll']:.3f}, {of[f'{arm}-validated']['nll']:.3f}")
        assert f"| {family} | {' | '.join([*cells, format(of['best']['nll'], '.3f')])} |" in page


def test_the_table_of_the_readme_is_that_of_the_results() -> None:
    rows = json.loads((measure.RESULTS / "ood.json").read_text())["results"]["fashion"]["rows"]
    assert ood.table(rows) in (DEFAULTS.parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_table_of_ood_scores_is_that_of_the_results() -> None:
    found = [json.loads((measure.RESULTS / f"{name}.json").read_text())["results"] for name in ("ood", "ood_detectors")]
    assert ood.table_of_scores(*found) in (DEFAULTS.parent / "ood.md").read_text(encoding="utf-8")


def test_the_table_of_networks_is_that_of_the_results_and_every_network_is_exact() -> None:
    results = json.loads(networks.RESULT.read_text())["results"]
    assert networks.TABLE.search(networks.PAGE.read_text(encoding="utf-8"))[0] == networks.table(results)
    assert max(row["error"] for row in results.values() if "error" in row) < 1e-9


def test_totals_and_labels_are_those_of_the_results() -> None:
    names = "quantities", "labels_botorch"
    results, rival = (json.loads((measure.RESULTS / f"{name}.json").read_text())["results"] for name in names)
    page = (DEFAULTS.parents[1] / "examples" / "tasks" / "plot_quantities.py").read_text(encoding="utf-8")
    assert "\n".join(quantities.rows_of_totals(results)) in page
    page = (DEFAULTS.parent / "training.md").read_text(encoding="utf-8")
    assert "\n".join(quantities.rows_of_labels(results, rival)) in page


def test_botorch_and_value_agree_on_the_same_process_and_train_the_same_networks() -> None:
    names = "quantities", "labels_botorch"
    results, rival = (json.loads((measure.RESULTS / f"{name}.json").read_text())["results"] for name in names)
    for table, of in rival.items():
        assert of["agreement"]["largest difference / largest value"] < 1e-10
        assert of["agreement"]["same order"]
        assert of["agreement"]["same ten rows"]
        assert of["network"]["RMSE"][0] == results["labels"][table]["random"]["RMSE"][0]


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
@pytest.mark.parametrize("task", answers.TASKS)
def test_a_small_run_of_answers(data_folder: Path, task: str) -> None:
    rows = answers.TASKS[task](0.02)
    assert len(rows) == 6
    for row in rows.values():
        assert math.isfinite(row["NLL"])
        assert all(0 <= error <= 1 for error in row["ECE of each label"])
