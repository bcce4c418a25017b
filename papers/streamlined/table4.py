"""Tables 4, 10 and 12, Figure 4: the ViT on Fashion-MNIST, foreign images from MNIST. `table4_cifar` has CIFAR-10."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lapwing as lw
from papers.common.results import Rows, once
from papers.common.tables import grid, shown
from papers.streamlined.setting import WAYS, Setting, treated

EXPONENTS = {"fashion_mnist": (0, 4), "cifar10": (0, 4), "sst2": (-1, 4)}
"""Range of log10 δ in which each way's own is sought, by quarters of a decade, of sampling by halves."""


def run(seeds: Sequence[int] = range(5), tested: int = 1000) -> dict[str, Any]:
    """Returns scores of every way through Laplace and mean-field posteriors of three parts of the network."""
    rows = Rows(__file__, {"tested": tested, "foreign": tested // 2, "draws": 50})
    for seed in seeds:
        add(rows, "fashion_mnist", seed, ("attention", "MLPs", "last layer"), 50, 10, tested=tested, tuned=500)
    return rows.all()


def add(rows: Rows, name: str, seed: int, parts: Sequence[str], draws: int, quick: int, **sizes: int) -> None:
    """Adds the rows of one network, whose posteriors treat some parts of it.

    `quick` is the number of draws where prior precisions are compared; `sizes` are those of the setting.
    """
    setting = once(lambda: Setting.load(name, seed, **sizes))
    ways = {**WAYS, "sampling": lw.MonteCarlo(draws)}
    rows.add(f"{name}, MAP, seed {seed}", "MAP", lambda: setting().network_row())
    low, high = EXPONENTS[name]
    exponents = [low + i / 4 for i in range(4 * (high - low) + 1)]

    def add_part(part: str) -> None:
        run, curves = f"{name}, {part}, seed {seed}", part == "attention" and seed == 0
        params = once(lambda: treated(setting().model)[part])
        validated = once(
            lambda: setting().laplace(params(), lw.Validation(setting().val, tempered=False, tolerance=0.0), seed)
        )
        evidence = once(lambda: setting().laplace(params(), lw.BoundedEvidence(nats=0.005), seed))
        variational = once(lambda: setting().variational(params(), seed=seed))
        for label, way in ways.items():
            fast = lw.MonteCarlo(quick) if label == "sampling" else None
            for method, posterior in (("LA", validated), ("MFVI", variational)):
                rows.add(run, f"{method} {label}", lambda p, w: setting().row(p(), w, curves), posterior, way)
            rows.add(
                run, f"LA {label}, own δ",
                lambda w, f: setting().own_row(validated(), w, exponents[:: 2 if f else 1], f), way, fast,
            )  # fmt: skip
            if label != "sampling":
                rows.add(run, f"LA {label}, δ by evidence", lambda w: setting().row(evidence(), w), way)

    for part in parts:
        add_part(part)


def table(found: Mapping[str, Any], names: Sequence[str]) -> str:
    """Returns NLPD and ECE of every way through posteriors; the names are "task, part" of the rows."""
    rows = {}
    for name in names:
        for way in ("sampling", "GLM", "streamlined", "streamlined, positions correlated"):
            of = found[name]
            parts = [of[f"LA {way}"]["plain"], of[f"LA {way}"]["scaled"], of[f"LA {way}, own δ"]]
            parts += [of[f"LA {way}, δ by evidence"]["scaled"] if f"LA {way}, δ by evidence" in of else None]
            parts += [of[f"MFVI {way}"]["plain"], of[f"MFVI {way}"]["scaled"]]
            cells = [f"{shown(part['nlpd'])}; {shown(part['ece'], 3)}" if part else "" for part in parts]
            rows[f"{name}, {way}"] = [*cells, shown(parts[0]["accuracy"], 1, 100), shown(parts[0]["auroc"])]
    columns = ["GLM's δ, factor", "own δ", "bounded evidence's δ, factor", "mean field", "mean field, factor"]
    return grid(["GLM's δ", *columns, "accuracy at GLM's δ, %", "AUROC at GLM's δ"], rows)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns NLPD and ECE of the ViT."""
    parts = [f"fashion_mnist, {part}" for part in ("attention", "MLPs", "last layer")]
    return {"scores": table(results["table"], parts)}
