"""Table 1, ResNet-20: all methods on the same images, with the network at one temperature and the prior alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from lapwing.covariance import AnyLatent, Latent, has_prior
from lapwing.covariance.terms import DenseTerm
from lapwing.tangent import Tangent, Vectors
from lapwing.tuning import Training, Tuning
from papers.common import drawing
from papers.common.cifar import Cifar, LastLayer
from papers.common.data import Batches
from papers.common.results import Rows, once
from papers.common.scores import class_scores
from papers.common.tables import grid, rounded, shown
from papers.common.training import kept_tensors
from papers.ella.shared import balanced_directions, contracted, curvatures, ella_latent

PUBLISHED = {
    "network": 0.282, "MFVI-BF": 0.231, "last layer": 0.269, "last layer, KFAC": 0.271, "diagonal": 0.728,
    "KFAC": 0.852, "ELLA": 0.233,
}  # fmt: skip
"""NLL, on other weights of that network."""

LINK = lw.SampledLink(512)
"""The link of all scores, as published. Choices on validation images are by the default link, which needs no draws."""

DELTAS = tuple(10 ** (i / 2) for i in range(-8, 13))
TEMPERATURES = tuple(10 ** (i / 20) for i in range(21))
PAPER_DELTA = 25.0
"""The paper's prior variance is .04."""

ALL = 50_000
"""Training images of the network, 14 000 of which are at hand."""

PARTS = (1000, 2000, 4000)
"""First reported images, which other tables of the page report."""

COUNTS = (0, *(2**i for i in range(2, 14)))
"""n, the numbers of images whose curvature is kept."""


def run(seeds: Sequence[int] = (0, 1), shown: int = 1024, curved: int = 500, reported: int = 1000) -> dict[str, Any]:
    """Returns scores of the last layer on 8 000 test images, and of all weights on the first 1 000 of them.

    The 2 000 other test images validate the last layer, 500 of them all weights. A prediction by all weights costs as
    much as 25 to 45 forward passes. Nothing is random but ELLA's rows and the draws of the link.

    Args:
        seeds: of ELLA's rows.
        shown: training images of ELLA's curvature; the last layer has 14 000.
        curved: training images of the curvature of diagonal and KFAC, scaled to all.
        reported: test images of all weights.
    """
    facts = {"images of ELLA's curvature": shown, "images of diagonal and KFAC": curved, "reported": reported}
    rows = Rows(__file__, facts)
    _add_last_layer(rows, once(lambda: LastLayer.load(0)))
    whole = once(lambda: Whole(seeds, curved, reported))
    _add_whole(rows, whole)
    for i, seed in enumerate(seeds):
        _add_ella(rows, whole, i, seed, shown)
    return rows.all()


def scored(latent: AnyLatent, labels: Tensor, temperature: float = 1.0) -> dict[str, Any]:
    """Returns scores on all images and on the first ones, by 512 draws, and the NLL by the default link."""
    likelihood = lw.Categorical(logit_temperature=temperature)
    prediction = likelihood.predict(latent, LINK)
    logs = prediction.log_prob(labels)  # of `probs` in float32 some may be 0
    found: dict[str, Any] = {}
    for count in (*(count for count in PARTS if count < len(labels)), len(labels)):
        scores = class_scores(prediction.probs[:count], labels[:count])
        found[f"first {count}"] = {**scores, "nll": -float(logs[:count].double().mean())}
    plain = -float(likelihood.predict(latent).log_prob(labels).double().mean())
    return {**found.pop(f"first {len(labels)}"), "nll by the default link": plain, **found}


def joined(part: Batches) -> tuple[Tensor, Tensor]:
    """Returns inputs and labels of all batches."""
    x, y = zip(*part, strict=True)
    return torch.cat(x), torch.cat(y)


def best_point(
    latent: Callable[[float], Latent],
    labels: Tensor,
    temperatures: Sequence[float] = (1.0,),
    deltas: Sequence[float] = DELTAS,
) -> tuple[float, float, float]:
    """Returns the lowest validation NLL by the default link over δ and T, with the δ and T that have it."""
    found = []
    for delta in deltas:
        at = latent(delta)
        for temperature in temperatures:
            likelihood = lw.Categorical(logit_temperature=temperature)
            found.append((-float(likelihood.predict(at).log_prob(labels).mean()), delta, temperature))
    return min(found)


