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
detector = lw.novelty(model, loader)
x_test, y_test = test[:]

# %%
# Two reasons to doubt an answer
# ------------------------------
# Mutual information (MI) says how far the weights leave the answer open. Novelty says how far the features of an input
# are from those of the training data. Each dot is an input: test digits, those of them that the network gets wrong, and
# patches of a photograph.

prediction, strange = posterior.predict(x_test), posterior.predict(temple)
wrong = prediction.classes != y_test
figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
for name, mine, inputs, style in (
    ("test digits", prediction.mutual_information(), x_test, {"s": 10, "color": "#4477aa", "alpha": 0.6}),
    ("patches of a temple", strange.mutual_information(), temple, {"s": 8, "color": "#ee6677", "alpha": 0.3}),
    ("wrong answers", prediction.mutual_information()[wrong], x_test[wrong], {"s": 60, "color": "k", "marker": "x"}),
):
    axes[0].scatter(detector(inputs), mine, label=name, **style)
axes[0].set(xlabel="novelty: unlike anything seen", ylabel="mutual information, nats: undecided", yscale="log")
axes[0].legend()
plots.ood_scores(detector(x_test), detector(temple), axes[1], score="novelty").set_title("digits against patches")
plt.show()

# %%
# Which score?
# ------------
# Each finds the patches; which one is best depends on the photograph. For wrong answers MI and entropy are better than
# novelty: most of these digits are like others that were seen, and the network is undecided. ``lw.compare`` has all
# scores, for as many sets as you name, next to the network and temperature scaling.

sets = {"temple": temple, "flower": flower}
print(lw.compare({"lapwing": posterior}, DataLoader(test, batch_size=300), sets, score=detector))


def auroc(score):
    """Returns the probability that a wrong answer has a larger score than a right one."""
    return (score[wrong][:, None] > score[~wrong]).double().mean().item()


print(f"wrong answers: AUROC {auroc(prediction.mutual_information()):.2f} by MI, {auroc(prediction.entropy()):.2f} by "
      f"entropy, {auroc(detector(x_test)):.2f} by novelty")  # fmt: skip

# %%
# When not to
# -----------
#
# - **Novelty for wrong answers.** A digit between 4 and 9 is not novel. Reject such answers by their entropy.
# - **One score for all data.** On a ResNet-20 for CIFAR-10 the entropy is better than MI. docs/ood.md compares scores
#   on images and on texts, next to six detectors of pytorch-ood. ``lw.novelty`` has the AUROC of two of these. No score
#   is best on all data, so test them on inputs of the kind that you fear.
