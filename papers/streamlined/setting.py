"""A trained network, its data, and how ways through its posteriors are scored: what Tables 4, 5, 10 and 12 share.

Each way is scored as it is, with its covariance multiplied by a factor found on validation data, and for Laplace under
the prior precision that is best for it there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.evaluation import metrics
from lapwing.prediction import Way
from papers.common.data import Batches, Part
from papers.common.measure import timed
from papers.common.networks import mlp
from papers.common.scores import entropy, probabilities
from papers.common.training import Recipe, kept, seeded
from papers.streamlined.transformers import Task, task, trained, trim

PAPER, CORRELATED = lw.Streamlined(positions="independent"), lw.Streamlined(positions="correlated")
WAYS: dict[str, Way] = {
    "sampling": lw.MonteCarlo(50),
    "GLM": lw.Linearized(),
    "streamlined": PAPER,
    "streamlined, positions correlated": CORRELATED,
}
"""Section 4: 50 draws; GLM is the linearised network. Positions are independent in the paper."""


BINS = 20
"""Of the entropies of Figure 4, from 0 to log C."""


def treated(model: nn.Module) -> dict[str, Any]:
    """Returns what is treated of a ViT or GPT-2, by label: layers of the last two blocks, or the last layer."""
    vit = hasattr(model, "vit")
    blocks = "vit.layers" if vit else "transformer.h"
    depth = len({name.removeprefix(blocks).split(".")[1] for name, _ in model.named_parameters() if blocks in name})
    last = [f"{blocks}.{i}" for i in range(depth)[-2:]]
    attention, mlp = ("attention", "mlp") if vit else ("attn", "mlp")
    return {
        "attention": lw.matching(*(f"{block}.{attention}.*" for block in last)),
        "MLPs": lw.matching(*(f"{block}.{mlp}.*" for block in last)),
        "last layer": lw.last_layer,
    }


@dataclass(frozen=True)
class Setting:
    """A trained transformer and batches of its task; texts by length, so that little is padding.

    Attributes:
        name: of the task.
        model: the network.
        size: N of the training part.
        train: the part of it that fits see.
        val: to tune with.
        test: to report.
        foreign: of the other data set; the labels are zeros, and mean nothing.
    """

    name: str
    model: nn.Module
    size: int
    train: Batches
    val: Batches
    test: Batches
    foreign: Batches

    @classmethod
    def load(cls, name: str, seed: int, shown: int = 5000, tested: int = 2000, tuned: int = 1000) -> Setting:
        """Reads data and network.

        Args:
            name: one of `transformers.TASKS`.
            seed: of the split, the network and the inputs shown.
            shown: training inputs that fits see.
            tested: most test inputs.
            tuned: most validation inputs.
        """
        found = task(name, seed)
        return cls.of(found, trained(found, seed), seed, shown, tested, tuned)

    @classmethod
    def of(cls, found: Task, model: nn.Module, seed: int, shown: int, tested: int, tuned: int) -> Setting:
        """Cuts a task into batches; arguments as for `load`."""
        x, y = found.train
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(x), generator=generator)[:shown]
        seen = batches_of((x[rows], y[rows]), size=50)
        order = torch.randperm(len(seen), generator=generator).tolist()  # not by length
        foreign = found.foreign[: tested // 2]
        return cls(
            found.name, model, len(x), [seen[i] for i in order], batches_of(found.val, tuned),
            batches_of(found.test, tested), batches_of((foreign, torch.zeros(len(foreign), dtype=torch.long))),
        )  # fmt: skip

    def laplace(self, params: Any, tune: Any, seed: int = 0) -> lw.Posterior:
        """Fits a diagonal Laplace posterior."""
        return lw.fit(
            self.model, self.train, lw.Diagonal(), params=params, tune=tune, data_size=self.size, seed=seed,
            progress=False,
        )  # fmt: skip

    def variational(self, params: Any, steps: int = 300, seed: int = 0) -> lw.Posterior:
        """Fine-tunes a mean-field posterior."""
        return lw.fit(
            self.model, self.train, lw.MeanField(steps), params=params, data_size=self.size, seed=seed, progress=False
        )

    def network_row(self) -> dict[str, Any]:
        """Returns MAP's scores."""
        with torch.no_grad():
            inside, outside = (
                torch.cat([outputs(self.model, x).softmax(-1) for x, _ in part]) for part in (self.test, self.foreign)
            )
        return {**scores(inside, labels(self.test)), **apart(inside, outside)}

    def row(self, posterior: lw.Posterior, way: Way, curves: bool = False) -> dict[str, Any]:
        """Scores a way as it is, and with the factor of its covariance that the validation data ask for.

        Args:
            posterior: the posterior.
            way: to score.
            curves: whether to add Figure 4's: densities of the entropy, of the task and of foreign inputs.
        """
        factor = lw.scale_factor(posterior, self.val, way).factor
        inside, spent = timed(lambda: posterior.latent(self.test, way))
        outside = posterior.latent(self.foreign, way)
        found: dict[str, Any] = {"seconds": spent, "factor": factor}
        if posterior.prior_precision is not None:
            found["prior_precision"] = posterior.prior_precision
        for name, multiple in (("plain", 1.0), ("scaled", factor)):
            probs, foreign = (probabilities(posterior, part.scaled(multiple)) for part in (inside, outside))
            found[name] = {**scores(probs, labels(self.test)), **apart(probs, foreign)}
            if curves:
                found[name]["curve of entropy"] = [histogram(entropy(part), part.shape[1]) for part in (probs, foreign)]
        return found

    def own_row(
        self, posterior: lw.Posterior, way: Way, exponents: Sequence[float], quick: Way | None = None
    ) -> dict[str, Any]:
        """Scores a way under the prior precision, of `10^exponents`, that is best for it on validation data.

        Args:
            posterior: under any prior.
            way: to score.
            exponents: rising.
            quick: what is compared instead, a way with fewer draws.
        """
        at = [posterior.with_prior(10**exponent) for exponent in exponents]
        losses = [loss(candidate, quick or way, self.val) for candidate in at]
        best = min(range(len(at)), key=losses.__getitem__)
        inside, outside = (probabilities(at[best], at[best].latent(x, way)) for x in (self.test, self.foreign))
        return {
            "prior_precision": 10 ** exponents[best], "edge": best in (0, len(at) - 1),
            **scores(inside, labels(self.test)), **apart(inside, outside),
        }  # fmt: skip


