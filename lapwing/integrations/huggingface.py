"""Hugging Face transformers: posteriors of the model of a `Trainer`, and the uncertainty of text and of rewards.

`lw.fit(model, loader)` accepts models, batches and padding of transformers without this file.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw

from ..data.inputs import Inputs
from ..errors import LapwingError, extra, shown
from ..linalg import doubled
from ..network.stamp import PreservedState
from ..prediction.quantities import Quantity
from ..tangent import Tangent

__all__ = [
    "NextTokens", "TokenScores", "fit_trainer", "lora_cores", "preferences", "reward_difference", "rewards",
    "score_tokens",
]  # fmt: skip

IGNORED = -100
"""Label of tokens that do not count."""


def fit_trainer(
    trainer: Any, method: lw.Method | None = None, *, validation: Any = None, **options: Any
) -> lw.Posterior:
    """Fits a posterior around the model of a `transformers.Trainer`, on its training data.

    The samples come in order through the trainer's collator, in batches of its evaluation size, and for a causal
    language model as `NextTokens`. The model is in eval mode only during the fit: call `model.eval()` before
    predictions. It costs as much as `lw.fit`.

    Args:
        trainer: a `transformers.Trainer` with a `train_dataset`, after `train()`.
        method: method of `lw.fit`.
        validation: held-out data: a data set that the trainer accepts, such as `trainer.eval_dataset`.
        options: options of `lw.fit`, such as `params=lw.last_layer`.

    Raises:
        LapwingError: if the argument is not a trainer, or has no training data, and for the reasons of `lw.fit`.
    """
    if not isinstance(trainer, extra("transformers").Trainer):
        raise LapwingError(
            f"fit_trainer needs a transformers.Trainer, not {shown(trainer)}. For a loader write lw.fit(model, loader)."
        )
    if trainer.train_dataset is None:
        raise LapwingError("The trainer has no train_dataset. Pass Trainer(model, ..., train_dataset=dataset).")
    model = trainer.model
    name = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__  # without adapters
    causal = name.endswith(("ForCausalLM", "LMHeadModel"))

    def loader(dataset: Any) -> Any:
        batches = trainer.get_test_dataloader(dataset)
        return NextTokens(batches) if causal else batches

    if validation is not None:
        options["validation"] = loader(validation)
    with PreservedState(model):
        model.eval()
        return lw.fit(model, loader(trainer.train_dataset), method, **options)


@dataclass(frozen=True)
class NextTokens:
    """A loader of texts whose labels are shifted by one: a causal language model predicts the next token.

    `y_t = labels_(t+1)`, and -100, which does not count, at the end of a text. The model shifts the labels only for its
    loss, and lapwing reads its outputs (B, T, V).

    Args:
        loader: an iterable of dicts with `labels` (B, T), for example from
            `DataCollatorForLanguageModeling(tokenizer, mlm=False)`; other batches raise an error.
    """

    loader: Iterable[Mapping[str, Any]]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.loader:
            labels = batch.get("labels") if isinstance(batch, Mapping) else None
            if not isinstance(labels, Tensor) or labels.ndim != 2:
                raise LapwingError(
                    "NextTokens needs dicts with labels of shape (batch, tokens). Set labels to the input_ids, and to "
                    "-100 at padding."
                )
            yield {**batch, "labels": torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)}


@dataclass(frozen=True, eq=False)
class TokenScores:
    """The log probabilities (B, S) of tokens by the trained network, and their covariance (B, S, S) by the weights.

    Both are 0 for tokens that a text does not have.
    """

    log_probs: Tensor
    covariance: Tensor

    @property
    def std(self) -> Tensor:
        """Standard deviations of the tokens' log probabilities, (B, S)."""
        return self.covariance.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()

    @property
    def log_prob(self) -> Tensor:
        """Log probability of each text, (B,)."""
        return self.log_probs.sum(1)

    @property
    def log_prob_std(self) -> Tensor:
        """Standard deviation of each text's log probability, (B,)."""
        return self.covariance.sum((1, 2)).clamp_min(0).sqrt()


