"""`lw.scale_factor`: one factor for the covariance of the outputs, by held-out data, the evidence, or another way."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from ..covariance import AnyLatent, has_positions, has_prior, is_selected
from ..data import batches
from ..data.data import Data
from ..errors import LapwingError, check_choice, is_one_of
from ..likelihoods import LaplaceBridge, Link, apply_weights
from ..likelihoods.targets import no_targets_error
from ..linalg import doubled
from ..network.entry import outside_modes
from ..options import at_least, check_argument
from ..posterior import Posterior
from ..posterior.evidence import effective_parameters
from ..posterior.latents import input_batches
from ..prediction import Linearized, Scaled, Way
from ..prediction.uncertain import prepared
from ..tangent.features import features_at
from .held_out_choice import RISING
from .search import golden_section, pull

MAX_LEVERAGE = 0.995
"""Maximum leverage of a training row that is left out: beyond it, rounding decides on `1/(1 - h)`."""

LEAST_FACTOR = 1e-12
"""Minimum of a factor to another way, for outputs that have a variance in one way only."""

log = logging.getLogger("lapwing")


@outside_modes
def scale_factor(
    posterior: Posterior,
    loader: Any,
    via: Way = Linearized(),  # noqa: B008 (frozen)
    *,
    to: Way | None = None,
    of: Callable[..., Tensor] | None = None,
    by: Literal["validation", "evidence"] = "validation",
    link: Link | None = None,
    decades: tuple[float, float] = (-6.0, 3.0),
    points: int = 37,
) -> Scaled:
    """Returns `lw.Scaled(via, s)` with the factor s of a way's covariance, `f(x) ~ N(m, s V)`, that data choose.

    With `to=`, s is chosen such that the mean variance equals the mean variance of the other way,
    `s = Σ_nc Var_to[f_c(x_n)] / Σ_nc V_ncc`, without targets. Training rows are left out of `Full` and of subspaces,
    which are surer of them than of new rows: `Var_to` is of a fit without row n. Outputs that are not logits have
    an s_c each:
    `lw.scale_factor(posterior, x, via=lw.Streamlined(), to=lw.Linearized())` with 64 inputs x. `Streamlined` also gets
    the correlation of the features before a last linear layer. Another posterior needs a factor of its own: fit again.

    With `of=`, s is for a quantity, such as forces of a network of energies: `of(f, x)` returns numbers (B, ...) as in
    `posterior.of`, and the loader has their true values y. `s = (q + Σ (y - m)²/v) / (q + n)`, for n numbers with means
    m and variances v, q in a row: the best s for single numbers, and a row at s = 1. Use it by `posterior.of(via=way)`.

    With `by="validation"`, `s = argmax Σ_n log ∫ p(y_n|f) N(f; m_n, s V_n) df` over held-out data. The sum counts one
    more term: for labels a quarter of a row with a uniform label, otherwise `-C/4 (log s)²`, which pulls s to 1. The
    noise is the noise of `posterior.predict`, also if it depends on the input or has tails. With `by="evidence"` it is
    normal with the variance `posterior.noise_variance`, and s maximises the lower bound of the evidence for
    `q_s = N(θ̂, s Σ)` over training data,

        N/n 1/τ Σ_n E[log p(y_n|f)] - KL(q_s ‖ N(μ0, Δ⁻¹)),   f ~ N(m_n, s V_n)
        KL = 1/2 [s tr(ΔΣ) + (θ̂-μ0)ᵀΔ(θ̂-μ0) - P - P log s - logdet(ΔΣ)]

    For Gaussian noise and `Linearized` this is `s = P / tr((G/τ + Δ) Σ)` with the exact curvature G: 1 for `Full`,
    `Diagonal` and `EKFAC`. So the bound corrects only approximations; validation also corrects for a wrong model. The
    noise variance stays.

    Args:
        posterior: posterior of the fit.
        loader: (inputs, targets) batches of held-out data; for the evidence, the training data or a random part, with
            weights if the fit had them; with `to=`, a batch of inputs; with `of=`, batches of inputs and values.
        via: way to scale.
        to: way whose variances s fits, such as `Linearized()`; None fits s to targets.
        of: function of the quantity; None fits s to the outputs.
        by: "validation" or "evidence".
        link: link from latents to predictions; None means the default link. For the evidence, the link computes
            expectations (`Likelihood.log_power_mean` at α = 0).
        decades: range of log10 s. If s is at an end of it, a warning is logged.
        points: number of grid points in this range, for a golden-section search around the best point.

    Raises:
        LapwingError: if the loader is empty, the link does not fit or ignores the factor (LaplaceBridge), or an option
            is out of range or has no effect; for the evidence also if the covariance has no prior or has directions of
            variance 0.

    Cost: one pass of the way over the loader; memory of its means and variances, and of features of the noise, or O(C²)
    per sample if the link reads covariances; then about 70 evaluations of the link or, for the evidence, of
    expectations. With `to=`, one prediction by either way, and for `Streamlined` about 50 forward passes of the inputs.

    Source: Li et al., Streamlining Prediction in Bayesian Deep Learning, section 4 (posterior approximations), without
    an equation there; the bound is the usual bound of variational inference (their section 2).

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(64, 4), torch.arange(64) % 3
        >>> posterior = lw.fit(torch.nn.Linear(4, 3).eval(), [(x[:32], y[:32])], lw.KFAC(), prior_precision=1.0)
        >>> way = lw.scale_factor(posterior, [(x[32:], y[32:])])
        >>> posterior.predict(x, via=way).probs.shape
        torch.Size([64, 3])
    """
    if (to is not None or of is not None) and isinstance(posterior, Posterior):
        both = of is not None and (to is not None or via != Linearized())
        if both or (by, link, decades, points) != ("validation", None, (-6.0, 3.0), 37):
            raise LapwingError(
                "lw.scale_factor has formulas for to= and of=: by=, link=, decades= and points= have no effect, and "
                "of= has neither via= nor to=. Write lw.scale_factor(posterior, x, via=lw.Streamlined(), "
                "to=lw.Linearized()), or lw.scale_factor(posterior, [(x, values)], of=function)."
            )
        if to is not None:
            return _as_wide(posterior, loader, via, to)
        return Scaled(via, _of_quantity(posterior, loader, of))
    weighted = isinstance(posterior, Posterior) and is_one_of(by, ("evidence",)) and posterior.method.sample_weights
    data = Data(
        loader, getattr(posterior, "model", None), sample_weights=weighted, columns=getattr(posterior, "columns", ())
    )
    loader = data.loader
    if not isinstance(posterior, Posterior) or not hasattr(loader, "__iter__") or isinstance(loader, Tensor):
        raise LapwingError(
            "lw.scale_factor needs a posterior and a loader of (inputs, targets) batches, not "
            f"{batches.describe(posterior)} and {batches.describe(loader)}. Write "
            "lw.scale_factor(posterior, [(x_val, y_val)])."
        )
    check_choice("lw.scale_factor", "by", by, ("validation", "evidence"))
    check_argument("lw.scale_factor", "decades", decades, RISING, "(-6.0, 3.0)")
    check_argument("lw.scale_factor", "points", points, at_least(3), "37")
    with torch.no_grad():
        score = _score_of(posterior, data, via, link, by == "evidence")
        exponent = golden_section(score, *decades, points)
        best = score(exponent)
        on_plateau = (end for end in decades if score(end) >= best - 1e-12 * abs(best))
        exponent = next(on_plateau, exponent)
    low, high = decades
    if exponent in decades:
        log.warning(
            "The scale factor of %r reached an end of its range, 1e%g: by the %s a %s covariance of the outputs would "
            "be better; decades=(%g, %g) searches further.",
            via, exponent, by, "narrower" if exponent == low else "wider", low - 3, high + 3,
        )  # fmt: skip
    return Scaled(via, 10**exponent)


def _of_quantity(posterior: Posterior, data: Any, function: Any) -> float:
    """Returns the factor of a quantity's variances by its held-out values; numbers without variance do not count."""
    tangent, squares, size = posterior.tangent, torch.zeros(0, dtype=torch.float64), 0
    for samples in Data(data, tangent.model, columns=posterior.columns):
        size = samples.targets[0].numel()
        length = max(1, tangent.memory // (64 * size * tangent.size))
        for rows, inputs in samples.to(tangent.device).inputs.chunks(length):
            found, values = posterior.of(function, iter([inputs.value])), samples.targets[rows]
            if found.mean.shape != values.shape:
                raise LapwingError(
                    f"The function of lw.scale_factor(of=...) returns numbers of shape {tuple(found.mean.shape)}, and "
                    f"the loader has values of shape {tuple(values.shape)}. Return one number for each value."
                )
            z = (values.to(found.mean) - found.mean) / found.std
            known = (found.std > 1e-6 * found.std.max()) & ~values.to(z).isnan()
            squares = torch.cat([squares, z[known].square().double().cpu()])
    if not len(squares):
        raise no_targets_error("held-out values")
    return float((squares.sum() + size) / (len(squares) + size))


def _as_wide(posterior: Posterior, x: Any, via: Way, to: Way) -> Scaled:
    """Returns a way, fitted to these inputs, times the factor that gives it the mean variance of another way."""

    def latent_by(way: Way) -> AnyLatent:
        latent = posterior.latent(x, way)
        return latent.rows if has_positions(latent) else latent

    wanted, tangent = doubled(_as_new(posterior, latent_by(to))), posterior.tangent  # (n, C)
    first = next(input_batches(x, tangent.model, posterior.columns))
    via = via.fitted(tangent, posterior.covariance, prepared(first, tangent.device).certain)
    found = doubled(latent_by(via).variance)
    if wanted.shape != found.shape:
        raise LapwingError(
            f"lw.scale_factor compares the variances of all outputs: to={to} has {tuple(wanted.shape)} of them, and "
            f"via={via} {tuple(found.shape)}. Leave outputs= out of the two ways. Write draws=64 for very many outputs."
        )
    units = posterior.likelihood.units(tangent.outputs).to(wanted.device)
    sums = (torch.zeros_like(wanted[0]).index_add(0, units, values.sum(0)) for values in (wanted, found))
    above, below = (values[units] for values in sums)
    factors = torch.where(below > 0, (above / below).clamp_min(LEAST_FACTOR), 1.0)  # 1 without any spread
    return Scaled(via, float(factors[0]) if not units.any() else tuple(factors.tolist()))


def _as_new(posterior: Posterior, latent: AnyLatent) -> Tensor:
    """Returns the variances (n, C) of rows as if the fit had not seen them: `V + s V R (I - s RᵀVR)⁻¹ RᵀV`, `Λ = RRᵀ`.

    A posterior with covariances between layers is surer of its training rows than of new ones, which a way without
    these covariances is not. Leverages are the eigenvalues of `s RᵀVR`. Over training rows their mean is h = d/(nC),
    for d effective parameters. It is about h/(1 - h) for new rows: rows below the geometric mean of both were seen.
    """
    covariance, whole = posterior.covariance, latent.mean.shape[1] == posterior.tangent.outputs
    if not has_prior(covariance) or not covariance.joins_layers or len(covariance.blocks) < 2:
        return latent.variance
    if latent.draws is not None or not whole:
        return latent.variance
    matrix, root = doubled(latent.covariance), doubled(posterior.likelihood.fisher_root(latent.mean))
    mean_weight = float(posterior.statistics["weight"]) / posterior.samples
    scale = posterior.scale.of_curvature * mean_weight  # s of a row
    through = matrix @ root  # V R (n, C, R)
    values, vectors = torch.linalg.eigh(scale * (root.mT @ through))
    seen = effective_parameters(covariance, posterior.prior) / (posterior.samples * values.shape[1])
    if not 0 < seen < 1 or values.mean() > seen / (1 - seen) ** 0.5:
        return latent.variance
    left_out = (through @ vectors).square() / (1 - values.clamp(0, MAX_LEVERAGE)).unsqueeze(1)
    return matrix.diagonal(dim1=1, dim2=2) + scale * left_out.sum(-1)


def _score_of(
    posterior: Posterior, loader: Iterable[Any], via: Way, link: Link | None, expected: bool
) -> Callable[[float], float]:
    """Returns a function of log10 s: the mean log likelihood, or the bound per sample plus a constant."""
    likelihood = posterior.likelihood
    trace, size = _divergence(posterior) if expected else (0.0, 0.0)
    kept, count = _latents(posterior, loader, via, link, expected)

    def score(exponent: float) -> float:
        factor, total = 10**exponent, 0.0
        rows = []  # pseudo-rows, for labels
        for latent, targets, features, weights in kept:
            scaled = latent.scaled(factor)
            if expected:  # draws, if there are any, are the same at every scale
                values = likelihood.log_power_mean(scaled.mean, scaled.covariance, targets, 0.0, link=link)
                values = apply_weights(values, weights)
            else:
                prediction = likelihood.predicted(scaled, link, None, features)
                values, uniform = prediction.log_prob(targets), prediction.pseudo_row(latent.mean)
                rows += [] if uniform is None else [uniform]
            total += float(values.sum())
        if not expected:
            total += float(torch.cat(rows).mean()) if rows else pull(exponent, posterior.tangent.outputs)
        return total / count - (factor * trace - size * math.log(factor)) / 2

    return score


def _latents(
    posterior: Posterior, loader: Iterable[Any], via: Way, link: Link | None, expected: bool
) -> tuple[list[tuple[Any, Tensor, Tensor | None, Tensor | None]], int]:
    """Returns latents, targets, features of the noise and sample weights of a loader, and its number of inputs.

    Expectations need all moments, with positions as rows; otherwise latents keep the moments that the link reads.
    """
    kept: list[tuple[Any, Tensor, Tensor | None, Tensor | None]] = []
    count, any_known = 0, False
    tangent, layer = posterior.tangent, None if expected else posterior.likelihood.features_read
    for samples in loader:
        samples = samples.to(tangent.device)
        targets, weights = samples.targets, samples.weights
        features = None if layer is None else features_at(tangent, layer, tangent.check(samples.inputs))
        latent: Any = posterior.latent(samples.inputs, via)
        count += len(latent.mean)
        rows = latent.rows if has_positions(latent) else latent
        if expected and has_positions(latent):
            weights = None if weights is None else weights.repeat_interleave(latent.places.count)
            latent, targets = rows, latent.places.targets(targets, rows.mean.shape[-1])
        if is_selected(latent):
            raise LapwingError(
                f"lw.scale_factor compares all outputs with the targets, and via={via} selects some. Choose the factor "
                "with via=lw.Linearized(), and use it in lw.Scaled with any way."
            )
        if expected:
            posterior.likelihood.check(latent.mean, targets)
        chosen: Any = None if expected else posterior.likelihood.choose_link(rows, link)
        if isinstance(chosen, LaplaceBridge):
            raise LapwingError(
                "The probabilities of link=LaplaceBridge() stay as they are when all variances are scaled, so no scale "
                "factor is best. Write link=lw.Probit()."
            )
        latent = latent.compact(expected or posterior.likelihood.reads_covariance(chosen))
        kept.append((latent, targets.to(latent.mean.device), features, weights))
        share = posterior.likelihood.known_share(targets, posterior.likelihood.labelled(targets))
        any_known = any_known or share is None or bool(share.any())
    if not any_known:
        raise no_targets_error("held-out targets")
    return kept, count


def _divergence(posterior: Posterior) -> tuple[float, float]:
    """Returns `tr(ΔΣ)` and P, both divided by N/τ; raises if `KL(N(θ̂, sΣ) ‖ prior)` is infinite."""
    covariance = posterior.covariance
    if covariance.precision is None or not covariance.full_rank:
        raise LapwingError(
            f"A posterior by {posterior.method} has no prior or has directions of variance 0, so its divergence "
            "from the prior is infinite. Write by='validation', or fit lw.KFAC() or a subspace with residual='prior'."
        )
    variances, deltas = covariance.diagonal(), posterior.prior.precision.tolist()
    named = zip(covariance.blocks, deltas, strict=True)
    trace = sum(delta * float(doubled(variances[block.name]).sum()) for block, delta in named)
    data = posterior.scale.effective_samples
    return trace / data, covariance.size / data
