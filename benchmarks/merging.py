"""One network from several that were fine-tuned from the same weights: sums of curvatures, and other rules.

A network sees 100 of scikit-learn's digits, with all classes. Each of 2, 4 or 8 sites then fine-tunes it on its own
classes of 500 other digits, by 100 steps of Adam on all its rows. *unequal*: the second of two sites has a quarter of
its rows. With θ_k of site k, its curvature `G_k` and the base network μ, the merged weights θ solve

    (Σ_k G_k + δI) (θ - μ) = Σ_k G_k (θ_k - μ)                   "towards the base"
    (Σ_k G_k + δI) (θ - θ̄) = Σ_k G_k (θ_k - θ̄)                   "towards the mean" θ̄ of the θ_k

The diagonal G_k is Fisher merging (Matena and Raffel 2022). TIES (Yadav et al. 2023) cuts small changes, elects signs,
and averages the changes that agree. RegMean (Jin et al. 2023) weighs each layer by the Gram matrix of its inputs. All
numbers of the rules (δ; density and factor of TIES; share of RegMean's off-diagonals) are chosen by the NLL of 100
held-out digits. *mean* is weighted by rows, and *joint* is fine-tuned on the rows of all sites. *closed* is the share
of the NLL gap from *mean* to *joint*. Six seeds; the other 1 097 digits test.
"""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.covariance.base import join_blocks, split_blocks
from lapwing.tangent import join, split
from papers.common.scores import class_scores
from papers.common.tables import grid
from papers.common.training import train

SEED = 0
SEEDS = range(6)
BASE, SITES, HELD_OUT, STEPS = 100, 500, 100, 100
DELTAS = tuple(10 ** (step / 2) for step in range(-8, 5))

RULES = {
    "base": "base", "TIES": "TIES", "RegMean": "RegMean", "diagonal, towards the mean": "diagonal",
    "KFAC, towards the base": "KFAC", "KFAC, towards the mean": "KFAC, mean",
    "full, towards the base": "full", "full, towards the mean": "full, mean",
}  # fmt: skip
"""Rule -> its column."""

Part = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    """Returns the network of 64, 20 and 10 units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 10))


def cnn() -> nn.Module:
    """Returns a network of two convolutions, 1 898 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


NETWORKS = {"MLP": (mlp, 3e-3), "CNN": (cnn, 1e-3), "CNN, smaller steps": (cnn, 3e-4), "CNN, larger steps": (cnn, 3e-3)}
"""Network, and the learning rate of the sites."""

CELLS = {
    **{f"{name}, {sites} sites": (name, sites, 1.0) for name in ("MLP", "CNN") for sites in (2, 4, 8)},
    **{f"{name}, unequal": (name, 2, 0.25) for name in ("MLP", "CNN")},
    **{name: (name, 2, 1.0) for name in list(NETWORKS)[2:]},
}
"""Network, number of sites, and share of rows that every second site keeps."""


def descended(model: nn.Module, data: Part, steps: int, rate: float) -> nn.Module:
    """Returns a copy of the network after some steps of Adam on all rows."""
    model = copy.deepcopy(model)
    return train(model, data, itertools.repeat(slice(None), steps), torch.optim.Adam(model.parameters(), rate))


def nll(model: nn.Module, data: Part) -> float:
    """Returns the mean NLL of the network's own probabilities."""
    with torch.no_grad():
        return float(F.cross_entropy(model(data[0]), data[1]))


class Weights:
    """The weights of networks of one kind as vectors (P,) float64, layer by layer in the order of lapwing's blocks."""

    def __init__(self, posterior: lw.Posterior) -> None:
        self.blocks, self.names = posterior.tangent.blocks, list(posterior.tangent.parameters)

    def of(self, model: nn.Module) -> Tensor:
        """Returns the weights of a network."""
        named = dict(model.named_parameters())
        parts = join(self.blocks, {name: named[name].detach().double() for name in self.names})
        return join_blocks(self.blocks, parts)

    def put(self, model: nn.Module, values: Tensor) -> nn.Module:
        """Returns a copy of a network with other weights."""
        model = copy.deepcopy(model)
        parts = split(self.blocks, split_blocks(self.blocks, values[None]))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(parts[name].reshape(parameter.shape))
        return model


