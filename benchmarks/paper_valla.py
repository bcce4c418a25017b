"""VaLLA's tables and figures (Ortega et al. 2024); results go to `benchmarks/results/paper_valla_*.json`.

`python -m benchmarks.paper_valla toy` runs one experiment, without a name all. Rows that a results file has are kept:
delete it to begin anew. Trained networks are kept in the folder that LAPWING_NETWORKS names.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.averages import averaged
from benchmarks.measure import RESULTS, write

CACHE = Path(os.environ.get("LAPWING_NETWORKS") or Path(tempfile.gettempdir()) / "lapwing_networks")


class Results:
    """Results by run and row, written after every row, with means and standard errors over the runs.

    Args:
        name: of the experiment.
        facts: what is true of all runs.
    """

    def __init__(self, name: str, facts: Mapping[str, Any]) -> None:
        self.name, self.facts = name, dict(facts)
        path = RESULTS / f"paper_{name}.json"
        self.runs: dict[str, dict[str, Any]] = json.loads(path.read_text())["results"]["runs"] if path.exists() else {}

    def add(self, run: str, row: str, make: Callable[[], Any]) -> None:
        """Makes a row that is not there, prints and writes it."""
        if row in self.runs.get(run, {}):
            return
        start = time.perf_counter()
        found = make()
        self.runs.setdefault(run, {})[row] = found
        print(f"{self.name} {run} {row}: {time.perf_counter() - start:.0f} s {_short(found)}", flush=True)
        self.write()

    def write(self) -> None:
        """Writes all rows, and means over runs that differ in the seed alone."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for run, rows in self.runs.items():
            groups.setdefault(run.partition("seed")[0].rstrip(" ,"), []).append(rows)
        table = {
            group: {
                row: averaged([_numbers(rows[row]) for rows in runs if row in rows])
                for row in dict.fromkeys(row for rows in runs for row in rows)
            }
            for group, runs in groups.items()
        }
        write(f"paper_{self.name}", {**self.facts, "table": table, "runs": self.runs}, seed=0)


def _numbers(value: Any) -> Any:
    """Returns nested numbers alone, lists as mappings."""
    if isinstance(value, Mapping):
        found = {key: _numbers(part) for key, part in value.items() if not str(key).startswith("curve of")}
        return {key: part for key, part in found.items() if part is not None}
    if isinstance(value, (list, tuple)):
        return {str(i): _numbers(part) for i, part in enumerate(value)}
    return float(value) if isinstance(value, (int, float)) else None


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        shown = {key: _short(part) for key, part in value.items() if not isinstance(part, (list, str))}
        return "{" + ", ".join(f"{key} {part}" for key, part in shown.items() if key != "rotated") + "}"
    return f"{value:.4g}" if isinstance(value, (int, float)) else ""


def toy(seeds: Sequence[int] = range(5)) -> None:
    """Figures 1 and 3: KL divergence and ratio of standard deviations to full LLA, at its δ and σ²."""
    from lapwing.reproduce import valla_toy

    results = Results("valla_toy", {"grid": valla_toy.GRID[:, 0].tolist(), "gaps": valla_toy.GAPS})
    for seed in seeds:
        task, run = once(lambda seed=seed: valla_toy.Toy(seed, cache=CACHE)), f"seed {seed}"
        results.add(run, "LLA", lambda task=task: task().own_row())
        for name, (method, params) in valla_toy.methods().items():
            results.add(run, name, lambda task=task, m=method, p=params, s=seed: task().row(m, p, s))


def toy_stopping(seeds: Sequence[int] = (0, 1, 2)) -> None:
    """Figure 2: what early stopping of δ does in the gaps; a fifth of the points held out."""
    from lapwing.reproduce import valla_toy

    results = Results("valla_toy_stopping", {"grid": valla_toy.GRID[:, 0].tolist(), "gaps": valla_toy.GAPS})
    for seed in seeds:
        task = once(lambda seed=seed: valla_toy.Toy(seed, 0.2, CACHE))
        results.add(f"seed {seed}", "fits", lambda task=task, seed=seed: valla_toy.stopped_rows(task(), seed=seed))


