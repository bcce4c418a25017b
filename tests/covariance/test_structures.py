"""Every covariance structure, built from random tensors, against the dense matrix that its definition gives."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from lapwing.covariance import (
    COVARIANCES,
    Blockwise,
    DenseBlock,
    DenseCovariance,
    DiagonalBlock,
    ExplicitBasis,
    KroneckerBlock,
    LowRank,
    LowRankWithResidual,
    PriorCovariance,
    structures,
)
from lapwing.covariance.base import join_blocks, split_blocks
from lapwing.covariance.latent import Latent
from lapwing.covariance.terms import DenseTerm, EigenTerm, FactoredTerm
from lapwing.covariance.terms import concatenate as join_terms
from lapwing.data.inputs import Inputs
from tests.conformance import Setup, close, psd, sampled_from, setup
from tests.zoo import Case
from tests.zoo_modules import SpatialMean

NETWORKS = ("mlp", "mlp_scalar", "grouped", "embedding_bag_of_tokens", "shared_module")
on_two_kinds_of_block = pytest.mark.parametrize("problem", ["grouped", "embedding_bag_of_tokens"], indirect=True)
"""Blocks with groups and with one-hot inputs, for properties of Σ that only depend on the shapes of blocks."""
on_three_uses = pytest.mark.parametrize("problem", ["mlp_scalar", "grouped", "shared_module"], indirect=True)
DRAWS = 20_000


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def grouped() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Conv2d(4, 4, 2, groups=2), nn.Tanh(), SpatialMean(), nn.Linear(4, 2)]
        return nn.Sequential(*layers).double().eval()


GROUPED = Case("grouped", grouped, lambda b, s: random(b, 4, 3, 3, seed=s), 2, False, "a convolution in two groups")


@cache
def network(name: str) -> Setup:
    return Setup(GROUPED) if name == "grouped" else setup(name)


def orthogonal(groups: int, size: int, seed: int) -> Tensor:
    return torch.linalg.qr(random(groups, size, size, seed=seed))[0]


def spectrum(*shape: int, seed: int = 0) -> Tensor:
    """Non-negative numbers over some decades, a few of them exactly 0 as in a singular curvature."""
    values = torch.exp(1.5 * random(*shape, seed=seed))
    return torch.where(random(*shape, seed=seed + 1) < -1, 0.0, values)


class StructureConformance:
    """The checks; a structure gives `make` (the structure under test) and `oracle` (its definition, dense)."""

    scale = 1.7

    def make(self, problem: Setup, precision: Tensor, scale: float) -> PriorCovariance:
        raise AssertionError

    def oracle(self, problem: Setup, precision: Tensor, scale: float) -> Tensor:
        """Σ (P, P)."""
        raise AssertionError

    def whitened(self, problem: Setup, precision: Tensor) -> Tensor:
        """The part of `Δ^(-1/2) G Δ^(-1/2)` that the structure sees (P, P)."""
        root = problem.expand(precision).rsqrt()
        return root[:, None] * self.curvature(problem) * root

    def curvature(self, problem: Setup) -> Tensor:
        """G (P, P)."""
        raise AssertionError

    def log_det_ratio(self, problem: Setup, precision: Tensor, scale: float) -> Tensor:
        """`logdet(I + s Δ^(-1/2) G Δ^(-1/2))`."""
        whitened = self.whitened(problem, precision)
        return torch.linalg.slogdet(torch.eye(len(whitened)).double() + scale * whitened)[1]

    @staticmethod
    def precision(problem: Setup, seed: int | None = 5) -> Tensor:
        count = len(problem.blocks)
        return torch.full((count,), 0.8, dtype=torch.float64) if seed is None else torch.exp(random(count, seed=seed))

    @pytest.fixture(params=NETWORKS)
    def problem(self, request: pytest.FixtureRequest) -> Setup:
        return network(request.param)

    @pytest.fixture
    def built(self, problem: Setup) -> tuple[PriorCovariance, Tensor]:
        precision = self.precision(problem)
        return self.make(problem, precision, self.scale), self.oracle(problem, precision, self.scale)

    @on_two_kinds_of_block
    def test_products_diagonal_and_dense(self, problem, built):
        covariance, sigma = built
        assert covariance.size == len(sigma)
        close(covariance.to_dense(), sigma)
        assert psd(covariance.to_dense())
        close(join_blocks(covariance.blocks, covariance.diagonal()), sigma.diagonal())
        vectors = random(3, len(sigma))
        moved = covariance.mv(split_blocks(covariance.blocks, vectors))
        assert list(moved) == [block.name for block in problem.blocks]
        close(join_blocks(covariance.blocks, moved), vectors @ sigma)

    @on_two_kinds_of_block
    def test_samples(self, problem, built):
        covariance, sigma = built
        draws = covariance.sample(DRAWS, torch.Generator().manual_seed(0))
        sampled_from(join_blocks(covariance.blocks, draws), sigma)
        again = covariance.sample(7, torch.Generator().manual_seed(3))
        same = covariance.sample(7, torch.Generator().manual_seed(3))
        other = covariance.sample(7, torch.Generator().manual_seed(4))
        assert all(torch.equal(again[name], same[name]) for name in again)
        assert not torch.equal(join_blocks(covariance.blocks, again), join_blocks(covariance.blocks, other))

    def test_output_covariances(self, problem, built):
        covariance, sigma = built
        record = problem.tangent.record(problem.test)
        wanted = torch.einsum("ncp,pq,ndq->ncd", problem.J_test, sigma, problem.J_test)
        latent = Latent(record.outputs, covariance.output_covariance(record))
        close(latent.covariance, wanted)
        close(latent.variance, wanted.diagonal(dim1=-2, dim2=-1))
        draws = latent.sample(DRAWS, torch.Generator().manual_seed(1)) - latent.mean
        for n in range(len(wanted)):
            sampled_from(draws[:, n], wanted[n])
        joint = torch.einsum("ncp,pq,mdq->ncmd", problem.J_test, sigma, problem.J_test)
        close(covariance.joint_output_covariance(record, record), joint)
        few = problem.tangent.record(Inputs(problem.test).take(slice(0, 3)))
        close(covariance.joint_output_covariance(few, record), joint[:3])
        close(covariance.joint_output_covariance(record, few), joint[:, :, :3])

    @on_three_uses
    def test_output_covariances_of_other_cotangents(self, problem, built):
        covariance, sigma = built
        u = random(3, problem.case.outputs, 2)
        record = problem.tangent.record(problem.test, u)
        rows = torch.einsum("ncr,ncp->nrp", u, problem.J_test)
        terms = covariance.output_covariance(record)
        close(sum(term.dense() for term in terms), rows @ sigma @ rows.mT)

    @on_three_uses
    def test_chunks_join(self, problem, built):
        covariance, sigma = built
        parts = [problem.tangent.record(chunk) for chunk in (problem.test[:2], problem.test[2:])]
        terms = join_terms([covariance.output_covariance(part) for part in parts])
        wanted = problem.J_test @ sigma @ problem.J_test.mT
        close(sum(term.dense() for term in terms), wanted)

    @on_three_uses
    def test_push_equals_loops(self, problem, built):
        """`Σ_ii' M_ii' Cov[W_ji, W_j'i']` by explicit loops, for layers with one group."""
        covariance, sigma = built
        found = 0
        for block in problem.blocks:
            groups, outputs, inputs = block.matrix_shape
            if block.family != "linear" or groups > 1:
                continue
            found += 1
            where = problem.slices[block.name]
            tensor = sigma[where, where].reshape(outputs, inputs, outputs, inputs)
            layer = covariance.layer_block(block.name)
            mean, root = random(2, inputs), random(2, inputs, inputs, seed=3)
            spread = root @ root.mT / inputs
            for variance in (None, spread.diagonal(dim1=-2, dim2=-1), spread):
                added = 0 if variance is None else (torch.diag_embed(variance) if variance.ndim == 2 else variance)
                moment = mean[:, :, None] * mean[:, None, :] + added  # (B, I, I)
                wanted = torch.zeros(2, outputs, outputs).double()
                for n in range(2):
                    for j in range(outputs):
                        for k in range(outputs):
                            wanted[n, j, k] = (moment[n] * tensor[j, :, k, :]).sum()
                close(layer.push(mean, variance, True), wanted)
                close(layer.push(mean, variance, False), wanted.diagonal(dim1=-2, dim2=-1))
        assert found

    @on_two_kinds_of_block
    def test_with_prior_equals_rebuilding(self, problem, built):
        covariance, _ = built
        for seed, scale in ((None, 0.6), (8, 0.6), (9, 40.0)):
            precision = self.precision(problem, seed)
            for moved in (
                covariance.with_prior(precision, scale),
                covariance.with_prior(precision * 7, 3.0).with_prior(precision, scale),
            ):
                close(moved.to_dense(), self.oracle(problem, precision, scale))
                close(join_blocks(moved.blocks, moved.diagonal()), self.oracle(problem, precision, scale).diagonal())
        close(covariance.to_dense(), self.oracle(problem, self.precision(problem), self.scale))  # unchanged

    @on_three_uses
    def test_several_priors_at_once(self, problem, built):
        covariance, _ = built
        record = problem.tangent.record(problem.test)
        priors = [(self.precision(problem, seed), scale) for seed, scale in ((None, 0.6), (8, 2.0), (9, 40.0))]
        candidates, rows = [covariance.with_prior(*prior) for prior in priors], problem.J_test
        every, variances, scales = (
            list(covariance.output_covariances(record, candidates, reads))
            for reads in ("covariances", "variances", "scale")
        )
        centred = rows - rows.mean(1, keepdim=True)
        for i, prior in enumerate(priors):
            sigma = self.oracle(problem, *prior)
            wanted, between = (J @ sigma @ J.mT for J in (rows, centred))
            between = between.diagonal(dim1=1, dim2=2)
            close(sum(term.dense() for term in every[i]), wanted)
            ((marginals,), (scale,)) = variances[i], scales[i]
            close(marginals.variance(), wanted.diagonal(dim1=1, dim2=2))
            close(marginals.centred_variance(), between)
            close(scale.centred_variance(), between.mean(-1, keepdim=True))

    @on_two_kinds_of_block
    def test_log_det_ratio(self, problem, built):
        covariance, _ = built
        for seed, factor in product((None, 5, 11), (1.0, 1e-4, 1e5)):
            precision = self.precision(problem, seed) * factor
            for scale in (0.3, 20.0):
                wanted = self.log_det_ratio(problem, precision, scale)
                close(covariance.log_det_ratio(precision, scale), wanted, 1e-8)

    @on_two_kinds_of_block
    def test_log_det_ratio_gradient(self, problem, built):
        covariance, _ = built
        precision = self.precision(problem, 3).requires_grad_()
        scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(covariance.log_det_ratio, (precision, scale), eps=1e-6, atol=1e-6, rtol=1e-6)
        uniform = torch.tensor([0.8], dtype=torch.float64, requires_grad=True)
        shared = lambda delta: covariance.log_det_ratio(delta.expand(len(problem.blocks)), 1.3)  # noqa: E731
        assert torch.autograd.gradcheck(shared, (uniform,), eps=1e-6, atol=1e-6, rtol=1e-6)

    @on_two_kinds_of_block
    def test_evidence_gap(self, problem, built):
        """`s tr((I - VVᵀ) Δ^(-1/2) G Δ^(-1/2))`: all the curvature less what the structure sees."""
        covariance, _ = built
        precision = self.precision(problem, 3)
        root = problem.expand(precision).rsqrt()
        everything = (root * self.curvature(problem).diagonal() * root).sum()
        wanted = 0.7 * (everything - self.whitened(problem, precision).trace())
        found = covariance.evidence_gap(precision, 0.7)
        assert abs(float(found - wanted)) < 1e-9 * float(everything)
        if found.abs() > 1e-9:
            leaf = precision.requires_grad_()
            assert torch.autograd.gradcheck(lambda p: covariance.evidence_gap(p, 0.7), (leaf,), atol=1e-6, rtol=1e-6)

    @on_two_kinds_of_block
    def test_round_trip(self, problem, built):
        covariance, sigma = built
        tensors = {name: tensor.clone() for name, tensor in covariance.tensors().items()}
        kind = COVARIANCES[type(covariance).__name__]
        again = kind.from_tensors(problem.tangent, tensors, covariance.extra())
        assert type(again) is type(covariance)
        close(again.to_dense(), sigma)
        precision = self.precision(problem, 8)
        close(again.with_prior(precision, 0.6).to_dense(), self.oracle(problem, precision, 0.6))
        close(again.evidence_gap(precision, 0.6), covariance.evidence_gap(precision, 0.6))
        close(pickle.loads(pickle.dumps(covariance)).to_dense(), sigma)


class PrecisionConformance(StructureConformance):
    """The further checks of structures `(s G + Δ)⁻¹`."""

    def oracle(self, problem, precision, scale):
        root = problem.expand(precision).rsqrt()
        inner = torch.linalg.inv(scale * self.whitened(problem, precision) + torch.eye(len(root)).double())
        return root[:, None] * inner * root

    @on_two_kinds_of_block
    def test_full_rank(self, built):
        assert built[0].full_rank


class BlockwiseConformance(PrecisionConformance):
    """Blockwise covariances: `structure` gives one block's structure and its dense curvature."""

    def structure(self, block, seed):
        raise AssertionError

    def make(self, problem, precision, scale):
        structures = {b.name: self.structure(b, i)[0] for i, b in enumerate(problem.blocks)}
        return Blockwise(problem.blocks, structures, precision, scale)

    def curvature(self, problem):
        return torch.block_diag(*[self.structure(b, i)[1] for i, b in enumerate(problem.blocks)])


