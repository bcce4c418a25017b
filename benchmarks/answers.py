"""Yes-or-no answers about texts by `lw.Bernoulli`: which topics a text has, and whether a film review is positive.

One seed, a network of convolutions over words that is trained here for a minute or less.

The tables are in benchmarks/README.md. Needs the data sets that LAPWING_DATA names.

- *topics*: documents of one to three news texts (AG News), the first 12 words of each. Four answers: whether a text of
  World, Sports, Business, Sci/Tech is among them. Foreign documents are made of film reviews in the same way.
- *sentiment*: one answer, whether a sentence of a film review (SST-2) is positive. Foreign texts are news.

Scores are on test documents. ECE is the mean over labels of that of each label; AUROC says how well the entropy tells
foreign documents.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.evaluation.metrics import auroc, expected_calibration_error
from papers.common.data import Batches, arrays, batched
from papers.common.tables import of_scores
from papers.common.training import shuffled, train

SEED = 0
WORDS, PIECE, LONGEST = 3000, 12, 40


def words(text: str) -> list[str]:
    """Returns words and marks in lower case."""
    return re.findall(r"[a-z0-9']+|[^\sa-z0-9']", text.lower())[:LONGEST]


class Reader(nn.Module):
    """Embedded words, a convolution over three of them, the largest value over the text, and a layer."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 48, padding_idx=0)
        self.convolution, self.head = nn.Conv1d(48, 96, 3, padding=1), nn.Linear(96, answers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits (B, C)."""
        return self.head(torch.relu(self.convolution(self.embedding(tokens).mT)).amax(-1))


def trained(data: Batches, epochs: int, rate: float = 2e-3) -> nn.Module:
    """Trains by the binary cross-entropy; returns the network in eval mode."""
    model = Reader(data[0][1].shape[1])
    x, y = zip(*((tokens, answers.float()) for tokens, answers in data), strict=True)
    optimiser = torch.optim.AdamW(model.parameters(), rate)
    return train(model, (x, y), shuffled(len(data), 1, epochs=epochs), optimiser, F.binary_cross_entropy_with_logits)


class Numbers:
    """The most frequent words as numbers: 0 is padding, and 1 any other word."""

    def __init__(self, texts: list[list[str]]) -> None:
        frequent = Counter(word for text in texts for word in text).most_common(WORDS - 2)
        self._numbers = {word: 2 + i for i, (word, _) in enumerate(frequent)}

    def __call__(self, texts: list[list[str]]) -> Tensor:
        """Returns tokens (B, T), padded."""
        rows = [torch.tensor([self._numbers.get(word, 1) for word in text[:LONGEST]]) for text in texts]
        return F.pad(nn.utils.rnn.pad_sequence(rows, batch_first=True), (0, LONGEST))[:, :LONGEST]


def composed(texts: list[str], labels: Any, count: int, seed: int) -> tuple[list[list[str]], Tensor]:
    """Returns documents of one to three texts, and which of four labels are among them (count, 4), bool."""
    source = torch.Generator().manual_seed(seed)
    documents, answers = [], torch.zeros(count, 4, dtype=torch.bool)
    for row in answers:
        parts = torch.randint(len(texts), (int(torch.randint(1, 4, (), generator=source)),), generator=source).tolist()
        documents.append([word for i in parts for word in words(texts[i])[:PIECE]])
        row[[int(labels[i]) for i in parts]] = True
    return documents, answers


def scored(model: nn.Module, data: Batches, held_out: Batches, test: Batches, foreign: Tensor) -> Any:
    """Returns the scores of each candidate, and the ECE of each label."""
    candidates = {
        "network alone": lw.fit(model, data, prior_precision=1e12),  # no spread of the weights
        "temperature scaling": lw.fit(model, held_out, lw.TemperatureScaling()),
        "`lw.fit(model, loader)`": lw.fit(model, data, seed=SEED),
        "`lw.fit(..., validation=)`": lw.fit(model, data, validation=held_out, seed=SEED),
        "`lw.KFAC()`, all weights": lw.fit(model, data, lw.KFAC(), seed=SEED),
        "`lw.KFAC()`, all weights, `validation=`": lw.fit(model, data, lw.KFAC(), validation=held_out, seed=SEED),
    }
    y = torch.cat([part for _, part in test])
    rows: dict[str, Any] = {}
    for name, posterior in candidates.items():
        parts = [posterior.predict(x) for x, _ in test]
        probs = torch.cat([part.probs for part in parts]).double()
        calibration = [
            float(expected_calibration_error(torch.stack([1 - p, p], 1), label.long()))
            for p, label in zip(probs.T, y.T, strict=True)
        ]
        strange = torch.cat([posterior.predict(x).entropy() for x in foreign.split(100)])
        rows[name] = {
            "accuracy": float(((probs > 0.5) == y).double().mean()),
            "NLL": -float(torch.where(y, probs, 1 - probs).log().mean()),
            "ECE": sum(calibration) / len(calibration),
            "AUROC": float(auroc(torch.cat([part.entropy() for part in parts]), strange)),
            "ECE of each label": calibration,
            "logit temperature": posterior.logit_temperature,
        }
    return rows


def topics(share: float) -> dict[str, Any]:
    """Runs the topics of composed documents."""
    news, films = arrays("text_agnews"), arrays("text_sst2")
    texts, labels = list(news["text_train"]), news["y_train"]
    cut = len(texts) * 8 // 10  # no text is in documents of two parts
    parts = [
        composed(texts[:cut], labels[:cut], int(8000 * share), 1),
        composed(texts[cut:], labels[cut:], int(1000 * share), 2),
        composed(list(news["text_test"]), news["y_test"], int(2000 * share), 3),
    ]
    strange = composed(list(films["text_test"]), films["y_test"], int(2000 * share), 4)[0]
    numbers = Numbers(parts[0][0])
    data, held_out, test = (batched(numbers(documents), answers, 50) for documents, answers in parts)
    return scored(trained(data, 8), data, held_out, test, numbers(strange))


def sentiment(share: float) -> dict[str, Any]:
    """Runs the film reviews."""
    films, news = arrays("text_sst2"), arrays("text_agnews")
    parts = []
    for part in ("train", "val", "test"):
        count = int(len(films[f"y_{part}"]) * share)
        answers = torch.as_tensor(films[f"y_{part}"][:count])[:, None].bool()
        parts.append(([words(text) for text in films[f"text_{part}"][:count]], answers))
    numbers = Numbers(parts[0][0])
    data, held_out, test = (batched(numbers(documents), answers, 50) for documents, answers in parts)
    strange = [words(text) for text in news["text_test"][: int(2000 * share)]]
    return scored(trained(data, 5), data, held_out, test, numbers(strange))


def parts(share: float = 1.0) -> dict[str, Callable[[], Any]]:
    """Returns the tasks, with a share of the data."""
    return {"topics": lambda: topics(share), "sentiment": lambda: sentiment(share)}


tables = of_scores
