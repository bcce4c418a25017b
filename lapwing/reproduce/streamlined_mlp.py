"""Streamlined prediction of MLPs on MNIST and Fashion-MNIST (Li et al. 2025): tables 2 and 3, figures 8 and 9."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw

from ..covariance import AnyLatent
from ..evaluation import metrics
from ..likelihoods import ClassPrediction
from ..prediction import Way
from ..prediction.scaled import scaled
from . import streamlined_tables
from .ivon import IVON
from .streamlined_tables import relu_network
from .valla import Pictures, pictures

PAPER: dict[str, dict[str, dict[str, tuple[float, ...]]]] = {
    "table 2": {
        "mnist": {
            "LA sampling": (0.972, 0.210, 0.122), "LA GLM": (0.975, 0.089, 0.009),
            "LA streamlined": (0.975, 0.089, 0.004), "MFVI sampling": (0.974, 0.179, 0.018),
            "MFVI streamlined": (0.974, 0.086, 0.003),
        },
        "fashion_mnist": {
            "LA sampling": (0.868, 0.556, 0.151), "LA GLM": (0.882, 0.548, 0.078),
            "LA streamlined": (0.881, 0.397, 0.012), "MFVI sampling": (0.843, 2.010, 0.144),
            "MFVI streamlined": (0.842, 0.529, 0.013),
        },
    },
    "table 3": {
        "mnist": {"moments": (0.971, 0.103, 0.014), "linear": (0.975, 0.090, 0.006)},
        "fashion_mnist": {"moments": (0.882, 0.463, 0.051), "linear": (0.881, 0.435, 0.022)},
    },
}  # fmt: skip
"""Accuracy, NLPD and ECE; the standard errors are those of the test images."""

ANGLES = tuple(range(0, 181, 10))
BINS = 24
"""Of the entropies' histograms, from 0 to log 10."""

SHOWN = 100
"""Batches of 100 training images that curvatures are summed over, scaled to all 55 000."""


