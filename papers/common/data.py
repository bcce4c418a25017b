"""Readers of the packed data sets in the folder that LAPWING_DATA names: arrays, images, regression tables."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import lapwing as lw
from papers.common.device import DEVICE

VARIABLE = "LAPWING_DATA"

Part = tuple[Tensor, Tensor]
Batches = list[tuple[Tensor, Tensor]]

CENTRE_AND_SCALE: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.0,), (1.0,)),
    "fashion_mnist": ((0.0,), (1.0,)),  # as MNIST, so that one network can see both
    "cifar10": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""What the checkpoints were trained with: pixels / 255, minus the first, divided by the second, a channel each."""


@dataclass(frozen=True)
class Images:
    """An image data set, normalised for the checkpoints of `networks.py`.

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

    def train(self, rows: Tensor | slice) -> Part:
        """Returns some of the training images and their labels."""
        return self.x_train[rows], self.y_train[rows]

    def test(self, rows: Tensor | slice) -> Part:
        """Returns some of the test images and their labels."""
        return self.x_test[rows], self.y_test[rows]


def available(*names: str) -> bool:
    """Tells whether LAPWING_DATA is set and its folder holds these files, such as "mnist.npz"."""
    folder = os.environ.get(VARIABLE, "")
    return bool(folder) and all((Path(folder) / name).is_file() for name in names)


def file(name: str) -> Path:
    """Returns the path of one file of the data folder, such as "mnist.npz".

    Raises:
        LapwingError: if LAPWING_DATA names no folder, or one without this file.
    """
    folder = os.environ.get(VARIABLE, "")
    if not folder:
        raise lw.LapwingError(f"{VARIABLE} is not set. Set it to the folder of data sets that holds {name}.")
    path = Path(folder) / name
    if not path.is_file():
        raise lw.LapwingError(f"The folder {folder} holds no file {name}. Set {VARIABLE} to the folder that does.")
    return path


def arrays(name: str) -> dict[str, Any]:
    """Reads `name.npz` as numpy arrays; encoded entries are decoded.

    `K.image` and `K.utf8` hold concatenated bytes, and `K.offsets` where each piece begins and ends; together they are
    the entry K: images uint8 (N, H, W, 3), or texts as an object array.

    Args:
        name: without the suffix.

    Returns:
        entry -> array.

    Raises:
        LapwingError: if there is no such file.
        ModuleNotFoundError: Pillow is missing, for encoded images (`pip install pillow`).
    """
    values: dict[str, Any] = {}
    with np.load(file(f"{name}.npz"), allow_pickle=False) as packed:
        for entry in packed.files:
            stem, _, kind = entry.rpartition(".")
            if kind == "image":
                values[stem] = np.stack([_pixels(piece) for piece in _pieces(packed, stem, kind)])
            elif kind == "utf8":
                values[stem] = np.array([piece.decode() for piece in _pieces(packed, stem, kind)], dtype=object)
            elif kind != "offsets":
                values[entry] = packed[entry]
    return values


def _pieces(packed: Any, stem: str, kind: str) -> Iterator[bytes]:
    data, offsets = memoryview(packed[f"{stem}.{kind}"]).cast("B"), packed[f"{stem}.offsets"]
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        yield bytes(data[start:stop])


def _pixels(encoded: bytes) -> Any:
    from PIL import Image

    with Image.open(io.BytesIO(encoded)) as image:
        return np.asarray(image.convert("RGB"))


def images(name: str) -> Images:
    """Reads an image data set as tensors, normalised for the checkpoints.

    Args:
        name: "mnist", "fashion_mnist" or "cifar10" (14 000 of its 50 000 training images).

    Raises:
        LapwingError: for another name, or if there is no such file.
    """
    if name not in CENTRE_AND_SCALE:
        raise lw.LapwingError(f"There are no images {name!r}. Name one of {', '.join(map(repr, CENTRE_AND_SCALE))}.")
    found = arrays(name)
    centre, scale = (torch.tensor(value)[:, None, None] for value in CENTRE_AND_SCALE[name])

    def pixels(array: Any) -> Tensor:
        raw = torch.as_tensor(array)
        raw = raw[:, None] if raw.ndim == 3 else raw.movedim(-1, 1)  # (N, channels, H, W)
        return ((raw.float() / 255 - centre) / scale).contiguous()

    def labels(array: Any) -> Tensor:
        return torch.as_tensor(array).long()

    parts = (
        form(found[f"{kind}_{part}"]).to(DEVICE)
        for part in ("train", "test")
        for kind, form in (("x", pixels), ("y", labels))
    )
    return Images(*parts)


def batched(x: Tensor, y: Tensor, size: int = 100) -> Batches:
    """Cuts data into batches."""
    return list(zip(x.split(size), y.split(size), strict=True))


def joined(part: Batches) -> Part:
    """Returns inputs and targets of all batches."""
    x, y = zip(*part, strict=True)
    return torch.cat(x), torch.cat(y)


def random_rows(x: Tensor, count: int, seed: int) -> Tensor:
    """Returns `count` different row numbers of x, at random."""
    return torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:count]


@dataclass(frozen=True)
class Pictures:
    """MNIST or Fashion-MNIST: training and validation images from the training part, test images, foreign ones.

    Attributes:
        train: x (n, 1, 28, 28) and labels, in batches of 100.
        val: 2 000 of the 5 000 images that training has not seen, likewise.
        test: likewise.
        foreign: test images (n, 1, 28, 28) of the other of the two.
    """

    train: Batches
    val: Batches
    test: Batches
    foreign: Tensor


def pictures(name: str, seed: int, tested: int = 10_000) -> Pictures:
    """Reads MNIST or Fashion-MNIST with the other one's test images.

    Args:
        name: "mnist" or "fashion_mnist".
        seed: of the split into 55 000 training and 5 000 held-out images.
        tested: how many of the test and foreign images.
    """
    data = images(name)
    order = random_rows(data.x_train, len(data.x_train), seed)
    other = images("fashion_mnist" if name == "mnist" else "mnist")
    parts = data.train(order[5000:]), data.train(order[:2000]), data.test(slice(tested))
    train, val, test = (batched(*part) for part in parts)
    return Pictures(train, val, test, other.x_test[:tested])


@dataclass(frozen=True)
class Table:
    """A regression table, inputs and targets standardised by the training rows.

    Attributes:
        name: of the data set.
        train: x (n, d) and y (n, 1), float32.
        val: likewise, for early stopping and tuning.
        test: likewise, for reporting.
        scale: standard deviation of the training targets, in the target's unit.
        unit: of the target.
    """

    name: str
    train: Part
    val: Part
    test: Part
    scale: float
    unit: str


def rows_and_targets(name: str) -> Part:
    """Reads x (N, d) and y (N,) of a table, float64."""
    found = arrays(name)
    return torch.as_tensor(found["X"]).double(), torch.as_tensor(found["y"]).double()


def standardised(name: str, x: Tensor, y: Tensor, train: int, val: int, unit: str) -> Table:
    """Standardises x (n, d) and y (n,) by the rows before `train`; a constant column becomes 0.

    Args:
        name: of the data set.
        x: inputs, in the order of the splits.
        y: targets.
        train: where the validation rows begin.
        val: where the test rows begin.
        unit: of the targets.
    """
    spread = x[:train].std(0)
    x = (x - x[:train].mean(0)) / torch.where(spread > 1e-12 * x[:train].abs().amax(0), spread, torch.inf)
    scale = y[:train].std()
    y = (y - y[:train].mean()) / scale
    x, y = x.float(), y.float()[:, None]
    train_part, val_part, test_part = ((x[a:b], y[a:b]) for a, b in pairwise((0, train, val, len(x))))
    return Table(name, train_part, val_part, test_part, float(scale), unit)


def some_rows(name: str, most: int, seed: int, train: float = 0.7) -> Table:
    """Reads rows of a table in a random order, a share to train, half of the others to validate, and half to test."""
    x, y = rows_and_targets(name)
    picked = random_rows(x, most, seed)
    count = int(train * len(picked))
    return standardised(name, x[picked], y[picked], count, (count + len(picked)) // 2, "")


def split(name: str, x: Tensor, y: Tensor, unit: str, seed: int | None) -> Table:
    """Splits rows 80/10/10, in the random order of a seed, or in their own when it is None; standardises them."""
    if seed is not None:
        order = random_rows(x, len(x), seed)
        x, y = x[order], y[order]
    return standardised(name, x, y, round(0.8 * len(x)), round(0.9 * len(x)), unit)
