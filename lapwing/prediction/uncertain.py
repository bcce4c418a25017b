"""Uncertain inputs: `x ~ N(x, Σ_x)`, alone or within tuples and dicts of inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..data import batches
from ..data.inputs import Inputs
from ..errors import LapwingError
from ..linalg import psd_root
from ..network.eager import eager_math
from ..tangent import Tangent


@dataclass(frozen=True, eq=False)
class Uncertain:
    """An input with a Gaussian error, `x ~ N(x, Σ_x)`, independent between samples.

    Pass it instead of a tensor, alone or within a tuple or dict, to `posterior.latent`, `posterior.predict` or
    `lw.propagate`. It adds to the uncertainty of the weights. Differentiable in value and variance.

    Args:
        value: x, floating-point (B, ...), the samples first; not integers such as tokens.
        variance: diagonal of Σ_x, in squared units of x: a number of at least 0, or a tensor that broadcasts to x.
        covariance: Σ_x, (B, n, n) or (n, n) for samples with n entries, in the order of `x.flatten(1)`; instead of
            `variance`. `Streamlined` accepts it only in full mode.

    Source: Li et al., Streamlining Prediction in Bayesian Deep Learning, section 4.3.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> posterior = lw.fit(torch.nn.Linear(4, 3).eval(), [(x, y)], prior_precision=1.0)
        >>> noisy = posterior.latent(lw.Uncertain(x, 0.1), via=lw.Streamlined())
        >>> bool((noisy.variance > posterior.latent(x, via=lw.Streamlined()).variance).all())
        True
    """

    value: Tensor
    variance: Tensor | float | None = None
    covariance: Tensor | None = None

    def __post_init__(self) -> None:
        x = self.value
        if isinstance(x, Tensor):
            batches.check_dense(x, "The value of lw.Uncertain")
        if not isinstance(x, Tensor) or not x.ndim or not x.is_floating_point():
            raise LapwingError(
                f"The value of lw.Uncertain is {batches.describe(x)}, not a floating-point tensor with samples first. "
                "Integer inputs, such as tokens, have no variance: pass them as they are, and wrap measured ones, "
                "lw.Uncertain(x, 0.01)."
            )
        if (self.variance is None) == (self.covariance is None):
            raise LapwingError(
                f"lw.Uncertain({batches.describe(x)}) has "
                f"{'neither a variance nor a covariance' if self.variance is None else 'a variance and a covariance'}. "
                "Pass one of them: write lw.Uncertain(x, 0.01)."
            )
        spread = self.variance if self.covariance is None else self.covariance
        real = not spread.is_complex() if isinstance(spread, Tensor) else isinstance(spread, Real)
        if not real or isinstance(spread, bool):
            raise LapwingError(
                f"The variance of lw.Uncertain is {batches.describe(spread)}, not a number or a real tensor. Write "
                "lw.Uncertain(x, 0.01)."
            )
        if isinstance(spread, Tensor) and spread.device != x.device:
            raise LapwingError(
                f"The value of lw.Uncertain is on {x.device}, and its variance on {spread.device}. Write "
                f"variance.to('{x.device}')."
            )
        if isinstance(spread, Tensor):
            batches.check_dense(spread, "The variance of lw.Uncertain")
        if self.covariance is None:
            self._check_variance()
        else:
            self._check_covariance(self.covariance)

    def _check_variance(self) -> None:
        shape, spread = tuple(self.value.shape), self.variance
        pairs = zip(reversed(spread.shape), reversed(shape), strict=False) if isinstance(spread, Tensor) else ()
        if isinstance(spread, Tensor) and (spread.ndim > len(shape) or any(a not in (1, b) for a, b in pairs)):
            raise LapwingError(
                f"The variance of lw.Uncertain has shape {tuple(spread.shape)}, which does not broadcast to "
                f"the shape {shape} of x. Pass one that does, or a number: write lw.Uncertain(x, 0.01)."
            )
        _check_numbers(spread)

    def _check_covariance(self, spread: Any) -> None:
        count = self.value.shape[0]
        numbers = math.prod(self.value.shape[1:])
        if not isinstance(spread, Tensor) or tuple(spread.shape) not in ((numbers, numbers), (count, numbers, numbers)):
            raise LapwingError(
                f"The covariance of lw.Uncertain is {batches.describe(spread)}, and x has shape "
                f"{tuple(self.value.shape)}. Pass a tensor of shape ({count}, {numbers}, {numbers}) or ({numbers}, "
                f"{numbers}), or variances with lw.Uncertain(x, variance)."
            )
        _check_numbers(spread.diagonal(dim1=-2, dim2=-1))
        matrix = spread.detach()
        if not torch.allclose(matrix, matrix.mT, rtol=1e-3, atol=1e-6 * float(matrix.abs().max())):
            raise LapwingError(
                "The covariance of lw.Uncertain is not symmetric. Write covariance=(S + S.mT) / 2, if that is meant."
            )

    @property
    def spread(self) -> Tensor:
        """Variances in x's shape, or covariances (B, n, n), in the dtype of x, or float32 or wider."""
        spread = self.variance if self.covariance is None else self.covariance
        dtype = torch.promote_types(self.value.dtype, torch.float32)
        if not isinstance(spread, Tensor):
            return torch.full(self.value.shape, float(spread or 0.0), dtype=dtype, device=self.value.device)
        spread = spread.to(torch.promote_types(spread.dtype, dtype))
        if self.covariance is None:
            return spread.expand(self.value.shape)
        return spread.expand(self.value.shape[0], *spread.shape[-2:])

    def on(self, device: torch.device | None) -> Uncertain:
        """Returns the input on a device; None keeps its own."""
        if device is None or self.value.device == device:
            return self
        return Uncertain(*[batches.plain(part, device) for part in (self.value, self.variance, self.covariance)])

    def __repr__(self) -> str:
        """Shows shapes instead of values."""
        name = "variance" if self.covariance is None else "covariance"
        spread = self.variance if self.covariance is None else self.covariance
        text = batches.describe(spread) if isinstance(spread, Tensor) else spread
        return f"Uncertain({batches.describe(self.value)}, {name}={text})"


