"""`make demo`: several posteriors of one classifier in a table, and of one regression network in a picture.

Needs nothing but the package and scikit-learn's digits. Where LAPWING_DATA names a folder of data sets, the same
comparison also runs on a trained MNIST network. Tables and picture are written to demo-output/.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # no display needed
import matplotlib.pyplot as plt
import numpy as np
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.evaluation import Comparison, compare, plots

OUTPUT = Path("demo-output")
TUNED = "The prior precision is tuned on validation images, or without them by the evidence, bounded."

METHODS = {
    "last layer, no held-out data": (None, lw.last_layer),  # what lw.fit(model, loader) does for classes
    "last layer": (None, lw.last_layer),
    "Diagonal": (lw.Diagonal(), lw.everything),
    "KFAC": (lw.KFAC(), lw.everything),
    "ELLA": (lw.ELLA(rank=20, rows=200), lw.everything),
}


def comparison(
    model: nn.Module,
    train: list,
    validation: list,
    test: list,
    foreign: list,
    data_size: int | None = None,
    repeats: int = 3,
) -> Comparison:
    """Fits every method, the prior precision tuned with validation data or without; compares on test data."""
    posteriors, seconds = {}, {}
    for name, (method, params) in METHODS.items():
        tune = lw.BoundedEvidence() if name.endswith("no held-out data") else lw.Validation(validation)
        start = time.perf_counter()
        posteriors[name] = lw.fit(model, train, method, params=params, tune=tune, data_size=data_size)
        seconds[name] = time.perf_counter() - start
    return compare(posteriors, test, foreign, fit_seconds=seconds, repeats=repeats)


def digits() -> Comparison:
    """Trains a small CNN on 600 of scikit-learn's digits; 300 others tune, and the remaining 897 are reported on."""
    found = load_digits()
    x, y = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)
    generator = torch.Generator().manual_seed(0)
    train, validation, test = torch.randperm(len(x), generator=generator).split([600, 300, len(x) - 900])
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(144, 10),
    )  # fmt: skip
    loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=50, shuffle=True, generator=generator)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(60):
        for inputs, labels in loader:
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimiser.step()
    model.eval()
    shuffled = torch.randperm(64, generator=generator)
    foreign = [
        torch.rot90(x[test], 1, (2, 3)),
        1 - x[test],
        x[test].flatten(1)[:, shuffled].reshape(-1, 1, 8, 8),
    ]
    parts = [batches(x[part], y[part]) for part in (train, validation, test)]
    return comparison(model, *parts, foreign)


MNIST_FILES = ("mnist.npz", "fashion_mnist.npz", "mnist_cnn_ella.safetensors")


def mnist(folder: Path) -> Comparison:
    """Takes a trained MNIST network; 500 of its 60 000 training images stand for all.

    It has seen all training images, so that none of them can validate anything: 2 000 test images do, 1 000 report.
    """
    digits, clothes = (np.load(folder / name) for name in MNIST_FILES[:2])
    x, y = pixels(digits["x_test"]), torch.tensor(digits["y_test"]).long()
    picked = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    validation, test = picked[:2000], picked[2000:3000]
    return comparison(
        mnist_network(folder / MNIST_FILES[2]),
        batches(pixels(digits["x_train"][:500]), torch.tensor(digits["y_train"][:500]).long()),
        batches(x[validation], y[validation]),
        batches(x[test], y[test]),
        [pixels(clothes["x_test"][:250])],
        data_size=60_000,
        repeats=1,
    )


def pixels(images: np.ndarray) -> Tensor:
    """Returns images (N, 1, 28, 28) in [0, 1]."""
    return torch.tensor(images)[:, None].float() / 255


def mnist_network(path: Path) -> nn.Module:
    """Returns two convolutions with batch norm and a linear layer, with the weights of a file."""
    parts = OrderedDict[str, nn.Module]()
    for name, inputs, outputs in (("layer1", 1, 16), ("layer2", 16, 32)):
        convolution = nn.Conv2d(inputs, outputs, 5, padding=2)
        parts[name] = nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))
    parts |= {"flat": nn.Flatten(), "fc": nn.Linear(32 * 7 * 7, 10)}
    model = nn.Sequential(parts)
    model.load_state_dict(load_file(path), strict=False)  # the file may lack batch norm's counts, which training reads
    return model.eval()


def batches(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(250), y.split(250), strict=True))


def picture(path: Path) -> None:
    """Fits a one-dimensional regression with a gap in the data, and draws what each posterior says."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.rand(60, 1, generator=generator) * 2 - 4, torch.rand(60, 1, generator=generator) * 2.5 + 1])
    y = torch.sin(1.4 * x) + 0.15 * x + 0.15 * torch.randn(x.shape, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3000):
        optimiser.zero_grad()
        decay = sum(weight.square().sum() for weight in model.parameters())
        (nn.functional.mse_loss(model(x), y) + 1e-3 * decay).backward()
        optimiser.step()
    model.eval()
    methods = {
        "Full, the default": lw.Full(),
        "KFAC": lw.KFAC(),
        "Diagonal": lw.Diagonal(),
        "KFAC on the last layer": None,
        "ELLA, rank 10": lw.ELLA(rank=10, rows="all"),
        "ELLA, rank 10, prior outside its span": lw.ELLA(rank=10, rows="all", residual="prior"),
    }
    likelihood = lw.Gaussian(noise_variance=0.15**2)  # known here; the prior precision is tuned by the evidence
    posteriors = {
        name: lw.fit(model, [(x, y)], method, likelihood=likelihood, params=lw.everything if method else lw.last_layer)
        for name, method in methods.items()
    }
    grid = torch.linspace(-6.5, 6, 400)[:, None]
    figure, axes = plt.subplots(2, 3, figsize=(11, 6), sharex=True, sharey=True, layout="constrained")
    for axis, (name, posterior) in zip(axes.flat, posteriors.items(), strict=True):
        plots.bands(grid, posterior.predict(grid), axis, training=(x, y)).get_legend().remove()
        axis.set(title=name, xlim=(-6.5, 6), ylim=(-3.2, 3.2))
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main() -> None:
    OUTPUT.mkdir(exist_ok=True)
    strange = "test digits rotated by 90 degrees, inverted, or with shuffled pixels"
    tables = {"digits": (f"A small CNN on scikit-learn's digits. Foreign: {strange}.", digits)}
    folder = Path(os.environ.get("LAPWING_DATA") or "no-data")
    if all((folder / name).is_file() for name in MNIST_FILES):
        tables["mnist"] = ("A trained MNIST network. Foreign: Fashion-MNIST.", lambda: mnist(folder))
    for name, (title, run) in tables.items():
        table = run()
        text = f"{title}\n\n{table}\n{TUNED}\n"
        print(text, flush=True)
        (OUTPUT / f"{name}.txt").write_text(text)
        table.to_pandas().to_csv(OUTPUT / f"{name}.csv", index_label="candidate")
    if "mnist" not in tables:
        print("LAPWING_DATA names no folder with MNIST: the MNIST comparison is left out.\n")
    picture(OUTPUT / "regression.png")
    print(f"Tables and picture are in {OUTPUT}/: {', '.join(sorted(path.name for path in OUTPUT.iterdir()))}")


if __name__ == "__main__":
    main()
