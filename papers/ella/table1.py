"""Tables 1 and 4, ResNet-20: all methods on the same images, with one temperature and the prior alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import lapwing as lw
from lapwing.covariance import AnyLatent, Latent, LatentDraws, has_prior
from lapwing.covariance.terms import DenseTerm
from lapwing.tangent import Tangent, Vectors
from lapwing.tuning import Training
from papers.common import drawing
from papers.common.cifar import Cifar, LastLayer
from papers.common.data import joined
from papers.common.results import Rows, once
from papers.common.scores import class_scores
from papers.common.tables import grid, rounded, shown
from papers.ella.shared import balanced_directions, contracted, curvatures, ella_latent

PUBLISHED = {
    "network": 0.282, "MFVI-BF": 0.231, "last layer": 0.269, "last layer, KFAC": 0.271, "diagonal": 0.728,
    "KFAC": 0.852, "ELLA": 0.233,
}  # fmt: skip
"""NLL, on other weights of that network."""

RANKS = (4, 8, 16, 32)
TABLE_4 = {
    2000: (0.2673, 0.2551, 0.2380, 0.2308), 512: (0.2678, 0.2542, 0.2376, 0.2315),
    128: (0.2674, 0.2540, 0.2383, 0.2310), 32: (0.2655, 0.2541, 0.2395, 0.2318),
}  # fmt: skip
"""M -> the NLL at each K, published; the paper also has other M from 4 on, and K to 128."""

LINK = lw.SampledLink(512)
"""The link of all scores, as published. Choices on validation images are by the default link, which needs no draws."""

DELTAS = tuple(10 ** (i / 2) for i in range(-8, 13))
TEMPERATURES = tuple(10 ** (i / 20) for i in range(21))
PAPER_DELTA = 25.0
"""The paper's prior variance is .04."""

ALL = 50_000
"""Training images of the network, 14 000 of which are at hand."""

PARTS = (4000,)
"""First reported images, which Figure 7 reports."""

COUNTS = (0, *(2**i for i in range(2, 14)), 14_000)
"""n, the numbers of images whose curvature is kept."""

SAMPLED = 2000
"""Training images of sampled LLA, whose solves take a pass over them for each iteration."""

ROWS = (2000, 512, 128, 32)
"""M. All rows but those of Table 4 have the first."""


def run(seeds: Sequence[int] = range(5), shown: int = 14_000, reported: int = 8000) -> dict[str, Any]:
    """Returns scores of the last layer and of all weights on the same test images; the 2 000 others validate.

    A prediction by all weights costs as much as 25 to 45 forward passes, and 3 000 steps of MFVI cost most. This took
    minutes on a GPU, and takes a day on two cores.

    Args:
        seeds: of ELLA's rows, of VaLLA's inducing points and of draws; 3 000 steps of MFVI have the first three.
            Nothing else is random but the draws of the link.
        shown: training images of all curvatures, scaled to all.
        reported: test images.
    """
    rows = Rows(__file__, {"images of the curvature": shown, "reported": reported})
    _add_last_layer(rows, once(lambda: LastLayer.load(0, shown, reported)))
    whole = once(lambda: Whole([(size, seed) for seed in seeds for size in ROWS], shown, reported))
    _add_whole(rows, whole)
    for i, seed in enumerate(seeds):
        _add_ella(rows, [once(partial(OneSpan.of, whole, i * len(ROWS) + j)) for j in range(len(ROWS))], seed)
    _add_others(rows, whole, seeds)
    return rows.all()


def scored(latent: AnyLatent, labels: Tensor, temperature: float = 1.0) -> dict[str, Any]:
    """Returns scores on all images and on the first ones, by 512 draws, and the NLL by the default link."""
    likelihood = lw.Categorical(logit_temperature=temperature)
    prediction = likelihood.predict(latent, None if isinstance(latent, LatentDraws) else LINK)
    logs = prediction.log_prob(labels)  # of `probs` in float32 some may be 0
    found: dict[str, Any] = {}
    for count in (*(count for count in PARTS if count < len(labels)), len(labels)):
        scores = class_scores(prediction.probs[:count], labels[:count])
        found[f"first {count}"] = {**scores, "nll": -float(logs[:count].double().mean())}
    plain = -float(likelihood.predict(latent).log_prob(labels).double().mean())
    return {**found.pop(f"first {len(labels)}"), "nll by the default link": plain, **found}


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


