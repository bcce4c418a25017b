"""
Texts and LoRA
==============

A transformer reads texts of different lengths, and only small matrices beside its frozen weights are trained (LoRA).
lapwing treats the weights that were trained. Padding and dictionaries as inputs need no special care.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import lapwing as lw
from lapwing.evaluation import plots
from lapwing.integrations.huggingface import lora_cores

torch.manual_seed(0)
LENGTH, WORDS = 12, 300

# %%
# Data: generated texts of 5 to 12 words. A third of the words has a mood, and the label is the sign of the sum. Word
# 0 is padding.

mood = torch.zeros(WORDS).index_fill(0, torch.arange(1, 100), 1.0) * torch.randn(WORDS)


def texts(n):
    """Returns a dict of tokens and mask, both (n, 12), and labels (n,), a tenth of them wrong."""
    mask = torch.arange(LENGTH) < torch.randint(5, LENGTH + 1, (n, 1))
    tokens = torch.randint(1, WORDS, (n, LENGTH)) * mask
    labels = (mood[tokens].sum(1) > 0).long()
    wrong = torch.rand(n) < 0.1
    return {"tokens": tokens, "mask": mask}, torch.where(wrong, 1 - labels, labels)


class LoRA(nn.Module):
    """A frozen linear layer plus a trained product of two narrow matrices."""

    def __init__(self, layer, rank=4):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.layer(x) + self.lora_B(self.lora_A(x))


class Classifier(nn.Module):
    """Embedding, one attention block, the mean over the words that count, and a head."""

    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 2)

    def forward(self, tokens, mask):
        x = self.embedding(tokens)
        x = x + nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), mask[:, None])
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def train(model, batch, labels, steps, rate):
    """Trains the parameters that require gradients."""
    optimiser = torch.optim.Adam([weight for weight in model.parameters() if weight.requires_grad], lr=rate)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(**batch), labels).backward()
        optimiser.step()


model = Classifier()
train(model, *texts(2000), steps=150, rate=1e-2)  # pretraining

# %%
# Fine-tuning, then the posterior
# -------------------------------
# The moods have changed. Freeze everything, add LoRA to queries and values, and train on 600 new texts.

mood = mood * (torch.rand(WORDS) > 0.3)
model.requires_grad_(False)
model.query, model.value = LoRA(model.query), LoRA(model.value)
batch, labels = texts(600)
train(model, batch, labels, steps=80, rate=5e-3)
model.eval()

posterior = lw.fit(model, [(batch, labels)], validation=[texts(300)])
print(posterior.method, list(posterior.tangent.parameters))

test, answers = texts(1000)
prediction = posterior.predict(test)
with torch.no_grad():
    logits = model(**test)
alone = nn.functional.cross_entropy(logits, answers)
print(f"NLL: network {alone:.3f}, lapwing {-prediction.log_prob(answers).mean():.3f}")

# %%
# Only the cores
# --------------
# Each adapter is ``U R V.T`` with a core R of 4 x 4. With U and V fixed, 32 weights are left instead of 512, and their
# posterior is exact. It leaves out what the data leave open in U and V, so it gains less than the posterior of all
# adapters: here by the evidence, without held-out data.

cores = lora_cores(model)  # a copy with the same outputs
for name, network, method in (("cores", cores, lw.Full()), ("adapters", model, lw.KFAC())):
    fitted = lw.fit(network, [(batch, labels)], method)
    print(f"{name}: {fitted.tangent.size} weights, NLL {-fitted.predict(test).log_prob(answers).mean():.3f}")

# %%
# Stated probabilities against observed frequencies: the network lies below the diagonal, which means overconfident.

ax = plots.reliability_diagram(logits.softmax(1), answers, **plots.NETWORK)
plots.reliability_diagram(prediction, answers, ax)
plt.show()

# %%
# When not to
# -----------
#
# - **Out-of-distribution texts.** Uncertainty finds them less well than out-of-distribution images: of twelve text
#   networks five rank such texts at least as well as the network alone. The numbers are in benchmarks/README.md.
# - **Hugging Face:** ``lapwing.integrations.huggingface`` reads its batches and heads. LoRA by PEFT is in
#   docs/integrations/huggingface.md. Its table compares adapters and cores of a GPT-2 with a temperature and with
#   training-free draws of the low-rank factors (arXiv 2412.05723). There the error bars hardly improve the NLL.
# - **A label for each token:** return (B, T, C). See the page on maps.
