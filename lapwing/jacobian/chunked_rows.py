"""Jacobians whose rows are formed part by part. Each part is squared and summed while it is in the cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..linalg import nonnegative
from .jacobian import BlockJacobian, DiagonalWeights, Reads, Weightings, reflect_


class ChunkedRows(BlockJacobian):
    """A Jacobian of G groups of (O, I), whose rows are formed, squared and summed part by part."""

    groups: int
    outputs: int
    inputs: int

    @abstractmethod
    def parts(self, whole: bool = False) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yields samples, output channels, and their rows (b, G, R, o, I). `whole` means all output channels."""

    @abstractmethod
    def row_slices(self, whole: bool = False) -> Iterator[tuple[slice, Tensor]]:
        """Yields rows (B, R, p) for output channels of one group. `whole` means all channels of the group."""

    def _matrices(self, weights: Tensor) -> Tensor:
        """Returns weights (P, ...) as (G, O, I, ...)."""
        return weights.reshape(self.groups, self.outputs, self.inputs, *weights.shape[1:])

    def weighted(self, candidates: Weightings, reads: Reads) -> Sequence[Tensor] | Tensor:
        several = list(candidates)
        if reads == "covariances":
            roots, grams = [self._matrices(weighting.flat.sqrt()) for weighting in several], list[Tensor]()
            for samples, outputs, rows in self.parts():
                grams = grams or [rows.new_zeros(self.batch, self.cotangents, self.cotangents) for _ in roots]
                for root, gram in zip(roots, grams, strict=True):
                    scaled = reflect_((rows * root[:, None, outputs]).flatten(3), 2)
                    gram[samples] += (scaled @ scaled.mT).sum(1)
            return grams
        sums: Tensor | None = None
        if reads == "scale":
            for samples, squares, w in self._with_weights(self.centred_squares(), several):
                sums = squares.new_zeros(self.batch, len(several)) if sums is None else sums
                sums[samples] += (squares.flatten(2).transpose(0, 1) @ w.mT).sum(0)
            assert sums is not None
            return nonnegative(sums).T
        for samples, rows, w in self._with_weights(self.parts(), several):
            sums = rows.new_zeros(2, self.batch, self.cotangents, len(several)) if sums is None else sums
            rows = rows.flatten(3)
            for norms, values in zip(sums, (rows, rows - rows.mean(2, keepdim=True)), strict=True):
                squares = values.square().transpose(0, 1).flatten(1, 2)  # (G, b R, o I)
                norms[samples] += (squares @ w.mT).sum(0).unflatten(0, (-1, self.cotangents))
        assert sums is not None
        return sums.movedim(-1, 0)

    def centred_squares(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yields samples, output channels, and the squares of `H J`, summed over cotangents (b, G, o, I)."""
        for samples, outputs, rows in self.parts():
            yield samples, outputs, (rows - rows.mean(2, keepdim=True)).square_().sum(2)

    def _with_weights(
        self, parts: Iterable[tuple[slice, slice, Tensor]], several: Sequence[DiagonalWeights]
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields samples, their values, and n weights (G, n, o I) of the same output channels."""
        here, w = slice(0, 0), torch.empty(0)
        for samples, outputs, values in parts:
            if outputs != here:
                here, w = outputs, values.new_empty(self.groups, len(several), values.shape[-2:].numel())
                for i, weighting in enumerate(several):
                    w[:, i] = self._weights(weighting, outputs)
            yield samples, values, w

    def _weights(self, weighting: DiagonalWeights, outputs: slice = slice(None)) -> Tensor:
        """Returns the weights of some output channels (G, o I)."""
        return weighting.at(lambda flat: self._matrices(flat)[:, outputs]).flatten(1)

    def squared_sum(self) -> Tensor:
        sums: Tensor | None = None
        for _, outputs, rows in self.parts():
            sums = rows.new_zeros(self.groups, self.outputs, self.inputs) if sums is None else sums
            sums[:, outputs] += rows.square().sum((0, 2))
        assert sums is not None
        return sums.flatten()


class RotatedOuter(ChunkedRows):
    """`U_outᵀ J[n, r] U_in` for another Jacobian J, U_in (G, I, I) and U_out (G, O, O); None is the identity."""

    def __init__(self, plain: ChunkedRows, inputs: Tensor | None, outputs: Tensor | None) -> None:
        self.batch, self.cotangents, self.size = plain.batch, plain.cotangents, plain.size
        self.groups, self.outputs, self.inputs = plain.groups, plain.outputs, plain.inputs
        self._plain, self._inputs, self._outputs = plain, inputs, outputs
        self.within(plain.slice_bytes)

    def parts(self, whole: bool = False) -> Iterator[tuple[slice, slice, Tensor]]:
        mixes = self._outputs is not None  # all channels of the outputs
        for samples, outputs, rows in self._plain.parts(whole or mixes):
            rows = self._turned(rows)  # frees the plain rows
            yield samples, outputs, rows

    def row_slices(self, whole: bool = False) -> Iterator[tuple[slice, Tensor]]:
        for part, rows in self._plain.row_slices(whole or self._outputs is not None):
            group = part.start // (self.outputs * self.inputs)
            rows = rows.unflatten(-1, (-1, self.inputs)).unsqueeze(1)  # (B, 1, R, o, I)
            yield part, self._turned(rows, slice(group, group + 1)).squeeze(1).flatten(2)

    def _turned(self, rows: Tensor, groups: slice = slice(None)) -> Tensor:
        """Rotates rows (b, G, R, o, I) of a slice of the groups."""
        several = rows.shape[1] > 1  # a batched product would copy the bases of several groups for every sample
        if self._outputs is not None and several:
            rows = rows.permute(1, 3, 0, 2, 4)  # (G, o, b, R, I)
            rows = (self._outputs[groups].mT @ rows.flatten(2)).view(rows.shape).permute(2, 0, 3, 1, 4)
        elif self._outputs is not None:
            rows = self._outputs[groups].mT @ rows
        if self._inputs is not None and several:
            rows = rows.transpose(0, 1)  # (G, b, R, o, I)
            return (rows.flatten(1, 3) @ self._inputs[groups]).view(rows.shape).transpose(0, 1)
        return rows if self._inputs is None else rows @ self._inputs[groups][0]
