"""The pages of the papers: tables and numbers are those of the ledger and the results."""

from __future__ import annotations

import json
import re

import pytest

from papers import __main__ as command
from papers import ledger, pages
from papers.common.tables import grid, rounded, shown

ENTRIES = ledger.read()


@pytest.mark.parametrize("path", pages.paths(), ids=lambda path: path.parent.name)
def test_tables_are_those_of_the_ledger_and_the_results(path):
    text = path.read_text(encoding="utf-8")
    assert pages.written(text, ENTRIES) == text, "`python -m papers pages` writes the tables"
    assert len(re.findall("<!-- (verdicts|entries|table|counts)", text)) == text.count("<!-- end -->") > 0


@pytest.mark.parametrize("path", pages.paths()[1:], ids=lambda path: path.parent.name)
def test_every_number_in_prose_is_in_the_results(path):
    assert pages.unsupported(path) == []


def test_a_number_without_a_result_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "HOME", tmp_path)
    folder = tmp_path / "another"
    (folder / "results").mkdir(parents=True)
    for name, values in (("table8", {"nll": 0.7}), ("table9", {"nll": 0.2634, "curve": [0.111], "ece at 0.05": 2})):
        (folder / "results" / f"{name}.json").write_text(json.dumps({"results": values}))
    page = folder / "README.md"
    page.write_text(
        "# Title\n\nNone.\n\n## A\n\n`table9.json`: NLL 0.26 and .263, 26 % at 0.05, not 0.27, 0.7 or 0.111.\n"
    )
    assert pages.unsupported(page) == ["0.27", "0.7", "0.111"]


def test_the_command_writes_the_pages(tmp_path, monkeypatch):
    copy = tmp_path / "README.md"
    copy.write_text("<!-- counts -->\nold\n<!-- end -->\n", encoding="utf-8")
    monkeypatch.setattr(pages, "paths", lambda: [copy])
    assert command.main(["pages"]) == str(copy)
    assert copy.read_text(encoding="utf-8") == f"<!-- counts -->\n{pages.counts(ENTRIES)}<!-- end -->\n"


def test_findings_have_the_statements_with_their_numbers():
    table = "ella/results/table5.json: KL(LLA || method)/equal noise"
    ours = {"KFAC": f"{table}/KFAC", "last layer, KFAC": f"{table}/last layer", "ELLA": f"{table}/ELLA"}
    holds, fails = ("0.2 < KFAC < last layer, KFAC",), ("KFAC ≈ 0.4",)
    entry = ledger.Entry("ella", "Table 9", "", "", "partly", ours, holds, fails)
    one, other, third = (pages.numbers(entry)[label] for label in entry.ours)
    assert re.fullmatch(r"0\.3\d+ ± 0\.\d+", one)
    confirmed = f"✓ 0.2 < KFAC ({one}) < last layer, KFAC ({other})"
    assert pages.findings(entry) == [confirmed, f"✗ KFAC ({one}) ≈ 0.4", f"ELLA: {third}"]


def test_cells():
    found = {"mean": 0.26345, "standard_error": 0.0012}
    assert shown(found) == "0.263 ± 0.001"
    assert shown({"mean": 0.5, "standard_error": 0.0}, 1, 100) == "50.0"
    assert shown(None) == ""
    assert [rounded(number) for number in (118.2, 0.0126, 150_400)] == ["120", "0.013", "150000"]
    assert grid(["x", "y"], {"a": ["1"]}) == "| | x | y |\n|---|---|---|\n| a | 1 |  |\n"
