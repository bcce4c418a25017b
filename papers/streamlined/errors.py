"""Where streamlined variances leave linearised ones: one approximation lifted, or one layer uncertain, at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

import lapwing as lw
from lapwing.covariance import PriorCovariance
from lapwing.prediction import Way
from papers.common.results import Rows, once
from papers.common.tables import grid
from papers.streamlined.approximations import approximation_errors
from papers.streamlined.setting import CORRELATED, PAPER, Setting, treated


def run(
    seeds: Sequence[int] = (0,), names: Sequence[str] = ("fashion_mnist", "sst2"), inputs: int = 20
) -> dict[str, Any]:
    """Returns ratios of variances for the ViT and the GPT-2 of SST-2, attention and MLPs of the last blocks treated."""
    rows = Rows(__file__, {"inputs": inputs, "inputs, full": 2, "draws": 200})
    for seed in seeds:
        for name in names:
            _add(rows, name, seed, inputs)
    return rows.all()


def _add(rows: Rows, name: str, seed: int, inputs: int) -> None:
    setting = once(lambda: Setting.load(name, seed, shown=1000, tested=400, tuned=300))

    def middle(count: int) -> Tensor:
        return setting().test[len(setting().test) // 2][0][:count]  # of texts, those of middling length

    def add_part(part: str) -> None:
        run = f"{name}, {part}, seed {seed}"
        posterior = once(
            lambda: setting().laplace(
                treated(setting().model)[part], lw.Validation(setting().val, tempered=False, tolerance=0.0)
            )
        )
        for label, via, factor in (
            ("as in the paper", PAPER, 1),
            ("as in the paper, Σ / 100", PAPER, 100),
            ("positions correlated, Σ / 100", CORRELATED, 100),
        ):
            rows.add(
                run, label, lambda v, f: approximation_errors(narrowed(posterior(), f), middle(inputs), v), via, factor
            )
        for label, way, count in (
            ("full", lw.Streamlined("full", attention="scores"), 2), ("sampling", lw.MonteCarlo(200), inputs),
        ):  # fmt: skip
            for suffix, factor in (("", 1), (", Σ / 100", 100)):
                rows.add(
                    run, f"whole: {label}{suffix}",
                    lambda w, f, n: whole_ratio(narrowed(posterior(), f), middle(n), w), way, factor, count,
                )  # fmt: skip

    for part in ("attention", "MLPs"):
        add_part(part)


def whole_ratio(posterior: lw.Posterior, x: Tensor, way: Way) -> dict[str, float]:
    """Returns the geometric mean of a way's variances over linearised ones, and the mean of the logs' distance."""
    found, exact = (posterior.latent(x, via).variance.double() for via in (way, lw.Linearized()))
    logs = (found / exact).log()
    return {"ratio": float(logs.mean().exp()), "error": float(logs.abs().mean())}


def narrowed(posterior: lw.Posterior, factor: float = 100.0) -> lw.Posterior:
    """Returns a posterior with the covariance divided by a factor: products of uncertain numbers hardly count there."""
    assert isinstance(posterior.covariance, PriorCovariance)
    precision, scale = posterior.prior.precision, posterior.scale.of_curvature
    return replace(posterior, covariance=posterior.covariance.with_prior(factor * precision, factor * scale))


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns ratios of streamlined and of drawn variances to linearised ones, at Σ and at Σ / 100."""
    rows = {}
    for name, found in results["table"].items():
        cells = []
        for kind in ("as in the paper", "whole: full", "whole: sampling"):
            for size in ("", ", Σ / 100"):
                of = found.get(f"{kind}{size}", {})
                ratio = of.get("options", {}).get("as given", of).get("ratio")
                value = ratio["mean"] if isinstance(ratio, Mapping) else ratio
                cells.append("" if value is None else f"{value:.2g}")
        rows[name] = cells
    kinds = ("streamlined", "streamlined with full covariances", "200 draws")
    return {"ratios": grid([f"{kind}, {size}" for kind in kinds for size in ("Σ", "Σ / 100")], rows)}
