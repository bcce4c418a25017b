"""Latents to predict from, and integrals over Gaussians as references for links."""

from __future__ import annotations

import torch

from lapwing.covariance import JointLatent, Latent
from lapwing.covariance.terms import DenseTerm, EigenTerm


def dense_latent(mean, covariance):
    return Latent(mean, (DenseTerm(covariance),))


def marginal_latent(mean, variance):
    """A latent without covariances: code that reads more than means and variances fails."""
    return Latent(mean, (EigenTerm(None, variance).marginals(),))


def random_covariances(batch, size, generator, scale=1.0):
    root = torch.randn(batch, size, size, generator=generator, dtype=torch.float64)
    return scale * (root @ root.mT / size + 0.2 * torch.eye(size, dtype=torch.float64))


def random_latent(batch=4, size=3, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(batch, size, generator=generator, dtype=torch.float64)
    return dense_latent(mean, random_covariances(batch, size, generator, scale))


def joint_latent(batch=3, size=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(batch, size, generator=generator, dtype=torch.float64)
    covariance = random_covariances(1, batch * size, generator).reshape(batch, size, batch, size)
    return JointLatent(mean, covariance)


def normal_grid(mean, covariance, points):
    """Nodes f (G, C) and weights (G,) of an even grid for f ~ N(mean (C,), covariance (C, C)): spectrally accurate."""
    axis = torch.linspace(-9, 9, points, dtype=torch.float64)
    z = torch.cartesian_prod(*[axis] * len(mean)).reshape(-1, len(mean))
    return mean + z @ torch.linalg.cholesky(covariance).T, (-0.5 * z.square().sum(-1)).softmax(0)


def integral(function, mean, covariance, points=61):
    """`E[function(f)]` for f ~ N(mean (C,), covariance (C, C)); function maps (G, C) to (G, ...)."""
    f, weights = normal_grid(mean, covariance, points)
    return torch.tensordot(weights, function(f), dims=1)
