"""Whatever is given in place of an argument, the message is one of ours, short, and prints no array."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
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
ODD: dict[str, Any] = {
    "None": None, "a word": "a", "bytes": b"a", "a flag": True, "negative": -1, "zero": 0, "half": 2.5, "NaN": math.nan,
    "infinite": math.inf, "many digits": 10**400, "an object": object(), "a class": nn.Linear, "a dict": {"a": 1},
    "a dict of numbers": {1: X}, "an empty dict": {}, "an empty list": [], "words": ["a"], "nothings": [None],
    "a tuple": (1,), "a function": lambda *_: 0, "a generator": iter(()), "an array": np.zeros(3),
    "an array of objects": np.array([None]), "no samples": X[:0], "a tensor with NaN": torch.full_like(X, math.nan),
    "meta": X.to("meta"), "a scalar": torch.tensor(1.0), "labels": Y, "complex": X.cfloat(), "sparse": X.to_sparse(),
    "other features": X[:, :3], "a batch with NaN": [(torch.full_like(X, math.nan), Y)],
    "a batch on meta": [(X.to("meta"), Y)], "an empty batch": [(X[:0], Y[:0])], "a narrow batch": [(X[:, :3], Y)],
    "a network without weights": nn.Tanh(),
    "a network in training mode": nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).train(),
}  # fmt: skip
"""What no argument or few arguments may be, by what it is."""

NETWORK = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).eval()
POSTERIOR = lw.fit(NETWORK, [(X, Y)], prior_precision=1.0)
FACTORS = lw.fit(NETWORK, [(X, Y)], lw.KFAC(), prior_precision=1.0)
MIXTURE = lw.mixture([POSTERIOR, FACTORS])
REAL = torch.randn(8, 3)
REGRESSION = lw.fit(NETWORK, [(X, REAL)], prior_precision=1.0)
DETECTOR = lw.novelty(NETWORK, [(X, Y)])
ALARM = lw.novelty(POSTERIOR, [(X, Y)], held_out=[(X + 1, Y)])
SNAPSHOTS = lw.SWAG.collector(NETWORK)
for _ in range(3):
    SNAPSHOTS.snapshot()
OPTIONS = [
    getattr(lw, name) for name in lw.__all__
    if inspect.isclass(getattr(lw, name)) and hasattr(getattr(lw, name), "__dataclass_fields__")
    and not inspect.isabstract(getattr(lw, name))
    and name not in ("Posterior", "Latent", "Comparison", "Coverage", "Novelty")
]  # fmt: skip
CALLS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (lw.fit, {"model": NETWORK, "loader": [(X, Y)]}),
    (lw.plan, {"model": NETWORK, "loader": [(X, Y)]}),
    (lw.load, {"path": "nowhere.safetensors", "model": NETWORK}),
    (lw.batches, {"loader": [{"x": X, "y": Y}], "inputs": "x", "targets": "y"}),
    (lw.novelty, {"model": NETWORK, "loader": [(X, Y)]}),
    (lw.Novelty.load, {"path": "nowhere.safetensors", "model": NETWORK}),
    (DETECTOR.__call__, {"x": X}),
    (lw.novelty, {"model": POSTERIOR, "loader": [(X, Y)], "held_out": [(X + 1, Y)]}),
    (ALARM.alarm, {"x": X, "rate": 0.9}),
    (ALARM.p_value, {"x": X}),
    (ALARM.why, {"x": X}),
    (lw.mixture, {"posteriors": [POSTERIOR, FACTORS], "validation": [(X, Y)]}),
    (MIXTURE.predict, {"x": X}),
    (MIXTURE.save, {"folder": "nowhere/at/all"}),
    (lw.coverage, {"model": NETWORK, "batch": X}),
    (lw.compare, {"posteriors": {"one": POSTERIOR}, "loader": [(X, Y)], "repeats": 1}),
    (lw.propagate, {"model": NETWORK, "inputs": lw.Uncertain(X, 0.1)}),
    (lw.scale_factor, {"posterior": POSTERIOR, "loader": [(X, Y)], "via": lw.Linearized()}),
    (lw.amortize, {"posterior": POSTERIOR, "loader": [(X, Y)], "unlabelled": X}),
    (lw.deploy, {"posterior": POSTERIOR, "x": X}),
    (lw.MeanField.from_variances, {"model": NETWORK, "variances": {}, "loader": [(X, Y)]}),
    (lw.SWAG.from_snapshots, {"snapshots": SNAPSHOTS, "loader": [(X, Y)]}),
    (POSTERIOR.latent, {"x": X}),
    (POSTERIOR.predict, {"x": X}),
    (POSTERIOR.sample, {"n": 1}),
    (POSTERIOR.sample_function, {}),
    (POSTERIOR.explain, {"x": X}),
    (POSTERIOR.influence, {"train": (X, Y), "x": X}),
    (POSTERIOR.value, {"candidates": X, "targets": X}),
    (POSTERIOR.of, {"function": lambda f, *_: f(X)}),
    (POSTERIOR.with_prior, {"prior_precision": 1.0}),
    (POSTERIOR.save, {"path": "nowhere/at/all"}),
    (POSTERIOR.log_marginal_likelihood, {}),
    (POSTERIOR.predict(X).log_prob, {"targets": Y}),
    (POSTERIOR.predict(X).sample, {"n": 1}),
    (POSTERIOR.predict(X).uncertainty, {}),
    (POSTERIOR.latent(X).sample, {"n": 1}),
    (FACTORS.update, {"loader": [(X, Y)]}),
    (FACTORS.penalty, {"model": NETWORK}),
    (REGRESSION.predict(X).scaled, {}),
    (REGRESSION.predict(X).interval, {}),
    (REGRESSION.predict(X).quantile, {"probability": 0.5}),
    (REGRESSION.predict(X).pit, {"targets": REAL}),
    (REGRESSION.predict(X).crps, {"targets": REAL}),
    (REGRESSION.predict(X).log_prob, {"targets": REAL}),
    (REGRESSION.predict(X).sample, {"n": 1}),
    (REGRESSION.with_prior, {"prior_precision": 1.0}),
    (lw.matching, {}),
]
NEEDED: dict[Any, dict[str, Any]] = {
    lw.SubsetOfWeights: {"size": 3}, lw.Uncertain: {"value": X}, lw.Validation: {"loader": [(X, Y)]},
    lw.EarlyStopping: {"loader": [(X, Y)]}, lw.Scaled: {"via": lw.Linearized(), "factor": 1.0},
    lw.InducingPoints: {"inputs": X}, lw.FromDistribution: {"function": torch.distributions.Poisson},
    lw.Joint: {"likelihoods": {"a": lw.Gaussian(), "b": lw.Poisson()}, "outputs": {"a": [0], "b": [1]}},
}  # fmt: skip
PATHS = {"path", "folder", "checkpoint"}
"""Arguments of which messages show the text."""

WITHOUT_ARGUMENTS = {"versions"}
SELECTIONS = {"everything", "last_layer"}
"""Passed to `params=`, and not called by users."""

BASES = {"LapwingError", "Likelihood", "Method", "Novelty", "Posterior", "SWAG", "evaluation"}
"""Names that nobody calls: their methods and functions are in the table."""

COUNTS = {"draws", "nodes", "points", "prefixes", "ranks", "repeats", "samples", "size", "steps"}
"""How often something is done, of which a great number only takes long."""


def cases(slow: tuple[Any, ...] = ()) -> Iterator[Any]:
    for call, valid in [*CALLS, *((option, NEEDED.get(option, {})) for option in OPTIONS)]:
        parameters = inspect.signature(call).parameters.values()
        named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        marks = [pytest.mark.slow] if call in slow else []
        yield pytest.param(call, valid, named, id=call.__qualname__, marks=marks)


def test_the_table_has_every_public_name() -> None:
    rows = {row for row, _ in CALLS} | set(OPTIONS)
    missing = {name for name in lw.__all__ if getattr(lw, name) not in rows}
    assert missing == WITHOUT_ARGUMENTS | SELECTIONS | BASES
    methods = {name for name, member in vars(lw.Posterior).items() if inspect.isfunction(member) and name[0] != "_"}
    called = {row.__name__ for row, _ in CALLS if isinstance(getattr(row, "__self__", None), lw.Posterior)}
    assert methods - called == {"at", "diagnose", "weight_std", "with_defaults", "with_noise"}  # no argument


@pytest.fixture(autouse=True)
def a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For what is written where a text is taken as a path."""
    monkeypatch.chdir(tmp_path)


