"""The likelihood protocol: the functions of p(y | f) that fitting, tuning and prediction call.

A new likelihood without a noise variance extends `NoiselessLikelihood` with a name and four functions; one with a noise
variance extends `Likelihood`. Both classes are abstract. Likelihoods are frozen dataclasses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, cast

import torch
from torch import Tensor

from ..covariance import AnyLatent, has_positions, is_selected
from ..covariance.latent_at_positions import LatentAtPositions
from ..covariance.terms import standard_normal
from ..errors import LapwingError, shown
from ..jacobian.jacobian import Reads
from ..linalg import at_least_float32, cholesky, doubled, seeded
from ..options import Options
from .links import ExactLink, Link, SampledLink
from .prediction_at_positions import PredictionAtPositions
from .predictions import P
from .quadrature import weighted_log_power_mean

Integrals = dict[type[Link], Callable[..., Tensor]]
"""Link class -> function that computes an expectation with a link of this class."""

MOST_RAISED = 0.02
"""Share by which a spread of the weights may raise the sum of mean counts, `E[exp(f)] > exp(E[f])`."""


def apply_weights(values: Tensor, weights: Tensor | None) -> Tensor:
    """Returns values (B, ...) times weights (B,), or None for ones; 0 times an infinite value or NaN is 0."""
    if weights is None:
        return values
    weights = weights.to(values).reshape(-1, *[1] * (values.ndim - 1))
    return torch.where(weights == 0, 0.0, values) * weights


def curvature_weights(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, weights: Tensor | None
) -> Tensor | None:
    """Returns the factors of Λ, (B, 1) per sample or (B, C) per output: target weights times sample weights."""
    of_targets = likelihood.target_weights(outputs, targets)
    if weights is None:
        return of_targets
    return weights[:, None] if of_targets is None else of_targets * weights.to(of_targets)[:, None]


class Likelihood(Options, ABC, Generic[P]):
    """p(y | f) at network outputs f (B, C), a root of its Fisher information Λ, and the predictions.

    Λ = E_{y~p(y|f)}[-∂² log p(y|f)] = root rootᵀ, always at unit noise; a noise variance σ² divides it. Roots have the
    dtype of the outputs, log probabilities at least float32, and statistics float64.

    Example:
        >>> import torch, lapwing as lw
        >>> likelihood: lw.Likelihood = lw.Categorical()
        >>> outputs = torch.randn(8, 3)
        >>> root, p = likelihood.fisher_root(outputs), outputs.softmax(-1)
        >>> torch.allclose(root @ root.mT, torch.diag_embed(p) - p[:, :, None] * p[:, None, :], atol=1e-6)
        True
    """

    name: ClassVar[str]
    """Name for users, such as "categorical"; `lapwing.likelihoods.register_likelihood` registers the class under it."""
    links: ClassVar[tuple[type[Link], ...]] = (SampledLink,)
    """The link classes that `predict` accepts, the default first."""
    tuning_link: ClassVar[Link | None] = None
    """The link for the scores of the many candidates of a tuning, if there is a faster one than the default."""
    activation: ClassVar[str | None] = None
    """Function from outputs to probabilities, "softmax" or "sigmoid"; None if the outputs are not logits."""
    selects_outputs: ClassVar[bool] = False
    """Whether `predict` accepts the latent of selected outputs, as from `lw.Linearized(outputs=10)`."""
    has_closed_width: ClassVar[bool] = False
    """Whether y is Gaussian around f, so `lw.Validation` computes the best factor of its variance in closed form."""
    one_output_per_target: ClassVar[bool] = True
    """Whether output c of the network is for component c of y."""
    by_name: ClassVar[dict[str, Any]] = {}
    """Options that the name of the class means in `lw.fit(..., likelihood=name)`, if they are not the defaults."""
    logit_temperature: float | None = None
    """T, which divides the mean of the logits in predictions; None if the outputs are not logits."""
    logit_map: tuple[float, ...] = ()
    """Rows [W, b] of the affine map of the logits in predictions; () means none."""
    regressions: ClassVar[Mapping[Any, Any]] = {}
    """The parts with normal or Student t noise: the likelihood itself with the key None, or heads of `lw.Joint`."""
    head_numbers: ClassVar[Mapping[str, tuple[float | None, ...]]] = {}
    """Each head's σ², T, and σ² in the curvature if lapwing estimated it, or None; empty except for `lw.Joint`."""
    left_out_decides: ClassVar[Literal["noise", "spread"] | None] = None
    """What left-out training targets decide: the noise of `noise_candidates`, or the spread of outputs that hold the
    noise. `residuals` says how far outputs are from targets."""
    features_read: ClassVar[str | None] = None
    """The block whose inputs are features of the noise; "" for the outputs, and None for no features."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Resets the inherited `fisher_parts` of a class that defines only a new `fisher_root`."""
        super().__init_subclass__(**options)
        if "fisher_root" in vars(cls) and "fisher_parts" not in vars(cls):
            cls.fisher_parts = Likelihood.fisher_parts  # type: ignore[method-assign]

    @property
    def default_link(self) -> Link:
        """The link for a Gaussian latent if `predict` gets None."""
        return self.links[0].default()

    def units(self, outputs: int) -> Tensor:
        """Returns for each output (C,) the first output of the same unit. All logits share one, and nothing else."""
        return torch.arange(outputs) if self.activation is None else torch.zeros(outputs, dtype=torch.int64)

    def open_heads(self, outputs: int) -> Iterable[Any]:
        """Returns the keys in `heads` of the outputs whose residuals decide a noise before the curvature is formed."""
        return ()

    def target_shape(self, outputs: int) -> tuple[int, ...]:
        """Returns the shape of one target for C outputs: (K,), or () for an integer label."""
        return (outputs,)

    def classifies(self, outputs: int) -> bool:
        """Whether y is a class, or several labels: then a default fit treats the last layer; not for one yes or no."""
        return not self.target_shape(outputs) or (self.activation is not None and outputs > 1)

    @abstractmethod
    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises if targets do not fit outputs (B, C): NaN, or a wrong range, shape, dtype or device."""

    def labelled(self, targets: Tensor) -> Tensor | None:
        """Returns a mask of the targets that count, in their shape; None if all of them count."""
        return None

    def known_share(self, targets: Tensor, counted: Tensor | None) -> Tensor | None:
        """Returns the share of each row's targets that counts, (B,); None means all. `counted` is their `labelled`."""
        if counted is not None:
            return counted.flatten().float()
        known = ~targets.isnan() if getattr(self, "missing", False) else None
        return None if known is None else known.reshape(len(known), -1).float().mean(1)

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns `log p(y|f)` with all constants, (B,), without a check of the targets."""

    @abstractmethod
    def statistics(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
        """Returns float64 sums over samples that suffice for `log_likelihood` at any noise variance.

        Sample n counts `weights[n]` times; None for weights (B,) means ones.
        """

    def ratios(self, like: Tensor) -> Tensor:
        """Returns the factor of σ² of each target, (K,) or (B, K), for outputs (B, C): ones if all have equal noise."""
        return like.new_ones(like.shape[-1])

    @property
    def plain(self) -> Likelihood:
        """The likelihood of predictions, without options of the loss such as class weights and label smoothing."""
        return self

    def target_weights(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Returns factors of Λ from the targets: w (B, 1), or (B, C) for `diag(√w) Λ diag(√w)`; None for ones.

        A weight of 0 leaves a sample, or one of its outputs, out of the curvature.
        """
        return None

    def weighs(self, counted: Tensor | None) -> bool:
        """Whether `target_weights` may differ from None, if `labelled` returned `counted` for the targets.

        Each batch calls it once, so that its chunks need not read the targets again.
        """
        return True

    @abstractmethod
    def log_likelihood(self, statistics: dict[str, Tensor], noise_variance: Tensor | None = None) -> Tensor:
        """Returns the sum over data of `log p(y|f)` from sums of `statistics` over batches, a float64 scalar.

        It is differentiable in σ², the noise variance; None means the likelihood's own.
        """

    @abstractmethod
    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Returns a root (B, C, R) with `root rootᵀ = Λ` at unit noise; R is arbitrary."""

    def fisher_parts(self, outputs: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Returns the diagonal (B, C) of Λ at unit noise, and v (B, C) with entries `-v_i v_j` of Λ off the diagonal.

        v is None if Λ is diagonal, and the result is None if Λ has another form. A layer that gives the outputs needs
        only these parts: C entries per sample instead of the C² of a root.
        """
        return None

    def sampled_fisher_root(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Returns a column r (B, C, 1) with `E[r rᵀ] = Λ` at unit noise, for fits with more than 1 000 outputs.

        It is the root times a standard normal column. Override it if a draw is cheaper than the root: `y - p` for a y
        drawn from p needs no tensor (B, C, R).
        """
        parts = self.fisher_parts(outputs)
        if parts is not None and parts[1] is None:
            roots = parts[0].sqrt()
            return (roots * standard_normal(roots.shape, roots, generator)).unsqueeze(-1).to(outputs.dtype)
        root = self.fisher_root(outputs)
        return root @ standard_normal((len(root), root.shape[-1], 1), root, generator)

    @property
    @abstractmethod
    def noise_variance(self) -> float | None:
        """σ², or None if the likelihood has none or if it is still to be tuned."""

    def noise_candidates(self) -> Sequence[Likelihood[P]]:
        """Returns this likelihood at other values of a number of its noise, of which held-out data choose one."""
        return ()

    def raised(self, prediction: Any) -> Tensor | None:
        """Returns means of y (B, C), whose sum over the data a spread of the weights must not change much, or None."""
        return None

    def most_raised(self, total: float, rows: float) -> float:
        """Returns by how much a spread may change the sum of `raised`, which is `total` for the network alone."""
        return MOST_RAISED * total

    def with_dispersion(self, statistics: dict[str, Tensor]) -> tuple[Likelihood[P], float]:
        """Returns the likelihood whose predictions vary as much as its statistics show, and its τ: see `Poisson`."""
        return self, 1.0

    def dispersion_temperature(self, statistics: dict[str, Tensor]) -> float:
        """Returns the factor of τ that the noise of the likelihood asks for."""
        return 1.0

    def with_further(self, former: dict[str, Tensor], whole: dict[str, Tensor]) -> tuple[Likelihood[P], float]:
        """Returns the likelihood if further data join the former ones, by both statistics, and the factor of its τ."""
        return self, 1.0

    def of_statistics(self, statistics: dict[str, Tensor]) -> Likelihood[P]:
        """Returns the likelihood that computed these statistics: without noise ratios if these were tuned later."""
        return self

    @property
    def needs_noise(self) -> bool:
        """Whether the likelihood has a σ² that is still to be tuned."""
        return self.noise_variance is None

    @abstractmethod
    def residual_variance(self, statistics: dict[str, Tensor]) -> float | None:
        """Returns the σ² of highest likelihood for summed statistics, the start of tuning; None without a σ²."""

    @abstractmethod
    def with_noise_variance(self, noise_variance: float | None) -> Likelihood[P]:
        """Returns the likelihood at another σ²."""

    def with_logit_temperature(self, logit_temperature: float | None) -> Likelihood[P]:
        """Returns the likelihood at another T; raises if a number is given and the outputs are not logits."""
        if logit_temperature is not None:
            raise LapwingError(
                f"The {self.name} likelihood has no logit temperature. Leave out "
                f"logit_temperature={shown(logit_temperature)}, an option of lw.Categorical and lw.Bernoulli."
            )
        return self

    @property
    def uncalibrated(self) -> Likelihood[P]:
        """The likelihood at T = 1, without a map of the logits."""
        return self.with_logit_temperature(None)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns `∇_f log p(y|f)`, (B, C), in the dtype of the outputs, for targets that `check` accepts."""
        self.check(outputs, targets)
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            return torch.autograd.grad(self.log_prob(leaf, targets).sum(), leaf)[0]

    def reads(self, outputs: int) -> Reads:
        """Returns how much of the covariances of C outputs the default link reads."""
        link = self.default_link
        one = link.closed_form and outputs == 1
        return "variances" if one or not self.reads_covariance(link) else "covariances"

    def reads_covariance(self, link: Link) -> bool:
        """Whether a link of this likelihood reads more than the mean and variances of a Gaussian latent."""
        return link.reads_covariance

    @abstractmethod
    def predict(self, latent: AnyLatent, link: Link | None = None, generator: torch.Generator | None = None) -> P:
        """Returns the distribution of y under a latent: a Gaussian over the outputs, or outputs under weight draws.

        Args:
            latent: the latent.
            link: an instance of one of `links`. None means `default_link`, or for weight draws their average.
            generator: random generator for links that draw; None means seed 0.
        """

    def columns(self, key: Any, outputs: int) -> Any:
        """Returns the indices of a part's outputs, for C outputs in all."""
        return slice(None)

    def at_features(self, prediction: Any, features: Tensor | None) -> Any:
        """Returns a prediction of this likelihood with the noise that a tuning has fitted; here the prediction itself.

        `features` (N, F) belong to the block `features_read`, with a row for each row of the prediction.
        """
        return prediction

    def predict_positions(
        self, latent: LatentAtPositions, link: Link | None = None, generator: torch.Generator | None = None
    ) -> P:
        """Returns the distribution of y (B T, C) at all positions."""
        return self.predict(latent.rows, link, generator)

    def predicted(
        self,
        latent: AnyLatent,
        link: Link | None = None,
        generator: torch.Generator | None = None,
        features: Tensor | None = None,
    ) -> P:
        """Returns `predict`, with the noise `at_features`, and with positions in the shape of the outputs."""
        if not has_positions(latent):
            return self.at_features(self.predict(latent, link, generator), features)
        rows = self.at_features(self.predict_positions(latent, link, generator), features)
        return cast(P, PredictionAtPositions(rows, latent))  # with the attributes of P

    def log_power_mean(
        self,
        mean: Tensor,
        covariance: Tensor,
        targets: Tensor,
        alpha: float = 1.0,
        noise_variance: Tensor | None = None,
        generator: torch.Generator | None = None,
        link: Link | None = None,
    ) -> Tensor:
        """Returns `1/α log E[p(y|f)^α]` under `f ~ N(mean, covariance)`, or `E[log p(y|f)]` at α = 0.

        This is the data term of variational objectives with α-divergences, (B,). VaLLA uses α = 1 (its appendix D),
        where it is the log predictive probability. It is differentiable in mean and covariance, and for Gaussian noise
        in σ².

        Args:
            mean: means of the outputs, (B, C).
            covariance: covariances of each input's outputs, (B, C, C).
            targets: y, already checked.
            alpha: α, at least 0.
            noise_variance: σ², a scalar; None means the likelihood's own.
            generator: random generator for draws; None means seed 0.
            link: one of `integrals`; None means the first of them, which is exact if that is cheap. Monte Carlo takes
                time O(B C³ + draws B C²).
        """
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0.0 <= alpha < math.inf:
            raise LapwingError(
                f"A power mean needs a finite alpha of at least 0, not alpha={shown(alpha)}. Write alpha=1.0 for the "
                "predictive density, or alpha=0.0 for the expected log likelihood."
            )
        if noise_variance is not None and self.noise_variance is None and not self.needs_noise:
            self.with_noise_variance(float(noise_variance))  # raises
        integrals = self.integrals(mean.shape[-1], alpha)
        chosen = next(iter(integrals))() if link is None else link
        for kind, integral in integrals.items():
            if isinstance(chosen, kind):
                return integral(
                    chosen, mean, covariance, targets, alpha, noise_variance=noise_variance, generator=generator
                )
        raise self._refusal(f"take its power mean of alpha={alpha}", link, integrals)

    def integrals(self, outputs: int, alpha: float) -> Integrals:
        """Returns the link classes that `log_power_mean` can use for C outputs, the preferred one first.

        Each maps to its function of the link, mean, covariance, targets and α, with the keyword arguments
        `noise_variance` and `generator`.
        """
        return {SampledLink: self._power_mean_of_draws}

    def _power_mean_of_draws(
        self,
        link: SampledLink,
        mean: Tensor,
        covariance: Tensor,
        targets: Tensor,
        alpha: float,
        noise_variance: Tensor | None,
        generator: torch.Generator | None,
    ) -> Tensor:
        """Returns `1/α log 1/S Σ_s p(y|f_s)^α` over draws `f_s = m + L ε_s`, `K = L Lᵀ`; biased down by O(α/S)."""
        likelihood = self if noise_variance is None else self.with_noise_variance(float(noise_variance))
        mean = at_least_float32(mean)
        root = cholesky(covariance.double()).to(mean.dtype)
        noise = standard_normal((link.draws, *mean.shape), mean, seeded(generator, mean.device))
        outputs = mean + torch.einsum("bcd,sbd->sbc", root, noise)
        repeated = targets.expand(link.draws, *targets.shape).flatten(0, 1)
        logs = likelihood.log_prob(outputs.flatten(0, 1), repeated).reshape(link.draws, -1)  # (S B,) -> (S, B)
        return weighted_log_power_mean(logs, logs.new_full((link.draws, 1), -math.log(link.draws)), alpha, 0)

    def choose_link(self, latent: AnyLatent, link: Link | None) -> Any:
        """Returns the link to use; None means the default. Raises if it does not fit the likelihood or the latent."""
        if not self.selects_outputs and is_selected(latent):
            raise LapwingError(
                f"The {self.name} likelihood needs all outputs of an input in their order, and "
                "lw.Linearized(outputs=...) selects some. Leave outputs= out, or use posterior.latent(x, via=...)."
            )
        drawn = latent.draws is not None
        usable = [accepted for accepted in self.links if accepted.accepts_draws or not drawn]
        if link is None:
            return usable[0].default()
        if isinstance(link, tuple(usable)):
            return link
        kind = "a latent made of weight draws" if drawn else "a Gaussian latent"
        raise self._refusal(f"turn {kind} into a prediction", link, usable)

    def _refusal(self, what: str, link: object, accepted: Iterable[type[Link]]) -> LapwingError:
        wrong = f"{link.__name__} (a class, not an instance)" if isinstance(link, type) else shown(link)
        names = " or ".join(f"lw.{kind.__name__}()" for kind in accepted if kind is not ExactLink)
        remedy = f"Write link={names}, or leave link=None." if names else "Leave link=None."
        return LapwingError(f"The {self.name} likelihood cannot {what} with link={wrong}. {remedy}")


class NoiselessLikelihood(Likelihood[P]):
    """A likelihood without a noise variance. Its only statistic is the log likelihood."""

    noise_variance = None
    needs_noise = False

    def statistics(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
        """Returns `{"log_likelihood": Σ w log p(y|f)}`, a float64 scalar."""
        outputs = doubled(outputs)
        logs = self.log_prob(outputs, targets.to(outputs.device))
        return {"log_likelihood": apply_weights(logs, weights).sum()}

    def log_likelihood(self, statistics: dict[str, Tensor], noise_variance: Tensor | None = None) -> Tensor:
        return statistics["log_likelihood"]

    def residual_variance(self, statistics: dict[str, Tensor]) -> None:
        return

    def with_noise_variance(self, noise_variance: float | None) -> Likelihood[P]:
        if noise_variance is not None:
            raise LapwingError(
                f"The {self.name} likelihood has no noise variance. Leave out noise_variance={shown(noise_variance)}, "
                "or write `likelihood=lw.Gaussian(noise_variance=...)` for real targets."
            )
        return self
