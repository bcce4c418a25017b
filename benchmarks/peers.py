"""What people already use beside lapwing: laplace-torch on the same networks and data, a Gaussian process of BoTorch.

    python -m venv peers && peers/bin/pip install -e .[eval,botorch] laplace-torch
    peers/bin/python -m benchmarks peers              # everything, a quarter of an hour on one thread

Needs the data sets that LAPWING_DATA names. One seed. Every row of a task is around the same trained network, with the
same training data, held-out data and batches. Seconds are those of a fit with its tuning, and of predictions of all
test data, each the median of three rounds in which the candidates take turns; of one where a fit takes over 20 seconds.

laplace-torch is run as its README and its examples do: by default (last layer, KFAC), tuned by its marginal likelihood
or its grid search on held-out data; and over all weights. In a regression the marginal likelihood tunes the noise too.
The grid search of a regression goes by the NLL here: by default it goes by squared errors, on which the prior precision
of a linearised network has no influence.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from benchmarks import answers, heteroscedastic
from lapwing.evaluation.metrics import expected_calibration_error
from papers.common.data import arrays, some_rows
from papers.common.networks import mlp
from papers.common.tables import of_scores
from papers.common.training import adam

SEED = 0
ROUNDS, SLOW = 3, 20.0
PACKAGES = ("laplace-torch", "botorch")

Rows = dict[str, dict[str, Any]]
Outputs = tuple[Tensor, ...]
"""Probabilities (B, C), or means and variances (B, 1) of y."""


@dataclass(frozen=True)
class Task:
    """A trained network, its training data, held-out data, and test data."""

    model: nn.Module
    train: DataLoader
    held_out: DataLoader
    test: tuple[Tensor, Tensor]

    @property
    def regression(self) -> bool:
        """Whether the targets are numbers."""
        return self.test[1].is_floating_point()


Fit = Callable[[Task], Callable[[Tensor], Outputs]]
"""Fits and tunes; returns what predicts."""


# ---- candidates


def alone(task: Task) -> Callable[[Tensor], Outputs]:
    """Returns the network, with the mean squared residual of the training data as its noise."""
    if not task.regression:
        return lambda x: (task.model(x).softmax(-1),)
    noise = torch.cat([(task.model(x) - y).square() for x, y in task.train]).mean()
    return lambda x: (mean := task.model(x), noise.expand_as(mean))


def ours(method: lw.Method | None = None, held_out: bool = False) -> Fit:
    """Returns the fit of one line, with or without held-out data."""

    def fit(task: Task) -> Callable[[Tensor], Outputs]:
        if isinstance(method, lw.TemperatureScaling):
            posterior = lw.fit(task.model, task.held_out, method)
        else:
            validation = task.held_out if held_out else None
            posterior = lw.fit(task.model, task.train, method, validation=validation, seed=SEED)

        def predict(x: Tensor) -> Outputs:
            prediction = posterior.predict(x)
            return (prediction.mean, prediction.variance) if task.regression else (prediction.probs,)

        return predict

    return fit


def gaussian_nll(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """Returns the mean NLL of numbers."""
    return -torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).mean()


def theirs(tuning: str, **options: str) -> Fit:
    """Returns laplace-torch's fit, tuned by "marglik" or "gridsearch"."""

    def fit(task: Task) -> Callable[[Tensor], Outputs]:
        from laplace import Laplace

        posterior: Any = Laplace(
            copy.deepcopy(task.model), "regression" if task.regression else "classification", **options
        )
        posterior.fit(task.train)
        if not task.regression:
            posterior.optimize_prior_precision(method=tuning, val_loader=task.held_out)
            return lambda x: (posterior(x),)
        logs = [torch.zeros(1, requires_grad=True) for _ in range(2)]
        optimiser = torch.optim.Adam(logs, lr=0.1)
        for _ in range(1000):
            optimiser.zero_grad()
            (-posterior.log_marginal_likelihood(*(each.exp() for each in logs))).backward()
            optimiser.step()
        posterior.prior_precision, posterior.sigma_noise = (each.detach().exp() for each in logs)
        noise = posterior.sigma_noise.square()
        if tuning == "gridsearch":
            posterior.optimize_prior_precision(
                method=tuning, val_loader=task.held_out,
                loss=lambda mean, variance, y: gaussian_nll(mean, variance[..., 0] + noise, y),
            )  # fmt: skip

        def predict(x: Tensor) -> Outputs:
            mean, variance = posterior(x)
            return mean, variance[..., 0] + noise

        return predict

    return fit


