"""The moment rules, one file for each family of operations; each enters its own into the table at its end."""

from . import arithmetic, attention, conv, elementwise, linear, moves, norm

__all__ = ["arithmetic", "attention", "conv", "elementwise", "linear", "moves", "norm"]
