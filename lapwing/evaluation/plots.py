"""Pictures of predictions and their error bars; they need `pip install "lapwing-torch[eval]"`.

Each function takes tensors, arrays or a `Prediction`, draws on the matplotlib Axes `ax`, or on a new figure if `ax` is
None, and returns the Axes. `**line` is color, label and other options of matplotlib's `plot`; the default is `LAPWING`.
To compare two predictions, draw both on the same Axes:

    ax = plots.reliability_diagram(network_probs, y, **plots.NETWORK)
    plots.reliability_diagram(posterior.predict(x), y, ax).figure.savefig("reliability.png")

N is the number of samples, C of classes. Labels of -100 (or the `ignore_index` of the prediction) and NaN targets do
not count. All outputs and positions count alike. Wrong shapes and values raise a `LapwingError`.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..data.frames import as_targets
from ..errors import LapwingError, extra, shown
from ..likelihoods import Prediction
from ..options import at_least, check_argument
from .evaluated import scores_of
from .metrics import auroc, checked_classes, real_tensor, risks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KNOWN_COLOR, OOD_COLOR = "#0072B2", "#D55E00"
"""Colours of known and of out-of-distribution inputs: a blue and an orange that colour-blind readers can tell apart."""
LAPWING: dict[str, Any] = {"color": KNOWN_COLOR, "label": "lapwing"}
NETWORK: dict[str, Any] = {"color": OOD_COLOR, "label": "network"}
LEAST_MAP_END = 0.01
"""Minimum end of the colour scale of mutual information, in nats, so that a map of rounding errors looks empty."""
_MOST_POINTS = 1000
"""Maximum number of points of a curve or a scatter plot, so that an SVG file stays small."""


def reliability_diagram(
    prediction_or_probs: Any, labels: Any, ax: Axes | None = None, *, bins: int = 10, **line: Any
) -> Axes:
    """Draws the observed frequency against the stated probability, in bins of equal width.

    For classes this is the accuracy against the largest probability, for yes-or-no outputs the frequency of yes against
    its probability. The numbers count the samples; empty bins have no point. The band is a bootstrap: nine in ten
    points are in it if labels are drawn from the stated probabilities (Bröcker and Smith 2007).

    Takes a prediction or class probabilities (N, C), (B, T, C) or (B, C, H, W), with labels (N,), (B, T) or (B, H, W);
    or probabilities of yes in the shape of the labels, which are 1 for yes and 0 for no.
    """
    check_argument("reliability_diagram", "bins", bins, at_least(1), "10")
    stated, true = _outcomes("reliability_diagram", prediction_or_probs, labels)
    edges, ax, line = np.linspace(0, 1, bins + 1), _axes(ax), LAPWING | line
    place = np.searchsorted(edges[1:-1], stated, side="right")
    counts = np.bincount(place, minlength=bins)
    used = np.flatnonzero(counts)
    mean, frequency = (np.bincount(place, values)[used] / counts[used] for values in (stated, true))
    _draw_calibration(ax, mean, frequency, counts[used], line)
    bottom = -0.07 * (len(ax.lines) - 1)  # one row of counts for each curve
    for left, count in zip(edges[used], counts[used], strict=True):
        ax.bar(left, 0.07, 1 / bins, bottom, align="edge", color=line["color"], alpha=0.5 * count / counts.max())
        ax.text(left + 0.5 / bins, bottom + 0.03, f"{count:.4g}", fontsize=min(7, 70 / bins), ha="center", va="center")
    ax.set(ylim=(bottom, 1.02), xlabel="stated probability", ylabel="observed frequency")
    return ax


def ood_scores(known: Any, foreign: Any, ax: Axes | None = None, *, score: str = "mutual_information") -> Axes:
    """Draws histograms of an uncertainty of known and of out-of-distribution (OOD) inputs, with the AUROC.

    The AUROC is the probability that an OOD input has the larger score: 1 is perfect, 0.5 useless. The axis is
    logarithmic if all scores are positive and the middle nine in ten span a factor of 100.

    `known` and `foreign` are predictions, or scores (N,) and (M,), larger for less certain predictions. `score` is the
    score of predictions as in `lw.compare`: "mutual_information", "entropy" or "confidence". A "p-value" of a detector
    is smaller for stranger inputs.
    """
    given = [scores_of(side, [score])[score] if isinstance(side, Prediction) else side for side in (known, foreign)]
    sides = [real_tensor("ood_scores", "scores", side).cpu().double().flatten() for side in given]
    area = float(auroc(*sides)) if score != "p-value" else float(auroc(*sides[::-1]))
    together, ax = torch.cat(sides).numpy(), _axes(ax)
    smallest, low, high, largest = np.quantile(together, [0, 0.05, 0.95, 1])
    scale, spaced = ("log", np.geomspace) if smallest > 0 and high > 100 * low else ("linear", np.linspace)
    edges = spaced(smallest, largest if largest > smallest else smallest + 1, 41).tolist()
    for side, color, name in zip(sides, (KNOWN_COLOR, OOD_COLOR), ("known", "out-of-distribution"), strict=True):
        share = torch.full_like(side, 1 / len(side))
        ax.hist(side, edges, weights=share, color=color, alpha=0.55, label=f"{name} ({len(side)})")
    ax.set(xlabel=score.replace("_", " "), ylabel="share of inputs", xscale=scale)
    ax.legend(title=f"AUROC {area:.3f}", fontsize="small")
    return ax


def risk_coverage(prediction_or_probs: Any, labels: Any, ax: Axes | None = None, **line: Any) -> Axes:
    """Draws the error rate of the most certain predictions against the share of inputs that they cover.

    `risk(k/N) = 1/k Σ_{i ≤ k} 1[wrong_i]`, in the order of the confidence; samples of equal confidence share their mean
    error. The area under the curve (AURC) is the mean of the risk over k. Takes predictions and labels as
    `reliability_diagram`; or confidences (N,), and 1 for right and 0 for wrong.
    """
    stated, true = _outcomes("risk_coverage", prediction_or_probs, labels, top=True)
    risk, ax, line = risks(torch.from_numpy(-stated), torch.from_numpy(1 - true)).numpy(), _axes(ax), LAPWING | line
    some = np.unique(np.linspace(0, len(risk) - 1, _MOST_POINTS).astype(int))
    ax.plot((some + 1) / len(risk), risk[some], **line | {"label": f"{line['label']}: AURC {risk.mean():.3g}"})
    ax.set(xlim=(0, 1), ylim=(0, None), xlabel="coverage: share of inputs kept", ylabel="error rate of inputs kept")
    ax.legend(fontsize="small")
    return ax


def interval_calibration(prediction: Any, y: Any, ax: Axes | None = None, **line: Any) -> Axes:
    """Draws the share of targets inside central intervals against the level of the intervals, 5 % to 95 %.

    Above the diagonal intervals are too wide, below it too narrow. Nine in ten points are in the band if the intervals
    are calibrated and the targets independent. Takes a prediction of real values, or (mean, std) of Gaussian
    predictions, noise included; and targets in the shape of the mean.
    """
    mean, std, y = _real("interval_calibration", prediction, y)
    levels, ax, known = np.linspace(0.05, 0.95, 19).tolist(), _axes(ax), ~y.isnan()
    if isinstance(prediction, tuple):
        ends = [(mean - z * std, mean + z * std) for z in (NormalDist().inv_cdf(0.5 + level / 2) for level in levels)]
    else:
        ends = [(low.detach().cpu(), high.detach().cpu()) for low, high in map(prediction.interval, levels)]
    inside = [float(((low <= y) & (y <= high))[known].double().mean()) for low, high in ends]
    _draw_calibration(ax, levels, inside, int(known.sum()), LAPWING | line)
    ax.set(ylim=(0, 1), xlabel="level of the interval", ylabel="share of targets inside")
    return ax


def scaled_residuals(prediction: Any, y: Any, ax: Axes | None = None, **line: Any) -> Axes:
    """Draws the absolute residual in standard deviations, `|y - mean| / std`, against the predicted standard deviation.

    The curve is the root of the mean squared residual in ten bins of equal size. Nine in ten of its points are in the
    band around 1 if the error bars are right at all widths. For noise with tails a residual counts as the normal one of
    the same probability, `Φ⁻¹(pit)`. The axis is logarithmic if the standard deviations span a factor of 10. Takes what
    `interval_calibration` takes.
    """
    mean, std, y = _real("scaled_residuals", prediction, y)
    known, ax, line = ~y.isnan(), _axes(ax), LAPWING | line
    spread, residual = std[known].numpy(), ((y - mean) / std)[known].abs().numpy()
    if isinstance(prediction, Prediction):
        found = prediction.for_metrics(y.to(prediction.mean))  # type: ignore[attr-defined]
        if "pit" in found:  # y is continuous
            residual = normal_residuals(found["pit"]).abs().flatten().numpy()
            spread = found["std"].detach().cpu().double().flatten().numpy()
    bins = np.array_split(spread.argsort(kind="stable"), min(10, len(spread)) if np.ptp(spread) else 1)
    widths, curve = ([np.sqrt(np.mean(values[rows] ** 2)) for rows in bins] for values in (spread, residual))
    counts = [len(rows) for rows in bins]
    draws = np.sqrt(np.random.default_rng(0).chisquare(counts, (1000, len(bins))) / counts)
    some = np.random.default_rng(0).permutation(len(spread))[:_MOST_POINTS]
    ax.fill_between(widths, *np.quantile(draws, [0.05, 0.95], axis=0), color=line["color"], alpha=0.15, lw=0)
    ax.plot(spread[some], residual[some], ".", color=line["color"], alpha=0.3, markersize=4, markeredgewidth=0)
    ax.axhline(1, color="black", linestyle=":")
    ax.plot(widths, curve, "o-", markersize=4, **line)
    if spread.max() > 10 * spread.min() or ax.get_xscale() == "log":
        ax.set_xscale("log")
        ticks = np.geomspace(*ax.get_xlim(), 5)
        ax.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
        ax.minorticks_off()
    ax.set(ylim=(0, 4), xlabel="predicted standard deviation", ylabel="residuals in standard deviations")
    ax.legend(loc="upper left", fontsize="small")
    return ax


def normal_residuals(pit: Any) -> Tensor:
    """Returns `Φ⁻¹(pit)`, the residuals in standard deviations of a normal prediction; at most ±5.2."""
    return torch.special.ndtri(torch.as_tensor(pit).detach().cpu().double().clamp(1e-7, 1 - 1e-7))


def bands(x: Any, prediction: Any, ax: Axes | None = None, *, training: Any = None, color: str = KNOWN_COLOR) -> Axes:
    """Draws the mean over inputs of one dimension, with bands of ± 2 std for the weights and, wider, with the noise.

    Takes inputs (N,) or (N, 1) in any order, and a prediction of one real output there; (mean, std); or (mean, std due
    to weights, std). `training` is a pair of inputs and targets, (M,) or (M, 1), drawn as points.
    """
    if hasattr(prediction, "epistemic_variance"):
        prediction = (prediction.mean, prediction.epistemic_variance.sqrt(), prediction.std)
    parts = (x, *prediction) if isinstance(prediction, tuple) else (x, prediction)
    columns = [real_tensor("bands", "x and prediction", part).cpu().double().flatten() for part in parts]
    if len({len(column) for column in columns}) > 1 or not 3 <= len(columns) <= 4:
        raise LapwingError(
            f"bands got {[len(c) for c in columns]} entries. Pass x (N,) and the prediction of one output."
        )
    ax, (t, mean, *stds) = _axes(ax), (column[columns[0].argsort()].numpy() for column in columns)
    for std, alpha, name in zip(stds[::-1], (0.2, 0.4), ("± 2 std with noise", "± 2 std of weights"), strict=False):
        ax.fill_between(t, mean - 2 * std, mean + 2 * std, color=color, alpha=alpha, lw=0, label=name)
    ax.plot(t, mean, color=color, label="mean")
    if training is not None:
        points = (real_tensor("bands", "training", part).cpu().flatten().numpy() for part in training)
        ax.plot(*points, ".", color="black", markersize=4, label="training data")
    ax.legend(fontsize="small")
    return ax


def uncertainty_map(values: Any, image: Any = None, ax: Axes | None = None, *, label: str = "uncertainty") -> Axes:
    """Draws the uncertainty of each pixel in colour, from 0 on, over the image if there is one.

    For labels it is the mutual information in nats; the scale ends at 0.01 or above, so that a map of tiny values looks
    empty. For real values it is the standard deviation due to the weights.

    Takes the prediction of one image, with outputs (1, C, H, W) or (1, H, W), or values (H, W). The image (H, W) is
    drawn in grey where the uncertainty is small. `label=""` draws no colour bar.
    """
    least = 0.0
    if hasattr(values, "mutual_information"):
        values, least = values.mutual_information(), LEAST_MAP_END
    elif hasattr(values, "epistemic_variance"):
        values = values.epistemic_variance.sqrt()
    pixels = real_tensor("uncertainty_map", "values", values).cpu().double().squeeze().numpy()
    grey = pixels if image is None else real_tensor("uncertainty_map", "image", image).cpu().squeeze().numpy()
    if pixels.ndim != 2 or pixels.shape != grey.shape:
        raise LapwingError(f"uncertainty_map got {pixels.shape} and {grey.shape}. Pass both as (H, W), of one image.")
    ax, end = _axes(ax), max(float(np.nan_to_num(pixels).max()), least) or 1.0
    drawn = ax.imshow(pixels, cmap="plasma", vmin=0, vmax=end)
    if image is not None:
        ax.imshow(grey, cmap="gray", zorder=-1)
        drawn.set_alpha(np.nan_to_num(pixels / end).clip(0, 1) * 0.85)
    if label:
        ax.figure.colorbar(drawn, ax=ax, label=label, fraction=0.046)
    ax.set_axis_off()
    return ax


def sensitivity_bars(values: Any, features: list[str], ax: Axes | None = None) -> Axes:
    """Draws the mean sensitivity of each feature, the largest on top, with the quartiles over samples as lines.

    Takes the values of `sensitivity` (B, n) and n names. Images have a map: `uncertainty_map(found.values[0], x[0])`.
    """
    table, names = real_tensor("sensitivity_bars", "values", values).cpu().double().numpy(), np.array(features)
    if table.ndim != 2 or names.shape != table.shape[1:]:
        raise LapwingError(f"sensitivity_bars has {names.size} names for {table.shape}. Pass one for each column.")
    order, rows, ax = table.mean(0).argsort(), range(len(names)), _axes(ax)
    ax.barh(rows, table.mean(0)[order], color=KNOWN_COLOR, alpha=0.7)
    ax.hlines(rows, *np.quantile(table, [0.25, 0.75], axis=0)[:, order], color="black", lw=1.5)
    ax.set_yticks(rows, names[order])
    ax.set(xlim=(0, 1), xlabel="sensitivity")
    return ax


def _axes(ax: Axes | None) -> Axes:
    return extra("matplotlib.pyplot").subplots(figsize=(5, 4), layout="constrained")[1] if ax is None else ax


def _draw_calibration(ax: Axes, stated: Any, observed: Any, counts: Any, line: dict[str, Any]) -> None:
    """Draws frequencies against probabilities, the diagonal, and the band of nine in ten frequencies by chance."""
    draws = np.random.default_rng(0).binomial(counts, stated, (1000, len(stated))) / counts
    ax.fill_between(stated, *np.quantile(draws, [0.05, 0.95], axis=0), color=line["color"], alpha=0.15, lw=0)
    display = extra("sklearn.calibration").CalibrationDisplay(observed, stated, stated)
    display.plot(ax=ax, **{"marker": "o", "markersize": 4} | line).ax_.set_xlim(0, 1)
    ax.legend(loc="upper left", fontsize="small")


def _outcomes(caller: str, given: Any, labels: Any, top: bool = False) -> tuple[Any, Any]:
    """Returns probabilities (n,) and 1 where they came true. If `top`, they are of the predicted answer, yes or no."""
    if isinstance(given, Prediction):
        found = given.for_metrics(as_targets(labels, given.point.device))
        if "probs" not in found:
            raise LapwingError(f"{caller} draws labels. Write interval_calibration(prediction, y) for {shown(given)}.")
        probs, labels, yes = found["probs"], found["labels"], "places" in found and not top
    else:
        probs, labels = real_tensor(caller, "probs", given), real_tensor(caller, "labels", labels)
        yes = probs.numel() == labels.numel()
        if yes:
            probs = torch.stack([1 - probs.flatten(), probs.flatten()], 1)
        elif probs.ndim > 2:  # positions
            probs = (probs if probs.shape[:-1] == labels.shape else probs.movedim(1, -1)).flatten(0, -2)
        labels = labels.flatten()
        known = (labels != -100) & ~labels.isnan()
        if len(probs) == len(known):
            probs, labels = probs[known], labels[known]
        labels = labels.long() if bool((labels == labels.long()).all()) else labels
    probs, labels = checked_classes(caller, probs, labels)
    stated, best = (probs[:, 1], torch.ones_like(labels)) if yes else probs.max(1)
    return stated.clamp(0, 1).numpy(), (best == labels).double().numpy()


def _real(caller: str, prediction: Any, y: Any) -> tuple[Tensor, ...]:
    """Returns means, standard deviations and targets in one shape, in float64; unknown targets are NaN."""
    given = (prediction.mean, prediction.std) if hasattr(prediction, "interval") else prediction
    parts = [real_tensor(caller, "y", part).cpu().double() for part in (*given, y)] if isinstance(given, tuple) else []
    fits = len(parts) == 3 and all(len(parts[0]) > 0 and part.numel() == parts[0].numel() for part in parts)
    if not fits or not bool((parts[1] > 0).all()) or bool(parts[2].isnan().all()):
        raise LapwingError(
            f"{caller} got {shown(prediction)} and y {shown(y)}. Pass posterior.predict(x), or (mean, std > 0), and y."
        )
    return tuple(part.reshape(parts[0].shape) for part in parts)