class TestDiagonalBlocks(BlockwiseConformance):
    def structure(self, block, seed):
        values = spectrum(block.size, seed=seed)
        return DiagonalBlock(values), torch.diag(values)


class TestDenseBlocks(BlockwiseConformance):
    def structure(self, block, seed):
        values, basis = spectrum(block.size, seed=seed), orthogonal(1, block.size, seed)[0]
        return DenseBlock(values, basis), basis @ torch.diag(values) @ basis.T


class TestKroneckerBlocks(BlockwiseConformance):
    """EKFAC's form, with eigenvalues that are not products. One-hot inputs have no basis; norms are diagonal."""

    def structure(self, block, seed):
        if block.matrix is None:
            return TestDiagonalBlocks.structure(self, block, seed)
        groups, outputs, inputs = block.matrix_shape
        values, out = spectrum(groups, outputs, inputs, seed=seed), orthogonal(groups, outputs, seed)
        if block.family == "embedding":
            rotation, within = torch.eye(inputs).double().repeat(groups, 1, 1), None
        else:
            rotation = within = orthogonal(groups, inputs, seed + 1)
        bases = [torch.kron(out[g].contiguous(), rotation[g].contiguous()) for g in range(groups)]
        dense = torch.block_diag(*[u @ torch.diag(values[g].flatten()) @ u.T for g, u in enumerate(bases)])
        factored = KroneckerBlock.of_factors(within, out, values.amax(1), values.amax(2), torch.tensor([3]))
        return replace(factored, eigenvalues=values), dense


