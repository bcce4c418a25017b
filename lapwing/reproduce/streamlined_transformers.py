"""Streamlined prediction on small transformers (Li et al. 2025): Tables 4, 5, 10 and 12, Figures 4 and 11.

Three ways through the same posteriors, by Laplace with a diagonal covariance and by mean-field variational inference.
Each is scored as it is, with its covariance multiplied by a factor found on validation data, and for Laplace under the
prior precision that is best for it there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw

from ..covariance import LatentDraws, PriorCovariance
from ..evaluation import metrics
from ..evaluation.approximations import approximation_errors
from ..prediction import Way
from ..prediction.scaled import scaled
from .ella_cifar import Cifar
from .loaders import Batches
from .transformers import Part, Task, kept, task, trained, trim
from .valla import IMAGES
from .valla import train as optimise

PAPER, CORRELATED = lw.Streamlined(positions="independent"), lw.Streamlined(positions="correlated")
WAYS: dict[str, Way] = {
    "sampling": lw.MonteCarlo(50),
    "GLM": lw.Linearized(),
    "streamlined": PAPER,
    "streamlined, positions correlated": CORRELATED,
}
"""Section 4: 50 draws; GLM is the linearised network. Positions are independent in the paper."""

VALUES: dict[str, Way] = {
    "variances of values": PAPER,
    "covariances of features": lw.Streamlined(positions="independent", attention="features"),
    "covariances of tokens": lw.Streamlined(positions="independent", attention="tokens"),
}
"""Tables 14 to 16 compare the first two."""

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
    def load(
        cls, name: str, seed: int, cache: Path | None = None, shown: int = 5000, tested: int = 2000, tuned: int = 1000
    ) -> Setting:
        """Reads data and network.

        Args:
            name: one of `transformers.TASKS`.
            seed: of the split, the network and the inputs shown.
            cache: folder that keeps networks.
            shown: training inputs that fits see.
            tested: most test inputs.
            tuned: most validation inputs.
        """
        found = task(name, seed)
        return cls.of(found, trained(found, seed, cache), seed, shown, tested, tuned)

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
        start = time.perf_counter()
        inside = posterior.latent(self.test, way)
        spent = time.perf_counter() - start
        outside = posterior.latent(self.foreign, way)
        found: dict[str, Any] = {"seconds": spent, "factor": factor}
        if posterior.prior_precision is not None:
            found["prior_precision"] = posterior.prior_precision
        for name, multiple in (("plain", 1.0), ("scaled", factor)):
            probs, foreign = (probabilities(posterior, scaled(part, multiple)) for part in (inside, outside))
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


def probabilities(posterior: lw.Posterior, latent: Any) -> Tensor:
    """Returns class probabilities (N, C) by the default link."""
    prediction = posterior.likelihood.predict(latent)
    assert hasattr(prediction, "probs")
    return prediction.probs


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


def entropy(probs: Tensor) -> Tensor:
    """Returns the entropy (N,) of class probabilities, in nats."""
    return torch.special.entr(probs.double()).sum(-1)


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


def over_draws(
    posterior: lw.Posterior, part: Batches, counts: Sequence[int], most: int, repeats: int = 5
) -> dict[str, dict[str, float]]:
    """Scores Monte Carlo with n draws, n growing (Figures 11 and 12), each over disjoint groups of the same draws.

    Args:
        posterior: the posterior.
        part: inputs and labels.
        counts: numbers of draws.
        most: draws in all.
        repeats: most groups.

    Returns:
        n -> scores, means over groups, and the standard deviation of the NLPD between groups.
    """
    latent = posterior.latent(part, lw.MonteCarlo(most))
    assert isinstance(latent, LatentDraws)
    found = {}
    for count in counts:
        groups = latent.draws.split(count)[: min(repeats, most // count)]
        each = [scores(probabilities(posterior, LatentDraws(group)), labels(part)) for group in groups]
        nlpd = torch.tensor([one["nlpd"] for one in each])
        found[str(count)] = {key: sum(one[key] for one in each) / len(each) for key in each[0]} | {
            "nlpd between groups": float(nlpd.std()) if len(each) > 1 else 0.0, "groups": len(each),
        }  # fmt: skip
    return found


def nonlinearity(network: Any, z: Tensor, epsilons: Sequence[float]) -> dict[str, float]:
    """Returns `E|f(z (1 ± ε)) - f(z) (1 ± ε)|` over inputs and outputs, each output by its range (equation 89).

    Args:
        network: takes inputs (N, ...), returns (N, C).
        z: inputs.
        epsilons: ε.
    """
    with torch.no_grad():
        middle = network(z)
        span = middle.amax(0) - middle.amin(0)  # (C,)
        return {
            f"{epsilon:g}": sum(
                float(((network(z * (1 + e)) - middle * (1 + e)).abs().mean(0) / span).mean()) / 2
                for e in (epsilon, -epsilon)
            )
            for epsilon in epsilons
        }


def error_rows(posterior: lw.Posterior, x: Tensor, via: lw.Streamlined) -> dict[str, Any]:
    """Returns the tables of `approximation_errors` as numbers: by approximation lifted, and by layer.

    Args:
        posterior: the posterior.
        x: inputs.
        via: where lifting starts.
    """
    found = approximation_errors(posterior, x, via)
    return {"options": dict(found.options.rows), "refused": sorted(found.refused), "layers": dict(found.layers.rows)}


def whole_ratio(posterior: lw.Posterior, x: Tensor, way: Way) -> dict[str, float]:
    """Returns the geometric mean of a way's variances over linearised ones, and the mean of the logs' distance."""
    found, exact = (posterior.latent(x, via).variance.double() for via in (way, lw.Linearized()))
    logs = (found / exact).log()
    return {"ratio": float(logs.mean().exp()), "error": float(logs.abs().mean())}


def narrowed(posterior: lw.Posterior, factor: float = 100.0) -> lw.Posterior:
    """Returns a posterior with the covariance divided by a factor: products of uncertain numbers hardly count there."""
    assert isinstance(posterior.covariance, PriorCovariance)
    precision, scale = posterior.prior.precision, posterior.scale_at(posterior.likelihood)
    return replace(posterior, covariance=posterior.covariance.with_prior(factor * precision, factor * scale))


def relu_mlp(x: Tensor, y: Tensor, name: str, seed: int, cache: Path | None = None) -> nn.Sequential:
    """Returns the paper's MLP for 28 x 28 images, 784-128-64-10 with ReLU, trained or from the cache.

    Args:
        x: images.
        y: labels.
        name: of the data, in the cache.
        seed: of weights and batches.
        cache: folder that keeps networks; None keeps none.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
        model = nn.Sequential(nn.Flatten(), *layers)
    return kept(model, f"relu_{name}_{seed}", cache, lambda: optimise(model, (x, y), IMAGES, seed))


