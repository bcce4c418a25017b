"""ELLA against exact linearised Laplace (Deng et al. 2022): Figures 1 and 2 (a, b), Table 5.

Every function returns plain numbers; `python -m benchmarks.papers ella_regression ella_errors` writes the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw

from ..covariance import LowRank
from ..evaluation.measures import gaussian_kl
from ..tangent import Anchors, Tangent
from .data import images
from .ella_cifar import features
from .loaders import Batches, batched
from .models import mnist_cnn

# Figure 1 and Table 5 ------------------------------------------------------------------------------------------------


def illustrative_regression(seed: int, noise_variance: float = 0.01) -> dict[str, Any]:
    """Fits `y = sin 2x + ε` at 16 points with a tanh MLP; returns each method's KL divergence to full LLA.

    One noise variance and one prior precision (1) for all methods, unlike the paper's program, which gave ELLA the
    noise variance 0.01 and the others 0.0001.

    Args:
        seed: of data, network and rows.
        noise_variance: σ².

    Returns:
        method -> `KL(method || Full)` of the predictive Gaussians, averaged over 200 points of [-5, 5]; and the
        training error of the network.
    """
    generator = torch.Generator().manual_seed(seed)
    x = 8 * torch.rand(16, 1, generator=generator) - 4
    y = (2 * x).sin() + 0.2 * torch.randn(16, 1, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        widths = (1, 50, 50, 50, 1)
        layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
        model = nn.Sequential(*layers[:-1]).double()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-4)
    x, y = x.double(), y.double()
    for _ in range(1000):
        optimiser.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimiser.step()
    methods: dict[str, tuple[lw.Method, Any]] = {
        "ELLA": (lw.ELLA(rank=5, rows=16), lw.everything),
        "ELLA, 16 directions": (lw.ELLA(rank=16, rows=16), lw.everything),
        "ELLA with residual": (lw.ELLA(rank=5, rows=16, residual="prior"), lw.everything),
        "KFAC": (lw.KFAC(), lw.everything),
        "EKFAC": (lw.EKFAC(), lw.everything),
        "diagonal": (lw.Diagonal(), lw.everything),
        "last layer": (lw.Full(), lw.last_layer),
    }
    grid = torch.linspace(-5, 5, 200).double()[:, None]

    def predictive(method: lw.Method, params: Any) -> tuple[Tensor, Tensor]:
        posterior = lw.fit(
            model.eval(), [(x, y)], method, params=params, prior_precision=1.0, likelihood=lw.Gaussian(noise_variance),
            seed=seed,
        )  # fmt: skip
        latent = posterior.latent(grid)
        return latent.mean, latent.covariance

    exact = predictive(lw.Full(), lw.everything)
    found: dict[str, Any] = {"training error": float(loss.detach())}
    for name, chosen in methods.items():
        found[name] = float(gaussian_kl(*predictive(*chosen), *exact, noise_variance=noise_variance).mean())
    return found


# Figure 2 (a, b) -----------------------------------------------------------------------------------------------------


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
        root = lw.Categorical().fisher_root(model(train))  # (N, C, C)
    count, width = len(train), tangent.outputs

    def rooted(matrix: Tensor) -> Tensor:
        """Returns Rᵀ times a matrix (NC, n), block by block."""
        return torch.einsum("ncr,ncm->nrm", root.to(matrix.dtype), matrix.reshape(count, width, -1)).flatten(0, 1)

    kernel = _gram(rows)
    ntk = rooted(rooted(kernel.double()).T.contiguous())
    cross = rooted((rows @ val_rows.T).double())  # (NC, VC)
    blocks = val_rows.reshape(len(val), width, -1)
    prior = (blocks @ blocks.mT).double()
    found = {}
    for delta in precisions:
        diagonal = ntk.diagonal()
        diagonal += delta
        factor = torch.linalg.cholesky(ntk)
        diagonal -= delta
        solved = torch.linalg.solve_triangular(factor, cross, upper=False)  # (NC, VC)
        del factor
        solved = solved.reshape(len(rows), len(val), width)
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
        values = features(posterior, [(val, torch.zeros(len(val)))]).values
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


def mnist_setup(seed: int, shown: int) -> tuple[nn.Module, Batches, Tensor]:
    """Returns ELLA's MNIST network, some training images in batches, and 256 others."""
    data = images("mnist")
    picked = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(seed))
    train, val = picked[:shown], picked[shown : shown + 256]
    return mnist_cnn(), batched(data.x_train[train], data.y_train[train]), data.x_train[val]


def _rows(tangent: Tangent, x: Tensor) -> Tensor:
    """Returns all rows of J at images (N C, P)."""
    width = tangent.outputs
    samples = torch.arange(len(x)).repeat_interleave(width)
    return Anchors(tangent, (x,), samples, torch.arange(width).repeat(len(x))).rows(torch.float32)


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
