"""KFAC and EKFAC: Kronecker-factored Laplace, exact in the eigenbasis of its factors.

Both share the factor pass; EKFAC adds a second pass for the true second moments in KFAC's eigenbasis.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor

from ..covariance import Blockwise, DenseBlock, DiagonalBlock, KroneckerBlock, Structure
from ..jacobian.jacobian import MatrixJacobian
from ..jacobian.outer import FisherSums
from ..likelihoods import Likelihood
from ..linalg import check_matrices, doubled, eigen_in_place, mirrored, symmetric_eigen
from ..tangent import MemoryNeed, Tangent
from .footprint import DECOMPOSITION_BYTES, FitShape, Footprint, decompositions
from .passes import Batch, CurvaturePass, Method, Passes, run_curvature_pass
from .problem import Problem
from .state import BlockSums, State

log = logging.getLogger("lapwing")

MatrixSums = MatrixJacobian | FisherSums  # `Record.sums` of a block with a matrix layout


@dataclass(frozen=True)
class KFAC(Method):
    """Kronecker-factored Laplace, `Σ = (s Γ ⊗ A/M + δI)⁻¹` with `s = N/(n σ² τ)`, exact in the eigenbasis.

    `A = Σ a aᵀ` over layer inputs (the bias is a coordinate of ones), `Γ = Σ g gᵀ` over output gradients with the
    Fisher root. M is the number of positions of all samples, or their total weight. There is no damping by √δ.

    Args:
        weight_sharing: treatment of weights that are used at several positions (convolution, tokens). "expand" treats
            every position as a sample; "reduce" uses the mean of a and the sum of g over positions (Eschenhagen et al.
            2023, section 3).
        uncovered: structure of parameters without a Kronecker product (norms, scales, generic ones, tied weights whose
            uses disagree), even if `lw.coverage` names a family for them: "diagonal", or "dense" for the exact GGN
            block.
        fisher: "sampled" draws a label y from the network's own prediction for each sample, and uses the gradients of
            its log probability, `Λ ≈ r rᵀ` with `r = ∂log p(y|f)` and `E[r rᵀ] = Λ`; for outputs with positions 8
            draws. The factors have a relative error of order 1/√N, and for small N the inverse is too wide: for a
            10-32-5 network, variances were 1.2 to 1.8 times the exact ones for N = 100 and within 2 % for 1 600.
            Confident networks need more samples. Evidences differed by up to 55 nats: compare only fits with the same
            `fisher`. None: sampled above 1 000 outputs (of all positions), exact below and for a last layer alone.

    Cost: one pass of C backward passes of activations, or of one if sampled; memory O(D_in² + D_out²) per layer. At the
    end, time O(D³) per layer, or O(D² n) for a factor of width D that is summed over n < D rows. A prediction rotates
    the inputs of each layer, O(D_in²) per position, or O(D_in n) for a layer with one position if the fit had far fewer
    samples n.
    """

    accepts_further_data = True
    weight_sharing: Literal["expand", "reduce"] = "expand"
    uncovered: Literal["diagonal", "dense"] = "diagonal"
    fisher: Literal["sampled"] | None = None

    def check(self, tangent: Tangent, likelihood: Likelihood) -> None:
        """Warns if no layer family covers most weights: the method is then almost `Diagonal`."""
        unknown = [block for block in tangent.blocks if block.name in tangent.reasons]
        weights = sum(block.size for block in unknown)
        if self.uncovered == "diagonal" and 2 * weights > tangent.size:
            log.warning(
                "%s ignores the covariances of %d of %d weights, since no layer family covers them (%s: %s). Write "
                "%s(uncovered='dense') or lw.Full() if they are few. lw.coverage(model, x) lists all reasons.",
                type(self).__name__, weights, tangent.size, unknown[0].name, tangent.reasons[unknown[0].name],
                type(self).__name__,
            )  # fmt: skip

    def passes(self, problem: Problem) -> Passes:
        return (yield from run_curvature_pass(self._factor_pass(problem)))

    def _kinds(self, tangent: Tangent) -> dict[str, str]:
        """Returns block name -> "kronecker", "diagonal" or "dense"."""
        return {block.name: "kronecker" if block.matrix is not None else self.uncovered for block in tangent.blocks}

    def _factor_pass(self, problem: Problem) -> _FactorPass:
        problem = problem.with_drawn_root() if self.fisher == "sampled" else problem
        return _FactorPass(problem, self._kinds(problem.tangent), self.weight_sharing == "reduce")

    def footprint(self, shape: FitShape) -> Footprint:
        shape = shape.with_drawn_root() if self.fisher == "sampled" else shape
        kinds, entries, sizes, dense = self._kinds(shape.tangent), [0], list[int](), 0
        for block in shape.tangent.blocks:
            if block.matrix is not None:
                groups, outputs, inputs = block.matrix_shape
                widths = (outputs,) if block.matrix.one_hot else (outputs, inputs)
                entries.append(groups * max(widths) ** 2)
                sizes += widths * groups
            elif kinds[block.name] == "dense":
                dense += block.size**2
                entries.append(2 * block.size**2)
                sizes.append(block.size)
        kept = shape.stored(Blockwise, {"kinds": kinds})
        peak = kept + max(shape.chunk(), DECOMPOSITION_BYTES * max(entries))
        name = f"{type(self).__name__}(uncovered='dense')"
        need = MemoryNeed(name, 8 * dense, "dense blocks", "write uncovered='diagonal'")
        return Footprint(kept, peak, shape.pass_length, needs=(need,), products=decompositions(*sizes))


class EKFAC(KFAC):
    """Eigenvalue-corrected KFAC: the eigenbasis of KFAC, with the true second moments of the Jacobian as eigenvalues.

    `λ_ji = Σ_n,r (U_outᵀ J U_in)²_ji`, for each row of J as a matrix (O, I): the best diagonal in that basis in
    Frobenius norm (George et al. 2018, section 3). The options are as in `KFAC`.

    Cost: two passes of C backward passes of activations each, or of one if sampled; memory O(D_in² + D_out² + P) per
    layer.
    """

    accepts_further_data: ClassVar[bool] = False

    def passes(self, problem: Problem) -> Passes:
        factors = self._factor_pass(problem)
        structures = factors.finish((yield factors)).structures
        return (yield from run_curvature_pass(_SecondMoments(factors.problem, structures)))

    def footprint(self, shape: FitShape) -> Footprint:
        factors, tangent = super().footprint(shape), shape.tangent
        peak = factors.peak + tangent.size * tangent.dtype.itemsize
        return replace(factors, peak=peak, passes=2 * factors.passes)


@dataclass
class Factors(State):
    """Sums by block: `diagonal`, `dense`, or A and Gamma, which `mirrored` or `eigen_in_place` reads.

    `count` and `excess` have an entry for each block of A, in its order: one operation adds to all.
    """

    count: Tensor  # number of positions for each block of A (n_blocks,)
    excess: Tensor | None = None  # `Σ (w - 1)` over positions (n,) float64, if weighted
    diagonal: dict[str, Tensor] = field(default_factory=dict)  # `Σ J²` (P_block,)
    dense: dict[str, Tensor] = field(default_factory=dict)  # `Σ JᵀJ` (P_block, P_block)
    A: dict[str, Tensor] = field(default_factory=dict)  # lower triangle of `Σ a aᵀ` (G, I, I); one-hot: diagonal (G, I)
    Gamma: dict[str, Tensor] = field(default_factory=dict)  # lower triangle of `Σ g gᵀ` (G, O, O)


@dataclass(eq=False)
class _FactorPass(CurvaturePass[Factors]):
    """Sums A, Γ and M of the Kronecker-factored blocks, and the diagonals or dense matrices of the other blocks."""

    problem: Problem
    kinds: dict[str, str]  # block name -> "kronecker", "diagonal" or "dense"
    reduce: bool  # whether weights are shared as by `weight_sharing="reduce"`
    label = "Kronecker factors"

    def init(self) -> Factors:
        zeros, count = self.problem.zeros, [*self.kinds.values()].count(KroneckerBlock.kind)
        state = Factors(zeros(count, dtype=torch.int64))
        for block in self.problem.tangent.blocks:
            name, kind = block.name, self.kinds[block.name]
            if kind == "diagonal":
                state.diagonal[name] = zeros(block.size)
            elif kind == "dense":
                state.dense[name] = zeros(block.size, block.size, dtype=torch.float64)
            else:
                groups, outputs, inputs = block.matrix_shape
                one_hot = block.matrix is not None and block.matrix.one_hot
                state.A[name] = zeros(groups, inputs) if one_hot else zeros(groups, inputs, inputs)
                state.Gamma[name] = zeros(groups, outputs, outputs)
        return state

    def update(self, state: Factors, batch: Batch) -> None:
        for _, record in batch.records(self.problem.summed_root):
            weights = None  # for A: (B, T) at T positions of the outputs, or (B, 1)
            if record.weights is not None:
                width = min(record.weights.shape[1], self.problem.tangent.outputs)
                weights = doubled(record.weights).unflatten(1, (-1, width)).mean(2)
            counts = []
            for name, kind in self.kinds.items():
                if kind == "diagonal":
                    state.diagonal[name] += record.sums(name).squared_sum()
                elif kind == "dense":
                    rows = doubled(record[name].rows().flatten(0, 1))
                    state.dense[name] += rows.T @ rows
                else:
                    sums = cast("MatrixSums", record.sums(name))
                    counts.append(sums.add_kronecker_factors(self.reduce, state.A[name], state.Gamma[name], weights))
            count = state.count.new_tensor(counts)
            state.count += count
            if weights is not None:
                more = (weights.mean(1).sum() / record.samples - 1) * count.to(weights.device)
                state.excess = more if state.excess is None else state.excess + more

    def finish(self, state: Factors) -> Blockwise:
        problem, tangent = self.problem, self.problem.tangent
        softmax = problem.likelihood.activation == "softmax" and not tangent.plan.tail
        logits = {block.name for block in tangent.blocks if softmax and tangent.gives_outputs(block)}
        work = {n: sum(f[n].shape[-1] ** 3 for f in (state.A, state.Gamma) if f[n].ndim == 3) for n in state.A}
        check_matrices([*state.A.values(), *state.Gamma.values()])
        widest_first = sorted(work, key=work.__getitem__, reverse=True)  # while few other eigenvectors are in memory
        count = state.count  # the number of positions, or their total weight
        if state.excess is not None:  # if all weights are 0, there are no data and λ = 0
            count = (doubled(count) + state.excess).clamp_min(torch.finfo(torch.float64).tiny)
        positions = dict(zip(state.A, state.count.tolist(), strict=True))
        counts, rank = dict(zip(state.A, count[:, None], strict=True)), problem.summed_root.rank
        found: dict[str, Structure] = {name: DiagonalBlock(total) for name, total in state.diagonal.items()}
        found |= {n: _eigenbasis(state, n, positions[n], counts[n], rank, n in logits) for n in widest_first}
        for name, total in state.dense.items():
            found[name] = DenseBlock(*(part.to(tangent.device, tangent.dtype) for part in symmetric_eigen(total)))
        structures = {name: found[name] for name in self.kinds}
        return Blockwise(tangent.blocks, structures, problem.precision, problem.scale.of_curvature)


class _SecondMoments(CurvaturePass[BlockSums]):
    """Sums `Σ_n,r (U_outᵀ J U_in)²` (G, O, I) for each Kronecker-factored block; a row of J is a matrix (O, I)."""

    label = "second moments in KFAC's eigenbasis"

    def __init__(self, problem: Problem, structures: Mapping[str, Structure]) -> None:
        self._problem, self._structures = problem, structures
        self._bases = {n: cast("KroneckerBlock", s) for n, s in structures.items() if s.kind == KroneckerBlock.kind}

    def basis_tensors(self) -> Iterator[Tensor]:
        return (tensor for structure in self._structures.values() for tensor in structure.tensors().values())

    def init(self) -> BlockSums:
        return BlockSums({name: torch.zeros_like(basis.eigenvalues) for name, basis in self._bases.items()})

    def update(self, state: BlockSums, batch: Batch) -> None:
        for _, record in batch.records(self._problem.summed_root):
            for name, basis in self._bases.items():
                sums = cast("MatrixSums", record.sums(name))
                squares = sums.rotated_squared_sum(basis.inputs, basis.outputs)
                state.blocks[name] += squares.reshape_as(state.blocks[name])  # (G, O, I)

    def finish(self, state: BlockSums) -> Blockwise:
        corrected = {n: replace(old, eigenvalues=state.blocks[n]) for n, old in self._bases.items()}
        problem, structures = self._problem, {**self._structures, **corrected}
        return Blockwise(problem.tangent.blocks, structures, problem.precision, problem.scale.of_curvature)


def _eigenbasis(state: Factors, name: str, positions: int, count: Tensor, rank: int, centred: bool) -> KroneckerBlock:
    """Diagonalises both factors and frees them: `λ_ji = γ_j α_i / M` with M = `count` (1,).

    A is a sum of `positions` outer products, and Γ of `rank` times as many. For logits, Γ maps the vector of ones to 0
    up to rounding. With a weak prior, the rounding would carry the large variance of that direction to other outputs;
    `centred` removes it.
    """
    # 1. A = U_in diag(α) U_inᵀ (G, I, I), or diag(α)
    if state.A[name].ndim == 2:  # one-hot inputs: A is stored as its diagonal
        alpha, inputs = doubled(state.A[name]), None
    else:
        alpha, inputs = _diagonalised(state.A, name, positions)
    # 2. Γ = U_out diag(γ) U_outᵀ (G, O, O)
    gamma, outputs = _diagonalised(state.Gamma, name, rank * positions, centred)
    return KroneckerBlock.of_factors(inputs, outputs, alpha, gamma, count)


def _diagonalised(factors: dict[str, Tensor], name: str, rank: int, centred: bool = False) -> tuple[Tensor, Tensor]:
    """Returns λ (G, n) in float64 and U (G, n, n) in the dtype of the factor, whose memory it frees."""
    device, dtype = factors[name].device, factors[name].dtype
    if centred:
        # (I - 11ᵀ/n) Γ (I - 11ᵀ/n)
        factors[name] = mirrored(doubled(factors[name]))
        factors[name] -= factors[name].mean(-1, keepdim=True)
        factors[name] -= factors[name].mean(-2, keepdim=True)
    values, vectors = eigen_in_place(factors.pop(name), rank, dtype)
    return values, vectors.to(device, dtype, memory_format=torch.contiguous_format)