def batches_of(part: Part, most: int | None = None, size: int = 100) -> Batches:
    """Cuts the first inputs into batches, texts by length and without padding that a batch shares."""
    x, y = part[0][:most], part[1][:most]
    if not x.is_floating_point():
        order = (x != 0).sum(1).argsort(stable=True)
        x, y = x[order], y[order]
    return [(trim(a).contiguous(), b) for a, b in zip(x.split(size), y.split(size), strict=True)]


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Returns the logits (B, C) of a Hugging Face or a plain network."""
    found = model(x)
    return found if isinstance(found, Tensor) else found.logits


def labels(part: Batches) -> Tensor:
    """Returns the labels of all batches."""
    return torch.cat([y for _, y in part])


def loss(posterior: lw.Posterior, way: Way, part: Batches) -> float:
    """Returns the mean NLPD of a way."""
    return -float(posterior.likelihood.predict(posterior.latent(part, way)).log_prob(labels(part)).double().mean())


def scores(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Returns accuracy, NLPD and ECE, the first two with standard errors over inputs."""
    right = (probs.argmax(-1) == labels).double()
    lost = -probs.double().gather(1, labels[:, None]).clamp_min(1e-30).log()[:, 0]
    root = math.sqrt(len(labels))
    return {
        "accuracy": float(right.mean()), "accuracy error": float(right.std()) / root,
        "nlpd": float(lost.mean()), "nlpd error": float(lost.std()) / root,
        "ece": float(metrics.expected_calibration_error(probs, labels)),
    }  # fmt: skip


def apart(inside: Tensor, outside: Tensor) -> dict[str, float]:
    """Returns mean entropies of inputs of the task and foreign ones, and the AUROC of entropy between them."""
    own, other = entropy(inside), entropy(outside)
    return {
        "entropy": float(own.mean()), "foreign entropy": float(other.mean()),
        "auroc": float(metrics.auroc(own, other)),
    }  # fmt: skip


def histogram(values: Tensor, classes: int) -> list[float]:
    """Returns densities (per nat) in `BINS` bins from 0 to log C, rounded."""
    top = math.log(classes)
    counts = torch.histc(values.double().clamp(0, top), BINS, 0, top)
    return [round(float(n), 4) for n in counts / len(values) * BINS / top]


def relu_mlp(x: Tensor, y: Tensor, name: str, seed: int) -> nn.Sequential:
    """Returns the paper's MLP for 28 x 28 images, 784-128-64-10 with ReLU, trained or as it was kept."""
    with seeded(seed):
        model = mlp(784, 128, 64, 10, activation=nn.ReLU)
    recipe = Recipe(F.cross_entropy, 6000, decay=1e-3)
    return kept(model, f"relu_{name}_{seed}", lambda: recipe.train(model, (x, y), seed))
