"""
Guarantees: sets and intervals that cover
=========================================

A posterior's 90 % interval holds nine in ten targets if the model is right. Conformal prediction gives this coverage
without that assumption, for new inputs of the same kind. MAPIE (``pip install mapie``) does the statistics, on held-out
data that trained and tuned nothing.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import lapwing as lw

try:
    from mapie.classification import SplitConformalClassifier
    from mapie.conformity_scores import StdConformityScore
    from mapie.regression import SplitConformalRegressor
except ModuleNotFoundError:
    raise SystemExit('This script needs MAPIE: run pip install "lapwing-torch[mapie]".') from None

from lapwing.integrations.mapie import PredictionClassifier, PredictionRegressor, matrix_of


def trained(model, loss, x, y):
    """Returns a network after 100 epochs of Adam."""
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(100):
        for rows in torch.randperm(len(x)).split(50):
            optimiser.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimiser.step()
    return model.eval()


# %%
# Sets of classes
# ---------------
# ``matrix_of`` turns predictions into a matrix, so the network's inputs may be images, texts or dicts. A set holds one
# class if the network is sure, and several if it is not.

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
x = x + 0.35 * torch.randn(x.shape)  # noise makes the digits harder
train, held_out, test = torch.randperm(len(x)).split([400, 500, 897])
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
trained(model, nn.functional.cross_entropy, x[train], y[train])
probs = matrix_of(lw.fit(model, (x[train], y[train])).predict(x))

conformal = SplitConformalClassifier(
    PredictionClassifier(10), confidence_level=0.9, conformity_score="lac", prefit=True
)
conformal.conformalize(probs[held_out], y[held_out].numpy())
sets = conformal.predict_set(probs[test])[1][:, :, 0]  # (897, 10): True if the class is in the set
print(f"90 % sets cover {sets[np.arange(len(test)), y[test]].mean():.1%} of the test digits")
print(f"classes in a set: {sets.sum(1).mean():.2f} on average, at most {sets.sum(1).max()}")

# %%
# Intervals
# ---------
# Here the noise grows with x, and the network predicts its logarithm. MAPIE's default score, ``"absolute"``, ignores
# the posterior's standard deviation, so all its intervals have one width. ``StdConformityScore()`` uses it.


def sines(size):
    """Returns x and y, whose noise grows from 0.1 to 1."""
    x = 6 * torch.rand(size, 1) - 3
    return x, x.sin() + (0.1 + 0.15 * (x + 3)) * torch.randn(size, 1)


def gaussian_nll(outputs, y):
    """Returns the loss of a mean and a log noise variance."""
    mean, log_noise = outputs.chunk(2, 1)
    return (log_noise + (y - mean) ** 2 * torch.exp(-log_noise)).mean()


(x, y), (x_held_out, y_held_out), (x_test, y_test) = sines(300), sines(500), sines(4000)
model = trained(nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 2)), gaussian_nll, x, y)
posterior = lw.fit(model, (x, y), likelihood=lw.HeteroscedasticGaussian())
matrices = [matrix_of(posterior.predict(part)) for part in (x_held_out, x_test)]  # means and standard deviations
order, target = x_test[:, 0].argsort().numpy(), y_test[:, 0].numpy()

figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
for ax, name, score in zip(
    axes, ('"absolute"', "StdConformityScore()"), ("absolute", StdConformityScore()), strict=True
):
    conformal = SplitConformalRegressor(
        PredictionRegressor(), confidence_level=0.9, conformity_score=score, prefit=True
    )
    conformal.conformalize(matrices[0], y_held_out[:, 0].numpy())
    low, high = conformal.predict_interval(matrices[1])[1][:, :, 0].T
    inside = (low <= target) & (target <= high)
    quarters = " to ".join(f"{inside[order[part]].mean():.0%}" for part in (slice(1000), slice(3000, None)))
    print(f"{name:22} covers {inside.mean():.1%}: {quarters} from the quarter of least noise to that of most")
    ax.plot(x_test[:500], target[:500], ".", color="0.5", markersize=3)
    ax.fill_between(x_test[order, 0], low[order], high[order], color="#0072B2", alpha=0.3, lw=0)
    ax.set(title=name, xlabel="x")
axes[0].set_ylabel("y, and 90 % intervals")
plt.show()

# %%
# Groups, control of a risk such as missed cases, and alarms for drift are in docs/integrations/mapie.md.
#
# When not to
# -----------
#
# - **New inputs of another kind.** The guarantee is void after a drift and for out-of-distribution inputs. For these
#   look at the mutual information.
# - **Fewer than some hundred held-out samples.** The coverage of one calibration varies by about ``sqrt(.09 / n)``.
# - **You need probabilities.** A set does not say which of its classes is the most probable one.
