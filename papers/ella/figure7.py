"""Figure 7: exact Laplace of the ResNet-20's last layer over the number of images in its curvature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from lapwing.covariance import Latent
from lapwing.tangent import Record
from lapwing.tuning import Training, Tuning
from papers.common import drawing
from papers.common.cifar import LastLayer
from papers.common.results import read
from papers.common.scores import averaged, class_scores
from papers.common.tables import grid, shown
from papers.ella import table1

DELTAS = tuple(10 ** (i / 2) for i in range(-8, 9))

PUBLISHED_DELTA = 25.0
"""The paper's prior precision; the authors' program has this number times n/50 000."""

FIXED, HALVED = (0.5, 5.0, 25.0, 50.0), 11
"""Prior precisions that do not follow n, and how often n is halved."""

FAST = {"seeds": (0,)}
"""Arguments of a run for `python -m papers verify`."""


def run(seeds: Sequence[int] = range(5), shown: int = 14_000, reported: int = 4000) -> dict[str, Any]:
    """Returns scores of exact Laplace of the last layer (LLA*) after n images, and of the network."""
    runs = []
    for seed in seeds:
        setup = LastLayer.load(seed, shown, reported)
        runs.append(last_layer_over_n(setup, seed))
        print(seed, runs[-1], flush=True)
    with torch.no_grad():
        outputs, labels = (torch.cat(part) for part in zip(*((setup.layer(x), y) for x, y in setup.test), strict=True))
    plain = class_scores(outputs.softmax(-1), labels)
    return {"images": shown, "reported": reported, "seeds": len(seeds), "MAP": plain, "over n": averaged(runs)}


class KeepPrefixes(Tuning):
    """Tunes nothing and keeps the posteriors of the first parts of the data.

    Attributes:
        found: those posteriors, by rising number of samples, then that of all data (scaled, with `data_size`).
    """

    found: tuple[lw.Posterior, ...] = ()

    def __init__(self, prefixes: int) -> None:
        self.prefixes = prefixes

    def tune(self, posterior: lw.Posterior, training: Training = Training()) -> lw.Posterior:  # noqa: B008 (frozen)
        """Returns the posterior as it is."""
        self.found = (*training.prefixes, posterior)
        return posterior


def last_layer_over_n(setup: LastLayer, seed: int) -> dict[int, dict[str, dict[str, float]]]:
    """Scores exact linearised Laplace of the last layer (LLA*) with the curvature of n images, n growing.

    Args:
        setup: all of its training images are shown; the last n is 50 000, their sum scaled.
        seed: of the fit.

    Returns:
        n -> how the prior precision was found (fixed, rising with n as in the authors' program, by the evidence of the
        n images, by validation) -> scores on the test images, and that precision.
    """
    keep = KeepPrefixes(HALVED)
    lw.fit(setup.layer, setup.train, lw.Full(), prior_precision=1.0, tune=keep, data_size=50_000, seed=seed)
    tangent = keep.found[0].tangent
    val, test = (
        [(record, y) for x, y in part for _, record in tangent.records(x)] for part in (setup.val[:10], setup.test)
    )
    found: dict[int, dict[str, dict[str, float]]] = {}
    for posterior in keep.found:
        count = round(posterior.samples * posterior.data_factor)
        rising = PUBLISHED_DELTA * count / 50_000
        at = {delta: posterior.with_prior(delta) for delta in (*DELTAS, *FIXED, rising)}
        evidence = {delta: float(at[delta].log_marginal_likelihood()) for delta in DELTAS}
        losses = {delta: _last_layer_scores(at[delta], val)["nll"] for delta in DELTAS}
        chosen = {f"prior precision {delta:g}": delta for delta in FIXED}
        chosen["prior precision rising with n"] = rising
        chosen["evidence"] = max(evidence, key=evidence.__getitem__)
        chosen["validation"] = min(losses, key=losses.__getitem__)
        found[count] = {
            name: {"precision": delta, **_last_layer_scores(at[delta], test)} for name, delta in chosen.items()
        }
    return found


def _last_layer_scores(posterior: lw.Posterior, records: Sequence[tuple[Record, Tensor]]) -> dict[str, float]:
    """Scores predictions from records of J, which no prior changes."""
    covariance, probs = posterior.covariance, []
    with torch.no_grad():
        for record, _ in records:
            latent = Latent(record.outputs, covariance.output_covariance(record))
            probs.append(lw.Categorical().predict(latent).probs)
    return class_scores(torch.cat(probs), torch.cat([y for _, y in records]))


def draw(results: Mapping[str, Any]) -> None:
    """Draws scores over n, with the network at one temperature from `table1`, on the same images."""
    tempered = read(table1.__file__)["table"]["network and last layer"]["network, one temperature"]
    figure, ((*axes,),) = drawing.panels(1, 2, (9, 3.6))
    for measure, axis in zip(("nll", "ece"), axes, strict=True):
        for kind in next(iter(results["over n"].values())):
            drawing.curve(axis, {n: row[kind][measure] for n, row in results["over n"].items()}, label=kind)
        axis.axhline(results["MAP"][measure], color="#555555", linestyle=":", label="network")
        temperature = tempered[f"first {results['reported']}"][measure]["mean"]
        axis.axhline(temperature, color="black", linestyle="--", label="network, one temperature")
        label = {"nll": "NLL (nats)", "ece": "ECE"}[measure]
        axis.set(xscale="log", xlabel="n, images in the curvature (last layer)", ylabel=label)
    axes[0].set_ylim(0.24, 0.5)
    axes[1].set_ylim(0, 0.15)
    drawing.legend_below(figure, 4)
    drawing.save(figure, __file__)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the NLL by the number of images and the way to the prior precision."""
    counts = ("6", "109", "875", "3500", "7000", "50000")
    kinds = next(iter(results["over n"].values()))
    rows = {kind: [shown(results["over n"][n][kind]["nll"]) for n in counts] for kind in kinds}
    return {"nll": grid([f"n = {n}" for n in counts], rows)}
