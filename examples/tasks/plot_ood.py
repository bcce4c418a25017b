"""
Out-of-distribution inputs
==========================

A network answers everything: it calls a patch of a photograph a digit, too. The uncertainty of a posterior tells what
the network has not seen. It needs no out-of-distribution (OOD) data for the fit, only three lines.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits, load_sample_images
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.evaluation import plots

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
train, held_out, test = (TensorDataset(x[rows], y[rows]) for rows in torch.randperm(len(x)).split([900, 300, 597]))


def patches(photograph):
    """Returns grey patches (n, 1, 8, 8) of a photograph."""
    grey = torch.tensor(photograph, dtype=torch.float32).mean(-1) / 255
    return grey.unfold(0, 8, 16).unfold(1, 8, 16).reshape(-1, 1, 8, 8)


temple, flower = (patches(photograph) for photograph in load_sample_images().images)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(32 * 16, 10),
)  # fmt: skip
loader = DataLoader(train, batch_size=100, shuffle=True)
optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(30):
    for inputs, labels in loader:
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimiser.step()
model.eval()

# %%
# Three lines
# -----------

posterior = lw.fit(model, loader, validation=DataLoader(held_out, batch_size=300))
known = posterior.predict(test[:][0])
unknown = posterior.predict(temple)

# %%
# The scores of digits and of patches of a temple. AUROC is the probability that a patch has the larger score.

figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
plots.ood_scores(known, unknown, axes[0]).set_title("mutual information")
plots.ood_scores(known, unknown, axes[1], score="entropy").set_title("entropy")
plt.show()

# %%
# Which score?
# ------------
# It depends on the data. Here entropy is better for both photographs. For a CNN on Fashion-MNIST against MNIST mutual
# information is far better (the table of the README). ``lw.compare`` has both scores, for as many sets as you name,
# next to the network and temperature scaling.

print(lw.compare({"lapwing": posterior}, DataLoader(test, batch_size=300), {"temple": temple, "flower": flower}))

# %%
# When not to
# -----------
#
# - **Large networks whose features separate everything already,** such as a ResNet-20 on CIFAR-10: entropy ranks
#   better there. Compare both on inputs of the kind that you fear.
# - **A detector as the goal itself.** Detectors on the features before the last layer need no probabilities. For grey
#   CIFAR-10 images three of pytorch-ood are better than mutual information: see docs/ood.md.
# - **Texts.** Of twelve text networks five rank OOD texts at least as well as the network alone.
