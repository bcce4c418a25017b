"""
Tables: an interval around each prediction
==========================================

A network predicts how far diabetes progresses within a year, from ten measurements of a patient. One number does not
say how wrong it may be. lapwing adds an interval, and does not train the network again.
"""

# %%
# This part is yours: a trained network, its training data, and rows that it has not seen.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_diabetes
from torch import nn

import lapwing as lw

torch.manual_seed(0)
table = load_diabetes(scaled=True)
x = torch.tensor(table.data, dtype=torch.float32) * 20  # columns of standard deviation 1
y = torch.tensor(table.target, dtype=torch.float32)[:, None]
train, held_out, test = torch.randperm(len(x)).split([200, 100, 142])
center, scale = y[train].mean(), y[train].std()
targets = (y - center) / scale

model = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(200):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[train]), targets[train]).backward()
    optimizer.step()

# %%
# **Fit and predict.** The held-out rows decide how wide the intervals are. `scaled` returns to the units of the table.

posterior = lw.fit(model.eval(), (x[train], targets[train]), validation=(x[held_out], targets[held_out]))
prediction = posterior.predict(x[test]).scaled(center, scale)
low, high = prediction.interval(0.9)

# %%
# **Check the coverage.** A 90 % interval should contain nine of ten new targets. The network alone, with the variance
# of its training residuals as noise, is far too sure.

covered = ((low <= y[test]) & (y[test] <= high)).double().mean()
with torch.no_grad():
    residual = (targets - model(x)) * scale
alone = (residual[test].abs() <= 1.645 * residual[train].std()).double().mean()
print(f"90 % intervals: lapwing covers {covered:.0%} of the test rows, the network alone {alone:.0%}")

# %%
# **See them.** The width has two parts: the noise of the targets, and the uncertainty of the network, which is larger
# for patients who are unlike those in the training data.

order = prediction.mean[:, 0].argsort()
figure, axes = plt.subplots(figsize=(7, 4), layout="tight")
axes.fill_between(range(len(test)), low[order, 0], high[order, 0], alpha=0.25, label="90 % interval")
axes.plot(prediction.mean[order, 0], label="prediction")
axes.plot(y[test][order, 0], ".", label="measured")
axes.set(xlabel="test rows, sorted by prediction", ylabel="progression of the disease")
axes.legend()

# %%
# **When not to.** Intervals of a regression are symmetric: train skewed targets on a log scale, and use `lw.Poisson()`
# for counts. If you must guarantee the coverage, use conformal prediction. On a table this small, compare with gradient
# boosting or a Gaussian process before you choose a network.
