"""The curvature of one block, `U diag(λ) Uᵀ`: diagonal, Kronecker-factored or dense in its own eigenbasis.

U is orthonormal: the identity, a Kronecker product or a dense matrix. Every function of the curvature is a weighting
`w(λ)` of that basis, so a prior never refactorises anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..contents import Entry, Mismatch, largest
from ..jacobian.jacobian import SLICE_BYTES, MatrixJacobian, Weighting
from ..jacobian.outer import Outer
from ..linalg import matmul
from ..tangent import Block, BlockJacobian
from .base import LayerBlock
from .spectrum import condensed
from .terms import DenseTerm, EigenTerm, FactoredTerm, MarginalTerm, Term, cross_covariance, factored_or_dense, unique

MATRIX_SIDE = 4096
"""A layer with at most so many weights may have its covariance written out, 64 MiB, where that spares work."""

SPARED = 128
"""Columns of products that must be spared for input directions to be left out of a rotation: it takes further steps."""


class Structure(ABC):
    """The curvature of one block, `U diag(λ) Uᵀ`.

    Attributes:
        eigenvalues: λ, in any shape of P entries; weights w have the same shape.
    """

    kind: str
    eigenvalues: Tensor

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor | None]:
        """The eigenvalues as float64 points and weights, few where they are many."""
        return condensed(self.eigenvalues)

    @abstractmethod
    def rotate(self, vectors: Tensor, back: bool = False) -> Tensor:
        """Returns `Uᵀ v` (or `U v`) for v (..., P), in the shape (..., *λ.shape) on the rotated side."""

    @abstractmethod
    def diagonal(self, weights: Tensor) -> Tensor:
        """Returns the diagonal of `U diag(w) Uᵀ` (P,)."""

    @abstractmethod
    def outputs_at(self, jacobian: BlockJacobian, candidates: Iterable[Weighting]) -> Iterator[Term]:
        """Yields `J U diag(w) Uᵀ Jᵀ` of each sample, for several weights w: J is rotated, or its rows formed, once."""

    def marginals_at(self, jacobian: BlockJacobian, candidates: Iterable[Weighting]) -> Iterator[MarginalTerm]:
        """Yields the variances of `outputs_at` alone."""
        return (term.marginals() for term in self.outputs_at(jacobian, candidates))

    @abstractmethod
    def joint_output(self, jacobian: BlockJacobian, other: BlockJacobian, weights: Tensor) -> Tensor:
        """Returns `J U diag(w) Uᵀ J'ᵀ` (B, R, B', R') for the samples of two Jacobians, which may be the same one."""

    @abstractmethod
    def push(
        self, weights: Tensor, shape: tuple[int, int], mean: Tensor, variance: Tensor | None, full: bool
    ) -> Tensor:
        """Returns `LayerBlock.push` for a weight of shape (O, I)."""

    def rotation(self, weights: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor | None, Tensor] | None:
        """Returns `LayerBlock.rotation` for a weight of shape (G, O, I)."""
        return None

    def noise(self, precision: float) -> float:
        """Returns the largest rounding error of an eigenvalue over its sum with a precision, λ + δ."""
        return 0.0

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that make up the structure."""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Structure:
        """Rebuilds the structure from `tensors()`, which agree with `entries`."""
        return cls(**tensors)

    @classmethod
    @abstractmethod
    def entries(cls, block: Block, dtype: torch.dtype) -> dict[str, Entry]:
        """Returns what `tensors()` of a block in a file must be.

        Raises:
            Mismatch: for a block that cannot have this structure.
        """


