"""VaLLA on images (Ortega et al. 2024): Figures 5 and 6 on MLPs, Table 1's row and Figure 7 on the ResNet-20."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw

from ..covariance import Latent
from ..evaluation import metrics
from ..tuning import Training, Tuning
from .valla import IMAGES, Pictures, pictures, trained
from .valla_tables import Untuned

LINKS: dict[str, Any] = {
    "probit": lw.Probit(), "textbook probit": lw.Probit(marginal=True), "Monte Carlo": lw.SampledLink(512),
}  # fmt: skip
DRAWS_LINKS = {"Monte Carlo": lw.SampledLink(512)}
"""For latents that are draws, such as sampled LLA's."""

SHOWN = 100
"""Batches of 100 training images that fits see, their curvature scaled to all 55 000."""


def class_scores(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Returns accuracy, NLL, ECE and Brier score."""
    return {
        "accuracy": float(metrics.accuracy(probs, labels)),
        "nll": float(metrics.negative_log_likelihood(probs, labels)),
        "ece": float(metrics.expected_calibration_error(probs, labels)),
        "brier": float(metrics.brier(probs, labels)),
    }


def entropy(probs: Tensor) -> Tensor:
    """Returns the entropy (n,) of class probabilities."""
    return torch.special.entr(probs.double()).sum(-1)


def latents(posterior: lw.Posterior, x: Tensor, size: int = 250) -> Any:
    """Returns the latent at images, in one piece."""
    return posterior.latent([(part, torch.zeros(len(part))) for part in x.split(size)])


@dataclass(frozen=True)
class ImageTask:
    """A trained network for images, and its data.

    Attributes:
        model: the network.
        data: its images.
        x: test images.
        y: their labels.
    """

    model: nn.Module
    data: Pictures
    x: Tensor
    y: Tensor

    @classmethod
    def load(cls, name: str, seed: int, tested: int = 10_000, cache: Path | None = None) -> ImageTask:
        """Reads MNIST or Fashion-MNIST and trains the 2 x 200 tanh MLP, or reads it from the cache."""
        data = pictures(name, seed, tested)
        whole = torch.cat([x for x, _ in data.train]), torch.cat([y for _, y in data.train])
        model = trained((784, 200, 200, 10), whole, IMAGES, seed, name, cache)
        return cls(model, data, torch.cat([x for x, _ in data.test]), torch.cat([y for _, y in data.test]))

    def network_scores(self, rotated: Mapping[int, Tensor]) -> dict[str, Any]:
        """Returns MAP's scores."""
        with torch.no_grad():
            inside, outside = self.model(self.x).softmax(-1), self.model(self.data.foreign).softmax(-1)
            found: dict[str, Any] = self._scores(inside, outside)
            found["rotated"] = {str(a): class_scores(self.model(x).softmax(-1), self.y[: len(x)])
                                for a, x in rotated.items()}  # fmt: skip
        return {"softmax": found}

    def score(self, posterior: lw.Posterior, rotated: Mapping[int, Tensor]) -> dict[str, Any]:
        """Returns a posterior's scores by link; those of rotated images too.

        Args:
            posterior: of this network.
            rotated: angle -> the first so many test images, rotated.
        """
        inside, outside = latents(posterior, self.x), latents(posterior, self.data.foreign)
        turned = {angle: latents(posterior, x) for angle, x in rotated.items()}
        found: dict[str, Any] = {}
        for name, link in LINKS.items() if isinstance(inside, Latent) else DRAWS_LINKS.items():

            def probs(latent: Any, link: Any = link) -> Tensor:
                prediction = posterior.likelihood.predict(latent, link)
                assert hasattr(prediction, "probs")
                return prediction.probs

            found[name] = self._scores(probs(inside), probs(outside))
            found[name]["rotated"] = {
                str(angle): class_scores(probs(latent), self.y[: len(rotated[angle])])
                for angle, latent in turned.items()
            }
        return {**found, "prior_precision": posterior.prior_precision}

    def _scores(self, inside: Tensor, outside: Tensor) -> dict[str, float]:
        return {**class_scores(inside, self.y), "auroc": float(metrics.auroc(entropy(inside), entropy(outside)))}

    def fit(self, method: lw.Method, params: Any = lw.everything, seed: int = 0, **options: Any) -> lw.Posterior:
        """Fits a method, δ open, tuned by nothing unless the options say so."""
        count = sum(len(x) for x, _ in self.data.train)
        options = {"tune": Untuned(), "memory": 2**30, "data_size": count, **options}
        return lw.fit(self.model, self.data.train[:SHOWN], method, params=params, seed=seed, **options)


METHODS: dict[str, tuple[lw.Method, Any]] = {
    "diagonal": (lw.Diagonal(), lw.everything),
    "KFAC": (lw.KFAC(), lw.everything),
    "last layer": (lw.KFAC(), lw.last_layer),
    "ELLA": (lw.ELLA(rank=20, rows=1000), lw.everything),
    "VaLLA 100, natural gradient": (lw.VaLLA(100, lw.NaturalGradient(steps=50)), lw.everything),
}
"""Methods whose δ is tuned afterwards; natural gradients of 50 batches of 100, ELLA's rows half of the paper's."""


def tuned_scores(
    task: ImageTask,
    seed: int,
    rotated: Mapping[int, Tensor],
    method: lw.Method,
    params: Any = lw.everything,
    kinds: Sequence[str] = ("evidence", "validation"),
) -> dict[str, Any]:
    """Fits a method once, tunes δ in several ways and scores each.

    Returns:
        tuning -> scores by link, and processor seconds of fit and tuning together; rotated images for the first alone.
    """
    tunings: dict[str, Tuning] = {
        "evidence": lw.Evidence(), "bounded evidence": lw.BoundedEvidence(), "validation": lw.Validation(task.data.val),
    }  # fmt: skip
    start = time.process_time()
    posterior = task.fit(method, params, seed)
    seconds = time.process_time() - start
    found: dict[str, Any] = {}
    for kind in kinds:
        start = time.process_time()
        tuned = tunings[kind].tune(posterior, Training(task.data.train))
        spent = seconds + time.process_time() - start
        found[kind] = {**task.score(tuned, rotated if kind == kinds[0] else {}), "seconds": spent}
    return found


def published_row(task: ImageTask, seed: int, rotated: Mapping[int, Tensor], steps: int = 250) -> dict[str, Any]:
    """Fits VaLLA as published, by the α-divergence over Z, A and δ in batches of 100, 100 inducing points.

    Args:
        task: network and images.
        seed: of the fit.
        rotated: angle -> images.
        steps: batches at most; the NLL of 500 validation images may end them earlier.

    Returns:
        scores by link, processor seconds, steps taken, validation NLL by looks.
    """
    start = time.process_time()
    val = task.data.val[:5]
    fit = lw.AlphaDivergence(steps=steps, learning_rate=0.05, validation=val, every=50, patience=2)
    posterior = task.fit(lw.VaLLA(100, fit), seed=seed, tune=None)
    seconds = time.process_time() - start
    history = posterior.history
    return {
        **task.score(posterior, rotated), "seconds": seconds, "steps": len(history["objective"]),
        "looks": history["validation"].tolist(),
    }  # fmt: skip


def sampled_row(
    task: ImageTask, seed: int, rotated: Mapping[int, Tensor], draws: int = 16, em_steps: int = 3, shown: int = 2000
) -> dict[str, Any]:
    """Fits sampled LLA: δ by EM; the paper has 32 draws and 8 steps of EM on all images.

    Returns:
        scores by link, processor seconds.
    """
    start = time.process_time()
    count = sum(len(x) for x, _ in task.data.train)
    posterior = lw.fit(
        task.model, task.data.train[: shown // 100], lw.SampledLLA(draws, em_steps=em_steps), seed=seed,
        data_size=count, memory=2**30,
    )  # fmt: skip
    return {**task.score(posterior, rotated), "seconds": time.process_time() - start, "images": shown}
