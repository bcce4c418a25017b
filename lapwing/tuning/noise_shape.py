"""Noise that depends on the input, and its tails: fitted to residuals, and kept only if left-out residuals gain by it.

`shapes` finds from training residuals how the log variance varies. `level` fits its offset, the factor of the latent
covariance and the degrees of freedom. `chosen` compares them with the plain law: one normal noise variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..likelihoods.input_noise import InputNoise, least_noise, standardised
from ..linalg import doubled, orthonormal_rows, symmetric_eigen
from .search import descend

RIDGES = 0.1, 1.0, 10.0, 100.0, 1000.0
"""Candidates for λ, the precision of w in units of the loss of one row."""
SHAPE_ROWS, SHAPE_ENTRIES, CHOICE_ROWS = 20_000, 2**24, 2_000
"""Maximum number of training rows, of their features, and of held-out rows times outputs that choose."""
MOST_DIRECTIONS, PRINCIPAL_ROWS = 256, 1_024
"""Maximum number of principal components that w combines, and of rows that define them if there are more features."""
CONSTANT, SMALLEST = 1e-6, 1e-10
"""Standard deviation of a constant feature, over its largest value; least squared residual, over the mean one."""
PART_BEYOND = 0.01
"""Fraction of the training rows beyond each end of the range of wᵀz, and of those that count as far from the others."""
SHAPE_DF, LEAST_DF, TYPICAL_DF, MOST_DF, NORMAL_DF = 5.0, 3.0, 7.0, 100.0, 1e6
"""ν of the density that finds w; least, most probable and largest tuned ν; largest ν of a sum of noise and f."""
FOLDS_HELD_OUT, LEAST_HELD_OUT, FEW_HELD_OUT, FEW_ERRORS = 5, 30, 200, 1.5
FOLDS_TRAINING, LEAST_TRAINING, FEW_TRAINING = 3, 200, 1500
"""Folds; least rows for another law than the plain one; least gain in standard errors with fewer than FEW rows."""
LEAST_GAIN, MOST_STEPS, LARGEST_LOG = 1e-6, 60, 60.0
"""Least gain of a step of `_minimise`, maximum number of steps; largest |log σ²| on the way, over the mean r²."""
CURVATURES = 0.5, 0.25, 0.05
"""Typical second derivatives of the mean loss of a row by b, log s and log(ν - 3), where the search for them starts."""


class ResidualRows(NamedTuple):
    """Rows whose residuals are known.

    Attributes:
        features: φ, (N, F).
        residuals: y - f, (N, C); NaN for a missing target.
        weights: sample weights (N,), which count as repeated rows; None for ones.
        latent: variances of f (N, C) for held-out rows, at the plain law's prior precision and noise.
        losses: `-log p(y)` (N,) of held-out rows by the plain law, which may have been tuned on them.
    """

    features: Tensor
    residuals: Tensor
    weights: Tensor | None = None
    latent: Tensor | None = None
    losses: Tensor | None = None

    def taken(self, index: Tensor) -> ResidualRows:
        return ResidualRows(*(part if part is None else part[index.to(part.device)] for part in self))  # type: ignore[arg-type]

    def order(self) -> Tensor:
        """Returns a random order of the rows, (N,), the same at every call."""
        return torch.randperm(len(self.features), generator=torch.Generator().manual_seed(0))

    def at_most(self, count: int) -> ResidualRows:
        return self.taken(self.order()[:count]) if count < len(self.features) else self

    def counts(self) -> Tensor:
        return doubled(torch.ones_like(self.features[:, 0]) if self.weights is None else self.weights)

    def known(self) -> tuple[Tensor, Tensor]:
        """Returns r² (N, C) and the weights (N, C), both 0 for a missing target, in float64."""
        known = ~self.residuals.isnan()
        return torch.where(known, doubled(self.residuals), 0.0).square(), known * self.counts()[:, None]


def chosen(
    train: ResidualRows, floor: Tensor, held_out: ResidualRows | None = None,
    noise: str | None = None, df: float | None = None, normal: bool = True, scaled: bool = True,
) -> InputNoise | None:  # fmt: skip
    """Returns the noise that predicts left-out folds of residuals best, or None for the plain law.

    With held-out rows, shapes of the training residuals get a `level` by four fifths of these rows. Otherwise two
    thirds of the training rows determine shape and level, and the mean of σ²(x) over all of them is `floor`.
    The best law must gain more than one standard error of the paired difference to the plain law, or more if rows are
    few. The factor s of the latent covariance is tuned for the best law only.

    Args:
        train: training rows.
        floor: the plain law's noise variance of each output, (C,), float64.
        held_out: held-out rows with latent variances and the plain law's losses, or None.
        noise: "constant", "input", or None if the data decide.
        df: ν, see `level`. A tuned ν of `MOST_DF` becomes infinite.
        normal: whether the plain law is an answer, unless `noise` is "input".
        scaled: whether the latent variances may get a factor.

    Cost: 5 shapes and 31 levels of at most `CHOICE_ROWS` held-out rows, or 20 shapes and 18 levels of training rows.
    """
    # 1. the rows that choose, and which laws are candidates
    rows, count, least, few = train, FOLDS_TRAINING, LEAST_TRAINING, FEW_TRAINING
    some = rows.at_most(max(SHAPE_ROWS // len(floor), few))
    if held_out is not None:
        rows, count, least, few = held_out, FOLDS_HELD_OUT, LEAST_HELD_OUT, FEW_HELD_OUT
        some = rows.at_most(max(CHOICE_ROWS // len(floor), few))
    informative = int((some.known()[1] > 0).any(1).sum())
    may_stay = normal and noise != "input"
    if informative < least and may_stay:
        return None
    kind = "constant" if noise is None and informative < least else noise

    def candidates(residuals: ResidualRows) -> list[InputNoise]:
        found = shapes(residuals, floor)
        constant = replace(found[0], **{name: 0 * getattr(found[0], name) for name in ("weights", "low", "high")})
        return [constant] if kind == "constant" else found if kind == "input" else [constant, *found]

    # 2. shapes for each fold, and for all rows
    fold = some.order() % count
    used = (fold != torch.arange(count)[:, None]).to(floor)  # (folds, N)
    plain: Tensor | None = some.losses
    if held_out is None:
        final = candidates(rows)
        slopes = [_slopes(candidates(some.taken((fold != k).nonzero()[:, 0])), some) for k in range(count)]
        squares, weights = some.known()
        variances = (used @ (weights * squares)) / (used @ weights)  # (folds, C)
        plain = (loss(squares, variances.maximum(SMALLEST * floor)[fold], math.inf) * (weights > 0)).sum(1)
    else:
        final = candidates(train)
        slopes = [_slopes(final, some)] * count
    # 3. losses (laws, N) of the left-out rows, and the best law
    far = final[0].is_far(some.features)
    left_out = level(torch.cat(slopes), some, used.repeat_interleave(len(final), 0), df, floor, far, False)[-1]
    losses = left_out.unflatten(0, (count, -1))[fold, :, torch.arange(len(fold))].T
    errors = FEW_ERRORS if informative < few else 1.0
    best = _surest(losses, some.counts(), plain if may_stay else None, kind != "input", errors)
    if best is None:
        return None
    # 4. its level by all rows
    shape, ones = final[best], torch.ones_like(rows.counts())[None]
    slope, far = _slopes([shape], rows), shape.is_far(rows.features)
    offset, spread, tail, _ = level(slope, rows, ones, df, floor, far, scaled)
    if held_out is None:
        offset = (floor / (rows.counts() / rows.counts().sum() @ slope.exp())).log()
    return replace(shape, offset=offset[0], spread=spread[0], df=tail[0] if tail < MOST_DF else tail[0] + math.inf)


def _surest(losses: Tensor, counts: Tensor, plain: Tensor | None, has_constant: bool, errors: float) -> int | None:
    """Returns the law with the least mean of its losses (laws, N), if it gains some paired standard errors.

    `plain` holds the plain law's losses (N,); None as the answer is the plain law. If `plain` is None, the reference
    is the first law if its variance is constant. Otherwise the best law needs no gain.
    """
    mass = counts / counts.sum()
    best = int((losses @ mass).argmin())
    if plain is None and not has_constant:
        return best
    gains = (losses[0] if plain is None else doubled(plain)) - losses[best]
    error = (mass @ (gains - mass @ gains).square() * mass.square().sum()).sqrt()
    if float(mass @ gains) > errors * float(error):
        return best
    return 0 if plain is None else None


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
    features, (squares, weights) = doubled(rows.features), rows.known()
    mass = rows.counts() / rows.counts().sum()
    centre = mass @ features
    deviation = (mass @ (features - centre).square()).sqrt()
    scale = torch.where(deviation > CONSTANT * features.abs().amax(0), 1 / deviation, 0.0)
    z = standardised(features, centre, scale)
    # 2. principal components z U (N, F') and their variances (F',)
    many = z.shape[1] > MOST_DIRECTIONS
    basis = (
        orthonormal_rows(z[:PRINCIPAL_ROWS], MOST_DIRECTIONS, whole=False).T if many else torch.eye(z.shape[1]).to(z)
    )
    components = z @ basis
    variances, vectors = symmetric_eigen(components.T * mass @ components)
    basis, components = basis @ vectors, components @ vectors
    # 3. for each output all λ at once: w = U P p, with P^-2 the curvature at constant noise
    precisions = z.new_tensor(ridges)

    def fitted(square: Tensor, weight: Tensor, least: Tensor) -> Tensor:
        total = weight.sum().clamp_min(SMALLEST)
        mean = (weight @ square / total).maximum(least)
        unit, scales = (square / mean).clamp_min(SMALLEST), (0.5 * variances + 2 * precisions[:, None] / total).rsqrt()

        def objective(point: Tensor) -> Tensor:
            w = point[:, :-1] * scales  # (K, F')
            noise = (w @ components.T + point[:, -1:]).clamp(-LARGEST_LOG, LARGEST_LOG).exp()
            return (loss(unit, noise, df) @ weight + precisions * w.square().sum(1)) / total

        point = _minimise(objective, z.new_zeros(len(precisions), len(variances) + 1), z.new_ones(len(variances) + 1))
        return torch.cat([(point[:, :-1] * scales) @ basis.T, point[:, -1:] + mean.log()], 1)

    solutions = [fitted(*one) for one in zip(squares.T, weights.T, SMALLEST * floor, strict=True)]
    # 4. the range of wᵀz and the distances of the rows
    noises, one, whitening = [], torch.ones_like(floor[0]), basis * (variances + 2 / rows.counts().sum()).rsqrt()
    reach = _quantile((z @ whitening).square().sum(1, keepdim=True), 1 - PART_BEYOND, mass)[0]
    for w, b in ((solution[:, :-1], solution[:, -1]) for solution in torch.stack(solutions, 1)):  # (C, F), (C,)
        low, high = (_quantile(z @ w.T, part, mass) for part in (PART_BEYOND, 1 - PART_BEYOND))
        noises.append(InputNoise(centre, scale, w, low, high, b, floor, whitening, reach, one, one * df))
    return noises


def level(
    slopes: Tensor, rows: ResidualRows, parts: Tensor, df: float | None, floor: Tensor, far: Tensor, scaled: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Minimises the loss of noise variances `exp(b_c + slope_c)` plus s times the latent variances over b, s and ν.

    The priors of log s and log(ν - 3) weigh as much as one row. Without latent variances s is 1.

    Args:
        slopes: `InputNoise.slope` of K shapes, (K, N, C).
        rows: rows with residuals and, if held out, latent variances.
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
    weights, latent, outputs = parts[:, :, None] * known, rows.latent, squares.shape[1]
    total, of_output = weights.sum((1, 2)), weights.sum(1)
    ratio = (weights * squares).sum(1) / (weights * slopes.exp()).sum(1)  # (K, C)
    start = torch.where(of_output > 0, ratio.maximum(SMALLEST * floor), floor).log()

    def numbers(point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spread = (
            torch.ones_like(point[:, 0]) if latent is None or not scaled else point[:, outputs].clamp(-10.0, 10.0).exp()
        )
        tuned = (LEAST_DF + (TYPICAL_DF - LEAST_DF) * point[:, -1].exp()).clamp_max(MOST_DF)
        return start + point[:, :outputs], spread, tuned if df is None else torch.full_like(tuned, df)

    def losses(point: Tensor) -> Tensor:
        offset, spread, tail = (number.reshape(len(point), 1, -1) for number in numbers(point))
        noise, wide = (offset + slopes).exp(), None if latent is None else spread * doubled(latent)
        if wide is not None:
            noise = torch.where(far, noise.maximum(least_noise(floor, wide, spread, tail)), noise)
        return torch.where(known > 0, loss(squares, noise, df if df == math.inf else tail, wide), 0.0)

    def objective(point: Tensor) -> Tensor:
        prior = 0.25 * point[:, outputs].square() + 0.1 * point[:, -1].square()
        return ((weights * losses(point)).sum((1, 2)) + prior) / total

    curvatures = start.new_tensor([CURVATURES[0]] * outputs + [*CURVATURES[1:]])
    point = _minimise(objective, start.new_zeros(len(slopes), outputs + 2), curvatures)
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


def _slopes(noises: Sequence[InputNoise], rows: ResidualRows) -> Tensor:
    return torch.stack([noise.slope(rows.features) for noise in noises])


def _quantile(values: Tensor, part: float, counts: Tensor) -> Tensor:
    """Returns the smallest of the values (N, C) with at least a part of the weight at or below it, (C,)."""
    ordered, order = values.sort(0)
    below = (counts[order].cumsum(0) < part * counts.sum()).sum(0)
    return ordered.gather(0, below.clamp_max(len(values) - 1)[None])[0]


def _minimise(function: Callable[[Tensor], Tensor], start: Tensor, curvatures: Tensor) -> Tensor:
    """Returns minimisers (K, p) of K functions, (K, p) -> (K,), whose Hessians are about diag(curvatures (p,))."""
    scale = curvatures.rsqrt()
    return descend(lambda point: function(point * scale).sum(), start / scale, MOST_STEPS, LEAST_GAIN) * scale
