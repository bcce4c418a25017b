"""Features of the inputs: the inputs of a layer of the network, in one plain call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..data.inputs import Inputs
from ..jacobian.layers import BatchAxis, Use
from ..network.eager import own_parameters
from .tangent import Tangent


def rows_of(use: Use, axis: BatchAxis, samples: int) -> Tensor | None:
    """Returns the inputs (B, F) of a layer, averaged over positions; None if it is not linear in its inputs."""
    if use.features is None:
        return None
    rows = axis.front(use.inputs.movedim(use.features, -1), samples)
    return rows.reshape(samples, -1, rows.shape[-1]).mean(1)


def last_layer_of(tangent: Tangent) -> str:
    """Returns the name of the block of the last treated layer that is linear in its inputs; "" if there is none.

    Cost: none. Layers count in the order of the forward pass.
    """
    uses = [(i, name) for name, every in tangent.plan.uses.items() for i, _, _ in every]
    linear = [(i, name) for i, name in uses if tangent.plan.order[i].kind.split(",")[0] in ("linear", "conv")]
    return max(linear, default=(0, ""))[1]


def features_at(tangent: Tangent, block: str, inputs: Inputs) -> Tensor:
    """Returns the features (N, F) of B inputs: see `outputs_and_features`."""
    return outputs_and_features(tangent, block, inputs)[1]


def outputs_and_features(tangent: Tangent, block: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Returns the outputs of B inputs in their own shape, and features (N, F) in the order of the N rows of outputs.

    The features are the inputs of a block's last layer: at each position if the layer has the positions of the outputs,
    else their mean over positions. "" for the block means the outputs themselves. They keep their graph if the inputs
    require gradients.

    Cost: one forward pass, in which only this layer is recorded.
    """
    if not block:
        shaped = tangent.outputs_of(inputs)
        return shaped, tangent.positions.rows(shaped)
    every = own_parameters(tangent.model)
    watched = {name: every[name] for name in tangent.named_blocks[block].parameters}
    frozen = [value for value in watched.values() if not value.requires_grad]
    outputs, features = [], []
    for _, chunk in inputs.chunks(tangent.chunk_length(1)):
        recording = tangent.call.traced(chunk, watched, frozen=frozen, repeats=True)
        noted, sizes, (*_, (_, axis, _)) = recording.noted[-1], recording.sizes, tangent.plan.uses[block]
        count = tangent.positions.places(chunk.samples, sizes).count
        mean = rows_of(noted.use, axis, chunk.samples)
        assert mean is not None  # the block was chosen by `last_layer_of`
        patches, grid = None, noted.out.movedim(noted.use.features or 0, -1).shape[:-1]
        if sizes and grid == (chunk.samples, *sizes):
            patches = noted.use.position_inputs(sizes, chunk.samples * count)
        rows = mean.repeat_interleave(count, 0) if patches is None else torch.cat(list(patches))
        outputs.append(recording.shaped.detach().to(tangent.dtype))
        features.append(rows if inputs.wants_gradient else rows.detach())
    return torch.cat(outputs), torch.cat(features)
