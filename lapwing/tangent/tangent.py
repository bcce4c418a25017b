"""The tangent: a network that is surveyed once, and whose Jacobian is then computed in chunks of samples.

`Tangent.survey` runs the network on the first batch, finds the parameters that layer families cover, checks them
against autograd (the probe), and lays them out as blocks. `Tangent.records` then yields `Record`s: the outputs and the
block Jacobians of a chunk of samples. The rest of the library contracts records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..data import batches
from ..data.batches import Forward
from ..data.inputs import Inputs
from ..environment import unlocked_property
from ..errors import LapwingError
from ..jacobian.blocks import Block
from ..linalg import accumulation_dtype, double_device, doubled, joined
from ..network.call import Call
from ..network.call_errors import OutputsWithPositions
from ..network.eager import native, own_parameters, parameters_of, without_compiled
from ..network.entry import outside_modes
from ..network.gate import check_inputs, checked_memory, checked_network, writes_itself
from ..network.positions import Places, Positions
from ..network.probe import PROBED_SAMPLES, probe
from ..network.recording_plan import Coverage, Covered, RecordingPlan, Uses
from ..network.sample_axis import SampleAxisCheck, SampleAxisMoved
from ..network.selection import LastLayer, Predicate, everything
from ..network.stamp import Stamp, state_of
from ..network.tracing import Recording
from .at_positions import by_position, output_use, records_of_positions
from .cotangents import EVERY_OUTPUT, READING, Cotangents, Reading
from .record import Record
from .retry import MemoryNeed, chunk_limit

log = logging.getLogger("lapwing")


@dataclass(frozen=True)
class Tangent:
    """A network and its treated parameters."""

    call: Call  # of the uncompiled network, which is never written
    blocks: tuple[Block, ...]  # the treated parameters, in order of use
    plan: RecordingPlan = field(repr=False)  # the recorded uses of each block
    reasons: Mapping[str, str]  # name of a generic block -> why no family treats it
    outputs: int  # C
    memory: int  # budget in bytes for one chunk
    sample_axis: SampleAxisCheck = field(default_factory=SampleAxisCheck, repr=False, compare=False)

    @classmethod
    @outside_modes
    def survey(
        cls,
        model: nn.Module | Call,
        inputs: Any,
        params: Predicate | LastLayer = everything,
        forward: Forward | None = None,
        memory: int | None = None,
        warn: bool = True,
        targets: Any = None,
        activation: str | None = None,
    ) -> Tangent:
        """Runs the network on a few samples. Finds and checks the layer family of each parameter.

        The shape of the targets may show which dimension of the outputs holds classes. `activation` gives probabilities
        if the outputs are logits: "softmax" or "sigmoid". A call brings its own `forward` and `activation`.

        Cost: four forward passes, two of them on one sample and two on at most four. One more for each of: a first
        batch of one sample, a frozen last layer, shared embeddings; and about four more for attention, recurrent layers
        and random numbers. At most four backward passes. All of it again on the whole batch, if layers stay unused.
        """
        last = isinstance(params, LastLayer)
        call = model if isinstance(model, Call) else Call(checked_network(model, last), forward, activation)
        network, memory = call.model, checked_memory(memory, call.model)
        parameters = own_parameters(network)
        inputs = Inputs.of(inputs, next(iter(parameters.values())).device)
        inputs = check_inputs(inputs, (), "the inputs of the first batch")
        inputs.check_lists()
        before = Stamp.of(network)
        try:
            surveyed = probe(call, parameters, inputs, params, memory // 16, warn)
        except OutputsWithPositions as error:
            shape = tuple(targets.shape) if isinstance(targets, Tensor) else None
            call = replace(call, layout=Positions.of(error.shape, shape))
            surveyed = probe(call, parameters, inputs, params, memory // 16, warn)
        if (written := before.changed()) is not None:
            raise writes_itself(network, written)
        tangent, layout = cls(call, *surveyed, memory), call.layout
        if layout is not None:
            few = inputs.take(slice(0, PROBED_SAMPLES))  # a run finds out whether the treated layer gives the outputs
            use = output_use(tangent, *tangent.traced(few))
            layout = replace(layout, rows_are_positions=use is not None)
            plan = replace(tangent.plan, tail=use is not None and use.slopes is not None)
            tangent = replace(tangent, call=replace(call, layout=layout), plan=plan, outputs=layout.outputs)
        if warn:
            tangent._warn_of_memory()
        return tangent if call.activation is None else tangent.of_logits(call.activation)

    def of_logits(self, activation: str | None) -> Tangent:
        """Returns the tangent of a network with logits. Its calls replace the logits of impossible classes."""
        gives_outputs, tail = self.plan.last or self.positions.rows_are_positions, self.plan.tail
        activation = None if gives_outputs and not tail else activation
        return replace(self, call=replace(self.call, activation=activation, looks=tail))  # a tail may add masks

    @property
    def model(self) -> nn.Module:
        """The uncompiled network."""
        return self.call.model

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    @property
    def coverage(self) -> Coverage:
        """The family of each block, with a reason for generic ones."""
        named = [(block, self.reasons.get(block.name, "")) for block in self.blocks]
        return Coverage(tuple(Covered(b.name, b.parameters, b.size, b.family, reason) for b, reason in named))

    @unlocked_property
    def parameters(self) -> dict[str, Tensor]:
        """Treated parameters of the model by name (not copies). Complex ones are pairs of real numbers (..., 2)."""
        named = parameters_of(self.model)
        return {name: named[name] for block in self.blocks for name in block.parameters}

    @unlocked_property
    def _own(self) -> dict[str, Tensor]:
        named = own_parameters(self.model)
        return {name: named[name] for name in self.parameters}

    def native(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns values of treated parameters with complex numbers where the network has them."""
        return native(values, self._own)

    @unlocked_property
    def named_blocks(self) -> dict[str, Block]:
        return {block.name: block for block in self.blocks}

    @unlocked_property
    def dtype(self) -> torch.dtype:
        """Accumulation dtype, in which sums are stored: by a treated weight, or one of the network if none is."""
        dtypes = [value.dtype for value in (self.parameters or parameters_of(self.model)).values()]
        return accumulation_dtype(next((dtype for dtype in dtypes if dtype.is_floating_point), dtypes[0]))

    @property
    def contraction_dtype(self) -> torch.dtype:
        """The widest dtype that records are contracted in: float64 if the device has it, else the dtype of sums."""
        return torch.float64 if double_device(self.device) == self.device else self.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(iter((self.parameters or parameters_of(self.model)).values())).device

    @unlocked_property
    def positions(self) -> Positions:
        """Layout of the positions of the outputs; one position if the outputs are a matrix (B, C)."""
        return self.call.layout or Positions(1, 2, self.outputs, 1)

    @property
    def width(self) -> int:
        """Number of outputs per input of the first batch: C, or T C."""
        return self.outputs * self.positions.count

    def with_flattened_positions(self) -> Tangent:
        """Returns the tangent for which all positions of an input are one sample with T C outputs."""
        layout = replace(self.positions, flattened=True, rows_are_positions=False, count=1)
        return replace(self, call=replace(self.call, layout=layout), outputs=self.width)

    @unlocked_property
    def treats_output_alone(self) -> bool:
        """Whether only layers that give the outputs are treated. Their rows need no backward pass."""
        return all(map(self.gives_outputs, self.blocks))

    @property
    def treats_one_layer(self) -> bool:
        """Whether only one layer is treated, and gives the outputs: ways without draws give the same variances.

        A tail may contain `detach()`, which linearisation obeys and other ways do not.
        """
        return len(self.plan.last) < 2 and not self.plan.tail and self.treats_output_alone

    def gives_outputs(self, block: Block) -> bool:
        """Whether all uses of a block give the outputs."""
        if self.positions.several:
            return self.positions.rows_are_positions
        uses = self.plan.uses.get(block.name, [(-1,)])
        return all(use[0] in self.plan.last for use in uses)

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors on which the outputs depend, see `state_of`."""
        return state_of(self.model)

    def mean(self) -> dict[str, Tensor]:
        """Returns the trained weights in the accumulation dtype: block name -> (P_block,)."""
        return {block.name: self.mean_of(block) for block in self.blocks}

    def mean_of(self, block: Block) -> Tensor:
        """Returns the trained weights of one block (P_block,), in the accumulation dtype."""
        return block.join({name: self.parameters[name].detach().to(self.dtype) for name in block.parameters})

    def call_with(self, values: Mapping[str, Tensor], inputs: Any) -> Tensor:
        """Returns differentiable outputs (B, C), or (B, T C), with other values of some treated parameters."""
        return self.call.rows_with(values, self._own, Inputs.of(inputs), self.plan.unseen)

    def outputs_of(self, inputs: Any) -> Tensor:
        """Returns the outputs (B, C), or in their own shape with positions, in chunks and without gradients."""
        with torch.no_grad(), without_compiled():
            shaped = (self.call.shaped(chunk) for _, chunk in Inputs.of(inputs).chunks(self.chunk_length(1)))
            return joined(part.detach().to(self.dtype) for part in shaped)  # scripted networks may give them a graph

    def places_of(self, inputs: Any) -> Places:
        """Returns the positions of the outputs. Cost: a forward pass of two samples, or none for outputs (B, C)."""
        sizes: tuple[int, ...] = ()
        inputs = Inputs.of(inputs)
        if self.positions.several:
            sizes = self.positions.sizes(self.outputs_of(inputs.take(slice(0, 2))).shape)
        return self.positions.places(inputs.samples, sizes)

    def width_of(self, inputs: Any) -> int:
        """Returns the number of outputs per input: C, or T C. It costs as much as `places_of`."""
        return self.outputs * self.places_of(inputs).count

    def record(
        self,
        inputs: Any,
        cotangents: Callable[[Tensor], Any] | Tensor | None = None,
        dtype: torch.dtype | None = None,
        finite: bool = True,
    ) -> Record:
        """Records one chunk of B samples. The record is differentiable in the inputs if they require gradients.

        The cotangents are u (B, C, R), a function of the outputs that returns u, or None for the C outputs. The
        contractions have this `dtype` (None: the accumulation dtype). With `finite` it raises unless the
        outputs are finite, which waits for the device.

        Cost: one forward and R backward passes. Memory O(R) times the activations.
        """
        checked, dtype = self.check(inputs), dtype or self.dtype
        differentiable = checked.wants_gradient
        recording, uses = self.traced(checked, finite)
        self.sample_axis.check(recording, uses, type(self.model).__name__)
        outputs = recording.outputs
        at = outputs if differentiable else outputs.detach()
        at = doubled(at) if dtype == torch.float64 else at  # a root of Λ with the same precision
        u = cotangents(at) if callable(cotangents) else cotangents
        return Record(self, checked, outputs, recording.noted, uses, u, dtype, differentiable, recording.sizes)

    def check(self, inputs: Any, where: str = "the inputs") -> Inputs:
        """Returns checked inputs, or raises an error with their name `where`. Checked inputs come back unchanged."""
        inputs = Inputs.of(inputs)
        if inputs.checked:
            return inputs
        checked = check_inputs(inputs, self.plan.shared, where)
        for _, chunk in checked.chunks(self.chunk_length(1)) if self.plan.idle else ():
            self.traced(chunk)  # raises if an idle weight is used, also for ways that record nothing
        return checked

    def traced(self, checked: Inputs, finite: bool = True) -> tuple[Recording, Uses]:
        """Runs the network on a chunk, and finds the uses of each block; `finite` is as in `record`."""
        chunk_limit().latest, named = checked.samples, self.parameters
        every = own_parameters(self.model) if self.plan.idle else {}
        idle = {name: every[name] for name in self.plan.idle}
        recorded = [block for block in self.blocks if block.name in self.plan.uses]
        watched = {name: named[name] for block in recorded for name in block.parameters}
        spread = checked.samples if self.plan.spread else 1
        frozen = [parameter for parameter in watched.values() if not parameter.requires_grad]
        recording = self.call.traced(checked, watched | idle, spread, frozen, repeats=not idle)
        recording.noted[:] = [use for use in recording.noted if use.reached or not idle.keys() & use.names.values()]
        if finite:
            batches.check_outputs(recording.outputs, "these inputs")
        width, noted = recording.outputs.shape[1] if self.call.layout else self.outputs, recording.noted
        uses = self.plan.uses_in(recording, checked, width, type(self.model).__name__)
        if not all(use.reached for use in noted):  # leave out uses without a gradient
            uses = {key: [use for use in every if noted[use[0]].reached] or every for key, every in uses.items()}
        return recording, uses

    def records(
        self,
        inputs: Any,
        cotangents: Cotangents = EVERY_OUTPUT,
        dtype: torch.dtype | None = None,
        reading: Reading = READING,
    ) -> Iterator[tuple[slice, Record]]:
        """Yields records of consecutive chunks of samples that fit the memory budget.

        - Outputs (B, C): a record has outputs (B, C), and the slices count samples.
        - With positions, if the treated layer gives the outputs: (N, C), and the slices count positions of all samples.
        - With positions, and cotangents that are the same at each position: (B, C) at one position; the slices count
          positions, with step T.
        - With positions, and other cotangents: (B, T C), and the slices count samples.

        Args:
            inputs: B samples, checked or not.
            cotangents: of each sample.
            dtype: dtype of the contractions.
            reading: memory that the caller needs, and positions that it reads. Slices count only `recorded` positions.
        """
        dtype, positions = dtype or self.dtype, self.positions
        if positions.rows_are_positions:
            yield from records_of_positions(self, self.check(inputs), cotangents, dtype, reading)
            return
        scratch = reading.scratch_per_sample * (1 if cotangents.columns is None else positions.count)
        each = positions.several and cotangents.by_position
        bad: list[Tensor] = []  # masks of samples; the first chunk is checked at once, and the others at the end
        length = self.chunk_length(1 if reading.variances_only else cotangents.columns, dtype, scratch)
        for part, chunk in self.check(inputs).chunks(length):
            if part.start and not bad:
                bad.append(torch.zeros(part.start, dtype=torch.bool, device=self.device))
            for rows, record in self.records_of_chunk(chunk, cotangents, dtype, finite=not bad):
                if bad:
                    bad.append(~record.outputs.isfinite().all(-1))
                rows = slice(part.start + rows.start, part.start + rows.stop)
                yield from by_position(record, rows, reading, cotangents) if each else [(rows, record)]
        if bad:
            batches.check_rows(torch.cat(bad), "these inputs")

    def records_of_chunk(
        self, inputs: Inputs, cotangents: Cotangents, dtype: torch.dtype, finite: bool = True
    ) -> Iterator[tuple[slice, Record]]:
        """Yields the record of one chunk, or of each sample if a layer has the samples on another axis than before."""
        try:
            record = self.record(inputs, cotangents, dtype, finite)
        except SampleAxisMoved as error:
            self.sample_axis.warn_once(error)
        else:
            yield slice(0, inputs.samples), record
            return
        for n in range(inputs.samples):
            part = slice(n, n + 1)
            yield part, self.record(inputs.take(part), cotangents.take(part), dtype)

    def chunk_length(
        self, columns: int | None = None, dtype: torch.dtype | None = None, scratch_per_sample: int = 0
    ) -> int:
        """Returns the number of samples that fit the memory budget, at least one; `columns` as in `Cotangents`."""
        fitting = self.memory // self.bytes_per_sample(columns, dtype, scratch_per_sample)
        return max(1, min(fitting, chunk_limit().samples))

    def require(self, need: MemoryNeed) -> None:
        """Raises if the tensors of a need exceed the memory budget."""
        if need.bytes > self.memory:
            raise LapwingError(need.refusal(self.memory))

    def _warn_of_memory(self) -> None:
        """Warns if one output at one position exceeds the budget. Logs if a whole sample exceeds it.

        The network's activations, and their gradients for one output, do not count: no choice here changes them.
        Neither do tensors as large as one layer's activations, such as the normalised inputs of a group norm.
        """
        explicit = [3 * block.size for block in self.blocks if block.name in self.plan.explicit]
        matrices = [b.matrix_shape for b in self.blocks if b.matrix is not None and not b.matrix.one_hot]
        least = max([0, *explicit, *(groups * (2 * inputs + 3 * outputs) for groups, outputs, inputs in matrices)])
        smallest, whole = least * self.dtype.itemsize, self.bytes_per_sample()
        if max(smallest, whole) > self.memory:
            self._tell_of_memory(smallest, whole)

    def _tell_of_memory(self, smallest: int, whole: int) -> None:
        name, budget = type(self.model).__name__, self.memory / 2**20
        if smallest > self.memory:
            log.warning(
                "One sample of %s needs about %.0f MiB even for one output and one position at a time, more than the "
                "budget of %.0f MiB, and will exceed it; pass memory=%d, or fewer parameters, such as "
                "params=lw.last_layer.",
                name, smallest / 2**20, budget, 2 ** (smallest - 1).bit_length(),
            )  # fmt: skip
        else:
            log.info(
                "One sample of %s needs about %.0f MiB (C = %d), and the memory budget is %.0f MiB. So lapwing "
                "processes its layers, outputs and positions in several steps. Pass memory=%d to process them in one.",
                name, whole / 2**20, self.outputs, budget, 2 ** (whole - 1).bit_length(),
            )  # fmt: skip

    def bytes_per_sample(
        self, columns: int | None = None, dtype: torch.dtype | None = None, scratch_per_sample: int = 0
    ) -> int:
        """Estimates the bytes of one sample of a record and its largest contraction; `columns` as in `Cotangents`.

        All g count twice, and patches and rotated gradients of one layer once. If the cotangents are the C outputs
        themselves, a layer that gives the outputs has no g.
        """
        count, gathered, largest = self.outputs if columns is None else columns, 0, 0
        for i, use in enumerate(self.plan.order):
            gradients = 0 if i in self.plan.last and columns is None else count * use.out
            gathered, largest = gathered + gradients, max(largest, 2 * use.patches + 3 * gradients)
        matrix = 2 * count**2 if columns is None else 0  # covariance of the outputs, and its root
        numbers = 2 * gathered + largest + matrix + 1 + 3 * count * self.plan.explicit_size + scratch_per_sample
        return numbers * (dtype or self.dtype).itemsize
