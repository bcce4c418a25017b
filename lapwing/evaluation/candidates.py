"""Rows of a comparison: the candidates, and the network alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..covariance import without_spread
from ..covariance.latent_at_positions import LatentAtPositions
from ..data import batches
from ..data.data import Data
from ..data.frames import Columns
from ..data.inputs import Inputs
from ..errors import LapwingError
from ..fitting import Mixture
from ..likelihoods import Likelihood, Prediction
from ..likelihoods.inferred import inferred_likelihood
from ..network.call import Call, finite
from ..network.positions import Positions
from ..posterior import Posterior
from ..prediction import Way

Candidate = Posterior | Mixture | nn.Module | tuple[Posterior | Mixture, Way]

NETWORK_ROW = "network"
"""Name of the row of the network alone, unless it is a candidate."""


@dataclass(frozen=True)
class Row:
    """How a row of the table predicts a batch, and runs the plain network. A posterior has no likelihood here."""

    predict: Callable[[Any], Prediction]
    forward: Callable[[Any], Tensor]
    device: torch.device | None
    likelihood: Likelihood | None
    columns: Columns = ()


def rows_of(posteriors: Mapping[str, Candidate], data: Data) -> tuple[dict[str, Row], str, list[str]]:
    """Returns the rows, the name of the network alone, and a note on its likelihood if the candidates have several.

    The network alone is the first candidate that is a network. If there is none, the network of most posteriors is
    added as the first row.
    """
    fitted = [posterior for candidate in posteriors.values() for posterior in posteriors_in(candidate)]
    models = [id(posterior.model) for posterior in fitted]
    main = fitted[models.index(max(models, key=models.count))] if fitted else None
    likelihood = _with_noise(main) if main else _likelihood(data)
    positions, columns = (main.tangent.positions, main.columns) if main else (None, ())
    base = next((name for name, candidate in posteriors.items() if isinstance(candidate, nn.Module)), NETWORK_ROW)
    if base in posteriors and not isinstance(posteriors[base], nn.Module):
        raise LapwingError(
            f'The name "{base}" belongs to the row of the network without a posterior. Write another name: compare('
            '{"KFAC": posterior}, test_loader).'
        )
    rows: dict[str, Row] = {}
    alone = partial(_predicted_alone, likelihood, positions)
    if base not in posteriors:
        assert main is not None
        run = main.tangent.outputs_of
        rows[NETWORK_ROW] = Row(partial(alone, run), run, main.tangent.device, likelihood, columns)
    for name, candidate in posteriors.items():
        if isinstance(candidate, nn.Module):
            device = next((parameter.device for parameter in candidate.parameters()), None)
            run = torch.no_grad()(Call(candidate, layout=positions).shaped)
            rows[name] = Row(partial(alone, run), run, device, likelihood, columns)
        else:
            one, way = candidate if isinstance(candidate, tuple) else (candidate, None)
            posterior = posteriors_in(one)[0]
            tangent = posterior.tangent
            rows[name] = Row(partial(one.predict, via=way), tangent.outputs_of, tangent.device, None, posterior.columns)
    networks = {*models, *(id(candidate) for candidate in posteriors.values() if isinstance(candidate, nn.Module))}
    if main is None or len(networks) == len({repr(_with_noise(posterior)) for posterior in fitted}) == 1:
        return rows, base, []
    owner = min((len(found), name) for name, one in posteriors.items() if main in (found := posteriors_in(one)))
    what = ("a member of " if owner[0] > 1 else "") + f'"{owner[1]}"'
    has = "likelihood" if base in posteriors else "network and the likelihood"
    return rows, base, [f"Rows of a network alone have the {has} of {what}."]


def posteriors_in(candidate: Candidate) -> tuple[Posterior, ...]:
    """Returns the posterior of a candidate, or the members of a mixture; () for a network."""
    one = candidate[0] if isinstance(candidate, tuple) else candidate
    return one.members if isinstance(one, Mixture) else (one,) if isinstance(one, Posterior) else ()


def _with_noise(posterior: Posterior) -> Likelihood:
    """Returns the likelihood without calibration, at the given σ² or the mean squared residual."""
    likelihood = posterior.likelihood.of_statistics(posterior.statistics).with_logit_temperature(None)
    residual = likelihood.residual_variance(posterior.statistics)
    return likelihood if residual is None or posterior.noise_fixed else likelihood.with_noise_variance(residual)


def _predicted_alone(
    likelihood: Likelihood, positions: Positions | None, forward: Callable[[Inputs], Tensor], inputs: Inputs
) -> Prediction:
    """Returns the prediction of a network, as of a posterior without spread."""
    outputs = forward(inputs)
    layout = Positions.of(outputs.shape, None) if positions is None or outputs.ndim == 2 else positions
    rows = finite(layout.rows(outputs), likelihood.activation)
    batches.check_outputs(rows, "a batch of compare")
    places = layout.places(len(outputs), layout.sizes(outputs.shape))
    return likelihood.predicted(LatentAtPositions(without_spread(rows), places), None, None)


def _likelihood(data: Data) -> Likelihood:
    """Returns the likelihood of a comparison of networks only, or refuses it if it needs a noise variance."""
    targets = next((samples.targets for samples in data), torch.zeros(0, dtype=torch.long))
    likelihood = inferred_likelihood(targets, data)
    if likelihood.needs_noise:
        raise LapwingError(
            "A comparison of networks has no noise variance, which real targets need. Add at least one posterior: "
            'write compare({"KFAC": lw.fit(model, loader)}, test_loader).'
        )
    return likelihood
