"""Covariances of weights as sums of squares: the last layer of a deployed network needs no C x C matrix per sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..covariance import Latent, LayerBlock
from ..covariance.terms import DenseTerm, EigenTerm, FactoredTerm, MarginalTerm, Term
from ..errors import LapwingError
from ..prediction.streamlined.moments import Value, mean_of, total_of, variance_of
from ..prediction.streamlined.operations import Kind, is_a
from ..prediction.streamlined.program import Program
from ..prediction.streamlined.rules.linear import Layer, bias_term, has_one_position
from ..prediction.streamlined.schedule import Step
from ..prediction.streamlined.sites import Treated, arguments_of

MAX_EIGEN_NUMBERS = 2**27
"""Maximum number of entries of the matrices of quadratic forms that are diagonalised."""


@dataclass(frozen=True)
class Head:
    """A last linear layer with one position per sample.

    moment_r = Σ_q (Vᵀ a)_q² s_rq + Σ_i v_i u_ri + β_r        r: moments, as `moments_of` orders them
    """

    source: str  # name of its input
    weight: Tensor
    bias: Tensor | None
    basis: Tensor | None  # Vᵀ (Q, I), None if it is the identity
    offset: Tensor | None  # column of Vᵀ for the bias (Q,)
    scale: Tensor | None  # s (R, Q), None for certain weights
    shift: Tensor | None  # β (R,)
    through: Tensor | None  # u (R, I), None for certain inputs

    def __call__(self, value: Value) -> tuple[Tensor, Tensor]:
        """Returns the outputs (..., O) and the variances (B, R)."""
        mean, variance = mean_of(value), variance_of(value)
        h = F.linear(mean, self.weight, self.bias)
        total: Any = self.shift
        if self.scale is not None:
            rows = mean.flatten(0, -2)
            rows = rows if self.basis is None else F.linear(rows, self.basis, self.offset)
            total = F.linear(rows.square(), self.scale, total)
        if variance is not None and self.through is not None:
            spread = F.linear(variance.flatten(0, -2), self.through)
            total = spread if total is None else total + spread
        return h, total


def read_head(program: Program, step: Step, values: Mapping[str, Any], samples: int, kinds: int) -> Head | None:
    """Returns the last layer of a program, or None if it has several positions per sample or other weights.

    It is also None if the inputs of the layer are correlated: then the program computes C x C matrices.
    `values` are the values before the layer at an example of B `samples`. `kinds` is as in `moments_of`.
    """
    if program.way.features is not None or not is_a(step.node, Kind.LINEAR) or step.node.name not in program.sites:
        return None
    read = {name: program.cast(name, values[name]) for name in step.sources}
    layer = Layer.of(program.sites[step.node.name], arguments_of(step.node, read, program.dtype))
    if not has_one_position(layer, samples):
        return None
    shared, weights = layer.bias_is_shared, None if layer.treated is None else layer.treated.covariance
    w = layer.matrix.contiguous()  # (O, I)
    basis = offset = scale = shift = through = None
    if weights is not None:
        basis, scale = _rotation(weights, w, shared, kinds)
        if shared and basis is None:
            shift, scale = scale[:, -1].contiguous(), scale[:, :-1].contiguous()
        elif shared and basis is not None:
            offset, basis = basis[:, -1].contiguous(), basis[:, :-1].contiguous()
    bias = bias_term(layer)
    if bias is not None:
        shift = total_of([shift, moments_of(bias, kinds)[0]])
    if variance_of(layer.x) is not None:
        through = moments_of(FactoredTerm(w.T.unsqueeze(-1)), kinds).T  # (R, I)
        if weights is not None:
            eye = torch.eye(w.shape[1] + shared, dtype=w.dtype, device=w.device)[: w.shape[1]]
            through = through + _spread(weights, eye, w.shape[0], kinds).T
    source = next(name for name in step.sources if read[name] is layer.x)
    return Head(source, w, mean_of(layer.bias), basis, offset, scale, shift, through)


def _spread(covariance: LayerBlock, rows: Tensor, outputs: int, kinds: int) -> Tensor:
    """Returns the moments (N, R) of `W a` at rows a."""
    if kinds == 1:
        return covariance.push(rows, None, False)
    parts = rows.split(max(1, 2**24 // outputs**2))  # at most 2²⁴ entries of covariances per step
    return torch.cat([moments_of(covariance.covariances(part, None), kinds) for part in parts])


def _rotation(covariance: LayerBlock, w: Tensor, bias: bool, kinds: int) -> tuple[Tensor | None, Tensor]:
    """Returns Vᵀ (Q, I) and s (R, Q), including the bias column."""
    inputs = w.shape[1] + bias
    rotation = covariance.rotation()
    if rotation is None:
        vectors, scale = _squares_of(
            lambda rows: _spread(covariance, rows, w.shape[0], kinds), inputs, w, "the last layer"
        )
        return vectors.mT.contiguous(), scale
    basis, variances = rotation
    if basis is None:
        return None, moments_of(EigenTerm(None, variances[0].T), kinds).T.to(w.dtype).contiguous()
    rows = basis[0].mT.to(w.dtype).contiguous()  # (Q, I), orthonormal: row q gives column q of s
    return rows, _spread(covariance, rows, w.shape[0], kinds).T.contiguous()


def moments_of(term: Term, kinds: int) -> Tensor:
    """Returns the variances (N, O) of N covariances; with 2 kinds also centred variances, with 3 the covariances."""
    read = term.variance, term.centred_variance, lambda: term.dense().flatten(1)
    return torch.cat([moments() for moments in read[:kinds]], -1)


def latent_of(mean: Tensor, moments: Tensor) -> Latent:
    """Returns the latent with means (B, C) and the moments (B, R) that `moments_of` lists."""
    size = mean.shape[-1]
    plain, centred, matrix = moments.tensor_split([size, 2 * size], -1)
    whole = moments.shape[-1] > 2 * size
    term = DenseTerm(matrix.unflatten(-1, (size, size)), centred) if whole else MarginalTerm(plain, centred)
    return Latent(mean, (term,))


def _squares_of(spread: Callable[[Tensor], Tensor], inputs: int, like: Tensor, where: str) -> tuple[Tensor, Tensor]:
    """Returns V (I, Q) and s (R, Q) with `q_r(a) = Σ_q (Vᵀ a)_q² s_rq` for quadratic forms q_r that can be evaluated.

    `spread` maps rows (N, I) to values of the forms (N, R). The matrix of each form follows from its values at unit
    vectors and at sums of two, and is then diagonalised: time O(R I³), memory O(R I²).
    """
    eye = torch.eye(inputs, dtype=like.dtype, device=like.device)
    diagonal = spread(eye)  # (I, R)
    outputs = diagonal.shape[1]
    if outputs * inputs**2 > MAX_EIGEN_NUMBERS:
        raise LapwingError(
            f"The weights of {where} are correlated without a common basis, and their {outputs} x {inputs}² "
            f"covariances exceed the {MAX_EIGEN_NUMBERS} numbers that lw.deploy can decompose. Fit with lw.KFAC() or "
            "lw.Diagonal(), or with params=lw.last_layer."
        )
    matrices = torch.diag_embed(diagonal.T).double()  # (R, I, I)
    first, second = torch.triu_indices(inputs, inputs, 1, device=like.device)
    step = max(1, 2**22 // max(1, inputs))  # at most 2²² entries of rows
    for some in torch.arange(len(first), device=like.device).split(step):
        i, j = first[some], second[some]
        both = (spread(eye[i] + eye[j]) - diagonal[i] - diagonal[j]).T.double() / 2  # (R, n)
        matrices[:, i, j] = matrices[:, j, i] = both
    values, vectors = torch.linalg.eigh(matrices)
    kept = values.abs() > 1e-12 * values.abs().amax().clamp_min(torch.finfo(values.dtype).tiny)  # (R, I)
    kept[0, 0] |= not kept.any()  # certain weights keep a direction without variance: tensors (0, ...) cannot be run
    basis = vectors.transpose(1, 2)[kept].T  # (I, Q)
    owner = torch.arange(outputs, device=like.device)[:, None].expand_as(kept)[kept]
    scale = F.one_hot(owner, outputs).T * values[kept]  # (R, Q)
    return basis.to(like.dtype).contiguous(), scale.to(like.dtype).contiguous()


def squares_of_weights(treated: Treated) -> tuple[Tensor, Tensor]:
    """Returns V (1, I, Q) and s (1, O, Q), as `LayerBlock.rotation`, for weights without a common basis."""
    block, push, like = treated.block, treated.covariance.push, next(iter(treated.marginals.values()))
    basis, scale = _squares_of(lambda rows: push(rows, None, False), block.matrix_shape[2], like, repr(block.name))
    return basis[None], scale[None]