@dataclass(frozen=True)
class Sites:
    """Networks that were fine-tuned from one network, their data, and held-out rows."""

    base: nn.Module
    models: list[nn.Module]
    data: list[Part]
    held_out: Part

    def fits(self, method: lw.Method) -> list[lw.Posterior]:
        """Returns a posterior of each site."""
        both = zip(self.models, self.data, strict=True)
        return [lw.fit(model, rows, method, prior_precision=1.0, progress=False) for model, rows in both]

    def mean(self) -> nn.Module:
        """Returns the network with the mean of the weights, weighted by rows."""
        model, shares = copy.deepcopy(self.base), [len(rows[0]) for rows in self.data]
        with torch.no_grad():
            for target, *values in zip(model.parameters(), *(m.parameters() for m in self.models), strict=True):
                target.copy_(sum(n * value for n, value in zip(shares, values, strict=True)) / sum(shares))
        return model

    def best(self, candidates: Iterable[nn.Module]) -> nn.Module:
        """Returns the candidate with the lowest NLL of the held-out rows."""
        return min(candidates, key=lambda model: nll(model, self.held_out))

    def summed(self, method: lw.Method) -> Iterator[tuple[str, Iterator[nn.Module]]]:
        """Yields the merges by sums of curvatures at all δ, towards the base and towards the mean."""
        posteriors = self.fits(method)
        kind = Weights(posteriors[0])
        size = posteriors[0].tangent.size
        eye = torch.eye(size, dtype=torch.float64)
        total, right = torch.zeros_like(eye), torch.zeros(size, dtype=torch.float64)
        for posterior in posteriors:
            covariance: Any = posterior.covariance
            product = covariance.precision_mv(split_blocks(kind.blocks, eye.to(covariance.dtype)))
            G = join_blocks(kind.blocks, product).double() - eye  # Σ⁻¹ = G + I at the prior precision of `fits`
            total, right = total + G, right + G @ kind.of(posterior.model)
        values, vectors = torch.linalg.eigh((total + total.T) / 2)

        def merges(centre: Tensor) -> Iterator[nn.Module]:
            for delta in DELTAS:
                rotated = vectors.T @ (right - total @ centre) / (values.clamp_min(0) + delta)
                yield kind.put(self.base, centre + vectors @ rotated)

        yield "towards the base", merges(kind.of(self.base))
        yield "towards the mean", merges(kind.of(self.mean()))

    def ties(self) -> Iterator[nn.Module]:
        """Yields the merges of TIES at all densities and factors."""
        base = nn.utils.parameters_to_vector(self.base.parameters()).detach()
        changes = torch.stack([nn.utils.parameters_to_vector(m.parameters()).detach() - base for m in self.models])
        for density, factor in itertools.product((0.2, 0.5, 1.0), (0.5, 1.0, 1.5, 2.0, 3.0)):
            # 1. the largest changes of each site
            least = changes.abs().quantile(1 - density, dim=1, keepdim=True)
            kept = changes * (changes.abs() >= least)
            # 2. the sign of their sum, and the mean of those with this sign
            agree = kept * (kept.sign() == kept.sum(0).sign())
            merged = agree.sum(0) / agree.ne(0).sum(0).clamp_min(1)
            model = copy.deepcopy(self.base)
            nn.utils.vector_to_parameters(base + factor * merged, model.parameters())
            yield model

    def regmean(self) -> Iterator[nn.Module]:
        """Yields the merges of RegMean at all shares of the off-diagonals; a bias is the weight of a constant input."""
        posteriors = self.fits(lw.KFAC())
        kind = Weights(posteriors[0])
        thetas = [split_blocks(kind.blocks, kind.of(model)) for model in self.models]
        for share in (0.1, 0.5, 0.9, 1.0):
            merged = {}
            for block in kind.blocks:
                grams = []
                for posterior in posteriors:
                    factors: Any = posterior.covariance.structures[block.name]  # type: ignore[attr-defined]
                    inputs = factors.inputs[0].double()
                    gram = (inputs * factors.input_eigenvalues[0]) @ inputs.T
                    grams.append(share * gram + (1 - share) * gram.diagonal().diag())
                each = [theta[block.name].unflatten(-1, block.matrix_shape[1:]) for theta in thetas]
                right = sum(gram @ one.T for gram, one in zip(grams, each, strict=True))
                # a pixel that is always 0 has no Gram, and keeps the mean
                mean = torch.stack(each).mean(0).T
                total = torch.stack(grams).sum(0)
                solved = mean + torch.linalg.pinv(total, hermitian=True, rtol=1e-6) @ (right - total @ mean)
                merged[block.name] = solved.T.flatten()
            yield kind.put(self.base, join_blocks(kind.blocks, merged))