def _add_last_layer(rows: Rows, setup: Callable[[], LastLayer]) -> None:
    """Adds the network, one temperature, and all rows of the last layer."""
    add = partial(rows.add, "network and last layer")
    test = once(lambda: joined(setup().test))
    add("network", lambda: scored(prior_latent(setup(), test()[0], math.inf), test()[1]))  # without variance
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
    return Latent(outputs, (DenseTerm(variance[:, None, None] * torch.eye(outputs.shape[-1]).to(variance)),))


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

    Args:
        spans: M and seed of each of ELLA's spans, of `rank` directions.
        shown: training images.
        reported: test images.
    """

    rank = 32

    def __init__(self, spans: Sequence[tuple[int, int]], shown: int, reported: int) -> None:
        self.spans, self.setup = spans, Cifar.load(0, shown, reported)

    @cached_property
    def tangent(self) -> Tangent:
        """The network with all its weights."""
        return Tangent.survey(self.setup.model, self.setup.train[0][0][:4])

    @cached_property
    def posteriors(self) -> dict[str, lw.Posterior]:
        """Diagonal and KFAC, as fitted; `choices` has their prior precisions."""
        return {"diagonal": self.fit(lw.Diagonal(), tune=None), "KFAC": self.fit(lw.KFAC(), tune=None)}

    def fit(self, method: lw.Method, images: int | None = None, **options: Any) -> lw.Posterior:
        """Fits a posterior of all weights to the first training images, or to all."""
        train = self.setup.train if images is None else self.setup.train[: images // 100]
        options = {"params": lw.everything, "data_size": ALL, "progress": False, **options}
        return lw.fit(self.setup.model, train, method, **options)

    def valla(self, points: int, seed: int) -> lw.Posterior:
        """Fits VaLLA's closed form, with a validated prior precision."""
        return self.fit(lw.VaLLA(points), tune=self.prior_alone, seed=seed)

    def sampled(self, seed: int, deltas: Sequence[float] = (300.0, 1000.0, 3000.0)) -> lw.Posterior:
        """Fits sampled LLA with 16 draws at each prior precision; returns the one of lowest validation NLL."""
        found, method = [], lw.SampledLLA(16, em_steps=0)
        for delta in deltas:
            posterior = self.fit(method, SAMPLED, prior_precision=delta, tune=None, seed=seed)
            prediction = lw.Categorical().predict(posterior.latent(self.setup.val, progress=False))
            found.append((-float(prediction.log_prob(joined(self.setup.val)[1]).mean()), posterior))
        return min(found, key=lambda pair: pair[0])[1]

    @cached_property
    def choices(self) -> dict[str, tuple[float, float]]:
        """Method and tuning -> δ and T, tuned by the evidence, and on the validation images."""
        found, with_t = {}, lw.Validation(self.setup.val)
        tunings = {"evidence": lw.Evidence(), "validation": self.prior_alone, "validation with T": with_t}
        for name, posterior in self.posteriors.items():
            for how, tune in tunings.items():
                tuned = tune.tune(posterior, Training())
                assert isinstance(tuned.prior_precision, float)
                found[f"{name}, {how}"] = tuned.prior_precision, tuned.logit_temperature or 1.0
        return found

    @property
    def prior_alone(self) -> lw.Validation:
        """Tunes the prior precision on the validation images, without a temperature."""
        return lw.Validation(self.setup.val, tempered=False, tolerance=0.0)

    @cached_property
    def directions(self) -> Tensor:
        """ELLA's directions of all spans (spans K, P)."""
        x, y = joined(self.setup.train)
        return torch.cat([balanced_directions(self.tangent, x, y, size, self.rank, seed) for size, seed in self.spans])

    @cached_property
    def val(self) -> dict[str, Tensor]:
        """The validation images on ELLA's directions, with their prior covariance."""
        return contracted(self.tangent, joined(self.setup.val)[0], self.directions, self._prior)

    @cached_property
    def test(self) -> dict[str, Tensor]:
        """The reported images, with the covariances of all posteriors."""
        return self.of(joined(self.setup.test)[0], list(self.choices), self._prior)

    @cached_property
    def train(self) -> dict[str, Tensor]:
        """The training images on ELLA's directions."""
        return contracted(self.tangent, joined(self.setup.train)[0], self.directions)

    def of(self, x: Tensor, names: Sequence[str], diagonals: Mapping[str, Vectors] | None = None) -> dict[str, Tensor]:
        """Contracts images (n, 3, 32, 32) with ELLA's directions, posteriors of `choices`, and other diagonals."""
        covariances = {}
        for name in names:
            covariances[name] = self.posteriors[name.partition(",")[0]].with_prior(self.choices[name][0]).covariance
        variances = {name: c.diagonal() for name, c in covariances.items() if name.startswith("diagonal")}
        kfac = {name: c for name, c in covariances.items() if name.startswith("KFAC") and has_prior(c)}
        others = {"KFAC": list(kfac.values())} if kfac else None
        found = contracted(self.tangent, x, self.directions, {**(diagonals or {}), **variances}, others)
        named = {name: found.pop(f"KFAC, {i}") for i, name in enumerate(kfac)}
        return {**found, **named}

    @property
    def _prior(self) -> dict[str, Vectors]:
        return {"prior": {block.name: torch.ones(block.size) for block in self.tangent.blocks}}


