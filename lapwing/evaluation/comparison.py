"""`lw.compare`: a table of posteriors on held-out data, with the plain network (MAP) as a row and the cost of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..covariance import Latent
from ..covariance.latent_at_positions import LatentAtPositions
from ..covariance.terms import EigenTerm
from ..data import batches
from ..data.data import Data
from ..data.frames import Columns, as_inputs, ordered
from ..data.progress import tracked, with_progress
from ..errors import LapwingError, check_choice, check_flag, extra, shown
from ..likelihoods import Likelihood, Prediction
from ..likelihoods.inferred import inferred_likelihood
from ..likelihoods.prediction_at_positions import predicted
from ..network.calling import shaped_outputs
from ..network.entry import outside_modes
from ..network.impossible import EXCLUDED
from ..network.positions import Positions
from ..options import at_least, check_argument
from ..posterior import Posterior
from ..prediction import Way
from . import metrics

Candidate = Posterior | nn.Module | tuple[Posterior, Way]
Score = Literal["entropy", "confidence"]

SCORES: dict[str, str] = {"entropy": "entropy", "confidence": "1 - confidence"}
METRICS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "accuracy": (metrics.accuracy, ("probs", "labels")),
    "RMSE": (metrics.rmse, ("mean", "y")),
    "NLL": (metrics.nll, ("log_prob",)),
    "ECE": (metrics.expected_calibration_error, ("probs", "labels")),
    "CRPS": (metrics.crps_gaussian, ("mean", "std", "y")),
    "Brier": (metrics.brier, ("probs", "labels")),
    "90 % interval": (metrics.interval_coverage, ("lower", "upper", "y")),
}
"""Column -> its metric, and the entries of `Prediction.for_metrics` that it needs. Without them there is no column."""
MANY_LABELS = 10
"""Maximum number of labels that get a column each."""

FORMATS = {"accuracy": ".2%", "ECE": ".2%", "90 % interval": ".1%", "fit s": ".2f", "passes": ".1f"}
"""Column -> its format. Other columns are printed to four digits."""


@dataclass(frozen=True)
class Comparison:
    """A table of numbers with one row per candidate, which prints as text.

    Attributes:
        columns: names of the metrics.
        rows: name -> column -> number; a column that does not apply is missing from the row.
        notes: explanations of the numbers.
    """

    columns: tuple[str, ...]
    rows: dict[str, dict[str, float]]
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> dict[str, float]:
        """Returns one row."""
        return self.rows[name]

    def __str__(self) -> str:
        """Returns the table and its notes as text."""
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        cells.insert(1, ["-" * width for width in widths])
        lines = []
        for name, *numbers in cells:
            right = (cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))
            lines.append("  ".join([name.ljust(widths[0]), *right]).rstrip())
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        """Returns the table and its notes for notebooks."""
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self._cells())
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + f"</table>{notes}"

    def to_pandas(self) -> Any:
        """Returns the unrounded numbers as a `pandas.DataFrame`, one row per candidate; a missing number is NaN.

        The frame writes files: `table.to_pandas().to_csv("table.csv")`, or `to_markdown()`, `to_latex()`, `to_excel()`.

        Raises:
            LapwingError: without pandas.
        """
        rows = list(self.rows.values())
        return extra("pandas").DataFrame(rows, index=list(self.rows), columns=list(self.columns))

    def _cells(self) -> list[list[str]]:
        """Returns the names of the columns, then the rounded numbers of each row, as strings."""
        return [["", *self.columns]] + [
            [name, *(_cell(column, row[column]) if column in row else "" for column in self.columns)]
            for name, row in self.rows.items()
        ]


def _cell(column: str, number: float) -> str:
    """Returns a number in the format of its column."""
    return format(number, FORMATS.get(column, ".2%" if "ECE" in column else ".4f"))


@outside_modes
@with_progress
def compare(
    posteriors: Mapping[str, Candidate],
    loader: Any,
    foreign: Any = None,
    *,
    score: Score = "entropy",
    fit_seconds: Mapping[str, float] | None = None,
    repeats: int = 3,
    sample_weights: bool = False,
    progress: bool | None = None,
) -> Comparison:
    """Compares posteriors on the same held-out data.

    Classification: accuracy, negative log likelihood (NLL), expected calibration error (ECE, 15 bins), Brier score, and
    AUROC; Bernoulli outputs are two classes each, pooled, and "ECE c" is the error of label c (of more than 10 labels
    only the "worst ECE"). Regression: RMSE, NLL, CRPS, coverage of the 90 % interval, and AUROC. A network predicts
    with the mean squared training residual as noise variance, unless σ² was given. If no candidate is a module and all
    posteriors are around one network, this network is added as the row "MAP".

    Args:
        posteriors: name -> a posterior, a pair (posterior, way) such as `(posterior, lw.MonteCarlo(30))`, or a network.
        loader: held-out data in any form that `lw.fit` accepts; data that tuned nothing.
        foreign: out-of-distribution inputs: one tensor, array or loader. AUROC measures how well the uncertainty
            separates them from the loader's inputs. A dict, name -> inputs, gives a column "AUROC name" for each set.
        score: uncertainty that AUROC ranks by: "entropy" of the class probabilities, or "confidence", 1 minus the
            largest probability. For regression it is the predictive standard deviation of the first output.
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
        (['MAP', 'KFAC'], ('accuracy', 'NLL', 'ECE', 'Brier', 'passes'))
    """
    _check(posteriors, score, repeats, fit_seconds)
    check_flag("compare", "sample_weights", sample_weights)
    first = next(iter(posteriors.values()))
    around = first[0] if isinstance(first, tuple) else first
    network = around.model if isinstance(around, Posterior) else around
    data = Data(loader, network, sample_weights)
    batches.check_loader(data.loader, "compare")
    fits = fit_seconds or {}
    rows: dict[str, dict[str, float]] = {}
    for name, candidate in _candidates(posteriors, data).items():
        own = Data(loader, network, sample_weights, columns=candidate.columns)
        foreign_sets = _foreign_sets(foreign, own, network)
        parts, targets, cost = _run(candidate, tracked(own, name), repeats)
        rows[name] = _row(parts, targets)
        for column, inputs in foreign_sets.items():
            outside = _predictions(candidate, inputs)
            sides = (
                torch.cat([part.uncertainty(score).flatten() for part in side]).detach() for side in (parts, outside)
            )
            rows[name][column] = float(metrics.auroc(*sides))
        if name in fits:
            rows[name]["fit s"] = fits[name]
        rows[name]["passes"] = 1.0 if candidate.alone else cost
    columns = tuple(dict.fromkeys(column for row in sorted(rows.values(), key=len, reverse=True) for column in row))
    notes = ["passes: time of a prediction in plain forward passes of the same batches, measured in this run."]
    if sample_weights:
        notes.append("The weights of samples are ignored: every sample counts once.")
    if foreign_sets:
        by = "predictive standard deviation" if "RMSE" in columns else SCORES[score]
        notes.append(f"AUROC: foreign inputs against held-out inputs, ranked by {by}.")
    return Comparison(columns, rows, tuple(notes))


def _check(posteriors: Any, score: str, repeats: Any, fit_seconds: Any) -> None:
    if not isinstance(posteriors, Mapping) or not posteriors:
        raise LapwingError(
            f"The posteriors of compare are {batches.describe(posteriors)}. Pass a dict of at least one: "
            'compare({"KFAC": posterior}, loader).'
        )
    for name, candidate in posteriors.items():
        if not isinstance(name, str):
            raise LapwingError(f"A name of the posteriors is {shown(name)}. Pass a dict with strings as keys.")
        pair = isinstance(candidate, tuple) and len(candidate) == 2
        if not (
            isinstance(candidate, (Posterior, nn.Module))
            or (pair and isinstance(candidate[0], Posterior) and isinstance(candidate[1], Way))
        ):
            raise LapwingError(
                f"The candidate {shown(name)} of compare is {batches.describe(candidate)}. Pass a posterior, a pair "
                "(posterior, way) or a network."
            )
    check_choice("compare", "score", score, tuple(SCORES))
    check_argument("compare", "repeats", repeats, at_least(1), "10")
    real = isinstance(fit_seconds, Mapping) and all(
        isinstance(seconds, Real) and seconds < 1e300 for seconds in fit_seconds.values()
    )
    if fit_seconds is not None and not real:
        raise LapwingError(f"fit_seconds is {shown(fit_seconds)}. Pass a dict of seconds by name, or leave it out.")


def _foreign_sets(foreign: Any, data: Data, network: nn.Module) -> dict[str, Any]:
    """Returns column -> foreign inputs. A dict of tensors may be one batch, if the network's inputs are dicts."""
    if foreign is None:
        return {}
    foreign = ordered(foreign, data.columns)
    if not isinstance(foreign, Mapping):
        return {"AUROC": as_inputs(foreign, network)}
    held_out = next((batches.split(batch)[0] for batch in data), None)
    if isinstance(held_out, Mapping) and all(isinstance(value, Tensor) for value in foreign.values()):
        return {"AUROC": foreign}
    if not foreign or not all(isinstance(name, str) for name in foreign):
        raise LapwingError(
            f"The foreign inputs of compare are {batches.describe(foreign)}. Pass a tensor or a loader, or several by "
            'name: foreign={"noise": torch.randn(100, 3)}.'
        )
    return {f"AUROC {name}": as_inputs(inputs, network) for name, inputs in foreign.items()}


