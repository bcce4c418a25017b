"""The tangent: a network surveyed once, then seen through its Jacobian chunk by chunk.

`Tangent.survey` runs the network on the first batch, finds which parameters the layer families cover, checks them
against autograd (the probe), and lays them out as blocks. `Tangent.records` then gives `Record`s: outputs and the block
Jacobians of a chunk of samples, from which everything else in the library is contracted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from .. import batches
from ..batches import Forward
from ..errors import LapwingError
from ..numerics import accumulation_dtype
from .attribution import Misplaced, misplaced, shapes
from .blocks import Block
from .chunk import Record
from .eager import LOCK, modules_of, outside_modes, parameters_of, uncompiled, without_compiled
from .plan import Coverage, Covered, Plan
from .probe import check_mode, probe
from .record import Recording, level, run, wants_gradient
from .selection import LastLayer, Predicate, everything

log = logging.getLogger("lapwing")

DEFAULT_MEMORY = 2**30
"""Budget in bytes for what the library holds of one chunk of samples: 1 GiB."""

Cotangents = Callable[[Tensor], Tensor] | Tensor | None


@dataclass(frozen=True)
class Tangent:
    """A network and its treated parameters, ready to be contracted.

    Attributes:
        model: the uncompiled network, never written.
        forward: how it is called, or None.
        blocks: the treated parameters, in order of use.
        coverage: which family covers each block, and why not where it is generic.
        outputs: C.
        memory: budget in bytes for one chunk.
    """

    model: nn.Module
    forward: Forward | None
    blocks: tuple[Block, ...]
    plan: Plan = field(repr=False)
    coverage: Coverage
    outputs: int
    memory: int

    @classmethod
    @outside_modes
    def survey(
        cls,
        model: nn.Module,
        inputs: Any,
        params: Predicate | LastLayer = everything,
        forward: Forward | None = None,
        memory: int | None = None,
        tell: bool = True,
    ) -> Tangent:
        """Runs the network on a few samples, finds and checks what covers each parameter.

        Args:
            model: a trained network in eval mode.
            inputs: a first batch.
            params: which parameters to treat.
            forward: `forward(model, inputs)` where plain calling does not do.
            memory: budget in bytes for one chunk; 1 GiB when None.
            tell: warn of idle parameters and of needs above the budget.

        Raises:
            LapwingError: cases 1, 2, 5, 7, 10, 11, 12, 14 and 15 of bad input.

        Cost: three or four forward passes and C + 3 backward passes on at most four samples.
        """
        memory = _checked_memory(memory)
        model = _checked_network(model)
        parameters = parameters_of(model)
        inputs = batches.plain(inputs)
        batches.check_inputs(inputs, next(iter(parameters.values())), "the inputs of the first batch")
        batches.check_lists(inputs)
        surveyed = probe(model, parameters, inputs, params, forward, most=memory // 16, tell=tell)
        tangent = cls(model, forward, surveyed.blocks, surveyed.plan, surveyed.coverage, surveyed.outputs, memory)
        if tell:
            tangent._tell_need()
        return tangent

    def to_json(self) -> dict[str, Any]:
        """Returns everything but the network and the budget, as JSON."""
        return {"blocks": [asdict(b) for b in self.blocks], "plan": self.plan.to_json(), "outputs": self.outputs,
                "coverage": [asdict(line) for line in self.coverage.lines]}  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any], model: nn.Module, forward: Forward | None, memory: int | None) -> Tangent:
        """Rebuilds the tangent around a network, without running it.

        Raises:
            LapwingError: if the network lacks one of the parameters, or has it in another shape.
        """
        memory = _checked_memory(memory)
        model = _checked_network(model)
        named = parameters_of(model)
        blocks = tuple(Block.from_json(block) for block in data["blocks"])
        for block in blocks:
            for name, shape in zip(block.parameters, block.shapes, strict=True):
                found = tuple(named[name].shape) if name in named else "no such parameter"
                if found != shape:
                    raise LapwingError(
                        f"Asked to load a posterior over the parameter {name} {shape} around {type(model).__name__}, "
                        f"found {found}; the network of the fit is needed: build it with the same options."
                    )
        lines = tuple(Covered(**{**line, "parameters": tuple(line["parameters"])}) for line in data["coverage"])
        return cls(model, forward, blocks, Plan.from_json(data["plan"]), Coverage(lines), data["outputs"], memory)

    @property
    def size(self) -> int:
        """P, the number of treated weights."""
        return sum(block.size for block in self.blocks)

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Name -> the model's own treated parameters (not copies)."""
        named = parameters_of(self.model)
        return {name: named[name] for block in self.blocks for name in block.parameters}

    @cached_property
    def named_blocks(self) -> dict[str, Block]:
        """Name -> block."""
        return {block.name: block for block in self.blocks}

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype that sums are kept in."""
        return accumulation_dtype(next(iter(self.parameters.values())).dtype)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.parameters.values())).device

    @cached_property
    def explicit_size(self) -> int:
        """The number of weights whose rows are always formed."""
        return sum(block.size for block in self.blocks if self.plan.is_explicit(block))

    def state(self) -> dict[str, Tensor]:
        """Returns what the outputs depend on: name -> every parameter, treated or not, and every saved real buffer."""
        plain = type(self.model).named_parameters is nn.Module.named_parameters
        parameters = {} if plain else parameters_of(self.model)
        buffers: dict[str, Tensor] = {}
        met = set()  # a tied parameter counts under its first name
        with LOCK:
            for prefix, module in modules_of(self.model):
                for name, value in module._parameters.items() if plain else ():
                    if value is not None and id(value) not in met:
                        met.add(id(value))
                        parameters[prefix + name] = value
                for name, buffer in module._buffers.items():
                    if buffer is None or name in module._non_persistent_buffers_set:
                        continue
                    if buffer.is_floating_point():
                        buffers[prefix + name] = buffer
        return {**parameters, **buffers}

    def mean(self) -> dict[str, Tensor]:
        """Returns the trained weights as one vector a block (P_block,), in the accumulation dtype."""
        parameters = {name: value.detach().to(self.dtype) for name, value in self.parameters.items()}
        return {block.name: block.join(parameters) for block in self.blocks}

    def outputs_of(self, inputs: Any) -> Tensor:
        """Returns the network's outputs (B, C), without gradients."""
        with torch.no_grad(), without_compiled():
            outputs = batches.call(self.model, inputs, self.forward)
        return outputs.detach().to(self.dtype)  # a scripted network may give them a graph all the same

    def record(self, inputs: Any, cotangents: Cotangents = None, dtype: torch.dtype | None = None) -> Record:
        """Sees one chunk of samples through the Jacobian.

        Args:
            inputs: B samples.
            cotangents: u (B, C, R), or a function of the outputs that gives it; the C outputs themselves when None.
            dtype: contract in this dtype; the accumulation dtype when None.

        Returns:
            A record; differentiable in the inputs where they require gradients.

        Raises:
            LapwingError: NaN or infinite inputs or outputs; a network that calls its layers in another order than on
                the first batch.

        Cost: one forward and R backward passes of activations; memory O(R) times the activations.
        """
        self._check_inputs(inputs)
        return self._record(inputs, cotangents, dtype or self.dtype)

    def _check_inputs(self, inputs: Any) -> None:
        if level() is not None:
            raise LapwingError(
                f"Asked for gradients of {type(self.model).__name__} within a transformation of torch.func, found that "
                "its own would mix with them; torch.autograd.grad is needed: write x.requires_grad_() and "
                "torch.autograd.grad(posterior.latent(x).variance.sum(), x)."
            )
        batches.check_inputs(inputs, next(iter(self.parameters.values())), "the inputs")
        before = self.plan.shared
        if not any(before) or len(now := batches.shared(inputs)) != len(before):
            return
        count = batches.size(inputs)
        if count > 1 and any(was and not still for was, still in zip(before, now, strict=True)):
            raise LapwingError(
                f"Asked to run {type(self.model).__name__} on {batches.describe(inputs)}, found {count} samples and a "
                f"tensor of length {count} that the samples of the first batch shared, which cannot be told from one "
                "with a row a sample; give what samples share in another shape, such as shared[None], or hold it in "
                "forward=lambda model, inputs: model(inputs, shared)."
            )

    def _record(self, inputs: Any, cotangents: Cotangents, dtype: torch.dtype) -> Record:
        """Does what `record` says, for inputs that are checked."""
        differentiable = wants_gradient(inputs)
        named = self.parameters
        watched = {name: named[name] for name in self.plan.watched}
        spread = batches.size(inputs) if self.plan.spread else 1
        frozen = [parameter for parameter in watched.values() if not parameter.requires_grad]
        recording = run(self.model, inputs, self.forward, watched, spread, frozen)
        outputs, noted, routed, *_ = recording
        batches.check_outputs(outputs, "these inputs")
        samples, name = outputs.shape[0], type(self.model).__name__
        if outputs.shape[1] != self.outputs:
            raise LapwingError(
                f"Asked for the {self.outputs} outputs of {name} at {batches.describe(inputs)}, "
                f"found outputs of shape {tuple(outputs.shape)}; as many as on the first batch are needed: check the "
                "shape of the inputs, and give a single sample as x[None]."
            )
        self._check_seen_whole(recording)
        kinds = tuple([use.use.kind for use in noted])
        uses = self.plan.uses_in([use.names for use in noted], kinds, samples, name)
        known = shapes(outputs, noted)
        if samples > 1 and (routed or known not in self._attributed):
            layer, conclusive = misplaced(outputs, noted, uses)
            if layer:
                raise Misplaced(
                    f"Asked for gradients of {name} at {samples} samples at once, found that {layer} does not hold "
                    "them as on the first batch: forward() sorts, packs or leaves out parts of them; what needs "
                    "several samples together (joint covariances, inducing points) takes layers that always hold them "
                    "alike: leave this one out with params=lambda name, parameter: ..., or ask for single samples."
                )
            if conclusive and not routed:
                self._attributed.add(known)
        if callable(cotangents):
            cotangents = cotangents(outputs if differentiable else outputs.detach())
        return Record(self, inputs, outputs, noted, uses, cotangents, dtype, differentiable)

    def _check_seen_whole(self, recording: Recording) -> None:
        """Raises where covered parameters, or what their layers saw, count in ways that the first batch did not show.

        Raises:
            LapwingError: for such a batch.
        """
        stale = [min(use.names.values()) for use in recording.noted if use.stale]
        found = ""
        if recording.elsewhere:
            found = f"it also uses {min(recording.elsewhere)} in another way"
        elif recording.differentiated and recording.noted:
            found = "it takes gradients"
        elif stale:
            found = f"the input of the layer of {stale[0]} is written in place after the call"
        if found:
            raise LapwingError(
                f"Asked to run {type(self.model).__name__} as on the first batch, found that {found}, which was not so "
                "there; the same on every batch is needed: put a batch that shows it first, or leave the parameter out "
                "with params=lambda name, parameter: ..."
            )

    def tell_alone(self, error: Misplaced) -> None:
        """Warns once that samples are taken one by one."""
        if (torch.Size(),) not in self._attributed:
            self._attributed.add((torch.Size(),))
            log.warning("%s; they are taken one by one, which is slow.", str(error).partition(";")[0])

    @cached_property
    def _attributed(self) -> set[tuple[torch.Size, ...]]:
        """Shapes of recordings whose layers are known to hold the samples where the survey found them."""
        return set()

    def records(
        self, inputs: Any, cotangents: Cotangents = None, dtype: torch.dtype | None = None, rows_held: int = 0
    ) -> Iterator[tuple[slice, Record]]:
        """Yields records of consecutive chunks of samples that fit the memory budget.

        Args:
            inputs: B samples.
            cotangents: as in `record`; a function, or None (a tensor cannot be cut along).
            dtype: as in `record`.
            rows_held: further numbers that the caller holds a sample, in units of `dtype`.
        """
        self._check_inputs(inputs)
        for part, chunk in batches.chunks(inputs, self.chunk_length(cotangents, dtype, rows_held)):
            try:
                record = self._record(chunk, cotangents, dtype or self.dtype)
            except Misplaced as error:
                self.tell_alone(error)
            else:
                yield part, record
                continue
            for n in range(part.stop - part.start):
                alone = self._record(batches.take(chunk, slice(n, n + 1)), cotangents, dtype or self.dtype)
                yield slice(part.start + n, part.start + n + 1), alone

    def chunk_length(
        self, cotangents: Cotangents | int = None, dtype: torch.dtype | None = None, rows_held: int = 0
    ) -> int:
        """Returns how many samples fit the memory budget at once, at least one; `cotangents` may be their count."""
        return max(1, self.memory // self.bytes_per_sample(cotangents, dtype, rows_held))

    def _tell_need(self) -> None:
        """Warns where one output at one position of a sample exceeds the budget; mentions where the whole sample does.

        The network's own activations, and their gradients for one output, are not counted: no choice here changes them.
        """
        name, budget = type(self.model).__name__, self.memory / 2**20
        least, whole = self.plan.least(self.blocks) * self.dtype.itemsize, self.bytes_per_sample()
        if least > self.memory:
            log.warning(
                "One sample of %s needs about %.0f MiB even for one output and one position at a time, more than the "
                "budget of %.0f MiB, and will exceed it; pass memory=%d, or fewer parameters, such as "
                "params=lw.last_layer.",
                name, least / 2**20, budget, 2 ** (least - 1).bit_length(),
            )  # fmt: skip
        elif whole > self.memory:
            log.info(
                "One sample of %s needs about %.0f MiB in one piece (C = %d), more than the budget of %.0f MiB: its "
                "layers, outputs and positions are taken a few at a time; memory=%d would take them at once.",
                name, whole / 2**20, self.outputs, budget, 2 ** (whole - 1).bit_length(),
            )  # fmt: skip

    def bytes_per_sample(
        self, cotangents: Cotangents | int = None, dtype: torch.dtype | None = None, rows_held: int = 0
    ) -> int:
        """Estimates the bytes held for one sample of a record and its largest contraction; arguments as above."""
        count = cotangents if isinstance(cotangents, int) else getattr(cotangents, "columns", self.outputs)
        numbers = (
            self.plan.numbers_per_sample(count, cotangents is not None) + 3 * count * self.explicit_size + rows_held
        )
        return numbers * (dtype or self.dtype).itemsize


def _checked_memory(memory: int | None) -> int:
    """Returns the budget in bytes (case 15 otherwise)."""
    memory = DEFAULT_MEMORY if memory is None else memory
    if not isinstance(memory, int) or memory < 2**24:
        raise LapwingError(
            f"Asked to work within memory={memory!r} bytes; an int of at least {2**24} (16 MiB) is needed: "
            "write memory=2**30 for 1 GiB."
        )
    return memory


def _checked_network(model: Any) -> nn.Module:
    """Returns the uncompiled network, checked to be one with weights and in eval mode."""
    if not isinstance(model, nn.Module):
        raise LapwingError(
            f"Asked to treat a model of type {type(model).__name__}; a torch.nn.Module with trained weights is needed: "
            "pass the module itself, with forward=lambda model, inputs: ... where it is not called as model(x)."
        )
    model = uncompiled(model)
    named = parameters_of(model)
    for name, module in model.named_modules():
        if ".quantized" in type(module).__module__:
            raise LapwingError(
                f"Asked to treat {type(model).__name__}, found that its layer {name or type(module).__name__} is "
                f"quantized ({type(module).__module__}), where no gradients exist; float weights are needed: fit the "
                "network before it is quantized."
            )
    if not named:
        raise LapwingError(
            f"Asked to treat the parameters of {type(model).__name__}, found that it has none; a network with trained "
            "weights is needed: pass the nn.Module that holds them."
        )
    for name, value in named.items():
        if value.is_meta or isinstance(value, nn.UninitializedParameter):
            raise LapwingError(
                f"Asked to treat {type(model).__name__}, found that its parameter {name} holds no numbers "
                f"({'on the meta device' if value.is_meta else 'not initialised'}); trained weights are needed: write "
                "model.load_state_dict(torch.load(path), assign=True) first."
            )
        if value.is_inference():
            raise LapwingError(
                f"Asked to treat {type(model).__name__}, found that its parameter {name} was made in "
                "torch.inference_mode(), where no gradients exist; ordinary parameters are needed: build and load the "
                "network outside it."
            )
    check_mode(model)
    return model


def coverage(
    model: nn.Module, batch: Any, params: Predicate | LastLayer = everything, forward: Forward | None = None
) -> Coverage:
    """Says which layer family treats each parameter, and why the generic one treats the rest.

    Args:
        model: a network in eval mode.
        batch: a batch of inputs, or of (inputs, targets) as a loader yields them in a dict.
        params: which parameters.
        forward: as in `lw.fit`.

    Returns:
        A report that prints as a table.

    Raises:
        LapwingError: for bad input.

    Cost: three or four forward passes and a few backward passes on four samples.
    """
    inputs = batches.inputs_of(batch) if isinstance(batch, Mapping) else batch
    return Tangent.survey(model, inputs, params, forward).coverage
