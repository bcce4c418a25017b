"""`lw.amortize`: a small network learns the variances of a posterior, so that a prediction costs a forward pass."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ranks
from ..covariance import Covariance, Latent, has_prior
from ..covariance.terms import DenseTerm
from ..data import batches
from ..data.data import Data
from ..data.inputs import Inputs, checked
from ..errors import LapwingError
from ..linalg import doubled, symmetric_eigen
from ..network.stamp import fingerprint
from ..posterior import Posterior
from ..posterior.latents import input_batches, latent_of_batch
from ..prediction import Linearized, Way
from ..prediction.uncertain import prepared
from ..tangent import Tangent
from ..tangent.features import last_layer_of, outputs_and_features
from ..tangent.retry import entry

log = logging.getLogger("lapwing")

HEAD_OUTPUTS, HEAD_ROWS, HEAD_FEWEST = 20, 4_000, 100
"""Maximum number of outputs; maximum number of rows of the data, and of unlabelled ones; minimum number of both."""
HEAD_COPIES = 20
"""Rows z and covariances that are in memory for each row of the data: corruptions, and copies while the head learns."""
HEAD_LEFT_OUT, HEAD_WITHIN = 0.2, 0.99
"""Part of the rows that the head does not see; part of these within the limit of the guard."""
HEAD_WIDTH, HEAD_STEPS, HEAD_BATCH, HEAD_RATE = 128, 8_000, 512, 3e-3
"""Width of the two hidden layers of the head; steps of AdamW, their rows, and the largest rate."""
HEAD_JITTER, HEAD_SMALLEST, HEAD_LARGEST_Z, HEAD_RIDGE = 1e-4, 1e-30, 30.0, 1e-3
"""Added to correlations; least variance; largest standardised feature; added to the features' variances of 1."""
GOOD_RATIO, GOOD_RANK = (0.9, 1.1), 0.9
"""Range of the ratio, and least rank correlation, at the left-out rows; otherwise a warning is logged."""


class Agreement(NamedTuple):
    """Compares variances of the head with exact ones. If they agree, ratio and rank are 1; NaN without two inputs."""

    ratio: float  # mean variance by the head over the exact one, within the guard
    rank: float  # rank correlation of the summed variances of the inputs, within the guard
    beyond: float  # part of the inputs beyond the guard


class VarianceHead(nn.Module):
    """A small network from rows z (B, D) to covariances (B, C, C), and the guard of its domain.

    It predicts the log variances, and the rows of a Cholesky factor of the correlations, which are normalised.
    """

    def __init__(self, rows: Tensor, codes: Tensor, known: Tensor, left_out: Tensor, outputs: int) -> None:
        super().__init__()
        self.outputs, sizes = outputs, (rows.shape[1], HEAD_WIDTH, HEAD_WIDTH, codes.shape[1])
        first, second, last = (nn.Linear(*pair) for pair in pairwise(sizes))
        self.layers = nn.Sequential(first, nn.GELU(), second, nn.GELU(), last).to(rows.device)
        spread = rows.std(0)
        self.centre, self.scale = rows.mean(0), torch.where(spread > 1e-4 * rows.abs().amax(0), 1 / spread, 0.0)
        self.middle, self.width = codes.mean(0), codes.std(0).clamp_min(1e-3)
        self.largest = codes[:, :outputs].amax(0).exp()  # variances (C,)
        z = self.standardised(known)
        self.mean = z.mean(0)
        values, vectors = symmetric_eigen((z - self.mean).T @ (z - self.mean) / len(z))
        self.whitening = (vectors * (values + HEAD_RIDGE).rsqrt()).to(z)
        self.limit = self.distance(left_out).quantile(HEAD_WITHIN)
        self._fit(self.standardised(rows), (codes - self.middle) / self.width)

    def _fit(self, z: Tensor, wanted: Tensor) -> None:
        """Minimises the mean squared error of standardised codes, by AdamW with one cycle of the rate."""
        generator = torch.Generator().manual_seed(0)
        optimiser = torch.optim.AdamW(self.parameters(), HEAD_RATE, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, HEAD_RATE, HEAD_STEPS)
        for _ in range(HEAD_STEPS):
            some = torch.randint(len(z), (HEAD_BATCH,), generator=generator).to(z.device)
            optimiser.zero_grad()
            F.mse_loss(self.layers(z[some]), wanted[some]).backward()
            optimiser.step()
            schedule.step()
        self.requires_grad_(False)

    def standardised(self, rows: Tensor) -> Tensor:
        return ((rows - self.centre) * self.scale).clamp(-HEAD_LARGEST_Z, HEAD_LARGEST_Z)

    def distance(self, rows: Tensor) -> Tensor:
        """Returns the squared Mahalanobis distance to the known rows, (B,)."""
        return ((self.standardised(rows) - self.mean) @ self.whitening).square().sum(1)

    def beyond(self, rows: Tensor) -> Tensor:
        return self.distance(rows) > self.limit

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns variances (B, C), and the correlations' factor (B, C, C) with rows of length 1."""
        codes = self.layers(self.standardised(rows)) * self.width + self.middle
        row, column = torch.tril_indices(self.outputs, self.outputs)
        factor = codes.new_zeros(codes.shape[0], self.outputs, self.outputs)  # len() would fix the batch of an export
        factor[:, row, column] = codes[:, self.outputs :]
        return codes[:, : self.outputs].exp(), F.normalize(factor, dim=2)


