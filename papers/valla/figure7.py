"""Figure 7: the CIFAR-10 ResNet-20 on clean and corrupted images. Table 1 has a row in ELLA's `table1`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from lapwing.tuning import Tuning
from papers.common import drawing
from papers.common.cifar import Cifar, normalised, pixels
from papers.common.corruptions import COMMON, corrupt
from papers.common.data import joined
from papers.common.results import Rows, once
from papers.common.scores import class_scores, probabilities
from papers.common.tables import grid, shown
from papers.valla.figure5 import LINKS, latents


def run(seeds: Sequence[int] = range(5), shown: int = 200, reported: int = 1000, each: int = 8) -> dict[str, Any]:
    """Returns scores of every method; curvatures are of `shown` images, 200 of the first 2 000 test images validate."""
    rows = Rows(__file__, {"images": shown, "reported": reported, "corrupted of a kind": each})
    return rows.filled(_add, seeds, [shown], [reported], [each])


def _add(rows: Rows, seed: int, shown: int, reported: int, each: int) -> None:
    run, task = f"seed {seed}", once(lambda: CifarTask.load(seed, shown, reported, each))
    rows.add(run, "MAP", lambda: task().network_scores())
    rows.add(run, "one temperature", lambda: task().one_temperature())
    methods: dict[str, tuple[lw.Method, Any, type[Tuning]]] = {
        "last layer, early stopping": (lw.Full(), lw.last_layer, lw.EarlyStopping),
        "diagonal": (lw.Diagonal(), lw.everything, lw.Validation),
        "KFAC": (lw.KFAC(), lw.everything, lw.Validation),
        "VaLLA 100, closed form": (lw.VaLLA(100), lw.everything, lw.Validation),
        "ELLA, early stopping": (lw.ELLA(rank=20, rows=200), lw.everything, lw.EarlyStopping),
    }
    for label, chosen in methods.items():
        rows.add(run, label, lambda m, p, tune: task().row(m, p, tune(task().setup.val[:2]), seed), *chosen)
    rows.add(run, "sampled LLA", lambda: task().sampled_row(seed))


SEVERITIES = (1, 3, 5)


@dataclass(frozen=True)
class CifarTask:
    """The ResNet-20, training images, some of the first 2 000 test images to validate, others to report.

    Attributes:
        setup: network and data.
        x: reported images.
        y: their labels.
        corrupted: severity -> images and labels, as many of each of 19 kinds.
    """

    setup: Cifar
    x: Tensor
    y: Tensor
    corrupted: dict[int, tuple[Tensor, Tensor]]

    @classmethod
    def load(cls, seed: int, shown: int, reported: int, each: int) -> CifarTask:
        """Reads the data.

        Args:
            seed: of the training images shown, and of the corruptions.
            shown: training images.
            reported: test images.
            each: corrupted images of one kind and severity.
        """
        setup = Cifar.load(seed, shown, reported)
        x, y = joined(setup.test)
        raw, corrupted = pixels(x), {}
        for severity in SEVERITIES:
            parts = [slice(each * i, each * (i + 1)) for i in range(len(COMMON))]
            found = [corrupt(raw[part], kind, severity, seed=seed) for part, kind in zip(parts, COMMON, strict=True)]
            corrupted[severity] = normalised(torch.cat(found)), torch.cat([y[part] for part in parts])
        return cls(setup, x, y, corrupted)

    def network_scores(self, temperature: float = 1.0) -> dict[str, Any]:
        """Returns the scores of the network with its logits divided by a number, and NLL by kind of corruption."""
        with torch.no_grad():
            logits = torch.cat([self.setup.model(part) for part in self.x.split(250)])
            turned = {s: (self.setup.model(x) / temperature).softmax(-1) for s, (x, _) in self.corrupted.items()}
        clean = class_scores((logits / temperature).softmax(-1), self.y)
        return {"softmax": clean, "corrupted": {str(s): self._by_kind(s, probs) for s, probs in turned.items()}}

    def one_temperature(self) -> dict[str, Any]:
        """Returns the scores of the network at the temperature of the validation images."""
        fitted = lw.fit(self.setup.model, self.setup.val[:2], lw.TemperatureScaling())
        assert isinstance(fitted.logit_temperature, float)
        return {**self.network_scores(fitted.logit_temperature), "temperature": fitted.logit_temperature}

    def row(self, method: lw.Method, params: Any, tune: Tuning | None, seed: int, **options: Any) -> dict[str, Any]:
        """Fits a method and returns its scores by link, NLL by kind of corruption (probit), and seconds."""
        start = time.process_time()
        posterior = self._fit(method, params, tune, seed, **options)
        return self._scored(posterior, time.process_time() - start)

    def sampled_row(
        self, seed: int, precisions: Sequence[float] = (500.0, 1500.0, 5000.0), draws: int = 16
    ) -> dict[str, Any]:
        """Fits sampled LLA at several δ and scores the one with the lowest NLL on 200 validation images."""
        start, found = time.process_time(), []
        x, y = joined(self.setup.val[:2])
        for delta in precisions:
            posterior = self._fit(lw.SampledLLA(draws, em_steps=0), lw.everything, None, seed, prior_precision=delta)
            probs = probabilities(posterior, latents(posterior, x, 50), lw.Probit(scale="mean"))
            found.append((class_scores(probs, y)["nll"], posterior))
        posterior = min(found, key=lambda pair: pair[0])[1]
        return self._scored(posterior, time.process_time() - start)

    def _fit(self, method: lw.Method, params: Any, tune: Tuning | None, seed: int, **options: Any) -> lw.Posterior:
        return lw.fit(
            self.setup.model, self.setup.train, method, params=params, tune=tune, data_size=50_000, seed=seed,
            memory=2**31, **options,
        )  # fmt: skip

    def _scored(self, posterior: lw.Posterior, seconds: float) -> dict[str, Any]:
        start = time.process_time()
        latent = latents(posterior, self.x, 50)
        predicted = time.process_time()
        found: dict[str, Any] = {}
        for name, link in LINKS.items():
            found[name] = class_scores(probabilities(posterior, latent, link), self.y)
        turned = {
            s: probabilities(posterior, latents(posterior, x, 50), lw.Probit(scale="mean"))
            for s, (x, _) in self.corrupted.items()
        }
        return {
            **found, "corrupted": {str(s): self._by_kind(s, probs) for s, probs in turned.items()},
            "prior_precision": posterior.prior_precision, "images": posterior.samples, "seconds": seconds,
            "predict_seconds": predicted - start,
        }  # fmt: skip

    def _by_kind(self, severity: int, probs: Tensor) -> dict[str, Any]:
        labels = self.corrupted[severity][1]
        losses = -probs.double()[torch.arange(len(labels)), labels].clamp_min(1e-30).log()
        kinds = losses.reshape(len(COMMON), -1).mean(1).tolist()
        return {**class_scores(probs, labels), "nll by kind": kinds}


def draw(results: Mapping[str, Any]) -> None:
    """Draws the NLL of corrupted images by severity, a box over 19 kinds each."""
    run = next(iter(results["runs"].values()))
    figure, ((axis,),) = drawing.panels(1, 1, (8, 3.6))
    severities = list(next(iter(run.values()))["corrupted"])
    groups = {
        "network" if name == "MAP" else name: [row["nll by kind"] for row in found["corrupted"].values()]
        for name, found in run.items()
    }
    drawing.boxes(axis, groups, severities)
    axis.set(xlabel="strength of the corruption", ylabel="NLL of a kind, seed 0")
    axis.legend(frameon=False, fontsize=8)
    drawing.save(figure, __file__)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the scores of each method on clean and corrupted images, and what they cost."""
    columns = ["NLL, probit", "NLL, Monte Carlo", "ECE", *(f"NLL at strength {severity}" for severity in SEVERITIES)]
    rows = {}
    for name, row in results["table"][""].items():
        scores = row.get("softmax") or row["probit"]
        cells = [shown(scores["nll"]), shown(row.get("Monte Carlo", {}).get("nll")), shown(scores["ece"])]
        cells += [shown(row["corrupted"][str(severity)]["nll"], 2) for severity in SEVERITIES]
        images = (run.get(name, {}).get("images", "") for run in results["runs"].values())
        seconds = (shown(row.get(key), 0) for key in ("seconds", "predict_seconds"))
        rows[name] = [*cells, ", ".join(str(count) for count in images).strip(", "), *seconds]
    return {"scores": grid([*columns, "images by seed", "fit, s", "predictions, s"], rows)}
