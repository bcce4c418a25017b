"""The Gaussian process of the linearised network on some samples: its evidence and its leave-one-out predictions.

Its kernel is decomposed once. Everything is then a function of δσ², at the best δ for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .search import ascend, best_of_grid, evenly

RANGE = (-10.0, 6.0)  # searched decades of δσ², relative to the mean eigenvalue of the kernel
ROUNDING = 1e-12  # ridge of the equations for the constants, of which some may have no known target
MAX_EXPLAINED = 0.9  # the weights explain at most this fraction of the targets, of which copies count once
LARGEST_ROWS = 2**25  # maximum number of entries of the rows of a kernel's root that are read at once
FAR_VARIANCE = 100.0  # a sample is far from all others if its left-out variance exceeds this many medians
MOST_LEVERAGE = 0.99  # maximum leverage of a target: a far input decides its own output
MAX_FAR_PART = 0.1  # far samples are left out of means if they are at most this fraction of all


@dataclass(frozen=True)
class LeaveOneOut:
    """The exact Gaussian process of the linearised network on some training samples, at its own best δ and σ².

    The width s is the mean variance, or the mean squared error if it is larger, of a target that all other of the N
    samples predict. A few samples that are far from all others (`FAR_VARIANCE`), whose own targets decide their
    predictions, are not in the mean. The training variance is `σ² + mean_n J_n Σ J_nᵀ` of the exact posterior, which
    has seen them.
    """

    width: float
    variance: float  # mean variance by the n samples of the kernel
    training_variance: float
    learning_ratio: float  # width by N samples, divided by the width by n
    precision: float
    noise_variance: float
    samples: int
    weights: int
    share_explained: float = 0.0  # number of targets that the weights explain, divided by the number of all targets
    variance_of_draws: float = 0.0  # mean variance at the δ and σ² of exact draws; 0 for other posteriors
    weight: float = 1.0  # mean weight of a sample and its copies; here weights are relative to it
    windows: bool = False  # whether samples share values, and are left out together
    of_outputs: Tensor = field(default_factory=lambda: torch.ones(1))  # widths of outputs, over s (C,)

    def width_at_unseen_inputs(self, training_variance: float) -> float:
        """Estimates the variance of a posterior's predictions at unseen inputs from its variance at training inputs.

        Both are at this δ and σ². The exact posterior is wider at unseen inputs than at seen ones. A posterior that is
        wider at seen inputs, such as KFAC, has a quarter of this difference, on a logarithmic scale (measured). One
        that leaves out directions is about as wide everywhere.
        """
        if self.learning_ratio == 1 and abs(training_variance / self.training_variance - 1) < 1e-3:
            return self.variance
        if self.learning_ratio * self.training_variance < training_variance < self.learning_ratio * self.variance:
            return training_variance**0.75 * (self.learning_ratio * self.variance) ** 0.25
        return training_variance


@dataclass(frozen=True)
class Process:
    """The Gaussian process of M pairs of a sample and an output, at δ = 1; δσ² is `10^log10` of the kernel's mean."""

    values: Tensor  # eigenvalues of the kernel `√w JJᵀ √w` (M,), of each output relative to its noise
    vectors: Tensor  # its eigenvectors (M, M)
    labels: Tensor  # `√w r` (M,), in the same unit
    constants: Tensor  # `√w` in the rows of one output, 0 in others (M, C): the labels have a free constant per output
    counts: Tensor  # w (M,), relative to `weight`: number of targets that each pair represents
    same: Tensor  # whether a sample is a copy of another or the same (n, n); all have equally many pairs
    weights: int  # number of weights that count
    outputs_per_pair: float = 1.0  # number of outputs of a sample, divided by the number of its pairs
    weight: float = 1.0  # mean weight of a sample, with its copies in the kernel
    related: Tensor | None = None  # whether samples are left out together (n, n); None means copies

    @property
    def windows(self) -> bool:
        """Whether samples share values with others, and are left out together."""
        return self.related is not None and not torch.equal(self.related, self.same)

    @cached_property
    def groups(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs that are left out together: for each size k, indices (G, k), and which of them count (G, k)."""
        # 1. the different rows of `related`, one per group (G, n), and the group of each sample (n,)
        related = self.same if self.related is None else self.related
        distinct, group_of = related.unique(dim=0, return_inverse=True)
        times = len(self.labels) // len(self.same)  # number of consecutive pairs of a sample
        sizes, inside = distinct.sum(1), torch.arange(times, device=self.same.device)
        # 2. for groups of the same size: their samples, and the pairs of these, which are consecutive
        groups: list[tuple[Tensor, Tensor]] = []
        for size in sizes.unique().tolist():
            of_size = (sizes == size).nonzero()
            members = distinct[of_size[:, 0]].nonzero()[:, 1].unflatten(0, (-1, size))
            rows = (members[..., None] * times + inside).flatten(1)
            counted = (group_of[members] == of_size).repeat_interleave(times, 1)
            some = max(1, LARGEST_ROWS // (rows.shape[1] * len(self.labels)))
            groups += zip(rows.split(some), counted.split(some), strict=True)
        return groups

    @cached_property
    def rotated(self) -> tuple[Tensor, Tensor]:
        """The labels (M,) and the constants (M, C) in the eigenbasis."""
        return self.vectors.T @ self.labels, self.vectors.T @ self.constants

    def centred(self, spectrum: Tensor) -> Tensor:
        """Returns the labels minus the likeliest constant of each output, `(AᵀC⁻¹A)⁻¹AᵀC⁻¹r`, in the eigenbasis (M,).

        A constant that the weights can produce is about the labels' mean; one that they cannot produce is about 0.
        """
        # 1. C⁻¹A (M, C) in the eigenbasis, AᵀC⁻¹A (C, C) and AᵀC⁻¹r (C,)
        labels, constants = self.rotated
        whitened = constants / spectrum.detach()[:, None]  # the evidence has no slope in the likeliest constants
        gram, moments = constants.T @ whitened, whitened.T @ labels
        # 2. b = (AᵀC⁻¹A)⁻¹AᵀC⁻¹r (C,), from a matrix with a diagonal of ones and a ridge; r - A b (M,)
        size = gram.diagonal().clamp_min(torch.finfo(gram.dtype).tiny).rsqrt()
        gram = size[:, None] * gram * size + ROUNDING * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        return labels - constants @ (size * torch.linalg.solve(gram, size * moments))

    @cached_property
    def total(self) -> float:
        """Σ w, the number of targets; 1 if none is known."""
        return float(self.counts.sum()) or 1.0

    @cached_property
    def unit(self) -> float:
        """The kernel's mean eigenvalue."""
        return float(self.values.sum()) / self.total or 1.0

    def at(self, log10: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the eigenvalues of `δC`, the best 1/δ for them, and the centred labels."""
        # 1. the kernel plus δσ², B = δC
        spectrum = self.values + self.unit * 10**log10
        labels = self.centred(spectrum)
        # 2. d/dx [rᵀB⁻¹r/x + Σw log x] = 0 at x = 1/δ = rᵀB⁻¹r/Σw
        return spectrum, ((labels.square() / spectrum).sum() / self.total).clamp_min(1e-24), labels  # 0 if all are 0

    def evidence(self, log10: Tensor) -> Tensor:
        """Returns the log marginal likelihood, up to a constant."""
        # 1. log N(r; 0, C) of the M pairs
        spectrum, scale, labels = self.at(log10)
        fit = -0.5 * (labels.square() / (scale * spectrum) + (scale * spectrum).log()).sum()
        # 2. w copies have a row for their mean, and w - 1 differences of variance σ² that are 0
        without_row = self.total - len(self.counts)  # number of targets
        return fit - 0.5 * without_row * (scale * self.unit * 10**log10).log() if without_row else fit

    def lowest(self) -> float:
        """Returns the first grid point of log10 at which the weights explain at most `MAX_EXPLAINED` of the targets."""
        # 1. tr K(K + δσ²)⁻¹ / Σw at each point of the grid, falling
        grid = evenly(*RANGE, 65)
        explained = [float((self.values / (self.values + self.unit * 10**end)).sum()) / self.total for end in grid]
        # 2. the part of the targets that are not copies: a group of copies counts as one sample
        copies = self.counts.unflatten(0, (len(self.same), -1)).amax(1)
        single = copies / (self.same.to(copies.dtype) @ copies).clamp_min(1.0)
        limit = MAX_EXPLAINED * float(single.sum() / copies.sum())  # copies count once
        return grid[sum(part > limit for part in explained)]

    def best(self) -> Tensor:
        """Returns the log10 of highest evidence."""
        low, values = self.lowest(), self.values
        grid, best = best_of_grid(lambda log10: float(self.evidence(values.new_tensor(log10))), low, RANGE[1], 65)
        start = values.new_tensor(grid[best : best + 1])
        return ascend(lambda point: self.evidence(point[0]), start, [low], RANGE[1:])[0]

    def left_out(self, log10: Tensor, size: float, inverse: float | None = None) -> LeaveOneOut:
        """Returns the leave-one-out predictions for N = `size` samples, at the best 1/δ or at `inverse`."""
        # 1. C and σ², with K + δσ² = δC
        spectrum, scale, labels = self.at(log10)
        scale = scale if inverse is None else log10.new_tensor(inverse)
        noise = float(scale * self.unit * 10**log10)
        spectrum = scale * spectrum
        # 2. mean left-out variance and squared error, by n samples
        (variance, error), of_outputs = self._means(noise, *self._moments(spectrum, labels))
        # 3. the ratio of the learning curve at all targets of N samples to that at the targets of the kernel
        growth = self.outputs_per_pair * size / len(self.same)
        ratio = learning_curve(scale * self.values, noise, growth, self.total)
        # 4. σ² + mean diag(k - k C⁻¹k) for k = K/δ = C - σ²: σ² (1 + tr(k C⁻¹)/Σw), and tr(k C⁻¹) = M - σ² tr C⁻¹
        training_variance = noise * (1 + (len(self.counts) - noise * float((1 / spectrum).sum())) / self.total)
        return LeaveOneOut(
            ratio * max(variance, error), variance, training_variance, ratio, 1 / float(scale), noise,
            len(self.same), self.weights, (training_variance / noise - 1) / growth, weight=self.weight,
            of_outputs=of_outputs, windows=self.windows,
        )  # fmt: skip

    def left_out_errors(self) -> tuple[Tensor, Tensor]:
        """Returns errors `√w e` of targets that are left out (M,), and the leverages `h = 1 - σ²/V` of these (M,).

        Both are at the δσ² of highest evidence. The error of a seen target is e (1 - h).
        """
        log10 = self.best()
        spectrum, scale, labels = self.at(log10)
        variances, errors = self._moments(scale * spectrum, labels)
        return errors, (1 - scale * self.unit * 10**log10 / variances).clamp(0.0, MOST_LEVERAGE)

    def _moments(self, spectrum: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns variances and errors (M,) of targets that are left out, by C and labels in its eigenbasis."""
        # 1. C⁻¹r (M,), and a root of C⁻¹ (M, M)
        root = self.vectors / spectrum.sqrt()  # root rootᵀ = C⁻¹
        weighted = self.vectors @ (labels / spectrum)
        variances, errors = torch.zeros_like(labels), torch.zeros_like(labels)
        for rows, counted in self.groups:
            # 2. V_I = ([C⁻¹]_II)⁻¹ (G, k, k) and e_I = V_I [C⁻¹r]_I for the pairs I that are left out together
            part = root[rows]  # (G, k, M)
            left = torch.linalg.inv(part @ part.mT)
            variances[rows[counted]] = left.diagonal(dim1=1, dim2=2)[counted]
            errors[rows[counted]] = (left @ weighted[rows][..., None])[..., 0][counted]
        return variances, errors

    def _means(self, noise: float, variances: Tensor, errors: Tensor) -> tuple[tuple[float, float], Tensor]:
        """Returns the mean variance and squared error per target, from all pairs (M,) but those of a few far samples.

        Also the larger one for the targets of each output, over the one of all (C,).
        """
        # 1. Σ w, Σ w v and Σ w e² over the pairs of a sample (n, 3); rows were multiplied by √w
        pairs = torch.stack([self.counts, variances - noise, errors.square()], 1)
        parts = pairs.unflatten(0, (len(self.same), -1)).sum(1)
        widths = noise + parts[:, 1] / parts[:, 0].clamp_min(ROUNDING)  # mean variance of a target of each sample (n,)
        # 2. means over the samples that are not far
        far = widths > FAR_VARIANCE * widths.median()
        if self.outputs_per_pair == 1 and far.double().mean() <= MAX_FAR_PART:
            pairs = pairs * ~far.repeat_interleave(len(pairs) // len(far))[:, None]
        # 3. of all pairs, and of those of each output
        sums = torch.cat([pairs.sum(0, keepdim=True), (self.constants != 0).to(pairs).T @ pairs])  # (1 + C, 3)
        count, spread, error = sums.clamp_min(0.0).T
        means = torch.stack([noise + spread / count, error / count])  # (2, 1 + C)
        widths = means.amax(0)
        return (float(means[0, 0]), float(means[1, 0])), (widths[1:] / widths[0]).nan_to_num(1.0)  # without targets


def learning_curve(values: Tensor, noise_variance: float, factor: float, total: float) -> float:
    """Returns κ at `factor` = N/n, divided by κ at 1: how much more samples narrow predictions of unseen targets.

    The width κ solves `κ = σ² + mean_i λ_i/(1 + factor λ_i/κ)`, a mean over `total` targets (Sollich 1999, equation 10,
    with the spectrum λ (M,) of the kernel of n samples as the spectrum of all inputs).
    """
    if factor <= 1:
        return 1.0
    # bisection: the right side is concave in κ and positive at 0, so it exceeds κ only below the solution
    widths = []
    for more in (factor, 1.0):
        low, high = noise_variance, noise_variance + float(values.sum()) / total
        for _ in range(60):
            middle = (low + high) / 2
            rises = noise_variance + float((values / (1 + more * values / middle)).sum()) / total > middle
            low, high = (middle, high) if rises else (low, middle)
        widths.append(high)
    return widths[0] / widths[1]
