"""The cost that a right spread has on the training data, which bounds the spread of `BoundedEvidence`."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ..data.inputs import Samples
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


def cost_of_right_spread(posterior: Posterior, parts: Sequence[Samples]) -> float:
    """Returns the bound b of `BoundedEvidence`, in nats per training sample, from a posterior at its evidence."""
    likelihood, outputs = posterior.likelihood, posterior.tangent.outputs
    if not likelihood.classifies(outputs):
        return max(MIN_COST, float(_shares(posterior).sum()) / 2)
    whole: Posterior | None = posterior
    if likelihood.activation is None:  # a larger output does not mean less doubt
        whole = None
    elif untreated(posterior.tangent):
        whole = _of_all_weights(posterior, parts)
    counted = posterior if whole is None else whole
    shares, covariance = _shares(counted), cast(Any, counted.covariance)
    share = float((shares * shares.new_tensor(covariance.correlated)).sum())
    # The K outputs of a linear regression with noise variance 1 share γ/N, so each has the leverage h: a spread J Σ Jᵀ
    # of h, and a mean squared training residual of 1 - h. N(f, 1 + h) instead of N(f, 1) costs
    # log(1+h)/2 - (1-h)/2 (1 - 1/(1+h)).
    outputs -= likelihood.activation == "softmax"
    h = min(1.0, share / outputs)
    cost = outputs / 2 * (math.log1p(h) - h * (1 - h) / (1 + h))
    return max(MIN_COST, cost if whole is None else cost - _paid(posterior, parts))


def _shares(posterior: Posterior) -> Tensor:
    """Returns γ/N of each block (n_blocks,); N counts training samples, or positions that count, by their weights."""
    covariance: Any = posterior.covariance
    rows = (float(posterior.statistics["weight"]) or 1.0) * posterior.data_factor / posterior.temperature
    return covariance.effective_dimension(posterior.prior.precision, posterior.scale.of_curvature) / rows


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
        return whole.at(*maximum(whole, per_layer=False))
    except Exception as error:  # from layers that the fit does not treat
        log.info("The trained weights that %s leaves out do not count: %s", posterior.method, error)
        return None


def _paid(posterior: Posterior, parts: Sequence[Samples]) -> float:
    """Returns the nats per training sample that larger logits would save: the network has paid these for its doubt."""
    likelihood = posterior.likelihood.plain
    rows = [Batch.of(posterior.tangent, one, likelihood.labelled(one.targets)).rows() for one in parts]

    def fit(log10: float) -> float:
        summary = DataSummary()
        for one in rows:
            summary.add(likelihood, **{**one, "outputs": one["outputs"] * 10**log10})
        return float(summary.statistics["log_likelihood"]) / (float(summary.statistics["weight"]) or 1.0)

    return fit(golden_section(fit, 0.0, 1.0, 11)) - fit(0.0)
