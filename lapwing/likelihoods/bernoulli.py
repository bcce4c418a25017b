"""Yes or no: the Bernoulli likelihood, a sigmoid of each output, and its predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributions as dist
from torch.nn import functional as F

from ..covariance import AnyLatent
from ..data.frames import as_targets
from ..errors import LapwingError
from ..linalg import at_least_float32, check_draws, doubled, seeded
from ..options import POSITIVE_NUMBERS, at_least, check_argument, option
from . import quadrature
from .base import Integrals, Likelihood
from .links import Link, Probit, Quadrature, SampledLink, TabulatedQuadrature
from .logits import LogitLikelihood
from .predictions import PSEUDO_WEIGHT, DiscretePrediction
from .registry import register_likelihood
from .targets import aligned_targets, check_binary_targets


@register_likelihood
@dataclass(frozen=True, repr=False)
class Bernoulli(LogitLikelihood["BernoulliPrediction"]):
    """`y_c ~ Bernoulli(σ(f_c))`, independently for each of C outputs; Λ = diag(p(1 - p)).

    Use one output for a question with two answers, and several outputs for several labels at once. Targets are 0 and 1,
    as bool, integers or floats, (B, C), or (B,) if C = 1.

    `pos_weight` w changes only the loss, as in `torch.nn.BCEWithLogitsLoss`: log p(y|f) becomes
    `Σ_c [w_c y_c log p_c + (1 - y_c) log(1 - p_c)]`, whose negative Hessian is `diag((w y + 1 - y) p(1 - p))`. Then the
    evidence is a pseudo-evidence. Predictions and their log probabilities use the sigmoid without w.

    Args:
        logit_temperature: T, a positive number that divides the mean of the logits in predictions.
        logit_map: rows [W, b] of an affine map of the logits in predictions, `W f/T + b`; () means none.
        pos_weight: w, one positive number for all outputs, or one for each; None means ones.
        soft_targets: whether targets may be probabilities, between 0 and 1, in the same formula.
        missing: whether a NaN target is a missing answer, which has no effect on fit, tuning and `log_prob`.

    Example:
        >>> import torch
        >>> Bernoulli().log_prob(torch.zeros(3, 1), torch.tensor([True, False, True])).shape
        torch.Size([3])
    """

    pos_weight: Any = option(None, POSITIVE_NUMBERS, write="5.0")
    soft_targets: bool = False
    missing: bool = False
    name: ClassVar[str] = "bernoulli"
    links: ClassVar[tuple[type[Link], ...]] = (Quadrature, Probit, SampledLink)
    tuning_link: ClassVar[Link | None] = TabulatedQuadrature()
    activation: ClassVar[str | None] = "sigmoid"
    selects_outputs: ClassVar[bool] = True

    @property
    def plain(self) -> Likelihood:
        return self if self.pos_weight is None else replace(self, pos_weight=None)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        check_binary_targets("Bernoulli", outputs.shape, outputs.device, targets, self.soft_targets, self.missing)
        if self.pos_weight is not None and len(self.pos_weight) not in (1, outputs.shape[1]):
            raise LapwingError(
                f"The pos_weight of Bernoulli is {len(self.pos_weight)} numbers, and the outputs have shape "
                f"{tuple(outputs.shape)}. Pass one weight, or one for each of {outputs.shape[1]} outputs."
            )

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns `Σ_c log σ(±f_c)` with a plus sign if y_c = 1, or the negative weighted loss, (B,)."""
        return _answers(at_least_float32(outputs), targets, self.pos_weight).sum(-1)

    def target_weights(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Returns `w y + 1 - y` (B, C), with 0 for missing y; None for ones."""
        if self.pos_weight is None and not (self.missing and bool(targets.isnan().any())):
            return None
        self.check(outputs, targets)
        y = aligned_targets("Bernoulli", at_least_float32(outputs), targets)
        weights = torch.ones_like(y) if self.pos_weight is None else 1 + (y.new_tensor(self.pos_weight) - 1) * y
        return torch.where(y.isnan(), 0.0, weights)

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Returns `diag(√(p(1 - p)))`, (B, C, C)."""
        logits = at_least_float32(outputs)
        return torch.diag_embed((0.5 * (F.logsigmoid(logits) + F.logsigmoid(-logits))).exp()).to(outputs.dtype)

    def fisher_parts(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns `p (1 - p)`, (B, C), and None."""
        logits = at_least_float32(outputs)
        return (F.logsigmoid(logits) + F.logsigmoid(-logits)).exp(), None

    def sampled_fisher_root(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Returns `y - p` for answers y drawn from p, (B, C, 1)."""
        probs = at_least_float32(outputs).sigmoid()
        return (torch.bernoulli(probs.detach(), generator=generator) - probs).unsqueeze(-1).to(outputs.dtype)

    def predict(
        self, latent: AnyLatent, link: Link | None = None, generator: torch.Generator | None = None
    ) -> BernoulliPrediction:
        """Returns probabilities of yes by `Quadrature()`, `Probit()` or `SampledLink()`, or averages weight draws."""
        chosen, latent = self.choose_link(latent, link), self.tempered(latent)
        log_odds = chosen.log_odds(latent, generator)
        return BernoulliPrediction(log_odds, latent, chosen, self.soft_targets, self.missing)

    def raised(self, prediction: BernoulliPrediction) -> Tensor | None:
        """Returns the probabilities of one yes or no; several labels have a smaller bound on the cost of the spread."""
        return prediction.probs if prediction.probs.shape[1] == 1 else None

    def most_raised(self, total: float, rows: float) -> float:
        """Returns the standard error of the number of yes, at least 1.

        The exact posterior has the mean of the data: `E[Σ (y_n - p_n)] = 0` over a bias with a flat prior.
        """
        return math.sqrt(max(1.0, total * (1 - total / rows)))

    def integrals(self, outputs: int, alpha: float) -> Integrals:
        """Returns `Quadrature` if C = 1 or α = 0, and `SampledLink`: else correlated outputs do not factorise."""
        hard = self.pos_weight is None and not self.soft_targets and not self.missing
        one = hard and (outputs == 1 or alpha == 0)
        exact: Integrals = {Quadrature: self._power_mean_by_quadrature} if one else {}
        return {**exact, **super().integrals(outputs, alpha)}

    def _power_mean_by_quadrature(
        self, link: Quadrature, mean: Tensor, covariance: Tensor, targets: Tensor, alpha: float, **_: Any
    ) -> Tensor:
        mean = at_least_float32(mean)
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        values = quadrature.binary_log_power_mean(_signed(mean, targets), variance, alpha, link.nodes)
        return values.sum(-1).to(mean)


@dataclass(frozen=True, eq=False, repr=False)
class BernoulliPrediction(DiscretePrediction):
    """Probabilities of yes for C outputs at B inputs; the outputs of one input are assumed independent.

    So `log_prob`, `entropy` and `mutual_information` are sums over outputs, with one value per input. They are
    differentiable in the mean and variance of the latent.

    Args:
        log_odds: `log p - log(1 - p)`, (B, C).
        latent: the latent of these log odds, for `mutual_information` and joint samples.
    """

    log_odds: Tensor
    latent: AnyLatent
    link: Link
    soft_targets: bool = False
    missing: bool = False

    @property
    def probs(self) -> Tensor:
        """Probability of yes, (B, C)."""
        return torch.sigmoid(self.log_odds)

    @property
    def classes(self) -> Tensor:
        """The more probable answer of each output, 0 or 1, int64 (B, C)."""
        return (self.log_odds > 0).long()

    @property
    def confidence(self) -> Tensor:
        """Probability of the most probable answers, `Π_c max(p_c, 1 - p_c)`, (B,)."""
        return F.logsigmoid(self.log_odds.abs()).sum(-1).exp()

    def entropy(self) -> Tensor:
        """Returns the total uncertainty `-Σ_c [p_c log p_c + (1 - p_c) log(1 - p_c)]` in nats, (B,)."""
        return quadrature.sigmoid_entropy(self.log_odds).sum(-1)

    def mutual_information(self, nodes: int = quadrature.NODES) -> Tensor:
        """Returns the epistemic part of the entropy, `Σ_c H[E p_c] - E H[p_c]` in nats, (B,).

        This is the information between an answer and the weights (BALD; Houlsby et al. 2011, equation 2), by quadrature
        over a Gaussian latent, or as an average over weight draws. Both terms use the exact mean of p under the latent
        instead of the link's, so the result is never negative. Time O(nodes B C), or O(draws B C).

        Args:
            nodes: number of quadrature nodes, at least 16.
        """
        check_argument("mutual_information", "nodes", nodes, at_least(16), "48")
        draws = self.latent.draws
        if draws is None:
            information = quadrature.information(self.latent.mean, self.latent.variance, nodes)
        else:
            wide = doubled(draws)  # (S, B, C)
            odds = F.logsigmoid(wide).logsumexp(0) - F.logsigmoid(-wide).logsumexp(0)
            inside = quadrature.sigmoid_entropy(wide).mean(0)
            information = (quadrature.sigmoid_entropy(odds) - inside).clamp_min(0.0).sum(-1)
        return information.to(self.log_odds)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns the log probability of the answers, `Σ_c log p(y_c)`, (B,)."""
        name = "BernoulliPrediction.log_prob"
        targets = as_targets(targets, self.log_odds.device)
        check_binary_targets(name, self.log_odds.shape, self.log_odds.device, targets, self.soft_targets, self.missing)
        return _answers(self.log_odds, targets).sum(-1)

    def pseudo_row(self, outputs: Tensor) -> Tensor:
        return PSEUDO_WEIGHT * (F.logsigmoid(self.log_odds) + F.logsigmoid(-self.log_odds)).sum(-1) / 2

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws answers, 0 or 1, int64 (n, B, C), independently by `probs`.

        With a joint latent the logits are drawn jointly first, and the frequencies match the exact link.
        """
        check_draws("sample", "n", n, 2 * self.log_odds.numel())
        generator = seeded(generator, self.log_odds.device)
        if self.latent.joint:
            probs = at_least_float32(self.latent.sample(n, generator)).detach().sigmoid()  # (n, B, C)
        else:
            probs = self.probs.detach().expand(n, *self.log_odds.shape)
        return torch.bernoulli(probs, generator=generator).long()

    def for_metrics(self, targets: Tensor) -> dict[str, Tensor]:
        """Returns log probabilities (B,), and for each known answer the probabilities of no and yes, label, output."""
        yes = self.probs.double().flatten()
        rows, answers = super().for_metrics(targets), targets.flatten().to(yes)
        numbers, outputs = torch.arange(len(yes), device=yes.device), self.log_odds.shape[1]
        known = ~answers.isnan()
        yes, answers, numbers = yes[known], answers[known], numbers[known]
        return {
            **rows, "probs": torch.stack([1.0 - yes, yes], 1), "labels": (answers > 0.5).long(),
            "places": numbers % outputs, "entry": numbers // outputs,
        }  # fmt: skip

    def distribution(self) -> dist.Independent:
        """Returns independent `torch.distributions.Bernoulli` with batch shape (B,) and event shape (C,)."""
        return dist.Independent(dist.Bernoulli(logits=self.log_odds), 1)

    def __repr__(self) -> str:
        inputs, outputs = self.log_odds.shape
        return f"{type(self).__name__}({inputs} inputs, {outputs} outputs, link={self.link})"


def _answers(logits: Tensor, targets: Tensor, pos_weight: tuple[float, ...] | None = None) -> Tensor:
    """Returns `w y log p + (1 - y) log(1 - p)` (B, C), with 0 if y is NaN."""
    if pos_weight is None and not targets.is_floating_point():
        return F.logsigmoid(_signed(logits, targets))
    y = aligned_targets("Bernoulli", logits, targets)
    weights = 1.0 if pos_weight is None else y.new_tensor(pos_weight)
    known = y.nan_to_num(0.0)
    values = weights * known * F.logsigmoid(logits) + (1.0 - known) * F.logsigmoid(-logits)
    return torch.where(y.isnan(), 0.0, values)


def _signed(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the logits of the given answers, (B, C): f if the answer is yes, and -f if it is no."""
    return (2.0 * aligned_targets("Bernoulli", logits, targets) - 1.0) * logits
