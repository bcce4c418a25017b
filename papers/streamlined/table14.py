"""Tables 14 to 16: which covariances of attention's values matter; the ViT, its attention treated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lapwing as lw
from lapwing.prediction import Way
from papers.common.results import Rows, once
from papers.common.tables import grid, shown
from papers.streamlined.setting import PAPER, Setting, treated

VALUES: dict[str, Way] = {
    "variances of values": PAPER,
    "covariances of features": lw.Streamlined(positions="independent", attention="features"),
}
"""The paper compares these two."""


def run(seeds: Sequence[int] = range(5), tested: int = 1000) -> dict[str, Any]:
    """Returns scores by what is kept of the values' covariance."""
    return Rows(__file__, {"tested": tested}).filled(_add, seeds, [tested])


def _add(rows: Rows, seed: int, tested: int) -> None:
    setting = once(lambda: Setting.load("fashion_mnist", seed, tested=tested, tuned=500))
    params = once(lambda: treated(setting().model)["attention"])
    laplace = once(
        lambda: setting().laplace(params(), lw.Validation(setting().val, tempered=False, tolerance=0.0), seed)
    )
    variational = once(lambda: setting().variational(params(), seed=seed))
    for method, posterior in (("LA", laplace), ("MFVI", variational)):
        for label, way in VALUES.items():
            rows.add(f"{method}, seed {seed}", label, lambda p, w: setting().row(p(), w), posterior, way)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the scores with variances and with covariances of the values."""
    rows = {}
    for posterior, ways in results["table"].items():
        for way, found in ways.items():
            plain, scaled = found["plain"], found["scaled"]
            rows[f"{posterior}, {way}"] = [
                shown(plain["nlpd"], 4), shown(scaled["nlpd"], 4), shown(plain["accuracy"]), shown(plain["ece"], 4),
                shown(plain["auroc"], 4),
            ]  # fmt: skip
    return {"scores": grid(["NLPD", "NLPD x factor", "accuracy", "ECE", "AUROC"], rows)}
