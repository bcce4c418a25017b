"""What the probe leaves behind: the plan by which every recording is read, and the report of what covers each block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from functools import cached_property
from os.path import commonprefix
from typing import Any

from torch import Tensor

from ..errors import LapwingError
from ..jacobian.blocks import Block
from ..jacobian.layers import BatchAxis
from .tracing import RecordedUse

Uses = Mapping[str, Sequence[tuple[int, BatchAxis, frozenset[str]]]]
"""Block name -> its uses as (index, where the samples are, roles treated)."""


@dataclass(frozen=True)
class Covered:
    """One line of the coverage report."""

    block: str
    parameters: tuple[str, ...]
    weights: int
    family: str
    reason: str


@dataclass(frozen=True)
class Coverage:
    """Which layer family treats each block of parameters; `generic` is slower, never wrong."""

    lines: tuple[Covered, ...]

    @classmethod
    def of(cls, blocks: Sequence[Block], reasons: Sequence[str]) -> Coverage:
        """Makes the report of blocks and the reasons why they are generic, "" where they are not."""
        lines = zip(blocks, reasons, strict=True)
        return cls(tuple(Covered(b.name, b.parameters, b.size, b.family, reason) for b, reason in lines))

    @property
    def generic(self) -> tuple[Covered, ...]:
        """The blocks that no family covers."""
        return tuple(line for line in self.lines if line.family == "generic")

    def __str__(self) -> str:
        """A table: block, number of weights, family, and the reason where it is generic."""
        width = max(len(line.block) for line in self.lines)
        rows = [f"{line.block:<{width}}  {line.weights:>10,}  {line.family:<9}  {line.reason}" for line in self.lines]
        return "\n".join(row.rstrip() for row in rows)


@dataclass(frozen=True)
class Plan:
    """How to read a recording: which parameters are watched, and which uses make up each block.

    Attributes:
        watched: names of covered parameters.
        order: the names of each watched use by role, in order.
        kinds: the kind of each of them.
        shared: of each tensor of the inputs, whether the samples of the first batch shared it.
        uses: block name -> its uses as (index, where the samples are, roles treated).
        single_sample: the survey saw one sample only, so that batch axes are guesses.
        sizes: a watched use's (out numel, patches numel) a sample.
        spread: whether embeddings of a single row of tokens are spread over the samples.
        last: the index of the use whose output is the network's, -1 where there is none.
        unseen: whether the network takes parameters past function modes, as `functional.py` says.
    """

    watched: tuple[str, ...] = ()
    order: tuple[tuple[tuple[str, str], ...], ...] = ()
    uses: dict[str, list[tuple[int, BatchAxis, frozenset[str]]]] = field(default_factory=dict)
    single_sample: bool = False
    sizes: tuple[tuple[int, int], ...] = ()
    spread: bool = False
    last: int = -1
    kinds: tuple[str, ...] = ()
    shared: tuple[bool, ...] = ()
    unseen: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON: of the uses only where they hold the samples, since `order` tells the rest."""
        axes = {i: [axis.axis, axis.inner] for uses in self.uses.values() for i, axis, _ in uses}
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("watched", "uses")}
        return {**plain, "axes": [axes[i] for i in range(len(self.order))]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], blocks: Sequence[Block]) -> Plan:
        """Rebuilds the plan of these blocks, with its lists as tuples again; keys that it lacks have their defaults."""
        order = tuple(tuple(map(tuple, use)) for use in data["order"])
        axes = [BatchAxis(*axis) for axis in data["axes"]]
        covered = [block for block in blocks if not block.is_generic]
        uses = {}
        for block in covered:
            roles = [frozenset(role for role, name in use if name in block.parameters) for use in order]
            uses[block.name] = [(i, axes[i], names) for i, names in enumerate(roles) if names]
        watched = tuple(name for block in covered for name in block.parameters)
        known: dict[str, Any] = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        known |= {name: tuple(known[name]) for name in ("kinds", "shared") if name in known}
        known |= {"watched": watched, "order": order, "uses": uses, "sizes": tuple(map(tuple, data["sizes"]))}
        return cls(**known)

    @cached_property
    def _names(self) -> list[dict[str, str]]:
        return [dict(use) for use in self.order]

    @cached_property
    def _axes(self) -> dict[tuple[tuple[str, str], ...], set[BatchAxis]]:
        """The names of a use by role -> where its layers hold the samples."""
        axes: dict[tuple[tuple[str, str], ...], set[BatchAxis]] = {}
        for uses in self.uses.values():
            for i, axis, _ in uses:
                axes.setdefault(self.order[i], set()).add(axis)
        return axes

    def uses_in(self, names: list[dict[str, str]], kinds: tuple[str, ...], samples: int, model: str) -> Uses:
        """Returns the uses of a recording block by block: the survey's, or others where layers ran in another order.

        Raises:
            LapwingError: where that is not clear, or a layer did not run; for batches where the survey saw one sample.
        """
        if self.single_sample and samples > 1:
            raise LapwingError(
                f"The first batch had one sample, which cannot show where the layers of {model} hold the {samples} "
                "samples of this one. Begin with a batch of two or more: put a larger batch first."
            )
        if names == self._names and kinds == self.kinds:
            return self.uses
        order = [tuple(sorted(use.items())) for use in names]
        clear = all(len(self._axes.get(use, ())) == 1 for use in order)
        clear = clear and set(zip(self.order, self.kinds, strict=True)).issuperset(zip(order, kinds, strict=True))
        if not clear or set(order) != set(self.order):
            raise LapwingError(
                f"{model} does not run as on the first batch, where it used its covered parameters {len(self.order)} "
                f"times: this batch has {len(names)} uses, not of the same layers. All of them must run on every "
                "batch. Leave conditional layers out with params=lambda name, parameter: ..."
            )
        axes = {use: next(iter(axis)) for use, axis in self._axes.items()}
        treated = {name: {self.order[i]: roles for i, _, roles in uses} for name, uses in self.uses.items()}
        return {
            name: [(i, axes[use], roles[use]) for i, use in enumerate(order) if use in roles]
            for name, roles in treated.items()
        }

    def is_explicit(self, block: Block) -> bool:
        """Whether rows are all there is of a block: it is generic, or its uses disagree about the layout."""
        return block.is_generic or (block.matrix is None and len(self.uses[block.name]) > 1)

    def numbers_per_sample(self, cotangents: int, written: bool = True) -> int:
        """Estimates the numbers held a sample: all g twice, and the patches and rotated gradients of one layer.

        Args:
            cotangents: R.
            written: whether they are numbers; else they are the outputs themselves, and a layer whose output they are
                has no g.
        """
        gathered = largest = 0
        for i, (out, patches) in enumerate(self.sizes):
            gradients = 0 if i == self.last and not written else cotangents * out
            gathered, largest = gathered + gradients, max(largest, 2 * patches + 3 * gradients)
        matrix = 0 if written else 2 * cotangents**2  # of the outputs, which some structures give, and its root
        return 2 * gathered + largest + matrix + 1

    def work(self, blocks: Sequence[Block]) -> int:
        """Estimates the multiply-adds that one row of a sample takes: positions times weights, of matrices."""
        work = 0
        for block in blocks:
            if block.matrix is not None and not block.matrix.one_hot:
                outputs = block.matrix.groups * block.matrix.outputs
                work += sum(self.sizes[i][0] // outputs * block.size for i, _, _ in self.uses[block.name])
        return work

    def least(self, blocks: Sequence[Block]) -> int:
        """Estimates the numbers built of a sample for one output where layers take one position at a time.

        What is as large as one layer's activations (tokens merged, inputs of a group norm normalised) is not counted.
        """
        explicit = [3 * block.size for block in blocks if self.is_explicit(block)]
        matrices = [b.matrix_shape for b in blocks if b.matrix is not None and not b.matrix.one_hot]
        return max([0, *explicit, *(groups * (2 * inputs + 3 * outputs) for groups, outputs, inputs in matrices)])


def planned(
    uses: Sequence[tuple[RecordedUse, BatchAxis]],
    covered: Set[str],
    parameters: Mapping[str, Tensor],
    outputs: Tensor,
    shared: tuple[bool, ...],
    unseen: bool,
) -> tuple[list[Block], Plan]:
    """Makes blocks and plan of a survey's uses of covered parameters, with where they hold the samples.

    Weight and bias that always go together are one block, others stand alone.
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
            matrix, *others = {uses[j][0].use.matrix() for j in by_name[name]}
            partner = dict(roles).get("bias") if role == "weight" and not others else None
            paired = partner is not None and partner not in done and by_name[partner] == by_name[name]
            members = (name, partner) if partner is not None and paired else (name,)
            done.update(members)
            matrix = None if others else matrix  # uses that disagree are added up in the parameter's own order
            shapes = tuple(tuple(parameters[member].shape) for member in members)
            bias = matrix is not None and (role == "bias" or len(members) == 2)
            block_name = _block_name(members)
            block_name = members[0] if block_name in uses_of else block_name
            blocks.append(Block(block_name, members, shapes, uses[i][0].use.family, matrix, bias))
            uses_of[block_name] = [
                (j, uses[j][1], frozenset(r for r, n in order[j] if n in members)) for j in by_name[name]
            ]
    noted, samples = [use for use, _ in uses], len(outputs)
    plan = Plan(
        watched=tuple(name for block in blocks for name in block.parameters),
        order=order,
        uses=uses_of,
        single_sample=samples == 1,
        sizes=tuple(_numbers(use, samples) for use in noted),
        spread=any(use.spread for use in noted),
        last=next((i for i, use in enumerate(noted) if use.is_output(outputs)), -1),
        kinds=tuple(use.use.kind for use in noted),
        shared=shared,
        unseen=unseen,
    )
    return blocks, plan


def _block_name(members: tuple[str, ...]) -> str:
    """Returns what the names have in common: "fc" of "fc.weight" and "fc.bias", "rnn.ih_l0" of "rnn.weight_ih_l0"..."""
    if len(members) == 1:
        return members[0].removesuffix(".weight")
    prefix = commonprefix(members)  # noqa: RUF071 (characters are what is wanted)
    rest = [name[len(prefix) :] for name in members]
    suffix = commonprefix([name[::-1] for name in rest])[::-1]  # noqa: RUF071
    return (prefix + suffix.lstrip("._")).rstrip("._") if prefix.rstrip("._") else members[0]


def _numbers(noted: RecordedUse, samples: int) -> tuple[int, int]:
    """Returns (outputs, unfolded inputs) a sample, in numbers."""
    out, matrix = noted.out.numel() // samples, noted.use.matrix()
    if matrix is None or matrix.one_hot:
        return out, out
    return out, out // matrix.outputs * (matrix.inputs + 1)
