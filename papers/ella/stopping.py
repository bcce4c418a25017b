"""ELLA after n images on the ResNet-20: a curvature is summed once and kept after n, n/2, n/4, ... images.

All posteriors on one basis share their features, so the number of images and the prior precision are chosen together.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import lapwing as lw
from lapwing.covariance import Latent, LowRank
from lapwing.covariance.basis import ExplicitBasis
from lapwing.covariance.terms import FactoredTerm
from lapwing.likelihoods import ClassPrediction
from lapwing.tuning import Training, Tuning
from papers.common.cifar import Cifar


class KeepPrefixes(Tuning):
    """Tunes nothing and keeps the posteriors of the first parts of the data.

    Attributes:
        found: those posteriors, by rising number of samples, then that of all data (scaled, with `data_size`).
    """

    found: tuple[lw.Posterior, ...] = ()

    def __init__(self, prefixes: int = 9) -> None:
        self.prefixes = prefixes

    def tune(self, posterior: lw.Posterior, training: Training = Training()) -> lw.Posterior:  # noqa: B008 (frozen)
        """Returns the posterior as it is."""
        self.found = (*training.prefixes, posterior)
        return posterior


@dataclass(frozen=True)
class Features:
    """What all posteriors on one basis need of some inputs.

    Attributes:
        outputs: f (N, C).
        values: J Wᵀ (N, C, K).
        labels: y (N,).
        seconds: that it took.
    """

    outputs: Tensor
    values: Tensor
    labels: Tensor
    seconds: float

    def predict(self, covariance: LowRank) -> ClassPrediction:
        """Returns the predictions of a posterior on this basis."""
        return lw.Categorical().predict(Latent(self.outputs, (FactoredTerm(covariance.factor(self.values)),)))


def features(posterior: lw.Posterior, loader: Iterable[tuple[Tensor, Tensor]]) -> Features:
    """Projects J at every input on the posterior's basis."""
    return shared_features([posterior], loader)[0]


def shared_features(posteriors: Sequence[lw.Posterior], loader: Iterable[tuple[Tensor, Tensor]]) -> list[Features]:
    """Projects J at every input on the bases of several posteriors over the same weights, joined into one."""
    bases = [posterior.covariance.basis for posterior in posteriors if isinstance(posterior.covariance, LowRank)]
    rows = [basis.rows() for basis in bases]
    joined = ExplicitBasis({name: torch.cat([part[name] for part in rows]) for name in rows[0]})
    start, outputs, values, labels = time.perf_counter(), [], [], []
    with torch.no_grad():
        for x, y in loader:
            for _, record in posteriors[0].tangent.records(x):
                outputs.append(record.outputs)
                values.append(joined.project(record))
            labels.append(y)
    split = torch.cat(values).split([basis.rank for basis in bases], -1)  # (N, C, K) each
    seconds = time.perf_counter() - start
    return [Features(torch.cat(outputs), part, torch.cat(labels), seconds) for part in split]


DELTAS = tuple(10 ** (i / 2) for i in range(-8, 9))


def best_stop(
    posteriors: Sequence[lw.Posterior], val: Features, ranks: Sequence[int], deltas: Sequence[float] = DELTAS
) -> dict[int, dict[int, tuple[float, LowRank]]]:
    """Returns, for each number of samples and rank, the best validation NLL and its covariance."""
    found: dict[int, dict[int, tuple[float, LowRank]]] = {}
    for posterior in posteriors:
        covariance = posterior.covariance
        assert isinstance(covariance, LowRank)
        row = found.setdefault(posterior.samples, {})
        for rank in ranks:
            if rank > covariance.rank:
                continue
            shorter = covariance.with_rank(rank)
            candidates = [shorter.with_prior(torch.full_like(covariance.precision, d), 1.0) for d in deltas]
            losses = [-float(val.predict(c).log_prob(val.labels).mean()) for c in candidates]
            at = min(range(len(losses)), key=losses.__getitem__)
            row[rank] = losses[at], candidates[at]
    return found


def best(stops: dict[int, dict[int, tuple[float, LowRank]]], rank: int) -> tuple[int, float, LowRank]:
    """Returns the number of samples with the best validation NLL at a rank, that NLL and its covariance."""
    at = {n: row[rank] for n, row in stops.items() if rank in row}
    n = min(at, key=lambda n: at[n][0])
    return n, *at[n]


def cifar_ella(setup: Cifar, rows: int, rank: int, seed: int) -> tuple[KeepPrefixes, lw.Posterior, float]:
    """Fits ELLA once, keeping all prefixes; returns them, the posterior of all data and the seconds of the fit."""
    keep, start = KeepPrefixes(), time.perf_counter()
    posterior = lw.fit(
        setup.model, setup.train, lw.ELLA(rank=rank, rows=rows), prior_precision=1.0, tune=keep, seed=seed,
        memory=2**31 + 2**30,
    )  # fmt: skip
    return keep, posterior, time.perf_counter() - start
