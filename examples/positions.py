"""Error bars for every token and every pixel: a small tagger and a small segmentation network.

The tagger says of each digit of a number whether it is larger than the one before it; numbers have other lengths, and
padding does not count. The segmentation network finds the squares in noisy images.

    python examples/positions.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import lapwing as lw


class Tagger(nn.Module):
    """One of two labels for each digit, which reads the digit before it too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(11, 8), nn.Conv1d(8, 24, 2)
        self.head = nn.Linear(24, 2)

    def forward(self, digits: Tensor) -> Tensor:
        """Returns logits (B, T, 2)."""
        before = nn.functional.pad(self.embedding(digits).mT, (1, 0))
        return self.head(torch.relu(self.mix(before)).mT)


def numbers(count: int, length: int) -> tuple[Tensor, Tensor]:
    """Returns digits (B, T), padded by tens, and labels (B, T), -100 at padding."""
    digits = torch.randint(10, (count, length))
    labels = torch.zeros(count, length, dtype=torch.long)
    labels[:, 1:] = (digits[:, 1:] > digits[:, :-1]).long()
    labels = torch.where(torch.rand(count, length) < 0.1, 1 - labels, labels)  # one in ten is wrong
    padding = torch.arange(length) >= torch.randint(2, length + 1, (count, 1))
    return digits.masked_fill(padding, 10), labels.masked_fill(padding, -100)


def squares(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns noisy images (B, 1, H, W) of one square each, and labels (B, H, W)."""
    corner, rows = torch.randint(size // 2, (count, 2)), torch.arange(size)
    inside = [(rows >= corner[:, i, None]) & (rows < corner[:, i, None] + size // 2) for i in (0, 1)]
    labels = inside[0][:, :, None] & inside[1][:, None, :]
    return labels[:, None].float() + 0.7 * torch.randn(count, 1, size, size), labels.long()


def train(model: nn.Module, loader: list[tuple[Tensor, Tensor]], epochs: int) -> nn.Module:
    """Trains a network whose classes are where `cross_entropy` wants them, or last."""
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(epochs):
        for x, y in loader:
            logits = model(x)
            logits = logits.mT if logits.ndim == 3 else logits
            loss = nn.functional.cross_entropy(logits, y)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return model.eval()


def main() -> None:
    """Fits both networks and prints how sure they are, where they are right and where they are wrong."""
    torch.manual_seed(0)
    texts = [numbers(32, length) for length in (5, 9, 7, 9)]
    images = [squares(16, 16) for _ in range(4)]
    layers = nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 2, 1)
    for name, model, loader, (x, y) in (
        ("tagger", Tagger(), texts, numbers(200, 8)),
        ("segmentation", nn.Sequential(*layers), images, squares(50, 16)),
    ):
        posterior = lw.fit(train(model, loader, 30), loader)
        prediction = posterior.predict(x)
        counted, right = y != -100, prediction.classes == y
        entropy = prediction.entropy()
        print(f"{name}: probabilities {tuple(prediction.probs.shape)}, prior precision {posterior.prior_precision:.3g}")
        print(f"  accuracy {right[counted].double().mean():.1%}")
        print(
            f"  entropy where right {entropy[counted & right].mean():.3f}, wrong {entropy[counted & ~right].mean():.3f}"
        )


if __name__ == "__main__":
    main()
