"""
Intervals that know where they are wrong
========================================

The errors of most networks are larger for some inputs than for others, and a few are very large. One noise variance
gives all inputs nearly the same interval: too wide where the network is good, too narrow where it is bad.
``lw.fit`` reads from the residuals how the noise depends on the input, and how heavy its tails are. The network does
not train again, and its mean predictions stay the same.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import lapwing as lw

torch.manual_seed(0)

# %%
# Data
# ----
# The noise grows with x. Its tails are those of a Student t with four degrees of freedom. No row has an x between -0.3
# and 0.3. You bring a trained network, its training rows, and rows that it has not seen.


def measured(rows):
    x = 0.3 + 0.7 * torch.rand(rows, 1)
    x = torch.where(torch.rand(rows, 1) < 0.5, x, -x)
    tails = torch.distributions.StudentT(4.0).sample((rows, 1))
    return x, (3 * x).sin() + (0.175 + 0.125 * x) * tails


train, held_out, (x_test, y_test) = measured(1000), measured(400), measured(4000)
model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(300):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(train[0]), train[1]).backward()
    optimizer.step()
model.eval()

# %%
# Fit
# ---
# By default the data decide. ``lw.Gaussian(noise="constant")`` asks for one normal noise variance, to compare.

constant = lw.fit(model, train, validation=held_out, likelihood=lw.Gaussian(noise="constant"))
posterior = lw.fit(model, train, validation=held_out)
print(posterior.likelihood)

# %%
# See them
# --------
# The line is the same in both pictures. On the right the 90 % interval follows the noise. In the gap and beyond the
# data no residual shows the noise. There the interval is at least as wide as on the left, and it widens in a step.

grid = torch.linspace(-1.2, 1.2, 300)[:, None]
figure, panels = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="tight")
for axes, (title, fit) in zip(panels, {"one noise variance": constant, "the default": posterior}.items(), strict=True):
    prediction = fit.predict(grid)
    low, high = prediction.interval(0.9)
    axes.plot(*train, ".", color="0.6", markersize=3, label="training rows")
    axes.fill_between(grid[:, 0], low[:, 0], high[:, 0], alpha=0.3, color="#0072B2", label="90 % interval")
    axes.plot(grid, prediction.mean, color="#0072B2", label="prediction")
    axes.set(title=title, xlabel="x", ylim=(-2.5, 3.5))
panels[0].set_ylabel("y")
panels[0].legend(loc="upper left")
plt.show()

# %%
# Check the coverage
# ------------------
# Over all test rows both fits cover about nine in ten. Sort the rows by their predicted standard deviation, cut them
# into quarters, and the difference shows: with one noise variance the first quarter gets intervals that are too wide,
# and the last quarter intervals that are too narrow.


def coverage(fit, order):
    """Returns the fraction of targets within the 90 % intervals, for each quarter of the rows in an order."""
    low, high = fit.predict(x_test).interval(0.9)
    inside = ((low <= y_test) & (y_test <= high)).double()[order, 0]
    return [float(quarter.mean()) for quarter in inside.chunk(4)]


order = posterior.predict(x_test).std[:, 0].argsort()
shares = {"one noise variance": coverage(constant, order), "the default": coverage(posterior, order)}
for name, quarters in shares.items():
    print(f"{name:20}", *(f"{share:.2f}" for share in quarters), f"all {sum(quarters) / 4:.2f}", sep="  ")

figure, axes = plt.subplots(figsize=(6, 3), layout="tight")
axes.axhline(0.9, color="0.5", linestyle="--", label="wanted")
for (name, quarters), marker in zip(shares.items(), "os", strict=True):
    axes.plot(["smallest", "second", "third", "largest"], quarters, marker, linestyle="-", label=name)
axes.set(xlabel="quarter of the test rows by predicted standard deviation", ylabel="coverage", ylim=(0.7, 1.02))
axes.legend(loc="lower left")
plt.show()

# %%
# Score them
# ----------
# The mean negative log density is in nats, and the CRPS in the unit of y. Lower is better for both.

for name, fit in {"one noise variance": constant, "the default": posterior}.items():
    prediction = fit.predict(x_test)
    print(f"{name:20}  NLL {-prediction.log_prob(y_test).mean():.3f}  CRPS {prediction.crps(y_test).mean():.4f}")

# %%
# When not to
# -----------
#
# - **Few rows.** With fewer than 30 held-out rows, or 200 training rows if none are held out, one noise variance stays:
#   a shape that is fitted to few residuals mostly shows chance.
# - **The noise itself is your question.** Train a network with a second output for the log variance, and fit
#   ``lw.HeteroscedasticGaussian()``. It can learn any shape. The log variance of the default is linear in the last
#   hidden features, which were trained to predict the mean.
# - **Skewed errors.** Both tails are equally heavy. Train on the logarithm of positive targets.
# - **A guarantee.** These intervals are as good as the residuals from which they come. Conformal prediction guarantees
#   the coverage over all inputs; ``lapwing.integrations.mapie`` uses the widths of these intervals for it.