def tables(seeds: Sequence[int] = range(5), names: Sequence[str] = ()) -> None:
    """Figures 4 and 8: NLL, CRPS, CQM and its curve on regression tables."""
    from lapwing.reproduce import valla_tables
    from lapwing.reproduce.valla import TABLES

    results = Results("valla_tables", {"levels": valla_tables.LEVELS.tolist(), "units": TABLES})
    for seed in seeds:
        for name in names or TABLES:
            task = once(lambda name=name, seed=seed: valla_tables.TableTask.load(name, seed, CACHE))
            run = f"{name}, seed {seed}"
            results.add(run, "network", lambda task=task: task().network_scores())
            for label, (method, params) in valla_tables.METHODS.items():
                results.add(
                    run, label, lambda task=task, m=method, p=params, s=seed: valla_tables.tuned_rows(task(), s, m, p)
                )
            results.add(run, "VaLLA 100", lambda t=task, s=seed: valla_tables.published_row(t(), s))
            if seed == 0 and name in ("california_housing", "nyc_green_taxi_2023q1"):
                results.add(
                    run,
                    "VaLLA 100, not stopped",
                    lambda t=task, s=seed: valla_tables.published_row(t(), s, stopped=False),
                )


def images(
    seeds: Sequence[int] = (0, 1), names: Sequence[str] = ("mnist", "fashion_mnist"), tested: int = 1500
) -> None:
    """Figures 5 and 6: all methods on MNIST and Fashion-MNIST, two links, foreign and rotated images, seconds."""
    from lapwing.evaluation.rotations import rotate
    from lapwing.reproduce import valla_images

    results = Results("valla_images", {"tested": tested, "rotated": ROTATED, "angles": ANGLES})
    for seed in seeds:
        for name in names:

            @functools.cache
            def task(name: str = name, seed: int = seed) -> tuple[Any, Any]:
                found = valla_images.ImageTask.load(name, seed, tested, CACHE)
                return found, {angle: rotate(found.x[:ROTATED], angle) for angle in ANGLES}

            run = f"{name}, seed {seed}"
            results.add(run, "network", lambda task=task: task()[0].network_scores(task()[1]))
            for label, (method, params) in valla_images.METHODS.items():
                results.add(
                    run, label,
                    lambda t=task, m=method, p=params, s=seed: valla_images.tuned_scores(t()[0], s, t()[1], m, p),
                )  # fmt: skip
            results.add(run, "VaLLA 100", lambda t=task, s=seed: valla_images.published_row(t()[0], s, t()[1]))
            if seed == 0 and name == "fashion_mnist":
                results.add(
                    run, "VaLLA 100, 600 steps",
                    lambda t=task, s=seed: valla_images.published_row(t()[0], s, t()[1], 600),
                )  # fmt: skip
            results.add(run, "sampled LLA", lambda t=task, s=seed: valla_images.sampled_row(t()[0], s, t()[1]))


ANGLES = (0, 30, 60, 90, 120, 150, 180)
ROTATED = 300


def cifar(seeds: Sequence[int] = (0, 1), shown: int = 200, reported: int = 1000, each: int = 8) -> None:
    """Table 1's row and Figure 7 on the ResNet-20; 200 of the first 2 000 test images validate."""
    import lapwing as lw
    from lapwing.reproduce import valla_cifar

    results = Results("valla_cifar", {"images": shown, "reported": reported, "corrupted of a kind": each})
    for seed in seeds:
        task, run = once(lambda seed=seed: valla_cifar.CifarTask.load(seed, shown, reported, each)), f"seed {seed}"
        results.add(run, "MAP", lambda task=task: task().network_scores())

        def row(method: lw.Method, params: Any, early: bool, task: Any = task, seed: int = seed) -> Callable[[], Any]:
            def make() -> Any:
                val = task().setup.val[:2]
                return task().row(method, params, lw.EarlyStopping(val) if early else lw.Validation(val), seed)

            return make

        results.add(run, "last layer, early stopping", row(lw.Full(), lw.last_layer, True))
        results.add(run, "diagonal", row(lw.Diagonal(), lw.everything, False))
        results.add(run, "KFAC", row(lw.KFAC(), lw.everything, False))
        results.add(run, "VaLLA 100, closed form", row(lw.VaLLA(100), lw.everything, False))
        results.add(run, "ELLA, early stopping", row(lw.ELLA(rank=20, rows=200), lw.everything, True))
        results.add(run, "sampled LLA", lambda task=task, seed=seed: task().sampled_row(seed))