def score_tokens(posterior: lw.Posterior, batch: Mapping[str, Tensor]) -> TokenScores:
    """Returns the log probabilities of S labelled tokens under a causal language model, and their covariance.

    `log p(y_t | y_<t, θ) ≈ log p(y_t | y_<t, θ̂) + g_tᵀ(θ - θ̂)`, jointly Gaussian over the tokens of a text. A large
    variance marks text whose probability rests on little data, whatever its entropy.

    Args:
        posterior: a posterior of the language model, or of adapters within it.
        batch: inputs of the model, with `input_ids` (B, T) and `labels` (B, T): the token itself at positions that are
            scored, and -100 at the prompt and at padding. The first token cannot be scored.

    Raises:
        LapwingError: if the batch lacks these entries, or has no token to score.

    Cost: six forward passes, and S backward passes from the first treated layer on, for any size of the vocabulary.
    """
    if not isinstance(batch, Mapping) or not {"input_ids", "labels"} <= batch.keys():
        raise LapwingError("score_tokens needs a dict with input_ids and labels. Write {**tokens, 'labels': labels}.")
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    labels = batch["labels"].to(posterior.tangent.device)
    scored = labels[:, 1:] != IGNORED
    columns = scored.any(0).nonzero()[:, 0]
    if not len(columns):
        raise LapwingError(
            f"The labels, of shape {tuple(labels.shape)}, mark no token to score. Set them to the input_ids at tokens "
            "to score, and to -100 at the prompt and at padding."
        )
    inputs["targets"] = labels[:, 1:][:, columns]

    def forward(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        inputs = dict(inputs)
        targets = inputs.pop("targets")
        log_probs = model(**inputs).logits[:, columns].log_softmax(-1)
        return log_probs.gather(-1, targets.clamp_min(0)[..., None])[..., 0] * (targets != IGNORED)

    names, memory = set(posterior.tangent.parameters), posterior.tangent.memory
    tangent = Tangent.survey(posterior.model, inputs, lambda name, _: name in names, forward, memory)
    if tangent.blocks != posterior.tangent.blocks or posterior.stamp.changed():
        raise LapwingError(
            "The treated weights differ from the weights of the fit, or the network uses them differently. Fit again, "
            "on batches of whole texts."
        )
    latent = lw.Linearized().latent(tangent, posterior.covariance, Inputs.of(inputs, tangent.device), False)
    return TokenScores(latent.mean.detach(), latent.covariance.detach())


def preferences(loader: Iterable[Mapping[str, Any]], validation: Any = None) -> dict[str, Any]:
    """Returns arguments of `lw.fit(model, **preferences(loader))` for a reward model r that learned from pairs.

    `P(chosen is preferred) = σ(r(chosen) - r(rejected))`, the model of Bradley and Terry. Half of the differences have
    the sign -1 and the label 0: from labels that are all equal, calibration would learn a constant.

    Args:
        loader: an iterable of trl's batches, which can be read several times: dicts with `input_ids` (2B, T), B chosen
            and then B rejected answers, or with `input_ids_chosen` and `input_ids_rejected` (B, T); and their masks.
        validation: held-out pairs in the same form, or None.
    """
    options = {} if validation is None else {"validation": _Pairs(validation)}
    return {"loader": _Pairs(loader), "likelihood": lw.Bernoulli(), "forward": reward_difference, **options}


@dataclass(frozen=True)
class _Pairs:
    """A loader of `({"chosen": inputs, "rejected": inputs, "signs": ±1}, signs > 0)`, made of trl's batches."""

    loader: Iterable[Mapping[str, Any]]

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for batch in self.loader:
            pairs: dict[str, dict[str, Tensor]] = {"chosen": {}, "rejected": {}}
            for key, value in batch.items() if isinstance(batch, Mapping) else ():
                name, _, answer = key.rpartition("_")
                if answer in pairs:
                    pairs[answer][name] = value
                elif key in ("input_ids", "attention_mask"):
                    pairs["chosen"][key], pairs["rejected"][key] = value.tensor_split(2)
            if not all("input_ids" in inputs for inputs in pairs.values()):
                raise LapwingError(
                    "preferences needs trl's batches: dicts with input_ids (2B, T), chosen answers before rejected "
                    "ones, or with input_ids_chosen and input_ids_rejected. Pass the loader of a trl.RewardTrainer."
                )
            signs = 1.0 - 2 * (pairs["chosen"]["input_ids"].sum(1, keepdim=True) % 2)  # the same at every reading
            yield {**pairs, "signs": signs}, signs > 0


def reward_difference(model: nn.Module, pairs: Mapping[str, Any]) -> Tensor:
    """Returns `±(r(chosen) - r(rejected))` (B, 1): the `forward=` of `preferences`, which `lw.load` needs, too."""
    return pairs["signs"] * (model(**pairs["chosen"]).logits - model(**pairs["rejected"]).logits)


def rewards(posterior: lw.Posterior, batch: Mapping[str, Tensor], reference: int | None = None) -> Quantity:
    """Returns the rewards `D r` (n,) of n answers to one prompt, in log odds, with the covariance `D J Σ Jᵀ Dᵀ`.

    Pairs say nothing about a constant. So `D = I - 1 e_kᵀ` compares with answer k, or `D = I - 1 1ᵀ/n` with the mean.

    Args:
        posterior: `lw.fit(model, **preferences(loader))`.
        batch: inputs of the model, with a row for each answer.
        reference: k; None compares with the mean.

    Raises:
        LapwingError: for a posterior of something else, or if the batch has no answer k.

    Cost: 2 n forward passes, and as many backward passes.
    """
    if posterior.tangent.call.forward is not reward_difference:
        raise LapwingError("rewards needs a posterior of pairs. Write lw.fit(model, **preferences(loader)).")
    count = len(batch["input_ids"])
    if reference is not None and not 0 <= reference < count:
        raise LapwingError(f"There are {count} answers, and reference={shown(reference)}. Pass a number from 0.")
    same = {key: value[reference or 0].expand_as(value) for key, value in batch.items()}
    pairs = {"chosen": dict(batch), "rejected": same, "signs": torch.ones_like(batch["input_ids"][:, :1])}
    likelihood: Any = posterior.likelihood
    latent = likelihood.tempered(posterior.latent(pairs, joint=True)).compact(covariances=True)
    one = torch.eye(count).to(latent.mean)
    centre = one - (one.mean(0) if reference is None else one[reference])
    return Quantity(centre @ latent.mean[:, 0], centre @ latent.covariance[:, 0, :, 0] @ centre.T)


def lora_cores(model: nn.Module) -> nn.Module:
    """Returns a copy of a network with LoRA in which each adapter is `ΔW = U R Vᵀ` with a trainable core R (r, r).

    U (O, r) and V (I, r) are orthonormal bases of the trained factors, and fixed. The outputs do not change.
    So a posterior of the cores has r² weights per adapter: `lw.fit(lora_cores(model), loader, lw.Full())` is
    exact for them. It leaves out changes of the bases themselves.

    Args:
        model: a network with trained linear adapters as in peft: modules with dicts `lora_A`, `lora_B` and `scaling`,
            or with two linear layers `lora_A` and `lora_B` and a number `scaling` (1 without it). The copy shares all
            other weights with it.

    Raises:
        LapwingError: if there are no such adapters, or if an adapter is merged, not linear, or DoRA.

    Source: arXiv 2605.07706.

    Example:
        >>> import torch, lapwing as lw
        >>> class Adapted(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.base = torch.nn.Linear(20, 3).requires_grad_(False)
        ...         self.lora_A, self.lora_B = torch.nn.Linear(20, 2, bias=False), torch.nn.Linear(2, 3, bias=False)
        ...     def forward(self, x):
        ...         return self.base(x) + self.lora_B(self.lora_A(x))
        >>> x, model = torch.randn(30, 20), Adapted().eval()
        >>> lw.fit(lora_cores(model), (x, torch.arange(30) % 3), lw.Full(), params=lw.matching("*core*")).tangent.size
        4
    """
    tensors = (*model.parameters(), *model.buffers())
    network, found = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}), False
    for name, module in list(network.named_modules()):
        down, up, scaling = (getattr(module, key, None) for key in ("lora_A", "lora_B", "scaling"))
        if isinstance(down, nn.ModuleDict) and isinstance(up, nn.ModuleDict):
            for key in down:
                down[key], up[key] = _with_core(name, module, down[key], up[key], (scaling or {}).get(key, 1.0))
                found = True
        elif isinstance(down, nn.Module) and isinstance(up, nn.Module):
            scale = float(scaling) if isinstance(scaling, Real) else 1.0  # a dict for AdaLoRA, which is refused
            module.lora_A, module.lora_B = _with_core(name, module, down, up, scale)
            found = True
    if not found:
        raise LapwingError(
            f"{type(model).__name__} has no modules with lora_A and lora_B. Pass the network of peft itself: "
            "lora_cores(get_peft_model(model, config)), after its training."
        )
    return network


