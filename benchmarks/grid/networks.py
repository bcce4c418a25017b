"""The cells of the grid: data sets, the networks that are trained on them, and how; each is trained once and kept.

A cell's rows are what a user has: 15 % of them, 100 at least, are held out of the training, to validate. Up to 2 000
others are to report on. Families put together what should behave alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, repeat

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from papers.common.cifar import normalised
from papers.common.data import Images, Part, arrays, images, random_rows, rows_and_targets, standardised
from papers.common.networks import cifar_resnet20, mlp, mnist_cnn
from papers.common.training import Recipe, kept, seeded, train

TESTED, FOREIGN = 2000, 1000


@dataclass(frozen=True)
class Data:
    """What a cell's network is trained with, validated and tested on.

    Attributes:
        train: inputs and targets.
        val: likewise, held out of the training.
        test: likewise, to report.
        foreign: inputs of other data sets, for classifiers.
        size: number of samples that the network was trained with, where `train` is a part of them.
    """

    train: Part
    val: Part
    test: Part
    foreign: Tensor | None = None
    size: int | None = None


@dataclass(frozen=True)
class Cell:
    """One trained network.

    Attributes:
        name: of the cell.
        family: of the cells that it is averaged with.
        data: seed -> data.
        build: makes the network, with random weights; or with trained ones, where `fit` is None.
        fit: trains it in place: network, training data and seed.
    """

    name: str
    family: str
    data: Callable[[int], Data]
    build: Callable[[Data], nn.Module]
    fit: Callable[[nn.Module, Part, int], object] | None = None

    def trained(self, data: Data, seed: int) -> nn.Module:
        """Returns the network in eval mode, from the folder LAPWING_NETWORKS where an earlier call has kept it."""
        with seeded(seed):
            model = self.build(data).to(data.train[0].dtype if data.train[0].is_floating_point() else torch.float32)
        fit = self.fit
        if fit is None:
            return model.eval()

        def make() -> None:
            with seeded(seed):
                fit(model, data.train, seed)

        return kept(model, f"{self.name}-{seed}", make)


def validation_rows(rows: int) -> int:
    """Returns the number of rows that validate."""
    return max(100, round(0.15 * rows))


# tables

WELL = {"small": Recipe(F.mse_loss, 1500, 5e-3, 1e-3, 50), "large": Recipe(F.mse_loss, 3000, 5e-3, 1e-4)}
LONG = {"small": Recipe(F.mse_loss, 500, 2e-3, batch=50), "large": Recipe(F.mse_loss, 5000, 3e-3)}


def interpolate(model: nn.Module, data: Part, seed: int, steps: int = 1500) -> nn.Module:
    """Trains until rounding is all that is left of the residuals, in float64: steps of Adam, then LBFGS."""
    Recipe(F.mse_loss, steps, 5e-3, batch=0).train(model, data, seed)
    optimiser = torch.optim.LBFGS(
        model.parameters(), max_iter=2000, history_size=50, tolerance_grad=1e-12, tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )  # fmt: skip
    return train(model, data, repeat(slice(None), 2), optimiser, F.mse_loss)


REGIMES: dict[str, tuple[str, tuple[int, ...], type[nn.Module], torch.dtype]] = {
    "well": ("well fitted", (20, 20), nn.Tanh, torch.float32),
    "over": ("overfitted", (100, 100), nn.ReLU, torch.float32),
    "exact": ("interpolated", (100, 100), nn.Tanh, torch.float64),
}


def table(name: str, size: str, regime: str) -> Cell:
    """Returns a regression cell: 300 rows of a table ("small"), or 80 % of them, 9 000 at most ("large")."""
    family, widths, activation, dtype = REGIMES[regime]
    recipe: Callable[[nn.Module, Part, int], object]
    recipe = interpolate if regime == "exact" else {"well": WELL, "over": LONG}[regime][size].train

    def data(seed: int) -> Data:
        x, y = rows_and_targets(name)
        rows = 300 if size == "small" else min(9000, round(0.8 * len(x)))
        order = random_rows(x, len(x), seed)[: rows + TESTED]
        parts = standardised(name, x[order], y[order], rows - validation_rows(rows), rows, "")
        return Data(*((x.to(dtype), y.to(dtype)) for x, y in (parts.train, parts.val, parts.test)))

    return Cell(
        f"{name.removeprefix('uci_')}-{size}-{regime}", f"tables, {family}, {size}", data,
        lambda data: mlp(data.train[0].shape[1], *widths, 1, activation=activation), recipe,
    )  # fmt: skip


# images


def cnn(channels: Sequence[int], size: int, dropout: float) -> nn.Sequential:
    """Returns a network of 3 x 3 convolutions, each halving the image, and a last layer for ten classes."""
    layers: list[nn.Module] = []
    for a, b in pairwise(channels):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        size //= 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(dropout), nn.Linear(channels[-1] * size * size, 10))


class Moved(nn.Module):
    """Shifts a batch by up to two pixels and flips half of the batches, in training."""

    def __init__(self, flips: bool) -> None:
        super().__init__()
        self.flips = flips

    def forward(self, x: Tensor) -> Tensor:
        """Returns images as they came, but moved."""
        down, right, flip = torch.randint(5, (3,)).tolist()
        height, width = x.shape[-2:]
        x = F.pad(x, (2, 2, 2, 2))[..., down : down + height, right : right + width]
        return x.flip(-1) if self.flips and flip > 2 else x


@cache
def read(name: str) -> Images:
    """Reads images once."""
    return images(name)


def foreign_images(name: str) -> Tensor:
    """Returns images of another data set of the same shape; for CIFAR-10 uniform noise and garments in grey."""
    if name != "cifar10":
        return read("fashion_mnist" if name == "mnist" else "mnist").x_test[:FOREIGN]
    noise = torch.rand(FOREIGN // 2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    grey = F.interpolate(read("fashion_mnist").x_test[: FOREIGN // 2], size=(32, 32), mode="bilinear")
    return normalised(torch.cat([noise, grey.expand(-1, 3, -1, -1)]))


def picture(name: str, rows: int, regularised: bool = False) -> Cell:
    """Returns an image cell; regularised means weight decay, dropout and images that are moved."""
    channels, size = ((3, 16, 32, 32), 32) if name == "cifar10" else ((1, 12, 24), 28)
    steps = 300 + rows // 10 + (200 if regularised else 0)
    recipe = Recipe(F.cross_entropy, steps, 2e-3, 5e-4 if regularised else 0.0, 50)

    def data(seed: int) -> Data:
        source = read(name)
        train, val = random_rows(source.x_train, rows, seed).split(
            [rows - validation_rows(rows), validation_rows(rows)]
        )
        test = random_rows(source.x_test, TESTED, seed)
        return Data(source.train(train), source.train(val), source.test(test), foreign_images(name))

    def fit(model: nn.Module, part: Part, seed: int) -> object:
        wrapped = nn.Sequential(Moved(name != "mnist"), model) if regularised else model
        return recipe.train(wrapped, part, seed)

    kind = "regularised" if regularised else "plain"
    dropout = 0.25 if regularised else 0.0
    return Cell(f"{name}-{rows}-{kind}", f"images, {kind}", data, lambda _: cnn(channels, size, dropout), fit)


def checkpoint(name: str, label: str, network: Callable[[], nn.Module], size: int) -> Cell:
    """Returns a cell of a network that is read: it has seen all training images, so test images validate."""

    def data(seed: int) -> Data:
        source = read(name)
        shown = random_rows(source.x_train, 2000, seed)
        val, test = random_rows(source.x_test, 300 + TESTED, seed).split([300, TESTED])
        return Data(source.train(shown), source.test(val), source.test(test), foreign_images(name), size)

    return Cell(f"{name}-{label}", "images, checkpoints", data, lambda _: network())


# texts

WORDS, LENGTH, WIDTH = 3000, 40, 32


def hashed(texts: Sequence[str]) -> Tensor:
    """Returns token numbers (N, LENGTH) of lower-case words by a hash, padded behind by 0."""
    tokens = torch.zeros(len(texts), LENGTH, dtype=torch.long)
    for row, text in zip(tokens, texts, strict=True):
        words = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in text.lower().split()[:LENGTH]] or [1]
        row[: len(words)] = torch.tensor(words)
    return tokens


class TextCNN(nn.Module):
    """Embedding, convolution over three words, the maximum over positions, and a last layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, 48, 3, padding=1)
        self.last = nn.Linear(48, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits (B, classes)."""
        h = F.relu(self.convolution(self.embedding(tokens).mT))
        return self.last(h.amax(-1))


class Block(nn.Module):
    """Attention of four heads and an MLP, each after a layer norm and beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.projections, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor, words: Tensor) -> Tensor:
        """Returns (B, T, WIDTH); words (B, T) tells them from padding."""
        heads = self.projections(self.norm1(h)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), attn_mask=words[:, None, None])
        h = h + self.joined(mixed.transpose(1, 2).flatten(2))
        return h + self.narrow(F.gelu(self.wide(self.norm2(h))))


