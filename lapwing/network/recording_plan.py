"""The plan that reads every recording, and the coverage report of the blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any

from torch import Tensor

from ..data.inputs import Inputs
from ..display import Displayed
from ..errors import LapwingError
from ..jacobian.blocks import Block
from ..jacobian.layers import BatchAxis
from .tracing import RecordedUse, Recording

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
class PlannedUse:
    """One use of covered parameters in the survey."""

    names: tuple[tuple[str, str], ...]  # sorted (role, name) pairs
    kind: str  # `Use.kind`
    axis: BatchAxis  # of the samples
    out: int  # entries of the output per sample
    patches: int  # entries of the unfolded inputs per sample


@dataclass(frozen=True)
class RecordingPlan:
    """Assigns the uses of a recording to blocks."""

    order: tuple[PlannedUse, ...] = ()  # the uses in the order of the pass
    uses: Uses = field(default_factory=dict)  # of each block with a layer family; they follow from `order`
    explicit: frozenset[str] = frozenset()  # blocks that need rows: generic, or with uses that disagree on the layout
    explicit_size: int = 0  # number of weights in these
    single_sample: bool = False  # the survey saw one sample: sample axes are guesses
    spread: bool = False  # embeddings of a single row of tokens are expanded over the samples
    last: tuple[int, ...] = ()  # indices of the uses that give the network's outputs
    tail: bool = False  # whether further steps follow these layers, entry by entry
    shared: tuple[bool, ...] = ()  # for each tensor of the inputs, whether the samples of the first batch shared it
    unseen: bool = False  # the network bypasses function modes (see `functional.py`)
    idle: tuple[str, ...] = ()  # names that the first batch did not use, and that may be a last layer of other inputs

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON, without what follows from the blocks and `order`."""
        flags = ("single_sample", "spread", "last", "tail", "shared", "unseen", "idle")
        return {
            **{name: getattr(self, name) for name in flags},
            "order": [use.names for use in self.order],
            "kinds": [use.kind for use in self.order],
            "axes": [(use.axis.axis, use.axis.inner) for use in self.order],
            "sizes": [(use.out, use.patches) for use in self.order],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], blocks: Sequence[Block]) -> RecordingPlan:
        """Rebuilds the plan of these blocks from JSON. Missing flags get their defaults."""
        parts = zip(data["order"], data["kinds"], data["axes"], data["sizes"], strict=True)
        order = tuple(
            PlannedUse(tuple(map(tuple, names)), kind, BatchAxis(*axis), *sizes) for names, kind, axis, sizes in parts
        )
        known = {name: data[name] for name in ("single_sample", "spread", "tail", "unseen") if name in data}
        known |= {name: tuple(data[name]) for name in ("shared", "idle") if name in data}
        last = data.get("last", ())  # files of lapwing 0.3.0 name one use, or -1
        known["last"] = tuple(last) if isinstance(last, list) else (last,) * (last >= 0)
        return cls.of(order, blocks, **known)

    @classmethod
    def of(cls, order: tuple[PlannedUse, ...], blocks: Sequence[Block], **known: Any) -> RecordingPlan:
        """Makes the plan of the uses of these blocks."""
        owners = {name: block.name for block in blocks if block.family != "generic" for name in block.parameters}
        uses: dict[str, list[tuple[int, BatchAxis, frozenset[str]]]] = {name: [] for name in owners.values()}
        for i, use in enumerate(order):
            for block in dict.fromkeys(owners[name] for _, name in use.names):
                uses[block].append((i, use.axis, frozenset(role for role, name in use.names if owners[name] == block)))
        several = {block.name for block in blocks if block.matrix is None and len(uses.get(block.name, ())) > 1}
        tied = {name for name in several if {order[i].kind for i, _, _ in uses[name]} == TIED_TABLE}
        rowwise = {block.name for block in blocks} - uses.keys() | several - tied
        explicit = {block.name: block.size for block in blocks if block.name in rowwise}
        return cls(order, uses, frozenset(explicit), sum(explicit.values()), **known)

    def uses_in(self, recording: Recording, inputs: Inputs, outputs: int, model: str) -> Uses:
        """Returns the uses of a recording for each block: the uses of the survey, or new ones if the order differs.

        Raises unless the call has `outputs` (C or T C) outputs, and uses weights as the first batch did.
        """
        noted, (samples, width) = recording.noted, recording.outputs.shape
        if width != outputs:
            raise _other_width(model, inputs, recording.outputs.shape, outputs)
        if recording.elsewhere or recording.differentiated or any(use.stale for use in noted):
            _refuse_other_use(recording, model)
        if self.single_sample and samples > 1:
            raise LapwingError(
                f"The first batch had one sample, which cannot show where the layers of {model} hold the {samples} "
                "samples of this one. Begin with a batch of two or more: put a larger batch first."
            )
        seen = [(tuple(sorted(use.names.items())), use.use.kind) for use in noted]
        return self.uses if seen == [(use.names, use.kind) for use in self.order] else self._reordered(seen, model)

    def _reordered(self, seen: Sequence[tuple[tuple[tuple[str, str], ...], str]], model: str) -> Uses:
        """Returns the uses of a recording in another order than the survey's; raises unless it has the same ones."""
        axes = {use.names: use.axis for use in self.order}
        clear = all(axes[use.names] == use.axis for use in self.order)
        clear = clear and {(use.names, use.kind) for use in self.order}.issuperset(seen)
        if not clear or {names for names, _ in seen} != axes.keys():
            used = [name for names, _ in seen for _, name in reversed(names)]  # weight before bias
            known = [name for use in self.order for _, name in reversed(use.names)]
            differences = [f"uses {name}" for name in used if name not in known]
            differences += [f"does not use {name}" for name in known if name not in used]
            raise LapwingError(
                f"{model} {(*differences, 'uses its layers in another way')[0]} at these inputs, unlike at the first "
                "samples of the fit. Shuffle the data, so that the first batch shows which layers run on some samples "
                "only, or name the weights to treat: params=lw.matching(...)."
            )
        treated = {name: {self.order[i].names: roles for i, _, roles in uses} for name, uses in self.uses.items()}
        return {
            name: [(i, axes[names], roles[names]) for i, (names, _) in enumerate(seen) if names in roles]
            for name, roles in treated.items()
        }

    def work(self, blocks: Sequence[Block]) -> int:
        """Estimates the multiply-adds per row of a sample: positions times weights, for matrices."""
        work = 0
        for block in blocks:
            if block.matrix is not None and not block.matrix.one_hot:
                outputs = block.matrix.groups * block.matrix.outputs
                work += sum(self.order[i].out // outputs * block.size for i, _, _ in self.uses[block.name])
        return work


def _other_width(name: str, inputs: Inputs, shape: tuple[int, ...], outputs: int) -> LapwingError:
    return LapwingError(
        f"The outputs of {name} have the shape {tuple(shape)} at {inputs}, and there were {outputs} for each sample on "
        "the first batch. Check the shape of the inputs, and pass a single sample as x[None]."
    )


def _refuse_other_use(recording: Recording, name: str) -> None:
    """Raises if a call uses a treated weight in another way than the first batch did."""
    stale = [min(use.names.values()) for use in recording.noted if use.stale]
    difference = ""
    if recording.elsewhere:
        difference = f"also uses {min(recording.elsewhere)} in another way"
    elif recording.differentiated and recording.noted:
        difference = "takes gradients"
    elif stale:
        difference = f"writes the input of the layer of {stale[0]} in place after the call"
    if difference:
        raise LapwingError(
            f"{name} {difference}, which it did not do on the first batch. Put a batch that shows it first, or leave "
            "the parameter out with params=lambda name, parameter: ..."
        )


def planned(
    pairs: Sequence[tuple[RecordedUse, BatchAxis]], covered: Set[str], samples: int, parameters: Mapping[str, Tensor]
) -> tuple[tuple[PlannedUse, ...], list[Block]]:
    """Plans the recorded uses of covered parameters, and makes the blocks of these parameters.

    A weight and a bias that always occur together form one block. Any other parameter forms its own block.
    """
    order: list[PlannedUse] = []
    by_name: dict[str, list[int]] = {}
    for i, (noted, axis) in enumerate(pairs):
        names = tuple(sorted((role, name) for role, name in noted.names.items() if name in covered))
        out, matrix = noted.out.numel() // samples, noted.use.matrix()
        patches = out if matrix is None or matrix.one_hot else out // matrix.outputs * (matrix.inputs + 1)
        order.append(PlannedUse(names, noted.use.kind, axis, out, patches))
        for _, name in names:
            by_name.setdefault(name, []).append(i)
    blocks: dict[str, Block] = {}
    done: set[str] = set()
    for (noted, _), use in zip(pairs, order, strict=True):
        for role, name in reversed(use.names):  # weight before bias
            if name in done:
                continue
            matrix, *different = {pairs[j][0].use.matrix() for j in by_name[name]}
            partner = dict(use.names).get("bias") if role == "weight" and not different else None
            paired = partner is not None and partner not in done and by_name[partner] == by_name[name]
            members = (name, partner) if partner is not None and paired else (name,)
            done.update(members)
            matrix = None if different else matrix  # uses that disagree are added in the layout of the parameter
            shapes = tuple(tuple(parameters[member].shape) for member in members)
            bias = matrix is not None and (role == "bias" or len(members) == 2)
            block_name = _block_name(members)
            block_name = members[0] if block_name in blocks else block_name
            blocks[block_name] = Block(block_name, members, shapes, noted.use.family, matrix, bias)
    return tuple(order), list(blocks.values())


def _block_name(members: tuple[str, ...]) -> str:
    """Returns the common part of the names: "fc" for "fc.weight" and "fc.bias", "rnn.ih_l0" for "rnn.weight_ih_l0"."""
    if len(members) == 1:
        return members[0].removesuffix(".weight")
    prefix = commonprefix(members)  # noqa: RUF071 (a prefix of characters, not of paths)
    rest = [name[len(prefix) :] for name in members]
    suffix = commonprefix([name[::-1] for name in rest])[::-1]  # noqa: RUF071
    return (prefix + suffix.lstrip("._")).rstrip("._") if prefix.rstrip("._") else members[0]
