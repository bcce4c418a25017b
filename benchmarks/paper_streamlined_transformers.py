"""Streamlined prediction on transformers (Li et al. 2025); results go to `benchmarks/results/paper_streamlined_*.json`.

`python -m benchmarks.paper_streamlined_transformers vit` runs one experiment, without a name all. Rows that a results
file has are kept: delete it to begin anew. Trained networks are kept in the folder that LAPWING_NETWORKS names.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import torch

import lapwing as lw
from benchmarks.paper_valla import CACHE, Results, once, run_named
from lapwing.reproduce import streamlined_transformers as st
from lapwing.reproduce.data import images

EXPONENTS = {"fashion_mnist": (0, 4), "mrpc": (-1, 4), "sst2": (-1, 4)}
"""Range of log10 δ in which each way's own is sought, by quarters of a decade, of sampling by halves."""


def tables(results: Results, name: str, seed: int, parts: Sequence[str], draws: int, quick: int, **sizes: int) -> None:
    """Adds the rows of Tables 4, 5, 10 or 12 for one network.

    Args:
        results: where.
        name: of the task.
        seed: of the network.
        parts: what is treated, keys of `treated`.
        draws: of sampling.
        quick: of sampling where prior precisions are compared.
        sizes: of the setting.
    """

    @functools.cache
    def setting() -> st.Setting:
        return st.Setting.load(name, seed, CACHE, **sizes)

    ways = {**st.WAYS, "sampling": lw.MonteCarlo(draws)}
    results.add(f"{name}, MAP, seed {seed}", "MAP", lambda: setting().network_row())
    low, high = EXPONENTS[name]
    exponents = [low + i / 4 for i in range(4 * (high - low) + 1)]
    for part in parts:
        run, curves = f"{name}, {part}, seed {seed}", part == "attention" and seed == 0
        params = once(lambda part=part: st.treated(setting().model)[part])
        validated = once(lambda p=params: setting().laplace(p(), lw.Validation(setting().val), seed))
        evidence = once(lambda p=params: setting().laplace(p(), lw.BoundedEvidence(), seed))
        variational = once(lambda p=params: setting().variational(p(), seed=seed))
        for label, way in ways.items():
            fast = lw.MonteCarlo(quick) if label == "sampling" else None
            for method, posterior in (("LA", validated), ("MFVI", variational)):
                results.add(run, f"{method} {label}", lambda p=posterior, w=way, c=curves: setting().row(p(), w, c))
            results.add(
                run,
                f"LA {label}, own δ",
                lambda p=validated, w=way, f=fast: setting().own_row(p(), w, exponents[:: 2 if f else 1], f),
            )
            if label != "sampling":
                results.add(run, f"LA {label}, δ by evidence", lambda p=evidence, w=way: setting().row(p(), w))


