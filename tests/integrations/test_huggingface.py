"""Models of transformers: what a Trainer trained, and the log probabilities of tokens against dense algebra."""

from __future__ import annotations

import math
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests.refused import refused

pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForSequenceClassification

from lapwing.integrations.huggingface import (
    NextTokens,
    fit_trainer,
    preferences,
    reward_difference,
    rewards,
    score_tokens,
)

CONFIG = GPT2Config(vocab_size=7, n_embd=4, n_layer=1, n_head=1, n_positions=9, bos_token_id=0, eos_token_id=0)


def last_logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs).logits[:, -1]


@pytest.fixture
def language() -> tuple[lw.Posterior, Tensor]:
    model, texts = GPT2LMHeadModel(CONFIG).double().eval().requires_grad_(False), torch.randint(7, (12, 5))
    model.transformer.h[0].attn.requires_grad_(True)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.4)
    batches = [({"input_ids": part[:, :-1]}, part[:, -1]) for part in texts.split([7, 5])]
    return lw.fit(model, batches, lw.Full(), forward=last_logits, prior_precision=2.0), texts


def gradient(value: Tensor, model: nn.Module) -> Tensor:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.cat([part.flatten() for part in torch.autograd.grad(value, weights, retain_graph=True)])


def curvature(logits: Tensor, model: nn.Module) -> Tensor:
    """`Jᵀ (diag(p) - p pᵀ) J` of the logits (C,) of one sample."""
    jacobian, p = torch.stack([gradient(logit, model) for logit in logits]), logits.detach().softmax(0)
    return jacobian.T @ (p.diag() - torch.outer(p, p)) @ jacobian


def test_scores_are_those_of_dense_algebra(language) -> None:
    posterior, texts = language
    model = posterior.model
    precision = 2.0 * torch.eye(posterior.tangent.size, dtype=torch.float64)
    for text in texts:
        precision += curvature(last_logits(model, {"input_ids": text[None, :-1]})[0], model)
    ids = torch.randint(7, (3, 6))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, :3], labels[1, 5], mask[0, 0] = -100, -100, 0
    scores = score_tokens(posterior, {"input_ids": ids, "attention_mask": mask, "labels": labels})
    log_probs = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
    for text in range(3):
        chosen = [log_probs[text, place - 1, ids[text, place]] * (labels[text, place] >= 0) for place in (3, 4, 5)]
        jacobian = torch.stack([gradient(value, model) for value in chosen])
        covariance = jacobian @ torch.linalg.inv(precision) @ jacobian.T
        assert torch.allclose(scores.log_probs[text], torch.stack(chosen).detach())
        assert torch.allclose(scores.covariance[text], covariance)
        assert torch.allclose(scores.std[text], covariance.diagonal().sqrt())
        assert torch.allclose(scores.log_prob_std[text], covariance.sum().sqrt())
    assert scores.log_probs[1, 2] == scores.std[1, 2] == 0
    assert torch.allclose(scores.log_prob, scores.log_probs.sum(1))


def test_scores_refuse(language) -> None:
    posterior, texts = language
    refused(lambda: score_tokens(posterior, {"input_ids": texts}), "input_ids and labels")
    none = torch.full_like(texts, -100)
    refused(lambda: score_tokens(posterior, {"input_ids": texts, "labels": none}), "mark no token")
    with torch.no_grad():
        posterior.model.transformer.wpe.weight.mul_(2)
    refused(lambda: score_tokens(posterior, {"input_ids": texts, "labels": texts}), "Fit again")


LLAMA = LlamaConfig(
    vocab_size=9, hidden_size=4, intermediate_size=6, num_hidden_layers=1, num_attention_heads=1, num_labels=1,
    num_key_value_heads=1, max_position_embeddings=9, pad_token_id=0,
)  # fmt: skip


def answers(count: int, length: int) -> dict[str, Tensor]:
    """Answers of several lengths, padded."""
    mask = (torch.arange(length) < torch.randint(2, length + 1, (count, 1))).long()
    return {"input_ids": torch.randint(1, 9, (count, length)) * mask, "attention_mask": mask}


