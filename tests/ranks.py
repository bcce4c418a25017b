"""Fits over several processes, beside those of one: processes that `tests/fitting/test_ranks.py` starts."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lapwing as lw
from lapwing.methods import IteratePass, State

Batches = list[tuple[Tensor, ...]]

SHARES = {2: [[12, 9], [10, 5, 4]], 3: [[12, 9], [], [10, 5, 4]], 4: [[], [12, 9], [10], [5, 4]]}
"""Sizes of the batches of each rank: uneven, and one rank without data where there are more than two."""

HELD_OUT = {2: [[6, 4], [5]], 3: [[6], [4, 5], []], 4: [[6], [], [4], [5]]}


def network(outputs: int, width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(4, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, outputs)
    return nn.Sequential(*layers).double().eval()


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


def everything(name: str, size: int) -> tuple[list[Batches], list[Batches]]:
    """Returns the training and the held-out batches of each rank for a case."""
    outputs, _ = ALL[name]
    x, y = data(outputs, 40, 1)
    return shares((x, y, 0.5 + (x[:, 0] > 0)), SHARES[size]), shares(data(outputs, 15, 3), HELD_OUT[size])


def in_steps(every: list[Batches]) -> Batches:
    """Returns the batches of the steps of all ranks."""
    steps = zip_longest(*every)
    return [
        tuple(torch.cat(parts) for parts in zip(*(b for b in step if b is not None), strict=True)) for step in steps
    ]


CASES: dict[str, tuple[int, Callable[[Any], dict[str, Any]]]] = {
    "default": (3, lambda held_out: {}),
    "default of a regression": (1, lambda held_out: {}),
    "KFAC of a regression": (1, lambda held_out: {"method": lw.KFAC()}),
    "validation": (3, lambda held_out: {"validation": held_out}),
    "ELLA": (3, lambda held_out: {
        "method": lw.ELLA(5, 20, sampling="balanced"), "tune": lw.BoundedEvidence(samples=17)}),
    "weights": (3, lambda held_out: {"method": lw.KFAC(), "sample_weights": True}),
    "Full": (3, lambda held_out: {"method": lw.Full("dual")}),
    "Full, primal": (3, lambda held_out: {"method": lw.Full("primal"), "weight_decay": 1e-3}),
    "Diagonal": (3, lambda held_out: {"method": lw.Diagonal(), "params": lw.everything, "data_size": 100}),
    "EKFAC": (3, lambda held_out: {"method": lw.EKFAC(), "tune": lw.Evidence(per_layer=True)}),
    "OptimalSubspace": (3, lambda held_out: {"method": lw.OptimalSubspace(4)}),
    "SubsetOfData": (3, lambda held_out: {"method": lw.SubsetOfData(11, "balanced", True)}),
    "SubsetOfWeights": (3, lambda held_out: {"method": lw.SubsetOfWeights(9)}),
    "TemperatureScaling": (3, lambda held_out: {"method": lw.TemperatureScaling()}),
    "VaLLA": (3, lambda held_out: {"method": lw.VaLLA(8)}),
    "SampledLLA": (1, lambda held_out: {"method": lw.SampledLLA(4)}),
    "validation of a regression": (1, lambda held_out: {"method": lw.KFAC(), "validation": held_out}),
    "validation of prefixes": (3, lambda held_out: {
        "method": lw.ELLA(5, 20), "tune": lw.EarlyStopping(held_out, prefixes=3)}),
    "KFAC, wide": (1, lambda held_out: {"method": lw.KFAC(), "params": lw.matching("*"), "prior_precision": 1.0}),
    "no tuning": (1, lambda held_out: {"method": lw.KFAC(), "tune": None}),
}  # fmt: skip
POINTS = lw.InducingPoints(torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4))
STEPS: dict[str, tuple[int, Callable[[Any], dict[str, Any]]]] = {
    "NaturalGradient": (3, lambda held_out: {"method": lw.VaLLA(POINTS, lw.NaturalGradient())}),
    "NaturalGradient, rate": (3, lambda held_out: {"method": lw.VaLLA(POINTS, lw.NaturalGradient(5, 0.3))}),
    "VariationalBound": (1, lambda held_out: {"method": lw.VaLLA(POINTS, lw.VariationalBound(4))}),
    "AlphaDivergence": (1, lambda held_out: {
        "method": lw.VaLLA(POINTS, lw.AlphaDivergence(steps=4, every=2, validation=held_out))}),
    "MeanField": (3, lambda held_out: {"method": lw.MeanField(4, initial_std=1e-9)}),  # so that its draws do not count
    "MeanField of a regression": (1, lambda held_out: {"method": lw.MeanField(4, initial_std=1e-9)}),
}  # fmt: skip
"""Fits by steps, each on the joined batches of the ranks."""

ALL = {**CASES, **STEPS}
FEW = ["default", "KFAC of a regression", "validation", "ELLA", "weights"]


def numbers(posterior: lw.Posterior) -> dict[str, Any]:
    """Returns what must be the same on every rank and in one process."""
    prediction = posterior.predict(torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4))
    moments = torch.cat([prediction.mean, prediction.std]) if hasattr(prediction, "std") else prediction.probs
    chosen = posterior.prior.precision, posterior.noise_variance, posterior.logit_temperature
    return {"chosen": chosen, "samples": posterior.samples, "method": str(posterior.method), "prediction": moments}


def fitted(name: str, training: Batches, held_out: Batches) -> dict[str, Any]:
    """Returns the numbers of a case."""
    outputs, options = ALL[name]
    chosen = options(held_out)
    loader: Any = training if chosen.get("sample_weights") else [batch[:2] for batch in training]
    width = 260 if name == "KFAC, wide" else 6  # whose decompositions are shared out
    return numbers(lw.fit(network(outputs, width), loader, **chosen))


def fit_cases(rank: int, size: int, names: list[str]) -> dict[str, Any]:
    """Fits cases on one rank."""
    results = {}
    for name in names:
        training, held_out = everything(name, size)
        results[name] = fitted(name, training[rank], held_out[rank])
    return results


def fit_cases_alone(size: int, names: list[str]) -> dict[str, Any]:
    """Fits the same in one process, on the shares one after another."""
    results = {}
    for name in names:
        training, held_out = everything(name, size)
        joined = in_steps(training) if name in STEPS else [*chain(*training)]
        results[name] = fitted(name, joined, [*chain(*held_out)])
    return results


def padded(rank: int, size: int, samples: int) -> dict[str, Any]:
    """Fits on the share of a `DistributedSampler` that repeats samples."""
    dataset = TensorDataset(*data(1, samples, 1))
    sampler = DistributedSampler(dataset, size, rank, shuffle=False)
    return numbers(lw.fit(network(1), DataLoader(dataset, 3, sampler=sampler), lw.KFAC()))


def other_fits(rank: int, size: int) -> dict[str, Any]:
    """Fits after a former fit, at positions, and with all data on every rank."""
    training, _ = everything("default", size)
    loader = [batch[:2] for batch in training[rank]]
    return others(loader) | {"same data": same_data(rank, size)}


def others(loader: Any) -> dict[str, Any]:
    """Returns the numbers of fits that begin with another one, and of one whose outputs have positions."""
    first = lw.fit(network(3), loader, lw.KFAC(), prior_precision=1.0)
    rows = lw.fit(network(3), loader, lw.Full("primal"), prior_precision=1.0)
    places = [(x[:, None].expand(-1, 2, -1), y[:, None].expand(-1, 2)) for x, y in loader]
    further = {
        "update": first.update(loader), "update of rows": rows.update(loader, tune=lw.Evidence()),
        "prior": lw.fit(network(3), loader, prior=first),
    }  # fmt: skip
    positions = lw.fit(network(3), places, lw.KFAC())
    return {**{name: numbers(fit) for name, fit in further.items()}, "positions": positions.prior.precision}


def same_data(rank: int, size: int) -> str:
    """Returns what is logged where every rank shows all data."""
    with logged() as records:
        lw.fit(network(3), data(3, 10, 0), lw.KFAC(), tune=None)
    return " ".join(record.getMessage() for record in records)


class Failing(list):
    """Batches that raise half-way."""

    def __iter__(self) -> Any:
        yield self[0]
        raise OSError("the disk is gone")


def refused(function: Callable[[], Any]) -> str:
    """Returns the error that a function raises."""
    try:
        function()
    except (lw.LapwingError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Stopping(list):
    """Batches that raise after so many."""

    def __init__(self, every: Any, left: int) -> None:
        super().__init__(every)
        self.left = left

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            if not self.left:
                raise OSError("the disk is gone")
            self.left -= 1
            yield batch


ENOUGH = 10**6
"""More batches than any fit loads."""

SUMS = [
    "default", "KFAC of a regression", "ELLA", "EKFAC", "Full", "SubsetOfData", "TemperatureScaling", "weights",
    "validation of prefixes",
]  # fmt: skip
SOLVES = ["VaLLA", "SampledLLA", *STEPS]
"""Cases whose ranks are at one step, or one solve."""


def bits(posterior: lw.Posterior) -> dict[str, Any]:
    """Returns what must be the same to the bit."""
    numbers = {"precision": posterior.prior.precision, "noise": posterior.noise_variance, "n": posterior.samples}
    return {**posterior.covariance.tensors(), **posterior.statistics, **posterior.history, **numbers}


def interrupted(
    rank: int, size: int, folder: Path, names: list[str], parts: list[float], lost: str = ""
) -> dict[str, Any]:
    """Fits with checkpoints, where the highest rank is interrupted after parts of the batches of a fit; and without.

    Args:
        rank: of this process.
        size: how many there are.
        folder: for files.
        names: of cases.
        parts: of the batches that the highest rank loads in a fit without a checkpoint.
        lost: "file" if the highest rank then finds no file; "write" if it finds that of the first interruption.

    Returns:
        For each case what the resumed fit has, what a fit without a checkpoint has, the errors, and what was logged, of
        the resumed fit alone where something was lost.
    """
    return {name: _interrupted(rank, size, folder / f"{name}.safetensors", name, parts, lost) for name in names}


def _interrupted(
    rank: int, size: int, path: Path, name: str, parts: list[float], lost: str
) -> tuple[Any, Any, list[str], str]:
    outputs, options = ALL[name]
    training, held_out = everything(name, size)
    chosen = options(held_out[rank])
    loader: Any = training[rank] if chosen.get("sample_weights") else [batch[:2] for batch in training[rank]]

    def fit(loader: Stopping, **kept: Any) -> dict[str, Any]:
        return bits(lw.fit(network(outputs), loader, **chosen, **kept))

    highest, errors, files = rank == size - 1, [], []
    mine, whole = path.with_name(f"{path.name}.{rank}"), Stopping(loader, ENOUGH)
    expected = fit(whole)
    with logged() as records:
        for part in parts:
            stopping = Stopping(loader, round(part * (ENOUGH - whole.left)) if highest else ENOUGH)
            errors.append(refused(lambda stopping=stopping: fit(stopping, checkpoint=path, every=1)))
            files.append(mine.read_bytes() if highest and mine.exists() else b"")
        if lost:
            records.clear()
            if highest:
                mine.unlink(missing_ok=True)
                if lost == "write" and files[0]:
                    mine.write_bytes(files[0])
        resumed = fit(Stopping(loader, ENOUGH), checkpoint=path, every=1)
    return resumed, expected, errors, " ".join(record.getMessage() for record in records)


@contextlib.contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    """Collects what lapwing logs."""
    records: list[logging.LogRecord] = []
    log, handler = logging.getLogger("lapwing"), logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    yield records
    log.removeHandler(handler)
    log.setLevel(level)


class Slow(list):
    """Batches that take a while, so that kills come between them."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            time.sleep(0.01)
            yield batch