@dataclass(frozen=True)
class _Candidate:
    """A row: its prediction, its network's forward pass, device, whether it is only the network, and its columns."""

    predict: Callable[[Any], Prediction]
    forward: Callable[[Any], Tensor]
    device: torch.device | None
    alone: bool
    columns: Columns = ()


def _candidates(posteriors: Mapping[str, Candidate], data: Data) -> dict[str, _Candidate]:
    """Returns the rows of the table, with the network as "MAP" if all candidates are posteriors around one network."""
    around = [c[0] if isinstance(c, tuple) else c for c in posteriors.values()]
    fitted = [posterior for posterior in around if isinstance(posterior, Posterior)]
    likelihood = _with_noise(fitted[0]) if fitted else _likelihood(data)
    positions = fitted[0].tangent.positions if fitted else None
    columns = fitted[0].columns if fitted else ()
    rows: dict[str, _Candidate] = {}
    if len(fitted) == len(around) and len({id(posterior.tangent.model) for posterior in fitted}) == 1:
        rows["MAP"] = _network(fitted[0].tangent.outputs_of, likelihood, fitted[0].tangent.device, positions, columns)
    for name, candidate in posteriors.items():
        if isinstance(candidate, nn.Module):
            device = next((parameter.device for parameter in candidate.parameters()), None)
            layout = None if positions is None else replace(positions, forward=None)
            run = torch.no_grad()(partial(shaped_outputs, candidate, forward=layout))
            rows[name] = _network(run, likelihood, device, positions, columns)
        else:
            posterior, way = candidate if isinstance(candidate, tuple) else (candidate, None)
            predict = partial(posterior.predict, via=way)
            rows[name] = _Candidate(
                predict, posterior.tangent.outputs_of, posterior.tangent.device, False, posterior.columns
            )
    return rows


