"""A record: the outputs of one chunk of samples, and the Jacobians of all blocks.

The C backward passes run at the first access to a block. A product `J V` may use forward mode instead.

Three cuts keep the memory budget:

1. *Samples*: `Tangent.records` cuts a batch into chunks.
2. *Cotangents*: if the gradients of all blocks of one sample do not fit, consecutive blocks form a `GradientGroup`,
   which replaces the previous group. So read the blocks in order. A block that does not fit is
   computed for slices of its cotangents (`Sliced`).
3. *Positions*: patches and products of positions are built for one strip at a time (`strips.py`).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..data.inputs import Inputs
from ..errors import LapwingError
from ..jacobian.blocks import Block, Matrix, Vectors, split
from ..jacobian.jacobian import SLICE_BYTES, BlockJacobian, Rows, Sliced, SumOfUses
from ..jacobian.layers.embedding import TiedTable
from ..jacobian.outer import FisherSums
from ..linalg import double_device, joined, total
from ..network.generic import forward_products, per_sample_rows
from ..network.probe import PROBED_SAMPLES
from ..network.recording_plan import TIED_TABLE, Uses
from ..network.tracing import RecordedUse, output_gradients
from .cotangents import FisherParts

if TYPE_CHECKING:
    from .tangent import Tangent


class GradientGroup(NamedTuple):
    """Consecutive blocks whose gradients are computed together, for `step` cotangents at a time."""

    blocks: tuple[Block, ...]
    step: int


class Record(Mapping[str, BlockJacobian]):
    """The Jacobian of one chunk of samples: block name -> `BlockJacobian`, built at each access.

    It has B = `samples` and R = `cotangents`. `outputs` are f (B, C), and `graph` is f with its graph, or None after
    all gradients are computed. Contractions run on `device`: the CPU if they are float64 and the outputs' device has no
    float64.
    """

    weights: Tensor | None = None  # factors of Λ (B, 1) or (B, C); None means ones
    _u: Tensor | None  # cotangents (B, C, R); None means the C outputs, or Λ by its parts
    _parts: FisherParts | None

    def __init__(
        self,
        tangent: Tangent,
        inputs: Inputs | None,  # None: no product needs another call of the network
        outputs: Tensor,
        noted: list[RecordedUse],
        uses: Uses,
        cotangents: Tensor | FisherParts | None,
        dtype: torch.dtype,
        differentiable: bool,
        sizes: tuple[int, ...],
    ) -> None:
        self._u, self._parts = (None, cotangents) if isinstance(cotangents, FisherParts) else (cotangents, None)
        self.tangent, self._inputs, self.noted, self._uses = tangent, inputs, noted, uses
        self.graph: Tensor | None = outputs
        self._differentiable = differentiable
        self.sizes = sizes  # of the grid of positions, such as (H, W), or () for outputs (B, C)
        self._limit = tangent.memory // dtype.itemsize  # number of entries that fit the budget
        self._slice_bytes = min(SLICE_BYTES, tangent.memory // 8)
        self._group: GradientGroup | None = None
        self._taken: dict[bool, dict[Any, Tensor | None]] = {}  # for that group: recorded -> gradients or rows
        self.outputs = (outputs if differentiable else outputs.detach()).to(tangent.dtype)
        self.samples, self.dtype = outputs.shape[0], dtype
        self.device = double_device(outputs.device) if dtype == torch.float64 else outputs.device
        self._elsewhere = self.device != outputs.device
        self.cotangents = outputs.shape[1] if self._u is None else self._u.shape[-1]
        for use in noted:
            if not differentiable:
                use.use.inputs = use.use.inputs.detach()
            if self._elsewhere:
                use.use.inputs = use.use.inputs.to(self.device)

    def __iter__(self) -> Iterator[str]:
        return (block.name for block in self.tangent.blocks)

    def __len__(self) -> int:
        return len(self.tangent.blocks)

    def sums(self, name: str) -> BlockJacobian | FisherSums:
        """Returns the object that sums one block over samples: its Jacobian, or `FisherSums` if Λ is in parts."""
        if self._parts is None:
            return self[name]
        if not all(self.noted[i].is_output for i, *_ in self._uses[name]):
            if not self.tangent.plan.tail:
                raise outputs_moved_error(self.tangent, self.tangent.named_blocks[name].parameters[0])
            return self._changed(_parts=None, _u=self._parts.root())[name]  # the tail masks classes of this batch only
        layer: Any = self._changed(_parts=None)[name]
        return FisherSums(layer, *(self._parts if layer.slopes is None else self._parts.times(layer.slopes)))

    def __getitem__(self, name: str) -> BlockJacobian:
        """Builds the Jacobian of one block. Patches are unfolded here and freed with the result."""
        assert self._parts is None, "Λ is in parts: use sums(name)"
        block = self.tangent.named_blocks[name]
        groups = self._groups
        group = groups[0] if len(groups) == 1 else next(g for g in groups if any(b is block for b in g.blocks))
        if self._group is not group:
            self._group, self._taken = group, {}
        if group.step < self.cotangents:
            shape = self.samples, self.cotangents, block.size
            part = lambda cut: self._form(block, self._take(group, block, cut))  # noqa: E731
            return Sliced(part, shape, group.step, self._limit // 2).within(self._slice_bytes)
        recorded = name in self._uses
        if recorded not in self._taken:
            self._taken[recorded] = self._take(group, block)
        return self._form(block, self._taken[recorded])

    def at_position(self, which: int, columns: Tensor | None) -> Record:
        """Returns the record of one position (B, C) of (B, T C), for cotangents (B, C, R) at it, or the C outputs."""
        width, graph = self.tangent.outputs, self.graph
        assert graph is not None
        columns = torch.eye(width, device=graph.device) if columns is None else columns
        u = graph.new_zeros(len(graph), graph.shape[1] // width, *columns.shape[-2:])
        u[:, which] = columns.to(u)
        u = u.flatten(1, 2)  # (B, T C, R)
        known = self.dtype, self._differentiable, self.sizes
        record = Record(self.tangent, self._inputs, graph, self.noted, self._uses, u, *known)
        return record._changed(outputs=self.outputs[:, which * width : (which + 1) * width])

    def times(self, factors: Tensor) -> Record:
        """Returns the record with its cotangents times factors per sample (B, 1) or output (B, C)."""
        if self._parts is None:
            return self._changed(_u=self.u * factors.to(self.u)[..., None])
        return self._changed(_parts=self._parts.times(factors))

    def weighted(self, weights: Tensor) -> Record:
        """Returns the record with Λ times weights (B, 1) or (B, C): cotangents times √w."""
        return self.times(weights.sqrt())._changed(weights=weights)

    def _changed(self, **attributes: Any) -> Record:
        """Returns a copy with other attributes, which has computed no block."""
        record = copy.copy(self)
        vars(record).update(attributes, _group=None, _taken={})
        return record

    @property
    def u(self) -> Tensor:
        """The cotangents u (B, C, R), or the identity if the cotangents are the outputs."""
        if self._u is not None:
            return self._u
        eye = torch.eye(self.outputs.shape[1], dtype=self.outputs.dtype, device=self.outputs.device)
        return eye.expand(self.samples, -1, -1)

    def rows(self) -> Tensor:
        """Returns the whole Jacobian (B, R, P), blocks in order."""
        return torch.cat([self[name].rows() for name in self], -1)

    def jvp(self, vectors: Vectors) -> Tensor:
        """Returns `J V` (B, R, K) for vectors V: block name -> rows (K, P_block).

        Uses forward mode (about 2 K forward passes) if that costs less than R backward passes, else the blocks.
        """
        count = next(iter(vectors.values())).shape[0]
        taken = True in self._taken and len(self._groups) == 1
        fewer = 2 * count < self.cotangents and not taken
        if fewer and self._inputs is not None and not self._differentiable and self.dtype == self.tangent.dtype:
            products = forward_products(
                self.tangent.call_with, self.tangent.parameters, split(self.tangent.blocks, vectors), self._inputs
            )  # (B, C, K), or None if the network has no forward mode
            if products is not None:
                products = products.to(self.dtype)
                return products if self._u is None else self._u.mT.to(self.dtype) @ products
        return total(self[name].jvp(vectors[name].to(self.dtype)) for name in self if name in vectors)

    @cached_property
    def _groups(self) -> list[GradientGroup]:
        """A single group if all blocks fit, or if a graph keeps all gradients anyway."""
        blocks, count = self.tangent.blocks, self.cotangents
        numbers = 5 * sum([use.out.numel() for use in self.noted]) + 3 * self.samples * self.tangent.plan.explicit_size
        if self._differentiable or count * numbers <= self._limit:
            return [GradientGroup(blocks, count)]
        loads, groups = [self.load(block) for block in blocks], []
        for part in grouped(loads, self._limit):
            step, needed = count, sum(loads[part.start])
            if len(part) == 1 and needed > self._limit:
                step = max(1, self._limit // 2 * count // needed)
            groups.append(GradientGroup(blocks[part.start : part.stop], step))
        return groups

    def load(self, block: Block) -> tuple[int, int]:
        """Returns the numbers of entries of a block's gradients, and of the extra memory of a contraction."""
        rows = self.samples * self.cotangents * block.size
        if block.name not in self._uses:
            return rows, 2 * rows
        uses = [self.noted[i] for i, _, _ in self._uses[block.name]]
        gradients = self.cotangents * sum(use.out.numel() for use in uses if not use.is_output)
        return gradients, 4 * gradients + 2 * rows * (block.name in self.tangent.plan.explicit)

    def _take(self, group: GradientGroup, block: Block, cut: slice | None = None) -> dict[Any, Tensor | None]:
        """Computes the rows of a group's generic parameters by name, or the gradients of its other uses by index."""
        if block.name not in self._uses:
            generic = [name for b in group.blocks if b.name not in self._uses for name in b.parameters]
            return self._generic_rows(generic, cut)
        u = self._u if cut is None else self.u[:, :, cut]
        wanted = sorted({i for b in group.blocks for i, _, _ in self._uses.get(b.name, ())})
        whole = cut is None and len(self._groups) == 1
        passing = 0 if whole else sum(use.out.numel() for use in self.noted)  # gradients pass through other layers too
        batched = 4 * passing * (self.cotangents if u is None else u.shape[-1]) <= self._limit
        assert self.graph is not None  # it is freed only if all gradients are computed together
        noted = [self.noted[i] for i in wanted]
        gradients = output_gradients(self.graph, noted, u, self._differentiable, batched)
        if whole and not self._differentiable:
            self.graph = None
        return dict(zip(wanted, gradients, strict=True))

    def _generic_rows(self, names: Sequence[str], cut: slice | None) -> dict[Any, Tensor | None]:
        values = {name: self.tangent.parameters[name] for name in names}
        dtype = next(iter(values.values())).dtype
        assert self._inputs is not None  # a layer that gives the outputs has a family
        with torch.set_grad_enabled(self._differentiable):
            sent = (self.u if cut is None else self.u[:, :, cut]).mT.to(self.outputs.device, dtype)
            rows = per_sample_rows(self.tangent.call_with, values, self._inputs, sent)
        return {name: row if self._differentiable else row.detach() for name, row in rows.items()}

    def _form(self, block: Block, taken: dict[Any, Any]) -> BlockJacobian:
        """Builds the Jacobian of a block from its rows or gradients."""
        if block.name not in self._uses:
            return Rows(joined((taken[name] for name in block.parameters), -1).to(self.device, self.dtype))
        jacobians: list[BlockJacobian] = []
        tied = block.matrix is None and {self.noted[i].use.kind for i, *_ in self._uses[block.name]} == TIED_TABLE
        limit = sys.maxsize if self._differentiable else self._limit // 2
        for i, axis, roles in self._uses[block.name]:
            use, g = self.noted[i].use, taken[i]
            if self._elsewhere and g is not None:
                g = g.to(self.device)
            jacobian = use.jacobian(g, axis, self.samples, roles, self.dtype, limit)
            if g is None and (slopes := self.noted[i].slopes) is not None:
                jacobian.slopes = slopes.to(self.device, self.dtype)
            if block.matrix is None and not tied:
                jacobian = _row_major(jacobian, block, use.matrix(), roles)
            jacobians.append(jacobian)
        first, *other_uses = jacobians
        if tied:
            first = TiedTable(jacobians)
        elif other_uses:
            first = SumOfUses(jacobians) if block.matrix is None else first.plus(other_uses)
        first.slice_bytes = self._slice_bytes
        return first


