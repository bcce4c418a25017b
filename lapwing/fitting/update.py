"""What `Posterior.update` does: the curvature and statistics of further data, at the same weights."""

from __future__ import annotations

from typing import Any

from .. import ranks
from ..data.frames import as_loader
from ..data.loaders import WeightedLoader, check_progress
from ..data.shares import joined_first_batch, share
from ..errors import LapwingError, check_flag, shown
from ..network.entry import outside_modes
from ..posterior import Posterior
from ..tuning import Evidence, Training, Tuning, Validation
from .further import with_further
from .result import checked, tuned
from .validation import with_joined_data


@outside_modes
@ranks.across_ranks()
def updated(
    posterior: Posterior, loader: Any, tune: Tuning | None, sample_weights: bool, progress: bool | None
) -> Posterior:
    """Returns the posterior of the data so far and of those in a loader: see `Posterior.update`."""
    if tune is not None and not isinstance(tune, (Evidence, Validation)):
        raise LapwingError(
            f"update(tune={shown(tune)}) is not an option, since the former data are not there. Write "
            "tune=lw.Evidence() or tune=lw.Validation(loader), or leave it out to keep the prior and the noise."
        )
    check_progress(progress)
    check_flag("posterior.update", "sample_weights", sample_weights)
    loader = share(as_loader(loader, posterior.model))
    joined_first_batch(loader)
    loader = WeightedLoader(loader, ranks.several()) if sample_weights else loader
    whole = with_further(posterior, posterior.tangent, loader)
    if tune is None:
        return checked(whole)
    return checked(tuned(with_joined_data(tune, posterior.model), whole, Training()))


Posterior.updating = staticmethod(updated)
