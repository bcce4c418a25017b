"""Correlations of the two sides of a sum, `x + h(x)`, which the diagonal mode otherwise leaves out.

Both sides are functions of the last uncertain tensor u that they share, whose entries are taken as independent:
`Cov[a_i, b_i] = Σ_k (∂a_i/∂u_k)(∂b_i/∂u_k) Var[u_k]`, so `diag(J_h) v` for `a = u` and `b = h(u)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ...tangent.eager import batching_quiet
from ...tangent.forward_mode import jvp
from .calls import evaluate
from .fusion import aten
from .moments import Site, mean_of
from .plan import Item, Plan
from .rows import Rows

_TANGENTS = 2**25
_MOST = 4096
"""Numbers a sample of the shared tensor up to which its directions are gone through one by one."""

SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})


@dataclass(frozen=True)
class Branches:
    """The two sides of one sum as functions of the tensor that they share.

    Attributes:
        source: name of u.
        sides: names of a and b.
        items: the steps from u to them, in order.
    """

    source: str
    sides: tuple[str, str]
    items: tuple[Item, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of all values that must be kept until the sum."""
        inside = {item.node.name for item in self.items}
        found = {name for item in self.items for name in item.sources if name not in inside}
        return (self.source, *sorted(found))

    def covariance(self, values: Mapping[str, Any], rows: Rows, samples: int, dtype: torch.dtype, site: Site) -> Tensor:
        """Returns `Cov[a_i, b_i]` in the shape of the sum.

        Cost: as many forward-mode passes through the two sides as u has numbers a sample.
        """
        u = values[self.source]
        spread = rows.flat(self.source, u.variance, samples)  # (B, n)
        if spread.shape[1] > _MOST:
            raise site.refusal(
                f"of branches that share {spread.shape[1]} numbers a sample, with residual='correlated'",
                f"are {_MOST} at most, or lw.Streamlined(residual='independent')",
            )
        given = {name: mean_of(values[name]) for name in self.reads}

        def both(x: Tensor) -> tuple[Tensor, Tensor]:
            inner = {**given, self.source: x}
            for item in self.items:
                inner[item.node.name] = evaluate(item, inner, dtype)
            return inner[self.sides[0]], inner[self.sides[1]]

        shape, like = u.mean.shape, self.sides[0]
        size = max(1, _TANGENTS // max(1, u.mean.numel()))
        total: Any = 0
        for first in range(0, spread.shape[1], size):
            picked = torch.arange(first, min(first + size, spread.shape[1]), device=u.mean.device)
            directions = torch.nn.functional.one_hot(picked, spread.shape[1]).to(dtype).T  # (n, K)
            tangents = rows.tensors(self.source, directions.expand(samples, -1, -1), shape)
            with batching_quiet():
                outs = vmap(lambda t: jvp(both, (u.mean.contiguous(),), (t,))[1])(tangents)
            left, right = (rows.columns(side, out, samples) for side, out in zip(self.sides, outs, strict=True))
            total = total + (left * right * spread[:, None, picked]).sum(-1)  # (B, n_out)
        return rows.tensors(like, total[..., None], mean_of(values[like]).shape)[0]


def find(plan: Plan, rows: Rows) -> dict[str, Branches]:
    """Returns the branches of every sum of two uncertain values that share another."""
    ancestors: dict[str, frozenset[str]] = {}
    order = {item.node.name: place for place, item in enumerate(plan.items)}
    found = {}
    for item in plan.items:
        name = item.node.name
        above = [ancestors.get(source, frozenset({source})) for source in item.uncertain]
        ancestors[name] = frozenset({name}).union(*above)
        if item.fused is not None or item.node.target not in SUMS or len(item.uncertain) != 2:
            continue
        shared = [n for n in above[0] & above[1] if n in rows.dims and n in plan.uncertain]
        if not shared or any(side not in rows.dims for side in item.uncertain):
            continue
        source = max(shared, key=lambda n: order.get(n, -1))
        between = [
            step
            for step in plan.items
            if step.node.name != source
            and step.node.name in above[0] | above[1]
            and source in ancestors.get(step.node.name, ())
        ]
        a, b = item.uncertain
        found[name] = Branches(source, (a, b), tuple(between))
    return found