def keyed(chosen: dict[str, Tensor], rejected: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{k}_chosen": v for k, v in chosen.items()} | {f"{k}_rejected": v for k, v in rejected.items()}


@pytest.fixture
def reward_model() -> LlamaForSequenceClassification:
    model = LlamaForSequenceClassification(LLAMA).double().eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.5)
    return model


def test_rewards_are_those_of_dense_algebra(reward_model, reloaded: Any) -> None:
    """Pairs of different lengths, and the answers to one prompt by the Jacobian of the reward of each of them."""
    pairs = [(answers(count, 6), answers(count, 4)) for count in (5, 4)]
    arguments = preferences([keyed(*pair) for pair in pairs]) | {"method": lw.Full(), "prior_precision": 2.0}
    fitted = lw.fit(reward_model, **arguments)
    precision = 2.0 * torch.eye(fitted.tangent.size, dtype=torch.float64)
    for pair in pairs:
        chosen, rejected = (reward_model(**side).logits[:, 0] for side in pair)
        for difference in chosen - rejected:
            p, slope = difference.detach().sigmoid(), gradient(difference, reward_model)
            precision += p * (1 - p) * torch.outer(slope, slope)
    prompt = answers(5, 6)
    r = reward_model(**prompt).logits[:, 0]
    jacobian = torch.stack([gradient(value, reward_model) for value in r])
    for reference, base in ((None, torch.full((5,), 0.2)), (3, torch.eye(5)[3])):
        centre = torch.eye(5).double() - base
        found, exact = rewards(fitted, prompt, reference), centre @ jacobian
        exact = exact @ torch.linalg.inv(precision) @ exact.T
        assert torch.allclose(found.mean, centre @ r.detach())
        assert torch.allclose(found.covariance, exact)
        assert torch.allclose(found.std, exact.diagonal().clamp_min(0).sqrt(), atol=1e-7)
    assert found.mean[3] == found.std[3] == 0
    again = rewards(reloaded(fitted, reward_model, forward=reward_difference), prompt, 3)
    assert torch.equal(again.covariance, found.covariance)
    cooler = lw.fit(reward_model, **arguments | {"likelihood": lw.Bernoulli(logit_temperature=2)})
    assert torch.allclose(rewards(cooler, prompt, 3).mean, found.mean / 2)


def test_both_forms_of_trls_batches_are_one(reward_model) -> None:
    chosen, rejected, margin = answers(6, 5), answers(6, 5), torch.zeros(6)
    halves = {key: torch.cat([chosen[key], rejected[key]]) for key in chosen} | {"margin": margin}
    suffixed = keyed(chosen, rejected) | {"return_loss": True, "margin": margin}
    options = {"params": lw.last_layer, "prior_precision": 1.0}
    one, other = (lw.fit(reward_model, **preferences([batch]), **options) for batch in (halves, suffixed))
    assert one.samples == other.samples == 6
    assert torch.equal(rewards(one, chosen).covariance, rewards(other, chosen).covariance)
    wins = (reward_model(**chosen).logits > reward_model(**rejected).logits)[:, 0]
    right = one.predict(preferences([halves])["loader"]).log_prob(next(iter(preferences([halves])["loader"]))[1])
    assert torch.equal(right > math.log(0.5), wins)


def test_held_out_pairs_teach_no_constant(reward_model, caplog) -> None:
    """With labels that are all 1, lapwing would warn that a constant for each logit gains, and learn it."""
    with torch.no_grad():
        reward_model.score.weight.mul_(0.1)
    train, held_out = ([keyed(answers(60, 6), answers(60, 6))] for _ in range(2))
    arguments = preferences(train, validation=held_out)
    assert 0.25 < float(torch.cat([labels.double() for _, labels in arguments["validation"]]).mean()) < 0.75
    lw.fit(reward_model, **arguments, params=lw.last_layer)
    assert "constant for each logit" not in caplog.text