class TextTransformer(nn.Module):
    """Embedding and positions, two blocks, the mean over words, and a last layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits (B, classes)."""
        words = tokens != 0
        h = self.embedding(tokens) + self.positions
        for block in self.blocks:
            h = block(h, words)
        weights = words / words.sum(1, keepdim=True)
        return self.last((self.norm(h) * weights[..., None]).sum(1))


def text(name: str, label: str, network: Callable[[int], nn.Module], steps: int) -> Cell:
    """Returns a text cell: 2 000 texts, foreign ones are of another data set."""

    def data(seed: int) -> Data:
        found, other = arrays(f"text_{name}"), arrays("text_sst2" if name == "agnews" else "text_agnews")
        y, y_test = (torch.as_tensor(found[f"y_{part}"]).long() for part in ("train", "test"))
        train, val = random_rows(y, 2000, seed).split([1700, 300])
        x, x_val = (hashed([found["text_train"][i] for i in rows.tolist()]) for rows in (train, val))
        x_test, foreign = hashed(found["text_test"][:TESTED]), hashed(other["text_test"][:FOREIGN])
        return Data((x, y[train]), (x_val, y[val]), (x_test, y_test[:TESTED]), foreign)

    return Cell(
        f"{name}-{label}", "texts", data, lambda found: network(int(found.train[1].max()) + 1),
        Recipe(F.cross_entropy, steps, 2e-3, batch=50).train,
    )  # fmt: skip


