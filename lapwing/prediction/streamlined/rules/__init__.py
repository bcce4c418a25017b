"""The moment rules, one file for each family of operations. Each file registers its operations at its end."""

from . import arithmetic, attention, conv, elementwise, linear, moves, norm

__all__ = ["arithmetic", "attention", "conv", "elementwise", "linear", "moves", "norm"]
