"""
Images: probabilities that mean what they say
=============================================

A small CNN on few images is overconfident: of its predictions with 99 % confidence, far fewer than 99 % are right. A
few hundred held-out images and one line mend this, and the classes stay the network's own.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.evaluation import plots

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
x = x + 0.4 * torch.randn_like(x)  # noisy pixels: the task is hard enough for mistakes
train, held_out, test = (TensorDataset(x[rows], y[rows]) for rows in torch.randperm(len(x)).split([600, 300, 897]))

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(32 * 16, 10),
)  # fmt: skip
loader = DataLoader(train, batch_size=100, shuffle=True)
optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(25):
    for inputs, labels in loader:
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimiser.step()
model.eval()

# %%
# Fit
# ---
# ``validation=`` chooses the width of the posterior and a temperature of the logits together.

posterior = lw.fit(model, loader, validation=DataLoader(held_out, batch_size=300))
images, labels = test[:]
prediction = posterior.predict(images)
with torch.no_grad():
    probs = model(images).softmax(1)
alone = nn.functional.nll_loss(probs.log(), labels)
print(f"NLL: network {alone:.3f}, lapwing {-prediction.log_prob(labels).mean():.3f}")
print("the same classes:", bool((prediction.probs.argmax(1) == probs.argmax(1)).all()))

# %%
# Points on the diagonal are calibrated. The network lies below it: it is too sure.

ax = plots.reliability_diagram(probs, labels, **plots.NETWORK)
plots.reliability_diagram(prediction, labels, ax)
plt.show()

# %%
# When not to
# -----------
#
# - **Only calibrated probabilities, nothing else.** Temperature scaling is as good for them. The posterior adds the
#   uncertainty of the weights, which finds out-of-distribution images.
# - **Augmentation in the loader.** Turn random augmentation off for the fit: the posterior is that of the images it
#   is shown.
# - **All weights of a convolution network.** Write ``lw.KFAC()`` as the third argument. For a ResNet-20 a pass of the
#   fit costs 21 forward passes, and a prediction 34: benchmarks/README.md has the table.
# - **A pretrained trunk.** Nothing changes: the default treats the last layer, whatever lies below.
