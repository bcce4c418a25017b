"""Leave-one-out predictions of the exact linearised model: `BoundedEvidence` sets a regression's width by them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..covariance import Draws, PriorCovariance
from ..errors import LapwingError
from ..jacobian.blocks import join, split
from ..likelihoods import Gaussian, aligned_targets, curvature_weights
from ..linalg import doubled
from ..network import batches
from ..network.eager import parameters_of
from ..posterior import Posterior
from ..tangent import Tangent
from ..tangent.anchors import Anchors
from .search import ascend, best_of_grid, evenly

MAX_ROWS = 2000
"""The kernel is built of at most so many pairs of a sample and an output."""

MAX_WEIGHTS = 1_000_000
"""All trained weights count where a network has at most so many: their kernel then takes no longer than most fits."""

MAX_MULTIPLY_ADDS = 2**33
"""The rows of all samples may take so many, for the same reason."""

MAX_EXPLICIT_WEIGHTS = 1000
"""Weights without a layer family, whose rows are gradients of one sample after another."""

RANGE = (-10.0, 6.0)
"""Decades of δσ², relative to the mean eigenvalue of the kernel, that are searched."""

LOWEST_WIDTH = 0.5
"""Where s is less than this part of the mean squared residual, the network was not trained to the end."""

HIGHEST_RAISED = 0.0
"""To fit as badly as the network, δσ² is raised to this decade at most: noise as large as the kernel."""

MAX_EXPLAINED = 0.9
"""Of the targets, copies aside, the weights explain at most this part, the noise the others."""

OTHER_SCALE = 5.0
"""Outputs whose targets and residuals are more than so many times those of another output are warned of."""

TABLE = 2**20
"""Inputs of at most so many real numbers are one batch."""

SAME_SAMPLE = 0.98
"""Cosine between the gradients of two samples from which on they are copies, if their targets are equal too."""

SAME_INPUT = 0.9999
"""The same where equal targets tell nothing: rounded ones, ratings, counts."""

MANY_EQUAL = 0.01
"""Targets are taken for rounded where so large a part of the pairs below `SAME_SAMPLE` have equal ones."""


log = logging.getLogger("lapwing")


@dataclass(frozen=True)
class LeaveOneOut:
    """The exact Gaussian process of the linearised network on some training samples, at its own best δ and σ².

    Attributes:
        width: s, the mean variance of a target that all N samples but its own predict, or the mean squared error if
            that is more.
        variance: the mean variance alone, by the n samples of the kernel.
        training_variance: `σ² + mean_n J_n Σ J_nᵀ` of the exact posterior of these, which has seen the targets too.
        curve: by how much N samples narrow predictions, against n.
        precision: δ, as a multiple of the prior's where that is fixed.
        noise_variance: σ².
        samples: n.
        weights: how many weights count.
        drawn: the mean variance at the δ and σ² of a posterior of exact draws; 0 of others.
    """

    width: float
    variance: float
    training_variance: float
    curve: float
    precision: float
    noise_variance: float
    samples: int
    weights: int
    drawn: float = 0.0

    def unseen(self, training_variance: float) -> float:
        """Returns how wide a posterior's predictions of unseen targets are, at this δ and σ², by its training variance.

        The exact posterior tells inputs that it has seen from others. Those that are wider than it at inputs that they
        have seen, such as KFAC, do so in part, by measurement a quarter of the way on a logarithmic scale. Others leave
        out directions, and are about as wide everywhere.
        """
        if self.curve == 1 and abs(training_variance / self.training_variance - 1) < 1e-3:
            return self.variance
        if self.curve * self.training_variance < training_variance < self.curve * self.variance:
            return training_variance**0.75 * (self.curve * self.variance) ** 0.25
        return training_variance


@torch.no_grad()
def leave_one_out(
    posterior: Posterior, parts: Sequence[tuple[Any, ...]], size: float | None = None, residual: float = 0.0
) -> LeaveOneOut:
    """Returns `s = max(mean_n diag V_n, mean_n e_n²)`, `V_n = ([C⁻¹]_nn)⁻¹`, `e_n = V_n [C⁻¹ r]_n`, `C = JJᵀ/δ + σ²I`.

    The linearised network is a Gaussian process, `r = y - f + J(θ̂ - μ0) ~ N(0, C)`, whose marginal likelihood and
    leave-one-out predictions are exact (Rasmussen & Williams 2006, equations 5.8, 5.10 to 5.12, for blocks), at its own
    mode and not at the network's weights, which need not be one. A sample is left out with all its outputs, and with
    its copies, which would predict its target. Errors count besides variances, since the model has no
    noise that outputs share.

    Output biases have their trained value for μ0: targets far from 0 would else ask for a wide prior of all weights.

    Weights that explain all targets but no noise would leave nothing to posteriors that see less, so σ² is at least
    what leaves a tenth of the targets to it (`MAX_EXPLAINED`).

    A network that was not trained to the end leaves residuals that its linearised model could explain, and predicts
    with them all the same. So δσ² is raised until s is half of their mean square (`LOWEST_WIDTH`), to
    `HIGHEST_RAISED` at most: the model then fits about as the network does.

    Of N samples, n are in the kernel. More samples tell more: s is multiplied by `learning_curve` at N/n.

    All trained weights count (`requires_grad`), also where the posterior treats only some: the layers before the
    treated ones were trained on the targets too. Where they are too many, or a layer among them is refused, only the
    treated weights count.

    Args:
        posterior: of a regression with noise σ². Its network is used, and its prior where all weights are treated.
        parts: batches of inputs and targets, and perhaps sample weights: w copies of a sample are one whose residual
            and kernel are multiplied by √w, and the count of targets is Σ w. Of many samples with many
            outputs some are taken.
        size: N; as many as there are in `parts` where None.
        residual: the network's mean squared residual, below half of which s does not go if δσ² can be raised; 0 for
            none.

    Cost: M = n C backward passes, at most MAX_ROWS, `JJᵀ` of all pairs, and one eigendecomposition of it, O(M³).
    """
    parts = [part for part in parts if batches.size(part[0])]
    samples = sum(batches.size(inputs) for inputs, *_ in parts)
    try:
        tangent = _trained(posterior, parts[0][0], samples)
        if tangent is not None:
            return _left_out(posterior, tangent, parts, size or samples, residual)
    except (LapwingError, RuntimeError) as error:  # of layers that the fit has nothing to do with
        log.info("The trained weights that %s leaves out do not count: %s", posterior.method, error)
    return _left_out(posterior, posterior.tangent, parts, size or samples, residual)


def _left_out(
    posterior: Posterior, tangent: Tangent, parts: Sequence[tuple[Any, ...]], size: float, residual: float
) -> LeaveOneOut:
    """Returns what `leave_one_out` does, for these weights."""
    process = _process(posterior, tangent, parts)
    log10 = process.best()
    result, end = process.left_out(log10, size), log10.new_tensor(HIGHEST_RAISED)
    if log10 < end and result.width < LOWEST_WIDTH * residual:
        for _ in range(10):
            middle = (log10 + end) / 2
            result = process.left_out(middle, size)
            log10, end = (middle, end) if result.width < LOWEST_WIDTH * residual else (log10, middle)
    if isinstance(posterior.covariance, Draws) and posterior.noise_variance:
        delta = float(posterior.prior.precision.mean())
        own = math.log10(posterior.noise_variance * delta / process.unit)
        result = replace(result, drawn=process.left_out(log10.new_tensor(own), size, 1 / delta).variance)
    return result


@dataclass(frozen=True)
class _Process:
    """The Gaussian process of M pairs of a sample and an output, at δ = 1; δσ² is `10^log10` of the kernel's mean.

    Attributes:
        values: eigenvalues of the kernel `√w JJᵀ √w` (M,), of each output relative to its noise.
        vectors: its eigenvectors (M, M).
        labels: `√w r` (M,), in the same unit.
        counts: w (M,), how many targets each pair stands for.
        same: which samples are left out at once with each (n, n).
        prior_fixed: whether δ is the user's.
        weights: how many weights count.
    """

    values: Tensor
    vectors: Tensor
    labels: Tensor
    counts: Tensor
    same: Tensor
    prior_fixed: bool
    weights: int

    @property
    def samples(self) -> int:
        """n, each with as many pairs."""
        return len(self.same)

    @cached_property
    def groups(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs that are left out at once, as of `_groups`."""
        return _groups(self.same, len(self.labels) // self.samples)

    @cached_property
    def squares(self) -> Tensor:
        """Squared labels in the eigenbasis (M,)."""
        return (self.vectors.T @ self.labels).square()

    @cached_property
    def total(self) -> float:
        """Σ w, the number of targets."""
        return float(self.counts.sum())

    @property
    def more(self) -> float:
        """Targets without a row of their own."""
        return self.total - len(self.counts)

    @cached_property
    def unit(self) -> float:
        """The kernel's mean eigenvalue."""
        return float(self.values.sum()) / self.total or 1.0

    def at(self, log10: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the eigenvalues of `δC`, and the best 1/δ there."""
        spectrum = self.values + self.unit * 10**log10
        if self.prior_fixed:
            return spectrum, torch.ones_like(log10)
        return spectrum, ((self.squares / spectrum).sum() / self.total).clamp_min(1e-24)  # 0: nothing to explain

    def evidence(self, log10: Tensor) -> Tensor:
        """Returns the log marginal likelihood, up to a constant."""
        spectrum, scale = self.at(log10)
        fit = -0.5 * (self.squares / (scale * spectrum) + (scale * spectrum).log()).sum()
        return fit - 0.5 * self.more * (scale * self.unit * 10**log10).log() if self.more else fit

    def lowest(self) -> float:
        """Returns the first log10 of a grid where the weights explain at most `MAX_EXPLAINED` of the targets."""
        grid = evenly(*RANGE, 65)
        explained = [float((self.values / (self.values + self.unit * 10**end)).sum()) / self.total for end in grid]
        copies = self.counts.unflatten(0, (self.samples, -1)).amax(1)
        single = copies / (self.same.to(copies.dtype) @ copies).clamp_min(1.0)
        limit = MAX_EXPLAINED * float(single.sum() / copies.sum())  # of copies one counts
        return grid[sum(part > limit for part in explained)]

    def best(self) -> Tensor:
        """Returns the log10 of most evidence."""
        low, values = self.lowest(), self.values
        grid, best = best_of_grid(lambda log10: float(self.evidence(values.new_tensor(log10))), low, RANGE[1], 65)
        start = values.new_tensor(grid[best : best + 1])
        return ascend(lambda point: self.evidence(point[0]), start, [low], RANGE[1:])[0]

    def left_out(self, log10: Tensor, size: float, inverse: float | None = None) -> LeaveOneOut:
        """Returns the leave-one-out predictions for N samples, at the best 1/δ or at this one."""
        spectrum, scale = self.at(log10)
        scale = scale if inverse is None else log10.new_tensor(inverse)
        noise = float(scale * self.unit * 10**log10)
        spectrum = scale * spectrum
        variance, error = _left_out_moments(spectrum, self.vectors, self.labels, self.groups)
        variance, error = (variance + self.more * noise) / self.total, error / self.total
        curve = learning_curve(scale * self.values, noise, size / self.samples, self.total)
        training_variance = noise * (1 + (len(self.counts) - noise * float((1 / spectrum).sum())) / self.total)
        return LeaveOneOut(
            curve * max(variance, error), variance, training_variance, curve, 1 / float(scale), noise, self.samples,
            self.weights,
        )  # fmt: skip


def _process(posterior: Posterior, tangent: Tangent, parts: Sequence[tuple[Any, ...]]) -> _Process:
    """Returns the process of samples spread over the parts, of some outputs of each where there are too many."""
    targets, residuals, every_weight = (
        torch.cat(every) for every in zip(*(_targets(posterior, *part) for part in parts), strict=True)
    )
    treated = tangent is posterior.tangent
    given = posterior.prior.fixed and isinstance(posterior.covariance, PriorCovariance)  # not by the method
    outputs, prior_fixed = residuals.shape[1], given and treated
    count = min(len(residuals), max(20, MAX_ROWS // outputs))
    times = min(outputs, MAX_ROWS // count)
    chosen = torch.arange(count) * len(residuals) // count
    samples = chosen.repeat_interleave(times)
    turns = torch.arange(len(samples)) % outputs
    inputs = tuple(inputs for inputs, *_ in parts)
    if len(residuals) * tangent.bytes_per_sample(times, tangent.widest) <= tangent.memory // 16:
        inputs = _joined(inputs)
    anchors = Anchors(tangent, inputs, samples, turns)
    precision = posterior.prior.precision if prior_fixed else torch.ones(len(tangent.blocks), dtype=torch.float64)
    weights = {block.name: 1 / value for block, value in zip(tangent.blocks, precision.tolist(), strict=True)}
    mean = posterior.prior.mean if treated else {}
    offset = {name: (value - mean.get(name, 0.0)).to(tangent.widest)[None] for name, value in tangent.mean().items()}
    by_parameter = split(tangent.blocks, offset)
    for name in _output_biases(tangent, inputs):
        by_parameter[name] = torch.zeros_like(by_parameter[name])
    labels = residuals[samples, turns] + doubled(anchors.inner(join(tangent.blocks, by_parameter))[0])
    gram = anchors.gram(weights, tangent.widest)
    same = _copies(gram, targets[chosen], times)
    counts = every_weight[samples, turns]
    roots = counts.sqrt() / posterior.likelihood.ratios(residuals).sqrt()[turns]
    values, vectors = torch.linalg.eigh(roots[:, None] * gram * roots)
    if isinstance(posterior.likelihood, Gaussian) and posterior.likelihood.noise_ratios is None:
        _warn_of_scales(targets, residuals, every_weight)
    return _Process(values.clamp_min(0), vectors, roots * labels, counts, same, prior_fixed, tangent.size)


def _warn_of_scales(targets: Tensor, residuals: Tensor, weights: Tensor) -> None:
    """Warns where one noise variance stands for outputs of other scales: in targets and residuals, each (N, C)."""
    totals = weights.sum(0)
    counts = totals.clamp_min(torch.finfo(totals.dtype).tiny)
    squares = (weights * residuals.square()).sum(0) / counts
    means = (weights * targets).sum(0) / counts
    variances = (weights * (targets - means).square()).sum(0) / counts
    large, small = int(squares.argmax()), int(torch.where(totals > 0, squares, math.inf).argmin())
    if all(float(part[large]) > OTHER_SCALE**2 * float(part[small]) for part in (squares, variances)):
        log.warning(
            "The residuals of output %d are %.3g times those of output %d, and one noise variance for both makes "
            "intervals of the latter too wide. Pass likelihood=lw.Gaussian(noise_ratios=y.var(0).tolist()), or train "
            "on standardised targets and use prediction.scaled(mean, std).",
            large, float(squares[large] / squares[small]) ** 0.5, small,
        )  # fmt: skip


def _output_biases(tangent: Tangent, parts: Sequence[Any]) -> list[str]:
    """Returns the names of parameters that add the same numbers to the outputs of all samples, of which 8 are seen."""
    inputs: list[Any] = []
    for part in parts:
        left = 8 - sum(batches.size(every) for every in inputs)
        if left > 0:
            some = batches.take(part, slice(0, min(left, batches.size(part))))
            inputs.append(batches.plain(some, tangent.device))
    outputs, names = torch.cat([tangent.outputs_of(some) for some in inputs]), []
    for name, value in tangent.parameters.items():
        if value.ndim != 1 or len(value) > tangent.outputs or len(outputs) == 1:
            continue
        zero = {name: torch.zeros_like(value)}
        without = torch.cat([tangent.call_with(zero, some) for some in inputs])
        added, largest = outputs - without, max(float(outputs.abs().max()), float(without.abs().max()))
        if float((added - added[0]).abs().max()) <= 8 * torch.finfo(value.dtype).eps * largest:
            names.append(name)
    return names


def _joined(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns rows of a table as one batch, since the kernel goes through all pairs of batches; others as they are."""
    tables = [part for part in parts if isinstance(part, Tensor) and part.is_floating_point()]
    few = len(tables) == len(parts) and sum(part.numel() for part in tables) <= TABLE
    return (torch.cat(tables),) if few and len({(part.shape[1:], part.dtype) for part in tables}) == 1 else parts


def learning_curve(values: Tensor, noise_variance: float, factor: float, total: float) -> float:
    """Returns by how much more samples narrow predictions of unseen targets, at most 1.

    The width κ solves `κ = σ² + mean_i λ_i/(1 + factor λ_i/κ)` (Sollich 1999, equation 10, with the spectrum of the
    kernel for that of all inputs). The result is κ at the factor over κ at 1.

    Args:
        values: λ, eigenvalues of the kernel of n samples (M,).
        noise_variance: σ².
        factor: N/n.
        total: the number of targets.
    """
    if factor <= 1:
        return 1.0
    widths = []
    for more in (factor, 1.0):
        low, high = noise_variance, noise_variance + float(values.sum()) / total
        for _ in range(60):
            middle = (low + high) / 2
            rises = noise_variance + float((values / (1 + more * values / middle)).sum()) / total > middle
            low, high = (middle, high) if rises else (low, middle)
        widths.append(high)
    return widths[0] / widths[1]


def _trained(posterior: Posterior, inputs: Any, samples: int) -> Tangent | None:
    """Returns the tangent of all trained weights; None where the posterior treats them, or they take too long."""
    tangent = posterior.tangent
    treated = {name for block in tangent.blocks for name in block.parameters}
    others = {
        name: value.numel()
        for name, value in parameters_of(tangent.model).items()
        if value.requires_grad and name not in treated and value.is_floating_point()
    }
    if not others:
        return None
    names = treated | others.keys()
    if tangent.size + sum(others.values()) <= MAX_WEIGHTS:
        whole = Tangent.survey(
            tangent.model, inputs, lambda name, _: name in names, tangent.forward, tangent.memory, warn=False
        )
        if whole.explicit_size <= MAX_EXPLICIT_WEIGHTS and samples * whole.plan.work(whole.blocks) <= MAX_MULTIPLY_ADDS:
            return whole
    log.info(
        "%s is too large to look at all trained weights: only those that %s treats count for the noise variance",
        type(tangent.model).__name__, posterior.method,
    )  # fmt: skip
    return None


def _groups(same: Tensor, times: int) -> list[tuple[Tensor, Tensor]]:
    """Returns pairs that are left out at once, by how many they are: (G, k) of indices, and of whose moments count.

    Args:
        same: which samples are left out at once with each (N, N).
        times: how many pairs a sample has, side by side.
    """
    distinct, group_of = same.unique(dim=0, return_inverse=True)
    sizes, inside = distinct.sum(1), torch.arange(times, device=same.device)
    groups = []
    for size in sizes.unique().tolist():
        of_size = (sizes == size).nonzero()
        members = distinct[of_size[:, 0]].nonzero()[:, 1].unflatten(0, (-1, size))
        rows = (members[..., None] * times + inside).flatten(1)
        groups.append((rows, (group_of[members] == of_size).repeat_interleave(times, 1)))
    return groups


def _left_out_moments(
    spectrum: Tensor, vectors: Tensor, labels: Tensor, groups: list[tuple[Tensor, Tensor]]
) -> tuple[float, float]:
    """Returns the sums of the variances and of the squared errors of targets that are left out.

    Args:
        spectrum: eigenvalues of C (M,).
        vectors: eigenvectors of C (M, M).
        labels: r (M,).
        groups: which pairs are left out at once.
    """
    root = vectors / spectrum.sqrt()  # of C⁻¹
    weighted = root @ (root.T @ labels)
    variance = error = 0.0
    for rows, counted in groups:
        part = root[rows]  # (G, k, M)
        left = torch.linalg.inv(part @ part.mT)
        variance += float(left.diagonal(dim1=1, dim2=2)[counted].sum())
        error += float((left @ weighted[rows][..., None])[..., 0][counted].square().sum())
    return variance, error


def _copies(gram: Tensor, targets: Tensor, times: int) -> Tensor:
    """Returns which samples are copies of which, themselves included (N, N), by `JJᵀ` (M, M) and y (N, C).

    Samples of which only some outputs are in the kernel cannot be compared, and have no copies.
    """
    count, outputs = targets.shape
    alone = torch.eye(count, dtype=torch.bool, device=gram.device)
    if times < outputs:
        return alone
    kernel = gram.unflatten(0, (count, times)).unflatten(2, (count, times)).diagonal(dim1=1, dim2=3).sum(-1)  # (N, N)
    size = kernel.diagonal().clamp_min(torch.finfo(kernel.dtype).tiny).sqrt()
    cosine, equal = kernel / (size * size[:, None]), (targets == targets[:, None]).all(-1)
    others = cosine < SAME_SAMPLE
    rounded = (equal & others).sum() > MANY_EQUAL * others.sum()
    return alone | ((cosine >= (SAME_INPUT if rounded else SAME_SAMPLE)) & equal)


def _targets(
    posterior: Posterior, inputs: Any, targets: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y, y - f and w, (B, C), in float64; zeros for targets that are missing."""
    outputs = posterior.tangent.outputs_of(inputs)
    posterior.likelihood.check(outputs, targets)
    outputs = doubled(outputs)
    targets, weights = targets.to(outputs.device), None if weights is None else weights.to(outputs.device)
    every = curvature_weights(posterior.likelihood, outputs, targets, weights)
    targets = aligned_targets("Gaussian", outputs, targets)
    if every is None:
        return targets, targets - outputs, torch.ones_like(targets)
    every = every.double().expand_as(targets)
    return targets.nan_to_num(), torch.where(every == 0, 0.0, targets - outputs), every
