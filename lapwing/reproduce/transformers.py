"""Small transformers of the streamlined experiments (Li et al. 2025, section 4.2), trained here: a ViT and two GPT-2s.

The paper fine-tunes pre-trained networks of 86 to 124 million weights; these have 0.14 and 0.74 million, from scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import LapwingError
from .data import arrays, images

Network = TypeVar("Network", bound=nn.Module)
Part = tuple[Tensor, Tensor]

PROMPT = "Answer whether sentence 2 is equivalent to sentence 1. Sentence 1: {}. Sentence 2: {}. Answer:"
"""Table 11, MRPC."""

PADDING, UNKNOWN = 0, 1


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: AdamW, cross-entropy, the rate rising for a tenth of the steps, then falling to zero.

    Attributes:
        epochs: over the training part.
        rate: the largest learning rate.
        batch: size.
        decay: weight decay.
    """

    epochs: float
    rate: float = 1e-3
    batch: int = 128
    decay: float = 0.05


@dataclass(frozen=True)
class Task:
    """Data of one task, and the network for it.

    Attributes:
        name: one of `TASKS`.
        train: inputs and labels (N,); images (N, 1, 28, 28), or tokens (N, T), padded behind.
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


def vit(size: int = 28, patch: int = 7, width: int = 64, layers: int = 4, classes: int = 10) -> nn.Module:
    """Returns a Hugging Face ViT for grey images, with random weights.

    Args:
        size: of the images, in pixels a side.
        patch: likewise, of a patch.
        width: of the tokens.
        layers: blocks of attention and an MLP of twice the width.
        classes: outputs.
    """
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=size, patch_size=patch, num_channels=1, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=4, intermediate_size=2 * width,
    )  # fmt: skip
    config.num_labels = classes
    return ViTForImageClassification(config)


def gpt2(words: int, length: int, width: int = 96, layers: int = 4, classes: int = 2) -> nn.Module:
    """Returns a Hugging Face GPT-2 that classifies by the last token that is not padding, with random weights.

    Args:
        words: of the vocabulary.
        length: most tokens of a text.
        width: of the tokens.
        layers: blocks of attention and an MLP of four times the width.
        classes: outputs.
    """
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(
        vocab_size=words, n_positions=length, n_embd=width, n_layer=layers, n_head=4,
        pad_token_id=PADDING, bos_token_id=UNKNOWN, eos_token_id=UNKNOWN,
    )  # fmt: skip
    config.num_labels = classes
    return GPT2ForSequenceClassification(config)


def vocabulary(texts: Sequence[str], words: int) -> Any:
    """Returns a byte-pair tokeniser of lower-case words, trained on the texts.

    Args:
        texts: of the training part.
        words: most tokens; 0 is padding, 1 unknown.
    """
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


def fashion_mnist(seed: int, folder: Path | None = None) -> Task:
    """Reads Fashion-MNIST with MNIST as foreign images: 5 000 train, 2 000 others validate.

    After 55 000 the ViT is calibrated as it is, and validation asks for no spread in its weights at all.
    """
    data = images("fashion_mnist", folder)
    order = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(seed))
    train, val = order[2000:7000], order[:2000]
    seen, held_out = ((data.x_train[rows], data.y_train[rows]) for rows in (train, val))
    foreign = images("mnist", folder).x_test
    return Task("fashion_mnist", seen, held_out, (data.x_test, data.y_test), foreign, vit, Recipe(40))


def mrpc(seed: int, folder: Path | None = None) -> Task:
    """Reads MRPC in the prompt of Table 11; foreign are pairs of SST-2 sentences in that prompt; 400 pairs validate."""
    found, other = arrays("text_mrpc", folder), arrays("text_sst2", folder)
    prompts = {
        part: [PROMPT.format(*pair) for pair in zip(found[f"text_{part}"], found[f"text2_{part}"], strict=True)]
        for part in ("train", "test")
    }
    foreign = [PROMPT.format(*pair) for pair in zip(other["text_test"][::2], other["text_test"][1::2], strict=False)]
    y_train, y_test = (torch.as_tensor(found[f"y_{part}"]).long() for part in ("train", "test"))
    order = torch.randperm(len(y_train), generator=torch.Generator().manual_seed(seed))
    train, val = order[400:], order[:400]
    texts = [prompts["train"][i] for i in train.tolist()], [prompts["train"][i] for i in val.tolist()]
    labels = y_train[train], y_train[val], y_test
    return _texts("mrpc", (*texts, prompts["test"], foreign), labels, 128, Recipe(6, 5e-4, 32))


def sst2(seed: int, folder: Path | None = None) -> Task:
    """Reads SST-2 in its own three parts; foreign are AG News texts. The seed is that of the training alone."""
    del seed
    found, other = arrays("text_sst2", folder), arrays("text_agnews", folder)
    texts = (*(list(found[f"text_{part}"]) for part in ("train", "val", "test")), list(other["text_test"]))
    labels = tuple(torch.as_tensor(found[f"y_{part}"]).long() for part in ("train", "val", "test"))
    return _texts("sst2", texts, labels, 64, Recipe(4, 1e-3, 64))


def _texts(
    name: str, texts: Sequence[Sequence[str]], labels: Sequence[Tensor], length: int, recipe: Recipe, words: int = 3000
) -> Task:
    tokeniser = vocabulary(texts[0], words)
    *parts, foreign = (tokens(tokeniser, part, length) for part in texts)
    train, val, test = zip(parts, labels, strict=True)
    size = tokeniser.get_vocab_size()
    return Task(name, train, val, test, foreign, lambda: gpt2(size, length), recipe)


TASKS: dict[str, Callable[..., Task]] = {"fashion_mnist": fashion_mnist, "mrpc": mrpc, "sst2": sst2}


def task(name: str, seed: int, folder: Path | None = None) -> Task:
    """Reads a task.

    Args:
        name: one of `TASKS`.
        seed: of the split.
        folder: of the data; the one that LAPWING_DATA names when None.

    Raises:
        LapwingError: for another name, or if a file is missing.
    """
    if name not in TASKS:
        raise LapwingError(
            f"Asked for task({name!r}); accepted are {', '.join(map(repr, TASKS))}: write task({next(iter(TASKS))!r}, "
            "seed=0)."
        )
    return TASKS[name](seed, folder)


def trim(x: Tensor) -> Tensor:
    """Cuts the padding that all texts of a batch share; images stay as they are."""
    if x.is_floating_point():
        return x
    return x[:, : int((x != PADDING).sum(1).max())]


def train(model: nn.Module, data: Part, recipe: Recipe, seed: int) -> nn.Module:
    """Trains a network in place, gradients cut to norm 1, and returns it in eval mode.

    Args:
        model: takes a batch of inputs, returns an object with `logits`.
        data: inputs and labels.
        recipe: of the training.
        seed: of batches and dropout.
    """
    x, y = data
    steps = max(1, round(recipe.epochs * len(x) / recipe.batch))
    optimiser = torch.optim.AdamW(model.parameters(), recipe.rate, weight_decay=recipe.decay)
    rising = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda i: min((i + 1) / rising, (steps - i) / max(1, steps - rising))
    )
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        rows: Tensor = torch.empty(0, dtype=torch.long)
        for _ in range(steps):
            while len(rows) < recipe.batch:
                rows = torch.cat([rows, torch.randperm(len(x))])
            chosen, rows = rows[: recipe.batch], rows[recipe.batch :]
            optimiser.zero_grad()
            F.cross_entropy(model(trim(x[chosen])).logits, y[chosen]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
    return model.eval()


def trained(found: Task, seed: int, cache: Path | None = None) -> nn.Module:
    """Returns the trained network of a task, from the cache where it is there.

    Args:
        found: the task.
        seed: of weights and batches.
        cache: folder that keeps networks, in float32; None keeps none.

    Cost: two to five minutes of one core each.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = found.build()
    return kept(model, f"transformer_{found.name}_{seed}", cache, lambda: train(model, found.train, found.recipe, seed))


def kept(model: Network, name: str, cache: Path | None, make: Callable[[], Any]) -> Network:
    """Returns a network with its weights from the cache, else with those that `make` gives it, which are kept.

    Args:
        model: the network.
        name: of the file, without suffix.
        cache: folder; None keeps nothing.
        make: trains the network in place.
    """
    path = None if cache is None else cache / f"{name}.safetensors"
    if path is not None and path.is_file():
        model.load_state_dict(load_file(path))
        return model.eval()
    make()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in model.state_dict().items()}, path)
    return model.eval()
