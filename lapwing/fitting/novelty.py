"""`lw.novelty`: a detector of inputs that are unlike the training data, by the features that reach the last layer."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ranks
from ..covariance import AnyLatent
from ..data import batches
from ..data.batches import Forward
from ..data.data import Data
from ..data.inputs import Inputs, checked
from ..errors import LapwingError, check_choice, check_flag
from ..files import prefixed, read_safetensors, under, write_safetensors
from ..likelihoods import Likelihood
from ..likelihoods.targets import which_count
from ..linalg import doubled, placed
from ..network.entry import outside_modes
from ..network.stamp import Stamp, fingerprint
from ..options import between, check_argument
from ..posterior import Posterior
from ..posterior.latents import input_batches
from ..posterior.loading import check_same
from ..prediction import Way
from ..running.fingerprints import check_same_network, differences, fingerprint_of
from ..tangent import Tangent, last_layer
from ..tangent.features import rows_of
from ..tangent.retry import entry
from ..tangent.stored import from_json, to_json
from .fit_data import share_of_known

log = logging.getLogger("lapwing")

NEIGHBOURS = 50  # number k of the neighbour whose distance counts: the choice of Sun et al. 2022 for CIFAR-10
IGNORED = -100  # label of samples that do not count, as in `torch.nn.functional.cross_entropy`
RIDGE = 1e-6  # share of the mean variance of the features that is added to covariances, which may be singular


@dataclass(frozen=True, repr=False, eq=False)
class Novelty:
    """A detector that `lw.novelty` makes: `detector(x)` (B,) is larger for stranger inputs of a batch or a loader.

    With held-out data it has p-values and alarms, and without them these raise a LapwingError. `detector.save(path)`
    writes a file. `lw.Novelty.load(path, model)` reads it, with the posterior as the model if the detector has one.
    """

    by: Literal["mahalanobis", "knn"]
    tangent: Tangent  # the network, which must keep its weights, and its last layer
    tensors: dict[str, Tensor]  # the numbers that the score reads
    stamp: Stamp
    posterior: Posterior | None = None  # its doubt is a score before the novelty
    held_out: Tensor | None = None  # the K scores of n held-out inputs, (K, n), each row in rising order
    via: Way | None = None  # of the doubt; None is the way of the posterior's predictions
    model = property(lambda self: self.tangent.model)

    @outside_modes
    def __call__(self, x: Any) -> Tensor:
        """Returns the novelty (B,), or with a posterior `1 - min_k p_k`, with ties broken by standardised scores."""
        scores = self._scores(x)
        if self.posterior is None or self.held_out is None:
            return scores[0]
        std, mean = torch.std_mean(self.held_out, 1, correction=0, keepdim=True)
        far = ((torch.stack([*map(doubled, scores)]) - mean) / std.clamp_min(1e-300)).amax(0)
        return 1 - self._p_values(scores).amin(0) + (0.5 + far.atan() / torch.pi) / (self.held_out.shape[1] + 1)

    @outside_modes
    def p_value(self, x: Any) -> Tensor:
        """Returns p-values (B,) in float64: `min(1, K min_k p_k)`, `p_k = (1 + #{held-out scores ≥ s_k}) / (n + 1)`.

        For inputs drawn as the held-out ones were, `P(p ≤ α) ≤ α`, in the mean over the draw of both: for given
        held-out rows it has a standard deviation of about `√(α/n)`. It does not hold if the known inputs drift.

        Source: Bates et al. 2023, Testing for Outliers with Conformal p-values, for one score; Bonferroni for several.
        """
        return self.joined(self._scores(x))

    @outside_modes
    def alarm(self, x: Any, rate: float = 0.05) -> Tensor:
        """Returns whether the p-value is at most `rate`, (B,) of bool: true for at most this share of known inputs.

        Raises a LapwingError for a rate that is not between 0 and 1, or below the least p-value, `K/(n + 1)`.
        """
        check_argument("alarm", "rate", rate, between(0, 1), "0.05")
        p, (scores, rows) = self.p_value(x), self.held_out.shape  # type: ignore[union-attr]
        needed = math.ceil(round(scores / rate, 6)) - 1  # rows with which the least p-value is below the rate
        if rows < needed:
            raise LapwingError(f"alarm(rate={rate:.4g}) needs {needed} held-out rows, not {rows}: pass more.")
        if rows + 1 < 10 * (needed + 1):
            text = (
                "Fewer than 10 of %d held-out rows decide alarms at rate %.3g, which may be off by a third. %d suffice."
            )
            log.warning(text, rows, rate, 10 * needed + 9)
        return p <= rate

    @outside_modes
    def why(self, x: Any, maps: bool = False) -> dict[str, Tensor]:
        """Returns the p-value `p_k` of each score by name, (B,): "doubt", if there is a posterior, and "novelty".

        With `maps=True`, for one batch, "doubt" has one for each position, such as (B, H, W): its doubt is compared
        with the largest doubts of the held-out inputs.
        """
        check_flag("why", "maps", maps)
        p = self._p_values(self._scores(x))
        found = dict(zip(("doubt", "novelty")[-len(p) :], p, strict=True))
        if maps:
            if self.posterior is None or batches.is_loader(x):
                raise LapwingError("maps=True needs the detector of a posterior and one batch. Write why(x) otherwise.")
            found["doubt"] = self._p_values([doubt(self.posterior, x, self.via)])[0]
        return found

    def joined(self, scores: Sequence[Tensor]) -> Tensor:
        """Returns the p-values (B,) of inputs with these K scores (B,)."""
        return (len(scores) * self._p_values(scores).amin(0)).clamp_max(1.0)

    def _p_values(self, scores: Sequence[Tensor]) -> Tensor:
        """Returns `p_k` of the first scores, (k, B, ...)."""
        if self.held_out is None:
            raise LapwingError("The detector has no held-out scores. Write lw.novelty(model, loader, held_out=(x, y)).")
        count, pairs = self.held_out.shape[1] + 1, zip(self.held_out, scores, strict=False)
        return torch.stack([count - torch.searchsorted(row, doubled(part)) for row, part in pairs]).double() / count

    def _scores(self, x: Any) -> list[Tensor]:
        """Returns the K scores (B,): with a posterior the doubt, at positions the largest one, and the novelty."""
        changed = self.stamp.changed()
        if changed is not None:
            raise LapwingError(
                f"{changed} has changed since the fit. Write detector = lw.novelty(model, loader) again."
            )
        widest = max(size for tensor in self.tensors.values() for size in tensor.shape)
        length = max(1, min(self.tangent.chunk_length(1), self.tangent.memory // (64 * widest)))
        found, like = [], next(iter(self.tensors.values()))
        columns = () if self.posterior is None else self.posterior.columns
        for part in input_batches(x, self.model, columns):
            inputs = Inputs.of(part, self.tangent.device)
            if inputs.samples:
                novelty = like.new_empty(inputs.samples)
                for rows, chunk in self.tangent.check(inputs).chunks(length):
                    novelty[rows] = self.score(features_of(self.tangent, chunk))
                found.append([novelty])
                if self.posterior is not None:
                    doubts = doubt(self.posterior, inputs, self.via).reshape(len(novelty), -1)
                    found[-1].insert(0, doubts.amax(1))
        if not found:
            raise LapwingError("The inputs hold no samples. Pass a tensor (B, ...) or a loader that yields batches.")
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def __repr__(self) -> str:
        return f"Novelty(by={self.by!r}, network={type(self.model).__name__})"

    def score(self, features: Tensor) -> Tensor:
        """Returns the novelty (B,) of features (B, D)."""
        if self.by == "knn":
            rows = self.tensors["rows"]
            cosines = (F.normalize(features.to(rows)) @ rows.T).topk(min(NEIGHBOURS, len(rows))).values
            return (2 - 2 * cosines[:, -1]).clamp_min(0.0).sqrt()
        moved = features.to(self.tensors["mean"]) - self.tensors["mean"]
        squares = (moved @ self.tensors["rotation"]).square().sum(1)
        return squares - (moved @ self.tensors["slopes"] - self.tensors["offsets"]).amax(1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the detector (not the network) to one safetensors file."""
        state, tangent = self.tangent.state(), self.tangent
        dtypes = {name: str(value.dtype) for name, value in state.items()}
        header = {"tangent": to_json(tangent), "forward": tangent.call.forward is not None, "dtypes": dtypes}
        tensors = prefixed("weights", {name: fingerprint(value) for name, value in state.items()})
        tensors |= prefixed("novelty", self.tensors) | ({} if self.held_out is None else {"held_out": self.held_out})
        mine = self.posterior and _print_of(self.posterior, self.via)
        write_safetensors(path, tensors, {"novelty": self.by, "posterior": mine, **header})

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module | Posterior,
        *,
        via: Way | None = None,
        forward: Forward | None = None,
    ) -> Novelty:
        """Reads a detector that `save` wrote; raises for another posterior.

        The file has no functions and no ways: pass `forward` and `via` as in the fit.
        """
        tensors, header = read_safetensors(path)
        if "novelty" not in header:
            raise LapwingError(f"The file {path} holds no detector. lw.load(path, model) reads posteriors.")
        posterior, network = (model, model.model) if isinstance(model, Posterior) else (None, model)
        mine, theirs = posterior and _print_of(posterior, via), header.get("posterior")
        if other := differences(mine or {}, theirs or {}):
            if other[0] == "way":
                raise LapwingError(
                    f"The detector in {path} has the doubt of another way. Pass the way of its fit, via=..."
                )
            wanted = f"a posterior, with another {other[0]}" if theirs else "a network, posterior.model"
            raise LapwingError(f"The detector in {path} is one of {wanted}. Pass it as the second argument.")
        forward = posterior.tangent.call.forward if posterior and forward is None else forward
        if header["forward"] != (forward is not None):
            line = f"lw.Novelty.load(path, model{', forward=forward' if header['forward'] else ''})"
            raise LapwingError(f"The file {path} holds a detector with another forward=. Write {line}.")
        tangent, device = from_json(header["tangent"], network, forward, None), next(network.parameters()).device
        check_same(path, tangent, under("weights", tensors), header["dtypes"])
        kept = {name: value.to(device) for name, value in under("novelty", tensors).items()}
        held_out = placed(tensors["held_out"], device) if "held_out" in tensors else None
        return cls(header["novelty"], tangent, kept, Stamp.of(tangent.model), posterior, held_out, via)