def said(call: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """What a call says of its arguments; nothing where it takes them."""
    try:
        call(**arguments)
    except lw.LapwingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("call", "valid", "names"), list(cases(slow=(lw.plan, lw.deploy, lw.compare))))
def test_messages_are_short_and_print_no_array(
    call: Callable[..., Any], valid: dict[str, Any], names: list[str]
) -> None:
    for name, junk in product([name for name in names if name not in PATHS], JUNK.values()):
        message = said(call, {**valid, name: junk})
        assert len(message) < 600, (name, message)
        assert message.count("0.1234") < 10, (name, message)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("call", "valid", "names"), list(cases(slow=(lw.fit, lw.plan, lw.deploy, lw.compare))))
def test_odd_arguments_are_taken_or_refused_in_a_sentence(
    call: Callable[..., Any], valid: dict[str, Any], names: list[str]
) -> None:
    """Any other exception than a LapwingError fails."""
    before = {name: value.clone() for name, value in NETWORK.state_dict().items()}
    for name, (kind, junk) in product(names, ODD.items()):
        if (name in COUNTS and kind == "many digits") or (name == "progress" and junk is True):
            continue
        message = said(call, {**valid, name: junk})
        assert not message or message.endswith((".", ")")), (name, kind, message)
        assert "\n" not in message, (name, kind, message)
        assert len(message) < 600, (name, kind, message)
    assert all(torch.equal(value, before[name]) for name, value in NETWORK.state_dict().items())
    assert not NETWORK.training


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
