"""The detector of a posterior: how well it separates other inputs, and how often it raises false alarms.

It is `lw.novelty(posterior, loader, held_out=held_out)`, with `validation=` in the fit. Beside it are its two scores
alone: *doubt* (mutual information, or the variance of a regression) and *novelty*.

- *fashion* and *cifar10*: the networks and images of `benchmarks.ood`. The last layer of the ResNet-20 is the network
  here, and its features are the inputs: the detector has the same numbers.
- *vit*: small vision transformers on the images of *fashion*, two repeats.
- *texts*: the six text networks of `benchmarks.grid`, with texts of another data set.
- *bikes*, *California*, *taxis*: MLPs on 2 000 rows of a table: rented bikes of the first year against the second,
  houses in the south against the north, taxi rides of January against March. *columns* has the test rows with each
  column in another order, *noise* has normal numbers.
- *corruptions*: 1 000 test images of CIFAR-10, changed in five ways and five steps, for the ResNet-20.

*deployed* has the p-values of networks that `lw.deploy` made of posteriors over all weights, by the exact doubts of the
library, streamlined and amortised, with 300 held-out rows.

*same rows* compares with the rows of `validation=`, *100 rows* and so on with others. *alarms* is the share of alarms
by rate; *known* are test inputs. *prediction* is the CPU time of a p-value, in forward passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from benchmarks import novelty, ood_detectors
from benchmarks.grid.networks import CELLS
from benchmarks.novelty import by_parts
from benchmarks.ood import REPEATS, SEED, cifar10, fashion, logits_of
from lapwing.evaluation.metrics import auroc
from papers.common import results
from papers.common.cifar import LastLayer, normalised, pixels
from papers.common.data import Part, arrays, batched, images, random_rows, rows_and_targets, standardised
from papers.common.measure import ratio
from papers.common.networks import mlp
from papers.common.scores import averaged
from papers.common.tables import grid, shown
from papers.common.training import Recipe, kept, seeded

RATES, ROWS = (0.01, 0.05, 0.1), (100, 300, 1000)


class Setting(NamedTuple):
    """A network with its data: `tuned` are the rows of `validation=`, `others` further held-out rows."""

    model: nn.Module
    loader: Any
    tuned: Part
    others: Part
    inputs: dict[str, Tensor]  # by name; the first are test inputs
    data_size: int | None = None


def doubt(posterior: lw.Posterior, x: Tensor) -> Tensor:
    """Returns the mutual information of classes, or the variance of one real output."""
    prediction = posterior.predict(x)
    classes = posterior.logit_temperature is not None
    return prediction.mutual_information() if classes else prediction.epistemic_variance[:, 0]


def report(setting: Setting) -> dict[str, Any]:
    """Returns the AUROC by each score, and the share of alarms, for each set of inputs."""
    model, loader, tuned, others, inputs, size = setting
    posterior: Any = lw.fit(model, loader, validation=tuned, data_size=size, progress=False)
    detectors = {"same rows": lw.novelty(posterior, loader, held_out=tuned)}
    for rows in ROWS:
        if rows <= len(others[0]):
            held_out = others[0][:rows], others[1][:rows]
            detectors[f"{rows} rows"] = lw.novelty(posterior, loader, held_out=held_out)
    by = detectors["same rows"].by
    calls: dict[str, Any] = {"doubt": partial(doubt, posterior), "novelty": lw.novelty(model, loader, by), **detectors}
    scores = {name: {place: by_parts(call, x, 500) for place, x in inputs.items()} for name, call in calls.items()}
    known, *strange = inputs
    row: dict[str, Any] = {
        f"AUROC {place}": {name: float(auroc(found[known], found[place])) for name, found in scores.items()}
        for place in strange
    }
    row["alarms"] = {}
    for name, detector in detectors.items():
        assert detector.held_out is not None
        rates = [rate for rate in RATES if rate >= 2 / (detector.held_out.shape[1] + 1)]
        row["alarms"][name] = {str(rate): {} for rate in rates}
        for place, x in inputs.items():
            p = by_parts(detector.p_value, x, 500)
            for rate in rates:
                where = "known" if place == known else place
                row["alarms"][name][str(rate)][where] = float((p <= rate).double().mean())
    if not isinstance(model, nn.Linear):
        some, call = inputs[known][:300], detectors["same rows"].p_value
        cost = ratio(lambda: call(some), lambda: logits_of([model], some), 3, time.process_time)
        row["prediction"] = cost["ratio"]
    print(row, flush=True)
    return row


def garments(seed: int, make: Callable[[Part, int], nn.Module] | None = None) -> Setting:
    """Returns a small CNN of `benchmarks.ood`, or another network for the same images."""
    (model,), loader, tuned, inputs, _ = fashion(seed, 1)
    if make is not None:
        x, y = (torch.cat(parts) for parts in zip(*loader, strict=True))
        model = make((x, y), seed)
    data = images("fashion_mnist")
    return Setting(model, loader, tuned, data.test(slice(9000, None)), inputs)


def resnet() -> Setting:
    """Returns the last layer of the ResNet-20, with the rows of `benchmarks.ood`."""
    _, _, tuned, inputs, _ = cifar10()
    data, features = images("cifar10"), LastLayer.load(SEED)
    trunk, rows = features.trunk, random_rows(data.x_train, 2000, SEED)
    loader = [(trunk(x), y) for x, y in batched(*data.train(rows))]
    sets = {place: trunk(x) for place, x in inputs.items()}
    others = trunk(data.x_test[3000:4000]), data.y_test[3000:4000]
    return Setting(features.layer.eval(), loader, (trunk(tuned[0]), tuned[1]), others, sets, 50_000)


class Patches(nn.Module):
    """A small vision transformer on 16 patches of 7 x 7 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(1, 64, 7, 7), nn.Parameter(0.1 * torch.randn(16, 64))
        layers = [nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True) for _ in range(3)]
        self.layers, self.last = nn.Sequential(*layers), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, 10)."""
        return self.last(self.layers(self.patches(x).flatten(2).mT + self.places).mean(1))


def vit(part: Part, seed: int) -> nn.Module:
    """Trains a vision transformer."""
    with seeded(seed):
        model = Patches()
    recipe = Recipe(F.cross_entropy, 900, 1e-3, 1e-4, 64)
    return kept(model, f"detector_vit_{seed}", lambda: recipe.train(model, part, seed))


def texts(name: str) -> Setting:
    """Returns a text network of the grid. The second half of the test texts are the other held-out rows."""
    (model,), loader, tuned, inputs, y = novelty.texts(name)
    (x, strange), half = inputs.values(), len(y) // 2
    return Setting(model, loader, tuned, (x[half:], y[half:]), {"test": x[:half], "texts": strange})


def bikes() -> tuple[Tensor, Tensor, Tensor]:
    """Returns the table of rented bikes without the year, and which rows are of the second year."""
    x, y = rows_and_targets("uci_bike")
    return torch.cat([x[:, :1], x[:, 2:]], 1), y, x[:, 1] == x[:, 1].max()


def houses() -> tuple[Tensor, Tensor, Tensor]:
    """Returns the table of Californian houses without their place, and which rows are in the north."""
    x, y = rows_and_targets("california_housing")
    return x[:, :6], y, x[:, 6] > 36


def taxis() -> tuple[Tensor, Tensor, Tensor]:
    """Returns the table of taxi rides without month and day, and which are of March; outliers are left out."""
    names = [str(name) for name in arrays("nyc_green_taxi_2023q1")["feature_names"]]
    x, y = rows_and_targets("nyc_green_taxi_2023q1")
    month, far = x[:, names.index("month")], x[:, names.index("trip_distance")]
    some = ((month == 1) | (month == 3)) & (far < 50) & (y > 0) & (y < 200)
    columns = [i for i, name in enumerate(names) if name not in ("month", "day_of_month")]
    return x[some][:, columns], y[some], month[some] == 3


def table(make: Callable[[], tuple[Tensor, Tensor, Tensor]], seed: int) -> Setting:
    """Trains an MLP on 2 000 rows of one part of a table. The other part are the foreign rows."""
    x, y, other = make()
    mine, theirs = (torch.nonzero(which)[:, 0] for which in (~other, other))
    order = torch.cat([mine[random_rows(x[mine], 5300, seed)], theirs[random_rows(x[theirs], 2000, seed)]])
    found = standardised("", x[order], y[order], 2000, 2300, "")
    test, far = found.test[0][1000:3000], found.test[0][3000:]
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.stack([column[torch.randperm(len(column), generator=generator)] for column in test.T], 1)
    noise = torch.randn(test.shape, generator=generator)
    inputs = {"test": test, "other rows": far, "columns": shuffled, "noise": noise}
    with seeded(seed):
        model = mlp(x.shape[1], 50, 50, 1)
    Recipe(F.mse_loss, 3000, 3e-3, 1e-4).train(model, found.train, seed)
    others = found.test[0][:1000], found.test[1][:1000]
    return Setting(model, batched(*found.train), found.val, others, inputs)


def changed(x: Tensor, kind: str, step: int) -> Tensor:
    """Returns images (B, 3, H, W) of [0, 1], changed by one of five steps."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(step))
    if kind == "noise":
        return (x + (0.02, 0.05, 0.1, 0.2, 0.3)[step] * noise).clamp(0, 1)
    if kind == "blur":
        width = (0.4, 0.7, 1.0, 1.5, 2.5)[step]
        taps = torch.exp(-torch.arange(-6, 7).float().square() / (2 * width**2))
        taps = (taps / taps.sum()).expand(3, 1, 1, -1)
        x = F.conv2d(F.pad(x, (6, 6, 0, 0), "reflect"), taps, groups=3)
        return F.conv2d(F.pad(x, (0, 0, 6, 6), "reflect"), taps.mT, groups=3)
    if kind == "contrast":
        mean = x.mean((1, 2, 3), keepdim=True)
        return mean + (0.8, 0.6, 0.4, 0.2, 0.1)[step] * (x - mean)
    if kind == "brightness":
        return (x + (0.1, 0.2, 0.3, 0.4, 0.5)[step]).clamp(0, 1)
    turned = torch.tensor((5, 10, 20, 40, 80)[step] * torch.pi / 180)
    turn = torch.stack([torch.stack([turned.cos(), -turned.sin()]), torch.stack([turned.sin(), turned.cos()])])
    places = F.affine_grid(torch.cat([turn, torch.zeros(2, 1)], 1).expand(len(x), 2, 3), list(x.shape), False)
    return F.grid_sample(x, places, padding_mode="reflection", align_corners=False)


