"""Best of n answers by a reward model, with doubt and without: is the chosen answer better?

Answers are 12 of 40 words. Their gold reward is the sum of the words' values over √12, less 0.3 for each word that
comes again. A Llama of width 32 learns from 300 pairs by Bradley and Terry, stopped by 150 others. The words of the
pairs are as frequent as `rank^-1.2`; the answers to choose from have the same frequencies, or even ones. The choice is
the largest mean, or the largest `mean - σ²/(2β)`, relative to the mean of the n answers. Eight prompts of 256 answers,
cut into groups of n; five seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.integrations.huggingface import preferences, rewards
from lapwing.prediction.quantities import Quantity
from papers.common.scores import averaged
from papers.common.tables import grid
from papers.common.training import of_best_epoch, seeded, train

PACKAGES = ("transformers",)
WORDS, LENGTH, PAIRS, HELD_OUT, PROMPTS, ANSWERS = 40, 12, 300, 150, 8, 256
NUMBERS, BETAS, SEEDS = (1, 16, 64, 256), (1.0, 0.1), (0, 1, 2, 3, 4)
FITS: dict[str, tuple[bool, dict[str, Any]]] = {
    "all weights": (False, {}),
    "last layer, held-out pairs": (True, {"params": lw.last_layer}),
}


def drawn(frequencies: Tensor, count: int) -> Tensor:
    """Returns answers (count, 12) of words 1 to 40; 0 is padding."""
    return 1 + torch.multinomial(frequencies.expand(count, -1), LENGTH, replacement=True)


def gold(answers: Tensor, values: Tensor) -> Tensor:
    """Returns the true rewards (n,)."""
    again = (F.one_hot(answers, WORDS + 1).sum(1) - 1).clamp_min(0).sum(1)
    return values[answers].sum(1) / LENGTH**0.5 - 0.3 * again


def pairs(frequencies: Tensor, values: Tensor, count: int) -> list[dict[str, Tensor]]:
    """Returns batches of pairs; the better one is preferred with probability `σ(2 · difference)`."""
    first, second = drawn(frequencies, count), drawn(frequencies, count)
    wins = torch.rand(count) < torch.sigmoid(2 * (gold(first, values) - gold(second, values)))
    chosen, rejected = torch.where(wins[:, None], first, second), torch.where(wins[:, None], second, first)
    batches = zip(chosen.split(50), rejected.split(50), strict=True)
    return [{"input_ids_chosen": one, "input_ids_rejected": other} for one, other in batches]


def trained(data: list[dict[str, Tensor]], held_out: list[dict[str, Tensor]]) -> nn.Module:
    """Returns a reward model as it was after the epoch with the least loss on held-out pairs."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=WORDS + 1, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=LENGTH, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    model: Any = LlamaForSequenceClassification(config)
    optimiser = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.01)

    def loss(batch: Any) -> Tensor:
        difference = model(batch["input_ids_chosen"]).logits - model(batch["input_ids_rejected"]).logits
        return -F.logsigmoid(difference).mean()

    def epoch() -> None:
        train(model, (data, data), range(len(data)), optimiser, lambda value, _: value, forward=loss)

    return of_best_epoch(model, epoch, lambda: torch.stack([loss(batch) for batch in held_out]).mean(), 40)


def of_chosen(found: Quantity, true: Tensor, number: int, beta: float | None) -> float:
    """Returns the mean gold reward of the answers that are chosen from groups of n."""
    picked = []
    for rows in torch.arange(len(true)).split(number):
        centre = torch.eye(number).double() - 1 / number
        covariance = centre @ found.covariance[rows][:, rows] @ centre
        doubt = 0.0 if beta is None else covariance.diagonal() / (2 * beta)  # -β log E[exp(-r/β)] = mean - σ²/(2β)
        picked.append(true[rows][(found.mean[rows] - doubt).argmax()])
    return float(torch.stack(picked).double().mean())


def run(seed: int) -> dict[str, Any]:
    """Returns the gold rewards of chosen answers, and with β their differences from a choice by the mean."""
    with seeded(seed):
        values, order = torch.randn(WORDS + 1), torch.randperm(WORDS)
        frequencies = torch.arange(1, WORDS + 1).float().pow(-1.2)[order]
        data, held_out = pairs(frequencies, values, PAIRS), pairs(frequencies, values, HELD_OUT)
        model = trained(data, held_out)
        kinds = {"same words": frequencies, "even words": torch.ones(WORDS)}
        prompts = {kind: [drawn(each, ANSWERS) for _ in range(PROMPTS)] for kind, each in kinds.items()}
    row: dict[str, Any] = {}
    for name, (held, options) in FITS.items():
        posterior = lw.fit(model, **preferences(data, validation=held_out if held else None), **options)
        for kind, every in prompts.items():
            parts = [(rewards(posterior, {"input_ids": answers}), gold(answers, values)) for answers in every]
            for number in NUMBERS:
                mean, *doubting = (
                    sum(of_chosen(*part, number, beta) for part in parts) / PROMPTS for beta in (None, *BETAS)
                )
                best = torch.stack([group.max() for _, true in parts for group in true.split(number)])
                row[f"{kind}, {number}"] = {"mean": mean, "best": float(best.double().mean())}
                for beta, value in zip(BETAS, doubting, strict=True):
                    row[f"{kind}, {number}, {name}, {beta}"] = value - mean
    print(seed, row, flush=True)
    return row


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the runs."""
    return {"choices": partial(lambda: averaged([run(seed) for seed in SEEDS]))}


def tables(found: dict[str, Any]) -> dict[str, str]:
    """Returns the gold rewards of chosen answers."""
    rows, lines = found["choices"], []
    for kind in ("same words", "even words"):
        for key, heading in (("mean", "by the mean"), ("best", "best possible")):
            cells = [f"{rows[f'{kind}, {number}'][key]['mean']:.2f}" for number in NUMBERS]
            lines.append((kind, [heading, *cells]))
        for name in FITS:
            for beta in BETAS:
                gains = [rows[f"{kind}, {number}, {name}, {beta}"] for number in NUMBERS]
                cells = [f"{gain['mean']:+.2f} ± {gain['standard_error']:.2f}" for gain in gains]
                lines.append((kind, [f"gain by doubt, {name}, β = {beta:g}", *cells]))
    return {"choices": grid(["choice", *(f"n = {number}" for number in NUMBERS)], lines, corner="answers")}
