"""Which parameters are treated: `everything`, `last_layer`, `matching("*.lora_*")`, or any predicate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from ..errors import LapwingError, shown

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
        """Whether the parameter is trained."""
        return parameter.requires_grad


@dataclass(frozen=True)
class LastLayer:
    """Weight and bias of the last linear or convolution layer that the forward pass runs, frozen too: `lw.last_layer`.

    Example:
        >>> import torch, lapwing as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).eval()
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> lw.fit(model, [(x, y)], lw.Full(), params=lw.last_layer).tangent.size  # 5 · 3 + 3 weights
        18
    """


@dataclass(frozen=True)
class Matching:
    """Parameters whose name matches one of the shell patterns, frozen or not."""

    patterns: tuple[str, ...]

    def __call__(self, name: str, parameter: Tensor) -> bool:
        """Whether the name matches."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


everything = Everything()
last_layer = LastLayer()


def matching(*patterns: str) -> Matching:
    """Selects parameters by shell patterns on their names: `matching("*.lora_*", "head.*")`.

    Args:
        patterns: at least one; `*` stands for any text, dots included. Frozen parameters that match are treated too.

    Raises:
        LapwingError: for anything but strings, or none.

    Example:
        >>> import torch, lapwing as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).eval()
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> list(lw.fit(model, [(x, y)], lw.KFAC(), params=lw.matching("0.*", "*.bias")).tangent.parameters)
        ['0.weight', '0.bias', '2.bias']
    """
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise LapwingError(
            f"Asked for matching({', '.join(map(repr, patterns))}); one or more patterns, each a string, are needed: "
            "write lw.matching('*.lora_*', 'head.*')."
        )
    return Matching(patterns)


def select(
    params: Predicate | LastLayer, parameters: Mapping[str, Tensor], last_use: tuple[str, ...], model_name: str
) -> tuple[str, ...]:
    """Returns the names of the selected parameters.

    Args:
        params: a selection.
        parameters: name -> parameter, tied ones once.
        last_use: names of the last matrix layer's parameters.
        model_name: for the error.

    Raises:
        LapwingError: case 10, none selected.
    """
    if isinstance(params, LastLayer):
        names = last_use
    elif callable(params):
        names = _chosen(params, parameters)
    else:
        raise LapwingError(
            f"Asked to treat params={shown(params)}; accepted are lw.everything, lw.last_layer, "
            "lw.matching('*.weight') and a predicate: write params=lambda name, parameter: name.startswith('head')."
        )
    if names:
        return names
    if isinstance(params, LastLayer):
        raise LapwingError(
            f"Asked to treat the last layer of {model_name}, found no linear or convolution layer, outside "
            f"torch.no_grad(), whose weight is one of its {len(parameters)} parameters ({_listed(parameters)}); name "
            "what to treat: pass params=lw.everything, or params=lw.matching(...)."
        )
    frozen = sum(not value.requires_grad for value in parameters.values())
    raise LapwingError(
        f"Asked to treat {shown(params)} of {model_name}, found no such parameter among {len(parameters)} ({frozen} "
        f"frozen; names: {_listed(parameters)}); at least one is needed: pass params=lw.matching('*') to treat frozen "
        "parameters too, or name some with params=lw.matching(...)."
    )


def _listed(parameters: Mapping[str, Tensor]) -> str:
    return f"{', '.join(list(parameters)[:4])}{', ...' if len(parameters) > 4 else ''}"


def _chosen(params: Predicate, parameters: Mapping[str, Tensor]) -> tuple[str, ...]:
    try:
        chosen = tuple(name for name, value in parameters.items() if params(name, value))
    except TypeError as error:
        raise LapwingError(
            f"Asked to treat params={shown(params)}, found that it raised TypeError ({error}); a function of a name "
            "and a parameter is needed: write params=lambda name, parameter: name.startswith('head')."
        ) from error
    for name in chosen:
        if parameters[name].is_complex():
            raise LapwingError(
                f"Asked to treat {name}, found a parameter of {parameters[name].dtype}; real parameters are needed: "
                "leave complex ones out by params=lambda name, parameter: not parameter.is_complex(), or keep real "
                "and imaginary part as one real parameter and call torch.view_as_complex(parameter) in forward()."
            )
    return tuple(name for name in chosen if parameters[name].is_floating_point())
