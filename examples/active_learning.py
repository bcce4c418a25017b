"""Active learning on handwritten digits: which images should be labelled next?

A small CNN starts with 20 labels. In each round 20 more are chosen from 500 random images: at random, by the entropy of
the network alone, or by the mutual information between label and weights, which counts the doubt that more labels can
remove. For one seed every choice starts with the same labels, and every network with the same weights.

Run it: python examples/active_learning.py

The digits are MNIST where LAPWING_DATA names a folder with mnist.npz, else those of scikit-learn.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import lapwing as lw

Images = tuple[Tensor, Tensor]


def digits(folder: Path | None) -> tuple[Images, Images]:
    """Returns the images to choose from and the test images, each (N, 1, H, W) with its labels (N,)."""
    if folder is not None and (folder / "mnist.npz").is_file():
        with np.load(folder / "mnist.npz") as file:
            parts = [(file["x_train"][:5000], file["y_train"][:5000]), (file["x_test"][:2000], file["y_test"][:2000])]
        pool, test = ((torch.tensor(x)[:, None] / 255, torch.tensor(y).long()) for x, y in parts)
        return pool, test
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    places = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return (x[places[:1200]], y[places[:1200]]), (x[places[1200:]], y[places[1200:]])


def trained(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    """Returns a new CNN after 60 steps on all labels, with a weight decay of 0.1."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * (x.shape[-1] // 8) ** 2, 10),
    )  # fmt: skip
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        penalty = 0.1 / 2 * sum(weight.square().sum() for weight in model.parameters())
        optimiser.zero_grad()
        ((loss + penalty) / len(x)).backward()
        optimiser.step()
    return model.eval()


def scores(choice: str, model: nn.Module, labelled: Images, x: Tensor, generator: torch.Generator) -> Tensor:
    """Returns how much the label of each image is wanted, (N,)."""
    if choice == "random":
        return torch.rand(len(x), generator=generator)
    if choice == "entropy":
        with torch.no_grad():
            return torch.distributions.Categorical(logits=model(x)).entropy()
    return lw.fit(model, labelled, lw.KFAC()).predict(x).mutual_information()


def learn(choice: str, pool: Images, test: Images, rounds: int, seed: int) -> list[float]:
    """Returns the accuracy on the test images with 20 labels, and after each round of 20 more."""
    (x, y), generator, accuracies = pool, torch.Generator().manual_seed(seed), []
    labelled, others = torch.randperm(len(x), generator=generator).tensor_split([20])
    for number in range(rounds + 1):
        model = trained(x[labelled], y[labelled], seed)
        with torch.no_grad():
            accuracies.append(float((model(test[0]).argmax(1) == test[1]).float().mean()))
        if number < rounds:
            others = others[torch.randperm(len(others), generator=generator)]
            wanted = scores(choice, model, (x[labelled], y[labelled]), x[others[:500]], generator).topk(20).indices
            labelled = torch.cat([labelled, others[wanted]])
            others = others[~torch.isin(others, labelled)]
    return accuracies


def main(folder: Path | None = None, rounds: int = 8, seeds: int = 3) -> dict[str, list[float]]:
    """Prints and returns the mean accuracy over the seeds after each round, of each choice."""
    pool, test = digits(folder)
    print(f"{'labels':24}" + "".join(f"{20 * number:7}" for number in range(1, rounds + 2)))
    results = {}
    for choice in ("random", "entropy", "mutual information"):
        runs = [learn(choice, pool, test, rounds, seed) for seed in range(seeds)]
        results[choice] = [sum(column) / seeds for column in zip(*runs, strict=True)]
        print(f"{choice:24}" + "".join(f"{value:7.3f}" for value in results[choice]), flush=True)
    return results


if __name__ == "__main__":
    main(Path(os.environ["LAPWING_DATA"]) if os.environ.get("LAPWING_DATA") else None)
