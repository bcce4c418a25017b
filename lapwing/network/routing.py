"""Functions by which values, and not shapes alone, can decide what lies where; `tracing.py` looks out for them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

ROUTING = frozenset(
    name + suffix
    for suffix in ("", "_")
    for name in (
        "allclose", "argsort", "bincount", "bucketize", "gather", "index_add", "index_copy", "index_fill", "index_put",
        "index_reduce", "index_select", "kthvalue", "masked_scatter", "masked_select", "median", "nonzero", "put",
        "repeat_interleave", "scatter", "scatter_add", "scatter_reduce", "searchsorted", "sort", "take",
        "take_along_dim", "topk", "unique", "unique_consecutive", "_pack_padded_sequence", "_pad_packed_sequence",
        "equal", "is_nonzero", "msort", "one_hot", "__array__", "__bool__", "__contains__",
        "__float__", "__index__", "__int__", "item", "numpy", "tolist",
    )
)  # fmt: skip


def routes(function: Callable, args: tuple) -> bool:
    """Whether a function can make positions depend on values."""
    name = getattr(function, "__name__", "")
    if name in ("__getitem__", "__setitem__"):
        places = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(place, (Tensor, list)) or hasattr(place, "__array__") for place in places)
    return name in ROUTING
