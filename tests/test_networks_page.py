"""The table of docs/networks.md is that of the results, and every network of it is exact."""

from __future__ import annotations

import json

from benchmarks.networks import PAGE, RESULT, TABLE, table


def test_the_pages_table_is_that_of_the_results():
    results = json.loads(RESULT.read_text())["results"]
    assert TABLE.search(PAGE.read_text(encoding="utf-8"))[0] == table(results)
    assert max(row["error"] for row in results.values() if "error" in row) < 1e-9
