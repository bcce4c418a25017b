"""Outputs with positions on real data: scenes of digits, noisy images, texts without capitals, and characters to come.

One seed, small networks trained for about a minute on one thread. Every row of a task is around the same network.

The tables are in benchmarks/README.md. Needs the data sets that LAPWING_DATA names, and matplotlib for the pictures.

- *segmentation*: MNIST digits on textures, 11 classes a pixel. AUROC says how well the entropy of a pixel tells
  garments of Fashion-MNIST, pasted into the scenes, from all other pixels.
- *denoising*: Fashion-MNIST with noise of standard deviation 0.4; the network returns the clean image.
- *tagging*: words of AG News in lower case and without punctuation; four classes a word say whether it had a capital,
  and whether punctuation followed. Batches have texts of similar length, and padding.
- *language*: the next of 48 characters of AG News, at each of 64.
"""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.evaluation import compare
from lapwing.evaluation.comparison import Candidate
from lapwing.evaluation.metrics import auroc
from papers.common.data import Batches, arrays, batched, images
from papers.common.drawing import panels, save
from papers.common.tables import SCORES, of_scores
from papers.common.training import adam, cosine

SEED = 0
SCENE, SIDE, THRESHOLD = 64, 28, 0.4
NOISE = 0.4
WORDS, LONGEST = 2000, 40
CHARACTERS, WINDOW = 48, 64


# ---- training and scoring


def loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Returns the mean NLL of labels (B, T) or (B, H, W), -100 left out, or the mean squared error."""
    if y.is_floating_point():
        return F.mse_loss(outputs, y)
    return F.cross_entropy(outputs.movedim(-1, 1) if outputs.ndim == 3 else outputs, y)


def train(model: nn.Module, data: Batches, epochs: int, rate: float) -> nn.Module:
    """Trains with Adam and a cosine schedule; returns the network in eval mode."""
    x, y = zip(*data, strict=True)
    return adam(model, (x, y), epochs, rate, 1, loss=loss, factor=cosine(epochs * len(data)), clip=1.0)


def classifiers(model: nn.Module, data: Batches, held_out: Batches) -> dict[str, Candidate]:
    """Returns the rows of every classification: the network, its temperature, and two fits of one line."""
    return {
        "network alone": model,
        "temperature scaling": lw.fit(model, held_out, lw.TemperatureScaling()),
        "`lw.fit(model, loader)`": lw.fit(model, data, seed=SEED),
        "`lw.fit(..., validation=)`": lw.fit(model, data, validation=held_out, seed=SEED),
    }


def scores(candidates: Mapping[str, Candidate], test: Batches) -> dict[str, dict[str, float]]:
    """Returns the metrics of each candidate over all positions that count."""
    rows = compare(candidates, test, repeats=1).rows
    names = {"network": "network alone", **{name: name for name in candidates}}
    return {
        new: {key: rows[name][key] for key in SCORES if key in rows[name]}
        for name, new in names.items()
        if name in rows
    }


# ---- segmentation


def texture(source: torch.Generator) -> Tensor:
    """Returns a grating under smooth noise, (64, 64)."""
    turn, pitch, phase, strength = torch.rand(4, generator=source).tolist()
    down, across = torch.meshgrid(torch.arange(SCENE), torch.arange(SCENE), indexing="ij")
    along = math.cos(math.pi * turn) * across + math.sin(math.pi * turn) * down
    grating = torch.sin((0.3 + 0.7 * pitch) * along + 2 * math.pi * phase)
    noise = F.avg_pool2d(torch.randn(1, 1, SCENE + 4, SCENE + 4, generator=source), 5, 1)[0, 0]
    return 0.2 + 0.1 * strength * grating + 0.25 * noise


def scenes(x: Tensor, y: Tensor, count: int, seed: int, foreign: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Composes images (N, 1, 64, 64) and labels (N, 64, 64): 0 is the background, 1 to 10 are digits.

    Each has two to four digits, the later ones above. With foreign images one of these comes last, with the label -100.
    """
    source = torch.Generator().manual_seed(seed)

    def below(number: int) -> int:
        return int(torch.randint(number, (), generator=source))

    pictures, labels = [], torch.zeros(count, SCENE, SCENE, dtype=torch.long)
    for label in labels:
        picture = texture(source)
        objects = []
        for _ in range(2 + below(3)):
            which = below(len(x))
            objects.append((x[which, 0], int(y[which]) + 1))
        if foreign is not None:
            objects.append((foreign[below(len(foreign)), 0], -100))
        for shape, name in objects:
            place = tuple(slice(at, at + SIDE) for at in (below(SCENE - SIDE), below(SCENE - SIDE)))
            bright = 0.6 + 0.4 * float(torch.rand((), generator=source))
            picture[place] = picture[place] * (1 - shape) + bright * shape
            label[place][shape > THRESHOLD] = name
        pictures.append(picture + 0.05 * torch.randn(SCENE, SCENE, generator=source))
    return torch.stack(pictures)[:, None], labels


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Returns two convolutions with batch norm."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class Segmenter(nn.Module):
    """An encoder and a decoder with three shortcuts, and a 1x1 head."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(1, 8), block(8, 24), block(24, 48), block(48, 64)])
        self.up = nn.ModuleList([block(112, 32), block(56, 16), block(24, 12)])
        self.head = nn.Conv2d(12, 11, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, 11, H, W)."""
        sizes = []
        for layers in self.down:
            x = layers(F.max_pool2d(x, 2) if sizes else x)
            sizes.append(x)
        for layers, shortcut in zip(self.up, sizes[-2::-1], strict=True):
            x = layers(torch.cat([shortcut, F.interpolate(x, scale_factor=2)], 1))
        return self.head(x)