def _print_of(posterior: Posterior, via: Way | None) -> dict[str, Any]:
    """Returns a fingerprint of what decides the predictions of a posterior, except for the network."""
    covariance = [posterior.covariance.tensors(), posterior.covariance.extra()]
    parts = {"covariance": covariance, "likelihood": posterior.likelihood, "way": via or posterior.aim}
    return {name: fingerprint_of(part, functions=False) for name, part in parts.items()}


@entry("The detector", "Pass smaller batches.")
def novelty(
    model: nn.Module | Posterior,
    loader: Any,
    by: Literal["mahalanobis", "knn"] | None = None,
    *,
    held_out: Any = None,
    via: Way | None = None,
    forward: Forward | None = None,
) -> Novelty:
    """Fits a detector of inputs that are unlike the training data, with a false-alarm rate that one can choose.

    The score of a network is its novelty: *unlike anything seen*. A posterior adds its doubt, the mutual information of
    y and the weights: *seen, but undecided*. With held-out data each score has a p-value, and the smaller one decides:
    see `p_value`, `alarm` and `why` of the detector.

    z are the features: the inputs of the last layer, which must be linear or a convolution, averaged over positions,
    padding too.

    - "mahalanobis": distance to the nearest class, minus distance to all data (relative Mahalanobis distance):
      `min_c (z-μ_c)ᵀ Σ⁻¹ (z-μ_c) - (z-μ_0)ᵀ Σ_0⁻¹ (z-μ_0)`, with the class means μ_c, their pooled covariance Σ, and
      mean and covariance of all features. Integer or bool labels (B,) are classes, so write counts as floats. Samples
      of label -100 do not count. Without classes only `(z-μ_0)ᵀ Σ_0⁻¹ (z-μ_0)`.
    - "knn": the distance of `z/|z|` to its 50th nearest neighbour in the training data, or to the last if there are
      fewer than 50. Targets do not matter.

    Training inputs score lower than new inputs of the same kind, so thresholds need held-out inputs. If
    `torch.distributed` has several processes, each calls `lw.novelty` with its share of the data, as in `lw.fit`.

    Args:
        model: a posterior, or the trained network in eval mode.
        loader: training data, in any form that `lw.fit` accepts.
        by: the novelty; None means "knn" for a posterior of classes, and otherwise "mahalanobis".
        held_out: a few hundred rows that did not train the network, as the `loader`. They may have tuned the posterior.
        via: the way of the doubt. None means the way of `posterior.predict`. `lw.deploy` takes a detector with the way
            that it deploys: the p-values are valid for any way, if it is the same for held-out and new inputs.
        forward: as in `lw.fit`; None means the `forward` of the posterior, if it has one.

    Raises:
        LapwingError: for a posterior without held-out data, and if over 5 % of the held-out rows are training rows.

    Cost: one pass over the data; memory O(D² + C D), or all features with "knn". A score costs a forward pass, and with
        a posterior a prediction.

    Source: Ren et al. 2021, A Simple Fix to Mahalanobis Distance, equation 2; Sun et al. 2022, Out-of-Distribution
    Detection with Deep Nearest Neighbors, section 3.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(60, 4), torch.arange(60) % 3
        >>> detector = lw.novelty(torch.nn.Linear(4, 3).eval(), (x, y))
        >>> detector(x).shape
        torch.Size([60])
    """
    posterior, network = (model, model.model) if isinstance(model, Posterior) else (None, model)
    if by is None:
        by = "mahalanobis" if posterior is None or posterior.logit_temperature is None else "knn"
    check_choice("lw.novelty", "by", by, ("mahalanobis", "knn"))
    if posterior is None and via is not None:
        raise LapwingError("via= is the way of a posterior's doubt. Write lw.novelty(posterior, loader, held_out=...).")
    if posterior is not None and held_out is None:
        raise LapwingError("A posterior needs held_out=. Write lw.novelty(posterior, loader, held_out=(x_val, y_val)).")
    data = Data(loader, network) if posterior is None else Data.of(loader, posterior)
    batches.check_loader(data.loader, "lw.novelty")
    forward = posterior.tangent.call.forward if posterior and forward is None else forward
    tangent = Tangent.survey(network, data.first.inputs, last_layer, forward, targets=data.first.targets)
    check_same_network(tangent.model)
    ignored = getattr(posterior and posterior.likelihood, "ignore_index", -100)
    if tangent.positions.several and which_count(data.first.targets, ignored) is not None:
        log.warning(
            "The scores of a detector join all positions of an input, and padding too. So its p-values hold for inputs "
            "that are padded to the lengths of the held-out ones."
        )
    known = None if held_out is None else Data(held_out, network, columns=data.columns)
    if known is not None:
        batches.check_loader(known.loader, "lw.novelty(held_out=...)")
        known.wants_digests = data.wants_digests = True
    pairs = ((features_of(tangent, part.inputs), part.targets) for part in checked(data, tangent.device))
    if by == "knn":  # at least float32: cosines near 1 in half precision would tie
        kept = [F.normalize(rows.to(torch.promote_types(rows.dtype, torch.float32))) for rows, _ in pairs]
        kept = [rows.to(tangent.device) for part in ranks.gathered("the features", kept) for rows in part]
    tensors = {"rows": torch.cat(kept)} if by == "knn" else _mahalanobis(pairs, tangent.device)
    detector = Novelty(by, tangent, tensors, Stamp.of(tangent.model), posterior, via=via)
    if known is None:
        return detector
    parts = [torch.stack([*map(doubled, detector._scores(part.inputs))]) for part in known if part.count]
    every = [placed(part, tangent.device) for one in ranks.gathered("the held-out scores", parts) for part in one]
    share = share_of_known(known, data)
    if not every or share:
        what = f"{share:.0%} of the held-out rows are training rows" if every else "The held-out data hold no samples"
        raise LapwingError(f"{what}. Pass data that did not train the network: held_out=(x_val, y_val).")
    return replace(detector, held_out=torch.cat(every, 1).sort(1).values)


