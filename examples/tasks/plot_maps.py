"""
Maps: a class for each pixel
============================

A segmentation network gives each pixel a class. With a posterior each pixel has a probability and an uncertainty too,
and the prediction keeps the shape of the map.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import lapwing as lw

torch.manual_seed(0)
SIZE = 32


def scenes(n):
    """Returns noisy images (n, 1, 32, 32) of a bright disc, and masks (n, 32, 32) of its pixels."""
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    centre, radius = torch.rand(n, 2, 1, 1) * 16 + 8, torch.rand(n, 1, 1) * 4 + 4
    masks = (rows - centre[:, 0]).square() + (columns - centre[:, 1]).square() < radius.square()
    return masks[:, None] + 0.8 * torch.randn(n, 1, SIZE, SIZE), masks.long()


x, y = scenes(240)
train, held_out, test = (slice(0, 120), slice(120, 180), slice(180, 240))
model = nn.Sequential(
    nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 2, 1)
)
optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(30):
    for rows in torch.randperm(120).split(20):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[train][rows]), y[train][rows]).backward()
        optimiser.step()
model.eval()

# %%
# Fit and predict
# ---------------
# Targets are maps of class numbers. The default treats the last layer, in closed form for maps of any size.

posterior = lw.fit(model, (x[train], y[train]), validation=(x[held_out], y[held_out]))
prediction = posterior.predict(x[test])
print("probabilities", tuple(prediction.probs.shape), "entropy", tuple(prediction.entropy().shape))
wrong = prediction.probs.argmax(1) != y[test]
print(f"{float(wrong.float().mean()):.1%} of the pixels are wrong")
unsure = prediction.entropy().flatten().topk(wrong.numel() // 20).indices
print(f"{float(wrong.flatten()[unsure].sum() / wrong.sum()):.0%} of the errors lie in the 5 % most uncertain pixels")

# %%
# The entropy is largest along the edge of the disc, where the network is wrong most often.

figure, axes = plt.subplots(1, 4, figsize=(9, 2.6))
pictures = (x[test][0, 0], y[test][0], prediction.probs[0, 1], prediction.entropy()[0])
for axis, picture, title in zip(axes, pictures, ("image", "truth", "probability", "entropy"), strict=True):
    axis.imshow(picture, cmap="cividis" if title == "entropy" else "gray")
    axis.set_title(title)
    axis.axis("off")
plt.tight_layout()
plt.show()

# %%
# When not to
# -----------
#
# - **Pixels are predicted one at a time.** Covariances between pixels are not kept: for the area of a disc, draw
#   whole maps with ``via=lw.MonteCarlo(50)``.
# - **Few images, many pixels.** Pixels of one image are alike, so held-out data of three images show less than their
#   number of pixels suggests.
# - **Logits that are upsampled** make an exact prediction expensive: let ``forward=`` return the logits before the
#   upsampling. The lines are in docs/positions.md.