def vit(seeds: Sequence[int] = (0, 1), tested: int = 1000) -> None:
    """Tables 4, 10 and 12, Figure 4: the ViT on Fashion-MNIST, foreign images from MNIST."""
    results = Results("streamlined_vit", {"tested": tested, "foreign": tested // 2, "draws": 50})
    for seed in seeds:
        tables(results, "fashion_mnist", seed, ("attention", "MLPs", "last layer"), 50, 10, tested=tested, tuned=500)


def gpt2(seeds: Sequence[int] = (0,), names: Sequence[str] = ("sst2", "mrpc"), tested: int = 600) -> None:
    """Table 5: the GPT-2s on SST-2 (foreign texts from AG News) and MRPC (foreign pairs from SST-2)."""
    results = Results("streamlined_gpt2", {"tested": tested, "foreign": tested // 2, "draws": 20})
    for seed in seeds:
        for name in names:
            tables(results, name, seed, ("MLPs",), 20, 5, tested=tested, tuned=300)


def errors(seeds: Sequence[int] = (0,), names: Sequence[str] = ("fashion_mnist", "sst2"), inputs: int = 20) -> None:
    """Streamlined beside linearised variances: one approximation lifted, or one layer uncertain, at a time."""
    results = Results("streamlined_transformer_errors", {"inputs": inputs, "inputs, full": 2, "draws": 200})
    for seed in seeds:
        for name in names:

            @functools.cache
            def setting(name: str = name, seed: int = seed) -> st.Setting:
                return st.Setting.load(name, seed, CACHE, shown=1000, tested=400, tuned=300)

            def middle(count: int, setting: Callable[[], st.Setting] = setting) -> torch.Tensor:
                return setting().test[len(setting().test) // 2][0][:count]  # of texts, those of middling length

            for part in ("attention", "MLPs"):
                run = f"{name}, {part}, seed {seed}"

                @functools.cache
                def posterior(part: str = part, setting: Callable[[], st.Setting] = setting) -> lw.Posterior:
                    return setting().laplace(st.treated(setting().model)[part], lw.Validation(setting().val))

                for label, via, factor in (
                    ("as in the paper", st.PAPER, 1),
                    ("as in the paper, Σ / 100", st.PAPER, 100),
                    ("positions correlated, Σ / 100", st.CORRELATED, 100),
                ):
                    results.add(
                        run, label,
                        lambda p=posterior, m=middle, v=via, f=factor: st.error_rows(
                            st.narrowed(p(), f), m(inputs), v),
                    )  # fmt: skip
                for label, way, count in (
                    ("full", lw.Streamlined("full", attention="scores"), 2), ("sampling", lw.MonteCarlo(200), inputs),
                ):  # fmt: skip
                    for suffix, factor in (("", 1), (", Σ / 100", 100)):
                        results.add(
                            run, f"whole: {label}{suffix}",
                            lambda p=posterior, m=middle, w=way, f=factor, n=count: st.whole_ratio(
                                st.narrowed(p(), f), m(n), w),
                        )  # fmt: skip


def values(seeds: Sequence[int] = (0,), tested: int = 1000) -> None:
    """Tables 14 to 16: what covariances of the values matter; the ViT, its attention treated."""
    results = Results("streamlined_values", {"tested": tested})
    for seed in seeds:
        setting = once(lambda seed=seed: st.Setting.load("fashion_mnist", seed, CACHE, tested=tested, tuned=500))
        params = once(lambda s=setting: st.treated(s().model)["attention"])
        laplace = once(lambda s=setting, p=params, k=seed: s().laplace(p(), lw.Validation(s().val), k))
        variational = once(lambda s=setting, p=params, k=seed: s().variational(p(), seed=k))
        for method, posterior in (("LA", laplace), ("MFVI", variational)):
            for label, way in st.VALUES.items():
                results.add(
                    f"{method}, seed {seed}", label, lambda s=setting, p=posterior, w=way: s().row(p(), w)
                )  # fmt: skip


EPSILONS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)


def linearity(seeds: Sequence[int] = (0, 1)) -> None:
    """Figure 14: how far networks are from linear along their inputs; the paper's ReLU MLP on MNIST, and the ViT."""
    results = Results("streamlined_linearity", {"inputs": 124})
    for seed in seeds:
        digits, setting = once(lambda: images("mnist")), once(lambda seed=seed: st.Setting.load(
            "fashion_mnist", seed, CACHE, shown=100, tested=200, tuned=100))  # fmt: skip
        mlp = once(lambda seed=seed, d=digits: st.relu_mlp(d().x_train, d().y_train, "mnist", seed, CACHE))
        results.add(
            f"seed {seed}", "MLP, MNIST", lambda m=mlp, d=digits: st.nonlinearity(m(), d().x_test[:124], EPSILONS)
        )
        results.add(
            f"seed {seed}", "ViT, Fashion-MNIST", lambda s=setting: st.nonlinearity(
                lambda z: s().model(z).logits, torch.cat([x for x, _ in s().test])[:124], EPSILONS),
        )  # fmt: skip


def samples(seeds: Sequence[int] = (0, 1)) -> None:
    """Figures 11 and 12: scores of sampling over the number of draws; the ViT, and the MLP on Fashion-MNIST."""
    results = Results("streamlined_samples", {"tested": 1000})
    for seed in seeds:
        setting = once(lambda seed=seed: st.Setting.load("fashion_mnist", seed, CACHE, tested=1000))
        params = once(lambda s=setting: st.treated(s().model)["attention"])
        small = once(lambda seed=seed, s=setting: st.mlp_setting(s(), seed, CACHE))
        for name, made, treated, counts in (
            ("ViT, attention", setting, params, (2, 5, 10, 20, 50, 100, 200)),
            ("MLP, all weights", small, once(lambda: lw.everything), (2, 10, 50, 100, 200, 500, 1000)),
        ):
            laplace = once(lambda m=made, t=treated: m().laplace(t(), lw.Validation(m().val)))
            variational = once(lambda m=made, t=treated: m().variational(t()))
            for method, posterior in (("LA", laplace), ("MFVI", variational)):
                results.add(
                    f"{name}, {method}, seed {seed}", "sampling",
                    lambda m=made, p=posterior, c=counts: st.over_draws(p(), m().test, c, c[-1]),
                )  # fmt: skip
                for label in ("GLM", "streamlined"):
                    results.add(
                        f"{name}, {method}, seed {seed}", label,
                        lambda m=made, p=posterior, w=st.WAYS[label]: m().row(p(), w),
                    )  # fmt: skip


def mfvi(seeds: Sequence[int] = (0, 1), reported: int = 3000, draws: int = 10) -> None:
    """ELLA's Table 1, MFVI-BF on the ResNet-20, with other ways through the same posterior."""
    from lapwing.reproduce.ella_cifar import Cifar

    results = Results("streamlined_mfvi", {"reported": reported, "draws": draws, "published": PUBLISHED})
    for seed in seeds:
        setup, run = once(lambda seed=seed: Cifar.load(seed, 14_000, reported)), f"seed {seed}"
        posterior = once(lambda s=setup, seed=seed: st.resnet_variational(s(), seed))
        results.add(run, "MAP", lambda s=setup: st.outputs_row(s().model, s().test))
        results.add(run, "moved mean", lambda s=setup, p=posterior: st.outputs_row(p().model, s().test))
        for label, way, some in (
            ("sampling", lw.MonteCarlo(draws), None), ("streamlined", st.PAPER, None),
            ("streamlined, positions correlated", st.CORRELATED, None),
            ("sampling, first 500", lw.MonteCarlo(draws), 5), ("streamlined, first 500", st.PAPER, 5),
            ("streamlined, positions correlated, first 500", st.CORRELATED, 5), ("GLM, first 500", lw.Linearized(), 5),
        ):  # fmt: skip
            results.add(
                run, label,
                lambda s=setup, p=posterior, w=way, n=some: st.scaled_row(p(), w, s().val[:4], s().test[:n]),
            )  # fmt: skip


PUBLISHED = {"MFVI-BF": {"accuracy": 0.927, "nlpd": 0.231, "ece": 0.016}}
"""ELLA's Table 1, its own ResNet-20 (MAP 92.6 %)."""

EXPERIMENTS: dict[str, Callable[[], None]] = {
    "vit": vit,
    "gpt2": gpt2,
    "errors": errors,
    "values": values,
    "linearity": linearity,
    "samples": samples,
    "mfvi": mfvi,
}


if __name__ == "__main__":
    run_named(EXPERIMENTS, sys.argv[1:])
