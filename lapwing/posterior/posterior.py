"""The posterior, immutable: a Gaussian over the weights, its likelihood, and everything asked of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ..covariance import AnyLatent, Covariance, PriorCovariance
from ..errors import LapwingError, shown
from ..likelihoods import Likelihood, Link, Prediction
from ..linalg import check_memory, total
from ..network import batches
from ..network.autocast import full_precision
from ..network.eager import outside_modes
from ..network.gate import check_mode
from ..network.module_state import walked_once
from ..network.stamp import Stamp
from ..network.tracing import wants_gradient
from ..prediction import Linearized, Uncertain, Way
from ..prediction.uncertain import placed, separate
from ..tangent import Tangent, split
from .diagnosis import Diagnosis
from .evidence import log_joint_gradient
from .prior import Prior, check_range, is_positive
from .saving import write


@dataclass(frozen=True, repr=False)
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
        method: the method's name and options, as text.
        noise_given: whether the user gave σ²; otherwise it is tuned.
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
    method: str
    noise_given: bool
    stamp: Stamp = field(repr=False)
    history: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def assemble(
        cls,
        tangent: Tangent,
        covariance: Covariance,
        likelihood: Likelihood,
        prior: Prior,
        statistics: dict[str, Tensor],
        samples: int,
        data_size: float | None,
        temperature: float,
        method: object,
        history: Mapping[str, Tensor],
    ) -> Posterior:
        """Puts a fit's results together; δ and σ² that are None are still to be tuned."""
        factor = 1.0 if data_size is None else data_size / samples
        if factor < 1:
            raise LapwingError(
                f"Asked for data_size={data_size}, found {samples} samples in the loader; N must be at least as many: "
                "leave data_size out, or give the size of the whole training set."
            )
        given = not likelihood.needs_noise
        posterior = cls(
            tangent, covariance, likelihood, prior, statistics, samples, factor, temperature, repr(method), given,
            Stamp.of(tangent.state()), history,
        )  # fmt: skip
        settled = given and isinstance(covariance, PriorCovariance)
        return posterior.at(prior.precision, likelihood.noise_variance) if settled else posterior

    def __repr__(self) -> str:
        """One line; the network and its blocks are under `model` and `print(posterior.tangent.coverage)`."""
        named, delta = [repr(self.likelihood)], self.prior_precision
        treated = list(self.tangent.parameters)
        shown = ", ".join(treated[:4]) + (f", ... {len(treated)} parameters" if len(treated) > 4 else "")
        if isinstance(delta, float):
            named.append(f"prior_precision={delta:.4g}")
        elif delta is not None:
            named.append(f"prior_precision=one for each of {len(delta)} blocks")
        named += [
            f"{name}={getattr(self, name):g}" for name in ("data_factor", "temperature") if getattr(self, name) != 1
        ]
        return (
            f"<Posterior by {self.method} over {self.tangent.size:,} weights of {type(self.model).__name__} ({shown}), "
            f"{self.samples:,} samples, {', '.join(named)}>"
        )

    @property
    def tuned(self) -> bool:
        """Whether both δ and σ² are the user's."""
        return self.prior.given and self.noise_given

    @property
    def model(self) -> torch.nn.Module:
        """The network that this is a posterior of: yours, or for SWAG and MeanField a copy with other weights."""
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

    def scale_at(self, likelihood: Likelihood) -> float:
        """Returns s, what multiplies the curvature of unit noise: `N/(n σ² τ)`."""
        return likelihood.curvature_scale * self.data_factor / self.temperature

    @outside_modes
    def at(self, precision: Tensor, noise_variance: float | None) -> Posterior:
        """Returns the posterior at another prior precision (n_blocks,) and noise; the curvature is kept."""
        if not isinstance(self.covariance, PriorCovariance):
            raise LapwingError(
                f"Asked for another prior of a {type(self.covariance).__name__}, found that it has none; fit anew with "
                "prior_precision=..., or use lw.KFAC()."
            )
        likelihood = self.likelihood.with_noise_variance(noise_variance)
        covariance = self.covariance.with_prior(precision, self.scale_at(likelihood))
        return replace(
            self, covariance=covariance, likelihood=likelihood, prior=replace(self.prior, precision=precision)
        )

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
        if not isinstance(prior_precision, Mapping) and not is_positive(prior_precision):
            raise LapwingError(
                f"Asked for with_prior({shown(prior_precision)}); a positive finite number is needed: write "
                "with_prior(10.0)."
            )
        if noise_variance is not None and not is_positive(noise_variance):
            raise LapwingError(
                f"Asked for with_prior(noise_variance={shown(noise_variance)}); a positive finite number is needed: "
                f"write with_prior({shown(prior_precision)}, noise_variance=0.1), or leave it out to keep it."
            )
        prior = Prior.read(self.tangent, prior_precision)
        noise = self.noise_variance if noise_variance is None else noise_variance
        if noise is not None:
            check_range("noise variance", torch.tensor(noise, dtype=torch.float64), self.tangent.dtype)
        return self.at(prior.precision, noise)

    def with_defaults(self) -> Posterior:
        """Returns the posterior with δ = 1 and σ² the mean squared residual where they were not given."""
        noise = self.noise_variance if self.noise_given else self.likelihood.residual_variance(self.statistics)
        return self.at(self.prior.precision, noise)

    @cached_property
    def _distance(self) -> Tensor:
        """How far the weights are from the prior's mean, `|θ̂ - μ0|²` (n_blocks,)."""
        means = self.tangent.mean().items()
        return torch.stack([(mean - self.prior.mean[name]).double().square().sum() for name, mean in means])

    def log_evidence(self, precision: Tensor, likelihood: Likelihood, lower_bound: bool) -> Tensor:
        """Returns `log Z` at any prior precision (n_blocks,) and noise; differentiable in the precision.

        See `log_marginal_likelihood`; this is the function that tuning maximises.
        """
        covariance = self.covariance
        assert isinstance(covariance, PriorCovariance)
        scale = self.scale_at(likelihood)
        fit = self.data_factor / self.temperature * likelihood.log_likelihood(self.statistics)
        value = fit - (precision * self._distance).sum() / 2 - covariance.log_det_ratio(precision, scale) / 2
        return value - covariance.evidence_gap(precision, scale) / 2 if lower_bound else value

    @outside_modes
    def log_marginal_likelihood(
        self,
        *,
        lower_bound: bool = False,
        linearised_mode: bool = False,
        loader: Iterable[Any] | None = None,
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

        Returns:
            log Z.

        Raises:
            LapwingError: if the structure has no prior, or the loader is missing.

        Cost: O(P) or less; one pass over the data with `linearised_mode`.
        """
        self._check_network()
        if not isinstance(self.covariance, PriorCovariance):
            raise LapwingError(
                f"Asked for the evidence of a {type(self.covariance).__name__}, found no prior in it; fit with "
                "lw.KFAC()."
            )
        value = self.log_evidence(self.prior.precision, self.likelihood, lower_bound)
        if linearised_mode:
            if loader is None:
                raise LapwingError(
                    "Asked for the evidence at the linearised mode, found no loader; the training data are needed: "
                    "write posterior.log_marginal_likelihood(linearised_mode=True, loader=loader)."
                )
            gradient = log_joint_gradient(self, loader)
            moved = self.covariance.mv(gradient)
            value = value + total((gradient[name] * moved[name]).sum() for name in gradient).double() / 2
        return float(value)

    def latent(self, x: Any, via: Way = Linearized(), joint: bool = False) -> AnyLatent:  # noqa: B008 (frozen)
        """Returns the latent distribution of the outputs f(x).

        Args:
            x: a batch of inputs, or a loader; `lw.Uncertain(x, variance)` in place of any tensor that is measured.
            via: the way through the network.
            joint: keep covariances across inputs: `.covariance` is then (B, C, B, C), whose memory is not the budget's.

        Returns:
            `.mean .variance .std` (B, C), `.covariance` (B, C, C), `.sample(n)`; differentiable in x where x requires
            gradients.

        Raises:
            LapwingError: for bad inputs, or weights that changed since the fit.

        Cost: the way's.
        """
        if not isinstance(via, Way):
            raise LapwingError(
                f"Asked for via={shown(via)}; accepted are lw.Linearized(), lw.MonteCarlo(draws=50) and "
                "lw.Streamlined(): write via=lw.Linearized()."
            )
        with walked_once(self.tangent.model):
            self._check_network()
            return self._latents(x, via, joint)

    def _latents(self, x: Any, via: Way, joint: bool) -> AnyLatent:
        if batches.is_loader(x):
            parts = [self._latent(_inputs_of(batch), via, False) for batch in x]
            if joint or not parts:
                raise LapwingError(
                    f"Asked for latents of a loader with joint={joint}, found {len(parts)} batches; joint covariances "
                    "need all inputs in one batch, and others at least one batch: pass a tensor."
                )
            kind: Any = type(parts[0])
            return kind.concatenate(parts).with_checks()
        return self._latent(batches.inputs_of(x) if isinstance(x, Mapping) else x, via, joint)

    @outside_modes
    def _latent(self, inputs: Any, via: Way, joint: bool) -> AnyLatent:
        inputs = placed(inputs, self.tangent.device)
        values, spreads = separate(inputs)
        if (isinstance(values, Tensor) and not values.ndim) or batches.size(values) == 0:
            raise LapwingError(
                f"Asked for the latent at {batches.describe(values)}, found no samples in it; at least one is needed: "
                "give a single sample as x[None], and leave empty batches out."
            )
        with torch.set_grad_enabled(wants_gradient((values, spreads) if spreads else values)):
            latent = via.latent(self.tangent, self.covariance, inputs, joint)
        if latent.mean.shape[1] != self.tangent.outputs:
            raise LapwingError(
                f"Asked for the {self.tangent.outputs} outputs of {type(self.tangent.model).__name__} at "
                f"{batches.describe(values)}, found outputs of shape {tuple(latent.mean.shape)}; as many as in the fit "
                "are needed: check the shape of the inputs, and give a single sample as x[None]."
            )
        return latent.with_checks()

    @full_precision
    def predict(
        self,
        x: Any,
        via: Way = Linearized(),  # noqa: B008 (frozen)
        link: Link | None = None,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Returns the predictive distribution of y.

        Args:
            x: a batch of inputs, or a loader.
            via: the way through the network.
            link: from the latent Gaussian to class probabilities; the likelihood's default when None.
            generator: of links that draw; seed 0 when None.

        Returns:
            Classification: `.probs .confidence .entropy() .mutual_information()`; regression: `.mean .std .variance
            .interval(0.9) .epistemic_variance .aleatoric_variance`; both: `.log_prob(y) .sample(n) .distribution()`.

        Raises:
            LapwingError: for bad inputs, or a link that does not fit.

        Cost: the way's, and the link's.
        """
        if generator is not None and not isinstance(generator, torch.Generator):
            raise LapwingError(
                f"Asked for predict(generator={shown(generator)}); a torch.Generator is needed: write "
                "generator=torch.Generator().manual_seed(0), or leave it out for seed 0."
            )
        return self.likelihood.predict(self.latent(x, via), link, generator)

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
        for name, value, least in (("n", n, 1), ("seed", seed, 0)):
            if isinstance(value, bool) or not isinstance(value, Integral) or not least <= value < 2**63:
                raise LapwingError(
                    f"Asked for sample({name}={shown(value)}); a whole number from {least} to 2**63 - 1 is needed: "
                    "write posterior.sample(5, seed=0)."
                )
        self._check_network()
        check_memory(f"posterior.sample({n})", n, self.tangent.size)
        generator = torch.Generator(self.covariance.device).manual_seed(int(seed))
        mean, own = self.tangent.mean(), self.tangent.parameters
        drawn = self.covariance.sample(n, generator)
        vectors = {name: mean[name] + draw.to(mean[name].dtype) for name, draw in drawn.items()}
        return {name: value.to(own[name].dtype) for name, value in split(self.tangent.blocks, vectors).items()}

    @outside_modes
    def diagnose(self) -> Diagnosis:
        """Returns what was fitted, in numbers: sizes, coverage, prior, noise, evidence, effective parameters."""
        effective = evidence = None
        if isinstance(self.covariance, PriorCovariance):
            scale = torch.tensor(self.covariance.scale, dtype=torch.float64, requires_grad=True)
            with torch.enable_grad():
                ratio = self.covariance.log_det_ratio(self.prior.precision, scale)
            effective = float(torch.autograd.grad(ratio, scale)[0]) * self.covariance.scale
            evidence = self.log_marginal_likelihood()
        return Diagnosis(
            self.method, self.tangent.size, self.samples, self.prior_precision, self.noise_variance,
            evidence, effective, str(self.tangent.coverage),
        )  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the posterior (not the network) to one safetensors file, whole or not at all.

        Args:
            path: for instance "posterior.safetensors".

        Raises:
            LapwingError: for a path that cannot be written, or weights that changed since the fit.
        """
        self._check_network()
        write(self, path)

    def _check_network(self) -> None:
        check_mode(self.tangent.model)
        changed = self.stamp.changed(self.tangent.state())
        if changed is not None:
            raise LapwingError(
                f"Asked to use a posterior around {type(self.tangent.model).__name__}, found that {changed} was "
                "written, replaced or added after the fit; a posterior describes the weights it was fitted with: fit "
                "again, or load them back into the model and use lw.load(path, model)."
            )


def _inputs_of(batch: Any) -> Any:
    return batch if isinstance(batch, Uncertain) else batches.inputs_of(batch)
