"""SWAG: a Gaussian fitted to the weights that training passes through, around their average."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from tqdm import tqdm

from ..covariance.low_rank_diagonal import LowRankPlusDiagonal
from ..errors import LapwingError, check_choice, check_positive
from ..likelihoods import Likelihood
from ..network import batches
from ..network.batches import Forward
from ..network.calling import call
from ..network.eager import outside_modes, without_compiled
from ..network.loaders import check_progress, check_seed, checked_batches, first_batch, shows_bar
from ..posterior import Posterior
from ..tangent import LastLayer, Predicate, Tangent, everything
from .constructed import constructed, copied, put
from .snapshots import SnapshotCollector


class SWAG:
    """Stochastic weight averaging, Gaussian: `θ ~ N(θ̄, Σ)` from the weights that training passes through.

        Σ = 1/2 [ Σ_diag + D̂ᵀD̂/(K - 1) ],   Σ_diag = 1/T Σ_i (θ_i - θ̄)²,   rows of D̂ = the last K of θ_i - θ̄_i

    θ̄ and Σ_diag are moments of all T snapshots, `θ̄_i` is the mean of the first i. No prior and no curvature: Σ is what
    stochastic gradient descent at a constant, rather high learning rate leaves. Snapshots are for the late phase of
    training, one an epoch.

    Source: Maddox et al. 2019, A Simple Baseline for Bayesian Uncertainty in Deep Learning, equation 1 and sections 3.2
    and 3.3. It predicts by 30 draws, as `via=lw.MonteCarlo(30)` does, and refreshes batch norm statistics for each of
    them, where here those of θ̄ serve all.

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

    def __new__(cls, *arguments: Any, **options: Any) -> SWAG:
        """Refuses to make an instance, and says what to call instead.

        Raises:
            LapwingError: always.
        """
        raise LapwingError(
            "lw.SWAG is made from snapshots of a training run, not by lw.fit. Write collector = "
            "lw.SWAG.collector(model), collector.snapshot() after each epoch, and lw.SWAG.from_snapshots(collector, "
            "loader)."
        )

    @staticmethod
    def collector(model: nn.Module, rank: int = 20, params: Predicate | LastLayer = everything) -> SnapshotCollector:
        """Returns a collector of snapshots for your own training loop.

        Args:
            model: the network that is being trained, in any mode.
            rank: K, the most deviations kept, at least 2; 0 for the diagonal alone.
            params: which parameters are uncertain; the others are averaged too. Not `lw.last_layer`.

        Returns:
            A collector; call its `snapshot()` after every epoch of the late phase.

        Raises:
            LapwingError: for a rank below 2 and not 0, or a selection that selects nothing.

        Cost: memory of 16 bytes per weight, and K numbers per treated weight.
        """
        return SnapshotCollector(model, rank, params)

    @staticmethod
    @outside_modes
    def from_snapshots(
        snapshots: SnapshotCollector | Iterable[Mapping[str, Tensor]],
        loader: Iterable[Any],
        *,
        likelihood: str | Likelihood | None = None,
        scale: float = 0.5,
        batch_norm: Literal["refresh", "keep"] = "refresh",
        model: nn.Module | None = None,
        rank: int | None = None,
        params: Predicate | None = None,
        forward: Forward | None = None,
        memory: int | None = None,
        seed: int = 0,
        progress: bool | None = None,
    ) -> Posterior:
        """Returns the posterior around a copy of the network with the averaged weights, in eval mode.

        The copy is `posterior.model`: save its `state_dict()` beside the posterior. Your network is only read.

        Args:
            snapshots: a collector; or state dicts of `model`, read one by one.
            loader: the training data, (inputs, targets) batches that can be read several times.
            likelihood: "categorical", "gaussian" or an instance; None infers it from the targets' dtype. A noise
                variance that is None becomes the mean squared residual of the averaged network.
            scale: what multiplies the sum of both parts of Σ; 1/2 in the paper, which uses 1 for the diagonal alone.
            batch_norm: "refresh" takes statistics of the averaged weights from the data, as in training mode; "keep"
                has those of the last snapshot, for networks trained with frozen ones.
            model: the network, for state dicts.
            rank: K for state dicts; 20 when None.
            params: which parameters are uncertain, for state dicts; `lw.everything` when None.
            forward: `forward(model, inputs)` where `model(x)`, `model(*x)` or `model(**x)` does not do.
            memory: budget in bytes for one chunk of samples; 1 GiB when None.
            seed: of dropout while batch norm statistics are refreshed.
            progress: show a bar; None shows one on a terminal.

        Returns:
            An immutable posterior. It has no prior (`prior_precision` is 0) and no evidence.

        Raises:
            LapwingError: for fewer than two snapshots, snapshots of another network, or bad input.

        Cost: one forward pass over the data, two with batch norm; memory O(K P).
        """
        check_progress(progress)
        collector = _collected(snapshots, model, rank, params)
        check_choice("SWAG.from_snapshots", "batch_norm", batch_norm, ("refresh", "keep"))
        check_seed(seed)
        check_positive("SWAG.from_snapshots", "scale", scale, 0.5)
        first = first_batch(loader)
        network = copied(collector.model, "SWAG")
        put(network, {**collector.buffers, **collector.mean})
        if batch_norm == "refresh":
            bar = tqdm(loader, "batch norm statistics", disable=not shows_bar(progress), leave=False)
            _refresh(network, bar, forward, seed)
        network.eval()
        method = f"SWAG(rank={len(collector.deviations)}, snapshots={collector.count}, scale={scale})"
        return constructed(
            network, collector.names, lambda tangent: _covariance(collector, tangent, scale), first, loader, method,
            likelihood, forward, memory, progress,
        )  # fmt: skip


