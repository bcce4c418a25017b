"""The state of a fit: what `runner.py` needs to go on, and how a checkpoint holds it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..methods.state import DataSummary, State, joined_by


@dataclass
class PassSums(State):
    """What a pass adds over data. Over several ranks these are the sums of this rank, until the pass ends.

    Attributes:
        state: state of the pass.
        summary: the likelihood's statistics, if this pass collects them.
        prefixes: states of the first n samples: `n/path` -> tensor.
        statistics: likelihood statistics of the first n samples: `n/name` -> tensor.
        any_counted: whether any target counted.
    """

    state: State = field(default_factory=State)
    summary: DataSummary = field(default_factory=DataSummary)
    prefixes: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)
    any_counted: bool = joined_by(torch.logical_or, False)


@dataclass
class RunnerState(State):
    """What the runner needs to go on from here, besides the states of earlier passes.

    Attributes:
        sums: sums of the pass.
        summary: likelihood statistics of the samples that the passes have read.
        statistics: likelihood statistics of the first n samples: `n/name` -> tensor.
        generator: state of the random generator of the Fisher root; None before it is saved.
        batches: number of batches of the pass that are done.
        start: number of samples of these batches.
        size: n, or 0 if it is unknown.
        whole: whether `summary` covers all samples.
        finished: whether the pass is finished.
    """

    sums: PassSums = field(default_factory=PassSums)
    summary: DataSummary = field(default_factory=DataSummary)
    statistics: dict[str, Tensor] = field(default_factory=dict)
    generator: Tensor | None = None
    batches: int = 0
    start: int = 0
    size: int = 0
    whole: bool = False
    finished: bool = False


@dataclass(frozen=True)
class SavedPass:
    """A runner state as a checkpoint holds it.

    Attributes:
        label: label of the pass.
        tensors: path -> tensor, on the CPU.
        on_cpu: paths of the tensors that the fit keeps on the CPU; the others go to the network's device.
    """

    label: str
    tensors: dict[str, Tensor] = field(repr=False)
    on_cpu: list[str]

    @classmethod
    def of(cls, label: str, state: RunnerState) -> SavedPass:
        """Copies a state."""
        flat = state.tensors()
        copies = {path: tensor.detach().to("cpu", copy=True) for path, tensor in flat.items()}
        return cls(label, copies, [path for path, tensor in flat.items() if tensor.device.type == "cpu"])

    def restored(self, fresh: RunnerState, device: torch.device) -> RunnerState:
        """Returns the state, from the state at the start of the same pass. Its tensors are copies."""
        kept = set(self.on_cpu)
        return fresh.with_tensors({
            path: tensor.to("cpu" if path in kept else device, copy=True) for path, tensor in self.tensors.items()
        })  # fmt: skip
