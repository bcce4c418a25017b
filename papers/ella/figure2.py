"""Figure 2 (a, b): errors of the NTK and of ELLA's covariances over M and K, on ELLA's own MNIST network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.covariance import LowRank
from lapwing.data.inputs import Inputs
from lapwing.tangent import Anchors, Tangent
from papers.common import drawing
from papers.common.data import Batches, batched, images, random_rows
from papers.common.networks import mnist_cnn
from papers.common.scores import averaged
from papers.common.tables import grid, shown
from papers.ella.shared import features

PRECISIONS = (1.0, 100.0, 1e4)
"""Prior precisions; the authors' program has a prior variance of 1e-4."""


def run(
    counts: Sequence[int] = (4, 16, 64, 256, 1000), seeds: Sequence[int] = range(5), shown: int = 1000
) -> dict[str, Any]:
    """Returns ε_Nyström and ε_ELLA by M and K; one data subset, rows by seed."""
    model, train, val = setup(0, shown)
    reference = exact_reference(model, torch.cat([x for x, _ in train]), val, PRECISIONS)
    runs = []
    for seed in seeds:
        found = nystrom_errors(model, train, val, reference, counts, counts, seed)
        runs.append({f"M={row.pop('rows')}, K={row.pop('rank')}": row for row in found})
        print(seed, runs[-1], flush=True)
    return {"images": shown, "seeds": len(seeds), "table": averaged(runs)}


@dataclass(frozen=True)
class ExactNTK:
    """Rows of J, and `J_val Ψ J_valᵀ` of each validation image by the dual form at some prior precisions.

    Attributes:
        rows: J_X (NC, P) float32.
        kernel: the NTK, J_X J_Xᵀ (NC, NC) float32.
        covariances: prior precision -> (B, C, C).
    """

    rows: Tensor
    kernel: Tensor
    covariances: dict[float, Tensor]


def exact_reference(model: nn.Module, train: Tensor, val: Tensor, precisions: Sequence[float]) -> ExactNTK:
    """Computes exact linearised Laplace of the MNIST network, `Ψ = (JᵀΛJ + δI)⁻¹`, from all NC rows of J.

    `J_v Ψ J_vᵀ = (K_vv - K_vX R (δI + Rᵀ K_XX R)⁻¹ Rᵀ K_Xv)/δ`, with `R Rᵀ = Λ`.

    Cost: (NC)² numbers in float32 and, twice, in float64 (2 GB for 1 000 images), a Cholesky factor for each precision.
    """
    tangent = Tangent.survey(model, train[:4], memory=2**28)
    rows, val_rows = (_rows(tangent, x) for x in (train, val))
    with torch.no_grad():
        root = lw.Categorical().fisher_root(model(train))  # (N, C, R)
    count, width = len(train), tangent.outputs

    def rooted(matrix: Tensor) -> Tensor:
        """Returns Rᵀ (NR, NC) times a matrix (NC, n), block by block."""
        return torch.einsum("ncr,ncm->nrm", root.to(matrix.dtype), matrix.reshape(count, width, -1)).flatten(0, 1)

    kernel = _gram(rows)
    ntk = rooted(rooted(kernel.double()).T.contiguous())
    cross = rooted((rows @ val_rows.T).double())  # (NR, VC)
    blocks = val_rows.reshape(len(val), width, -1)
    prior = (blocks @ blocks.mT).double()
    found = {}
    for delta in precisions:
        diagonal = ntk.diagonal()
        diagonal += delta
        factor = torch.linalg.cholesky(ntk)
        diagonal -= delta
        solved = torch.linalg.solve_triangular(factor, cross, upper=False)  # (NR, VC)
        del factor
        solved = solved.reshape(-1, len(val), width)
        found[delta] = (prior - torch.einsum("mvc,mvd->vcd", solved, solved)) / delta
    return ExactNTK(rows, kernel, found)