def _check_numbers(spread: Tensor | float | None) -> None:
    """Raises for variances that are negative, infinite or NaN."""
    try:
        values = torch.as_tensor(spread).detach()
    except (ValueError, OverflowError, RuntimeError):  # an integer too large for a tensor
        values = torch.tensor(math.inf)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    bad = ~(torch.isfinite(values) & (values >= 0))
    if bool(bad.any()):
        raise LapwingError(
            f"{int(bad.sum())} of {bad.numel()} variances of lw.Uncertain are negative, infinite or NaN. Pass finite "
            "numbers of at least 0; for standard deviations write std**2."
        )


def prepared(x: Any, device: torch.device | None = None) -> Inputs:
    """Returns inputs on a device, with the spreads of `lw.Uncertain` ones. Raises if they hold no samples.

    None for the device keeps theirs.
    """
    leaves = [x] if isinstance(x, (Tensor, Inputs)) else pytree.tree_leaves(batches.tree(x))
    uncertain = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Uncertain)}
    inputs = _with_spreads(x, uncertain, device) if uncertain else Inputs.of(x, device)
    if (isinstance(inputs.value, Tensor) and not inputs.value.ndim) or inputs.samples == 0:
        raise LapwingError(f"{inputs} holds no samples. Write a single sample as x[None], and leave empty batches out.")
    return inputs


def _with_spreads(x: Any, uncertain: Mapping[int, Uncertain], device: torch.device | None) -> Inputs:
    """Returns inputs with the spreads of uncertain leaves, by their number."""
    uncertain = {place: one.on(device) for place, one in uncertain.items()}
    inputs = Inputs.of(Inputs(x).with_leaves({place: one.value for place, one in uncertain.items()}), device)
    for one in uncertain.values():
        if len(one.value) != inputs.samples:
            raise LapwingError(
                f"The inputs have {inputs.samples} samples, and lw.Uncertain has {len(one.value)}. Expand what the "
                f"samples share: x.expand({inputs.samples}, ...)."
            )
    return replace(inputs, spreads={place: batches.plain(one.spread) for place, one in uncertain.items()})