def doubt(posterior: Posterior, x: Any, via: Way | None = None) -> Tensor:
    """Returns the mutual information of y and the weights in nats, (B, ...), with one noise of y for all inputs."""
    # noise that depends on the input also grows far from the data, and would hide it
    via = posterior.aim.via if via is None and posterior.aim is not None else via
    return doubt_of(posterior.likelihood, posterior.latent(x, via)).detach()


def doubt_of(likelihood: Likelihood, latent: AnyLatent) -> Tensor:
    """Returns the mutual information of y and the latent in nats, (B, ...)."""
    return likelihood.predicted(latent).uncertainty("mutual_information")


def features_of(tangent: Tangent, inputs: Inputs) -> Tensor:
    """Returns the features (B, D): the inputs of the last layers, averaged over positions and joined."""
    parts = []
    for _, chunk in tangent.check(Inputs.of(inputs, tangent.device)).chunks(tangent.chunk_length(1)):
        recording, uses = tangent.traced(chunk)
        found: dict[int, Tensor] = {}  # layers that read the same features count once
        for i, axis, _ in (use for every in uses.values() for use in every):
            use = recording.noted[i].use
            rows = rows_of(use, axis, chunk.samples)
            if rows is not None:
                found[id(use.inputs)] = rows.detach()
        if not found:
            raise LapwingError(
                f"The last layer, {', '.join(tangent.parameters)}, is neither linear nor a convolution. Let the "
                "network end in torch.nn.Linear, whose inputs are the features."
            )
        parts.append(torch.cat(list(found.values()), 1))
    return torch.cat(parts)


