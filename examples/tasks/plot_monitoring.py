"""
Monitoring and updates
======================

After deployment data drift. If the network sees inputs that it was not trained on, the mutual information rises before
labels arrive. If only the relation of labels to inputs changes, the log density of new labels shows it.
``posterior.update`` adds new labels without a new fit.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import lapwing as lw

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
order = torch.randperm(len(x))
train, known, stream = order.split([800, 300, 697])
model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 16, 10))
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(80):
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(x[train]), y[train]).backward()
    optimiser.step()
posterior = lw.fit(model.eval(), (x[train], y[train]), lw.KFAC())

# %%
# An alarm
# --------
# On inputs that the network knows, take the level of mutual information that 5 % exceed. Later, count the share of
# each day's inputs above it. Here the camera tilts a little more every day.

alarm = posterior.predict(x[known]).mutual_information().quantile(0.95)


def tilted(images, degrees):
    """Returns the images, turned by an angle."""
    angle = torch.tensor(degrees * torch.pi / 180)
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    grid = nn.functional.affine_grid(torch.cat([turn, torch.zeros(2, 1)], 1).expand(len(images), 2, 3), images.shape)
    return nn.functional.grid_sample(images, grid, align_corners=False)


days, above, wrong = range(0, 70, 10), [], []
for degrees in days:
    prediction = posterior.predict(tilted(x[stream], float(degrees)))
    above.append(float((prediction.mutual_information() > alarm).float().mean()))
    wrong.append(float((prediction.probs.argmax(1) != y[stream]).float().mean()))
    print(f"{degrees:2} degrees: {above[-1]:4.0%} above the alarm, {wrong[-1]:4.0%} wrong")

plt.plot(days, above, "o-", color="#0072B2", label="above the alarm, without labels")
plt.plot(days, wrong, "o-", color="black", label="wrong, known only with labels")
plt.axhline(0.05, color="0.6", linestyle=":", label="expected without drift")
plt.xlabel("tilt in degrees")
plt.ylabel("share of the inputs")
plt.legend()
plt.show()

# %%
# A changed relation
# ------------------
# The mutual information reads only inputs. On rented bikes, a network trained on the first year had 90 % intervals that
# covered half of the second year, with 0.2 to 8 % of the inputs above the alarm. So compare also the log density of the
# labels that arrive with its usual value. Here the inputs stay, and from some day on every 1 is labelled as a 7.

usual, prediction = posterior.predict(x[known]).log_prob(y[known]), posterior.predict(x[stream])
share = float((prediction.mutual_information() > alarm).float().mean())
for name, labels in ("as before", y[stream]), ("1 labelled as 7", y[stream].where(y[stream] != 1, 7)):
    density = prediction.log_prob(labels)
    error = (usual.var() / len(usual) + usual.var() / len(density)).sqrt()
    z = float((density.mean() - usual.mean()) / error)
    print(f"{name:15}: {share:.0%} above the alarm, log density {float(density.mean()):.2f}, z = {z:.1f}")

# %%
# New labels
# ----------
# ``update`` adds the curvature of new samples of the same kind: the posterior narrows, the mean stays.

more = posterior.update((x[known], y[known]))
before, after = (p.predict(x[stream]).mutual_information().mean() for p in (posterior, more))
print(f"mean mutual information {float(before):.4f}, and {float(after):.4f} after 300 more labels")

# %%
# When not to
# -----------
#
# - **Do not update with drifted data.** The mean stays where it was, so the posterior would become narrow around a
#   wrong network: train again, then fit. For regressions lapwing warns if the new residuals are far above the noise.
# - **The alarm without labels cannot see a changed relation.** Keep a stream of labels, also a small one.
# - **A guarantee on the alarm** needs a test: a binomial test of the share above the level, or MAPIE's monitoring.
