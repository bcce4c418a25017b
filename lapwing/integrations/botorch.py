"""A BoTorch model around a posterior: `LaplaceModel`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import lapwing as lw

from ..errors import LapwingError, extra, shown

__all__ = ["LaplaceModel"]

_model: Any = extra("botorch.models.model")
_posteriors = extra("botorch.posteriors.gpytorch")
_distributions = import_module("gpytorch.distributions")  # a dependency of BoTorch
_to_linear_operator = import_module("linear_operator").to_linear_operator

MAX_JOINT_INPUTS = 64
"""Number of inputs of one joint prediction, or q if that is larger. Covariances of different batches are dropped."""


class LaplaceModel(_model.Model, _model.FantasizeMixin):
    """A network with a Laplace posterior, as a BoTorch model for acquisition functions and their optimisation.

    `f(X) ~ N(f(X, θ̂), J(X) Σ J(X)ᵀ)`, jointly over the q points of a batch and the m outputs; differentiable in X. The
    network is not copied, and stays in eval mode whatever the mode of this model.

    Args:
        posterior: posterior of a network from (n, d) to (n, m). BoTorch's samplers need exact covariances of points
            that are close to each other: call `model.double()` before the fit.

    Raises:
        LapwingError: if the argument is not a posterior, or its likelihood is `HeteroscedasticGaussian`.

    The noise of y is normal, of the variance σ²(x), also if the posterior predicts tails.

    Cost: per call `posterior.latent` of all points, jointly if q > 1; after n observations, of q + n points per batch.
        Noise that depends on the input costs one more prediction of its points.
    """

    def __init__(self, posterior: lw.Posterior) -> None:
        super().__init__()
        if not isinstance(posterior, lw.Posterior):
            raise LapwingError(
                f"LaplaceModel needs a posterior, not {shown(posterior)}. Write LaplaceModel(lw.fit(model, [(x, y)]))."
            )
        if not posterior.likelihood.one_output_per_target:
            raise LapwingError(
                "LaplaceModel needs an output for each objective, and observations that are numbers, unlike "
                f"lw.{type(posterior.likelihood).__name__}. Fit a network of means with lw.Gaussian(), and pass "
                "variances of your own as observation_noise=."
            )
        self.laplace = posterior
        self._observed: tuple[Tensor, ...] | None = None  # X, Y and noise

    @property
    def num_outputs(self) -> int:
        """Returns m."""
        return self.laplace.tangent.outputs

    @property
    def batch_shape(self) -> torch.Size:
        """Returns the batch shape of the observations, or () without observations."""
        if self._observed is None:
            return torch.Size()
        return torch.broadcast_shapes(self._observed[0].shape[:-2], self._observed[1].shape[:-2])

    def posterior(
        self,
        X: Tensor,
        output_indices: Sequence[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """Returns the joint distribution of the q points of every batch.

        Args:
            X: (batch..., q, d).
            output_indices: outputs to return; None means all.
            observation_noise: True adds the noise variance of each output, σ²(x) if it depends on the input; a tensor
                that broadcasts to (batch..., q, m) adds its variances.
            posterior_transform: transform of BoTorch that is applied to the result, a `GPyTorchPosterior` with mean
                (batch..., q, m).

        Raises:
            LapwingError: if the likelihood has no noise variance, and for the reasons of `lw.Posterior.latent`.
        """
        X = self.transform_inputs(X)
        mean, covariance = self._conditioned(X)
        if observation_noise is not False:
            covariance = covariance + torch.diag_embed(self._noise(observation_noise, X, mean).flatten(-2))
        if output_indices is not None:
            numbers = torch.arange(covariance.shape[-1], device=mean.device).view(mean.shape[-2:])
            chosen = numbers[:, output_indices].flatten()
            mean, covariance = mean[..., output_indices], covariance[..., chosen[:, None], chosen]
        operator = _to_linear_operator(covariance)  # decomposed lazily, with jitter if it is singular
        if mean.shape[-1] == 1:
            normal = _distributions.MultivariateNormal(mean[..., 0], operator)
        else:
            normal = _distributions.MultitaskMultivariateNormal(mean, operator)
        result = _posteriors.GPyTorchPosterior(normal)
        return result if posterior_transform is None else posterior_transform(result)

    def condition_on_observations(self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **_: Any) -> LaplaceModel:
        """Returns the model given further values: the latent Gaussian conditioned on `Y = f(X) + ε`, mean included.

        The network and its posterior stay: only the linearised network changes. After many observations fit again.

        Args:
            X: (batch..., n, d).
            Y: (batch'..., n, m), whose batches broadcast with the batches of X; additional batches are fantasies.
            noise: variances of ε that broadcast to Y; None means those of `posterior(X, observation_noise=True)`.

        Raises:
            LapwingError: if the shapes do not fit, or `noise` is None and the likelihood has no noise variance.
        """
        if X.ndim < 2 or Y.ndim < 2 or Y.shape[-2:] != (X.shape[-2], self.num_outputs):
            raise LapwingError(
                f"The observations have shape {tuple(Y.shape)} at inputs of shape {tuple(X.shape)}. Pass X (batch..., "
                f"n, d) and Y (batch..., n, {self.num_outputs}): write y[:, None] for one value per input."
            )
        X = self.transform_inputs(X)
        noise = self._noise(True if noise is None else noise, X, Y)
        model = LaplaceModel(self.laplace)
        if hasattr(self, "input_transform"):
            model.input_transform = self.input_transform
        new = X, Y, noise
        model._observed = new if self._observed is None else tuple(map(_concatenated, self._observed, new))
        return model

    def fantasize(self, X: Tensor, sampler: Any, observation_noise: Tensor | None = None, **_: Any) -> LaplaceModel:
        """Returns the model conditioned on draws from itself at X (batch..., n, d): a batch of models."""
        noise = True if observation_noise is None else observation_noise
        drawn = sampler(self.posterior(X, observation_noise=noise))
        return self.condition_on_observations(X, drawn, observation_noise)

    def _noise(self, noise: bool | Tensor, X: Tensor, like: Tensor) -> Tensor:
        """Returns the noise variances at X for outputs (..., q, m), in their shape, or (batch..., q, m), or (q, m)."""
        if isinstance(noise, Tensor):
            return noise.to(like).expand_as(like)
        if self.laplace.noise_variance is None:
            raise LapwingError(
                f"{self.laplace.likelihood} has no noise variance. Leave observation_noise out, or pass a tensor."
            )
        if self.laplace.likelihood.features_read is not None:  # it depends on the input
            points = X.flatten(0, -2).to(self.laplace.tangent.dtype)
            return self.laplace.predict(points).aleatoric_variance.to(like).unflatten(0, X.shape[:-1])
        each = self.laplace.noise_variance * self.laplace.likelihood.ratios(like)
        return each.expand(like.shape[-2:])

    def _conditioned(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean (..., q, m) and covariance (..., q m, q m), given the observations."""
        if self._observed is None:
            return self._joint(X)
        before, Y, noise = self._observed
        mean, covariance = self._joint(_concatenated(before.to(X), X))
        n, cut = Y.shape[-2], Y.shape[-2] * mean.shape[-1]
        known = covariance[..., :cut, :cut] + torch.diag_embed(noise.to(X).flatten(-2))
        cross = covariance[..., cut:, :cut]
        gain = torch.cholesky_solve(cross.mT, torch.linalg.cholesky(known)).mT
        change = gain @ (Y.to(X) - mean[..., :n, :]).flatten(-2)[..., None]
        after = mean[..., n:, :] + change.unflatten(-2, (-1, mean.shape[-1]))[..., 0]
        remaining = covariance[..., cut:, cut:] - gain @ cross.mT
        return after, remaining.expand(*after.shape[:-2], *remaining.shape[-2:])

    def _joint(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean (..., q, m) and the covariance (..., q m, q m) of the latent, before any observation."""
        q, m = X.shape[-2], self.num_outputs
        points = X.reshape(-1, q, X.shape[-1]).to(self.laplace.tangent.dtype)
        means, covariances = [], []
        for part in points.split(max(1, MAX_JOINT_INPUTS // q) if q > 1 else len(points)):
            latent = self.laplace.latent(part.flatten(0, 1), joint=q > 1)
            covariance = latent.covariance
            if q > 1:
                covariance = covariance.reshape(len(part), q * m, len(part), q * m)
                covariance = covariance.diagonal(dim1=0, dim2=2).movedim(-1, 0)
            means.append(latent.mean)
            covariances.append(covariance)
        mean, covariance = torch.cat(means).to(X), torch.cat(covariances).to(X)
        return mean.reshape(*X.shape[:-1], m), covariance.reshape(*X.shape[:-2], q * m, q * m)


def _concatenated(first: Tensor, second: Tensor) -> Tensor:
    """Returns two sets of points or observations in one tensor (batch..., n + n', ...)."""
    batch = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    return torch.cat([part.expand(*batch, *part.shape[-2:]) for part in (first, second.to(first))], -2)
