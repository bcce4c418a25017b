"""A tuning without held-out data: a bound on the cost of the spread, or `regression_width.py`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch

from ..covariance import has_prior
from ..data.inputs import Samples
from ..likelihoods import Likelihood
from ..linalg import possible
from ..methods import KFAC, Batch, DataSummary, FisherRoot, FitShape, Problem
from ..methods.prior import Prior
from ..network.entry import outside_modes
from ..options import at_least, option, positive
from ..posterior import Posterior
from ..posterior.tuned import Training, Tuning, evenly_spaced_batches
from .evidence import at_maximum, maximum
from .fitted_noise import rows_wanted, with_noise_of_residuals
from .held_out import SOME_POSITIONS, spread_costs
from .latent_factor import with_left_out_noise, with_left_out_spread
from .leave_one_out import trained, untreated
from .regression_width import inputs_read, with_left_out_width
from .search import crossing, evenly, golden_section

log = logging.getLogger("lapwing")

MIN_COST = 0.005  # nats per training sample that the spread may cost in any case
KFAC_MULTIPLY_ADDS = 2**32  # maximum multiply-adds of the backward passes for KFAC of all weights: about a second
MOST_STEP = 10  # KFAC reads at least every tenth sample; if that takes longer, only the treated weights count
DECOMPOSED_MULTIPLY_ADDS = 2**39  # maximum multiply-adds of its decompositions, if all matrices had full rank
CERTAIN_NLL = 0.05  # nats per training sample below which the training labels show little about the calibration


@dataclass(frozen=True)
class BoundedEvidence(Tuning):
    """Prior precision and noise variance without held-out data: the default tuning, except where `Refit` is.

    Classification: `δ = max(δ_evidence, min{δ : mean_n [log p(y_n|f_n) - log p(y_n|N(f_n, J_n Σ_δ J_nᵀ))] <= b})`.
    If a classifier is certain of its training labels, its loss is nearly flat there, and the evidence (of `Evidence`,
    with one δ) chooses too small a δ. So δ is raised until the spread costs the training data at most b per sample.

    b is the cost of a right spread in a linear regression with as many effective dimensions,
    `b = K/2 [log(1+h) - h(1-h)/(1+h)] - p`, `h = min(1, γ/(N K))`, for γ = `Σ_i s λ_i/(s λ_i + δ)` at the evidence's
    δ, N samples or positions that count, by their weights, and K outputs, or one less than the possible classes of a
    softmax. p is what the network has paid for doubt already: the nats per training sample that logits times the best
    number from 1 to 10 would save. b is at least 0.005.

    All trained weights count in γ, since all were fitted to the labels: by KFAC on the samples that are read, if the
    method treats only some of them. Freeze the weights that other data trained (`requires_grad`). Only the treated
    ones count, and p is 0, if there are more than a million weights, if KFAC takes more than a few seconds or the
    memory budget, and if outputs are not logits. Blocks with a diagonal curvature do not count: they count more
    dimensions than there are.

    One yes or no: the same, with `b = min(h, 1/h)/2 - p` for `h = γ/N` of the treated weights. And the spread changes
    the sum of the probabilities of the samples that are read by at most one standard error of their number of yes,
    because the mean of the exact posterior's probabilities is the frequency of yes. Measured on 273 networks.

    Other likelihoods without one σ², such as `lw.Poisson()`: `b = γ/(2N)`. By Jensen's inequality a right spread costs
    no more, and it may raise mean counts by 2 %. Training targets that are left out, as below, decide the dispersion of
    counts and the noise of censored targets, if it is larger than by residuals. Last they decide a factor of the spread
    of `HeteroscedasticGaussian`.

    Regression: `(δ, σ²) = (δ*/c, c σ*²)`, `c = s/(σ*² + mean_n J_n Σ* J_nᵀ)`. The linearised network is a Gaussian
    process, whose evidence is highest at (δ*, σ*²). Its leave-one-out predictions give s, the width of predictions of
    unseen targets, at least the mean squared residual. A sample is left out with its copies, and only ratios of
    `sample_weights` count: Σ and s are those of weights over their mean, which becomes the temperature τ. c scales the
    covariance of any method to it (for `Full`, which separates seen from unseen inputs, at unseen inputs). A sample is
    left out with all its positions. All trained weights count in networks of at most a million weights, most of them
    with a layer family, otherwise the treated ones. Freeze the weights that other data trained (`requires_grad`). Then
    the training residuals decide on the noise and the tails of predictions (see `Gaussian`). The mean of the noise over
    the training data is σ². If left-out targets of several outputs have surely unequal widths, in units of their noise
    ratios, each output has the noise that its own width needs: one squared error overfits the noisiest most.

    A prior precision that the user gave is kept, and so is a covariance that chose its own prior (`SampledLLA`,
    `MeanField`): then σ² makes the width. If the user gave σ², the evidence chooses the prior precision.

    Args:
        nats: the bound b on the cost of the spread, in nats per training sample, with the default link. None means the
            b above.
        samples: maximum number of training samples that are read, in batches spread evenly over the loader, which
            should not be sorted; four times as many for a regression. A position of a classifier is a sample; a last
            layer whose outputs have positions reads 16 times as many. At least 8 inputs are read.
        decades: range of the search above the evidence's δ, in powers of ten.
        points: number of candidates in that range; the cost is interpolated between them.

    Raises:
        LapwingError: if a number is out of range, or the loader has no samples.

    Cost: for classifiers the cost of the evidence, and one pass over `samples` samples, which are contracted once; the
    candidates cost almost nothing with the default probit link. KFAC over all weights on these samples, or on some of
    them, for at most a few seconds, if the method leaves out weights. If more than 1 000 outputs of an input need a
    backward pass each, 4 random combinations at a position estimate their mean variance. For regressions: a kernel of
    at most 2 000 rows over all trained weights, 500 if a sample has more than 200 outputs, its eigenvalues, and
    predictions of the samples; and for the noise predictions of at most 20 000 samples, or 2 000 for more than 40 000
    treated weights. For counts, censored targets and predicted noise a kernel, too.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> model = torch.nn.Linear(4, 3).eval()
        >>> evidence = lw.fit(model, [(x, y)], tune=lw.Evidence()).prior_precision
        >>> lw.fit(model, [(x, y)], tune=lw.BoundedEvidence()).prior_precision >= evidence
        True
    """

    fits_noise: ClassVar[bool] = True
    nats: float | None = option(None, positive())
    samples: int = option(500, at_least(1))
    decades: float = option(8.0, positive())
    points: int = option(17, at_least(3))

    @outside_modes
    def tune(self, posterior: Posterior, training: Training = Training()) -> Posterior:  # noqa: B008 (frozen)
        if not posterior.noise_fixed:
            residual = posterior.likelihood.residual_variance(posterior.statistics)
            assert residual is not None  # of the σ² that is open
            return with_left_out_width(posterior, residual, training, 4 * self.samples)
        decided = posterior.likelihood.left_out_decides
        if decided == "noise":
            posterior = with_left_out_noise(posterior, training, 4 * self.samples)
        if has_prior(posterior.covariance) and not posterior.prior.fixed:
            posterior = at_maximum(posterior)
            if posterior.noise_variance is None:
                posterior = self._with_bounded_cost(posterior, training)
        if decided == "spread":
            posterior = with_left_out_spread(posterior, training, 4 * self.samples)
        return with_noise_of_residuals(posterior, training) if posterior.likelihood.regressions else posterior

    def tunes_own_prior(self, posterior: Posterior) -> bool:
        return not has_prior(posterior.covariance) and (not posterior.noise_fixed or rows_wanted(posterior) > 0)

    def training_samples(self, posterior: Posterior) -> int:
        if not posterior.noise_fixed or posterior.likelihood.left_out_decides:
            return max(inputs_read(posterior, 4 * self.samples), rows_wanted(posterior))
        return max(0 if posterior.prior.fixed else number_of_inputs(posterior, self.samples), rows_wanted(posterior))

    def _with_bounded_cost(self, posterior: Posterior, training: Training) -> Posterior:
        """Returns the posterior at the smallest prior precision, from its own up, whose spread costs at most b."""
        exponents, lowest = evenly(0.0, self.decades, self.points), posterior.prior.precision
        parts = list(evenly_spaced_batches(training, number_of_inputs(posterior, self.samples), posterior))
        costs, rows = spread_costs([posterior.at(lowest * 10**exponent) for exponent in exponents], parts)
        _warn_of_certainty(posterior)
        bound = cost_of_right_spread(posterior, parts, rows) if self.nats is None else self.nats
        exponent = crossing(exponents, costs, bound)
        if exponent == 0:
            return posterior
        chosen = lowest * 10**exponent
        log.info(
            "The spread at the evidence's prior precision %.3g costs %.3g nats per training sample: raised to %.3g",
            lowest[0], costs[0], chosen[0],
        )  # fmt: skip
        if exponent == exponents[-1]:
            log.warning(
                "BoundedEvidence of %s reached the end of its range, prior precision %.0e, where the spread still "
                "costs the training data %.1g nats per sample; BoundedEvidence(decades=%g) looks further.",
                posterior.method, chosen[0], costs[-1], self.decades + 4,
            )  # fmt: skip
        return posterior.at(chosen)


def _warn_of_certainty(posterior: Posterior) -> None:
    likelihood, model = posterior.likelihood, posterior.tangent.model
    labels = likelihood.classifies(posterior.tangent.outputs) or likelihood.activation is not None
    rows = float(posterior.statistics["weight"]) or 1.0
    nll = -float(likelihood.log_likelihood(posterior.statistics)) / rows
    if labels and nll < CERTAIN_NLL:  # the NLL of a density depends on the unit of y, and of counts on their rate
        log.warning(
            "%s is almost sure of its training labels, whose NLL is %.2g per sample: they show little of how "
            "calibrated it is. For calibrated probabilities hold data out, and write "
            "lw.fit(model, loader, validation=held_out).", type(model).__name__, nll,
        )  # fmt: skip


def number_of_inputs(posterior: Posterior, samples: int) -> int:
    """Returns the maximum number of inputs that are read for a number of samples, each of which may be a position."""
    positions = posterior.tangent.positions
    count = 16 * samples // min(positions.count, 1024)
    if not positions.rows_are_positions:  # each position needs its own backward passes
        count = min(count, samples // min(positions.count, SOME_POSITIONS))
    return max(min(8, samples), count)


def cost_of_right_spread(posterior: Posterior, parts: Sequence[Samples], rows: Sequence[Mapping[str, Any]]) -> float:
    """Returns the bound b of `BoundedEvidence`, in nats per training sample, from a posterior at its evidence.

    `parts` are some training samples, and `rows` their outputs and targets, as from `spread_costs`.
    """
    likelihood, outputs = posterior.likelihood, float(posterior.tangent.outputs)
    classifies = likelihood.classifies(posterior.tangent.outputs)
    whole: Posterior | None = None  # of logits: in another classifier a larger output does not mean less doubt
    if likelihood.activation is not None:
        whole = _of_all_weights(posterior, parts) if classifies and untreated(posterior.tangent) else posterior
    # 1. γ/N of each block (n_blocks,); N counts training samples, or positions that count, by their weights
    counted = posterior if whole is None else whole
    covariance = cast(Any, counted.covariance)
    samples = (float(counted.statistics["weight"]) or 1.0) * counted.data_factor / counted.temperature
    shares = covariance.effective_dimension(counted.prior.precision, counted.scale.of_curvature) / samples
    # 2. By Jensen's inequality the spread costs at most h/2, h = γ/N. A γ above N counts each dimension about h times.
    h = float(shares.sum())
    cost = h / 2 if whole is None or h <= 1 else 1 / (2 * h)
    # 3. Several classes: the K outputs of a linear regression with noise variance 1 share γ/N, so each has the leverage
    # h: a spread J Σ Jᵀ of h, and a mean squared training residual of 1 - h. N(f, 1 + h) instead of N(f, 1) costs
    # log(1+h)/2 - (1-h)/2 (1 - 1/(1+h)).
    if classifies:
        share = float((shares * shares.new_tensor(covariance.correlated)).sum())
        if likelihood.activation == "softmax":  # without impossible classes
            counts = torch.cat([possible(row["outputs"]).sum(-1) for row in rows])
            outputs = max(1.0, float(counts.float().mean()) - 1)
        h = min(1.0, share / outputs)
        cost = outputs / 2 * (math.log1p(h) - h * (1 - h) / (1 + h))
    if whole is None:
        return max(MIN_COST, cost)
    # 4. p, what the network has paid for doubt already: larger logits would save it
    fit = partial(_mean_log_likelihood, likelihood.plain, rows)
    return max(MIN_COST, cost - (fit(golden_section(fit, 0.0, 1.0, 11)) - fit(0.0)))


def _of_all_weights(posterior: Posterior, parts: Sequence[Samples]) -> Posterior | None:
    """Returns KFAC over all trained weights at its evidence, by some training samples; None if that is too much.

    The labels were fitted by all weights, also by those that the posterior does not treat.
    """
    count, likelihood = sum(part.count for part in parts), posterior.likelihood
    try:
        passed = count * posterior.tangent.width
        tangent = trained(posterior, parts[0].inputs, passed, MOST_STEP * KFAC_MULTIPLY_ADDS)
        if tangent is None:
            return None
        needed = KFAC().footprint(FitShape.of(tangent, likelihood, parts[0].inputs, count))
        if needed.peak > tangent.memory or needed.products > DECOMPOSED_MULTIPLY_ADDS:
            return None
        step = math.ceil(passed * tangent.plan.work(tangent.blocks) / KFAC_MULTIPLY_ADDS) or 1
        prior = Prior.read(tangent, None)
        problem = Problem(tangent, likelihood, FisherRoot.of(tangent, likelihood, 0), prior, False, 0)
        curvature: Any = next(KFAC().passes(problem))
        state, summary = curvature.init(), DataSummary()
        with torch.no_grad():
            for samples in (part.take(slice(0, None, step)) for part in parts):
                batch = Batch.of(tangent, samples, likelihood.labelled(samples.targets), likelihood=likelihood)
                curvature.update(state, batch)
                summary.add(likelihood, **batch.rows())
        share = float(posterior.statistics["weight"] / summary.statistics["weight"])  # of targets that count
        whole = replace(
            posterior, tangent=tangent, covariance=curvature.finish(state), prior=prior, statistics=summary.statistics,
            samples=summary.samples, data_factor=posterior.data_factor * share,
        )  # fmt: skip
        precision, noise, _ = maximum(whole, per_layer=False)
        return whole.at(precision, noise)
    except Exception as error:  # from layers that the fit does not treat
        log.info("The trained weights that %s leaves out do not count: %s", posterior.method, error)
        return None


def _mean_log_likelihood(likelihood: Likelihood, rows: Sequence[Mapping[str, Any]], log10: float) -> float:
    """Returns the mean log likelihood, in nats, of rows whose logits are multiplied by 10^log10."""
    summary = DataSummary()
    for one in rows:
        summary.add(likelihood, **{**one, "outputs": one["outputs"] * 10**log10})
    return float(summary.statistics["log_likelihood"]) / (float(summary.statistics["weight"]) or 1.0)
