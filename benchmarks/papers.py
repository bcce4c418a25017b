"""The papers' tables and figures on what is at hand; results go to `benchmarks/results/paper_*.json`.

`python -m benchmarks.papers ella_errors` runs one of them, without a name all.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lapwing as lw
from benchmarks.measure import ratio, write
from lapwing.evaluation import COMMON, DIGITS, corrupt
from lapwing.evaluation.dead_weights import dead_parameters
from lapwing.reproduce import ella
from lapwing.reproduce import optimal_subspace as subspace

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


def ella_errors(counts: Sequence[int] = (4, 16, 64, 256, 1024, 2000), seeds: Sequence[int] = (0, 1)) -> dict[str, Any]:
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


def ella_rows(seeds: Sequence[int] = (0,), shown: int = 2048) -> dict[str, Any]:
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


def ella_corruptions(seed: int = 0, images: int = 30) -> dict[str, Any]:
    """Figures 3 and 4 (a, c): NLL and ECE on corrupted images, error against confidence, and time, for every method."""
    setup = ella.Cifar.load(seed, 2048)
    posteriors, fits = ella.cifar_posteriors(setup, seed)
    clean_x, labels = (ella.torch.cat(part)[:1000] for part in zip(*setup.test, strict=True))
    foreign = ella.fashion_as_cifar(1000)
    found: dict[str, Any] = {"images per kind and severity": images, "fits": fits, "clean": {}, "corrupted": {}}
    with ella.torch.no_grad():
        setup.model(clean_x[:100])
        start = time.perf_counter()
        for part in clean_x.split(100):
            setup.model(part)
        forward = time.perf_counter() - start
    for name, predict in posteriors.items():
        start = time.perf_counter()
        probs = ella.torch.cat([predict(part) for part in clean_x.split(100)])
        seconds = time.perf_counter() - start
        outside = ella.torch.cat([predict(part) for part in foreign.split(100)])
        found["clean"][name] = {
            **ella.scores(probs, labels), "forward passes": seconds / forward,
            "error against confidence": ella.error_against_confidence(probs, labels, outside),
        }  # fmt: skip
        print(name, found["clean"][name], flush=True)
    raw = ella.pixels(clean_x)
    for severity in range(1, 6):
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in posteriors}
        for i, kind in enumerate(COMMON):
            chosen = slice(images * i, images * (i + 1))
            x = ella.normalised(corrupt(raw[chosen], kind, severity, seed=seed))
            for name, predict in posteriors.items():
                rows[name].append(ella.scores(predict(x), labels[chosen]))
        found["corrupted"][severity] = {name: summary(kinds) for name, kinds in rows.items()}
        print(severity, found["corrupted"][severity], flush=True)
    return found


def ella_cost(rows: int = 2000, images: int = 2000) -> dict[str, Any]:
    """Cost of ELLA on the ResNet-20 (K = 20): its parts alone, the whole fit, prediction in forward passes."""
    setup, torch = ella.Cifar.load(0, images, reported=100), ella.torch
    x = setup.test[0][0]
    tangent = ella.Tangent.survey(setup.model, x[:4], memory=2**32)
    data = torch.cat([part for part, _ in setup.train])
    generator = torch.Generator().manual_seed(0)
    samples, outputs = (torch.randint(high, (rows,), generator=generator) for high in (images, 10))

    def timed(function: Callable[[], Any]) -> tuple[float, Any]:
        start = time.perf_counter()
        value = function()
        return time.perf_counter() - start, value

    def plain_rows() -> None:
        """A tenth of the rows by ordinary backward passes, one image each."""
        weights = [p for p in setup.model.parameters() if p.requires_grad]
        for sample, output in zip(samples.tolist()[: rows // 10], outputs.tolist(), strict=False):
            torch.autograd.grad(setup.model(data[sample : sample + 1])[0, output], weights)

    backward = 10 * timed(plain_rows)[0]
    written, jacobian = timed(lambda: ella.Anchors(tangent, (data,), samples, outputs).rows(torch.float32))
    gram = timed(partial(torch.matmul, jacobian, jacobian.T))[0]
    del jacobian
    method = lw.ELLA(rank=20, rows=rows)
    whole, posterior = timed(
        lambda: lw.fit(setup.model, setup.train, method, prior_precision=1.0, tune=None, memory=2**32)
    )
    projected = ella.features(posterior, setup.train).seconds
    with torch.no_grad():
        ratios = ratio(lambda: posterior.latent(x).variance, lambda: setup.model(x), rounds=8)
    return {
        "rows": rows, "images": images, "rows by plain backward passes": backward, "rows by the engine": written,
        "gram": gram, "features": projected, "fit": whole, "fit / parts": whole / (backward + gram + projected),
        "prediction of 100 images": ratios, "aim": {"fit / parts": 1.5, "prediction": 1.2 * 41},
    }  # fmt: skip


def ella_memory() -> dict[str, Any]:
    """Peak memory of a process that fits ELLA (K = 20) to a ResNet-18 of 11 million random weights; run it alone."""
    import resource

    torch = ella.torch
    model = ella.resnet18()
    x = torch.randn(200, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.arange(200) % 10
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    start = time.perf_counter()
    posterior = lw.fit(model, ella.batched(x, y, 50), lw.ELLA(rank=20, rows=200), prior_precision=1.0, tune=None)
    seconds = time.perf_counter() - start
    variance = posterior.latent(x[:20]).variance
    assert bool((variance > 0).all())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"weights": posterior.tangent.size, "fit_seconds": seconds, "GiB before": before, "peak GiB": peak, "aim": 6}


def averaged(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Averages nested results over runs: mean and standard error at every leaf that all runs have."""
    if not isinstance(runs[0], Mapping):
        values = [float(run) for run in runs]  # type: ignore[arg-type]
        spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        return {"mean": statistics.fmean(values), "standard_error": spread}
    return {str(k): averaged([run[k] for run in runs]) for k in runs[0] if all(k in run for run in runs)}


