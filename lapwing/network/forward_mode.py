"""Forward mode: `jvp`, and products `J V` as K directional derivatives of the whole network, for many outputs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ..linalg import total
from .eager import LOCK, batching_quiet
from .generic import Network


@functools.cache
def _load_rules() -> None:
    """Makes torch load its rules of forward mode, for which it scripts functions and warns that this is deprecated."""
    with LOCK, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", category=FutureWarning)
        warnings.filterwarnings("ignore", "`torch.jit", category=DeprecationWarning)
        torch.func.jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))


def jvp(function: Any, primals: tuple, tangents: tuple) -> Any:
    """Returns `function(*primals)` and its derivative along the tangents: `torch.func.jvp`, without its warning.

    Cost: about two calls of the function.
    """
    _load_rules()
    return torch.func.jvp(function, primals, tangents)


def forward_products(
    network: Network,
    parameters: Mapping[str, Tensor],
    vectors: Mapping[str, Tensor],
    inputs: Any,
) -> Tensor | None:
    """Returns `J V` (B, C, K), or None where the network has no forward mode, or one that disagrees with reverse mode.

    Args:
        network: the network as a function of the treated parameters.
        parameters: name -> value of the treated parameters.
        vectors: name -> directions (K, *shape).
        inputs: B samples.

    Returns:
        The products. One random sum of them is compared with a backward pass: torch's forward mode differs from its
        reverse mode at padding tokens, for instance.

    Cost: about 2 K forward passes and one backward pass; memory of one dual forward pass.
    """
    values = {name: value.detach() for name, value in parameters.items()}
    directions = {name: vectors[name].to(value.dtype) for name, value in values.items()}

    def outputs(weights: dict[str, Tensor]) -> Tensor:
        return network(weights, inputs)

    def product(direction: dict[str, Tensor]) -> Tensor:
        return jvp(outputs, (values,), (direction,))[1]

    try:
        with batching_quiet(), torch.no_grad():
            products = vmap(product, chunk_size=8, out_dims=-1, randomness="error")(directions)  # (B, C, K)
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return None
    return products if _agrees(outputs, values, directions, products) else None


def _agrees(outputs: Any, values: dict[str, Tensor], directions: dict[str, Tensor], products: Tensor) -> bool:
    """Compares `uᵀ J V` for a random u with one backward pass."""
    u = torch.randn(products.shape[:2], generator=torch.Generator().manual_seed(0)).to(products)
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    with torch.enable_grad():
        gradients = torch.autograd.grad(
            outputs(leaves), list(leaves.values()), u, allow_unused=True, materialize_grads=True
        )
    wanted = total(
        directions[name].flatten(1) @ gradient.flatten() for name, gradient in zip(leaves, gradients, strict=True)
    )  # (K,)
    contracted = torch.einsum("bc,bck->k", u, products)
    eps = torch.finfo(products.dtype).eps
    allowed = 3 * eps**0.5 * wanted.norm() + 100 * eps * products.abs().sum() / products.shape[-1]
    return bool((contracted - wanted).norm() <= allowed)
