"""The posterior, immutable: a Gaussian over the weights with its likelihood, for predictions and evidence."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic

import torch
from torch import Tensor

from ..covariance import AnyLatent, Covariance, has_positions, has_prior
from ..data.frames import Columns
from ..data.progress import with_progress
from ..display import Displayed
from ..errors import LapwingError, check_flag
from ..likelihoods import Likelihood, Link, P
from ..linalg import check_draws, check_range
from ..methods.prior import Prior
from ..methods.problem import Scale
from ..network.entry import outside_modes
from ..network.stamp import Stamp
from ..options import SEED, Rule, check_argument, instance_of, positive
from ..prediction import Aim, Quantity, Scaled, Way
from ..prediction.linearized import EXACT
from ..prediction.quantities import quantity
from ..prediction.weight_draws import KeptDraws, deviations_of
from ..tangent import Tangent, split
from ..tangent.retry import memory_errors
from .evidence import Diagnosis, LogEvidence, effective_parameters, gain_at_linearised_mode, squared_distance
from .explanations import Explanation, explained, influence, value
from .further_data import penalty, updated
from .latents import latents_of
from .method_info import MethodInfo
from .storage import save

SMALLER_PREDICTION = (
    "Predict fewer inputs at a time, or fewer outputs by via=lw.Linearized(outputs=10), or pass a smaller memory=... "
    "to lw.fit or lw.load."
)  # advice if a prediction runs out of memory


@dataclass(frozen=True, repr=False, eq=False)
class Posterior(Displayed, Generic[P]):
    """`θ ~ N(θ̂, Σ)` around a trained network, with its likelihood and prior.

    `lw.fit` and `lw.load` make posteriors, which never change. A posterior uses the network without a copy, so the
    network must keep the weights of the fit. Every call compares the set of tensors, torch's write counters, and eight
    entries of each tensor (all entries if it has at most 64) with the fit. It does not notice a write to other entries
    that torch does not count, such as a write through `.data`.

    Attributes:
        tangent: the network and its treated blocks.
        covariance: Σ.
        likelihood: the likelihood with its noise variance.
        prior: δ and μ0.
        samples: n, number of samples in the curvature, including updates; only the first ones after
            `lw.EarlyStopping`.
        data_factor: N/n; for `lw.SubsetOfData` n is the number of samples of the loader here.
        temperature: τ; if the user gave none, the mean sample weight in a regression whose σ² was tuned, and the
            dispersion φ of counts.
        method: how the posterior was made; `print(posterior.method)` shows the method and its options.
        columns: names of the columns of the frames of the fit; later frames are read in their order.
        aim: the way and the link for which held-out data chose the numbers: `aim.via` and `aim.link`; or None.
        history: tensors by name that the method reports about its fit, such as the objective at each step.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> posterior = lw.fit(torch.nn.Linear(4, 3).eval(), [(x, y)], lw.KFAC())
        >>> posterior.latent(x).covariance.shape, posterior.predict(x).probs.shape
        (torch.Size([32, 3, 3]), torch.Size([32, 3]))
        >>> posterior.with_prior(10.0).prior_precision
        10.0
    """

    _internal = frozenset({"at", "noise_fixed", "scale", "stamp", "statistics", "with_defaults", "with_noise"})

    tangent: Tangent
    covariance: Covariance
    likelihood: Likelihood[P]
    prior: Prior
    statistics: dict[str, Tensor]  # sums over the data, from which log p(y|θ̂) follows at any noise variance
    samples: int
    data_factor: float
    temperature: float
    method: MethodInfo
    noise_fixed: bool  # whether the user gave σ²; otherwise it is tuned
    stamp: Stamp  # fingerprint of the network's state at the fit
    history: Mapping[str, Tensor] = field(default_factory=dict)
    columns: Columns = ()
    aim: Aim | None = None

    def __repr__(self) -> str:
        """One line; `model` is the network, and `print(posterior.tangent.coverage)` lists its blocks."""
        precision, parameters = self.prior_precision, list(self.tangent.parameters)
        names = ", ".join(parameters[:4]) + (f", ... {len(parameters)} parameters" if len(parameters) > 4 else "")
        size = self.tangent.size  # a complex weight counts twice
        every = sum(weight.numel() * (1 + weight.is_complex()) for weight in self.model.parameters())
        weights = f"all {size:,} weights" if size == every else f"{size:,} of {every:,} weights"
        default = f", the default for {self.method.rule}" if self.method.rule else ""
        facts = [repr(self.likelihood)]
        if isinstance(precision, float):
            facts.append(f"prior_precision={precision:.4g}")
        elif precision is not None:
            facts.append(f"prior_precision of {len(precision)} blocks")
        factors = {"data_factor": self.data_factor, "temperature": self.temperature}
        facts += [f"{name}={factor:g}" for name, factor in factors.items() if factor != 1]
        if self.method.tuning is not None:
            facts.append(f"tuned by {self.method.tuning.partition('(')[0]}")
        if self.aim is not None and self.aim.via is not None:
            facts.append(f"predictions by {self.aim.via}")
        return (
            f"<Posterior by {self.method} over {weights} of {type(self.model).__name__} ({names}){default}, "
            f"{self.samples:,} samples, {', '.join(facts)}>"
        )

    @property
    def tuned(self) -> bool:
        """Whether a tuning chose δ, σ² or the logit temperature."""
        return self.method.tuning is not None

    @property
    def model(self) -> torch.nn.Module:
        """The network of the posterior: the user's own, or for SWAG and MeanField a copy with other weights."""
        return self.tangent.model

    @property
    def prior_precision(self) -> Any:
        """δ: one number if it is equal in all blocks, else {block: number}; None if the covariance has no prior."""
        if self.covariance.precision is None:
            return None
        values = self.prior.precision.tolist()
        if all(value == values[0] for value in values):
            return values[0]
        return {block.name: value for block, value in zip(self.tangent.blocks, values, strict=True)}

    @property
    def parameter_precisions(self) -> dict[str, float]:
        """δ of each treated parameter, by its name: `Σ δ/2 |θ|²` over these is the penalty of a loss summed over rows.

        Raises:
            LapwingError: if the covariance has no prior.
        """
        if self.covariance.precision is None:
            raise self._without("prior precision")
        pairs = zip(self.tangent.blocks, self.prior.precision.tolist(), strict=True)
        return {name: value for block, value in pairs for name in block.parameters}

    @property
    def noise_variance(self) -> float | Any:
        """σ² of the likelihood, or None if it has none."""
        return self.likelihood.noise_variance

    @property
    def logit_temperature(self) -> float | Any:
        """T, which divides the mean of the logits in predictions, or None if the outputs are not logits."""
        return self.likelihood.logit_temperature

    @property
    def scale(self) -> Scale:
        """The factors of the likelihood and of the curvature, at this posterior's n, N, τ and σ²."""
        return Scale(self.samples, self.samples * self.data_factor, self.temperature, self.noise_variance)

    @outside_modes
    def at(self, precision: Tensor | float, noise_variance: float | None = None) -> Posterior[P]:
        """Returns the posterior at another δ (n_blocks,), or one number for all blocks, with the same curvature.

        None keeps the noise variance.
        """
        likelihood = self.likelihood if noise_variance is None else self.likelihood.with_noise_variance(noise_variance)
        precision = precision if isinstance(precision, Tensor) else torch.full_like(self.prior.precision, precision)
        assert not likelihood.needs_noise  # σ² = None would count as 1
        scale = replace(self.scale, noise_variance=likelihood.noise_variance).of_curvature
        if not has_prior(self.covariance):
            raise self._without("prior precision")
        covariance = self.covariance.with_prior(precision, scale)
        prior = replace(self.prior, precision=precision)
        return replace(self, covariance=covariance, likelihood=likelihood, prior=prior)

    def with_noise(self, noise_variance: float | None) -> Posterior[P]:
        """Returns the posterior at another noise variance; a covariance without a prior does not change."""
        if has_prior(self.covariance):
            return self.at(self.prior.precision, noise_variance)
        return replace(self, likelihood=self.likelihood.with_noise_variance(noise_variance))

    @outside_modes
    def with_prior(
        self, prior_precision: float | Mapping[str, float], noise_variance: float | None = None
    ) -> Posterior[P]:
        """Returns a new posterior with another prior precision and, if given, another noise variance.

        Subspace methods keep their span. Fit again to choose a new one.

        Args:
            prior_precision: δ, a number or {block or parameter pattern: number}.
            noise_variance: σ², for all inputs; None keeps the present one, and noise that the fit found in residuals.

        Raises:
            LapwingError: if a number is not positive, or if the weights have changed since the fit.
        """
        self._check_network()
        if not isinstance(prior_precision, Mapping):
            check_argument("posterior.with_prior", "prior_precision", prior_precision, positive(), "10.0")
        if noise_variance is not None:
            check_argument("posterior.with_prior", "noise_variance", noise_variance, positive(), "0.1")
        prior = Prior.read(self.tangent, prior_precision)
        noise = self.noise_variance if noise_variance is None else noise_variance
        check_range("noise variance", self.likelihood.with_noise_variance(noise).noise_variance, self.tangent.dtype)
        calibrated = self.likelihood != self.likelihood.with_logit_temperature(None)
        others_tuned = calibrated or (noise_variance is None and not self.noise_fixed)
        method = self.method if others_tuned else replace(self.method, tuning=None)
        return replace(self.at(prior.precision, noise), method=method)

    def with_defaults(self) -> Posterior[P]:
        """Returns the posterior without tuning: δ = 1 and σ² the mean squared residual, unless the user gave them."""
        noise = self.noise_variance if self.noise_fixed else self.likelihood.residual_variance(self.statistics)
        return self.at(self.prior.precision, noise)

    @cached_property
    @outside_modes
    def log_evidence(self) -> LogEvidence:
        """The evidence as a function of δ and σ², which tuning maximises; raises if it is not defined."""
        if self.method.after_former:
            raise LapwingError(
                "The evidence is not defined for a posterior whose prior was a former posterior: each part of its "
                "curvature belongs to the weights of its own fit. Compare such posteriors on held-out data with "
                "lw.compare."
            )
        if not has_prior(self.covariance):
            raise self._without("evidence")
        distance = squared_distance(self.tangent, self.prior)
        return LogEvidence(self.covariance, self.likelihood, self.statistics, self.scale.of_likelihood, distance)

    @outside_modes
    def log_marginal_likelihood(
        self,
        *,
        lower_bound: bool = False,
        linearised_mode: bool = False,
        loader: Iterable[Any] | None = None,
        sample_weights: bool = False,
    ) -> float:
        """Returns the Laplace evidence in nats, including all constants of the likelihood.

        `log Z = log p(y|θ̂) - 1/2 (θ̂-μ0)ᵀΔ(θ̂-μ0) - 1/2 logdet(I + Δ^(-1/2) G Δ^(-1/2))`. A temperature divides the
        likelihood's part by τ, and `data_size` multiplies it by N/n.

        Args:
            lower_bound: if True, subtracts half the trace of the curvature outside the subspace of a subspace method.
                The result is a lower bound of Full's evidence that grows with the subspace. It needs a fit with
                `tune=lw.Evidence()`.
            linearised_mode: if True, adds `1/2 gᵀΣg`, where g is the gradient of the log joint at θ̂. The result is
                exact for the linearised model even if θ̂ is not its mode. It needs the training `loader`.
            loader: the training data.
            sample_weights: whether the batches hold sample weights, as in the fit.

        Raises:
            LapwingError: if the covariance has no prior, if the prior was a former posterior, or if the loader is
                missing.

        Cost: O(P) or less; one pass over the data with `linearised_mode`.
        """
        self._check_network()
        flags = {"lower_bound": lower_bound, "linearised_mode": linearised_mode, "sample_weights": sample_weights}
        for name, flag in flags.items():
            check_flag("log_marginal_likelihood", name, flag)
        value = self.log_evidence(self.prior.precision, self.noise_variance, lower_bound=lower_bound)
        if linearised_mode:
            if loader is None:
                raise LapwingError(
                    "The evidence at the linearised mode needs the training data. Write "
                    "posterior.log_marginal_likelihood(linearised_mode=True, loader=loader)."
                )
            value = value + gain_at_linearised_mode(self, loader, sample_weights)
        return float(value)

    @outside_modes
    @memory_errors("The prediction", SMALLER_PREDICTION)
    def latent(self, x: Any, via: Way | None = None, joint: bool = False, *, progress: bool | None = None) -> AnyLatent:
        """Returns the latent distribution of the outputs f(x).

        Args:
            x: a batch of inputs: a tensor, NumPy array or pandas frame, where an array of floats (B,) has one input per
                sample; or a loader or Dataset. `lw.Uncertain(x, variance)` replaces any tensor that was measured with
                an error.
            via: the way through the network. None means `lw.Linearized()`, with `draws=64` if there are more than
                1 000 outputs (of all positions) and more than the last layer is treated.
            joint: if True, keeps covariances between inputs: `.covariance` is (B, C, B, C). The memory budget does not
                limit its size.
            progress: whether to show a bar over a loader's batches; None shows it on a terminal or in a notebook.

        Returns:
            `.mean .variance .std` (B, C), `.covariance` (B, C, C), `.sample(n)`; differentiable in x if x requires
            gradients. If the outputs have positions, mean and variance have the shape of the outputs, and there is one
            covariance for each position, such as (B, T, C, C) or (B, H, W, C, C). A loader whose batches have different
            numbers of positions, such as texts, gives a list with an entry for each batch.

        Raises:
            LapwingError: if the inputs are invalid, or if the weights have changed since the fit.
        """
        self._check_network()
        check_flag("latent", "joint", joint)
        parts = latents_of(self, x, via, joint, progress)
        latents: Any = [latent for latent, _ in parts]
        return latents[0] if len(latents) == 1 else latents

    @outside_modes
    @memory_errors("The prediction", SMALLER_PREDICTION)
    def predict(
        self,
        x: Any,
        via: Way | None = None,
        link: Link | None = None,
        generator: torch.Generator | None = None,
        *,
        progress: bool | None = None,
    ) -> P:
        """Returns the predictive distribution of y.

        Args:
            x: a batch of inputs or a loader, as in `latent`.
            via: the way through the network. None means the way of the tuning, such as
                `lw.Validation(loader, via=lw.MonteCarlo())`, or else is as in `latent`.
            link: the link from the latent Gaussian to class probabilities. None means the link of the tuning, or else
                the default of the likelihood.
            generator: random generator for links that draw; None means seed 0.
            progress: whether to show a bar over a loader's batches, as in `latent`.

        Returns:
            Classification: `.probs .confidence .entropy() .mutual_information()`; regression: `.mean .std .variance
            .interval(0.9) .epistemic_variance .aleatoric_variance`, and `.covariance` (B, C, C) of the targets of an
            input; both: `.log_prob(y) .sample(n) .distribution()`. If the outputs have positions, results have their
            shape, with one value per position instead of per input. A loader whose batches have different numbers of
            positions gives a list with a prediction for each batch.

        Raises:
            LapwingError: if the inputs are invalid, or if the likelihood does not accept the link.

        Cost: the cost of the way plus the cost of the link.
        """
        if generator is not None:
            rule = instance_of("a torch.Generator, or None for seed 0", torch.Generator)
            check_argument("posterior.predict", "generator", generator, rule, "torch.Generator().manual_seed(0)")
        self._check_network()
        likelihood, way = self.likelihood, self.aim.via if self.aim is not None and via is None else via
        parts = latents_of(self, x, way, False, progress, likelihood.features_read)
        if self.aim is not None:
            rows = parts[0][0].rows if has_positions(parts[0][0]) else parts[0][0]
            link = self.aim.link_for(via, link, likelihood, rows, one_layer=self.tangent.treats_one_layer)
        found: Any = [likelihood.predicted(latent, link, generator, features) for latent, features in parts]
        return found[0] if len(found) == 1 else found

    @outside_modes
    @memory_errors("The quantity", "Return fewer numbers, or pass the inputs as a loader of smaller batches.")
    def of(
        self, function: Callable[..., Tensor], data: Any = None, observed: bool = False, via: Scaled | None = None
    ) -> Quantity:
        """Returns any numbers that are computed from the network, with their error: totals, slopes, single weights.

        `q(θ) ≈ q(θ̂) + g (θ - θ̂)` has the covariance `g Σ gᵀ`, where g (q, P) is the gradient of the q numbers.

        Args:
            function: `function(f)` returns a tensor of q numbers. `f(x)` is the network, for one batch of inputs as in
                `latent`, and `f.weight["fc.weight"]` is a weight; one that is not treated has no error.
                With data it is `function(f, batch)`, for each batch as the loader yields it. For classes `f(x)` has the
                logits of the network, not calibrated by held-out data. With a logit temperature write
                `(f(x) / posterior.logit_temperature).softmax(-1)` for probabilities.
            data: a loader, or arrays as in `lw.fit`; the result is the sum over its batches, so return sums, and divide
                a mean by the number of rows yourself.
            observed: True adds the noise of future targets: the error of the same numbers computed from y instead of
                `f(x)`, with `d diag(σ²) dᵀ` for the derivative d of the numbers by the outputs. A row has one noise in
                all calls of f with equal inputs, so `f(x) - f(x)` has none. Equal rows of one call, or of two batches,
                are separate measurements. Numbers without y, such as slopes and weights, have no noise.
            via: `lw.scale_factor(posterior, held_out, of=...)`, whose factor multiplies `g Σ gᵀ`; None means 1.

        Returns:
            `.mean`, `.std` and `.interval(0.9)` in the shape of the result of the function, `.covariance` of shape
            `(*shape, *shape)`, `.sample(n)` of shape `(n, *shape)`.

        Raises:
            LapwingError: if the result has no gradient or a NaN gradient, if the q gradients exceed the memory budget,
                if `observed` and the likelihood has no noise variance (such as classes) or several outputs per target,
                or if the weights have changed since the fit.

        Cost: q backward passes and q products with Σ, for any number of rows; memory for q P numbers and one batch.
            With `observed` a prediction, if the noise depends on the input.

        Source: the delta method; MacKay 1992 for single outputs (A practical Bayesian framework, section 4.1).

        Example:
            >>> import torch, lapwing as lw
            >>> x, y = torch.randn(50, 2), torch.randn(50, 1)
            >>> posterior = lw.fit(torch.nn.Linear(2, 1).eval(), (x, y))
            >>> total = posterior.of(lambda f: f(x).sum(0), observed=True)
            >>> total.std.shape, posterior.of(lambda f: f.weight["weight"]).std.shape
            (torch.Size([1]), torch.Size([1, 2]))
        """
        self._check_network()
        check_flag("of", "observed", observed)
        way = Scaled(EXACT, 1.0) if via is None else via
        factor: Any = way.factor if isinstance(way, Scaled) and way.via == EXACT else None
        rule = Rule(lambda _: isinstance(factor, float), "a way of lw.scale_factor(..., of=)")
        check_argument("posterior.of", "via", way, rule, "None")
        return quantity(self.tangent, self.covariance, self.likelihood, function, data, observed, self.columns, factor)

    @outside_modes
    @with_progress
    @memory_errors("The explanation", SMALLER_PREDICTION)
    def explain(self, x: Any, train: Any = None, novelty: Callable[[Any], Tensor] | None = None) -> Explanation:
        """Returns the parts of the uncertainty at some inputs: noise, layers, novelty, and training rows.

        The share of layer l in the variance `J Σ Jᵀ` of the outputs is `J_l (Σ Jᵀ)_l`.

        Args:
            x: one batch of inputs, as in `latent`.
            train: the training data without shuffling, as in `influence`; None leaves out the rows.
            novelty: a detector, a function of x that returns scores (B,); None leaves out the novelty.

        Returns:
            `.noise` (B, C), `.weights` {layer: (B, C)}, `.novelty` (B,) and `.rows` (B, 5).

        Raises:
            LapwingError: if the outputs have positions, if a loader shuffles the training data, if `novelty` is not a
                detector, or if the weights have changed since the fit.

        Cost: per input one forward pass, C backward passes and C products with Σ; with `train` the cost of `influence`.
        """
        self._check_network()
        return explained(self, x, train, novelty)

    @outside_modes
    @with_progress
    @memory_errors("The influence", SMALLER_PREDICTION)
    def influence(self, train: Any, x: Any, *, progress: bool | None = None) -> Tensor:
        """Returns the change of f(x) if one training row is removed, for each row, without training again.

        `-Cov(f(x), f_i) (I - Λ_i V_i)⁻¹ r_i` with the score `r_i = ∇_f log p(y_i|f_i)`, the Fisher information Λ_i and
        the covariance V_i of row i. It is exact for a linear network at its optimum with Gaussian noise and fixed δ and
        σ², and an approximation for other networks: check a few rows by training without them.

        With a coarse covariance (KFAC, diagonal) effects can be too small. If some `Λ_i V_i` has an eigenvalue of at
        least 1, lapwing warns, and leaves out `(I - Λ_i V_i)⁻¹`. The order of the rows is mostly right.

        A row counts in the fit by its sample weight times `N/(n τ)`, with N of `data_size=` and τ of `temperature=`. So
        with `data_size=` the change is the effect of removing N/n equal rows.

        Args:
            train: the training data, as in `lw.fit`, with sample weights if the fit had them, and without shuffling.
                After a fit over several processes, each process gets the effects of the rows that it passes.
            x: one batch of inputs, as in `latent`.
            progress: whether to show a bar over the batches of the training data, as in `latent`.

        Returns:
            Changes of the outputs, (B, C, n), in their units.

        Raises:
            LapwingError: if the outputs have positions, if a loader shuffles, if sample weights are missing, or if the
                weights have changed since the fit.

        Cost: per row two forward and C + 1 backward passes, and C covariances for each pair of an input and a row.

        Source: Cook and Weisberg 1982, section 3.4, for linear models; Koh and Liang 2017, equation 1, for networks,
            without `(I - Λ_i V_i)⁻¹`.

        Example:
            >>> import torch, lapwing as lw
            >>> x, y = torch.randn(50, 2), torch.randn(50, 1)
            >>> posterior = lw.fit(torch.nn.Linear(2, 1).eval(), (x, y))
            >>> posterior.influence((x, y), x[:3]).shape
            torch.Size([3, 1, 50])
        """
        self._check_network()
        return influence(self, train, x)

    @outside_modes
    @with_progress
    @memory_errors("The value", SMALLER_PREDICTION)
    def value(self, candidates: Any, targets: Any, given: Any = None, *, progress: bool | None = None) -> Tensor:
        """Returns the expected fall of the summed variance of the outputs at `targets` if a candidate is labelled.

        `tr C_ta (C_aa + Λ⁻¹)⁻¹ C_at`, with the covariance C of the outputs and the Fisher information Λ of a label. For
        a linearised network with Gaussian noise the fall does not depend on the label, and this is exact. A label has
        the weight N/(n τ), as each sample of the fit has.

        Args:
            candidates: one batch of n inputs that could be labelled.
            targets: one batch of inputs whose outputs you want to know.
            given: inputs that will be labelled in any case, such as those chosen already; None or no rows means none.
            progress: whether to show a bar over chunks of the candidates, as in `latent`.

        Returns:
            Falls of the variance, (n,), in squared units of the outputs. Label the candidates with the largest value.
            They are differentiable in candidates that require gradients.
            For a batch of k, choose one at a time and pass those chosen before as `given`.

        Raises:
            LapwingError: if the outputs have positions, if the covariance of the given inputs exceeds the memory
                budget, or if the weights have changed since the fit.

        Cost: one forward and C backward passes per candidate, as much per target and given input for each chunk of
            candidates, and the covariances of all pairs.

        Source: MacKay 1992, Information-based objective functions for active data selection, section 4.
        """
        self._check_network()
        return value(self, candidates, targets, given)

    @outside_modes
    def sample(self, n: int, seed: int = 0) -> dict[str, Tensor]:
        """Returns n draws of the weights `θ ~ N(θ̂, Σ)`: parameter name -> `(n, *shape)`. The model keeps its weights.

        `torch.func.functional_call` runs the network at a draw.

        Raises:
            LapwingError: if `n` or `seed` is not a whole number, or if the weights have changed since the fit.
        """
        draws = self._deviations("posterior.sample", n, seed)
        for name, weight in self.tangent.parameters.items():
            draws[name] = draws[name].add_(weight.detach()).to(weight.dtype)
        return self.tangent.native(draws)

    @outside_modes
    def weight_std(self) -> dict[str, Tensor]:
        """Returns the standard deviations of the weights, `√diag Σ`: parameter name -> its shape.

        Weights with a small `|θ̂|/std` can be pruned. The cost is at most one copy of the covariance's tensors.

        Raises:
            LapwingError: if the weights have changed since the fit.
        """
        self._check_network()
        variances = split(self.tangent.blocks, self.covariance.diagonal())
        return {name: variance.clamp_min(0).sqrt() for name, variance in variances.items()}

    @outside_modes
    def sample_function(self, seed: int = 0, n: int | None = None) -> Callable[[Any], Any]:
        """Returns a draw of the function, or n draws: `f(x) = f(x, θ̂) + J(x)(θ - θ̂)` with `θ ~ N(θ̂, Σ)` drawn once.

        So f is the same function at every call and in every batch, and after `save` and `load`. It is differentiable in
        inputs that require gradients. `posterior.sample(n, seed)` returns the weights θ.

        Args:
            seed: seed of the draws.
            n: number of functions; None means one, whose values have no axis for draws.

        Returns:
            A function of inputs as in `latent`: `f(x)` has the outputs (B, C), or (n, B, C), or the shape of outputs
            with positions. For classes they are logits, not calibrated by held-out data.

        Raises:
            LapwingError: if `seed` or `n` is not a whole number, or if the weights have changed since the fit. f raises
                for invalid inputs, and for networks that support neither forward mode nor two backward passes.

        Cost: memory for n draws of the weights; each call about four forward passes, and two more per function.

        Example:
            >>> import torch, lapwing as lw
            >>> x, y = torch.randn(50, 2), torch.randn(50, 1)
            >>> f = lw.fit(torch.nn.Linear(2, 1).eval(), (x, y)).sample_function(seed=1)
            >>> f(x).shape, torch.allclose(f(x)[:3], f(x[:3]))
            (torch.Size([50, 1]), True)
        """
        way = KeptDraws(self._deviations("posterior.sample_function", 1 if n is None else n, seed))

        def values(latent: Any) -> Any:
            if isinstance(latent, list):
                return [values(part) for part in latent]
            return latent.draws[0] if n is None else latent.draws

        return lambda x: values(self.latent(x, way))

    def _deviations(self, caller: str, n: int, seed: int) -> dict[str, Tensor]:
        """Returns n draws of `θ - θ̂`: parameter name -> (n, *shape)."""
        check_draws(caller, "n", n, self.tangent.size)
        check_argument(caller, "seed", seed, SEED, "0")
        self._check_network()
        return deviations_of(self.tangent, self.covariance, int(n), int(seed))

    @outside_modes
    def diagnose(self) -> Diagnosis:
        """Returns sizes, coverage, prior, noise, evidence and the effective number of parameters, as a report."""
        effective = evidence = None
        if has_prior(self.covariance):
            effective = effective_parameters(self.covariance, self.prior)
            evidence = None if self.method.after_former else self.log_marginal_likelihood()
        return Diagnosis(
            str(self.method), self.tangent.size, self.samples, self.prior_precision, self.noise_variance,
            evidence, effective, str(self.tangent.coverage),
        )  # fmt: skip

    @with_progress
    def update(
        self, loader: Any, *, tune: Any = None, sample_weights: bool = False, progress: bool | None = None
    ) -> Posterior[P]:
        """Returns a new posterior, of the former data plus further data, at the same weights.

        `G = G_1 + G_2` (KFAC's factors add, not its G), and the statistics of the likelihood add too. So for Diagonal,
        KFAC and Full the result equals one fit to all data, to rounding, unless the Fisher information is drawn (more
        than 1 000 outputs). The mean stays: if the new data should move it, train the network further and fit again.
        The directions of a subspace, the prior precision, the noise variance, the logit temperature and map and
        `history` stay too, even if all data would change them. The dispersion of counts follows from all residuals, if
        the training residuals of the fit decided on it.

        Args:
            loader: only the further data, in any form that `lw.fit` accepts.
            tune: `lw.Evidence()` or `lw.Validation(loader)`, which chooses again the values that the user did not give.
                If the noise depends on the input, `lw.Validation` keeps how it does and chooses its level and tails;
                `lw.Evidence` replaces it by one noise variance.
            sample_weights: whether the batches are `(x, y, w)`, as in `lw.fit`.
            progress: whether to show a bar; None shows it on a terminal.

        Raises:
            LapwingError: if the curvature is not such a sum (EKFAC, VaLLA, SubsetOfData, SWAG, MeanField, SampledLLA,
                TemperatureScaling), if the fit scaled its data by `data_size=`, if the input is invalid, or if the
                weights have changed since the fit.

        Cost: one pass over the further data, and the decomposition of the sums. In float32 the sums of KFAC are
            restored from their eigenpairs, with float32 rounding.

        Example:
            >>> import torch, lapwing as lw
            >>> x, y = torch.randn(64, 4), torch.arange(64) % 3
            >>> posterior = lw.fit(torch.nn.Linear(4, 3).eval(), (x[:32], y[:32]), lw.KFAC())
            >>> posterior.update((x[32:], y[32:])).samples
            64
        """
        self._check_network()
        return updated(self, loader, tune, sample_weights)

    def penalty(self, model: torch.nn.Module) -> Tensor:
        """Returns `1/2 (θ - θ̂)ᵀ Σ⁻¹ (θ - θ̂)` at the weights of another network, for its training loss.

        The loss of further data plus the penalty, `Σ_n -log p(y_n | f(x_n)) + penalty`, is the negative log posterior
        of all data in the Laplace approximation, so training does not forget the former data. Add `penalty / N` to a
        mean loss over N samples. The penalty is a scalar with first derivatives only.

        Args:
            model: a network of the same architecture, such as `copy.deepcopy(posterior.model)`, in training or in eval
                mode; gradients flow into its parameters.

        Raises:
            LapwingError: if the model is the posterior's own network or has another architecture, if the covariance has
                no inverse (a subspace without residual, SWAG), or if the posterior's weights have changed.

        Cost: one product with Σ⁻¹, without a factorisation: O(P) for `Diagonal`, `O I (O + I)` per layer for `KFAC`,
            O(P²) for `Full`.

        Source: Kirkpatrick et al. 2017 for diagonals; Ritter, Botev and Barber 2018 for Kronecker factors.

        Example:
            >>> import copy, torch, lapwing as lw
            >>> x, y = torch.randn(64, 4), torch.arange(64) % 3
            >>> posterior = lw.fit(torch.nn.Linear(4, 3).eval(), (x, y), lw.KFAC())
            >>> model = copy.deepcopy(posterior.model).train()
            >>> loss = torch.nn.functional.cross_entropy(model(x), y) + posterior.penalty(model) / 64
            >>> loss.backward()
        """
        self._check_network()
        return penalty(self.tangent, self.covariance, model, self.method)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the posterior (not the network) to one safetensors file. An old file is replaced at the very end.

        Raises:
            LapwingError: if the path cannot be written, or if the weights have changed since the fit.
        """
        self._check_network()
        save(self, path)

    def _check_network(self) -> None:
        changed = self.stamp.changed()
        if changed is not None:
            raise LapwingError(
                f"{changed} of {type(self.model).__name__} was written, replaced or added after the fit. Fit "
                "again, or load the weights of the fit into the model and use lw.load(path, model)."
            )

    def _without(self, what: str) -> LapwingError:
        return LapwingError(f"A posterior by {self.method} has no {what}. Fit again with lw.KFAC().")
