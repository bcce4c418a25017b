"""Networks that somebody keeps would stand for those that the tests train."""

from __future__ import annotations

import os

os.environ.pop("LAPWING_NETWORKS", None)
