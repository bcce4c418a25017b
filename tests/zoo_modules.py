"""Hand-written modules of the test zoo: each holds one habit of real code that naive layer hooks get wrong."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """Named parts, put together by a function of itself and the inputs."""

    def __init__(self, together: Callable[..., Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.together = together
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        return self.together(self, *inputs, **named)


class ResidualBlock(nn.Module):
    """ResNet block whose residual is added in place to the output of a batch norm, pooled to a linear head."""

    def __init__(self, channels: int = 3, outputs: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(channels, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        h += x
        h = self.relu(h)
        h = self.head(h.mean((2, 3)))
        h *= 2.0  # the head's own output is changed in place
        return h


class PatchEmbedding(nn.Module):
    """Patches to tokens through a batch norm whose gradients arrive with channels and positions exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.head = nn.Conv2d(2, 4, 2, 2), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.patches(x)).flatten(2).transpose(1, 2)  # (B, T, D)
        return self.head(F.gelu(tokens).mean(1))


class PreNormAttention(nn.Module):
    """Pre-norm transformer block in plain operations: (B, T, D) to (B, C)."""

    def __init__(self, width: int = 6, heads: int = 2, outputs: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, width = x.shape
        h = self.norm1(x)
        q, k, v = (  # each (B, H, T, D / H)
            layer(h).view(batch, positions, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        weights = torch.softmax(q @ k.transpose(-1, -2) / (width / self.heads) ** 0.5, -1)  # (B, H, T, T)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, positions, width))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x.mean(1))


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` on (B, T, D), batch first or (transposed within) sequence first."""

    def __init__(self, batch_first: bool, width: int = 6, heads: int = 2, outputs: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=batch_first)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h if self.attention.batch_first else h.transpose(0, 1)  # (T, B, D) where the sequence comes first
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(torch.tanh(h).mean(1 if self.attention.batch_first else 0))


class EncoderLayer(nn.Module):
    """`nn.TransformerEncoderLayer`, which takes a fused path without gradients, with a mean-pooled head."""

    def __init__(self, width: int = 8, outputs: int = 3) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(width, 2, dim_feedforward=12, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class TiedTokens(nn.Module):
    """Token model whose embedding and head share one weight: logits over the vocabulary, averaged over positions."""

    def __init__(self, vocabulary: int = 7, width: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(tokens)))).mean(1)


class SharedModule(nn.Module):
    """One Linear module called twice."""

    def __init__(self, width: int = 5, outputs: int = 3) -> None:
        super().__init__()
        self.shared = nn.Linear(width, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.shared(torch.tanh(self.shared(x)))))


class FunctionalReuse(nn.Module):
    """One weight used by its module, by `F.linear` behind the module's back, and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc(x))
        h = torch.tanh(F.linear(h, self.fc.weight))
        h = torch.tanh(h @ self.fc.weight)
        return self.head(h)


class HandRMSNorm(nn.Module):
    """Root-mean-square norm as language models write it: a bare weight times the normalised input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class TokenSum(nn.Module):
    """Sum of token embeddings with a padding token, whose row takes no gradient, and a small MLP."""

    def __init__(self, vocabulary: int = 9, width: int = 5, outputs: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).sum(1))


class Recurrent(nn.Module):
    """`nn.LSTM` on (B, T, D) with a linear head on the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class CustomParameter(nn.Module):
    """Bare parameters: an elementwise scale and shift, and two weights used by `einsum`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(0.5 + torch.rand(4))
        self.shift = nn.Parameter(0.3 * torch.randn(4))
        self.weight = nn.Parameter(0.5 * torch.randn(2, 4, 3))
        self.readout = nn.Parameter(0.5 * torch.randn(3, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(torch.einsum("bd,hdk->bhk", x * self.scale + self.shift, self.weight))  # (B, H, K)
        return torch.einsum("bhk,khc->bc", h, self.readout)


class SwappedOrder(nn.Module):
    """Layers defined in the opposite order of their use: the last layer is the first one registered."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.middle = nn.Linear(5, 6)
        self.first = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class TwoInputs(nn.Module):
    """`nn.Bilinear` of two inputs, called as `model(left, right)`."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(3, 4, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.tanh(self.bilinear(left, right)))


class Squeezed(nn.Module):
    """Scalar regressor that returns (B,) in place of (B, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).squeeze(-1)


class SpatialMean(nn.Module):
    """Mean over all positions of (B, D, ...): (B, D)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(2)
