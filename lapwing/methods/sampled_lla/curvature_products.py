"""Products with the curvature for many vectors, `G Z = Σ_n JᵀR (RᵀJ Z)`, and `JᵀR ε`: one pass each, no matrix.

One record of `RᵀJ` (R backward passes) serves product and transposed product. Where the outputs outnumber the vectors
twice, forward mode and a record of S cotangents are cheaper (about 2 S forward and S backward passes).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from ...errors import LapwingError
from ...linalg import total as summed
from ...tangent import Record, Vectors
from ..passes import Batch, SumPass
from ..problem import Problem
from ..state import BlockSums

NOISE, ROOT, PRIOR = range(3)
"""Streams of random numbers."""


def generator_at(seed: int, position: int, stream: int) -> torch.Generator:
    """Returns a CPU generator of its own for a sample position, one of several streams, and a seed.

    The CPU generator takes 32 bits, mixed here by a bijection, so that no two positions share their numbers.
    """
    bits = ((seed ^ seed >> 32) * 0x9E3779B1 + stream * 0x85EBCA77 + position) & 0xFFFFFFFF
    bits = ((bits ^ bits >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    bits = ((bits ^ bits >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    return torch.Generator().manual_seed(bits ^ bits >> 16)


class PositionedRoot:
    """The Fisher root R, the same at every pass: where it is sampled, each sample position has its own generator.

    Attributes:
        columns: R.
        position: of the next sample.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem, self.position = problem, 0
        self.columns = problem.root.columns
        sampled = problem.tangent.outputs > self.columns
        self._marks = torch.full((problem.count(),), torch.nan, dtype=torch.float64) if sampled else None

    def __call__(self, outputs: Tensor) -> Tensor:
        """Returns R (B, C, R) at the outputs (B, C) of the next B samples."""
        if self._marks is None:
            return self._problem.root(outputs)
        start, self.position = self.position, self.position + len(outputs)
        self._check_order(outputs, self._marks[start : self.position])
        columns = []
        for i, output in enumerate(outputs):  # a generator on the device, seeded by the position's own
            seed = torch.randint(2**62, (), generator=generator_at(self._problem.seed, start + i, ROOT))
            generator = torch.Generator(outputs.device).manual_seed(int(seed))
            columns.append(self._problem.likelihood.sampled_fisher_root(output[None], generator))
        return torch.cat(columns)

    def _check_order(self, outputs: Tensor, before: Tensor) -> None:
        """Raises where another sample stands at a position than at the first pass; notes them there."""
        now = outputs.double().mean(-1).cpu()
        moved = ~torch.isclose(now, before, rtol=0.01, atol=0.01 * float(now.abs().max())) & ~before.isnan()
        if moved.any():
            raise LapwingError(
                f"The loader shows {int(moved.sum())} samples at other positions than in the first pass, and "
                f"SampledLLA with {self._problem.tangent.outputs} outputs draws the Fisher information by position. "
                "Write DataLoader(..., shuffle=False)."
            )
        before.copy_(now)


class _Products(SumPass[BlockSums]):
    """What both passes share: records of `RᵀJ`, and sums of transposed products, (S, P_block) by block."""

    def __init__(self, problem: Problem, root: PositionedRoot, count: int) -> None:
        self._problem, self._root, self._count = problem, root, count
        tangent = problem.tangent
        widest = max(block.matrix_shape[1] for block in tangent.blocks)
        self._held = 2 * count * (root.columns + widest)
        # half precision rounds forward and backward mode apart: both products then come from one record
        self._either_mode = all(p.dtype == tangent.dtype for p in tangent.parameters.values())

    @abstractmethod
    def cotangents(self, record: Record, start: int) -> Tensor:
        """Returns u (B, R, S) of a record whose first sample has position `start`."""

    def init(self) -> BlockSums:
        return BlockSums(self._problem.block_zeros(self._count))

    def update(self, state: BlockSums, batch: Batch) -> None:
        self._root.position = batch.start
        for part, record in batch.records(self._root, scratch_per_sample=self._held):
            u = self.cotangents(record, batch.start + part.start)
            if self._either_mode and 2 * self._count < record.cotangents:
                weighted = self._problem.root(record.outputs) @ u  # (B, C, S)
                record = batch.tangent.record(batch.checked.take(part), weighted)
                for name, total in state.blocks.items():
                    total += record[name].sum_rows()
            else:
                for name, total in state.blocks.items():
                    total += record[name].vjp(u)


class CurvatureProducts(_Products):
    """`G Z` at unit noise, (S, P_block) by block, for Z (S, P_block) by block."""

    label = "products with the curvature"

    def __init__(self, problem: Problem, root: PositionedRoot, vectors: Vectors) -> None:
        super().__init__(problem, root, len(next(iter(vectors.values()))))
        self._vectors = vectors

    def cotangents(self, record: Record, start: int) -> Tensor:
        """Returns `RᵀJ Z` (B, R, S)."""
        if self._either_mode:
            return record.jvp(self._vectors)
        return summed(record[name].jvp(vectors.to(record.dtype)) for name, vectors in self._vectors.items())


class DataNoise(_Products):
    """`JᵀR ε` (S, P_block) by block, for standard normal ε: one a sample position, column of R and right-hand side."""

    label = "right-hand sides"

    def cotangents(self, record: Record, start: int) -> Tensor:
        """Returns ε (B, R, S), the same for a position whatever the batch it comes in."""
        shape, seed = (record.cotangents, self._count), self._problem.seed
        positions = range(start, start + record.samples)
        noise = [torch.randn(shape, generator=generator_at(seed, n, NOISE), dtype=torch.float64) for n in positions]
        return torch.stack(noise).to(self._problem.tangent.device, record.dtype)


def prior_noise(problem: Problem, count: int) -> Iterator[tuple[str, Tensor]]:
    """Yields standard normal ε₀ (S, P_block) block by block, the same at every call."""
    for index, block in enumerate(problem.tangent.blocks):
        seed = torch.randint(2**62, (), generator=generator_at(problem.seed, index, PRIOR))
        generator = torch.Generator(problem.tangent.device).manual_seed(int(seed))
        noise = torch.randn(
            (count, block.size), generator=generator, dtype=problem.tangent.dtype, device=generator.device
        )
        yield block.name, noise