COUNTS = (1000, 10_000, 50_000, 200_000)


def cost() -> None:
    """Seconds and memory of one fit over N, of one step, and on larger networks."""
    import lapwing as lw
    from benchmarks.measure import LiveBytes
    from lapwing.reproduce import valla, valla_cost
    from lapwing.reproduce.loaders import batched

    results = Results("valla_cost", {"batch": 100, "network": "3 x 200 tanh MLP on taxi rows"})

    @functools.cache
    def setup() -> Any:
        data = valla.table("nyc_green_taxi_2023q1", 0)
        model = valla.trained((8, 200, 200, 200, 1), data.train, valla.TABLE, 0, data.name, CACHE)
        parts = (data.train, data.val, data.test)
        return model, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def one_fit(method: Any, count: int) -> dict[str, float]:
        model, x, y = setup()
        loader = batched(x[:count], y[:count], 100)
        spent, _ = valla_cost.fit_seconds(model, loader, method, likelihood=lw.Gaussian(0.2))
        with LiveBytes() as live:
            valla_cost.fit_seconds(model, loader, method, likelihood=lw.Gaussian(0.2))
        return {"seconds": spent, "peak MiB": live.peak / 2**20}

    methods: dict[str, tuple[Any, int]] = {
        "VaLLA 100, natural gradient, 20 steps": (lw.VaLLA(100, lw.NaturalGradient(20)), 200_000),
        "VaLLA 100, α-divergence, 10 steps": (lw.VaLLA(100, lw.AlphaDivergence(steps=10)), 200_000),
        "VaLLA 100, closed form": (lw.VaLLA(100), 10_000),
        "KFAC": (lw.KFAC(), 50_000),
        "ELLA, K = 20, M = 100": (lw.ELLA(rank=20, rows=100), 10_000),
    }
    for name, (method, most) in methods.items():
        for count in COUNTS:
            if count <= most:
                results.add("fit over N", f"{name}, N = {count}", functools.partial(one_fit, method, count))
    fits = {
        "natural gradient": lambda steps: lw.VaLLA(50, lw.NaturalGradient(steps)),
        "variational bound": lambda steps: lw.VaLLA(50, lw.VariationalBound(steps, then=lw.NaturalGradient(1))),
        "α-divergence": lambda steps: lw.VaLLA(50, lw.AlphaDivergence(steps=steps)),
    }
    for name, fit in fits.items():

        def step(fit: Any = fit) -> dict[str, float]:
            return {"seconds": valla_cost.step_seconds(fit, "MLP of 74 000 weights")}

        results.add("step, 74 000 weights, M = 50, batch 100, 1 thread", name, step)
    for name, points in (("ResNet-20", 100), ("ViT", 20), ("GPT-2", 20)):
        call = f"c.runs_at_all({name!r}, {points})"
        program = f"import json; from lapwing.reproduce import valla_cost as c; print(json.dumps({call}))"

        def alone(program: str = program) -> dict[str, float]:
            done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
            return json.loads(done.stdout.splitlines()[-1])

        results.add("networks", f"{name}, M = {points}", alone)


def run_named(experiments: Mapping[str, Callable[[], None]], names: Sequence[str]) -> None:
    """Runs the named experiments on one thread, all of them when none is named."""
    torch.set_num_threads(1)
    for name in names or experiments:
        experiments[name]()


def once(make: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that makes its value when it is first called."""
    return functools.cache(make)


EXPERIMENTS: dict[str, Callable[[], None]] = {
    "toy": toy,
    "toy_stopping": toy_stopping,
    "tables": tables,
    "images": images,
    "cifar": cifar,
    "cost": cost,
}


if __name__ == "__main__":
    run_named(EXPERIMENTS, sys.argv[1:])
