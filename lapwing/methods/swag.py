"""SWAG: a Gaussian fitted to the weights that training passes through, around their average."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from tqdm import tqdm

from .. import batches
from ..batches import Forward
from ..covariance.low_rank_diagonal import LowRankPlusDiagonal
from ..errors import LapwingError
from ..likelihoods import Categorical, Gaussian, Likelihood, resolve
from ..posterior import Posterior
from ..prior import Prior, is_positive
from ..tangent import LastLayer, Predicate, Tangent, everything
from ..tangent.eager import outside_inference, parameters_of, uncompiled, without_compiled
from ..tangent.stamp import Stamp
from .passes import check_choice
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
        """Says how it is made: not by `lw.fit`.

        Raises:
            LapwingError: always.
        """
        raise LapwingError(
            "Asked for lw.SWAG(...), found that it is made along a training run, not by lw.fit; snapshots are needed: "
            "write collector = lw.SWAG.collector(model), collector.snapshot() after each epoch, and "
            "lw.SWAG.from_snapshots(collector, loader)."
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

        Cost: memory of 16 bytes a weight, and K numbers a treated weight.
        """
        return SnapshotCollector(model, rank, params)

    @staticmethod
    @outside_inference
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
            loader: the training data, (inputs, targets) batches that can be gone through several times.
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
        collector = _collected(snapshots, model, rank, params)
        check_choice("SWAG.from_snapshots", "batch_norm", batch_norm, ("refresh", "keep"))
        if not is_positive(scale):
            raise LapwingError(
                f"Asked for SWAG with scale={scale!r}; a positive finite number is needed: write scale=0.5, or leave "
                "it out."
            )
        inputs, targets = _first_batch(loader)
        likelihood = _inferred(targets) if likelihood is None else resolve(likelihood)
        network = _averaged(collector)
        bar = sys.stderr.isatty() if progress is None else progress
        if batch_norm == "refresh":
            _refresh(network, tqdm(loader, "batch norm statistics", disable=not bar, leave=False), forward, seed)
        network.eval()
        chosen = set(collector.names)
        tangent = Tangent.survey(network, inputs, lambda name, _: name in chosen, forward, memory)
        statistics, samples = _statistics(tangent, tqdm(loader, "likelihood", disable=not bar, leave=False), likelihood)
        given = not likelihood.needs_noise
        if not given:
            likelihood = likelihood.with_noise_variance(likelihood.residual_variance(statistics))
        blocks, device = tangent.blocks, tangent.device
        flat = Prior(
            torch.zeros(len(blocks), dtype=torch.float64, device=device),
            {block.name: torch.zeros(block.size, dtype=tangent.dtype, device=device) for block in blocks},
            given=True,
        )
        method = f"SWAG(rank={len(collector.deviations)}, snapshots={collector.count}, scale={scale})"
        return Posterior(
            tangent, _covariance(collector, tangent, scale), likelihood, flat, statistics, samples, 1.0, 1.0, method,
            given, Stamp.of(tangent.state()),
        )  # fmt: skip


def _collected(
    snapshots: Any, model: nn.Module | None, rank: int | None, params: Predicate | None
) -> SnapshotCollector:
    """Returns the collector, fed with the state dicts where these are given."""
    if isinstance(snapshots, SnapshotCollector):
        if not (model is rank is params is None):
            raise LapwingError(
                "Asked for SWAG.from_snapshots of a collector and model=, rank= or params=, found that these are the "
                "collector's own; with a collector none of them is accepted: give them to lw.SWAG.collector."
            )
        collector = snapshots
    else:
        if not isinstance(snapshots, Iterable) or isinstance(snapshots, (Mapping, Tensor, nn.Module)) or model is None:
            raise LapwingError(
                f"Asked for SWAG.from_snapshots({batches.describe(snapshots)}, model={type(model).__name__}); accepted "
                "are a collector, and a list of state dicts with their network: write "
                "lw.SWAG.from_snapshots([state_1, state_2, ...], loader, model=model)."
            )
        collector = SnapshotCollector(model, 20 if rank is None else rank, everything if params is None else params)
        for state in snapshots:
            collector.add(state)
    if collector.count < 2:
        raise LapwingError(
            f"Asked for SWAG of {collector.count} snapshots of {type(collector.model).__name__}; at least 2 have a "
            "variance: call collector.snapshot() after each of the last 20 epochs, say."
        )
    return collector


