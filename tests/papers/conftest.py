"""Networks that somebody keeps would stand for those that the tests train, and the tests' would stand for theirs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch):
    monkeypatch.delenv("LAPWING_NETWORKS", raising=False)
