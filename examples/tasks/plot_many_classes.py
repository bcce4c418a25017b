"""
Many classes and many outputs
=============================

An exact prediction needs one backward pass for each output. For a last layer it needs none, so many classes are cheap
by default. If all weights are treated, choose the outputs that matter, or draw.
"""

import time

import matplotlib.pyplot as plt
import torch
from torch import nn

import lapwing as lw

torch.manual_seed(0)
CLASSES = 1200

# %%
# A classifier of 1 200 classes, ten training samples for each.

centres = torch.randn(CLASSES, 32)
y = torch.arange(CLASSES).repeat(14)
x = centres[y] + 1.0 * torch.randn(len(y), 32)
train, held_out, test = slice(0, 12_000), slice(12_000, 14_400), slice(14_400, None)
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, CLASSES))
optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(5):
    for rows in torch.randperm(12_000).split(200):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[train][rows]), y[train][rows]).backward()
        optimiser.step()
model.eval()

posterior = lw.fit(model, (x[train], y[train]), validation=(x[held_out], y[held_out]))
print(posterior.method)
start = time.perf_counter()
prediction = posterior.predict(x[test])
print(f"{len(x[test])} predictions of {CLASSES} classes took {time.perf_counter() - start:.2f} s")
with torch.no_grad():
    alone = nn.functional.cross_entropy(model(x[test]), y[test])
print(f"NLL {-prediction.log_prob(y[test]).mean():.3f}, network {alone:.3f}")

# %%
# A few outputs of many
# ---------------------
# For a shortlist of ten classes ask only for these: exact variances, ten backward passes. Or draw: all variances,
# with an error that you know.

everything = lw.fit(model, (x[:2000], y[:2000]), lw.Diagonal(), prior_precision=10.0)
few = everything.latent(x[test][:5], via=lw.Linearized(outputs=10))
drawn = everything.latent(x[test][:5], via=lw.Linearized(draws=64))
print("shape of ten outputs", tuple(few.variance.shape), "of all", tuple(drawn.variance.shape))
print(f"relative error of a drawn variance {(2 / 64) ** 0.5:.0%}, by rule")

plt.hist(prediction.confidence.detach(), 40, color="#0072B2")
plt.xlabel("probability of the most probable class")
plt.ylabel("test inputs")
plt.show()

# %%
# When not to
# -----------
#
# - **KFAC of a very wide layer.** Its basis has C² entries: minutes for 10⁴ classes. The default is ``lw.Diagonal()``
#   above 1 000 outputs, which loses little.
# - **Mutual information above 100 classes is drawn,** so small values are noise. Costs and errors are in
#   docs/many-outputs.md.
