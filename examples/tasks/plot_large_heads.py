"""
Large heads: all weights of a network with many classes
=======================================================

A network has 1 000 classes, and you want error bars over all of its weights. The factors of ``lw.KFAC()`` need a
backward pass for each class and sample. ``lw.KFAC(fisher="sampled")`` needs one for each sample: it draws a label from
the network's own prediction. The price is a sampling error.
"""

import statistics
import time

import matplotlib.pyplot as plt
import torch
from torch import nn

import lapwing as lw

torch.manual_seed(0)


def network(classes):
    """Returns a network of three layers, with random weights."""
    widths = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, classes)
    return nn.Sequential(*widths).eval()


def fit(model, x, y, fisher, seed=0):
    """Fits all weights, without tuning."""
    method = lw.KFAC(fisher=fisher)
    return lw.fit(model, (x, y), method, params=lw.everything, prior_precision=1.0, tune=None, seed=seed)


# %%
# What it costs
# -------------
# The CPU time of a fit to 50 samples, median of three. The cost does not depend on the weights, so the network needs no
# training here.

numbers, seconds = [10, 30, 100, 300, 1000], {None: [], "sampled": []}
for classes in numbers:
    model, x, y = network(classes), torch.randn(50, 32), torch.randint(classes, (50,))
    fit(model, x, y, "sampled")  # the first fit of a program is slower
    runs = {None: [], "sampled": []}
    for _ in range(3):
        for fisher, times in runs.items():
            start = time.process_time()
            fit(model, x, y, fisher)
            times.append(time.process_time() - start)
    for fisher, times in runs.items():
        seconds[fisher].append(statistics.median(times))
    print(f"{classes:4} classes: exact {seconds[None][-1]:.3f} s, sampled {seconds['sampled'][-1]:.3f} s")

# %%
# How far the error bars are off
# ------------------------------
# Classifiers of 100 classes that lie apart or overlap, fitted to more and more samples. The standard deviations are
# those of the ten most probable logits of 50 test inputs. Each sampled fit is repeated with three seeds.

CLASSES, TRAINED = 100, 6400


def trained(distance):
    """Returns a trained classifier and its inputs, for classes at this distance from each other."""
    y = torch.randint(CLASSES, (TRAINED + 50,))
    x = distance * torch.randn(CLASSES, 32)[y] + torch.randn(len(y), 32)
    model = network(CLASSES)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(5):
        for rows in torch.randperm(TRAINED).split(100):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()
    return model, x, y


samples, errors = [100, 400, 1600, 6400], {}
for distance in (1.0, 0.5):
    model, x, y = trained(distance)
    confidence = float(model(x).detach().softmax(1).amax(1).mean())
    error = errors.setdefault(f"mean confidence {confidence:.2f}", [])
    for count in samples:
        exact = fit(model, x[:count], y[:count], None).latent(x[TRAINED:], via=lw.Linearized(outputs=10)).std
        ratios = []
        for seed in range(3):
            drawn = fit(model, x[:count], y[:count], "sampled", seed)
            ratios.append(drawn.latent(x[TRAINED:], via=lw.Linearized(outputs=10)).std / exact)
        ratio = torch.stack(ratios)
        error.append(float((ratio - 1).square().mean().sqrt()))
        print(
            f"confidence {confidence:.2f}, {count:4} samples: {float(ratio.mean()):.2f} times the exact ones on average"
        )

figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
for fisher, label, colour in ((None, "exact", "0.4"), ("sampled", 'fisher="sampled"', "#0072B2")):
    axes[0].loglog(numbers, seconds[fisher], "o-", color=colour, label=label)
axes[0].set(xlabel="classes", ylabel="CPU seconds of a fit to 50 samples")
axes[0].legend()
for (label, error), colour in zip(errors.items(), ("#D55E00", "#0072B2"), strict=True):
    axes[1].loglog(samples, error, "o-", color=colour, label=label)
guide = [error[0] * (samples[0] / count) ** 0.5 for count in samples]
axes[1].loglog(samples, guide, "--", color="0.4", label="1 / √N")
axes[1].set(xlabel="samples N of the fit", ylabel="relative error of a standard deviation")
axes[1].set_yticks([0.01, 0.03, 0.1, 0.3, 1], ["1 %", "3 %", "10 %", "30 %", "100 %"])
axes[1].legend()
plt.show()

# %%
# What to read off
# ----------------
#
# - **The cost of a sampled fit grows slowly with the classes.** For 1 000 classes it is more than ten times cheaper
#   here. Most of the rest is the decomposition of the last layer's factor.
# - **The error bars are too wide on average.** For the confident network they are 1.6 times the exact ones at 400
#   samples, and 4 % wider at 6 400. This bias falls faster than the error of the factors, which is of order 1/√N.
# - **A confident network needs more samples.** Nearly all labels that it draws are its own answer, and their gradients
#   are almost 0. At a mean confidence of 0.46, 400 samples have an error of 17 %.
#
# When not to
# -----------
#
# - **Only the last layer.** This is the default for classifiers. Its exact factors need no backward pass.
# - **Few classes or few samples.** Up to 30 classes the exact factors cost no more here. With a few hundred samples
#   they are affordable, and the sampled ones have their largest error.
# - **Evidences.** Compare them only between fits with the same ``fisher``.
# - **More than 1 000 outputs.** There is nothing to write, because ``lw.KFAC()`` then samples by itself. Costs of a
#   wider network are in benchmarks/README.md.
