"""Whatever is given in place of an argument, the message is one of ours, short, and prints no array."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.errors import shown

X, Y = torch.randn(8, 4), torch.arange(8) % 3
NUMBER = 0.12345678
JUNK: dict[str, Any] = {
    "tensor": torch.full((300, 300), NUMBER, dtype=torch.float64),
    "list": [NUMBER] * 10_000,
    "ndarray": np.full((300, 300), NUMBER),
    "tensors": [torch.full((30, 30), NUMBER, dtype=torch.float64)] * 100,
    "text": "0.12345678 " * 1000,
}
NETWORK = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).eval()
POSTERIOR = lw.fit(NETWORK, [(X, Y)], prior_precision=1.0)
STATES = [NETWORK.state_dict()] * 3
OPTIONS = [
    getattr(lw, name) for name in lw.__all__
    if inspect.isclass(getattr(lw, name)) and hasattr(getattr(lw, name), "__dataclass_fields__")
    and not inspect.isabstract(getattr(lw, name)) and name not in ("Posterior", "Latent", "Comparison", "Coverage")
]  # fmt: skip
CALLS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (lw.fit, {"model": NETWORK, "loader": [(X, Y)]}),
    (lw.plan, {"model": NETWORK, "loader": [(X, Y)]}),
    (lw.load, {"path": "nowhere.safetensors", "model": NETWORK}),
    (lw.coverage, {"model": NETWORK, "batch": X}),
    (lw.compare, {"posteriors": {"one": POSTERIOR}, "loader": [(X, Y)], "repeats": 1}),
    (lw.propagate, {"model": NETWORK, "inputs": lw.Uncertain(X, 0.1)}),
    (lw.scale_factor, {"posterior": POSTERIOR, "loader": [(X, Y)], "via": lw.Linearized()}),
    (lw.deploy, {"posterior": POSTERIOR, "x": X}),
    (lw.MeanField.from_variances, {"model": NETWORK, "variances": {}, "loader": [(X, Y)]}),
    (lw.SWAG.from_snapshots, {"snapshots": STATES, "loader": [(X, Y)], "model": NETWORK}),
    (POSTERIOR.latent, {"x": X}),
    (POSTERIOR.predict, {"x": X}),
    (POSTERIOR.sample, {"n": 1}),
    (POSTERIOR.with_prior, {"prior_precision": 1.0}),
    (POSTERIOR.save, {"path": "nowhere/at/all"}),
    (POSTERIOR.log_marginal_likelihood, {}),
    (POSTERIOR.predict(X).log_prob, {"targets": Y}),
    (POSTERIOR.predict(X).sample, {"n": 1}),
]
NEEDED: dict[Any, dict[str, Any]] = {
    lw.SubsetOfWeights: {"size": 3}, lw.Uncertain: {"value": X}, lw.Validation: {"loader": [(X, Y)]},
    lw.EarlyStopping: {"loader": [(X, Y)]}, lw.Scaled: {"via": lw.Linearized(), "factor": 1.0},
    lw.InducingPoints: {"inputs": X},
}  # fmt: skip
LEFT_OUT = {"joint", "lower_bound", "linearised_mode", "path"}
"""Arguments of which only counts whether they are true, and paths, which the file system refuses in its own words."""


def cases() -> Iterator[Any]:
    for call, valid in [*CALLS, *((option, NEEDED.get(option, {})) for option in OPTIONS)]:
        parameters = inspect.signature(call).parameters.values()
        named = [p.name for p in parameters if p.name not in LEFT_OUT and p.kind is not p.VAR_POSITIONAL]
        yield pytest.param(call, valid, named, id=call.__qualname__)


def said(call: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """What a call says of its arguments; nothing where it takes them."""
    try:
        call(**arguments)
    except lw.LapwingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("call", "valid", "names"), list(cases()))
def test_messages_are_short_and_print_no_array(
    call: Callable[..., Any], valid: dict[str, Any], names: list[str]
) -> None:
    for name, junk in product(names, JUNK.values()):
        message = said(call, {**valid, name: junk})
        assert len(message) < 600, (name, message)
        assert message.count("0.1234") < 10, (name, message)


def test_inputs_and_targets_given_as_two_arguments_are_told_how_to_be_written() -> None:
    with pytest.raises(lw.LapwingError, match=r"lw\.fit\(model, \[\(x, y\)\]\)"):
        lw.fit(NETWORK, X, Y)  # type: ignore[arg-type]


def test_shown() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError

    texts = {
        "3": 3, "'three'": "three", "None": None, "[1, 2]": [1, 2], "Tensor (2, 3) float32": torch.ones(2, 3),
        "ndarray (2, 3) float64": np.ones((2, 3)), "[Tensor () int64]": [torch.tensor(1)], "KFAC": lw.KFAC,
        "{'a': [ndarray (1,) float64]}": {"a": [np.ones(1)]}, "a Silent": Silent(), "a int": 10**5000,
    }  # fmt: skip
    for text, value in texts.items():
        assert text in shown(value)
        assert len(shown(value)) <= 160
    assert len(shown([["x" * 1000] * 100] * 100)) <= 160
