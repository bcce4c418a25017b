"""VaLLA by the published objective, constant rate and stop, and the rows to beat: one number from held-out data."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from lapwing.evaluation import metrics
from papers.common.data import Batches, batched
from papers.common.results import Rows, once
from papers.common.scores import class_scores, entropy, probabilities
from papers.common.tables import grid, shown
from papers.valla.figure4 import TABLES, TableTask, regression_scores
from papers.valla.figure5 import ImageTask, latents

STEPS = 2000
"""Most batches of 100. The paper does not give a number for tables, and has up to 40 000 for images."""

RATE = 0.02
"""Constant learning rate, in lapwing's units; the paper's 1e-3 is in other units."""

EVERY = 100
"""Batches between two looks at the held-out data, as in appendix D."""

HELD_OUT = 1000
"""Most samples that stop a fit, or that choose δ, σ² and temperature."""


def run(
    seeds: Sequence[int] = (0, 1), names: Sequence[str] = ("mnist", "fashion_mnist", *TABLES), tested: int = 1500
) -> dict[str, Any]:
    """Returns scores of the published fit and of the rows to beat, on images and tables."""
    rows = Rows(__file__, {"steps": STEPS, "rate": RATE, "held out": HELD_OUT, "tested": tested})
    for seed in seeds:
        for name in names:
            if name in TABLES:
                _add_table(rows, name, seed)
            else:
                _add_images(rows, name, seed, tested)
    return rows.all()


PRIOR_ALONE = lw.VaLLA(1, lw.NaturalGradient(steps=1))
"""One inducing point and one batch: next to no data, so the variance is `‖J(x)‖²/δ`."""


def _add_images(rows: Rows, name: str, seed: int, tested: int) -> None:
    run, task = f"{name}, seed {seed}", once(lambda: ImageRows(ImageTask.load(name, seed, tested), seed))
    rows.add(run, "network", lambda: task().network(1.0))
    rows.add(run, "one temperature", lambda: task().one_temperature())
    rows.add(run, "prior alone, validated", lambda: task().validated(PRIOR_ALONE))
    rows.add(run, "recommended call", lambda: task().validated(None))
    rows.add(run, "VaLLA 100", lambda: task().published())


def _add_table(rows: Rows, name: str, seed: int) -> None:
    run, task = f"{name}, seed {seed}", once(lambda: TableRows(TableTask.load(name, seed), seed))
    rows.add(run, "network", lambda: task().network(task().task.data.train))
    rows.add(run, "one noise variance", lambda: task().network(task().held_out))
    rows.add(run, "prior alone, validated", lambda: task().validated(PRIOR_ALONE))
    rows.add(run, "recommended call", lambda: task().validated(None))
    rows.add(run, "VaLLA 100", lambda: task().published())


def published_fit(val: Batches, link: Any = None) -> lw.VaLLA:
    """Returns VaLLA with M = 100 by the α-divergence at α = 1, which ends at the first rise of the validation NLL."""
    fit = lw.AlphaDivergence(
        steps=STEPS, learning_rate=RATE, validation=val, every=EVERY, link=link, schedule="constant", stop="first rise"
    )
    return lw.VaLLA(100, fit)


def path_of(posterior: lw.Posterior) -> dict[str, Any]:
    """Returns the steps of a published fit, its validation NLL by looks, and whether the rise ended it."""
    looks = posterior.history["validation"].tolist()
    rose = len(looks) > 1 and looks[-1] > looks[-2]
    return {"steps": len(posterior.history["objective"]), "looks": looks, "ended by the rise": float(rose)}


class ImageRows:
    """Rows of an image data set.

    Attributes:
        task: network and images.
        seed: of the fits.
        held_out: at most `HELD_OUT` validation images in batches of 100.
    """

    def __init__(self, task: ImageTask, seed: int) -> None:
        self.task, self.seed, self.held_out = task, seed, task.data.val[: HELD_OUT // 100]

    def network(self, temperature: float) -> dict[str, float]:
        """Returns the scores of the network with its logits divided by a number."""
        with torch.no_grad():
            inside, outside = (self.task.model(x) / temperature for x in (self.task.x, self.task.data.foreign))
        return {**self._scores(inside.softmax(-1), outside.softmax(-1)), "temperature": temperature}

    def one_temperature(self) -> dict[str, float]:
        """Returns the scores of the network at the temperature of the held-out images."""
        return self.network(lw.fit(self.task.model, self.held_out, lw.TemperatureScaling()).logit_temperature)

    def validated(self, method: lw.Method | None) -> dict[str, Any]:
        """Returns the scores of a posterior whose δ and temperature are of the held-out images."""
        options: dict[str, Any] = {} if method is None else {"params": lw.everything}
        posterior = lw.fit(
            self.task.model, self.task.data.train[:100], method, validation=self.held_out, seed=self.seed,
            data_size=sum(len(x) for x, _ in self.task.data.train), memory=2**30, **options,
        )  # fmt: skip
        return self._by_link(posterior, {"probit": lw.Probit()})

    def published(self) -> dict[str, Any]:
        """Returns the scores of the published fit on all training images, by the paper's link and by Monte Carlo."""
        link, start = lw.Probit(scale="marginal"), time.process_time()
        posterior = lw.fit(
            self.task.model,
            self.task.data.train,
            published_fit(self.held_out, link),
            seed=self.seed,
            memory=2**30,
            tune=None,
        )
        seconds = time.process_time() - start
        links = {"textbook probit": link, "Monte Carlo": lw.SampledLink(512)}
        return {**self._by_link(posterior, links), **path_of(posterior), "seconds": seconds}

    def _by_link(self, posterior: lw.Posterior, links: dict[str, Any]) -> dict[str, Any]:
        inside, outside = latents(posterior, self.task.x), latents(posterior, self.task.data.foreign)
        found: dict[str, Any] = {
            name: self._scores(*(probabilities(posterior, latent, link) for latent in (inside, outside)))
            for name, link in links.items()
        }
        numbers = {"prior_precision": posterior.prior_precision, "temperature": posterior.logit_temperature}
        return {**found, **{name: value for name, value in numbers.items() if isinstance(value, float)}}

    def _scores(self, inside: Tensor, outside: Tensor) -> dict[str, float]:
        auroc = metrics.auroc(entropy(inside), entropy(outside))
        return {**class_scores(inside, self.task.y), "auroc": float(auroc)}


