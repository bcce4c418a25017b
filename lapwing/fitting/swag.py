"""SWAG: a Gaussian fitted to snapshots of the weights during training."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from ..covariance.low_rank_diagonal import LowRankPlusDiagonal
from ..data import batches
from ..data.batches import Forward
from ..data.data import Data
from ..data.inputs import Inputs, checked
from ..data.progress import tracked, with_progress
from ..errors import LapwingError, check_choice, check_flag, shown
from ..likelihoods import Likelihood
from ..linalg import accumulation_dtype, seeded_torch
from ..network.call import Call
from ..network.eager import parameters_of, real, uncompiled, without_compiled
from ..network.entry import outside_modes
from ..network.selection import select
from ..options import SEED, check_argument, integer, positive
from ..posterior import MethodInfo, Posterior
from ..tangent import LastLayer, Predicate, Tangent, everything, join
from .constructed import constructed, copied, diagonal, put


class SWAG:
    """Stochastic weight averaging, Gaussian: `θ ~ N(θ̄, Σ)` from snapshots of the weights during training.

        Σ = 1/2 [ Σ_diag + D̂ᵀD̂/(K - 1) ],   Σ_diag = 1/T Σ_i (θ_i - θ̄)²,   rows of D̂ = the last K of θ_i - θ̄_i

    θ̄ and Σ_diag are moments of all T snapshots; `θ̄_i` is the mean of the first i. Without a prior or a curvature, Σ is
    the spread of stochastic gradient descent at a constant, rather high learning rate. Take one snapshot per epoch in
    the late phase of training.

    Source: Maddox et al. 2019, A Simple Baseline for Bayesian Uncertainty in Deep Learning, equation 1 and sections 3.2
    and 3.3. The paper predicts by 30 draws, as `via=lw.MonteCarlo(30)` does, and refreshes batch norm statistics for
    each draw. Here all draws use the statistics of θ̄.

    Example:
        >>> x, y = torch.randn(64, 4), torch.randint(3, (64,))
        >>> model = torch.nn.Linear(4, 3)
        >>> optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> collector = SWAG.collector(model, rank=5)
        >>> for epoch in range(10):
        ...     optimiser.zero_grad()
        ...     torch.nn.functional.cross_entropy(model(x), y).backward()
        ...     optimiser.step()
        ...     collector.snapshot()
        >>> posterior = SWAG.from_snapshots(collector, [(x, y)])
        >>> posterior.predict(x).probs.shape
        torch.Size([64, 3])
    """

    @staticmethod
    def collector(model: nn.Module, rank: int = 20, params: Predicate | LastLayer = everything) -> SnapshotCollector:
        """Returns a collector of snapshots for your own training loop.

        Args:
            model: the network that is being trained, in any mode.
            rank: K, the maximum number of deviations, at least 2; 0 for the diagonal only.
            params: selection of the uncertain parameters; the other parameters are averaged too. Not `lw.last_layer`.

        Raises:
            LapwingError: if the rank is 1 or negative, or if no parameter is selected.

        Cost: memory of 16 bytes per weight, and K entries per treated weight.
        """
        return SnapshotCollector(model, rank, params)

    @staticmethod
    @outside_modes
    @with_progress
    def from_snapshots(
        snapshots: SnapshotCollector,
        loader: Any,
        *,
        likelihood: str | Likelihood | None = None,
        scale: float = 0.5,
        batch_norm: Literal["refresh", "keep"] = "refresh",
        forward: Forward | None = None,
        memory: int | None = None,
        seed: int = 0,
        sample_weights: bool = False,
        progress: bool | None = None,
    ) -> Posterior:
        """Returns the posterior around a copy of the network with the averaged weights, in eval mode.

        The copy is `posterior.model`: save its `state_dict()` together with the posterior. Your network is only read.

        Args:
            snapshots: the collector.
            loader: the training data, as in `lw.fit`.
            likelihood: "categorical", "gaussian" or an instance; None infers it from the dtype of the targets. A noise
                variance that is None becomes the mean squared residual of the averaged network.
            scale: factor of both parts of Σ; 1/2 in the paper, which uses 1 for the diagonal only.
            batch_norm: "refresh" computes the statistics of the averaged weights from the data, in training mode;
                "keep" uses the statistics of the last snapshot, for networks trained with frozen statistics.
            forward: `forward(model, inputs)`, if `model(x)`, `model(*x)` and `model(**x)` are all wrong.
            memory: budget in bytes for one chunk of samples; None as in `lw.fit`.
            seed: seed of dropout while batch norm statistics are refreshed.
            sample_weights: whether batches hold weights, as in `lw.fit`, for the noise and the log likelihood.
            progress: whether to show a bar; None shows one on a terminal.

        Returns:
            An immutable posterior without a prior or an evidence. `lw.Validation(held_out).tune(posterior)` chooses the
            logit temperature or the noise variance, and `lw.scale_factor(posterior, held_out)` a factor of Σ.

        Raises:
            LapwingError: if there are fewer than two snapshots, or if the input is invalid.

        Cost: one forward pass over the data, two with batch norm; memory O(K P).
        """
        if not isinstance(snapshots, SnapshotCollector):
            raise LapwingError(
                f"SWAG.from_snapshots needs a collector, not {batches.describe(snapshots)}. Write collector = "
                "lw.SWAG.collector(model), and collector.snapshot() after each epoch, or collector.add(state) for each "
                "saved state dict."
            )
        if snapshots.count < 2:
            raise LapwingError(
                f"SWAG of {snapshots.count} snapshots of {type(snapshots.model).__name__} has no variance: at least 2 "
                "are needed. Call collector.snapshot() after each of the last 20 epochs, say."
            )
        check_choice("SWAG.from_snapshots", "batch_norm", batch_norm, ("refresh", "keep"))
        check_argument("SWAG.from_snapshots", "seed", seed, SEED, "0")
        check_flag("SWAG.from_snapshots", "sample_weights", sample_weights)
        check_argument("SWAG.from_snapshots", "scale", scale, positive(), "0.5")
        data = Data(loader, snapshots.model, sample_weights)
        data.first  # noqa: B018 (checks the data)
        network = copied(snapshots.model, "SWAG")
        put(network, {**snapshots.buffers, **snapshots.mean})
        if batch_norm == "refresh":
            # the mean over batches; it leaves the network in training mode
            device = next(network.parameters()).device
            with seeded_torch(seed, device), without_compiled():
                refreshing = checked(tracked(data, "batch norm statistics"), device)
                wrapped = ([samples.inputs] for samples in refreshing)  # update_bn takes the first of a list
                update_bn(wrapped, _OnInputs(network, forward))
        network.eval()
        options = {"rank": len(snapshots.deviations), "snapshots": snapshots.count, "scale": scale}
        text = ", ".join(f"{name}={value}" for name, value in options.items())
        method = MethodInfo("SWAG", f"SWAG({text})", options)
        return constructed(
            network, snapshots.names, lambda tangent: _covariance(snapshots, tangent, scale), data, method,
            likelihood, forward, memory, progress,
        )  # fmt: skip


class SnapshotCollector:
    """Running moments of the weights of a network during training; made by `SWAG.collector`.

    Attributes:
        model: the network that is being trained; it is only read.
        rank: K, the maximum number of deviations.
        names: names of the treated parameters.
        count: T, the number of snapshots.
        mean: θ̄, for every parameter, float64.
        deviations: the last K of `θ_i - θ̄_i` by treated parameter, oldest first.
        buffers: buffers of the last snapshot.
    """

    def __init__(self, model: nn.Module, rank: int, params: Predicate | LastLayer) -> None:
        if not isinstance(model, nn.Module):
            raise LapwingError(
                f"SWAG cannot take snapshots of a {type(model).__name__}: it needs a torch.nn.Module. Write "
                "lw.SWAG.collector(model)."
            )
        if not integer(0).accepts(rank) or rank == 1:
            raise LapwingError(
                f"rank={shown(rank)} of SWAG is not a whole number of at least 2 deviations, or 0 for the diagonal "
                "only. Write lw.SWAG.collector(model, rank=20)."
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
        return f"SnapshotCollector({type(self.model).__name__}, rank={self.rank}, snapshots={self.count})"

    @property
    def variance(self) -> dict[str, Tensor]:
        """Variances `1/T Σ (θ_i - θ̄)²` by treated parameter, float64."""
        return {name: squares / max(self.count, 1) for name, squares in self._squares.items()}

    def snapshot(self) -> None:
        """Adds the current weights of the network as a snapshot, for example after every epoch.

        Raises:
            LapwingError: if weights are NaN or infinite; the collector then stays as it is.

        Cost: time O(P); memory of one more deviation, up to K.
        """
        self._take({**dict(uncompiled(self.model).named_buffers()), **self._parameters()})

    def add(self, state: Mapping[str, Tensor]) -> None:
        """Adds saved weights as a snapshot.

        Args:
            state: the result of `model.state_dict()`.

        Raises:
            LapwingError: if the state is of another network, NaN or infinite; the collector then stays as it is.
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
        state = {name: real(value) if name in self.mean else value for name, value in state.items()}
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
            step = state[name].detach().to(mean.device, mean.dtype) - mean
            mean += step / self.count
            if name in self._squares:  # Welford: near convergence `E[θ²] - E[θ]²` would lose half of the digits
                deviation = step * ((self.count - 1) / self.count)
                self._squares[name] += step * deviation
                deviations[name] = deviation.to(accumulation_dtype(state[name].dtype))
        self.deviations.append(deviations)
        self.buffers = {name: value.detach().clone() for name, value in state.items() if name in buffers}

    def _parameters(self) -> dict[str, Tensor]:
        parameters = parameters_of(uncompiled(self.model))
        return {name: value for name, value in parameters.items() if value.is_floating_point()}


