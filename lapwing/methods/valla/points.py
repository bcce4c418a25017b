"""Inducing points: M (input, output) pairs from the user, or by clusters or draws of the first samples."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...data import batches, nesting
from ...data.inputs import Inputs
from ...errors import LapwingError
from ...tangent import Anchors, Tangent
from ..passes import Batch, Step, SumPass
from ..problem import Problem
from ..rows import KeptInputs, choose, class_labels, rank_in_class

log = logging.getLogger("lapwing")

Initial = Literal["kmeans", "data"]

POOL = 2000  # number of first samples that clustering uses, or 20 M if that is more, so that no cost grows with N
LLOYD_STEPS = 100  # maximum number of Lloyd's iterations
MAX_DISTANCES = 2**20  # maximum number of distances in memory


@dataclass(frozen=True, eq=False)
class InducingPoints:
    """Your own inducing points, for `VaLLA`.

    Args:
        inputs: a batch of inputs of the network.
        outputs: the output of each point, (M,) int64; None means every output at every input, `M = B C`. If the outputs
            have positions, output `t C + c` is output c of position t.

    Raises:
        LapwingError: if `outputs` has another shape or dtype.
    """

    inputs: Any
    outputs: Tensor | None = None

    def __post_init__(self) -> None:
        count, outputs = Inputs.of(self.inputs).samples, self.outputs
        whole = isinstance(outputs, Tensor) and not outputs.is_floating_point() and outputs.dtype != torch.bool
        if not count or (outputs is not None and not (whole and outputs.shape == (count,))):
            raise LapwingError(
                f"InducingPoints(inputs={batches.describe(self.inputs)}, outputs={batches.describe(outputs)}) needs at "
                f"least one input, and one output number for each. Write outputs=torch.zeros({count}, "
                "dtype=torch.int64), or leave outputs out to use every output."
            )

    def __repr__(self) -> str:
        outputs = None if self.outputs is None else batches.describe(self.outputs)
        return f"InducingPoints(inputs={batches.describe(self.inputs)}, outputs={outputs})"


def inducing_points(problem: Problem, wanted: int | InducingPoints, initial: Initial) -> Generator[Step, Any, Anchors]:
    """Yields a pass over the first samples, unless the points are given; returns rows of J at M pairs."""
    if isinstance(wanted, InducingPoints):
        return anchors_of(problem.tangent, wanted)
    pool = _Pool(max(POOL, 20 * wanted), wanted, problem.tangent.memory)
    state = yield pool
    groups = [nesting.unflatten(*state.flattened(start)) for start in sorted(int(key) for key in state.nests)]
    labels = state.classes()
    classes = problem.tangent.outputs
    if classes == 1 or int(labels.min()) < 0 or int(labels.max()) >= classes:
        labels = torch.zeros_like(labels)
    elif len(labels.unique()) < 0.75 * classes:
        log.warning(
            "The first %d samples have %d of %d classes, and all inducing points are of these classes. Shuffle the "
            "training data: DataLoader(..., shuffle=True).", len(labels), len(labels.unique()), classes,
        )  # fmt: skip
    together = _as_one_batch(groups)
    if initial == "kmeans" and together is None:
        log.info(
            "Inputs are discrete or have several shapes (%s), so the %d inducing points are samples of the data and "
            "do not move", groups[0], wanted,
        )  # fmt: skip
    kinds = [(labels == label).nonzero()[:, 0] for label in labels.unique()]  # samples of each class
    shares = balanced_shares([len(kind) for kind in kinds], wanted)
    generator = problem.generator()
    if initial == "data" or together is None:
        chosen = [kind[choose(len(kind), share, generator)] for kind, share in zip(kinds, shares, strict=True)]
        picked = torch.cat(chosen)
        return _pairs(problem, tuple(groups) if together is None else (together,), picked, labels[picked], wanted)
    leaves, nest = nesting.flatten(together)
    features = torch.cat([leaf.float().flatten(1).cpu() for leaf in leaves], 1)
    centres = [
        features[kind[:share]] if share in (0, len(kind)) else cluster_centres(features[kind], share, generator)
        for kind, share in zip(kinds, shares, strict=True)
    ]
    coordinates = torch.cat(centres).split([leaf[0].numel() for leaf in leaves], 1)
    moved = (x.reshape(-1, *leaf.shape[1:]).to(leaf) for x, leaf in zip(coordinates, leaves, strict=True))
    classes_of = torch.cat([labels[kind[:share]] for kind, share in zip(kinds, shares, strict=True)])
    return _pairs(problem, (nesting.unflatten(moved, nest),), torch.arange(len(classes_of)), classes_of, wanted)


def movable(anchors: Anchors) -> bool:
    """Whether all inputs are floating-point, so that gradients in them exist."""
    return all(leaf.is_floating_point() for group in anchors.inputs for leaf in group.tensors)


def anchors_of(tangent: Tangent, points: InducingPoints) -> Anchors:
    """Returns anchors at the user's points, checked against the network."""
    outputs = points.outputs
    leaves, nest = nesting.flatten(Inputs.of(points.inputs, tangent.device))
    inputs = nesting.unflatten((leaf.detach().clone() for leaf in leaves), nest)  # fits move them in place
    tangent.check(inputs, "the inducing points")
    every = tangent.outputs_of(inputs)
    count, width = len(every), every[0].numel()
    if outputs is None:
        samples, each = torch.arange(count).repeat_interleave(width), torch.arange(width).repeat(count)
        return Anchors(tangent, (inputs,), samples, each)
    if int(outputs.min()) < 0 or int(outputs.max()) >= width:
        raise LapwingError(
            f"The inducing points name outputs {int(outputs.min())} to {int(outputs.max())}, and the network has "
            f"outputs 0 to {width - 1}. Name one of these, or leave outputs out to use every output."
        )
    return Anchors(tangent, (inputs,), torch.arange(count), outputs.cpu().long())


