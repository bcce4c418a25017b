"""How near amortised variances (`lw.amortize`) are to the exact ones, and what they cost.

Six networks with KFAC over all weights, and the default tuning; the classifiers also with held-out data. The way learns
at training rows and at other rows without labels.

- *kin40k, California, airfoil*: tables, and ReLU MLPs with two layers of 50 units. Rows whose first input is between
  its 40 and 60 % quantiles are the gap: neither the network nor the way has seen them.
- *Fashion-MNIST*: the small CNN of `benchmarks/ood.py`; *digits, CNN* and *digits, MLP*: scikit-learn's digits.
- *ResNet-20*: the trained network for CIFAR-10, with a given prior precision. It shows the cost of a larger network.

*Ratio* is the mean variance over the exact one, and *rank* the rank correlation of the summed variances of the inputs,
both within the guard. *Beyond* is the part of the inputs beyond it, where the way is exact. For classes AUROC is that
of the mutual information: by the exact way, by the amortised one, and of the entropy of the network. *Passes* is the
CPU time of a prediction of 128 inputs in forward passes on one thread. One seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import isnan
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lapwing as lw
from benchmarks.ood import cifar10, fashion
from lapwing.evaluation.metrics import auroc
from papers.common.data import random_rows, rows_and_targets, standardised
from papers.common.measure import fastest
from papers.common.networks import mlp
from papers.common.scores import entropy
from papers.common.tables import grid
from papers.common.training import adam

SEED, SECONDS, BATCH = 0, 20.0, 128
ROWS, TESTED, FEW = 8_000, 1_000, 200
"""Maximum number of rows of a table, and of test rows; number of images of each set for the ResNet-20."""

TABLES = {"kin40k": "kin40k", "California": "california_housing", "airfoil": "uci_airfoil"}


def measured(
    posterior: lw.Posterior[Any], loader: Any, unlabelled: Tensor, places: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Returns how well the way agrees at each place, and the passes of its predictions."""
    way = lw.amortize(posterior, loader, unlabelled=unlabelled)
    found: dict[str, Any] = {}
    for place, x in places.items():  # beyond the guard there is nothing to compare
        found[place] = {key: value for key, value in way.check(posterior, x)._asdict().items() if not isnan(value)}
    x = next(iter(places.values()))[:BATCH]
    predictor = lw.deploy(posterior, x[:9], via=way)
    with torch.no_grad():
        calls = [lambda: posterior.model(x), lambda: posterior.predict(x), lambda: predictor(x)]
        forward, exact, deployed = fastest(calls, SECONDS)
    if posterior.likelihood.activation is not None:
        known, *others = ((place, *scores(posterior, way, x)) for place, x in places.items())
        for place, *values in others:
            pairs = zip(known[1:], values, strict=True)
            found[place] |= dict(zip(("exact", "amortised", "entropy"), (float(auroc(*p)) for p in pairs), strict=True))
    return {**found, "passes": {"exact": exact / forward, "deployed": deployed / forward}}