class _OnInputs(nn.Module):
    """A network that is called with the inputs of a batch, for `update_bn`."""

    def __init__(self, network: nn.Module, forward: Forward | None) -> None:
        super().__init__()
        self.network, self.call = network, Call(network, forward)

    def forward(self, inputs: Inputs) -> Tensor:
        try:
            return self.call.rows(inputs)
        except (LapwingError, ValueError) as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise LapwingError(
                f"Batch norm statistics of {type(self.network).__name__} have no variance on "
                f"{inputs}: it has one value per channel. Pass batches of at least 2 samples, "
                "DataLoader(..., drop_last=True), or batch_norm='keep'."
            ) from error


def _covariance(collector: SnapshotCollector, tangent: Tangent, scale: float) -> LowRankPlusDiagonal:
    """Returns `scale [Σ_diag + D̂ᵀD̂/(K - 1)]` by block."""
    deviations = collector.deviations
    covariance = diagonal(tangent, {name: scale * value for name, value in collector.variance.items()})
    if not deviations:
        return covariance
    rows = {name: torch.stack([each[name] for each in deviations]) for name in collector.names}
    share, like = (scale / (len(deviations) - 1)) ** 0.5, (tangent.device, tangent.dtype)
    factor = {name: part.to(*like) * share for name, part in join(tangent.blocks, rows).items()}  # (K, P_block)
    return LowRankPlusDiagonal(tangent.blocks, covariance.variances, factor)
