"""Continual learning on handwritten digits, with a former posterior as the prior.

One network learns five tasks in turn and never sees a former one again; `posterior.penalty(model)` in the loss keeps
what is known of them. In "split" each task tells the even digit of a pair from the odd one, 0 from 1 up to 8 from 9. In
"permuted" each has all ten digits, and its own order of the pixels.

Run it: python examples/continual_digits.py
"""

from __future__ import annotations

import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lapwing as lw

Task = tuple[Tensor, Tensor]


def tasks(kind: str) -> tuple[list[Task], list[Task]]:
    """Returns training and test data of the five tasks, "split" or "permuted"."""
    digits = load_digits()
    x, digit = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(0)
    train, test = torch.randperm(len(x), generator=generator).split([1200, 597])
    orders = [torch.randperm(64, generator=generator) for _ in range(5)]

    def task(places: Tensor, number: int) -> Task:
        if kind == "permuted":
            return x[places][:, orders[number]], digit[places]
        places = places[digit[places] // 2 == number]
        return x[places], digit[places] % 2

    return [task(train, i) for i in range(5)], [task(test, i) for i in range(5)]


def trained(model: nn.Module, task: Task, former: lw.Posterior | None) -> nn.Module:
    """Returns the network after 100 steps on one task, by the log loss and the penalty of a former posterior."""
    x, y = task
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(100):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        if former is None:
            penalty = sum(weight.square().sum() for weight in model.parameters()) / 2  # the prior, δ = 1
        else:
            penalty = former.penalty(model)
        ((loss + penalty) / len(x)).backward()
        optimiser.step()
    return model


def learn(method: lw.Method | None, train: list[Task]) -> nn.Module:
    """Learns all tasks in turn; without a method nothing but the weights is carried on."""
    torch.manual_seed(0)
    outputs = 1 + max(int(y.max()) for _, y in train)
    model: nn.Module = nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, outputs)).eval()
    posterior = None
    for task in train:
        model = trained(copy.deepcopy(model), task, posterior)
        if posterior is not None:
            posterior = lw.fit(model, task, prior=posterior)
        elif method is not None:
            posterior = lw.fit(model, task, method, prior_precision=1.0)
    return model


def accuracies(model: nn.Module, parts: list[Task]) -> list[float]:
    """Returns the share of right answers on each task."""
    return [float((model(x).argmax(1) == y).float().mean()) for x, y in parts]


def main() -> dict[tuple[str, str], list[float]]:
    """Prints and returns the accuracy on each task after the fifth."""
    results = {}
    print("accuracy after five tasks:    task 1     2     3     4     5   mean")
    for kind in ("split", "permuted"):
        train, test = tasks(kind)
        for name, method in {"weights alone": None, "Diagonal": lw.Diagonal(), "KFAC": lw.KFAC()}.items():
            row = results[kind, name] = accuracies(learn(method, train), test)
            numbers = "".join(f"{value:6.3f}" for value in row)
            print(f"{kind + ', ' + name:30}{numbers}{sum(row) / 5:7.3f}")
    return results


if __name__ == "__main__":
    main()
