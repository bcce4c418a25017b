"""Out-of-distribution inputs: one network with error bars beside what people take instead.

- *fashion*: small CNNs trained on 3 000 images of Fashion-MNIST. The temperatures and `validation=` use 300 held-out
  images. 5 000 test images are compared with 3 000 digits of MNIST, and with grey centres of 3 000 images of CIFAR-10.
  Five repeats with other training images and weights.
- *cifar10*: the trained ResNet-20. The fit reads 2 000 training images (`data_size=50_000`) and 1 000 held-out images.
  2 000 test images are compared with 2 000 enlarged images of Fashion-MNIST, and of MNIST.

*prediction* is the CPU time of a prediction with its scores, as a ratio to that of the network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.evaluation.metrics import auroc
from papers.common.cifar import normalised
from papers.common.data import arrays, batched, images, random_rows
from papers.common.measure import ratio
from papers.common.networks import cifar_resnet20
from papers.common.scores import averaged, class_scores, entropy
from papers.common.tables import grid
from papers.common.training import shuffled, train

SEED, REPEATS, MEMBERS, EPOCHS = 0, 5, 5, 12


def trained(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    """Trains a small CNN with Adam."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(1568, 64), nn.ReLU(), nn.Linear(64, 10),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    optimiser = torch.optim.Adam(model.parameters(), 3e-3, fused=True)
    return train(model, (x, y), shuffled(len(x), 64, epochs=EPOCHS), optimiser)


@torch.no_grad()
def logits_of(models: list[nn.Module], x: Tensor) -> Tensor:
    """Returns the logits (S, N, C) of networks."""
    return torch.stack([torch.cat([model(part) for part in x.split(100)]) for model in models]).double()


def temperature(logits: Tensor, labels: Tensor) -> float:
    """Returns the T of least NLL of the mean probabilities of networks whose logits are divided by T."""
    loss = lambda log: F.nll_loss((logits / 10**log).softmax(-1).mean(0).log(), labels).item()  # noqa: E731
    return 10.0 ** float(minimize_scalar(loss, bounds=(-1, 1), method="bounded").x)


def of_logits(logits: Tensor) -> dict[str, Tensor]:
    """Returns the mean probabilities of networks, their entropy, and for several the mutual information."""
    probs = logits.softmax(-1)
    scores = {"probs": probs.mean(0), "entropy": entropy(probs.mean(0))}
    return scores | ({"mutual information": scores["entropy"] - entropy(probs).mean(0)} if len(logits) > 1 else {})


def of_posterior(posterior: lw.Posterior, x: Tensor) -> dict[str, Tensor]:
    """Returns the probabilities, the entropy and the mutual information of a posterior."""
    parts = [(p.probs, p.entropy(), p.mutual_information()) for p in map(posterior.predict, x.split(100))]
    names = ("probs", "entropy", "mutual information")
    return {name: torch.cat(values) for name, values in zip(names, zip(*parts, strict=True), strict=True)}


