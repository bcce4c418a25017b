"""States of passes: the sums of parts of the data are added, written and read by their fields."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lapwing.methods import DataSummary, State


@dataclass
class Example(State):
    total: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    summary: DataSummary = field(default_factory=DataSummary)
    missing: Tensor | None = None
    taken: int = 0
    done: bool = False


def test_a_state_is_added_written_and_read_by_its_fields():
    first = Example(torch.ones(2), {"a/b": torch.ones(1)}, DataSummary(3, {"count": torch.tensor(3.0)}), taken=2)
    second = Example(torch.ones(2), {"c": torch.ones(1)}, DataSummary(4, {"count": torch.tensor(4.0)}), taken=1)
    added = first.added(second)
    flat = added.tensors()
    names = ["total", "parts/a/b", "parts/c", "summary/samples", "summary/statistics/count", "taken", "done"]
    assert list(flat) == names
    assert added.total.tolist() == [2.0, 2.0]
    assert (added.summary.samples, float(added.summary.statistics["count"]), added.taken) == (7, 7.0, 3)
    again = Example(torch.zeros(2)).with_tensors(flat)
    assert (again.missing, again.taken, again.done) == (None, 3, False)
    assert again.tensors().keys() == flat.keys()
