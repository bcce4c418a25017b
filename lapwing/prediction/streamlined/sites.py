"""A call that carries moments: its arguments, treated weights, dimensions and errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from ...covariance import LayerBlock
from ...errors import LapwingError
from ...tangent import Block
from .graph import name_of, where
from .moments import Layout
from .operations import Kind, aten, is_a, named

TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
"""Convolutions whose weights are stored with their inputs first."""

INPUTS, WEIGHTS = ("input", "mat1", "self"), ("weight", "mat2", "other")
"""Names of the input and of the weights of a layer; the first that is an argument of the call counts."""


@dataclass(frozen=True)
class Treated:
    """The treated weights of one block.

    `marginals` maps a parameter's name to its variances, in its shape and in the dtype of the moments. `decompose`
    returns `rotation` for a covariance without a common basis, which otherwise has no rotation.
    """

    block: Block
    covariance: LayerBlock
    marginals: Mapping[str, Tensor]
    decompose: Callable[[Treated], tuple[Tensor, Tensor]] | None = None

    @cached_property
    def rotation(self) -> tuple[Tensor | None, Tensor] | None:
        """`LayerBlock.rotation` in the dtype of the moments."""
        with torch.no_grad():
            rotation = self.covariance.rotation()
            one_group = self.block.matrix is not None and self.block.matrix_shape[0] == 1
            if rotation is None and self.decompose is not None and one_group:
                rotation = self.decompose(self)
        if rotation is None:
            return None
        dtype = next(iter(self.marginals.values())).dtype
        basis, variances = rotation
        return (None if basis is None else basis.to(dtype)), variances.to(dtype)

    def push(self, rows: Tensor) -> Tensor:
        """Returns `Σ_ii' a_i a_i' Cov[W_ji, W_ji']` (N, G O) for inputs a (N, G, I), if the weights are correlated."""
        if self.rotation is None:
            return self.covariance.push(rows[:, 0], None, False)
        basis, variances = self.rotation
        assert basis is not None
        rotated = torch.einsum("ngi,giq->ngq", rows, basis)
        return torch.einsum("ngq,goq->ngo", rotated.square(), variances).flatten(1)

    @property
    def is_diagonal(self) -> bool:
        """Whether the weights are independent of each other."""
        return self.rotation is not None and self.rotation[0] is None


@dataclass
class Site:
    """One call with everything that does not depend on the inputs.

    `roles` maps an argument's name to its treated parameter, as (block, parameter name), and `layouts` a value's name
    to its dimensions. `varies` is whether its weights are computed from the inputs of the network.
    """

    node: fx.Node
    roles: Mapping[str, tuple[Treated, str]]
    attention: str
    network: str
    layouts: Mapping[str, Layout] = field(default_factory=dict, repr=False)
    correlated: bool = True
    varies: bool = False
    samples: int = 0
    _constants: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def layout(self) -> Layout | None:
        """The dimensions of the call's value, or None without known positions."""
        layout = self.layouts.get(self.node.name)
        return layout if layout is not None and layout.shared and self.correlated else None

    def layout_of(self, argument: str) -> Layout | None:
        """Returns the dimensions of an argument, or None if they are unknown."""
        node = named(self.node).get(argument)
        return self.layouts.get(node.name) if isinstance(node, fx.Node) else None

    def apply(self, arguments: Mapping[str, Any], /, **changed: Any) -> Any:
        """Returns the value of the call with some arguments changed."""
        return self.node.target(**{**arguments, **changed})  # type: ignore[operator]

    def treated(self, *names: str) -> Treated | None:
        """Returns the block of matrix weights at these arguments, or None unless they are of one layer."""
        blocks = [self.roles[name][0] for name in names if name in self.roles]
        if not blocks or blocks[0].block.matrix is None or any(other is not blocks[0] for other in blocks):
            return None
        return blocks[0]

    @property
    def weights(self) -> Treated | None:
        """The treated weights of a layer, or None if this call does not read them in the layout that the block has."""
        treated = self.treated(*WEIGHTS)
        matrix = None if treated is None else treated.block.matrix
        transposed = "weight" not in self.roles or self.node.target in TRANSPOSED
        fits = matrix is not None and not matrix.one_hot and matrix.transposed == transposed
        return treated if fits else None

    def constant(self, key: str, make: Callable[[], Any]) -> Any:
        """Returns `make()`, computed once if the weights are the same for all inputs."""
        if self.varies:
            return make()
        if key not in self._constants:
            with torch.no_grad():
                self._constants[key] = make()
        return self._constants[key]

    def refusal(self, problem: str, advice: str = "") -> LapwingError:
        """Returns the error for a call that is not supported."""
        return refusal(self.network, self.node, problem, advice)


def roles_of(node: fx.Node, treated: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the treated parameters among the arguments of a call, by name."""
    arguments = named(node).items()
    return {name: treated[a.name] for name, a in arguments if isinstance(a, fx.Node) and a.name in treated}


def weights_of(node: fx.Node) -> str | None:
    """Returns the name of the matrix weights among the arguments of a call, or None."""
    arguments = named(node)
    weights = [arguments[name] for name in WEIGHTS if name in arguments]
    return weights[0].name if weights and isinstance(weights[0], fx.Node) else None


def refusal(network: str, node: fx.Node, problem: str, advice: str = "") -> LapwingError:
    """Returns the error for a call that is not supported; the text `problem` calls it "it"."""
    advice = f"{advice} Or" if advice else "Predict"
    return LapwingError(
        f"Streamlined prediction of {network} stops at {name_of(node)} in {where(node)}: {problem}. {advice} "
        "with via=lw.Linearized()."
    )


# ---- running a call in the dtype of the moments


def run(node: fx.Node, values: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Returns the value of one call in the dtype of the moments; identities, such as casts, return their argument."""
    value = node.meta.get("val")
    casts_to_integers = isinstance(value, Tensor) and not value.is_floating_point()
    if is_a(node, Kind.IDENTITY) and not casts_to_integers:
        return values[node.all_input_nodes[0].name]
    args, kwargs = _resolved((node.args, node.kwargs), values, dtype)
    if node.target is aten._weight_norm.default:  # it has no forward-mode derivative
        direction, size, dim = (*args, 0)[:3]
        return direction * (size / torch.norm_except_dim(direction, 2, dim))
    return node.target(*args, **kwargs)  # type: ignore[operator]


def arguments_of(node: fx.Node, values: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Returns a call's arguments by name, with the dtype of the moments."""
    return dict(_resolved(named(node), values, dtype))


def _resolved(arguments: Any, values: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Returns arguments with values, and with the dtype of the moments for every floating-point dtype."""

    def value_of(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return values[leaf.name]
        if isinstance(leaf, torch.dtype) and leaf.is_floating_point:
            return dtype
        return leaf

    return fx.node.map_aggregate(arguments, value_of)
