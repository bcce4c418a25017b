"""VaLLA on the one-dimensional toy (Ortega et al. 2024): Figures 1, 2 and 3."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lapwing as lw

from ..evaluation.measures import gaussian_kl
from ..tuning import Tuning
from .valla import TOY, toy, trained

GRID = torch.linspace(-9, 9, 181).double()[:, None]
STEPS = 500
"""Full batches that inducing points are moved for; the paper has 30 000."""

GAPS = ((-4.5, -1.8), (1.7, 4.6))
"""Where there are no data between data."""


def regions(x: Tensor) -> dict[str, Tensor]:
    """Returns which of the grid's points (n, 1) lie in the gaps, among the data, and outside."""
    gap = torch.zeros(len(x), dtype=torch.bool)
    for low, high in GAPS:
        gap |= ((x > low) & (x < high))[:, 0]
    outside = (x.abs() > 7.2)[:, 0]
    return {"gaps": gap, "data": ~gap & ~outside, "outside": outside}


class Toy:
    """A trained 50-50 network, and full LLA of it at the δ and σ² of its evidence.

    Attributes:
        model: the network.
        train: its data.
        val: held-out points, or none.
        exact: full LLA.
        std: its standard deviations (181, 1) of f on `GRID`.
    """

    def __init__(self, seed: int, held_out: float = 0.0, cache: Path | None = None) -> None:
        self.train, self.val = toy(held_out, seed)
        self.model = trained((1, 50, 50, 1), self.train, TOY, seed, f"toy{held_out:g}", cache)
        self.exact = lw.fit(self.model, [self.train], lw.Full(), likelihood="gaussian", tune=lw.Evidence())
        self.latent = self.exact.latent(GRID)
        self.std = self.latent.std

    def fit(self, method: lw.Method, params: Any = lw.everything, seed: int = 0) -> lw.Posterior:
        """Fits another method at full LLA's δ and σ²."""
        noise = self.exact.noise_variance
        return lw.fit(
            self.model, [self.train], method, params=params, prior_precision=self.exact.prior_precision,
            likelihood=lw.Gaussian(noise), seed=seed,
        )  # fmt: skip

    def score(self, posterior: lw.Posterior) -> dict[str, float]:
        """Returns KL divergence to full LLA (predictive, averaged over `GRID`) and ratios of standard deviations of f.

        Ratios are geometric means: over the grid, in the gaps, among the data, outside.
        """
        latent, noise = posterior.latent(GRID), self.exact.noise_variance
        assert noise is not None
        ratio = (latent.std / self.std).clamp_min(1e-12).log()[:, 0]
        kl = gaussian_kl(latent.mean, latent.covariance, self.latent.mean, self.latent.covariance, noise)
        found = {"kl": float(kl.mean()), "ratio": float(ratio.mean().exp())}
        return found | {f"ratio, {name}": float(ratio[at].mean().exp()) for name, at in regions(GRID).items()}

    def row(self, method: lw.Method, params: Any = lw.everything, seed: int = 0) -> dict[str, Any]:
        """Returns a method's scores at full LLA's δ and σ², and its standard deviations of f on `GRID`."""
        start = time.process_time()
        posterior = self.fit(method, params, seed)
        seconds = time.process_time() - start
        return {**self.score(posterior), "seconds": seconds, "curve of std": curve(posterior)}

    def own_row(self) -> dict[str, Any]:
        """Returns full LLA's δ and σ², and what a picture needs of network and data."""
        return {
            "prior_precision": self.exact.prior_precision, "noise_variance": self.exact.noise_variance,
            "curve of std": curve(self.exact), "curve of mean": self.latent.mean[:, 0].tolist(),
            "curve of x": self.train[0][:, 0].tolist(), "curve of y": self.train[1][:, 0].tolist(),
            "curve of validation x": self.val[0][:, 0].tolist(), "curve of validation y": self.val[1][:, 0].tolist(),
        }  # fmt: skip


def curve(posterior: lw.Posterior) -> list[float]:
    """Returns the standard deviations of f on `GRID`."""
    return [round(value, 5) for value in posterior.latent(GRID).std[:, 0].tolist()]


def methods(counts: Sequence[int] = (5, 10, 20, 50)) -> dict[str, tuple[lw.Method, Any]]:
    """Returns what Figures 1 and 3 compare: KFAC, diagonal, last layer, ELLA of M rows and directions, VaLLA."""
    found: dict[str, tuple[lw.Method, Any]] = {
        "KFAC": (lw.KFAC(), lw.everything),
        "diagonal": (lw.Diagonal(), lw.everything),
        "last layer": (lw.Full(), lw.last_layer),
    }
    for count in counts:
        found[f"VaLLA, M = {count}, k-means"] = (lw.VaLLA(count, lw.ClosedForm()), lw.everything)
        found[f"VaLLA, M = {count}"] = (lw.VaLLA(count, lw.VariationalBound(STEPS, 0.02)), lw.everything)
        found[f"ELLA, M = {count}"] = (lw.ELLA(rank=count, rows=count), lw.everything)
        found[f"ELLA with residual, M = {count}"] = (lw.ELLA(rank=count, rows=count, residual="prior"), lw.everything)
    return found


def stopped_rows(task: Toy, count: int = 20, steps: int = 1500, seed: int = 0) -> dict[str, Any]:
    """Fits Z, A, δ and σ² by the α-divergence, with and without stopping by held-out points (Figure 2).

    Args:
        task: with held-out points.
        count: M.
        steps: full batches at most; the paper has 20 000.
        seed: of the fit.

    Returns:
        fit -> scores against full LLA of the same training points, δ, σ², NLL of the held-out points, steps taken; the
        variational bound, with δ and σ² of its maximum or of validation, beside the α-divergence.
    """
    val = [task.val]
    fits: dict[str, tuple[lw.Method, Tuning | None]] = {
        "stopped": (lw.VaLLA(count, lw.AlphaDivergence(steps=steps, validation=val, every=100, patience=1)), None),
        "not stopped": (lw.VaLLA(count, lw.AlphaDivergence(steps=steps)), None),
        "bound, its own prior": (lw.VaLLA(count, lw.VariationalBound(STEPS, 0.02)), lw.Evidence()),
        "bound, validated prior": (lw.VaLLA(count, lw.VariationalBound(STEPS, 0.02)), lw.Validation(val)),
    }
    found: dict[str, Any] = {"LLA": {"validation nll": _loss(task.exact, task), **task.own_row()}}
    for name, (method, tune) in fits.items():
        posterior = lw.fit(task.model, [task.train], method, likelihood="gaussian", tune=tune, seed=seed)
        found[name] = {
            **task.score(posterior), "prior_precision": posterior.prior_precision, "curve of std": curve(posterior),
            "noise_variance": posterior.noise_variance, "validation nll": _loss(posterior, task),
            "steps": len(posterior.history.get("objective", ())),
        }  # fmt: skip
    return found


def _loss(posterior: lw.Posterior, task: Toy) -> float:
    x, y = task.val
    return -float(posterior.predict(x).log_prob(y).mean())
