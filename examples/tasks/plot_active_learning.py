"""
Active learning: which inputs to label next
===========================================

The mutual information between an input's label and the weights is the uncertainty that a label can remove. Labels
that are ambiguous anyway raise the entropy, but not the mutual information.
"""

import logging

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import lapwing as lw

logging.getLogger("lapwing").setLevel(logging.ERROR)  # 20 labels are too few to hold some out, and lapwing warns

digits = load_digits()
x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
pool, test = order[:1200], order[1200:]


def trained(rows, seed):
    """Returns a small CNN, trained on the labelled rows."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 16, 10)
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()
    return model.eval()


# %%
# A loop
# ------
# Start with 20 labels. In each round train, fit, and label the 20 images with the largest score.


def scores(kind, model, rows, candidates):
    """Returns the score of each candidate: the label of the largest one is asked for."""
    if kind == "random":
        return torch.rand(len(candidates))
    posterior = lw.fit(model, (x[rows], y[rows]), lw.KFAC())
    prediction = posterior.predict(x[candidates])
    return prediction.mutual_information() if kind == "mutual information" else prediction.entropy()


def learn(kind, seed, rounds=6):
    """Returns the test accuracy of each round."""
    torch.manual_seed(seed)
    rows, candidates = pool[torch.randperm(len(pool))].tensor_split([20])
    accuracies = []
    for _ in range(rounds):
        model = trained(rows, seed)
        with torch.no_grad():
            accuracies.append(float((model(x[test]).argmax(1) == y[test]).float().mean()))
        chosen = scores(kind, model, rows, candidates).topk(20).indices
        rows = torch.cat([rows, candidates[chosen]])
        candidates = candidates[~torch.isin(candidates, rows)]
    return torch.tensor(accuracies)


labels = torch.arange(20, 140, 20)
for kind, colour in (("random", "0.5"), ("entropy", "#D55E00"), ("mutual information", "#0072B2")):
    runs = torch.stack([learn(kind, seed) for seed in range(3)])
    print(f"{kind:20}", *(f"{accuracy:.3f}" for accuracy in runs.mean(0)))
    plt.plot(labels, runs.mean(0), "o-", color=colour, label=kind)
plt.xlabel("labels")
plt.ylabel("accuracy on test images, mean of three seeds")
plt.legend()
plt.show()

# %%
# When not to
# -----------
#
# - **Entropy is often as good.** The two scores differ only for ambiguous inputs, and few digits are ambiguous. The
#   accuracies are in benchmarks/README.md.
# - **Leave the prior precision to the default tuning.** With a prior as weak as the weight decay of the training
#   nearly all images have the largest possible mutual information, and the score hardly tells them apart.
# - **A batch of 20 is scored one by one,** so some of its images tell the network the same.
