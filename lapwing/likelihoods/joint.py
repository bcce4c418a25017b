"""Networks with several heads: a likelihood for each head, and predictions by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..covariance import AnyLatent, JointLatent, Latent, LatentDraws
from ..covariance.terms import DenseTerm
from ..data.batches import packed
from ..errors import LapwingError, shown
from ..linalg import doubled
from ..options import Rule, instance_of, option, required
from .base import Likelihood, NoiselessLikelihood
from .links import ExactLink, Link, SampledLink
from .predictions import Prediction

_LIKELIHOODS = Rule(
    lambda value: (
        isinstance(value, Mapping) and len(value) > 1 and all(isinstance(head, Likelihood) for head in value.values())
    ),
    "a dict from at least two keys to likelihoods",
    lambda value: {  # heads accept NaN as a missing target, if their class has the option
        key: replace(value[key], missing=True) if hasattr(value[key], "missing") else value[key]
        for key in sorted(value)
    },
)
_OUTPUTS = Rule(
    lambda value: isinstance(value, Mapping) and all(isinstance(part, (slice, list, range)) for part in value.values()),
    "a dict from the same keys to slices or lists of outputs",
    lambda value: {key: value[key] for key in sorted(value)},
)


@dataclass(frozen=True)
class Joint(NoiselessLikelihood["JointPrediction"]):
    """One likelihood for each head of a network: `log p(y|f) = Σ_k log p_k(y_k|f_k)`; Λ has a block for each head.

    Outputs are one tensor (B, C); join others by `forward=`. Batches are `(x, {key: targets (B,) or (B, K)})`, and NaN
    means missing, for labels too, but not for counts. Predictions are dicts by key, such as
    `posterior.predict(x)["box"].interval(0.9)`.

    An open noise variance of a Gaussian head is the mean squared residual of the data in `validation=`, or else of the
    training data, which takes one more forward pass. `lw.Validation` then chooses the noise variance or the logit
    temperature of each head, for predictions: the curvature keeps the residual. Other tunings choose only the prior
    precision. Then residuals decide on the noise and the tails of each head, as for `Gaussian` alone. A file cannot
    store the heads: write `lw.load(path, model, likelihood=joint)`.

    Args:
        likelihoods: key -> likelihood.
        outputs: key -> outputs of this head, as a slice or a list of indices; no output belongs to two heads.
        estimated: key -> noise variance in the curvature, if it was open. A fit sets it.
    """

    likelihoods: Mapping[str, Likelihood] = field(
        metadata=required(_LIKELIHOODS, '{"kind": lw.Categorical(), "size": lw.Gaussian()}')
    )
    outputs: Mapping[str, Any] = field(metadata=required(_OUTPUTS, '{"kind": slice(0, 3), "size": slice(3, 7)}'))
    estimated: Mapping[str, float] = option(dict, instance_of("a dict", Mapping), write='{"size": 0.1}', kw_only=True)
    name: ClassVar[str] = "joint"
    one_output_per_target: ClassVar[bool] = False
    missing: ClassVar[bool] = True  # NaN means a missing target

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys != tuple(self.outputs):
            keys = f"{shown(list(self.keys))}, and outputs of {shown(list(self.outputs))}"
            raise LapwingError(f"Joint has likelihoods of {keys}. Pass both for the same keys.")

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.likelihoods)

    @property
    def links(self) -> tuple[type[Link], ...]:  # type: ignore[override]
        """Each head uses its default link: `ExactLink` if all of these have a closed form."""
        closed = all(head.default_link.closed_form for head in self.likelihoods.values())
        return (ExactLink,) if closed else (SampledLink,)

    @property
    def plain(self) -> Likelihood:
        heads = {key: head.plain for key, head in self.likelihoods.items()}
        return self if heads == self.likelihoods else replace(self, likelihoods=heads)

    @property
    def head_numbers(self) -> dict[str, tuple[float | None, ...]]:  # type: ignore[override]
        heads = self.likelihoods.items()
        return {key: (head.noise_variance, head.logit_temperature, self.estimated.get(key)) for key, head in heads}

    def with_head_numbers(self, numbers: Mapping[str, Sequence[float | None]]) -> Joint:
        """Returns the likelihood with these `head_numbers`; T = None means 1, without a map of the logits."""
        if numbers.keys() != {*self.keys}:
            raise LapwingError(
                f"The fit had heads {shown(sorted(numbers))}, and Joint has {shown(list(self.keys))}. Pass the "
                "likelihood of the fit: lw.load(path, model, likelihood=joint)."
            )
        heads = {
            key: self.likelihoods[key].with_noise_variance(noise).with_logit_temperature(temperature)
            for key, (noise, temperature, _) in numbers.items()
        }
        estimated = {key: residual for key, (_, _, residual) in numbers.items() if residual is not None}
        return replace(self, likelihoods=heads, estimated=estimated)

    def with_logit_temperature(self, logit_temperature: float | None) -> Joint:
        """Returns the heads with another T, before the calibration of σ²; None means 1, without maps of the logits."""
        numbers = self.head_numbers.items()
        return self.with_head_numbers({key: (s or noise, logit_temperature, s) for key, (noise, _, s) in numbers})

    @property
    def uncalibrated(self) -> Joint:
        return replace(self, likelihoods={key: head.uncalibrated for key, head in self.likelihoods.items()})

    @property
    def regressions(self) -> dict[Any, Any]:  # type: ignore[override]
        return {key: head for key, head in self.likelihoods.items() if head.regressions}

    @property
    def features_read(self) -> str | None:  # type: ignore[override]
        read = (head.features_read for head in self.likelihoods.values())
        return next((layer for layer in read if layer is not None), None)

    def with_regressions(self, parts: Mapping[Any, Any]) -> Joint:
        return replace(self, likelihoods={**self.likelihoods, **parts})

    def residuals(self, outputs: Tensor, targets: Any) -> Tensor:
        """Returns y - f of all heads that are regressions, in float64, (B, C); NaN for other outputs."""
        found = torch.full_like(doubled(outputs), torch.nan)
        for key, head, f, y in self.heads(outputs, targets):
            if head.regressions:
                found[:, self.columns(key, outputs.shape[-1])] = head.residuals(f, y)  # type: ignore[attr-defined]
        return found

    def reads_covariance(self, link: Link) -> bool:
        return any(head.reads_covariance(link) for head in self.likelihoods.values())

    def classifies(self, outputs: int) -> bool:
        """Whether all heads do: any other head needs all weights for its error bars, and they do not harm classes."""
        return all(head.classifies(len(self.columns(key, outputs))) for key, head in self.likelihoods.items())

    def open_heads(self, outputs: int) -> list[str]:
        return [key for key, head in self.likelihoods.items() if head.needs_noise]

    def with_residuals(self, statistics: Mapping[str, dict[str, Tensor]]) -> Joint:
        """Returns the likelihood with the mean squared residual of each open head as its σ².

        The curvature of a censored head depends on its σ², of highest likelihood, which a tuning therefore keeps.
        """
        found = {key: self.likelihoods[key].residual_variance(sums) for key, sums in statistics.items()}
        numbers = self.head_numbers
        numbers |= {key: (s, None, s if key in self.regressions else None) for key, s in found.items()}
        return self.with_head_numbers(numbers)

    def part(self, latent: AnyLatent, key: str) -> Any:
        """Returns the latent of the outputs of a head."""
        index = self.columns(key, latent.mean.shape[-1])
        if latent.draws is not None:
            return LatentDraws(latent.draws[..., index], latent.joint)
        mean, covariance = latent.mean[:, index], latent.covariance[:, index][..., index]
        return JointLatent(mean, covariance) if latent.joint else Latent(mean, (DenseTerm(covariance),))

    def by_key(self, targets: Any, outputs: int) -> dict[str, Tensor]:
        """Returns the targets of each head, from a dict or one tensor (B, K); integers for labels."""
        same = not isinstance(targets, Mapping) or tuple(sorted(targets)) == self.keys
        targets = packed(targets) if isinstance(targets, Mapping) else targets
        shapes = [head.target_shape(len(self.columns(key, outputs))) for key, head in self.likelihoods.items()]
        widths = [sum(shape) or 1 for shape in shapes]
        if not same or targets.ndim != 2 or targets.shape[1] != sum(widths):
            raise LapwingError(
                f"Joint has {sum(widths)} targets per sample, {dict(zip(self.keys, widths, strict=True))}. The targets "
                f"have shape {tuple(targets.shape)}. Let the loader yield (x, {{key: targets (B,) or (B, K)}}) with "
                "all keys in every batch, and NaN for unknown targets."
            )
        found = dict(zip(self.keys, targets.split(widths, 1), strict=True))
        for key, shape in zip(self.keys, shapes, strict=True):
            ignored = getattr(self.likelihoods[key], "ignore_index", torch.nan)
            labels = found[key].nan_to_num(ignored).flatten()
            if not shape:
                found[key] = labels.long() if bool((labels == labels.long()).all()) else labels
        return found

    def heads(self, outputs: Tensor, targets: Any) -> Iterator[tuple[str, Likelihood, Tensor, Tensor]]:
        y = self.by_key(targets, outputs.shape[-1])
        for key, head in self.likelihoods.items():
            yield key, head, outputs[:, self.columns(key, outputs.shape[-1])], y[key]

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        for key, head, f, y in self.heads(outputs, targets):
            try:
                head.check(f, y)
            except LapwingError as error:
                raise LapwingError(f"The target {key!r} does not fit. {error}") from error

    def target_weights(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        weights = torch.ones_like(outputs)
        for key, head, f, y in self.heads(outputs, targets):
            own = head.target_weights(f, y)
            weights[:, self.columns(key, outputs.shape[-1])] = 1.0 if own is None else own.to(weights)
        return weights

    def log_prob(self, outputs: Tensor, targets: Any) -> Tensor:
        """Returns the sum over heads of `log p(y|f)`, (B,); targets are a dict by key, or one tensor (B, K)."""
        return sum(head.log_prob(f, y) for _, head, f, y in self.heads(outputs, targets))  # type: ignore[return-value]

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Returns a root with a block for each head, at its noise in the curvature, (B, C, ΣR)."""
        blocks = []
        for key, head in self.likelihoods.items():
            index = self.columns(key, outputs.shape[-1])
            root = head.fisher_root(outputs[:, index]) / (self.estimated.get(key) or head.noise_variance or 1.0) ** 0.5
            blocks.append(outputs.new_zeros(*outputs.shape, root.shape[-1]).index_copy(1, index.to(root.device), root))
        return torch.cat(blocks, -1)

    def predict(
        self, latent: AnyLatent, link: Link | None = None, generator: torch.Generator | None = None
    ) -> JointPrediction:
        """Returns the predictions of all heads by key, each by its default link."""
        self.choose_link(latent, link)
        heads = {key: head.predict(self.part(latent, key), None, generator) for key, head in self.likelihoods.items()}
        return JointPrediction(self, heads, latent.mean.shape[-1])

    def at_features(self, prediction: Any, features: Tensor | None) -> Any:
        heads = {key: self.likelihoods[key].at_features(one, features) for key, one in prediction.items()}
        return replace(prediction, predictions=heads)

    def units(self, outputs: int) -> Tensor:
        units = torch.arange(outputs)
        for key, head in self.likelihoods.items():
            columns = self.columns(key, outputs)
            units[columns] = columns[head.units(len(columns))]
        return units

    def columns(self, key: str, outputs: int) -> Tensor:
        """Returns the indices of the outputs of a head; raises unless they exist and belong to no other head."""
        found = {name: list(range(outputs))[part] if isinstance(part, slice) else [*part]
                 for name, part in self.outputs.items()}  # fmt: skip
        every = [index for indices in found.values() for index in indices]
        if not all(found.values()) or len({*every}) < len(every) or not {*every} <= {*range(outputs)}:
            raise LapwingError(
                f"The heads of Joint have the outputs {found} of {outputs}. Give each head outputs from 0 to "
                f"{outputs - 1} that no other head has."
            )
        return torch.tensor(found[key])


