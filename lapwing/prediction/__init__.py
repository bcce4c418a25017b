"""Ways through the network: from a Gaussian over the weights to a distribution of the outputs.

It imports `covariance` and the rooms below it. Begin with `way.py` (the contract), then `linearized.py`,
the default way. `streamlined` is a wing: only `lapwing/__init__` imports it.
"""

from __future__ import annotations

from .aim import Aim
from .linearized import Linearized, default_way
from .propagation import propagate
from .quantities import Quantity
from .uncertain import Uncertain
from .way import Scaled, Way
from .weight_draws import MonteCarlo

__all__ = ["Aim", "Linearized", "MonteCarlo", "Quantity", "Scaled", "Uncertain", "Way", "default_way", "propagate"]
