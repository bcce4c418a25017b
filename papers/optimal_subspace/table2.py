"""Table 2, and Figures 2, 5 and 7 by its settings on MNIST: 12 458 weights, one convolution twice, 20 epochs.

`table2_fashion` has the same for Fashion-MNIST.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.tangent import Tangent
from papers.common import drawing
from papers.common.data import Images, batched, images, random_rows
from papers.common.measures import relative_error
from papers.common.results import Rows, once
from papers.common.tables import grid, shown
from papers.common.training import kept, seeded, shuffled, train
from papers.optimal_subspace.comparison import COLOURS, LABELS, Task, compare_subspaces, curves, swag_from, table
from papers.optimal_subspace.table1 import WAYS, warm_up_and_decay

SETTINGS: dict[str, tuple[int, float, tuple[float, float]]] = {
    "mnist": (20, 0.004, (0.1, 0.3)),
    "fashion_mnist": (40, 0.002, (0.1, 0.5)),
}
"""The paper's Table 2: epochs, learning rate, and the shares of the epochs for warm-up and decay, as in `table1`."""
RANKS = (10, 50, 100, 200, 500, 1000)
LONG = (1000, 3000, 6000, 9000, 11_000, 12_458)
"""s of Figure 5."""
SHOWN, TESTED, VALIDATING = 400, 100, 1000
"""Training images that posteriors sum over, test images X, and other test images that choose δ and the temperature."""


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns the measures of every way by s at λ = 1, the errors of subsets for s up to P, and the network's NLL."""
    return compared(__file__, "mnist", seeds)


def compared(experiment: str, name: str, seeds: Sequence[int]) -> dict[str, Any]:
    """Returns the rows of `run` for one data set of `SETTINGS`; `experiment` is its `__file__`."""
    rows = Rows(experiment, {"epochs": SETTINGS[name][0], "images of the curvature": SHOWN})
    for seed in seeds:
        task = once(lambda seed=seed: ImageRows(name, seed))  # type: ignore[misc]
        rows.add(f"{name}, seed {seed}", "network", lambda task: task().network(), task)
        rows.add(f"{name}, seed {seed}", "recommended call", lambda task: task().recommended(), task)
        rows.add(f"{name}, seed {seed}", "λ = 1", lambda task: task().measures(), task)
        rows.add(f"{name}, seed {seed}", "subsets to P", lambda task: task().long_subsets(), task)
    return rows.all()


class PublishedCNN(nn.Module):
    """The network of the authors' program: 3 x 3 convolutions, ReLU and pooling, one convolution twice.

    Inputs (B, 1, 28, 28) in [-1, 1], outputs (B, 10); 12 458 weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 32, 3, padding=1)
        self.twice = nn.Conv2d(32, 32, 3, padding=1)
        self.last = nn.Linear(288, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, 10)."""
        for convolution in (self.first, self.twice, self.twice):
            x = F.relu(F.max_pool2d(convolution(x), 2))
        return self.last(x.flatten(1))


class ImageRows:
    """The trained network, SWAG from 20 more snapshots of SGD, and the images of the measures.

    Attributes:
        data: all images.
        task: network and training images.
        x: test images X.
        y: their labels.
        validation: other test images that choose δ and the temperature.
        rest: all test images but those of the validation, X included, and their labels.
        seed: of network and images.
    """

    def __init__(self, name: str, seed: int) -> None:
        data, self.seed = images(name), seed
        data = Images(2 * data.x_train - 1, data.y_train, 2 * data.x_test - 1, data.y_test)
        with seeded(seed):
            model = PublishedCNN().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model = kept(model, f"{name}_twice_{seed}", lambda: fit(model, data, name, seed))
        some = random_rows(data.x_train, 256 * 100, seed)
        swag = swag_from(model, batched(*data.train(some), 256), F.cross_entropy, 0.01, 20)
        picked, order = random_rows(data.x_train, SHOWN, seed), random_rows(data.x_test, TESTED + VALIDATING, seed)
        shown = batched(*data.train(picked))
        self.data, self.task = data, Task(model, shown, len(data.x_train), lw.Categorical(), swag)
        (self.x, self.y), chosen = data.test(order[:TESTED]), order[TESTED:]
        self.validation = batched(*data.test(chosen))
        other = torch.ones(len(data.x_test), dtype=torch.bool)
        other[chosen] = False
        self.rest = data.test(other)

    def network(self) -> dict[str, float]:
        """Returns the temperature, the accuracy, and the NLL with and without it, at X and at 9 000 test images."""
        temperature = lw.fit(self.task.model, self.validation, lw.TemperatureScaling()).logit_temperature
        assert isinstance(temperature, float)
        found = {"temperature": temperature}
        for where, (x, y) in {"": (self.x, self.y), ", 9 000 images": self.rest}.items():
            with torch.no_grad():
                logits = torch.cat([self.task.model(part) for part in x.split(500)])
            found[f"accuracy{where}"] = float((logits.argmax(1) == y).double().mean())
            found[f"nll{where}"] = float(F.cross_entropy(logits, y))
            found[f"nll, one temperature{where}"] = float(F.cross_entropy(logits / temperature, y))
        return found

    def recommended(self) -> dict[str, float]:
        """Returns the NLL of lapwing's default posterior, its δ and temperature by the validation images."""
        posterior = lw.fit(
            self.task.model, self.task.train, validation=self.validation, data_size=self.task.data_size, seed=self.seed
        )
        found = {}
        for where, (x, y) in {"": (self.x, self.y), ", 9 000 images": self.rest}.items():
            scores = [posterior.predict(a).log_prob(b).double() for a, b in batched(x, y, 500)]
            found[f"nll{where}"] = -float(torch.cat(scores).mean())
        return found

    def measures(self) -> dict[str, Any]:
        """Returns the measures of every way by s at λ = 1."""
        return compare_subspaces(self.task, {"test": (self.x, self.y)}, RANKS, 1.0, self.seed, WAYS)["test"]

    def long_subsets(self) -> dict[str, Any]:
        """Returns the relative errors of subsets of weights for s up to P at λ = 1, way -> s -> error."""
        model, train = self.task.model, torch.cat([x for x, _ in self.task.train])
        tangent = Tangent.survey(model, self.x)
        with torch.no_grad():
            p = model(train).softmax(1).double()
        root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None]  # R Rᵀ = diag(p) - p pᵀ
        rows = (root.mT @ jacobian(tangent, train)).flatten(0, 1) * (self.task.data_size / len(train)) ** 0.5
        at = jacobian(tangent, self.x).flatten(0, 1)
        squares, magnitudes = rows.square().sum(0), torch.cat(list(tangent.mean().values())).abs()
        assert self.task.swag is not None
        variances = torch.cat(list(self.task.swag.covariance.diagonal().values()))
        scores = {"magnitude": magnitudes, "diagonal": -squares, "SWAG": variances}
        found = {}
        for way, score in scores.items():
            order = score.argsort(descending=True, stable=True)
            found[f"subset, {way}"] = subset_errors(at[:, order], rows[:, order], LONG)
        return found