def codes_of(covariance: Tensor) -> Tensor:
    """Returns the log variances and the entries of the correlations' Cholesky factor, (B, C (C + 3)/2)."""
    variance = covariance.diagonal(dim1=1, dim2=2).clamp_min(HEAD_SMALLEST)
    scale, size = variance.rsqrt(), covariance.shape[1]
    correlations = covariance * scale[:, :, None] * scale[:, None] + HEAD_JITTER * torch.eye(size).to(covariance)
    row, column = torch.tril_indices(size, size)
    factor = torch.linalg.cholesky_ex(correlations).L[:, row, column]
    return torch.cat([variance.log(), factor], 1).float()


def product(variance: Tensor, factor: Tensor) -> Tensor:
    """Returns covariances (B, C, C) from variances (B, C) and a factor of correlations (B, C, C)."""
    root = variance.sqrt()[:, :, None] * factor
    return root @ root.mT


@dataclass(frozen=True, eq=False, repr=False)
class Amortized(Way):
    """The way that `lw.amortize` makes: variances by a small network, and exact ones beyond its guard.

    Attributes:
        head: the network and its guard.
        layer: block whose inputs are features.
        centred: whether the average of the outputs is subtracted, since a softmax does not read it.
        posterior: fingerprints of the covariance of the posterior, which no other posterior shares.
        agreement: how well it agrees at rows that it has not seen.
    """

    head: VarianceHead
    layer: str
    centred: bool
    posterior: Tensor
    agreement: Agreement
    _seen: list[weakref.ref[Covariance]] = field(default_factory=list)

    tuned_as = "Linearized"

    def latent(self, tangent: Tangent, covariance: Covariance, inputs: Inputs, joint: bool) -> Latent:
        """Returns the latent Gaussian, which is not differentiable in the inputs."""
        if joint or inputs.wants_gradient:
            what = "covariances across inputs" if joint else "gradients at inputs that require gradients"
            raise LapwingError(f"An amortised way has no {what}. Leave out via=, or pass via=lw.Linearized().")
        self._check(covariance)
        mean, rows = rows_of(tangent, self.layer, tangent.check(inputs))
        found, beyond = product(*self.head(rows)), self.head.beyond(rows)
        if beyond.any():
            found[beyond] = exact(tangent, covariance, inputs.take(beyond.nonzero()[:, 0]), self.centred).to(found)
        return Latent(mean, (DenseTerm(found.to(mean)),))

    def check(self, posterior: Posterior, x: Any) -> Agreement:
        """Returns how well the variances at a batch or a loader agree with the exact ones of its posterior.

        Cost: an exact prediction.
        """
        self._check(posterior.covariance)
        tangent, parts = posterior.tangent, []
        for inputs in _batches(tangent, x):
            rows = rows_of(tangent, self.layer, tangent.check(inputs))[1]
            parts.append((rows, exact(tangent, posterior.covariance, inputs, self.centred)))
        return agreement(self.head, *_joined(parts))

    def _check(self, covariance: Covariance) -> None:
        if any(seen() is covariance for seen in self._seen):
            return
        if not torch.equal(prints_of(covariance), self.posterior):
            raise LapwingError(
                "This amortised way belongs to another posterior, or to this one before its prior, noise or data "
                "changed. Write way = lw.amortize(posterior, loader) again."
            )
        self._seen.append(weakref.ref(covariance))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_seen": []}  # weak references cannot be pickled

    def __repr__(self) -> str:
        ratio, rank, _ = self.agreement
        return f"Amortized(variances of left-out rows: {ratio:.2f} times the exact ones, rank correlation {rank:.2f})"


