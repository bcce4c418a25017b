"""Tables of numbers as Markdown, and their places in pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MARKER = re.compile(r"(<!-- (verdicts of|entries of|table of|counts)([^\n]*?) -->\n).*?(<!-- end -->)", re.DOTALL)

SCORES = {
    "accuracy": ".1%", "RMSE": ".4f", "NLL": ".4f", "ECE": ".2%", "90 % interval": ".1%", "AUROC": ".3f",
    "fit, s": ".2f", "predictions, ms": ".1f", "mean": ".3f", "best": ".3f", "worst": ".3f",
    "laplace-torch": "", "lapwing": "", "refusal": "",
}  # fmt: skip
"""Column of a table of scores -> format of its numbers."""


def filled(text: str, make: Callable[[str, str], str]) -> str:
    """Returns the text of a page with the tables of its markers, `make("table of", "ella/table5: divergence")`."""
    return MARKER.sub(lambda found: found[1] + make(found[2], found[3].strip()) + found[4], text)


def grid(
    columns: Sequence[str],
    rows: Mapping[str, Sequence[str]] | Sequence[tuple[str, Sequence[str]]],
    right: bool = False,
    corner: str = "",
) -> str:
    """Returns a table as Markdown.

    Args:
        columns: headings after the first.
        rows: heading -> cells, or pairs if headings repeat; missing cells at the end are empty.
        right: whether cells are aligned on the right.
        corner: the first heading.
    """
    line = "|---|" + ("---:|" if right else "---|") * len(columns)
    lines = ["| " + f"{corner} | ".lstrip() + " | ".join(columns) + " |", line]
    for heading, cells in rows.items() if isinstance(rows, Mapping) else rows:
        lines.append(f"| {heading} | " + " | ".join([*cells, *[""] * (len(columns) - len(cells))]) + " |")
    return "\n".join(lines) + "\n"


def shown(found: Any, digits: int = 3, scale: float = 1.0) -> str:
    """Returns a number with its standard error, "0.263 ± 0.001", or an empty string for None.

    Args:
        found: a number, or its "mean" and "standard_error".
        digits: after the point.
        scale: factor of the number, 100 for percent.
    """
    if found is None:
        return ""
    if not isinstance(found, Mapping):
        return f"{scale * found:.{digits}f}"
    text = f"{scale * found['mean']:.{digits}f}"
    error = f"{scale * found['standard_error']:.{digits}f}"
    return f"{text} ± {error}" if found["standard_error"] else text


def rounded(number: float, digits: int = 2) -> str:
    """Returns a number of any size at a few significant digits, "120" or "0.013"."""
    return f"{float(f'{number:.{digits}g}'):g}"


def of_scores(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, str]:
    """Returns the tables of tasks with rows of scores; a table has the columns that some row has."""
    found = {}
    for task, rows in results.items():
        columns = [column for column in SCORES if any(column in row for row in rows.values())]
        found[task] = grid(columns, {name: [format(row[c], SCORES[c]) if c in row else "" for c in columns]
                                     for name, row in rows.items()})  # fmt: skip
    return found
