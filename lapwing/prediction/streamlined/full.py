"""Full mode: covariances within each sample, also between all pairs of values that are still needed.

Every call is linearised at the means, and a layer with treated weights adds their contribution. The outputs have the
covariance of the linearised network, plus the products of uncertain weights and uncertain inputs in each layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ...covariance import Covariance
from ...covariance.terms import DenseTerm, Term
from ...data.inputs import Inputs
from .forward_mode import chunk_size, evaluate, push
from .moments import mean_of, total_of, variance_of
from .operations import Kind, is_a, named
from .program import Program
from .rules.conv import patches_of
from .schedule import Schedule, Step
from .sites import INPUTS, Site, Treated, refusal

Covariances = Mapping[tuple[str, str], Tensor]
"""Two names -> the covariances (B, n_a, n_b) of their values; each pair is stored in one order."""


@dataclass(frozen=True)
class FusedCall:
    """One step with inner steps, whose values have no covariances: tuples, and functions of weights."""

    step: Step
    inside: tuple[Step, ...]
    leaves: tuple[str, ...]
    """Names of the uncertain arguments."""
    reads: tuple[str, ...]
    """Names of all arguments."""
    carries: bool
    """Whether the value has covariances."""

    def __call__(self, values: dict[str, Any], dtype: torch.dtype) -> Any:
        for step in self.inside:
            values[step.node.name] = evaluate(step, values, dtype)
        return evaluate(self.step, values, dtype)


def calls_of(schedule: Schedule, samples: Collection[str]) -> tuple[FusedCall, ...]:
    """Groups steps: values without samples (names outside `samples`) and tuples go into the steps that read them."""
    inner: dict[str, Step] = {}
    calls = []
    for step in schedule.steps:
        inside, leaves, certain = dict[str, Step](), dict[str, None](), dict[str, None]()

        def visit(step: Step, inside: dict = inside, leaves: dict = leaves, certain: dict = certain) -> None:
            for name in step.sources:
                if name not in step.uncertain:
                    certain[name] = None
                elif name in inner:
                    visit(inner[name], inside, leaves, certain)
                    inside[name] = inner[name]
                else:
                    leaves[name] = None

        visit(step)
        name, carries = step.node.name, bool(step.uncertain)
        if carries and name not in samples:
            inner[name], carries = step, False
        calls.append(FusedCall(step, tuple(inside.values()), tuple(leaves), (*leaves, *certain), carries))
    return tuple(calls)


class FullProgram:
    """One pass through a network with means, and covariances (B, n_a, n_b) by pairs of names."""

    def __init__(self, program: Program, covariance: Covariance) -> None:
        assert program.axes is not None
        self._program, self._axes = program, program.axes
        self._correlated = program.way.residual != "independent"  # the two sides of a sum
        self._calls = calls_of(program.schedule, self._axes.dims)
        self._last_reads = {
            n: place for place, call in enumerate(self._calls) for n in (*call.reads, *call.step.sources)
        }
        self._last_reads[program.graph.output] = len(self._calls)
        self._covariance = weakref.ref(covariance)  # a program must not keep its posterior alive
        self._matrices: dict[str, Tensor] = {}

    @property
    def bytes_per_sample(self) -> int:
        """Estimated bytes of the largest step for one sample: a few covariances of its tensors."""
        return 4 * self._program.largest**2 * self._program.dtype.itemsize

    def run(self, inputs: Inputs) -> tuple[Tensor, Term]:
        """Returns the result of `Program.run`, with covariances. Uncertain inputs may have covariances (B, n, n)."""
        program, samples = self._program, inputs.samples
        start = program.start(inputs)
        values = {name: mean_of(value) for name, value in start.items()}
        known: dict[tuple[str, str], Tensor] = {}
        for name in (program.graph.leaves[place] or "" for place in inputs.spreads):
            spread = variance_of(start[name])
            assert spread is not None
            if spread.shape == values[name].shape:
                spread = torch.diag_embed(self._axes.flat(name, spread, samples))
            known[name, name] = spread
        for place, call in enumerate(self._calls):
            self._run_call(place, call, values, known, samples)
        output, width = program.graph.output, program.width
        matrix = known[output, output]
        if width is not None:  # keep the covariances within each position
            matrix = matrix.unflatten(2, (-1, width)).unflatten(1, (-1, width)).diagonal(dim1=1, dim2=3)
            matrix = matrix.movedim(-1, 1).flatten(0, 1)
        return values[output], DenseTerm(matrix)

    def _run_call(
        self, place: int, call: FusedCall, values: dict[str, Any], known: dict[tuple[str, str], Tensor], samples: int
    ) -> None:
        """Adds the mean and covariances of a call, and drops values that no later call needs."""
        program, name = self._program, call.step.node.name
        if call.step.in_moment_dtype:
            read = {name: mean_of(program.cast(name, values[name])) for name in call.step.sources}
            values[name] = evaluate(call.step, read, program.dtype)
        else:
            values[name] = program.step(call.step, values, samples)
        if call.carries:
            targets = [z for z in values if self._correlated and z != name and self._last_reads.get(z, -1) > place]
            covariances = self._covariances(call, values, known, targets, samples)
            known.update({(name, other): c for other, c in covariances.items()})
        gone = [n for n in values if self._last_reads.get(n, -1) <= place and n not in program.graph.tensors]
        for other in gone:
            del values[other]
        for pair in [pair for pair in known if not set(pair).isdisjoint(gone)]:
            del known[pair]

    def _covariances(
        self, call: FusedCall, values: Mapping[str, Any], known: Covariances, targets: list[str], samples: int
    ) -> dict[str, Tensor]:
        """Returns `Cov[y, z]` for the targets z and y itself: `Σ_i J_i Cov[x_i, z]`, `Σ_i J_i Cov[x_i, y]`."""
        program, name, axes = self._program, call.step.node.name, self._axes
        dtype, node = program.dtype, call.step.node
        read = {n: program.cast(n, values[n]) for n in call.reads}
        layer = _treated_layer(program.sites.get(name))
        leaves = [n for n in call.leaves if n not in program.treated]
        refuse = partial(refusal, program.graph.network, node)

        def carried(tangents: Mapping[str, Tensor]) -> Tensor:
            """Returns the tangents of y (B, n, K) for tangents (K, *shape) of some leaves."""

            def function(*primals: Tensor) -> Tensor:
                return call({**read, **dict(zip(tangents, primals, strict=True))}, dtype)

            primals, directions = [read[n] for n in tangents], [t.to(dtype) for t in tangents.values()]
            out = push(function, primals, directions, refuse, chunk_size(values[name]))
            return axes.columns(name, out, samples)

        def from_leaves(covariances: Mapping[str, Tensor]) -> Tensor | None:
            if not covariances:
                return None
            return carried({x: axes.tensors(x, c, values[x].shape) for x, c in covariances.items()})

        result: dict[str, Tensor] = {}
        for target in dict.fromkeys([*leaves, *targets]):
            parts = {x: c for x in leaves if (c := _between(known, x, target)) is not None}
            if not self._correlated:
                parts = {x: c for x, c in parts.items() if x == target}
            part = from_leaves(parts)
            if part is not None:
                result[target] = part
        terms = [from_leaves({x: result[x].mT for x in leaves if x in result})]
        blocks: dict[str, tuple[Treated, dict[str, str]]] = {}  # with placeholder -> parameter name
        for leaf in call.leaves:
            if leaf in program.treated:
                treated, parameter = program.treated[leaf]
                blocks.setdefault(treated.block.name, (treated, {}))[1][leaf] = parameter
        if layer is not None:
            treated, source = layer
            blocks.pop(treated.block.name, None)
            mean = read[source]
            if not is_a(node, Kind.CONVOLUTION):
                mean = axes.flat(source, mean, samples).reshape(samples, -1, mean.shape[-1])  # (B, T, I)
            spread = _between(known, source, source)
            terms.append(_added(program.sites[name], treated, mean, spread, self._matrix))
        for treated, names in blocks.values():
            jacobian = carried(_directions(call, treated, names, read, dtype))  # (B, n, P)
            terms.append(jacobian @ self._matrix(treated).to(dtype) @ jacobian.mT)
        kept, total = {z: c for z, c in result.items() if z in targets}, total_of(terms)
        return kept if total is None else {**kept, name: total}

    def _matrix(self, treated: Treated) -> Tensor:
        """Returns the covariance of one block (P, P), computed once."""
        name, size = treated.block.name, treated.block.size
        if name not in self._matrices:
            covariance = self._covariance()
            assert covariance is not None
            with torch.no_grad():
                like = torch.empty(0, dtype=covariance.dtype, device=covariance.device)
                vectors = {block.name: like.new_zeros(size, block.size) for block in covariance.blocks}
                vectors[name] = torch.eye(size, dtype=like.dtype, device=like.device)
                self._matrices[name] = covariance.mv(vectors)[name]
        return self._matrices[name]


def _directions(
    call: FusedCall, treated: Treated, names: Mapping[str, str], read: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Returns the unit directions of a block's weights as tangents of its parameters, by placeholder.

    The padding token's row of an embedding does not change, as torch gives it no gradient.
    """
    device = read[next(iter(names))].device
    parts = treated.block.split(torch.eye(treated.block.size, dtype=dtype, device=device))
    directions = {placeholder: parts[parameter] for placeholder, parameter in names.items()}
    padding = named(call.step.node)["padding_idx"] if is_a(call.step.node, Kind.EMBEDDING) else -1
    if padding >= 0:
        row = torch.tensor([padding], device=device)
        directions = {placeholder: part.index_fill(1, row, 0.0) for placeholder, part in directions.items()}
    return directions


