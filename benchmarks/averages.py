"""Mean and standard error over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def averaged(runs: Sequence[Any]) -> dict[str, Any]:
    """Averages nested results over runs: mean and standard error at every leaf that all runs have."""
    if isinstance(runs[0], Mapping):
        return {str(key): averaged([run[key] for run in runs]) for key in runs[0] if all(key in run for run in runs)}
    values = [float(run) for run in runs]
    spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "standard_error": spread}
