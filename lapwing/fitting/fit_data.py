"""The data of a fit: training data, held-out data, and the likelihood and the tuning that they decide."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from .. import ranks
from ..data.data import Data, check_data_size
from ..data.inputs import Samples, checked
from ..likelihoods import Likelihood, resolve
from ..likelihoods.inferred import inferred_likelihood
from ..methods import Batch, DataSummary
from ..posterior import Posterior
from ..tangent import Tangent
from ..tuning import Tuning, Validation
from .options import FitOptions

log = logging.getLogger("lapwing")

FEW_COUNTED = 2.0  # a total weight below this warns of weights that were divided by their sum
FEW = 30  # minimum number of held-out samples; below it a warning is logged
KNOWN = 0.05  # maximum share of held-out samples that are training samples, beyond chance; above it a warning is logged


@dataclass(frozen=True)
class FitData:
    """The data of a fit, and what they decide.

    Over several processes `tune` has the held-out data of all processes on rank 0, and none on other ranks.
    """

    training: Data
    held_out: Data | None  # data of `validation=`, `lw.Validation` or `lw.EarlyStopping`
    first: Samples = field(repr=False)  # the first batch of the joined training data
    likelihood: Likelihood  # the user's likelihood, or the one inferred from the targets
    tune: Tuning | None  # None for the default prior and noise

    @classmethod
    def of(cls, options: FitOptions, model: Any, loader: Any) -> FitData:
        """Reads the first batches; raises if the data cannot be used, or if `data_size` is too small."""
        training, held_out = Data(loader, model, options.sample_weights, options.data_size), None
        first = training.first
        tune: Any = options.tune if options.validation is None else Validation(options.validation)
        if tune is not None and tune.loader is not None:
            given = tune.loader
            held_out = given if isinstance(given, Data) else Data(given, model, columns=training.columns)
            held_out.wants_digests = training.wants_digests = True
        if options.data_size is not None:
            check_data_size(options.data_size, training.known_size or 0)
        training.check_keys(likelihood := options.likelihood)
        likelihood = inferred_likelihood(first.targets, training) if likelihood is None else resolve(likelihood)
        if held_out is not None:
            tune = replace(tune, loader=held_out.on_first_rank())
        return cls(training, held_out, first, likelihood, tune)

    def likelihood_by_residuals(self, tangent: Tangent, keys: Iterable[Any]) -> Likelihood:
        """Runs the network over held-out or training data; returns the likelihood with noise of heads, or ratios."""
        likelihood: Any = self.likelihood
        data = self.training if self.held_out is None else self.held_out
        sums = {key: DataSummary() for key in keys}
        for samples in checked(data, tangent.device):
            rows = Batch.of(tangent, samples).rows()
            likelihood.check(rows["outputs"], rows["targets"])  # before the columns are apart
            for key, head, f, y in likelihood.heads(rows["outputs"], rows["targets"]):
                if key in sums:
                    sums[key].add(head, f, y, rows["weights"])
        parts = ranks.gathered("the residuals", sums)
        whole = {key: reduce(DataSummary.added, [part[key].mapped(Tensor.cpu) for part in parts]) for key in sums}
        totals = {key: summary.of_mean_weight(data.weighted) for key, summary in whole.items()}
        return likelihood.with_residuals(totals) if all(totals.values()) else likelihood

    def warn(self, options: FitOptions, posterior: Posterior, count: int) -> None:
        """Warns about data that make the error bars wrong, and logs if a likelihood has only a pseudo-evidence."""
        held_out = self.held_out
        if self.training.weighted:
            _warn_of_weights(posterior, count)
        batches = [self.first] if held_out is None else [self.first, held_out.first]
        texts = [samples for samples in batches if isinstance(samples.inputs.value, Mapping)]
        if texts and options.forward is None:
            _warn_of_own_tokens(texts, self.likelihood)
        if self.likelihood.plain is not self.likelihood:
            log.info(
                "%s weighs the loss, and no distribution of the targets has such a loss: its evidence is a "
                "pseudo-evidence", self.likelihood,
            )  # fmt: skip
        if held_out is None:
            return
        _warn_of_few(held_out, self.likelihood)
        if share := share_of_known(held_out, self.training):
            log.warning(
                "%.0f %% of the validation samples are training samples. The network fits these better than new data, "
                "so its error bars become too narrow and its probabilities overconfident. Pass data on which it was "
                "not trained: validation=(x_val, y_val).", 100 * share,
            )  # fmt: skip


def _warn_of_weights(posterior: Posterior, count: int) -> None:
    """Warns of sample weights that sum to about 1, unless only ratios count or σ² gives them a unit."""
    total = float(posterior.statistics["weight"]) * posterior.data_factor
    likelihood = posterior.likelihood
    alone = likelihood.regressions and not likelihood.head_numbers
    meant = alone and (posterior.noise_fixed or posterior.temperature != 1)
    if total < FEW_COUNTED <= count / 10 and not meant:
        log.warning(
            "The sample weights sum to %.3g, so %d samples count as %.3g, and the variances are nearly those of the "
            "prior. Divide the weights by their mean.", total, count, total,
        )  # fmt: skip


def share_of_known(held_out: Data, training: Data) -> float:
    """Returns the share of held-out samples that are training samples, or 0 if that share is chance.

    In a table of few values, a training sample equals another one by chance as often. Targets that are real numbers do
    not: there repeated samples are copies, of a join for instance.
    """
    mine = held_out.row_digests, training.row_digests, held_out.source is training.source
    every = ranks.gathered("the digests", mine)
    known, digests = (torch.cat(part) for part in list(zip(*every, strict=True))[:2])
    values, counts = digests.unique(return_counts=True)
    share = float(torch.isin(known, values).double().mean())  # NaN if the tuning reads no held-out data
    share = 1.0 if any(same for *_, same in every) else share  # augmented samples differ each time
    y = training.first.targets
    distinct = isinstance(y, Tensor) and y.is_floating_point() and 2 * len(y.flatten().unique()) > y.numel()
    chance = 0.0 if distinct else float(counts[counts > 1].sum() / max(1, len(digests)))
    return share if share - chance > KNOWN + 2 * (chance * (1 - chance) / max(1, len(known))) ** 0.5 else 0.0


def _warn_of_few(held_out: Data, likelihood: Likelihood) -> None:
    count = held_out.expected_size
    if count and count < FEW and getattr(held_out.first.targets, "ndim", 1) < 3:  # no maps
        log.warning(
            "%d held-out samples are too few to tune the width of predictions. Pass a few hundred%s.", count,
            "" if likelihood.activation else ", or leave validation= out, so that the training data tune it",
        )  # fmt: skip


def _warn_of_own_tokens(texts: Sequence[Samples], likelihood: Likelihood) -> None:
    """Warns if the labels of a text that count are its own tokens instead of the tokens that follow."""
    for samples in texts:
        tokens, targets = samples.inputs.value.get("input_ids"), samples.targets
        if not isinstance(tokens, Tensor) or not isinstance(targets, Tensor) or tokens.shape != targets.shape:
            continue
        counted = likelihood.labelled(targets)
        own = tokens.to(targets.device) == targets
        if own.any() and (own if counted is None else own[counted]).all():
            log.warning(
                "The labels are the input_ids, so each token is fitted to itself. For a causal language model, which "
                "predicts the token that follows, write NextTokens(loader) for training and held-out data, with "
                "lapwing.integrations.huggingface.NextTokens."
            )
            return