def corruptions() -> dict[str, Any]:
    """Returns the share of alarms at a rate of 5 %, and of errors, for each change and step; step 0 is no change."""
    model, loader, tuned, _, _, size = resnet()
    posterior = lw.fit(model, loader, validation=tuned, data_size=size, progress=False)
    detector = lw.novelty(posterior, loader, held_out=tuned)
    data, trunk = images("cifar10"), LastLayer.load(SEED).trunk
    x, y = pixels(data.x_test[1000:2000]), data.y_test[1000:2000]
    found: dict[str, Any] = {}
    for kind in ("noise", "blur", "contrast", "brightness", "rotation"):
        found[kind] = {}
        for step in range(-1, 5):
            features = trunk(normalised(x if step < 0 else changed(x, kind, step)))
            alarms, wrong = detector.alarm(features), model(features).argmax(1) != y
            found[kind][str(step + 1)] = {
                "alarms": float(alarms.double().mean()), "errors": float(wrong.double().mean()),
                "alarms of errors": float(alarms[wrong].double().mean()),
            }  # fmt: skip
        print(kind, found[kind], flush=True)
    return found


def deployed(setting: Setting) -> dict[str, Any]:
    """Returns the AUROC of p-values and the share of alarms at a rate of 5 %, exact and by deployed networks."""
    model, loader, tuned, others, inputs, _ = setting
    posterior = lw.fit(model, loader, lw.KFAC(), params=lw.everything, validation=tuned, progress=False)
    held_out, example = (others[0][:300], others[1][:300]), next(iter(inputs.values()))[:64]
    detector = partial(lw.novelty, posterior, loader, held_out=held_out)
    ways = {"streamlined": lw.deploy(posterior, example).via, "amortised": lw.amortize(posterior, loader)}
    calls: dict[str, Callable[[Tensor], Tensor]] = {"exact": detector().p_value}
    for name, way in ways.items():
        predictor = lw.deploy(posterior, example, novelty=detector(via=way))
        calls[name] = lambda x, predictor=predictor: predictor(x)[-1]  # type: ignore[misc]
    row: dict[str, Any] = {}
    for name, call in calls.items():
        p = {place: by_parts(call, x, 500) for place, x in inputs.items()}
        known, *strange = p
        row[name] = {f"AUROC {place}": float(auroc(1 - p[known], 1 - p[place])) for place in strange}
        row[name]["false alarms"] = float((p[known] <= 0.05).double().mean())
    print(row, flush=True)
    return row


