"""Covariances of weights as sums of squares, a form that takes few plain products at run time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..covariance import Covariance, LayerBlock
from ..covariance.terms import DenseTerm, EigenTerm
from ..errors import LapwingError
from ..tangent import Block, Vectors

MAX_NUMBERS = 2**27
"""Matrices of quadratic forms that are diagonalised have at most so many entries."""

_ROWS = 2**22


def squares_of(spread: Callable[[Tensor], Tensor], inputs: int, like: Tensor, where: str) -> tuple[Tensor, Tensor]:
    """Returns V (I, Q) and s (R, Q) with `q_r(a) = Σ_q (Vᵀ a)_q² s_rq` for quadratic forms q_r that can be evaluated.

    The matrix of each is read off at unit vectors and sums of two, and diagonalised.

    Args:
        spread: rows (N, I) -> values of the forms (N, R).
        inputs: I.
        like: gives dtype and device.
        where: whose forms they are, for messages.

    Raises:
        LapwingError: where R times I squared is too many numbers.

    Cost: I²/2 evaluations, time O(R I³), memory O(R I²).
    """
    eye = torch.eye(inputs, dtype=like.dtype, device=like.device)
    diagonal = spread(eye)  # (I, R)
    outputs = diagonal.shape[1]
    if outputs * inputs**2 > MAX_NUMBERS:
        raise LapwingError(
            f"The weights of {where} are correlated without a common basis, and their {outputs} x {inputs}² "
            f"covariances exceed the {MAX_NUMBERS} numbers that lw.deploy can decompose. Fit with lw.KFAC() or "
            "lw.Diagonal(), or with params=lw.last_layer."
        )
    matrices = torch.diag_embed(diagonal.T).double()  # (R, I, I)
    first, second = torch.triu_indices(inputs, inputs, 1, device=like.device)
    for some in torch.arange(len(first), device=like.device).split(max(1, _ROWS // max(1, inputs))):
        i, j = first[some], second[some]
        both = (spread(eye[i] + eye[j]) - diagonal[i] - diagonal[j]).T.double() / 2  # (R, n)
        matrices[:, i, j] = matrices[:, j, i] = both
    values, vectors = torch.linalg.eigh(matrices)
    kept = values.abs() > 1e-12 * values.abs().amax().clamp_min(torch.finfo(values.dtype).tiny)  # (R, I)
    basis = vectors.transpose(1, 2)[kept].T  # (I, Q)
    owner = torch.arange(outputs, device=like.device)[:, None].expand_as(kept)[kept]
    scale = torch.nn.functional.one_hot(owner, outputs).T * values[kept]  # (R, Q)
    return basis.to(like.dtype).contiguous(), scale.to(like.dtype).contiguous()


class WithBasis(LayerBlock):
    """A layer's covariance with a basis, by `squares_of` where the structure has none.

    Args:
        block: the layer's weights.
        covariance: their covariance.
        like: gives the device and the dtype of rows.
    """

    def __init__(self, block: Block, covariance: LayerBlock, like: Tensor) -> None:
        self._block, self._covariance, self._like = block, covariance, like

    def push(self, mean: Tensor, variance: Tensor | None, full: bool) -> Tensor:
        """Returns what the covariance gives."""
        return self._covariance.push(mean, variance, full)

    def rotation(self) -> tuple[Tensor | None, Tensor] | None:
        """Returns the basis of the covariance, or one of its quadratic forms."""
        rotation = self._covariance.rotation()
        if rotation is not None or self._block.matrix is None or self._block.matrix_shape[0] > 1:
            return rotation
        basis, scale = squares_of(
            lambda rows: self._covariance.push(rows, None, False),
            self._block.matrix_shape[2],
            self._like,
            repr(self._block.name),
        )
        return basis[None], scale[None]


class CovarianceWithBases:
    """What a program of moments reads of a covariance, with a basis for every layer.

    Args:
        covariance: Σ.
        dtype: of the rows that are pushed through it.
    """

    def __init__(self, covariance: Covariance, dtype: torch.dtype) -> None:
        self.blocks, self.record_dtype = covariance.blocks, covariance.record_dtype
        self._covariance, self._dtype = covariance, dtype

    def diagonal(self) -> Vectors:
        """Returns the marginal variances."""
        return self._covariance.diagonal()

    def layer_block(self, name: str) -> LayerBlock:
        """Returns one block's covariance."""
        block = next(block for block in self.blocks if block.name == name)
        like = torch.empty(0, dtype=self._dtype, device=self._covariance.device)
        return WithBasis(block, self._covariance.layer_block(name), like)


def marginals(matrix: Tensor, centred: bool) -> Tensor:
    """Returns the variances of covariances (N, O, O), those of the centred outputs behind them: (N, O) or (N, 2 O)."""
    dense = DenseTerm(matrix)
    return torch.cat([dense.variance(), dense.centred_variance()], -1) if centred else dense.variance()


def of_independent(variance: Tensor, centred: bool) -> Tensor:
    """Returns the same for variances (N, O) of independent outputs."""
    return torch.cat([variance, EigenTerm(None, variance).centred_variance()], -1) if centred else variance
