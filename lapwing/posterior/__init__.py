"""The posterior, its prior, its evidence and diagnosis, and the file that it is saved to.

This room imports `prediction`, `likelihoods`, `covariance` and lower rooms, and never `methods`, `tuning` or `fitting`.
Begin with `posterior.py`. `files.py` writes and reads files, `storage.py` lists their contents, and `loading.py` makes
posteriors from them.
"""

from __future__ import annotations

from .explanations import Explanation
from .loading import load
from .method_info import MethodInfo
from .posterior import Posterior

__all__ = ["Explanation", "MethodInfo", "Posterior", "load"]
