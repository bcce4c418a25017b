"""Intervals of real regressions against what people use: ensembles, a variance output, conformal prediction, NGBoost.

    python -m venv rivals && rivals/bin/pip install -e .[eval,mapie] laplace-torch ngboost
    rivals/bin/python -m benchmarks regression_rivals --missing --minutes 60       # a later run continues
    rivals/bin/python -m benchmarks regression_rivals 'concrete 0: *' '*: NGBoost'         # some parts, the others stay

Needs the tables that LAPWING_DATA names. A part is one method on one table with one seed. A rival whose package is not
installed has no parts. A method that fails has no row: a line says so, and the next run with `--missing` tries again.

The real tables with 150 rows or more are used as they are; columns with missing entries are left out. A fifth of the
rows, at most 1 000, are test rows. An eighth, 60 to 500, are held out. Up to 5 000 other rows train. Inputs and targets
are standardised by the training rows, and all scores are in this unit. For each table and seed the methods share one
ReLU MLP with two hidden layers of 50 units, trained for 60 epochs without weight decay. Other networks have the same
size, epochs, rate and batches. All methods see the held-out rows, except laplace-torch and "no held-out data".

Scores are NLL, CRPS, RMSE, coverage and mean width of 90 % intervals. Tables with at least 100 test rows also have the
coverage of each quarter of the test rows by predicted standard deviation, or by width. Seconds are CPU seconds on one
thread: "training" of the networks, and "fit" with all choices on held-out rows. Boosting has "fit" only.
"""

from __future__ import annotations

import importlib
import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from benchmarks import heteroscedastic, peers
from lapwing.evaluation import metrics
from papers.common.data import Table, random_rows, rows_and_targets, standardised
from papers.common.networks import mlp
from papers.common.tables import grid
from papers.common.training import Loss, adam, kept_tensors

THREADS, SEEDS = 1, (0, 1, 2)
EPOCHS, RATE, BATCH = 60, 5e-3, 100
TRAINED, HELD_OUT, TESTED = 5000, (60, 500), 1000
"""Maximum number of training rows, minimum and maximum number of held-out rows, maximum number of test rows."""

MEMBERS, DROPPED, PASSES = 5, 0.1, 50
"""Networks of an ensemble; probability of dropout, and number of passes."""

LEVELS = tuple((i + 0.5) / 10 for i in range(10))
"""Quantiles of gradient boosting: the midpoints of ten equal parts, of which the first and last are a 90 % interval."""

QUARTERS = 100
"""Minimum number of test rows for the coverage of quarters."""

INSIDE, QUARTER_INSIDE = (0.86, 0.94), (0.82, 0.97)
"""Ranges that the coverage of 90 % intervals should have, over all test rows and in each quarter."""

NORMAL = 1.6448536
"""Half of the width of the central 90 % interval of a standard normal."""

TABLES = {
    "servo": "uci_servo", "liver": "uci_liver", "autompg": "uci_autompg", "real estate": "uci_real_estate",
    "boston": "uci_boston", "forest fires": "uci_forest_fires", "energy": "uci_energy",
    "thermography": "uci_thermography", "concrete": "uci_concrete", "airfoil": "uci_airfoil", "wine": "uci_wine_red",
    "communities": "uci_communities", "parkinsons": "uci_parkinsons", "power": "uci_power", "naval": "uci_naval",
    "pol": "pol", "elevators": "elevators", "bike": "uci_bike", "California": "california_housing", "kin40k": "kin40k",
    "flights 2015": "us_flights_2015jan", "kegg": "keggundirected", "flights 2001": "us_flights_2001_200k",
    "taxi": "nyc_green_taxi_2023q1",
}  # fmt: skip
"""Name -> file, the smallest first."""


# ---- data and networks