def parts(repeats: int = REPEATS) -> dict[str, Callable[[], Any]]:
    """Returns the tasks, with means, standard errors and each run."""
    seeds = [SEED + repeat for repeat in range(repeats)]
    tasks: dict[str, list[Callable[[], Setting]]] = {
        "fashion": [partial(garments, seed) for seed in seeds],
        "cifar10": [resnet],
        "vit": [partial(garments, seed, vit) for seed in seeds[:2]],
        "texts": [partial(texts, cell.name) for cell in CELLS if cell.family == "texts"],
        "bikes": [partial(table, bikes, seed) for seed in seeds],
        "California": [partial(table, houses, seed) for seed in seeds],
        "taxis": [partial(table, taxis, seed) for seed in seeds],
    }

    def scored(name: str, row: Callable[[Setting], dict[str, Any]] = report, most: int = REPEATS) -> dict[str, Any]:
        runs = [row(make()) for make in tasks[name][:most]]
        return {"rows": averaged(runs), "runs": runs}

    def all_deployed() -> dict[str, Any]:
        return {name: scored(name, deployed, 3) for name in ("fashion", "bikes", "California", "taxis")}

    return {**{name: partial(scored, name) for name in tasks}, "corruptions": corruptions, "deployed": all_deployed}


IMAGES = {
    "digits": ("fashion", "AUROC MNIST"), "grey CIFAR-10": ("fashion", "AUROC CIFAR-10"),
    "ResNet: Fashion-MNIST": ("cifar10", "AUROC Fashion-MNIST"), "ResNet: MNIST": ("cifar10", "AUROC MNIST"),
}  # fmt: skip
"""Column -> part and entry of the twelve comparisons of images."""
NAMES = {"doubt": "doubt alone", "novelty": "novelty alone", "300 rows": "**the detector**"}
NAMES["same rows"] = "the detector, by the rows of `validation=`"


