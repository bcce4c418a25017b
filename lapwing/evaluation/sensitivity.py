"""Sensitivity to inputs: the noise that each input tolerates before the prediction suffers, learned by gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..data import batches
from ..data.batches import Forward
from ..data.inputs import Inputs
from ..errors import LapwingError
from ..likelihoods import Likelihood, Prediction, resolve
from ..likelihoods.inferred import inferred_likelihood
from ..network.entry import outside_modes
from ..options import at_least, check_argument, positive
from ..posterior import Posterior
from ..prediction import Linearized, Uncertain, Way
from ..prediction.propagation import certain_latent, untreated
from ..prediction.uncertain import prepared

_SLOWED = 0.75
"""θ: if `weight` is None, the loss grows at 1 - θ of its speed without the pull towards smaller variances."""

_MAX_LOG_VARIANCE = math.log(1e20)
"""Maximum log variance, which inputs that the network ignores reach."""


@dataclass(frozen=True, eq=False)
class Sensitivities:
    """The result of `sensitivity` at B inputs, after the last step within the rule. Samples are independent.

    Attributes:
        values: `min_j σ_j / σ_i` in (0, 1], in the shape of the inputs: 1 for the input of each sample that tolerates
            the least noise, near 0 for inputs that the network ignores.
        variance: learned variances v = σ², in squared units of the inputs.
        inputs: the inputs.
        stopped: whether the rule stopped a sample, rather than the number of steps (B,).
        steps: number of steps of each sample (B,).
        history: "nlpd", "entropy": negative log predictive density, and entropy of the input, both in nats, at the
            start and after each step (steps + 1, B).
    """

    values: Tensor
    variance: Tensor
    inputs: Tensor
    stopped: Tensor
    steps: Tensor
    history: Mapping[str, Tensor] = field(repr=False)

    @property
    def std(self) -> Tensor:
        """Standard deviation σ of the noise that each input tolerates, in its units."""
        return self.variance.sqrt()


@outside_modes
def sensitivity(
    candidate: Posterior | nn.Module,
    inputs: Any,
    targets: Tensor | None = None,
    *,
    via: Way = Linearized(),  # noqa: B008 (frozen)
    likelihood: str | Likelihood | None = None,
    rise: float = 0.1,
    weight: float | None = None,
    variance: float = 1e-5,
    rate: float = 0.1,
    steps: int = 2000,
    forward: Forward | None = None,
) -> Sensitivities:
    """Learns the noise that the inputs of each sample tolerate: the widest Gaussian around x that costs little.

        ℓ(v) = λ NLPD(y | N(x, diag v)) - H(N(x, diag v)),    gradient steps on log v, until NLPD rises by `rise`

    For a linear network with weights w_i the sensitivities are `|w_i| / max_j |w_j|`. With the paper's λ = 1 the
    entropies of many inputs outweigh the loss, and the variances are still nearly equal at the end. So the default is
    `λ = 3/8 |Σ p| / Σ p²` in each step and sample, with `p_i = v_i ∂NLPD/∂v_i`.

    Args:
        candidate: a posterior, or a network, whose weights then have no uncertainty.
        inputs: B samples; or several inputs, one of them an `lw.Uncertain` with the variances of the start.
        targets: y; None means the predictions of the candidate.
        via: way through the network. `Streamlined()` is cheaper than `Linearized()`, and can underestimate the noise of
            deep networks.
        likelihood: only for a network, such as "categorical" or `lw.Gaussian(noise_variance)`; None infers it from the
            targets.
        rise: maximum change of the NLPD of a sample, in nats.
        weight: λ; None chooses it in each step.
        variance: variance of each input at the start, in squared units of x.
        rate: step on log v.
        steps: maximum number of steps.
        forward: for a network: `forward(model, inputs)`; None calls `model(x)`.

    Raises:
        LapwingError: if a number is out of range, a network has no likelihood, or several inputs are uncertain.

    Cost: in each step the way and a backward pass through it; about 400 steps from 1e-5 to 0.1.

    Source: Li et al., Streamlining Prediction in Bayesian Deep Learning, equation 11 and appendix B.3. The paper steps
    by Adam, on an unstated function of the variance.

    Example:
        >>> import torch, lapwing as lw
        >>> from lapwing.evaluation import sensitivity
        >>> model = torch.nn.Linear(3, 1, bias=False).eval()
        >>> _ = model.weight.data.copy_(torch.tensor([[2.0, -1.0, 0.0]]))
        >>> result = sensitivity(model, torch.zeros(1, 3), likelihood=lw.Gaussian(0.5))
        >>> [round(float(value), 2) for value in result.values[0]]
        [1.0, 0.5, 0.0]
    """
    numbers = {"rise": rise, "variance": variance, "rate": rate} | ({} if weight is None else {"weight": weight})
    for name, value in numbers.items():
        check_argument("sensitivity", name, value, positive(), "0.1")
    check_argument("sensitivity", "steps", steps, at_least(1), "2000")
    if isinstance(targets, Tensor):
        batches.check_dense(targets, "A tensor of the targets")
    predict = _predictor(candidate, likelihood, via, targets, forward)
    given, place, start = _start(candidate, inputs, variance)
    x = given.leaves[place]

    def predicted(log_v: Tensor) -> Prediction:
        return predict(replace(given, spreads={place: log_v.exp()}))

    if targets is None:
        with torch.no_grad():
            targets = predicted(start.log()).point
    y = batches.plain(targets)
    log_v, stopped, taken, history = _widened(
        lambda log_v: -predicted(log_v).log_prob(y), start.log(), rise, weight, rate, steps
    )
    smallest = log_v.flatten(1).amin(1).reshape(-1, *[1] * (x.ndim - 1))
    return Sensitivities(((smallest - log_v) / 2).exp(), log_v.exp(), x.detach(), stopped, taken, history)


def _start(candidate: Posterior | nn.Module, inputs: Any, variance: float) -> tuple[Inputs, int, Tensor]:
    """Returns the inputs, the place of the uncertain one among their leaves, and its variances at the start."""
    model = candidate.model if isinstance(candidate, Posterior) else candidate
    parameter = next(model.parameters(), None)
    given = Uncertain(inputs, variance) if isinstance(inputs, Tensor) else inputs
    given = prepared(given, None if parameter is None else parameter.device)
    place, start = next(iter(given.spreads.items()), (0, torch.zeros(0)))
    shape = given.leaves[place].shape
    if len(given.spreads) != 1 or start.shape != shape or not start.numel() or not bool((start > 0).all()):
        raise LapwingError(
            f"The inputs {batches.describe(inputs)} hold {len(given.spreads)} uncertain ones. Pass samples as one "
            "tensor, or with one of several replaced by lw.Uncertain(x, 1e-5), whose variances are positive."
        )
    return given, place, start.detach()


def _widened(
    nlpd_at: Callable[[Tensor], Tensor], log_v: Tensor, rise: float, weight: float | None, rate: float, steps: int
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Returns log v after the last step within the rule, whether it stopped each sample, the steps, and the history."""

    def slope_at(log_v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the NLPD (B,) and its slopes `v ∂NLPD/∂v` (B, n)."""
        with torch.enable_grad():
            at = log_v.detach().requires_grad_()
            nlpd = nlpd_at(at)
            (slope,) = torch.autograd.grad(nlpd.sum(), at)
        return nlpd.detach(), slope.flatten(1).nan_to_num(0.0)

    nlpd, pull = slope_at(log_v)
    first, taken, active = nlpd, torch.zeros_like(nlpd, dtype=torch.long), torch.ones_like(nlpd, dtype=torch.bool)
    history = [(nlpd, _entropy(log_v))]
    for _ in range(steps):
        moved = 1 - (_adaptive_pull(pull) if weight is None else 2 * weight * pull)
        trial = (log_v + rate * moved.clamp(-4.0, 4.0).reshape(log_v.shape)).clamp_max(_MAX_LOG_VARIANCE)
        risen, slope = slope_at(trial)
        active = active & ((risen - first).abs() <= rise)
        log_v = torch.where(active.reshape(-1, *[1] * (log_v.ndim - 1)), trial, log_v)
        nlpd, pull = torch.where(active, risen, nlpd), torch.where(active[:, None], slope, pull)
        taken = taken + active
        history.append((nlpd, _entropy(log_v)))
        if not active.any():
            break
    nlpds, entropies = (torch.stack(part) for part in zip(*history, strict=True))
    return log_v, ~active, taken, {"nlpd": nlpds, "entropy": entropies}


def _adaptive_pull(pull: Tensor) -> Tensor:
    """Returns `2 λ p` (B, n) for slopes p with `2 λ = θ |Σ p| / Σ p²`, scaled so that tiny slopes do not underflow."""
    unit = pull / pull.abs().amax(1, keepdim=True).clamp_min(torch.finfo(pull.dtype).tiny)
    square = unit.square().sum(1, keepdim=True).clamp_min(torch.finfo(pull.dtype).tiny)
    return _SLOWED * unit.sum(1, keepdim=True).abs() / square * unit


def _entropy(log_v: Tensor) -> Tensor:
    """Returns `½ Σ_i log(2 π e v_i)`, (B,)."""
    return 0.5 * (log_v + math.log(2 * math.pi * math.e)).flatten(1).sum(1)


def _predictor(
    candidate: Any, likelihood: str | Likelihood | None, via: Way, targets: Tensor | None, forward: Forward | None
) -> Callable[[Any], Prediction]:
    if isinstance(candidate, Posterior):
        if likelihood is not None or forward is not None:
            raise LapwingError(
                "A posterior has a likelihood and a forward. Leave out likelihood= and forward=: they are for networks."
            )
        return lambda inputs: candidate.predict(inputs, via)
    if not isinstance(candidate, nn.Module):
        raise LapwingError(
            f"The candidate of sensitivity is a {type(candidate).__name__}. Pass a posterior or a network: "
            "sensitivity(lw.fit(model, loader), x)."
        )
    known = likelihood is not None or targets is not None
    chosen = (inferred_likelihood(targets) if likelihood is None else resolve(likelihood)) if known else None
    if chosen is None or chosen.needs_noise:
        raise LapwingError(
            "A network needs a likelihood here, and a Gaussian one its noise variance. Write likelihood='categorical', "
            "or likelihood=lw.Gaussian(noise_variance=0.1) with the mean squared residual of held-out data."
        )
    certain = untreated(candidate, forward, None)
    return lambda inputs: chosen.predict(certain_latent(*certain, inputs, via))
