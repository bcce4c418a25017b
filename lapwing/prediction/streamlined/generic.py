"""Moments through calls without a rule: their Jacobian, one direction of the uncertain arguments at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ...tangent.eager import batching_quiet
from ...tangent.forward_mode import jvp
from .calls import evaluate
from .moments import Moments, Site, Value, mean_of
from .plan import Item
from .rows import Rows

MOST = 4096
"""Numbers of an argument (a sample, or in all where it is a weight) whose directions are gone through."""

_TANGENTS = 2**25


def linearised(
    item: Item, site: Site, given: Mapping[str, Value], rows: Rows, samples: int, dtype: torch.dtype
) -> Value:
    """Returns the moments of a call, `v_y = Σ_x Σ_k (∂y/∂x_k)² Var[x_k]` for independent entries of its arguments x.

    Args:
        item: the call.
        site: what is known of it.
        given: its arguments by name.
        rows: where the samples are in them.
        samples: B.
        dtype: of the moments.

    Raises:
        LapwingError: arguments with more than 4096 numbers; a call without a forward-mode derivative.

    Cost: as many forward-mode evaluations as its uncertain arguments have numbers.
    """
    means = {name: mean_of(value) for name, value in given.items()}

    def outputs(name: str, x: Tensor) -> tuple[Tensor, ...]:
        found = evaluate(item, {**means, name: x}, dtype)
        return tuple(part for part in found if _counts(part)) if isinstance(found, (tuple, list)) else (found,)

    mean = evaluate(item, means, dtype)
    totals: list[Any] | None = None
    for name in item.uncertain:
        x = given[name]
        if not isinstance(x, Moments):
            raise site.refusal("on several uncertain tensors at once", "are one at a time")
        for tangents in _directions(name, x, rows, samples, site):
            try:
                with batching_quiet():
                    parts = vmap(
                        lambda t, n=name, at=x.mean: jvp(lambda y: outputs(n, y), (at.contiguous(),), (t,))[1]
                    )(tangents)
            except (RuntimeError, NotImplementedError) as error:
                first = str(error).strip().partition("\n")[0]
                raise site.refusal(f"without a forward-mode derivative ({first})", "are calls with one") from error
            squares = [part.square().sum(0) for part in parts]
            totals = squares if totals is None else [a + b for a, b in zip(totals, squares, strict=True)]
    assert totals is not None
    if not isinstance(mean, (tuple, list)):
        return Moments(mean, totals[0])
    rest = iter(totals)
    return tuple(Moments(part, next(rest)) if _counts(part) else part for part in mean)


def _counts(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point()


def _directions(name: str, x: Moments, rows: Rows, samples: int, site: Site) -> Iterator[Tensor]:
    """Yields standard deviations along one entry of x after another, (K, *shape)."""
    sampled = name in rows.dims
    count = x.mean.numel() // samples if sampled else x.mean.numel()
    if count > MOST:
        raise site.refusal(
            f"on an uncertain tensor of {count} numbers, for which there is no moment rule",
            f"are up to {MOST} numbers there, and linear, convolution, pooling, norm, attention, embedding, "
            "element-wise and shape operations of any size",
        )
    root = x.variance.clamp_min(torch.finfo(x.variance.dtype).tiny).sqrt()
    size = max(1, _TANGENTS // max(1, x.mean.numel()))
    for first in range(0, count, size):
        picked = torch.arange(first, min(first + size, count), device=root.device)
        units = torch.nn.functional.one_hot(picked, count).to(root.dtype)  # (K, n)
        if sampled:
            yield rows.tensors(name, units.T.expand(samples, -1, -1), x.mean.shape) * root
        else:
            yield units.reshape(-1, *x.mean.shape) * root