def _add_whole(rows: Rows, whole: Callable[[], Whole]) -> None:
    """Adds the rows of all weights but ELLA's."""
    add = partial(rows.add, "all weights")
    for method in ("diagonal", "KFAC"):
        for how in ("evidence", "validation", "validation with T"):
            add(f"{method}, {how}", lambda name: _whole_row(whole(), name), f"{method}, {how}")
    add("prior alone", lambda: _whole_prior(whole()))


def _whole_row(whole: Whole, name: str) -> dict[str, Any]:
    delta, temperature = whole.choices[name]
    latent = Latent(whole.test["outputs"], (DenseTerm(whole.test[name]),))
    return {"prior precision": delta, "T": temperature, **scored(latent, joined(whole.setup.test)[1], temperature)}


def _whole_prior(whole: Whole) -> dict[str, Any]:
    """Returns scores of the prior of all weights, `J Jᵀ/δ`, with the validated δ."""

    def latent(part: Mapping[str, Tensor], delta: float) -> Latent:
        return Latent(part["outputs"], (DenseTerm(part["prior"] / delta),))

    loss, delta, _ = best_point(lambda delta: latent(whole.val, delta), joined(whole.setup.val)[1])
    scores = scored(latent(whole.test, delta), joined(whole.setup.test)[1])
    return {"prior precision": delta, "validation nll": loss, **scores}


def _add_others(rows: Rows, whole: Callable[[], Whole], seeds: Sequence[int]) -> None:
    """Adds the rows of VaLLA, sampled LLA and MFVI; MFVI of 3 000 steps has three seeds, since it takes longest."""
    makes: dict[str, Callable[[int], dict[str, Any]]] = {
        "VaLLA, 100 points": lambda seed: _fitted_row(whole().setup, whole().valla(100, seed)),
        "VaLLA, 200 points": lambda seed: _fitted_row(whole().setup, whole().valla(200, seed)),
        "sampled LLA, 16 draws": lambda seed: _fitted_row(whole().setup, whole().sampled(seed)),
        "MFVI, 300 steps": lambda seed: _variational_row(whole().setup, seed, 300),
        "MFVI, 3 000 steps": lambda seed: _variational_row(whole().setup, seed, 3000),
    }
    for name, make in makes.items():
        for seed in seeds[:3] if name == "MFVI, 3 000 steps" else seeds:
            rows.add(f"all weights, seed {seed}", name, make, seed)


