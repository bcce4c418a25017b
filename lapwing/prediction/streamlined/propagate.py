"""The walk: a network read as steps, each with the rule of its module, and moments carried along them.

Reading (`read`) and walking (`propagate`) are apart, so that another reading of the network can use the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...covariance import Covariance
from ...errors import LapwingError
from ...tangent import Block, Tangent
from ...tangent.eager import uncompiled
from . import elementwise, linear
from .moments import Moments, Rule, Treated, call_detached

RULES: dict[type[nn.Module], Rule] = {**linear.RULES, **elementwise.RULES}
"""Module class -> its moment rule. A new family adds its own here."""

ACCEPTED = (
    "accepted are nn.Sequential, nested or not, of nn.Linear and element-wise activations from the first treated layer "
    "on (any module before it); write via=lw.Linearized() instead."
)


@dataclass(frozen=True)
class Step:
    """One module of the walk.

    Attributes:
        path: its dotted path.
        module: the module.
        rule: its moment rule; None before the first treated layer, where activations are certain and it is called.
        treated: its treated weights, if any.
        full: whether covariances come out.
    """

    path: str
    module: nn.Module
    rule: Rule | None
    treated: Treated | None
    full: bool


def read(tangent: Tangent, covariance: Covariance, full: bool) -> tuple[Step, ...]:
    """Reads the network as a sequence of steps.

    Args:
        tangent: the network and its treated blocks.
        covariance: Σ.
        full: covariances everywhere, or at the last linear layer only.

    Raises:
        LapwingError: a module without a rule, or whose treated parameters have none; a block used twice.
    """
    blocks = {name: block for block in tangent.blocks for name in block.parameters}
    names = {id(parameter): name for name, parameter in tangent.model.named_parameters()}
    steps: list[Step] = []
    seen: dict[str, str] = {}  # block name -> the path that used it
    for path, module in _sequence("", tangent.model):
        mine = [names[id(parameter)] for parameter in module.parameters() if names[id(parameter)] in blocks]
        rule = treated = None
        if mine or seen:
            rule = _rule(module)
            block = _block(module, mine, blocks, names)
            if rule is None or (mine and (block is None or block.family != rule.family)):
                raise _unsupported(tangent, path, module, mine, next(iter(seen.values()), None))
            if block is not None:
                if block.name in seen:
                    raise LapwingError(
                        f"Asked for streamlined prediction through {type(tangent.model).__name__}, found that {path!r} "
                        f"and {seen[block.name]!r} share the treated parameters {', '.join(block.parameters)}, so that "
                        "its layers are not independent; each treated parameter may be used once: write "
                        "via=lw.Linearized() instead."
                    )
                seen[block.name] = path
                treated = Treated(block, covariance.layer_block(block.name))
        steps.append(Step(path, module, rule, treated, full))
    missing = [name for name, block in blocks.items() if block.name not in seen]
    if missing:
        raise LapwingError(
            f"Asked for streamlined prediction through {type(tangent.model).__name__}, found treated parameters "
            f"outside its layers ({', '.join(missing[:4])}); {ACCEPTED}"
        )
    last = max(i for i, step in enumerate(steps) if step.rule is not None and step.rule.family == "linear")
    return tuple(replace(step, full=full or i == last) for i, step in enumerate(steps))


def propagate(steps: Sequence[Step], inputs: Tensor, dtype: torch.dtype) -> Moments:
    """Carries a certain input through the steps.

    Args:
        steps: what `read` returned.
        inputs: (B, ...).
        dtype: the dtype of everything from the first treated layer on.

    Returns:
        Moments (B, C) and (B, C, C) of the outputs.

    Raises:
        LapwingError: a layer that sees several positions a sample.
    """
    moments = Moments(inputs.clone())  # the first module may work in place
    for step in steps:
        if step.rule is None:
            moments = Moments(call_detached(step.module, moments.mean))
            continue
        if moments.mean.ndim != 2:
            raise LapwingError(
                f"Asked for streamlined prediction, found that {step.path!r} ({type(step.module).__name__}) sees "
                f"activations of shape {tuple(moments.mean.shape)}; from the first treated layer on, vectors (B, D), "
                "one a sample, are needed: put nn.Flatten() before it, or write via=lw.Linearized() instead."
            )
        if moments.mean.dtype != dtype:
            moments = Moments(moments.mean.to(dtype), moments.variance)
        moments = step.rule.apply(step.module, moments, step.treated, step.full)
    return moments


def numbers_per_sample(steps: Sequence[Step]) -> int:
    """Estimates the numbers held a sample at the widest linear layer."""
    largest, full = 0, False
    for step in steps:
        if step.rule is not None and isinstance(step.module, nn.Linear):
            i, o = step.module.in_features + 1, step.module.out_features
            largest = max(largest, 2 * (i + o) + (2 * i * i if full else 0) + (3 * o * o + o * i if step.full else 0))
            full = step.full
    return largest


def _sequence(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields modules in the order that `nn.Sequential`s run them; a module used twice comes twice."""
    module = uncompiled(module)
    if type(module).forward is nn.Sequential.forward and not _altered(module):
        for name, child in module._modules.items():
            if child is not None:
                yield from _sequence(f"{path}.{name}" if path else name, child)
    else:
        yield path, module


def _altered(module: nn.Module) -> bool:
    """Whether calling the module does more than its class's `forward`."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _rule(module: nn.Module) -> Rule | None:
    """Finds the rule of a module whose class runs the `forward` that the rule is for."""
    for kind in type(module).__mro__:
        if kind in RULES and type(module).forward is kind.forward and not _altered(module):
            return RULES[kind] if RULES[kind].accepts(module) else None
    return None


def _block(module: nn.Module, mine: list[str], blocks: dict[str, Block], names: dict[int, str]) -> Block | None:
    """Returns the one block that holds the module's treated parameters, all its own `weight` and `bias`."""
    own = {names.get(id(getattr(module, role, None))) for role in ("weight", "bias")}
    found = {id(blocks[name]): blocks[name] for name in mine}
    if not mine or len(found) > 1 or not set(mine) <= own:
        return None
    block = next(iter(found.values()))
    return block if block.matrix is not None and not block.matrix.transposed else None


def _unsupported(tangent: Tangent, path: str, module: nn.Module, treated: list[str], first: str | None) -> LapwingError:
    what = f"{path!r} ({type(module).__name__})" if path else f"the network itself ({type(module).__name__})"
    if _altered(module):
        what += " with forward hooks or a forward of its own"
    where = f"with treated parameters {', '.join(treated[:4])}" if treated else f"after the treated layer {first!r}"
    reasons = [line.reason for line in tangent.coverage.lines if line.reason and set(line.parameters) & set(treated)]
    if reasons:
        where += f" (in the generic family: {reasons[0]})"
    return LapwingError(
        f"Asked for streamlined prediction through {type(tangent.model).__name__}, found {what} {where}, for which "
        f"there is no moment rule; {ACCEPTED}"
    )
