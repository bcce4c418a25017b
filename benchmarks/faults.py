"""Faults that a fit must survive, tried at random moments: how many were tried, survived and lost.

A fit survives a fault where it ends all the same, with the posterior of a fit without it: equal bit by bit.

    python -m benchmarks.faults          # writes benchmarks/results/faults.json
"""

from __future__ import annotations

import logging
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks.measure import write

SEED = 0
SAMPLES, BATCH = 60, 6
"""Of the data of the fits."""

PAUSE = 0.002
"""Seconds that the loader takes for a batch, so that faults come while data are read too."""

KILLS = 60
"""So many processes are killed at least."""

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
        survived: those after which the fit ended with the same posterior.
        lost: the others.
    """

    tried: int = 0
    survived: int = 0
    lost: int = 0


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


def fitted(name: str, checkpoint: Path | None, out: Path) -> None:
    """Fits, and saves the posterior; a process runs this and may be killed meanwhile."""
    torch.set_num_threads(1)
    logging.getLogger("lapwing").setLevel(logging.ERROR)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 4, generator=generator)
    y = (x.sum(1) + 0.5 * torch.randn(SAMPLES, generator=generator)).gt(0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).eval()
    loader = Slow(list(zip(x.split(BATCH), y.split(BATCH), strict=True)))
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
            tally.tried += here
            tally.survived += here * same
            tally.lost += here * (not same)
            out.unlink()
    return tally


FAULTS: dict[str, Callable[[str, int, random.Random], Tally]] = {"SIGKILL": killed}
"""Kind of fault -> what tries it so often at a fit of that name."""


def tried(count: int, seed: int = SEED) -> dict[str, dict[str, Tally]]:
    """Tries at least so many faults of each kind, over all fits; returns kind -> fit -> what became of them."""
    randomness, each = random.Random(seed), -(-count // len(FITS))
    return {kind: {name: fault(name, each, randomness) for name in FITS} for kind, fault in FAULTS.items()}


def main() -> None:
    """Tries all faults, prints and writes the results."""
    results = {kind: {name: asdict(tally) for name, tally in tallies.items()} for kind, tallies in tried(KILLS).items()}
    for kind, tallies in results.items():
        for name, tally in tallies.items():
            print(f"{kind:10} {name:12} " + ", ".join(f"{count} {what}" for what, count in tally.items()))
    write("faults", results, SEED)


if __name__ == "__main__":
    main()
