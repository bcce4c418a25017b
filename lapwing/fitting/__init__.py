"""`lw.fit`: it reads the arguments, runs the method's passes over the data, and tunes the open numbers.

It imports `tuning`, `methods` and the rooms below them. Begin with `fit.py`, then `runner.py`. Plans are in `plan.py`,
ensembles in `mixture.py`, and detectors in `novelty.py`.
"""

from __future__ import annotations

from .fit import fit
from .mixture import Mixture, mixture
from .novelty import Novelty, novelty
from .plan import Plan, Plans, plan
from .update import updated

__all__ = ["Mixture", "Novelty", "Plan", "Plans", "fit", "mixture", "novelty", "plan", "updated"]
