"""The tables of docs/positions.md are those of the results, and the script that made them runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.positions_data import PAGE, RESULT, TASKS, tagging, with_tables


def test_the_pages_tables_are_those_of_the_results():
    results = json.loads(RESULT.read_text())["results"]
    assert set(results) == set(TASKS)
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_tables(text, results)


@pytest.mark.slow
def test_a_small_run_of_the_tagger(data_folder: Path) -> None:
    rows = tagging(0.02)
    assert len(rows) == 5
    for row in rows.values():
        assert math.isfinite(row["NLL"])
        assert 0 <= row["ECE"] <= 1
        assert 0 <= row["accuracy"] <= 1
    alone, validated = rows["network alone"], rows["`lw.fit(..., validation=)`"]
    assert abs(validated["accuracy"] - alone["accuracy"]) < 0.05
