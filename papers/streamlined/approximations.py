"""Where streamlined prediction departs from the linearised one: which of its approximations, and at which layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing import LapwingError, Linearized, Posterior, Streamlined
from lapwing.covariance import Blockwise, Covariance, LayerBlock, LowRankPlusDiagonal, Term
from lapwing.covariance.output import Dense, across, distinct
from lapwing.evaluation import Comparison
from lapwing.tangent import Block, Record, Tangent, Vectors

_LIFTED: dict[str, dict[str, Any]] = {
    "positions correlated": {"positions": "correlated"},
    "residual branches correlated": {"residual": "correlated"},
    "scores uncertain": {"attention": "scores"},
    "activations matched": {"activations": "moments"},
}
_FULL: dict[str, Any] = {"covariance": "full", "residual": None, "attention": "scores", "activations": "linear"}


@dataclass(frozen=True)
class ApproximationErrors:
    """Two tables; prints as text.

    Attributes:
        options: one row for the way as given, and one for each approximation of it that is lifted.
        layers: one row a treated block, which alone is uncertain there.
        refused: approximations that could not be lifted -> why.
    """

    options: Comparison
    layers: Comparison
    refused: dict[str, str]

    def __str__(self) -> str:
        """Both tables."""
        return f"{self.options}\n\n{self.layers}"


def approximation_errors(
    posterior: Posterior,
    x: Any,
    via: Streamlined = Streamlined(),  # noqa: B008 (frozen)
    *,
    full: bool = False,
    layers: bool = True,
) -> ApproximationErrors:
    """Compares output variances with those of `Linearized()`, with one approximation lifted, or one layer uncertain.

    For each way and each layer b, over B inputs and C outputs:

        ratio = exp mean log(v / v_lin)    error = mean |log(v / v_lin)|    v_lin = diag(J Σ Jᵀ), or diag(J_b Σ_bb J_bᵀ)

    A ratio below 1 is too sure. Of a layer, `share` is its part of the linearised variances (of all blocks together,
    without what a posterior correlates between them), and `missing` the part of them that the way loses there: what a
    layer is short of, in units of the total.

    Args:
        posterior: around a network that `Streamlined()` takes.
        x: B inputs, as `posterior.latent` takes them; some tens are enough.
        via: the way in question; its own options are where the lifting starts.
        full: whether to lift everything at once too, by full mode with uncertain scores: for small networks.
        layers: whether to go through the layers.

    Returns:
        Tables `options` (ratio, error, correlation of log variances) and `layers` (the same, share, missing).

    Raises:
        LapwingError: a posterior without variances, or what the way itself refuses.

    Cost: one linearised prediction, and one streamlined for each approximation; for each layer one more of both.

    Source: the limitations that Li et al. name for Streamlining Prediction in Bayesian Deep Learning, section 5.
    """
    tangent, covariance = posterior.tangent, posterior.covariance
    exact = posterior.latent(x).variance
    rows = {"as given": _compared(posterior.latent(x, via=via).variance, exact)}
    refused: dict[str, str] = {}
    lifted = {**_LIFTED, "everything (full mode)": _FULL} if full else _LIFTED
    for name, changes in lifted.items():
        if all(getattr(via, key) == value for key, value in changes.items()):
            continue
        try:
            rows[name] = _compared(posterior.latent(x, via=replace(via, **changes)).variance, exact)
        except LapwingError as error:
            refused[name] = str(error)
    notes = (
        "Variances beside those of Linearized(): geometric mean of the ratio, mean |log ratio|, correlation of logs.",
    )
    options = Comparison(("ratio", "error", "correlation"), rows, (*notes, *(f"{n}: refused." for n in refused)))
    table = dict(_by_layer(tangent, covariance, x, via)) if layers else {}
    columns = ("share", "ratio", "error", "correlation", "missing")
    return ApproximationErrors(options, Comparison(columns, _with_shares(table), notes), refused)


def _by_layer(
    tangent: Tangent, covariance: Covariance, x: Any, via: Streamlined
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yields each block's own output variances, of the way and linearised."""
    for block in covariance.blocks:
        alone = restricted(covariance, block)
        exact = Linearized().latent(tangent, alone, x, joint=False).variance
        try:
            found = via.latent(tangent, alone, x).variance
        except LapwingError:  # with the others it went through: what is treated does not reach the outputs, as queries
            found = torch.zeros_like(exact)
        yield block.name, (found, exact)


def _with_shares(table: dict[str, tuple[Tensor, Tensor]]) -> dict[str, dict[str, float]]:
    total = sum(float(exact.sum()) for _, exact in table.values())
    rows = {}
    for name, (found, exact) in table.items():
        missing = float((exact - found).sum()) / total
        rows[name] = {"share": float(exact.sum()) / total, **_compared(found, exact), "missing": missing}
    return rows


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


def restricted(covariance: Covariance, block: Block) -> Covariance:
    """Returns `Σ_bb`, the covariance of one block's weights when all others are certain.

    Args:
        covariance: Σ.
        block: b, one of its blocks.
    """
    name = block.name
    if isinstance(covariance, Blockwise):
        place = [other.name for other in covariance.blocks].index(name)
        precision = covariance.precision[place : place + 1]
        return Blockwise((block,), {name: covariance.structures[name]}, precision, covariance.scale)
    if isinstance(covariance, LowRankPlusDiagonal):
        return LowRankPlusDiagonal((block,), covariance.variances, covariance.factor)
    return _Restricted(covariance, block)


class _Restricted(Covariance):
    """`Σ_bb` of any covariance, by products with it."""

    def __init__(self, covariance: Covariance, block: Block) -> None:
        self._covariance, self._block = covariance, block
        self.blocks, self.record_dtype = (block,), covariance.record_dtype

    def mv(self, vectors: Vectors) -> Vectors:
        name = self._block.name
        some = vectors[name]
        padded = {b.name: some.new_zeros(*some.shape[:-1], b.size) for b in self._covariance.blocks}
        return {name: self._covariance.mv({**padded, name: some})[name]}

    def sample(self, count: int, generator: torch.Generator) -> Vectors:
        return {self._block.name: self._covariance.sample(count, generator)[self._block.name]}

    def diagonal(self) -> Vectors:
        return {self._block.name: self._covariance.diagonal()[self._block.name]}

    def output_covariance(self, record: Record) -> tuple[Term, ...]:
        rows = record[self._block.name].rows()  # (B, R, P)
        return (Dense(rows @ self.mv({self._block.name: rows})[self._block.name].mT),)

    def joint_output_covariance(self, record: Record, other: Record) -> Tensor:
        rows = [one[self._block.name].rows() for one in distinct(record, other)]
        return across(self.mv({self._block.name: rows[0]})[self._block.name], rows[-1])

    def layer_block(self, name: str) -> LayerBlock:
        return self._covariance.layer_block(name)

    def tensors(self) -> dict[str, Tensor]:
        return self._covariance.tensors()

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: dict[str, Tensor], extra: dict[str, Any]) -> Covariance:
        raise LapwingError(
            "Asked to load one block's covariance, which is never saved; the whole posterior's is accepted: write "
            "lw.load(path, model)."
        )
