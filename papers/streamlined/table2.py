"""Tables 2 and 3, Figure 9: MLPs on MNIST and Fashion-MNIST, plain and with a factor of the covariance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.covariance import AnyLatent
from lapwing.evaluation import metrics
from lapwing.prediction import Way
from lapwing.tuning import Tuning
from papers.common import drawing
from papers.common.data import Pictures, joined, pictures
from papers.common.networks import mlp
from papers.common.results import Rows, once, read
from papers.common.scores import entropy, probabilities
from papers.common.tables import grid, shown
from papers.common.training import Recipe, drawn, seeded, train
from papers.streamlined import table4
from papers.streamlined.ivon import IVON
from papers.streamlined.setting import scores

PUBLISHED: dict[str, dict[str, dict[str, tuple[float, ...]]]] = {
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


def run(seeds: Sequence[int] = range(5), names: Sequence[str] = ("mnist", "fashion_mnist")) -> dict[str, Any]:
    """Returns accuracy, NLPD, ECE, and entropies of the other data set's images, for every posterior and way."""
    return Rows(__file__, {"bins": BINS, "tested": 5000}).filled(_add, seeds, names)


def _add(rows: Rows, seed: int, name: str) -> None:
    run, task = f"{name}, seed {seed}", once(lambda: MLPTask.load(name, seed))
    rows.add(run, "network", lambda: task().network())
    posteriors: dict[str, tuple[lw.Method, Tuning, tuple[str, ...]]] = {
        "LA, KFAC": (lw.KFAC(), lw.Evidence(), ()),
        "LA, KFAC, bounded evidence": (lw.KFAC(), lw.BoundedEvidence(nats=0.005), ("streamlined", "GLM", "sampling")),
        "LA, diagonal": (lw.Diagonal(), lw.Evidence(), ("streamlined, diagonal", "moments", "GLM")),
    }
    for label, (method, tune, ways) in posteriors.items():
        rows.add(run, label, lambda m, t, w: task().scores(task().laplace(m, t), task().ways(*w)), method, tune, ways)
    rows.add(run, "MFVI", lambda: task().scores(task().variational, task().ways()))


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
        return joined(self.data.train)

    @cached_property
    def tested(self) -> tuple[Tensor, Tensor]:
        """Test images and labels."""
        return joined(self.data.test)

    @property
    def steps(self) -> int:
        """Batches in all epochs."""
        return self.epochs * len(self.data.train)

    @cached_property
    def model(self) -> nn.Sequential:
        """The network trained by Adam, rate 1e-3, without weight decay."""
        return Recipe(F.cross_entropy, self.steps, falling=1.0).train(self._start(), self.whole, self.seed)

    def _start(self) -> nn.Sequential:
        with seeded(self.seed):
            return mlp(784, 128, 64, 10, activation=nn.ReLU)

    def laplace(self, method: lw.Method, tune: Any) -> lw.Posterior:
        """Fits a Laplace posterior of all layers."""
        return lw.fit(self.model, self.data.train[:SHOWN], method, tune=tune, data_size=len(self.whole[0]))

    @cached_property
    def variational(self) -> lw.Posterior:
        """Trains another network of the same start by IVON, rate 0.1 falling to zero, and reads its posterior."""
        model, count, steps = self._start(), len(self.whole[0]), self.steps // 2
        optimiser = IVON(model.parameters(), ess=count, rate=0.1, seed=self.seed)
        train(
            model, self.whole, drawn(count, 100, steps, self.seed), optimiser, factor=lambda i: 1 - 2 * i / self.steps
        )
        return lw.MeanField.from_optimizer(model, optimiser, self.data.train[:SHOWN])

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
            inside, outside = (self.latent(posterior, x, way) for x in (self.tested[0], self.data.foreign[:2000]))
            found[name] = {
                "plain": self._row(posterior, inside, outside),
                "scaled": self._row(posterior, inside.scaled(factor), outside.scaled(factor)),
                "factor": float(f"{factor:.4g}"),
            }
        delta = posterior.covariance.precision
        return found if delta is None else {**found, "δ": float(delta[0])}

    def network(self) -> dict[str, Any]:
        """Returns the network's own scores."""
        with torch.no_grad():
            inside, outside = (self.model(x).softmax(-1) for x in (self.tested[0], self.data.foreign[:2000]))
        return class_row(inside, self.tested[1], outside)

    def latent(self, posterior: lw.Posterior, x: Tensor, way: Way) -> AnyLatent:
        parts = x.split(len(x) if isinstance(way, lw.MonteCarlo) else 250)
        with torch.no_grad():
            return posterior.latent([(part, torch.zeros(len(part))) for part in parts], via=way)

    def _row(self, posterior: lw.Posterior, inside: AnyLatent, outside: AnyLatent) -> dict[str, Any]:
        return class_row(probabilities(posterior, inside), self.tested[1], probabilities(posterior, outside))