class TableRows:
    """Rows of a regression table.

    Attributes:
        task: network and table.
        seed: of the fits.
        held_out: at most `HELD_OUT` validation rows, evenly spread.
    """

    def __init__(self, task: TableTask, seed: int) -> None:
        x, y = (torch.cat(parts) for parts in zip(*task.val, strict=True))
        step = -(-len(x) // HELD_OUT)
        self.task, self.seed, self.held_out = task, seed, (x[::step], y[::step])

    def network(self, rows: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """Returns the scores of the network with the mean squared residual of some rows as noise variance."""
        x, y = self.task.test
        with torch.no_grad():
            mean = torch.cat([self.task.model(part) for part in x.split(500)])
        noise = float(self.task.errors(rows).mean())
        return _without_curve(regression_scores(mean, torch.zeros_like(mean), noise, y, self.task.data.scale))

    def validated(self, method: lw.Method | None) -> dict[str, Any]:
        """Returns the scores of a posterior whose δ and σ² are of the held-out rows."""
        options: dict[str, Any] = {} if method is None else {"params": lw.everything}
        posterior = lw.fit(
            self.task.model, self.task.train[:20], method, validation=batched(*self.held_out, 500), seed=self.seed,
            data_size=len(self.task.data.train[0]), likelihood="gaussian", **options,
        )  # fmt: skip
        return _without_curve(self.task.score(posterior))

    def published(self) -> dict[str, Any]:
        """Returns the scores of the published fit on all training rows."""
        start = time.process_time()
        train = [part for x, y in self.task.train for part in batched(x, y, 100)]
        method = published_fit(batched(*self.held_out, 500))
        posterior = lw.fit(self.task.model, train, method, likelihood="gaussian", seed=self.seed, tune=None)
        seconds = time.process_time() - start
        return {**_without_curve(self.task.score(posterior)), **path_of(posterior), "seconds": seconds}


def _without_curve(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "curve"}


LABELS = ("network", "one temperature", "one noise variance", "prior alone, validated", "recommended call", "VaLLA 100")


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the scores on images by link, the NLL on tables, and how the published fits ended."""
    images: dict[str, list[str]] = {}
    regressions: dict[str, dict[str, str]] = {}
    ends: dict[str, list[str]] = {}
    for task, rows in results["table"].items():
        for label in LABELS:
            row = rows.get(label)
            if row is None:
                continue
            if task in TABLES:
                regressions.setdefault(label, {})[task] = shown(row["nll"])
            else:
                links = {name: row[name] for name in ("textbook probit", "probit", "Monte Carlo") if name in row}
                for link, found in (links or {"": row}).items():
                    measures = (("nll", 3, 1), ("accuracy", 1, 100), ("ece", 3, 1), ("brier", 3, 1), ("auroc", 3, 1))
                    cells = [shown(found[name], digits, scale) for name, digits, scale in measures]
                    images[f"{task}: {label}" + f", {link}" * bool(link)] = cells
        if "VaLLA 100" in rows:
            found = rows["VaLLA 100"]
            looks = [look["mean"] for look in found["looks"].values()] if "looks" in found else []
            ends[task] = [
                shown(found["steps"], 0), shown(found["ended by the rise"], 1), shown(found["seconds"], 0),
                *(f"{look:.3f}" for look in (looks[0], min(looks))),
            ]  # fmt: skip
    columns = list(dict.fromkeys(task for cells in regressions.values() for task in cells))
    return {
        "images": grid(("NLL", "accuracy, %", "ECE", "Brier", "AUROC"), images),
        "tables": grid(columns, {label: [of.get(task, "") for task in columns] for label, of in regressions.items()}),
        "ends": grid(("steps", "share ended by the rise", "seconds", "validation NLL at the start", "lowest"), ends),
    }
