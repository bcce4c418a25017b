"""
Ensembles
=========

Several trainings predict better than one, and their posteriors are mixed by one line. Members that are calibrated each
on its own make a mixture that is too unsure: ``validation=`` gives the mixture one temperature.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.evaluation import plots

digits = load_digits()
x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
x = x + 0.25 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))  # hard enough for mistakes
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, held_out, test = (TensorDataset(x[rows], y[rows]) for rows in order.split([600, 300, 897]))
loader, held_out = DataLoader(train, batch_size=100, shuffle=True), DataLoader(held_out, batch_size=300)


def trained(seed):
    """Returns a small CNN."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 16, 10)
    )
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        for inputs, labels in loader:
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimiser.step()
    return model.eval()


# %%
# Fit each network, and mix
# -------------------------

members = [lw.fit(trained(seed), loader, validation=held_out) for seed in range(4)]
mixture = lw.mixture(members)
calibrated = lw.mixture(members, validation=held_out)
posteriors = {"one posterior": members[0], "mixture": mixture, "mixture, one temperature": calibrated}
print(lw.compare(posteriors, DataLoader(test, batch_size=300)))

# %%
# Two kinds of uncertainty: between the networks, and within each posterior. Their sum is the mutual information.

prediction = calibrated.predict(test[:][0])
between, within = prediction.between_members().mean(), prediction.within_members().mean()
print(f"mutual information: {float(between):.4f} nats between members, {float(within):.4f} within")

ax = plots.reliability_diagram(mixture.predict(test[:][0]), test[:][1], **plots.NETWORK | {"label": "mixture"})
plots.reliability_diagram(prediction, test[:][1], ax, label="one temperature")
plt.show()

# %%
# An ensemble of plain networks
# -----------------------------
# ``lw.TemperatureScaling()`` is a posterior without spread: a mixture of these is the usual deep ensemble.
#
# When not to
# -----------
#
# - **One training is all you can pay.** Its posterior calibrates as well; the gain of an ensemble is accuracy.
# - **The mixture is deployed member by member:** a prediction costs one prediction of each.