def digits(seed: int) -> Part:
    """Returns the digits in the random order of a seed."""
    from sklearn.datasets import load_digits

    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return (x[order].float() / 16).reshape(-1, 1, 8, 8), y[order]


def scored(network: str, count: int, share: float, seed: int) -> dict[str, Any]:
    """Returns the scores of all rules for one seed."""
    (build, rate), (x, y) = NETWORKS[network], digits(seed)
    known, shared, held_out = BASE, BASE + SITES, BASE + SITES + HELD_OUT
    # 1. the network of all, and those of the sites
    torch.manual_seed(seed)
    base = descended(build(), (x[:known], y[:known]), 300, 3e-3)
    data = []
    for site, classes in enumerate(torch.arange(10).tensor_split(count)):
        rows = known + torch.isin(y[known:shared], classes).nonzero()[:, 0]
        rows = rows[: int(share * len(rows))] if site % 2 else rows
        data.append((x[rows], y[rows]))
    models = [descended(base, rows, STEPS, rate) for rows in data]
    every = torch.cat([rows[0] for rows in data]), torch.cat([rows[1] for rows in data])
    sites = Sites(base, models, data, (x[shared:held_out], y[shared:held_out]))
    # 2. merges
    merged: dict[str, nn.Module] = {
        "base": base, "mean": sites.mean(), "joint": descended(base, every, STEPS, rate),
        "TIES": sites.best(sites.ties()), "RegMean": sites.best(sites.regmean()),
    }  # fmt: skip
    for name, method in {"diagonal": lw.Diagonal(), "KFAC": lw.KFAC(), "full": lw.Full(form="primal")}.items():
        for towards, candidates in sites.summed(method):
            merged[f"{name}, {towards}"] = sites.best(candidates)
    # 3. scores
    found: dict[str, Any] = {}
    with torch.no_grad():
        for name, model in merged.items():
            scores = class_scores(model(x[held_out:]).softmax(-1), y[held_out:])
            found[name] = {key: scores[key] for key in ("nll", "accuracy")}
        alone = [class_scores(model(x[held_out:]).softmax(-1), y[held_out:])["accuracy"] for model in models]
    gap = found["mean"]["nll"] - found["joint"]["nll"]
    for row in found.values():
        row["closed"] = (found["mean"]["nll"] - row["nll"]) / gap
    return {"alone": statistics.fmean(alone), **found}


def cell(network: str, count: int, share: float) -> dict[str, Any]:
    """Returns the scores of all seeds."""
    return {str(seed): scored(network, count, share, seed) for seed in SEEDS}


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the cells."""
    return {name: partial(cell, *options) for name, options in CELLS.items()}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Returns the mean NLLs of averaging and joint training, and the share of their gap that each rule closes."""
    rows = {}
    for name, found in results.items():
        seeds = list(found.values())
        mean = {rule: statistics.fmean(seed[rule]["nll"] for seed in seeds) for rule in ("mean", "joint", *RULES)}
        gap = mean["mean"] - mean["joint"]
        alone = statistics.fmean(seed["alone"] for seed in seeds)
        closed = [f"{100 * (mean['mean'] - mean[rule]) / gap:.0f} %" for rule in RULES]
        rows[name] = [f"{alone:.2f}", f"{mean['mean']:.3f}", f"{mean['joint']:.3f}", *closed]
    return {"closed": grid(["site", "averaged", "joint", *RULES.values()], rows, right=True)}
