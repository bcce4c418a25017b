"""Snapshots of a network's weights along a training run, of which only running moments are kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..errors import LapwingError, shown
from ..linalg import accumulation_dtype
from ..network import batches
from ..network.eager import parameters_of, uncompiled
from ..network.selection import select
from ..tangent import LastLayer, Predicate


def welford(mean: Tensor, squares: Tensor | None, value: Tensor, count: int) -> Tensor:
    """Updates a mean, and a sum of squared deviations from it, in place by one value; returns `θ_n - θ̄_n`.

    Weights near convergence move by a thousandth of their size or less, so that `E[θ²] - E[θ]²` would subtract numbers
    that agree in half of their digits or more; a sum of squares neither loses these digits nor comes out negative.

    Args:
        mean: θ̄ of the values before, float64.
        squares: `Σ (θ_i - θ̄)²` of the values before, or None to leave it out.
        value: θ_n.
        count: n, this value included.
    """
    step = value.to(mean.dtype) - mean
    mean += step / count
    deviation = step * ((count - 1) / count)
    if squares is not None:
        squares += step * deviation
    return deviation


class SnapshotCollector:
    """Running moments of a network's weights along a training run; made by `SWAG.collector`.

    Attributes:
        model: the network that is being trained; read, never written.
        rank: K, how many deviations are kept.
        names: the treated parameters, chosen when the collector is made.
        count: T, how many snapshots were taken.
        mean: their mean θ̄, by parameter, treated or not, float64.
        deviations: the last K of `θ_i - θ̄_i`, each from the mean up to then, by treated parameter; oldest first.
        buffers: those of the last snapshot.
    """

    def __init__(self, model: nn.Module, rank: int, params: Predicate | LastLayer) -> None:
        if not isinstance(model, nn.Module):
            raise LapwingError(
                f"SWAG cannot take snapshots of a {type(model).__name__}: it needs a torch.nn.Module. Write "
                "lw.SWAG.collector(model), or model=model beside a list of state dicts."
            )
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 or rank == 1:
            raise LapwingError(
                f"rank={shown(rank)} of SWAG is not a whole number of at least 2 deviations, or 0 for the diagonal "
                "alone. Write lw.SWAG.collector(model, rank=20)."
            )
        if isinstance(params, LastLayer):
            raise LapwingError(
                "params=lw.last_layer does not work for SWAG: only running the network shows which layer is the last. "
                "Pass lw.everything, a predicate or a pattern: params=lw.matching('head.*')."
            )
        self.model, self.rank, self.count = model, rank, 0
        parameters = self._parameters()
        self.names = select(params, parameters, type(model).__name__)
        self.mean = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
        self._squares = {name: torch.zeros_like(self.mean[name]) for name in self.names}
        self.deviations: deque[dict[str, Tensor]] = deque(maxlen=rank)
        self.buffers: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        """Says how far it is."""
        return f"SnapshotCollector({type(self.model).__name__}, rank={self.rank}, snapshots={self.count})"

    @property
    def variance(self) -> dict[str, Tensor]:
        """`1/T Σ (θ_i - θ̄)²` by treated parameter, float64."""
        return {name: squares / max(self.count, 1) for name, squares in self._squares.items()}

    def snapshot(self) -> None:
        """Takes the network's weights as they are now into account: after every epoch, say.

        Raises:
            LapwingError: for NaN or infinite weights; nothing is changed then.

        Cost: time O(P); memory for one more deviation until K are held.
        """
        self._take({**dict(uncompiled(self.model).named_buffers()), **self._parameters()})

    def add(self, state: Mapping[str, Tensor]) -> None:
        """Takes saved weights into account.

        Args:
            state: what `model.state_dict()` gave.

        Raises:
            LapwingError: for the state of another network, NaN or infinite weights; nothing is changed then.
        """
        network = type(self.model).__name__
        if not isinstance(state, Mapping):
            raise LapwingError(
                f"A snapshot of {network} for SWAG is a state dict, not {batches.describe(state)}. Pass what "
                "model.state_dict() returns."
            )
        state = {name.removeprefix("_orig_mod."): value for name, value in state.items()}
        known = {*uncompiled(self.model).state_dict(), *self.mean}
        unknown = [name for name in state if name not in known]
        missing = [name for name in self.mean if name not in state]
        if unknown or missing:
            raise LapwingError(
                f"The snapshot is not one of this {network}: {(unknown + missing)[0]} is only in the "
                f"{'snapshot' if unknown else 'network'}. Pass what model.state_dict() of the same network returns."
            )
        self._take(state)

    @torch.no_grad()
    def _take(self, state: Mapping[str, Tensor]) -> None:
        buffers = dict(uncompiled(self.model).named_buffers())
        for name, before in {**buffers, **self.mean}.items():
            same = name not in state or state[name].shape == before.shape
            if same and (name in buffers or torch.isfinite(state[name]).all()):
                continue
            problem = "NaN or infinite values" if same else f"shape {tuple(state[name].shape)}"
            raise LapwingError(
                f"The snapshot of {type(self.model).__name__} for SWAG has {problem} in its {name} "
                f"{tuple(before.shape)}. Check that training has not diverged, and pass state dicts of this network."
            )
        self.count += 1
        deviations = {}
        for name, mean in self.mean.items():
            deviation = welford(mean, self._squares.get(name), state[name].detach().to(mean.device), self.count)
            if name in self._squares:
                deviations[name] = deviation.to(accumulation_dtype(state[name].dtype))
        self.deviations.append(deviations)
        self.buffers = {name: value.detach().clone() for name, value in state.items() if name in buffers}

    def _parameters(self) -> dict[str, Tensor]:
        parameters = parameters_of(uncompiled(self.model))
        return {name: value for name, value in parameters.items() if value.is_floating_point()}
