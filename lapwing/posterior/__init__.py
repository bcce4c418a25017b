"""The posterior, its evidence and diagnosis, further data, and the contents of the file that it is saved to.

It imports `running` and the rooms below it, and never `tuning` or `fitting`. Begin with `posterior.py`. `tuned.py` has
the contract of a tuning, `storage.py` lists what a file holds, and `loading.py` makes posteriors of it.
"""

from __future__ import annotations

from .explanations import Explanation
from .loading import load
from .method_info import MethodInfo
from .posterior import Posterior

__all__ = ["Explanation", "MethodInfo", "Posterior", "load"]
