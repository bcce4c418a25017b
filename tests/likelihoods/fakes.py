"""Dense replacements for the latent types, and Gauss-Hermite integrals as references for links."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from lapwing.covariance.latent import BaseLatent


@dataclass
class FakeLatent(BaseLatent):
    """A Gaussian with covariance (B, C, C), or (B, C, B, C) when joint."""

    mean: torch.Tensor
    covariance: torch.Tensor
    joint: bool = False
    draws = None

    @property
    def centred_variance(self):
        centring = torch.eye(self.mean.shape[-1], dtype=self.mean.dtype) - 1 / self.mean.shape[-1]
        return (centring @ self.covariance @ centring).diagonal(dim1=-2, dim2=-1)

    @property
    def variance(self):
        if self.joint:
            size = self.mean.numel()
            return self.covariance.reshape(size, size).diagonal().reshape(self.mean.shape)
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    def sample(self, n, generator=None):
        noise = torch.randn(n, *self.mean.shape, generator=generator, dtype=self.mean.dtype)
        if self.joint:
            size = self.mean.numel()
            root = torch.linalg.cholesky(self.covariance.reshape(size, size))
            return self.mean + (noise.reshape(n, size) @ root.T).reshape(noise.shape)
        return self.mean + torch.einsum("bcd,nbd->nbc", torch.linalg.cholesky(self.covariance), noise)


@dataclass
class MarginalLatent(BaseLatent):
    """A latent without a covariance: code that reads more than mean and variance fails."""

    mean: torch.Tensor
    variance: torch.Tensor
    joint: bool = False
    draws = None

    @property
    def centred_variance(self):
        classes = self.mean.shape[-1]
        return (1 - 2 / classes) * self.variance + self.variance.sum(-1, keepdim=True) / classes**2


@dataclass
class FakeDraws(BaseLatent):
    """Outputs under weight draws (S, B, C)."""

    draws: torch.Tensor
    joint: bool = False

    @property
    def mean(self):
        return self.draws.mean(0)

    @property
    def variance(self):
        return self.draws.var(0, correction=0)

    def sample(self, n, generator=None):
        return self.draws[torch.randint(len(self.draws), (n,), generator=generator)]


def random_covariances(batch, size, generator, scale=1.0):
    root = torch.randn(batch, size, size, generator=generator, dtype=torch.float64)
    return scale * (root @ root.mT / size + 0.2 * torch.eye(size, dtype=torch.float64))


def random_latent(batch=4, size=3, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(batch, size, generator=generator, dtype=torch.float64)
    return FakeLatent(mean, random_covariances(batch, size, generator, scale))


def joint_latent(batch=3, size=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(batch, size, generator=generator, dtype=torch.float64)
    covariance = random_covariances(1, batch * size, generator).reshape(batch, size, batch, size)
    return FakeLatent(mean, covariance, joint=True)


def gauss_hermite(function, mean, covariance, nodes=60):
    """E[function(f)] for f ~ N(mean (C,), covariance (C, C)) by a tensor grid; function maps (G, C) to (G, ...)."""
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    weights = weights / weights.sum()
    grid = torch.tensor(list(itertools.product(points, repeat=len(mean))), dtype=torch.float64)
    mass = torch.tensor(list(itertools.product(weights, repeat=len(mean))), dtype=torch.float64).prod(-1)
    values = function(mean + grid @ torch.linalg.cholesky(covariance).T)
    return torch.tensordot(mass, values, dims=1)
