"""What `lw.fit` does with `validation=`: held-out data tune, and choose between the last layer and all weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

from .. import ranks
from ..data import batches
from ..data.frames import as_loader
from ..data.loaders import known_size, sampler_size
from ..data.shares import joined_first_batch, on_first_rank, share
from ..errors import LapwingError
from ..likelihoods import Likelihood
from ..posterior import Posterior
from ..tangent import Tangent, everything
from ..tuning import EarlyStopping, Tuning, Validation
from ..tuning.held_out import sample_scores
from .default_method import is_affordable_for_kfac

log = logging.getLogger("lapwing")

OUTPUTS = 20
"""All weights are tried where there are at most so many outputs: a prediction takes a backward pass for each."""

MULTIPLY_ADDS = 2**37
"""And where the rows of all samples take at most so many: some ten seconds."""

GAIN = 2e-3
"""All weights must gain so many nats a held-out sample, since their predictions cost more."""


FEW = 30
"""Fewer held-out samples are warned of."""


def first_held_out(validation: Any, loader: Iterable[Any], first: tuple[Any, Any]) -> tuple[Any, Any]:
    """Returns the first batch of held-out data; warns where they are the training data, or few.

    Args:
        validation: a loader.
        loader: the training data.
        first: their first batch.
    """
    same = any(ranks.gathered("held-out data", validation is loader or _same_dataset(validation, loader)))
    held_out = batches.split(joined_first_batch(share(validation)))
    if same or _overlap(_tensors(validation, held_out), _tensors(loader, first)) or _same_rows(held_out, first):
        log.warning(
            "The validation data are the training data. The network fits these better than any others, so that its "
            "error bars come out too narrow and its probabilities too sure. Pass data that it was not trained on: "
            "validation=(x_val, y_val)."
        )
    sizes = ranks.gathered("the size of the held-out data", _size(validation))
    count = sum(FEW if size is None else size for size in sizes)
    if count < FEW and getattr(held_out[1], "ndim", 1) < 3:  # not of maps
        log.warning(
            "%d held-out samples are too few to tell how wide predictions are. Pass a few hundred, or leave "
            "validation= out, so that the training data tell it.",
            count,
        )  # fmt: skip
    return held_out


def with_joined_data(tune: Tuning, model: Any) -> Tuning:
    """Returns the tuning with the held-out data of all ranks, on rank 0; on other ranks without data."""
    if not ranks.several() or not isinstance(tune, (EarlyStopping, Validation)):
        return tune
    return replace(tune, loader=on_first_rank(as_loader(tune.loader, model)))


def check_held_out(tangent: Tangent, likelihood: Likelihood, inputs: Any, targets: Any) -> None:
    """Raises where the network does not take held-out inputs, or the likelihood their targets: before the passes."""
    try:
        check_batch(tangent, likelihood, inputs, targets)
    except LapwingError as error:
        raise LapwingError(f"The held-out data do not fit. {error}") from error


def check_batch(tangent: Tangent, likelihood: Likelihood, inputs: Any, targets: Any) -> None:
    """Raises where the network does not take inputs, or the likelihood their targets."""
    inputs, targets = batches.split((inputs, targets), tangent.device)
    tangent.check(inputs)
    outputs = tangent.outputs_of(inputs)
    if tangent.positions is not None:
        places = tangent.positions.places(len(targets), tangent.positions.sizes(outputs.shape))
        outputs, targets = tangent.positions.rows(outputs), places.targets(targets, tangent.outputs)
    likelihood.check(outputs, targets)


def all_weights(tangent: Tangent, inputs: Any, samples: int) -> Tangent | None:
    """Returns all weights of a classifier where they are tried beside the last layer; None where they are not.

    Args:
        tangent: of the last layer.
        inputs: of the first batch.
        samples: N.
    """
    if tangent.positions is not None:  # each takes a backward pass an output
        return None
    try:
        whole = Tangent.survey(tangent.model, inputs, everything, tangent.forward, tangent.memory, warn=False)
    except LapwingError as error:  # frozen weights, quantized layers, ...
        _log_impossible(error)
        return None
    if whole.parameters.keys() == tangent.parameters.keys():
        return None
    work = samples * whole.outputs * whole.plan.work(whole.blocks)
    if is_affordable_for_kfac(whole, OUTPUTS) and work <= MULTIPLY_ADDS:
        return whole
    log.info("The last layer alone is treated, since all %d weights cost too much.", whole.size)
    return None


def _log_impossible(error: LapwingError) -> None:
    log.info("The last layer alone is treated, since all trained weights cannot be: %s", error)


def with_all_weights(
    posterior: Posterior, fit: Callable[[], Posterior], validation: Any, inputs: Any, samples: int
) -> Posterior:
    """Returns a classifier's posterior of the last layer, or that of all weights where held-out data prefer it.

    The latter is preferred where it is better by more than the standard error of the difference, sample by sample.

    Args:
        posterior: of the last layer.
        fit: returns that of all weights.
        validation: the held-out data; of several processes, those of all on rank 0.
        inputs: of the first batch.
        samples: N.
    """
    whole = all_weights(posterior.tangent, inputs, samples)
    if whole is None:
        return posterior
    try:
        other = fit()
    except LapwingError as error:
        _log_impossible(error)
        return posterior

    def gain_of_all() -> tuple[float, float]:
        """Returns the mean gain in nats per held-out sample, and its standard error."""
        narrow, every = (sample_scores([one], lambda one: [one], validation).flatten() for one in (posterior, other))
        gain = every - narrow
        return float(gain.mean()), float(gain.std(correction=0)) / math.sqrt(len(gain))

    gain, deviation = ranks.on_first("all weights", gain_of_all)
    better = gain > max(GAIN, deviation)
    log.info(
        "%s is treated: on held-out data all weights gain %.2g nats a sample, with a standard error of %.2g.",
        f"All of {whole.size} weights" if better else "The last layer alone", gain, deviation,
    )  # fmt: skip
    return other if better else posterior


def _same_dataset(one: Any, other: Any) -> bool:
    """Whether two loaders show one data set, and neither chooses a part of it."""
    loaders = (one, other)
    if not all(isinstance(loader, DataLoader) for loader in loaders) or one.dataset is not other.dataset:
        return False
    return all(type(loader.sampler) in (RandomSampler, SequentialSampler) for loader in loaders)


def _size(loader: Any) -> int | None:
    """Returns how many samples a loader shows; None where it does not say."""
    return sampler_size(loader) if isinstance(loader, DataLoader) else known_size(loader)


def _tensors(loader: Any, first: tuple[Any, Any]) -> Sequence[Tensor]:
    """Returns the tensors of a data set that is shown whole, and those of the first batch of any other."""
    whole = isinstance(loader, DataLoader) and type(loader.sampler) in (RandomSampler, SequentialSampler)
    return loader.dataset.tensors if whole and isinstance(loader.dataset, TensorDataset) else batches.tensors(first)


def _overlap(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether inputs and targets share memory, as those of one table do that is shuffled for training."""
    return len(one) == len(other) and all(
        a.device == b.device and not a.is_meta
        and a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
        for a, b in zip(one, other, strict=True)
    )  # fmt: skip


def _same_rows(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether two batches begin with the same samples, as many as both have."""
    count = min(batches.size(one[0]), batches.size(other[0]))
    rows = [[tensor[:count] for tensor in batches.tensors(batch)] for batch in (one, other)]
    if any(tensor.is_meta for tensors in rows for tensor in tensors):
        return False
    rows = [[tensor.cpu() for tensor in tensors] for tensors in rows]
    kinds = [[(tensor.shape, tensor.dtype) for tensor in tensors] for tensors in rows]
    return kinds[0] == kinds[1] and all(torch.equal(*pair) for pair in zip(*rows, strict=True))
