"""What one sample takes of the network: a mode counts the operations of a forward pass and of two records."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..methods import Work
from ..methods.cost import CALL, MOVE
from ..network import batches
from ..network.eager import OperationMode
from ..network.probe import PROBED_SAMPLES
from ..tangent import Tangent
from ..tangent.anchors import output_width
from .speed import Speed

RECORD_CALLS, LAYER_CALLS = 100, 8
"""Operations of one batch beside those of the network: to record it, and to contract each layer."""

FIT_CALLS, SURVEY_SAMPLES = 20_000, 60
"""What any fit takes: operations of the checks and the search for the prior precision, and the survey's forward passes
of a sample."""

PROBED_COLUMNS = 2, 8
"""Two records of one sample, with so many cotangents, show what each of them takes."""


@dataclass(frozen=True)
class NetworkCost:
    """What one sample takes of the network: work in multiply-adds, memory in bytes.

    Attributes:
        forward: a forward pass.
        recorded: a record, without backward passes.
        backward: a backward pass.
        activations: the bytes that a record holds.
        gradients: the bytes that each cotangent adds to it.
        patches: the bytes that layers add to it.
        survey: the bytes that the survey holds: two graphs of a few samples, their gradients, and those of the weights.
    """

    forward: float
    recorded: float
    backward: float
    activations: int
    gradients: int
    patches: int
    survey: int

    @classmethod
    def of(cls, tangent: Tangent, inputs: Any) -> NetworkCost:
        """Counts the operations of one sample: of a forward pass, and of records with few and more cotangents."""
        samples = batches.size(inputs)
        one = batches.plain(batches.take(inputs, slice(0, 1)), tangent.device)
        with Operations() as forward:
            tangent.outputs_of(one)
        width, (few, more) = output_width(tangent, one), PROBED_COLUMNS
        counted = {}
        for columns in PROBED_COLUMNS:
            with Operations() as counted[columns]:
                record = tangent.record(one, torch.zeros(1, width, columns, device=tangent.device))
                written, activations = counted[columns].written, counted[columns].peak
                for name in record:
                    record[name]  # takes the gradients
                del record
        backward = (counted[more].work - counted[few].work) / (more - few)
        calls = counted[few].calls + RECORD_CALLS + LAYER_CALLS * len(tangent.blocks)
        recorded = counted[few].work - few * backward + CALL * calls / samples
        gradients = (counted[more].peak - counted[few].peak) // (more - few)
        patches = max(0, counted[few].peak - few * gradients - activations)
        survey = min(samples, PROBED_SAMPLES) * (2 * written + 3 * gradients)
        survey += tangent.dtype.itemsize * (tangent.size + 3 * max(block.size for block in tangent.blocks))
        return cls(
            forward.work + CALL * forward.calls / samples, recorded, backward, activations, gradients, patches, survey
        )  # fmt: skip

    def passes(self, work: Work) -> float:
        """Returns work in forward passes."""
        return (self._of_network(work) + work.products + work.decompositions) / self.forward

    def seconds(self, work: Work, speed: Speed, samples: int) -> float:
        """Returns the seconds of work on so many samples."""
        each = self._of_network(work) * speed.forward / self.forward + work.products * speed.product
        each += work.decompositions * speed.decomposition
        once = FIT_CALLS * CALL * speed.product + SURVEY_SAMPLES * speed.forward
        return each * samples + once

    def _of_network(self, work: Work) -> float:
        return work.records * self.recorded + work.backwards * self.backward


class Operations(OperationMode):
    """Counts operations: their multiply-adds and the numbers they write (`work`), and how many there are (`calls`).

    Attributes:
        written: the bytes of the tensors they make.
        peak: of those that live at the same time at most.
    """

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # not needed to import lapwing

        super().__init__()
        self.work, self.calls, self.written, self.peak, self._flops = 0.0, 0, 0, 0, flop_registry
        self._live: dict[weakref.ref, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        self.calls += 1
        flops = self._flops.get(function.overloadpacket)
        if flops is not None:
            self.work += flops(*args, **kwargs, out_val=out) / 2
        if not function.is_view:
            written = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
            self.work += MOVE * sum(value.numel() for value in written)
            before = {value.untyped_storage() for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
            for storage in {value.untyped_storage() for value in written} - before:
                self._live[weakref.ref(storage, self._live.pop)] = storage.nbytes()
                self.written += storage.nbytes()
            self.peak = max(self.peak, sum(self._live.values()))
        return out