@entry("lw.amortize", "Pass smaller batches.")
def amortize(posterior: Posterior, loader: Any, unlabelled: Any = None) -> Amortized:
    """Returns a way whose variances a small network predicts: `posterior.predict(x, via=way)` costs a forward pass.

    `Cov[f(x)] ≈ diag(v)^½ U(z) U(z)ᵀ diag(v)^½` with `v = exp(h(z))` (C,) and U (C, C) with rows of length 1. z are the
    inputs of the last treated layer, the outputs, and the inputs of the network if these are rows of numbers. h and U
    are learned from the exact covariances at data, unlabelled inputs, and corruptions of both: mixtures of two rows,
    noise, rows stretched about their mean, entries of other rows. Before a softmax the average of the logits is
    subtracted.

    Beyond a guard, the 99th percentile of the Mahalanobis distance of z at left-out rows, the way predicts exactly. The
    network of `lw.deploy(posterior, x, via=way)` has no exact variances: it uses the largest ones of the fit there, and
    has the output `beyond`. Inputs without floating-point numbers, such as tokens, are not corrupted: pass unlabelled
    ones.

    Args:
        posterior: a posterior whose exact predictions cost too much, with up to 20 outputs and no positions. Any change
            of its prior, noise or data needs another way.
        loader: data, in any form that `lw.fit` accepts. Up to 4 000 random rows are used.
        unlabelled: a batch or a loader of inputs like those to come, without targets; or None.

    Raises:
        LapwingError: for outputs with positions or more than 20 outputs, or for fewer than 100 rows.

    Cost: exact predictions of 4 000 rows and 16 000 corrupted ones, and 8 000 steps of the head: half a minute for a
    small network on a CPU. A prediction costs a forward pass, and exact predictions of the inputs beyond the guard.
    Rows z and covariances are in memory at once: if 4 000 rows exceed `memory=` of the fit, there are fewer.

    Source: after knowledge distillation; the targets are exact and need no labels. `docs/deployment.md` has a trial.

    Example:
        >>> import torch, lapwing as lw
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(300, 4)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).eval()
        >>> posterior = lw.fit(model, (x, x[:, :1]), lw.KFAC(), prior_precision=1.0, likelihood="gaussian")
        >>> way = lw.amortize(posterior, (x, x[:, :1]))
        >>> posterior.predict(x, via=way).std.shape, way.check(posterior, torch.randn(50, 4)).rank > 0.9
        (torch.Size([300, 1]), True)
    """
    _check_posterior(posterior)
    posterior._check_network()
    tangent = posterior.tangent
    data, generator = Data.of(loader, posterior), torch.Generator().manual_seed(0)
    batches.check_loader(data.loader, "lw.amortize")
    layer, centred = last_layer_of(tangent), posterior.likelihood.activation == "softmax"
    width = rows_of(tangent, layer, tangent.check(data.first.inputs.take(slice(0, 1))))[1].shape[1]
    most = tangent.memory // (HEAD_COPIES * (4 * width + 8 * tangent.outputs**2))
    most = min(max(most, HEAD_FEWEST), HEAD_ROWS)
    share = min(1.0, most / (data.expected_size or most))
    labelled = _some((samples.inputs for samples in checked(data, tangent.device)), share, most, generator)
    more = () if unlabelled is None else _some(_batches(tangent, unlabelled), 1.0, most, generator)

    # 1. rows z and covariances of known, left-out and corrupted inputs
    known: list[tuple[Tensor, Tensor]] = []
    left_out, corrupted = known.copy(), known.copy()

    def add(pairs: list[tuple[Tensor, Tensor]], inputs: Inputs) -> None:
        if inputs.samples:
            rows = rows_of(tangent, layer, tangent.check(inputs))[1]
            pairs.append((rows, exact(tangent, posterior.covariance, inputs, centred)))

    parts = [*labelled, *more]
    rounds = max(1, most // max(1, sum(inputs.samples for inputs in parts)))
    for inputs in parts:
        out = torch.rand(inputs.samples, generator=generator) < HEAD_LEFT_OUT
        kept = inputs.take((~out).nonzero()[:, 0])
        add(known, kept)
        add(left_out, inputs.take(out.nonzero()[:, 0]))
        for other in (other for _ in range(rounds) for other in _corrupted(kept, generator)):
            add(corrupted, other)
    count = sum(len(rows) for rows, _ in known + left_out)
    if count < HEAD_FEWEST:
        raise LapwingError(
            f"lw.amortize learns from {count} inputs, and needs {HEAD_FEWEST}. Pass the training data, and inputs "
            "without targets as unlabelled=."
        )
    # 2. the head, and how well it does at the left-out rows
    (rows, wanted), (new, wanted_new) = map(_joined, (known + corrupted, left_out))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        head = VarianceHead(rows, codes_of(wanted), torch.cat([rows for rows, _ in known]), new, tangent.outputs)
    found = agreement(head, new, wanted_new)
    low, high = GOOD_RATIO
    log.log(
        logging.INFO if low <= found.ratio <= high and found.rank >= GOOD_RANK else logging.WARNING,
        "Amortised variances of %d left-out rows are %.2f times the exact ones, with a rank correlation of %.2f. If "
        "this is too little, pass more data, or inputs like those to come as unlabelled=.",
        len(new), found.ratio, found.rank,
    )  # fmt: skip
    return Amortized(head, layer, centred, prints_of(posterior.covariance), found)


def rows_of(tangent: Tangent, layer: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Returns the outputs (B, C), and the rows z (B, D) that a head reads, in float32."""
    outputs, features = outputs_and_features(tangent, layer, inputs)
    return outputs, joined_rows(features, outputs, inputs)


def joined_rows(features: Tensor, outputs: Tensor, inputs: Inputs) -> Tensor:
    """Returns features, outputs and inputs that are rows of numbers, side by side."""
    numbers = [x for x in inputs.tensors if x.is_floating_point() and x.ndim == 2 and x.shape[0] == outputs.shape[0]]
    return torch.cat([part.float() for part in (features, outputs, *numbers)], 1)


def exact(tangent: Tangent, covariance: Covariance, inputs: Inputs, centred: bool) -> Tensor:
    """Returns the exact covariances of the outputs, or of the outputs minus their average, (B, C, C) in float64."""
    found = doubled(latent_of_batch(tangent, covariance, inputs, Linearized(), False).covariance)
    if centred:
        found = found - found.mean(1, keepdim=True)
        found = found - found.mean(2, keepdim=True)
    return found


def agreement(head: VarianceHead, rows: Tensor, wanted: Tensor) -> Agreement:
    """Returns how well the variances of a head agree with covariances (B, C, C) at rows (B, D)."""
    within = ~head.beyond(rows)
    beyond = 1 - float(within.double().mean())
    if int(within.sum()) < 2:
        return Agreement(math.nan, math.nan, beyond)
    found = doubled(head(rows[within])[0])
    variance = wanted[within].diagonal(dim1=1, dim2=2)
    ranked = torch.stack([part.sum(1).argsort().argsort().double() for part in (found, variance)])
    ratio = float(found.sum() / variance.sum().clamp_min(HEAD_SMALLEST))
    return Agreement(ratio, float(torch.corrcoef(ranked)[0, 1]), beyond)


def prints_of(covariance: Covariance) -> Tensor:
    """Returns the fingerprints of all tensors of a covariance, and of its scale."""
    scale = torch.tensor(covariance.scale if has_prior(covariance) else 1.0, dtype=torch.float64)
    return torch.stack([fingerprint(part.cpu()) for part in (*covariance.tensors().values(), scale)])


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    first, second = zip(*parts, strict=True)
    return torch.cat(first), torch.cat(second)


def _batches(tangent: Tangent, x: Any) -> Iterator[Inputs]:
    """Yields the inputs of a batch or a loader, on the device."""
    for part in input_batches(x, tangent.model):
        yield prepared(part, tangent.device).certain


def _some(parts: Iterable[Inputs], share: float, most: int, generator: torch.Generator) -> Iterator[Inputs]:
    """Yields about a share of the samples, and no more than `most` in all."""
    left = most
    for inputs in parts:
        chosen = (torch.rand(inputs.samples, generator=generator) < share).nonzero()[:left, 0]
        left -= len(chosen)
        if len(chosen):
            yield inputs.take(chosen)
        if left <= 0:
            return


def _corrupted(inputs: Inputs, generator: torch.Generator) -> Iterator[Inputs]:
    """Yields inputs whose floating-point numbers are mixed, noisy, stretched, and exchanged between samples."""
    places = {place: leaf for place, leaf in inputs.per_sample.items() if leaf.is_floating_point()}
    if not places or not inputs.samples:
        return
    order = torch.randperm(inputs.samples, generator=generator)
    amount = torch.rand(inputs.samples, generator=generator)

    def changed(x: Tensor) -> Iterator[Tensor]:
        other, t = x[order.to(x.device)], amount.to(x).reshape(-1, *[1] * (x.ndim - 1))
        spread = x.std(0, correction=0) if x.ndim == 2 else x.std(correction=0)
        yield other + (1.6 * t - 0.3) * (x - other)
        yield x + 2 * t * spread * torch.randn(x.shape, generator=generator).to(x)
        yield x.mean(0) + (4 * t - 1) * (x - x.mean(0))
        yield torch.where(torch.rand(x.shape, generator=generator).to(x) < 0.6 * t, other, x)

    for leaves in zip(*map(changed, places.values()), strict=True):
        yield inputs.with_leaves(dict(zip(places, leaves, strict=True)))


def _check_posterior(posterior: Any) -> None:
    if not isinstance(posterior, Posterior):
        raise LapwingError(
            f"lw.amortize takes a posterior first, not {batches.describe(posterior)}. Write "
            "lw.amortize(lw.fit(model, loader), loader)."
        )
    tangent, name = posterior.tangent, type(posterior.model).__name__
    if tangent.positions.several or tangent.outputs > HEAD_OUTPUTS:
        what = "have positions" if tangent.positions.several else f"are {tangent.outputs} for each input"
        raise LapwingError(
            f"The outputs of {name} {what}, and lw.amortize learns the variances of up to {HEAD_OUTPUTS} outputs "
            "without positions. Predict with via=lw.Streamlined(), or treat the last layer alone: "
            "lw.fit(model, loader, params=lw.last_layer)."
        )
    if ranks.several():
        raise LapwingError("lw.amortize runs in one process. Call it after torch.distributed has ended.")
