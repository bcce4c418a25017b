"""Derivatives of any network: per-sample gradients of any parameter, and products `J V`.

Gradients use vmap, or a loop over samples if vmap fails. Products use forward mode, or two backward passes if forward
mode fails. All results are compared with autograd.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from ..data.inputs import Inputs
from ..errors import LapwingError
from ..linalg import joined, total
from .eager import LOCK, batching_quiet
from .entry import network_casts

Network = Callable[[Mapping[str, Tensor], Inputs], Tensor]
"""Other values of some parameters by name, and inputs -> outputs (B, C)."""

Outputs = Callable[[dict[str, Tensor]], Tensor]
"""Values of the weights by name -> outputs (B, C) at some inputs."""


def per_sample_rows(
    network: Network, parameters: Mapping[str, Tensor], inputs: Inputs, cotangents: Tensor
) -> dict[str, Tensor]:
    """Returns `J[n, r] = uᵀ ∂f(x_n)/∂θ` (B, R, P) of each parameter by name, for cotangents u (B, R, C).

    Cost: R backward passes per sample and one more as a check; memory O(B R P) plus the vectorised forward pass.
    """
    parameters = {name: value.detach() for name, value in parameters.items()}
    samples, eps = cotangents.shape[0], torch.finfo(cotangents.dtype).eps

    def outputs(values: dict[str, Tensor]) -> Tensor:
        return network(values, inputs)

    try:
        with batching_quiet():
            rows = _vectorised(network, parameters, inputs, cotangents)
        graph = any(row.requires_grad for row in rows.values())
        lost = inputs.wants_gradient and not graph  # as for scripted networks under vmap
        if not lost and _agrees_with_autograd(rows, outputs, parameters, cotangents, eps):
            return rows
    except (RuntimeError, ValueError, TypeError, IndexError):  # data-dependent control flow, no batching rule
        pass
    looped = [
        _looped(network, parameters, inputs.take(slice(n, n + 1)) if samples > 1 else inputs, cotangents[n])
        for n in range(samples)
    ]
    rows = {name: torch.stack([row[name] for row in looped]) for name in parameters}
    half = min(value.dtype.itemsize for value in parameters.values()) < 4 or network_casts()
    coarse = torch.finfo(torch.bfloat16).eps if half else 1e-4  # parts of the network may compute in less precision
    if samples > 1 and not _agrees_with_autograd(rows, outputs, parameters, cotangents, coarse):
        raise LapwingError(
            f"The gradients of {samples} samples of {inputs}, taken one by one, differ from the batch: "
            "a tensor whose first length is the number of samples is cut along it. Pass what samples share in another "
            "shape, such as x[None], or keep it within the model, or pass batches of another size."
        )
    return rows


def _agrees_with_autograd(
    rows: dict[str, Tensor], outputs: Outputs, parameters: dict[str, Tensor], cotangents: Tensor, eps: float
) -> bool:
    """Compares a random sum of rows with a plain backward pass, as some batching rules of torch are wrong (PReLU)."""
    signs = torch.randn(cotangents.shape[:2], generator=torch.Generator().manual_seed(0))  # (B, R)
    signs = signs.to(cotangents)
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    with torch.enable_grad():
        u = torch.einsum("br,brc->bc", signs, cotangents.detach())
        truth = _gradients(outputs(leaves), leaves.values(), u)
    largest = max(float(wanted.detach().norm()) for wanted in truth)  # much smaller ones may be rounding noise
    for row, wanted in zip(rows.values(), truth, strict=True):
        if row.shape != (*signs.shape, wanted.numel()):
            return False
        row, wanted = row.detach(), wanted.flatten()
        allowed = 3 * eps**0.5 * wanted.norm() + 100 * eps * (signs.abs() @ row.abs().amax((0, 2))).sum()
        allowed += 100 * eps * largest
        if not (torch.einsum("br,brp->p", signs, row) - wanted).norm() <= allowed:
            return False
    return True


def _vectorised(
    network: Network, parameters: dict[str, Tensor], inputs: Inputs, cotangents: Tensor
) -> dict[str, Tensor]:
    leaves = inputs.per_sample

    def one(cotangent: Tensor, *row: Tensor) -> dict[str, Tensor]:
        sample = inputs.with_leaves({place: x[None] for place, x in zip(leaves, row, strict=True)})
        pull = vjp(lambda values: network(values, sample)[0], parameters)[1]
        return vmap(lambda u: pull(u)[0])(cotangent)

    rows = vmap(one, randomness="error")(cotangents, *leaves.values())
    return {name: value.flatten(2) for name, value in rows.items()}


def _looped(network: Network, parameters: dict[str, Tensor], sample: Inputs, cotangents: Tensor) -> dict[str, Tensor]:
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    keep = sample.wants_gradient
    with torch.enable_grad():
        out = network(leaves, sample)[0]  # (C,)
        rows = [_gradients(out, leaves.values(), u, retain_graph=True, create_graph=keep) for u in cotangents]
    return {name: torch.stack([row[i].flatten() for row in rows]) for i, name in enumerate(leaves)}


def _gradients(out: Tensor, leaves: Iterable[Tensor], u: Tensor, **options: bool) -> tuple[Tensor, ...]:
    """Returns `uᵀ ∂out/∂leaf`, or zeros if the outputs do not depend on the leaf."""
    wanted = tuple(leaves)
    if not out.requires_grad:
        return tuple(map(torch.zeros_like, wanted))
    return torch.autograd.grad(out, wanted, u, allow_unused=True, materialize_grads=True, **options)


@functools.cache
def _load_rules() -> None:
    """Loads torch's rules of forward mode, and silences the deprecation warning that this raises."""
    with LOCK, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", category=FutureWarning)
        warnings.filterwarnings("ignore", "`torch.jit", category=DeprecationWarning)
        torch.func.jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))


