"""Error bars for your own classifier: copy this file and replace the part between the lines.

lapwing needs two things: a trained network in eval mode, and a loader of its training data as (inputs, labels) batches.
"""

from __future__ import annotations

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw

# ---- yours: a trained network, its training data, held-out data that it was not trained on, and new inputs -----------
torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
train_loader = DataLoader(TensorDataset(x[:1000], y[:1000]), batch_size=100, shuffle=True)
optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(100):
    for inputs, labels in train_loader:
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimiser.step()
held_out_loader = DataLoader(TensorDataset(x[1000:1400], y[1000:1400]), batch_size=100)
new_inputs, true_labels = x[1400:], y[1400:]
# ----------------------------------------------------------------------------------------------------------------------

# Fit: held-out data choose the weights to treat, prior and temperature; without them leave `validation` out.
model.eval()
posterior = lw.fit(model, train_loader, validation=held_out_loader)
print(posterior.diagnose())

# Predict: class probabilities which know how sure the weights are.
prediction = posterior.predict(new_inputs)
print(f"accuracy on all {len(new_inputs)} new inputs: {(prediction.classes == true_labels).double().mean():.1%}")

# When not to trust it: hand the least confident tenth to a person.
threshold = prediction.confidence.quantile(0.1)
kept = prediction.confidence > threshold
correct = (prediction.classes == true_labels).double()
print(f"confidence above {threshold:.2f}: {correct[kept].mean():.1%} correct; below: {correct[~kept].mean():.1%}")

# Where the doubt comes from: entropy is all of it, mutual information the part that more data would remove.
doubtful = int(prediction.confidence.argmin())
entropy, information = prediction.entropy()[doubtful], prediction.mutual_information()[doubtful]
print(f"least sure of input {doubtful}: entropy {entropy:.2f} nats, of which {information:.2f} from the weights")

# Keep: the file holds the posterior, not the network; the network must have the same weights when it is loaded.
path = Path("posterior.safetensors")
posterior.save(path)
again = lw.load(path, model)
assert torch.allclose(again.predict(new_inputs).probs, prediction.probs, atol=1e-5)
