"""The state of a pass: a dataclass of tensors. Its fields define how states are added, written and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..files import prefixed, under
from ..likelihoods import Likelihood
from ..linalg import double_device, doubled

S = TypeVar("S", bound="State")


@dataclass
class State:
    """What a pass has computed so far.

    A subclass is a dataclass. Each field is a tensor, a number, a dict of tensors by name, another state, or None. The
    state of all data is the sum of the states of its parts, field by field.
    """

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors by their path, `field` or `field/name`; numbers become tensors without dimensions."""
        flat: dict[str, Tensor] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, (State, dict)):
                flat |= prefixed(each.name, value.tensors() if isinstance(value, State) else value)
            elif value is not None:
                double = torch.float64 if isinstance(value, float) else None
                flat[each.name] = value if isinstance(value, Tensor) else torch.tensor(value, dtype=double)
        return flat

    def with_tensors(self: S, flat: Mapping[str, Tensor]) -> S:
        """Returns a state of this class with other tensors, under the paths of `tensors`."""
        values: dict[str, Any] = {}
        for each in fields(self):
            old = getattr(self, each.name)
            if isinstance(old, State):
                values[each.name] = old.with_tensors(under(each.name, flat))
            elif isinstance(old, dict):
                values[each.name] = under(each.name, flat)
            elif old is None or isinstance(old, Tensor):
                values[each.name] = flat.get(each.name)
            else:
                values[each.name] = type(old)(flat[each.name].item())
        return type(self)(**values)

    def added(self: S, other: S) -> S:
        """Returns the state of both parts of the data. A tensor that only one part has stays as it is."""
        first, second = self.tensors(), other.tensors()
        both = {path: first[path] + second[path] for path in first.keys() & second.keys()}
        return self.with_tensors({**first, **second, **both})

    def mapped(self: S, function: Callable[[Tensor], Tensor]) -> S:
        """Returns the state with a function applied to every tensor, such as `torch.clone`."""
        return self.with_tensors({path: function(tensor) for path, tensor in self.tensors().items()})


@dataclass
class TensorSum(State):
    """One sum."""

    total: Tensor


@dataclass
class BlockSums(State):
    """One sum for each block, by block name."""

    blocks: dict[str, Tensor]


@dataclass
class DataSummary(State):
    """The statistics of the likelihood, and the "weight" of the targets that count, summed over a part of the data."""

    samples: int = 0
    statistics: dict[str, Tensor] = field(default_factory=dict)

    def add(
        self,
        likelihood: Likelihood,
        outputs: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        samples: int | None = None,
        counted: Tensor | None = None,
    ) -> None:
        """Checks targets and adds their statistics. If rows are positions, `samples` is the number of samples.

        `counted` is a mask of the rows that count; None means all of them.
        """
        likelihood.check(outputs, targets)
        self.samples += len(outputs) if samples is None else samples
        more = {} if weights is None else {"weights": weights}  # a user's likelihood may not accept weights
        share = likelihood.known_share(targets, counted)
        if weights is None and share is None:
            weight = torch.tensor(len(outputs), dtype=torch.float64, device=double_device(outputs.device))
        else:
            each = doubled(outputs.new_ones(len(outputs)) if weights is None else weights)
            weight = (each if share is None else each * share.to(each)).sum()
        for name, value in {**likelihood.statistics(outputs.detach(), targets, **more), "weight": weight}.items():
            self.statistics[name] = self.statistics.get(name, 0) + value

    def of_mean_weight(self, weighted: bool) -> dict[str, Tensor]:
        """Returns the statistics of sample weights over their mean, so that n samples count as n."""
        if not weighted or not self.statistics:
            return self.statistics
        factor = self.samples / (float(self.statistics["weight"]) or 1.0)
        return {name: factor * value for name, value in self.statistics.items()}


Values = Mapping[str, Tensor]
"""Values that Adam optimises, by name."""


@dataclass
class Descent(State):
    """Values that Adam optimises.

    `torch.optim.Adam` would need values that are scaled by their units, and a schedule of its learning rates.
    """

    values: dict[str, Tensor]
    means: dict[str, Tensor] = field(default_factory=dict)  # running means of the gradients
    squares: dict[str, Tensor] = field(default_factory=dict)  # running means of the squared gradients
    history: dict[str, Tensor] = field(default_factory=dict)  # one number per step
    kept: dict[str, Tensor] = field(default_factory=dict)  # other tensors of the pass
    taken: int = 0  # number of steps so far

    def move(self, name: str, gradient: Tensor, rate: float, unit: Tensor | float = 1.0, eps: float = 1e-8) -> None:
        """Moves a value by a step of Adam against its gradient, in units of `unit` (Kingma and Ba 2015)."""
        if name not in self.means:
            self.means[name], self.squares[name] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        mean = self.means[name].lerp_(gradient, 1 - 0.9)
        square = self.squares[name].mul_(0.999).addcmul_(gradient, gradient, value=1 - 0.999)
        steps = self.taken + 1
        root = (square / (1 - 0.999**steps)).sqrt_().add_(eps)
        self.values[name] -= mean / root * (rate / (1 - 0.9**steps)) * unit

    def note(self, **numbers: Tensor | float) -> None:
        append(self.history, **numbers)


def append(history: dict[str, Tensor], **numbers: Tensor | float) -> None:
    """Appends numbers, or tensors of equal shapes, to the float64 tensors of a history on the CPU."""
    for name, number in numbers.items():
        number = number.detach().cpu() if isinstance(number, Tensor) else torch.tensor(number, dtype=torch.float64)
        number = number.double()[None]
        history[name] = torch.cat([history[name], number]) if name in history else number