def scores(posterior: lw.Posterior[Any], way: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mutual informations by the exact and the amortised way, and entropies of the network, (n,)."""
    parts = [
        (posterior.predict(part).mutual_information(), posterior.predict(part, via=way).mutual_information(),
         entropy(posterior.model(part).softmax(-1)))
        for part in x.split(200)
    ]  # fmt: skip
    exact, amortised, plain = (torch.cat(part).detach() for part in zip(*parts, strict=True))
    return exact, amortised, plain


def table(name: str) -> dict[str, Any]:
    """Returns the measurements of a table."""
    x, y = rows_and_targets(TABLES[name])
    chosen = random_rows(x, min(len(x), ROWS), SEED)
    x, y = x[chosen], y[chosen]
    low, high = x[:, 0].quantile(0.4), x[:, 0].quantile(0.6)
    gap = (low < x[:, 0]) & (x[:, 0] < high)
    outside = int((~gap).sum())
    train, more = int(0.7 * outside), int(0.85 * outside)
    data = standardised(name, torch.cat([x[~gap], x[gap]]), torch.cat([y[~gap], y[gap]]), train, more, "")
    test, within = data.test[0].tensor_split([outside - more])
    test, within = test[:TESTED], within[:TESTED]
    model = mlp(x.shape[1], 50, 50, 1, activation=nn.ReLU)
    adam(model, data.train, 60, 5e-3, 100, generator=torch.Generator().manual_seed(SEED), loss=nn.functional.mse_loss)
    posterior = lw.fit(model.eval(), data.train, lw.KFAC(), params=lw.everything)
    noisy = test + torch.randn(test.shape, generator=torch.Generator().manual_seed(1))
    places = {"test": test, "gap": within, "noise of one std": noisy, "four times as far": 4 * test}
    return measured(posterior, data.train, data.val[0], places)


def images(tuned: bool) -> dict[str, Any]:
    """Returns the measurements of the small CNN for Fashion-MNIST."""
    (model,), loader, held_out, inputs, _ = fashion(SEED, 1)
    x = inputs["Fashion-MNIST"]
    options = {"validation": held_out} if tuned else {}
    posterior = lw.fit(model, loader, lw.KFAC(), params=lw.everything, **options)
    places = {"test": x[:TESTED], "MNIST": inputs["MNIST"][:TESTED], "grey CIFAR-10": inputs["CIFAR-10"][:TESTED]}
    return measured(posterior, loader, x[-1500:], {**places, "inverted": 1 - x[:TESTED]})


def digits(network: str, tuned: bool) -> dict[str, Any]:
    """Returns the measurements of a network for scikit-learn's digits."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))
    x, y = x[order], torch.tensor(data.target)[order]
    if network == "MLP":
        x, model = x.flatten(1), mlp(64, 64, 32, 10, activation=nn.Tanh)
    else:
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
    train = x[:600], y[:600]
    adam(model, train, 30, 3e-3, 50, generator=torch.Generator().manual_seed(SEED))
    options = {"validation": (x[600:800], y[600:800])} if tuned else {}
    posterior = lw.fit(model.eval(), train, lw.KFAC(), params=lw.everything, **options)
    test = x[1200:]
    noisy = test + 0.5 * torch.randn(test.shape, generator=torch.Generator().manual_seed(1))
    return measured(posterior, train, x[800:1200], {"test": test, "inverted": 1 - test, "noise": noisy})


def resnet() -> dict[str, Any]:
    """Returns the measurements of the ResNet-20."""
    (model,), loader, _, inputs, _ = cifar10()
    posterior = lw.fit(model, loader, lw.KFAC(), params=lw.everything, prior_precision=100.0, data_size=50_000)
    known, *others = inputs.items()
    places = {"test": known[1][:FEW], **{place: x[:FEW] for place, x in others}}
    return measured(posterior, loader, known[1][-1000:], places)


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the networks."""
    found: dict[str, Callable[[], Any]] = {name: partial(table, name) for name in TABLES}
    for tuned, end in ((False, ""), (True, ", validation=")):
        found[f"Fashion-MNIST, CNN{end}"] = partial(images, tuned)
        found |= {f"digits, {kind}{end}": partial(digits, kind, tuned) for kind in ("CNN", "MLP")}
    found["ResNet-20"] = resnet
    return found


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the table of the page: a row for each network and place."""
    lines: list[tuple[str, list[str]]] = []
    for name, row in results.items():
        for place, found in row.items():
            if place == "passes":
                continue
            scored = [f"{found[key]:.3f}" if key in found else "" for key in ("exact", "amortised", "entropy")]
            agrees = [f"{found[key]:.2f}" if found["beyond"] < 0.99 else "" for key in ("ratio", "rank")]
            first = place == "test"
            passes = [f"{row['passes'][key]:.1f}" if first else "" for key in ("exact", "deployed")]
            lines.append((name if first else "", [place, *agrees, f"{found['beyond']:.0%}", *scored, *passes]))
    columns = ["inputs", "ratio", "rank", "beyond", "AUROC: exact", "amortised", "entropy of the network",
               "passes: exact", "deployed"]  # fmt: skip
    return {"agreement": grid(columns, lines, corner="network")}