def images_table(found: dict[str, Any]) -> str:
    """Returns the table of the twelve comparisons of images, next to the detectors of pytorch-ood."""
    others = results.read(ood_detectors.__file__)
    rows = {name: (found, lambda run, at, score=score: run[at][score]) for score, name in NAMES.items()}
    for name in (name for name in others["fashion"]["rows"] if name.startswith("pytorch-ood")):
        rows[name] = others, lambda run, at, name=name: run[name][at]["its own"]
    lines = {}
    for name, (of, value) in rows.items():
        cells = [shown(value(of[part]["rows"], at)) for part, at in IMAGES.values()]
        least = min(value(run, at) for part, at in IMAGES.values() for run in of[part]["runs"])
        lines[name] = [*cells, f"{least:.3f}"]
    return grid([*IMAGES, "least of twelve"], lines, right=True)


def rates_table(found: dict[str, Any]) -> str:
    """Returns the table of false alarms by the number of held-out rows."""
    parts = {"CNNs": "fashion", "ResNet": "cifar10", "bikes": "bikes", "houses": "California", "taxis": "taxis"}
    columns = [f"{name}: {rate:.0%}" for name in parts for rate in RATES]
    lines = {}
    for rows in ("100 rows", "300 rows", "1000 rows", "same rows"):
        cells = []
        for part in parts.values():
            alarms = found[part]["rows"]["alarms"][rows]
            cells += [f"{alarms[str(rate)]['known']['mean']:.1%}" if str(rate) in alarms else "" for rate in RATES]
        lines["rows of `validation=`" if rows == "same rows" else rows] = cells
    return grid(columns, lines, right=True)


def others_table(found: dict[str, Any]) -> str:
    """Returns the table of the other networks: AUROC by each score, and alarms at a rate of 5 %."""
    lines = {}
    networks = {"vit": "ViT", "texts": "texts", "bikes": "bikes", "California": "houses", "taxis": "taxis"}
    for part, network in networks.items():
        rows = found[part]["rows"]
        for at in (name for name in rows if name.startswith("AUROC")):
            place = at.removeprefix("AUROC ")
            cells = [shown(rows[at][score]) for score in ("doubt", "novelty", "300 rows")]
            alarms = rows["alarms"]["300 rows"]["0.05"]
            lines[f"{network}: {place}"] = [*cells, *(f"{alarms[which]['mean']:.1%}" for which in ("known", place))]
    return grid(["doubt", "novelty", "detector", "false alarms", "alarms"], lines, right=True)


def corruptions_table(found: dict[str, Any]) -> str:
    """Returns the table of alarms and errors by the step of a change."""
    steps = [str(step) for step in range(6)]
    lines = {
        kind: [f"{row[step]['alarms']:.0%} / {row[step]['errors']:.0%}" for step in steps]
        for kind, row in found["corruptions"].items()
    }
    return grid(["none", *(f"step {step}" for step in steps[1:])], lines, right=True)


def deployed_table(found: dict[str, Any]) -> str:
    """Returns the table of deployed p-values."""
    lines = {}
    for part, network in {"fashion": "CNN", "bikes": "bikes", "California": "houses", "taxis": "taxis"}.items():
        rows = found["deployed"][part]["rows"]
        for at in (name for name in rows["exact"] if name.startswith("AUROC")):
            cells = [shown(row[at]) for row in rows.values()]
            lines[f"{network}: {at.removeprefix('AUROC ')}"] = [
                *cells, *(f"{row['false alarms']['mean']:.1%}" for row in rows.values())
            ]  # fmt: skip
    ways = ("exact", "streamlined", "amortised")
    return grid([*(f"AUROC, {way}" for way in ways), *(f"false alarms, {way}" for way in ways)], lines, right=True)


def tables(found: dict[str, Any]) -> dict[str, str]:
    """Returns the tables of benchmarks/README.md on OOD inputs."""
    return {
        "images": images_table(found), "rates": rates_table(found), "others": others_table(found),
        "corruptions": corruptions_table(found), "deployed": deployed_table(found),
    }  # fmt: skip
