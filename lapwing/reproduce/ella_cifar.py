"""ELLA and the last layer on the CIFAR-10 ResNet-20 (Deng et al. 2022): Table 4, Figures 2 (c), 4 (b), 6 and 7.

A curvature is summed once and kept after n, n/2, n/4, ... images; all posteriors on one basis share their features.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import lapwing as lw

from ..covariance import Latent, LowRank
from ..covariance.basis import ExplicitBasis
from ..covariance.output import Thin
from ..evaluation import metrics
from ..likelihoods import ClassPrediction
from ..tangent import Record
from ..tuning import Training, Tuning
from .data import images
from .loaders import Batches, batched
from .models import cifar_resnet20


@dataclass(frozen=True)
class Cifar:
    """CIFAR-10 for the ResNet-20: training images, the first 2 000 test images to validate, the others to report."""

    model: nn.Module
    train: Batches
    val: Batches
    test: Batches

    @classmethod
    def load(cls, seed: int, shown: int = 4096, reported: int = 8000) -> Cifar:
        """Reads the data; `shown` of the training images, in the order of the seed."""
        data = images("cifar10")
        picked = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(seed))[:shown]
        return cls(
            cifar_resnet20(),
            batched(data.x_train[picked], data.y_train[picked]),
            batched(data.x_test[:2000], data.y_test[:2000]),
            batched(data.x_test[2000 : 2000 + reported], data.y_test[2000 : 2000 + reported]),
        )


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
        return lw.Categorical().predict(Latent(self.outputs, (Thin(covariance.factor(self.values)),)))


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


def scores(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Returns accuracy, NLL and ECE."""
    return {
        "accuracy": float(metrics.accuracy(probs, labels)),
        "nll": float(metrics.negative_log_likelihood(probs, labels)),
        "ece": float(metrics.expected_calibration_error(probs, labels)),
    }


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


def last_layer_over_n(
    setup: Cifar, seed: int, fixed: Sequence[float] = (0.5, 5.0, 50.0), prefixes: int = 11
) -> dict[int, dict[str, dict[str, float]]]:
    """Scores exact linearised Laplace of the last layer (LLA*) with the curvature of n images, n growing (Figure 7).

    Args:
        setup: all of its training images are shown; the last n is 50 000, their sum scaled.
        seed: of the fit.
        fixed: prior precisions that do not follow n.
        prefixes: how often n is halved.

    Returns:
        n -> how the prior precision was found (fixed, by the evidence of the n images, by validation) -> scores on the
        test images, and that precision.
    """
    keep = KeepPrefixes(prefixes)
    lw.fit(
        setup.model, setup.train, lw.Full(), params=lw.last_layer, prior_precision=1.0, tune=keep, data_size=50_000,
        seed=seed,
    )  # fmt: skip
    tangent = keep.found[0].tangent
    val, test = (
        [(record, y) for x, y in part for _, record in tangent.records(x)] for part in (setup.val[:10], setup.test)
    )
    found: dict[int, dict[str, dict[str, float]]] = {}
    for posterior in keep.found:
        at = {delta: posterior.with_prior(delta) for delta in (*DELTAS, *fixed)}
        evidence = {delta: float(at[delta].log_marginal_likelihood()) for delta in DELTAS}
        losses = {delta: _last_layer_scores(at[delta], val)["nll"] for delta in DELTAS}
        chosen = {f"prior precision {delta:g}": delta for delta in fixed}
        chosen["evidence"] = max(evidence, key=evidence.__getitem__)
        chosen["validation"] = min(losses, key=losses.__getitem__)
        found[round(posterior.samples * posterior.data_factor)] = {
            name: {"precision": delta, **_last_layer_scores(at[delta], test)} for name, delta in chosen.items()
        }
    return found


def _last_layer_scores(posterior: lw.Posterior, records: Sequence[tuple[Record, Tensor]]) -> dict[str, float]:
    """Scores predictions from records of J, which no prior changes."""
    covariance, probs = posterior.covariance, []
    with torch.no_grad():
        for record, _ in records:
            latent = Latent(record.outputs, covariance.output_covariance(record))
            probs.append(lw.Categorical().predict(latent).probs)
    return scores(torch.cat(probs), torch.cat([y for _, y in records]))
