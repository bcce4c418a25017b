"""Faults at random moments and in files: how many were tried, survived and lost.

A fit survives a fault where it ends all the same, with the posterior of a fit without it: equal bit by bit. A network
survives an interruption where it and torch's switches are as before. A file survives a process that is killed where it
is the old one or the new one, and a change of its bytes where it is refused or makes a posterior like others.

    python -m benchmarks.faults          # writes benchmarks/results/faults.json
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks.measure import write
from lapwing.posterior.storage import ABANDONED
from tests.network.test_untouched import assert_same, snapshot, switches
from tests.posterior import test_mutated_files as mutated

SEED = 0
SAMPLES, BATCH = 60, 6
"""Of the data of the fits."""

PAUSE = 0.002
"""Seconds that the loader takes for a batch, so that faults come while data are read too."""

KILLS = 60
"""So many fits are killed at least."""

INTERRUPTIONS, SAVES, FILES = 200, 100, 5000
"""So many fits and predictions are interrupted, processes killed while they save, and files changed in each way."""

FITS: dict[str, dict[str, Any]] = {
    "default": {},
    "EKFAC": {"method": lw.EKFAC()},
    "Full": {"method": lw.Full("primal"), "tune": lw.Evidence()},
    "ELLA": {"method": lw.ELLA(rank=5, rows=20)},
    "VaLLA": {"method": lw.VaLLA(5, lw.VariationalBound(steps=15))},
    "SampledLLA": {"method": lw.SampledLLA(4, lw.ConjugateGradients(tolerance=0.1), em_steps=2)},
    "MeanField": {"method": lw.MeanField(steps=25)},
}
"""Name -> options of `lw.fit`."""


@dataclass
class Tally:
    """What became of the faults of one kind.

    Attributes:
        tried: how many.
        survived: those after which all was as it must be.
        lost: the others.
    """

    tried: int = 0
    survived: int = 0
    lost: int = 0

    def add(self, survived: bool, count: int = 1) -> None:
        """Counts faults."""
        self.tried += count
        self.survived += count * survived
        self.lost += count * (not survived)


class Slow:
    """Batches that take some time."""

    def __init__(self, every: list[tuple[Tensor, Tensor]]) -> None:
        self.every = every

    def __len__(self) -> int:
        return len(self.every)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.every:
            time.sleep(PAUSE)
            yield batch


def problem() -> tuple[nn.Module, Tensor, Slow]:
    """Returns a network with gradients of a former step, its inputs and a loader."""
    torch.set_num_threads(1)
    logging.getLogger("lapwing").setLevel(logging.CRITICAL)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 4, generator=generator)
    y = (x.sum(1) + 0.5 * torch.randn(SAMPLES, generator=generator)).gt(0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).eval()
    model(x).sum().backward()
    return model, x, Slow(list(zip(x.split(BATCH), y.split(BATCH), strict=True)))


def fitted(name: str, checkpoint: Path | None, out: Path) -> None:
    """Fits, and saves the posterior; a process runs this and may be killed meanwhile."""
    model, _, loader = problem()
    options: dict[str, Any] = {} if checkpoint is None else {"checkpoint": checkpoint, "every": 1}
    lw.fit(model, loader, **FITS[name], **options).save(out)


def run(target: Callable[..., None], *arguments: Any, seconds: float | None = None) -> bool:
    """Runs a function in a process of its own; returns whether it ended before it was killed by SIGKILL."""
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    process.join(seconds)
    ended = process.exitcode == 0
    if process.exitcode is None:
        process.kill()
        process.join()
        ended = False
    elif process.exitcode > 0:
        raise RuntimeError(f"{target.__name__}{arguments} failed with exit code {process.exitcode}")
    return ended


def killed(name: str, kills: int, randomness: random.Random) -> Tally:
    """Kills fits at random moments, each until it ends by itself, and compares the posteriors."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        expected, out, checkpoint = (Path(folder) / part for part in ("expected", "out", "checkpoint"))
        start = time.monotonic()
        run(fitted, name, None, expected)
        seconds = time.monotonic() - start
        while tally.tried < kills:
            here, ended = 0, False
            while not ended:
                limit = randomness.uniform(0.2, 2.0) * seconds * 1.2**here  # for machines whose load changes
                ended = run(fitted, name, checkpoint, out, seconds=limit)
                here += not ended
            same = out.read_bytes() == expected.read_bytes() and not checkpoint.exists()
            tally.add(same, here)
            out.unlink()
    return tally


def saving(posteriors: list[lw.Posterior], path: Path) -> None:
    """Saves one posterior after the other for ever; a process runs this until it is killed."""
    while True:
        for posterior in posteriors:
            posterior.save(path)


