"""Full mode: covariances within each sample, and between all values that are still needed, so that branches agree.

Every call is linearised at the means; a layer with treated weights adds what they contribute. With cross-covariances
the covariance of the outputs is that of the linearised network, plus what the weights' products with uncertain inputs
add in each layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ... import batches
from ...covariance import Covariance
from ...tangent.eager import batching_quiet
from ...tangent.forward_mode import jvp
from .calls import Call, calls_of, evaluate
from .fusion import aten
from .moments import Treated, mean_of, refusal, variance_of
from .program import Program, means
from .rows import Rows, read_rows
from .tail import Joint
from .weights import contribution, own_layer

_TANGENTS = 2**25
"""Numbers of tangents that go through a call at once."""


class Walk:
    """One pass through a network with means, and covariances (B, n_a, n_b) by pairs of names.

    Args:
        program: the plan and its treated weights.
        rows: where the samples are in each value.
        blocks: block name -> its covariance matrix (P, P).
        correlated: whether covariances between values are kept.
    """

    def __init__(self, program: Program, rows: Rows, blocks: Callable[[Treated], Tensor], correlated: bool) -> None:
        self._program, self._rows, self._blocks, self._correlated = program, rows, blocks, correlated
        self._calls = calls_of(program.plan, rows.dims)
        self._last = {name: place for place, call in enumerate(self._calls) for name in call.reads}
        self._last[program.plan.output] = len(self._calls)

    @classmethod
    def of(cls, program: Program, covariance: Covariance, inputs: Any) -> Walk:
        """Prepares the walk for inputs like these."""
        rows = read_rows(program.graph, inputs, program.network)
        matrices: dict[str, Tensor] = {}
        owner = weakref.ref(covariance)  # programs are kept for as long as their posterior lives

        def block(treated: Treated) -> Tensor:
            name = treated.block.name
            if name not in matrices:
                alive = owner()
                assert alive is not None
                with torch.no_grad():
                    matrices[name] = _matrix(alive, name)
            return matrices[name]

        return cls(program, rows, block, program.options.correlated)

    @property
    def bytes_per_sample(self) -> int:
        """Estimates what the largest step holds for one sample: a few covariances of its tensors."""
        return 4 * self._program.largest**2 * self._program.dtype.itemsize

    def run(self, inputs: Any, variances: Mapping[int, Tensor]) -> Joint:
        """Carries means and covariances to the output.

        Args:
            inputs: B samples.
            variances: place of an uncertain input among the leaves -> its variances, in its own shape, or its
                covariances (B, n, n).
        """
        samples = batches.size(inputs)
        started = self._program.start(inputs, variances)
        values = {name: mean_of(value) for name, value in started.items()}
        known: dict[tuple[str, str], Tensor] = {}
        for name in (self._program.graph.leaves[place] or "" for place in variances):
            spread = variance_of(started[name])
            assert spread is not None
            flat = spread.shape == values[name].shape
            known[name, name] = torch.diag_embed(self._rows.flat(name, spread, samples)) if flat else spread
        for place, call in enumerate(self._calls):
            self._step(place, call, values, known, samples)
        output = self._program.plan.output
        return Joint(values[output], known[output, output])

    def _step(
        self, place: int, call: Call, values: dict[str, Any], known: dict[tuple[str, str], Tensor], samples: int
    ) -> None:
        program, name = self._program, call.item.node.name
        values[name] = self._mean(call, values)
        if call.carries:
            targets = [z for z in self._living(place, values) if self._correlated and z != name]
            found = self._covariances(call, values, known, targets, samples)
            known.update({(name, other): c for other, c in found.items()})
        gone = [n for n in values if self._last.get(n, -1) <= place and n not in program.graph.tensors]
        for other in gone:
            del values[other]
        for pair in [pair for pair in known if not set(pair).isdisjoint(gone)]:
            del known[pair]

    def _mean(self, call: Call, values: Mapping[str, Any]) -> Any:
        if not call.item.worked:
            return self._program.step(call.item, values, 0)
        given = {name: means(self._program.worked(name, values[name])) for name in call.item.sources}
        return evaluate(call.item, given, self._program.dtype)

    def _living(self, place: int, values: Mapping[str, Any]) -> list[str]:
        """Returns the values that later calls need."""
        return [name for name in values if self._last.get(name, -1) > place]

    def _covariances(
        self,
        call: Call,
        values: Mapping[str, Any],
        known: Mapping[tuple[str, str], Tensor],
        targets: list[str],
        samples: int,
    ) -> dict[str, Tensor]:
        """Returns `Cov[y, z]` for the targets z and y itself: `Σ_i J_i Cov[x_i, z]`, `Σ_i J_i Cov[x_i, y]`."""
        program, name, rows = self._program, call.item.node.name, self._rows
        dtype = program.dtype
        given = {n: self._program.worked(n, values[n]) for n in call.needs}
        layer = own_layer(self._program.sites.get(name), call)
        owned = layer.owned if layer is not None else frozenset[str]()
        leaves = [n for n in call.leaves if n not in self._program.treated]

        def push(tangents: Mapping[str, Tensor]) -> Tensor:
            """Returns the tangents of y (B, n, K) for those (K, *shape) of some leaves."""
            names = list(tangents)

            def forward(*primals: Tensor) -> Tensor:
                return call(dict(given) | dict(zip(names, primals, strict=True)), dtype)

            def one(*directions: Tensor) -> Tensor:
                return jvp(forward, tuple(given[n].contiguous() for n in names), directions)[1]

            size = max(1, _TANGENTS // max(1, values[name].numel()))
            try:
                with batching_quiet():
                    out = vmap(one, chunk_size=size)(*(tangents[n].to(dtype) for n in names))
            except (RuntimeError, NotImplementedError) as error:
                first = str(error).strip().partition("\n")[0]
                raise refusal(
                    program.network,
                    call.item.node,
                    f"without a forward-mode derivative ({first})",
                    "are calls with one",
                ) from error
            return rows.columns(name, out, samples)

        def from_leaves(covariances: Mapping[str, Tensor]) -> Tensor | None:
            if not covariances:
                return None
            return push({x: rows.tensors(x, c, values[x].shape) for x, c in covariances.items()})

        found: dict[str, Tensor] = {}
        for target in dict.fromkeys([*leaves, *targets]):
            parts = {x: c for x in leaves if (c := _between(known, x, target)) is not None}
            if not self._correlated:
                parts = {x: c for x, c in parts.items() if x == target}
            carried = from_leaves(parts)
            if carried is not None:
                found[target] = carried
        own = from_leaves({x: found[x].mT for x in leaves if x in found})
        for treated, names in call.blocks(self._program.treated, owned):
            directions = _identity(treated, names, given[next(iter(names))].device, dtype)
            if call.item.node.target is aten.embedding.default:
                directions = {n: _without_padding(call, d) for n, d in directions.items()}
            jacobian = push(directions)  # (B, n, P)
            part = jacobian @ self._blocks(treated).to(dtype) @ jacobian.mT
            own = part if own is None else own + part
        if layer is not None:
            source = layer.source
            part = contribution(layer, given, values, rows, samples, _between(known, source, source), self._blocks)
            own = part if own is None else own + part
        kept = {z: c for z, c in found.items() if z in targets}
        return kept if own is None else {**kept, name: own}


def _matrix(covariance: Covariance, name: str) -> Tensor:
    """Returns the covariance of one block (P, P)."""
    size = next(block.size for block in covariance.blocks if block.name == name)
    like = torch.empty(0, dtype=covariance.dtype, device=covariance.device)
    vectors = {block.name: like.new_zeros(size, block.size) for block in covariance.blocks}
    vectors[name] = torch.eye(size, dtype=like.dtype, device=like.device)
    return covariance.mv(vectors)[name]


def _without_padding(call: Call, directions: Tensor) -> Tensor:
    """Leaves the padding token's row as it is, as it takes no gradient in torch."""
    args = call.item.node.args
    padding = args[2] if len(args) > 2 else call.item.node.kwargs.get("padding_idx", -1)
    if isinstance(padding, int) and padding >= 0:
        directions = directions.clone()
        directions[:, padding] = 0
    return directions


def _between(known: Mapping[tuple[str, str], Tensor], a: str, b: str) -> Tensor | None:
    """Returns Cov[a, b], None where it is 0."""
    if (a, b) in known:
        return known[a, b]
    return known[b, a].mT if (b, a) in known else None


def _identity(
    treated: Treated, names: Mapping[str, str], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Returns the unit directions of a block's weights as tangents of its parameters, by placeholder."""
    parts = treated.block.split(torch.eye(treated.block.size, dtype=dtype, device=device))
    return {placeholder: parts[parameter] for placeholder, parameter in names.items()}


__all__ = ["Walk"]
