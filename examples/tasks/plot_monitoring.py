"""
Monitoring and updates
======================

After deployment data drift. If the network sees inputs that it was not trained on, a detector raises more alarms before
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
# A detector compares the doubt and the novelty of an input with those of held-out inputs. Of inputs like these at most
# 5 % have a p-value below 5 %. So count the share of each day's inputs that have. Here the camera tilts a little more
# every day.

detector = lw.novelty(posterior, (x[train], y[train]), held_out=(x[known], y[known]))


def tilted(images, degrees):
    """Returns the images, turned by an angle."""
    angle = torch.tensor(degrees * torch.pi / 180)
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    grid = nn.functional.affine_grid(torch.cat([turn, torch.zeros(2, 1)], 1).expand(len(images), 2, 3), images.shape)
    return nn.functional.grid_sample(images, grid, align_corners=False)


days, alarms, wrong = range(0, 70, 10), [], []
for degrees in days:
    today = tilted(x[stream], float(degrees))
    alarms.append(float((detector.p_value(today) <= 0.05).float().mean()))
    wrong.append(float((posterior.predict(today).classes != y[stream]).float().mean()))
    print(f"{degrees:2} degrees: an alarm for {alarms[-1]:4.0%}, {wrong[-1]:4.0%} wrong")

plt.plot(days, alarms, "o-", color="#0072B2", label="alarms, without labels")
plt.plot(days, wrong, "o-", color="black", label="wrong, known only with labels")
plt.axhline(0.05, color="0.6", linestyle=":", label="at most without drift")
plt.xlabel("tilt in degrees")
plt.ylabel("share of the inputs")
plt.legend()
plt.show()

# %%
# A changed relation
# ------------------
# A detector reads only inputs. On rented bikes, a network trained on the first year had 90 % intervals that covered
# half of the second year, and alarms at 5 % were as rare in both years (docs/ood.md). So compare also the log density
# of the labels that arrive with its usual value. Here the inputs stay, and from some day on every 1 is labelled as a 7.

usual, prediction = posterior.predict(x[known]).log_prob(y[known]), posterior.predict(x[stream])
share = float((detector.p_value(x[stream]) <= 0.05).float().mean())
for name, labels in ("as before", y[stream]), ("1 labelled as 7", y[stream].where(y[stream] != 1, 7)):
    density = prediction.log_prob(labels)
    error = (usual.var() / len(usual) + usual.var() / len(density)).sqrt()
    z = float((density.mean() - usual.mean()) / error)
    print(f"{name:15}: an alarm for {share:.0%}, log density {float(density.mean()):.2f}, z = {z:.1f}")

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
# - **One day with few inputs.** The rate of 5 % is a mean. Whether a day has too many alarms needs a test: a binomial
#   test of their number, or MAPIE's monitoring, which may look after every input (docs/integrations/mapie.md).