def network_latent(outputs: Tensor) -> Latent:
    """Returns latents without variance."""
    return Latent(outputs, (DenseTerm(outputs.new_zeros(*outputs.shape, outputs.shape[-1])),))


def _add_last_layer(rows: Rows, setup: Callable[[], LastLayer]) -> None:
    """Adds the network, one temperature, and all rows of the last layer."""
    add = partial(rows.add, "network and last layer")
    add("network", lambda: scored(network_latent(outputs_of(setup(), setup().test)), joined(setup().test)[1]))
    for count in (2000, 300):
        name = "network, one temperature" + f", {count} rows" * (count != 2000)
        add(name, lambda n: _posterior_row(setup(), tempered(setup(), n)), count)
    add("last layer, prior alone", lambda: _prior_alone(setup()))
    full, kfac = lw.Full(), lw.KFAC()
    for name, method in (("last layer", full), ("last layer, KFAC", kfac)):
        for how, tune in (
            ("evidence", lambda: lw.Evidence()),
            ("validation", lambda: lw.Validation(setup().val, tempered=False, tolerance=0.0)),
            ("validation with T", lambda: lw.Validation(setup().val)),
            ("early stopping", lambda: lw.EarlyStopping(setup().val)),
        ):
            add(f"{name}, {how}", lambda m, t: _posterior_row(setup(), fitted(setup(), m, tune=t())), method, tune)
    for count in (2000, 300):
        name = "recommended call" + f", {count} rows" * (count != 2000)
        add(name, lambda n: _posterior_row(setup(), fitted(setup(), validation=setup().val[: n // 100])), count)


def outputs_of(setup: LastLayer, part: Batches) -> Tensor:
    """Returns the outputs for features."""
    with torch.no_grad():
        return setup.layer(joined(part)[0])


def fitted(setup: LastLayer, method: lw.Method | None = None, **options: Any) -> lw.Posterior:
    """Fits the last layer to the features of training images."""
    return lw.fit(setup.layer, setup.train, method, data_size=ALL, **options)


def tempered(setup: LastLayer, count: int) -> lw.Posterior:
    """Returns the network at the temperature of the first validation images."""
    return lw.fit(setup.layer, setup.val[: count // 100], lw.TemperatureScaling())


def _posterior_row(setup: LastLayer, posterior: lw.Posterior) -> dict[str, Any]:
    """Returns the scores of a posterior of the last layer, and what was chosen."""
    x, y = joined(setup.test)
    temperature = posterior.logit_temperature or 1.0
    return {
        "prior precision": posterior.prior_precision, "T": temperature, "images": posterior.samples,
        **scored(posterior.latent(x), y, temperature),
    }  # fmt: skip


def prior_latent(setup: LastLayer, x: Tensor, delta: float) -> Latent:
    """Returns latents of the last layer's prior, with variance `(‖φ‖² + 1)/δ` of every output, for features φ."""
    with torch.no_grad():
        outputs = setup.layer(x)
    variance = (x.square().sum(-1) + 1) / delta
    return Latent(outputs, (DenseTerm(variance[:, None, None] * torch.eye(outputs.shape[-1])),))


def best_prior(setup: LastLayer) -> tuple[float, float]:
    """Returns the lowest validation NLL of the last layer's prior alone, and the δ that has it."""
    x, y = joined(setup.val)
    return best_point(partial(prior_latent, setup, x), y)[:2]


def _prior_alone(setup: LastLayer) -> dict[str, Any]:
    loss, delta = best_prior(setup)
    x, y = joined(setup.test)
    return {"prior precision": delta, "validation nll": loss, **scored(prior_latent(setup, x, delta), y)}


class Whole:
    """Posteriors of all weights on the ResNet-20: diagonal, KFAC, and what images give on ELLA's directions.

    Everything that takes minutes is kept: see `papers.common.training.kept_tensors`.

    Args:
        seeds: of ELLA's rows.
        curved: training images of the curvature of diagonal and KFAC.
        reported: test images.
    """

    rank, rows = 32, 512

    def __init__(self, seeds: Sequence[int], curved: int, reported: int) -> None:
        setup = Cifar.load(0, 14_000, reported)
        self.seeds, self.curved, self.setup = seeds, curved, replace(setup, val=setup.val[:5])

    @cached_property
    def tangent(self) -> Tangent:
        """The network with all its weights."""
        return Tangent.survey(self.setup.model, self.setup.train[0][0][:4], memory=2**30)

    @cached_property
    def posteriors(self) -> dict[str, lw.Posterior]:
        """Diagonal and KFAC, as fitted; `choices` has their prior precisions."""
        return {
            name: lw.fit(
                self.setup.model, self.setup.train[: self.curved // 100], method, params=lw.everything, tune=None,
                data_size=ALL, memory=2**30,
            )
            for name, method in {"diagonal": lw.Diagonal(), "KFAC": lw.KFAC()}.items()
        }  # fmt: skip

    @cached_property
    def choices(self) -> dict[str, Tensor]:
        """Method and tuning -> δ and T, tuned by the evidence, and on 500 validation images."""

        def make() -> dict[str, Tensor]:
            val, found = self.setup.val, {}
            tunings: dict[str, Tuning] = {
                "evidence": lw.Evidence(),
                "validation": lw.Validation(val, tempered=False, tolerance=0.0),
                "validation with T": lw.Validation(val),
            }
            for name, posterior in self.posteriors.items():
                for how, tune in tunings.items():
                    tuned = tune.tune(posterior, Training())
                    pair = (tuned.prior_precision, tuned.logit_temperature or 1.0)
                    found[f"{name}, {how}"] = torch.tensor(pair, dtype=torch.float64)
            return found

        return kept_tensors("resnet20_choices", make)

    @cached_property
    def directions(self) -> Tensor:
        """ELLA's directions of all seeds (seeds K, P)."""
        x, y = joined(self.setup.train)

        def make(seed: int) -> dict[str, Tensor]:
            tangent = Tangent.survey(self.setup.model, x[:4], memory=2**32)
            return {"W": balanced_directions(tangent, x, y, self.rows, self.rank, seed)}

        return torch.cat([kept_tensors(f"resnet20_directions_{s}", partial(make, s))["W"] for s in self.seeds])

    @cached_property
    def val(self) -> dict[str, Tensor]:
        """The validation images on ELLA's directions, with their prior covariance."""
        return self._kept("val", self.setup.val, lambda x: contracted(self.tangent, x, self.directions, self._prior))

    @cached_property
    def test(self) -> dict[str, Tensor]:
        """The reported images, with the covariances of all posteriors."""
        return self._kept("test", self.setup.test, lambda x: self.of(x, list(self.choices), self._prior))

    def train(self, images: int) -> dict[str, Tensor]:
        """The first training images on ELLA's directions."""
        part = self.setup.train[: -(-images // 100)]
        return self._kept("train", part, lambda x: contracted(self.tangent, x, self.directions))

    def of(self, x: Tensor, names: Sequence[str], diagonals: Mapping[str, Vectors] | None = None) -> dict[str, Tensor]:
        """Contracts images (n, 3, 32, 32) with ELLA's directions, posteriors of `choices`, and other diagonals."""
        covariances = {}
        for name in names:
            method, delta = name.partition(",")[0], float(self.choices[name][0])
            covariances[name] = self.posteriors[method].with_prior(delta).covariance
        variances = {name: c.diagonal() for name, c in covariances.items() if name.startswith("diagonal")}
        kfac = {name: c for name, c in covariances.items() if name.startswith("KFAC") and has_prior(c)}
        others = {"KFAC": list(kfac.values())} if kfac else None
        found = contracted(self.tangent, x, self.directions, {**(diagonals or {}), **variances}, others)
        named = {name: found.pop(f"KFAC, {i}") for i, name in enumerate(kfac)}
        return {**found, **named}

    @property
    def _prior(self) -> dict[str, Vectors]:
        return {"prior": {block.name: torch.ones(block.size) for block in self.tangent.blocks}}

    def _kept(self, name: str, part: Batches, make: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Contracts batches, each of which is kept."""
        done = [kept_tensors(f"resnet20_{name}_{i}", partial(make, x)) for i, (x, _) in enumerate(part)]
        return {key: torch.cat([one[key] for one in done]) for key in done[0]}


def _add_whole(rows: Rows, whole: Callable[[], Whole]) -> None:
    """Adds the rows of all weights but ELLA's."""
    add = partial(rows.add, "all weights")
    for method in ("diagonal", "KFAC"):
        for how in ("evidence", "validation", "validation with T"):
            add(f"{method}, {how}", lambda name: _whole_row(whole(), name), f"{method}, {how}")
    add("prior alone", lambda: _whole_prior(whole()))


def _whole_row(whole: Whole, name: str) -> dict[str, Any]:
    delta, temperature = whole.choices[name].tolist()
    latent = Latent(whole.test["outputs"], (DenseTerm(whole.test[name]),))
    return {"prior precision": delta, "T": temperature, **scored(latent, joined(whole.setup.test)[1], temperature)}


def _whole_prior(whole: Whole) -> dict[str, Any]:
    """Returns scores of the prior of all weights, `J Jᵀ/δ`, with the validated δ."""

    def latent(part: Mapping[str, Tensor], delta: float) -> Latent:
        return Latent(part["outputs"], (DenseTerm(part["prior"] / delta),))

    loss, delta, _ = best_point(lambda delta: latent(whole.val, delta), joined(whole.setup.val)[1])
    scores = scored(latent(whole.test, delta), joined(whole.setup.test)[1])
    return {"prior precision": delta, "validation nll": loss, **scores}


def _add_ella(rows: Rows, whole: Callable[[], Whole], place: int, seed: int, shown: int) -> None:
    """Adds ELLA's rows of a seed, at K = 20 if the name of the row has no other K."""
    ella = once(lambda: OneSpan.of(whole(), place, shown))
    add = partial(rows.add, f"ELLA, seed {seed}")
    counts = [n for n in COUNTS if n <= shown]
    add("paper's prior, scaled", lambda: ella().row(counts[1:], fixed=lambda n: PAPER_DELTA * n / ALL))
    add("paper's prior, published form", lambda: ella().row(counts[1:], fixed=lambda n: PAPER_DELTA))
    add("prior alone", lambda: ella().row([0]))
    add("n and prior validated", lambda: ella().row(counts))
    add("n, prior and T validated", lambda: ella().row(counts, temperatures=TEMPERATURES))
    add("all images, prior validated", lambda: ella().row([shown]))
    add("with residual, n and prior validated", lambda: ella().row(counts, residual=True))
    for rank in (4, 8, 12, 16, 24, 32):
        add(f"n and prior validated, K = {rank}", lambda k: ella().row(counts, rank=k), rank)
    for name, at in (
        ("over n, paper's prior, scaled", lambda n: PAPER_DELTA * n / ALL),
        ("over n, paper's prior, published form", lambda n: PAPER_DELTA),
        ("over n, prior validated", None),
    ):
        add(name, lambda f: {str(n): ella().row([n], fixed=f) for n in counts[1:]}, at)


@dataclass(frozen=True)
class OneSpan:
    """ELLA on the span of one seed.

    Attributes:
        val: outputs, features and prior covariance of the validation images.
        test: likewise of the reported images.
        curvatures: n -> H_n.
        labels: of both.
    """

    val: dict[str, Tensor]
    test: dict[str, Tensor]
    curvatures: dict[int, Tensor]
    labels: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, whole: Whole, place: int, shown: int) -> OneSpan:
        """Returns the span at a place in the order of the seeds, with the curvature of up to `shown` images."""
        mine = slice(place * whole.rank, (place + 1) * whole.rank)
        train, val, test = (
            {**part, "features": part["features"][..., mine]} for part in (whole.train(shown), whole.val, whole.test)
        )
        found = curvatures(train["outputs"], train["features"], [n for n in COUNTS if n <= shown])
        return cls(val, test, found, (joined(whole.setup.val)[1], joined(whole.setup.test)[1]))

    def row(self, counts: Sequence[int], rank: int = 20, residual: bool = False, **candidates: Any) -> dict[str, Any]:
        """Returns test scores at the n, δ and T of lowest validation NLL (section 5.2); for options see `chosen`."""
        loss, delta, temperature, n = self.chosen(counts, rank, residual, **candidates)
        at = ella_latent(self.test, self.curvatures[n][:rank, :rank], delta, residual=residual)
        return {
            "n": n, "prior precision": delta, "T": temperature, "validation nll": loss,
            **scored(at, self.labels[1], temperature),
        }  # fmt: skip

    def chosen(
        self,
        counts: Sequence[int],
        rank: int = 20,
        residual: bool = False,
        fixed: Callable[[int], float] | None = None,
        temperatures: Sequence[float] = (1.0,),
    ) -> tuple[float, float, float, int]:
        """Returns the lowest validation NLL, and the δ, T and n that have it; `fixed` gives δ for each n."""
        found = []
        for n in counts:
            curvature = self.curvatures[n][:rank, :rank]
            latent = partial(ella_latent, self.val, curvature, residual=residual)
            deltas = DELTAS if fixed is None else (fixed(n),)
            found.append((*best_point(latent, self.labels[0], temperatures, deltas), n))
        return min(found)


def draw(results: Mapping[str, Any]) -> None:
    """Draws NLL, ECE and accuracy over n, and NLL over K, with the network at one temperature."""
    table = results["table"]
    ella, plain = table["ELLA"], table["network and last layer"]
    figure, ((*axes,),) = drawing.panels(1, 4, (16, 3.8))
    for measure, axis in zip(("nll", "ece", "accuracy"), axes, strict=False):
        for name, curve in ella.items():
            if name.startswith("over n"):
                rows = {int(n): row[measure] for n, row in curve.items()}
                means, errors = ([row[part] for row in rows.values()] for part in ("mean", "standard_error"))
                axis.errorbar(list(rows), means, errors, fmt=".-", label=name.removeprefix("over n, "))
        axis.set(xscale="log", xlabel="n, images in the curvature (K = 20)", ylabel=LABELS[measure])
    ranks = {20: ella["n and prior validated"]["nll"]}
    for name, row in ella.items():
        if "K = " in name:
            ranks[int(name.partition("K = ")[2])] = row["nll"]
    ordered = sorted(ranks)
    means, errors = ([ranks[rank][part] for rank in ordered] for part in ("mean", "standard_error"))
    axes[3].errorbar(ordered, means, errors, fmt=".-", label="ELLA, n and prior validated")
    axes[3].set(xlabel="K (M = 512)", ylabel=LABELS["nll"])
    for measure, axis in zip(("nll", "ece", "accuracy", "nll"), axes, strict=True):
        for name, style in (("network", ":"), ("network, one temperature", "--")):
            axis.axhline(plain[name]["first 1000"][measure]["mean"], color="#555555", linestyle=style, label=name)
    axes[0].set_ylim(0.24, 0.42)
    axes[1].set_ylim(0, 0.08)
    axes[2].set_ylim(0.88, 0.93)
    drawing.legend_below(figure, 3)
    drawing.save(figure, __file__)


LABELS = {"nll": "NLL (nats)", "ece": "ECE", "accuracy": "accuracy"}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns scores on 8 000 images, on the first 1 000 for all methods, and the NLL on the images of other tables."""
    plain = results["table"]["network and last layer"]
    whole = results["table"].get("all weights", {})
    ella = {name: row for name, row in results["table"].get("ELLA", {}).items() if not name.startswith("over n")}
    columns = ["NLL, 512 draws", "NLL, default link", "ECE", "accuracy, %", "n", "δ", "T"]
    last = {name: _cells(row, row) for name, row in plain.items()}
    every = {name: _cells(row["first 1000"], row) for name, row in plain.items() if "rows" not in name}
    every |= {name: _cells(row, row) for name, row in whole.items()}
    every |= {f"ELLA, {name}": _cells(row, row) for name, row in ella.items()}
    other = {}
    for name, row in plain.items():
        if name.startswith(("network", "recommended")) or "prior alone" in name:
            other[name] = [shown(row[f"first {count}"]["nll"]) for count in PARTS] + [shown(row["nll"])]
    images = ["first 1 000 (Figures 2, 4 and 6)", "2 000 (Table 4)", "4 000 (Figure 7)", "8 000 (Table 1)"]
    return {
        "last layer": grid(columns, last), "all methods": grid(columns, every), "other images": grid(images, other)
    }  # fmt: skip


def _cells(scores: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    """Returns the cells of a row: scores on some images, and what was chosen."""
    link = shown(scores.get("nll by the default link"))
    n, delta, temperature = row.get("n", row.get("images")), row.get("prior precision"), row.get("T")
    numbers = [shown(n, 0), "" if delta is None else rounded(delta["mean"]), shown(temperature, 2)]
    return [shown(scores["nll"]), link, shown(scores["ece"]), shown(scores["accuracy"], 1, 100), *numbers]