def _mahalanobis(pairs: Iterable[tuple[Tensor, Any]], device: torch.device) -> dict[str, Tensor]:
    """Returns the numbers of the relative Mahalanobis distance, from batches of features and targets.

    `Σ_0 = Σ + M W Mᵀ` with the means M (D, C) relative to μ_0, and the shares W of the classes. So for `S = Σ⁻¹ M` the
    distance is `|Rᵀ(z-μ_0)|² - max_c [2 s_cᵀ(z-μ_0) - s_cᵀ m_c]`, with `R Rᵀ = Σ⁻¹ - Σ_0⁻¹ = S (W⁻¹ + Mᵀ S)⁻¹ Sᵀ`.
    """
    sums: dict[str, Tensor] = {}  # of all features times features, and of the features of each label
    for features, targets in pairs:
        rows, labels = doubled(features), torch.zeros(len(features), dtype=torch.long)
        if isinstance(targets, Tensor) and not targets.is_floating_point() and targets.numel() == len(rows):
            labels = targets.flatten().long().to(rows.device)
            rows, labels = rows[labels != IGNORED], labels[labels != IGNORED]
        for label in labels.unique().tolist():
            part = F.pad(rows[labels == label], (0, 1), value=1.0)  # the last entry counts samples
            sums[f"label {label}"] = sums.get(f"label {label}", 0.0) + part.sum(0)
        sums["squares"] = sums.get("squares", 0.0) + rows.T @ rows
    sums = ranks.joined("the sums of features", sums, device)
    squares = sums.pop("squares")
    if not sums:
        raise LapwingError(f"All labels are {IGNORED}, so no sample counts. Pass the labels of the classes.")
    totals, counts = torch.stack(list(sums.values())).tensor_split([-1], 1)
    shares, mean, squares = (counts / counts.sum())[:, 0], totals.sum(0) / counts.sum(), squares / counts.sum()
    moved = (totals / counts - mean).T  # M (D, C)
    covariance = squares - mean[:, None] * mean  # Σ_0
    variance = (covariance + RIDGE * squares).diagonal().mean().clamp_min(1e-300)  # above rounding
    samples, active = int(counts.sum()), int((covariance.diagonal() > RIDGE * variance).sum())
    if samples - len(sums) < active:
        log.warning(
            "The number of samples minus the number of classes, %d, is below the number of features, %d. So training "
            'inputs score low and all others high. Pass more data, or write lw.novelty(model, loader, by="knn").',
            samples - len(sums), active,
        )  # fmt: skip
    within = covariance - (moved * shares) @ moved.T + RIDGE * variance * torch.eye(len(mean)).to(mean)
    root = torch.linalg.cholesky(within)
    slopes = torch.cholesky_solve(moved, root)  # S (D, C)
    inner = torch.linalg.cholesky(shares.reciprocal().diag() + moved.T @ slopes)
    rotation = torch.linalg.solve_triangular(inner, slopes.T, upper=False).T
    rotation = torch.linalg.inv(root).T if len(sums) == 1 else rotation  # then only the distance of all features
    return {"mean": mean, "rotation": rotation, "slopes": 2 * slopes, "offsets": (moved * slopes).sum(0)}
