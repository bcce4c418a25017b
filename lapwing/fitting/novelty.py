"""`lw.novelty`: a detector of inputs that are unlike the training data, by the features that reach the last layer."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ranks
from ..data import batches
from ..data.batches import Forward
from ..data.data import Data
from ..data.frames import as_inputs
from ..data.inputs import Inputs
from ..data.samples import Samples, checked
from ..errors import LapwingError, check_choice
from ..files import prefixed, read_safetensors, under, write_safetensors
from ..linalg import doubled
from ..network.entry import outside_modes
from ..network.stamp import Stamp, fingerprint
from ..posterior.loading import check_same
from ..running.fingerprints import check_same_network
from ..tangent import Tangent, last_layer
from ..tangent.features import rows_of
from ..tangent.retry import entry
from ..tangent.stored import from_json, to_json

log = logging.getLogger("lapwing")

NEIGHBOURS = 50  # number k of the neighbour whose distance counts: the choice of Sun et al. 2022 for CIFAR-10
IGNORED = -100  # label of samples that do not count, as in `torch.nn.functional.cross_entropy`
RIDGE = 1e-6  # share of the mean variance of the features that is added to covariances, which may be singular


@dataclass(frozen=True, repr=False, eq=False)
class Novelty:
    """A detector that `lw.novelty` makes: `detector(x)` (B,) is larger for stranger inputs of a batch or a loader.

    `detector.save(path)` writes a file, and `lw.Novelty.load(path, model)` reads it.
    """

    by: Literal["mahalanobis", "knn"]
    tangent: Tangent  # the network, which must keep its weights, and its last layer
    tensors: dict[str, Tensor]  # the numbers that the score reads
    stamp: Stamp

    @outside_modes
    def __call__(self, x: Any) -> Tensor:
        changed = self.stamp.changed(self.tangent.model, self.tangent.call.known.state)
        if changed is not None:
            raise LapwingError(
                f"{changed} has changed since the fit. Write detector = lw.novelty(model, loader) again."
            )
        x = as_inputs(x, self.tangent.model)
        widest = max(size for tensor in self.tensors.values() for size in tensor.shape)
        length = max(1, min(self.tangent.chunk_length(1), self.tangent.memory // (64 * widest)))
        scores, like = [], next(iter(self.tensors.values()))
        for part in map(_inputs_of, x) if batches.is_loader(x) else [x]:
            inputs = Inputs.of(part, self.tangent.device)
            scores.append(like.new_empty(inputs.samples))
            for rows, chunk in self.tangent.check(inputs).chunks(length) if inputs.samples else ():
                scores[-1][rows] = self.score(features_of(self.tangent, chunk))
        if not sum(map(len, scores)):
            raise LapwingError("The inputs hold no samples. Pass a tensor (B, ...) or a loader that yields batches.")
        return torch.cat(scores)

    def __repr__(self) -> str:
        return f"Novelty(by={self.by!r}, network={type(self.tangent.model).__name__})"

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
        prints = {name: fingerprint(value) for name, value in state.items()}
        tensors = prefixed("novelty", self.tensors) | prefixed("weights", prints)
        write_safetensors(path, tensors, {"novelty": self.by, **header})

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module, *, forward: Forward | None = None) -> Novelty:
        """Reads a detector that `save` wrote, with `forward` as in its fit; raises if the network has other weights."""
        tensors, header = read_safetensors(path)
        if "novelty" not in header:
            raise LapwingError(f"The file {path} holds no detector. lw.load(path, model) reads posteriors.")
        if header["forward"] != (forward is not None):
            line = f"lw.Novelty.load(path, model{', forward=forward' if header['forward'] else ''})"
            raise LapwingError(f"The file {path} holds a detector with another forward=. Write {line}.")
        tangent, device = from_json(header["tangent"], model, forward, None), next(model.parameters()).device
        check_same(path, tangent, under("weights", tensors), header["dtypes"])
        kept = {name: value.to(device) for name, value in under("novelty", tensors).items()}
        return cls(header["novelty"], tangent, kept, Stamp.of(tangent.model))


def _inputs_of(batch: Any) -> Any:
    return batch.inputs if isinstance(batch, Samples) else batches.inputs_of(batch)


@entry("The detector", "Pass smaller batches.")
def novelty(
    model: nn.Module, loader: Any, by: Literal["mahalanobis", "knn"] = "mahalanobis", *, forward: Forward | None = None
) -> Novelty:
    """Fits a detector of inputs that are unlike the training data. It needs no posterior.

    z are the features of an input: what reaches the last layer, averaged over positions. This layer must be linear or a
    convolution. Mutual information says *seen, but undecided*; novelty says *unlike anything seen*.

    - "mahalanobis": distance to the nearest class, minus distance to all data (relative Mahalanobis distance):
      `min_c (z-μ_c)ᵀ Σ⁻¹ (z-μ_c) - (z-μ_0)ᵀ Σ_0⁻¹ (z-μ_0)`, with the class means μ_c, their pooled covariance Σ, and
      mean and covariance of all features. Integer or bool labels (B,) are classes, so write counts as floats. Samples
      of label -100 do not count. Without classes only `(z-μ_0)ᵀ Σ_0⁻¹ (z-μ_0)`.
    - "knn": the distance of `z/|z|` to its 50th nearest neighbour in the training data, or to the last if there are
      fewer than 50. Targets do not matter.

    Training inputs score lower than new inputs of the same kind: choose a threshold on held-out inputs.
    `detector.save(path)` writes the detector, and `lw.Novelty.load(path, model)` reads it. If `torch.distributed` is
    initialised with several processes, each of them calls `lw.novelty` with its share of the data, as in `lw.fit`.

    Args:
        model: the trained network, in eval mode.
        loader: training data, in any form that `lw.fit` accepts.
        by: the score.
        forward: as in `lw.fit`.

    Cost: one pass over the data; memory O(D² + C D), or all features with "knn". A score costs a forward pass.

    Source: Ren et al. 2021, A Simple Fix to Mahalanobis Distance, equation 2; Sun et al. 2022, Out-of-Distribution
    Detection with Deep Nearest Neighbors, section 3.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(60, 4), torch.arange(60) % 3
        >>> detector = lw.novelty(torch.nn.Linear(4, 3).eval(), (x, y))
        >>> detector(x).shape
        torch.Size([60])
    """
    check_choice("lw.novelty", "by", by, ("mahalanobis", "knn"))
    data = Data(loader, model)
    batches.check_loader(data.loader, "lw.novelty")
    tangent = Tangent.survey(model, data.first.inputs, last_layer, forward, targets=data.first.targets)
    check_same_network(tangent.model)
    pairs = ((features_of(tangent, part.inputs), part.targets) for part in checked(data, tangent.device))
    if by == "knn":  # at least float32: cosines near 1 in half precision would tie
        kept = [F.normalize(rows.to(torch.promote_types(rows.dtype, torch.float32))) for rows, _ in pairs]
        kept = [rows.to(tangent.device) for part in ranks.gathered("the features", kept) for rows in part]
    tensors = {"rows": torch.cat(kept)} if by == "knn" else _mahalanobis(pairs, tangent.device)
    return Novelty(by, tangent, tensors, Stamp.of(tangent.model))


def features_of(tangent: Tangent, inputs: Inputs) -> Tensor:
    """Returns the features (B, D): the inputs of the last layers, averaged over positions and joined."""
    parts = []
    for _, chunk in tangent.check(Inputs.of(inputs, tangent.device)).chunks(tangent.chunk_length(1)):
        recording, uses = tangent.recording(chunk)
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
