"""The gradient of the log joint at the trained weights, which the evidence at the linearised model's mode needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import LapwingError
from ..network import batches
from ..tangent import Vectors

if TYPE_CHECKING:
    from .posterior import Posterior


def log_joint_gradient(posterior: Posterior, loader: Iterable[Any]) -> Vectors:
    """Returns the gradient of `log p(y|θ) + log p(θ)` at θ̂, (P_block,) a block.

    Args:
        posterior: any with a prior.
        loader: the training data of its fit.

    Raises:
        LapwingError: where the loader is none, or shows another number of samples.

    Cost: one pass of one backward pass a batch.
    """
    batches.check_loader(loader, "The evidence at the linearised mode")
    tangent, likelihood, prior = posterior.tangent, posterior.likelihood, posterior.prior
    dtype, mean = posterior.covariance.dtype, tangent.mean()
    gradient = {
        block.name: -delta * (mean[block.name] - prior.mean[block.name]).to(dtype)
        for block, delta in zip(tangent.blocks, prior.precision.tolist(), strict=True)
    }
    factor, samples = posterior.data_factor / posterior.temperature, 0
    length = tangent.chunk_length(1, dtype)
    for batch in loader:
        inputs, targets = batches.split(batch, tangent.device)
        for rows, chunk in batches.chunks(inputs, length):

            def score(outputs: Tensor, targets: Tensor = targets[rows]) -> Tensor:
                return likelihood.score(outputs, targets).unsqueeze(-1)  # (B, C, 1)

            record = tangent.record(chunk, score, dtype)
            samples += record.samples
            for name in gradient:
                gradient[name] = gradient[name] + factor * record[name].sum_rows()[0]
    if samples != posterior.samples:
        raise LapwingError(
            f"Asked for the evidence at the linearised mode, found {samples} samples in the loader, after "
            f"{posterior.samples} in the fit; the training data of the fit are needed: pass the same loader, one that "
            "can be gone through again."
        )
    return gradient
