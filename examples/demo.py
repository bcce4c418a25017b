"""`make demo`: what error bars are for, as a report of a classifier, a report of a regression, and a picture.

It needs the package and scikit-learn's digits and sample photographs, and writes to demo-output/.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display needed
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.evaluation import Comparison, compare, plots

OUTPUT = Path("demo-output")


def trained(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[..., Tensor], epochs: int) -> nn.Module:
    """Trains a network by Adam with weight decay."""
    loader = DataLoader(TensorDataset(x, y), 60, shuffle=True, generator=torch.Generator().manual_seed(0))
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-4)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimiser.zero_grad()
            loss(model(inputs), targets).backward()
            optimiser.step()
    return model.eval()


def compared(fits: dict[str, Callable[[], lw.Posterior]], test: Any, foreign: dict[str, Any]) -> Comparison:
    """Runs the fits, and compares them on test data."""
    posteriors, seconds = {}, {}
    for name, fit in fits.items():
        start = time.perf_counter()
        posteriors[name] = fit()
        seconds[name] = time.perf_counter() - start
    return compare(posteriors, test, foreign, fit_seconds=seconds)


def digits() -> Comparison:
    """Trains a small CNN on 600 of scikit-learn's digits; 300 others are held out, and the remaining 897 report."""
    found = load_digits()
    x, y = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)
    generator = torch.Generator().manual_seed(0)
    train, held_out, test = torch.randperm(len(x), generator=generator).split([600, 300, len(x) - 900])
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(144, 10),
    )  # fmt: skip
    trained(model, x[train], y[train], nn.functional.cross_entropy, 30)
    data, validation = (x[train], y[train]), (x[held_out], y[held_out])
    fits = {
        "lw.fit(model, data)": lambda: lw.fit(model, data),
        "last layer, held-out data": lambda: lw.fit(model, data, params=lw.last_layer, validation=validation),
        "all weights, held-out data": lambda: lw.fit(model, data, lw.KFAC(), validation=validation),
    }
    foreign = {"photographs": photographs(500), "inverted digits": 1 - x[test]}
    return compared(fits, (x[test], y[test]), foreign)


def photographs(count: int) -> Tensor:
    """Returns patches of scikit-learn's two sample photographs as images (count, 1, 8, 8) of the digits' range."""
    patches = []
    for image in load_sample_images().images:
        grey = nn.functional.avg_pool2d(torch.tensor(image).float().mean(2)[None, None] / 255, 4)
        patches.append(nn.functional.unfold(grey, 8, stride=8)[0].T.reshape(-1, 1, 8, 8))
    every = torch.cat(patches)
    return every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))[:count]]


def curve(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.sin(1.4 * x) + 0.15 * x + 0.15 * torch.randn(x.shape, generator=generator)


def regression(path: Path) -> Comparison:
    """Trains on a curve with a gap from -2 to 1, and draws what each posterior says there."""
    generator = torch.Generator().manual_seed(0)
    sides = [(torch.rand(n, 1, generator=generator) * 2 - 4, torch.rand(n, 1, generator=generator) * 2.5 + 1)
             for n in (60, 150)]  # fmt: skip
    x, inside = (torch.cat(side) for side in sides)
    y, y_inside = curve(x, generator), curve(inside, generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    trained(model, x, y, nn.functional.mse_loss, 600)
    posteriors = {
        "all weights (lw.Full())": lw.fit(model, (x, y), lw.Full(), params=lw.everything),
        "last layer": lw.fit(model, (x, y), params=lw.last_layer),
        "all weights, no correlations (lw.Diagonal())": lw.fit(model, (x, y), lw.Diagonal(), params=lw.everything),
    }
    grid = torch.linspace(-6, 5.5, 400)[:, None]
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharex=True, sharey=True, layout="constrained")
    for axis, (name, posterior) in zip(axes, posteriors.items(), strict=True):
        plots.bands(grid, posterior.predict(grid), axis, training=(x, y))
        axis.set(title=name, ylim=(-3, 3))
    figure.suptitle("Error bars should grow where there are no data: between -2 and 1, and outside")
    figure.savefig(path, dpi=140)
    plt.close(figure)
    gap = torch.rand(150, 1, generator=generator) * 3 - 2
    return compare(posteriors, (inside, y_inside), {"the gap": gap, "beyond the data": inside.sign() * 2 + inside})


def main() -> None:
    OUTPUT.mkdir(exist_ok=True)
    tables = {
        "report": ("A small CNN on scikit-learn's digits", digits),
        "regression": ("A curve with a gap in its data", lambda: regression(OUTPUT / "regression.png")),
    }
    for name, (title, run) in tables.items():
        table = run()
        print(f"{title}\n\n{table}\n", flush=True)
        table.report(OUTPUT / f"{name}.html", title=title)
        table.to_pandas().to_csv(OUTPUT / f"{name}.csv", index_label="row")
    print(f"Open {OUTPUT / 'report.html'} (digits) and {OUTPUT / 'regression.html'} in a browser.")
    print(f"{OUTPUT / 'regression.png'} shows the error bars in the gap.")


if __name__ == "__main__":
    main()
