"""The state of a fit, from which `runner.py` continues. Checkpoints save it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..methods.state import DataSummary, State, joined_by


@dataclass
class PassSums(State):
    """Sums of a pass over data. Over several ranks these are the sums of this rank until the pass ends.

    Attributes:
        state: state of the pass.
        summary: the likelihood's statistics, if this pass collects them.
        any_counted: whether any target counted.
    """

    state: State = field(default_factory=State)
    summary: DataSummary = field(default_factory=DataSummary)
    any_counted: bool = joined_by(torch.logical_or, False)


@dataclass
class RunnerState(State):
    """State of the runner in one pass. Together with the states of earlier passes it determines the rest of the fit.

    Attributes:
        sums: sums of the pass.
        summary: likelihood statistics of the samples that the passes have read.
        generator: state of the random generator of the Fisher root; None before it is saved.
        batches: number of batches of the pass that are done.
        start: number of samples of these batches.
        size: n, or 0 if it is unknown.
        whole: whether `summary` covers all samples.
        finished: whether the pass is finished.
    """

    sums: PassSums = field(default_factory=PassSums)
    summary: DataSummary = field(default_factory=DataSummary)
    generator: Tensor | None = None
    batches: int = 0
    start: int = 0
    size: int = 0
    whole: bool = False
    finished: bool = False
