"""
Detection: a class and a box from one posterior
===============================================

A detector says what is in an image and where. The two heads of such a network have targets of two kinds. ``lw.Joint``
gives both error bars from one posterior, also if some images have no box.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import lapwing as lw

torch.manual_seed(0)
SIZE, NAMES = 24, ("square", "disc", "cross")


def images(count):
    """Draws shapes in noise; returns the images, the kinds, and the boxes as left, top, right and bottom."""
    kind = torch.arange(count) % 3
    half = 3 + 3 * torch.rand(count, 1)
    center = half + 1 + (SIZE - 2 * half - 2) * torch.rand(count, 2)
    rows = torch.arange(SIZE) + 0.5
    dx, dy = rows - center[:, :1], rows - center[:, 1:]
    dx, dy, size = dx[:, None, :], dy[:, :, None], half[:, :, None]
    inside = (dx.abs() <= size) & (dy.abs() <= size)
    discs = dx**2 + dy**2 <= size**2
    crosses = inside & ((dx.abs() <= size / 2.5) | (dy.abs() <= size / 2.5))
    shapes = torch.stack([inside, discs, crosses], 1)[torch.arange(count), kind]
    noise = 0.6 * torch.rand(count, 1, 1) * torch.randn(count, SIZE, SIZE)  # some images are noisier than others
    return (shapes.float() + noise)[:, None], kind, torch.cat([center - half, center + half], 1) / SIZE


x, kind, box = images(1500)
box[::5] = torch.nan  # nobody drew the boxes of these images
train, held_out, test = torch.arange(1500).split([600, 150, 750])

# %%
# **This part is yours**: a network whose output has three logits and then four numbers of the box.

model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
    nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 36, 32), nn.ReLU(), nn.Linear(32, 7),
)  # fmt: skip
optimiser = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
for _ in range(40):
    for rows in train[torch.randperm(len(train))].split(60):
        f, known = model(x[rows]), ~box[rows, 0].isnan()
        loss = nn.functional.cross_entropy(f[:, :3], kind[rows])
        loss = loss + 10 * (f[known, 3:] - box[rows][known]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
model.eval()

# %%
# **Fit and predict.** Targets are dicts, and so are predictions. The held-out data choose the noise of the box and the
# temperature of the kind.

joint = lw.Joint({"kind": lw.Categorical(), "box": lw.Gaussian()}, outputs={"kind": slice(0, 3), "box": slice(3, 7)})


def targets(rows):
    return {"kind": kind[rows], "box": box[rows]}


posterior = lw.fit(
    model, (x[train], targets(train)), lw.KFAC(), likelihood=joint, validation=(x[held_out], targets(held_out))
)
prediction = posterior.predict(x[test])
low, high = prediction["box"].interval(0.9)
probs = prediction["kind"].probs

known = ~box[test].isnan()
covered = ((low <= box[test]) & (box[test] <= high))[known].double().mean()
accuracy = (prediction["kind"].classes == kind[test]).double().mean()
print(f"{accuracy:.0%} of the kinds are right, {covered:.0%} of the sides of boxes are within their 90 % interval")
print(lw.compare({"joint": posterior}, (x[test], targets(test))))

# %%
# **See them.** The inner and the outer frame are the ends of the 90 % intervals of the four sides. These are the three
# images with the narrowest intervals, and the three with the widest.

order = prediction["box"].std.mean(1).argsort()
figure, axes = plt.subplots(1, 6, figsize=(11, 2.4), layout="constrained")
for ax, i in zip(axes, [*order[:3].tolist(), *order[-3:].tolist()], strict=True):
    ax.imshow(x[test][i, 0], cmap="gray", extent=(0, 1, 1, 0), vmin=-1, vmax=2)
    outer = torch.cat([low[i, :2], high[i, 2:]])
    inner = torch.cat([high[i, :2], low[i, 2:]])
    for left, top, right, bottom in (outer.tolist(), inner.tolist()):
        ax.add_patch(plt.Rectangle((left, top), right - left, bottom - top, fill=False, color="tab:orange", lw=1.5))
    best = int(probs[i].argmax())
    ax.set(title=f"{NAMES[best]}, {probs[i, best]:.0%}", xticks=[], yticks=[], xlim=(0, 1), ylim=(1, 0))

# %%
# **When not to.** With one head, or if the heads share no weights, fit each by itself: each fit then has its own prior
# precision. Without held-out data only such fits calibrate the noise: the noise of ``lw.Joint`` is then the training
# residual. Detectors with many boxes per image need a fit at each matched anchor.
