"""Error bars of an image: a network that takes noise out of 64 x 64 pixels, and how sure it is of each of them.

    LAPWING_DATA=folder python examples/denoising.py

needs `fashion_mnist.npz` in that folder, and writes `demo-output/denoising.png`. It takes about half a minute.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.evaluation import plots

mpl.use("Agg")
from matplotlib import pyplot as plt

NOISE = 0.3


def images(folder: Path, count: int) -> Tensor:
    """Returns grey images (n, 1, 64, 64) from 0 to 1."""
    pixels = np.load(folder / "fashion_mnist.npz")["x_train"][:count].reshape(-1, 1, 28, 28)
    return F.interpolate(torch.tensor(pixels, dtype=torch.float32) / 255, (64, 64), mode="bilinear")


def trained(clean: Tensor, noisy: Tensor, epochs: int) -> nn.Module:
    """Returns a network from noisy images to clean ones, flattened to 4 096 outputs."""
    layers = [nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 12, 5, padding=2), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(12, 1, 5, padding=2), nn.Flatten())
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(clean)).split(16):
            optimiser.zero_grad()
            F.mse_loss(model(noisy[rows]), clean[rows].flatten(1)).backward()
            optimiser.step()
    return model.eval()


def main(folder: Path, count: int = 200, epochs: int = 6) -> None:
    """Trains, fits, predicts one image of a kind that was trained on and one that was not, and draws both."""
    torch.manual_seed(0)
    clean = images(folder, count + 1)
    noisy = clean + NOISE * torch.randn_like(clean)
    model = trained(clean[:count], noisy[:count], epochs)
    with torch.no_grad():
        residual = float(F.mse_loss(model(noisy[:count]), clean[:count].flatten(1)))
    likelihood = lw.Gaussian(noise_variance=residual)
    loader = list(zip(noisy[:count].split(16), clean[:count].flatten(1).split(16), strict=True))
    posterior = lw.fit(model, loader, lw.KFAC(), likelihood=likelihood, prior_precision=100.0)

    stripes = torch.cat([noisy[count:], 2 * noisy[count:].roll(32, -1) * (torch.arange(64) % 8 < 4)])
    prediction = posterior.predict(stripes)  # 4 096 outputs: 64 draws of the weights
    deviations = prediction.epistemic_variance.sqrt()
    print(f"standard deviations: {deviations[0].mean():.4f} for a garment, {deviations[1].mean():.4f} for stripes")
    error = float((2 / 64) ** 0.5 / 2)
    print(f"Monte Carlo error of a standard deviation: {error:.0%}")
    draw(stripes, prediction.mean, deviations)


def draw(inputs: Tensor, means: Tensor, deviations: Tensor) -> None:
    """Writes inputs, means and standard deviations, one row an image."""
    figure, axes = plt.subplots(len(inputs), 3, figsize=(7, 2.4 * len(inputs)))
    for row, noisy, mean, deviation in zip(axes, inputs, means, deviations, strict=True):
        for axis, image, title in zip(row, (noisy, mean), ("noisy input", "prediction"), strict=False):
            axis.imshow(image.reshape(64, 64).numpy(), cmap="gray")
            axis.set_title(title)
            axis.axis("off")
        plots.uncertainty_map(deviation.reshape(64, 64), None, row[2], label="standard deviation")
    figure.tight_layout()
    Path("demo-output").mkdir(exist_ok=True)
    figure.savefig("demo-output/denoising.png", dpi=150)
    print("demo-output/denoising.png")


if __name__ == "__main__":
    if "LAPWING_DATA" not in os.environ:
        sys.exit("Set LAPWING_DATA to a folder with fashion_mnist.npz.")
    main(Path(os.environ["LAPWING_DATA"]))
