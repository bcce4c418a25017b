"""Loaders of tensors, made from arrays, frames and data sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from math import ceil
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from ..errors import LapwingError, shown
from ..linalg import double_device
from . import batches
from .batches import is_array
from .inputs import Inputs

BATCH = 100
"""Most samples per batch if lapwing cuts the data. Batches that exceed the memory budget are cut again."""


Columns = tuple[tuple[str, ...], ...]
"""Names of the columns of each frame of the training data that has several columns, all with strings as names."""


def as_loader(data: Any, network: Any, columns: Columns = ()) -> Any:
    """Returns a loader for training or held-out data, or raises a LapwingError if they cannot be used.

    - A tuple `(x, y)` or `(x_1, ..., x_k, y)`, or a dict with one of the label keys, of tensors, arrays or frames, is
      one data set. It is cut into batches, in order.
    - A map-style `Dataset` is cut into batches, in order.
    - A list or tuple of batches may hold arrays instead of tensors.
    - Other data are returned unchanged.

    Arrays of floats get the dtype of the network's weights, and a single array of inputs (B,) becomes a column (B, 1).
    Tensors are never converted. Frames get their columns in the order of the fit's `columns`; () keeps theirs.
    """
    if isinstance(data, DataLoader):
        return data
    data = _ordered(data, columns) if columns else data
    if isinstance(data, nn.Module) or hasattr(data, "train_dataloader"):
        raise _no_data(data)
    for part in data if type(data) is tuple else (data,):
        _check_no_numbers(part)
    if type(data) is list or (type(data) is tuple and not _is_whole(data)):  # of batches
        arrays = any(is_array(x) for x in pytree.tree_leaves(list(map(batches.tree, data))))
        return [with_tensors(batch, network) for batch in data] if arrays else data
    if _is_map_style(data):
        if not len(data):
            raise LapwingError(f"The data set, of type {type(data).__name__}, has no samples. Check its filters.")
        generator, length = torch.Generator(), _even_length(len(data))  # a loader without one draws from the user's
        return DataLoader(data, length, collate_fn=partial(_collated, dtype=_dtype(network)), generator=generator)
    return _cut(data, _dtype(network)) if _is_whole(data) else data


def _no_data(data: Any) -> LapwingError:
    if isinstance(data, nn.Module):
        return LapwingError(
            f"The data are a network, of type {type(data).__name__}. Write lw.fit(model, loader): pass the network "
            "first, and then the data."
        )
    return LapwingError(
        f"The data are a Lightning data module, of type {type(data).__name__}, which has several loaders. Call "
        "module.setup('fit'), and pass module.train_dataloader() or another of its loaders."
    )


def columns_of(data: Any) -> Columns:
    """Returns the names of the columns of the frames in data, each order once."""
    return tuple(dict.fromkeys(names for part in pytree.tree_leaves(data) if (names := _names(part))))


def _ordered(data: Any, columns: Columns) -> Any:
    """Returns data whose frames have their columns in the order of the fit, found by name; raises for other columns."""

    def one(part: Any) -> Any:
        names = _names(part)
        same = next((known for known in columns if sorted(known) == sorted(names)), None)
        if names and same is None:
            raise LapwingError(
                f"A {type(part).__name__} {_difference(names, columns)}. Pass the columns of the fit, or x.to_numpy() "
                "if only the names differ."
            )
        return part if same in (None, names) else part[list(same)]

    return pytree.tree_map(one, data) if columns_of(data) else data


def _difference(names: tuple[str, ...], columns: Columns) -> str:
    """Returns which columns a frame has in addition to the most similar frame of the fit, and which it lacks."""
    known = min(columns, key=lambda those: len(set(those) ^ set(names)))
    counts = Counter(names), Counter(known)
    extra, missing = (list((one - other).elements()) for one, other in (counts, counts[::-1]))
    parts = [f"has the columns {shown(extra)}, which the data of the fit did not have"] if extra else []
    parts += [f"lacks the columns {shown(missing)} of the data of the fit"] if missing else []
    return " and ".join(parts)


def _names(part: Any) -> tuple[str, ...]:
    """Returns the names of the columns of a frame; () if it has one column, or names that are not strings."""
    names = tuple(part.columns) if is_array(part) and hasattr(part, "columns") else ()
    return names if len(names) > 1 and all(isinstance(name, str) for name in names) else ()


def check_data(data: Any, purpose: str) -> None:
    """Raises unless the data are a loader, or `as_loader` can make a loader of them."""
    if not (_is_map_style(data) or _is_whole(data)):
        batches.check_loader(data, purpose)


def as_inputs(x: Any, network: Any, columns: Columns = ()) -> Any:
    """Returns inputs for prediction, without labels of a dict, or a loader of them; tensors instead of arrays.

    Frames are read as by `as_loader`.
    """
    if isinstance(x, (Tensor, Inputs)):
        return x
    x = _ordered(x, columns) if columns else x
    x = batches.inputs_of(x) if isinstance(x, Mapping) else x
    if isinstance(x, (tuple, Mapping)):
        return _tensors(x, _dtype(network), column=False)
    return with_tensors(x, network) if is_array(x) else as_loader(x, network)


def with_tensors(batch: Any, network: Any) -> Any:
    """Returns a batch with tensors instead of arrays; the same object if it has no arrays."""
    return batch if isinstance(batch, Tensor) else _tensors(batch, _dtype(network))


def as_targets(y: Any, device: torch.device) -> Any:
    """Returns the targets of a prediction on its device, as tensors instead of arrays and frames."""
    _check_no_numbers(y)
    wide = torch.float64 if double_device(device) == device else torch.float32
    return batches.plain(_tensor(y, wide) if is_array(y) else y, device)


def _dtype(network: Any) -> torch.dtype | None:
    parameters = network.parameters() if isinstance(network, nn.Module) else ()
    return next((value.dtype for value in parameters if value.is_floating_point()), None)


def _is_map_style(data: Any) -> bool:
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not indexed or isinstance(data, (IterableDataset, type, str, bytes)) or is_array(data):
        return False
    if isinstance(data, Dataset):
        return type(data).__getitem__ is not Dataset.__getitem__
    if hasattr(data, "__getitems__"):  # a data set of Hugging Face, which also iterates over its samples
        return True
    return not (hasattr(data, "__iter__") or isinstance(data, (Tensor, Mapping)))


def _check_no_numbers(x: Any) -> None:
    """Raises for a number and for a nested list of numbers. The first entry decides."""
    entry = x
    while isinstance(entry, list) and entry:
        entry = entry[0]
    if isinstance(entry, Real):
        found = "a list of numbers" if isinstance(x, list) else "a single number"
        raise LapwingError(f"The data hold {found}. Pass an array, numpy.array(x), or a tensor, with a row per sample.")


def _is_whole(data: Any) -> bool:
    """Whether data are one data set with its targets: a tuple that ends in an array, tensor or heads, or a dict."""
    if isinstance(data, Mapping):
        label = next((key for key in batches.LABEL_KEYS if key in data), None)
        return label is not None and len(data) > 1 and (isinstance(data[label], Tensor) or is_array(data[label]))
    if type(data) is not tuple or len(data) < 2:
        return False
    heads = batches.are_heads(data[-1]) and not isinstance(data[0], Mapping)
    return heads or isinstance(data[-1], Tensor) or is_array(data[-1])


def _cut(data: Any, dtype: torch.dtype | None) -> list[Any]:
    """Returns the batches of one data set. Their tensors are views of it."""
    data = _tensors(data, dtype)
    inputs, targets, _ = batches.pair(data)
    count, joined = Inputs(inputs).samples, f" {batches.JOINED}" * any(Inputs(inputs).shared)
    if targets.ndim and count != len(targets):
        raise LapwingError(
            f"The inputs have {count} rows and the targets {len(targets)}. Pass a target for each row.{joined}"
        )
    if not count:
        raise LapwingError(f"The data set has no samples: {batches.describe(data)}. Pass at least one row.")
    return [batch.value for _, batch in Inputs(data).chunks(_even_length(count))]


def _even_length(count: int) -> int:
    """Returns the length of batches of nearly equal length, at most `BATCH`.

    A step of mean field or VaLLA weighs all batches alike, so the rows of a short one would count for more.
    """
    return ceil(count / ceil(count / BATCH))


def _tensors(data: Any, dtype: torch.dtype | None, column: bool = True) -> Any:
    """Returns a batch with tensors instead of arrays; with `column`, inputs (B,) become (B, 1)."""
    if is_array(data):
        return _column(_tensor(data, dtype))
    if column and isinstance(data, (tuple, list)) and len(data) == 2 and is_array(data[0]):
        data = (_column(_tensor(data[0], dtype)), data[1])
    if not any(map(is_array, pytree.tree_leaves(batches.tree(data)))):
        return data
    return pytree.tree_map(lambda leaf: _tensor(leaf, dtype) if is_array(leaf) else leaf, batches.tree(data))


def _column(x: Tensor) -> Tensor:
    """Returns floats (B,) as a column (B, 1). Integers stay, since they may be tokens."""
    return x[:, None] if x.ndim == 1 and x.is_floating_point() else x


def _tensor(x: Any, dtype: torch.dtype | None) -> Tensor:
    """Returns an array or a frame as a tensor; floats get the dtype."""
    array = np.asarray(x.to_numpy() if hasattr(x, "to_numpy") else x)
    if array.dtype.kind not in "biufc" and hasattr(x, "columns"):
        array = _numeric(x)
    if array.dtype.kind not in "biufc":
        raise LapwingError(
            f"The {type(x).__name__} of shape {array.shape} has the dtype {array.dtype}, which holds no numbers. "
            "Pass numbers, x.astype('float32'), and labels that are names as numpy.unique(y, return_inverse=True)[1]."
        )
    array = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])  # torch warns about read-only arrays
    values = torch.from_numpy(array)
    return values.to(dtype or values.dtype) if values.is_floating_point() else values


def _numeric(frame: Any) -> Any:
    """Returns the numbers of a frame whose columns have different dtypes; raises if some columns hold no numbers."""
    kinds = zip(frame.columns, frame.dtypes, strict=True)
    other = [f"{name!r} ({dtype})" for name, dtype in kinds if getattr(dtype, "kind", "O") not in "biuf"]
    if other:
        raise LapwingError(
            f"The columns {', '.join(other[:8])} of the {type(frame).__name__} hold no numbers. Drop them or turn them "
            "into numbers."
        )
    try:
        return np.asarray(frame.to_numpy(), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise LapwingError(
            f"The {type(frame).__name__} of shape {frame.shape} has missing values. Drop or impute them."
        ) from error


def _collated(samples: list[Any], dtype: torch.dtype | None) -> Any:
    """Joins samples of a data set as torch does; arrays and Python floats get the dtype first."""

    def converted(leaf: Any) -> Any:
        if isinstance(leaf, float):
            return torch.tensor(leaf, dtype=dtype, device="cpu")
        return _tensor(leaf, dtype) if is_array(leaf) else leaf

    try:
        return default_collate([pytree.tree_map(converted, sample) for sample in samples])
    except LapwingError:
        raise
    except (TypeError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise LapwingError(
            f"The samples of the data set cannot be joined into a batch ({reason}). Pass a loader that joins them, "
            "torch.utils.data.DataLoader(dataset, batch_size=100, collate_fn=...)."
        ) from error
