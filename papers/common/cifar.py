"""CIFAR-10 for the ResNet-20, which has seen all training images: test images validate, others are reported."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from papers.common.data import CENTRE_AND_SCALE, Batches, batched, images, random_rows
from papers.common.device import DEVICE
from papers.common.networks import cifar_resnet20
from papers.common.training import kept_tensors

_CENTRE, _SCALE = (torch.tensor(values, device=DEVICE)[:, None, None] for values in CENTRE_AND_SCALE["cifar10"])


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
        parts = data.train(picked), data.test(slice(2000)), data.test(slice(2000, 2000 + reported))
        return cls(cifar_resnet20(), *(batched(*part) for part in parts))


@dataclass(frozen=True)
class LastLayer:
    """The last layer of the ResNet-20 on the features before it: methods of the last layer need nothing else.

    Features are computed once. Then the fit of a last layer, its tuning and its predictions take seconds, and are those
    of `lw.fit(network, ..., params=lw.last_layer)`.

    Attributes:
        layer: the linear layer, 64 to 10.
        trunk: images (B, 3, 32, 32) -> features (B, 64).
        train: features and labels of the training images, in the order of the seed.
        val: of the first 2 000 test images.
        test: of the other test images.
    """

    layer: nn.Linear
    trunk: Callable[[Tensor], Tensor]
    train: Batches
    val: Batches
    test: Batches

    @classmethod
    def load(cls, seed: int, shown: int = 14_000, reported: int = 8000) -> LastLayer:
        """Reads the data; arguments are those of `Cifar.load`."""
        data, network = images("cifar10"), cifar_resnet20()
        layer, body = network.linear, copy.deepcopy(network)
        body.linear = nn.Identity()  # type: ignore[assignment]

        @torch.no_grad()
        def trunk(x: Tensor) -> Tensor:
            return torch.cat([body(part) for part in x.split(100)])

        features = kept_tensors("resnet20_features", lambda: {"train": trunk(data.x_train), "test": trunk(data.x_test)})
        picked = random_rows(data.x_train, shown, seed)
        last = 2000 + reported
        return cls(
            layer, trunk, batched(features["train"][picked], data.y_train[picked]),
            batched(features["test"][:2000], data.y_test[:2000]),
            batched(features["test"][2000:last], data.y_test[2000:last]),
        )  # fmt: skip


def normalised(pixels: Tensor) -> Tensor:
    """Returns pixels of [0, 1] as the ResNet-20 expects them."""
    return (pixels.to(DEVICE) - _CENTRE) / _SCALE


def pixels(x: Tensor) -> Tensor:
    """Returns normalised images as pixels of [0, 1]."""
    return (x * _SCALE + _CENTRE).clamp(0, 1)


def fashion_as_cifar(count: int) -> Tensor:
    """Returns Fashion-MNIST test images padded to 32 x 32, in three channels, normalised as the ResNet-20 expects."""
    x = images("fashion_mnist").x_test[:count]
    return normalised(nn.functional.pad(x, (2, 2, 2, 2)).expand(-1, 3, -1, -1))
