"""Training samples that a tuning reads: whole batches, spread evenly over the loader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..data import batches
from ..data.loaders import other_size
from ..data.progress import tracked
from ..posterior import Posterior
from .evidence import Training


def spread_batches(
    training: Training, limit: int, posterior: Posterior, before: Sequence[int] | None = None
) -> Iterator[batches.Weighted]:
    """Yields whole batches that are spread evenly over the training data, with at most `limit` samples in all.

    The batches are put on the posterior's device. `before` holds the sizes of the batches of the processes before this
    one; None means a single process. Raises if the loader has no samples, or shows another number of samples than the
    fit read.
    """
    device, shown = posterior.tangent.device, training.shown
    if training.chosen:
        yield from (batches.plain(part, device) for part in training.loader)
        return
    whole = shown or posterior.samples
    start = taken = 0

    def count(size: int) -> int:
        """Returns the number of samples that are read from the next batch."""
        return min(size, limit - taken) if taken < limit and taken * whole <= start * limit else 0

    for size in before or ():
        taken, start = taken + count(size), start + size
    if taken >= limit:
        return
    for batch in tracked(training.loader, "training data for the tuning"):
        inputs, targets = batches.split(batch)
        weights = batches.weights_of(batch, device)
        size = batches.size(inputs)
        some = count(size)
        if some:
            if some < size:  # every (size // some)-th sample
                rows = slice(0, some * (size // some), size // some)
                inputs, targets = batches.take(inputs, rows), targets[rows]
                weights = None if weights is None else weights[rows]
            taken += some
            yield batches.Weighted(batches.plain(inputs, device), batches.plain(targets, device), weights)
        start += size
        if taken >= limit:
            return
    if before is None and (not taken or (shown == posterior.samples and start != whole)):
        raise other_size(start, "to the tuning", posterior.samples)
