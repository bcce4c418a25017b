"""What streamlined prediction carries from call to call: means, variances, and the covariances of treated weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ...covariance import Covariance, LayerBlock
from ...errors import LapwingError
from ...tangent import Block
from .graph import operation, where


@dataclass(frozen=True)
class Moments:
    """The independent Gaussians over the entries of one tensor.

    Attributes:
        mean: of any shape.
        variance: of the mean's shape.
    """

    mean: Tensor
    variance: Tensor


Value = Any
"""A certain value (a tensor, a number, a tuple of them), `Moments`, or a tuple with some `Moments`."""


def mean_of(value: Value) -> Value:
    """Returns the mean of an uncertain value, a certain value as it is."""
    return value.mean if isinstance(value, Moments) else value


def variance_of(value: Value) -> Tensor | None:
    """Returns the variances of an uncertain value, None for a certain one."""
    return value.variance if isinstance(value, Moments) else None


@dataclass(frozen=True)
class Treated:
    """The treated weights of one block.

    Attributes:
        block: which parameters they are, and their layout.
        covariance: their covariance.
        marginals: parameter name -> its variances, in its own shape.
    """

    block: Block
    covariance: LayerBlock
    marginals: Mapping[str, Tensor]

    @classmethod
    def of(cls, block: Block, covariance: Covariance, diagonal: Mapping[str, Tensor], dtype: torch.dtype) -> Treated:
        """Reads a block's covariance."""
        parts = block.split(diagonal[block.name].to(dtype))
        return cls(block, covariance.layer_block(block.name), parts)


@dataclass
class Site:
    """One call of the network at which moments are carried, and what is known of it before any input is seen.

    Attributes:
        node: the call.
        roles: argument name -> the treated parameter that stands there, as (block, parameter name).
        attention: "values" or "scores".
        network: name of the network's class, for messages.
    """

    node: fx.Node
    roles: Mapping[str, tuple[Treated, str]]
    attention: str
    network: str
    _constants: dict[str, tuple[Any, Any]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, node: fx.Node, treated: Mapping[str, tuple[Treated, str]], attention: str, network: str) -> Site:
        """Reads which arguments of a call are treated parameters."""
        names = [argument.name for argument in node.target._schema.arguments] if has_schema(node) else []  # type: ignore[union-attr]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        roles = {name: treated[a.name] for name, a in given.items() if isinstance(a, fx.Node) and a.name in treated}
        return cls(node, roles, attention, network)

    def named(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """Returns a call's arguments by name, defaults filled in; those of a Python function by their place."""
        if not has_schema(self.node):
            return {str(place): value for place, value in enumerate(args)}
        schema = self.node.target._schema.arguments  # type: ignore[union-attr]
        given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
        return {**given, **{a.name: value for a, value in zip(schema, args, strict=False)}, **kwargs}

    def treated(self, *names: str) -> Treated | None:
        """Returns the block of matrix weights that stands at one of these arguments, if it is one layer's own."""
        found = [self.roles[name][0] for name in names if name in self.roles]
        if not found or found[0].block.matrix is None or any(other is not found[0] for other in found):
            return None
        return found[0]

    def constant(self, key: str, make: Callable[[], Any], *sources: Tensor | None) -> Any:
        """Returns what `make` gives for these weights, made anew when they change or for another dtype."""
        stamp = tuple((source.data_ptr(), source._version) for source in sources if source is not None)
        found = self._constants.get(key)
        if found is None or found[0] != stamp:
            with torch.no_grad():
                found = (stamp, make())
            self._constants[key] = found
        return found[1]

    def refusal(self, found: str, accepted: str) -> LapwingError:
        """Returns the error for a call that is not covered."""
        return refusal(self.network, self.node, found, accepted)


def has_schema(node: fx.Node) -> bool:
    """Whether a call is one of ATen's."""
    return hasattr(node.target, "_schema")


def refusal(network: str, node: fx.Node, found: str, accepted: str) -> LapwingError:
    """Returns the error for a call that is not covered: what was found where, what is accepted, what to write."""
    return LapwingError(
        f"Asked for streamlined prediction through {network}, found {operation(node)} in {where(node)} {found}; "
        f"accepted {accepted}: write via=lw.Linearized() instead."
    )


Rule = Callable[[Site, dict[str, Any]], Value]
"""`(site, arguments by name)` -> moments, for a call with an uncertain argument."""