@dataclass(frozen=True, eq=False, repr=False)
class JointPrediction(Prediction, Mapping[str, Any]):
    """The predictions of several heads, by key: `prediction["box"]` is the ordinary prediction of that head.

    The heads of one input are predicted separately. Targets are dicts by key, or one tensor (B, K).
    """

    joint: Joint
    predictions: dict[str, Any]
    outputs: int

    def __getitem__(self, key: str) -> Any:
        return self.predictions[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.predictions)

    def __len__(self) -> int:
        return len(self.predictions)

    def log_prob(self, targets: Any) -> Tensor:
        """Returns the sum over heads of the log probability of the known targets, (B,)."""
        y = self.joint.by_key(targets, self.outputs)
        return sum(head.log_prob(y[key]) for key, head in self.items())

    def sample(self, n: int, generator: torch.Generator | None = None) -> Any:
        return {key: head.sample(n, generator) for key, head in self.items()}

    def distribution(self) -> Any:
        return {key: head.distribution() for key, head in self.items()}

    @property
    def point(self) -> Any:
        return {key: head.point for key, head in self.items()}

    def uncertainty(self, score: str = "entropy") -> Tensor:
        """Returns the mutual information, which adds over the heads, (B,); raises for other scores, in other units."""
        if score == "mutual_information":
            return sum(head.uncertainty(score) for head in self.values())
        raise LapwingError(f"The heads have different units. Write prediction[{self.joint.keys[0]!r}].uncertainty().")

    entropy = mutual_information = uncertainty

    def summary(self) -> dict[str, Tensor]:
        """Returns the outputs of a deployed network by `key_name`."""
        return {f"{key}_{name}": value for key, head in self.items() for name, value in head.summary().items()}

    def for_metrics(self, targets: Any) -> dict[str, Tensor]:
        """Returns the log probability of all targets, and the tensors of each head by `key: name`."""
        y = self.joint.by_key(targets, self.outputs)
        heads = {f"{key}: {name}": v for key, head in self.items() for name, v in head.for_metrics(y[key]).items()}
        return super().for_metrics(targets) | heads

    def __repr__(self) -> str:
        return f"JointPrediction({', '.join(f'{key}={head!r}' for key, head in self.items())})"
