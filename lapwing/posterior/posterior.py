"""The posterior, immutable: a Gaussian over the weights, its likelihood, and everything asked of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..covariance import AnyLatent, Covariance, PriorCovariance, has_prior
from ..data.progress import with_progress
from ..errors import LapwingError, check_flag, shown
from ..likelihoods import Likelihood, Link, Prediction
from ..likelihoods.prediction_at_positions import predicted
from ..linalg import check_memory
from ..network.entry import full_precision, outside_modes
from ..network.refusals import check_layers
from ..network.stamp import Stamp
from ..prediction import Way
from ..tangent import Tangent, split
from ..tangent.retry import memory_errors
from .evidence import Diagnosis, LogEvidence, effective_parameters, gain_at_linearised_mode, squared_distance
from .former import penalty
from .latents import latent_of
from .method_info import MethodInfo
from .prior import Prior, check_positive, check_range
from .scale import Scale
from .storage import save

FEWER = (
    "Predict fewer inputs at a time, or fewer outputs by via=lw.Linearized(outputs=10), or pass a smaller memory=... "
    "to lw.fit or lw.load."
)
"""What helps a prediction that runs out of memory."""


@dataclass(frozen=True, repr=False, eq=False)
class Posterior:
    """`θ ~ N(θ̂, Σ)` around a trained network, with its likelihood and prior.

    Made by `lw.fit` or `lw.load`; never changes. The network is used, not copied: it must keep the weights it was
    fitted with. Every use looks at which tensors there are, at torch's write counters, and at up to eight entries of
    each tensor; a write that torch does not count, such as one through `.data`, to other entries goes unnoticed.

    Attributes:
        tangent: the network and its treated blocks.
        covariance: Σ.
        likelihood: with its noise variance.
        prior: δ and μ0.
        statistics: sums over the data that give the log likelihood at any noise.
        samples: n, how many training points were seen.
        data_factor: N/n.
        temperature: τ.
        method: how the posterior was made; `print(posterior.method)` shows the method and its options.
        noise_fixed: whether the user gave σ²; otherwise it is tuned.
        stamp: the state of the network that this is a posterior of.
        history: what the method tells of its fit: numbers by name, such as an objective step by step.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> posterior = lw.fit(torch.nn.Linear(4, 3).eval(), [(x, y)], lw.KFAC())
        >>> posterior.latent(x).covariance.shape, posterior.predict(x).probs.shape
        (torch.Size([32, 3, 3]), torch.Size([32, 3]))
        >>> posterior.with_prior(10.0).prior_precision
        10.0
    """

    tangent: Tangent
    covariance: Covariance
    likelihood: Likelihood
    prior: Prior
    statistics: dict[str, Tensor] = field(repr=False)
    samples: int
    data_factor: float
    temperature: float
    method: MethodInfo
    noise_fixed: bool
    stamp: Stamp = field(repr=False)
    history: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    updating: ClassVar[Callable[[Posterior, Any, Any, bool, bool | None], Posterior]]
    """What `update` calls. `fitting/update.py` puts it here, since imports go downwards."""

    def __repr__(self) -> str:
        """One line; the network and its blocks are under `model` and `print(posterior.tangent.coverage)`."""
        precision, parameters = self.prior_precision, list(self.tangent.parameters)
        names = ", ".join(parameters[:4]) + (f", ... {len(parameters)} parameters" if len(parameters) > 4 else "")
        facts = [repr(self.likelihood)]
        if isinstance(precision, float):
            facts.append(f"prior_precision={precision:.4g}")
        elif precision is not None:
            facts.append(f"prior_precision=one for each of {len(precision)} blocks")
        facts += [
            f"{name}={getattr(self, name):g}" for name in ("data_factor", "temperature") if getattr(self, name) != 1
        ]
        return (
            f"<Posterior by {self.method} over {self.tangent.size:,} weights of {type(self.model).__name__} ({names}), "
            f"{self.samples:,} samples, {', '.join(facts)}>"
        )

    @property
    def tuned(self) -> bool:
        """Whether both δ and σ² are the user's."""
        return self.prior.fixed and self.noise_fixed

    @property
    def model(self) -> torch.nn.Module:
        """The network that this is a posterior of: yours, for SWAG and MeanField a copy with other weights."""
        return self.tangent.model

    @property
    def prior_precision(self) -> float | dict[str, float] | None:
        """δ: one number where all blocks agree, else {block: number}; None for a covariance without a prior."""
        if self.covariance.precision is None:
            return None
        values = self.prior.precision.tolist()
        if all(value == values[0] for value in values):
            return values[0]
        return {block.name: value for block, value in zip(self.tangent.blocks, values, strict=True)}

    @property
    def noise_variance(self) -> float | None:
        """σ² of a Gaussian likelihood, else None."""
        return self.likelihood.noise_variance

    @property
    def logit_temperature(self) -> float | None:
        """T of a classifier's likelihood, which divides the mean of the logits in predictions, else None."""
        return self.likelihood.logit_temperature

    @property
    def scale(self) -> Scale:
        """The factors of the likelihood and of the curvature, at this posterior's n, N, τ and σ²."""
        return Scale(self.samples, self.samples * self.data_factor, self.temperature, self.noise_variance)

    @outside_modes
    def at(self, precision: Tensor, noise_variance: float | None) -> Posterior:
        """Returns the posterior at another prior precision (n_blocks,) and noise; the curvature is kept."""
        likelihood = self.likelihood.with_noise_variance(noise_variance)
        assert not likelihood.needs_noise  # σ² = None would count as 1
        scale = self.scale.at(noise_variance).of_curvature
        covariance = self._prior_covariance("prior precision").with_prior(precision, scale)
        return replace(
            self, covariance=covariance, likelihood=likelihood, prior=replace(self.prior, precision=precision)
        )

    def with_noise(self, noise_variance: float | None) -> Posterior:
        """Returns the posterior at another noise variance; a covariance that chose its own prior stays as it is."""
        if has_prior(self.covariance):
            return self.at(self.prior.precision, noise_variance)
        return replace(self, likelihood=self.likelihood.with_noise_variance(noise_variance))

    @outside_modes
    def with_prior(
        self, prior_precision: float | Mapping[str, float], noise_variance: float | None = None
    ) -> Posterior:
        """Returns the posterior under another prior precision, and noise variance if given.

        Subspace methods keep their span; to choose it anew, fit anew.

        Args:
            prior_precision: δ, a number or {block or parameter pattern: number}.
            noise_variance: σ², or None to keep it.

        Returns:
            A new posterior; this one is unchanged.

        Raises:
            LapwingError: for numbers that are not positive, or weights that changed since the fit.
        """
        self._check_network()
        if not isinstance(prior_precision, Mapping):
            check_positive("prior_precision", prior_precision, "with_prior(10.0)")
        if noise_variance is not None:
            check_positive("noise_variance", noise_variance, "with_prior(10.0, noise_variance=0.1)")
        prior = Prior.read(self.tangent, prior_precision)
        noise = self.noise_variance if noise_variance is None else noise_variance
        if noise is not None:
            check_range("noise variance", torch.tensor(noise, dtype=torch.float64), self.tangent.dtype)
        return self.at(prior.precision, noise)

    def with_defaults(self) -> Posterior:
        """Returns the posterior with δ = 1 and σ² the mean squared residual where they were not given."""
        noise = self.noise_variance if self.noise_fixed else self.likelihood.residual_variance(self.statistics)
        return self.at(self.prior.precision, noise)

    @cached_property
    @outside_modes
    def log_evidence(self) -> LogEvidence:
        """The evidence as a function of prior precision and noise variance, which tuning maximises.

        Raises:
            LapwingError: if the structure has no prior.
        """
        if self.method.after_former:
            raise LapwingError(
                "The evidence of a posterior after a former one is not defined here: its curvature is of all data, "
                "each at the weights of its time. Compare such posteriors on held-out data, by lw.compare."
            )
        covariance = self._prior_covariance("evidence")
        distance = squared_distance(self.tangent, self.prior)
        return LogEvidence(covariance, self.likelihood, self.statistics, self.scale, distance)

    @outside_modes
    def log_marginal_likelihood(
        self,
        *,
        lower_bound: bool = False,
        linearised_mode: bool = False,
        loader: Iterable[Any] | None = None,
        sample_weights: bool = False,
    ) -> float:
        """Returns the Laplace evidence in nats, all constants of the likelihood included.

        `log Z = log p(y|θ̂) - 1/2 (θ̂-μ0)ᵀΔ(θ̂-μ0) - 1/2 logdet(I + Δ^(-1/2) G Δ^(-1/2))`.

        Under a temperature the likelihood's part is divided by τ, and with `data_size` multiplied by N/n.

        Args:
            lower_bound: for subspaces, subtract half the trace of the curvature outside the subspace: a lower bound of
                Full's evidence that grows with the subspace. Needs a fit with `tune=lw.Evidence()`.
            linearised_mode: add `1/2 gᵀΣg`, g the gradient of the log joint at θ̂: exact for the linearised model also
                where θ̂ is not its mode. Needs the training `loader` again.
            loader: the training data.
            sample_weights: whether its batches hold sample weights, as in the fit.

        Returns:
            log Z.

        Raises:
            LapwingError: if the structure has no prior, or the loader is missing.

        Cost: O(P) or less; one pass over the data with `linearised_mode`.
        """
        self._check_network()
        for name, flag in {"lower_bound": lower_bound, "linearised_mode": linearised_mode}.items():
            check_flag("log_marginal_likelihood", name, flag)
        check_flag("log_marginal_likelihood", "sample_weights", sample_weights)
        value = self.log_evidence(self.prior.precision, self.noise_variance, lower_bound=lower_bound)
        if linearised_mode:
            if loader is None:
                raise LapwingError(
                    "The evidence at the linearised mode needs the training data. Write "
                    "posterior.log_marginal_likelihood(linearised_mode=True, loader=loader)."
                )
            value = value + gain_at_linearised_mode(self, loader, sample_weights)
        return float(value)

    @memory_errors("The prediction", FEWER)
    def latent(self, x: Any, via: Way | None = None, joint: bool = False, *, progress: bool | None = None) -> AnyLatent:
        """Returns the latent distribution of the outputs f(x).

        Args:
            x: a batch of inputs: a tensor, NumPy array or pandas frame, where an array of floats (B,) is one input per
                sample; or a loader or Dataset. `lw.Uncertain(x, variance)` replaces any tensor that is
                measured.
            via: the way through the network; None is `lw.Linearized()`, with `draws=64` for more than 1 000 outputs
                where more than the last layer is treated.
            joint: keep covariances across inputs: `.covariance` is then (B, C, B, C), whose memory is not the budget's.
            progress: show a bar over a loader's batches; None shows one on a terminal or in a notebook.

        Returns:
            `.mean .variance .std` (B, C), `.covariance` (B, C, C), `.sample(n)`; differentiable in x where x requires
            gradients. Of outputs with positions mean and variance have the shape of the outputs, and the covariance is
            that of each position, such as (B, T, C, C) or (B, H, W, C, C).

        Raises:
            LapwingError: for bad inputs, or weights that changed since the fit.

        Cost: the way's.
        """
        self._check_network()
        check_flag("latent", "joint", joint)
        return latent_of(self.tangent, self.covariance, x, via, joint, progress)

    @full_precision
    @memory_errors("The prediction", FEWER)
    def predict(
        self,
        x: Any,
        via: Way | None = None,
        link: Link | None = None,
        generator: torch.Generator | None = None,
        *,
        progress: bool | None = None,
    ) -> Prediction:
        """Returns the predictive distribution of y.

        Args:
            x: a batch of inputs or a loader, as in `latent`.
            via: the way through the network; None as in `latent`.
            link: from the latent Gaussian to class probabilities; the likelihood's default when None.
            generator: of links that draw; seed 0 when None.
            progress: show a bar over a loader's batches, as in `latent`.

        Returns:
            Classification: `.probs .confidence .entropy() .mutual_information()`; regression: `.mean .std .variance
            .interval(0.9) .epistemic_variance .aleatoric_variance`; both: `.log_prob(y) .sample(n) .distribution()`. Of
            outputs with positions in their shape, and one number for each position where that is one for each input.

        Raises:
            LapwingError: for bad inputs, or a link that does not fit.

        Cost: the way's, and the link's.
        """
        if generator is not None and not isinstance(generator, torch.Generator):
            raise LapwingError(
                f"generator={shown(generator)} is not a torch.Generator. Write "
                "generator=torch.Generator().manual_seed(0), or leave it out for seed 0."
            )
        return predicted(self.likelihood, self.latent(x, via, progress=progress), link, generator)

    @outside_modes
    def sample(self, n: int, seed: int = 0) -> dict[str, Tensor]:
        """Draws weights `θ ~ N(θ̂, Σ)`.

        Args:
            n: number of draws.
            seed: of the draws.

        Returns:
            parameter name -> (n, *shape), for `torch.func.functional_call`; the model is not written.

        Raises:
            LapwingError: for numbers that are not whole, or weights that changed since the fit.
        """
        for name, value, low in (("n", n, 1), ("seed", seed, 0)):
            if isinstance(value, bool) or not isinstance(value, Integral) or not low <= value < 2**63:
                raise LapwingError(
                    f"{name}={shown(value)} is not a whole number from {low} to 2**63 - 1. Write "
                    "posterior.sample(5, seed=0)."
                )
        self._check_network()
        check_memory(f"posterior.sample({n})", n, self.tangent.size)
        generator = torch.Generator(self.covariance.device).manual_seed(int(seed))
        mean, parameters = self.tangent.mean(), self.tangent.parameters
        deviations = self.covariance.sample(n, generator)
        draws = {name: mean[name] + deviation.to(mean[name]) for name, deviation in deviations.items()}
        return {name: draw.to(parameters[name].dtype) for name, draw in split(self.tangent.blocks, draws).items()}

    @outside_modes
    def diagnose(self) -> Diagnosis:
        """Returns what was fitted, in numbers: sizes, coverage, prior, noise, evidence, effective parameters."""
        effective = evidence = None
        if has_prior(self.covariance):
            effective = effective_parameters(self.covariance, self.prior)
            evidence = None if self.method.after_former else self.log_marginal_likelihood()
        return Diagnosis(
            str(self.method), self.tangent.size, self.samples, self.prior_precision, self.noise_variance,
            evidence, effective, str(self.tangent.coverage),
        )  # fmt: skip

    @memory_errors("The update", "Pass smaller batches, or load the posterior with a smaller memory=... of lw.load.")
    @with_progress
    def update(
        self, loader: Any, *, tune: Any = None, sample_weights: bool = False, progress: bool | None = None
    ) -> Posterior:
        """Returns the posterior of the data so far and of further data, at the same weights.

        `G = G_1 + G_2`, and the likelihood's statistics add as well, so that the result is that of one fit to both. The
        mean stays: train the network further, and fit again, where the new data should move it. Of a subspace the
        directions stay too; a new fit would choose them from all data. Prior precision, noise variance and logit
        temperature are kept, tuned ones too.

        Args:
            loader: the further data alone, in any form that `lw.fit` takes.
            tune: `lw.Evidence()` or `lw.Validation(loader)`, to choose again what the user did not give.
            sample_weights: whether the batches are `(x, y, w)`, as in `lw.fit`.
            progress: show a bar; None shows one on a terminal.

        Returns:
            A new posterior; this one is unchanged.

        Raises:
            LapwingError: for EKFAC, VaLLA and others whose curvature is no such sum, for a fit with `data_size=`, bad
                input, or weights that changed since the fit.

        Cost: one pass over the further data, and the decomposition of the sums. In float32 KFAC's sums are read back
            from their eigenpairs, to float32's rounding.

        Example:
            >>> import torch, lapwing as lw
            >>> x, y = torch.randn(64, 4), torch.arange(64) % 3
            >>> posterior = lw.fit(torch.nn.Linear(4, 3).eval(), (x[:32], y[:32]), lw.KFAC())
            >>> posterior.update((x[32:], y[32:])).samples
            64
        """
        self._check_network()
        return type(self).updating(self, loader, tune, sample_weights, progress)

    def penalty(self, model: torch.nn.Module) -> Tensor:
        """Returns `1/2 (θ - θ̂)ᵀ Σ⁻¹ (θ - θ̂)` at the weights of another network, for the loss of its training.

        With it the loss of further data, `Σ_n -log p(y_n | f(x_n)) + penalty`, is minus the log of the posterior of all
        data so far, in the Laplace approximation: what is known of the former data is kept. A mean loss over N data
        takes `penalty / N`.

        Args:
            model: a network of the same architecture, such as `copy.deepcopy(posterior.model)`, in training or in eval
                mode; gradients flow into its parameters.

        Returns:
            A scalar, with first derivatives only.

        Raises:
            LapwingError: for the posterior's own network, another architecture, a covariance without an inverse (a
                subspace without residual, SWAG), or weights of the posterior that changed since the fit.

        Cost: one product with Σ⁻¹, without a factorisation: O(P) for `Diagonal`, `O I (O + I)` a layer for `KFAC`,
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
        """Writes the posterior (not the network) to one safetensors file, whole or not at all.

        Args:
            path: for instance "posterior.safetensors".

        Raises:
            LapwingError: for a path that cannot be written, or weights that changed since the fit.
        """
        self._check_network()
        save(self, path)

    def _check_network(self) -> None:
        check_layers(self.tangent.model)
        changed = self.stamp.changed(self.tangent.state())
        if changed is not None:
            raise LapwingError(
                f"{changed} of {type(self.tangent.model).__name__} was written, replaced or added after the fit. Fit "
                "again, or load the weights of the fit into the model and use lw.load(path, model)."
            )

    def _prior_covariance(self, what: str) -> PriorCovariance:
        if not has_prior(self.covariance):
            raise LapwingError(f"A posterior by {self.method} has no {what}. Fit again with lw.KFAC().")
        return self.covariance