def outputs_moved_error(tangent: Tangent, parameter: str) -> LapwingError:
    """Returns the error for a layer that gave the outputs only on the first batch."""
    return LapwingError(
        f"The layer of {parameter} gave the outputs of {type(tangent.model).__name__} on the first batch, and not on "
        "this one. Let forward() return them in the same way on every batch. If it masks classes, one of the first "
        f"{PROBED_SAMPLES} samples must show it."
    )


def _row_major(jacobian: BlockJacobian, block: Block, matrix: Matrix | None, roles: frozenset[str]) -> BlockJacobian:
    """Returns rows in the row-major order of the parameters, for a block whose uses have different matrix layouts."""
    if matrix is None or (len(roles) == 1 and not matrix.transposed):
        return jacobian
    parts = replace(block, matrix=matrix, bias="bias" in roles).split(jacobian.rows())
    return Rows(torch.cat([parts[name].flatten(2) for name in block.parameters], -1))


def grouped(loads: Sequence[tuple[int, int]], limit: int) -> list[range]:
    """Cuts blocks into consecutive groups with `Σ gradients + max scratch <= limit`, or of one larger block."""
    groups, start, gradients, scratch = [], 0, 0, 0
    for i, (more, extra) in enumerate(loads):
        gradients, scratch = gradients + more, max(scratch, extra)
        if i > start and gradients + scratch > limit:
            groups.append(range(start, i))
            start, gradients, scratch = i, more, extra
    return [*groups, range(start, len(loads))]