class DiagonalBlock(Structure):
    """`diag(λ)`."""

    kind = "diagonal"

    def __init__(self, eigenvalues: Tensor) -> None:
        self.eigenvalues = eigenvalues

    def rotate(self, vectors: Tensor, back: bool = False) -> Tensor:
        """Returns v: the basis is the identity."""
        return vectors

    def diagonal(self, weights: Tensor) -> Tensor:
        """Returns w."""
        return weights

    def outputs_at(self, jacobian: BlockJacobian, candidates: Iterable[Weighting]) -> Iterator[Term]:
        """Yields diagonals for an output layer, thin factors for one position, else matrices."""
        if isinstance(jacobian, Outer) and jacobian.is_output:
            return (EigenTerm(None, jacobian.input_scale(weighting)) for weighting in candidates)
        return _weighted(jacobian, candidates)

    def marginals_at(self, jacobian: BlockJacobian, candidates: Iterable[Weighting]) -> Iterator[MarginalTerm]:
        """Yields the variances, from squares taken once."""
        if isinstance(jacobian, Outer) and jacobian.is_output:
            return super().marginals_at(jacobian, candidates)
        return _weighted_marginals(jacobian, candidates)

    def joint_output(self, jacobian: BlockJacobian, other: BlockJacobian, weights: Tensor) -> Tensor:
        """Returns the weighted Gram matrix across samples."""
        return jacobian.joint_weighted_gram(weights, other)

    def push(
        self, weights: Tensor, shape: tuple[int, int], mean: Tensor, variance: Tensor | None, full: bool
    ) -> Tensor:
        """Returns `(m² + v) wᵀ`: covariances of the input do not count beside their diagonal."""
        moment = mean.square()
        if variance is not None:
            moment = moment + (variance if variance.ndim == 2 else variance.diagonal(dim1=-2, dim2=-1))
        pushed = moment @ weights.reshape(shape).T  # (B, O)
        return torch.diag_embed(pushed) if full else pushed

    def rotation(self, weights: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor | None, Tensor]:
        """Returns the identity and w."""
        return None, weights.reshape(shape)

    def tensors(self) -> dict[str, Tensor]:
        """Returns λ."""
        return {"eigenvalues": self.eigenvalues}

    @classmethod
    def entries(cls, block: Block, dtype: torch.dtype) -> dict[str, Entry]:
        """One number a weight, none negative."""
        return {"eigenvalues": Entry((block.size,), (dtype,), minimum=0.0)}


@dataclass(frozen=True)
class KroneckerFactors:
    """The eigenpairs of a layer's two factors, sums over data, and how many positions they were summed over.

    Data can be added to them: `A = U_in diag(α) U_inᵀ` and `Γ = U_out diag(γ) U_outᵀ` are sums themselves.

    Attributes:
        inputs: U_in (G, I, I), or None where A is diagonal (embeddings).
        outputs: U_out (G, O, O).
        input_eigenvalues: α (G, I), float64.
        output_eigenvalues: γ (G, O), float64.
        count: # (1,), an integer.
    """

    inputs: Tensor | None
    outputs: Tensor
    input_eigenvalues: Tensor
    output_eigenvalues: Tensor
    count: Tensor

    def __post_init__(self) -> None:
        """Copies bases that are not contiguous: predictions multiply by their rows."""
        object.__setattr__(self, "inputs", None if self.inputs is None else self.inputs.contiguous())
        object.__setattr__(self, "outputs", self.outputs.contiguous())

    def products(self) -> Tensor:
        """Returns `γ_j α_i / #` (G, O, I), the eigenvalues of KFAC's curvature."""
        products = self.output_eigenvalues[..., :, None] * self.input_eigenvalues[..., None, :] / self.count.double()
        return products.to(self.outputs.dtype)


