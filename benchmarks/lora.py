"""LoRA on a small language model: few lines of another kind of text, and what error bars over the adapters do for them.

A GPT-2 of 0.4 million weights learns the characters of news (AG News), 20 000 windows of 64. LoRA then adapts it to
sentences of film reviews (SST-2), of which it sees 150 windows. Scores are those of the next character in reviews that
nothing else has seen. One seed.

The table is in docs/integrations/huggingface.md. Needs `pip install transformers peft` beside lapwing, and the data
sets that LAPWING_DATA names.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from benchmarks.positions_data import CHARACTERS, WINDOW
from lapwing.integrations.huggingface import NextTokens, lora_cores
from papers.common.data import arrays
from papers.common.tables import of_scores
from papers.common.training import cosine, shuffled, train

SEED = 0

Texts = list[dict[str, Tensor]]


def windows(texts: Any, numbers: dict[str, int], count: int, size: int = 10) -> Texts:
    """Returns batches of windows of the texts in lower case; a character of no number is 0."""
    stream = torch.tensor([numbers.get(character, 0) for character in "\n".join(texts).lower()][: count * WINDOW])
    return [{"input_ids": part, "labels": part} for part in stream.reshape(-1, WINDOW).split(size)]


def descend(model: nn.Module, data: Texts, epochs: int, rate: float) -> nn.Module:
    """Trains what requires gradients by the model's own loss; returns the network in eval mode."""
    optimiser = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], rate)
    return train(
        model, (data, data), shuffled(len(data), 1, epochs=epochs), optimiser, lambda value, _: value,
        cosine(epochs * len(data)), lambda texts: model(**texts).loss, clip=1.0,
    )  # fmt: skip


def writer(data: Texts, epochs: int) -> Any:
    """Returns a language model of characters, trained on these texts."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=CHARACTERS,
        n_embd=128,
        n_layer=2,
        n_head=4,
        n_positions=WINDOW,
        bos_token_id=0,
        eos_token_id=0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return descend(GPT2LMHeadModel(config), data, epochs, 3e-3)


class TrainingFree(nn.Module):
    """Training-free Bayesianization (arXiv 2412.05723): the mean prediction of draws of the low-rank factors.

    With `B = U diag(d) Vᵀ` an adapter is `U diag(d) (Vᵀ A)`, and (Vᵀ A)_ij has the standard deviation β / d_i. β is the
    largest that raises the NLL of held-out texts by at most 0.3 %, found by bisection.
    """

    def __init__(self, model: nn.Module, data: Texts, draws: int = 10) -> None:
        super().__init__()
        self.model, self.draws, self.beta = copy.deepcopy(model), draws, 0.0
        self.spreads: list[tuple[Tensor, Tensor]] = []
        for module in self.model.modules():
            for key in getattr(module, "lora_B", {}):
                up, down = module.lora_B[key].weight.data, module.lora_A[key].weight.data  # type: ignore[index, union-attr]
                left, sizes, right = torch.linalg.svd(up, full_matrices=False)
                up.copy_(left * sizes), down.copy_(right @ down)
                self.spreads.append((down, 1 / sizes[:, None]))
        most, low, high = 1.003 * self.nll(data), 1e-5, 10.0
        for _ in range(16):
            self.beta = math.sqrt(low * high)
            low, high = (self.beta, high) if self.nll(data) <= most else (low, self.beta)
        self.beta = low

    @torch.no_grad()
    def nll(self, data: Texts) -> float:
        """Returns the mean NLL of the next characters."""
        logs = torch.cat([self(**{**batch})[:, :-1] for batch in data]).flatten(0, 1)
        return float(F.nll_loss(logs, torch.cat([batch["labels"][:, 1:] for batch in data]).flatten()))

    def forward(self, **inputs: Tensor) -> Tensor:
        """Returns log probabilities."""
        if not self.beta:
            return self.model(**inputs).logits.log_softmax(-1)
        generator, logs = torch.Generator().manual_seed(SEED), []
        means = [down.clone() for down, _ in self.spreads]
        for _ in range(self.draws):
            for (down, spread), mean in zip(self.spreads, means, strict=True):
                down.copy_(mean + self.beta * spread * torch.randn(mean.shape, generator=generator))
            logs.append(self.model(**inputs).logits.log_softmax(-1))
        for (down, _), mean in zip(self.spreads, means, strict=True):
            down.copy_(mean)
        return torch.stack(logs).logsumexp(0) - math.log(self.draws)


def scored(share: float) -> dict[str, dict[str, float]]:
    """Trains, adapts and scores."""
    from peft import LoraConfig, get_peft_model

    news, films = arrays("text_agnews"), arrays("text_sst2")
    frequent = Counter("".join(news["text_train"][:2000]).lower()).most_common(CHARACTERS - 1)
    numbers = {character: 1 + i for i, (character, _) in enumerate(frequent)}
    base = writer(windows(news["text_train"], numbers, int(20000 * share), 20), 1)
    data = windows(films["text_train"], numbers, 150)
    held_out = windows(films["text_val"], numbers, 20)
    test = windows(films["text_test"], numbers, int(40 * share))
    torch.manual_seed(SEED)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    model = descend(get_peft_model(copy.deepcopy(base), lora), data, math.ceil(20 * share), 5e-3)
    candidates: dict[str, Any] = {
        "before LoRA": base,
        "network alone": model,
        "temperature scaling": lw.fit(model, NextTokens(held_out), lw.TemperatureScaling()),
        "training-free draws of the factors": TrainingFree(model, held_out),
        "`lw.fit(..., lw.KFAC())`": lw.fit(model, NextTokens(data), lw.KFAC(), seed=SEED),
        "`lw.fit(..., lw.KFAC(), validation=)`": lw.fit(
            model, NextTokens(data), lw.KFAC(), validation=NextTokens(held_out), seed=SEED
        ),
        "`lw.fit(lora_cores(...), lw.Full())`": lw.fit(lora_cores(model), NextTokens(data), lw.Full(), seed=SEED),
    }
    rows = lw.compare(candidates, NextTokens(test), repeats=1).rows
    return {name: {key: rows[name][key] for key in ("accuracy", "NLL", "ECE")} for name in candidates}


def parts(share: float = 1.0) -> dict[str, Callable[[], Any]]:
    """Returns the experiment, with a share of the data."""
    return {"lora": lambda: scored(share)}


tables = of_scores
