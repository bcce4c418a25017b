"""The system that posterior draws solve, `(s G + Δ) z = √s JᵀRε + Δ^(1/2) ε₀`, for S right-hand sides at once.

Then `Cov[z] = (sG + Δ)⁻¹ (sG + Δ) (sG + Δ)⁻¹ = Ψ`, so z is an exact draw. G is never formed: each pass computes a
product `G Z = Σ_n JᵀR (RᵀJ Z)`. One record of `RᵀJ` (R backward passes) is enough for both factors. If there are more
than twice as many outputs as vectors, forward mode and a record of S cotangents are cheaper (about 2 S forward and S
backward passes); only float64 networks use it.

Vectors are float64 on devices that have it, whatever the dtype of the network: at a weak prior draws are far longer in
directions without data than in those that the data determine, where float32 would leave rounding of the former.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...covariance import PriorCovariance
from ...errors import LapwingError
from ...linalg import doubled, row_products, total
from ...tangent import Cotangents, Record, Vectors
from ..passes import Batch, Step, SumPass
from ..problem import Problem
from ..state import BlockSums

NOISE_STREAM, ROOT_STREAM, PRIOR_STREAM = range(3)  # streams of random numbers
POSITIONS_PER_GENERATOR = 256  # number of positions of a sample whose noise comes from one generator


def generator_at(seed: int, position: int, stream: int) -> torch.Generator:
    """Returns a separate CPU generator for each sample position, stream and seed.

    The CPU generator accepts 32 bits. A bijection mixes them, so that no two positions share their numbers.
    """
    bits = ((seed ^ seed >> 32) * 0x9E3779B1 + stream * 0x85EBCA77 + position) & 0xFFFFFFFF
    bits = ((bits ^ bits >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    bits = ((bits ^ bits >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    return torch.Generator().manual_seed(bits ^ bits >> 16)


def stream_of(sample: int, stream: int) -> int:
    """Returns the stream of a sample whose positions have separate generators."""
    return stream + 3 * (sample + 1)


class PositionedRoot(Cotangents):
    """The Fisher root R, the same at every pass: if it is sampled, each sample position has its own generator."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._start, self._taken, self._places = problem, 0, 0, 1
        self.columns: int = problem.root.columns
        self._marks: Tensor | None = None

    def begin(self, batch: Batch) -> None:
        tangent = self._problem.tangent
        self._start, self._taken = batch.start, 0
        if tangent.positions.rows_are_positions and not self._problem.root.exact:
            self._places = tangent.places_of(batch.inputs).count

    def __call__(self, outputs: Tensor) -> Tensor:
        """Returns R (B, C, R) at the outputs (B, C) of the next B samples, or of the next positions of samples."""
        problem = self._problem
        if not problem.root.is_drawn_at(outputs):
            return problem.root(outputs)
        numbers = range(self._taken, self._taken + len(outputs))
        self._taken = numbers.stop
        if self._marks is None:
            self._marks = torch.full((problem.seen.count,), torch.nan, dtype=torch.float64)
        firsts = slice(-numbers.start % self._places, None, self._places)  # the first position of each sample
        first = self._start + -(-numbers.start // self._places)
        self._check_order(outputs[firsts], self._marks[first : first + len(numbers[firsts])])
        columns = []
        for number, output in zip(numbers, outputs, strict=True):  # a CPU generator seeds one on the device
            sample, place = self._start + number // self._places, number % self._places
            where = (sample, ROOT_STREAM) if self._places == 1 else (place, stream_of(sample, ROOT_STREAM))
            seed = torch.randint(2**62, (), generator=generator_at(problem.seed, *where))
            generator = torch.Generator(outputs.device).manual_seed(int(seed))
            columns.append(problem.root.drawn(generator)(output[None]))
        return torch.cat(columns)

    def _check_order(self, outputs: Tensor, before: Tensor) -> None:
        """Raises if the samples are in another order than in the first pass, which notes their mean outputs."""
        if not len(outputs):
            return
        now = doubled(outputs).mean(-1).cpu()
        moved = ~torch.isclose(now, before, rtol=0.01, atol=0.01 * float(now.abs().max())) & ~before.isnan()
        if moved.any():
            raise LapwingError(
                f"The loader shows {int(moved.sum())} samples at other positions than in the first pass, and "
                f"SampledLLA with {self._problem.tangent.width} outputs draws the Fisher information by position. "
                "Write DataLoader(..., shuffle=False)."
            )
        before.copy_(now)


class CurvatureProducts(SumPass[BlockSums]):
    """`G Z` at unit noise, (S, P_block) by block, for Z (S, P_block) by block."""

    label = "products with the curvature"
    in_iteration = True

    def __init__(self, problem: Problem, root: PositionedRoot, vectors: Vectors, sums: int | None = None) -> None:
        """Accepts Z and the number of vectors that the pass sums; None means the number of vectors of Z."""
        self._problem, self._root, self._vectors = problem, root, vectors
        self._count = sums or len(next(iter(vectors.values())))
        tangent = problem.tangent
        self._dtype = tangent.contraction_dtype
        widest = max(block.matrix_shape[1] for block in tangent.blocks)
        self._scratch = 2 * self._count * (root.columns + widest)
        # below this dtype forward and backward mode round differently, so one record gives both products
        same = all(p.dtype == self._dtype for p in tangent.parameters.values())
        self._either_mode = same and not tangent.positions.rows_are_positions

    def init(self) -> BlockSums:
        return BlockSums(self._problem.block_zeros(self._count, dtype=self._dtype))

    def update(self, state: BlockSums, batch: Batch) -> None:
        self._root.begin(batch)
        for part, record in batch.records(self._root, self._dtype, self._scratch):
            u = self.cotangents(record, batch.start, part.start)
            if self._either_mode and 2 * self._count < record.cotangents:
                weighted = record.u @ u  # (B, C, S)
                record = batch.tangent.record(batch.inputs.take(part), weighted)
                for name, value in state.blocks.items():
                    value += record[name].sum_rows()
            else:
                for name, value in state.blocks.items():
                    value += record[name].vjp(u)

    def cotangents(self, record: Record, start: int, first: int) -> Tensor:
        """Returns `RᵀJ Z` (B, R, S) of a record at row `first` of the batch that begins at sample `start`."""
        if self._either_mode:
            return record.jvp(self._vectors)
        return total(record[name].jvp(vectors.to(record.dtype)) for name, vectors in self._vectors.items())


class FirstProducts(CurvatureProducts):
    """`JᵀR ε` and `G Z`, (2S, P_block) by block; ε is N(0, 1) for each sample position, column of R and draw."""

    label = "right-hand sides"

    def __init__(self, problem: Problem, root: PositionedRoot, vectors: Vectors) -> None:
        self._draws = len(next(iter(vectors.values())))
        super().__init__(problem, root, vectors, 2 * self._draws)

    def cotangents(self, record: Record, start: int, first: int) -> Tensor:
        """Returns ε and `RᵀJ Z`, joined to (B, R, 2S)."""
        return torch.cat([self._noise(record, start, first), super().cotangents(record, start, first)], -1)

    def _noise(self, record: Record, start: int, first: int) -> Tensor:
        """Returns ε (B, R, S); for a position it is the same in every batch and chunk."""
        shape, seed, tangent = (record.cotangents, self._draws), self._problem.seed, self._problem.tangent
        if not tangent.positions.rows_are_positions:
            numbers = range(start + first, start + first + record.samples)
            each = (generator_at(seed, n, NOISE_STREAM) for n in numbers)
            noise = [torch.randn(shape, generator=one, dtype=torch.float64) for one in each]
            return torch.stack(noise).to(tangent.device, record.dtype)
        noise, count, stop = [], prod(record.sizes), first + record.samples
        while first < stop:  # positions of one sample from one generator
            sample, place = divmod(first, count)
            block, skipped = divmod(place, POSITIONS_PER_GENERATOR)
            taken = min(POSITIONS_PER_GENERATOR - skipped, count - place, stop - first)
            generator = generator_at(seed, block, stream_of(start + sample, NOISE_STREAM))
            rows = min(POSITIONS_PER_GENERATOR, count - place + skipped)
            drawn = torch.randn((rows, *shape), generator=generator, dtype=torch.float64)
            noise.append(drawn[skipped : skipped + taken].to(tangent.device, record.dtype))
            first += taken
        return torch.cat(noise)


def prior_noise(problem: Problem, count: int) -> Iterator[tuple[str, Tensor]]:
    """Yields standard normal ε₀ (S, P_block) block by block, the same at every call."""
    tangent = problem.tangent
    for index, block in enumerate(tangent.blocks):
        seed = torch.randint(2**62, (), generator=generator_at(problem.seed, index, PRIOR_STREAM))
        generator = torch.Generator(tangent.device).manual_seed(int(seed))
        noise = torch.randn((count, block.size), generator=generator, dtype=tangent.dtype, device=tangent.device)
        yield block.name, noise.to(tangent.contraction_dtype)


def inner(first: Vectors, second: Vectors) -> Tensor:
    """Returns `u_k · v_k` (S,) in float64."""
    return total(inner_by_block(first, second))


def inner_by_block(first: Vectors, second: Vectors) -> Tensor:
    """Returns the parts of `u_k · v_k` by block, (n_blocks, S) in float64, one row at a time to save memory."""
    pairs = (zip(first[name], second[name], strict=True) for name in first)
    return torch.stack([torch.stack([doubled(u) @ doubled(v) for u, v in rows]) for rows in pairs])


def gram(first: Vectors, second: Vectors) -> Tensor:
    """Returns `u_k · v_l` (S, S') in float64, computed in slices of weights."""
    return total(row_products(first[name], second[name]) for name in first)


def recombine(weights: Tensor, vectors: Vectors) -> Vectors:
    """Replaces V (S, P_block) by `W V` (r, P_block) for each block; returns the same dict."""
    for name, value in vectors.items():
        vectors[name] = weights.to(value) @ value
    return vectors


@dataclass(frozen=True)
class LinearSystem:
    """`A = s G + Δ` and its right-hand sides at one prior and noise."""

    problem: Problem
    root: PositionedRoot  # R
    noise: Vectors  # `JᵀRε` (S, P_block)
    features: Vectors | None  # g (P_block,) with `Δ = δ g`; None means ones
    curvature: PriorCovariance | None  # an approximation of G by another method
    precision: Tensor  # δ (n_blocks,) float64
    scale: float  # s
    extra: Vectors | None = None  # one more right-hand side (1, P_block)

    @property
    def count(self) -> int:
        """S."""
        return len(next(iter(self.noise.values())))

    def prior(self) -> Vectors:
        """Returns Δ, (P_block,) or (1,) by block."""
        tangent = self.problem.tangent
        deltas = self.precision.to(tangent.device, tangent.contraction_dtype)[:, None].unbind()
        prior = {block.name: delta for block, delta in zip(tangent.blocks, deltas, strict=True)}
        if self.features is None:
            return prior
        return {name: delta * self.features[name] for name, delta in prior.items()}

    def trace(self) -> Tensor:
        """Returns the estimate `E‖JᵀRε‖²` of tr G, or of the trace over scaled features."""
        scaled = self.noise
        if self.features is not None:
            scaled = {name: v / self.features[name] for name, v in self.noise.items()}
        return inner(self.noise, scaled).mean()

    def right_hand_sides(self) -> Vectors:
        """Computes `√s JᵀRε + Δ^(1/2) ε₀`; only `JᵀRε` is in memory."""
        prior = self.prior()
        sides = {
            name: noise.mul_(prior[name].sqrt()).add_(self.noise[name], alpha=self.scale**0.5)
            for name, noise in prior_noise(self.problem, self.count)
        }
        return sides if self.extra is None else {name: torch.cat([b, self.extra[name]]) for name, b in sides.items()}

    def prior_draws(self, count: int) -> Vectors:
        """Returns `Z₀ = Δ^(-1/2) ε₀`, (S, P_block) by block."""
        prior = self.prior()
        return {name: noise.div_(prior[name].sqrt()) for name, noise in prior_noise(self.problem, count)}

    def start(self, draws: Vectors, products: Vectors, before: Tensor) -> Generator[Step, Any, None]:
        """Changes draws Z at the precisions `before`, and `G Z`, into an initial Z at the present precisions, in place.

        `Δ(Z - Z₀)` is in the range of Jᵀ before and after. With `f = √(δ_before/δ)` by block and its geometric mean c,
        Z becomes `f²/c Z + (1 - f/c) Z₀`. This is `f Z` if all blocks have the same f; otherwise it needs a pass.
        """
        # 1. f by block; Z₀ at the precisions before is Z₀/f
        factors = (before / self.precision).sqrt()
        # 2. one f: f²/c Z + (1 - f/c) Z₀ = f Z, and its product with G is f G Z
        if torch.equal(factors, factors[:1].expand_as(factors)):
            for value in (*draws.values(), *products.values()):
                value.mul_(float(factors[0]))
            return
        # 3. Δ (Z - Z₀) becomes Δ_before (Z - Z₀/f) / c, which stays in the range of Jᵀ as c is the same for all blocks
        shares = factors / factors.log().mean().exp()
        prior_draws = self.prior_draws(self.count).items()
        for (name, prior_draw), factor, share in zip(prior_draws, factors.tolist(), shares.tolist(), strict=True):
            draws[name][: self.count].mul_(factor * share).add_(prior_draw, alpha=1 - share)
        # 4. f differs between blocks, and G mixes them
        products.clear()
        products.update((yield from self.products(draws)))

    def products(self, vectors: Vectors) -> Generator[Step, Any, Vectors]:
        """Yields the pass for `G V`; returns `G V`."""
        return (yield CurvatureProducts(self.problem, self.root, vectors)).blocks

    def completed(self, vectors: Vectors, products: Vectors) -> Vectors:
        """Returns `A V` from V and `G V`, which it overwrites."""
        prior = self.prior()
        return {name: products[name].mul_(self.scale).addcmul_(v, prior[name]) for name, v in vectors.items()}

    def preconditioner(self) -> Callable[[Vectors], Vectors]:
        """Returns multiplication by `(s G̃ + Δ)⁻¹`, or by Δ⁻¹ if there is no G̃; G̃ uses the mean of Δ in each block."""
        if self.curvature is None:
            prior = self.prior()
            return lambda vectors: {name: v / prior[name] for name, v in vectors.items()}
        covariance, tangent = self.curvature.with_prior(self.mean_precision(), self.scale), self.problem.tangent

        def precondition(vectors: Vectors) -> Vectors:
            products = covariance.mv({name: v.to(covariance.dtype) for name, v in vectors.items()})
            return {name: v.to(tangent.contraction_dtype) for name, v in products.items()}

        return precondition

    def mean_precision(self) -> Tensor:
        """Returns the mean of Δ over each block, (n_blocks,)."""
        if self.features is None:
            return self.precision
        return self.precision * torch.stack([doubled(g).mean() for g in self.features.values()])