def fit(model: nn.Module, data: Images, name: str, seed: int) -> nn.Module:
    """Trains the network by the settings of Table 2."""
    epochs, rate, phases = SETTINGS[name]
    steps = epochs * -(-len(data.x_train) // 256)
    batches = islice(shuffled(len(data.x_train), 256, torch.Generator().manual_seed(seed)), steps)
    optimiser = torch.optim.Adam(model.parameters(), rate)
    factor = warm_up_and_decay(steps, *phases)
    forward = lambda x: model(x.contiguous(memory_format=torch.channels_last))  # noqa: E731  # 1.6 times as fast
    return train(model, (data.x_train, data.y_train), batches, optimiser, factor=factor, forward=forward)


def jacobian(tangent: Tangent, x: Tensor) -> Tensor:
    """Returns J (B, C, P), float64."""
    return torch.cat([record.rows() for _, record in tangent.records(x)]).double()


def subset_errors(at: Tensor, rows: Tensor, sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """Returns the relative errors (equation 20) of the subsets of the first s weights, at a prior precision of 1.

    With the columns S of the chosen weights, the covariance is `J_S (I + R_SᵀR_S)⁻¹ J_Sᵀ`, which equals
    `J_S J_Sᵀ - J_S R_Sᵀ (I + R_S R_Sᵀ)⁻¹ R_S J_Sᵀ`. All subsets together cost one pass over the columns.

    Args:
        at: Jacobian at the test inputs (n C, P), the first chosen weights first.
        rows: rows R of the GGN `RᵀR` (m, P), in the same order.
        sizes: s, rising; the last one is P.
    """
    inner, mixed, gram = at.new_zeros(len(at), len(at)), at.new_zeros(len(at), len(rows)), torch.eye(len(rows)).double()
    covariances, first = [], 0
    for size in sizes:
        part, data = at[:, first:size], rows[:, first:size]
        inner, mixed, gram, first = inner + part @ part.T, mixed + part @ data.T, gram + data @ data.T, size
        whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), mixed.T, upper=False)
        covariances.append(inner - whitened.T @ whitened)
    errors = (float(relative_error(covariance, covariances[-1])) for covariance in covariances)
    return {str(size): {"relative_error": error} for size, error in zip(sizes, errors, strict=True)}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns relative errors and NLL at X, the NLL of the rows to beat, and errors of subsets for s up to P."""
    (name,) = results["table"]
    found = results["table"][name]
    tasks, long = {name: found["λ = 1"]}, {name: found["subsets to P"]}
    beat = {
        row: [shown(found[of].get(f"{measure}{where}"), 4) for where in ("", ", 9 000 images")]
        for row, of, measure in (
            ("network", "network", "nll"),
            ("one temperature", "network", "nll, one temperature"),
            ("recommended call", "recommended call", "nll"),
        )
    }
    return {
        "relative error": table(tasks, [name], "relative_error", RANKS),
        "nll": table(tasks, [name], "nll", RANKS, 2),
        "rows to beat": grid([f"NLL, the {TESTED} images of X", "NLL, 9 000 test images"], beat),
        "subsets to P": table(long, [name], "relative_error", LONG),
    }


def draw(results: Mapping[str, Any], experiment: str = __file__) -> None:
    """Draws relative error and NLL over s, and the relative errors of subsets for s up to P."""
    (name,) = results["table"]
    found = results["table"][name]
    network = {"network": {"nll": found["network"]["nll"]}}
    network["one temperature"] = {"nll": found["network"]["nll, one temperature"]}
    figure, ((*axes,),) = drawing.panels(1, 3, (12, 4))
    for axis, measure in zip(axes, ("relative_error", "nll"), strict=False):
        curves(axis, {**found["λ = 1"], **network}, measure)
        axis.set_ylabel(LABELS[measure])
    for way, errors in found["subsets to P"].items():
        points = [(int(size), error["relative_error"]["mean"]) for size, error in errors.items()]
        axes[2].plot(*zip(*points, strict=True), ".--", color=COLOURS[way])
    axes[2].set(xlabel="s", ylabel=LABELS["relative_error"], title="subsets for s up to P")
    seeds = len(results["runs"])
    heading = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST"}[name]
    figure.suptitle(f"{heading}, 12 458 weights, λ = 1, {seeds} seed{'s' * (seeds > 1)}", fontsize=10)
    drawing.legend_below(figure, 5)
    drawing.save(figure, experiment)