def mlp_setting(images: Setting, seed: int, cache: Path | None = None) -> Setting:
    """Returns the MLP on the images of another setting."""
    found = task("fashion_mnist", seed)
    return replace(images, model=relu_mlp(*found.train, "fashion_mnist", seed, cache))


def resnet_variational(setup: Cifar, seed: int, steps: int = 300) -> lw.Posterior:
    """Fine-tunes the ResNet-20 on flipped and shifted training images, in batches of 64."""
    x, y = (torch.cat([pair[i] for pair in setup.train]) for i in (0, 1))
    loader = [(shifted(a, seed + i), b) for i, (a, b) in enumerate(zip(x.split(64), y.split(64), strict=True))]
    return lw.fit(
        setup.model, loader, lw.MeanField(steps), params=lw.everything, data_size=50_000, seed=seed, progress=False
    )


def shifted(x: Tensor, seed: int, most: int = 4) -> Tensor:
    """Mirrors half of the images (B, channels, H, W) and shifts all by up to 4 pixels a side, zeros coming in."""
    generator = torch.Generator().manual_seed(seed)
    mirrored = torch.rand(len(x), generator=generator) < 0.5
    x = torch.where(mirrored[:, None, None, None], x.flip(3), x)
    wide, (height, width) = F.pad(x, (most,) * 4), x.shape[2:]
    places = torch.randint(0, 2 * most + 1, (len(x), 2), generator=generator).tolist()
    return torch.stack([one[:, a : a + height, b : b + width] for one, (a, b) in zip(wide, places, strict=True)])


def outputs_row(model: nn.Module, part: Batches) -> dict[str, float]:
    """Returns scores of a network whose outputs are logits."""
    with torch.no_grad():
        return scores(torch.cat([outputs(model, x).softmax(-1) for x, _ in part]), labels(part))


def scaled_row(posterior: lw.Posterior, way: Way, val: Batches, test: Batches) -> dict[str, Any]:
    """Scores a way as it is, and with the factor of its covariance that validation data ask for."""
    factor = lw.scale_factor(posterior, val, way).factor
    latent = posterior.latent(test, way)
    found: dict[str, Any] = {"factor": factor}
    for name, multiple in (("plain", 1.0), ("scaled", factor)):
        found[name] = scores(probabilities(posterior, scaled(latent, multiple)), labels(test))
    return found
