"""LoRA on a small language model: few labelled texts, and what error bars over the adapters do for them.

A GPT-2 of 0.6 million weights reads 6 000 texts of AG News without their labels. LoRA then adapts it to the four topics
by 200 labelled texts. Three draws of these texts share one language model; scores are means over them, on the test
texts. AUROC says how well the entropy tells sentences of film reviews (SST-2) from news.

    python -m benchmarks.lora         # trains, scores, and writes the table in docs/integrations/huggingface.md
    python -m benchmarks.lora --page  # writes the table alone

Needs `pip install transformers peft` beside lapwing, and the data sets that LAPWING_DATA names.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks.measure import RESULTS, write
from benchmarks.positions_data import saved, with_tables
from papers.common.data import arrays

SEEDS = (0, 1, 2)
WORDS, LONGEST = 4000, 40
LABELLED, HELD_OUT, TEST = 200, 100, 2000
RESULT = RESULTS / "lora.json"
PAGE = Path(__file__).parents[1] / "docs" / "integrations" / "huggingface.md"

Batch = dict[str, Tensor]


def words(text: str) -> list[str]:
    """Returns words and marks in lower case."""
    return re.findall(r"[a-z0-9']+|[^\sa-z0-9']", text.lower())[:LONGEST]


class Vocabulary:
    """The most frequent words: 0 is padding, 1 the end of a text, and 2 any other word."""

    def __init__(self, texts: list[str]) -> None:
        frequent = Counter(word for text in texts for word in words(text)).most_common(WORDS - 3)
        self.numbers = {word: 3 + i for i, (word, _) in enumerate(frequent)}

    def __call__(self, texts: list[str]) -> Batch:
        """Returns a batch, padded on the right."""
        rows = [torch.tensor([*(self.numbers.get(word, 2) for word in words(text)), 1]) for text in texts]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    def labelled(self, texts: list[str], labels: Any, size: int) -> list[Batch]:
        """Returns batches with labels."""
        y = torch.as_tensor(labels).long()
        return [{**self(texts[at : at + size]), "labels": y[at : at + size]} for at in range(0, len(texts), size)]


def descend(model: nn.Module, batches: list[Batch], epochs: int, rate: float) -> nn.Module:
    """Trains what requires gradients by the model's own loss; returns the network in eval mode."""
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs * len(batches))
    model.train()
    for _ in range(epochs):
        for i in torch.randperm(len(batches)).tolist():
            optimiser.zero_grad()
            model(**batches[i]).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
    return model.eval()


def configuration(**more: Any) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=WORDS, n_embd=96, n_layer=2, n_head=4, n_positions=LONGEST + 1, pad_token_id=0, bos_token_id=1,
        eos_token_id=1, **more,
    )  # fmt: skip


def language_model(vocabulary: Vocabulary, texts: list[str], epochs: int) -> Any:
    """Returns a network that was trained to write these texts."""
    from transformers import GPT2LMHeadModel

    ordered = sorted(texts, key=lambda text: len(words(text)))  # texts of similar length make a batch
    batches = [vocabulary(ordered[at : at + 32]) for at in range(0, len(ordered), 32)]
    for batch in batches:
        batch["labels"] = batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100)
    return descend(GPT2LMHeadModel(configuration()), batches, epochs, 2e-3)


def adapted(writer: Any, data: list[Batch], epochs: int) -> nn.Module:
    """Returns a classifier of four topics around a copy of the language model, adapted by LoRA."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2ForSequenceClassification

    model = GPT2ForSequenceClassification(configuration(num_labels=4))
    model.transformer.load_state_dict(writer.transformer.state_dict())
    lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    return descend(get_peft_model(model, lora), data, epochs, 3e-3)


def scored(model: nn.Module, data: list[Batch], held_out: list[Batch], test: list[Batch], foreign: list[Batch]) -> Any:
    """Returns the scores of each candidate."""
    candidates = {
        "network alone": model,
        "temperature scaling": lw.fit(model, held_out, lw.TemperatureScaling()),
        "`lw.fit(model, loader)`, the last layer": lw.fit(model, data),
        "`lw.fit(model, loader, lw.KFAC())`, all of LoRA": lw.fit(model, data, lw.KFAC()),
        "the same with `validation=`": lw.fit(model, data, lw.KFAC(), validation=held_out),
    }
    rows = lw.compare(candidates, test, foreign, repeats=1).rows
    return {name: {key: row[key] for key in ("accuracy", "NLL", "ECE", "AUROC")} for name, row in rows.items()}


def run(share: float = 1.0, seeds: tuple[int, ...] = SEEDS) -> dict[str, dict[str, float]]:
    """Trains the language model, adapts it once a seed, and returns mean scores."""
    news, films = arrays("text_agnews"), arrays("text_sst2")
    texts, labels = list(news["text_train"]), torch.as_tensor(news["y_train"]).long()
    count = int(6000 * share)
    torch.manual_seed(SEEDS[0])
    vocabulary = Vocabulary(texts[:count])
    writer = language_model(vocabulary, texts[:count], 2)
    test = vocabulary.labelled(list(news["text_test"][: int(TEST * share)]), news["y_test"][: int(TEST * share)], 50)
    reviews = list(films["text_test"][: int(500 * share)])
    foreign = [vocabulary(reviews[at : at + 50]) for at in range(0, len(reviews), 50)]
    every = []
    for seed in seeds:
        torch.manual_seed(seed)
        order = torch.randperm(count)
        parts = []
        for rows in (order[:LABELLED], order[LABELLED : LABELLED + HELD_OUT]):
            parts.append(vocabulary.labelled([texts[i] for i in rows], labels[rows], 20))
        model = adapted(writer, parts[0], 15)
        every.append(scored(model, *parts, test, foreign))
        print(seed, every[-1], flush=True)
    return {
        name: {key: sum(rows[name][key] for rows in every) / len(every) for key in row}
        for name, row in every[0].items()
    }


def main() -> None:
    """Runs everything, and writes results and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the table of the page alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.page:
        write("lora", {"lora": run()}, SEEDS[0])
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), saved(RESULT)), encoding="utf-8")


if __name__ == "__main__":
    main()
