"""One chunk of samples seen through the network's Jacobian: outputs, and the block Jacobians all else is made of.

Gradients are taken when the first block is asked for, so a product `J V` that forward mode gives more cheaply never
pays for the C backward passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..numerics import total
from .blocks import Matrix, Vectors, split
from .forward_mode import forward_products
from .jacobian import BlockJacobian, Rows, SumOfUses
from .layers.embedding import OneHot
from .layers.generic import per_sample_rows
from .outer import Outer, SharedOuter
from .record import Noted, output_gradients

if TYPE_CHECKING:
    from .network import Tangent


class Record(Mapping[str, BlockJacobian]):
    """One chunk of samples, seen through the network's Jacobian: block name -> `BlockJacobian`, built when asked for.

    Attributes:
        outputs: f (B, C).
        samples: B.
        cotangents: R.
        dtype: what the contractions are done in.
    """

    def __init__(
        self,
        tangent: Tangent,
        inputs: Any,
        outputs: Tensor,
        noted: list[Noted],
        cotangents: Tensor | None,
        dtype: torch.dtype,
        differentiable: bool,
    ) -> None:
        self._tangent, self._inputs, self._noted, self._u = tangent, inputs, noted, cotangents
        self._graph: Tensor | None = outputs
        self._differentiable = differentiable
        self.outputs = (outputs if differentiable else outputs.detach()).to(tangent.dtype)
        self.samples, self.dtype = outputs.shape[0], dtype
        self.cotangents = outputs.shape[1] if cotangents is None else cotangents.shape[-1]
        if not differentiable:
            for use in noted:
                use.use.inputs = use.use.inputs.detach()

    def __iter__(self) -> Iterator[str]:
        """Iterates over block names."""
        return (block.name for block in self._tangent.blocks)

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._tangent.blocks)

    def __getitem__(self, name: str) -> BlockJacobian:
        """Builds the Jacobian of one block; patches are unfolded here and freed with the result."""
        block = next(block for block in self._tangent.blocks if block.name == name)
        if block.family == "generic":
            return Rows(torch.cat([self._rows[parameter] for parameter in block.parameters], -1).to(self.dtype))
        uses = self._tangent.plan.uses[name]
        forms = [
            self._noted[i].use.jacobian(self._gradients[i], axis, self.samples, roles, self.dtype)
            for i, axis, roles in uses
        ]
        if len(forms) == 1:
            return forms[0]
        if block.matrix is None:
            return SumOfUses(
                [_native(form, self._noted[i].use.matrix()) for form, (i, _, _) in zip(forms, uses, strict=True)]
            )
        return _concatenate(forms)

    def rows(self) -> Tensor:
        """Returns the whole Jacobian (B, R, P), blocks in order."""
        return torch.cat([self[name].rows() for name in self], -1)

    def jvp(self, vectors: Vectors) -> Tensor:
        """Returns `J V` (B, R, K) for V given as rows (K, P_block) a block.

        By forward mode (about 2 K forward passes) where that is less than the R backward passes, else block by block.
        """
        count = next(iter(vectors.values())).shape[0]
        fewer = 2 * count < self.cotangents and "_gradients" not in self.__dict__
        if fewer and not self._differentiable and self.dtype == self._tangent.dtype:
            found = forward_products(
                self._tangent.model, self._tangent.forward, self._tangent.parameters,
                split(self._tangent.blocks, vectors), self._inputs,
            )  # fmt: skip  # (B, C, K), or None where the network has no forward mode
            if found is not None:
                return found.to(self.dtype) if self._u is None else self._u.mT.to(self.dtype) @ found.to(self.dtype)
        return total(self[name].jvp(rows.to(self.dtype)) for name, rows in vectors.items())

    @cached_property
    def _gradients(self) -> list[Tensor | None]:
        """The gradients g of every use; the graph is freed with them."""
        assert self._graph is not None  # once only
        gradients = output_gradients(self._graph, self._noted, self._u, self._differentiable)
        if not self._differentiable:
            self._graph = None
        return gradients

    @cached_property
    def _rows(self) -> dict[str, Tensor]:
        """Rows (B, R, P) of every generic parameter."""
        names = [name for block in self._tangent.blocks if block.family == "generic" for name in block.parameters]
        u, width = self._u, self.outputs.shape[1]
        if u is None:
            u = torch.eye(width, dtype=self.outputs.dtype, device=self.outputs.device).expand(self.samples, -1, -1)
        values = {name: self._tangent.parameters[name] for name in names}
        with torch.set_grad_enabled(self._differentiable):
            rows = per_sample_rows(
                self._tangent.model, self._tangent.forward, values, self._inputs, u.mT.to(values[names[0]].dtype)
            )
        return rows if self._differentiable else {name: row.detach() for name, row in rows.items()}


def _native(form: BlockJacobian, matrix: Matrix | None) -> BlockJacobian:
    """Gives rows in the parameter's own row-major order, for weights whose uses disagree about their layout."""
    if matrix is None or not matrix.transposed:
        return form
    rows = form.rows().unflatten(-1, (matrix.outputs, matrix.inputs)).mT
    return Rows(rows.flatten(2))


def _concatenate(forms: list[Any]) -> BlockJacobian:
    """Joins several uses of one matrix weight: their positions are added, for `J = Σ_uses Σ_t g a`."""
    if isinstance(forms[0], OneHot):
        tokens, g = torch.cat([f.tokens for f in forms], 1), torch.cat([f.unmerged for f in forms], 2)
        return OneHot(tokens, g, forms[0].vocabulary)
    if all(isinstance(form, (Outer, SharedOuter)) for form in forms):
        shared = [SharedOuter(f.a[:, None, None], f.g[:, :, None, None]) if isinstance(f, Outer) else f for f in forms]
        return SharedOuter(torch.cat([f.a for f in shared], 1), torch.cat([f.g for f in shared], 2))
    return SumOfUses(forms)
