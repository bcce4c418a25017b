"""Readers of the packed data sets in the folder that LAPWING_DATA names: arrays as they are, images as tensors."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import LapwingError

VARIABLE = "LAPWING_DATA"

CENTRE_AND_SCALE: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.0,), (1.0,)),
    "fashion_mnist": ((0.0,), (1.0,)),  # as MNIST, so that one network can see both
    "cifar10": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""What the checkpoints were trained with: pixels / 255, minus the first, divided by the second, a channel each."""


@dataclass(frozen=True)
class Images:
    """An image data set, normalised for the checkpoints of `models.py`.

    Attributes:
        x_train: (N, channels, H, W) float32.
        y_train: class labels (N,) int64.
        x_test: as `x_train`.
        y_test: as `y_train`.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


def available(*names: str) -> bool:
    """Tells whether LAPWING_DATA is set and its folder holds these files, such as "mnist.npz"."""
    folder = os.environ.get(VARIABLE, "")
    return bool(folder) and all((Path(folder) / name).is_file() for name in names)


def file(name: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Returns the path of one file of the data folder.

    Args:
        name: such as "mnist.npz".
        folder: where; the one that LAPWING_DATA names when None.

    Raises:
        LapwingError: if no folder is named, or it holds no such file.
    """
    named = folder or os.environ.get(VARIABLE, "")
    if not named:
        raise LapwingError(
            f"Asked for {name}, found neither a folder nor the variable {VARIABLE}; the folder of data sets is needed: "
            f"set {VARIABLE}=folder in the environment."
        )
    path = Path(named) / name
    if not path.is_file():
        raise LapwingError(
            f"Asked for {name}, found no such file in {Path(named)}; a folder that holds it is needed: set "
            f"{VARIABLE} to it."
        )
    return path


def arrays(name: str, folder: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Reads `name.npz` as numpy arrays; encoded entries are decoded.

    `K.image` and `K.utf8` hold concatenated bytes, and `K.offsets` where each piece begins and ends; together they are
    the entry K: images uint8 (N, H, W, 3), or texts as an object array.

    Args:
        name: without the suffix.
        folder: where; the one that LAPWING_DATA names when None.

    Returns:
        entry -> array.

    Raises:
        LapwingError: if there is no such file.
        ModuleNotFoundError: Pillow is missing, for encoded images (`pip install pillow`).
    """
    import numpy as np

    found: dict[str, Any] = {}
    with np.load(file(f"{name}.npz", folder), allow_pickle=False) as packed:
        for entry in packed.files:
            stem, _, kind = entry.rpartition(".")
            if kind == "image":
                found[stem] = np.stack([_pixels(piece) for piece in _pieces(packed, stem, kind)])
            elif kind == "utf8":
                found[stem] = np.array([piece.decode() for piece in _pieces(packed, stem, kind)], dtype=object)
            elif kind != "offsets":
                found[entry] = packed[entry]
    return found


def _pieces(packed: Any, stem: str, kind: str) -> Iterator[bytes]:
    data, offsets = memoryview(packed[f"{stem}.{kind}"]).cast("B"), packed[f"{stem}.offsets"]
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        yield bytes(data[start:stop])


def _pixels(encoded: bytes) -> Any:
    import numpy as np
    from PIL import Image

    with Image.open(io.BytesIO(encoded)) as image:
        return np.asarray(image.convert("RGB"))


def images(name: str, folder: str | os.PathLike[str] | None = None) -> Images:
    """Reads an image data set as tensors, normalised for the checkpoints.

    Args:
        name: "mnist", "fashion_mnist" or "cifar10" (14 000 of its 50 000 training images).
        folder: where; the one that LAPWING_DATA names when None.

    Raises:
        LapwingError: for another name, or if there is no such file.
    """
    if name not in CENTRE_AND_SCALE:
        raise LapwingError(
            f"Asked for images({name!r}); accepted are {', '.join(map(repr, CENTRE_AND_SCALE))}: for other files write "
            f"arrays({name!r})."
        )
    found = arrays(name, folder)
    centre, scale = (torch.tensor(value)[:, None, None] for value in CENTRE_AND_SCALE[name])

    def pixels(array: Any) -> Tensor:
        raw = torch.as_tensor(array)
        raw = raw[:, None] if raw.ndim == 3 else raw.movedim(-1, 1)  # (N, channels, H, W)
        return ((raw.float() / 255 - centre) / scale).contiguous()

    def labels(array: Any) -> Tensor:
        return torch.as_tensor(array).long()

    return Images(pixels(found["x_train"]), labels(found["y_train"]), pixels(found["x_test"]), labels(found["y_test"]))