def jvp(function: Any, primals: tuple, tangents: tuple) -> Any:
    """Returns `function(*primals)` and its derivative along the tangents: `torch.func.jvp`, without its warning."""
    _load_rules()
    with LOCK:  # torch has one level of forward mode for all threads
        return torch.func.jvp(function, primals, tangents)


def forward_products(
    network: Network, parameters: Mapping[str, Tensor], vectors: Mapping[str, Tensor], inputs: Inputs
) -> Tensor | None:
    """Returns `J V` (B, C, K) for vectors (K, *shape) by name, or None if no forward mode agrees with reverse mode.

    At padding tokens, for instance, it disagrees. Cost: about 2 K forward passes and one backward pass.
    """
    with torch.no_grad():
        products = WeightProducts(network, parameters, (by_forward_mode,))(vectors, inputs)
    return None if products is None else products.movedim(0, -1)


DIRECTIONS = 8
"""Number of directions in one call of forward mode."""

Group = dict[str, Tensor]
"""At most `DIRECTIONS` directions (K, *shape) by name."""


def direction_groups(directions: Mapping[str, Tensor]) -> list[Group]:
    """Cuts directions (K, *shape) into groups of contiguous tensors that share no memory.

    Forward mode copies a tangent whose layout in memory differs from its weight, such as a slice. For wide layers this
    copy would cost more than the layer.
    """

    def laid_out(part: Tensor) -> Tensor:
        owns_memory = part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes
        return part if owns_memory else part.clone(memory_format=torch.contiguous_format)

    parts = {name: map(laid_out, value.split(DIRECTIONS)) for name, value in directions.items()}
    return [dict(zip(parts, group, strict=True)) for group in zip(*parts.values(), strict=True)]


def by_forward_mode(outputs: Outputs, values: dict[str, Tensor], groups: Sequence[Group]) -> Tensor:
    """Returns `J V` (K, B, C) by forward mode: about 2 passes per direction, or 3 if a layer has no batched product."""

    def product(direction: dict[str, Tensor]) -> Tensor:
        return jvp(outputs, (values,), (direction,))[1]

    with batching_quiet():
        return joined(vmap(product, randomness="error")(group) for group in groups)


def by_two_backward_passes(outputs: Outputs, values: dict[str, Tensor], groups: Sequence[Group]) -> Tensor:
    """Returns `J V` (K, B, C) as the derivative of `Jᵀu` in u, for operations without forward mode."""
    graph = torch.is_grad_enabled()
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    with torch.enable_grad():
        out = outputs(leaves)
        u = torch.zeros_like(out).requires_grad_()
        pulled = torch.autograd.grad(out, list(leaves.values()), u, create_graph=True, materialize_grads=True)
        moving = [(name, row) for name, row in zip(leaves, pulled, strict=True) if row.requires_grad]
        rows = [row for _, row in moving]
        products = [
            torch.autograd.grad(rows, u, list(direction), True, create_graph=graph)[0]
            for group in groups
            for direction in zip(*(group[name] for name, _ in moving), strict=True)
        ]
    return torch.stack(products)


Route = Callable[[Outputs, dict[str, Tensor], Sequence[Group]], Tensor]
"""Function of outputs, the values of the weights and directions V -> products `J V` (K, B, C)."""

ROUTES: tuple[Route, ...] = by_forward_mode, by_two_backward_passes


class WeightProducts:
    """Products `J V` (K, B, C) for vectors (K, *shape) by name, by the first route that agrees with a backward pass.

    The first call compares a random sum of its products with `Jᵀu`. Later calls must have the same inputs, and use the
    route of the first call. If gradients are on, the products are differentiable in the inputs.
    """

    def __init__(self, network: Network, parameters: Mapping[str, Tensor], routes: Sequence[Route] = ROUTES) -> None:
        self._network, self._routes, self._checked = network, tuple(routes), False
        self._values = {name: value.detach() for name, value in parameters.items()}

    def __call__(self, vectors: Mapping[str, Tensor] | Sequence[Group], inputs: Inputs) -> Tensor | None:
        """Returns the products, or None if every route fails. Vectors may be `direction_groups` already."""
        values = self._values
        parts = direction_groups(vectors) if isinstance(vectors, Mapping) else vectors
        groups = [{name: part[name].to(value) for name, value in values.items()} for part in parts]

        def outputs(weights: dict[str, Tensor]) -> Tensor:
            return self._network(weights, inputs)

        for route in self._routes:
            try:
                products = route(outputs, values, groups)
            except (RuntimeError, ValueError, TypeError, NotImplementedError):
                continue
            if self._checked or _agrees_with_reverse_mode(outputs, values, groups, products.detach()):
                self._routes, self._checked = (route,), True
                return products
        return None


def _agrees_with_reverse_mode(
    outputs: Outputs, values: dict[str, Tensor], groups: Sequence[Group], products: Tensor
) -> bool:
    """Compares `uᵀ J V` for a random u with one backward pass."""
    u = torch.randn(products.shape[1:], generator=torch.Generator().manual_seed(0)).to(products)
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    with torch.enable_grad():
        gradients = _gradients(outputs(leaves), leaves.values(), u)
    flat = {name: gradient.detach().flatten() for name, gradient in zip(leaves, gradients, strict=True)}
    each = [total(group[name].reshape(-1, len(flat[name])) @ flat[name] for name in flat) for group in groups]
    wanted = torch.cat(each)  # (K,)
    contracted = products.flatten(1) @ u.flatten()
    eps = torch.finfo(products.dtype).eps
    allowed = 3 * eps**0.5 * wanted.norm() + 100 * eps * products.abs().sum() / len(products)
    return bool((contracted - wanted).norm() <= allowed)
