"""Files that were changed: by chance, which the checksum tells, and on purpose, with a checksum that fits.

The former are refused. The latter are refused, by one sentence, or make a posterior like others: its variances are
finite and not negative. Nothing else may happen.
"""

from __future__ import annotations

import copy
import math
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.covariance import ImplicitBasis, LowRank
from lapwing.posterior import storage
from lapwing.tangent import Anchors

FEW = 100
"""Changes of each arm that the fast tests try."""

MANY = 5000
"""Changes of each arm that the slow tests try."""

SECONDS = 60
"""What takes longer counts as a hang."""


@dataclass(frozen=True)
class Saved:
    """A file, and what is needed to ask it."""

    model: nn.Module
    x: Any
    data: bytes
    tensors: dict[str, Tensor]
    header: dict[str, Any]


class Words(nn.Module):
    """Tied embeddings, a convolution in groups, a norm, a layer used twice and a parameter of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv = nn.Embedding(9, 4), nn.Conv1d(4, 4, 2, groups=2)
        self.norm, self.twice, self.factor = nn.LayerNorm(4), nn.Linear(4, 4), nn.Parameter(torch.ones(1, 4))

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        h = self.conv(self.table(tokens).mT).mean(-1) * scale
        h = self.twice(torch.tanh(self.twice(self.norm(h)))) * self.factor
        return h @ self.table.weight.T[:, :3]


def implicit(posterior: lw.Posterior, inputs: Any) -> lw.Posterior:
    """Return a posterior on combinations of rows at kept inputs."""
    old, blocks = posterior.covariance, posterior.tangent.blocks
    anchors = Anchors(posterior.tangent, (inputs,), torch.arange(4), torch.arange(4) % 3)
    basis = ImplicitBasis(anchors, torch.eye(3, 4).double(), {block.name: 1.0 for block in blocks})
    covariance = LowRank(blocks, basis, torch.eye(3).double(), old.traces, old.precision, old.scale)
    return replace(posterior, covariance=covariance)


@cache
def saved(few: bool, folder: Path) -> list[Saved]:
    """Return files of every structure; of some, where few are asked for."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    mlp = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).eval()
    curve = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double().eval()
    words, tokens = Words().eval(), {"tokens": torch.randint(9, (12, 5)), "scale": torch.rand(12, 1)}
    given = {"prior_precision": 1.0}
    fits: list[tuple[nn.Module, Any, Any, dict[str, Any]]] = [
        (mlp, x, y, {"method": lw.KFAC(), **given}),
        (mlp, x, y, {"method": lw.ELLA(rank=3, rows=6, residual="prior"), **given}),
    ]
    if not few:
        methods = [
            lw.Diagonal(), lw.EKFAC(), lw.KFAC("reduce", "dense"), lw.Full(form="primal"), lw.Full(form="dual"),
            lw.ELLA(rank=3, rows=6), lw.OptimalSubspace(3, lw.KFAC(), "all"), lw.SubsetOfWeights(5, "magnitude"),
            lw.SubsetOfData(4), lw.SampledLLA(4), lw.VaLLA(4), lw.MeanField(steps=3),
        ]  # fmt: skip
        fits += [(mlp, x, y, {"method": method, **given}) for method in methods]
        fits += [(mlp, x, y, {}), (curve, x.double(), x[:, :1].double(), {"method": lw.KFAC()})]
        fits += [(curve, x.double(), x[:, :1].double(), {"method": lw.Full(), "tune": None})]
        fits += [(words, tokens, y, {"method": method, **given}) for method in (lw.KFAC(), lw.Diagonal(), lw.ELLA(3))]
    found = []
    for i, (model, inputs, targets, options) in enumerate(fits):
        batch = {**inputs, "labels": targets} if isinstance(inputs, dict) else (inputs, targets)
        options = {"likelihood": "gaussian"} | options if targets.is_floating_point() else options
        posteriors = [lw.fit(model, [batch], **options)]
        if options.get("method") == lw.MeanField(steps=3):
            states = [{k: v + 0.1 * torch.randn_like(v) for k, v in model.state_dict().items()} for _ in range(4)]
            posteriors.append(lw.SWAG.from_snapshots(iter(states), [batch], model=model))
        if isinstance(posteriors[0].covariance, LowRank):
            posteriors.append(implicit(posteriors[0], inputs))
        for posterior in posteriors:
            path = folder / f"{i}"
            posterior.save(path)
            few_inputs = {k: v[:3] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[:3]
            found.append(Saved(posterior.model, few_inputs, path.read_bytes(), *storage.read(path)))
    return found


# --- changes of bytes ------------------------------------------------------------------------------------------------
def bytes_changed(data: bytes, rng: random.Random) -> bytes:
    """Return a file with some bytes changed, left out, added or exchanged; the head is met as often as the rest."""
    head = 8 + int.from_bytes(data[:8], "little")
    at = rng.randrange(head if rng.random() < 0.5 else len(data))
    length, other = rng.choice((1, 1, 2, 8, 100)), rng.randrange(len(data))
    part = data[at : at + length]
    kind = rng.randrange(7)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + rng.randbytes(len(part)) + data[at + len(part) :]
    if kind == 2:
        return data[:at] + data[at + length :]
    if kind == 3:
        return data[:at] + rng.randbytes(length) + data[at:]
    if kind == 4:
        return data[:at]
    if kind == 5:
        return data[:at] + bytes(len(part)) + data[at + len(part) :]
    return data[:at] + data[other : other + len(part)] + data[at + len(part) :]


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_bytes_that_changed_are_told(count: int, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    rng, path, outcomes = random.Random(0), tmp_path / "p", Counter[str]()
    files = saved(count == FEW, tmp_path_factory.getbasetemp())
    while outcomes.total() < count:
        file = rng.choice(files)
        data = bytes_changed(file.data, rng)
        if data == file.data:
            continue
        path.write_bytes(data)
        with pytest.raises(lw.LapwingError) as caught:
            lw.load(path, file.model)
        outcomes[str(caught.value).replace(str(path), "p")] += 1
    print(outcomes)
    assert len(outcomes) <= 3
    assert all("damaged" in message and "\n" not in message for message in outcomes)


# --- changes with a checksum that fits -------------------------------------------------------------------------------
NUMBERS = (0, 1, -1, 2, 3, 7, -3, 0.5, 1e-300, 1e300, -1e-3, 1e30, 1e-30, 2**31, 2**63, 10**400)
TEXTS = ("", "0", "weight", "bias", "linear", "conv", "generic", "dense", "kronecker", "Draws", "LowRank", "gaussian",
         "os.system", "\n", "x" * 10_000, '["tensor"]', '["tuple", ["tensor"]]', "torch.float32")  # fmt: skip
VALUES = (None, True, False, [], {}, [[]], [1], {"a": 1}, *NUMBERS, *TEXTS)


def header_changed(header: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a header with another value somewhere, or a part left out, doubled or exchanged with another one."""
    header = copy.deepcopy(header)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(header)
    node, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0:
        del node[key]
    elif kind == 1:
        other, name = rng.choice(places)
        node[key] = copy.deepcopy(other[name])
    elif kind == 2 and isinstance(node, list):
        node.insert(key, copy.deepcopy(node[key]))
    elif kind == 3 and isinstance(node[key], (int, float)):
        node[key] = node[key] + rng.choice((-1, 1)) if rng.random() < 0.5 else node[key] * rng.choice(NUMBERS[:15])
    elif kind == 4 and isinstance(node[key], bool):
        node[key] = not node[key]
    else:
        node[key] = copy.deepcopy(rng.choice(VALUES))
    return header


DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def tensors_changed(tensors: dict[str, Tensor], rng: random.Random) -> dict[str, Tensor]:
    """Return tensors of which one has other numbers, another shape, dtype or name, or is missing."""
    tensors = dict(tensors)
    name, other = rng.choice(list(tensors)), rng.choice(list(tensors))
    value = tensors[name].clone()
    flat = value.view(-1)
    kind = rng.randrange(11)
    if kind <= 2 and len(flat):  # bits of one number
        raw = flat.view(torch.uint8)
        at = rng.randrange(len(raw)) if kind else len(raw) - 1
        raw[at] = raw[at] ^ (1 << rng.randrange(8)) if kind < 2 else rng.randrange(256)
    elif kind == 3 and len(flat) and value.is_floating_point():
        flat[rng.randrange(len(flat))] = rng.choice(
            (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e18, 1e38, 1e-38, 1e-18)
        )
    elif kind == 4 and value.is_floating_point():
        value = value * rng.choice((-1.0, 0.0, 1e-18, 1e18, 1e9, 1e-9, 2.0, torch.rand(1).item()))
    elif kind == 5:
        value = rng.choice(
            (value.mT if value.ndim > 1 else value[None], flat, flat[:1], value[None], torch.cat([flat, flat]))
        )
    elif kind == 6:
        value = value.to(rng.choice(DTYPES))
    elif kind == 7:
        value = rng.choice((value.new_zeros(0), value.new_zeros(2**20, 0), value[..., :-1] if value.ndim else value))
    elif kind == 8:
        del tensors[name]
        return (
            {**tensors, rng.choice((name + "x", "history/x", "statistics/x", "covariance/x")): value}
            if other
            else tensors
        )
    elif kind == 9:
        tensors[name], tensors[other] = tensors[other], tensors[name]
        return tensors
    elif kind == 10:
        value = tensors[other]
    return {**tensors, name: value.contiguous()}


class Hang(BaseException):
    """What takes too long."""


def hang(*args: Any) -> None:
    raise Hang


def outcome(path: Path, file: Saved) -> str:
    """Return what becomes of a file: where it was refused, or that its predictions are like others; else raise."""
    try:
        posterior = lw.load(path, file.model)
    except lw.LapwingError:
        return "refused at load"
    try:
        latent = posterior.latent(file.x)
        prediction = posterior.predict(file.x)
        shown = [latent.mean, latent.variance, latent.covariance]
        shown += [prediction.probs] if hasattr(prediction, "probs") else [prediction.variance]
    except lw.LapwingError:
        return "refused at first use"
    assert all(bool(value.isfinite().all()) for value in shown), "numbers that are not finite"
    assert bool((latent.variance >= 0).all()), "a negative variance"
    return "like others"


def changes(count: int, files: list[Saved], path: Path) -> Iterator[Saved]:
    """Write changed files to a path, one after the other, and yield what each was made of."""
    rng = random.Random(1)
    torch.manual_seed(1)
    for _ in range(count):
        file = rng.choice(files)
        tensors, header = file.tensors, file.header
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if rng.random() < 0.5:
                tensors = tensors_changed(tensors, rng)
            else:
                header = header_changed(header, rng)
        storage.write(path, tensors, header)
        yield file


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="needs an alarm to end what hangs")
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_changes_with_a_checksum_that_fits(
    count: int, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    outcomes, before = Counter[str](), signal.signal(signal.SIGALRM, hang)
    try:
        for i, file in enumerate(changes(count, saved(count == FEW, tmp_path_factory.getbasetemp()), tmp_path / "p")):
            signal.alarm(SECONDS)
            try:
                outcomes[outcome(tmp_path / "p", file)] += 1
            except BaseException as error:
                raise AssertionError(f"change {i}, of {file.header['method']}: {error!r}") from error
            finally:
                signal.alarm(0)
    finally:
        signal.signal(signal.SIGALRM, before)
    print(outcomes)
    assert outcomes.total() == count
    assert len(outcomes) >= 2