def report(
    models: list[nn.Module], loader: Any, held_out: tuple[Tensor, Tensor], inputs: Mapping[str, Tensor], y: Tensor,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Fits the posteriors, and returns the metrics of all rows; the first inputs are the test images."""
    logits = {place: logits_of(models, x) for place, x in inputs.items()}
    tuned, some = logits_of(models, held_out[0]), next(iter(inputs.values()))[:300]
    scores, calls = {}, {}
    for name, members in {"network": 1, f"ensemble of {MEMBERS}": MEMBERS}.items():
        if members <= len(models):
            scale = temperature(tuned[:members], held_out[1])
            other = "temperature scaling" if members == 1 else f"{name}, one temperature"
            for row, divisor in {name: 1.0, other: scale}.items():
                scores[row] = {place: of_logits(part[:members] / divisor) for place, part in logits.items()}
                calls[row] = lambda members=members: of_logits(logits_of(models[:members], some))
    for row, tuning in {"lw.fit(model, loader)": {}, "lw.fit(..., validation=)": {"validation": held_out}}.items():
        posterior = lw.fit(models[0], loader, **tuning, **options)
        scores[row] = {place: of_posterior(posterior, x) for place, x in inputs.items()}
        calls[row] = lambda posterior=posterior: of_posterior(posterior, some)
    rows: dict[str, Any] = {}
    for row, (known, *strange) in ((row, parts.values()) for row, parts in scores.items()):
        rows[row] = {key: value for key, value in class_scores(known["probs"], y).items() if key != "brier"}
        for place, other in zip(list(inputs)[1:], strange, strict=True):
            rows[row][f"AUROC {place}"] = {key: float(auroc(known[key], other[key])) for key in [*known][1:]}
        rows[row]["prediction"] = ratio(calls[row], calls["network"], 3, time.process_time)["ratio"]
        print(row, rows[row], flush=True)
    return rows


Task = tuple[list[nn.Module], Any, tuple[Tensor, Tensor], dict[str, Tensor], Tensor]
"""Networks, training batches of a posterior, held-out data, inputs by name (test images first), labels of the test."""


def fashion(seed: int, members: int = MEMBERS) -> Task:
    """Trains the networks of one repeat."""
    data, grey = images("fashion_mnist"), torch.as_tensor(arrays("cifar10")["x_test"][:3000]).float().mean(-1) / 255
    inputs = {"Fashion-MNIST": data.x_test[:5000], "MNIST": images("mnist").x_test[:3000]}
    inputs["CIFAR-10"] = grey[:, None, 2:30, 2:30].contiguous()
    rows = random_rows(data.x_train, 3300, seed)
    x, y = data.train(rows)
    models = [trained(x[:3000], y[:3000], 100 * seed + member) for member in range(members)]
    return models, batched(x[:3000], y[:3000]), (x[3000:], y[3000:]), inputs, data.y_test[:5000]


def cifar10() -> Task:
    """Reads the trained ResNet-20."""
    data, model = images("cifar10"), cifar_resnet20().eval()
    rows = random_rows(data.x_train, 2000, SEED)
    inputs = {"CIFAR-10": data.x_test[1000:3000]}
    for place, name in {"Fashion-MNIST": "fashion_mnist", "MNIST": "mnist"}.items():
        inputs[place] = normalised(F.interpolate(images(name).x_test[:2000], 32).expand(-1, 3, -1, -1))
    return [model], batched(*data.train(rows)), data.test(slice(1000)), inputs, data.y_test[1000:3000]


SHORT = {"entropy": "entropy", "mutual information": "MI"}


README = "network", "temperature scaling", "ensemble of 5, one temperature", "lw.fit(..., validation=)"
"""Rows of the table of the README."""


def table(rows: Mapping[str, Any]) -> str:
    """Returns the table of the README: means, with the standard error of an AUROC by the better score."""
    lines = {}
    for name in README:
        row = rows[name]
        cells = [f"{row['nll']['mean']:.3f}", f"{100 * row['ece']['mean']:.1f} %"]
        for place in ("AUROC MNIST", "AUROC CIFAR-10"):
            score, found = max(row[place].items(), key=lambda item: item[1]["mean"])
            cells.append(f"{found['mean']:.2f} ± {found['standard_error']:.2f}, {SHORT[score]}")
        lines[code(name)] = [*cells, f"{row['prediction']['mean']:.1f}"]
    return grid(["NLL", "ECE", "AUROC, digits", "AUROC, CIFAR-10", "cost"], lines, right=True)


def code(name: str) -> str:
    """Returns the name of a row, in backticks if it is code."""
    return f"`{name}`" if name.startswith("lw.") else name


def parts(repeats: int = REPEATS) -> dict[str, Callable[[], Any]]:
    """Returns the tasks, with means and standard errors."""

    def garments() -> dict[str, Any]:
        return {"repeats": repeats, "rows": averaged([report(*fashion(SEED + repeat)) for repeat in range(repeats)])}

    def large() -> dict[str, Any]:
        return {"repeats": 1, "rows": averaged([report(*cifar10(), data_size=50_000)])}

    return {"cifar10": large, "fashion": garments}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the table of the README."""
    return {"fashion": table(results["fashion"]["rows"])}
