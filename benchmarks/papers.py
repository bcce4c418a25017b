"""The papers' tables and figures on what is at hand; results go to `benchmarks/results/paper_*.json`.

`python -m benchmarks.papers ella_errors` runs one of them, without a name all.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.measure import write
from lapwing.reproduce import ella

SEEDS = range(5)


def summary(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Returns mean and standard error of every number over runs."""
    return {
        name: {
            "mean": statistics.fmean(run[name] for run in runs),
            "standard_error": statistics.stdev(run[name] for run in runs) / len(runs) ** 0.5 if len(runs) > 1 else 0.0,
        }
        for name in runs[0]
    }


def ella_regression() -> dict[str, Any]:
    """Figure 1 and Table 5: KL divergence to full LLA, with one noise variance for all and with the paper's two."""
    published = {"ELLA": 0.83, "KFAC": 0.35, "diagonal": 1.71, "last layer": 2.44}
    runs = {noise: [ella.illustrative_regression(seed, noise) for seed in SEEDS] for noise in (0.01, 0.0001)}
    return {
        "published (ELLA at noise variance 0.01, others 0.0001)": published,
        **{f"noise variance {noise}": summary(found) for noise, found in runs.items()},
    }


def ella_errors(counts: Sequence[int] = (4, 16, 64, 256, 1024, 2000), seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """Figure 2 (a, b): ε_Nyström and ε_ELLA on ELLA's MNIST network; one data subset, rows by seed."""
    model, train, val = ella.mnist_setup(0)
    start = time.perf_counter()
    exact = ella.exact_reference(model, ella.torch.cat([x for x, _ in train]), val, (1.0, 100.0))
    seconds = time.perf_counter() - start
    runs = []
    for seed in seeds:
        few = [count for count in counts if count < 2000 or seed < 2]
        runs.append(ella.nystrom_errors(model, train, val, exact, few, counts, seed))
        print(seed, runs[-1], flush=True)
    table = {}
    for row in runs[0]:
        same = [r for run in runs for r in run if (r["rows"], r["rank"]) == (row["rows"], row["rank"])]
        errors = [{k: v for k, v in r.items() if k not in ("rows", "rank")} for r in same]
        table[f"M={row['rows']}, K={row['rank']}"] = {"runs": len(same), **summary(errors)}
    return {"images": sum(len(x) for x, _ in train), "exact_seconds": seconds, "table": table}


def ella_cifar(seeds: Sequence[int] = (0, 1), shown: int = 4096) -> dict[str, Any]:
    """Table 1's row, Table 4, Figures 2 (c), 4 (b, c) and 6 on the CIFAR-10 ResNet-20."""
    ranks, found = (4, 8, 16, 20, 32, 64), []
    for seed in seeds:
        setup = ella.Cifar.load(seed, shown)
        keep, posterior, seconds = ella.cifar_ella(setup, rows=2000, rank=max(ranks), seed=seed)
        val, test = (ella.features(posterior, part) for part in (setup.val, setup.test))
        stops = ella.best_stop(keep.found, val, ranks)
        run: dict[str, Any] = {"seed": seed, "fit_seconds": seconds, "feature_seconds": val.seconds + test.seconds}
        run["MAP"] = ella.scores(test.outputs.softmax(-1), test.labels)
        run["K, best n and prior"] = {}
        for rank in ranks:
            n = min(stops, key=lambda n, rank=rank: stops[n][rank][0])
            loss, covariance = stops[n][rank]
            run["K, best n and prior"][rank] = {
                "n": n, "prior_precision": float(covariance.precision[0]), "validation_nll": loss,
                **ella.scores(test.predict(covariance).probs, test.labels),
            }  # fmt: skip
        run["n at K=20"] = {}
        for part in keep.found:
            at = {"best prior": stops[part.samples][20][1]}
            shorter = part.covariance.with_rank(20)
            for delta in (0.5, 5.0, 50.0):
                precision = ella.torch.full_like(shorter.precision, delta)
                at[f"prior precision {delta:g}"] = shorter.with_prior(precision, 1.0)
            run["n at K=20"][part.samples] = {
                name: ella.scores(test.predict(c).probs, test.labels) for name, c in at.items()
            }
        found.append(run)
        print(run, flush=True)
    return {"published": {"ELLA": 0.233, "MAP": 0.282}, "images": shown, "rows": 2000, "runs": found}


def ella_rows(seeds: Sequence[int] = (0, 1), shown: int = 2048) -> dict[str, Any]:
    """Table 4 over M at K <= 20, on 2 000 of the reported test images."""
    found = []
    for seed in seeds:
        setup = ella.Cifar.load(seed, shown, reported=2000)
        for rows in (8, 32, 128, 512):
            keep, posterior, _ = ella.cifar_ella(setup, rows, rank=min(20, rows), seed=seed)
            val, test = (ella.features(posterior, part) for part in (setup.val[:10], setup.test))
            rank = posterior.covariance.rank
            stops = ella.best_stop(keep.found, val, (rank,))
            n = min(stops, key=lambda n, rank=rank: stops[n][rank][0])
            chosen = ella.scores(test.predict(stops[n][rank][1]).probs, test.labels)
            found.append({"seed": seed, "rows": rows, "rank": rank, "n": n, **chosen})
            print(found[-1], flush=True)
    return {"images": shown, "runs": found}


EXPERIMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    function.__name__: function for function in (ella_regression, ella_errors, ella_cifar, ella_rows)
}


def main(names: Sequence[str]) -> None:
    """Runs the named experiments, all of them when none is named."""
    for name in names or EXPERIMENTS:
        start = time.perf_counter()
        results = EXPERIMENTS[name]()
        path = write(f"paper_{name}", {**results, "seconds": time.perf_counter() - start}, seed=SEEDS[0])
        print(f"{name}: {time.perf_counter() - start:.0f} s, {path}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
