"""Parts of the report of a comparison: its pictures as SVG, and which row detects out-of-distribution inputs best."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import LapwingError, extra, shown
from . import plots
from .evaluated import MATRIX, NOISE, SCORES, TEMPERATURE, Predictions

if TYPE_CHECKING:
    from .comparison import Comparison


def literal(name: str) -> str:
    """Returns a name as matplotlib prints it: `$` starts no formula, and `_` at the start hides nothing."""
    return "\N{ZERO WIDTH SPACE}" * name.startswith("_") + name.replace("$", r"\$")


def pictures(table: Comparison, row: str | None) -> list[dict[str, Any]]:
    """Returns pictures that compare a row with the first row: a kind, a function `draw(ax)`, and the names for texts.

    Raises:
        LapwingError: if the table has no such row, or no predictions.
    """
    arrays = table.predictions
    base = next(iter(arrays), "")
    others = [name for name in arrays if name not in (base, TEMPERATURE, NOISE, MATRIX)] or list(arrays)
    chosen = row or min(others, key=lambda name: table[name]["NLL"], default=None)
    if chosen not in arrays:
        raise LapwingError(
            f"The table has no predictions of the row {shown(row)}. Its rows are {', '.join(arrays) or 'without any'}: "
            "let lw.compare make the table."
        )
    lines = {base: plots.NETWORK | {"label": literal(base)}, chosen: plots.LAPWING | {"label": literal(chosen)}}
    found = []

    def add(kind: str, draw: Callable[..., Any], given: Callable[[Predictions], tuple[Any, Any]]) -> None:
        def both(ax: Any) -> None:
            for name, line in lines.items():
                draw(*given(arrays[name]), ax, **line)

        found.append({"kind": kind, "draw": both, "rows": {name: arrays[name] for name in lines}, "row": chosen})

    if arrays[base].confidence is not None:
        add("reliability", plots.reliability_diagram, lambda own: (own.confidence, own.correct))
        add("risk", plots.risk_coverage, lambda own: (own.confidence, own.correct))
    elif arrays[base].mean is not None:
        add("intervals", plots.interval_calibration, _as_normal)
        add("scaled", plots.scaled_residuals, _as_normal)
    for name, ranked in detectors(table).items():
        for area, _, score in [one for one in ranked if one[1] == chosen][:1]:
            own = arrays[chosen]
            known, outside = own.scores[score], np.sort(own.foreign[name][score])
            picture = {"kind": "foreign", "draw": partial(plots.ood_scores, known, outside, score=score), "area": area}
            if own.p_values and score == "novelty":
                draw = partial(plots.ood_scores, own.p_values[""], own.p_values[name], score="p-value")
                picture |= {"kind": "p-values", "draw": draw}
            flagged = float((known >= outside[len(outside) // 20]).mean())  # by a threshold that flags 95 % of the set
            found.append(picture | {"set": name, "row": chosen, "score": score, "flagged": flagged})
    return found


def _as_normal(own: Predictions) -> tuple[Any, Any]:
    """Returns (mean, std), and the targets that have the same PIT under normal predictions."""
    residuals = None if own.pit is None else plots.normal_residuals(own.pit).numpy()
    return (own.mean, own.std), own.y if residuals is None else own.mean + own.std * residuals


def detectors(table: Comparison) -> dict[str, list[tuple[float, str, str]]]:
    """Returns name of an out-of-distribution set -> its (AUROC, row, score), the best one first."""
    found: dict[str, list[tuple[float, str, str]]] = {}
    for row, arrays in table.predictions.items():
        for name, scores in arrays.foreign.items():
            areas = {score: table[row][f"{name}: AUROC by {SCORES[score]}"] for score in scores}
            if f"{areas.get('entropy', 0):.3f}" == f"{areas.get('mutual_information', 1):.3f}":
                del areas["entropy"]  # with one noise variance both scores have one order
            own = [(area, row, score) for score, area in areas.items()]
            found[name] = sorted([*found.get(name, []), *own], key=lambda one: -one[0])
    return found


def svg(draw: Callable[[Any], Any]) -> str:
    """Returns a picture as an <svg> element that fits the width of the page."""
    mpl, figure = extra("matplotlib"), extra("matplotlib.figure").Figure(figsize=(4.6, 3.8), layout="constrained")
    with mpl.rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' id="[a-z0-9]+_\d+"', "", text)  # matplotlib gives the parts of every figure the same names
    return re.sub(r'^<svg ([^>]*?)width="[^"]*" ([^>]*?)height="[^"]*"', r"<svg \1\2", text)
