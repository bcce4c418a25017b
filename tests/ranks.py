"""Fits over several processes: what the processes run that `tests/fitting/test_ranks.py` starts."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lapwing as lw

Batches = list[tuple[Tensor, ...]]

SHARES = {2: [[12, 9], [10, 5, 4]], 3: [[12, 9], [], [10, 5, 4]]}
"""Sizes of the batches of each rank: uneven, and one of three ranks without data."""

HELD_OUT = {2: [[6, 4], [5]], 3: [[6], [4, 5], []]}


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, outputs)).double().eval()


def data(outputs: int, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    if outputs > 1:
        return x, torch.randint(outputs, (samples,), generator=generator)
    noise = torch.randn(samples, 1, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin() + 0.3 * noise


def shares(tensors: Sequence[Tensor], sizes: list[list[int]]) -> list[Batches]:
    """Cuts tensors into the batches of each rank, in order."""
    parts = iter(zip(*(x.split([size for own in sizes for size in own]) for x in tensors), strict=True))
    return [[next(parts) for _ in own] for own in sizes]


def training(outputs: int, size: int) -> list[Batches]:
    return shares(data(outputs, 40, 1), SHARES[size])


CASES: dict[str, tuple[int, Callable[[Any], dict[str, Any]]]] = {
    "default": (3, lambda held_out: {}),
    "default of a regression": (1, lambda held_out: {}),
    "KFAC of a regression": (1, lambda held_out: {"method": lw.KFAC()}),
    "validation": (3, lambda held_out: {"validation": held_out}),
    "validation of a link": (3, lambda held_out: {"tune": lw.Validation(held_out, link=lw.Probit(scale="class"))}),
    "ELLA": (3, lambda held_out: {
        "method": lw.ELLA(5, 20, sampling="balanced"), "tune": lw.BoundedEvidence(samples=17)}),
    "weights": (3, lambda held_out: {"method": lw.KFAC(), "sample_weights": True}),
    "EKFAC": (3, lambda held_out: {"method": lw.EKFAC(), "tune": lw.Evidence(per_layer=True)}),
    "validation of prefixes": (3, lambda held_out: {
        "method": lw.ELLA(5, 20), "tune": lw.EarlyStopping(held_out, prefixes=3)}),
    "Full": (3, lambda held_out: {"method": lw.Full("dual")}),
    "Full, primal": (3, lambda held_out: {"method": lw.Full("primal"), "weight_decay": 1e-3}),
    "Diagonal": (3, lambda held_out: {"method": lw.Diagonal(), "params": lw.everything, "data_size": 100}),
    "rank by evidence": (3, lambda held_out: {"method": lw.OptimalSubspace(4), "tune": lw.Evidence(rank_gap=2.0)}),
    "rank by validation": (3, lambda held_out: {
        "method": lw.ELLA(5, 20), "tune": lw.Validation(held_out, ranks=(1, 3))}),
    "SubsetOfData": (3, lambda held_out: {"method": lw.SubsetOfData(11, "balanced")}),
    "SubsetOfWeights": (3, lambda held_out: {"method": lw.SubsetOfWeights(9)}),
    "TemperatureScaling": (3, lambda held_out: {"method": lw.TemperatureScaling()}),
    "VaLLA": (3, lambda held_out: {"method": lw.VaLLA(8)}),
    "validation of a regression": (1, lambda held_out: {"method": lw.KFAC(), "validation": held_out}),
    "no tuning": (1, lambda held_out: {"method": lw.KFAC(), "tune": None}),
    "noise of residuals": (1, lambda held_out: {
        "method": lw.KFAC(), "likelihood": lw.StudentT(noise="input"), "validation": held_out}),
    "noise of training residuals": (1, lambda held_out: {
        "likelihood": lw.Gaussian(noise="input"), "tune": lw.BoundedEvidence(samples=4)}),
    "counts": (1, lambda held_out: {"method": lw.KFAC(), "likelihood": lw.Poisson()}),
    "predicted noise": (1, lambda held_out: {
        "method": lw.KFAC(), "likelihood": lw.HeteroscedasticGaussian(),
        "forward": lambda net, x: net(x).repeat(1, 2) - torch.tensor([0.0, 5.0])}),
    "noise and prefixes": (1, lambda held_out: {
        "method": lw.ELLA(5, 20), "likelihood": lw.Gaussian(noise="input"),
        "tune": lw.EarlyStopping(held_out, prefixes=3)}),
}  # fmt: skip
FEW = ["default", "KFAC of a regression", "ELLA", "noise of residuals"]


def numbers(posterior: lw.Posterior) -> dict[str, Any]:
    """Returns what must be the same on every rank and in one process."""
    prediction = posterior.predict(torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4))
    moments = torch.cat([prediction.mean, prediction.std]) if hasattr(prediction, "std") else prediction.probs
    chosen = posterior.prior.precision, posterior.noise_variance, posterior.logit_temperature
    return {"chosen": chosen, "samples": posterior.samples, "method": str(posterior.method), "prediction": moments}


def fitted(name: str, size: int, join: Callable[[list[Batches]], Batches]) -> dict[str, Any]:
    """Returns the numbers of a case, on the batches that `join` makes of the batches of all ranks."""
    outputs, options = CASES[name]
    chosen = options(join(shares(data(outputs, 15, 3), HELD_OUT[size])))
    every = training(outputs, size)
    if chosen.get("sample_weights"):
        every = [[(x, y, 0.5 + (x[:, 0] > 0)) for x, y in part] for part in every]
    if name == "counts":
        every = [[(x, (8 * y).abs().round()) for x, y in part] for part in every]
    return numbers(lw.fit(network(outputs), join(every), **chosen))


def fit_cases(rank: int, size: int, names: list[str]) -> dict[str, Any]:
    return {name: fitted(name, size, lambda every: every[rank]) for name in names}


def fit_cases_alone(size: int, names: list[str]) -> dict[str, Any]:
    """Fits the same in one process, on the shares one after another."""
    return {name: fitted(name, size, lambda every: [*chain(*every)]) for name in names}


ORDER = torch.arange(40)
LABELS = {
    "mahalanobis": ORDER % 3, "knn": ORDER % 3, "one class": ORDER.double(), "posterior": ORDER % 3,
    "a class of one rank": torch.where(ORDER == 39, 7, ORDER % 2),
    "all ignored on one rank": torch.where(ORDER < 21, -100, ORDER % 3),
}  # fmt: skip
"""Kind of a detector -> labels of its training data; the first rank has 21 samples."""


def scores(kind: str, size: int, join: Callable[[list[Batches]], Batches]) -> Tensor:
    """Returns the scores of a detector of the batches that `join` makes of the batches of all ranks."""
    every = shares((data(3, 40, 1)[0], LABELS[kind]), SHARES[size])
    x = torch.linspace(-2, 2, 20, dtype=torch.float64).reshape(5, 4)
    if kind == "posterior":
        posterior = lw.fit(network(3), join(every), lw.KFAC(), prior_precision=1.0, progress=False)
        held_out = join(shares(data(3, 15, 7), HELD_OUT[size]))
        return lw.novelty(posterior, join(every), held_out=held_out).p_value(x)
    return lw.novelty(network(3), join(every), "knn" if kind == "knn" else "mahalanobis")(x)


def novelties(rank: int, size: int) -> dict[str, Any]:
    """Returns the scores of detectors of all ranks, and the error if the ranks want different detectors."""
    share = training(3, size)[rank]
    error = refused(lambda: lw.novelty(network(3), share, "knn" if rank else "mahalanobis"))
    return {"error": error} | {kind: scores(kind, size, lambda every: every[rank]) for kind in LABELS}


def novelties_alone(size: int) -> dict[str, Tensor]:
    return {kind: scores(kind, size, lambda every: [*chain(*every)]) for kind in LABELS}


def known(rank: int, size: int) -> list[str]:
    """Returns the warnings of a fit whose held-out data are the training data of the next rank."""
    every, texts = training(3, size), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lapwing").addHandler(handler)
    lw.fit(network(3), every[rank], validation=every[(rank + 1) % size][1:])
    logging.getLogger("lapwing").removeHandler(handler)
    return [text for text in texts if "training samples" in text]


def padded(rank: int, size: int, samples: int) -> dict[str, Any]:
    """Fits on the share of a `DistributedSampler` that repeats samples, with a function that knows the rank."""
    dataset = TensorDataset(*data(1, samples, 1))
    sampler = DistributedSampler(dataset, size, rank, shuffle=False)
    loader = DataLoader(dataset, 3, sampler=sampler)
    return numbers(lw.fit(network(1), loader, lw.KFAC(), forward=lambda model, x: model(x) + 0 * rank))


def further(loader: Any) -> dict[str, Any]:
    """Returns the numbers of fits that begin with another one, and of one whose outputs have positions."""
    first = lw.fit(network(3), loader, lw.KFAC(), prior_precision=1.0)
    rows = lw.fit(network(3), loader, lw.Full("primal"), prior_precision=1.0)
    sums = [(x, x.sum(1, keepdim=True)) for x, _ in loader]
    untuned = lw.fit(network(1), sums, lw.KFAC(), tune=None)
    places = [(x[:, None].expand(-1, 2, -1), y[:, None].expand(-1, 2)) for x, y in loader]
    fits = {
        "update": first.update(loader), "update of rows": rows.update(loader, tune=lw.Evidence()),
        "update on held-out data": untuned.update(sums, tune=lw.Validation(sums)),
        "prior": lw.fit(network(3), loader, prior=first), "positions": lw.fit(network(3), places, lw.KFAC()),
    }  # fmt: skip
    return {name: numbers(fit) for name, fit in fits.items() if name != "positions"} | {
        "positions": fits["positions"].prior.precision
    }


def further_of_share(rank: int, size: int) -> dict[str, Any]:
    return further(training(3, size)[rank])


class Failing(list):
    """Batches that raise an error after a number of them, in all passes together."""

    def __init__(self, batches: Batches, left: int) -> None:
        super().__init__(batches)
        self.left = left

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            if not self.left:
                raise OSError("the disk is gone")
            self.left -= 1
            yield batch


def refused(function: Callable[[], Any]) -> str:
    """Returns the error that a function raises."""
    try:
        function()
    except (lw.LapwingError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fail(rank: int, size: int) -> dict[str, str]:
    """Fails on the last rank only, in several ways."""
    loader: Any = training(3, size)[rank]
    held_out: Any = shares(data(3, 15, 3), HELD_OUT[size])[rank]
    fit, last = partial(lw.fit, network(3)), rank == size - 1
    other = network(3)
    other[0].weight.data += last
    errors = {
        "while it loads": refused(lambda: fit(Failing(loader, 3) if last else loader, lw.KFAC())),
        "held-out data": refused(lambda: fit(loader, validation=Failing(held_out, 1) if last else held_out)),
        "other weights": refused(lambda: lw.fit(other, loader, lw.KFAC())),
        "method": refused(lambda: fit(loader, lw.Diagonal() if last else lw.KFAC())),
        "another shape": refused(lambda: fit([(x[:, :3], y) for x, y in loader] if last else loader)),
        "prior_precision": refused(lambda: fit(loader, prior_precision=1 if last else 2.0)),
        "tune": refused(lambda: fit(loader, tune=lw.Validation(held_out, points=9 if last else 25))),
        "tuning": refused(lambda: fit(loader, tune=lw.Validation([*held_out, (held_out[0][0], held_out[0][1] + 7)]))),
        "steps": refused(lambda: fit(loader, lw.MeanField(4))),
        "solves": refused(lambda: fit(loader, lw.SampledLLA(4))),
    }
    return errors | {"then": refused(lambda: fit(loader, lw.KFAC()))}


def interrupted(rank: int, size: int, path: Path) -> tuple[str, int, Any, Any]:
    """Fits with a checkpoint, where the last rank fails at the end of the second pass; goes on; and fits without one.

    Returns:
        The error, the number of batches that the resumed fit did not read, and the two fits.
    """
    loader, enough = Failing(training(3, size)[rank], 1000), 1000
    fit = partial(lw.fit, network(3), loader, lw.EKFAC(), tune=None)
    whole = fit(checkpoint=path)
    count = enough - loader.left
    if rank == size - 1:
        loader.left = count - 1
    error = refused(lambda: fit(checkpoint=path))
    loader.left = enough
    resumed = fit(checkpoint=path)
    return error, count - (enough - loader.left), bits(resumed), bits(whole)


def bits(posterior: lw.Posterior) -> dict[str, Any]:
    """Returns what must be the same to the bit."""
    return {**posterior.covariance.tensors(), **posterior.statistics, "precision": posterior.prior.precision}


def die(rank: int, size: int) -> str:
    """Kills the last rank in the middle of a pass."""

    class Deadly(list):
        def __iter__(self) -> Any:
            yield self[0]
            os.kill(os.getpid(), signal.SIGKILL)

    loader = training(3, size)[rank]
    return refused(lambda: lw.fit(network(3), Deadly(loader) if rank == size - 1 else loader, lw.KFAC()))


def run(folder: Path, size: int, tasks: Sequence[tuple[Any, ...]], seconds: float = 60.0) -> list[list[Any] | None]:
    """Runs functions on the ranks of a gloo group; returns what each of them returned, by rank; None where it died.

    Args:
        folder: for files.
        size: number of ranks.
        tasks: a function of this file and its arguments after rank and size.
        seconds: the timeout of the group.
    """
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload([__name__])  # torch is imported once, not by each rank
    group = [context.Process(target=_rank, args=(folder, rank, size, tasks, seconds)) for rank in range(size)]
    for process in group:
        process.start()
    for process in group:
        process.join()
    paths = [folder / f"{rank}.pt" for rank in range(size)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in paths]


def _rank(folder: Path, rank: int, size: int, tasks: Sequence[tuple[Any, ...]], seconds: float) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", f"file://{folder}/group", timedelta(seconds=seconds), rank=rank, world_size=size
    )
    torch.save([function(rank, size, *arguments) for function, *arguments in tasks], folder / f"{rank}.pt")
