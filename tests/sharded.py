"""Networks sharded by `fully_shard`, on the processes that `tests/fitting/test_sharded.py` starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import lapwing as lw
from tests import ranks

TRAINING, HELD_OUT = [[12, 9, 3], [10, 6]], [[6, 9], []]
"""Sizes of the batches of two ranks. They have other numbers of batches, so that each waits for the other."""

LAST = {"params": lw.last_layer}

CASES: dict[str, tuple[int, Callable[[Any], dict[str, Any]]]] = {
    "default": (3, lambda held_out: {}),
    "default of a regression": (1, lambda held_out: {}),
    "validation": (3, lambda held_out: {"validation": held_out, "method": lw.KFAC(), **LAST}),
    "Full": (3, lambda held_out: {"method": lw.Full(), "tune": lw.Validation(held_out), **LAST}),
    "weights": (3, lambda held_out: {"method": lw.KFAC(), "sample_weights": True, **LAST}),
}


class Wrapped(nn.Module):
    """A network that takes and returns a dict, whose last layer has the name of a method of `Head`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.features = network

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.features(x)}


def network(outputs: int) -> nn.Module:
    return Wrapped(ranks.network(outputs)).eval()


def sharded(outputs: int) -> nn.Module:
    model: Any = network(outputs)
    fully_shard(model.features[0])
    return fully_shard(model)


def batches(name: str) -> tuple[list[Any], list[Any]]:
    """Returns the training and the held-out batches of each rank."""
    outputs, _ = CASES[name]
    x, y = ranks.data(outputs, 40, 1)
    parts = (x, y, 0.5 + (x[:, 0] > 0)) if name == "weights" else (x, y)
    every = ranks.shares(parts, TRAINING), ranks.shares(ranks.data(outputs, 15, 3), HELD_OUT)
    return tuple([[({"x": x}, *rest) for x, *rest in batch] for batch in data] for data in every)  # type: ignore[return-value]


def points(count: int) -> Tensor:
    return torch.linspace(-1, 1, 4 * count, dtype=torch.float64).reshape(count, 4)


def numbers(posterior: lw.Posterior, training: Any, loader: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Returns what a fit chose, and its predictions at a batch and at a loader, and after an update."""
    chosen = posterior.prior.precision, posterior.noise_variance, posterior.logit_temperature
    updated = (
        posterior if "Full" in posterior.method else posterior.update(training, sample_weights=len(training[0]) > 2)
    )
    latents = [posterior.latent({"x": points(5)}, joint=True), posterior.latent(loader), updated.latent(loader)]
    return {
        "chosen": chosen, "samples": updated.samples, "latents": [(each.mean, each.covariance) for each in latents],
        "evidence": posterior.log_marginal_likelihood(), "names": dict.fromkeys(posterior.tangent.parameters, 0),
    }  # fmt: skip


def loader(rank: int) -> list[dict[str, Tensor]]:
    """Returns what a rank predicts: each has another number of batches."""
    return [{"x": points(3 + number)} for number in range(1 + 2 * rank)]


def fit_alone(rank: int) -> dict[str, Any]:
    """Fits all cases in one process, and returns the predictions of a rank."""
    results = {}
    for name, (outputs, options) in CASES.items():
        training, held_out = ([batch for part in data for batch in part] for data in batches(name))
        chosen = {"method": lw.KFAC(), **LAST, **options(held_out)}
        model: Any = network(outputs)
        model.features[:-1].requires_grad_(False)  # the tuning of a regression reads all weights that are trained
        results[name] = numbers(lw.fit(model, training, **chosen), training, loader(rank))
    return results


def fit(rank: int, size: int) -> dict[str, Any]:
    """Fits all cases with sharded networks."""
    results = {}
    for name, (outputs, options) in CASES.items():
        training, held_out = batches(name)
        model = sharded(outputs)
        before = {key: (id(value), value._version, value.to_local().clone()) for key, value in model.named_parameters()}
        posterior = lw.fit(model, training[rank], **options(held_out[rank]))
        results[name] = numbers(posterior, training[rank], loader(rank))
        for key, value in model.named_parameters():
            assert before[key][:2] == (id(value), value._version), key
            assert torch.equal(before[key][2], value.to_local()), key
    return results


class Failing(list):
    """Batches that raise at the end."""

    def __iter__(self) -> Any:
        yield from super().__iter__()
        raise OSError("the disk is gone")


def fail(rank: int, size: int) -> dict[str, str]:
    """Fails on the last rank alone, in a fit and in a prediction."""
    training = batches("default")[0][rank]
    model = sharded(3)
    posterior = lw.fit(model, training)
    some = loader(rank)
    return {
        "while it loads": ranks.refused(lambda: lw.fit(model, Failing(training) if rank else training)),
        "while it predicts": ranks.refused(lambda: posterior.predict(Failing(some) if rank else some)),
        "then": ranks.refused(lambda: lw.fit(model, training).predict(some)),
    }
