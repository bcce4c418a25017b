"""Which parameters are treated: `everything`, `last_layer`, `matching("*.lora_*")`, or any predicate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
    """The weights after which no others come on the way to the outputs, frozen ones too: `lw.last_layer`.

    That is the last linear or convolution layer, or any other way to multiply by weights: `x @ W.T + b`, weights under
    a weight or spectral norm (all that the weight is made of), prototypes. Where the outputs add up or join several
    layers, such as two towers, it is all of them, and biases that are added later belong to it. A weight that is tied
    to an embedding counts in both uses.

    Where outputs are gradients that the network takes itself, such as forces, it is the last layer of the energy.

    Fixed functions may follow (log-softmax, softplus, clamping, pooling, slicing, a scale): the Jacobian goes through
    them. Norms, activations and one learned number, such as a temperature, may follow too and count as constants.

    Raises:
        LapwingError: from a fit, where no layer is the last: where outputs are a product of what several layers give
            (gates, experts weighted by a router, two encoders compared), for a scripted network, and where the last
            layer depends on the sample and not all such layers ran. The message names the weights to choose from.

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
            f"lw.matching({', '.join(map(shown, patterns))}) needs one or more patterns, each a string. Write "
            "lw.matching('*.lora_*', 'head.*')."
        )
    return Matching(patterns)


def select(params: Predicate, parameters: Mapping[str, Tensor], model_name: str) -> tuple[str, ...]:
    """Returns the names of the selected parameters; `last_layer` takes a run of the network (`output_layers.py`).

    Raises:
        LapwingError: where none is selected.
    """
    if not callable(params):
        raise LapwingError(
            f"params={shown(params)} is none of lw.everything, lw.last_layer, lw.matching('*.weight') and a predicate. "
            "Write params=lambda name, parameter: name.startswith('head')."
        )
    try:
        chosen = tuple(name for name, value in parameters.items() if params(name, value))
    except TypeError as error:
        raise LapwingError(
            f"params={shown(params)} raised TypeError ({str(error).splitlines()[0]}). Pass a function of a name and a "
            "parameter: write params=lambda name, parameter: name.startswith('head')."
        ) from error
    check_real(chosen, parameters)
    names = tuple(name for name in chosen if parameters[name].is_floating_point())
    if names:
        return names
    frozen = sum(not value.requires_grad for value in parameters.values())
    listed = f"{', '.join(list(parameters)[:4])}{', ...' if len(parameters) > 4 else ''}"
    raise LapwingError(
        f"params={shown(params)} selects no parameter of {model_name}, which has {len(parameters)} ({frozen} frozen; "
        f"names: {listed}). Pass params=lw.matching('*') to treat frozen parameters too, or name some with "
        "params=lw.matching(...)."
    )


def check_real(names: Iterable[str], parameters: Mapping[str, Tensor]) -> None:
    """Raises for complex parameters among those to treat."""
    for name in names:
        if parameters[name].is_complex():
            raise LapwingError(
                f"The parameter {name} has the dtype {parameters[name].dtype}, and only real ones can be treated. "
                "Leave complex ones out by params=lambda name, parameter: not parameter.is_complex(), or keep real and "
                "imaginary part as one real parameter and call torch.view_as_complex(parameter) in forward()."
            )
