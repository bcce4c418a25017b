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

unseen = DataLoader(held_out, batch_size=300)
posterior = lw.fit(model, loader, validation=unseen)
detector = lw.novelty(posterior, loader, held_out=unseen)
x_test, y_test = test[:]

# %%
# Two reasons to doubt an answer
# ------------------------------
# Doubt is mutual information (MI): how far the weights leave the answer open. Novelty says how far the features of an
# input are from those of the training data. Each has a p-value, its rank among 300 held-out digits. Each dot is an
# input: test digits, those of them that the network gets wrong, and patches of a photograph. An alarm at a rate of 5 %
# needs one p-value of at most 0.025: the left and the lower edge.

wrong = posterior.predict(x_test).classes != y_test
figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
for name, inputs, style in (
    ("test digits", x_test, {"s": 10, "color": "#4477aa", "alpha": 0.6}),
    ("patches of a temple", temple, {"s": 8, "color": "#ee6677", "alpha": 0.3}),
    ("wrong answers", x_test[wrong], {"s": 60, "color": "k", "marker": "x"}),
):
    why = detector.why(inputs)
    axes[0].scatter(why["novelty"], why["doubt"], label=name, **style)
axes[0].axvspan(0.003, 0.025, color="#ee6677", alpha=0.1)
axes[0].axhspan(0.003, 0.025, color="#ee6677", alpha=0.1)
axes[0].set(xlabel="p-value of the novelty: unlike anything seen", ylabel="p-value of the doubt: undecided")
axes[0].set(xscale="log", yscale="log")
axes[0].legend(fontsize="small")
p_values = detector.p_value(x_test), detector.p_value(temple)
plots.ood_scores(*p_values, axes[1], score="p-value").set_title("digits against patches")
plt.show()
for name, inputs in {"test digits": x_test, "temple": temple, "flower": flower, "wrong": x_test[wrong]}.items():
    print(f"{name}: an alarm for {detector.alarm(inputs, rate=0.05).double().mean():.0%}")

# %%
# Which score?
# ------------
# Each finds the patches; which one is better depends on the photograph, so the detector has both. For wrong answers MI
# and entropy are better than novelty: most of these digits are like others that were seen, and the network is
# undecided. ``lw.compare`` has all scores, for as many sets as you name, next to the network and temperature scaling.

sets = {"temple": temple, "flower": flower}
print(lw.compare({"lapwing": posterior}, DataLoader(test, batch_size=300), sets, score=detector))
prediction = posterior.predict(x_test)


def auroc(score):
    """Returns the probability that a wrong answer has a larger score than a right one."""
    return (score[wrong][:, None] > score[~wrong]).double().mean().item()


print(f"wrong answers: AUROC {auroc(prediction.mutual_information()):.2f} by MI, {auroc(prediction.entropy()):.2f} by "
      f"entropy, {auroc(lw.novelty(model, loader)(x_test)):.2f} by novelty")  # fmt: skip

# %%
# When not to
# -----------
#
# - **Novelty for wrong answers.** A digit between 4 and 9 is not novel. Reject such answers by their entropy.
# - **Inputs that no score finds.** On texts and on tables of another year the detector hardly raises more alarms than
#   on known inputs. docs/ood.md has its numbers there, on images, and next to six detectors of pytorch-ood. So test it
#   on inputs of the kind that you fear.