def kill_at_random(
    folder: Path, size: int, kills: int, method: lw.Method
) -> tuple[int, int, dict[str, Any], dict[str, Any]]:
    """Kills one rank of a fit or all at random moments, and starts them again; a fit that ends is followed by another.

    Args:
        folder: for files.
        size: how many ranks.
        kills: how many at least.
        method: of the fit.

    Returns:
        How often ranks were killed, how many fits ended, what the latest of these has, and a fit without a kill.
    """
    context, random = multiprocessing.get_context("fork"), torch.Generator().manual_seed(1)

    def start(checkpoint: Path | None) -> list[Any]:
        tasks = [(_slow_fit, method, checkpoint)]
        group = [context.Process(target=_rank, args=(folder, rank, size, tasks, 30.0)) for rank in range(size)]
        (folder / "group").unlink(missing_ok=True)
        for process in group:
            process.start()
        return group

    def wait(group: list[Any], seconds: float) -> bool:
        end = time.monotonic() + seconds
        for process in group:
            process.join(max(0.0, end - time.monotonic()))
        return all(process.exitcode == 0 for process in group)

    assert wait(start(None), 60.0)
    expected, count, ended, longest = torch.load(folder / "0.pt", weights_only=False)[0], 0, 0, 0.2
    while count < kills or not ended:
        group = start(folder / "fit")
        done, longest = wait(group, longest * float(torch.rand((), generator=random))), 1.1 * longest
        first = int(torch.randint(2 * size, (), generator=random))
        if first < size and group[first].exitcode is None:  # one alone, and soon the others
            group[first].kill()
            group[first].join()
            count += 1
            wait(group, 3.0)
        for process in group:
            count += process.exitcode is None
            process.kill()
            process.join()
        ended, longest = ended + done, 0.2 if done else longest
    return count, ended, torch.load(folder / "0.pt", weights_only=False)[0], expected


