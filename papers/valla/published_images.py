"""Figures 5 and 6 by VaLLA's published objective, rate and stop, rotated images too, and the rows to beat."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import lapwing as lw
from papers.common.results import Rows, once
from papers.common.tables import grid, shown
from papers.valla.figure5 import ImageTask
from papers.valla.published import HELD_OUT, PRIOR_ALONE, RATE, ends, path_of, published_fit

STEPS = 6000
"""Most batches of 100; the paper has up to 40 000."""


POINTS = (100, 200)
"""M, the numbers of inducing points."""


def run(
    seeds: Sequence[int] = range(5), names: Sequence[str] = ("fashion_mnist", "mnist"), tested: int = 1500
) -> dict[str, Any]:
    """Returns scores of the published fits and of the rows to beat."""
    rows = Rows(__file__, {"steps": STEPS, "rate": RATE, "held out": HELD_OUT, "tested": tested})
    for name in names:
        for seed in seeds:
            run = f"{name}, seed {seed}"
            task = once(lambda name=name, seed=seed: ImageRows(ImageTask.load(name, seed, tested), seed))  # type: ignore[misc]
            rows.add(run, "network", lambda task: task().network(1.0), task)
            rows.add(run, "one temperature", lambda task: task().one_temperature(), task)
            rows.add(run, "prior alone, validated", lambda task: task().validated(PRIOR_ALONE), task)
            rows.add(run, "recommended call", lambda task: task().validated(None), task)
            for points in POINTS:
                rows.add(run, f"VaLLA {points}", lambda task, points: task().published(points, None), task, points)
    return rows.all()


class ImageRows:
    """Rows of an image data set.

    Attributes:
        task: network and images.
        seed: of the fits.
        held_out: at most `HELD_OUT` validation images in batches of 100.
    """

    def __init__(self, task: ImageTask, seed: int) -> None:
        self.task, self.seed, self.held_out = task, seed, task.data.val[: HELD_OUT // 100]

    def network(self, temperature: float) -> dict[str, Any]:
        """Returns the scores of the network with its logits divided by a number."""
        return {**self.task.network_scores(temperature), "temperature": temperature}

    def one_temperature(self) -> dict[str, Any]:
        """Returns the scores of the network at the temperature of the held-out images."""
        return self.network(lw.fit(self.task.model, self.held_out, lw.TemperatureScaling()).logit_temperature)

    def validated(self, method: lw.Method | None) -> dict[str, Any]:
        """Returns the scores of a posterior whose δ and temperature are of the held-out images."""
        options: dict[str, Any] = {} if method is None else {"params": lw.everything}
        posterior = lw.fit(
            self.task.model, self.task.data.train[:100], method, validation=self.held_out, seed=self.seed,
            data_size=sum(len(x) for x, _ in self.task.data.train), memory=2**30, **options,
        )  # fmt: skip
        return self._by_link(posterior, {"probit": lw.Probit(scale="mean")})

    def published(self, points: int, start: float | None, rate: float = RATE) -> dict[str, Any]:
        """Returns the scores of the published fit on all training images, by the paper's link and by Monte Carlo."""
        link, begin = lw.Probit(scale="marginal"), time.process_time()
        method = published_fit(self.held_out, link, STEPS, points, start, rate)
        posterior = lw.fit(
            self.task.model, self.task.data.train, method, seed=self.seed, memory=2**30, tune=None
        )  # fmt: skip
        seconds = time.process_time() - begin
        links = {"textbook probit": link, "Monte Carlo": lw.SampledLink(512)}
        return {**self._by_link(posterior, links), **path_of(posterior), "seconds": seconds}

    def _by_link(self, posterior: lw.Posterior, links: dict[str, Any]) -> dict[str, Any]:
        temperature = posterior.logit_temperature
        return self.task.score(posterior, links) | ({} if temperature is None else {"temperature": temperature})


HEADINGS = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST"}
FITS = tuple(f"VaLLA {points}" for points in POINTS)
LABELS = ("network", "one temperature", "prior alone, validated", "recommended call", *FITS)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the scores by link, and how the published fits ended."""
    measures = (("nll", 3, 1), ("accuracy", 1, 100), ("ece", 3, 1), ("brier", 3, 1), ("auroc", 3, 1))
    rows = {}
    for key, name in HEADINGS.items():
        of = results["table"][key]
        for label in LABELS:
            row = of.get(label, {})
            links = {link: row[link] for link in ("textbook probit", "probit", "Monte Carlo") if link in row}
            for link, found in (links or {"": row}).items() if row else ():
                cells = [shown(found[measure], digits, scale) for measure, digits, scale in measures]
                cells += [shown(found["rotated"]["90"][measure], 2) for measure in ("nll", "ece")]
                rows[f"{name}: {label}" + f", {link}" * bool(link)] = cells
    columns = ("NLL", "accuracy, %", "ECE", "Brier", "AUROC", "NLL at 90°", "ECE at 90°")
    return {"images": grid(columns, rows), "ends": ends(results["runs"], HEADINGS, FITS)}
