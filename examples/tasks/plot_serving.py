"""
Serving: one module, ONNX, an endpoint
======================================

``lw.deploy`` turns a posterior into an ordinary module that returns probabilities, or means and variances. It
compiles, exports, and runs in onnxruntime without torch and without lapwing.
"""

import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import lapwing as lw

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
order = torch.randperm(len(x))
train, held_out, test = order.split([1000, 300, 497])
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(100):
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(x[train]), y[train]).backward()
    optimiser.step()
model.eval()
posterior = lw.fit(model, (x[train], y[train]), lw.KFAC(), params=lw.last_layer, validation=(x[held_out], y[held_out]))

# %%
# A plain module
# --------------
# A last layer is deployed with the numbers of ``posterior.predict``.

predictor = lw.deploy(posterior, x[:4], via=lw.Linearized())
probabilities = predictor(x[test])
print(f"largest difference to predict {float((probabilities - posterior.predict(x[test]).probs).abs().max()):.0e}")


def seconds(function):
    """Returns the median time of 50 calls on 100 inputs."""
    times = []
    for _ in range(50):
        start = time.perf_counter()
        with torch.no_grad():
            function(x[:100])
        times.append(time.perf_counter() - start)
    return sorted(times)[25]


costs = {"network": seconds(model), "deployed": seconds(predictor), "posterior.predict": seconds(posterior.predict)}
print({name: f"{value / costs['network']:.1f} forward passes" for name, value in costs.items()})

# %%
# Files
# -----
# ``torch.export``, or ONNX (``pip install "lapwing-torch[export]"``), for any batch size:
#
# .. code-block:: python
#
#     predictor.to_onnx("network.onnx", x[:4])
#     session = onnxruntime.InferenceSession("network.onnx")
#     (probabilities,) = session.run(["probabilities"], {"x": batch})

exported = torch.export.export(predictor, (x[:4],), dynamic_shapes=predictor.dynamic_shapes)
print("exported, a batch of 7:", tuple(exported.module()(x[:7]).shape))

# %%
# An endpoint
# -----------
# Load once, predict in a thread pool. Threads may share a predictor. A request that the network should not answer
# gets another status: ask a person.
#
# .. code-block:: python
#
#     app = fastapi.FastAPI()
#     predictor = torch.export.load("network.pt2").module()
#
#     @app.post("/predict")
#     def predict(features: list[float]):  # a plain function: FastAPI runs it in a thread
#         with torch.inference_mode():
#             probs = predictor(torch.tensor([features]))[0]
#         confidence, label = probs.max(0)
#         return {"label": int(label), "confidence": float(confidence), "ask": bool(confidence < 0.8)}

correct = probabilities.argmax(1) == y[test]
confidence = probabilities.detach().amax(1)
thresholds = torch.linspace(0.3, 0.99, 50)
answered = torch.stack([(confidence >= threshold).float().mean() for threshold in thresholds])
right = torch.stack([correct[confidence >= threshold].float().mean() for threshold in thresholds])
plt.plot(answered, right, color="#0072B2")
plt.xlabel("share of requests that are answered")
plt.ylabel("accuracy of the answers")
plt.show()

# %%
# When not to
# -----------
#
# - **Any posterior but a last layer** is deployed by ``lw.Streamlined()``, whose variances are approximate. The example
#   inputs, at least 8, give them the level of ``posterior.predict``; with fewer pass ``data=(x, y)``. Compare both on a
#   batch first, by ``posterior.predict(x, via=predictor.via)``. Costs are in docs/deployment.md.
# - **Outputs with positions** cannot be deployed.