def test_rewards_refuse(reward_model, language) -> None:
    chosen = answers(3, 4)
    fitted = lw.fit(reward_model, **preferences([keyed(chosen, answers(3, 4))]), prior_precision=1.0)
    refused(lambda: rewards(language[0], chosen), "posterior of pairs")
    refused(lambda: rewards(fitted, chosen, reference=3), "3 answers")
    for batch in ({"chosen_input_ids": chosen["input_ids"]}, (chosen, chosen)):
        refused(lambda batch=batch: lw.fit(reward_model, **preferences([batch])), "trl's batches")


class Network(nn.Module):
    """A classifier in the form of transformers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.drop(values))
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


def rows(count: int) -> list[dict[str, Tensor]]:
    return [{"values": torch.randn(4), "labels": torch.tensor(i % 3)} for i in range(count)]


def trainer_of(model: nn.Module, train: list[dict[str, Tensor]], folder: Path, **options: Any) -> Any:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(str(folder), report_to="none", use_cpu=True, disable_tqdm=True, **options)
    return Trainer(model, arguments, train_dataset=train)


@pytest.mark.filterwarnings("ignore")
def test_fit_trainer_is_lw_fit_on_the_training_data(tmp_path: Path) -> None:
    model, train, held_out = Network(), rows(21), rows(12)
    trainer = trainer_of(model, train, tmp_path, max_steps=2, per_device_eval_batch_size=8)
    trainer.train()
    assert model.drop.training
    model.head.eval()
    posterior = fit_trainer(trainer, lw.KFAC(), validation=held_out)
    assert model.drop.training
    assert not model.head.training
    x, held = torch.stack([row["values"] for row in train]), torch.stack([row["values"] for row in held_out])
    model.eval()
    plain = lw.fit(
        model, [({"values": x}, torch.arange(21) % 3)], lw.KFAC(), validation=[({"values": held}, torch.arange(12) % 3)]
    )
    assert posterior.samples == 21
    inputs = {"values": x}
    assert torch.allclose(posterior.predict(inputs).probs, plain.predict(inputs).probs, atol=1e-5)

    model.train()
    refused(lambda: fit_trainer(trainer, "kfac"), "method")
    assert model.drop.training
    trainer.train_dataset = None
    refused(lambda: fit_trainer(trainer), "no train_dataset")


def test_fit_trainer_refuses_a_model() -> None:
    refused(lambda: fit_trainer(nn.Linear(2, 2)), "needs a transformers.Trainer")


@pytest.mark.filterwarnings("ignore")
def test_adapters_over_a_base_in_eight_bits() -> None:
    """The frozen layer's backward pass is bitsandbytes' own."""
    pytest.importorskip("bitsandbytes")
    import bitsandbytes
    from peft import LoraConfig, get_peft_model

    base = nn.Sequential(bitsandbytes.nn.Linear8bitLt(16, 16, has_fp16_weights=False), nn.Linear(16, 3))
    base[0].load_state_dict(nn.Linear(16, 16).state_dict())
    model = get_peft_model(base.to("cpu"), LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)).eval()
    x, y = torch.randn(12, 16), torch.arange(12) % 3
    posterior = lw.fit(model, [(x, y)], lw.Full(), prior_precision=1.0)
    assert base[0].base_layer.weight.dtype == torch.int8
    assert posterior.tangent.size == 64
    outputs = model(x)
    precision = torch.eye(64) + sum(curvature(logits, model) for logits in outputs)
    jacobian = torch.stack([torch.stack([gradient(logit, model) for logit in logits]) for logits in outputs])
    covariance = jacobian @ torch.linalg.inv(precision) @ jacobian.mT
    assert torch.allclose(posterior.latent(x).covariance, covariance, rtol=1e-3, atol=1e-4)


def test_next_tokens_moves_labels() -> None:
    batch = {"input_ids": torch.tensor([[4, 5, 6], [7, 8, 0]]), "labels": torch.tensor([[4, 5, 6], [7, 8, -100]])}
    loader = NextTokens([batch, batch])
    for _ in range(2):  # passes over the data
        first, second = loader
        assert first["labels"].tolist() == second["labels"].tolist() == [[5, 6, -100], [8, -100, -100]]
        assert first["input_ids"] is batch["input_ids"]
    assert batch["labels"][0, 0] == 4
    for wrong in ({"input_ids": batch["input_ids"]}, {"labels": torch.zeros(3)}, torch.zeros(3, 4)):
        refused(partial(list, NextTokens([wrong])), "NextTokens needs dicts")


def test_labels_that_are_the_tokens_themselves_are_warned_of(caplog) -> None:
    model, texts = GPT2LMHeadModel(CONFIG).eval(), torch.randint(7, (12, 5))
    labels = texts.clone()
    labels[:, :2] = -100
    for own in (texts, labels):
        lw.fit(deepcopy(model), [{"input_ids": texts, "labels": own}], prior_precision=1.0)
        assert "lapwing.integrations.huggingface.NextTokens" in caplog.text
        caplog.clear()
    shifted = [*NextTokens([{"input_ids": texts, "labels": labels}])]
    held_out = [{"input_ids": texts.flip(0), "labels": texts.flip(0)}]
    lw.fit(deepcopy(model), shifted, validation=held_out, prior_precision=1.0)
    assert "lapwing.integrations.huggingface.NextTokens" in caplog.text
    caplog.clear()
    others = labels.clone()
    others[3, 3] = (others[3, 3] + 1) % 7
    for batch in ({"input_ids": texts, "labels": others}, *NextTokens([{"input_ids": texts, "labels": labels}])):
        lw.fit(model, [batch], prior_precision=1.0)
    own = {"input_ids": texts, "labels": texts}
    lw.fit(model, [own], forward=lambda model, inputs: model(**inputs).logits, prior_precision=1.0)
    assert "NextTokens" not in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_adapters_are_the_default_where_the_head_is_frozen() -> None:
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model, texts = get_peft_model(GPT2LMHeadModel(CONFIG), lora).eval(), torch.randint(7, (12, 5))
    posterior = lw.fit(model, NextTokens([{"input_ids": texts, "labels": texts}]))
    assert all("lora_" in name for name in posterior.tangent.parameters)
    assert posterior.method.name == "KFAC"


@pytest.mark.filterwarnings("ignore")
def test_a_causal_language_model_is_fitted_at_every_token(tmp_path: Path) -> None:
    """In float64 against dense algebra: each token that another one follows is a sample of the last layer."""
    config = GPT2Config(**{**CONFIG.to_dict(), "tie_word_embeddings": False})
    model, texts = GPT2LMHeadModel(config).double(), torch.randint(7, (5, 6))
    labels = texts.clone()
    labels[2, 3:] = -100
    rows = [{"input_ids": text, "labels": label} for text, label in zip(texts, labels, strict=True)]
    trainer = trainer_of(model, rows, tmp_path, per_device_eval_batch_size=3)
    posterior = fit_trainer(trainer, lw.Full(), params=lw.last_layer, prior_precision=2.0)
    model.eval()
    with torch.no_grad():
        features = model.transformer(texts).last_hidden_state
    precision = 2.0 * torch.eye(28, dtype=torch.float64)
    for text in range(5):
        for place in range(5):
            if labels[text, place + 1] >= 0:
                a = features[text, place]
                p = model.lm_head(a).detach().softmax(0)
                precision += torch.kron(p.diag() - torch.outer(p, p), torch.outer(a, a))
    root = torch.kron(torch.eye(7, dtype=torch.float64), features[0, 1])
    latent = posterior.latent({"input_ids": texts})
    assert latent.mean.shape == (5, 6, 7)
    variance = (root.reshape(7, 28) @ torch.linalg.inv(precision) @ root.reshape(7, 28).T).diagonal()
    assert torch.allclose(latent.variance[0, 1], variance)
