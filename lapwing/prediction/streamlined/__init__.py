"""Streamlined prediction: the Gaussian over the weights, pushed through the network layer by layer in one pass.

`streamlined.py` is the way; begin reading there. `graph.py` reads the network, `schedule.py` says which calls carry
moments, `program.py` runs them (`full.py` in full mode), and `operations.py` is the table that both ask: `rules/` fills
it, one entry for each operation. The room imports `covariance`, `tangent`, `batches` and `errors`, and from its own
floor `way.py` and `uncertain.py`; only `deployment` reads its insides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .streamlined import Streamlined

if TYPE_CHECKING:
    from .operations import Kind, Operation, broadcast, independent, register


def __getattr__(name: str) -> Any:
    """Returns what belongs to the table of operations, filled when it is first used: `import lapwing` stays light."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import operations, rules  # noqa: F401

    return getattr(operations, name)


__all__ = ["Kind", "Operation", "Streamlined", "broadcast", "independent", "register"]
