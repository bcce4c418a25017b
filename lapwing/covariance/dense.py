"""The dense covariance `(s G + Δ)⁻¹` over all blocks jointly, for small networks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ..jacobian.jacobian import Reads
from ..linalg import RESOLVED, check_matrices, cholesky, eigen_in_place
from ..tangent import Block, Record, Tangent, TensorSpec, Vectors
from .base import PriorCovariance, join_blocks, precision_spec, register_covariance, same_ratios, split_blocks
from .layer_block import FactorLayer, LayerBlock
from .terms import Terms, cross_covariance, factored_or_dense, of_both, standard_normal

Eigen = tuple[Tensor, Tensor, Tensor]
"""λ and U of the whitened curvature, and the prior precision (n_blocks,) that whitened it."""


def expand(blocks: tuple[Block, ...], values: Tensor) -> Tensor:
    """Repeats the value of each block (n_blocks,) for all weights of the block (P,)."""
    counts = torch.tensor([block.size for block in blocks], device=values.device)
    return values.repeat_interleave(counts)


@register_covariance
class DenseCovariance(PriorCovariance):
    """`Σ = Δ^(-1/2) U diag(1/(s λ + 1)) Uᵀ Δ^(-1/2)` from the eigenpairs of `Δ^(-1/2) G Δ^(-1/2)`.

    A prior with the same ratios between blocks reuses the eigenpairs (`eigen`: λ, U and their precision). Other ratios
    need a refactorisation, O(P³). All tensors are float64: float32 sums have rounding errors that can exceed a small
    prior precision. Memory 16 P² bytes, and 32 P² while the eigenpairs are computed.
    """

    record_dtype = torch.float64
    full_rank = True
    continued_by = "matrix"

    def __init__(
        self, blocks: tuple[Block, ...], curvature: Tensor, precision: Tensor, scale: float, eigen: Eigen | None = None
    ) -> None:
        self.blocks, self.curvature, self.precision, self.scale = blocks, curvature.double(), precision, scale
        self.scratch_per_row = 3 * self.size
        if eigen is None or not same_ratios(eigen[2], precision):
            root = expand(blocks, precision).rsqrt()
            whitened = (self.curvature * root).mul_(root[:, None])
            check_matrices([whitened])
            eigen = (*eigen_in_place(whitened), precision)
        values, self._basis, at = self._eigen = eigen
        self._prior_root = expand(blocks, precision).rsqrt()  # Δ^(-1/2) (P,)
        self._weights = 1 / (scale * values * (at[0] / precision[0]) + 1)

    def has_rounding_noise(self) -> bool:
        return bool((self._weights * RESOLVED < 1).any())

    def shares_contraction_with(self, other: PriorCovariance) -> bool:
        return isinstance(other, DenseCovariance) and other.curvature is self.curvature

    def with_prior(self, precision: Tensor, scale: float) -> DenseCovariance:
        return DenseCovariance(self.blocks, self.curvature, precision, scale, self._eigen)

    def log_det_ratio(self, precision: Tensor, scale: Tensor | float) -> Tensor:
        """Returns `Σ log(1 + s λ)` if the ratios between blocks are unchanged, else uses a Cholesky factor."""
        values, _, at = self._eigen
        if same_ratios(precision, at):
            return torch.log1p(scale * values * at[0] / precision[0]).sum()
        root = expand(self.blocks, precision).rsqrt()
        matrix = scale * root[:, None] * self.curvature * root
        eye = torch.eye(self.size, dtype=torch.float64, device=matrix.device)
        return 2 * cholesky(eye + matrix).diagonal().log().sum()

    def mv(self, vectors: Vectors) -> Vectors:
        rotated = (join_blocks(self.blocks, vectors) * self._prior_root) @ self._basis
        return self._back(rotated * self._weights)

    def precision_mv(self, vectors: Vectors) -> Vectors:
        """Returns `(s G + Δ) v`."""
        flat = join_blocks(self.blocks, vectors)
        return split_blocks(self.blocks, self.scale * (flat @ self.curvature) + flat * self._prior_root.pow(-2))

    def sample(self, count: int, generator: torch.Generator) -> Vectors:
        """Returns `Δ^(-1/2) U √w z`."""
        return self._back(standard_normal((count, self.size), self._weights, generator) * self._weights.sqrt())

    def _back(self, rotated: Tensor) -> Vectors:
        """Returns `Δ^(-1/2) U v`."""
        return split_blocks(self.blocks, F.linear(rotated, self._basis) * self._prior_root)

    def diagonal(self) -> Vectors:
        return split_blocks(self.blocks, (self._basis.square() @ self._weights) * self._prior_root.square())

    def output_covariances(self, record: Record, candidates: Sequence[Self], reads: Reads) -> Iterable[Terms]:
        """Rotates J once for consecutive candidates whose priors have the same ratios between blocks."""
        eigen, rotated, prior_root = None, record.outputs, self._prior_root
        for candidate in candidates:
            if candidate._eigen is not eigen:
                eigen, rotated, prior_root = candidate._eigen, candidate._rotated(record), candidate._prior_root
            moved = candidate._prior_root[0] / prior_root[0]
            yield (factored_or_dense(rotated * (candidate._weights.sqrt() * moved)).read(reads),)

    def joint_output_covariance(self, record: Record, other: Record) -> Tensor:
        return cross_covariance(*of_both(lambda one: self._rotated(one) * self._weights.sqrt(), record, other))

    def _rotated(self, record: Record) -> Tensor:
        """Returns `J Δ^(-1/2) U` (B, R, P)."""
        return (record.rows() * self._prior_root) @ self._basis

    def layer_block(self, name: str) -> LayerBlock:
        root = self._prior_root[:, None] * self._basis * self._weights.sqrt()  # Σ = R Rᵀ
        return FactorLayer(split_blocks(self.blocks, root.T)[name].reshape(-1, *self.block(name).matrix_shape[1:]))

    def tensors(self) -> dict[str, Tensor]:
        values, vectors, at = self._eigen
        eigen = {"values": values, "vectors": vectors, "at": at}
        return {"curvature": self.curvature, "precision": self.precision, **eigen}

    @classmethod
    def entries(cls, tangent: Tangent, extra: Mapping[str, Any]) -> dict[str, TensorSpec]:
        precision, values = precision_spec(tangent), TensorSpec((tangent.size,), (torch.float64,))
        square = TensorSpec((tangent.size, tangent.size), (torch.float64,))
        return {"curvature": square, "precision": precision, "values": values, "vectors": square, "at": precision}

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: dict[str, Tensor], extra: dict[str, Any]) -> DenseCovariance:
        eigen = (tensors["values"], tensors["vectors"], tensors["at"])
        return cls(tangent.blocks, tensors["curvature"], tensors["precision"], extra["scale"], eigen)
