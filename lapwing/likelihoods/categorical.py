"""Classification: the categorical likelihood, a softmax over the outputs, and its predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributions as dist

from ..covariance import AnyLatent, Latent, LatentDraws, is_selected
from ..covariance.terms import DenseTerm
from ..data.frames import as_targets
from ..errors import LapwingError
from ..jacobian.jacobian import Reads
from ..linalg import at_least_float32, check_draws, doubled, possible, seeded
from ..options import POSITIVE_NUMBERS, integer, number, option
from . import quadrature
from .base import Integrals, Likelihood
from .classwise import CLASSES, information
from .links import ClassLink, LaplaceBridge, Link, Probit, Quadrature, SampledLink, draw_chunks
from .logits import LogitLikelihood
from .predictions import PSEUDO_WEIGHT, DiscretePrediction
from .registry import register_likelihood
from .targets import check_labels, is_soft, which_count


@register_likelihood
@dataclass(frozen=True, repr=False)
class Categorical(LogitLikelihood["ClassPrediction"]):
    """`y ~ softmax(f)` with integer labels (B,) from 0 to C - 1; Λ = diag(p) - p pᵀ.

    Labels equal to `ignore_index`, for example padding, do not count, as in `torch.nn.functional.cross_entropy`. They
    do not enter the Fisher information, the evidence and the tuning, and their log probability is 0.

    Targets may also be class probabilities q (B, C), floats whose rows sum to 1: then log p(y|f) is `Σ_c q_c log p_c`.

    Class weights w and label smoothing ε change only the loss, as in `torch.nn.functional.cross_entropy`:
    `log p(y|f)` becomes `Σ_c t_c log p_c` with `t_c = w_c [(1 - ε) q_c + ε/C]`, whose negative Hessian is
    `(Σ_c t_c) Λ`. No distribution of y has this log density, so the evidence is a pseudo-evidence. Predictions and
    their log probabilities use the softmax without w and ε.

    Args:
        logit_temperature: T, a positive number that divides the mean of the logits in predictions.
        logit_map: rows [W, b] of an affine map of the logits in predictions, `W f/T + b`; () means none.
        class_weights: w, one positive number for each class; None means ones.
        label_smoothing: ε, from 0 to below 1.
        ignore_index: label of samples and positions that do not count.

    Example:
        >>> import torch
        >>> Categorical(ignore_index=0).log_prob(torch.zeros(2, 3), torch.tensor([0, 1]))
        tensor([ 0.0000, -1.0986])
        >>> Categorical().fisher_root(torch.zeros(4, 3)).shape
        torch.Size([4, 3, 2])
    """

    class_weights: Any = option(None, POSITIVE_NUMBERS, write="[1.0, 5.0]")
    label_smoothing: float = option(0.0, number(0, below=1), write="0.1")
    ignore_index: int = option(-100, integer(-(2**31), 2**31))
    name: ClassVar[str] = "categorical"
    links: ClassVar[tuple[type[Link], ...]] = (Probit, LaplaceBridge, Quadrature, SampledLink)
    activation: ClassVar[str | None] = "softmax"
    selects_outputs: ClassVar[bool] = True

    @property
    def plain(self) -> Likelihood:
        weighs = self.class_weights is not None or self.label_smoothing > 0
        return replace(self, class_weights=None, label_smoothing=0.0) if weighs else self

    def reads(self, outputs: int) -> Reads:
        """Returns "scale": the default `Probit` divides all logits of an input by one number. A map reads all."""
        return "covariances" if self.logit_map else "scale"

    def reads_covariance(self, link: Link) -> bool:
        return super().reads_covariance(link) or isinstance(link, Quadrature)

    def target_shape(self, outputs: int) -> tuple[int, ...]:
        return ()

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        check_labels("Categorical", outputs.shape, outputs.device, targets, self.ignore_index, soft=True)
        if self.class_weights is not None and len(self.class_weights) != outputs.shape[1]:
            raise LapwingError(
                f"The class_weights of Categorical are {len(self.class_weights)} numbers, and the outputs have shape "
                f"{tuple(outputs.shape)}. Pass one weight for each of {outputs.shape[1]} classes."
            )

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns `f_y - log Σ_c exp f_c`, (B,), or `Σ_c t_c log p_c`."""
        logs = torch.log_softmax(at_least_float32(outputs), -1)
        if self.plain is not self:
            return (self._shares(logs, targets) * logs).sum(-1)
        return _of_targets(logs, targets, self.ignore_index)

    def labelled(self, targets: Tensor) -> Tensor | None:
        return which_count(targets, self.ignore_index)

    def weighs(self, counted: Tensor | None) -> bool:
        return self.class_weights is not None or counted is not None

    def target_weights(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Returns `Σ_c t_c` (B, 1) under class weights, or 1 and 0 for labels that count or not; None for ones."""
        if self.class_weights is None:
            counted = self.labelled(targets)
            return None if counted is None or counted.ndim > 1 else counted[:, None].to(outputs.dtype)
        self.check(outputs, targets)
        return self._shares(at_least_float32(outputs), targets).sum(-1, keepdim=True)

    def _shares(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns t (B, C)."""
        if is_soft(logits.shape, targets):
            shares = targets.to(logits.dtype)
        else:
            labels = targets.long()[:, None]
            shares = torch.zeros_like(logits).scatter(-1, labels.clamp(0, logits.shape[1] - 1), 1.0)
        if self.label_smoothing:
            shares = (1 - self.label_smoothing) * shares + self.label_smoothing / shares.shape[1]
        shares = shares if self.class_weights is None else shares * shares.new_tensor(self.class_weights)
        return shares if is_soft(logits.shape, targets) else shares.masked_fill(labels == self.ignore_index, 0.0)

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Returns columns √p_k (v - e_k) of all classes k except the last one z, (B, C, C - 1); zeros for one class.

        `v = (p - p_z e_z)/(1 + √p_z) + √p_z e_z` sums to 1. With s = √p of the other classes their rows are the root
        `(s sᵀ/(1 + √p_z) - I) diag(s)` of `diag(s²) - s² s²ᵀ`, and the row of z makes the sum of each column 0.
        """
        if outputs.shape[1] == 1:
            return torch.zeros_like(outputs)[:, :, None]
        roots = (0.5 * torch.log_softmax(at_least_float32(outputs), -1)).exp()  # √p, positive even if p underflows
        others, final = roots.tensor_split([-1], 1)
        shared = torch.cat([others.square() / (1 + final), final], 1)  # v
        rows = others.unsqueeze(2) * shared.unsqueeze(1)  # the columns of the root, contiguous in memory
        rows.diagonal(dim1=1, dim2=2).zero_().sub_(rows.sum(2))  # v_k - 1 without cancellation at the largest p
        return rows.mT.to(outputs.dtype)  # (B, C, C - 1)

    def fisher_parts(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns `p (1 - p)` and p, both (B, C); for the largest p, `1 - p` is computed as the sum of the others."""
        probs = torch.softmax(at_least_float32(outputs), -1)
        top = probs.argmax(-1, keepdim=True)
        rest = probs.scatter(-1, top, 0.0).sum(-1, keepdim=True)
        return probs * (1 - probs).scatter(-1, top, rest), probs

    def sampled_fisher_root(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Returns `e_y - p` for a label y drawn from p, (B, C, 1)."""
        probs = at_least_float32(outputs).softmax(-1)
        sums = probs.detach().cumsum(-1)  # one random number per row; `torch.multinomial` draws C
        place = sums[:, -1:] * torch.rand(len(sums), 1, generator=generator, dtype=sums.dtype, device=sums.device)
        labels = torch.searchsorted(sums, place, right=True).clamp(max=sums.shape[1] - 1)  # (B, 1)
        return (torch.zeros_like(probs).scatter(-1, labels, 1.0) - probs).unsqueeze(-1).to(outputs.dtype)

    def predict(
        self, latent: AnyLatent, link: Link | None = None, generator: torch.Generator | None = None
    ) -> ClassPrediction:
        """Returns class probabilities by `Probit()` or another of `links`, or averages weight draws."""
        chosen, latent = self.choose_link(latent, link), self.tempered(latent)
        some = is_selected(latent)
        latent = latent.of_classes() if is_selected(latent) else latent
        return ClassPrediction(chosen.log_probs(latent, generator), latent, chosen, self.ignore_index, some)

    def integrals(self, outputs: int, alpha: float) -> Integrals:
        """Returns `Quadrature` for two classes, `SampledLink`, and at α = 1 the closed forms of predictions.

        The VaLLA paper uses `Probit(scale="marginal")` at α = 1, the log predictive probability.
        """
        if self.plain is not self:
            return super().integrals(outputs, alpha)
        two: Integrals = {Quadrature: self._power_mean_by_quadrature} if outputs == 2 else {}
        closed: Integrals = {Probit: self._log_predictive, LaplaceBridge: self._log_predictive} if alpha == 1 else {}
        return {**two, **super().integrals(outputs, alpha), **closed}

    def _power_mean_by_quadrature(
        self, link: Quadrature, mean: Tensor, covariance: Tensor, targets: Tensor, alpha: float, **_: Any
    ) -> Tensor:
        if is_soft(mean.shape, targets):
            return self._power_mean_of_draws(SampledLink(), mean, covariance, targets, alpha, None, None)
        mean = at_least_float32(mean)
        gap = (mean[:, 1] - mean[:, 0]) * (2 * targets.long() - 1)
        variance = covariance.diagonal(dim1=-2, dim2=-1).sum(-1) - covariance[:, 0, 1] - covariance[:, 1, 0]
        values = quadrature.binary_log_power_mean(gap, variance.clamp_min(0.0), alpha, link.nodes).to(mean.dtype)
        return values.masked_fill(targets.long() == self.ignore_index, 0.0)

    def _log_predictive(
        self, link: ClassLink, mean: Tensor, covariance: Tensor, targets: Tensor, alpha: float, **_: Any
    ) -> Tensor:
        mean = at_least_float32(mean)
        latent = Latent(mean, (DenseTerm(covariance.to(mean.dtype)),))
        return _of_targets(link.log_probs(latent), targets, self.ignore_index)


@dataclass(frozen=True, eq=False, repr=False)
class ClassPrediction(DiscretePrediction):
    """Class probabilities at B inputs.

    Args:
        log_probs: log probabilities, (B, C).
        latent: the latent of these probabilities, for `mutual_information` and joint samples.
        some: whether only some outputs have covariances.
    """

    log_probs: Tensor
    latent: AnyLatent
    link: Link
    ignore_index: int = -100
    some: bool = False

    @classmethod
    def mixture(cls, draws: Tensor) -> ClassPrediction:
        """Returns the equal mixture of class probabilities (B, S, C) under draws, for a new likelihood of labels."""
        logs = draws.clamp_min(torch.finfo(draws.dtype).tiny).log().transpose(0, 1)
        return cls(draws.mean(1).log(), LatentDraws(logs), SampledLink())

    @property
    def probs(self) -> Tensor:
        return self.log_probs.exp()

    @property
    def confidence(self) -> Tensor:
        return self.log_probs.amax(-1).exp()

    @property
    def classes(self) -> Tensor:
        return self.log_probs.argmax(-1)

    def entropy(self) -> Tensor:
        """Returns the total uncertainty `-Σ_c p_c log p_c` in nats, (B,)."""
        return _entropy(self.log_probs)

    def mutual_information(self, draws: int | None = None, generator: torch.Generator | None = None) -> Tensor:
        """Returns the epistemic part of the entropy, `H[E p] - E H[p]` in nats, (B,).

        This is the information between the label and the weights (BALD; Houlsby et al. 2011, equation 2). By default
        it is integrated over one class at a time (`lapwing.likelihoods.classwise`): exact for two classes, close for
        more, without randomness, and exactly 0 without spread. With standard deviations of logits above 5, draws are
        more accurate. S draws are biased down by O(1/S). Both use the mean of p under the latent instead of the link's,
        so the result is never negative.

        Args:
            draws: number of latent draws, at least 1; None means quadrature, or 512 draws if there are more than 100
                classes or only some of the outputs are selected. A latent of weight draws uses all of its draws.
            generator: random generator; None means seed 0.

        Cost: O(B C) and two products with the covariance, or O(draws B C).
        """
        if draws is None and self.latent.draws is None and not self.some and self.log_probs.shape[1] <= CLASSES:
            return information(self.latent).to(self.log_probs)
        draws = 512 if draws is None else draws
        check_draws("mutual_information", "draws", draws)
        total, entropies, count = None, torch.zeros((), dtype=torch.float64), 0
        for chunk in draw_chunks(self.latent, draws, generator):
            logs = torch.log_softmax(doubled(chunk), -1)  # (s, B, C)
            part = logs.logsumexp(0)
            total = part if total is None else torch.logaddexp(total, part)
            entropies = entropies + _entropy(logs).sum(0)
            count += len(chunk)
        assert total is not None
        drawn = _entropy(total - math.log(count)) - entropies / count
        return drawn.clamp_min(0.0).to(self.log_probs)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Returns the log probability of the label of each input, (B,); 0 for labels that do not count.

        For class probabilities q (B, C) as targets, it is `Σ_c q_c log p_c`.
        """
        logs, targets = self.log_probs, as_targets(targets, self.log_probs.device)
        check_labels("ClassPrediction.log_prob", logs.shape, logs.device, targets, self.ignore_index, soft=True)
        return _of_targets(logs, targets, self.ignore_index)

    def pseudo_row(self, outputs: Tensor) -> Tensor:
        logits = outputs if outputs.shape == self.log_probs.shape else self.log_probs  # not so for `lw.Ordinal`
        mask = possible(logits)
        return PSEUDO_WEIGHT * torch.where(mask, self.log_probs, 0.0).sum(-1) / mask.sum(-1)

    def for_metrics(self, targets: Tensor) -> dict[str, Tensor]:
        """Returns the log probabilities (n,), class probabilities (n, C) and labels (n,) of the n labels that count."""
        values, counted = super().for_metrics(targets), which_count(targets, self.ignore_index)
        values["labels"] = targets.argmax(-1) if is_soft(self.log_probs.shape, targets) else targets
        return values if counted is None else {name: value[counted] for name, value in values.items()}

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws labels, int64 (n, B), independently by `probs`.

        With a joint latent the logits are drawn jointly first, and the frequencies match `SampledLink`.
        """
        check_draws("sample", "n", n, 2 * len(self.log_probs))
        generator = seeded(generator, self.log_probs.device)
        if not self.latent.joint:
            return torch.multinomial(self.probs.detach(), n, replacement=True, generator=generator).T
        probs = at_least_float32(self.latent.sample(n, generator)).detach().softmax(-1)  # (n, B, C)
        labels = torch.multinomial(probs.flatten(0, 1), 1, generator=generator)  # (n·B, 1)
        return labels.reshape(probs.shape[:2])

    def distribution(self) -> dist.Categorical:
        """Returns `torch.distributions.Categorical` with batch shape (B,)."""
        return dist.Categorical(logits=self.log_probs)

    def __repr__(self) -> str:
        inputs, classes = self.log_probs.shape
        return f"{type(self).__name__}({inputs} inputs, {classes} classes, link={self.link})"


def _of_targets(logs: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """Returns the log probability (B,) of each label, 0 if it is ignored, or `Σ_c q_c log p_c`, for log p (B, C)."""
    if is_soft(logs.shape, targets):
        return (targets.to(logs.dtype) * logs).sum(-1)
    labels = targets.long()
    picked = logs.gather(-1, labels.clamp(0, logs.shape[-1] - 1)[:, None]).squeeze(-1)
    return picked.masked_fill(labels == ignored, 0.0)


def _entropy(log_probs: Tensor) -> Tensor:
    """Returns the entropy in nats over the last axis."""
    return -(log_probs.exp() * log_probs).sum(-1)