SHARED: dict[str, Fit] = {
    "network alone": alone,
    "laplace-torch: last layer, evidence": theirs("marglik"),
    "laplace-torch: last layer, grid search": theirs("gridsearch"),
    "laplace-torch: all weights, KFAC, evidence": theirs("marglik", subset_of_weights="all"),
    "laplace-torch: all weights, KFAC, grid search": theirs("gridsearch", subset_of_weights="all"),
    "`lw.fit(model, loader)`": ours(),
    "`lw.fit(..., validation=)`": ours(held_out=True),
}
CLASSIFIERS: dict[str, Fit] = {
    "network alone": alone,
    "temperature scaling": ours(lw.TemperatureScaling()),
    "laplace-torch: all weights, diagonal, grid search": theirs(
        "gridsearch", subset_of_weights="all", hessian_structure="diag"
    ),
    **SHARED,
}

TEXTS = {name: fit for name, fit in CLASSIFIERS.items() if "all weights" not in name or "evidence" in name}
"""Without the grid searches over all weights, which make all Jacobians anew for each of 100 precisions."""


def scored(task: Task, candidates: dict[str, Fit]) -> Rows:
    """Returns the scores and seconds of each candidate; of one that fails, the first line of its error."""
    x, y = task.test
    rows: Rows = {}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    for turn in range(ROUNDS):
        for name, fit in candidates.items():
            if "refusal" in rows.get(name, {}) or (turn and seconds[name][0][0] > SLOW):
                continue
            torch.manual_seed(SEED)
            start = time.perf_counter()
            try:
                predict = fit(task)
                middle = time.perf_counter()
                parts = [predict(part) for part in x.split(500)]
            except Exception as error:
                rows[name] = {"refusal": first_line(error)}
                print(name, rows[name], flush=True)
                continue
            seconds[name].append((middle - start, time.perf_counter() - middle))
            if not turn:
                outputs = tuple(torch.cat(columns).detach().double() for columns in zip(*parts, strict=True))
                rows[name] = numbers(outputs, y)
                print(name, rows[name], seconds[name][0], flush=True)
    for name, times in seconds.items():
        if times:
            rows[name]["fit, s"], predictions = (median(column) for column in zip(*times, strict=True))
            rows[name]["predictions, ms"] = 1e3 * predictions
    return rows


def numbers(outputs: Outputs, y: Tensor) -> dict[str, float]:
    """Returns the scores of predictions."""
    if len(outputs) == 1:
        probs = outputs[0]
        return {
            "accuracy": float((probs.argmax(-1) == y).double().mean()),
            "NLL": float(F.nll_loss(probs.log(), y)),
            "ECE": float(expected_calibration_error(probs, y)),
        }
    mean, variance = outputs
    return {
        "RMSE": float((mean - y).square().mean().sqrt()),
        "NLL": float(gaussian_nll(mean, variance, y.double())),
        "90 % interval": float(((mean - y).abs() < 1.6449 * variance.sqrt()).double().mean()),
    }


def first_line(error: Exception) -> str:
    """Returns the name of an error and the beginning of what it says."""
    text = " ".join(str(error).split("\n")[0].split())
    return f"{type(error).__name__}: {text[:120]}".rstrip(": ")


# ---- networks and data


def loader(x: Tensor, y: Tensor) -> DataLoader:
    return DataLoader(TensorDataset(x, y), 100)


def table(name: str) -> Task:
    """Returns a network of one noise variance on a table of `benchmarks.heteroscedastic`."""
    data = some_rows(name, heteroscedastic.ROWS, SEED)
    model = heteroscedastic.trained(data.train, data.val, 1)
    return Task(model, loader(*data.train), loader(*data.val), data.test)


