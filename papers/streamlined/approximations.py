"""Where streamlined prediction departs from the linearised one: which of its approximations, and at which layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from lapwing.covariance import Blockwise
from lapwing.tangent import Block

LIFTED: dict[str, dict[str, Any]] = {
    "positions correlated": {"positions": "correlated"},
    "scores uncertain": {"attention": "scores"},
    "activations matched": {"activations": "moments"},
}


def approximation_errors(posterior: lw.Posterior, x: Tensor, via: lw.Streamlined) -> dict[str, Any]:
    """Compares output variances with those of `Linearized()`, with one approximation lifted, or one layer uncertain.

    For each way and each layer b, over B inputs and C outputs:

        ratio = exp mean log(v / v_lin)    error = mean |log(v / v_lin)|    v_lin = diag(J Σ Jᵀ), or diag(J_b Σ_bb J_bᵀ)

    A ratio below 1 is too sure. Of a layer, `share` is its part of the linearised variances, and `missing` the part of
    them that the way loses there, in units of the total (Li et al., the limitations of section 5).

    Args:
        posterior: one without covariances between layers, such as those of lw.Diagonal() and lw.KFAC().
        x: B inputs; some tens are enough.
        via: the way in question; its own options are where the lifting starts.

    Returns:
        "options": approximation lifted -> ratio, error, correlation of log variances; "layers": layer -> the same, with
        share and missing; "refused": approximations that could not be lifted.

    Cost: one linearised prediction, and one streamlined for each approximation; for each layer one more of both.
    """
    exact = posterior.latent(x).variance
    options, refused = {"as given": _compared(posterior.latent(x, via=via).variance, exact)}, []
    for name, changes in LIFTED.items():
        if any(getattr(via, key) != value for key, value in changes.items()):
            try:
                options[name] = _compared(posterior.latent(x, via=replace(via, **changes)).variance, exact)
            except lw.LapwingError:
                refused.append(name)
    pairs = {block.name: _of_layer(posterior, block, x, via) for block in posterior.covariance.blocks}
    total = sum(float(exact.sum()) for _, exact in pairs.values())
    layers = {
        name: {
            "share": float(exact.sum()) / total,
            **_compared(found, exact),
            "missing": float((exact - found).sum()) / total,
        }
        for name, (found, exact) in pairs.items()
    }
    return {"options": options, "refused": sorted(refused), "layers": layers}


def _of_layer(posterior: lw.Posterior, block: Block, x: Tensor, via: lw.Streamlined) -> tuple[Tensor, Tensor]:
    """Returns the output variances of one layer alone, of the way and linearised."""
    assert isinstance(posterior.covariance, Blockwise)
    alone = restricted(posterior.covariance, block)
    exact = lw.Linearized().latent(posterior.tangent, alone, x, joint=False).variance
    try:
        return via.latent(posterior.tangent, alone, x).variance, exact
    except lw.LapwingError:  # with the others it went through: what is treated does not reach the outputs, as queries
        return torch.zeros_like(exact), exact


def restricted(covariance: Blockwise, block: Block) -> Blockwise:
    """Returns the covariance of one block's weights when all others are certain."""
    place = [other.name for other in covariance.blocks].index(block.name)
    structures = {block.name: covariance.structures[block.name]}
    return Blockwise((block,), structures, covariance.precision[place : place + 1], covariance.scale)


def _compared(found: Tensor, exact: Tensor) -> dict[str, float]:
    """Returns ratio, error and correlation, over the entries that both have variances at."""
    found, exact = found.detach().double().flatten(), exact.detach().double().flatten()
    seen = (found > 0) & (exact > 0)
    if not seen.any():
        return {"ratio": 0.0 if bool((exact > 0).any()) else 1.0}
    a, b = found[seen].log(), exact[seen].log()
    row = {"ratio": float((a - b).mean().exp()), "error": float((a - b).abs().mean())}
    if len(a) > 1 and float(a.std()) > 0 and float(b.std()) > 0:
        row["correlation"] = float(torch.corrcoef(torch.stack([a, b]))[0, 1])
    return row
