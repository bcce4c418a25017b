"""Tables of numbers as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def grid(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """Returns a table as Markdown.

    Args:
        columns: headings after the first, which is empty.
        rows: heading -> cells; missing ones at the end are empty.
    """
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for heading, cells in rows.items():
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