def _slow_fit(rank: int, size: int, method: lw.Method, checkpoint: Path | None) -> dict[str, Any]:
    x, y = data(3, 120, 1)
    parts = shares((x, y), [[4] * 12, [4] * 18])
    return bits(lw.fit(network(3), Slow(parts[rank]), method, checkpoint=checkpoint, every=checkpoint and 1))


def never_ending(rank: int, size: int, folder: Path) -> str:
    """Leaves the checkpoint of a fit that is interrupted."""
    training, _ = everything("default", size)
    loader: Any = [batch[:2] for batch in training[rank]]
    path = folder / "left.safetensors"
    return refused(lambda: lw.fit(network(3), Stopping(loader, 7 + rank), lw.KFAC(), checkpoint=path, every=1))


class OwnSteps(IteratePass):
    """Steps of a method from outside, which know of no other process."""

    label, steps = "own steps", 1

    def init(self) -> State:
        return State()

    def step(self, state: State, batch: Any, generator: Any) -> None:
        pass


class OwnMethod(lw.Method):
    def passes(self, problem: Any) -> Any:
        yield OwnSteps()


def fail(rank: int, size: int) -> dict[str, str]:
    """Fails on the highest rank alone, in several ways."""
    training, _ = everything("default", size)
    loader: Any = [batch[:2] for batch in training[rank]]
    other, highest = network(3), rank == size - 1
    if highest:
        other[0].weight.data += 1
    errors = {
        "while it loads": refused(lambda: lw.fit(network(3), Failing(loader) if highest else loader, lw.KFAC())),
        "other weights": refused(lambda: lw.fit(other, loader, lw.KFAC())),
        "another method": refused(lambda: lw.fit(network(3), loader, lw.Diagonal() if highest else lw.KFAC())),
        "another shape": refused(lambda: lw.fit(network(3), [(x[:, :3], y) for x, y in loader] if highest else loader)),
    }
    held_out: Any = everything("default", size)[1][rank]
    options: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "prior_precision": ({"prior_precision": 2.0}, {"prior_precision": 1}),
        "prior_mean": ({"prior_mean": {"3.bias": torch.ones(3)}}, {"prior_mean": {"3.bias": torch.zeros(3)}}),
        "tune": ({"tune": lw.Evidence()}, {"tune": None}),
        "a tuning's": ({"tune": lw.Validation(held_out)}, {"tune": lw.Validation(held_out, points=9)}),
        "seed": ({"seed": 1}, {}),
        "validation": ({"validation": held_out}, {}),
    }
    for name, pair in options.items():
        errors[name] = refused(partial(lw.fit, network(3), loader, lw.KFAC(), **pair[highest]))
    errors["steps from outside"] = refused(lambda: lw.fit(network(3), loader, OwnMethod()))
    return errors | {"then": refused(lambda: lw.fit(network(3), loader, lw.KFAC()))}


def die(rank: int, size: int) -> str:
    """Kills the highest rank in the middle of a pass."""

    class Deadly(list):
        def __iter__(self) -> Any:
            yield self[0]
            os.kill(os.getpid(), signal.SIGKILL)

    training, _ = everything("default", size)
    loader = [batch[:2] for batch in training[rank]]
    return refused(lambda: lw.fit(network(3), Deadly(loader) if rank == size - 1 else loader, lw.KFAC()))


def run(folder: Path, size: int, tasks: Sequence[tuple[Any, ...]], seconds: float = 60.0) -> list[list[Any] | None]:
    """Runs functions on the ranks of a gloo group; returns what each of them returned, by rank; None where it died.

    Args:
        folder: for files.
        size: how many ranks.
        tasks: a function of this file and its arguments after rank and size.
        seconds: the timeout of the group.
    """
    context = multiprocessing.get_context("spawn")
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
