"""Results of the probe: the plan that reads every recording, and the coverage report of the blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from functools import cached_property
from os.path import commonprefix
from typing import Any

from torch import Tensor

from ..display import Displayed
from ..errors import LapwingError
from ..jacobian.blocks import Block
from ..jacobian.layers import BatchAxis
from .tracing import RecordedUse

TIED_TABLE = {"embedding, transposed, one-hot", "linear"}
"""The kinds of the uses of a weight whose rows `TiedTable` does not form."""

Uses = Mapping[str, Sequence[tuple[int, BatchAxis, frozenset[str]]]]
"""Block name -> its uses as (index, sample axis, treated roles)."""


@dataclass(frozen=True)
class Covered:
    """One line of the coverage report."""

    block: str
    parameters: tuple[str, ...]
    weights: int
    family: str
    reason: str


@dataclass(frozen=True, repr=False)
class Coverage(Displayed):
    """Layer family of each block of parameters. The family `generic` is slower but also exact."""

    lines: tuple[Covered, ...]

    @classmethod
    def of(cls, blocks: Sequence[Block], reasons: Sequence[str]) -> Coverage:
        """Makes the report of blocks and the reasons why they are generic, or "" if they are not."""
        lines = zip(blocks, reasons, strict=True)
        return cls(tuple(Covered(b.name, b.parameters, b.size, b.family, reason) for b, reason in lines))

    @property
    def generic(self) -> tuple[Covered, ...]:
        """The blocks that no family covers."""
        return tuple(line for line in self.lines if line.family == "generic")

    def __repr__(self) -> str:
        """Returns a table: block, number of weights, family, and the reason if the block is generic."""
        width = max(len(line.block) for line in self.lines)
        rows = [f"{line.block:<{width}}  {line.weights:>10,}  {line.family:<9}  {line.reason}" for line in self.lines]
        return "\n".join(row.rstrip() for row in rows)


@dataclass(frozen=True)
class RecordingPlan:
    """Assigns the uses of a recording to blocks. `uses` holds (index, sample axis, treated roles) by block name."""

    watched: tuple[str, ...] = ()  # names of covered parameters
    order: tuple[tuple[tuple[str, str], ...], ...] = ()  # (role, name) pairs of each use, in the order of the pass
    uses: dict[str, list[tuple[int, BatchAxis, frozenset[str]]]] = field(default_factory=dict)
    single_sample: bool = False  # the survey saw one sample: sample axes are guesses
    sizes: tuple[tuple[int, int], ...] = ()  # per sample and use: entries of the output and of the unfolded inputs
    spread: bool = False  # embeddings of a single row of tokens are expanded over the samples
    last: int = -1  # index of the use whose output is the network's output, or -1
    kinds: tuple[str, ...] = ()  # kind of each watched use
    shared: tuple[bool, ...] = ()  # for each tensor of the inputs, whether the samples of the first batch shared it
    unseen: bool = False  # the network bypasses function modes (see `functional.py`)
    idle: tuple[str, ...] = ()  # names that the first batch did not use, and that may be a last layer of other inputs

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON. Only the sample axes of the uses are stored, since `order` gives the rest."""
        axes = {i: [axis.axis, axis.inner] for uses in self.uses.values() for i, axis, _ in uses}
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("watched", "uses")}
        return {**plain, "axes": [axes[i] for i in range(len(self.order))]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], blocks: Sequence[Block]) -> RecordingPlan:
        """Rebuilds the plan of these blocks from JSON. Missing keys get their defaults."""
        order = tuple(tuple(map(tuple, use)) for use in data["order"])
        axes = [BatchAxis(*axis) for axis in data["axes"]]
        covered = [block for block in blocks if not block.is_generic]
        uses = {}
        for block in covered:
            roles = [frozenset(role for role, name in use if name in block.parameters) for use in order]
            uses[block.name] = [(i, axes[i], names) for i, names in enumerate(roles) if names]
        watched = tuple(name for block in covered for name in block.parameters)
        known: dict[str, Any] = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        known |= {name: tuple(known[name]) for name in ("kinds", "shared", "idle") if name in known}
        known |= {"watched": watched, "order": order, "uses": uses, "sizes": tuple(map(tuple, data["sizes"]))}
        return cls(**known)

    @cached_property
    def _names(self) -> list[dict[str, str]]:
        return [dict(use) for use in self.order]

    @cached_property
    def _axes(self) -> dict[tuple[tuple[str, str], ...], set[BatchAxis]]:
        """Names of a use by role -> sample axes of its layers."""
        axes: dict[tuple[tuple[str, str], ...], set[BatchAxis]] = {}
        for uses in self.uses.values():
            for i, axis, _ in uses:
                axes.setdefault(self.order[i], set()).add(axis)
        return axes

    def uses_in(self, names: list[dict[str, str]], kinds: tuple[str, ...], samples: int, model: str) -> Uses:
        """Returns the uses of a recording for each block: the uses of the survey, or new ones if the order differs."""
        if self.single_sample and samples > 1:
            raise LapwingError(
                f"The first batch had one sample, which cannot show where the layers of {model} hold the {samples} "
                "samples of this one. Begin with a batch of two or more: put a larger batch first."
            )
        if names == self._names and kinds == self.kinds:
            return self.uses
        return self._reordered(names, kinds, model)

    def _reordered(self, names: list[dict[str, str]], kinds: tuple[str, ...], model: str) -> Uses:
        """Returns the uses of a recording in another order than the survey's; raises unless it has the same ones."""
        order = [tuple(sorted(use.items())) for use in names]
        clear = all(len(self._axes.get(use, ())) == 1 for use in order)
        clear = clear and set(zip(self.order, self.kinds, strict=True)).issuperset(zip(order, kinds, strict=True))
        if not clear or set(order) != set(self.order):
            used = [name for use in names for name in use.values()]
            differences = [f"uses {name}" for name in used if name not in self.watched]
            differences += [f"does not use {name}" for name in self.watched if name not in used]
            raise LapwingError(
                f"{model} {(*differences, 'uses its layers in another way')[0]} at these inputs, unlike at the first "
                "samples of the fit. Shuffle the data, so that the first batch shows which layers run on some samples "
                "only, or name the weights to treat: params=lw.matching(...)."
            )
        axes = {use: next(iter(axis)) for use, axis in self._axes.items()}
        treated = {name: {self.order[i]: roles for i, _, roles in uses} for name, uses in self.uses.items()}
        return {
            name: [(i, axes[use], roles[use]) for i, use in enumerate(order) if use in roles]
            for name, roles in treated.items()
        }

    def is_explicit(self, block: Block) -> bool:
        """Whether a block needs explicit rows, because it is generic or its uses disagree about the layout."""
        uses = self.uses.get(block.name, ())
        tied = {self.kinds[i] for i, _, _ in uses if self.kinds} == TIED_TABLE
        return block.is_generic or (block.matrix is None and len(uses) > 1 and not tied)

    def numbers_per_sample(self, cotangents: int, written: bool = True) -> int:
        """Estimates the entries in memory per sample: all g twice, plus patches and rotated gradients of one layer.

        Without `written`, the R cotangents are the C outputs themselves, and a layer that gives the outputs has no g.
        """
        gathered = largest = 0
        for i, (out, patches) in enumerate(self.sizes):
            gradients = 0 if i == self.last and not written else cotangents * out
            gathered, largest = gathered + gradients, max(largest, 2 * patches + 3 * gradients)
        matrix = 0 if written else 2 * cotangents**2  # covariance of the outputs, and its root
        return 2 * gathered + largest + matrix + 1

    def work(self, blocks: Sequence[Block]) -> int:
        """Estimates the multiply-adds per row of a sample: positions times weights, for matrices."""
        work = 0
        for block in blocks:
            if block.matrix is not None and not block.matrix.one_hot:
                outputs = block.matrix.groups * block.matrix.outputs
                work += sum(self.sizes[i][0] // outputs * block.size for i, _, _ in self.uses[block.name])
        return work

    def least(self, blocks: Sequence[Block]) -> int:
        """Estimates the entries built per sample for one output if layers process one position at a time.

        Tensors as large as one layer's activations (merged tokens, normalised inputs of a group norm) do not count.
        """
        explicit = [3 * block.size for block in blocks if self.is_explicit(block)]
        matrices = [b.matrix_shape for b in blocks if b.matrix is not None and not b.matrix.one_hot]
        return max([0, *explicit, *(groups * (2 * inputs + 3 * outputs) for groups, outputs, inputs in matrices)])


def planned(
    uses: Sequence[tuple[RecordedUse, BatchAxis]],
    covered: Set[str],
    parameters: Mapping[str, Tensor],
    outputs: Tensor,
) -> tuple[list[Block], RecordingPlan]:
    """Makes the blocks and the plan from the survey's (use, sample axis) pairs of covered parameters.

    A weight and a bias that always occur together form one block. Any other parameter forms its own block.
    """
    order = tuple(tuple(sorted((r, n) for r, n in use.names.items() if n in covered)) for use, _ in uses)
    by_name: dict[str, list[int]] = {}
    for i, roles in enumerate(order):
        for _, name in roles:
            by_name.setdefault(name, []).append(i)
    blocks: list[Block] = []
    uses_of: dict[str, list[tuple[int, BatchAxis, frozenset[str]]]] = {}
    done: set[str] = set()
    for i, roles in enumerate(order):
        for role, name in sorted(roles, reverse=True):  # weight before bias
            if name in done:
                continue
            matrix, *different = {uses[j][0].use.matrix() for j in by_name[name]}
            partner = dict(roles).get("bias") if role == "weight" and not different else None
            paired = partner is not None and partner not in done and by_name[partner] == by_name[name]
            members = (name, partner) if partner is not None and paired else (name,)
            done.update(members)
            matrix = None if different else matrix  # uses that disagree are added in the layout of the parameter
            shapes = tuple(tuple(parameters[member].shape) for member in members)
            bias = matrix is not None and (role == "bias" or len(members) == 2)
            block_name = _block_name(members)
            block_name = members[0] if block_name in uses_of else block_name
            blocks.append(Block(block_name, members, shapes, uses[i][0].use.family, matrix, bias))
            uses_of[block_name] = [
                (j, uses[j][1], frozenset(r for r, n in order[j] if n in members)) for j in by_name[name]
            ]
    noted, samples = [use for use, _ in uses], len(outputs)
    plan = RecordingPlan(
        watched=tuple(name for block in blocks for name in block.parameters),
        order=order,
        uses=uses_of,
        single_sample=samples == 1,
        sizes=tuple(_numbers(use, samples) for use in noted),
        spread=any(use.spread for use in noted),
        last=next((i for i, use in enumerate(noted) if use.is_output(outputs)), -1),
        kinds=tuple(use.use.kind for use in noted),
    )
    return blocks, plan


def _block_name(members: tuple[str, ...]) -> str:
    """Returns the common part of the names: "fc" for "fc.weight" and "fc.bias", "rnn.ih_l0" for "rnn.weight_ih_l0"."""
    if len(members) == 1:
        return members[0].removesuffix(".weight")
    prefix = commonprefix(members)  # noqa: RUF071 (a prefix of characters, not of paths)
    rest = [name[len(prefix) :] for name in members]
    suffix = commonprefix([name[::-1] for name in rest])[::-1]  # noqa: RUF071
    return (prefix + suffix.lstrip("._")).rstrip("._") if prefix.rstrip("._") else members[0]


def _numbers(noted: RecordedUse, samples: int) -> tuple[int, int]:
    """Returns (entries of the output, entries of the unfolded inputs) per sample."""
    out, matrix = noted.out.numel() // samples, noted.use.matrix()
    if matrix is None or matrix.one_hot:
        return out, out
    return out, out // matrix.outputs * (matrix.inputs + 1)
