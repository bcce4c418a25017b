"""
Totals, slopes and crossings: the error of any quantity
=======================================================

How sure is the total of many predictions, the difference of two, a slope, or the dose at which a curve crosses a
level? ``posterior.of`` returns any numbers that you compute from the network, with their error.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import lapwing as lw

torch.manual_seed(0)
dose = 10 * torch.rand(120, 1)
dose = dose[(dose < 2.5) | (dose > 5.5)][:, None]  # nobody measured the doses in between
response = torch.sigmoid(1.2 * (dose - 4.5)) + 0.1 * torch.randn(len(dose), 1)
x, y = (dose - 5) / 3, response
model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
optimiser = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-3)
for _ in range(800):
    optimiser.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimiser.step()
model.eval()
posterior = lw.fit(model, (x, y))


def at(*doses):
    """Returns the inputs of the network for some doses, (n, 1)."""
    return (torch.tensor(doses)[:, None] - 5) / 3


# %%
# A total
# -------
# Sixty patients get a dose of 4. Their predictions have one error in common, so the error of the total is much larger
# than if the errors were independent. ``observed=True`` adds the noise of the sixty responses.

sixty = at(*[4.0] * 60)
total = posterior.of(lambda f: f(sixty).sum(), observed=True)
independent = posterior.predict(sixty).variance.sum().sqrt()
print(f"total {float(total.mean):.1f} ± {float(total.std):.1f}, as if independent ± {float(independent):.1f}")

# %%
# A difference
# ------------
# Two doses next to each other share most of their error, which then cancels.

difference = posterior.of(lambda f: f(at(4.2)) - f(at(4.0)))
apart = posterior.latent(at(4.2, 4.0)).variance.sum().sqrt()
print(f"difference {float(difference.mean):.3f} ± {float(difference.std):.3f}, as if independent ± {float(apart):.3f}")

# %%
# A slope
# -------
# Take derivatives inside the function, with ``create_graph=True``.

grid = torch.linspace(0, 10, 101)


def slopes(f):
    """Returns the change of the response per unit of the dose, (101, 1)."""
    doses = grid[:, None].requires_grad_()
    return torch.autograd.grad(f((doses - 5) / 3).sum(), doses, create_graph=True)[0]


slope = posterior.of(slopes)

# %%
# A crossing
# ----------
# At which dose does the curve cross 0.5? Find it first without gradients. One Newton step from there then has the right
# gradient: this is the implicit function theorem.

low, high = torch.tensor(0.0), torch.tensor(10.0)
with torch.no_grad():
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if model((middle[None, None] - 5) / 3) > 0.5 else (middle, high)


def crossing(f):
    """Returns the dose at which the curve is 0.5."""
    dose = low.clone().requires_grad_()
    value = f((dose[None, None] - 5) / 3).squeeze()
    return dose.detach() - (value - 0.5) / torch.autograd.grad(value, dose, retain_graph=True)[0]


half = posterior.of(crossing)
ends = [float(end) for end in half.interval(0.9)]
print(f"half of the effect at {float(half.mean):.2f}, 90 % interval {ends[0]:.2f} to {ends[1]:.2f}; true 4.50")

figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
prediction = posterior.latent((grid[:, None] - 5) / 3)
for ax, mean, std, label in (
    (axes[0], prediction.mean[:, 0], prediction.std[:, 0], "response"),
    (axes[1], slope.mean[:, 0], slope.std[:, 0], "slope of the response"),
):
    ax.plot(grid, mean, color="#0072B2")
    ax.fill_between(grid, mean - 1.645 * std, mean + 1.645 * std, color="#0072B2", alpha=0.25, label="90 % interval")
    ax.set_xlabel("dose")
    ax.set_ylabel(label)
axes[0].plot(dose, response, ".", color="0.4", markersize=4)
axes[0].plot(ends, [0.5, 0.5], color="#D55E00", linewidth=4, label="dose of half the effect")
true = torch.sigmoid(1.2 * (grid - 4.5))
axes[0].plot(grid, true, "--", color="0.2", linewidth=1, label="truth")
axes[1].plot(grid, 1.2 * true * (1 - true), "--", color="0.2", linewidth=1)
axes[0].legend()
plt.show()

# %%
# What to read off
# ----------------
#
# - **The dose of half the effect is uncertain although no interval of the response is wide,** because nobody measured
#   there. Its interval has the width of the band divided by the slope.
# - **The slope is best known where data are,** and its interval holds the true slope nearly everywhere.
#
# When not to
# -----------
#
# - **Intervals of totals can be too narrow.** They hold the uncertainty of the weights and the noise, but not a lack of
#   fit that rows have in common. On four tables (800 rows, a network of 50 hidden units, ``lw.fit(model, data)``) this
#   part of the totals of 60 similar rows was inside 90 % intervals. Check totals of held-out rows before you rely on
#   them. The last column adds up variances as if errors were independent.
#
# ===========  ===========  ===========  ===========
# table        single rows  totals       independent
# ===========  ===========  ===========  ===========
# concrete     0.87         0.61         0.52
# power plant  0.92         0.76         0.60
# kin40k       0.89         0.71         0.52
# elevators    0.83         0.81         0.62
# ===========  ===========  ===========  ===========
#
# - **The quantity is linearised in the weights.** A crossing where the curve is flat, or a quotient by nearly
#   zero, is not Gaussian. Compute it at draws of the weights, ``posterior.sample(100)``, to see the difference.
# - **A maximum or a count of predictions** has no useful gradient. Take draws of the outputs,
#   ``posterior.latent(x, joint=True).sample(1000)``.
# - **You have a covariance of the weights already.** The package deltavar multiplies it with the gradients of one
#   number. With the covariance of this posterior both agree to rounding. Its own covariance is an inverse Fisher matrix
#   averaged over rows, with a damping that you choose. deltavar's default gives the total above an error of 68;
#   lapwing's is 3.7.
