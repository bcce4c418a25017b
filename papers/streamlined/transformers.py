"""Small transformers of the streamlined experiments (Li et al. 2025, section 4.2), trained here: a ViT and a GPT-2.

The paper fine-tunes pre-trained networks of 86 to 124 million weights; these have 0.14 and 0.74 million, from scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from papers.common.cifar import fashion_as_cifar
from papers.common.data import Part, arrays, images, random_rows
from papers.common.networks import PADDING, UNKNOWN, gpt2, vit
from papers.common.training import kept, seeded, train


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: AdamW, cross-entropy, the rate rising for a tenth of the steps, then falling to 0."""

    epochs: float
    rate: float = 1e-3
    batch: int = 128
    decay: float = 0.05


@dataclass(frozen=True)
class Task:
    """Data of one task, and the network for it.

    Attributes:
        name: one of `TASKS`.
        train: inputs and labels (N,); images (N, channels, H, W), or tokens (N, T), padded behind.
        val: held out of the training part, to tune with.
        test: to report.
        foreign: inputs of another data set, of the same kind.
        build: makes the network, with random weights.
        recipe: of its training.
    """

    name: str
    train: Part
    val: Part
    test: Part
    foreign: Tensor
    build: Callable[[], nn.Module]
    recipe: Recipe


def vocabulary(texts: Sequence[str], words: int) -> Any:
    """Returns a byte-pair tokeniser of lower-case words, trained on the texts; 0 is padding, 1 unknown."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokeniser = Tokenizer(models.BPE(unk_token="[unknown]"))
    tokeniser.normalizer = normalizers.Lowercase()
    tokeniser.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[padding]", "[unknown]"]
    trainer = trainers.BpeTrainer(vocab_size=words, special_tokens=special, show_progress=False)
    tokeniser.train_from_iterator(texts, trainer)
    return tokeniser


def tokens(tokeniser: Any, texts: Sequence[str], length: int) -> Tensor:
    """Returns token numbers (N, length), padded behind; of longer texts the last tokens are kept."""
    found = torch.full((len(texts), length), PADDING)
    for row, text in enumerate(tokeniser.encode_batch(list(texts))):
        kept = text.ids[-length:] or [UNKNOWN]
        found[row, : len(kept)] = torch.tensor(kept)
    return found


def fashion_mnist(seed: int) -> Task:
    """Reads Fashion-MNIST with MNIST as foreign images: 5 000 train, 2 000 others validate.

    After 55 000 the ViT is calibrated as it is, and validation asks for no spread in its weights at all.
    """
    data = images("fashion_mnist")
    order = random_rows(data.x_train, 7000, seed)
    parts = data.train(order[2000:]), data.train(order[:2000]), (data.x_test, data.y_test)
    return Task("fashion_mnist", *parts, images("mnist").x_test, vit, Recipe(40))


def cifar10(seed: int) -> Task:
    """Reads CIFAR-10: 14 000 images train, the first 2 000 test images validate; foreign are Fashion-MNIST images.

    The seed is that of the training alone.
    """
    del seed
    data = images("cifar10")
    parts = (data.x_train, data.y_train), data.test(slice(2000)), data.test(slice(2000, None))
    return Task("cifar10", *parts, fashion_as_cifar(2000), lambda: vit(32, 8, channels=3), Recipe(20))


def sst2(seed: int) -> Task:
    """Reads SST-2 in its own three parts; foreign are AG News texts. The seed is that of the training alone."""
    del seed
    found, other = arrays("text_sst2"), arrays("text_agnews")
    texts = (*(list(found[f"text_{part}"]) for part in ("train", "val", "test")), list(other["text_test"]))
    labels = tuple(torch.as_tensor(found[f"y_{part}"]).long() for part in ("train", "val", "test"))
    return _texts("sst2", texts, labels, 64, Recipe(4, 1e-3, 64))


def agnews(seed: int) -> Task:
    """Reads AG News: 8 000 texts train, 2 000 others validate; foreign are SST-2 texts."""
    found, other = arrays("text_agnews"), arrays("text_sst2")
    y_train, y_test = (torch.as_tensor(found[f"y_{part}"]).long() for part in ("train", "test"))
    train, val = random_rows(y_train, 10_000, seed).split([8000, 2000])
    texts = ([found["text_train"][i] for i in rows.tolist()] for rows in (train, val))
    labels = y_train[train], y_train[val], y_test
    parts = (*texts, list(found["text_test"]), list(other["text_test"]))
    return _texts("agnews", parts, labels, 64, Recipe(4, 1e-3, 64), classes=4)


def _texts(
    name: str, texts: Sequence[Sequence[str]], labels: Sequence[Tensor], length: int, recipe: Recipe, classes: int = 2
) -> Task:
    tokeniser = vocabulary(texts[0], 3000)
    *parts, foreign = (tokens(tokeniser, part, length) for part in texts)
    train, val, test = zip(parts, labels, strict=True)
    size = tokeniser.get_vocab_size()
    return Task(name, train, val, test, foreign, lambda: gpt2(size, length, classes=classes), recipe)


TASKS: dict[str, Callable[..., Task]] = {
    "fashion_mnist": fashion_mnist, "cifar10": cifar10, "sst2": sst2, "agnews": agnews,
}  # fmt: skip


def task(name: str, seed: int) -> Task:
    """Reads one of `TASKS`, split by a seed."""
    return TASKS[name](seed)


def trim(x: Tensor) -> Tensor:
    """Cuts the padding that all texts of a batch share; images stay as they are."""
    if x.is_floating_point():
        return x
    return x[:, : int((x != PADDING).sum(1).max())]


def trained(found: Task, seed: int) -> nn.Module:
    """Returns the trained network of a task, or the one that was kept; gradients are cut to norm 1.

    Cost: two to five minutes of one core each.
    """
    with seeded(seed):
        model = found.build()
    recipe, count = found.recipe, len(found.train[0])
    steps = max(1, round(recipe.epochs * count / recipe.batch))
    rising = max(1, steps // 10)
    optimiser = torch.optim.AdamW(model.parameters(), recipe.rate, weight_decay=recipe.decay)

    def make() -> None:
        with seeded(seed):
            train(
                model, found.train, islice(epochs(count, recipe.batch), steps), optimiser, clip=1.0,
                factor=lambda i: min((i + 1) / rising, (steps - i) / max(1, steps - rising)),
                forward=lambda x: model(trim(x)).logits,
            )  # fmt: skip

    return kept(model, f"transformer_{found.name}_{seed}", make)


def epochs(count: int, size: int) -> Iterator[Tensor]:
    """Yields rows without end, every one once an epoch; a batch may begin in one epoch and end in the next."""
    rows = torch.empty(0, dtype=torch.long)
    while True:
        while len(rows) < size:
            rows = torch.cat([rows, torch.randperm(count)])
        yield rows[:size]
        rows = rows[size:]
