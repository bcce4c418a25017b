"""What goes by forward mode in diagonal mode: calls without a rule, and the correlations of the two sides of a sum.

Both take the Jacobian of a function, one direction of an uncertain tensor at a time, so both are for small tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ...errors import LapwingError
from ...network.eager import batching_quiet
from ...network.generic import jvp
from .axes import SampleAxes
from .moments import Moments, Value, mean_of
from .operations import Kind, aten, is_a
from .rules.attention import products
from .schedule import Schedule, Step
from .sites import Site, arguments_of, run

MAX_NUMBERS = 4096
"""Numbers of a tensor (per sample, or in all where it is a weight) whose directions are gone through."""

_TANGENT_NUMBERS = 2**25
"""Numbers of tangents that go through a function at once."""


def evaluate(step: Step, values: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Runs a step on tensors; attention by plain products, which have forward-mode derivatives."""
    if step.fused is not None:
        return step.fused(values[step.fused.source], values)
    if is_a(step.node, Kind.ATTENTION):
        return products(arguments_of(step.node, values, dtype))[0]
    return run(step.node, values, dtype)


def chunk_size(like: Tensor) -> int:
    """Returns how many tangents of a tensor's size go through a function at once."""
    return max(1, _TANGENT_NUMBERS // max(1, like.numel()))


def push(
    function: Callable[..., Any],
    primals: Sequence[Tensor],
    tangents: Sequence[Tensor],
    refuse: Callable[[str], LapwingError],
    size: int | None = None,
) -> Any:
    """Returns K tangents of a function's values, for K tangents (K, *shape) of its arguments, `size` at a time.

    Raises:
        LapwingError: what `refuse` gives for a function without a forward-mode derivative.
    """

    def one(*directions: Tensor) -> Any:
        return jvp(function, tuple(x.contiguous() for x in primals), directions)[1]

    try:
        with batching_quiet():
            return vmap(one, chunk_size=size)(*tangents)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise refuse(f"it has no forward-mode derivative ({reason})") from error


# ---- calls without a rule


def linearised(
    step: Step, site: Site, values: Mapping[str, Value], axes: SampleAxes, samples: int, dtype: torch.dtype
) -> Value:
    """Returns the moments of a call, `v_y = Σ_x Σ_k (∂y/∂x_k)² Var[x_k]` for independent entries of its arguments x.

    Args:
        step: the call.
        site: what is known of it.
        values: its arguments by name.
        axes: where the samples are in them.
        samples: B.
        dtype: of the moments.

    Raises:
        LapwingError: arguments with more than 4096 numbers; a call without a forward-mode derivative.

    Cost: as many forward-mode evaluations as its uncertain arguments have numbers.
    """
    means = {name: mean_of(value) for name, value in values.items()}
    mean = evaluate(step, means, dtype)
    totals: list[Any] | None = None
    for name in step.uncertain:
        x = values[name]
        if not isinstance(x, Moments):
            raise site.refusal("it has no moment rule, and reads several uncertain tensors at once")

        def outputs(x: Tensor, name: str = name) -> tuple[Tensor, ...]:
            return tuple(filter(_is_real, _as_tuple(evaluate(step, {**means, name: x}, dtype))))

        for tangents in _directions(name, x, axes, samples, site):
            squares = [part.square().sum(0) for part in push(outputs, (x.mean,), (tangents,), site.refusal)]
            totals = squares if totals is None else [a + b for a, b in zip(totals, squares, strict=True)]
    assert totals is not None
    if not isinstance(mean, (tuple, list)):
        return Moments(mean, totals[0])
    rest = iter(totals)
    return tuple(Moments(part, next(rest)) if _is_real(part) else part for part in mean)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _is_real(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point()


def _directions(name: str, x: Moments, axes: SampleAxes, samples: int, site: Site) -> Iterator[Tensor]:
    """Yields standard deviations along one entry of x after another, (K, *shape)."""
    sampled = name in axes.dims
    count = x.mean.numel() // samples if sampled else x.mean.numel()
    if count > MAX_NUMBERS:
        raise site.refusal(
            f"it has no moment rule, and its uncertain input has {count} numbers, more than the {MAX_NUMBERS} that go "
            "by forward mode",
            "Use linear, convolution, pooling, norm, attention, embedding, element-wise or shape operations, or give "
            "it a rule (lapwing.prediction.streamlined.register_operation).",
        )
    deviation = x.variance.clamp_min(torch.finfo(x.variance.dtype).tiny).sqrt()
    size = chunk_size(x.mean)
    if sampled:
        for _, units in axes.units(name, x.mean, samples, size):
            yield units * deviation
    else:
        units = torch.eye(count, dtype=deviation.dtype, device=deviation.device).reshape(-1, *x.mean.shape)
        for some in units.split(size):
            yield some * deviation


# ---- the two sides of a sum


@dataclass(frozen=True)
class Branches:
    """The two sides of one sum, `x + h(x)`, as functions of the last uncertain tensor u that they share.

    With independent entries of u, `Cov[a_i, b_i] = Σ_k (∂a_i/∂u_k)(∂b_i/∂u_k) Var[u_k]`, so `diag(J_h) v` for `a = u`
    and `b = h(u)`.

    Attributes:
        source: name of u.
        sides: names of a and b.
        steps: the steps from u to them, in order.
    """

    source: str
    sides: tuple[str, str]
    steps: tuple[Step, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of all values that must be kept until the sum."""
        inside = {step.node.name for step in self.steps}
        outside = {name for step in self.steps for name in step.sources if name not in inside}
        return (self.source, *sorted(outside))

    def covariance(
        self, values: Mapping[str, Any], axes: SampleAxes, samples: int, dtype: torch.dtype, site: Site
    ) -> Tensor:
        """Returns `Cov[a_i, b_i]` in the shape of the sum.

        Cost: as many forward-mode passes through the two sides as u has numbers a sample.
        """
        u = values[self.source]
        spread = axes.flat(self.source, u.variance, samples)  # (B, n)
        if spread.shape[1] > MAX_NUMBERS:
            raise site.refusal(
                f"its two sides share {spread.shape[1]} numbers a sample, more than the {MAX_NUMBERS} that "
                "residual='correlated' goes through",
                "Pass lw.Streamlined(residual='independent').",
            )
        means = {name: mean_of(values[name]) for name in self.reads}

        def both(x: Tensor) -> tuple[Tensor, Tensor]:
            inner = {**means, self.source: x}
            for step in self.steps:
                inner[step.node.name] = evaluate(step, inner, dtype)
            return inner[self.sides[0]], inner[self.sides[1]]

        total: Any = 0
        for places, units in axes.units(self.source, u.mean, samples, chunk_size(u.mean)):
            outs = push(both, (u.mean,), (units.to(dtype),), site.refusal)
            left, right = (axes.columns(side, out, samples) for side, out in zip(self.sides, outs, strict=True))
            total = total + (left * right * spread[:, None, places]).sum(-1)  # (B, n_out)
        return axes.tensors(self.sides[0], total[..., None], mean_of(values[self.sides[0]]).shape)[0]


def find_branches(schedule: Schedule, axes: SampleAxes) -> dict[str, Branches]:
    """Returns the branches of every sum of two uncertain values that share another."""
    ancestors: dict[str, frozenset[str]] = {}
    order = {step.node.name: place for place, step in enumerate(schedule.steps)}
    branches = {}
    for step in schedule.steps:
        name = step.node.name
        above = [ancestors.get(source, frozenset({source})) for source in step.uncertain]
        ancestors[name] = frozenset({name}).union(*above)
        is_sum = step.node.target in (aten.add.Tensor, aten.sub.Tensor)
        if step.fused is not None or not is_sum or len(step.uncertain) != 2:
            continue
        shared = [n for n in above[0] & above[1] if n in axes.dims and n in schedule.uncertain]
        if not shared or any(side not in axes.dims for side in step.uncertain):
            continue
        source = max(shared, key=lambda n: order.get(n, -1))
        between = [
            inner
            for inner in schedule.steps
            if inner.node.name != source
            and inner.node.name in above[0] | above[1]
            and source in ancestors.get(inner.node.name, ())
        ]
        a, b = step.uncertain
        branches[name] = Branches(source, (a, b), tuple(between))
    return branches