def nystrom_errors(
    model: nn.Module, train: Batches, val: Tensor, exact: ExactNTK, rows: Sequence[int], ranks: Sequence[int], seed: int
) -> list[dict[str, float]]:
    """Returns ε_Nyström and ε_ELLA (section 5.1; spectral norms) at several M and K, one ELLA fit for each M."""
    found = []
    for count in rows:
        first = next(iter(exact.covariances))
        posterior = lw.fit(
            model, train, lw.ELLA(rank=count, rows=count), prior_precision=first, tune=None, seed=seed, memory=2**31
        )
        covariance = posterior.covariance
        assert isinstance(covariance, LowRank)
        directions = torch.cat([*covariance.basis.rows().values()], -1)  # (K, P)
        values = features(posterior, val)
        few = [rank for rank in ranks if rank <= covariance.rank]
        residuals = _residuals(exact.kernel, exact.rows @ directions.T, few)
        for rank, residual in zip(few, residuals, strict=True):
            row = {"rows": count, "rank": rank, "nystrom": residual}
            for delta, wanted in exact.covariances.items():
                at = covariance.with_rank(rank).with_prior(torch.full_like(covariance.precision, delta), 1.0)
                factor = at.factor(values).double()
                norms = torch.linalg.matrix_norm(factor @ factor.mT - wanted, 2)
                relative = norms / torch.linalg.matrix_norm(wanted, 2)
                row[f"ella at prior variance {1 / delta:g}"] = float(relative.mean())
            found.append(row)
    return found


def setup(seed: int, shown: int) -> tuple[nn.Module, Batches, Tensor]:
    """Returns the network, some training images in batches, and 256 others."""
    data = images("mnist")
    picked = random_rows(data.x_train, shown + 256, seed)
    return mnist_cnn(), batched(*data.train(picked[:shown])), data.x_train[picked[shown:]]


def _rows(tangent: Tangent, x: Tensor) -> Tensor:
    """Returns all rows of J at images (N C, P)."""
    width = tangent.outputs
    samples = torch.arange(len(x)).repeat_interleave(width)
    return Anchors(tangent, (Inputs(x),), samples, torch.arange(width).repeat(len(x))).rows(torch.float32)


def _gram(rows: Tensor, block: int = 2000) -> Tensor:
    """Returns `J Jᵀ` (NC, NC), its lower half mirrored."""
    found = rows.new_empty(len(rows), len(rows))
    for start in range(0, len(rows), block):
        stop = min(start + block, len(rows))
        part = rows[start:stop] @ rows[:stop].T
        found[start:stop, :stop] = part
        found[:stop, start:stop] = part.T
    return found


def _residuals(kernel: Tensor, projected: Tensor, ranks: Sequence[int], steps: int = 40) -> list[float]:
    """Returns `‖K - B_k B_kᵀ‖/‖K‖`, B_k the first k columns, by power iterations that share their passes over K."""
    count = len(ranks) + 1  # the last vector is for K itself
    vectors = torch.randn(len(kernel), 1, generator=torch.Generator().manual_seed(0)).expand(-1, count)
    norms = [0.0] * count
    for _ in range(steps):
        vectors = vectors / vectors.norm(dim=0)
        moved = kernel @ vectors  # (NC, count)
        for i, rank in enumerate(ranks):
            part = projected[:, :rank]
            moved[:, i] -= part @ (part.T @ vectors[:, i])
        norms = (vectors * moved).sum(0).tolist()
        vectors = moved
    return [norm / norms[-1] for norm in norms[:-1]]


def draw(results: Mapping[str, Any]) -> None:
    """Draws both errors over M."""
    table = results["table"]
    kinds = list(next(iter(table.values())))
    figure, axes = drawing.panels(1, len(kinds), (4 * len(kinds), 3.4))
    for axis, kind in zip(axes[0], kinds, strict=True):
        curves: dict[int, dict[int, Any]] = {}
        for name, row in table.items():
            rows, rank = (int(part.partition("=")[2]) for part in name.split(", "))
            curves.setdefault(rank, {})[rows] = row[kind]
        for rank, points in sorted(curves.items()):
            drawing.curve(axis, dict(sorted(points.items())), label=f"K = {rank}")
        label = kind.replace("nystrom", "error of the NTK").replace("ella at", "error of ELLA's covariance\nat")
        axis.set(xscale="log", yscale="log", xlabel="M, rows of J, five seeds", ylabel=label)
    axes[0][0].legend(frameon=False, fontsize=8)
    drawing.save(figure, __file__)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the errors by M and K."""
    table = results["table"]
    rows = {}
    kinds = {
        "ε_Nyström": ("nystrom", (16, 256, 1000)),
        "ε_ELLA, prior variance 0.01": ("ella at prior variance 0.01", (16, 256, 1000)),
        "ε_ELLA, prior variance 1": ("ella at prior variance 1", (1000,)),
        "ε_ELLA, prior variance 0.0001": ("ella at prior variance 0.0001", (16, 256, 1000)),
    }
    for heading, (kind, counts) in kinds.items():
        for count in counts:
            cells = (table.get(f"M={count}, K={rank}", {}).get(kind) for rank in (4, 16, 64, 256))
            rows[f"{heading}, M = {count}"] = [shown(cell, 4) for cell in cells]
    return {"errors": grid(["K = 4", "16", "64", "256"], rows)}
