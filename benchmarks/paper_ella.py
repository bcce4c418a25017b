"""ELLA's tables and figures (Deng et al. 2022) from `lapwing.reproduce`; `benchmarks.papers` runs them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.averages import averaged
from lapwing.covariance import LowRank
from lapwing.evaluation import COMMON, corrupt
from lapwing.reproduce import ella_baselines as baselines
from lapwing.reproduce import ella_cifar as cifar
from lapwing.reproduce import ella_exact as exact


def ella_regression(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Figure 1 and Table 5: KL divergence to full LLA, with one noise variance for all and with the paper's two."""
    published = {"ELLA": 0.83, "KFAC": 0.35, "diagonal": 1.71, "last layer": 2.44}
    runs = {noise: [exact.illustrative_regression(seed, noise) for seed in seeds] for noise in (0.01, 0.0001)}
    return {
        "published (ELLA at noise variance 0.01, others 0.0001)": published,
        **{f"noise variance {noise}": averaged(found) for noise, found in runs.items()},
    }


def ella_errors(
    counts: Sequence[int] = (4, 16, 64, 256, 1000), seeds: Sequence[int] = (0, 1), shown: int = 1000
) -> dict[str, Any]:
    """Figure 2 (a, b): ε_Nyström and ε_ELLA on ELLA's MNIST network; one data subset, rows by seed."""
    model, train, val = exact.mnist_setup(0, shown)
    start = time.perf_counter()
    reference = exact.exact_reference(model, torch.cat([x for x, _ in train]), val, (1.0, 100.0))
    seconds = time.perf_counter() - start
    print(f"exact: {seconds:.0f} s", flush=True)
    runs = []
    for seed in seeds:
        found = exact.nystrom_errors(model, train, val, reference, counts, counts, seed)
        runs.append({f"M={row.pop('rows')}, K={row.pop('rank')}": row for row in found})
        print(seed, runs[-1], flush=True)
    return {"images": shown, "seeds": len(seeds), "exact_seconds": seconds, "table": averaged(runs)}


def ella_cifar(seeds: Sequence[int] = (0, 1), shown: int = 4096) -> dict[str, Any]:
    """Table 1's row, Table 4, Figures 2 (c), 4 (b, c) and 6 on the CIFAR-10 ResNet-20."""
    ranks, found = (4, 8, 16, 20, 32, 64), []
    for seed in seeds:
        setup = cifar.Cifar.load(seed, shown)
        keep, posterior, seconds = cifar.cifar_ella(setup, rows=2000, rank=max(ranks), seed=seed)
        val, test = (cifar.features(posterior, part) for part in (setup.val, setup.test))
        stops = cifar.best_stop(keep.found, val, ranks)
        run: dict[str, Any] = {"seed": seed, "fit_seconds": seconds, "feature_seconds": val.seconds + test.seconds}
        run["MAP"] = cifar.scores(test.outputs.softmax(-1), test.labels)
        run["K, best n and prior"] = {}
        for rank in ranks:
            n, loss, covariance = cifar.best(stops, rank)
            run["K, best n and prior"][rank] = {
                "n": n, "prior_precision": float(covariance.precision[0]), "validation_nll": loss,
                **cifar.scores(test.predict(covariance).probs, test.labels),
            }  # fmt: skip
        run["n at K=20"] = {}
        for part in keep.found:
            at = {"best prior": stops[part.samples][20][1]}
            assert isinstance(part.covariance, LowRank)
            shorter = part.covariance.with_rank(20)
            for delta in (0.5, 5.0, 50.0):
                precision = torch.full_like(shorter.precision, delta)
                at[f"prior precision {delta:g}"] = shorter.with_prior(precision, 1.0)
            run["n at K=20"][part.samples] = {
                name: cifar.scores(test.predict(c).probs, test.labels) for name, c in at.items()
            }
        found.append(run)
        print(run, flush=True)
    return {"published": {"ELLA": 0.233, "MAP": 0.282}, "images": shown, "rows": 2000, "runs": found}