def _fitted_row(setup: Cifar, posterior: lw.Posterior) -> dict[str, Any]:
    latent = posterior.latent(setup.test, progress=False)
    return {"prior precision": posterior.prior_precision, **scored(latent, joined(setup.test)[1])}


def _variational_row(setup: Cifar, seed: int, steps: int) -> dict[str, Any]:
    """Returns scores by 50 draws of the fine-tuned network, and how much its objective still falls, per sample.

    It is fine-tuned on flipped and shifted training images, in batches of 64.
    "last fall" is the mean objective of the steps from 80 % to 90 % minus that of the last 10 %.
    """
    x, y = joined(setup.train)
    loader = [(shifted(a, seed + i), b) for i, (a, b) in enumerate(zip(x.split(64), y.split(64), strict=True))]
    posterior = lw.fit(
        setup.model, loader, lw.MeanField(steps), params=lw.everything, data_size=ALL, seed=seed, progress=False
    )
    latent = posterior.latent(setup.test, lw.MonteCarlo(50), progress=False)
    objective = posterior.history["objective"].double() / ALL
    last = objective[-(len(objective) // 5) :].chunk(2)
    return {"last fall": float(last[0].mean() - last[1].mean()), **scored(latent, joined(setup.test)[1])}


def shifted(x: Tensor, seed: int, most: int = 4) -> Tensor:
    """Mirrors half of the images (B, channels, H, W) and shifts all by up to 4 pixels a side, zeros coming in."""
    generator = torch.Generator().manual_seed(seed)
    mirrored = (torch.rand(len(x), generator=generator) < 0.5).to(x.device)
    x = torch.where(mirrored[:, None, None, None], x.flip(3), x)
    wide, (height, width) = F.pad(x, (most,) * 4), x.shape[2:]
    places = torch.randint(0, 2 * most + 1, (len(x), 2), generator=generator).tolist()
    return torch.stack([one[:, a : a + height, b : b + width] for one, (a, b) in zip(wide, places, strict=True)])


def _add_ella(rows: Rows, spans: Sequence[Callable[[], OneSpan]], seed: int) -> None:
    """Adds ELLA's rows of a seed. M is the first of `ROWS` and K is 20, if the name of the row has no others."""
    add, ella = partial(rows.add, f"ELLA, seed {seed}"), spans[0]
    add("paper's prior, scaled", lambda: ella().row(ella().counts[1:], fixed=lambda n: PAPER_DELTA * n / ALL))
    add("paper's prior, published form", lambda: ella().row(ella().counts[1:], fixed=lambda n: PAPER_DELTA))
    add("prior alone", lambda: ella().row([0]))
    add("n and prior validated", lambda: ella().row(ella().counts))
    add("n, prior and T validated", lambda: ella().row(ella().counts, temperatures=TEMPERATURES))
    add("all images, prior validated", lambda: ella().row(ella().counts[-1:]))
    add("with residual, n and prior validated", lambda: ella().row(ella().counts, residual=True))
    for size, span in zip(ROWS, spans, strict=True):
        for rank in RANKS:
            add(f"M = {size}, K = {rank}", lambda s, k: s().row(s().counts, rank=k), span, rank)
    for name, at in (
        ("over n, paper's prior, scaled", lambda n: PAPER_DELTA * n / ALL),
        ("over n, paper's prior, published form", lambda n: PAPER_DELTA),
        ("over n, prior validated", None),
    ):
        add(name, lambda f: {str(n): ella().row([n], fixed=f) for n in ella().counts[1:]}, at)


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
    def of(cls, whole: Callable[[], Whole], place: int) -> OneSpan:
        """Returns the span at a place in the order of the spans."""
        mine = slice(place * Whole.rank, (place + 1) * Whole.rank)
        train, val, test = (
            {**part, "features": part["features"][..., mine]} for part in (whole().train, whole().val, whole().test)
        )
        most = len(train["outputs"])
        counts = [*(n for n in COUNTS if n < most), most]
        found = curvatures(train["outputs"], train["features"], counts)
        return cls(val, test, found, (joined(whole().setup.val)[1], joined(whole().setup.test)[1]))

    @property
    def counts(self) -> list[int]:
        """All n, ascending, the first 0."""
        return list(self.curvatures)

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
        choose: Callable[..., tuple[float, float, float]] = best_point,
    ) -> tuple[float, float, float, int]:
        """Returns the lowest validation NLL, and the δ, T and n that have it; `fixed` gives δ for each n."""
        found = []
        for n in counts:
            curvature = self.curvatures[n][:rank, :rank]
            latent = partial(ella_latent, self.val, curvature, residual=residual)
            deltas = DELTAS if fixed is None else (fixed(n),)
            found.append((*choose(latent, self.labels[0], temperatures, deltas), n))
        return min(found)


def draw(results: Mapping[str, Any]) -> None:
    """Draws NLL, ECE and accuracy over n, and NLL over K, with the network at one temperature."""
    table = results["table"]
    ella, plain = table["ELLA"], table["network and last layer"]
    figure, ((*axes,),) = drawing.panels(1, 4, (16, 3.8))
    for measure, axis in zip(("nll", "ece", "accuracy"), axes, strict=False):
        for name, curve in ella.items():
            if name.startswith("over n"):
                rows = {n: row[measure] for n, row in curve.items()}
                drawing.curve(axis, rows, label=name.removeprefix("over n, "))
        axis.set(xscale="log", xlabel="n, images in the curvature (K = 20)", ylabel=LABELS[measure])
    ranks = {rank: ella[f"M = {ROWS[0]}, K = {rank}"]["nll"] for rank in RANKS}
    ranks[20] = ella["n and prior validated"]["nll"]
    drawing.curve(axes[3], dict(sorted(ranks.items())), label="ELLA, n and prior validated")
    axes[3].set(xlabel=f"K (M = {ROWS[0]})", ylabel=LABELS["nll"])
    for measure, axis in zip(("nll", "ece", "accuracy", "nll"), axes, strict=True):
        for name, style in (("network", ":"), ("network, one temperature", "--")):
            axis.axhline(plain[name][measure]["mean"], color="#555555", linestyle=style, label=name)
    axes[0].set_ylim(0.24, 0.42)
    axes[1].set_ylim(0, 0.08)
    axes[2].set_ylim(0.88, 0.93)
    drawing.legend_below(figure, 3)
    drawing.save(figure, __file__)


LABELS = {"nll": "NLL (nats)", "ece": "ECE", "accuracy": "accuracy"}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the scores of all methods, and Table 4: the NLL over M and K, by 512 draws and by the default link."""
    table = results["table"]
    plain = {**table["network and last layer"], **table["all weights"]}
    rows = {name: cells(row) for name, row in plain.items() if "300 rows" not in name}
    ella = {name: row for name, row in table["ELLA"].items() if not name.startswith(("over n", "M = "))}
    rows |= {f"ELLA, {name}": cells(row) for name, row in ella.items()}
    columns = ["NLL, 512 draws", "NLL, default link", "ECE", "accuracy, %", "n", "δ", "T"]
    over = {}
    for size in ROWS:
        found = [table["ELLA"][f"M = {size}, K = {rank}"] for rank in RANKS]
        links = ([shown(row[key]) for key in ("nll", "nll by the default link")] for row in found)
        pairs = zip(links, TABLE_4[size], strict=True)
        over[f"M = {size}"] = [f"{draws} ({published:.4f}); {closed}" for (draws, closed), published in pairs]
    return {"scores": grid(columns, rows), "Table 4": grid([f"K = {rank}" for rank in RANKS], over)}


def cells(row: Mapping[str, Any]) -> list[str]:
    """Returns the cells of a row: scores, and what was chosen."""
    scores = [shown(row[key]) for key in ("nll", "nll by the default link", "ece")] + [shown(row["accuracy"], 1, 100)]
    n, delta, temperature = row.get("n", row.get("images")), row.get("prior precision"), row.get("T")
    return [*scores, shown(n, 0), "" if delta is None else rounded(delta["mean"]), shown(temperature, 2)]