def _between(known: Covariances, a: str, b: str) -> Tensor | None:
    """Returns Cov[a, b], or None if it is 0."""
    if (a, b) in known:
        return known[a, b]
    return known[b, a].mT if (b, a) in known else None


def _treated_layer(site: Site | None) -> tuple[Treated, str] | None:
    """Returns the treated weights of a linear layer or convolution and the name of its input, else None."""
    if site is None or not is_a(site.node, Kind.LINEAR, Kind.CONVOLUTION):
        return None
    treated = site.weights
    if treated is None or treated.block.matrix_shape[0] > 1:  # groups use the derivative
        return None
    arguments = named(site.node)
    source = arguments[next(name for name in INPUTS if name in arguments)]
    assert isinstance(source, fx.Node)
    return treated, source.name


def _added(
    site: Site, treated: Treated, mean: Tensor, spread: Tensor | None, matrix: Callable[[Treated], Tensor]
) -> Tensor:
    """Returns `Cov[h_tj, h_sk] = Σ_ii' (m_t m_sᵀ + Cov[a_t, a_s])_ii' Cov[W_ji, W_ki']`, (B, n, n).

    `mean` is m, the input (B, T, I) or (B, channels, *space), and `spread` its covariance (B, n_x, n_x), if any. For
    several positions the memory is O(P²) for the block, and O(B T² (I² + O²)).
    """
    convolution = is_a(site.node, Kind.CONVOLUTION)
    if convolution:
        mean, spread = _patches(site, mean, spread)
    elif spread is not None:
        spread = spread.unflatten(2, (-1, mean.shape[2])).unflatten(1, (-1, mean.shape[2]))
    if treated.block.bias:
        mean = F.pad(mean, (0, 1), value=1.0)
        spread = None if spread is None else F.pad(spread, (0, 1, 0, 0, 0, 1))
    if mean.shape[1] == 1:
        return treated.covariance.push(mean[:, 0], None if spread is None else spread[:, 0, :, 0], True)
    _, outputs, inputs = treated.block.matrix_shape
    dense = matrix(treated).to(mean.dtype).reshape(outputs, inputs, outputs, inputs)
    moment = torch.einsum("bti,bsj->btisj", mean, mean)
    moment = moment if spread is None else moment + spread
    out = torch.einsum("btisj,oipj->btosp", moment, dense)
    if convolution:
        out = out.permute(0, 2, 1, 4, 3)  # (B, O, T, O, T)
    return out.flatten(3).flatten(1, 2)


def _patches(site: Site, x: Tensor, covariance: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns the patches (B, T, I) of an input (B, channels, *space), and their covariances (B, T, I, T, I)."""
    arguments = named(site.node)
    arguments["weight"] = arguments["weight"].meta["val"]
    cut = partial(patches_of, site, arguments)
    mean = cut(x)
    if covariance is None:
        return mean, None
    samples, positions, inputs = mean.shape
    half = cut(covariance.mT.reshape(-1, *x.shape[1:]))  # (B n, T, I)
    half = half.reshape(samples, -1, positions * inputs).mT
    whole = cut(half.reshape(-1, *x.shape[1:])).reshape(samples, positions, inputs, positions, inputs)
    return mean, whole
