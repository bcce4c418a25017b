"""Tuning on held-out data: prior precision, noise or logit temperature, rank, and the number of training points."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from types import NoneType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..covariance import has_prior
from ..data.data import Data
from ..data.frames import check_data
from ..errors import LapwingError
from ..likelihoods import Likelihood, Link
from ..linalg import doubled
from ..methods import FitShape, Method
from ..network.entry import outside_modes
from ..options import Rule, at_least, integer, number, option
from ..posterior import Posterior
from ..posterior.tuned import Training, Tuning
from ..prediction import Way
from ..prediction.aim import DEFAULT_AIM, Aim
from .evidence import no_rank_error
from .fitted_noise import rows_wanted, with_noise_of_residuals
from .held_out import at_exponents, candidate_latents, sample_scores, tangent_of_samples
from .held_out_choice import RISING, STEPS, SURE, TEMPERATURES, best_of, surely_better, with_ranks
from .latent_factor import with_latent_factor, with_other_noise
from .matrix_scaling import MOST_OUTPUTS, matrix_scaled
from .regression_width import SAMPLES, inputs_read, trained_values, with_relative_weights
from .search import ascend, evenly

log = logging.getLogger("lapwing")

OUTPUT_NOISES = evenly(-1.5, 0.5, 41)  # candidates for log10 of an output's σ² over its mean squared residual
WORTHWHILE_SHIFT, WORTHWHILE_SHARE = 0.05, 0.08  # minimum gain of a shift: in nats per sample, or of the NLL if smaller
SHIFTED_OUTPUTS = 20  # maximum number of outputs for which a shift is looked for
LARGEST_SHIFT = 30.0  # largest size of a constant, and of the logarithm of the temperature

RANKS = Rule(
    lambda value: isinstance(value, (tuple, list)) and all(map(integer(1).accepts, value)),
    "a tuple of whole numbers of at least 1",
    tuple,
)
"""Ranks to compare."""


def _is_plain(value: Any) -> bool:
    """Whether all options of a way or a link are numbers, texts or None, and it keeps all outputs."""
    plain = all(isinstance(option, (Real, str, tuple, NoneType)) for option in vars(value).values())
    return plain and getattr(value, "outputs", None) is None


WAY = Rule(
    lambda value: isinstance(value, Way) and _is_plain(value), "a way of all outputs that was not fitted to a posterior"
)
LINK = Rule(lambda value: isinstance(value, Link) and _is_plain(value), "a link whose options are numbers and texts")


class _OnHeldOutData(Tuning):
    """A tuning on held-out data, which may compare ranks of a subspace, and does not read the evidence."""

    fits_noise: ClassVar[bool] = True
    reads_evidence: ClassVar[bool] = False
    loader: Any
    ranks: tuple[int, ...]
    via: Way | None
    link: Link | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_data(self.loader, type(self).__name__)

    @property
    def _aim(self) -> Aim:
        """The way and the link that the numbers are chosen for."""
        return Aim(self.via, self.link)

    def check(self, method: Method, shape: FitShape) -> None:
        self.check_likelihood(shape.likelihood, shape.tangent.outputs)
        footprint = method.footprint(shape) if self.ranks else None
        if footprint is not None and footprint.rank is None:
            raise no_rank_error("ranks", self.ranks, repr(method))

    def check_likelihood(self, likelihood: Likelihood, outputs: int) -> None:
        """Raises if the tuning and the likelihood do not go together; also before `tune` of a fitted posterior."""
        if likelihood.head_numbers and self._aim != DEFAULT_AIM:
            raise LapwingError(
                "The heads of lw.Joint are tuned for linearised predictions with their default links. Leave via= and "
                f"link= out: write tune=lw.{type(self).__name__}(held_out)."
            )

    def training_samples(self, posterior: Posterior) -> int:
        return max(rows_wanted(posterior), 0 if posterior.noise_fixed else inputs_read(posterior, SAMPLES))

    def _trained(
        self, posterior: Posterior, training: Training, parts: Sequence[Posterior]
    ) -> tuple[list[Posterior], tuple[float, float] | None]:
        """Returns the parts, and δ and σ² by the training data: if σ² is open and known data, of relative weights."""
        if training.count is None or posterior.noise_fixed:
            return list(parts), None
        *values, weight = trained_values(posterior, training)
        return [with_relative_weights(part, weight) for part in parts], (values[0], values[1])


@dataclass(frozen=True)
class Validation(_OnHeldOutData):
    """Chooses δ, and σ² or a logit temperature T, by the mean log likelihood of held-out data.

    Predictions are by the way `via` and the link `link`, which `predict` then uses by default. Values that the user
    gave are kept, and so is a logit temperature other than 1. The best point of the grid is refined by a parabola
    through its neighbours. n held-out labels that are all right show an error of about 1/n at best, so the likelihood
    of labels counts a quarter of a sample more, with a uniform label.

    Classification: all pairs of one scalar δ and `T >= 1` are compared. T divides the mean of the logits, because
    spread cannot correct logits that are all too large. Among pairs that the held-out data cannot distinguish from the
    best, the one with the widest spread detects out-of-distribution inputs best, and is chosen. If `T < 1` without
    spread is better than every pair, the network is underconfident. Then T is chosen as by `TemperatureScaling`, and
    the spread changes log probabilities by at most 0.005 nats. With a given prior precision T is free.

    Regression: for each `λ = δσ²`, the best factor c of the covariance of y, `(δ, σ²) -> (δ/c, c σ²)`, has a closed
    form, `mean r²/(σ² + v)` for one output. λ determines how widths differ between inputs, which few held-out samples
    cannot show. So it comes from the training data, as in `BoundedEvidence`, unless another λ is better by three
    standard errors of the paired difference. At this λ, at a given prior precision, and by another way, log σ² is
    pulled, with the weight of one sample, towards the noise variance that the training data show. Each of several
    outputs of `lw.Gaussian()` then gets its own noise variance, as ratios to σ², if it is better by as much, and if the
    fit has not estimated ratios before (see `Gaussian`). Outputs (B, T, C) get T C of them if T is fixed and T C at
    most 200, otherwise C. Give `noise_ratios` to keep them. Then held-out residuals decide on the noise and the tails
    of predictions (see `Gaussian`). If they change, so does the level of Σ: (δ, σ²) becomes (δ/s, s σ²).

    Other likelihoods, such as `lw.HeteroscedasticGaussian()`, have neither σ² nor T. At the best δ a factor c of the
    covariance is then chosen, `(δ, τ) -> (δ/c, c τ)`, if it gains more than one paired standard error. With a given
    prior precision only the temperature τ of the curvature changes, and a given τ other than 1 stays. `lw.Poisson()`:
    all δ are compared at the dispersion of the training data, and at the larger one that suits held-out counts best.

    `lw.Joint`: all δ are compared at the best noise variance or `T >= 1` of each head. At the best δ T may be below 1.

    Args:
        loader: held-out data, which must not be the training data, in any form that `lw.fit` accepts.
        decades: range of log10 δ; for a regression with the mean squared held-out residual as σ².
        points: number of candidates.
        ranks: for subspaces, numbers of leading directions to compare with all directions.
        tolerance: for classifiers, the widest spread is chosen whose score is at most this many standard errors, and at
            most 0.001 nats, below the best. Errors are of the paired difference over samples; 0 chooses the best.
        tempered: whether to choose a classifier's logit temperature; False chooses only the prior precision.
        via: the way of the predictions; None is the default way. The best δ of linearised predictions can be far too
            small for draws. So another way is scored at nine δ around it, with σ² or T, and with common random numbers.
        link: the link of the predictions; None is the default of the likelihood.
        calibration: "matrix" adds an affine map of the logits, `W z + b`, after the temperature. It is shrunken to the
            identity, as strongly as 5-fold cross-validation over the held-out samples chooses, and left out unless it
            pays there. It can change the most probable class. For sigmoids W is diagonal. Berta et al. 2025.

    Raises:
        LapwingError: if a range or a number does not give a grid; for "matrix" unless there are at most 100 logits and
            neither `via` nor `link`; for a way that was fitted to a posterior.

    Cost: one pass over the loader, with one record and one contraction per batch, and `points` variances (or Gram
    matrices, if the link reads covariances); by another way nine predictions more, or 18 with an open σ². A regression
    also needs the kernel of `BoundedEvidence`, up to two forward passes, and for its noise a forward pass of at
    most 20 000 training samples and a prediction of the held-out ones. Memory: about 6 kB per held-out sample of a
    classifier (or position), 3 kB of a regression.

    Example:
        >>> import torch, lapwing as lw
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(64, 4), torch.arange(64) % 3
        >>> model, held_out = torch.nn.Linear(4, 3).eval(), [(x[32:], y[32:])]
        >>> posterior = lw.fit(model, [(x[:32], y[:32])], lw.KFAC(), tune=lw.Validation(held_out))
        >>> 1e-5 <= posterior.prior_precision <= 1e7
        True
    """

    tunes_updates: ClassVar[bool] = True
    loader: Any = field(repr=False)
    decades: tuple[float, float] = option((-5.0, 7.0), RISING)
    points: int = option(25, at_least(3))
    ranks: tuple[int, ...] = option((), RANKS, write="(5, 10)")
    tolerance: float = option(0.25, number(0))
    tempered: bool = True
    calibration: Literal["temperature", "matrix"] = "temperature"
    via: Way | None = option(None, WAY, write="lw.MonteCarlo(draws=50)")
    link: Link | None = option(None, LINK, write="lw.SampledLink()")

    def check_likelihood(self, likelihood: Likelihood, outputs: int) -> None:
        super().check_likelihood(likelihood, outputs)
        if self.calibration == "matrix" and self._aim != DEFAULT_AIM:
            raise LapwingError(
                "calibration='matrix' is for linearised predictions with the default link. Leave via= and link= out: "
                "write tune=lw.Validation(held_out, calibration='matrix')."
            )
        logits = likelihood.activation is not None and outputs <= MOST_OUTPUTS
        if self.calibration == "matrix" and not logits:
            raise LapwingError(
                f"calibration='matrix' is for classifiers of at most {MOST_OUTPUTS} outputs. Write "
                "tune=lw.Validation(held_out)."
            )

    @outside_modes
    def tune(self, posterior: Posterior, training: Training = Training()) -> Posterior:  # noqa: B008 (frozen)
        self.check_likelihood(posterior.likelihood, posterior.tangent.outputs)
        held_out, without = Data.of(self.loader, posterior), posterior.likelihood.uncalibrated
        if posterior.method.calibrated and self.tempered:  # by former held-out data
            posterior = replace(posterior, likelihood=without)
        best = self._tuned(posterior, training, held_out)
        best = with_noise_of_residuals(best, training, held_out, self._aim, posterior.likelihood)
        best = replace(best, aim=self._aim) if best is not posterior or self._aim != DEFAULT_AIM else best
        if self.calibration == "matrix":
            best = matrix_scaled(best, held_out)
        calibrated = posterior.method.calibrated or posterior.likelihood == without
        return replace(best, method=replace(best.method, calibrated=calibrated))

    def _tuned(self, posterior: Posterior, training: Training, held_out: Data) -> Posterior:
        """Returns the posterior with δ, and σ² or T, chosen."""
        open_numbers = (self.tempered and posterior.logit_temperature == 1) or posterior.likelihood.head_numbers
        best = posterior
        open_numbers = open_numbers or posterior.likelihood.noise_candidates()
        if not posterior.prior.fixed or not posterior.noise_fixed or self.ranks or open_numbers:
            parts, trained = self._trained(posterior, training, with_ranks(posterior, self.ranks))
            best = best_of(
                with_other_noise(parts, held_out), self.decades, self.points, held_out,
                TEMPERATURES if self.tempered else (), self.tolerance, trained, self._aim,
            )  # fmt: skip
        best = with_latent_factor(best, held_out, self._aim)
        if best is posterior:
            return posterior
        best = replace(_with_output_noise(best, held_out), method=replace(best.method, tuning=repr(self)))
        if self.calibration == "temperature":
            _warn_of_shift(best, held_out)
        log.info("Validation chose %r", best)
        return best

    def tunes_own_prior(self, posterior: Posterior) -> bool:
        open_noise = not posterior.noise_fixed and not has_prior(posterior.covariance)
        return open_noise or posterior.logit_temperature == 1 or bool(posterior.likelihood.head_numbers)


@dataclass(frozen=True)
class EarlyStopping(_OnHeldOutData):
    """Chooses n, the number of training points in the curvature, and δ by the held-out log likelihood.

    Deng et al. 2022, section 5.2. The covariance is `(S_n + δI)⁻¹`, where `S_n` sums over the first n points: a small n
    is wider, if the posterior of all data is too narrow. All pairs (n, δ) are compared. In a regression `λ = δσ²` and
    the pull of log σ² are as in `Validation`. Without validation data, pass strongly augmented training images.

    Args:
        loader: held-out data in any form that `lw.fit` accepts.
        form: "published", `(S_n + δI)⁻¹`; or "scaled", `(S_n + (n/N) δI)⁻¹`, as in the authors' program: the whole
            covariance of N points, `((N/n) S_n + δI)⁻¹`, times N/n. If δ is free the two forms are one family.
        prefixes: number of parts of the data to compare: a half, a quarter, ... of it.
        decades: range of log10 δ.
        points: number of candidates for δ.
        ranks: for subspaces, numbers of leading directions to compare with all directions.
        via: as in `Validation`.
        link: as in `Validation`.
        stop: "best" compares all n. "first fall" starts with the smallest n and ends the fit at the first n whose best
            score is lower than the best so far, by one standard error of the paired difference. Then it compares the n
            that it has seen, and never sums the curvature of the rest.

    Raises:
        LapwingError: if the form is unknown, or a number does not give a grid.

    Cost: memory of `prefixes` curvatures (K x K for subspaces), and up to twice the last pass of the fit, which is
    repeated for the parts; with "first fall" up to twice a pass over the n at which it ends. One pass over the loader,
    contracted once for subspaces and once per prefix for other methods; with "first fall", one more for each n. A
    regression also needs the kernel of `BoundedEvidence`. The first samples of the training loader should be a random
    subset.

    Example:
        >>> import torch, lapwing as lw
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(64, 4), torch.arange(64) % 3
        >>> model, held_out = torch.nn.Linear(4, 3).eval(), [(x[32:], y[32:])]
        >>> posterior = lw.fit(model, [(x[:32], y[:32])], lw.ELLA(rank=5, rows=20), tune=lw.EarlyStopping(held_out))
        >>> posterior.samples in (1, 2, 4, 8, 16, 32)
        True
    """

    loader: Any = field(repr=False)
    form: Literal["published", "scaled"] = "published"
    prefixes: int = option(10, at_least(1))
    decades: tuple[float, float] = option((-5.0, 7.0), RISING)
    points: int = option(25, at_least(3))
    ranks: tuple[int, ...] = option((), RANKS, write="(5, 10)")
    stop: Literal["best", "first fall"] = "best"
    via: Way | None = option(None, WAY, write="lw.MonteCarlo(draws=50)")
    link: Link | None = option(None, LINK, write="lw.SampledLink()")

    def check(self, method: Method, shape: FitShape) -> None:
        if not method.allows_early_stopping():
            raise _without_prefixes(repr(method))
        super().check(method, shape)

    @outside_modes
    def tune(self, posterior: Posterior, training: Training = Training()) -> Posterior:  # noqa: B008 (frozen)
        if not training.prefixes:
            raise _without_prefixes(str(posterior.method))
        self.check_likelihood(posterior.likelihood, posterior.tangent.outputs)
        parts = (*training.prefixes, posterior)
        candidates = [one for part in parts for one in self._candidates(part, posterior)]
        candidates, trained = self._trained(posterior, training, candidates)
        held_out = Data.of(self.loader, posterior)
        candidates = with_other_noise(candidates, held_out)
        best = best_of(candidates, self.decades, self.points, held_out, trained=trained, aim=self._aim)
        best = with_noise_of_residuals(best, training, held_out, self._aim, posterior.likelihood)
        log.info("Early stopping chose %d of %d samples", best.samples, posterior.samples)
        first = (best.samples, training.count or posterior.samples)
        return replace(best, method=replace(posterior.method, first_samples=first), aim=self._aim)

    def _candidates(self, part: Posterior, whole: Posterior) -> list[Posterior]:
        """Returns the posterior of the first samples in the chosen form, for each rank."""
        part, every = part if part.noise_fixed else part.with_defaults(), whole.samples * whole.data_factor
        if self.form == "scaled" and part.prior.fixed and part.samples < every and part is not whole:
            part = part.at(part.prior.precision * (part.samples / every))
        return with_ranks(part, self.ranks)

    def falls(self) -> Callable[[Posterior, Posterior], bool] | None:
        if self.stop == "best":
            return None
        best: list[Tensor] = []

        def has_fallen(part: Posterior, whole: Posterior) -> bool:
            points = self.points if self._aim.other_way is None else len(STEPS)
            candidates = at_exponents([] if part.prior.fixed else evenly(*self.decades, points))
            data = Data.of(self.loader, part)
            parts = with_other_noise(self._candidates(part, whole), data)
            scores = sample_scores(parts, candidates, data, aim=self._aim).flatten(0, 2)
            now = scores[int(scores.mean(-1, dtype=torch.float64).nan_to_num(-math.inf).argmax())]
            if best and surely_better(best[0], now, 1.0):
                return True
            if not best or now.mean() > best[0].mean():
                best[:] = [now]
            return False

        return has_fallen


def _without_prefixes(method: str) -> LapwingError:
    return LapwingError(
        f"The fit of {method} kept no sums of the first samples. Use a method that sums a curvature over data: write "
        "lw.fit(model, loader, lw.ELLA(), tune=lw.EarlyStopping(validation_loader))."
    )


@torch.no_grad()
def _with_output_noise(posterior: Posterior, loader: Iterable[Any]) -> Posterior:
    """Returns the posterior with the noise ratios of the held-out data, if these surely show them, or unchanged.

    σ_c² is the point of `OUTPUT_NOISES` with the highest log density of targets of output c, of variance
    σ_c² + J_c Σ J_cᵀ. These C values are used if their density, minus the gain by chance `(C - 1)/N`, is better than
    with one value by `SURE` paired standard errors. The covariance and σ² do not change. Outputs (B, T, C) have T C
    values if `tangent_of_samples` joins them and all samples have the same T.

    Cost: a pass over the held-out data, if there are several outputs and no ratios.
    """
    likelihood: Any = posterior.likelihood
    if posterior.noise_fixed or getattr(likelihood, "noise_ratios", ()) is not None:
        return posterior
    if tangent_of_samples(posterior).outputs == 1:
        return posterior
    # 1. squared residuals and variances J_c Σ J_cᵀ of the held-out targets (N, C)
    parts = []
    for _, _, latent, labels, _ in candidate_latents([posterior], lambda one: [one], loader):
        squares = (doubled(labels).reshape(latent.mean.shape) - doubled(latent.mean)).square()
        parts.append((squares.cpu(), doubled(latent.variance).cpu()))
    widths = {squares.shape[1] for squares, _ in parts}  # several if the number of positions varies
    outputs = widths.pop() if len(widths) == 1 else posterior.tangent.outputs
    squares, variances = (
        torch.cat([values.reshape(-1, outputs) for values in part]) for part in zip(*parts, strict=True)
    )
    known = ~squares.isnan()
    squares, counts = squares.nan_to_num(), known.sum(0)
    if outputs == 1 or int(counts.min()) < 2:
        return posterior

    def scores(noise: Tensor | float) -> Tensor:
        """Returns log densities (N, C) at the noise variance of each output."""
        total = variances + noise
        return -0.5 * (known * (total.log() + squares / total))

    # 2. for each output K values of σ_c² around its mean squared residual, and the best one (C,)
    grid = squares.sum(0) / counts * 10 ** torch.tensor(OUTPUT_NOISES, dtype=squares.dtype)[:, None]  # (K, C)
    best = torch.stack([scores(noises).sum(0) for noises in grid]).argmax(0)
    noises, noise = grid.gather(0, best[None])[0], float(posterior.noise_variance or 0.0)
    # 3. C numbers instead of one: (C - 1)/N nats per sample are the gain by chance, as in AIC
    better = surely_better(scores(noises).sum(-1) - (outputs - 1) / len(squares), scores(noise).sum(-1), SURE)
    if not better or not (noises > 0).all():
        return posterior
    log.info("Held-out data show noise variances of the outputs from %.3g to %.3g", noises.min(), noises.max())
    # 4. ratios σ_c²/σ²
    return replace(posterior, likelihood=replace(likelihood, noise_ratios=tuple((noises / noise).tolist())))


def _warn_of_shift(posterior: Posterior, held_out: Data) -> None:
    """Warns if a constant for each logit improves the held-out log likelihood, which no temperature can do.

    The gain must exceed `WORTHWHILE_SHIFT` per sample, or `WORTHWHILE_SHARE` of the NLL if that is less (rare classes),
    unless weights of labels in the loss have surely shifted the logits; and twice the gain of all samples 10 + 3 C.
    Without a shift twice the gain is about χ² with C degrees of freedom.
    Outputs with positions, or with a map of the logits, are not checked. Cost: a forward pass.
    """
    likelihood, tangent = posterior.likelihood.plain, posterior.tangent
    mapped = getattr(likelihood, "logit_map", ())
    if mapped or likelihood.activation is None or tangent.outputs > SHIFTED_OUTPUTS or tangent.positions.several:
        return
    parts = [samples.to(tangent.device) for samples in held_out]
    logits = torch.cat([tangent.outputs_of(part.inputs).double() for part in parts])
    labels = torch.cat([part.targets for part in parts])
    counted = likelihood.labelled(labels)
    logits, labels = (logits, labels) if counted is None else (logits[counted], labels[counted])
    name, present = type(tangent.model).__name__, torch.arange(tangent.outputs, device=logits.device)
    # 1. the classes with a held-out label: the labels show no constant for another class
    if likelihood.activation == "softmax" and labels.ndim == 1:
        present, labels = labels.long().unique(return_inverse=True)
        absent = sorted({*range(tangent.outputs)} - {*present.tolist()})
        expected = float(logits.softmax(-1)[:, absent].sum())
        if expected > 10:  # the probability that all of them are missing by chance is below e^-10
            log.warning(
                "The classes %s have no held-out label, and %s expects about %.0f of %d there. Pass held-out data with "
                "all classes that occur in use.", absent[:10], name, expected, len(labels),
            )  # fmt: skip
        logits = logits[:, present]
    outputs = len(present)

    def score(point: Tensor) -> Tensor:
        """Returns the mean log likelihood of `f e^s + b` at the point (s, b), with a penalty for rare classes."""
        scores = likelihood.log_prob(logits * point[0].exp() + point[1:], labels)
        return scores.mean() - point.square().sum() / (50 * len(labels))

    # 2. the best s at b = 0, the best (s, b), and the gain of b
    start, most = logits.new_zeros(1 + outputs), [LARGEST_SHIFT] * (1 + outputs)
    scaled = ascend(lambda point: score(torch.cat([point, start[1:]])), start[:1], [-LARGEST_SHIFT], [LARGEST_SHIFT])
    best = ascend(score, start, [-bound for bound in most], most)
    nll = -float(score(torch.cat([scaled, start[1:]])))
    gain = nll + float(score(best))
    least = min(WORTHWHILE_SHIFT, WORTHWHILE_SHARE * nll) if likelihood is posterior.likelihood else 0.0
    if gain > least and 2 * len(labels) * gain > 10 + 3 * outputs:
        # 3. f e^s + b = e^s (f + b e^-s): the constants for the logits of the network
        shift = best[1:] / best[0].exp()
        shift = shift - shift.mean() if likelihood.activation == "softmax" else shift
        shift = shift.new_zeros(tangent.outputs).index_copy(0, present, shift)
        log.warning(
            "A constant for each logit of %s gains %.2g of %.2g nats per held-out sample, and validation= only divides "
            "the logits. If it was trained on resampled data or with weights of labels, leave the weights out of the "
            "likelihood, and write forward=lambda model, inputs: model(inputs) + torch.tensor(%s). Or write "
            "tune=lw.Validation(held_out, calibration='matrix'), which fits an affine map of the logits.",
            name, gain, nll, [round(value, 2) for value in shift.tolist()],
        )  # fmt: skip