def _averaged(collector: SnapshotCollector) -> nn.Module:
    """Returns a copy of the network with the averaged weights and the last snapshot's buffers."""
    try:
        network = copy.deepcopy(uncompiled(collector.model))
    except (RuntimeError, TypeError) as error:
        raise LapwingError(
            f"Asked for SWAG of {type(collector.model).__name__}, found that it cannot be copied ({error}); the "
            "average is put into a copy of the network: keep no tensors with a graph, locks or files in the module."
        ) from error
    own = {**dict(network.named_buffers()), **parameters_of(network)}
    with torch.no_grad():
        for name, value in {**collector.buffers, **collector.mean}.items():
            own[name].copy_(value)
    return network


class _OnInputs(nn.Module):
    """A network called as in the fit."""

    def __init__(self, network: nn.Module, called: Forward | None) -> None:
        super().__init__()
        self.network, self.called = network, called

    def forward(self, inputs: Any) -> Tensor:
        return batches.call(self.network, inputs, self.called)


def _refresh(network: nn.Module, loader: Iterable[Any], forward: Forward | None, seed: int) -> None:
    """Takes batch norm statistics anew, in training mode; torch's generators are left as they were."""
    device = next(network.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), without_compiled():
        torch.default_generator.manual_seed(seed)
        for each in devices:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        wrapped = ([inputs] for inputs, _ in _batches(network, loader))  # update_bn takes the first of a list
        update_bn(wrapped, _OnInputs(network, forward))


def _statistics(tangent: Tangent, loader: Iterable[Any], likelihood: Likelihood) -> tuple[dict[str, Tensor], int]:
    """Returns the likelihood's statistics, added over the data, and the number of samples."""
    statistics: dict[str, Tensor] = {}
    samples = 0
    for inputs, targets in _batches(tangent.model, loader):
        outputs = tangent.outputs_of(inputs)
        batches.check_outputs(outputs, "these inputs")
        likelihood.check(outputs, targets)
        for name, value in likelihood.statistics(outputs, targets).items():
            statistics[name] = statistics.get(name, 0) + value
        samples += len(outputs)
    if not samples:
        raise LapwingError(
            "Asked to go through the loader again for SWAG, found no samples after a first batch the first time; every "
            "pass needs the same data: pass a DataLoader or a list of batches, not a generator."
        )
    return statistics, samples


def _batches(network: nn.Module, loader: Iterable[Any]) -> Iterator[tuple[Any, Tensor]]:
    """Yields the inputs and targets of batches that are not empty."""
    weight = next(network.parameters())
    for number, raw in enumerate(loader, 1):
        inputs, targets = batches.split(raw)
        batches.check_inputs(inputs, weight, f"the inputs of batch number {number}")
        if batches.size(inputs):
            yield inputs, targets


def _first_batch(loader: Any) -> tuple[Any, Any]:
    """Returns the inputs and targets of the first batch with samples."""
    iterator = iter(loader) if isinstance(loader, Iterable) and not isinstance(loader, (Tensor, Mapping)) else loader
    if iterator is loader:
        raise LapwingError(
            f"Asked for SWAG on a loader, found {batches.describe(loader)}; an iterable of (inputs, targets) batches "
            "that can be gone through several times is needed: write [(x, y)] for one batch, or "
            "torch.utils.data.DataLoader(dataset, batch_size=100)."
        )
    for batch in iterator:
        inputs, targets = batches.split(batch)
        if batches.size(inputs):
            return inputs, targets
    raise LapwingError(
        f"Asked for SWAG on a loader of type {type(loader).__name__}, found no samples in it; at least one is needed: "
        "check the dataset's length, and drop_last=True with a batch size above it."
    )


def _inferred(targets: Any) -> Likelihood:
    return Gaussian() if targets.is_floating_point() else Categorical()


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
