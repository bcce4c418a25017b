"""Which tests of a method's conformance are quick: `make test-slow` runs the others."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what is not among the names that a class calls quick."""
    for item in items:
        quick = getattr(getattr(item, "cls", None), "quick", None)
        if quick is not None and item.originalname not in quick:
            item.add_marker("slow")
