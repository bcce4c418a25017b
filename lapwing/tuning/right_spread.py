"""The cost that a right spread has on the training data, which bounds the spread of `BoundedEvidence`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from ..data.inputs import Samples
from ..likelihoods import Likelihood
from ..methods import KFAC, Batch, DataSummary, FisherRoot, FitShape, Problem
from ..methods.prior import Prior
from ..posterior import Posterior
from .evidence import maximum
from .leave_one_out import trained, untreated
from .search import golden_section

log = logging.getLogger("lapwing")

MIN_COST = 0.005  # nats per training sample that the spread may cost in any case
KFAC_MULTIPLY_ADDS = 2**32  # maximum multiply-adds of the backward passes for KFAC of all weights: about a second
MOST_STEP = 10  # KFAC reads at least every tenth sample; if that takes longer, only the treated weights count
DECOMPOSED_MULTIPLY_ADDS = 2**39  # maximum multiply-adds of its decompositions, if all matrices had full rank


def cost_of_right_spread(posterior: Posterior, parts: Sequence[Samples], rows: Sequence[Mapping[str, Any]]) -> float:
    """Returns the bound b of `BoundedEvidence`, in nats per training sample, from a posterior at its evidence.

    `parts` are some training samples, and `rows` their outputs and targets, as from `spread_costs`.
    """
    likelihood, outputs = posterior.likelihood, posterior.tangent.outputs
    classifies = likelihood.classifies(outputs)
    whole: Posterior | None = None  # of logits: in another classifier a larger output does not mean less doubt
    if classifies and likelihood.activation is not None:
        whole = _of_all_weights(posterior, parts) if untreated(posterior.tangent) else posterior
    # 1. γ/N of each block (n_blocks,); N counts training samples, or positions that count, by their weights
    counted = posterior if whole is None else whole
    covariance = cast(Any, counted.covariance)
    samples = (float(counted.statistics["weight"]) or 1.0) * counted.data_factor / counted.temperature
    shares = covariance.effective_dimension(counted.prior.precision, counted.scale.of_curvature) / samples
    if not classifies:
        return max(MIN_COST, float(shares.sum()) / 2)
    # 2. The K outputs of a linear regression with noise variance 1 share γ/N, so each has the leverage h: a spread
    # J Σ Jᵀ of h, and a mean squared training residual of 1 - h. N(f, 1 + h) instead of N(f, 1) costs
    # log(1+h)/2 - (1-h)/2 (1 - 1/(1+h)).
    share = float((shares * shares.new_tensor(covariance.correlated)).sum())
    outputs -= likelihood.activation == "softmax"
    h = min(1.0, share / outputs)
    cost = outputs / 2 * (math.log1p(h) - h * (1 - h) / (1 + h))
    if whole is None:
        return max(MIN_COST, cost)
    # 3. p, what the network has paid for doubt already: larger logits would save it
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
