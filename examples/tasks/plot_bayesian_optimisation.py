"""
Bayesian optimisation with a network
====================================

Each evaluation is expensive, and you look for the maximum. Thompson sampling draws a function from the posterior,
evaluates its maximum next, and repeats. ``posterior.sample_function(seed)`` is such a function: it has the same values
at every call, and gradients in x.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import lapwing as lw

torch.manual_seed(0)
grid = torch.linspace(0, 1, 200).double()[:, None]


def objective(x):
    """Returns noisy values of a function with three hills; the highest is at 0.95."""
    return torch.sin(15 * x) * x + 0.3 * x + 0.02 * torch.randn_like(x)


def posterior_of(x, y):
    """Trains a small network on standardised values, and fits its posterior."""
    model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)).double()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-3)
    for _ in range(300):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(x), (y - y.mean()) / y.std()).backward()
        optimiser.step()
    return lw.fit(model.eval(), (x, (y - y.mean()) / y.std()))


# %%
# Eight random evaluations, then twelve chosen ones.

x = torch.rand(8, 1).double()
y = objective(x)
for step in range(12):
    chosen = grid[posterior_of(x, y).sample_function(seed=step)(grid).argmax()][None]
    x, y = torch.cat([x, chosen]), torch.cat([y, objective(chosen)])
print(f"best input {float(x[y.argmax()]):.2f}, value {float(y.max()):.2f}")
print(f"maximum of the function without noise {float((torch.sin(15 * grid) * grid + 0.3 * grid).max()):.2f}")

# %%
# The last posterior: its evaluations lie close together near the maximum, and the band is narrow there.

prediction = posterior_of(x, y).predict(grid)
mean, width = prediction.mean[:, 0], 2 * prediction.epistemic_variance[:, 0].sqrt()
plt.fill_between(grid[:, 0], mean - width, mean + width, color="#0072B2", alpha=0.3, label="two standard deviations")
plt.plot(grid[:, 0], mean, color="#0072B2", label="network")
standardised = (y - y.mean()) / y.std()
plt.scatter(x[:8], standardised[:8], color="0.5", label="first, at random")
plt.scatter(x[8:], standardised[8:], color="black", label="chosen")
plt.xlabel("input")
plt.legend()
plt.show()

# %%
# When not to
# -----------
#
# - **Few evaluations of few inputs.** A Gaussian process needs no training and is better there. A network pays with
#   many evaluations, many inputs, or inputs such as images and molecules.
# - **Expected improvement, constraints, batches:** BoTorch has them. ``lapwing.integrations.botorch.LaplaceModel``
#   gives it the posterior: see docs/integrations/botorch.md.
