"""The table of operations: the kind of each call of a network's graph, and its rule for moments.

An entry of `OPERATIONS` describes an ATen call, or an operator of the user's `torch.library`:

- `kind`: its kind, which determines how calls are grouped and where covariances end;
- `rule`: its rule for moments, for calls that are not part of an element-wise function;
- `label`: the channel of each entry of its result, from which the positions that share weights follow;
- `slope`: its derivative in closed form, for element-wise calls and statistics.

Each file of `rules/` registers its operations at its end. Calls without an entry use forward mode: those that torch
tags as element-wise for any size, other calls only for small tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ...errors import LapwingError, shown
from .moments import Value

if TYPE_CHECKING:
    from .sites import Site

aten = torch.ops.aten


class Kind(Flag):
    """The kind of a call; a call may have several."""

    OTHER = 0
    ELEMENTWISE = auto()
    """Each entry of the result depends only on the same entry of the arguments."""
    IDENTITY = auto()
    """Does not change the values of a floating-point tensor: casts, and dropout in eval mode (which is checked)."""
    FLAT = auto()
    """The result has slope 0: new tensors of the same shape, rounded values."""
    STATISTIC = auto()
    """A reduction. With its dimensions kept it may be part of a norm written by hand."""
    VIEW = auto()
    """A move of entries that may occur between the products of an attention written by hand."""
    ORDERED = auto()
    """A move that keeps the order of a sample's entries, and so their covariances, if it keeps all of them."""
    PICK = auto()
    """A move of a sample's entries that keeps the dimension of the samples: a selection, or another order."""
    JOIN = auto()
    PRODUCT = auto()
    """A product of two tensors, which may be part of an attention written by hand."""
    LINEAR = auto()
    """A product with a matrix: a linear layer if the matrix is a weight."""
    CONVOLUTION = auto()
    EMBEDDING = auto()
    ATTENTION = auto()
    SOFTMAX = auto()
    LOG_SOFTMAX = auto()
    NORM = auto()


Rule = Callable[["Site", dict[str, Any]], Value]
"""`(site, arguments by name)` -> moments, for a call with an uncertain argument."""

Label = Callable[[fx.Node, Mapping[str, Any]], Any]
"""`(call, labels of its uncertain arguments by name)` -> the channel of each entry of its value, in the value's shape;
None if it is unknown, which makes positions independent."""

Slope = Any
"""A tensor that broadcasts to a call's value, or a number."""

Arguments = Mapping[str, Any]
"""The arguments of a call by name, with defaults."""

Partial = Callable[[Arguments, Any, str], Slope]
"""`(arguments by name, the call's value y, name of an argument)` -> ∂y/∂argument, entry by entry; for a statistic,
its derivative in each entry of its argument."""


@dataclass(frozen=True)
class Operation:
    """One entry of the table; a rule needs a label, which is `independent` if the channels are unknown."""

    kind: Kind = Kind.OTHER
    rule: Rule | None = None
    label: Label | None = None
    slope: Partial | None = None

    def __post_init__(self) -> None:
        if self.rule is not None and self.label is None:
            raise LapwingError(
                "A moment rule needs a label, the channel of each entry. Pass label=broadcast if entries keep their "
                "places, or label=independent if positions are independent."
            )


OPERATIONS: dict[Any, Operation] = {}
"""Call -> its entry."""

_OTHER, _TAGGED = Operation(), Operation(Kind.ELEMENTWISE)


def register_operation(operation: Operation, *targets: Any) -> None:
    """Adds overloads of operators, such as `torch.ops.mylib.swish.default`, to the table.

    Raises:
        LapwingError: if a target is not an overload, or a slope belongs to no element-wise call or statistic.
    """
    if operation.slope is not None and not operation.kind & (Kind.ELEMENTWISE | Kind.STATISTIC):
        raise LapwingError(
            f"A slope needs Kind.ELEMENTWISE, and the operation has {operation.kind}. Write "
            "Operation(Kind.ELEMENTWISE, slope=slope), or register a rule for a call that is not element-wise."
        )
    for target in targets:
        if not isinstance(target, torch._ops.OpOverload):
            name = getattr(target, "_qualname", getattr(target, "_qualified_op_name", "mylib::name"))
            raise LapwingError(f"{shown(target)} is not an overload. Pass torch.ops.{name.replace('::', '.')}.default.")
    OPERATIONS.update(dict.fromkeys(targets, operation))


