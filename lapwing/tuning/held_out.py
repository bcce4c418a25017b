"""Scores of many candidates on held-out data, from one record of each batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..covariance import Latent, has_positions, has_prior, without_spread
from ..covariance.terms import MarginalTerm
from ..data.inputs import Samples
from ..data.progress import tracked
from ..errors import LapwingError
from ..jacobian.jacobian import Reads
from ..likelihoods import Likelihood, apply_weights, curvature_weights
from ..likelihoods.base import MOST_RAISED
from ..likelihoods.gaussian import ROUNDING
from ..likelihoods.targets import no_targets_error
from ..linalg import doubled
from ..methods.passes import Batch
from ..methods.temperature_scaling import refined
from ..network.positions import EXACT_OUTPUTS
from ..posterior import Posterior
from ..posterior.latents import latent_of_batch
from ..prediction import Way
from ..prediction.aim import DEFAULT_AIM, Aim
from ..tangent import EVERY_OUTPUT, RandomCotangents, Reading, Record, Tangent
from .search import evenly

SOME_POSITIONS = 16  # number of positions of an input that are scored if each needs its own backward passes
WIDTH_OUTPUTS = 200  # of an input with more outputs, over all positions, a mean variance uses some positions
HEADS = evenly(-2.0, 2.0, 41)  # candidates for log10 of T of a head, or of its σ² over the σ² in the curvature
PROBES = 4  # random combinations of C outputs, if an input has more than 1 000 outputs that need a backward pass each

Candidates = Callable[[Posterior], list[Posterior]]
"""Returns the candidates around a posterior, which differ only in prior and noise."""

Place = tuple[int, int]  # the index of a posterior, and of a candidate around it
Rows = dict[Place, list[Tensor]]  # the scores (K, N_part) of a candidate, batch by batch


def sample_scores(
    posteriors: Sequence[Posterior], candidates: Candidates, loader: Iterable[Any], temperatures: Sequence[float] = (),
    aim: Aim = DEFAULT_AIM, noises: Sequence[float] = (),
) -> Tensor:  # fmt: skip
    """Returns the log likelihood of each held-out sample that counts, (posteriors, candidates, K, N).

    Samples are as in `candidate_latents`, and labels have the pseudo-row of `_ScoreTable`. K is the number of
    `temperatures`, values of log10 T, or of `noises`, values of σ² at the same covariance; () uses only the candidate's
    own.
    """
    table, batches = _ScoreTable(aim, noises), tracked(loader, "held-out data")
    reads: Reads | None = None
    if aim.link is not None:
        reads = "covariances" if posteriors[0].likelihood.reads_covariance(aim.link) else "variances"
    if aim.other_way is not None:
        found: Iterator[Any] = _by_way(posteriors, candidates, batches, aim.other_way)
    else:
        found = candidate_latents(posteriors, candidates, batches, reads, max(1, len(temperatures)))
    for place, candidate, latent, labels, _ in found:
        latents = [latent.tempered(10**exponent) for exponent in temperatures] or [latent]
        table.add(place, candidate.likelihood, latent.mean, latents, labels)
    scores = table.scores()
    if not table.known:
        raise no_targets_error("held-out targets")
    return scores.unflatten(0, (len(posteriors), -1))


def head_scores(
    posteriors: Sequence[Posterior], candidates: Candidates, loader: Iterable[Any], tempered: bool
) -> tuple[Tensor, list[Likelihood]]:
    """Returns `sample_scores` of a `lw.Joint` at the best σ² and `T >= 1` of each head, and its best likelihoods.

    There is a likelihood for each posterior and candidate, with the best σ² and T of all. These do not change the
    covariance, so they are independent. `tempered` tells whether T is open.
    """
    joint: Any = posteriors[0].likelihood
    tables = {key: _ScoreTable(every=True) for key in joint.keys}
    for place, _, latent, labels, _ in candidate_latents(
        posteriors, candidates, tracked(loader, "held-out data"), latents_in_memory=len(HEADS)
    ):
        targets = joint.by_key(labels, latent.mean.shape[-1])
        for key, head in joint.likelihoods.items():
            part, noise = joint.part(latent, key), joint.estimated.get(key)
            parts = [part]
            if noise is not None:  # the smallest σ² in the likelihood, and the rest in the latents
                head, ratios = head.with_noise_variance(noise * 10 ** HEADS[0]), head.ratios(part.covariance)
                parts = [part.widened((noise * 10**k - head.noise_variance) * ratios) for k in HEADS]
            elif tempered and head.logit_temperature == 1:
                parts = [part.tempered(10**k) for k in HEADS]
            tables[key].add(place, head, part.mean, parts, targets[key])
    profile: Any = 0.0
    any_known = any(table.known for table in tables.values())
    best = [joint.head_numbers for _ in tables[joint.keys[0]].scores()]
    for key, table in tables.items():
        scores, noise = table.scores(), joint.estimated.get(key)
        if not any_known or (not table.known and len(scores[0]) > 1):
            raise no_targets_error(f"held-out targets {key!r}")
        means = scores.mean(-1, dtype=torch.float64)  # (posteriors * candidates, K)
        low = HEADS.index(0.0) if noise is None and len(means[0]) > 1 else 0  # T >= 1
        profile = profile + scores[torch.arange(len(scores)), low + means[:, low:].argmax(-1)]
        for numbers, line in zip(best, means.tolist(), strict=True) if len(means[0]) > 1 else ():
            factor = 10 ** refined(HEADS, line, line.index(max(line)))
            numbers[key] = (None, factor, None) if noise is None else (noise * factor, None, noise)
    scores = profile.unflatten(0, (len(posteriors), -1)).unsqueeze(2)
    return scores, [joint.with_head_numbers(numbers) for numbers in best]


class _ScoreTable:
    """Log likelihoods of held-out samples under candidates.

    For labels they count a pseudo-row with a uniform label (`PSEUDO_WEIGHT`), which is label smoothing.
    """

    def __init__(self, aim: Aim = DEFAULT_AIM, noises: Sequence[float] = (), every: bool = False) -> None:
        self._aim, self._noises, self._every = aim, noises, every  # `every` keeps samples that do not count
        self._rows: Rows = {}
        self._raised: dict[Place, float] = {}  # sums of `Likelihood.raised`
        self._uniform: dict[Place, Tensor] = {}  # (K, 2): sums of log p of a uniform label, and their number
        self.known = False  # whether a target counts

    def add(
        self, place: Place, likelihood: Likelihood, outputs: Tensor, latents: Sequence[Any], labels: Tensor
    ) -> None:
        """Adds a batch of a candidate, with outputs (B, C), and one of K latents for each temperature or noise."""
        link, many = self._aim.link, 1
        if self._aim == DEFAULT_AIM:  # one prediction of all latents; one latent is not copied
            link, many = likelihood.tuning_link, len(latents)
            latents = [Latent.concatenate(latents) if many > 1 else latents[0]]
        counted = likelihood.labelled(labels)
        share = likelihood.known_share(labels, counted)
        self.known = self.known or share is None or bool(share.any())
        rows = slice(None) if counted is None else counted
        outputs, labels = outputs.repeat(many, 1), labels.repeat(many, *[1] * (labels.ndim - 1))
        likelihoods = [likelihood.with_noise_variance(noise) for noise in self._noises] or [likelihood]
        predictions = [one.predict(latent, link) for one in likelihoods for latent in latents]
        raised = likelihood.raised(predictions[0]) if likelihood.activation is None else None  # labels show it
        if raised is not None:
            self._raised[place] = self._raised.get(place, 0.0) + float(raised.sum())
        scores = torch.cat([one.log_prob(labels).unflatten(0, (many, -1)) for one in predictions])
        uniform: Any = [one.pseudo_row(outputs) for one in predictions]
        if uniform[0] is not None:
            each = doubled(torch.cat(uniform).unflatten(0, (len(scores), -1))[:, rows]).cpu()  # (K, n)
            self._uniform[place] = self._uniform.get(place, 0.0) + torch.stack([each, torch.ones_like(each)], 1).sum(2)
        self._rows.setdefault(place, []).append((scores if self._every else scores[:, rows]).cpu())

    def scores(self) -> Tensor:
        """Returns the scores of all held-out samples (candidates, K, N); raises without samples."""
        scores = _concatenated(self._rows)
        if self._uniform:  # an equal part for each sample, so that paired differences keep their standard errors
            sums, numbers = torch.stack([sums for _, sums in sorted(self._uniform.items())]).unbind(2)
            scores += (sums / numbers.clamp_min(1) / scores.shape[-1]).to(scores)[..., None]
        for at, (place, total) in enumerate(sorted(self._raised.items())):
            least = min(self._raised[other] for other in self._raised if other[0] == place[0])
            if not total - least <= MOST_RAISED * least:
                scores[at] = -torch.inf
        return scores


def _concatenated(rows: Rows) -> Tensor:
    """Returns the scores of all held-out samples (candidates, K, N) from parts (K, N_part); raises without samples."""
    if not rows:
        raise no_batch_error()
    return torch.stack([torch.cat(parts, 1) for _, parts in sorted(rows.items())])


def spread_costs(
    posteriors: Sequence[Posterior], loader: Iterable[Any]
) -> tuple[list[float], list[dict[str, Tensor | None]]]:
    """Returns the costs of the spread of posteriors that differ only in their prior, in nats, and the rows it read.

    A cost is the mean of `log p(y_n|f_n) - log p(y_n|N(f_n, V_n))` over samples as in `candidate_latents` that count,
    by their weights. It is negative if the spread helps, and infinite if it changes the sum of `Likelihood.raised` by
    more than `Likelihood.most_raised`. Rows are arguments of `DataSummary.add`, for each record.
    """
    totals, rise = torch.zeros(2, len(posteriors), dtype=torch.float64)
    count = least = 0.0
    rows: list[dict[str, Tensor | None]] = []
    before: Any = None  # what `raised` returns without a spread
    latents = candidate_latents(posteriors[:1], lambda _: list(posteriors), loader)
    for (_, i), posterior, latent, labels, weights in latents:
        likelihood = posterior.likelihood
        if i == 0:  # a new record
            counted = likelihood.labelled(labels)
            rows.append({"outputs": latent.mean, "targets": labels, "weights": weights, "counted": counted})
            share = likelihood.known_share(labels, counted)
            plain = likelihood.predict(without_spread(latent.mean), likelihood.tuning_link)
            certain, before = plain.log_prob(labels), likelihood.raised(plain)
            every = torch.ones_like(certain) if weights is None else weights.to(certain)
            counting = every if share is None else every * share.to(every)
            count += float(counting.sum())
            least += 0.0 if before is None else float(apply_weights(before, counting).sum())
        prediction = likelihood.predict(latent, likelihood.tuning_link)
        totals[i] += float(apply_weights(doubled(certain) - doubled(prediction.log_prob(labels)), every).sum())
        if before is not None:
            rise[i] += float(apply_weights(likelihood.raised(prediction) - before, counting).sum())
    costs = totals / max(count, torch.finfo(totals.dtype).tiny)
    if before is not None:
        costs[rise.abs() > posteriors[0].likelihood.most_raised(least, count)] = torch.inf
    return costs.tolist(), rows


def width_scores(
    posteriors: Sequence[Posterior], candidates: Candidates, loader: Iterable[Any]
) -> tuple[Tensor, Tensor]:
    """Returns held-out log likelihoods (posteriors, candidates, N) at the best factor c of y's covariance, and log10 c.

    The mean of `log N(y; f, c S)` is highest at `c = mean rᵀS⁻¹r / C`, `r = y - f`, over the C known targets. Residuals
    are at least the rounding error of the targets, as in `Gaussian.residual_variance`. Computed in float64.
    """
    rows: Rows = {}
    batches_read = tracked(loader, "held-out data")
    for place, candidate, latent, labels, _ in candidate_latents(posteriors, candidates, batches_read):
        latent = latent.compact(covariances=latent.mean.shape[1] > 1)
        # 1. log N(y; f, S) at y = f, and rᵀS⁻¹r = 2 (that - log N(y; f, S)), (B,)
        prediction, labels = candidate.likelihood.predict(latent), labels.to(latent.mean.device)
        holes = labels.reshape(latent.mean.shape).isnan()  # missing targets, if the likelihood allows them
        volume = prediction.log_prob(torch.where(holes, torch.nan, latent.mean))  # at r = 0
        squares = 2 * (volume - prediction.log_prob(labels))
        sizes = doubled(labels).nan_to_num().reshape(latent.mean.shape).square().sum(-1)
        rows.setdefault(place, []).append(torch.stack([volume, squares, (~holes).sum(-1), sizes]).cpu())
    # 2. of all samples, with the number k of known targets and |y|²
    table = _concatenated(rows).unflatten(0, (len(posteriors), -1))
    volume, squares, counts, sizes = table.unbind(2)  # (posteriors, candidates, N)
    known = counts.sum(-1, keepdim=True)
    # 3. the rounding error of a target, over |S|^(1/k) from log N = -(k log 2π + log|S|)/2: at least this rᵀS⁻¹r/k
    rounding = ROUNDING * sizes.sum(-1, keepdim=True) / known
    rounding = torch.where(rounding > 0, rounding, ROUNDING)
    least = 2 * math.pi * (2 * volume / counts.clamp_min(1)).exp() * rounding  # over the geometric mean variance
    # 4. c = Σ rᵀS⁻¹r / Σ k, and log N(y; f, c S) = log N(y = f; f, S) - (rᵀS⁻¹r/c + k log c)/2
    factor = squares.maximum(counts * least).sum(-1, keepdim=True) / known
    return volume - (squares / factor + counts * factor.log()) / 2, factor.squeeze(-1).log10()


def candidate_latents(
    posteriors: Sequence[Posterior],
    candidates: Candidates,
    loader: Iterable[Any],
    reads: Reads | None = None,
    latents_in_memory: int = 1,
) -> Iterator[tuple[Place, Posterior, Latent, Tensor, Tensor | None]]:
    """Yields, batch by batch, the place of each candidate, the candidate, its latent, and the labels and weights.

    Samples are as in `tangent_of_samples`. `reads` is None if the default link reads the latents.
    """
    first = posteriors[0]
    tangent = tangent_of_samples(first)
    reads = reads or first.likelihood.reads(tangent.outputs)
    # 1. groups of candidates whose covariances share one contraction of J, by the index of a first posterior
    groups: dict[int, dict[Place, Posterior]] = {}
    for i, posterior in enumerate(posteriors):
        covariance: Any = posterior.covariance
        group = next((j for j in groups if covariance.shares_contraction_with(posteriors[j].covariance)), i)
        groups.setdefault(group, {}).update({(i, j): one for j, one in enumerate(candidates(posterior))})
    # 2. number of entries per sample that the latents of all candidates need, temporary ones included
    every = [one for members in groups.values() for one in members.values()]
    widest, outputs = max(block.matrix_shape[1] for block in tangent.blocks), tangent.outputs
    each = widest + (outputs**2 if reads == "covariances" else 2 * outputs)
    kept = 4 * latents_in_memory * (outputs**2 if reads == "covariances" else outputs)
    scratch = outputs * max(one.covariance.scratch_per_row for one in every) + len(every) * each + kept
    # 3. the cotangents: few random ones if each output needed a backward pass and only a mean variance is read
    few = tangent.width <= EXACT_OUTPUTS or tangent.outputs <= PROBES or tangent.treats_output_alone
    probed = reads == "scale" and not few and has_prior(first.covariance)
    cotangents = RandomCotangents(tangent.outputs, PROBES) if probed else EVERY_OUTPUT
    variances_only = reads != "covariances" and tangent.treats_output_alone and first.covariance.keeps_outputs
    # 4. the latents of each record
    with torch.no_grad():
        for batch in loader:
            samples = Batch.of(tangent, Samples.of(batch).to(tangent.device))
            counted = first.likelihood.labelled(samples.targets) if tangent.positions.several else None
            chosen = None if counted is None else counted.flatten(1).any(0)
            reading = Reading(scratch, None, SOME_POSITIONS, chosen, variances_only)
            for part, record in tangent.records(samples.inputs, cotangents, first.covariance.record_dtype, reading):
                _, labels, weights = samples.targets_of_rows(record.sizes)
                labels, weights = labels[part], None if weights is None else weights[part]
                first.likelihood.check(record.outputs, labels)
                labels = labels.to(record.device)
                for members in groups.values():
                    latents = _latents(record, list(members.values()), reads, probed)
                    for (place, candidate), latent in zip(members.items(), latents, strict=True):
                        yield place, candidate, latent, labels, weights


@torch.no_grad()
def _by_way(
    posteriors: Sequence[Posterior], candidates: Candidates, loader: Iterable[Any], via: Way
) -> Iterator[tuple[Place, Posterior, Any, Tensor, None]]:
    """Yields as `candidate_latents`, with latents by another way: one prediction for each candidate.

    Each position is a sample. Draws of two candidates have the same random numbers, because each way has a seed. They
    are float64, in which densities at very wide draws do not lose all digits. Draws that are not finite have a score of
    NaN.
    """
    for batch in loader:
        samples = Samples.of(batch).to(posteriors[0].tangent.device)
        for i, posterior in enumerate(posteriors):
            for j, one in enumerate(candidates(posterior)):
                latent: Any = latent_of_batch(one.tangent, one.covariance, samples.inputs, via, False)
                rows = latent.rows if has_positions(latent) else latent
                labels = samples.targets
                labels = latent.places.targets(labels, rows.mean.shape[-1]) if has_positions(latent) else labels
                rows = rows if rows.draws is None else rows.compact(False)
                yield (i, j), one, rows, labels.to(rows.mean.device), None


def tangent_of_samples(posterior: Posterior) -> Tangent:
    """Returns the tangent of a posterior, for which each position of outputs with positions is a sample.

    If a regression has at most `WIDTH_OUTPUTS` outputs, all positions of an input are one sample, so that outputs
    (B, T, C) have the scores of outputs (B, T C); except with noise ratios that the user gave for C outputs.
    """
    tangent = posterior.tangent
    ratios = getattr(posterior.likelihood, "noise_ratios", ())
    joins = ratios is None or len(ratios) == tangent.width  # only a Gaussian likelihood has ratios
    few = tangent.positions.several and tangent.width <= WIDTH_OUTPUTS
    return tangent.with_flattened_positions() if few and joins else tangent


def no_batch_error() -> LapwingError:
    """Returns the error for held-out data without a sample."""
    return LapwingError(
        "The loader of validation data shows no batch. Write lw.Validation([(x_val, y_val)]), with held-out batches in "
        "a loader that can be read twice."
    )


def means_over_samples(
    posteriors: Sequence[Posterior],
    parts: Iterable[Samples],
    function: Callable[[Posterior, Tensor], Tensor] = lambda _, variance: variance,
) -> list[float]:
    """Returns the weighted mean of a function of a posterior and its variances `J_n Σ J_nᵀ` (B, C), for each posterior.

    Without a function, these are mean variances. Each output is in units of its noise ratio. Some positions are used of
    inputs with more than `WIDTH_OUTPUTS` outputs. The posteriors may differ only in prior and noise.
    """
    totals, counts = torch.zeros(2, len(posteriors), dtype=torch.float64)
    latents = candidate_latents(posteriors, lambda one: [one], parts, "variances")
    for (i, _), posterior, latent, labels, weights in latents:
        mean, likelihood = latent.mean, posterior.likelihood
        factors = curvature_weights(likelihood, mean, labels, weights)
        every = torch.ones_like(mean) if factors is None else factors.expand_as(mean)
        values = function(posterior, doubled(latent.variance) / likelihood.ratios(doubled(mean)))
        counts[i] += float(doubled(every).sum())
        totals[i] += float((every.to(values) * values).sum())
    return (totals / counts).tolist()


def variances_of_outputs(posterior: Posterior, parts: Iterable[Samples]) -> Tensor:
    """Returns the mean variance `J_n Σ J_nᵀ` of each output (C,), in units of its noise ratio."""
    sums, rows = [], 0
    for _, one, latent, *_ in candidate_latents([posterior], lambda one: [one], parts, "variances"):
        sums.append((doubled(latent.variance) / one.likelihood.ratios(doubled(latent.mean))).sum(0))
        rows += len(latent.mean)
    return torch.stack(sums).sum(0) / rows


def at_exponents(exponents: Sequence[float]) -> Candidates:
    """Returns the candidates at scalar δ = 10^exponent, or only the posterior itself if there are no exponents."""
    return lambda posterior: [posterior.at(10**exponent) for exponent in exponents] or [posterior]


def _latents(record: Record, candidates: Sequence[Posterior], reads: Reads, probed: bool) -> Iterable[Latent]:
    """Returns the latent of each candidate of one contraction, with only the parts that are read.

    If the record holds probes, each output gets the mean of their variances.
    """
    covariances: list[Any] = [candidate.covariance for candidate in candidates]
    mean = record.outputs.to(record.device)
    if not has_prior(covariances[0]):
        return [Latent(mean, covariance.output_covariance(record)) for covariance in covariances]
    if not probed:
        return (Latent(mean, terms) for terms in covariances[0].output_covariances(record, covariances, reads))
    variances = covariances[0].output_covariances(record, covariances, "variances")
    ones = (term.variance().mean(-1, keepdim=True).to(mean).expand_as(mean) for (term,) in variances)
    return (Latent(mean, (MarginalTerm(each, each),)) for each in ones)