def _collected(
    snapshots: Any, model: nn.Module | None, rank: int | None, params: Predicate | None
) -> SnapshotCollector:
    """Returns the collector, fed with the state dicts where these are given."""
    if isinstance(snapshots, SnapshotCollector):
        if not (model is rank is params is None):
            raise LapwingError(
                "SWAG.from_snapshots takes model=, rank= and params= for state dicts only, and the snapshots are a "
                "collector. Pass them to lw.SWAG.collector."
            )
        collector = snapshots
    else:
        if not isinstance(snapshots, Iterable) or isinstance(snapshots, (Mapping, Tensor, nn.Module)) or model is None:
            raise LapwingError(
                f"SWAG.from_snapshots({batches.describe(snapshots)}, model={type(model).__name__}) needs a collector, "
                "or a list of state dicts and their network. Write lw.SWAG.from_snapshots([state_1, state_2, ...], "
                "loader, model=model)."
            )
        collector = SnapshotCollector(model, 20 if rank is None else rank, everything if params is None else params)
        for state in snapshots:
            collector.add(state)
    if collector.count < 2:
        raise LapwingError(
            f"SWAG of {collector.count} snapshots of {type(collector.model).__name__} has no variance: at least 2 are "
            "needed. Call collector.snapshot() after each of the last 20 epochs, say."
        )
    return collector


def _covariance(collector: SnapshotCollector, tangent: Tangent, scale: float) -> LowRankPlusDiagonal:
    """Returns `scale [Σ_diag + D̂ᵀD̂/(K - 1)]` by block."""
    variance, deviations = collector.variance, collector.deviations
    device, dtype = tangent.device, tangent.dtype
    variances, factor = {}, {}
    for block in tangent.blocks:
        joined = block.join({name: variance[name] for name in block.parameters})
        variances[block.name] = (scale * joined).to(device, dtype)
        factor[block.name] = torch.zeros(0, block.size, dtype=dtype, device=device)
        if deviations:
            rows = block.join({name: torch.stack([d[name] for d in deviations]) for name in block.parameters})
            factor[block.name] = rows.to(device, dtype) * (scale / (len(deviations) - 1)) ** 0.5  # (K, P_block)
    return LowRankPlusDiagonal(tangent.blocks, variances, factor)


class _OnInputs(nn.Module):
    """A network called as in the fit."""

    def __init__(self, network: nn.Module, called: Forward | None) -> None:
        super().__init__()
        self.network, self.called = network, called

    def forward(self, inputs: Any) -> Tensor:
        try:
            return call(self.network, inputs, self.called)
        except (LapwingError, ValueError) as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise LapwingError(
                f"Batch norm statistics of {type(self.network).__name__} have no variance on "
                f"{batches.describe(inputs)}: it has one value per channel. Pass batches of at least 2 samples, "
                "DataLoader(..., drop_last=True), or batch_norm='keep'."
            ) from error


def _refresh(network: nn.Module, loader: Iterable[Any], forward: Forward | None, seed: int) -> None:
    """Takes batch norm statistics anew, in training mode: the mean over batches of each batch's.

    Args:
        network: changed in place, its mode too.
        loader: (inputs, targets) batches.
        forward: `forward(network, inputs)`, or None.
        seed: of dropout; torch's generators are left as they were.

    Raises:
        LapwingError: for a batch with one value per channel, or bad inputs.
    """
    device = next(network.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), without_compiled():
        torch.default_generator.manual_seed(seed)
        for each in devices:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        wrapped = ([inputs] for inputs, _ in checked_batches(network, loader))  # update_bn takes the first of a list
        update_bn(wrapped, _OnInputs(network, forward))
