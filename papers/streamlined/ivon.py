"""IVON (Shen et al. 2024, algorithm 1): the optimiser behind the streamlined paper's mean-field posteriors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class IVON(torch.optim.Optimizer):
    """Variational online Newton: `q = N(m, 1/(λ(h + γ)))`, one draw of the weights a step.

        ĥ = ĝ (θ - m) λ (h + γ)         g ← β₁ g + (1 - β₁) ĝ       h ← β₂ h + (1 - β₂) ĥ + (1 - β₂)²/2 (h - ĥ)²/(h + γ)
        m ← m - α (g/(1 - β₁ᵗ) + γ m)/(h + γ)

    with ĝ the gradient of the mean loss at θ ~ q. Between steps the network holds m. `lw.MeanField.from_optimizer`
    reads `hess`, `ess` and `weight_decay` of its group.

    Args:
        parameters: what is trained.
        ess: λ, the number of training samples.
        rate: α.
        decay: γ; λγ is the prior precision.
        hessian: h at the start.
        betas: β₁ and β₂.
        seed: of the draws.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        ess: float,
        rate: float = 0.1,
        decay: float = 1e-4,
        hessian: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.99999),
        seed: int = 0,
    ) -> None:
        super().__init__(parameters, {"lr": rate, "ess": ess, "weight_decay": decay, "betas": betas})
        if len(self.param_groups) > 1:
            raise ValueError("one group of parameters is accepted")
        flat = _flat(self.param_groups[0]["params"])
        self.param_groups[0]["hess"] = torch.full_like(flat, hessian)
        self.momentum, self.steps = torch.zeros_like(flat), 0
        self.generator = torch.Generator(flat.device).manual_seed(seed)

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor:  # type: ignore[override]
        """Draws weights, evaluates the loss there by `closure()`, and moves mean and variances.

        Args:
            closure: differentiates the mean loss of a batch and returns it.
        """
        assert closure is not None
        group = self.param_groups[0]
        parameters, (first, second) = group["params"], group["betas"]
        hess, decay, ess = group["hess"], group["weight_decay"], group["ess"]
        mean = _flat(parameters)
        noise = torch.randn(mean.shape, generator=self.generator, dtype=mean.dtype, device=mean.device)
        moved = noise * (ess * (hess + decay)).rsqrt()
        _put(parameters, mean + moved)
        with torch.enable_grad():
            loss = closure()
        gradient = torch.cat([value.grad.flatten() for value in parameters])
        seen = gradient * moved * ess * (hess + decay)
        self.steps += 1
        self.momentum = first * self.momentum + (1 - first) * gradient
        correction = 0.5 * (1 - second) ** 2 * (hess - seen) ** 2 / (hess + decay)
        group["hess"] = hess = second * hess + (1 - second) * seen + correction
        direction = (self.momentum / (1 - first**self.steps) + decay * mean) / (hess + decay)
        _put(parameters, mean - group["lr"] * direction)
        return loss.detach()


def _flat(parameters: Iterable[Tensor]) -> Tensor:
    return torch.cat([value.detach().flatten() for value in parameters])


@torch.no_grad()
def _put(parameters: list[Tensor], flat: Tensor) -> None:
    parts = flat.split([value.numel() for value in parameters])
    for value, part in zip(parameters, parts, strict=True):
        value.copy_(part.reshape(value.shape))
