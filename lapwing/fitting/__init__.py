"""`lw.fit`: it reads the arguments, runs the method's passes over the data, and tunes the open numbers.

It imports `tuning` and the rooms below it. Begin with `fit.py`. Plans are in `plan.py`, ensembles in `mixture.py`,
detectors in `novelty.py`, and posteriors made without `lw.fit` in `swag.py` and `mean_field/`.
"""

from __future__ import annotations

from .fit import fit
from .mean_field import MeanField
from .mixture import Mixture, mixture
from .novelty import Novelty, novelty
from .plan import Plan, Plans, plan
from .swag import SWAG

__all__ = ["SWAG", "MeanField", "Mixture", "Novelty", "Plan", "Plans", "fit", "mixture", "novelty", "plan"]
