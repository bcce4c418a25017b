"""One pass over images serves all posteriors of all weights: the C backward passes of an image are computed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import lapwing as lw
from lapwing.covariance import Latent, LowRank, PriorCovariance
from lapwing.covariance.base import split_blocks
from lapwing.covariance.terms import DenseTerm, FactoredTerm
from lapwing.data.inputs import Inputs
from lapwing.methods.rows import choose_balanced
from lapwing.methods.subspace import orthonormal_span
from lapwing.tangent import Anchors, Tangent, Vectors


def balanced_directions(tangent: Tangent, x: Tensor, y: Tensor, rows: int, rank: int, seed: int) -> Tensor:
    """Returns ELLA's K directions (K, P): the leading right singular vectors of M rows of J.

    The rows are those of `lw.ELLA(rank, rows, sampling="balanced")`: as many images of each class, random outputs.
    """
    generator = torch.Generator().manual_seed(seed)
    samples = choose_balanced(y.cpu(), rows, generator)
    outputs = torch.randint(tangent.width, (len(samples),), generator=generator)
    return directions_of(tangent, x, samples, outputs, rank)


def directions_of(tangent: Tangent, x: Tensor, samples: Tensor, outputs: Tensor, rank: int) -> Tensor:
    """Returns the leading right singular vectors (K, P) of the rows of J at pairs of a sample and an output."""
    rows = Anchors(tangent, (Inputs(x),), samples, outputs).rows(tangent.dtype)
    return orthonormal_span(rows, tangent.memory, rank).to(rows)


@torch.no_grad()
def features(posterior: lw.Posterior, x: Tensor) -> Tensor:
    """Returns J Wᵀ (N, C, K) at inputs, for the basis W of a posterior of low rank."""
    covariance = posterior.covariance
    assert isinstance(covariance, LowRank)
    return torch.cat([covariance.basis.project(record) for _, record in posterior.tangent.records(x)])


@torch.no_grad()
def contracted(
    tangent: Tangent,
    x: Tensor,
    directions: Tensor | None = None,
    diagonals: Mapping[str, Vectors] | None = None,
    others: Mapping[str, Sequence[PriorCovariance]] | None = None,
) -> dict[str, Tensor]:
    """Returns what posteriors need of images, from one record of each.

    Args:
        tangent: the network.
        x: images (N, ...).
        directions: (K, P); None leaves the features out.
        diagonals: name -> variances of independent weights, a tensor (P_block,) for each block.
        others: name -> covariances of one structure with several priors.

    Returns:
        "outputs" (N, C), "features" `J Wᵀ` (N, C, K), and the covariances of the outputs (N, C, C) for each diagonal by
        its name, and for each other covariance by "name, number".
    """
    diagonals, others = diagonals or {}, others or {}
    basis = None if directions is None else split_blocks(tangent.blocks, directions)
    parts: list[dict[str, Tensor]] = []
    for _, record in tangent.records(x):
        count, width = record.outputs.shape
        found = {name: record.outputs.new_zeros(count, width, width) for name in diagonals}
        found["outputs"] = record.outputs
        if directions is not None:
            found["features"] = record.outputs.new_zeros(count, width, len(directions))
        for name in record:
            rows = record[name].rows()  # (B, C, P_block)
            for key, variances in diagonals.items():
                found[key] += (rows * variances[name].to(rows)) @ rows.mT
            if basis is not None:
                found["features"] += rows @ basis[name].T
        for key, candidates in others.items():
            for i, terms in enumerate(candidates[0].output_covariances(record, candidates, "covariances")):
                found[f"{key}, {i}"] = Latent(record.outputs, terms).covariance
        parts.append(found)
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def curvatures(outputs: Tensor, features: Tensor, counts: Sequence[int]) -> dict[int, Tensor]:
    """Returns n -> `H_n = Σ_i (RᵀJWᵀ)ᵀ(RᵀJWᵀ)` (K, K) float64 of the first n images; n = 0 gives zeros."""
    projected = (lw.Categorical().fisher_root(outputs).mT @ features).double()  # (N, R, K)
    total, start, found = projected.new_zeros(features.shape[-1], features.shape[-1]), 0, {}
    for count in sorted(counts):
        part = projected[start:count].flatten(0, 1)
        total, start = total + part.T @ part, count
        found[count] = total
    return found


def ella_latent(part: Mapping[str, Tensor], curvature: Tensor, delta: float, residual: bool = False) -> Latent:
    """Returns ELLA's latents `J Wᵀ (H + δI)⁻¹ W Jᵀ` of contracted images, for orthonormal directions W.

    Args:
        part: what `contracted` returns; its leading features are used. "prior" is `J Jᵀ`, for the residual.
        curvature: H (K, K) on the leading directions.
        delta: prior precision.
        residual: whether to add `δ⁻¹ J (I - WᵀW) Jᵀ`.
    """
    features = part["features"][..., : len(curvature)]
    values, vectors = torch.linalg.eigh(curvature)
    factor = features @ (vectors * (values.clamp_min(0) + delta).rsqrt()).to(features)
    if not residual:
        return Latent(part["outputs"], (FactoredTerm(factor),))
    outside = (part["prior"] - features @ features.mT) / delta
    return Latent(part["outputs"], (DenseTerm(outside + factor @ factor.mT),))
