"""Event times that are partly censored: do 90 % intervals cover the true times of other rows?

The true times of three tables are known, and independent normal ends hide about 40 % of those of the training and
held-out rows: "the event was later than this". Each row of a table trains an MLP of two layers of 50 units with its own
loss on 2 000 rows or fewer, and fits lapwing's default with 500 held-out rows or fewer.

- *censored*: `lw.Censored`, with held-out data and without them.
- *known rows*: a normal regression without the censored rows.
- *ends*: a normal regression in which a censored time counts as the event.

The parts named *tails* compare normal noise with `lw.Censored(df=4.0)`, in training and fit: on the tables as they are,
with noise added to all times (a Student t of 3 degrees of freedom times .29, whose standard deviation is .5), and with
*outliers* (a normal of standard deviation 2 added to 5 % of all times).

*Coverage* is the share of the true test times within the 90 % interval, *bias* the mean of the prediction minus the
true time, and *NLL* in nats per test row. Times are standardised. Three seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from papers.common.data import some_rows
from papers.common.networks import mlp
from papers.common.scores import averaged, interval_scores
from papers.common.tables import grid, shown
from papers.common.training import Recipe, seeded

SEEDS, ROWS = (0, 1, 2), 3_000
NOISES = "none", "Student t", "outliers"
TABLES = {"kin40k": "kin40k", "California": "california_housing", "airfoil": "uci_airfoil"}


def hidden(part: tuple[Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor]:
    """Returns inputs, and (lower, upper) of times that an independent end may hide."""
    x, y = part
    end = 0.4 + torch.randn(y.shape, generator=torch.Generator().manual_seed(seed))
    return x, torch.cat([y.minimum(end), torch.where(y > end, torch.inf, y)], 1)


class WithNoise(nn.Module):
    """A network, and the logarithm of its noise variance as another output."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.log_noise = network, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, 2)."""
        outputs = self.network(x)
        return torch.cat([outputs, self.log_noise.expand_as(outputs)], 1)


def negative(outputs: Tensor, targets: Tensor, df: float | None = None) -> Tensor:
    """Returns the mean negative log likelihood of censored targets."""
    return -lw.Censored(df=df).log_prob(outputs[:, :1], targets, outputs[0, 1].exp()).mean()


def noisy(part: tuple[Tensor, Tensor], kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """Returns inputs, and times to which one of `NOISES` is added."""
    x, y = part
    generator = torch.Generator().manual_seed(seed + 500)
    if kind == "Student t":
        z, squares = torch.randn(y.shape, generator=generator), torch.randn((*y.shape, 3), generator=generator).square()
        return x, y + 0.5 * z / squares.sum(-1).sqrt()
    if kind == "outliers":
        return x, y + (torch.rand(y.shape, generator=generator) < 0.05) * 2 * torch.randn(y.shape, generator=generator)
    return part


def run(name: str, seed: int) -> dict[str, Any]:
    """Returns the scores of all fits of a table with one seed."""
    data = some_rows(name, ROWS, seed)
    (x, train), (x_held, held) = hidden(data.train, seed), hidden(data.val, seed + 100)
    known, known_held = train[:, 1].isfinite(), held[:, 1].isfinite()
    tasks: dict[str, tuple[Any, Any, Any]] = {
        "censored": ((x, train), (x_held, held), "censored"),
        "known rows": ((x[known], train[known, :1]), (x_held[known_held], held[known_held, :1]), None),
        "ends": ((x, train[:, :1]), (x_held, held[:, :1]), None),
    }
    row: dict[str, Any] = {"censored rows": float(1 - known.double().mean())}
    for task, (part, held_out, likelihood) in tasks.items():
        with seeded(seed):
            model = mlp(x.shape[1], 50, 50, 1)
        if task == "censored":
            Recipe(negative, 2000, 3e-3, 1e-4).train(WithNoise(model), part, seed)
        else:
            Recipe(F.mse_loss, 2000, 3e-3, 1e-4).train(model, part, seed)
        fit: Any = partial(lw.fit, model, part, likelihood=likelihood, progress=False)
        row[task] = scores(fit(validation=held_out), *data.test)
        if task == "censored":
            row["censored, no held-out data"] = scores(fit(), *data.test)
    print(name, seed, row, flush=True)
    return row


def tails(name: str, seed: int) -> dict[str, Any]:
    """Returns the scores of normal and Student t noise with one seed, for each kind of added noise."""
    data, found = some_rows(name, ROWS, seed), {}
    for kind in NOISES:
        x, train = hidden(noisy(data.train, kind, seed), seed)
        held_out = hidden(noisy(data.val, kind, seed + 100), seed + 100)
        for df in (None, 4.0):
            with seeded(seed):
                model = mlp(x.shape[1], 50, 50, 1)
            Recipe(partial(negative, df=df), 2000, 3e-3, 1e-4).train(WithNoise(model), (x, train), seed)
            posterior = lw.fit(model, (x, train), likelihood=lw.Censored(df=df), validation=held_out, progress=False)
            found[f"{kind}, {'normal' if df is None else 't'}"] = scores(posterior, *noisy(data.test, kind, seed + 200))
    print(name, seed, found, flush=True)
    return found


def scores(posterior: lw.Posterior, x: Tensor, y: Tensor) -> dict[str, float]:
    """Returns the scores at true times."""
    prediction = posterior.predict(x)
    found, bias = interval_scores(prediction, y), float((prediction.mean - y).double().mean())
    return {"coverage": found["coverage"], "bias": bias, "NLL": found["nll"], "width": found["width"]}


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the runs of each table."""

    def of(name: str, run: Callable[[str, int], Any]) -> dict[str, Any]:
        runs = [run(TABLES[name], seed) for seed in SEEDS]
        return {"rows": averaged(runs), "runs": runs}

    first = {name: partial(of, name, run) for name in TABLES}
    return first | {f"{name} tails": partial(of, name, tails) for name in TABLES}


def tables(found: dict[str, Any]) -> dict[str, str]:
    """Returns the coverage, bias and NLL of all fits, and of normal and Student t noise."""
    lines, of_tails = [], []
    for name in TABLES:
        for task, row in found.get(name, {"rows": {}})["rows"].items():
            if task != "censored rows":
                cells = [f"{row['coverage']['mean']:.1%}", *(shown(row[key]) for key in ("bias", "NLL", "width"))]
                lines.append((name, [task, *cells]))
        rows = found.get(f"{name} tails", {"rows": {}})["rows"]
        for kind in NOISES if rows else ():
            pair = [rows[f"{kind}, {noise}"] for noise in ("normal", "t")]
            cells = [f"{row['coverage']['mean']:.1%}" for row in pair]
            of_tails.append((name, [kind, *cells, *(shown(row[key]) for key in ("NLL", "width") for row in pair)]))
    columns = [f"{key}: {noise}" for key in ("coverage", "NLL", "width") for noise in ("normal", "t")]
    return {
        "times": grid(["fit", "coverage", "bias", "NLL", "width"], lines, corner="table"),
        "tails": grid(["added noise", *columns], of_tails, corner="table"),
    }
