"""Dead parameters: the share of weights that no output feels, which says what subsets of weights can do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .. import batches
from ..errors import LapwingError, shown
from ..posterior import Posterior
from ..tangent import Tangent
from ..tangent.eager import outside_modes


@outside_modes
def dead_parameters(fitted: Posterior | Tangent, loader: Iterable[Any], threshold: float = 1e-6) -> Tensor:
    """Compute the share of treated weights that no output feels: `s_p ≤ threshold · max_p' s_p'`, `s_p = ‖J_·p‖`.

    The norm runs over all inputs and outputs, so at threshold 0 a weight is dead if its gradient is exactly 0
    everywhere, as that of a ReLU unit that never fires (optimal subspace, appendix E and Table 6). Being relative, the
    threshold depends neither on the units of the outputs nor on how many inputs there are.

    Args:
        fitted: a posterior, or a tangent.
        loader: batches of inputs, or of (inputs, targets).
        threshold: relative size at which a gradient counts as 0, in [0, 1).

    Returns:
        The share (), between 0 and 1.

    Raises:
        LapwingError: a threshold out of range, an empty loader, or bad inputs.

    Cost: one pass over the data with C backward passes of activations; memory O(P). J is never formed.

    Example:
        >>> layer = torch.nn.Linear(4, 3).eval()
        >>> x = torch.randn(8, 4)
        >>> x[:, 0] = 0.0  # three weights see nothing but 0
        >>> round(dead_parameters(lw.tangent.Tangent.survey(layer, x), [x]).item(), 3)
        0.2
    """
    if isinstance(threshold, bool) or not isinstance(threshold, Real) or not 0 <= threshold < 1:
        raise LapwingError(
            "dead_parameters compares gradients with threshold times the largest, and threshold is "
            f"{shown(threshold)}; a number from 0 up to 1 is accepted: threshold=1e-6."
        )
    tangent = fitted.tangent if isinstance(fitted, Posterior) else fitted
    if not isinstance(tangent, Tangent):
        raise LapwingError(f"dead_parameters takes a posterior. This is {shown(fitted)}. Pass lw.fit(model, loader).")
    if not isinstance(loader, (Tensor, Mapping, tuple)):
        batches.check_loader(loader, "dead_parameters")
    sums = {block.name: torch.zeros(block.size, dtype=torch.float64, device=tangent.device) for block in tangent.blocks}
    seen = 0
    for batch in loader if batches.is_loader(loader) else [loader]:
        for _, record in tangent.records(batches.plain(batches.inputs_of(batch), tangent.device)):
            seen += record.samples
            for name in sums:
                sums[name] += record[name].squared_sum()
    if not seen:
        raise LapwingError(
            f"dead_parameters looks at gradients on data, and found no samples in a loader of type "
            f"{type(loader).__name__}; at least one is needed: pass a DataLoader or a list of batches."
        )
    sizes = torch.cat(list(sums.values())).sqrt()
    return (sizes <= threshold * sizes.max()).double().mean()
