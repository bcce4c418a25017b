"""Files: whole or not at all, and one clear sentence for what is no file of this library (case 13)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import lapwing as lw
from lapwing import storage

TENSORS = {
    "a": torch.randn(3, 2),
    "b/c": torch.randn(4, dtype=torch.float64),
    "half": torch.ones(2, 2, dtype=torch.bfloat16),
    "count": torch.tensor([3]),
    "scalar": torch.tensor(1.5),
    "none": torch.zeros(0, 5),
    "view": torch.randn(4, 6).T[1:, ::2],
}
HEADER = {"name": "µ", "list": [1, 2.5, None, True], "nested": {"x": [[1], []]}, "tiny": 1e-300}


def network(width: int = 6) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).eval()


X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "posterior.safetensors"
    lw.fit(network(), [(X, Y)], lw.KFAC()).save(path)
    return path


def rewritten(path: Path, change: Callable[[dict[str, Any]], Any] = lambda header: None, drop: str = "") -> Path:
    """Write the file again with another header, or without the tensors whose name starts with `drop`."""
    with safe_open(str(path), "pt") as file:
        header = json.loads(file.metadata()[storage.KEY])
    change(header)
    tensors = {name: value for name, value in load_file(path).items() if not (drop and name.startswith(drop))}
    save_file(tensors, path, {storage.KEY: json.dumps(header)})
    return path


def refused(action: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(lw.LapwingError) as caught:
        action()
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tensors_and_header_come_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    storage.write(path, TENSORS, HEADER)
    tensors, header = storage.read(str(path))
    assert header == {"format": storage.FORMAT, **HEADER}
    assert tensors.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert tensors[name].dtype == value.dtype
        assert torch.equal(tensors[name], value)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_tensors_that_share_memory_or_require_gradients(tmp_path: Path) -> None:
    base = torch.randn(4, 4, requires_grad=True)
    storage.write(tmp_path / "file", {"all": base, "row": base[0], "same": base}, {})
    tensors, _ = storage.read(tmp_path / "file")
    assert torch.equal(tensors["row"], base[0])
    assert torch.equal(tensors["same"], base)


@pytest.mark.parametrize("failing", ["replace", "fdopen"])
def test_an_exception_while_writing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "file"
    storage.write(path, {"a": torch.ones(2)}, {"version": "old"})
    before = path.read_bytes()

    class Full:
        def __init__(self, handle: int, mode: str) -> None:
            self.handle = handle

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            os.close(self.handle)

        def write(self, data: bytes) -> None:
            os.write(self.handle, data[: len(data) // 2])
            raise OSError("no space left on device")

    def refuse(*args: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(storage.os, failing, Full if failing == "fdopen" else refuse)
        with pytest.raises(OSError, match="no space left"):
            storage.write(path, {"a": torch.zeros(1000)}, {"version": "new"})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["file"]  # nothing half-written is left
    assert storage.read(path)[1]["version"] == "old"


def test_a_header_that_is_no_json_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    storage.write(path, {"a": torch.ones(2)}, {})
    before = path.read_bytes()
    with pytest.raises(TypeError):
        storage.write(path, {"a": torch.ones(2)}, {"object": object()})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_writing_replaces(saved: Path) -> None:
    model = network()
    posterior = lw.fit(model, [(X, Y)], lw.KFAC(), prior_precision=7.0)
    posterior.save(saved)
    assert lw.load(saved, model).prior_precision == 7.0
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_places_that_cannot_be_written(saved: Path) -> None:
    posterior = lw.load(saved, network())
    missing = saved.parent / "missing" / "p"
    refused(lambda: posterior.save(missing), f"no folder {missing.parent}", "mkdir(parents=True)")
    refused(lambda: posterior.save(saved.parent), f"{saved.parent}", "is a folder", "posterior.safetensors'")


@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.6, 0.999])
def test_13_truncated(saved: Path, part: float) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[: int(part * len(data))])
    refused(lambda: lw.load(saved, network()), str(saved), "truncated", "posterior.save(path)", "save it again")


def test_13_longer_than_it_says(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes() + b"more")
    refused(lambda: lw.load(saved, network()), str(saved), "posterior.save(path)")


def test_13_foreign(tmp_path: Path) -> None:
    path, model = tmp_path / "file", network()
    origin = str(path), "another origin", "posterior.save(path)", "lw.load(path, model)"
    torch.save(model.state_dict(), path)
    refused(lambda: lw.load(path, model), str(path), "no safetensors file", "posterior.save(path)")
    path.write_text("hello, this is text and no safetensors file")
    refused(lambda: lw.load(path, model), str(path), "no safetensors file", "posterior.save(path)")
    save_file({k: v.clone() for k, v in model.state_dict().items()}, path)
    refused(lambda: lw.load(path, model), *origin)
    for text in ("nonsense", "[]", "3", "{}", '{"format": "one"}'):
        save_file({"a": torch.ones(1)}, path, {storage.KEY: text})
        refused(lambda: lw.load(path, model), *origin)


def test_13_newer(saved: Path) -> None:
    rewritten(saved, lambda header: header.update(format=storage.FORMAT + 1))
    refused(
        lambda: lw.load(saved, network()),
        f"format {storage.FORMAT + 1}",
        f"the {storage.FORMAT} this",
        "pip install -U",
    )


def test_13_missing(tmp_path: Path) -> None:
    refused(lambda: lw.load(tmp_path / "none", network()), "no such file", "posterior.save")
    refused(lambda: lw.load(tmp_path, network()), "no such file", "posterior.save")


@pytest.mark.parametrize("drop", ["covariance/precision", "covariance/0", "prior_mean/", "statistics/"])
def test_13_parts_that_are_missing(saved: Path, drop: str) -> None:
    rewritten(saved, drop=drop)
    refused(lambda: lw.load(saved, network()), str(saved), "do not make a posterior", "posterior.save(path)")


@pytest.mark.parametrize("key", ["tangent", "covariance", "likelihood", "given", "samples", "temperature"])
def test_13_headers_that_lack_something(saved: Path, key: str) -> None:
    rewritten(saved, lambda header: header.pop(key))
    refused(lambda: lw.load(saved, network()), str(saved), "do not make a posterior", key, "posterior.save(path)")


def test_13_structures_of_another_version(saved: Path) -> None:
    rewritten(saved, lambda header: header["covariance"].update({"class": "Future"}))
    refused(lambda: lw.load(saved, network()), "Future", "pip install -U lapwing")
    rewritten(saved, lambda header: header["covariance"].update({"class": "Blockwise"}))
    rewritten(saved, lambda header: header["likelihood"].update(name="poisson"))
    refused(lambda: lw.load(saved, network()), "poisson")


def test_other_weights_at_load(saved: Path) -> None:
    def load(change: Callable[[nn.Module], Any]) -> Callable[[], Any]:
        def run() -> Any:
            model = network()
            with torch.no_grad():
                model = change(model) or model
            return lw.load(saved, model)

        return run

    def entry(model: nn.Module) -> None:
        model[0].weight[3, 2] += 1e-3

    def swap(model: nn.Module) -> None:
        model[2].weight[[0, 1]] = model[2].weight[[1, 0]]

    values = "other values", "(6, 4)", "load their checkpoint"
    refused(load(entry), str(saved), "0.weight", *values)
    refused(load(swap), "2.weight", "other values", "load their checkpoint")
    refused(load(lambda model: network(7)), "0.weight (6, 4)", "found (7, 4)", "same options")
    refused(load(lambda model: nn.Sequential(model[0], model[2])), "2.weight", "no such parameter", "same options")
    refused(load(lambda model: model.append(nn.Linear(3, 3))), "3.weight", "only in the network", "same options")
    refused(load(lambda model: model.double()), "torch.float64", "torch.float32", "model.to(torch.float32)")
    refused(load(lambda model: model.bfloat16()), "torch.bfloat16", "model.to(torch.float32)")
    refused(load(lambda model: model.to("meta")), "meta device", "load_state_dict")
    refused(lambda: lw.load(saved, "model"), "model of type str", "torch.nn.Module")


def test_other_weights_in_a_trunk_that_is_not_treated(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).eval()
    lw.fit(model, [(X, Y)]).save(tmp_path / "p")
    lw.load(tmp_path / "p", model)
    with torch.no_grad():
        model[0].bias[0] += 1.0
    refused(lambda: lw.load(tmp_path / "p", model), "0.bias", "other values")
    with torch.no_grad():
        model[0].bias[0] -= 1.0
        model[1].running_var *= 2.0
    refused(lambda: lw.load(tmp_path / "p", model), "1.running_var", "other values")


def test_options_of_load(saved: Path) -> None:
    model = network()
    refused(lambda: lw.load(saved, model, memory=5), "memory=5", "memory=2**30")
    refused(lambda: lw.load(saved, model, likelihood=lw.Gaussian()), "Gaussian", "categorical one", "leave it out")
    refused(lambda: lw.load(saved, model, forward=lambda net, x: net(x)), "with forward=", "lw.load(path, model)")
    assert lw.load(saved, model, likelihood="categorical").likelihood == lw.Categorical()
    lw.fit(model, [(X, Y)], forward=lambda net, x: 2 * net(x)).save(saved)
    refused(lambda: lw.load(saved, model), "without forward=", "forward=forward")


def test_training_mode_at_load(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).eval()
    lw.fit(model, [(X, Y)]).save(tmp_path / "p")
    refused(lambda: lw.load(tmp_path / "p", model.train()), "1 (Dropout, p=0.5)", "model.eval()")
