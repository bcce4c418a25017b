"""The layer families: each reads calls of its functions as uses of parameters, and gives their Jacobians."""

from __future__ import annotations

from . import conv, embedding, linear, norm
from .use import BatchAxis, Handler, Use

HANDLERS: dict[object, Handler] = {
    **linear.HANDLERS,
    **conv.HANDLERS,
    **norm.HANDLERS,
    **embedding.HANDLERS,
}
"""Function -> the handler of its family. A new family adds its own here."""

__all__ = ["HANDLERS", "BatchAxis", "Use"]