@torch.no_grad()
def entropy(candidate: Any, x: Tensor) -> Tensor:
    """Returns the entropy of every pixel (B, H, W)."""
    if isinstance(candidate, nn.Module):
        log_probs = candidate(x).log_softmax(1)
        return -(log_probs.exp() * log_probs).sum(1)
    posterior, way = candidate if isinstance(candidate, tuple) else (candidate, None)
    return posterior.predict(x, via=way).entropy()


def segmentation(share: float) -> dict[str, dict[str, float]]:
    """Runs the digits on textures."""
    digits, garments = images("mnist"), images("fashion_mnist")
    seen, unseen = slice(0, 50_000), slice(50_000, 60_000)
    data = batched(*scenes(digits.x_train[seen], digits.y_train[seen], int(600 * share), 1), 10)
    held_out = batched(*scenes(digits.x_train[unseen], digits.y_train[unseen], int(40 * share), 2), 10)
    test = batched(*scenes(digits.x_test, digits.y_test, int(20 * share), 3), 10)
    strange, labels = scenes(digits.x_test, digits.y_test, int(12 * share), 4, garments.x_test)
    model = train(Segmenter(), data, math.ceil(10 * share), 5e-3)
    candidates = classifiers(model, data, held_out)
    every = lw.fit(model, data[:10], lw.KFAC(), data_size=10 * len(data), seed=SEED)
    candidates["`lw.KFAC()`, all weights"] = (every, lw.Linearized(draws=64))
    rows = scores(candidates, test)
    for name, candidate in candidates.items():
        maps = torch.cat([entropy(candidate, x) for x in strange.split(10)])
        rows[name]["AUROC"] = float(auroc(maps[labels >= 0], maps[labels < 0]))
    prediction = candidates["`lw.fit(..., validation=)`"].predict(strange[:3])  # type: ignore[union-attr]
    if share == 1:
        draw_maps("segmentation", {
            "scene": strange[:3, 0], "labels (grey: a garment)": labels[:3], "predicted classes": prediction.classes,
            "entropy": prediction.entropy(), "mutual information": prediction.mutual_information(),
        })  # fmt: skip
    return rows


# ---- denoising


def denoising(share: float) -> dict[str, dict[str, float]]:
    """Runs the noisy garments, padded to 32 x 32."""
    garments = images("fashion_mnist")

    def noisy(clean: Tensor, seed: int, size: int) -> Batches:
        clean = F.pad(clean, (2, 2, 2, 2))
        return batched(
            clean + NOISE * torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed)), clean, size
        )

    first, second = int(1000 * share), int(100 * share)
    data = noisy(garments.x_train[:first], 1, 25)
    held_out, test = noisy(garments.x_train[-second:], 2, 25), noisy(garments.x_test[:second], 3, 25)
    layers: list[nn.Module] = []
    for inputs in (1, 24, 24):
        layers += [nn.Conv2d(inputs, 24, 3, padding=1), nn.ReLU()]
    model = train(nn.Sequential(*layers, nn.Conv2d(24, 1, 3, padding=1)), data, math.ceil(6 * share), 4e-3)
    candidates: dict[str, Candidate] = {
        "`lw.fit(model, loader)`": lw.fit(model, data, seed=SEED),
        "`lw.fit(..., validation=)`": lw.fit(model, data, validation=held_out, seed=SEED),
    }
    every = lw.fit(model, data, lw.KFAC(), seed=SEED)
    candidates["`lw.KFAC()`, all weights"] = (every, lw.Linearized(draws=64))
    rows = scores(candidates, test)
    if share == 1:
        x, y = (part[:3] for part in test[0])
        by_last = candidates["`lw.fit(model, loader)`"].latent(x)  # type: ignore[union-attr]
        by_all = every.latent(x, via=lw.Linearized(draws=64))
        draw_maps("denoising", {
            "noisy": x[:, 0], "network": by_all.mean[:, 0], "absolute error": (by_all.mean - y).abs()[:, 0],
            "standard deviation,\nlast layer": by_last.std[:, 0], "standard deviation,\nall weights": by_all.std[:, 0],
        })  # fmt: skip
    return rows


# ---- tagging