def _with_noise(posterior: Posterior) -> Likelihood:
    """Returns the likelihood at T = 1; its noise is the mean squared residual unless the user gave σ²."""
    likelihood = posterior.likelihood
    if likelihood.logit_temperature is not None:
        likelihood = likelihood.with_logit_temperature(1.0)
    residual = likelihood.residual_variance(posterior.statistics)
    return likelihood if residual is None or posterior.noise_fixed else likelihood.with_noise_variance(residual)


def _network(
    forward: Callable[[Any], Tensor],
    likelihood: Likelihood,
    device: torch.device | None,
    positions: Positions | None,
    columns: Columns,
) -> _Candidate:
    """Returns a network as a posterior without spread."""

    def predict(inputs: Any) -> Prediction:
        outputs = forward(inputs)
        if likelihood.activation == "softmax" and outputs.ndim == 2 and outputs.shape[1] < 2:
            raise LapwingError(
                f"A network of the comparison has outputs of shape {tuple(outputs.shape)}, and {likelihood.name} "
                "predictions need one for each class. Pass a network with as many outputs as classes."
            )
        layout = Positions.of(outputs.shape, None, None) if positions is None or outputs.ndim == 2 else positions
        rows = layout.rows(outputs)
        if likelihood.activation is not None:
            rows = rows.clamp_min(EXCLUDED)  # -inf marks a class that cannot be
        batches.check_outputs(rows, "a batch of compare")
        latent = Latent(rows, (EigenTerm(None, torch.zeros_like(rows)),))
        places = layout.places(len(outputs), layout.sizes(outputs.shape))
        return predicted(likelihood, LatentAtPositions(latent, places), None, None)

    return _Candidate(predict, forward, device, True, columns)


