"""What streamlined prediction carries from call to call: means, variances, and the covariances of treated weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from ...covariance import Covariance, LayerBlock
from ...errors import LapwingError
from ...tangent import Block
from .graph import operation, where
from .layout import Layout, constant, root


@dataclass(frozen=True)
class Moments:
    """The Gaussians over the entries of one tensor, independent but for positions of a channel.

    Attributes:
        mean: of any shape.
        variance: v, of the mean's shape.
        correlation: ρ, of a shape that expands to the mean's: entries of one channel at positions t and t' have the
            covariance `√(ρ_t v_t) √(ρ_t' v_t')`. None: independent.
        origin: for values of an attention, where they come from (`values.Origin`), if that is asked for.
    """

    mean: Tensor
    variance: Tensor
    correlation: Tensor | None = None
    origin: Any = field(default=None, repr=False, compare=False)

    @property
    def common(self) -> Tensor:
        """Returns `√(ρ v)`, the standard deviations of what the positions of a channel have in common."""
        return root(self.variance if self.correlation is None else self.correlation * self.variance)

    def amplitude(self, layout: Layout, samples: int, channel: int = -1) -> Tensor:
        """Returns the means of `√(ρ v)` over positions, (B, n)."""
        if not self._flat(layout):
            return layout.mean(self.common, samples, channel)
        return layout.mean(root(self.variance), samples, channel) * root(self._at(layout, samples, channel))

    def mean_own(self, layout: Layout, samples: int, channel: int = -1) -> Tensor:
        """Returns the means of `(1 - ρ) v` over positions, (B, n)."""
        rho = self.correlation
        if rho is None or not self._flat(layout):
            return layout.mean(self.own, samples, channel)
        return layout.mean(self.variance, samples, channel) * (1 - self._at(layout, samples, channel))

    def _flat(self, layout: Layout) -> bool:
        """Whether ρ is the same at all positions."""
        rho, ndim = self.correlation, self.variance.ndim
        return rho is not None and not layout.merged and rho.ndim == ndim and constant(rho, ndim, layout.positions)

    def _at(self, layout: Layout, samples: int, channel: int) -> Tensor:
        """Returns such a ρ as (B, n)."""
        assert self.correlation is not None
        kept = (layout.batch, channel % self.variance.ndim)
        shape = [n if dim in kept else 1 for dim, n in enumerate(self.variance.shape)]
        return layout.mean(self.correlation.expand(shape), samples, channel)

    @property
    def own(self) -> Tensor:
        """Returns `(1 - ρ) v`, the variances of what each position has on its own."""
        return self.variance if self.correlation is None else (1 - self.correlation) * self.variance


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
        attention: as in `Streamlined`.
        network: name of the network's class, for messages.
        layouts: name of a value -> its dimensions, if they are asked for.
        correlated: whether positions are.
        samples: B.
    """

    node: fx.Node
    roles: Mapping[str, tuple[Treated, str]]
    attention: str
    network: str
    layouts: Mapping[str, Layout] = field(default_factory=dict, repr=False)
    correlated: bool = True
    samples: int = 0
    _constants: dict[str, tuple[Any, Any]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        node: fx.Node,
        treated: Mapping[str, tuple[Treated, str]],
        attention: str,
        network: str,
        layouts: Mapping[str, Layout] | None = None,
        correlated: bool = True,
    ) -> Site:
        """Reads which arguments of a call are treated parameters."""
        names = [argument.name for argument in node.target._schema.arguments] if has_schema(node) else []  # type: ignore[union-attr]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        roles = {name: treated[a.name] for name, a in given.items() if isinstance(a, fx.Node) and a.name in treated}
        return cls(node, roles, attention, network, layouts or {}, correlated)

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(
            (v.device for v in (n.meta.get("val") for n in self.node.all_input_nodes) if isinstance(v, Tensor)),
            torch.device("cpu"),
        )

    def at(self, samples: int) -> Site:
        """Returns the same for a batch of B samples."""
        return replace(self, samples=samples)

    @property
    def layout(self) -> Layout | None:
        """The dimensions of the call's value, None where it has no positions that are known."""
        found = self.layouts.get(self.node.name)
        return found if found is not None and found.shared and self.correlated else None

    def source(self, argument: str) -> Layout | None:
        """Returns the dimensions of an argument, None where they are not known."""
        node = self.named(self.node.args, self.node.kwargs).get(argument)
        return self.layouts.get(node.name) if isinstance(node, fx.Node) else None

    def positions(self, argument: str) -> tuple[int, ...]:
        """Returns the dimensions of an argument that are positions."""
        found = self.source(argument)
        return () if found is None else found.positions

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