class KroneckerBlock(Structure):
    """`(U_out ⊗ U_in) diag(λ) (U_out ⊗ U_in)ᵀ` in G groups, with U_in None where A is diagonal (embeddings).

    Args:
        eigenvalues: λ (G, O, I): KFAC's `α_i γ_j / #`, or EKFAC's second moments of the rotated Jacobian.
        factors: the eigenpairs of the layer's factors.
    """

    kind = "kronecker"

    def __init__(self, eigenvalues: Tensor, factors: KroneckerFactors) -> None:
        self.eigenvalues, self.factors = eigenvalues, factors

    @property
    def inputs(self) -> Tensor | None:
        """U_in (G, I, I), or None."""
        return self.factors.inputs

    @property
    def outputs(self) -> Tensor:
        """U_out (G, O, O)."""
        return self.factors.outputs

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the columns that predictions cut and keep."""
        return {name: value for name, value in self.__dict__.items() if name != "_seen"}

    def rotate(self, vectors: Tensor, back: bool = False) -> Tensor:
        """Returns `U_outᵀ M U_in` for v seen as M (G, O, I), or its inverse."""
        matrix = vectors if back else vectors.unflatten(-1, self.eigenvalues.shape)
        outputs = self.outputs if back else self.outputs.mT
        matrix = outputs @ matrix
        if self.inputs is not None:
            matrix = matrix @ (self.inputs.mT if back else self.inputs)
        return matrix.flatten(-3) if back else matrix

    def noise(self, precision: float) -> float:
        """Looks at the eigenvalues beside the largest of the other factor; those of 0 are exact."""
        largest = torch.cat([self.eigenvalues.amax(1).flatten(), self.eigenvalues.amax(2).flatten()])
        least = largest[largest > 0].amin() if largest.any() else torch.ones(())
        return float(torch.finfo(largest.dtype).eps * largest.amax() / (least + precision))

    def diagonal(self, weights: Tensor) -> Tensor:
        """Returns `U_out² w (U_in²)ᵀ` (P,)."""
        spread = self.outputs.square() @ weights
        return (spread if self.inputs is None else spread @ self.inputs.square().mT).flatten()

    def outputs_at(self, jacobian: BlockJacobian, candidates: Iterable[Weighting]) -> Iterator[Term]:
        """Rotates a and g, then weights them; an output layer keeps `U_out diag(s) U_outᵀ` as factors."""
        rotated, candidates = self._rotated(jacobian, candidates)
        if isinstance(rotated, Outer) and rotated.is_output:
            return (EigenTerm(self.outputs[0], rotated.input_scale(weighting)) for weighting in candidates)
        return _weighted(rotated, candidates)

    def marginals_at(self, jacobian: BlockJacobian, candidates: Iterable[Weighting]) -> Iterator[MarginalTerm]:
        """Rotates a and g, then takes the variances, from squares taken once."""
        if isinstance(jacobian, Outer) and jacobian.is_output:
            return super().marginals_at(jacobian, candidates)
        return _weighted_marginals(*self._rotated(jacobian, candidates))

    def _rotated(
        self, jacobian: BlockJacobian, candidates: Iterable[Weighting]
    ) -> tuple[BlockJacobian, Iterable[Weighting]]:
        """Returns J in the eigenbasis, an output layer's g as it is, and the weights of its rows."""
        assert isinstance(jacobian, MatrixJacobian)
        basis = self.inputs
        if isinstance(jacobian, Outer) and self._few and not jacobian.a.requires_grad:  # a length has a kink at 0
            jacobian = jacobian.rotate_inputs(self._seen)
            basis, candidates = None, map(self._of_seen, candidates)
        if isinstance(jacobian, Outer) and jacobian.is_output:
            return jacobian.rotate(basis, None), candidates
        return jacobian.rotate(basis, self.outputs), candidates

    def _of_seen(self, weighting: Weighting) -> Weighting:
        """Returns the weights of the directions seen, behind the one that stands for all others."""
        return Weighting(weighting.flat.reshape(self.eigenvalues.shape[1:])[:, self._shared - 1 :])

    @cached_property
    def _shared(self) -> int:
        """How many of the first input directions have the same eigenvalues: A's null space, which no sample showed."""
        same = (self.eigenvalues == self.eigenvalues[..., :1]).flatten(0, 1).all(0)
        return int(same.cumprod(0).sum())

    @cached_property
    def _seen(self) -> Tensor:
        """The other input directions (I, k)."""
        assert self.inputs is not None
        return self.inputs[0, :, self._shared :].contiguous()

    @property
    def _few(self) -> bool:
        """Whether a product with the other directions, and one back, are less work than one with all of them."""
        return self.inputs is not None and 2 * self._shared - self.inputs.shape[-1] > SPARED

    def joint_output(self, jacobian: BlockJacobian, other: BlockJacobian, weights: Tensor) -> Tensor:
        """Rotates a and g, then takes the weighted Gram matrix across samples."""
        rotated = []
        for one in unique(jacobian, other):
            assert isinstance(one, MatrixJacobian)
            rotated.append(one.rotate(self.inputs, self.outputs))
        return rotated[0].joint_weighted_gram(weights.flatten(), rotated[-1])

    def push(
        self, weights: Tensor, shape: tuple[int, int], mean: Tensor, variance: Tensor | None, full: bool
    ) -> Tensor:
        """Returns `U_out diag_j(Σ_i (U_inᵀ M U_in)_ii w_ji) U_outᵀ`: Streamlined Prediction's equation 10, exact."""
        assert self.inputs is not None  # tokens have no moments
        basis = self.inputs[0]
        moment = (mean @ basis).square()
        if variance is not None:
            moment = moment + (
                variance @ basis.square() if variance.ndim == 2 else ((variance @ basis) * basis).sum(-2)
            )
        rotated = EigenTerm(self.outputs[0], moment @ weights[0].T)
        return rotated.dense() if full else rotated.variance()

    def rotation(self, weights: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor | None, Tensor]:
        """Returns U_in and `U_out² w`."""
        return self.inputs, self.outputs.square() @ weights

    def tensors(self) -> dict[str, Tensor]:
        """Returns λ, and the factors' eigenpairs and count."""
        named = {"eigenvalues": self.eigenvalues, **vars(self.factors)}
        return {name: value for name, value in named.items() if value is not None}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> KroneckerBlock:
        """Rebuilds the block."""
        factors: Any = {"inputs": None, **tensors}
        return cls(factors.pop("eigenvalues"), KroneckerFactors(**factors))

    @classmethod
    def entries(cls, block: Block, dtype: torch.dtype) -> dict[str, Entry]:
        """λ, none negative, and both factors' eigenpairs; embeddings have no basis for their inputs."""
        if block.matrix is None:
            raise Mismatch(f"the block of {', '.join(block.parameters)} has no Kronecker factors")
        groups, outputs, inputs = block.matrix_shape
        most = largest(torch.float64, 1 / 2)
        named = {
            "eigenvalues": Entry((groups, outputs, inputs), (dtype,), minimum=0.0),
            "outputs": Entry((groups, outputs, outputs), (dtype,), orthonormal=True),
            "input_eigenvalues": Entry((groups, inputs), (torch.float64,), 0.0, most),
            "output_eigenvalues": Entry((groups, outputs), (torch.float64,), 0.0, most),
            "count": Entry((1,), (torch.int64,), 1, 2**48),
        }
        if block.family != "embedding":
            named["inputs"] = Entry((groups, inputs, inputs), (dtype,), orthonormal=True)
        return named


