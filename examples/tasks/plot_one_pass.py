"""
Error bars in one forward pass
==============================

The exact variances of a network cost a backward pass for each output. ``lw.Streamlined()`` carries means and variances
through the layers, in one pass. For a convolution network its variances have the wrong level. 64 images correct it,
and they need no labels.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
order = torch.randperm(len(x))
x, y = x[order], y[order]
train, test = TensorDataset(x[:1000], y[:1000]), x[1000:]

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
)  # fmt: skip
optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(15):
    for inputs, labels in DataLoader(train, batch_size=50, shuffle=True):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimiser.step()
model.eval()

# %%
# Fit the level
# -------------
# ``to=`` names the way whose variances are right. The result is a way like any other: ``predict`` and ``latent``
# accept it as ``via=``. ``lw.deploy(posterior, x)`` makes it from the example x.

posterior = lw.fit(model, train, lw.Diagonal(), params=lw.everything, prior_precision=100.0)
fitted = lw.scale_factor(posterior, x[:64], via=lw.Streamlined(), to=lw.Linearized())
print(fitted)

# %%
# What it changed
# ---------------
# Each dot is one logit of a test image. A dot on the line has the exact standard deviation. Besides the level, the
# fitted way uses how the pooled features vary together, so the dots also lie closer to each other.

exact = posterior.latent(test, via=lw.Linearized()).variance
figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharex=True, sharey=True)
ways = {"Streamlined()": lw.Streamlined(), "fitted to 64 images": fitted}
for ax, (name, way) in zip(axes, ways.items(), strict=True):
    variance = posterior.latent(test, via=way).variance
    ax.scatter(exact.sqrt(), variance.sqrt(), s=4, alpha=0.3)
    ends = [float(exact.sqrt().min()), float(exact.sqrt().max())]
    ax.plot(ends, ends, color="k", linewidth=0.8)
    ranks = torch.stack([exact.flatten(), variance.flatten()]).argsort(1).argsort(1).double()
    level = variance.mean() / exact.mean()
    ax.set_title(f"{name}\nlevel {level:.2f}, rank correlation {ranks.corrcoef()[0, 1]:.2f}")
    ax.set_xlabel("exact standard deviation of a logit")
axes[0].set_ylabel("in one pass")
plt.show()

# %%
# When not to
# -----------
# A network with few outputs needs no shortcut: the exact variances of 10 outputs cost about 20 passes, and those of a
# last layer next to nothing. Ranks stay below one for deep convolution networks, .81 for a ResNet-20:
# benchmarks/README.md has a table.