def _with_core(
    name: str, module: nn.Module, down: nn.Module, up: nn.Module, scale: float
) -> tuple[nn.Module, nn.Module]:
    """Returns `x -> Vᵀ x`, and the core followed by U over the scale, which the adapter multiplies by."""
    other = getattr(module, "merged", False) or getattr(module, "lora_variant", None)
    if not isinstance(down, nn.Linear) or not isinstance(up, nn.Linear) or other:
        raise LapwingError(
            f"The adapter {name!r} is merged, not linear, or a variant such as DoRA, and lora_cores supports plain "
            "linear adapters. Write model.unmerge_adapter() first, or LoraConfig(use_dora=False) for linear layers."
        )
    left, inner = torch.linalg.qr(doubled(up.weight.detach()))  # (O, r), (r, r)
    right, outer = torch.linalg.qr(doubled(down.weight.detach()).mT)  # (I, r), (r, r)
    core = _linear(scale * inner @ outer.mT, up, True)
    return _linear(right.mT, down), nn.Sequential(OrderedDict(core=core, up=_linear(left / scale, up, bias=up.bias)))


def _linear(weight: Tensor, like: nn.Linear, trained: bool = False, bias: Tensor | None = None) -> nn.Linear:
    """Returns a linear layer with a weight, in the dtype and on the device of another layer."""
    layer = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.to(like.weight), requires_grad=trained)
    layer.bias = bias
    return layer.train(like.training)
