"""What a row of a comparison predicts, and its numbers: metrics, standard errors, detection of OOD inputs, cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..covariance import has_positions, without_spread
from ..data import batches
from ..data.inputs import Inputs, Samples
from ..data.progress import tracked
from ..errors import LapwingError, extra
from ..likelihoods import Likelihood, Prediction
from ..likelihoods.targets import which_count
from ..linalg import doubled
from ..tuning.matrix_scaling import chosen_map
from ..tuning.search import golden_section
from . import metrics
from .candidates import Row

SCORES = {"mutual_information": "MI", "entropy": "entropy", "confidence": "confidence", "novelty": "detector"}
"""Score -> its name in a column. The last one is of a detector, and the others are labels of `score`."""
METRICS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "accuracy": (metrics.accuracy, ("probs", "labels")),
    "RMSE": (metrics.rmse, ("mean", "y")),
    "NLL": (metrics.nll, ("log_prob",)),
    "ECE": (metrics.expected_calibration_error, ("probs", "labels")),
    "CRPS": (lambda crps: doubled(crps).nanmean(), ("crps",)),
    "Brier": (metrics.brier, ("probs", "labels")),
    "AURC": (lambda probs, labels: metrics.aurc(1 - probs.amax(1), probs.argmax(1) != labels), ("probs", "labels")),
    "90 % interval": (metrics.interval_coverage, ("lower", "upper", "y")),
    "90 % width": (lambda lower, upper: (upper - lower).mean(), ("lower", "upper")),
}
"""Column -> its metric, and the entries of `Prediction.for_metrics` that it needs. Without them there is no column."""
MEANS: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "accuracy": lambda v: v["probs"].argmax(1) == v["labels"],
    "RMSE": lambda v: (v["mean"] - v["y"]).square(),
    "NLL": lambda v: -v["log_prob"],
    "90 % interval": lambda v: (v["lower"] <= v["y"]) & (v["y"] <= v["upper"]),
}
"""Column with standard errors -> the entries whose mean is the metric. For the RMSE they are squared errors."""

TEMPERATURE, NOISE, MATRIX = "temperature scaling", "held-out noise", "matrix scaling"
"""Names of the rows that `by_halves` makes."""
MANY_LABELS = 10
"""Maximum number of labels that get a column each."""
FEWEST = 40
"""Minimum number of samples for the coverage by quarter."""

KEPT = 20_000
"""Maximum number of entries of each array of `Predictions`."""

Scores = dict[str, Tensor]
"""Score -> uncertainty of each input."""


@dataclass(frozen=True, repr=False)
class Predictions:
    """What one row of a comparison predicted, as NumPy arrays, for pictures and tests of your own.

    N is the number of samples or positions, n the number of labels or known targets. If there are more than 20 000
    entries, each array holds every second, third, ... one. Arrays that do not apply are None.

    Attributes:
        log_prob: log probability or density of the targets (N,), in nats.
        confidence: largest class probability (n,).
        correct: whether the most probable class is the label (n,).
        mean: predicted means (n,), all outputs in one array.
        std: predicted standard deviations of y (n,).
        lower: lower ends of the 90 % intervals (n,); `upper` has the upper ends.
        y: targets (n,).
        pit: probability integral transforms of the targets (n,); None for counts.
        scores: "mutual_information", "entropy", ... -> uncertainty of each held-out input (N,); empty without
            `foreign=`. A network alone has no mutual information.
        foreign: name of an out-of-distribution set -> score -> uncertainty of each of its inputs (M,).
        p_values: likewise -> p-values of a detector with held-out data, and "" -> p-values of the held-out inputs.
    """

    log_prob: np.ndarray
    confidence: np.ndarray | None = None
    correct: np.ndarray | None = None
    mean: np.ndarray | None = None
    std: np.ndarray | None = None
    lower: np.ndarray | None = None
    upper: np.ndarray | None = None
    y: np.ndarray | None = None
    pit: np.ndarray | None = None
    scores: Mapping[str, np.ndarray] = field(default_factory=dict)
    foreign: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    p_values: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluated:
    """What a row of the table predicts. `rows` and `outside` are only for a network alone, batch by batch."""

    values: dict[str, Tensor]  # the entries of `Prediction.for_metrics` of all samples, on the CPU
    known: Scores  # of the held-out inputs, if there are out-of-distribution sets
    foreign: dict[str, Scores]  # of each out-of-distribution set
    score: str  # the score of FPR95 and AUPR
    cost: float = 1.0  # time of a prediction, in forward passes
    seconds: float | None = None  # time of the fit
    rows: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # outputs (n, C), targets, sample numbers
    outside: dict[str, list[Tensor]] = field(default_factory=dict)  # name of an out-of-distribution set -> outputs
    p_values: Scores = field(default_factory=dict)  # as in `Predictions`

    @cached_property
    def numbers(self) -> dict[str, float]:
        """Column -> number."""
        values = self.values
        row = {
            column: float(metric(*(values[name] for name in names)))
            for column, (metric, names) in METRICS.items()
            if set(names) <= set(values)
        }
        for head in dict.fromkeys(name.partition(": ")[0] for name in values if ": " in name):
            own = {name.partition(": ")[2]: v for name, v in values.items() if name.startswith(f"{head}: ")}
            numbers = Evaluated(own, {}, {}, self.score).numbers
            row |= {f"{head}: {column}": number for column, number in numbers.items() if column != "passes"}
        row |= _errors_of_labels(values) if "places" in values else {}
        for name in self.foreign:
            row |= self._detection(name)
        row |= _quarters(values) if "mean" in values else {}
        return row | ({} if self.seconds is None else {"fit s": self.seconds}) | {"passes": self.cost}

    def error(self, column: str, first: Evaluated | None = None) -> float:
        """Returns the standard error of a column of `MEANS`, or of its difference to another row.

        The difference is paired by sample, unless the rows have the samples in another order. Entries of one sample,
        such as positions, may depend on each other.
        """
        each, groups = self._deviations(column), self.values["sample" if column == "NLL" else "entry"].flatten()
        if first is not None:
            targets = [name for name in self.values if name.rpartition(": ")[2] in ("y", "labels")]
            pairs = [(one.values[name].double().flatten() for one in (self, first)) for name in targets]  # (N,), (N, 1)
            if not all(torch.equal(*pair) for pair in pairs):
                return math.hypot(self.error(column), first.error(column))
            each = each - first._deviations(column)
        sums = torch.zeros(int(groups.max()) + 1, dtype=each.dtype).index_add(0, groups, each)
        count = len(groups.unique())
        return math.sqrt(count / max(1, count - 1) * float(sums.square().sum())) / len(each)

    def predictions(self) -> Predictions:
        """Returns the arrays for pictures."""
        arrays = {name: value for name, value in self.values.items() if name in Predictions.__dataclass_fields__}
        if "probs" in self.values:
            arrays["confidence"], classes = self.values["probs"].max(1)
            arrays["correct"] = classes == self.values["labels"]
        foreign = {name: _kept(outside) for name, outside in self.foreign.items()}
        return Predictions(**_kept(arrays), scores=_kept(self.known), foreign=foreign, p_values=_kept(self.p_values))

    def _deviations(self, column: str) -> Tensor:
        """Returns the deviations of the entries from their mean. For the RMSE they are linearised."""
        each = doubled(MEANS[column](self.values)).flatten()
        return (each - each.mean()) / (2 * max(self.numbers["RMSE"], 1e-300) if column == "RMSE" else 1.0)

    def _detection(self, name: str) -> dict[str, float]:
        """Returns the AUROC of a foreign set by each score, and FPR95 and AUPR by the chosen score."""
        row, sklearn = {}, extra("sklearn.metrics")
        for score, known in self.known.items():
            outside = self.foreign[name][score]
            row[f"{name}: AUROC by {SCORES[score]}"] = float(metrics.auroc(known, outside))
        if self.score in self.known:
            known, outside = self.known[self.score], self.foreign[name][self.score]
            sides = torch.cat([torch.zeros_like(known), torch.ones_like(outside)]), torch.cat([known, outside])
            false, true, _ = sklearn.roc_curve(*sides, drop_intermediate=False)
            row[f"{name}: FPR95"] = float(false[true >= 0.95][0])
            row[f"{name}: AUPR"] = float(sklearn.average_precision_score(*sides))
        return row


def _kept(values: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Returns tensors as flat arrays of at most `KEPT` entries."""
    return {name: value.flatten()[:: -(-value.numel() // KEPT)].numpy() for name, value in values.items()}


def _quarters(values: dict[str, Tensor]) -> dict[str, float]:
    """Returns the coverage of the 90 % intervals in each quarter of the predicted standard deviations of each output.

    A row that predicts fewer than four standard deviations of an output has no quarters.
    """
    std, output, inside = values["std"], values["output"], doubled(MEANS["90 % interval"](values))
    quarter = torch.empty_like(output)
    for one in output.unique():
        column = std[output == one]
        if len(column) < FEWEST or len(column.unique()) < 4:
            return {}
        quarter[output == one] = column.argsort().argsort() * 4 // len(column)
    return {f"90 % interval: Q{q + 1}": float(inside[quarter == q].mean()) for q in range(4)}


def _errors_of_labels(values: dict[str, Tensor]) -> dict[str, float]:
    """Returns the ECE of each label by column, or only the largest one of many labels; nothing for a single label."""
    errors = {}
    for place in values["places"].unique().tolist():
        rows = values["places"] == place
        error = metrics.expected_calibration_error(values["probs"][rows], values["labels"][rows])
        errors[f"ECE {place}"] = float(error)
    if len(errors) > MANY_LABELS:
        return {"worst ECE": max(errors.values())}
    return errors if len(errors) > 1 else {}


def evaluated(
    row: Row, data: Iterable[Samples], foreign: Mapping[str, Any], repeats: int, score: str, seconds: float | None
) -> Evaluated:
    """Predicts every batch of the held-out data and of the out-of-distribution sets."""
    values, known, rows = [], [], []
    spent, plain = 0.0, 0.0
    keep = row.likelihood and (row.likelihood.logit_temperature or row.likelihood.noise_variance)
    names = [*dict.fromkeys(("mutual_information", "entropy", score))] if foreign else []
    if row.likelihood:  # a network alone has no mutual information, and with one noise variance no score
        names = [] if row.likelihood.noise_variance else [name for name in names if name != "mutual_information"]
    for samples in data:
        samples = samples.to(row.device)
        if not samples.count:
            continue
        timings = [_timed(row, samples.inputs) for _ in range(1 if row.likelihood else repeats)]
        prediction, targets = timings[-1][0], samples.targets
        numbers = samples.start + torch.arange(samples.count)
        values.append(_entries(prediction, targets, numbers))
        known.append(_of_counted(scores_of(prediction, names), prediction, targets))
        if keep:
            rows.append(_as_rows(prediction, targets, numbers))
        plain += min(forward for _, forward, _ in timings)
        spent += min(predict for _, _, predict in timings)
    if not values:
        raise LapwingError(
            "The loader of compare has no samples. Pass (inputs, targets) batches that can be iterated for every "
            "candidate: compare(posteriors, [(x_test, y_test)])."
        )
    sets: dict[str, list[Scores]] = {name: [] for name in foreign}
    outside: dict[str, list[Tensor]] = {name: [] for name in foreign}
    for name, inputs in foreign.items():
        for prediction in _predictions(row, name, inputs):
            sets[name].append(scores_of(prediction, names))
            if keep:
                outside[name].append(_outputs(prediction.latent))  # type: ignore[attr-defined]
    scores = _concatenated(known), {name: _concatenated(parts) for name, parts in sets.items()}
    cost = 1.0 if row.likelihood else spent / plain
    return Evaluated(_concatenated(values), *scores, score, cost, seconds, rows, outside)


def _timed(row: Row, inputs: Inputs) -> tuple[Prediction, float, float]:
    """Returns a prediction, the seconds of a forward pass, and the seconds of the prediction."""
    _wait()
    start = time.perf_counter()
    row.forward(inputs)
    _wait()
    middle = time.perf_counter()
    prediction = row.predict(inputs)
    prediction.distribution()  # computes everything that is lazy
    _wait()
    return prediction, middle - start, time.perf_counter() - middle


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _predictions(row: Row, name: str, foreign: Any) -> Iterator[Prediction]:
    """Yields the predictions of an out-of-distribution set, batch by batch."""
    several, found = batches.is_loader(foreign), False
    for batch in tracked(foreign if several else [foreign], name):
        inputs = Inputs.of(batches.inputs_of(batch) if several or isinstance(batch, Mapping) else batch, row.device)
        if inputs.samples:
            found = True
            yield row.predict(inputs)
    if not found:
        raise LapwingError(
            f"The set {name!r} of foreign= holds no samples. Pass a tensor (B, ...), or a loader that can be iterated "
            "for every candidate."
        )


def _concatenated(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Joins the entries of batches, flattened if some batches are flat, because they have missing targets."""
    joined = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        flat = len({value.ndim for value in values}) > 1
        joined[name] = torch.cat([value.flatten() for value in values] if flat else values)
    return joined


def _entries(prediction: Prediction, targets: Tensor, samples: Tensor) -> dict[str, Tensor]:
    """Returns the entries for metrics on the CPU; "sample" and "entry" count the samples of all batches."""
    values = {name: value.detach().cpu() for name, value in prediction.for_metrics(targets).items()}
    values.setdefault("entry", values["sample"])
    return values | {name: samples[values[name]] for name in ("sample", "entry")}


def scores_of(prediction: Any, names: Iterable[str]) -> Scores:
    """Returns scores of each input, in nats except for the confidence, as float64 on the CPU."""
    part = getattr(prediction, "rows", prediction)  # of outputs with positions
    return {name: doubled(part.uncertainty(name).detach()).cpu() for name in names}


def _of_counted(scores: Scores, prediction: Any, targets: Any) -> Scores:
    """Returns the scores of inputs or positions whose labels count: not those of padding, for instance."""
    ignored = getattr(getattr(prediction, "rows", prediction), "ignore_index", None)
    counted = None if ignored is None else which_count(targets, ignored)
    return scores if counted is None else {name: value[counted.flatten().cpu()] for name, value in scores.items()}


def by_halves(network: Evaluated, likelihood: Likelihood, matrix: bool) -> tuple[str, Evaluated, str] | None:
    """Returns the network with a temperature or noise variance from held-out data: the row's name, run and note.

    The samples of odd number choose for the samples of even number, and conversely. Returns None for likelihoods
    without temperature and noise variance, and for a single sample. `matrix` adds a map as of `calibration="matrix"`.
    """
    if not network.rows or not network.values["sample"].any():
        return None
    outputs, targets, samples = (torch.cat(parts) for parts in zip(*network.rows, strict=True))
    tempered, plain, odd = likelihood.logit_temperature is not None, likelihood.plain, samples % 2 == 1
    plain = plain if tempered else plain.with_noise_variance(None)  # a censored σ² changes only if it is open
    change = likelihood.with_logit_temperature if tempered else plain.with_noise_variance
    choose = _temperature if tempered else _noise
    chosen = [choose(plain, outputs[half], targets[half]) for half in (odd, ~odd)]
    halves = [change(number) for number in chosen]
    if matrix:
        parts = zip(halves, (odd, ~odd), strict=True)
        maps = [chosen_map(one, without_spread(outputs[half]), targets[half]) for one, half in parts]
        halves = [replace(one, logit_map=rows) for one, rows in zip(halves, maps, strict=True)]  # type: ignore[type-var]
    runs = [one.predict(without_spread(outputs)) for one in halves]
    values, of_odd = (_entries(run, targets, samples.cpu()) for run in runs)
    for name, value in values.items():
        numbers = values["sample" if name in ("sample", "log_prob") else "entry"]
        half = numbers.reshape(len(numbers), -1)[:, 0] % 2 == 1
        value[half] = of_odd[name][half]
    known, scores_of_odd = (scores_of(run, network.known) for run in runs)
    known = {name: torch.where(odd.cpu(), scores_of_odd[name], known[name]) for name in known}
    known = _of_counted(known, runs[0], targets)
    middle = halves[0] if matrix else change(math.sqrt(chosen[0] * chosen[1]))
    foreign = {
        name: _concatenated([scores_of(middle.predict(without_spread(rows)), network.known) for rows in parts])
        for name, parts in network.outside.items()
    }
    name, what = (TEMPERATURE, "its logits divided by") if tempered else (NOISE, "a noise variance of")
    note = (
        f'The row "{name}" is the network with {what} {chosen[0]:.3g} for half of the samples and {chosen[1]:.3g} for '
        "the other. The samples of each half chose the number for the other half."
    )
    if matrix:
        name = MATRIX
        note = f'The row "{name}" adds an affine map of the logits, which the samples of the other half chose.'
    return name, Evaluated(values, known, foreign, network.score), note


def _as_rows(part: Any, targets: Tensor, samples: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the outputs of a network as rows (n, C), their targets, and the sample of each row."""
    outputs = _outputs(part.latent)
    if has_positions(part.latent):
        targets = part.latent.places.targets(targets, outputs.shape[1])
    return outputs, targets, samples.repeat_interleave(len(outputs) // len(samples)).to(outputs.device)


def _outputs(latent: Any) -> Tensor:
    return (latent.rows if has_positions(latent) else latent).mean.detach()


def _temperature(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> float:
    """Returns the temperature from 0.01 to 100 of highest likelihood."""

    def score(exponent: float) -> float:
        return float(doubled(likelihood.log_prob(outputs / 10**exponent, targets)).sum())

    return 10 ** golden_section(score, -2.0, 2.0, 17)


def _noise(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> float:
    return float(likelihood.residual_variance(likelihood.statistics(outputs, targets)) or 0.0)