def sizes(count: int) -> tuple[int, int, int]:
    """Returns the numbers of training, held-out and test rows of a table."""
    test = min(TESTED, count // 5)
    held_out = min(HELD_OUT[1], max(HELD_OUT[0], count // 8))
    return min(TRAINED, count - test - held_out), held_out, test


def _dropout(inputs: int) -> nn.Sequential:
    layers = [
        layer for part in mlp(inputs, 50, 50, 1, activation=nn.ReLU)
        for layer in ([part, nn.Dropout(DROPPED)] if isinstance(part, nn.ReLU) else [part])
    ]  # fmt: skip
    return nn.Sequential(*layers)


def pinball(quantiles: Tensor, y: Tensor, levels: Sequence[float] = (0.05, 0.5, 0.95)) -> Tensor:
    """Returns the mean pinball loss of quantiles (B, K) of targets (B, 1)."""
    gap, level = y - quantiles, torch.as_tensor(levels, dtype=quantiles.dtype)
    return torch.maximum(level * gap, (level - 1) * gap).mean()


KINDS: dict[str, tuple[Callable[[int], nn.Sequential], Loss, float | None]] = {
    "mean": (lambda inputs: mlp(inputs, 50, 50, 1, activation=nn.ReLU), F.mse_loss, None),
    "variance": (lambda inputs: mlp(inputs, 50, 50, 2, activation=nn.ReLU), heteroscedastic.loss, 5.0),
    "quantiles": (lambda inputs: mlp(inputs, 50, 50, 3, activation=nn.ReLU), pinball, None),
    "dropout": (_dropout, F.mse_loss, None),
}
"""Network -> how it is built, its loss, and the largest norm of its gradient."""


@dataclass(frozen=True)
class Study:
    """One table and seed: data and trained networks. Networks and their seconds are kept in LAPWING_NETWORKS."""

    name: str
    seed: int

    @cached_property
    def table(self) -> Table:
        """Standardised training, held-out and test rows, in the random order of the seed."""
        x, y = rows_and_targets(TABLES[self.name])
        x = x[:, ~x.isnan().any(0)]
        train, held_out, test = sizes(len(x))
        order = random_rows(x, train + held_out + test, self.seed)
        return standardised(self.name, x[order], y[order], train, train + held_out, "")

    def network(self, kind: str = "mean", member: int = 0) -> tuple[nn.Module, float]:
        """Returns a trained network of `KINDS` and the CPU seconds of its training."""
        build, loss, clip = KINDS[kind]
        data, seed = self.table.train, 100 * self.seed + member
        torch.manual_seed(seed)
        model = build(data[0].shape[1])

        def make() -> dict[str, Tensor]:
            start = time.process_time()
            order = torch.Generator().manual_seed(seed)
            adam(model, data, EPOCHS, RATE, BATCH, generator=order, loss=loss, clip=clip)
            return {**model.state_dict(), "seconds": torch.tensor(time.process_time() - start)}

        weights = dict(kept_tensors(f"rivals_{TABLES[self.name]}_{kind}_{seed}", make))
        seconds = float(weights.pop("seconds"))
        model.load_state_dict(weights)
        return model.eval(), seconds

    def matrices(self) -> list[tuple[Any, Any]]:
        """Returns inputs (n, d) and targets (n,) of training, held-out and test rows as float64 arrays."""
        parts = self.table.train, self.table.val, self.table.test
        return [(x.double().numpy(), y[:, 0].double().numpy()) for x, y in parts]


@lru_cache(1)
def study(name: str, seed: int) -> Study:
    """Returns the study of a table and seed; the latest stays in memory."""
    return Study(name, seed)


# ---- scores


def scores(
    mean: Tensor,
    low: Tensor,
    high: Tensor,
    spread: Tensor,
    y: Tensor,
    nll: float | None = None,
    crps: float | None = None,
) -> dict[str, Any]:
    """Returns the scores of predictions (n,), without those that a method does not have.

    Args:
        mean: predicted mean, or median.
        low: lower ends of 90 % intervals.
        high: upper ends.
        spread: standard deviations or widths. If all are equal, quarters have no order and are left out.
        y: targets.
        nll: mean negative log likelihood in nats, or None.
        crps: mean CRPS, or None.
    """
    inside = ((low <= y) & (y <= high)).double()
    found: dict[str, Any] = {} if nll is None else {"nll": nll}
    found |= {} if crps is None else {"crps": crps}
    found["rmse"] = float((mean - y).square().mean().sqrt())
    found |= {"coverage": float(inside.mean()), "width": float((high - low).mean())}
    if len(y) >= QUARTERS and float(spread.max() - spread.min()) > 1e-6 * float(spread.mean().abs()):
        found["quarters"] = [float(part.mean()) for part in inside[spread.argsort()].tensor_split(4)]
    return found


def of_normals(mean: Tensor, variance: Tensor, y: Tensor) -> dict[str, Any]:
    """Returns the scores of normal predictions (n, 1)."""
    mean, variance, y = (part.detach().double().flatten() for part in (mean, variance, y))
    std = variance.sqrt()
    nll = float(F.gaussian_nll_loss(mean, y, variance, full=True, eps=0.0))
    crps = float(metrics.crps_gaussian(mean, std, y))
    return scores(mean, mean - NORMAL * std, mean + NORMAL * std, std, y, nll, crps)


def of_prediction(prediction: Any, y: Tensor) -> dict[str, Any]:
    """Returns the scores of a prediction of lapwing."""
    low, high = prediction.interval(0.9)
    parts = (part.detach().double().flatten() for part in (prediction.mean, low, high, prediction.std, y))
    return scores(*parts, -float(prediction.log_prob(y).double().mean()), float(prediction.crps(y).double().mean()))


def of_intervals(points: Any, low: Any, high: Any, y: Any, crps: float | None = None) -> dict[str, Any]:
    """Returns the scores of intervals in numpy arrays (n,)."""
    middle, lower, upper, targets = (torch.as_tensor(np.asarray(part)).double() for part in (points, low, high, y))
    return scores(middle, lower, upper, upper - lower, targets, None, crps)


def crps_of_quantiles(quantiles: Tensor, y: Tensor, levels: Sequence[float] = LEVELS) -> float:
    """Returns the CRPS of quantiles (n, K) at midpoints, of equal weight: twice the mean pinball loss.

    For a normal and ten quantiles it is .7 % too large (Gneiting and Raftery 2007, section 4.2).
    """
    return 2.0 * float(pinball(quantiles, y[:, None], levels))


def held_out_variance(squares: Tensor, variance: Tensor | float = 0.0) -> float:
    """Returns the σ² of most likely `r ~ N(0, v + σ²)`, for squared residuals r² (n,) and given variances v (n,)."""
    candidates = torch.logspace(-7, 3, 4001, dtype=torch.float64)[:, None]
    total = torch.as_tensor(variance).double().flatten() + candidates
    losses = (total.log() + squares.double().flatten() / total).mean(1)
    return float(candidates[losses.argmin()])


# ---- methods

Row = dict[str, Any]


def timed(train: float, start: float) -> Row:
    """Returns the seconds of the training, and those since the start of the fit."""
    return {"training": train, "fit": time.process_time() - start}


def one_variance(found: Study) -> Row:
    """Returns the scores of the network with its mean squared held-out residual as noise variance."""
    model, seconds = found.network()
    (a, b), (x, y) = found.table.val, found.table.test
    start = time.process_time()
    with torch.no_grad():
        variance = (model(a) - b).square().mean()
        spent = timed(seconds, start)
        return of_normals(mean := model(x), variance.expand_as(mean), y) | spent


def ours(found: Study, constant: bool = False, held_out: bool = True) -> Row:
    """Returns the scores of lapwing's call, or of the call before noise could depend on the input."""
    model, seconds = found.network()
    options: dict[str, Any] = {"validation": found.table.val} if held_out else {}
    if constant:
        options["likelihood"] = lw.Gaussian(noise="constant")
        options |= {} if held_out else {"tune": lw.BoundedEvidence()}
    start = time.process_time()
    posterior = lw.fit(model, found.table.train, progress=False, **options)
    spent = timed(seconds, start)
    x, y = found.table.test
    return of_prediction(posterior.predict(x), y) | spent


def laplace_torch(found: Study) -> Row:
    """Returns the scores of laplace-torch: KFAC of all weights, prior and noise by the marginal likelihood."""
    model, seconds = found.network()
    task = peers.Task(model, peers.loader(*found.table.train), peers.loader(*found.table.val), found.table.test)
    start = time.process_time()
    predict = peers.theirs("marglik", subset_of_weights="all")(task)
    spent = timed(seconds, start)
    x, y = found.table.test
    mean, variance = (torch.cat(part) for part in zip(*map(predict, x.split(500)), strict=True))
    return of_normals(mean, variance, y) | spent


def _moments(outputs: Callable[[Tensor], Tensor], found: Study, train: float) -> Row:
    """Returns the scores of moments of outputs (M, n, 1), with one noise variance from the held-out rows."""
    (a, b), (x, y) = found.table.val, found.table.test
    start = time.process_time()
    with torch.no_grad():
        draws = outputs(a)
        noise = held_out_variance((draws.mean(0) - b).square(), draws.var(0, correction=0))
        spent = timed(train, start)
        draws = outputs(x)
    return of_normals(draws.mean(0), draws.var(0, correction=0) + noise, y) | spent


def ensemble(found: Study) -> Row:
    """Returns the scores of five networks: mean and variance of their outputs, and one held-out noise variance."""
    models, seconds = zip(*(found.network(member=member) for member in range(MEMBERS)), strict=True)
    return _moments(lambda x: torch.stack([model(x) for model in models]), found, sum(seconds))


def our_ensemble(found: Study) -> Row:
    """Returns the scores of `lw.mixture` of the five networks' fits; each fit and the mixture see the held-out rows."""
    models, seconds = zip(*(found.network(member=member) for member in range(MEMBERS)), strict=True)
    train, held_out = found.table.train, found.table.val
    start = time.process_time()
    members = [lw.fit(model, train, validation=held_out, progress=False) for model in models]
    mixture = lw.mixture(members, validation=held_out)
    spent = timed(sum(seconds), start)
    x, y = found.table.test
    return of_prediction(mixture.predict(x), y) | spent


def dropout(found: Study) -> Row:
    """Returns the scores of MC dropout: mean and variance of 50 passes, and one held-out noise variance."""
    model, seconds = found.network("dropout")
    torch.manual_seed(found.seed)
    model.train()
    return _moments(lambda x: torch.stack([model(x) for _ in range(PASSES)]), found, seconds)


def variance_output(found: Study) -> Row:
    """Returns the scores of a network of mean and log variance; held-out rows choose a factor of the variance."""
    model, seconds = found.network("variance")
    (a, b), (x, y) = found.table.val, found.table.test

    def moments(inputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = model(inputs).double().chunk(2, -1)
        return mean, log_variance.exp().clamp_min(1e-6)  # as in training

    start = time.process_time()
    with torch.no_grad():
        mean, variance = moments(a)
        factor = ((b - mean).square() / variance).mean()
        spent = timed(seconds, start)
        mean, variance = moments(x)
    return of_normals(mean, factor * variance, y) | spent


class Column:
    """An estimator for MAPIE that returns a column of its X."""

    is_fitted, is_fitted_ = True, True

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def fit(self, X: Any, y: Any) -> Column:
        """Returns the estimator itself."""
        return self

    def predict(self, X: Any) -> Any:
        """Returns the column."""
        return np.asarray(X)[:, self.number]


def conformal(found: Study) -> Row:
    """Returns the scores of MAPIE's split conformal intervals of the network, by absolute residuals."""
    from mapie.regression import SplitConformalRegressor

    model, seconds = found.network()
    return _conformed(found, model, seconds, SplitConformalRegressor(Column(), confidence_level=0.9, prefit=True))


def conformal_quantiles(found: Study) -> Row:
    """Returns the scores of a network of three quantiles, which MAPIE makes conformal on the held-out rows."""
    from mapie.regression import ConformalizedQuantileRegressor

    model, seconds = found.network("quantiles")
    columns = [Column(0), Column(2), Column(1)]
    conformed = ConformalizedQuantileRegressor(columns, confidence_level=0.9, prefit=True)
    return _conformed(found, model, seconds, conformed)


def _conformed(found: Study, model: nn.Module, seconds: float, conformed: Any) -> Row:
    """Returns the scores of intervals of the network's sorted outputs, after the held-out rows made them conformal."""
    (a, b), (x, y) = found.table.val, found.table.test
    with torch.no_grad():
        held_out, test = (model(inputs).double().sort(1).values.numpy() for inputs in (a, x))
    start = time.process_time()
    conformed.conformalize(held_out, b[:, 0].double().numpy())
    spent = timed(seconds, start)
    points, ends = conformed.predict_interval(test)
    return of_intervals(points, ends[:, 0, 0], ends[:, 1, 0], y[:, 0]) | spent


def conformal_boosting(found: Study) -> Row:
    """Returns the scores of scikit-learn's boosted quantiles, which MAPIE makes conformal on the held-out rows."""
    from mapie.regression import ConformalizedQuantileRegressor
    from sklearn.ensemble import HistGradientBoostingRegressor

    train, held_out, (x, y) = found.matrices()
    start = time.process_time()
    boosted: Any = HistGradientBoostingRegressor(loss="quantile", quantile=0.5, random_state=found.seed)
    conformed: Any = ConformalizedQuantileRegressor(boosted, confidence_level=0.9)
    conformed.fit(*train).conformalize(*held_out)
    spent = timed(0.0, start)
    points, ends = conformed.predict_interval(x)
    return of_intervals(points, ends[:, 0, 0], ends[:, 1, 0], y) | spent


def boosting(found: Study) -> Row:
    """Returns the scores of ten quantiles by scikit-learn's gradient boosting; held-out rows stop each of them."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    (x, y), (a, b), (u, v) = found.matrices()
    start = time.process_time()
    models = [
        HistGradientBoostingRegressor(
            loss="quantile", quantile=level, max_iter=500, early_stopping=True, random_state=found.seed
        ).fit(x, y, X_val=a, y_val=b)
        for level in LEVELS
    ]
    spent = timed(0.0, start)
    quantiles = torch.as_tensor(np.stack([model.predict(u) for model in models], 1)).sort(1).values
    crps = crps_of_quantiles(quantiles, torch.as_tensor(v))
    return of_intervals(quantiles[:, 4:6].mean(1), quantiles[:, 0], quantiles[:, -1], v, crps) | spent


def ngboost(found: Study) -> Row:
    """Returns the scores of NGBoost's normals: up to 500 trees at a rate of .04, which the held-out rows stop."""
    from ngboost import NGBRegressor

    (x, y), (a, b), (u, v) = found.matrices()
    start = time.process_time()
    model: Any = NGBRegressor(learning_rate=0.04, verbose=False, random_state=found.seed, early_stopping_rounds=20)
    model.fit(x, y, X_val=a, Y_val=b)
    spent = timed(0.0, start)
    law = model.pred_dist(u, max_iter=model.best_val_loss_itr)
    mean, std = (torch.as_tensor(np.asarray(law.params[name])) for name in ("loc", "scale"))
    return of_normals(mean, std.square(), torch.as_tensor(v)) | spent


METHODS: dict[str, tuple[str, Callable[[Study], Row], str]] = {
    "one variance": ("one noise variance", one_variance, "torch"),
    "constant": ("`lw.fit(..., validation=)`, constant noise", partial(ours, constant=True), "torch"),
    "lapwing": ("`lw.fit(..., validation=)`", ours, "torch"),
    "constant alone": (
        "`lw.fit(...)`, constant noise, no held-out data", partial(ours, constant=True, held_out=False), "torch"
    ),
    "lapwing alone": ("`lw.fit(...)`, no held-out data", partial(ours, held_out=False), "torch"),
    "laplace-torch": ("laplace-torch, KFAC of all weights, evidence", laplace_torch, "laplace"),
    "dropout": ("MC dropout", dropout, "torch"),
    "variance output": ("network with a second output for the variance", variance_output, "torch"),
    "ensemble": ("ensemble of five", ensemble, "torch"),
    "lapwing ensemble": ("ensemble of five by `lw.mixture`", our_ensemble, "torch"),
    "conformal": ("split conformal (MAPIE)", conformal, "mapie"),
    "conformal quantiles": ("conformalised quantiles of a network (MAPIE)", conformal_quantiles, "mapie"),
    "conformal boosting": ("conformalised quantiles of gradient boosting (MAPIE)", conformal_boosting, "mapie"),
    "boosting": ("quantiles of gradient boosting (scikit-learn)", boosting, "sklearn"),
    "NGBoost": ("NGBoost", ngboost, "ngboost"),
}  # fmt: skip
"""Name -> its words in tables, its function, and the module that it needs."""

MODULES = {"laplace": "laplace-torch", "mapie": "mapie", "sklearn": "scikit-learn", "ngboost": "ngboost"}
PACKAGES = tuple(package for module, package in MODULES.items() if find_spec(module))


def row(name: str, seed: int, method: str) -> Row | None:
    """Returns the scores and seconds of a method. One that fails has no row: its error is printed."""
    torch.manual_seed(seed)
    try:
        importlib.import_module(METHODS[method][2])  # outside the seconds
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = METHODS[method][1](study(name, seed))
    except Exception as error:
        print(f"{name} {seed}: {method} failed: {peers.first_line(error)}", flush=True)
        return None
    quarters = {"quarters": [round(value, 3) for value in found["quarters"]]} if "quarters" in found else {}
    return {**{key: round(value, 4) for key, value in found.items() if key != "quarters"}, **quarters}


def parts() -> dict[str, Callable[[], Row | None]]:
    """Returns a row for each table, seed and installed method."""
    runs = itertools.product(TABLES, SEEDS, [method for method in METHODS if find_spec(METHODS[method][2])])
    return {f"{name} {seed}: {method}": partial(row, name, seed, method) for name, seed, method in runs}


# ---- tables of a page

Seeds = Mapping[int, Row]


def collected(results: Mapping[str, Row]) -> dict[str, dict[str, Seeds]]:
    """Returns method -> table -> seed -> row, in the order of `METHODS` and `TABLES`."""
    found: dict[str, dict[str, dict[int, Row]]] = {}
    for part, values in results.items():
        run, _, method = part.partition(": ")
        name, _, seed = run.rpartition(" ")
        found.setdefault(method, {}).setdefault(name, {})[int(seed)] = values
    return {
        method: {name: found[method][name] for name in TABLES if name in found[method]}
        for method in METHODS if method in found
    }  # fmt: skip


def compared(rows: Seeds, base: Seeds, of: Callable[[Row, Row], float], score: str) -> float | None:
    """Returns the mean over seeds of a comparison with the base; None if no seed has the score in both."""
    values = [of(rows[seed], base[seed]) for seed in rows if score in rows[seed] and seed in base]
    return fmean(values) if values else None


def gain(rows: Seeds, base: Seeds) -> float | None:
    """Returns the mean over seeds of the NLL of the base minus the NLL, in nats."""
    return compared(rows, base, lambda row, other: other["nll"] - row["nll"], "nll")


def ratio(rows: Seeds, base: Seeds, score: str) -> float | None:
    """Returns the mean over seeds of the ratio of a score to the score of the base."""
    return compared(rows, base, lambda row, other: row[score] / other[score], score)


def mean_quarters(rows: Seeds) -> list[float]:
    """Returns the mean coverage over seeds of each quarter; an empty list without quarters."""
    return [fmean(values) for values in zip(*(row["quarters"] for row in rows.values() if "quarters" in row))]  # noqa: B905


def _inside(value: float, ends: tuple[float, float]) -> bool:
    return ends[0] <= value <= ends[1]


def _cell(values: Sequence[float | None], digits: int, of: Callable[[list[float]], float] = median) -> str:
    known = [value for value in values if value is not None]
    return f"{of(known):.{digits}f}" if known else ""


COLUMNS = {
    "medians": (
        "tables", "gain, nats", "least gain", "CRPS", "coverage", "86 to 94 %", "quarters 82 to 97 %", "width",
        "training, s", "fit, s",
    ),
    "summary": ("gain, nats", "coverage", "86 to 94 %", "width", "seconds"),
}  # fmt: skip
"""Table of medians -> its columns."""


def cells(of: Mapping[str, Seeds], base: Mapping[str, Seeds]) -> dict[str, str]:
    """Returns column -> medians of a method over tables; "seconds" are of training and fit together."""
    pairs = [(rows, base.get(name, {})) for name, rows in of.items()]
    gains = [gain(*pair) for pair in pairs]
    cover = [fmean(row["coverage"] for row in rows.values()) for rows in of.values()]
    quarters = [part for rows in of.values() if (part := mean_quarters(rows))]
    even = sum(all(_inside(value, QUARTER_INSIDE) for value in part) for part in quarters)
    seconds = {
        column: [fmean(sum(row[key] for key in keys) for row in rows.values()) for rows in of.values()]
        for column, keys in {"training, s": ["training"], "fit, s": ["fit"], "seconds": ["training", "fit"]}.items()
    }
    return {
        "tables": str(len(of)), "gain, nats": _cell(gains, 3), "least gain": _cell(gains, 3, min),
        "CRPS": _cell([ratio(*pair, "crps") for pair in pairs], 3), "coverage": f"{100 * median(cover):.1f} %",
        "86 to 94 %": str(sum(_inside(value, INSIDE) for value in cover)),
        "quarters 82 to 97 %": f"{even} of {len(quarters)}" if quarters else "",
        "width": _cell([ratio(*pair, "width") for pair in pairs], 2),
        **{column: _cell(values, 1) for column, values in seconds.items()},
    }  # fmt: skip


def medians(found: Mapping[str, Mapping[str, Seeds]], columns: Sequence[str]) -> str:
    """Returns a table of medians over tables, a row for each method."""
    base, lines = found.get("one variance", {}), {}
    for method, of in found.items():
        row = cells(of, base)
        lines[METHODS[method][0]] = [row[column] for column in columns]
    return grid(columns, lines, right=True)


README = (
    "one variance", "laplace-torch", "ensemble", "conformal quantiles", "lapwing alone", "constant", "lapwing",
    "lapwing ensemble",
)  # fmt: skip
"""Rows of the table of the README."""


def readme(found: Mapping[str, Mapping[str, Seeds]]) -> str:
    """Returns the table of the README, medians over tables."""
    base, lines = found["one variance"], {}
    for method in (name for name in README if name in found):
        row = cells(found[method], base)
        gains = [gain(rows, base.get(name, {})) for name, rows in found[method].items()]
        lines[METHODS[method][0]] = [_cell(gains, 2), f"{row['86 to 94 %']} of {row['tables']}", row["width"]]
    return grid(["gain, nats", "86 to 94 %", "width"], lines, right=True)


def gains_by_table(found: Mapping[str, Mapping[str, Seeds]]) -> str:
    """Returns the gain in NLL over one noise variance, in nats: a row for each table."""
    base = found.get("one variance", {})
    columns = [
        name for name in found if name != "one variance" and any(gain(r, r) is not None for r in found[name].values())
    ]
    lines = {
        name: [f"{fmean(row['nll'] for row in seeds.values()):.3f}",
               *(_cell([gain(found[column].get(name, {}), seeds)], 3) for column in columns)]
        for name, seeds in base.items()
    }  # fmt: skip
    return grid(["NLL of one noise variance", *columns], lines, right=True)


def tables(results: Mapping[str, Row]) -> dict[str, str]:
    """Returns medians over tables, short, in full and for the README; and gains of each table."""
    found = collected(results)
    of_medians = {name: medians(found, columns) for name, columns in COLUMNS.items()}
    return {**of_medians, "README": readme(found), "gains": gains_by_table(found)}