def register_aten(operation: Operation, *names: str) -> None:
    """Adds ATen calls such as "relu.default" to the table, except those that this version of torch lacks."""
    for name in names:
        packet, _, overload = name.partition(".")
        target = getattr(getattr(aten, packet, None), overload, None)
        if target is not None:
            OPERATIONS[target] = operation


def operation_of(node: fx.Node) -> Operation:
    """Returns the entry of a call, or a default by torch's tags."""
    entry = OPERATIONS.get(node.target)
    if entry is not None:
        return entry
    return _TAGGED if torch.Tag.pointwise in getattr(node.target, "tags", ()) else _OTHER


def is_a(node: fx.Node, *kinds: Kind) -> bool:
    """Whether a call has one of these kinds."""
    kind = operation_of(node).kind
    return any(some in kind for some in kinds)


def is_elementwise(node: fx.Node) -> bool:
    """Whether each entry of a call's result depends only on the same entry of its arguments."""
    if node.target is operator.getitem:  # the first of a batch norm's values
        source = node.args[0]
        return isinstance(source, fx.Node) and bool(node.args[1] == 0) and is_a(source, Kind.NORM | Kind.ELEMENTWISE)
    return is_a(node, Kind.ELEMENTWISE)


def is_statistic(node: fx.Node) -> bool:
    """Whether a call is a statistic with its dimensions kept."""
    if not is_a(node, Kind.STATISTIC):
        return False
    arguments = named(node)
    return bool(arguments.get("keepdim", False)) and arguments.get("dim") not in (None, [])


def has_forward_mode(node: fx.Node) -> bool:
    """Whether a call has forward mode. Operators from outside torch silently lose tangents."""
    if not has_schema(node) or node.target.namespace in ("aten", "prims"):  # type: ignore[union-attr]
        return True
    name = node.target._schema.name  # type: ignore[union-attr]
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def has_schema(node: fx.Node) -> bool:
    """Whether a call is an operator of torch, and not a Python function."""
    return hasattr(node.target, "_schema")


def named(node: fx.Node) -> dict[str, Any]:
    """Returns a call's arguments by name, with defaults; arguments of a Python function by their index."""
    if not has_schema(node):
        return {str(place): value for place, value in enumerate(node.args)}
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return {**defaults, **{a.name: value for a, value in zip(schema, node.args, strict=False)}, **node.kwargs}


# ---- labels


def broadcast(node: fx.Node, labels: Mapping[str, Any]) -> Any:
    """Returns the label of an argument that broadcasts to the value's shape: entries keep their places."""
    shape = shape_of(node)
    for label in labels.values():
        if not isinstance(label, Tensor) or label.ndim != len(shape):
            continue
        if all(a in (1, b) for a, b in zip(label.shape, shape, strict=True)):
            return label.expand(shape)
    return None


def independent(node: fx.Node, labels: Mapping[str, Any]) -> None:
    """Returns no label: positions are independent."""


def numbered(node: fx.Node, dim: int) -> Tensor:
    """Returns the label of a layer's outputs, with channels numbered along one dimension."""
    shape = shape_of(node)
    return torch.arange(shape[dim], dtype=torch.double).reshape(-1, *(1,) * (-1 - dim % -len(shape))).expand(shape)


def same_along(label: Tensor, dim: int) -> bool:
    """Whether the channels are constant along a dimension."""
    return label.stride(dim) == 0 or bool((label == label.narrow(dim, 0, 1)).all())


def shape_of(node: fx.Node) -> list[int]:
    """Returns the shape of a call's value at the time of reading the network; [] if it is not a tensor."""
    value = node.meta.get("val")
    return [length_of(n) for n in value.shape] if isinstance(value, Tensor) else []


def length_of(value: Any) -> int:
    """Returns a length; a symbolic one as at the time of reading the network."""
    return value if isinstance(value, int) else int(value.node.hint or 1)