class DenseBlock(Structure):
    """`U diag(λ) Uᵀ` with a dense U (P, P)."""

    kind = "dense"

    def __init__(self, eigenvalues: Tensor, basis: Tensor) -> None:
        self.eigenvalues, self.basis = eigenvalues, basis

    def rotate(self, vectors: Tensor, back: bool = False) -> Tensor:
        """Returns `Uᵀ v` or `U v`."""
        return vectors @ (self.basis.T if back else self.basis)

    def diagonal(self, weights: Tensor) -> Tensor:
        """Returns `U² w`."""
        return self.basis.square() @ weights

    def outputs_at(self, jacobian: BlockJacobian, candidates: Iterable[Weighting]) -> Iterator[Term]:
        """Forms the rows and rotates them."""
        rows = matmul(jacobian.rows(), self.basis)
        return (factored_or_dense(rows * weighting.flat.sqrt()) for weighting in candidates)

    def joint_output(self, jacobian: BlockJacobian, other: BlockJacobian, weights: Tensor) -> Tensor:
        """Forms the rows."""
        factors = [matmul(one.rows(), self.basis * weights.sqrt()) for one in unique(jacobian, other)]
        return cross_covariance(factors[0], factors[-1])

    def push(
        self, weights: Tensor, shape: tuple[int, int], mean: Tensor, variance: Tensor | None, full: bool
    ) -> Tensor:
        """Contracts the dense block."""
        return push_factor((self.basis * weights.sqrt()).T.reshape(-1, *shape), mean, variance, full)

    def tensors(self) -> dict[str, Tensor]:
        """Returns λ and U."""
        return {"eigenvalues": self.eigenvalues, "basis": self.basis}

    @classmethod
    def entries(cls, block: Block, dtype: torch.dtype) -> dict[str, Entry]:
        """λ, none negative, and U."""
        size = block.size
        return {
            "eigenvalues": Entry((size,), (dtype,), minimum=0.0),
            "basis": Entry((size, size), (dtype,), orthonormal=True),
        }