@dataclass(frozen=True)
class MLPTask:
    """A 784-128-64-10 ReLU network trained on MNIST or Fashion-MNIST, and its images.

    Attributes:
        data: the images.
        seed: of split and training.
        epochs: of the training by Adam; half as many by IVON.
        draws: of the weights.
    """

    data: Pictures = field(repr=False)
    seed: int
    epochs: int = 20
    draws: int = 200

    @classmethod
    def load(cls, name: str, seed: int, tested: int = 5000) -> MLPTask:
        """Reads the images; networks are trained when they are asked for."""
        return cls(pictures(name, seed, tested), seed)

    @cached_property
    def whole(self) -> tuple[Tensor, Tensor]:
        """All training images and labels."""
        return torch.cat([x for x, _ in self.data.train]), torch.cat([y for _, y in self.data.train])

    @cached_property
    def tested(self) -> tuple[Tensor, Tensor]:
        """Test images and labels."""
        return torch.cat([x for x, _ in self.data.test]), torch.cat([y for _, y in self.data.test])

    @property
    def steps(self) -> int:
        """Batches in all epochs."""
        return self.epochs * len(self.data.train)

    @cached_property
    def model(self) -> nn.Sequential:
        """The network trained by Adam, rate 1e-3, without weight decay."""
        model = relu_network(784, (128, 64), 10, self.seed)
        streamlined_tables.train(model, self.whole, F.cross_entropy, self.seed, self.steps, 1e-3, 0.0, 100)
        return model

    def laplace(self, method: lw.Method, tune: Any) -> lw.Posterior:
        """Fits a Laplace posterior of all layers."""
        return lw.fit(self.model, self.data.train[:SHOWN], method, tune=tune, data_size=len(self.whole[0]))

    @cached_property
    def variational(self) -> lw.Posterior:
        """Trains another network of the same start by IVON, rate 0.1 falling to zero, and reads its posterior."""
        model, (x, y) = relu_network(784, (128, 64), 10, self.seed), self.whole
        optimiser = IVON(model.parameters(), ess=len(x), rate=0.1, seed=self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        for i in range(self.steps // 2):
            rows = torch.randint(len(x), (100,), generator=generator)
            optimiser.param_groups[0]["lr"] = 0.1 * (1 - 2 * i / self.steps)
            optimiser.step(lambda rows=rows: F.cross_entropy(model(x[rows]), y[rows]))  # type: ignore[misc]
        return lw.MeanField.from_optimizer(model.eval(), optimiser, self.data.train[:SHOWN])

    def ways(self, *names: str) -> dict[str, Way]:
        """Returns ways by name; all of table 2 without names."""
        every: dict[str, Way] = {
            "streamlined": lw.Streamlined(covariance="full"),
            "streamlined, diagonal": lw.Streamlined(),
            "moments": lw.Streamlined(activations="moments"),
            "GLM": lw.Linearized(),
            "sampling": lw.MonteCarlo(self.draws),
        }
        return {name: every[name] for name in names or ("streamlined", "streamlined, diagonal", "GLM", "sampling")}

    def scores(self, posterior: lw.Posterior, ways: Mapping[str, Way]) -> dict[str, Any]:
        """Returns scores of each way on the test images, plain and with the factor of the validation images."""
        found: dict[str, Any] = {}
        for name, way in ways.items():
            factor = lw.scale_factor(posterior, self.data.val, way).factor
            inside, outside = (self._latent(posterior, x, way) for x in (self.tested[0], self.data.foreign[:2000]))
            found[name] = {
                "plain": self._row(posterior, inside, outside),
                "scaled": self._row(posterior, scaled(inside, factor), scaled(outside, factor)),
                "factor": float(f"{factor:.4g}"),
            }
        delta = posterior.covariance.precision
        return found if delta is None else {**found, "δ": float(delta[0])}

    def network(self) -> dict[str, Any]:
        """Returns the network's own scores."""
        with torch.no_grad():
            inside, outside = (self.model(x).softmax(-1) for x in (self.tested[0], self.data.foreign[:2000]))
        return class_row(inside, self.tested[1], outside)

    def rotations(self, posterior: lw.Posterior | None, way: Way, shown: int = 500) -> dict[str, list[float]]:
        """Returns accuracy and NLPD of rotated test images by angle, with the factor of the validation images.

        Args:
            posterior: None for the network alone.
            way: through it.
            shown: the first so many test images.
        """
        from ..evaluation.rotations import rotate

        x, y = self.tested[0][:shown], self.tested[1][:shown]
        factor = 1.0 if posterior is None else lw.scale_factor(posterior, self.data.val, way).factor
        turned = torch.cat([rotate(x, angle) for angle in ANGLES])  # draws of the weights are shared
        if posterior is None:
            with torch.no_grad():
                probs = self.model(turned).softmax(-1)
        else:
            probs = _probs(posterior, scaled(self._latent(posterior, turned, way), factor))
        parts = probs.split(len(x))
        return {
            "accuracy": [float(f"{metrics.accuracy(part, y):.4g}") for part in parts],
            "nlpd": [float(f"{metrics.negative_log_likelihood(part, y):.4g}") for part in parts],
        }

    def _latent(self, posterior: lw.Posterior, x: Tensor, way: Way) -> AnyLatent:
        parts = x.split(len(x) if isinstance(way, lw.MonteCarlo) else 250)
        with torch.no_grad():
            return posterior.latent([(part, torch.zeros(len(part))) for part in parts], via=way)

    def _row(self, posterior: lw.Posterior, inside: AnyLatent, outside: AnyLatent) -> dict[str, Any]:
        return class_row(_probs(posterior, inside), self.tested[1], _probs(posterior, outside))


def _probs(posterior: lw.Posterior, latent: AnyLatent) -> Tensor:
    """Returns class probabilities: of draws their average, of Gaussians by the default link."""
    prediction = posterior.likelihood.predict(latent)
    assert isinstance(prediction, ClassPrediction)
    return prediction.probs


def class_row(probs: Tensor, labels: Tensor, outside: Tensor) -> dict[str, Any]:
    """Returns accuracy, NLPD with its standard error over images, ECE, and what entropies say of foreign images.

    Args:
        probs: class probabilities (n, C).
        labels: (n,).
        outside: probabilities of foreign images (m, C).
    """
    nlpd = -probs.double().clamp_min(1e-45).log().gather(1, labels[:, None])[:, 0]
    entropies = [torch.special.entr(p.double()).sum(-1) for p in (probs, outside)]
    top = math.log(probs.shape[1])
    numbers = {
        "accuracy": metrics.accuracy(probs, labels), "nlpd": nlpd.mean(), "over images": nlpd.std() / len(nlpd) ** 0.5,
        "ece": metrics.expected_calibration_error(probs, labels), "auroc": metrics.auroc(*entropies),
        "entropy inside": entropies[0].mean(), "entropy outside": entropies[1].mean(),
    }  # fmt: skip
    shares = [(torch.histc(e.clamp(0, top), BINS, 0, top) / len(e)).tolist() for e in entropies]
    histograms = {f"curve of entropies {place}": [round(value, 4) for value in share]
                  for place, share in zip(("inside", "outside"), shares, strict=True)}  # fmt: skip
    return {**{name: float(f"{float(value):.5g}") for name, value in numbers.items()}, **histograms}