class _Pool(SumPass[KeptInputs]):
    """Keeps the first `limit` samples by batch, under the place of the first sample of each batch.

    Beyond `minimum` samples it keeps only those that fit into `memory` bytes.
    """

    label = "inducing points"

    def __init__(self, limit: int, minimum: int, memory: int) -> None:
        self.limit, self._minimum, self._memory = limit, minimum, memory

    def init(self) -> KeptInputs:
        return KeptInputs()

    def update(self, state: KeptInputs, batch: Batch) -> None:
        if batch.start >= self._minimum and sum(leaf.nbytes for leaf in state.leaves.values()) > self._memory:
            return
        leaves, nest = nesting.flatten(batch.inputs)
        labels = class_labels(batch)
        state.keep(batch.start, [leaf.detach().clone() for leaf in leaves], nest, labels)


def _as_one_batch(groups: list[Inputs]) -> Inputs | None:
    """Returns all inputs as one batch, or None if they are not floating-point or if their shapes differ."""
    parts = [nesting.flatten(group) for group in groups]
    first, nest = parts[0]
    for group, (leaves, other) in zip(groups, parts, strict=True):
        count = group.samples
        pairs = zip(leaves, first, strict=True) if other == nest else None
        if pairs is None or not all(
            x.is_floating_point() and x.ndim and len(x) == count and x.shape[1:] == y.shape[1:] for x, y in pairs
        ):
            return None
    return nesting.unflatten((torch.cat(same) for same in zip(*[leaves for leaves, _ in parts], strict=True)), nest)


def balanced_shares(available: list[int], wanted: int) -> list[int]:
    """Divides `wanted` over kinds as evenly as the available numbers allow."""
    shares = [0] * len(available)
    left = min(wanted, sum(available))
    while left:
        for i in sorted(range(len(shares)), key=lambda i: shares[i]):
            if left and shares[i] < available[i]:
                shares[i], left = shares[i] + 1, left - 1
    return shares


def _pairs(problem: Problem, inputs: tuple[Inputs, ...], picked: Tensor, labels: Tensor, wanted: int) -> Anchors:
    """Returns M different pairs of picked inputs and outputs: first the output of the class, then the next outputs.

    If the outputs have positions, the pairs are random, and spread evenly over the inputs. `picked` and `labels` (U,)
    are places and classes of the picked samples, class by class. `wanted` is M; the result has at most U C pairs.
    """
    if problem.tangent.positions.several:
        every = [torch.full((group.samples,), problem.tangent.width_of(group)) for group in inputs]
        generator, available = problem.generator(), torch.cat(every)[picked].tolist()
        shares = balanced_shares(available, wanted)
        drawn = [choose(width, share, generator) for width, share in zip(available, shares, strict=True)]
        return Anchors(problem.tangent, inputs, picked.repeat_interleave(torch.tensor(shares)), torch.cat(drawn))
    count, width = len(picked), problem.tangent.outputs
    numbers = torch.arange(min(wanted, count * width))
    first = (labels + rank_in_class(labels))[numbers % count]
    return Anchors(problem.tangent, inputs, picked[numbers % count], (first + numbers // count) % width)


def cluster_centres(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Returns centres c (count, D) of points x (n, D) with small `Σ_n min_k ‖x_n - c_k‖²`, by Lloyd's iteration.

    The initial centres come from greedy k-means++ (Arthur and Vassilvitskii 2007). A centre without points stays. Cost:
    time O(n D count) per step, and O(n D count log count) for the start; memory O(n D).
    """
    mean = points.mean(0)
    size = (points - mean).abs().max().clamp_min(torch.finfo(points.dtype).tiny)

    def moved(x: Tensor) -> Tensor:  # distances are differences of squares, which would lose digits or overflow
        return (x - mean) / size

    scaled = moved(points)
    centres = points[_initial_centres(scaled, count, generator)]
    labels: Tensor | None = None
    for _ in range(LLOYD_STEPS):
        parts, ends = scaled.split(max(1, MAX_DISTANCES // count)), moved(centres)
        nearest = torch.cat([_squared_distances(part, ends).argmin(1) for part in parts])
        if labels is not None and torch.equal(nearest, labels):
            break
        labels = nearest
        sizes = labels.bincount(minlength=count)[:, None]
        sums = torch.zeros_like(centres).index_add_(0, labels, points)
        centres = torch.where(sizes > 0, sums / sizes, centres)
    return centres


def _initial_centres(points: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Returns the indices of initial centres, each the best of a few drawn by squared distance to earlier centres."""
    trials = 2 + int(math.log(count))
    chosen = [int(torch.randint(len(points), (), generator=generator))]
    distances = _squared_distances(points, points[chosen])[:, 0]
    for _ in range(count - 1):
        weights = distances if bool(distances.sum() > 0) else torch.ones_like(distances)  # every point is a centre
        drawn = torch.multinomial(weights, trials, replacement=True, generator=generator)
        left = torch.minimum(distances[:, None], _squared_distances(points, points[drawn]))  # (n, trials)
        best = int(left.sum(0).argmin())
        chosen.append(int(drawn[best]))
        distances = left[:, best]
    return chosen


def _squared_distances(points: Tensor, centres: Tensor) -> Tensor:
    """Returns `‖x_n - c_k‖²`, (n, K), by one product of matrices."""
    squares = points.square().sum(1)[:, None] + centres.square().sum(1)
    return torch.addmm(squares, points, centres.T, alpha=-2.0).clamp_min_(0.0)
