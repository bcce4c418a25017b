"""Records of outputs with positions. If the treated layer gives the outputs, each position is a sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..data.inputs import Inputs
from ..errors import LapwingError
from ..jacobian.jacobian import SLICE_BYTES
from ..jacobian.layers import BatchAxis
from ..jacobian.layers.linear import LinearUse
from ..jacobian.layers.use import Use
from ..network.positions import EXACT_OUTPUTS
from ..network.recording_plan import Uses
from ..network.tracing import RecordedUse, Recording, find_output
from .cotangents import EVERY_OUTPUT, Cotangents, Reading
from .record import Record, outputs_moved_error

if TYPE_CHECKING:
    from .tangent import Tangent


CHEAP_POSITIONS_FACTOR = 64
"""Factor by which `Reading.max_positions` records more positions if no position needs backward passes."""


def records_of_positions(
    tangent: Tangent, checked: Inputs, cotangents: Cotangents, dtype: torch.dtype, reading: Reading
) -> Iterator[tuple[slice, Record]]:
    """Yields records of a layer that gives the outputs, with positions as samples, as `Tangent.records` does."""
    positions, start, recorded, most = tangent.positions, 0, reading.recorded, reading.max_positions
    inputs = max(block.matrix_shape[2] for block in tangent.blocks)
    columns = tangent.outputs if cotangents.columns is None else cotangents.columns
    numbers = 2 * inputs + 5 * columns * tangent.outputs + reading.scratch_per_sample
    step = max(1, tangent.memory // (numbers * dtype.itemsize))
    strip = max(1, min(step, SLICE_BYTES // (inputs * dtype.itemsize)))
    differentiable = checked.wants_gradient
    for part, chunk in checked.chunks(tangent.chunk_length(1, dtype)):
        recording, uses = tangent.traced(chunk)
        use, sizes = output_use(tangent, recording, uses, differentiable), recording.sizes
        patches = None if use is None else use.use.position_inputs(sizes, step)
        if use is None and tangent.plan.tail and cotangents is EVERY_OUTPUT and recorded is None and most is None:
            inner = replace(positions, rows_are_positions=False)  # the tail masks classes of this chunk only
            general = replace(tangent, call=replace(tangent.call, layout=inner))
            for rows, record in general.records(chunk, cotangents, dtype, reading):
                yield slice(start + rows.start, start + rows.stop, rows.step), record
            start += chunk.samples * prod(sizes)
            continue
        if use is None or patches is None:
            raise outputs_moved_error(tangent, next(iter(tangent.parameters)))
        f, mask = positions.rows(recording.shaped), None if recorded is None else recorded[part].flatten()
        if mask is not None and len(mask) != len(f):
            raise LapwingError(
                f"The targets have {mask.numel() // chunk.samples} positions of a sample, and the outputs "
                f"{len(f) // chunk.samples}, of shape {tuple(recording.shaped.shape)}. Pass one target for each."
            )
        stride = 1 if most is None else _stride(-(-prod(sizes) // (CHEAP_POSITIONS_FACTOR * most)), sizes[-1])
        every = cotangents.columns is None and mask is None and stride == 1
        layers = use.use.position_uses(sizes, strip) if every else None
        if layers is None:
            weights, layout = use.use.parameters, use.use.matrix()
            assert layout is not None  # products have a matrix layout
            bias, transposed = weights.get("bias"), layout.transposed
            layers = ((len(a), LinearUse(a, weights["weight"], bias, transposed)) for a in patches)
        values = [f] if use.slopes is None else [f, positions.rows(use.slopes)]
        for rows, layer, (outputs, *slopes) in _parts(layers, values, mask, start, stride):
            start = rows.stop
            if not len(outputs):
                continue
            outputs = outputs if differentiable else outputs.detach().requires_grad_()
            u = cotangents(outputs if differentiable else outputs.detach())
            noted = RecordedUse(layer, use.names, get_gradient_edge(outputs), outputs, layer.inputs._version)
            noted.is_output, noted.slopes = True, slopes[0] if slopes else None
            roles = {name: [(0, BatchAxis(), each[0][2])] for name, each in uses.items()}
            yield rows, Record(tangent, None, outputs, [noted], roles, u, dtype, differentiable, sizes)


def _stride(least: int, width: int) -> int:
    """Returns the smallest step from `least` on that visits all columns of a grid, far from one step to the next."""
    step = least
    while step > 1 and (gcd(step, width) > 1 or (2 * step >= width > 8 and not 0.25 <= step % width / width <= 0.75)):
        step += 1
    return step


def _parts(
    layers: Iterable[tuple[int, Use]], values: Sequence[Tensor], mask: Tensor | None, start: int, stride: int
) -> Iterator[tuple[slice, Use, list[Tensor]]]:
    """Yields a slice from `start`, and the layer and the values at every `stride`-th of the positions in the mask."""
    first = 0
    for count, layer in layers:
        here = slice(first, first + count)
        first, parts = here.stop, [layer.inputs, *(each[here] for each in values)]
        if mask is not None:
            parts = [each[mask[here]] for each in parts]
        rows = slice(start, start + len(parts[1]))
        start = rows.stop
        if stride > 1:
            skipped = -rows.start % stride
            rows = slice(rows.start + skipped, rows.stop, stride)
            parts = [each[skipped::stride] for each in parts]
        layer.inputs, *parts = parts
        yield rows, layer, parts


def output_use(tangent: Tangent, recording: Recording, uses: Uses, differentiable: bool = False) -> RecordedUse | None:
    """Returns the only use of the treated weights if it gives the network's outputs at each position, or None."""
    positions, noted = tangent.positions, {i for every in uses.values() for i, _, _ in every}
    if len(noted) != 1 or set(uses) != {block.name for block in tangent.blocks}:
        return None
    use = recording.noted[noted.pop()]
    fits = not use.spread and use.use.features == positions.axis and use.use.position_inputs((), 1) is not None
    find_output([use] if fits else [], recording.shaped, differentiable)
    return use if use.is_output else None


def by_position(
    record: Record, rows: slice, reading: Reading, cotangents: Cotangents
) -> Iterator[tuple[slice, Record]]:
    """Yields a record with its own cotangents for each position, or for evenly spread positions if they are more."""
    outputs = record.tangent.outputs
    count = record.outputs.shape[1] // outputs
    if reading.max_positions is None and record.outputs.shape[1] > EXACT_OUTPUTS:
        raise LapwingError(
            f"The network has {count} positions of {outputs} outputs for each sample, more than "
            f"{EXACT_OUTPUTS} in all, and each takes a backward pass. Pass via=lw.Linearized(draws=64), or treat the "
            "last layer alone: params=lw.last_layer."
        )
    chosen = reading.chosen_from
    places = range(count) if chosen is None or len(chosen) != count else chosen.nonzero()[:, 0].tolist()
    if reading.max_positions is not None and len(places) > reading.max_positions:
        golden = 0.5 * (5**0.5 - 1)  # multiples modulo 1 are spread evenly, and no grid has a column for all of them
        spread = (int(len(places) * (i * golden % 1)) for i in range(reading.max_positions))
        places = [places[i] for i in dict.fromkeys(spread)]
    for which in places:
        columns = cotangents(record.outputs[:, :outputs])
        yield slice(rows.start * count + which, rows.stop * count, count), record.at_position(which, columns)
