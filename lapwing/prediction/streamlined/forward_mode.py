"""Forward mode for calls without a rule, one direction of an uncertain tensor at a time: for small tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ...errors import LapwingError
from ...network.eager import attention_products, batching_quiet
from ...network.generic import jvp
from .axes import SampleAxes
from .moments import Moments, Value, mean_of
from .operations import Kind, is_a
from .schedule import Step
from .sites import Site, arguments_of, run

MAX_UNCERTAIN_NUMBERS = 4096
"""Maximum number of entries of an uncertain tensor, per sample (for a weight: in all)."""


def evaluate(step: Step, values: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Returns the value of a step on tensors, with attention as plain products, which have forward-mode derivatives."""
    if step.fused is not None:
        return step.fused(values[step.fused.source], values)
    if is_a(step.node, Kind.ATTENTION):
        return attention_products(**arguments_of(step.node, values, dtype))[0]
    return run(step.node, values, dtype)


def chunk_size(like: Tensor) -> int:
    """Returns the number of tangents of a tensor's size in one call of a function, which get at most 2²⁵ entries."""
    return max(1, 2**25 // max(1, like.numel()))


def push(
    function: Callable[..., Any],
    primals: Sequence[Tensor],
    tangents: Sequence[Tensor],
    refuse: Callable[[str], LapwingError],
    size: int | None = None,
) -> Any:
    """Returns K tangents of a function's values, for K tangents (K, *shape) of its arguments, `size` at a time.

    Raises what `refuse` returns if the function has no forward-mode derivative.
    """

    def one(*directions: Tensor) -> Any:
        return jvp(function, tuple(x.contiguous() for x in primals), directions)[1]

    try:
        with batching_quiet():
            return vmap(one, chunk_size=size)(*tangents)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise refuse(f"it has no forward-mode derivative ({reason})") from error


def linearised(
    step: Step, site: Site, values: Mapping[str, Value], axes: SampleAxes, samples: int, dtype: torch.dtype
) -> Value:
    """Returns the moments of a call, `v_y = Σ_x Σ_k (∂y/∂x_k)² Var[x_k]` for independent entries of its arguments x."""
    means = {name: mean_of(value) for name, value in values.items()}
    mean = evaluate(step, means, dtype)
    totals: list[Any] | None = None
    for name in step.uncertain:
        x = values[name]

        def outputs(x: Tensor, name: str = name) -> tuple[Tensor, ...]:
            value = evaluate(step, {**means, name: x}, dtype)
            return tuple(filter(_is_real, value if isinstance(value, (tuple, list)) else (value,)))

        for tangents in _directions(name, x, axes, samples, site):
            squares = [part.square().sum(0) for part in push(outputs, (x.mean,), (tangents,), site.refusal)]
            totals = squares if totals is None else [a + b for a, b in zip(totals, squares, strict=True)]
    assert totals is not None
    if not isinstance(mean, (tuple, list)):
        return Moments(mean, totals[0])
    rest = iter(totals)
    return tuple(Moments(part, next(rest)) if _is_real(part) else part for part in mean)


def _is_real(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point()


def _directions(name: str, x: Moments, axes: SampleAxes, samples: int, site: Site) -> Iterator[Tensor]:
    """Yields unit directions of x times their standard deviations, (K, *shape)."""
    sampled = name in axes.dims
    count = x.mean.numel() // samples if sampled else x.mean.numel()
    if count > MAX_UNCERTAIN_NUMBERS:
        raise site.refusal(
            f"it has no moment rule, and its uncertain input has {count} entries, more than the "
            f"{MAX_UNCERTAIN_NUMBERS} that forward mode supports",
            "Use linear, convolution, pooling, norm, attention, embedding, element-wise or shape operations, or give "
            "it a rule (lapwing.prediction.streamlined.register_operation).",
        )
    deviation = x.variance.clamp_min(torch.finfo(x.variance.dtype).tiny).sqrt()
    for picked in torch.arange(count, device=x.mean.device).split(chunk_size(x.mean)):
        units = torch.nn.functional.one_hot(picked, count).to(deviation.dtype)  # (K, n)
        if sampled:
            yield axes.tensors(name, units.T.expand(samples, -1, -1), x.mean.shape) * deviation
        else:
            yield units.reshape(-1, *x.mean.shape) * deviation
