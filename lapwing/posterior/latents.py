"""The latent distribution of a batch or a loader: checks the inputs, follows a way, and checks the outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..covariance import AnyLatent, Covariance, has_positions
from ..data import batches
from ..data.frames import Columns, as_inputs, with_tensors
from ..data.inputs import Inputs, Samples
from ..data.progress import show_progress, tracked
from ..errors import LapwingError, shown
from ..prediction import Scaled, Uncertain, Way
from ..prediction.linearized import default_way
from ..prediction.uncertain import prepared
from ..prediction.way import checked_way
from ..tangent import Tangent
from ..tangent.features import features_at
from ..tangent.retry import retried

if TYPE_CHECKING:
    from .posterior import Posterior


def latents_of(
    posterior: Posterior, x: Any, via: Way | None, joint: bool, progress: bool | None, layer: str | None = None
) -> list[tuple[AnyLatent, Tensor | None]]:
    """Returns the latent distribution for a batch of inputs or a loader (`Posterior.latent`), and features of `layer`.

    The features are None if the layer is None. The list has one entry, or one for each batch of a loader if the batches
    have different numbers of positions.
    """
    tangent = posterior.tangent
    via = default_way(tangent) if via is None else _checked(posterior, via)
    x = as_inputs(x, tangent.model, posterior.columns)

    def one(batch: Any) -> tuple[AnyLatent, Tensor | None]:
        features = None if layer is None else features_at(tangent, layer, prepared(batch, tangent.device).certain)
        return latent_of_batch(tangent, posterior.covariance, batch, via, joint).with_checks(), features

    if not batches.is_loader(x):
        return [one(x)]
    if joint:
        raise LapwingError("A loader has no joint latent. Pass a tensor of all inputs.")
    with show_progress(progress), _explained(x):
        return _joined((one(_inputs_of(batch, tangent.model)) for batch in tracked(x, "predictions")), x)


def _checked(posterior: Posterior, via: Way) -> Way:
    """Returns a way. Raises if it is something else, or has different factors for outputs of one unit."""
    way = checked_way(via)
    if isinstance(way, Scaled) and isinstance(way.factor, tuple) and len(way.factor) == posterior.tangent.outputs:
        units = posterior.likelihood.units(len(way.factor)).tolist()
        if any(factor != way.factor[unit] for factor, unit in zip(way.factor, units, strict=True)):
            raise LapwingError(
                f"The factors of via={shown(way)} differ between logits, whose differences are the prediction. Pass "
                "the same factor for all logits of a classifier."
            )
    return way


def _joined(every: Iterable[tuple[AnyLatent, Tensor | None]], loader: Any) -> list[tuple[AnyLatent, Tensor | None]]:
    """Joins the latents of all batches, unless these have different numbers of positions."""
    parts = [(latent.without_wide_factors(), features) for latent, features in every]
    if not parts:
        raise LapwingError(
            f"The loader, of type {type(loader).__name__}, yields no batch. Check the dataset's length, and that the "
            "loader can be read more than once."
        )
    latents, features = zip(*parts, strict=True)
    if len({latent.places.sizes for latent in latents if has_positions(latent)}) > 1:
        return [(latent.with_checks(), part) for latent, part in parts]
    kind: Any = type(latents[0])
    return [(kind.concatenate(latents).with_checks(), None if features[0] is None else torch.cat(features))]


def input_batches(x: Any, network: Any, columns: Columns = ()) -> Iterator[Any]:
    """Yields a batch of inputs as tensors, or the batches of a loader without their targets."""
    x = as_inputs(x, network, columns)
    yield from (_inputs_of(batch, network) for batch in x) if batches.is_loader(x) else [x]


@contextlib.contextmanager
def _explained(x: Any) -> Iterator[None]:
    """Adds the remedy to an error if x is a list of tensors, which may be several inputs that a DataLoader joined."""
    try:
        yield
    except LapwingError as error:
        several = isinstance(x, list) and len(x) > 1 and all(isinstance(part, Tensor) for part in x)
        if not several or (error.__cause__ is None and "one row for each sample" not in str(error)):
            raise
        raise LapwingError(
            f"{error} A list is read as a loader, and each of its {len(x)} tensors as one batch. If they are several "
            "inputs of one call, pass tuple(x)."
        ) from error


def _inputs_of(batch: Any, network: Any) -> Any:
    if isinstance(batch, Samples):
        return batch.inputs
    return batch if isinstance(batch, Uncertain) else batches.inputs_of(with_tensors(batch, network))


def latent_of_batch(tangent: Tangent, covariance: Covariance, inputs: Any, via: Way, joint: bool) -> AnyLatent:
    """Returns the latent distribution of the outputs for one batch, which need not be finite."""
    several = tangent.positions.several
    if joint and several:
        raise LapwingError(
            "The outputs have positions, and a joint latent of all positions is not supported. Leave out joint=True: "
            "the latent has a covariance for each position."
        )
    inputs = prepared(inputs, tangent.device)
    with torch.set_grad_enabled(inputs.wants_gradient):
        latent = retried(tangent, lambda: via.latent(tangent, covariance, inputs, joint))
    if not (has_positions(latent) if several else latent.mean.shape[1] == via.width(tangent.outputs)):
        raise _other_outputs(tangent, inputs, via, latent)
    return latent


def _other_outputs(tangent: Tangent, inputs: Inputs, via: Way, latent: AnyLatent) -> LapwingError:
    name = type(tangent.model).__name__
    if tangent.positions.several:
        return LapwingError(
            f"The outputs of {name} have positions, which via={shown(via)} does not support. Pass via=lw.Linearized() "
            "or via=lw.MonteCarlo(draws=50)."
        )
    return LapwingError(
        f"The fit had {tangent.outputs} outputs of {name}, and these inputs, {inputs}, give outputs of shape "
        f"{tuple(latent.mean.shape)}. Check the shape of the inputs, and write a single sample as x[None]."
    )
