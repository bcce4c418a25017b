"""Quantities: any numbers that are computed from a network, with the covariance that uncertain weights give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from ..covariance import Covariance, without_spread
from ..covariance.latent_at_positions import LatentAtPositions
from ..data import batches
from ..data.frames import Columns, as_inputs, as_loader
from ..data.inputs import Inputs
from ..display import Displayed
from ..errors import LapwingError, shown
from ..likelihoods import Likelihood
from ..likelihoods.predictions import tails_of
from ..linalg import check_draws, is_finite, psd_root, row_products, seeded, total
from ..network.eager import native, own_parameters, parameters_of
from ..network.positions import Places
from ..tangent import MemoryNeed, Tangent, join
from ..tangent.features import features_at
from .linearized import default_way
from .uncertain import gradients, prepared


@dataclass(frozen=True, repr=False, eq=False)
class Quantity(Displayed):
    """`N(mean, covariance)` of numbers that are computed from a network. `Posterior.of` makes it.

    Attributes:
        mean: the numbers at the trained weights, in the shape of the result of the function.
        covariance: their covariance, `(*shape, *shape)`: (q, q) for q numbers in a row, and a scalar for a scalar.
    """

    mean: Tensor
    covariance: Tensor

    @property
    def std(self) -> Tensor:
        """Standard deviations, in the shape of the mean."""
        return self.covariance.flatten()[:: self.mean.numel() + 1].clamp_min(0).sqrt().reshape(self.mean.shape)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Returns the lower and upper end of the central interval of each number; the level is in (0, 1)."""
        half = NormalDist().inv_cdf(tails_of(level)[1]) * self.std
        return self.mean - half, self.mean + half

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws the numbers jointly, `(n, *shape)`. None for the generator means seed 0."""
        check_draws("sample", "n", n, count := self.mean.numel())
        like: Any = {"dtype": self.mean.dtype, "device": self.mean.device}
        noise = torch.randn(n, count, generator=seeded(generator, self.mean.device), **like)
        return self.mean + (noise @ psd_root(self.covariance.reshape(count, count)).T).reshape(n, *self.mean.shape)

    def __repr__(self) -> str:
        mean, std = self.mean.flatten().tolist(), self.std.flatten().tolist()
        pairs = [f"{m:.4g} ± {s:.2g}" for m, s in zip(mean[:4], std[:4], strict=True)]
        return f"{type(self).__name__}({', '.join(pairs)}{', ...' if len(mean) > 4 else ''})"


class NamedWeights(dict[str, Tensor]):
    """Name -> weight of a network. An unknown name raises a LapwingError."""

    def __missing__(self, name: Any) -> Tensor:
        near = (get_close_matches(name, self) if isinstance(name, str) else []) or list(self)
        raise LapwingError(f"The network has no weight {shown(name)}. Write f.weight[{near[0]!r}].")


class NetworkFunction:
    """A network as a function of its weights: the argument f of the function that `Posterior.of` gets.

    `f(x)` returns the outputs, in their own shape, for one batch of inputs. `f.weight` maps names to weights. Both are
    differentiable in the weights, and `f(x)` also in x, as often as the network is.
    """

    def __init__(self, tangent: Tangent, columns: Columns) -> None:
        self._tangent, self._columns, named = tangent, columns, parameters_of(tangent.model)
        self.treated = {name: w.detach().to(tangent.dtype).requires_grad_() for name, w in tangent.parameters.items()}
        others = {name: w.detach() for name, w in named.items() if name not in self.treated and w.is_floating_point()}
        self.others = {name: weight.requires_grad_() for name, weight in others.items()}
        self.weight = NamedWeights(native({**self.treated, **self.others}, own_parameters(tangent.model)))
        self.calls: list[tuple[Tensor, Places, Inputs]] = []  # the outputs (B T, C) and the inputs of each call

    def __call__(self, x: Any, *more: Any) -> Tensor:
        tangent = self._tangent
        if more:
            raise LapwingError("f takes one batch of inputs. If the network has several inputs, write f((x_1, x_2)).")
        line = "Write posterior.of(lambda f, batch: f(batch[0]).sum(0), loader), which adds up the batches."
        checked = one_batch(tangent, x, self._columns, line)
        values = {name: self.treated[name].to(value.dtype) for name, value in tangent.parameters.items()}
        rows = tangent.call_with(values, checked).to(tangent.dtype).reshape(-1, tangent.outputs)
        batches.check_outputs(rows.detach(), "these inputs")
        self.calls.append((rows, tangent.places_of(checked), checked))
        return self.calls[-1][1].whole(rows)


def one_batch(tangent: Tangent, x: Any, columns: Columns, instead: str) -> Inputs:
    """Returns one batch of inputs, checked and on the device of the network. Raises for a loader and `lw.Uncertain`."""
    if isinstance(x, Inputs) and x.checked:
        return x
    inputs = as_inputs(x, tangent.model, columns)
    if batches.is_loader(inputs):
        raise LapwingError(f"One batch of inputs is needed here, not {shown(x)}. {instead}")
    return tangent.check(prepared(inputs, tangent.device))


def quantity(
    tangent: Tangent,
    covariance: Covariance,
    likelihood: Likelihood,
    function: Callable[..., Tensor],
    data: Any,
    observed: bool,
    columns: Columns,
    factor: float,
) -> Quantity:
    """Returns the numbers of a function with the covariance `g Σ gᵀ` times a factor: see `Posterior.of`."""
    if not callable(function) or isinstance(function, (type, nn.Module)):
        raise LapwingError(
            f"posterior.of({shown(function)}) needs a function of the network. Write posterior.of(lambda f: "
            "f(x).sum(0))."
        )
    if observed and (likelihood.noise_variance is None or not likelihood.one_output_per_target):
        raise LapwingError(
            "observed=True needs a likelihood with one noise variance, such as lw.Gaussian, and does not support the "
            f"{likelihood.name} likelihood. Leave out observed=True, which gives the error of numbers that are "
            "computed from f(x)."
        )
    mean: Any = None
    gradient: dict[str, Tensor] = {}
    noise: Any = 0.0
    alone = data if type(data) is list else [data]
    if alone and all(isinstance(part, Tensor) or batches.is_array(part) for part in alone):
        raise LapwingError(
            f"posterior.of(..., {shown(data)}) needs an iterable of batches. Write posterior.of(lambda f, batch: "
            "f(batch[0]).sum(0), [(x,)]) for inputs x without targets, or (x, y) for a data set with targets."
        )
    loader = None if data is None else as_loader(data, tangent.model, columns)
    if loader is not None:
        batches.check_loader(loader, "posterior.of")
    _check_arguments(function, 1 if loader is None else 2)
    for arguments in [()] if loader is None else ((batches.plain(batch, tangent.device),) for batch in loader):
        f = NetworkFunction(tangent, columns)
        with torch.enable_grad():
            numbers = _numbers(function(f, *arguments), mean, tangent)
            each = numbers.flatten().unbind()
        count, calls = numbers.numel(), f.calls if observed else []
        needed = count * (tangent.size + sum(rows.numel() for rows, *_ in calls)) * covariance.dtype.itemsize
        what, instead = f"the gradients of {count:,} numbers", "return fewer at a time, or read posterior.weight_std()"
        tangent.require(MemoryNeed("posterior.of", needed, what, instead))
        like: Any = {"dtype": covariance.dtype, "device": covariance.device}
        gradient = gradient or {block.name: torch.zeros(count, block.size, **like) for block in tangent.blocks}
        errors = _errors(tangent, covariance, likelihood, calls)
        root = numbers.new_zeros(count, sum(len(std) for _, std in errors), tangent.outputs)  # of the noise
        wanted, depends = [*f.treated.values(), *(rows for rows, *_ in calls)], False
        for i, (found, slopes) in enumerate(gradients(each, wanted, list(f.others.values()))):
            depends = depends or found
            for name, part in join(tangent.blocks, dict(zip(f.treated, slopes, strict=False))).items():
                gradient[name][i] += part.to(gradient[name])
            for (measured, std), slope in zip(errors, slopes[len(f.treated) :], strict=True):
                root[i].index_add_(0, measured, slope * std)
        if not depends:
            raise LapwingError(
                "The result of the function of posterior.of does not depend on f. Call f(x) instead of the network "
                "itself, read f.weight[name] instead of a parameter, and run a part of the network by "
                "torch.func.functional_call(part, weights, x) with its weights from f.weight."
            )
        if not all(map(is_finite, [numbers.detach(), root, *gradient.values()])):
            raise LapwingError(
                "The function of posterior.of returned numbers that are NaN or infinite, or have such a gradient, as "
                "the root or norm of 0 has. Return finite ones, such as the square instead of the root."
            )
        noise = noise + row_products(root.flatten(1), root.flatten(1)).to(numbers) if calls else noise
        mean = numbers.detach() if mean is None else mean + numbers.detach()
    if mean is None:
        raise LapwingError("The data of posterior.of yield no batch. Check the dataset's length.")
    matrix = mean.new_zeros(mean.numel(), mean.numel())
    for rows, products in covariance.products(gradient, tangent.memory):
        matrix[rows] = total(row_products(products[name], gradient[name]) for name in gradient).to(matrix)
    return Quantity(mean, (matrix + matrix.T).mul_(factor / 2).add_(noise).reshape(mean.shape * 2))


def _errors(
    tangent: Tangent, covariance: Covariance, likelihood: Likelihood, calls: Sequence[tuple[Tensor, Places, Inputs]]
) -> list[tuple[Tensor, Tensor]]:
    """Returns the numbers of the measurements (B T,) and their standard deviations (B T, C) at the rows of each call.

    Calls share the noise of rows with equal inputs. Equal rows of one call have separate noise: the k-th of them shares
    its noise with the k-th of another call.
    """
    numbered, deviations = [], []
    for rows, places, inputs in calls:
        keys = inputs.digests().repeat_interleave(places.count)
        ascending, order = keys.sort(stable=True)
        k = torch.arange(len(keys), device="cpu") - torch.searchsorted(ascending, ascending)
        numbered.append(torch.stack([ascending, k], 1)[order.argsort()])
        deviations.append(noise_of(tangent, covariance, likelihood, rows, places, inputs).sqrt())
    if not calls:
        return []
    _, measured = torch.cat(numbered).unique(dim=0, return_inverse=True)
    parts = measured.to(tangent.device).split([len(std) for std in deviations])
    return list(zip(parts, deviations, strict=True))


def noise_of(
    tangent: Tangent, covariance: Covariance, likelihood: Likelihood, rows: Tensor, places: Places, inputs: Inputs
) -> Tensor:
    """Returns the variance of y (B T, K) at certain outputs f (B T, C): the noise, or `p (1 - p)` of probabilities.

    Noise that depends on the input grows with the variance of f far from the data, which costs a prediction.
    """
    layer, features = likelihood.features_read, None
    latent: Any = without_spread(rows.detach())
    latent = LatentAtPositions(latent, places) if places.sizes else latent
    if layer is not None:
        with torch.no_grad():
            latent = default_way(tangent).latent(tangent, covariance, inputs, False)
            features = features_at(tangent, layer, inputs)
    prediction: Any = likelihood.predicted(latent, features=features)
    prediction = prediction.rows if places.sizes else prediction
    heads = prediction.values() if isinstance(prediction, Mapping) else [prediction]
    noises = [h.aleatoric_variance if hasattr(h, "aleatoric_variance") else h.probs * (1 - h.probs) for h in heads]
    return torch.cat([noise.reshape(len(rows), -1) for noise in noises], 1)


def _check_arguments(function: Callable[..., Tensor], count: int) -> None:
    """Raises unless the function can be called with f, or with f and a batch."""
    try:
        signature(function).bind(*range(count))
    except TypeError as error:
        needed = "f alone without data=. Write lambda f: f(x).sum(0)"
        if count == 2:
            needed = "f and a batch with data=. Write lambda f, batch: f(batch[0]).sum(0)"
        raise LapwingError(f"The function of posterior.of takes {needed} ({error}).") from error
    except ValueError:  # a function of C has no signature
        pass


def _numbers(result: Any, before: Tensor | None, tangent: Tangent) -> Tensor:
    """Returns the result of the function. Raises if it has no gradient, or another shape than `before`."""
    if isinstance(result, (tuple, list, Mapping)):
        raise LapwingError(
            f"The function of posterior.of returned {batches.describe(result)}. Return one tensor: write "
            "torch.stack([a, b]) for scalars a and b, or torch.cat([a.flatten(), b.flatten()])."
        )
    if not isinstance(result, Tensor) or not result.is_floating_point() or not result.requires_grad:
        raise LapwingError(
            f"The function of posterior.of returned {batches.describe(result)} without a gradient. Return a tensor "
            "that is computed from f(x) or f.weight[...], without detach(), item(), NumPy, argmax and comparisons."
        )
    numbers = result.to(tangent.dtype)
    if not numbers.numel():
        raise LapwingError("The function of posterior.of returned no number. Check the index or slice of f(x).")
    if before is not None and numbers.shape != before.shape:
        raise LapwingError(
            f"The function of posterior.of returned shape {tuple(before.shape)} and then shape {tuple(numbers.shape)}. "
            "Return the same shape for each batch, such as f(batch[0]).sum(0): lapwing adds up the batches."
        )
    return numbers