def words(text: str) -> tuple[list[str], list[int]]:
    """Returns the words in lower case, and their classes: 1 for a capital, 2 for punctuation behind, 3 for both."""
    names, classes = [], []
    for piece in text.split():
        word = piece.strip(string.punctuation)
        if word:
            names.append(word.lower())
            classes.append(int(word[0].isupper()) + 2 * int(piece[-1] in string.punctuation))
    return names[:LONGEST], classes[:LONGEST]


class Tagger(nn.Module):
    """Convolutions over embedded words, which see two words to either side."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS + 2, 48, padding_idx=0)
        self.first, self.second = nn.Conv1d(48, 64, 3, padding=1), nn.Conv1d(64, 64, 3, padding=1)
        self.head = nn.Linear(64, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits (B, T, 4)."""
        hidden = torch.relu(self.first(self.embedding(tokens).mT))
        return self.head(torch.relu(self.second(hidden)).mT)


def tagging(share: float) -> dict[str, dict[str, float]]:
    """Runs the capitals and the punctuation of news."""
    news = arrays("text_agnews")
    count = int(3000 * share)
    texts = [words(text) for text in news["text_train"][:count]]
    known = Counter(name for names, _ in texts for name in names).most_common(WORDS)
    numbers = {name: 2 + i for i, (name, _) in enumerate(known)}

    def tagged(texts: list[tuple[list[str], list[int]]]) -> Batches:
        """Returns batches of similar length, words (B, T) padded with 0 and classes padded with -100."""
        ordered = sorted((text for text in texts if text[0]), key=lambda text: len(text[0]))
        batches = []
        for at in range(0, len(ordered), 50):
            part = ordered[at : at + 50]
            tokens = [torch.tensor([numbers.get(name, 1) for name in names]) for names, _ in part]
            classes = [torch.tensor(labels) for _, labels in part]
            pad = nn.utils.rnn.pad_sequence
            batches.append((pad(tokens, True), pad(classes, True, padding_value=-100)))
        return batches

    data = tagged(texts)
    held_out = tagged([words(text) for text in news["text_train"][-(count // 6) :]])
    test = tagged([words(text) for text in news["text_test"][: count // 6]])
    model = train(Tagger(), data, math.ceil(10 * share), 3e-3)
    candidates = classifiers(model, data, held_out)
    candidates["`lw.KFAC()`, all weights"] = lw.fit(model, data, lw.KFAC(), seed=SEED)
    return scores(candidates, test)


# ---- language


class Writer(nn.Module):
    """A recurrent network over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.memory = nn.Embedding(CHARACTERS, 32), nn.GRU(32, 128, batch_first=True)
        self.head = nn.Linear(128, CHARACTERS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits (B, T, 48) of the characters that follow."""
        return self.head(self.memory(self.embedding(tokens))[0])


def language(share: float) -> dict[str, dict[str, float]]:
    """Runs the characters of news."""
    news = arrays("text_agnews")
    frequent = Counter("".join(news["text_train"][:2000]).lower()).most_common(CHARACTERS - 1)
    numbers = {name: 1 + i for i, (name, _) in enumerate(frequent)}

    def windows(texts: Any, count: int) -> Batches:
        stream = torch.tensor([numbers.get(name, 0) for name in "\n".join(texts).lower()][: count * WINDOW + 1])
        return batched(stream[:-1].reshape(-1, WINDOW), stream[1:].reshape(-1, WINDOW), 50)

    data = windows(news["text_train"][:4000], int(1500 * share))
    held_out = windows(news["text_train"][-1000:], int(200 * share))
    test = windows(news["text_test"], int(300 * share))
    model = train(Writer(), data, math.ceil(40 * share), 6e-3)
    return scores(classifiers(model, data, held_out), test)


# ---- pictures


def draw_maps(name: str, maps: Mapping[str, Tensor]) -> None:
    """Draws maps (3, H, W), a column each; standard deviations and measures of doubt from 0."""
    figure, axes = panels(3, len(maps), (1.9 * len(maps), 5.6))
    for column, (title, values) in zip(axes.T, maps.items(), strict=True):
        column[0].set_title(title, fontsize=9)
        for axis, value in zip(column, values, strict=True):
            axis.set_axis_off()
            if value.is_floating_point():
                plain = title in ("scene", "noisy", "network")
                limits = (0.0, 1.0) if plain else (0.0, float(values.max()))
                axis.imshow(value, cmap="gray" if plain else "magma", vmin=limits[0], vmax=limits[1])
            else:
                axis.set_facecolor("0.7")
                axis.imshow(torch.full_like(value, 1), cmap="gray", vmin=0, vmax=1.5)
                axis.imshow(value.masked_fill(value < 0, 0), cmap="tab20", vmin=0, vmax=19, alpha=(value >= 0).float())
    save(figure, __file__, f"positions_{name}")


def parts(share: float = 1.0) -> dict[str, Callable[[], Any]]:
    """Returns the tasks, with a share of the data."""
    tasks = {"segmentation": segmentation, "denoising": denoising, "tagging": tagging, "language": language}
    return {name: partial(task, share) for name, task in tasks.items()}


tables = of_scores