def drawn(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Returns one draw of inputs, `x + Σ_x^½ ε`."""
    moved = {}
    for place, spread in inputs.spreads.items():
        x = inputs.leaves[place]
        noise = torch.randn(x.shape, generator=generator, dtype=spread.dtype, device=x.device)
        if spread.shape == x.shape:
            step = spread.clamp_min(torch.finfo(spread.dtype).tiny).sqrt() * noise
        else:
            step = (psd_root(spread) @ noise.flatten(1)[..., None]).reshape(x.shape)
        moved[place] = (x + step).to(x.dtype)
    return inputs.certain.with_leaves(moved)


def carried(tangent: Tangent, inputs: Inputs, differentiable: bool) -> tuple[Tensor, Tensor]:
    """Returns the outputs (B, C), and the first-order covariance from uncertain inputs, `J_x Σ_x J_xᵀ` (B, C, C).

    The result is always differentiable in the spreads, and with `differentiable` in the values.
    """
    means, parts = [], []
    for _, chunk in inputs.chunks(_length(tangent, inputs)):
        outputs, jacobians = _jacobians(tangent, chunk, differentiable)
        dtype = tangent.dtype
        added: Any = 0
        for (place, spread), jacobian in zip(chunk.spreads.items(), jacobians, strict=True):
            spread, j = spread.to(dtype), jacobian.to(dtype)  # (B, C, n)
            diagonal = spread.shape == chunk.leaves[place].shape
            half = j * spread.flatten(1)[:, None] if diagonal else j @ spread
            added = added + half @ j.mT
        means.append(outputs.to(dtype))
        parts.append(added)
    return torch.cat(means), torch.cat(parts)


def _jacobians(tangent: Tangent, inputs: Inputs, differentiable: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns outputs (B, C) and, for each uncertain tensor, its Jacobian (B, C, n)."""
    leaves = inputs.leaves
    with torch.enable_grad():
        at = {place: leaves[place] if differentiable else leaves[place].detach() for place in inputs.spreads}
        at = {place: x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for place, x in at.items()}
        with eager_math():
            outputs = tangent.call.rows(inputs.with_leaves(at))
        columns = outputs.unbind(1) if outputs.requires_grad else ()
        rows = list(gradients([column.sum() for column in columns], list(at.values()), create_graph=differentiable))
    if not any(depends for depends, _ in rows):
        raise LapwingError(
            f"No gradient leads from the outputs of {type(tangent.model).__name__} to its uncertain inputs. Take "
            "detach(), no_grad() and NumPy out of its forward, or pass via=lw.MonteCarlo(draws=50), which draws the "
            "inputs."
        )
    jacobians = [torch.stack(parts, 1).flatten(2) for parts in zip(*(slopes for _, slopes in rows), strict=True)]
    return outputs if differentiable else outputs.detach(), jacobians


def gradients(
    numbers: Iterable[Tensor], wanted: Sequence[Tensor], others: Sequence[Tensor] = (), create_graph: bool = False
) -> Iterator[tuple[bool, list[Tensor]]]:
    """Yields for each number whether it depends on any of the tensors, and its gradients by the wanted ones."""
    options: Any = {"retain_graph": True, "create_graph": create_graph, "allow_unused": True}
    for number in numbers:
        found = torch.autograd.grad(number, [*wanted, *others], **options)
        slopes = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=False)]
        yield any(part is not None for part in found), slopes


def _length(tangent: Tangent, inputs: Inputs) -> int:
    """Returns the number of samples that fit the memory budget, from what autograd saves for two samples."""
    few, kept = inputs.take(slice(0, 2)), {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x), torch.enable_grad():
        at = {place: few.leaves[place].detach().requires_grad_() for place in few.spreads}
        with eager_math():
            outputs = tangent.call.rows(few.with_leaves(at)).shape[1]
    weights = {x.untyped_storage().data_ptr() for x in tangent.model.parameters()}
    graph = sum(size for place, size in kept.items() if place not in weights)
    numbers = sum(inputs.leaves[place][0].numel() for place in inputs.spreads)
    return max(1, int(tangent.memory // (2 * graph // few.samples + 4 * outputs * (numbers + outputs) * 8)))