def _likelihood(data: Data) -> Likelihood:
    """Returns the likelihood of a comparison of networks only, or refuses it if it needs a noise variance."""
    targets = next((batches.split(batch)[1] for batch in data), torch.zeros(0, dtype=torch.long))
    likelihood = inferred_likelihood(targets, data)
    if likelihood.needs_noise:
        raise LapwingError(
            "A comparison of networks has no noise variance, which real targets need. Add at least one posterior: "
            'write compare({"KFAC": lw.fit(model, loader)}, test_loader).'
        )
    return likelihood


def _run(candidate: _Candidate, loader: Iterable[Any], repeats: int) -> tuple[list[Prediction], list[Tensor], float]:
    """Predicts every batch; returns the predictions, the targets, and the cost in forward passes."""
    parts: list[Prediction] = []
    targets: list[Tensor] = []
    spent = plain = 0.0
    for batch in loader:
        inputs, labels = batches.split(batch, candidate.device)
        if not batches.size(inputs):
            continue
        runs = [_timed(candidate, inputs) for _ in range(1 if candidate.alone else repeats)]
        parts.append(runs[-1][0])
        targets.append(labels)
        plain += min(forward for _, forward, _ in runs)
        spent += min(predict for _, _, predict in runs)
    if not parts:
        raise LapwingError(
            "The loader of compare has no samples. Pass (inputs, targets) batches that can be iterated for every "
            "candidate: compare(posteriors, [(x_test, y_test)])."
        )
    return parts, targets, spent / plain


def _timed(candidate: _Candidate, inputs: Any) -> tuple[Prediction, float, float]:
    """Returns a prediction, the seconds of a forward pass, and the seconds of the prediction."""
    _wait()
    start = time.perf_counter()
    candidate.forward(inputs)
    _wait()
    middle = time.perf_counter()
    prediction = candidate.predict(inputs)
    prediction.distribution()  # computes everything that is lazy
    _wait()
    return prediction, middle - start, time.perf_counter() - middle


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _predictions(candidate: _Candidate, foreign: Any) -> list[Prediction]:
    """Returns the predictions of a set of foreign inputs, batch by batch."""
    several, found = batches.is_loader(foreign), []
    for batch in tracked(foreign if several else [foreign], "foreign inputs"):
        inputs = batches.inputs_of(batch) if several or isinstance(batch, Mapping) else batch
        if batches.size(inputs):
            found.append(candidate.predict(batches.plain(inputs, candidate.device)))
    if not found:
        raise LapwingError("The foreign inputs of compare hold no samples. Pass a tensor (B, ...) or a loader.")
    return found


def _row(parts: list[Prediction], targets: list[Tensor]) -> dict[str, float]:
    """Returns the metrics of one candidate."""
    values = [part.for_metrics(y) for part, y in zip(parts, targets, strict=True)]
    joined = {name: torch.cat([value[name].detach() for value in values]) for name in values[0]}
    row = {
        column: float(metric(*(joined[name] for name in names)))
        for column, (metric, names) in METRICS.items()
        if set(names) <= set(joined)
    }
    return row | _errors_of_labels(joined) if "places" in joined else row


def _errors_of_labels(joined: dict[str, Tensor]) -> dict[str, float]:
    """Returns the ECE of each label by column, or only the largest one of many labels; nothing for a single label."""
    errors = {}
    for place in joined["places"].unique().tolist():
        rows = joined["places"] == place
        error = metrics.expected_calibration_error(joined["probs"][rows], joined["labels"][rows])
        errors[f"ECE {place}"] = float(error)
    if len(errors) > MANY_LABELS:
        return {"worst ECE": max(errors.values())}
    return errors if len(errors) > 1 else {}


__all__ = ["Comparison", "compare"]