def ella_rows(
    seeds: Sequence[int] = (0, 1), shown: int = 512, counts: Sequence[int] = (8, 32, 128, 512, 2000)
) -> dict[str, Any]:
    """Table 4 over M and K, n and prior precision chosen on 500 of the test images, scored on 2 000 others."""
    ranks, runs = (4, 8, 16, 32), []
    for seed in seeds:
        setup = cifar.Cifar.load(seed, shown, reported=2000)
        fits = [cifar.cifar_ella(setup, rows, min(max(ranks), rows), seed) for rows in counts]
        posteriors = [posterior for _, posterior, _ in fits]
        val, test = (cifar.shared_features(posteriors, part) for part in (setup.val[:5], setup.test))
        run: dict[str, Any] = {}
        for i, (keep, _, _) in enumerate(fits):
            stops = cifar.best_stop(keep.found, val[i], ranks)
            for rank in (rank for rank in ranks if rank <= counts[i]):
                n, _, covariance = cifar.best(stops, rank)
                run[f"M={counts[i]}, K={rank}"] = {
                    "n": n, "precision": float(covariance.precision[0]),
                    **cifar.scores(test[i].predict(covariance).probs, test[i].labels),
                }  # fmt: skip
        run["MAP"] = cifar.scores(test[0].outputs.softmax(-1), test[0].labels)
        runs.append(run)
        print(seed, run, flush=True)
    return {"images": shown, "seeds": len(seeds), "table": averaged(runs)}


def ella_last_layer(seeds: Sequence[int] = (0, 1), shown: int = 14_000, reported: int = 4000) -> dict[str, Any]:
    """Figure 7: NLL, ECE and accuracy of exact Laplace of the last layer (LLA*) over n on the ResNet-20."""
    runs = []
    for seed in seeds:
        setup = cifar.Cifar.load(seed, shown, reported=reported)
        runs.append(cifar.last_layer_over_n(setup, seed))
        print(seed, runs[-1], flush=True)
    with torch.no_grad():
        outputs, labels = (torch.cat(part) for part in zip(*((setup.model(x), y) for x, y in setup.test), strict=True))
    plain = cifar.scores(outputs.softmax(-1), labels)
    return {"images": shown, "reported": reported, "seeds": len(seeds), "MAP": plain, "over n": averaged(runs)}


def ella_corruptions(seeds: Sequence[int] = (0, 1), images: int = 30) -> dict[str, Any]:
    """Figures 3 and 4 (a, c): NLL and ECE on corrupted images, error against confidence, and time, for every method."""
    runs = [_corruptions(seed, images) for seed in seeds]
    return {"images per kind and severity": images, "seeds": len(seeds), "runs": runs, **averaged(runs)}


def _corruptions(seed: int, images: int) -> dict[str, Any]:
    """Scores every method; on corrupted images, the mean over kinds of each strength."""
    setup = cifar.Cifar.load(seed, 2048)
    posteriors, fits = baselines.cifar_posteriors(setup, seed)
    clean_x, labels = (torch.cat(part)[:1000] for part in zip(*setup.test, strict=True))
    foreign = baselines.fashion_as_cifar(1000)
    found: dict[str, Any] = {"fits": fits, "clean": {}, "error against confidence": {}, "corrupted": {}}
    with torch.no_grad():
        setup.model(clean_x[:100])
        start = time.perf_counter()
        for part in clean_x.split(100):
            setup.model(part)
        forward = time.perf_counter() - start
    for name, predict in posteriors.items():
        start = time.perf_counter()
        probs = torch.cat([predict(part) for part in clean_x.split(100)])
        seconds = time.perf_counter() - start
        outside = torch.cat([predict(part) for part in foreign.split(100)])
        found["clean"][name] = {**cifar.scores(probs, labels), "forward passes": seconds / forward}
        rows = baselines.error_against_confidence(probs, labels, outside)
        found["error against confidence"][name] = {f"{row['confidence']:g}": row for row in rows}
        print(name, found["clean"][name], flush=True)
    raw = baselines.pixels(clean_x)
    for severity in range(1, 6):
        scored: dict[str, list[dict[str, float]]] = {name: [] for name in posteriors}
        for i, kind in enumerate(COMMON):
            chosen = slice(images * i, images * (i + 1))
            x = baselines.normalised(corrupt(raw[chosen], kind, severity, seed=seed))
            for name, predict in posteriors.items():
                scored[name].append(cifar.scores(predict(x), labels[chosen]))
        mean = {name: averaged(kinds) for name, kinds in scored.items()}
        found["corrupted"][str(severity)] = {
            name: {key: value["mean"] for key, value in row.items()} for name, row in mean.items()
        }
        print(severity, found["corrupted"][str(severity)], flush=True)
    return found