def _weighted(jacobian: BlockJacobian, candidates: Iterable[Weighting]) -> Iterator[Term]:
    """Yields `J diag(w) Jᵀ` as thin factors where the layer sees one position, else as matrices."""
    if isinstance(jacobian, Outer):
        return (FactoredTerm(jacobian.g, jacobian.input_scale(weighting)) for weighting in candidates)
    return map(DenseTerm, jacobian.weighted_grams(weighting.flat for weighting in candidates))


def _weighted_marginals(jacobian: BlockJacobian, candidates: Iterable[Weighting]) -> Iterator[MarginalTerm]:
    """Yields the variances of `_weighted`."""
    if isinstance(jacobian, Outer):
        norms = jacobian.scaled_norms(map(jacobian.input_scale, candidates))
    else:
        norms = jacobian.weighted_norms(weighting.flat for weighting in candidates)
    return map(MarginalTerm, *norms)


STRUCTURES: dict[str, type[Structure]] = {cls.kind: cls for cls in (DiagonalBlock, KroneckerBlock, DenseBlock)}


class FactorLayer(LayerBlock):
    """One layer's `Σ_k F_k F_kᵀ` for rows F (K, O, I)."""

    def __init__(self, factor: Tensor) -> None:
        self._factor = factor

    def push(self, mean: Tensor, variance: Tensor | None, full: bool) -> Tensor:
        rows, outputs, inputs = self._factor.shape
        fits = outputs * inputs <= max(rows, MATRIX_SIDE)
        if variance is not None and variance.ndim == 3 and rows >= outputs and fits:
            return self._push_matrix(mean, variance, full)
        return push_factor(self._factor.to(mean.dtype), mean, variance, full)

    @cached_property
    def _matrix(self) -> Tensor:
        """The layer's own covariance (O, O, I, I)."""
        rows = self._factor.flatten(1)
        _, outputs, inputs = self._factor.shape
        return (rows.T @ rows).reshape(outputs, inputs, outputs, inputs).transpose(1, 2).contiguous()

    def _push_matrix(self, mean: Tensor, variance: Tensor, full: bool) -> Tensor:
        """Contracts the covariance with `M = m mᵀ + V`: O²I² products a sample, where the rows take K O I²."""
        moment = (mean[:, :, None] * mean[:, None] + variance).flatten(1)  # (B, I I)
        matrix = self._matrix.to(mean.dtype)
        if full:
            return (moment @ matrix.flatten(2).flatten(0, 1).T).unflatten(1, matrix.shape[:2])  # (B, O, O)
        return moment @ matrix.diagonal().permute(2, 0, 1).flatten(1).T  # (B, O)


def push_factor(factor: Tensor, mean: Tensor, variance: Tensor | None, full: bool) -> Tensor:
    """Returns `LayerBlock.push` for the covariance `Σ_k F_k F_kᵀ` of F (K, O, I), a slice of F at a time."""
    covariances = full and variance is not None and variance.ndim == 3
    numbers = mean.shape[0] * factor.shape[1] * (factor.shape[2] if covariances else 1)
    pushed = mean.new_zeros(())
    for rows in factor.split(max(1, SLICE_BYTES // (numbers * mean.element_size()))):
        means = torch.einsum("koi,bi->bko", rows, mean)
        pushed = pushed + (means.mT @ means if full else means.square().sum(1))
        if covariances:
            pushed = pushed + torch.einsum("bkoj,kpj->bop", torch.einsum("koi,bij->bkoj", rows, variance), rows)
    if variance is None or covariances:
        return pushed
    if full:
        return pushed + torch.einsum("koi,kpi,bi->bop", factor, factor, variance)
    if variance.ndim == 2:
        return pushed + variance @ factor.square().sum(0).T
    return pushed + torch.einsum("koi,koj,bij->bo", factor, factor, variance)
