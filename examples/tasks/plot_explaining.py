"""
Explaining an uncertainty
=========================

Why is this prediction uncertain? Three questions have answers: is it noise or missing data, which input tolerates the
least error, and what would a measurement error do?
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_diabetes
from torch import nn

import lapwing as lw
from lapwing.evaluation import plots, sensitivity

torch.manual_seed(0)
data = load_diabetes()
x = torch.tensor(data.data / data.data.std(0), dtype=torch.float32)
y = torch.tensor((data.target - data.target.mean()) / data.target.std(), dtype=torch.float32)[:, None]
order = torch.randperm(len(x))
x, y = x[order], y[order]
model = nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 1))
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
for _ in range(150):
    optimiser.zero_grad()
    nn.functional.mse_loss(model(x[:300]), y[:300]).backward()
    optimiser.step()
model.eval()
posterior = lw.fit(model, (x[:300], y[:300]), validation=(x[300:370], y[300:370]))

# %%
# Noise, or missing data?
# -----------------------
# The variance of y is the noise plus the variance that comes from the weights. More data reduce only the second part.
# It is the sum of the shares of the layers. A share can be negative, because the covariance couples layers.

prediction, reasons = posterior.predict(x[370:]), posterior.explain(x[370:], train=(x[:300], y[:300]))
share = (reasons.variance / (reasons.variance + reasons.noise))[:, 0]
print(f"part of the weights: {float(share.min()):.0%} to {float(share.max()):.0%} of the variance")
person = int(share.argmax())
unusual = x[370 + person].abs().argsort(descending=True)[:3]
print("largest for a person with", *(f"{data.feature_names[k]} {float(x[370 + person, k]):.1f}" for k in unusual))
for layer, variance in reasons.weights.items():
    print(f"layer {layer}: {float(variance[person]):.3f}")
print("training rows whose removal changes the output most:", *reasons.rows[person].tolist())

# %%
# Which input matters?
# --------------------
# ``sensitivity`` adds noise to each input until the prediction gets worse. The input that tolerates the least has a
# sensitivity of 1.

found = sensitivity(posterior, x[370:])
values = found.values.mean(0)
for rank in values.argsort(descending=True)[:4]:
    print(f"{data.feature_names[rank]:5} {float(values[rank]):.2f}")

# %%
# What would a measurement error do?
# ----------------------------------
# Replace inputs by uncertain ones. Here the body mass index has an error of half a standard deviation.

errors = torch.zeros(10)
errors[data.feature_names.index("bmi")] = 0.5**2
noisy = posterior.predict(lw.Uncertain(x[370:], errors))
print(f"standard deviation of y: {float(prediction.std.mean()):.2f}, and {float(noisy.std.mean()):.2f} with the error")

plots.sensitivity_bars(found.values, data.feature_names)
plt.show()

# %%
# When not to
# -----------
#
# - **Sensitivities are in the units of the inputs.** Standardise features first.
# - **They describe the network,** not the world: two inputs that carry the same information share it in any proportion.
