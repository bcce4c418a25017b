"""LoRA on a small language model: few lines of another kind of text, and what error bars over the adapters do for them.

A GPT-2 of 0.4 million weights learns the characters of news (AG News), 20 000 windows of 64. LoRA then adapts it to
sentences of film reviews (SST-2), of which it sees 150 windows. Scores are those of the next character in reviews that
nothing else has seen. One seed.

    python -m benchmarks.lora         # trains, scores, and writes the table in docs/integrations/huggingface.md
    python -m benchmarks.lora --page  # writes the table alone

Needs `pip install transformers peft` beside lapwing, and the data sets that LAPWING_DATA names.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from benchmarks.measure import RESULTS
from benchmarks.positions_data import CHARACTERS, WINDOW
from benchmarks.tables import run_tasks
from lapwing.integrations.huggingface import NextTokens
from papers.common.data import arrays

SEED = 0
RESULT = RESULTS / "lora.json"
PAGE = Path(__file__).parents[1] / "docs" / "integrations" / "huggingface.md"

Texts = list[dict[str, Tensor]]


def windows(texts: Any, numbers: dict[str, int], count: int, size: int = 10) -> Texts:
    """Returns batches of windows of the texts in lower case; a character of no number is 0."""
    stream = torch.tensor([numbers.get(character, 0) for character in "\n".join(texts).lower()][: count * WINDOW])
    return [{"input_ids": part, "labels": part} for part in stream.reshape(-1, WINDOW).split(size)]


def descend(model: nn.Module, data: Texts, epochs: int, rate: float) -> nn.Module:
    """Trains what requires gradients by the model's own loss; returns the network in eval mode."""
    optimiser = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs * len(data))
    for _ in range(epochs):
        for i in torch.randperm(len(data)).tolist():
            optimiser.zero_grad()
            model(**data[i]).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
    return model.eval()


def writer(data: Texts, epochs: int) -> Any:
    """Returns a language model of characters, trained on these texts."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=CHARACTERS, n_embd=128, n_layer=2, n_head=4, n_positions=WINDOW, bos_token_id=0, eos_token_id=0
    )
    return descend(GPT2LMHeadModel(config).eval(), data, epochs, 3e-3)  # without dropout


def adapted(model: nn.Module, data: Texts, epochs: int) -> nn.Module:
    """Returns the language model with trained adapters."""
    torch.manual_seed(SEED)
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    return descend(get_peft_model(model, lora).eval(), data, epochs, 5e-3)


class Tempered(nn.Module):
    """A language model whose logits are divided by the number of least NLL on held-out texts."""

    def __init__(self, model: nn.Module, data: Texts) -> None:
        super().__init__()
        self.model = model
        with torch.no_grad():
            logits = torch.cat([model(**batch).logits[:, :-1] for batch in data]).flatten(0, 1)
        y = torch.cat([batch["labels"][:, 1:] for batch in data]).flatten()
        candidates = torch.logspace(-0.5, 1.0, 46).tolist()
        self.temperature = min(candidates, key=lambda each: float(F.cross_entropy(logits / each, y)))

    def forward(self, **inputs: Tensor) -> Tensor:
        """Returns logits."""
        return self.model(**inputs).logits / self.temperature


def run(share: float = 1.0) -> dict[str, dict[str, float]]:
    """Trains, adapts and scores."""
    news, films = arrays("text_agnews"), arrays("text_sst2")
    frequent = Counter("".join(news["text_train"][:2000]).lower()).most_common(CHARACTERS - 1)
    numbers = {character: 1 + i for i, (character, _) in enumerate(frequent)}
    base = writer(windows(news["text_train"], numbers, int(20000 * share), 20), 1)
    data = windows(films["text_train"], numbers, 150)
    held_out = windows(films["text_val"], numbers, 20)
    test = windows(films["text_test"], numbers, int(40 * share))
    model = adapted(copy.deepcopy(base), data, math.ceil(20 * share))
    candidates: dict[str, Any] = {
        "before LoRA": base,
        "network alone": model,
        "temperature scaling": Tempered(model, held_out),
        "`lw.fit(..., lw.KFAC())`": lw.fit(model, NextTokens(data), lw.KFAC(), seed=SEED),
        "`lw.fit(..., lw.KFAC(), validation=)`": lw.fit(
            model, NextTokens(data), lw.KFAC(), validation=NextTokens(held_out), seed=SEED
        ),
    }
    rows = lw.compare(candidates, NextTokens(test), repeats=1).rows
    return {name: {key: rows[name][key] for key in ("accuracy", "NLL", "ECE")} for name in candidates}


if __name__ == "__main__":
    run_tasks(__doc__, {"lora": run}, RESULT, PAGE, SEED)
