"""CIFAR-10 for the ResNet-20, which has seen all training images: test images validate, others are reported."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from papers.common.data import CENTRE_AND_SCALE, Batches, batched, images, random_rows
from papers.common.networks import cifar_resnet20

_CENTRE, _SCALE = (torch.tensor(values)[:, None, None] for values in CENTRE_AND_SCALE["cifar10"])


@dataclass(frozen=True)
class Cifar:
    """The network, training images, the first 2 000 test images to validate, the others to report."""

    model: nn.Module
    train: Batches
    val: Batches
    test: Batches

    @classmethod
    def load(cls, seed: int, shown: int = 4096, reported: int = 8000) -> Cifar:
        """Reads the data; `shown` of the training images, in the order of the seed."""
        data = images("cifar10")
        picked = random_rows(data.x_train, shown, seed)
        return cls(
            cifar_resnet20(),
            batched(data.x_train[picked], data.y_train[picked]),
            batched(data.x_test[:2000], data.y_test[:2000]),
            batched(data.x_test[2000 : 2000 + reported], data.y_test[2000 : 2000 + reported]),
        )


def normalised(pixels: Tensor) -> Tensor:
    """Returns pixels of [0, 1] as the ResNet-20 expects them."""
    return (pixels - _CENTRE) / _SCALE


def pixels(x: Tensor) -> Tensor:
    """Returns normalised images as pixels of [0, 1]."""
    return (x * _SCALE + _CENTRE).clamp(0, 1)
