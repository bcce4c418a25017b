"""
Forecasts: a noise for each step
================================

A forecaster predicts the next twelve hours from the last 48. Its errors grow with the horizon, so one noise variance
for all steps is too wide at the first step and too narrow at the last. Held-out data give each step its own.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import lapwing as lw

torch.manual_seed(0)
HISTORY, STEPS = 48, 12

# %%
# Data
# ----
# An hourly series with a daily cycle and a drifting level. Windows for training, validation and test follow one
# another in time, so that no test hour was seen in training.

hours = torch.arange(4000)
drift, noise = 0.045 * torch.randn(len(hours)).cumsum(0), 0.1 * torch.randn(len(hours))
series = torch.sin(2 * torch.pi * hours / 24) + drift + noise
windows = series.unfold(0, HISTORY + STEPS, 1)
x, y = windows[:, :HISTORY], windows[:, HISTORY:]
level = x[:, -24:].mean(1, keepdim=True)  # forecast the change from the mean of the last day
x, y = x - level, y - level
train, validation, test = slice(0, 2400), slice(2460, 3000), slice(3060, None)

model = nn.Sequential(nn.Linear(HISTORY, 64), nn.Tanh(), nn.Linear(64, STEPS))
optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(60):
    for rows in torch.randperm(2400).split(200):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(x[train][rows]), y[train][rows]).backward()
        optimiser.step()
model.eval()

# %%
# Fit
# ---
# ``validation=`` chooses one noise variance for each step, if the held-out windows show that they differ.
# ``noise="constant"`` says that a step has the same noise in all windows. By default the residuals decide this, too.

noise_of_steps = lw.Gaussian(noise="constant")
without = lw.fit(model, (x[train], y[train]), likelihood=noise_of_steps)
posterior = lw.fit(model, (x[train], y[train]), likelihood=noise_of_steps, validation=(x[validation], y[validation]))


def coverage(posterior):
    """Returns the share of test values within the 90 % intervals, for each step."""
    lower, upper = posterior.predict(x[test]).interval(0.9)
    return ((lower <= y[test]) & (y[test] <= upper)).double().mean(0)


print("step        ", *range(1, STEPS + 1), sep="\t")
print("without     ", *(f"{share:.2f}" for share in coverage(without)), sep="\t")
print("validation= ", *(f"{share:.2f}" for share in coverage(posterior)), sep="\t")
print("std of noise", *(f"{std:.2f}" for std in posterior.predict(x[test][:1]).aleatoric_variance[0].sqrt()), sep="\t")

# %%
# One forecast of the test hours, with 90 % intervals: dark for the uncertainty of the weights, light with the noise.

window = slice(3060, 3061)
prediction = posterior.predict(x[window])
mean, width = prediction.mean[0], 1.645 * prediction.epistemic_variance[0].sqrt()
lower, upper = (bound[0] for bound in prediction.interval(0.9))
past, future = torch.arange(-HISTORY, 0), torch.arange(STEPS)
plt.figure(figsize=(7, 3))
plt.plot(past, x[window][0], color="0.4", label="history")
plt.plot(future, y[window][0], ".", color="black", label="what came")
plt.fill_between(future, lower, upper, alpha=0.25, color="#0072B2", label="90 % interval")
plt.fill_between(future, mean - width, mean + width, alpha=0.5, color="#0072B2", label="of the weights only")
plt.plot(future, mean, color="#0072B2")
plt.xlabel("hours from now")
plt.legend(loc="lower left", ncol=2)
plt.tight_layout()
plt.show()

# %%
# When not to
# -----------
#
# - **Steps depend on each other.** Intervals are right for each step by itself. For a sum over steps pass the sums as
#   targets, or use ``posterior.latent(x, joint=True)`` for the part that comes from the weights.
# - **A regime that the past does not show** has the errors of the past. Watch new residuals, and call
#   ``posterior.update`` or train again: lapwing warns if they are far larger than the noise.
# - **A level that drifts.** Subtract it, as above. Otherwise all steps share its error: they get one noise,
#   and the next shift of the level may be larger than those of the held-out windows.
# - **Horizons that vary.** Outputs (B, T, 1) and (B, T, C) get the same numbers as (B, T C), if T is the same for all
#   inputs and T C is at most 200. Otherwise each of the C outputs has one noise for all steps.
