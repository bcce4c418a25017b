"""The ledger of the papers: complete, with evidence that exists, and the page written from it."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("tomllib")  # Python 3.10 has none

from papers import __main__ as command
from papers import ledger

ENTRIES = ledger.read()
RESULTS = {"ella": 20}
"""Tables and figures of each paper and its appendices, with parts that have verdicts of their own."""


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.paper}, {entry.item}")
def test_evidence_exists(entry):
    for key in entry.ours:
        assert ledger.value(key) is not None
    for name in entry.test:
        assert ledger.has_test(name), name


def test_every_result_has_one_entry():
    names = [(entry.paper, entry.item) for entry in ENTRIES]
    assert len(names) == len(set(names))
    assert not any("|" in text for entry in ENTRIES for text in (entry.item, entry.claim, entry.setting))
    shown = [entry.paper for entry in ENTRIES if entry.item.startswith(("Table", "Figure"))]
    assert Counter(shown) == RESULTS


def test_the_page_is_written_from_the_ledger(tmp_path, monkeypatch):
    text = ledger.PAGE.read_text(encoding="utf-8")
    assert ledger.page(ENTRIES) == text
    copy = tmp_path / "README.md"
    copy.write_text(text.partition(ledger.START)[0], encoding="utf-8")
    monkeypatch.setattr(ledger, "PAGE", copy)
    assert str(copy) in command.main(["ledger"])
    assert copy.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "fine"},
        {"verdict": "not run: compute"},
        {"verdict": "tested", "ours": ()},
        {"ours": ()},
        {"paper": "another"},
    ],
    ids=str,
)
def test_entries_that_contradict_themselves_are_refused(change):
    entry = {"paper": "ella", "item": "Table 9", "claim": "", "setting": "", "ours": ("a.json: b",), "test": ()}
    ledger.Entry(**entry, verdict="partly")
    with pytest.raises(ValueError, match="Table 9"):
        ledger.Entry(**{**entry, "verdict": "partly", **change})


def test_missing_keys_and_tests_are_noticed():
    with pytest.raises(KeyError):
        ledger.value("ella/results/table5.json: noise variance 0.01/another method")
    assert not ledger.has_test("tests/papers/test_ledger.py::test_that_nobody_wrote")
    assert not ledger.has_test("tests/papers/test_ledger.py")
