"""`lw.compare`: a table of posteriors and of the network alone on held-out data, with standard errors and costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from importlib.resources import files
from os import PathLike
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

from torch import nn

from ..data import batches
from ..data.data import Data
from ..data.frames import as_inputs
from ..data.progress import tracked, with_progress
from ..errors import LapwingError, check_choice, check_flag, extra, shown
from ..files import check_writable, replacing
from ..fitting import Mixture, Novelty
from ..network.entry import outside_modes
from ..options import Rule, at_least, check_argument, number
from ..posterior import Posterior
from ..prediction import Way
from .candidates import Candidate, posteriors_in, rows_of
from .evaluated import MEANS, SCORES, Evaluated, Predictions, by_halves, evaluated
from .report import detectors, literal, pictures, svg

Score = Literal["mutual_information", "entropy", "confidence"]

FIT_SECONDS = Rule(
    lambda given: given is None or (isinstance(given, Mapping) and all(map(number(0).accepts, given.values()))),
    "a dict from names to seconds",
)
FORMATS = {"accuracy": ".2%", "90 % interval": ".1%", "fit s": ".2f", "passes": ".1f"}
"""Column -> its format. Rates have their own, and other columns are printed to four digits."""


@dataclass(frozen=True)
class Comparison:
    """A table of numbers with one row per candidate, which prints as text.

    Attributes:
        columns: names of the metrics.
        rows: name -> column -> number; a column that does not apply is missing from the row.
        notes: which row has the lowest NLL, and which rows the data cannot tell from it; explanations of the numbers.
        errors: name -> column -> standard error: of the number in the first row, and of the difference to the first
            row, paired by sample, in the other rows.
        predictions: name -> arrays of what the row predicted, for pictures.
        ties: rows whose NLL is at most two standard errors above the lowest one.
    """

    columns: tuple[str, ...]
    rows: dict[str, dict[str, float]]
    notes: tuple[str, ...] = ()
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    predictions: dict[str, Predictions] = field(default_factory=dict, repr=False)
    ties: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> dict[str, float]:
        """Returns one row."""
        return self.rows[name]

    def __str__(self) -> str:
        """Returns the table and its notes as text."""
        parts = []
        for title, cells in self.tables():
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            lines = [title] if title else []
            for name, *numbers in [cells[0], ["-" * width for width in widths], *cells[1:]]:
                right = (cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))
                lines.append("  ".join([name.ljust(widths[0]), *right]).rstrip())
            parts.append("\n".join(lines))
        parts += ["\n".join(fill(note, 80) for note in self.notes)] if self.notes else []
        return ("\n\n" if len(parts) > 2 else "\n").join(parts)

    def _repr_html_(self) -> str:
        """Returns the table and its notes for notebooks."""
        tables = []
        for title, cells in self.tables():
            rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
            tables.append((f"<p>{escape(title)}</p>" if title else "") + f"<table>{rows}</table>")
        return "".join([*tables, *(f"<p>{escape(line)}</p>" for line in self.notes)])

    def to_pandas(self) -> Any:
        """Returns the unrounded numbers as a `pandas.DataFrame`, one row per candidate; a missing number is NaN.

        The frame writes files: `table.to_pandas().to_csv("table.csv")`, or `to_markdown()`, `to_latex()`, `to_excel()`.

        Raises:
            LapwingError: without pandas.
        """
        rows = list(self.rows.values())
        return extra("pandas").DataFrame(rows, index=list(self.rows), columns=list(self.columns))

    def plot(self, row: str | None = None) -> Any:
        """Draws the pictures that fit the task: one row of the table in blue, the first row in orange.

        Classes: reliability, and risk against coverage. Regression: calibration of intervals, and residuals in standard
        deviations against the predicted one. Each out-of-distribution set adds the score of the row that detects it
        best. `row=None` chooses the lowest NLL among the posteriors. Returns a matplotlib figure:
        `table.plot().savefig("table.png")`.

        Raises:
            LapwingError: if the table has no such row or no predictions, or matplotlib is missing.
        """
        found = pictures(self, row)
        if not found:
            raise LapwingError("No picture fits predictions of several heads, or of targets such as (time, ended).")
        lines = -(-len(found) // 2)
        pyplot = extra("matplotlib.pyplot")
        figure, axes = pyplot.subplots(lines, 2, figsize=(9, 3.6 * lines), squeeze=False, layout="constrained")
        for ax in axes.flat[len(found) :]:
            ax.set_axis_off()
        for ax, picture in zip(axes.flat, found, strict=False):
            picture["draw"](ax=ax)
            ax.set_title(literal(f"{picture['set']}, {picture['row']}") if "set" in picture else "")
        return figure

    def report(self, path: str | PathLike[str], title: str = "How good are the error bars?") -> Path:
        """Writes a report as one HTML file, for a reader who does not know the metrics; returns its path.

        It has a verdict, the table, and pictures with a paragraph on how to read each. It needs no network and no other
        file, and can be read on a phone and printed. The pictures compare the row of lowest NLL with the first row.

        Raises:
            LapwingError: if Jinja2, matplotlib or scikit-learn is missing, if `lw.compare` did not make the table, or
                if the file cannot be written. Then an old file stays as it was.
        """
        check_writable(path)
        template = (files(__package__) / "report.html.jinja").read_text(encoding="utf-8")
        page = extra("jinja2").Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
        found, path = pictures(self, None), Path(path)
        svgs, ranked = [svg(picture["draw"]) for picture in found], detectors(self)
        text = page.render(table=self, title=title, pictures=found, svgs=svgs, detectors=ranked)
        with replacing(path) as new:
            new.write_text(text, "utf-8")
        return path

    def tables(self) -> list[tuple[str, list[list[str]]]]:
        """Returns the parts of the printed table: a title, then the names of the columns and the rows, as strings.

        Columns such as "MNIST: AUPR" make the part "MNIST". Rows without a number are left out of a part.
        """
        titles = dict.fromkeys(["", *(column.rpartition(": ")[0] for column in self.columns)])
        found = []
        for title in titles:
            columns = [column for column in self.columns if column.rpartition(": ")[0] == title]
            rows = [[name, *(self._cell(name, column) for column in columns)] for name in self.rows]
            rows = [row for row in rows if any(row[1:])]
            found.append((title, [["", *(column.rpartition(": ")[2] for column in columns)], *rows]))
        return found

    def _cell(self, name: str, column: str) -> str:
        """Returns a number in the format of its column, with its standard error."""
        if column not in self.rows[name]:
            return ""
        form = FORMATS.get(column.partition(": ")[0], ".2%" if "ECE" in column else ".4f")
        number, error = format(self.rows[name][column], form), self.errors.get(name, {}).get(column)
        return f"{number} ± {format(error, form)}" if error else number


@outside_modes
@with_progress
def compare(
    posteriors: Mapping[str, Candidate],
    loader: Any,
    foreign: Mapping[str, Any] | None = None,
    *,
    score: Score | Novelty = "mutual_information",
    fit_seconds: Mapping[str, float] | None = None,
    repeats: int = 3,
    sample_weights: bool = False,
    progress: bool | None = None,
) -> Comparison:
    """Compares posteriors on the same held-out data.

    Two rows are added: the network alone, as "network", unless a candidate is a network; and the network with one
    number from held-out data, the logit temperature ("temperature scaling") or the noise variance ("held-out noise").
    If a posterior has a map of its logits, there is a third row, "matrix scaling". The samples of even number choose
    for the others, and conversely. The network itself predicts with the mean squared training residual as
    noise variance, unless σ² was given. A note names its posterior if there are several networks or likelihoods.

    Classes: accuracy, negative log likelihood (NLL), expected calibration error (ECE, 15 bins), Brier score and area
    under the risk-coverage curve (AURC). Bernoulli outputs are two classes each, pooled, and "ECE c" is the error of
    label c; of more than 10 labels only the "worst ECE". Regression: RMSE, NLL, CRPS, and coverage and mean width of
    the 90 % interval, also for each quarter of the predicted standard deviations.

    Args:
        posteriors: name -> a posterior, a mixture, a pair (posterior, way) such as `(posterior, lw.MonteCarlo(30))`, or
            a network.
        loader: held-out data in any form that `lw.fit` accepts; data that tuned nothing.
        foreign: name -> out-of-distribution inputs, a loader or a tensor. Each set has the columns "name: AUROC by MI"
            and "name: AUROC by entropy": how well mutual information and entropy separate it from the held-out inputs.
        score: the score of "name: FPR95" and "name: AUPR": "mutual_information", "entropy", or "confidence" for 1 minus
            the largest probability. A regression has the first two, of Gaussian outputs with the predicted variances.
            A detector of `lw.novelty` adds "name: AUROC by detector" and notes its alarms. Not used without `foreign`.
        fit_seconds: name -> seconds of the fit, for the column "fit s".
        repeats: number of timings of each batch; the fastest counts.
        sample_weights: whether the batches are `(x, y, w)`, as in `lw.fit`. The weights are ignored: every sample
            counts once.
        progress: whether to show a bar; None shows one on a terminal or in a notebook.

    Returns:
        A table. The column "passes" is the time of a prediction divided by the time of a plain forward pass of the same
        network on the same batches, measured in turn in this run: the network itself has 1.

    Raises:
        LapwingError: if there is no candidate, a candidate is of another kind, the loader is empty, or an option is
            invalid.

    Cost: for each candidate `repeats` predictions of every batch, and one of every foreign batch.

    Example:
        >>> import torch, lapwing as lw
        >>> from lapwing.evaluation import compare
        >>> x, y = torch.randn(64, 4), torch.randint(3, (64,))
        >>> model = torch.nn.Linear(4, 3).eval()
        >>> table = compare({"KFAC": lw.fit(model, [(x, y)])}, [(x, y)])
        >>> list(table.rows), table.columns
        (['network', 'temperature scaling', 'KFAC'], ('accuracy', 'NLL', 'ECE', 'Brier', 'AURC', 'passes'))
    """
    _check(posteriors, score, repeats, fit_seconds)
    check_flag("compare", "sample_weights", sample_weights)
    first = next(iter(posteriors.values()))
    network: Any = next((posterior.model for posterior in posteriors_in(first)), first)
    data = Data(loader, network, sample_weights)
    batches.check_loader(data.loader, "compare")
    sets = _foreign_sets(foreign, data, network)
    fitted = [posterior for candidate in posteriors.values() for posterior in posteriors_in(candidate)]
    for posterior in fitted:
        data.check_keys(posterior.likelihood)
    candidates, base, notes = rows_of(posteriors, data)
    label = "mutual_information" if isinstance(score, Novelty) else score
    mapped = any(posterior.likelihood.logit_map for posterior in fitted)
    rows: dict[str, Evaluated] = {}
    notes += ["The weights of samples are ignored: every sample counts once."] if sample_weights else []
    for name, candidate in candidates.items():
        own = Data(loader, network, sample_weights, columns=candidate.columns)
        inputs = {key: as_inputs(value, network, own.columns) for key, value in sets.items()}
        rows[name] = evaluated(candidate, tracked(own, name), inputs, repeats, label, (fit_seconds or {}).get(name))
        if name != base:
            continue
        for matrix in (False, True) if mapped else (False,):
            half = by_halves(rows[name], candidate.likelihood, matrix)  # type: ignore[arg-type]
            if half is not None and half[0] not in posteriors:
                rows[half[0]] = half[1]
                notes.append(half[2])
    if isinstance(score, Novelty):
        every, p = {"": data, **sets}, {}
        if score.held_out is not None:
            p = {key: score.p_value(value).cpu() for key, value in every.items()}
            rates = {key or "the held-out inputs": (one <= 0.05).double().mean() for key, one in p.items()}
            shares = ", ".join(f"{rate:.1%} of {what}" for what, rate in rates.items())
            notes.append(f"At a rate of 5 % the detector raises an alarm for {shares}.")
        scores = {key: score(value).cpu() for key, value in every.items()}
        for name, row in rows.items():
            sets_of_row = {key: others | {"novelty": scores[key]} for key, others in row.foreign.items()}
            known = row.known | {"novelty": scores[""]}
            rows[name] = replace(row, score="novelty", known=known, foreign=sets_of_row, p_values=p)
    return _table(rows, notes, sets)


LOWER = {
    "NLL": "negative log likelihood, in nats",
    "ECE": "mean gap between confidence and accuracy",
    "Brier": "squared error of the probabilities",
    "AURC": "mean error rate of the most confident 1, 2, ..., N predictions",
    "RMSE": "root of the mean squared error",
    "CRPS": "absolute error of the whole predictive distribution",
}
"""Column -> its meaning; lower is better."""
ERRORS = (
    "The number after ± is a standard error: in the first row of the number, in the other rows of the difference from "
    "the first row, paired by sample."
)
PASSES = (
    "The column passes is the measured time of probabilities or means, without scores, in forward passes. Small "
    "networks need more."
)
QUARTERS = (
    "Q1 to Q4 are shares of targets in the 90 % intervals, by quarter of the predicted standard deviations, the "
    "smallest first. A row that predicts one standard deviation has no quarters."
)
OUTSIDE = (
    "AUROC is the probability that an out-of-distribution (OOD) input has a higher score than a held-out one; 0.5 is "
    "chance. MI is the mutual information between prediction and weights, which only posteriors have. FPR95 is the "
    "share of held-out inputs that a threshold flags if it flags 95 % of the OOD inputs. FPR95 and AUPR use {}."
)


def _table(rows: dict[str, Evaluated], notes: list[str], sets: dict[str, Any]) -> Comparison:
    """Returns the table of the rows, with standard errors, verdict and notes."""
    numbers = {name: row.numbers for name, row in rows.items()}
    columns = tuple(dict.fromkeys(column for row in sorted(numbers.values(), key=len, reverse=True) for column in row))
    first = next(iter(rows))
    for name, row in numbers.items():
        if missing := [column for column in columns if column in MEANS and column not in row]:
            raise LapwingError(
                f'The row "{name}" has no {missing[0]}, as others have. Compare labels and real values in two tables.'
            )
    errors = {
        name: {c: row.error(c, rows[first] if name != first else None) for c in columns if c in MEANS}
        for name, row in rows.items()
    }
    meanings = "; ".join(f"{column} is the {LOWER[column]}" for column in columns if column in LOWER)
    notes = [ERRORS, *notes, f"Lower is better: {meanings}.", PASSES]
    if "90 % interval: Q1" in columns:
        notes.append(QUARTERS)
    if sets:
        notes.append(OUTSIDE.format(SCORES[rows[first].score]))
    found = {name: row.predictions() for name, row in rows.items()}
    lead, ties = _lead(rows)
    verdict = " ".join([lead, *dict.fromkeys(_taken_for_known(rows))])
    return Comparison(columns, numbers, (verdict, *notes), errors, found, ties)


def _lead(rows: dict[str, Evaluated]) -> tuple[str, tuple[str, ...]]:
    """Returns a text about the row of lowest NLL, and the rows that are at most two standard errors above it."""
    best, *others = sorted(rows, key=lambda name: rows[name].numbers["NLL"])
    gaps = {name: rows[name].numbers["NLL"] - rows[best].numbers["NLL"] for name in others}
    errors = {name: rows[name].error("NLL", rows[best]) for name in others}
    shown = {name: f'"{name}" ({gaps[name]:.4f} ± {errors[name]:.4f} more)' for name in others}
    ties = tuple(name for name in others if gaps[name] <= 2 * errors[name])
    text = f'"{best}" has the lowest NLL, {rows[best].numbers["NLL"]:.4f}.'
    if ties:
        text += f" The data cannot tell it from {' and '.join(shown[name] for name in ties)}."
    if worse := [name for name in others if name not in ties]:
        text += f" It is better than {shown[worse[0]]}{' and the others' if worse[1:] else ''}."
    return text, ties


def _taken_for_known(rows: dict[str, Evaluated]) -> Iterator[str]:
    """Yields a sentence for each row that finds an out-of-distribution set less strange than the held-out inputs.

    Its AUROC A is two standard errors below 0.5, by `Var(A) ≤ A (1 - A) / min(n, m)` for n and m inputs.
    """
    for name, row in rows.items():
        for part, scores in row.foreign.items():
            for score, outside in scores.items():
                area = row.numbers[f"{part}: AUROC by {SCORES[score]}"]
                error = math.sqrt(area * (1 - area) / min(len(outside), len(row.known[score])))
                if area < 0.5 - 2 * error:
                    what = "The detector" if score == "novelty" else f'By {SCORES[score]}, "{name}"'
                    yield f"{what} ranks {part} as known: the AUROC is {area:.3f}, and 0.5 is chance."
                    break


def _check(posteriors: Any, score: Any, repeats: Any, fit_seconds: Any) -> None:
    if not isinstance(posteriors, Mapping) or not posteriors or not all(isinstance(name, str) for name in posteriors):
        raise LapwingError(
            f"The posteriors of compare are {batches.describe(posteriors)}. Pass a dict of at least one, by name: "
            'compare({"KFAC": posterior}, loader).'
        )
    for name, candidate in posteriors.items():
        one, way = candidate if isinstance(candidate, tuple) and len(candidate) == 2 else (candidate, None)
        fits = isinstance(one, (Posterior, Mixture)) and (way is None or isinstance(way, Way))
        if not fits and not isinstance(candidate, nn.Module):
            raise LapwingError(
                f"The candidate {shown(name)} of compare is {batches.describe(candidate)}. Pass a posterior, a pair "
                "(posterior, way) or a network."
            )
    if not isinstance(score, Novelty):
        check_choice("compare", "score", score, tuple(SCORES)[:-1])
    check_argument("compare", "repeats", repeats, at_least(1), "10")
    check_argument("compare", "fit_seconds", fit_seconds, FIT_SECONDS, '{"KFAC": 1.5}')


def _foreign_sets(foreign: Any, data: Data, network: nn.Module) -> dict[str, Any]:
    """Returns name -> out-of-distribution inputs. Raises unless they are such a dict."""
    if foreign is None:
        return {}
    held_out = next((samples.inputs.value for samples in data), None)
    batch = isinstance(held_out, Mapping) and isinstance(foreign, Mapping) and foreign.keys() & held_out.keys()
    if not isinstance(foreign, Mapping) or batch or not all(isinstance(name, str) for name in foreign):
        raise LapwingError(
            f"foreign of compare is {batches.describe(foreign)}. Pass a dict from a name to a loader or a tensor of "
            'out-of-distribution inputs: foreign={"noise": torch.randn(100, 3)}.'
        )
    return dict(foreign)
