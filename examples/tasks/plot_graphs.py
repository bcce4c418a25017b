"""
Graphs and other ragged batches
===============================

Samples of different sizes, such as molecules, graphs, point clouds and sequences, do not form one tensor. lapwing
needs one sample for each entry of the first dimension. Three ways lead there.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import lapwing as lw

torch.manual_seed(0)

# %%
# Data: 300 random graphs with 5 to 15 nodes. The target is the share of nodes whose feature agrees with the mean of
# their neighbours.


def graph():
    """Returns features (n, 1) and a normalised adjacency (n, n)."""
    size = int(torch.randint(5, 16, ()))
    edges = (torch.rand(size, size) < 0.3).float().triu(1)
    adjacency = edges + edges.T + torch.eye(size)
    return torch.randn(size, 1), adjacency / adjacency.sum(1, keepdim=True)


graphs = [graph() for _ in range(300)]
target = torch.stack([((x * (a @ x)) > 0).float().mean() for x, a in graphs])[:, None]


class GraphNetwork(nn.Module):
    """Two rounds of messages, and the mean over the nodes that count."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(2, 32), nn.Linear(64, 32), nn.Linear(32, 1)

    def forward(self, x, adjacency, counts):
        h = torch.relu(self.first(torch.cat([x, adjacency @ x], -1)))
        h = torch.relu(self.second(torch.cat([h, adjacency @ h], -1)))
        return self.head((h * counts[..., None]).sum(1) / counts.sum(1, keepdim=True))


# %%
# 1. Padding
# ----------
# Pad to the largest size, and multiply by a mask. Batches stay fast, and any method works.

largest = max(len(x) for x, _ in graphs)
features, counts = torch.zeros(300, largest, 1), torch.zeros(300, largest)
adjacencies = torch.zeros(300, largest, largest)
for row, (x, a) in enumerate(graphs):
    features[row, : len(x)], adjacencies[row, : len(x), : len(x)], counts[row, : len(x)] = x, a, 1
inputs = (features, adjacencies, counts)

model = GraphNetwork()
optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(200):
    optimiser.zero_grad()
    nn.functional.mse_loss(model(*(part[:150] for part in inputs)), target[:150]).backward()
    optimiser.step()
model.eval()

train = [(tuple(part[:150] for part in inputs), target[:150])]
held_out = [(tuple(part[150:200] for part in inputs), target[150:200])]
posterior = lw.fit(model, train, validation=held_out, forward=lambda model, parts: model(*parts))
prediction = posterior.predict(tuple(part[200:] for part in inputs))
lower, upper = prediction.interval(0.9)
inside = (lower <= target[200:]) & (target[200:] <= upper)
print(f"90 % intervals cover {float(inside.float().mean()):.0%} of 100 graphs")

# %%
# 2. Rows by number
# -----------------
# The loader yields the numbers of the samples, and ``forward=`` collates them. So a library's own batches work, such
# as those of PyTorch Geometric, whose nodes of all graphs lie along one dimension.


def joined(model, numbers):
    """Collates the graphs with these numbers, and calls the network."""
    return model(*(part[numbers] for part in inputs))


numbers = torch.arange(300)
of_numbers = [(numbers[150:200], target[150:200])]
by_number = lw.fit(model, [(numbers[:150], target[:150])], validation=of_numbers, forward=joined)
same = by_number.predict(numbers[200:])
print(f"largest difference to padding {float((same.std - prediction.std).abs().max()):.1e}")

# %%
# 3. One sample at a time
# -----------------------
# ``x[None]`` makes a batch of one, without padding. A list of such batches is a loader too, with a call for each
# sample.

x, adjacency = graphs[200]
alone = posterior.predict((x[None], adjacency[None], torch.ones(1, len(x))))
print(f"std of graph 200: {float(prediction.std[0]):.4f} with padding, {float(alone.std):.4f} alone")

order = target[200:, 0].argsort()
widths = 1.645 * prediction.std[order, 0]
plt.errorbar(range(100), prediction.mean[order, 0], widths, fmt=".", color="#0072B2", label="90 %")
plt.plot(range(100), target[200:][order], ".", color="black", label="target")
plt.xlabel("graphs, by target")
plt.legend()
plt.show()

# %%
# When not to
# -----------
#
# - **Batch norm over nodes, in training mode,** makes a graph's output depend on its batch. Call ``model.eval()``.
# - **Labels of nodes in one large graph** are not independent samples: the posterior treats them as if they were, and
#   is too narrow.
