"""What a saved posterior holds: everything but the network, of which it keeps fingerprints to know it again by."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..contents import Entry, Mismatch, check_json, check_tensors, is_count, is_positive, largest
from ..covariance import COVARIANCES
from ..errors import LapwingError
from ..network.stamp import fingerprint
from ..tangent import Tangent
from . import storage

if TYPE_CHECKING:
    from .posterior import Posterior

HEADER = {
    "format": int, "tangent": dict,
    "covariance": {"class": str, "extra": dict},
    "likelihood": {"name": str, "noise_variance": lambda value: value is None or is_positive(value)},
    "given": (bool, bool),
    "samples": lambda samples: is_count(samples) and samples > 0,
    "data_factor": lambda factor: is_positive(factor) and factor >= 1,
    "temperature": is_positive, "method": lambda method: type(method) is str, "forward": bool, "dtypes": dict,
}  # fmt: skip
"""What a file's header must be."""


def write(posterior: Posterior, path: str | os.PathLike[str]) -> None:
    """Writes what `load` needs to one file: `Posterior.save` once the network is known to be that of the fit.

    Args:
        posterior: the posterior.
        path: the file.

    Raises:
        LapwingError: for a path that cannot be written, and for what `load` would refuse, such as NaN.
    """
    kind = type(posterior.covariance)
    if COVARIANCES.get(kind.__name__) is not kind:
        raise LapwingError(
            f"The covariance class {kind.__name__} is not registered, so files cannot name it. Decorate it with "
            "@lapwing.covariance.register."
        )
    tensors = {f"covariance/{name}": tensor for name, tensor in posterior.covariance.tensors().items()}
    tensors |= {f"prior_mean/{name}": tensor for name, tensor in posterior.prior.mean.items()}
    tensors |= {f"statistics/{name}": tensor for name, tensor in posterior.statistics.items()}
    tensors |= {f"history/{name}": tensor for name, tensor in posterior.history.items()}
    state = posterior.tangent.state()
    tensors |= {f"weights/{name}": fingerprint(value) for name, value in state.items()}
    header = {
        "tangent": posterior.tangent.to_json(),
        "covariance": {"class": kind.__name__, "extra": posterior.covariance.extra()},
        "likelihood": {"name": posterior.likelihood.name, "noise_variance": posterior.noise_variance},
        "given": [posterior.prior.fixed, posterior.noise_fixed],
        "samples": posterior.samples,
        "data_factor": posterior.data_factor,
        "temperature": posterior.temperature,
        "method": posterior.method,
        "forward": posterior.tangent.forward is not None,
        "dtypes": {name: str(value.dtype) for name, value in state.items()},
    }
    try:
        read = json.loads(json.dumps({"format": storage.FORMAT, **header}))
        check_json(read, HEADER, "the header")
        check_contents(posterior.tangent, tensors, read)
    except Mismatch as error:
        raise LapwingError(
            f"The posterior cannot be saved, since {error}. Look at posterior.diagnose(), and fit again with other "
            "options."
        ) from error
    storage.write(path, tensors, header)


def check_contents(tangent: Tangent, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Raises where the tensors that predictions are made of do not belong to a checked header and a network.

    The network's fingerprints are compared besides, and the history may hold anything.
    """
    kind, bound = COVARIANCES[header["covariance"]["class"]], largest(tangent.dtype, 1 / 2)
    described = kind.entries(tangent, header["covariance"]["extra"])
    entries = {f"covariance/{name}": entry for name, entry in described.items()}
    entries |= {f"prior_mean/{b.name}": Entry((b.size,), (tangent.dtype,), -bound, bound) for b in tangent.blocks}
    entries |= {name: Entry() for name in tensors if name.startswith("statistics/")}
    used = {name: value for name, value in tensors.items() if not name.startswith(("weights/", "history/"))}
    check_tensors(used, entries)
