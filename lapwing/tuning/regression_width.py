"""The width of a regression without held-out data: leave-one-out predictions of the exact linearised model.

`docs/width.md` has the reasons. For tables, a Gaussian process that knows the inputs, not the network, checks it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..covariance import has_prior
from ..data.inputs import Samples
from ..linalg import doubled, symmetric_eigen
from ..posterior import Posterior
from ..posterior.tuned import Training, evenly_spaced_batches
from .fitted_noise import with_noise_of_residuals
from .gaussian_process import LeaveOneOut, Process
from .held_out import WIDTH_OUTPUTS, means_over_samples, variances_of_outputs
from .leave_one_out import leave_one_out, warn_of_windows
from .search import crossing, evenly
from .training_kernel import MIN_INPUTS, table_of

log = logging.getLogger("lapwing")

SAMPLES = 2000  # default of the maximum number of training samples that the width is computed from
UNEVEN, UNEVEN_ERRORS = 1.5, 3.0  # least ratio of widths of two outputs, and standard errors, for noises of their own
LEAST_PART = 0.1  # least noise variance of an output, as a fraction of σ² times its ratio
LOWEST_NOISE = 1e-6  # lower bound of σ², as a fraction of the width of predictions
TOO_LITTLE_NOISE = 0.4  # σ² is too small below this fraction of `least`, the σ² of the exact posterior
NOISE_OF_RESIDUAL = 0.5  # lower bound of `least`, as a fraction of the mean squared residual
RAISED = evenly(0.0, 4.0, 33)  # factors (log10) by which δ may be raised if σ² was too small
NOISES_AT_PRIOR = evenly(-4.0, 0.0, 33)  # candidates for log10 of σ² over the width, at a given prior precision

NARROW = 1.3  # a width s is too small if the error by a fresh copy exceeds `NARROW` s
NARROW_BY_INPUTS, ABOVE_RESIDUAL = 2.25, 6.0  # and if that by the inputs exceeds these times s and the squared residual

MIN_TABLE_ROWS, MAX_TABLE_ROWS = 100, 500  # number of samples below which there is no width; maximum in the kernel
LENGTH_ROWS, LENGTH_STEPS, LENGTH_RATE = 200, 40, 0.2  # for the length scales: rows, steps of Adam and their size
LEAST_NOISE = 1e-4  # minimum of the noise, as a part of the kernel's variance
MAX_TABLE_OUTPUTS = 16  # maximum number of outputs, which are evenly spaced


def inputs_read(posterior: Posterior, samples: int) -> int:
    """Returns the maximum number of inputs that are read for the width: fewer if each has very many positions."""
    tangent = posterior.tangent
    many = tangent.positions.several and tangent.width > WIDTH_OUTPUTS
    return max(MIN_INPUTS, samples * WIDTH_OUTPUTS // tangent.width) if many else samples


def with_left_out_width(
    posterior: Posterior,
    residual: float,
    training: Training,
    samples: int,
    yardstick: Callable[[Posterior, Training], float | None] | None = None,
) -> Posterior:
    """Returns the posterior whose predictions of unseen targets have the width s of the leave-one-out predictions.

    At most `samples` samples are read, and `residual` is the mean squared one of all. The yardstick replaces s if s is
    far smaller; None only warns if a Gaussian process on the inputs shows that s may be too small.
    """
    # 1. the exact model at its best δ*, σ*²
    exact, parts, size = _exact_model(posterior, residual, training, samples)
    posterior = with_relative_weights(posterior, exact.weight)
    warn_of_windows(posterior, exact.windows)
    # 2. the width s, at least (1 + h) mean squared residuals if the weights explain h = γ/(N C) of the targets
    width = max(exact.width, (1 + exact.share_explained) * residual)  # the network may fit worse than this model
    width = _checked_width(posterior, training, parts, size, width, residual, yardstick)
    # 3. v = mean_n J_n Σ J_nᵀ of this posterior at δ*, σ*², its width u at unseen inputs, and c = s/u
    keeps_prior = posterior.prior.fixed or not has_prior(posterior.covariance)
    precision, noise = exact.precision, exact.noise_variance
    start = posterior.with_noise(noise) if keeps_prior else posterior.at(precision, noise)
    variance = means_over_samples([start], parts)[0]
    factor = width / exact.width_at_unseen_inputs(noise + variance)
    if exact.variance_of_draws:
        # 4. exact draws at their own δ, σ²: σ² grows by what their left-out predictions lack of s
        noise = (posterior.noise_variance or 0.0) + max(width - exact.variance_of_draws, 0.0)
    elif not has_prior(posterior.covariance):
        # 4. Σ cannot change: σ² + v = c (σ*² + v)
        noise = max(factor * (noise + variance) - variance, residual)
    elif posterior.prior.fixed:
        # 4. δ is given, and Σ changes with σ²
        noise = _noise_at_prior(posterior, parts, width)
    else:
        # 4. δ*/c and c σ*²; `least` is the σ² of the exact model if its width at unseen inputs is s, and `wanted`
        #    is the v with which `least` has the same total c (σ*² + v)
        least = max(noise * width / (exact.learning_ratio * exact.variance), NOISE_OF_RESIDUAL * residual)
        wanted = factor * (noise + variance) - least
        noise, precision = max(factor * noise, LOWEST_NOISE * width), precision / factor
        if noise < TOO_LITTLE_NOISE * least:  # a few inputs far from the others dominate the mean variance
            noise = least
            if wanted > 0:  # δ from here up at which the mean variance of training data is the wanted one
                raised = [posterior.at(precision * 10**decade, least) for decade in RAISED]
                precision = precision * 10 ** crossing(RAISED, means_over_samples(raised, parts), wanted)
    log.info(
        "Targets that are left out have a variance of %.3g by the exact linearised model of %d weights and %d "
        "samples, and the mean squared residual is %.3g: the noise variance of %s is %.3g",
        exact.width, exact.weights, exact.samples, residual, posterior.method, noise,
    )  # fmt: skip
    posterior = posterior.with_noise(noise) if keeps_prior else posterior.at(precision, noise)
    if samples < SAMPLES:  # the user wants to read few rows
        training = replace(training, loader=parts, chosen=True)
    noises, least = None, max(math.log(UNEVEN), UNEVEN_ERRORS * (4 / exact.samples) ** 0.5)
    low, high = exact.of_outputs.log().aminmax()
    if float(high - low) > least and len(exact.of_outputs) == posterior.tangent.outputs:
        # 5. if outputs surely have unequal widths s_k: the noise s_k - v_k (C,), for the mean variance v_k of f_k
        noises = width * exact.of_outputs - variances_of_outputs(posterior, parts).to(exact.of_outputs)
        noises = noises.clamp_min(LEAST_PART * noise)
    return with_noise_of_residuals(posterior, training, noises=noises)


def _checked_width(
    posterior: Posterior, training: Training, parts: Sequence[Samples], size: float, width: float,
    residual: float, yardstick: Callable[[Posterior, Training], float | None] | None,
) -> float:  # fmt: skip
    """Returns the width, or the yardstick if it shows that the width is too small; warns in this case.

    A Gaussian process on the inputs has the width w. A network whose residual is `w (1 - h)` has fitted a part h of the
    noise, and its error at unseen inputs is about `w (1 + h)`, `2 w - residual`, as for Mallows' C_p of a projection.
    """
    name = type(posterior.tangent.model).__name__
    # 1. the yardstick Y
    other = None if yardstick is None else yardstick(posterior, training)
    if other is not None and other > NARROW * width:
        log.warning(
            "%s has overfitted: by a fresh copy it predicts targets that it has not seen with a mean squared error of "
            "%.3g, and the linearised network promised %.3g. All variances were multiplied by %.3g.",
            name, other, width, other / width,
        )  # fmt: skip
        return other
    # 2. 2 w - residual, at most 2 w: a Gaussian process with w <= least/2 shows nothing
    least, table = max(NARROW_BY_INPUTS * width, ABOVE_RESIDUAL * residual), table_of(posterior, parts)
    alone = None if table is None else width_by_inputs(*table, size, least / 2)
    needed = 0.0 if alone is None else max(alone, 2 * alone - residual)
    if needed > least:
        log.warning(
            "%s may have overfitted: its intervals have a variance of %.3g, and by a Gaussian process on the inputs it "
            "needs %.3g. Pass validation=held_out%s, or train for a shorter time.",
            name, width, needed, ", or tune=lw.Refit() if no data were held out" if other is None else "",
        )  # fmt: skip
    return width


def with_relative_weights(posterior: Posterior, weight: float) -> Posterior:
    """Returns the posterior of an open σ² with `weight`, the mean of w, as temperature: only ratios of w count.

    A τ that the user gave stays. The covariance follows when σ² is set.
    """
    if posterior.temperature != 1 or weight == 1 or not has_prior(posterior.covariance):
        return posterior
    return replace(posterior, temperature=weight)


def trained_values(posterior: Posterior, training: Training) -> tuple[float, float, float]:
    """Returns δ and σ² of a regression by the evidence of the exact linearised model, and the mean weight of a sample.

    `λ = δσ²` determines how the widths of predictions differ between inputs; `(δ/c, c σ²)` has the same λ for every c.
    """
    residual = posterior.likelihood.residual_variance(posterior.statistics) or 0.0
    exact, *_ = _exact_model(posterior, residual, training, SAMPLES)
    return exact.precision, exact.noise_variance, exact.weight


def _exact_model(
    posterior: Posterior, residual: float, training: Training, samples: int
) -> tuple[LeaveOneOut, list[Samples], float]:
    """Returns the leave-one-out predictions, the batches they are computed from, and the number N of all samples."""
    parts = list(evenly_spaced_batches(training, inputs_read(posterior, samples), posterior))
    size = max(training.count or 0, posterior.samples * posterior.data_factor)
    return leave_one_out(posterior, parts, size, residual), parts, size


def _noise_at_prior(posterior: Posterior, parts: Sequence[Samples], width: float) -> float:
    """Returns the σ² of highest density `N(e; 0, σ² + v_n)` of errors of mean square `width`, at the given prior."""
    candidates = [posterior.with_noise(width * 10**decade) for decade in NOISES_AT_PRIOR]

    # -2 log N(e; 0, t) = log t + e²/t + const at t = σ² + v_n, with e² = s
    def loss(candidate: Posterior, variance: Tensor) -> Tensor:
        total = variance + (candidate.noise_variance or 0.0)
        return total.log() + width / total

    losses = means_over_samples(candidates, parts, loss)
    return width * 10 ** NOISES_AT_PRIOR[min(range(len(losses)), key=losses.__getitem__)]


@torch.no_grad()
def width_by_inputs(x: Tensor, y: Tensor, weights: Tensor, size: float, least: float = 0.0) -> float | None:
    """Returns the leave-one-out width of a Gaussian process with a squared-exponential kernel on the inputs.

    The evidence chooses a length scale for each column. Inputs (N, D), targets and weights (N, C) come from
    `table_of`; weights above 0 count as 1. Returns None if there are too few rows, or if the width cannot exceed
    `least`, since the targets' variance does not. `size` is the number of all samples.

    Cost: `LENGTH_STEPS` Cholesky decompositions of `LENGTH_ROWS` rows, and an eigendecomposition of `MAX_TABLE_ROWS`.
    """
    # 1. some rows and outputs; y without its mean (n, C), columns of x (n, D) in units of their length scales
    known = (weights > 0).all(1)
    x, y = doubled(x[known]), y[known]
    if len(x) < MIN_TABLE_ROWS or float(y.var(0).mean()) <= least:
        return None
    x, y = _evenly_spaced(x, MAX_TABLE_ROWS), _evenly_spaced(y.T, MAX_TABLE_OUTPUTS).T
    y, spread = _evenly_spaced(y - y.mean(0), MAX_TABLE_ROWS), x.std(0)
    x = (x - x.mean(0)) / torch.where(spread > 0, spread, 1.0)
    x = x / _length_scales(_evenly_spaced(x, LENGTH_ROWS), _evenly_spaced(y, LENGTH_ROWS))
    # 2. K = exp(-‖x - x'‖²/2) (n, n) and its eigenpairs
    kernel = (torch.cdist(x, x).square() / -2).exp()
    values, vectors = symmetric_eigen(kernel)
    # 3. copies: equal inputs and equal targets
    same = (kernel > 1 - 1e-9) & (y[:, None] == y).all(-1)
    process = Process(values, vectors, y[:, 0], y[:, :0], torch.ones_like(y[:, 0]), same, x.shape[1])
    # 4. the width of each output at its own best noise
    widths = []
    for labels in y.T:
        one = replace(process, labels=labels)
        widths.append(one.left_out(one.best(), size).width)
    return sum(widths) / len(widths)


def _evenly_spaced(values: Tensor, most: int) -> Tensor:
    """Returns at most `most` rows, evenly spaced."""
    count = min(len(values), most)
    return values[torch.arange(count, device=values.device) * len(values) // count]


def _length_scales(x: Tensor, y: Tensor) -> Tensor:
    """Returns the length scale of each column (D,) by the evidence, by gradient steps from the median distance."""
    y = y / y.square().mean().sqrt().clamp_min(torch.finfo(y.dtype).tiny)
    distances = torch.pdist(x)
    median = float(distances[distances > 0].median()) if bool((distances > 0).any()) else 1.0
    start = x.new_tensor([-2.0, *[math.log(median)] * x.shape[1]])  # log of the noise, and of the lengths
    with torch.enable_grad():
        point = start.requires_grad_()
        optimiser = torch.optim.Adam([point], LENGTH_RATE)
        for _ in range(LENGTH_STEPS):
            # K = exp(-‖x - x'‖²/2) (n, n) from inner products, and K + noise = LLᵀ
            scaled = x / point[1:].exp()
            squares = scaled.square().sum(1)
            kernel = (scaled @ scaled.T - (squares[:, None] + squares) / 2).clamp_max(0).exp()
            root = torch.linalg.cholesky(kernel + (point[0].exp() + LEAST_NOISE) * torch.eye(len(x)).to(x))
            whitened = torch.linalg.solve_triangular(root, y, upper=False)
            # minus the log evidence, at the kernel's best scale
            fit = y.numel() / 2 * whitened.square().sum().log() + y.shape[1] * root.diagonal().log().sum()
            optimiser.zero_grad()
            fit.backward()
            optimiser.step()
    return point[1:].detach().exp()