class TestKroneckerBlocksOfFewSamples(TestKroneckerBlocks):
    """Most input directions have equal eigenvalues, as directions orthogonal to all data do."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        monkeypatch.setattr(structures, "MIN_SAVED_COLUMNS", 0)

    def structure(self, block, seed):
        structure, dense = super().structure(block, seed)
        if not isinstance(structure, KroneckerBlock) or structure.inputs is None:
            return structure, dense
        values = structure.eigenvalues
        values[..., : values.shape[-1] // 2 + 1] = 0
        bases = [
            torch.kron(u.contiguous(), v.contiguous()) for u, v in zip(structure.outputs, structure.inputs, strict=True)
        ]
        return structure, torch.block_diag(*[u * v.flatten() @ u.T for u, v in zip(bases, values, strict=True)])


class TestMixedBlocks(BlockwiseConformance):
    """All three kinds side by side."""

    def structure(self, block, seed):
        kind = (TestKroneckerBlocks(), TestDenseBlocks(), TestDiagonalBlocks())[seed % 3]
        return kind.structure(block, seed)


class TestDense(PrecisionConformance):
    def curvature(self, problem):
        size = sum(block.size for block in problem.blocks)
        root = random(size, size // 2)
        return root @ root.T + 0.5 * torch.eye(size).double()

    @pytest.mark.parametrize("ratio", [1.0, 3.0])
    def test_log_det_ratio_at_tiny_precisions(self, problem, built, ratio):
        """Two tiny precisions differ by less than an absolute tolerance, and still are not the same."""
        precision = torch.full((len(problem.blocks),), 1e-9, dtype=torch.float64)
        precision[-1] *= ratio
        root = problem.expand(precision).rsqrt()
        wanted = torch.linalg.slogdet(torch.eye(len(root)).double() + root[:, None] * self.curvature(problem) * root)[1]
        close(built[0].log_det_ratio(precision, 1.0), wanted, 1e-10)
        close(built[0].with_prior(precision, 1.0).to_dense(), self.oracle(problem, precision, 1.0))

    def make(self, problem, precision, scale):
        return DenseCovariance(problem.blocks, self.curvature(problem), precision, scale)


class TestLowRank(StructureConformance):
    """Directions W that are neither orthonormal nor whitened; the span alone matters."""

    residual = False
    structure = LowRank

    def curvature(self, problem):
        return TestDense().curvature(problem) / 10

    def directions(self, problem):
        return random(6, sum(block.size for block in problem.blocks))

    def whitened_span(self, problem, precision):
        """V (K, P) orthonormal, of `Δ^(1/2) span(W)`."""
        return torch.linalg.qr((self.directions(problem) * problem.expand(precision).sqrt()).T)[0].T

    def whitened(self, problem, precision):
        V = self.whitened_span(problem, precision)
        return V.T @ V @ super().whitened(problem, precision) @ V.T @ V

    def oracle(self, problem, precision, scale):
        root, V = problem.expand(precision).rsqrt(), self.whitened_span(problem, precision)
        inner = torch.linalg.inv(scale * V @ self.whitened(problem, precision) @ V.T + torch.eye(len(V)).double())
        middle = V.T @ inner @ V + (torch.eye(len(root)).double() - V.T @ V if self.residual else 0)
        return root[:, None] * middle * root

    def log_det_ratio(self, problem, precision, scale):
        V = self.whitened_span(problem, precision)
        inner = V @ StructureConformance.whitened(self, problem, precision) @ V.T
        return torch.linalg.slogdet(torch.eye(len(V)).double() + scale * inner)[1]

    def make(self, problem, precision, scale):
        W, G = self.directions(problem), self.curvature(problem)
        traces = torch.stack([G[where, where].trace() for where in problem.slices.values()])
        return self.structure(
            problem.blocks, ExplicitBasis(split_blocks(problem.blocks, W)), W @ G @ W.T, traces, precision, scale
        )


class TestLowRankWithResidual(TestLowRank, PrecisionConformance):
    residual = True
    structure = LowRankWithResidual


class TestFromRows(PrecisionConformance):
    """A curvature that lies in the span of rows: exact at every prior, though K numbers a weight are stored."""

    def rows(self, problem):
        size = sum(block.size for block in problem.blocks)
        return random(6, size), spectrum(6, seed=2) + 0.1

    def curvature(self, problem):
        U, values = self.rows(problem)
        return U.T @ torch.diag(values) @ U

    def log_det_ratio(self, problem, precision, scale):
        U, values = self.rows(problem)
        root = values.sqrt()[:, None] * U * problem.expand(precision).rsqrt()
        return torch.linalg.slogdet(torch.eye(len(root)).double() + scale * root @ root.T)[1]

    def make(self, problem, precision, scale):
        (U, values), G = self.rows(problem), self.curvature(problem)
        traces = torch.stack([G[where, where].trace() for where in problem.slices.values()])
        rows = ExplicitBasis(split_blocks(problem.blocks, U))
        return LowRankWithResidual.from_rows(problem.blocks, rows, torch.diag(values), traces, precision, scale)


def test_eigenvalues_of_kronecker_products(monkeypatch):
    monkeypatch.setattr(structures, "SLICE_NUMBERS", 8)  # two rows per step
    inputs, outputs = spectrum(2, 2, seed=1), spectrum(2, 3, seed=2)
    factored = KroneckerBlock.of_factors(None, orthogonal(2, 3, 0), inputs, outputs, torch.tensor([7]))
    close(factored.eigenvalues, torch.stack([torch.outer(outputs[g], inputs[g]) / 7 for g in range(2)]))


@pytest.mark.parametrize("precision", [0.0, 1e-17, 1e-12])
@pytest.mark.parametrize("row", [[1e-15, 0.0, 1e-17], [0.0, 0.0, 0.0]])
def test_rounding_noise_is_compared_with_the_smallest_row_or_column_that_is_not_zero(row, precision):
    values = torch.tensor([[[1.0, 0.0, 1e-3], row]], dtype=torch.float64)
    factored = KroneckerBlock.of_factors(None, orthogonal(1, 2, 0), values.amax(1), values.amax(2), torch.tensor([1]))
    largest = [*values[0].amax(0).tolist(), *values[0].amax(1).tolist()]
    wanted = torch.finfo(torch.float64).eps > min(value for value in largest if value > 0) + precision
    assert replace(factored, eigenvalues=values).has_rounding_noise(precision) == wanted


def test_scaled_factors_join():
    """Chunks of `F diag(s) Fᵀ`, alike, with another number of columns, and beside factors without a scale."""
    first, second, narrow = random(2, 3, 4), random(1, 3, 4), random(1, 3, 2)
    scales = [random(len(f), f.shape[-1]).abs() for f in (first, second, narrow)]

    def dense(factor: Tensor, scale: Tensor) -> Tensor:
        return factor @ torch.diag_embed(scale) @ factor.mT

    alike = join_terms([(FactoredTerm(first, scales[0]),), (FactoredTerm(second, scales[1]),)])
    assert isinstance(alike[0], FactoredTerm)
    wanted = torch.cat([dense(first, scales[0]), dense(second, scales[1])])
    close(alike[0].dense(), wanted)
    close(alike[0].variance(), wanted.diagonal(dim1=1, dim2=2))
    for other, matrix in (
        (FactoredTerm(narrow, scales[2]), dense(narrow, scales[2])),
        (FactoredTerm(second), second @ second.mT),
    ):
        (joined,) = join_terms([(FactoredTerm(first, scales[0]),), (other,)])
        close(joined.dense(), torch.cat([dense(first, scales[0]), matrix]))


def test_terms_of_different_kinds_join():
    """A chunk of one-token texts has thin factors where longer texts have matrices."""
    factor, matrix = random(2, 3, 4), random(1, 3, 3)
    matrix = matrix @ matrix.mT
    scale, basis = spectrum(2, 3) + 0.1, orthogonal(1, 3, 0)[0]
    joined = join_terms(
        [(FactoredTerm(factor), EigenTerm(basis, scale)), (EigenTerm(basis, scale[:1]), DenseTerm(matrix))]
    )
    wanted = torch.cat([
        factor @ factor.mT + EigenTerm(basis, scale).dense(), EigenTerm(basis, scale[:1]).dense() + matrix,
    ])  # fmt: skip
    close(sum(term.dense() for term in joined), wanted)
    joined = join_terms([(FactoredTerm(factor), FactoredTerm(factor)), (DenseTerm(matrix),)])
    close(sum(term.dense() for term in joined), torch.cat([2 * factor @ factor.mT, matrix]))
