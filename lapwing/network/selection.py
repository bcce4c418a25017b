"""Which parameters are treated: `everything`, `last_layer`, `matching("*.lora_*")`, or any predicate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from ..errors import LapwingError, shown

log = logging.getLogger("lapwing")

Predicate = Callable[[str, Tensor], bool]


@dataclass(frozen=True)
class Everything:
    """Every parameter that the model trains (`requires_grad=True`): `lw.everything`.

    Example:
        >>> import torch, lapwing as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).eval()
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> lw.fit(model, [(x, y)], params=lw.everything).tangent.size  # 4 · 5 + 5 + 5 · 3 + 3 weights
        43
    """

    def __call__(self, name: str, parameter: Tensor) -> bool:
        return parameter.requires_grad


@dataclass(frozen=True)
class LastLayer:
    """The first weights on each path from the outputs back through the network, frozen ones too: `lw.last_layer`.

    Usually the last linear or convolution layer has them. Any other multiplication by weights counts as well:
    `x @ W.T + b`, weights under a weight or spectral norm (every parameter that the weight is made of), prototypes. If
    the outputs add or join several layers, such as two towers, all of them are treated. Biases that are added later
    belong to the layer. A weight that is tied to an embedding counts in both uses. If the network takes gradients
    itself, such as forces, the last layer is the last one of the energy.

    Fixed functions may follow (log-softmax, softplus, clamping, pooling, slicing, a scale): the Jacobian goes through
    them. Norms, activations and one learned number, such as a temperature, may follow too and count as constants.

    Raises:
        LapwingError: from a fit, if no layer is the last: if the outputs multiply the results of several layers (gates,
            experts weighted by a router, two encoders compared), or if the network is scripted. The message names the
            weights to choose from. If the network chooses among experts, those that the first batch uses are treated,
            and inputs that use others are refused; name all of them by `lw.matching`.

    Example:
        >>> import torch, lapwing as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).eval()
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> lw.fit(model, [(x, y)], lw.Full(), params=lw.last_layer).tangent.size  # 5 · 3 + 3 weights
        18
    """


@dataclass(frozen=True)
class Matching:
    """Parameters, trained or frozen, whose name matches one of the shell patterns."""

    patterns: tuple[str, ...]

    def __call__(self, name: str, parameter: Tensor) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


everything = Everything()
last_layer = LastLayer()


def matching(*patterns: str) -> Matching:
    """Selects parameters by shell patterns on their names: `matching("*.lora_*", "head.*")`.

    Args:
        patterns: at least one; `*` matches any text, including dots. Frozen parameters that match are treated too.

    Raises:
        LapwingError: if there is no pattern, or one is not a string.

    Example:
        >>> import torch, lapwing as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).eval()
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> list(lw.fit(model, [(x, y)], lw.KFAC(), params=lw.matching("0.*", "*.bias")).tangent.parameters)
        ['0.weight', '0.bias', '2.bias']
    """
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise LapwingError(
            f"lw.matching({', '.join(map(shown, patterns))}) needs one or more patterns, each a string. Write "
            "lw.matching('*.lora_*', 'head.*')."
        )
    return Matching(patterns)


def select(params: Predicate, parameters: Mapping[str, Tensor], model_name: str) -> tuple[str, ...]:
    """Returns the names of the parameters that a predicate selects, or raises if it selects none."""
    if not callable(params):
        raise _no_predicate(params)
    try:
        chosen = tuple(name for name, value in parameters.items() if params(name, value))
    except TypeError as error:
        raise LapwingError(
            f"params={shown(params)} raised TypeError ({str(error).splitlines()[0]}). Pass a function of a name and a "
            "parameter: write params=lambda name, parameter: name.startswith('head')."
        ) from error
    numbers = [name for name in chosen if parameters[name].is_floating_point() or parameters[name].is_complex()]
    names = with_entries(numbers, parameters)
    if not names:
        raise _none_selected(params, parameters, model_name)
    return names


def _no_predicate(params: Any) -> LapwingError:
    known = params in ("everything", "last_layer") if isinstance(params, str) else False
    example = f"lw.{params}" if known else "lambda name, parameter: name.startswith('head')"
    return LapwingError(
        f"params={shown(params)} is none of lw.everything, lw.last_layer, lw.matching('*.weight') and a predicate. "
        f"Write params={example}."
    )


def _none_selected(params: Predicate, parameters: Mapping[str, Tensor], model_name: str) -> LapwingError:
    frozen = sum(not value.requires_grad for value in parameters.values())
    listed = f"{', '.join(list(parameters)[:4])}{', ...' if len(parameters) > 4 else ''}"
    return LapwingError(
        f"params={shown(params)} selects no parameter of {model_name}, which has {len(parameters)} ({frozen} frozen; "
        f"names: {listed}). Pass params=lw.matching('*') to treat frozen parameters too, or name some with "
        "params=lw.matching(...)."
    )


def with_entries(names: Iterable[str], parameters: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Returns the names of the parameters that have entries; logs which ones have none."""
    chosen = tuple(names)
    empty = [name for name in chosen if not parameters[name].numel()]
    if empty:
        log.info("Parameters without entries are left out: %s", ", ".join(empty))
    return tuple(name for name in chosen if name not in empty)