WELL_SMALL = ("uci_boston", "uci_concrete", "uci_energy", "uci_wine_red", "uci_airfoil", "uci_power",
              "california_housing", "izmailov_toy1d")  # fmt: skip

CELLS = (
    *(table(name, "small", "well") for name in WELL_SMALL),
    *(table(name, "small", "over") for name in ("uci_boston", "uci_concrete", "uci_energy", "uci_wine_red",
                                                "uci_airfoil", "kin40k")),
    *(table(name, "small", "exact") for name in ("uci_boston", "uci_airfoil", "kin40k",
                                                 "california_housing", "elevators")),
    *(table(name, "large", "well") for name in ("uci_concrete", "uci_wine_red", "uci_airfoil", "uci_power", "kin40k",
                                                "california_housing")),
    *(table(name, "large", "over") for name in ("uci_concrete", "uci_energy", "uci_wine_red", "uci_airfoil")),
    *(picture("mnist", rows) for rows in (300, 1000, 4000)),
    *(picture("fashion_mnist", rows) for rows in (300, 1000, 4000)),
    *(picture("cifar10", rows) for rows in (1000, 4000, 14_000)),
    *(picture("mnist", rows, True) for rows in (1000,)),
    *(picture("fashion_mnist", rows, True) for rows in (1000, 4000)),
    *(picture("cifar10", rows, True) for rows in (4000, 14_000)),
    checkpoint("mnist", "ella", mnist_cnn, 60_000),
    checkpoint("cifar10", "resnet20", cifar_resnet20, 50_000),
    *(text(name, "cnn", TextCNN, 300) for name in ("sst2", "subj", "agnews")),
    *(text(name, "transformer", TextTransformer, 500) for name in ("sst2", "subj", "agnews")),
)  # fmt: skip
"""The grid: 51 networks."""
