"""Noise that depends on the input, and its tails: fitted to residuals, and kept only if left-out residuals gain by it.

`shapes` finds from training residuals how the log variance varies. `level` fits its offset, the factor of the latent
covariance and the degrees of freedom. `chosen` compares them with the plain law: one normal noise variance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..likelihoods.input_noise import InputNoise, least_noise, standardised
from ..linalg import orthonormal_rows, symmetric_eigen
from .search import descend

RIDGES = math.inf, 0.1, 1.0, 10.0, 100.0, 1000.0
"""Candidates for λ, the precision of w in units of the loss of one row; the first makes the noise constant."""
SHAPE_ROWS, SHAPE_ENTRIES, CHOICE_ROWS = 20_000, 2**24, 2_000
"""Maximum number of training rows, of their features, and of held-out rows times outputs that choose."""
MOST_DIRECTIONS, PRINCIPAL_ROWS = 256, 1_024
"""Maximum number of principal components that w combines, and of rows that define them if there are more features."""
CONSTANT, SMALLEST = 1e-6, 1e-10
"""Standard deviation of a constant feature, over its largest value; least squared residual, over the mean one."""
PART_BEYOND, NOT_FAR = 0.01, 1.001
"""Fraction of the training rows beyond each end of the range of wᵀz, and of those that count as far from the others;
factor of their distance, so that rounding does not decide whether the row at the quantile is far."""
SHAPE_DF, LEAST_DF, TYPICAL_DF, MOST_DF, NORMAL_DF = 5.0, 3.0, 7.0, 100.0, 1e6
"""ν of the density that finds w; least, most probable and largest tuned ν; largest ν of a sum of noise and f."""
SAME_ROW, SOME_FEATURES, REPEATED = 1e-5, 64, 0.95
"""Largest difference of copies over the largest value; maximum number of features that are compared; least part of
the rows with equal inputs that also have equal targets, if the rows were repeated and not measured again."""
FOLDS_HELD_OUT, LEAST_HELD_OUT, FEW_HELD_OUT, FEW_ERRORS = 5, 30, 200, 1.5
FOLDS_TRAINING, LEAST_TRAINING, FEW_TRAINING = 3, 200, 1500
"""Folds; least rows for another law than the plain one; least gain in standard errors with fewer than FEW rows."""
LEAST_GAIN, MOST_STEPS, LARGEST_LOG = 1e-6, 60, 60.0
"""Least gain of a step of L-BFGS, maximum number of steps; largest |log σ²| on the way, over the mean r²."""
CURVATURES = 0.5, 0.25, 0.05
"""Typical second derivatives of the mean loss of a row by b, log s and log(ν - 3), where the search for them starts."""


class ResidualRows(NamedTuple):
    """Rows with residuals, in float64.

    Attributes:
        features: φ, (N, F).
        residuals: y - f, (N, C); NaN for a missing target.
        weights: sample weights (N,), which count as repeated rows.
        latent: variances of f (N, C) for held-out rows, at the plain law's prior precision and noise; else zeros.
    """

    features: Tensor
    residuals: Tensor
    weights: Tensor
    latent: Tensor

    def taken(self, index: Tensor) -> ResidualRows:
        return ResidualRows(*(part[index] for part in self))

    def of(self, columns: Any) -> ResidualRows:
        """Returns the rows with known targets among some outputs, for these outputs."""
        some = self._replace(residuals=self.residuals[:, columns], latent=self.latent[:, columns])
        return some.taken((some.known()[1] > 0).any(1).nonzero()[:, 0])

    def at_most(self, count: int) -> ResidualRows:
        """Returns random rows in a random order, which residuals determine and not the given order of the rows."""
        ranked = self.residuals.nan_to_num().sum(1).argsort()
        return self.taken(ranked[torch.randperm(len(ranked), generator=torch.Generator().manual_seed(0))[:count]])

    def distinct(self) -> ResidualRows:
        """Returns the rows with one for all copies, and weights of mean 1: copies add no evidence.

        If rows of equal features have other residuals, inputs were measured again, and all rows stay.
        """
        kept = self.taken((self.weights > 0).nonzero()[:, 0])
        if not len(kept.weights):
            return self
        residuals, count = kept.residuals.nan_to_num(), len(kept.weights)
        features = kept.features[:, :: 1 + kept.features.shape[1] // SOME_FEATURES]
        order, first = _different(torch.cat([features, residuals], 1))
        copies, again = count - int(first.sum()), count - int(_different(features)[1].sum())
        if copies and copies >= REPEATED * again:
            total = torch.zeros(count - copies).to(kept.weights)
            total = total.index_add(0, first.cumsum(0) - 1, kept.weights[order])
            kept = kept.taken(order[first])._replace(weights=total)
        return kept._replace(weights=kept.weights / kept.weights.mean())

    def known(self) -> tuple[Tensor, Tensor]:
        """Returns r² (N, C) and the weights (N, C), both 0 for a missing target."""
        return self.residuals.nan_to_num().square(), ~self.residuals.isnan() * self.weights[:, None]


def chosen(
    train: ResidualRows, floor: Tensor, held_out: ResidualRows | None = None,
    noise: str | None = None, df: float | None = None, normal: bool = True, scaled: bool = True,
) -> InputNoise | None:  # fmt: skip
    """Returns the noise that predicts left-out folds of residuals best, or None for the plain law.

    With held-out rows, shapes of the training residuals get a `level` by four fifths of these rows. Otherwise two
    thirds of the training rows determine shape and level, and the level of all rows is multiplied by the ratio of
    `floor`, the noise of new rows, to their mean squared residual, if it is above 1. A few rows of large noise decide
    on a mean of σ²(x), so that mean is not held at `floor`.
    The best law must gain more than one standard error of the paired difference to the plain law, or more if rows are
    few. Each law has a factor s of the latent covariance of its own: one noise variance may ask for a wide one, which
    would hide the noise.

    Args:
        train: training rows.
        floor: the plain law's noise variance of each output, (C,), float64.
        held_out: held-out rows with latent variances, or None.
        noise: "constant", "input", or None if the data decide.
        df: ν, see `level`. A tuned ν of `MOST_DF` becomes infinite.
        normal: whether the plain law is an answer, unless `noise` is "input". If it is not, constant noise takes its
            place.
        scaled: whether the latent variances may get a factor.

    Cost: 6 shapes and 31 levels of at most `CHOICE_ROWS` held-out rows, or 24 shapes and 19 levels of training rows.
    """
    # 1. the rows that choose, and which laws are candidates
    rows, folds, most, least, few = train, FOLDS_TRAINING, SHAPE_ROWS, LEAST_TRAINING, FEW_TRAINING
    if held_out is not None:
        rows, folds, most, least, few = held_out, FOLDS_HELD_OUT, CHOICE_ROWS, LEAST_HELD_OUT, FEW_HELD_OUT
    some = rows.at_most(max(most // len(floor), few))
    count, may_stay = len(some.features), normal and noise != "input"
    if count < least and may_stay:
        return None
    constant = noise == "constant" or (noise is None and count < least)
    ridges = RIDGES[:1] if constant else RIDGES[1:] if noise == "input" else RIDGES
    # 2. shapes for all rows and for each fold, and losses (laws, N) of the rows that they leave out
    final, (squares, weights) = shapes(train, floor, ridges), some.known()
    fold = torch.arange(count, device=floor.device) % folds
    used = (fold != torch.arange(folds, device=floor.device)[:, None]).to(floor)  # (folds, N)
    parts, plain_noise = [final] * folds, floor  # which may have been tuned on the held-out rows
    if held_out is None:
        parts = [shapes(some.taken((fold != k).nonzero()[:, 0]), floor, ridges) for k in range(folds)]
        level_of_fold = (used @ (weights * squares / floor).sum(1)) / (used @ weights.sum(1))  # (folds,)
        plain_noise = floor * level_of_fold.clamp_min(SMALLEST)[fold, None]  # (N, C)
    slopes = torch.stack([shape.slope(some.features) for part in parts for shape in part])
    far = final[0].is_far(some.features)
    left_out = level(slopes, some, used.repeat_interleave(len(final), 0), df, floor, far, scaled)[-1]
    losses = left_out.unflatten(0, (folds, -1))[fold, :, torch.arange(count)].T
    # 3. the best law, if it surely gains over the first one
    if may_stay:
        plain = (loss(squares, plain_noise, math.inf, some.latent) * (weights > 0)).sum(1)
        losses = torch.cat([plain[None], losses])
    mass = some.weights / some.weights.sum()
    best = int((losses @ mass).argmin())
    gains = losses[0] - losses[best]
    error = (mass @ (gains - mass @ gains).square() * mass.square().sum()).sqrt()
    if noise != "input" and not float(mass @ gains) > (FEW_ERRORS if count < few else 1.0) * float(error):
        best = 0
    if may_stay and best == 0:
        return None
    # 4. its level by all rows
    law = at_level(final[best - may_stay], rows, df, scaled)
    if held_out is not None:
        return law
    squares, weights = rows.known()
    residual = (weights * squares).sum(0) / weights.sum(0).clamp_min(SMALLEST)  # (C,), of rows that the network knows
    grown = (floor / residual.maximum(SMALLEST * floor)).clamp_min(1.0)
    return replace(law, offset=law.offset + grown.log())


def at_level(noise: InputNoise, rows: ResidualRows, df: float | None, scaled: bool) -> InputNoise:
    """Returns the noise with b, s and ν of `level` by all rows. A tuned ν of `MOST_DF` becomes infinite."""
    slope, far = noise.slope(rows.features)[None], noise.is_far(rows.features)
    offset, spread, tail, _ = level(slope, rows, torch.ones_like(rows.weights)[None], df, noise.floor, far, scaled)
    found = float(tail) if df is not None or tail < MOST_DF else math.inf
    return replace(noise, offset=offset[0], spread=float(spread), df=found)


def constant(rows: ResidualRows, floor: Tensor) -> InputNoise:
    """Returns normal noise with the variances `floor` (C,) at all inputs."""
    return replace(shapes(rows, floor, RIDGES[:1], math.inf)[0], offset=floor.log())


def shapes(
    rows: ResidualRows, floor: Tensor, ridges: Sequence[float] = RIDGES, df: float = SHAPE_DF
) -> list[InputNoise]:
    """Returns one noise for each λ of `ridges`, whose w and b minimise the penalised loss of training residuals.

    For each output, `(Σ_n ω_n loss(r_n², exp(b + wᵀz_n)) + λ‖w‖²) / Σ_n ω_n`, which is convex in w and b.

    Args:
        rows: rows with residuals.
        floor: the plain law's noise variance (C,), see `InputNoise.floor`.
        ridges: candidates for λ.
        df: degrees of freedom of the density; `math.inf` for normal noise.

    Cost: time O(N F'²) for F' = min(F, 256), and 10 products (N, F') (F', K) for K ridges and each output.
    """
    # 1. standardised features z (N, F)
    rows = rows.at_most(min(SHAPE_ROWS, SHAPE_ENTRIES // rows.features.shape[1]))
    features, (squares, weights) = rows.features, rows.known()
    mass = rows.weights / rows.weights.sum()
    centre = mass @ features
    deviation = (mass @ (features - centre).square()).sqrt()
    scale = torch.where(deviation > CONSTANT * features.abs().amax(0), 1 / deviation, 0.0)
    z = standardised(features, centre, scale)
    # 2. principal components z U (N, F') and their variances (F',)
    basis = torch.eye(z.shape[1]).to(z)
    if len(basis) > MOST_DIRECTIONS:
        basis = orthonormal_rows(z[:PRINCIPAL_ROWS], MOST_DIRECTIONS, whole=False).T
    variances, vectors = symmetric_eigen((z @ basis).T * mass @ (z @ basis))
    basis = basis @ vectors
    components = z @ basis
    # 3. for each output all λ at once: w = U P p, with P^-2 the curvature at constant noise
    precisions = z.new_tensor(ridges)[:, None]

    def fitted(square: Tensor, weight: Tensor, least: Tensor) -> Tensor:
        total = weight.sum().clamp_min(SMALLEST)
        mean = (weight @ square / total).maximum(least)
        unit = (square / mean).clamp_min(SMALLEST)
        scales = (0.5 * variances + 2 * precisions / total).rsqrt()  # 0 for an infinite λ
        penalty = (0.5 * variances / precisions + 2 / total).reciprocal()  # λ P²

        def objective(point: Tensor) -> Tensor:
            w = point[:, :-1] * scales  # (K, F')
            noise = (w @ components.T + point[:, -1:]).clamp(-LARGEST_LOG, LARGEST_LOG).exp()
            return (loss(unit, noise, df) @ weight + (penalty * point[:, :-1].square()).sum(1)).sum() / total

        point = descend(objective, z.new_zeros(len(ridges), len(variances) + 1), MOST_STEPS, LEAST_GAIN)
        return torch.cat([(point[:, :-1] * scales) @ basis.T, point[:, -1:] + mean.log()], 1)

    solutions = torch.stack([fitted(*one) for one in zip(squares.T, weights.T, SMALLEST * floor, strict=True)], 1)
    # 4. the range of wᵀz and the distances of the rows
    noises, whitening = [], basis * (variances + 2 / rows.weights.sum()).rsqrt()
    reach = NOT_FAR * _quantile((z @ whitening).square().sum(1, keepdim=True), 1 - PART_BEYOND, mass)[0]
    for w, b in zip(solutions[..., :-1], solutions[..., -1], strict=True):  # (C, F), (C,)
        low, high = (_quantile(z @ w.T, part, mass) for part in (PART_BEYOND, 1 - PART_BEYOND))
        noises.append(InputNoise(centre, scale, w, low, high, b, floor, whitening, reach, 1.0, df))
    return noises


def level(
    slopes: Tensor, rows: ResidualRows, parts: Tensor, df: float | None, floor: Tensor, far: Tensor, scaled: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Minimises the loss of noise variances `exp(b_c + slope_c)` plus s times the latent variances over b, s and ν.

    The priors of log s and log(ν - 3) weigh as much as one row.

    Args:
        slopes: `InputNoise.slope` of K shapes, (K, N, C).
        rows: rows with residuals and latent variances.
        parts: factors (K, N) of the sample weights: 0 for a row of the left-out fold.
        df: ν; `math.inf` for normal noise, and None to tune ν >= `LEAST_DF`.
        floor: the plain law's noise variance (C,), see `least_noise`.
        far: whether a row is far from the training rows, (N, 1); then `least_noise` bounds its noise.
        scaled: whether s is tuned; otherwise it is 1.

    Returns:
        b (K, C), s (K,), ν (K,), and `-Σ_c log p(r_nc)` over the known targets, (K, N).

    Cost: about 20 evaluations of K N C densities and their gradients.
    """
    squares, known = rows.known()
    weights, outputs, spreads = parts[:, :, None] * known, squares.shape[1], bool(rows.latent.any())
    total, of_output = weights.sum((1, 2)), weights.sum(1)
    ratio = (weights * squares).sum(1) / (weights * slopes.exp()).sum(1)  # (K, C)
    start = torch.where(of_output > 0, ratio.maximum(SMALLEST * floor), floor).log()

    def numbers(point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spread = point[:, outputs].clamp(-10.0, 10.0).exp() if scaled else torch.ones_like(point[:, 0])
        tuned = (LEAST_DF + (TYPICAL_DF - LEAST_DF) * point[:, -1].exp()).clamp_max(MOST_DF)
        return start + point[:, :outputs], spread, tuned if df is None else torch.full_like(tuned, df)

    def losses(point: Tensor) -> Tensor:
        offset, spread, tail = (number.reshape(len(point), 1, -1) for number in numbers(point))
        noise, wide = (offset + slopes).exp(), spread * rows.latent if spreads else None
        if wide is not None:
            noise = torch.where(far, noise.maximum(least_noise(floor, wide, spread, tail)), noise)
        return torch.where(known > 0, loss(squares, noise, df if df == math.inf else tail, wide), 0.0)

    def objective(place: Tensor) -> Tensor:
        point = place * steps
        prior = 0.25 * point[:, outputs].square() + 0.1 * point[:, -1].square()
        return (((weights * losses(point)).sum((1, 2)) + prior) / total).sum()

    steps = start.new_tensor([CURVATURES[0]] * outputs + [*CURVATURES[1:]]).rsqrt()
    point = descend(objective, start.new_zeros(len(slopes), outputs + 2), MOST_STEPS, LEAST_GAIN) * steps
    with torch.no_grad():
        return *numbers(point), losses(point).sum(2)


def loss(squares: Tensor, noise: Tensor, df: Tensor | float, latent: Tensor | None = None) -> Tensor:
    """Returns `-log p(r)` for r² of a normal f plus Student noise with the given variances, elementwise.

    The law of the sum is a Student t with the summed variance and `ν (noise + latent)/noise` degrees of freedom. Its KL
    divergence from the exact law is at most 0.003 nats for ν >= 3. `df = math.inf` is normal noise.
    """
    total = noise if latent is None else noise + latent
    if isinstance(df, float) and df == math.inf:
        return 0.5 * (math.log(2 * math.pi) + total.log() + squares / total)
    df = torch.as_tensor(df).to(total) if latent is None else (df * total / noise).clamp_max(NORMAL_DF)
    width = total * (df - 2)
    volume = torch.lgamma(df / 2) - torch.lgamma((df + 1) / 2) + 0.5 * (math.pi * width).log()
    return volume + (df + 1) / 2 * torch.log1p(squares / width)


def _different(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the order (N,) of rows (N, F) by their sums, and which of them differ from the one before (N,)."""
    order = rows.sum(1).argsort()
    steps = (rows[order].diff(dim=0).abs() > SAME_ROW * rows.abs().amax(0)).any(1)
    return order, torch.cat([steps.new_ones(1), steps])


def _quantile(values: Tensor, part: float, counts: Tensor) -> Tensor:
    """Returns the smallest of the values (N, C) with at least a part of the weight at or below it, (C,)."""
    ordered, order = values.sort(0)
    below = (counts[order].cumsum(0) < part * counts.sum()).sum(0)
    return ordered.gather(0, below.clamp_max(len(values) - 1)[None])[0]
