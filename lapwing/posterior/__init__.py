"""The posterior and what belongs to it: prior, evidence, diagnosis, the file that it is saved to.

It imports `prediction`, `likelihoods`, `covariance` and what is below them, never `methods`, `tuning` or `fitting`.
Begin with `posterior.py`. `files.py` writes and reads files, `storage.py` lists what they hold, and `loading.py` makes
posteriors of them.
"""

from __future__ import annotations

from .loading import load
from .method_info import MethodInfo
from .posterior import Posterior

__all__ = ["MethodInfo", "Posterior", "load"]