def class_row(probs: Tensor, labels: Tensor, outside: Tensor) -> dict[str, Any]:
    """Returns accuracy, NLPD with its standard error over images, ECE, and what entropies say of foreign images."""
    row = scores(probs, labels)
    entropies = [entropy(part) for part in (probs, outside)]
    numbers = {
        "accuracy": row["accuracy"], "nlpd": row["nlpd"], "over images": row["nlpd error"], "ece": row["ece"],
        "auroc": float(metrics.auroc(*entropies)), "entropy inside": float(entropies[0].mean()),
        "entropy outside": float(entropies[1].mean()),
    }  # fmt: skip
    top = math.log(probs.shape[1])
    shares = [(torch.histc(e.clamp(0, top), BINS, 0, top) / len(e)).tolist() for e in entropies]
    histograms = {f"curve of entropies {place}": [round(value, 4) for value in share]
                  for place, share in zip(("inside", "outside"), shares, strict=True)}  # fmt: skip
    return {**{name: float(f"{value:.5g}") for name, value in numbers.items()}, **histograms}


def draw(results: Mapping[str, Any]) -> None:
    """Draws densities of the entropy of test and foreign images, with the results of `table4` (Figures 4 and 9)."""
    network = results["runs"]["fashion_mnist, seed 0"]
    vit = read(table4.__file__)["runs"]
    panels: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for posterior, label in (("LA, KFAC", "LA"), ("MFVI", "MFVI")):
        for way in ("streamlined", "GLM", "sampling"):
            panels[f"MLP, {label} {way}"] = _both(network[posterior][way]["plain"])
    for label in ("LA", "MFVI"):
        for way in ("streamlined", "GLM", "sampling"):
            panels[f"ViT, {label} {way}"] = _both(vit["fashion_mnist, attention, seed 0"][f"{label} {way}"]["plain"])
    figure, axes = drawing.panels(2, 6, (13, 4.4), sharex=True)
    for axis, (name, (inside, outside)) in zip(axes.flat, panels.items(), strict=True):
        for share, colour in ((inside, "#1f77b4"), (outside, "#d62728")):
            width = math.log(10) / len(share)
            axis.bar([(i + 0.5) * width for i in range(len(share))], share, width, color=colour, alpha=0.5)
        axis.set_title(name, fontsize=8)
        axis.set_yticks([])
    for axis in axes[-1]:
        axis.set_xlabel("entropy (nats)", fontsize=8)
    for line in axes:
        line[0].set_ylabel("share of the images", fontsize=8)
    figure.suptitle("seed 0; without the factor", fontsize=9)
    drawing.save(figure, __file__, "entropies", (__file__, str(table4.__file__)))


def _both(row: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Returns shares of inputs by entropy, inside and outside."""
    inside, outside = row.get("curve of entropy") or [row[f"curve of entropies {at}"] for at in ("inside", "outside")]
    return [value / sum(inside) for value in inside], [value / sum(outside) for value in outside]


ROWS = {
    "network": ("network", ""), "KFAC, sampling": ("LA, KFAC", "sampling"), "KFAC, GLM": ("LA, KFAC", "GLM"),
    "KFAC, streamlined": ("LA, KFAC", "streamlined"),
    "KFAC, streamlined, diagonal mode": ("LA, KFAC", "streamlined, diagonal"),
    "KFAC with bounded evidence, streamlined": ("LA, KFAC, bounded evidence", "streamlined"),
    "mean field by IVON, sampling": ("MFVI", "sampling"), "mean field by IVON, streamlined": ("MFVI", "streamlined"),
    "diagonal, linearised": ("LA, diagonal", "streamlined, diagonal"), "diagonal, moments": ("LA, diagonal", "moments"),
}  # fmt: skip
"""Row of the tables -> posterior and way."""

OF_PAPER = {
    "KFAC, sampling": ("table 2", "LA sampling"), "KFAC, GLM": ("table 2", "LA GLM"),
    "KFAC, streamlined": ("table 2", "LA streamlined"),
    "mean field by IVON, sampling": ("table 2", "MFVI sampling"),
    "mean field by IVON, streamlined": ("table 2", "MFVI streamlined"),
    "diagonal, linearised": ("table 3", "linear"), "diagonal, moments": ("table 3", "moments"),
}  # fmt: skip
"""Row of the tables -> table and row of the paper."""


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the scores of each data set beside the paper's."""
    found = {}
    for name, posteriors in results["table"].items():
        rows = {}
        for row, (posterior, way) in ROWS.items():
            of = posteriors[posterior][way] if way else {"plain": posteriors[posterior]}
            table, label = OF_PAPER.get(row, ("", ""))
            cells = [f"{PUBLISHED[table][name][label][1]:.3f}" if table else "", shown(of["plain"]["accuracy"], 1, 100)]
            cells += [shown(of.get(kind, {}).get("nlpd")) for kind in ("plain", "scaled")]
            kinds = [(kind, key) for key in ("ece", "auroc") for kind in ("plain", "scaled")]
            rows[row] = cells + [shown(of.get(kind, {}).get(key)) for kind, key in kinds]
        found[name] = grid(COLUMNS, rows)
    return found


COLUMNS = (
    "paper's NLPD (factor for streamlined only)", "accuracy, %", "NLPD", "NLPD x factor", "ECE", "ECE x factor",
    "AUROC", "AUROC x factor",
)  # fmt: skip
