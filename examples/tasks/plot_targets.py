"""
Any target: counts with many zeros
==================================

How many fish does a visitor of a lake catch? Many visitors do not fish at all. No ordinary likelihood has so many
zeros. So write the distribution yourself: any of ``torch.distributions``, with parameters from the network's outputs.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, MixtureSameFamily, NegativeBinomial, Poisson

import lapwing as lw

torch.manual_seed(0)
hours = 8 * torch.rand(1200)
fishes = Bernoulli(torch.sigmoid(0.6 * hours - 2)).sample()  # who stays longer is more likely to fish
caught = fishes * Poisson(1 + hours).sample()
x, y = ((hours - 4) / 2.5)[:, None], caught
train, test = torch.arange(1200).split([600, 600])

# %%
# **Write the distribution.** The function gets outputs of shape (..., C), so index them by ``f[..., 0]``. Two Poissons,
# one of rate 0, make counts with many zeros. The other family predicts how much more than Poisson counts they vary.


def zero_inflated(f):
    rates = torch.stack([torch.zeros_like(f[..., 0]), f[..., 0].exp()], -1)
    return MixtureSameFamily(Categorical(logits=f[..., 1:]), Poisson(rates))


def negative_binomial(f):
    return NegativeBinomial(f[..., 0].exp(), logits=f[..., 1])


# %%
# **Train and fit.** The likelihood is the loss of the training too.


def fit(likelihood, outputs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, outputs))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(400):
        optimiser.zero_grad()
        loss = -likelihood.log_prob(model(x[train]), y[train]).mean()
        loss.backward()
        optimiser.step()
    return lw.fit(model.eval(), (x[train], y[train]), lw.KFAC(), likelihood=likelihood)


posteriors = {
    "zero-inflated Poisson": fit(lw.FromDistribution(zero_inflated), 3),
    "negative binomial": fit(lw.FromDistribution(negative_binomial), 2),
    "Poisson": fit(lw.Poisson(), 1),
}

# %%
# **Compare them** on the test rows.

for name, posterior in posteriors.items():
    prediction = posterior.predict(x[test])
    low, high = (end.flatten() for end in prediction.interval(0.9))
    inside = ((low <= y[test]) & (y[test] <= high)).double().mean()
    print(f"{name}: NLL {-prediction.log_prob(y[test]).mean():.2f}, 90 % intervals contain {inside:.0%}")

# %%
# **See them.** At every hour the zero-inflated Poisson predicts zeros as often as they occur. The Poisson, which most
# people would choose, predicts far too few. Its residuals vary too much for a Poisson, so its intervals are wider.

grid = torch.linspace(0, 8, 60)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="tight")
axes[0].plot(hours[test], y[test], ".", color="0.6", markersize=3)
for name, posterior in posteriors.items():
    prediction = posterior.predict(((grid - 4) / 2.5)[:, None])
    low, high = (end.flatten() for end in prediction.interval(0.9))
    (line,) = axes[1].plot(grid, prediction.log_prob(torch.zeros(60)).exp(), label=name)
    axes[0].plot(grid, low, grid, high, color=line.get_color())
middles = torch.arange(8) + 0.5
shares = [float((y[(hours - middle).abs() < 0.5] == 0).double().mean()) for middle in middles]
axes[1].plot(middles, shares, "o", color="0.4", label="share of zeros")
axes[0].set(xlabel="hours at the lake", ylabel="fish, and the ends of 90 % intervals")
axes[1].set(xlabel="hours at the lake", ylabel="probability of no fish", ylim=(0, 1))
axes[1].legend(fontsize=8)

# %%
# **Also**: ``lw.Ordinal()`` for grades. ``Gamma`` for positive targets and ``StudentT`` for heavy tails are in
# docs/likelihoods.md, and so is ``prediction.transformed(torch.exp)`` for a network that was trained on ``log y``.
#
# **When not to.** For real values, classes or plain counts use ``lw.Gaussian()``, ``lw.Categorical()`` and
# ``lw.Poisson()``: their predictions are exact and several times cheaper, and ``lw.deploy`` accepts them.
