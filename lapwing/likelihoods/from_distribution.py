"""Any distribution of the target: likelihoods from a distribution of `torch.distributions`, and ordered classes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributions as dist
from torch.nn import functional as F

from ..covariance import AnyLatent
from ..errors import LapwingError, is_out_of_memory, shown
from ..linalg import at_least_float32, doubled, psd_root, seeded_torch
from ..options import Rule, at_least, option, required
from .base import NoiselessLikelihood
from .categorical import ClassPrediction
from .families import MixturePrediction, log_density, validation
from .links import Link, SampledLink, latent_draws, latent_points
from .predictions import P
from .registry import register_likelihood
from .targets import check_labels, check_real_targets

LARGEST_SUPPORT = 64
"""Maximum number of values of a finite support for which Λ is an exact sum over the values."""


@dataclass(frozen=True)
class FamilyLikelihood(NoiselessLikelihood[P]):
    """`y ~ family(f)`, a distribution of `torch.distributions`, for outputs f (..., C); abstract.

    The Fisher information is the second moment of the score under the distribution itself, so it needs no second
    derivatives. Λ (C, C) is formed first. So a pass over the data takes C backward passes for any number of draws.
    """

    one_output_per_target: ClassVar[bool] = False
    tuning_link: ClassVar[Link] = SampledLink(draws=128)
    draws = 256  # without an annotation, so that a subclass may make it a field

    @abstractmethod
    def family(self, outputs: Tensor) -> dist.Distribution:
        """Returns the distribution of y at outputs (..., C), with batch shape (...), or (..., K) for K targets."""

    def target_shape(self, outputs: int) -> tuple[int, ...]:
        family: Any = self._family(torch.zeros(1, 1, outputs, dtype=torch.float64))
        return () if isinstance(family, dist.Categorical) else tuple((*family.batch_shape, *family.event_shape, 1)[2:3])

    def units(self, outputs: int) -> Tensor:
        return torch.arange(outputs) if self.target_shape(outputs) else torch.zeros(outputs, dtype=torch.int64)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises if the distribution has another shape or invalid parameters, or if targets are outside its support."""
        outputs, name = at_least_float32(outputs.detach()), type(self).__name__
        self._family(outputs[None], validate=True)  # (1, B, C): `family` must accept (..., C)
        family = self._family(outputs)
        y = self._aligned(family, outputs, targets)
        logs = log_density(family, y)
        if infinite := int((~logs.isfinite()).sum()):
            raise LapwingError(
                f"{name}: {infinite} of {logs.numel()} targets have no finite log density under "
                f"{type(family).__name__}, because they are outside its support or at its end, such as 0 and 1 for a "
                "Beta. Move them inside, for example by `y.clamp(1e-4, 1 - 1e-4)`, or choose another family."
            )

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns `log p(y|f)`, summed over the K targets of an input, (B,)."""
        outputs = at_least_float32(outputs)
        family = self._family(outputs)
        y = self._aligned(family, outputs, targets.to(outputs.device))
        return log_density(family, y).reshape(len(outputs), -1).sum(-1)

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Returns the root `U √λ` of `Λ = E[s sᵀ] = U λ Uᵀ`, `s = ∇_f log p(y|f)`, (B, C, C).

        The mean is exact for a finite support, otherwise over `draws` draws of y. They depend on all outputs of the
        batch: equal batches give equal results. A score that is not finite, at an end of the support, counts as 0.
        """
        wide = doubled(outputs.detach())
        values, weights = self._values(wide)
        information = wide.new_zeros(*wide.shape, wide.shape[-1])
        with torch.enable_grad(), validation(False):
            leaf = wide.expand(len(values), *wide.shape).clone().requires_grad_()  # (n, B, C)
            logs = log_density(self._family(leaf), values)
            if not logs.requires_grad:
                raise LapwingError(
                    f"The log density of {self!r} has no gradient by the outputs f. Compute the parameters of the "
                    "distribution from f by functions of torch, without f.detach(), f.tolist() or NumPy."
                )
            logs, weights = (part.reshape(*leaf.shape[:2], -1) for part in (logs, weights.expand_as(logs)))  # (n, B, K)
            for log, weight in zip(logs.unbind(-1), weights.unbind(-1), strict=True):  # targets are independent
                (score,) = torch.autograd.grad(log.sum(), leaf, retain_graph=True)
                score = torch.where(score.isfinite(), score, 0.0)
                information += torch.einsum("nb,nbi,nbj->bij", weight, score, score)
        return psd_root(information).to(outputs)

    def predict(self, latent: AnyLatent, link: Link | None = None, generator: torch.Generator | None = None) -> P:
        """Returns the mixture of `family(f)` over points of the latent, or draws for a link that the user names."""
        outputs = latent_points if link is None or link is self.tuning_link else latent_draws
        points = outputs(latent, self.choose_link(latent, link).draws, generator).transpose(0, 1)  # (B, S, C)
        family: Any = self._components(points)
        if isinstance(family, dist.Categorical):
            return ClassPrediction.mixture(family.probs)  # type: ignore[return-value]
        return MixturePrediction(family, precise=self._components(doubled(points)))  # type: ignore[return-value]

    def _components(self, points: Tensor) -> dist.Distribution:
        """Returns the distribution at points (B, S, C), with batch shape (B, S)."""
        family = self._family(points)
        return dist.Independent(family, 1) if len(family.batch_shape) == 3 else family

    def _aligned(self, family: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the targets of outputs (B, C) in the shape of the distribution; raises for another size or dtype."""
        name, shape = type(self).__name__, family.batch_shape + family.event_shape
        if isinstance(family, dist.Categorical):
            check_labels(name, family.logits.shape, outputs.device, targets)
            return targets.long()
        check_real_targets(name, torch.Size((*shape, 1)[:2]), outputs.device, targets)
        return targets.reshape(shape).to(outputs)

    def _family(self, outputs: Tensor, validate: bool = False) -> dist.Distribution:
        """Returns the distribution at outputs (..., C); raises if its shape is wrong.

        Parameters are validated only on request, since draws of the latent may overflow them.
        """
        try:
            with validation(validate):
                family: Any = self.family(outputs)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, LapwingError) or is_out_of_memory(error):
                raise
            raise self._failure(outputs, error) from error
        lead, shape = outputs.shape[:-1], torch.Size()
        if isinstance(family, dist.Distribution):
            shape = family.batch_shape + family.event_shape
            most = len(lead) + (not isinstance(family, dist.Categorical))
            if len(shape) <= most and shape[: len(lead)] == family.batch_shape[: len(lead)] == lead:
                return family
        raise LapwingError(
            f"{self!r} gives {shown(family)} of shape {tuple(shape)} for outputs of shape {tuple(outputs.shape)}. "
            f"Return a torch.distributions object of batch shape {tuple(lead)}, or with one more dimension for several "
            "targets (not for a Categorical): index the outputs by f[..., 0]."
        )

    def _failure(self, outputs: Tensor, error: Exception) -> LapwingError:
        return LapwingError(
            f"{self!r} fails at outputs of shape {tuple(outputs.shape)} and dtype {outputs.dtype}: "
            f"{str(error).split(', but found')[0]}. Map outputs (..., C) to parameters in their range, for example "
            "by f[..., 0].exp() for a positive one, with tensors of the dtype of f: torch.eye(2).to(f)."
        )

    def _values(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns values of y, (n, B, ...), and their weights: all values with their probabilities, or draws."""
        family = self._family(outputs)
        try:
            if family.has_enumerate_support and len(family.enumerate_support(expand=False)) <= LARGEST_SUPPORT:
                values = family.enumerate_support()
                return values, family.log_prob(values).exp()
        except NotImplementedError:  # for example a Binomial with different numbers of trials
            pass
        try:
            with seeded_torch(int(outputs.sum().view(torch.int64)) % 2**62, outputs.device):
                return family.sample((self.draws,)), outputs.new_full((), 1.0 / self.draws)
        except RuntimeError as error:
            self._family(outputs, validate=True)  # raises if the parameters are invalid
            if is_out_of_memory(error):
                raise
            raise self._failure(outputs, error) from error


@dataclass(frozen=True, repr=False)
class FromDistribution(FamilyLikelihood[Any]):
    """`y ~ function(f)`, any distribution of `torch.distributions` with parameters from outputs f (..., C).

    Train the network with the loss `-likelihood.log_prob(model(x), y).mean()`. Targets are (B,) if the distribution has
    the batch shape (...), or (B, K) if it has the batch shape (..., K), of K targets that are independent given f.

    Predictions are mixtures of `function(f)` over 512 points f of the latent: a lattice for one or two outputs, draws
    in pairs around the mean for more, independent draws with `link=lw.SampledLink()`. A Categorical gives class
    probabilities, and a VonMises circular means and arcs: see `lapwing.likelihoods.MixturePrediction`. `log_prob` of
    many targets at once is too low, since few points lie near all of them: .3 nats for 5 targets if the latent is
    three times as wide as the noise, 28 nats for 20. Each target alone (`quantile`, `mean`) is not affected.
    A file cannot store the function: write `lw.load(path, model, likelihood=likelihood)`.

    Args:
        function: function from outputs f (..., C) to a distribution of batch shape (...) or (..., K). A fit calls it in
            the network's dtype and in float64, so convert its tensors: `torch.eye(2).to(f)`.
        draws: number of draws of y per sample in the fit, for the Fisher information `Λ = E[∇log p ∇log pᵀ]`; a
            support of at most 64 values is summed exactly instead.

    Example:
        >>> import torch, lapwing as lw
        >>> likelihood = lw.FromDistribution(lambda f: torch.distributions.Gamma(f[..., 0].exp(), f[..., 1].exp()))
        >>> x, y = torch.randn(50, 3), torch.rand(50) + 0.1
        >>> posterior = lw.fit(torch.nn.Linear(3, 2).eval(), (x, y), likelihood=likelihood)
        >>> low, high = posterior.predict(x).interval(0.9)
        >>> low.shape, bool((low > 0).all())
        (torch.Size([50]), True)
    """

    function: Callable[[Tensor], dist.Distribution] = field(
        metadata=required(Rule(callable, "a function from outputs to a distribution"), "torch.distributions.Poisson")
    )
    draws: int = option(256, at_least(1))
    name: ClassVar[str] = "distribution"

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return f"FromDistribution({name}, draws={self.draws})"

    def family(self, outputs: Tensor) -> dist.Distribution:
        return self.function(outputs)


@register_likelihood
@dataclass(frozen=True)
class Ordinal(FamilyLikelihood[ClassPrediction]):
    """Ordered classes 0 < 1 < ... < C - 1 by cumulative logits: `P(y > k) = σ(θ_k)` for k = 0 to C - 2.

    The network has C - 1 outputs f, of any values: `θ_0 = f_0` and `θ_k = θ_{k-1} - softplus(f_k)`, which falls in k.
    Train it with the loss `-lw.Ordinal().log_prob(model(x), y).mean()`. Targets are integers (B,). Predictions are
    class probabilities, and Λ is exact. Source: McCullagh 1980, section 2.

    Example:
        >>> import torch
        >>> Ordinal().log_prob(torch.zeros(3, 2), torch.tensor([0, 2, 1])).shape  # three classes
        torch.Size([3])
    """

    name: ClassVar[str] = "ordinal"

    def family(self, outputs: Tensor) -> dist.Categorical:
        """Returns the Categorical; `P(y = k) = σ(θ_{k-1}) σ(-θ_k) σ(f_k)`, since `1 - exp(θ_k - θ_{k-1}) = σ(f_k)`."""
        above = outputs[..., :1] - F.pad(F.softplus(outputs[..., 1:]).cumsum(-1), (1, 0))  # θ (..., C - 1)
        middle = F.logsigmoid(above[..., :-1]) + F.logsigmoid(-above[..., 1:]) + F.logsigmoid(outputs[..., 1:])
        first, last = F.logsigmoid(-above[..., :1]), F.logsigmoid(above[..., -1:])
        return dist.Categorical(logits=torch.cat([first, middle, last], -1))