def digits() -> Task:
    """Returns the network of the README."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    train, held_out, test = torch.randperm(len(x)).split([600, 300, 897])
    model = adam(mlp(64, 64, 10, activation=nn.ReLU), (x[train], y[train]), 60, 1e-2)
    return Task(model, loader(x[train], y[train]), loader(x[held_out], y[held_out]), (x[test], y[test]))


def news() -> Task:
    """Returns a convolution over the words of news, trained for long on 2 000 of them; four topics."""
    data = arrays("text_agnews")
    read = answers.Numbers([answers.words(text) for text in data["text_train"][:2000]])
    (x, y), test = (
        (
            read([answers.words(text) for text in data[f"text_{part}"][:count]]),
            torch.tensor(data[f"y_{part}"][:count]).long(),
        )
        for part, count in (("train", 3000), ("test", 2000))
    )
    model = adam(answers.Reader(4), (x[:2000], y[:2000]), 30, 2e-3)
    return Task(model, loader(x[:2000], y[:2000]), loader(x[2000:], y[2000:]), test)


# ---- what is refused


class Positions(nn.Module):
    """Embedded tokens and a layer: logits (B, T, C)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 16), nn.Linear(16, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits."""
        return self.head(self.embedding(tokens).cumsum(1).tanh())


def other_outputs() -> Rows:
    """Says what becomes of a fit and a prediction for other outputs than one class or number a sample."""
    tokens, x = torch.randint(30, (40, 8)), torch.randn(40, 5)

    def layers(outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, outputs))

    cases: dict[str, tuple[nn.Module, Tensor, Tensor, str, Any]] = {
        "labels of words (B, T, C)": (Positions(4), tokens, torch.randint(4, (40, 8)), "classification", None),
        "next tokens (B, T, C)": (Positions(30), tokens[:, :-1], tokens[:, 1:], "classification", None),
        "classes of pixels (B, C, H, W)": (
            nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 3, 1)),
            torch.randn(40, 1, 8, 8), torch.randint(3, (40, 8, 8)), "classification", None,
        ),
        "several labels a sample (B, K)": (layers(3), x, torch.rand(40, 3) > 0.5, "bernoulli", None),
        "a mean and a log variance (B, 2)": (
            layers(2), x, torch.randn(40, 1), "heteroscedastic", lw.HeteroscedasticGaussian(),
        ),
        "counts (B, 1)": (layers(1), x, torch.randint(6, (40, 1)), "poisson", lw.Poisson()),
    }  # fmt: skip
    rows: Rows = {}
    for name, (model, inputs, y, label, likelihood) in cases.items():
        train = loader(inputs, y)
        prediction = lw.fit(model.eval(), train, likelihood=likelihood).predict(inputs)
        shape = tuple((prediction.probs if hasattr(prediction, "probs") else prediction.mean).shape)
        lines = {part: peer_line(model, label, part, train) for part in ("last_layer", "all")}
        same = len(set(lines.values())) == 1
        text = lines["all"] if same else "; ".join(f"{part}: {line}" for part, line in lines.items())
        rows[name] = {"laplace-torch": text, "lapwing": f"predictions {shape}"}
        print(name, rows[name], flush=True)
    return rows


def peer_line(model: nn.Module, likelihood: str, weights: str, train: DataLoader) -> str:
    """Returns what laplace-torch answers to a fit and a prediction."""
    from laplace import Laplace

    try:
        posterior: Any = Laplace(copy.deepcopy(model), likelihood, subset_of_weights=weights)
        posterior.fit(train)
        outputs = posterior(next(iter(train))[0])
        outputs = outputs if type(outputs) is tuple else (outputs,)
    except Exception as error:
        return f"`{first_line(error)}`"
    return f"predictions {', '.join(str(tuple(part.shape)) for part in outputs)}"


# ---- Bayesian optimisation


def branin(steps: int = 20, seeds: int = 5) -> Rows:
    """Returns how far the best of 8 random points and some chosen ones is from the maximum."""
    from botorch.acquisition import LogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.optim import optimize_acqf
    from gpytorch.mlls import ExactMarginalLogLikelihood

    from examples.bayesian_optimisation import MAXIMUM, objective, posterior_of
    from lapwing.integrations.botorch import LaplaceModel

    def process(x: Tensor, y: Tensor) -> Any:
        model = SingleTaskGP(x, y)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        return model

    models: dict[str, Any] = {
        "`LaplaceModel` of a network": lambda x, y: LaplaceModel(posterior_of(x, y)),
        "BoTorch's `SingleTaskGP`": process,
        "random choice": None,
    }
    below: dict[str, list[float]] = {name: [] for name in models}
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
    for seed in range(seeds):
        for name, model_of in models.items():
            torch.manual_seed(seed)
            x = torch.rand(8, 2).double()
            y, random = objective(x), torch.rand(steps, 2).double()
            for step in range(steps):
                chosen = random[step : step + 1]
                if model_of is not None:
                    scaled = (y - y.mean()) / y.std()
                    improvement = LogExpectedImprovement(model_of(x, scaled), best_f=scaled.max())
                    chosen, _ = optimize_acqf(
                        improvement, bounds, 1, num_restarts=5, raw_samples=100, options={"maxiter": 50}
                    )
                x, y = torch.cat([x, chosen]), torch.cat([y, objective(chosen)])
            below[name].append(MAXIMUM - float(y.max()))
            print(seed, name, below[name][-1], flush=True)
    return {
        name: {"mean": fmean(values), "best": min(values), "worst": max(values), "seeds": values}
        for name, values in below.items()
    }


def parts() -> dict[str, Callable[[], Rows]]:
    """Returns the tasks."""
    warnings.simplefilter("ignore")
    return {
        "digits": lambda: scored(digits(), CLASSIFIERS),
        "news": lambda: scored(news(), TEXTS),
        **{name: lambda name=name: scored(table(name), SHARED) for name in heteroscedastic.TABLES},
        "other outputs": other_outputs,
        "branin": branin,
    }


tables = of_scores