def subspace_images(seeds: Sequence[int] = (0, 1)) -> dict[str, Any]:
    """Figures 2, 3, 5 and 7 of the optimal-subspace paper on MNIST and Fashion-MNIST, with λ = 1 and λ tuned."""
    tasks: dict[str, Any] = {}
    accuracies, corrupted, tuned = {}, {}, {}
    for name in ("mnist", "fashion_mnist"):
        runs, runs_tuned = [], []
        for seed in seeds:
            task, inputs = subspace.image_task(name, seed)
            x, y = inputs["test"]
            accuracies[f"{name}, seed {seed}"] = float((task.model(x).argmax(-1) == y).double().mean())
            delta = lw.fit(task.model, task.train, lw.KFAC(), data_size=task.data_size).prior_precision
            tuned[f"{name}, seed {seed}"] = delta
            runs.append(subspace.compare_subspaces(task, inputs, RANKS, 1.0, seed)["test"])
            if seed == seeds[0]:
                runs_tuned.append(subspace.compare_subspaces(task, inputs, RANKS, float(delta), seed)["test"])
            if name == "mnist" and seed == seeds[0]:
                foreign = {kind: subspace.corrupted(x[:30], y[:30], kind, seed) for kind in DIGITS}
                corrupted = subspace.compare_subspaces(task, foreign, (100, 500, 1000), 1.0, seed)
            print(name, seed, runs[-1], flush=True)
        tasks[name], tasks[f"{name}, prior tuned"] = averaged(runs), averaged(runs_tuned)
    return {"tasks": tasks, "accuracy": accuracies, "tuned prior precision": tuned, "corrupted mnist": corrupted}


def subspace_given(seeds: Sequence[int] = (0, 1)) -> dict[str, Any]:
    """The same measures on ELLA's MNIST network, with λ = 1."""
    runs = []
    for seed in seeds:
        task, inputs = subspace.trained_task("mnist", seed, shown=400, test=100)
        runs.append(subspace.compare_subspaces(task, inputs, (10, 50, 200, 1000), 1.0, seed)["test"])
        print(seed, runs[-1], flush=True)
    return {"tasks": {"ELLA's MNIST network": averaged(runs)}}


def subspace_tables(seeds: Sequence[int] = (0, 1)) -> dict[str, Any]:
    """Figures 1 and 7 and Table 6: the 128-128 MLP on four tables, with λ = 1."""
    tasks: dict[str, Any] = {}
    dead: dict[str, Any] = {}
    for name in subspace.TABLES:
        runs, shares = [], []
        for seed in seeds:
            task, inputs = subspace.table_task(name, seed)
            runs.append(subspace.compare_subspaces(task, inputs, RANKS, 1.0, seed)["test"])
            tangent = ella.Tangent.survey(task.model, task.train[0][0])
            shares.append({"dead": float(dead_parameters(tangent, task.train))})
            print(name, seed, runs[-1], shares[-1], flush=True)
        tasks[name], dead[name] = averaged(runs), averaged(shares)
    return {"tasks": tasks, "dead parameters": dead}


def subspace_resnet(seed: int = 0) -> dict[str, Any]:
    """Figure 4: the trace on the ResNet-20, where the exact posterior cannot be had."""
    task, inputs = subspace.trained_task("cifar10", seed, shown=500, test=50)
    ways = ("low rank, KFAC", "low rank, diagonal", "low rank, prior", "subset, magnitude", "subset, diagonal")
    found = subspace.compare_subspaces(task, inputs, (10, 30, 100), 1.0, seed, ways, exact=False)
    return {"tasks": {"ResNet-20": averaged([found["test"]])}}


RANKS = (10, 50, 100, 200, 500, 1000)


EXPERIMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        ella_regression,
        ella_errors,
        ella_cifar,
        ella_rows,
        ella_corruptions,
        ella_cost,
        ella_memory,
        subspace_images,
        subspace_given,
        subspace_tables,
        subspace_resnet,
    )
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