def killed_while_saving(name: str, kills: int, randomness: random.Random) -> Tally:
    """Kills processes that save, and looks for a whole file, and for what they leave beside it."""
    model, _, loader = problem()
    posterior = lw.fit(model, loader, **FITS[name])
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out"
        posteriors = [posterior, replace(posterior, samples=SAMPLES + 1)]
        whole = []
        for each in posteriors:
            each.save(path)
            whole.append(path.read_bytes())
        while tally.tried < kills:
            run(saving, posteriors, path, seconds=randomness.uniform(0.02, 0.1))
            survived = path.read_bytes() in whole
            left = [other for other in Path(folder).iterdir() if other != path]
            for other in left:
                os.utime(other, (time.time() - 2 * ABANDONED,) * 2)  # as if it were long ago
            posterior.save(path)  # which sweeps up what the process left
            tally.add(survived and len(left) <= 1 and list(Path(folder).iterdir()) == [path])
    return tally


def interrupt(*_: Any) -> None:
    """Does what Ctrl-C does."""
    raise KeyboardInterrupt


def same(before: Any, after: Any) -> bool:
    """Returns whether nothing changed."""
    try:
        assert_same(before, after)
    except AssertionError as difference:
        print("changed:", difference)
        return False
    return True


def interrupted(name: str, count: int, randomness: random.Random) -> Tally:
    """Interrupts a fit with a checkpoint, its saving and its predictions, and does all of it again to the end."""
    model, x, loader = problem()
    tally, before = Tally(), (snapshot(model), switches())
    handler = signal.signal(signal.SIGALRM, interrupt)
    with tempfile.TemporaryDirectory() as folder:
        out, checkpoint = Path(folder) / "out", Path(folder) / "checkpoint"

        def work() -> None:
            posterior = lw.fit(model, loader, **FITS[name], checkpoint=checkpoint, every=1)
            posterior.save(out)
            posterior.predict(x)
            posterior.predict(x, via=lw.MonteCarlo(5))

        work()  # what is imported and traced once
        start = time.monotonic()
        work()
        seconds, expected = time.monotonic() - start, out.read_bytes()
        while tally.tried < count:
            stopped = False
            with suppress(KeyboardInterrupt):
                stopped = True
                signal.setitimer(signal.ITIMER_REAL, randomness.uniform(0.0, seconds) + 1e-6)
                work()
                stopped = False
                signal.setitimer(signal.ITIMER_REAL, 0)
            if not stopped:
                continue
            unchanged = same(before, (snapshot(model), switches()))
            torch.set_grad_enabled(True)
            work()
            tally.add(unchanged and out.read_bytes() == expected and list(Path(folder).iterdir()) == [out])
    signal.signal(signal.SIGALRM, handler)
    return tally


def changed_bytes(count: int, randomness: random.Random) -> dict[str, Tally]:
    """Changes bytes of files of every structure; the checksum must tell. Returns method -> what became of them."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    with tempfile.TemporaryDirectory() as folder:
        path, files = Path(folder) / "changed", mutated.saved(False, Path(folder))
        for _ in range(count):
            file = randomness.choice(files)
            data = file.data
            while data == file.data:
                data = mutated.bytes_changed(file.data, randomness)
            path.write_bytes(data)
            refused = False
            try:
                lw.load(path, file.model)
            except lw.LapwingError:
                refused = True
            except Exception as error:
                print("changed bytes:", repr(error))
            tallies[file.header["method"].split("(")[0]].add(refused)
    return dict(tallies)


def changed_contents(count: int, _: random.Random) -> dict[str, Tally]:
    """Changes headers and tensors under a checksum that fits. Returns method -> what became of them."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    with tempfile.TemporaryDirectory() as folder:
        path, files = Path(folder) / "changed", mutated.saved(False, Path(folder))
        for file in mutated.changes(count, files, path):
            survived = False
            try:
                mutated.outcome(path, file)
                survived = True
            except Exception as error:
                print("changed contents:", repr(error))
            tallies[file.header["method"].split("(")[0]].add(survived)
    return dict(tallies)


FAULTS: dict[str, Callable[[str, int, random.Random], Tally]] = {
    "SIGKILL": killed, "SIGKILL while saving": killed_while_saving, "KeyboardInterrupt": interrupted,
}  # fmt: skip
"""Kind of fault -> what tries it so often at a fit of that name."""


def tried(kind: str, count: int, seed: int = SEED) -> dict[str, Tally]:
    """Tries at least so many faults of a kind, over all fits; returns fit -> what became of them."""
    randomness, each = random.Random(seed), -(-count // len(FITS))
    return {name: FAULTS[kind](name, each, randomness) for name in FITS}


def main() -> None:
    """Tries all faults, prints and writes the results."""
    counts = zip(FAULTS, (KILLS, SAVES, INTERRUPTIONS), strict=True)
    every = {kind: tried(kind, count) for kind, count in counts}
    every["changed bytes"] = changed_bytes(FILES, random.Random(SEED))
    every["changed contents"] = changed_contents(FILES, random.Random(SEED))
    results = {kind: {name: asdict(tally) for name, tally in tallies.items()} for kind, tallies in every.items()}
    for kind, tallies in results.items():
        for name, tally in tallies.items():
            print(f"{kind:20} {name:18} " + ", ".join(f"{count} {what}" for what, count in tally.items()))
    write("faults", results, SEED)


if __name__ == "__main__":
    main()
