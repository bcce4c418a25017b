"""Files: whole or not at all, and one clear sentence for what is not a file of this library."""

from __future__ import annotations

import copy
import errno
import json
import os
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lapwing as lw
from benchmarks.measure import LiveBytes
from lapwing.covariance import ImplicitBasis, LowRank
from lapwing.posterior import storage
from lapwing.tangent import Anchors

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
    tensors, header = storage.read(path)
    change(header)
    tensors = {name: value for name, value in tensors.items() if not (drop and name.startswith(drop))}
    storage.write(path, tensors, header)  # with a checksum that fits
    return path


def refused(action: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(lw.LapwingError) as caught:
        action()
    for part in parts:
        assert part in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 3000


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


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    """Read by its own reader: any dtype, layout and shape, and names in any letters."""
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "strided": base[:, ::2], "transposed": base.T, "nothing": torch.zeros(0, 3), "number": torch.tensor(2.5),
        "Größe/\N{SNOWMAN}": torch.ones(3, dtype=torch.bfloat16), "flags": torch.tensor([True, False, True]),
        "half": torch.ones(5).half(), "counts": torch.arange(3), "bytes": torch.arange(7, dtype=torch.uint8),
        "double": torch.rand(2, 2, dtype=torch.float64),
    }  # fmt: skip
    storage.write(tmp_path / "file", tensors, {"text": "Größe"})
    again = load_file(tmp_path / "file")
    assert again.keys() == tensors.keys()
    for name, value in tensors.items():
        assert again[name].dtype == value.dtype
        assert torch.equal(again[name], value)
    assert storage.read(tmp_path / "file")[1]["text"] == "Größe"


def test_a_posterior_is_not_copied_to_be_saved(tmp_path: Path) -> None:
    tensors = {f"{i}": torch.ones(2**18) for i in range(8)}
    tracemalloc.start()
    with LiveBytes() as live:
        storage.write(tmp_path / "file", {**tensors, "strided": torch.ones(2, 2**17).T}, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(peak, live.peak) < 3 * 2**20  # of 9 MiB: the strided tensor, and its copy


@pytest.mark.parametrize("failing", ["replace", "fsync"])
def test_an_exception_while_writing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "file"
    storage.write(path, {"a": torch.ones(2)}, {"version": "old"})
    before = path.read_bytes()

    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(storage.os, failing, refuse)
        refused(
            lambda: storage.write(path, {"a": torch.zeros(1000)}, {"version": "new"}),
            str(path), "No space left on device", "Pass the name of a file",
        )  # fmt: skip
        patched.setattr(storage.os, failing, interrupt)
        with pytest.raises(KeyboardInterrupt):
            storage.write(path, {"a": torch.zeros(1000)}, {"version": "new"})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["file"]  # nothing half-written is left
    assert storage.read(path)[1]["version"] == "old"


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("path", [None, 3, b"bytes", "no\0name", "x" * 300, "/proc/none/file"], ids=repr)
def test_paths_that_are_none(path: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    refused(lambda: storage.write(path, {"a": torch.ones(2)}, {}), ".")
    refused(lambda: storage.read(path), ".")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="modes and links are those of POSIX")
def test_modes_and_links(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        storage.write(tmp_path / "new", {"a": torch.ones(2)}, {})
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
        (tmp_path / "new").chmod(0o604)
        storage.write(tmp_path / "new", {"a": torch.zeros(2)}, {})
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o604
    finally:
        os.umask(before)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "new")
    (tmp_path / "to nothing yet").symlink_to(tmp_path / "folder" / "there")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for name, real in (("link", "new"), ("to nothing yet", "folder/there")):
        storage.write(tmp_path / name, {"a": torch.full((2,), 3.0)}, {})
        assert (tmp_path / name).is_symlink()
        assert torch.equal(storage.read(tmp_path / real)[0]["a"], torch.full((2,), 3.0))
    refused(lambda: storage.write(tmp_path / "loop", {}, {}), "cannot be written")
    refused(lambda: storage.write(tmp_path / "pipe", {}, {}), "is not an ordinary file")


def test_all_is_on_the_disk_before_the_old_file_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    for name in ("fsync", "replace"):
        function = getattr(os, name)
        monkeypatch.setattr(storage.os, name, lambda *args, f=function, n=name: (done.append(n), f(*args)))
    storage.write(tmp_path / "file", {"a": torch.ones(2)}, {})
    assert done[:2] == ["fsync", "replace"]


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
def test_truncated(saved: Path, part: float) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[: int(part * len(data))])
    refused(lambda: lw.load(saved, network()), str(saved), "damaged", "posterior.save(path)")


def test_one_flipped_bit_of_any_byte_is_told(saved: Path) -> None:
    """Also in the spaces that fill up the head, in texts, and in the checksum itself."""
    data, model = saved.read_bytes(), network()
    for i in range(0, len(data), 37):
        saved.write_bytes(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :])
        refused(lambda: lw.load(saved, model), str(saved), "damaged")


def test_longer_than_it_says(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes() + b"more")
    refused(lambda: lw.load(saved, network()), str(saved), "posterior.save(path)")


def test_foreign(tmp_path: Path) -> None:
    path, model = tmp_path / "file", network()
    origin = str(path), "another origin", "posterior.save(path)", "lw.load(path, model)"
    torch.save(model.state_dict(), path)
    refused(lambda: lw.load(path, model), *origin)
    path.write_text("hello, this is text and no safetensors file")
    refused(lambda: lw.load(path, model), *origin)
    save_file({k: v.clone() for k, v in model.state_dict().items()}, path)
    refused(lambda: lw.load(path, model), *origin)
    save_file({"a": torch.ones(1)}, path, {storage.KEY: '{"format": 1}'})
    refused(lambda: lw.load(path, model), *origin)


@pytest.mark.parametrize(
    "rest",
    [
        "", "format", '"format": "two"', '"format": true', '"format": 2, "x": NaN',
        '"format": ' + "[" * 100_000, '"format": ' + "9" * 5000,
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_headers_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: str) -> None:
    text = f'{{"sha256": "{storage.BLANK.decode()}", {rest}}}'
    monkeypatch.setattr(storage, "_text", lambda header: text)  # with a checksum that fits
    storage.write(tmp_path / "p", {"a": torch.ones(1)}, {})
    monkeypatch.undo()
    refused(lambda: lw.load(tmp_path / "p", network()), str(tmp_path), "cannot be read", "posterior.save(path)")


def test_newer(saved: Path) -> None:
    rewritten(saved, lambda header: header.update(format=storage.FORMAT + 1))
    refused(
        lambda: lw.load(saved, network()),
        f"format {storage.FORMAT + 1}",
        f"the {storage.FORMAT} that this",
        "pip install -U",
    )


def test_older(saved: Path) -> None:
    rewritten(saved, lambda header: header.update(format=storage.FORMAT - 1))
    older = f"has format {storage.FORMAT - 1}, older than the {storage.FORMAT}"
    refused(lambda: lw.load(saved, network()), older, "Fit again")


def test_missing(tmp_path: Path) -> None:
    refused(lambda: lw.load(tmp_path / "none", network()), "no file", "posterior.save")
    refused(lambda: lw.load(tmp_path, network()), "is not a file", "Pass the name of one")


@pytest.mark.parametrize("drop", ["covariance/precision", "covariance/0", "prior_mean/", "statistics/"])
def test_parts_that_are_missing(saved: Path, drop: str) -> None:
    rewritten(saved, drop=drop)
    refused(lambda: lw.load(saved, network()), str(saved), "does not make a posterior", "posterior.save(path)")


@pytest.mark.parametrize("key", ["tangent", "covariance", "likelihood", "given", "samples", "temperature"])
def test_headers_that_lack_something(saved: Path, key: str) -> None:
    rewritten(saved, lambda header: header.pop(key))
    refused(lambda: lw.load(saved, network()), str(saved), "does not make a posterior", key, "posterior.save(path)")


# --- what files may not do -------------------------------------------------------------------------------------------
class Pair(nn.Module):
    """Takes a dict, so that how inputs nest is more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x) * scale))


def implicit(path: Path) -> nn.Module:
    """Save a posterior whose directions are combinations of rows at kept inputs, and return its network."""
    model = Pair().eval()
    posterior = lw.fit(model, [{"x": X, "scale": 0.5, "labels": Y}], lw.ELLA(rank=2, rows=4), prior_precision=1.0)
    old = posterior.covariance
    anchors = Anchors(posterior.tangent, ({"x": X, "scale": 0.5},), torch.arange(4), torch.arange(4) % 3)
    scales = {block.name: 1.0 for block in posterior.tangent.blocks}
    basis = ImplicitBasis(anchors, torch.eye(2, 4, dtype=torch.float64), scales)
    covariance = LowRank(old.blocks, basis, torch.eye(2).double(), old.traces, old.precision, 1.0)
    replace(posterior, covariance=covariance).save(path)
    return model


FACTORY = {"default_factory_module": "module_of_nobody", "default_factory_name": "Evil", "dict_context": ["x"]}
ENUM = {"__enum__": True, "fqn": "module_of_nobody:Evil.x", "name": "x"}
SPECS = {
    "defaultdict": {"type": "collections.defaultdict", "context": FACTORY},
    "enum": {"type": "builtins.dict", "context": json.dumps([ENUM])},
}  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_a_file_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    """Torch reads nests of inputs by importing what they name, so files hold them in a form of their own."""
    model = implicit(tmp_path / "p")
    (tmp_path / "module_of_nobody.py").write_text("raise SystemExit('code of the file ran')")
    monkeypatch.syspath_prepend(tmp_path)
    leaf = {"type": None, "context": None, "children_spec": []}
    nest = json.dumps([json.dumps([1, {**SPECS[spec], "children_spec": [leaf]}]), [None]])
    rewritten(tmp_path / "p", lambda header: header["covariance"]["extra"]["basis"]["extra"].update(nests=[nest]))
    refused(lambda: lw.load(tmp_path / "p", model), str(tmp_path), "does not make a posterior")
    assert "module_of_nobody" not in sys.modules


def test_inputs_of_a_posterior_come_back(tmp_path: Path) -> None:
    model = implicit(tmp_path / "p")
    (inputs,) = lw.load(tmp_path / "p", model).covariance.basis.anchors.inputs
    assert inputs.keys() == {"x", "scale"}
    assert torch.equal(inputs["x"], X)
    assert inputs["scale"] == 0.5


@pytest.mark.parametrize(
    "method",
    [
        None, lw.Full("primal"), lw.Full("dual"), lw.Diagonal(), lw.KFAC(), lw.KFAC("reduce", "dense"), lw.EKFAC(),
        lw.ELLA(rank=3, rows=6), lw.OptimalSubspace(3, lw.KFAC(), "all"), lw.SubsetOfWeights(5), lw.SubsetOfData(4),
        lw.SampledLLA(4), lw.VaLLA(4), lw.MeanField(steps=2),
    ],
    ids=repr,
)  # fmt: skip
def test_every_method_in_float32_comes_back(tmp_path: Path, method: lw.Method | None) -> None:
    model = network()
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    posterior = lw.fit(model, [(x, y)], method)
    posterior.save(tmp_path / "p")
    assert torch.equal(lw.load(tmp_path / "p", posterior.model).predict(x).probs, posterior.predict(x).probs)


def kron(key: str) -> str:
    return f"covariance/2/{key}"


TENSOR_LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "missing, which had a default": lambda t: t.pop(kron("inputs")),
    "too many": lambda t: t.update(other=torch.ones(1)),
    "another dtype": lambda t: t.update({kron("outputs"): t[kron("outputs")].to(torch.int32)}),
    "another shape": lambda t: t.update({kron("eigenvalues"): t[kron("eigenvalues")].mT.contiguous()}),
    "NaN": lambda t: t[kron("eigenvalues")].view(-1)[3:4].fill_(torch.nan),
    "infinite": lambda t: t[kron("eigenvalues")].fill_(torch.inf),
    "negated eigenvalues": lambda t: t[kron("eigenvalues")].neg_(),
    "zeroed eigenvectors": lambda t: t[kron("inputs")].zero_(),
    "large eigenvectors": lambda t: t[kron("outputs")].mul_(1.1),
    "a negative precision": lambda t: t["covariance/precision"].neg_(),
    "a prior mean of infinity": lambda t: t["prior_mean/0"].fill_(torch.inf),
    "NaN statistics": lambda t: t["statistics/log_likelihood"].fill_(torch.nan),
    "other statistics": lambda t: t.update({"statistics/squares": t.pop("statistics/log_likelihood")}),
    "a name that fills the screen": lambda t: t.update({"weights/" + 100_000 * "x": torch.ones(1)}),
    "a name that clears it": lambda t: t.update({"weights/\x1b[2J": torch.ones(1)}),
    "shorter fingerprints": lambda t: t.update({"weights/0.weight": t["weights/0.weight"][:1].clone()}),
}
HEADER_LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "temperature": lambda h: h.update(temperature=-1.0),
    "an infinite number": lambda h: h.update(data_factor=10**400),
    "data_factor below 1": lambda h: h.update(data_factor=0.5),
    "a number for a boolean": lambda h: h.update(given=[1, 0]),
    "no samples": lambda h: h.update(samples=0),
    "a text for a dict": lambda h: h.update(covariance="Blockwise"),
    "another structure": lambda h: h["covariance"]["extra"]["kinds"].update({"2": "dense"}),
    "an unknown structure": lambda h: h["covariance"]["extra"]["kinds"].update({"2": "os.system"}),
    "a scale of 0": lambda h: h["covariance"]["extra"].update(scale=0),
    "a scale of more than 64 bits": lambda h: h["covariance"]["extra"].update(scale=2**70),
    "a parameter's name that fills the screen": lambda h: h["tangent"]["blocks"][0].update(name=100_000 * "x"),
    "a likelihood's name that clears it": lambda h: h["likelihood"].update(name="\x1b[2J"),
    "a noise variance for classes": lambda h: h["likelihood"].update(noise_variance=1.0),
    "a block twice": lambda h: h["tangent"]["blocks"].append(h["tangent"]["blocks"][0]),
    "a layout of another shape": lambda h: h["tangent"]["blocks"][0]["matrix"].update(inputs=2, outputs=12),
    "a use that is none": lambda h: h["tangent"]["plan"]["order"].append([["weight", "2.weight"]]),
    "an axis of text": lambda h: h["tangent"]["plan"]["axes"][0].__setitem__(0, "0"),
    "a dtype that is none": lambda h: h["dtypes"].update({"0.weight": "torch.load"}),
}


@pytest.mark.parametrize("lie", TENSOR_LIES)
def test_tensors_that_lie_with_a_checksum_that_fits(saved: Path, lie: str) -> None:
    tensors, header = storage.read(saved)
    TENSOR_LIES[lie](tensors)
    storage.write(saved, tensors, header)
    refused(lambda: lw.load(saved, network()), str(saved), "does not make a posterior", "posterior.save(path)")


@pytest.mark.parametrize("lie", HEADER_LIES)
def test_headers_that_lie_with_a_checksum_that_fits(saved: Path, lie: str) -> None:
    rewritten(saved, HEADER_LIES[lie])
    refused(lambda: lw.load(saved, network()), ".")


def test_a_dimension_that_no_layer_has_is_refused_at_first_use(saved: Path) -> None:
    """Only the network can tell; a single sample would not show that a layer holds the samples elsewhere."""
    rewritten(saved, lambda header: [axis.__setitem__(0, 1) for axis in header["tangent"]["plan"]["axes"]])
    posterior = lw.load(saved, network())
    for x in (X[:1], X):
        refused(lambda x=x: posterior.latent(x), "on dimension 1 in the fit", "fit again")


def test_nothing_is_saved_that_cannot_be_loaded(tmp_path: Path) -> None:
    posterior = lw.fit(network(), [(X, Y)], lw.Diagonal())
    posterior.covariance.structures["0"].eigenvalues[0] = torch.nan
    refused(lambda: posterior.save(tmp_path / "p"), "covariance/0/eigenvalues", "out of range", "fit again")
    assert not list(tmp_path.iterdir())


def test_structures_of_another_version(saved: Path) -> None:
    rewritten(saved, lambda header: header["covariance"].update({"class": "Future"}))
    refused(lambda: lw.load(saved, network()), "the class 'Future'", "not registered", "pip install -U lapwing")
    rewritten(saved, lambda header: header["covariance"].update({"class": "Blockwise"}))
    rewritten(saved, lambda header: header["likelihood"].update(name="unknown"))
    refused(lambda: lw.load(saved, network()), "unknown")


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

    values = "other values", "(6, 4)", "Load the checkpoint of the fit"
    refused(load(entry), str(saved), "0.weight", *values)
    refused(load(swap), "2.weight", "other values", "Load the checkpoint of the fit")
    refused(load(lambda model: network(7)), "0.weight (6, 4)", "has (7, 4)", "same options")
    refused(load(lambda model: nn.Sequential(model[0], model[2])), "2.weight", "no such parameter", "same options")
    refused(load(lambda model: model.append(nn.Linear(3, 3))), "3.weight", "only in Sequential", "same options")
    refused(load(lambda model: model.double()), "torch.float64", "torch.float32", "model.to(torch.float32)")
    refused(load(lambda model: model.bfloat16()), "torch.bfloat16", "model.to(torch.float32)")
    refused(load(lambda model: model.to("meta")), "meta device", "load_state_dict")
    refused(lambda: lw.load(saved, "model"), "The model has the type str", "torch.nn.Module")


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


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 8, dtype=torch.complex64), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(torch.complex(x, -x)).abs())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("part", ["real", "imag"])
def test_other_complex_weights(tmp_path: Path, part: str) -> None:
    model = Spectral().eval()
    model.register_buffer("rotations", torch.randn(5, dtype=torch.complex64))
    lw.fit(model, [(X, Y)], params=lambda name, weight: not weight.is_complex()).save(tmp_path / "p")
    lw.load(tmp_path / "p", model)
    for name in ("inner.weight", "rotations"):
        other = copy.deepcopy(model)
        with torch.no_grad():
            getattr(other.state_dict()[name], part).mul_(3.0)
        refused(lambda other=other: lw.load(tmp_path / "p", other), name, "other values")


def test_options_of_load(saved: Path) -> None:
    model = network()
    refused(lambda: lw.load(saved, model, memory=5), "memory=5", "memory=2**30")
    refused(
        lambda: lw.load(saved, model, likelihood=lw.Gaussian()),
        "Gaussian",
        "a categorical likelihood",
        "Leave likelihood= out",
    )
    refused(
        lambda: lw.load(saved, model, forward=lambda net, x: net(x)), "made without forward=", "lw.load(path, model)"
    )
    assert lw.load(saved, model, likelihood="categorical").likelihood == lw.Categorical()
    lw.fit(model, [(X, Y)], forward=lambda net, x: 2 * net(x)).save(saved)
    refused(lambda: lw.load(saved, model), "made with forward=", "forward=forward")


def test_training_mode_at_load(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).eval()
    lw.fit(model, [(X, Y)]).save(tmp_path / "p")
    refused(lambda: lw.load(tmp_path / "p", model.train()), "1 (Dropout, p=0.5)", "model.eval()")


def test_what_a_killed_writer_left_goes_after_an_hour(tmp_path: Path) -> None:
    path, old, new = (tmp_path / name for name in ("p", f".p-{'0' * 16}.tmp", f".p-{'1' * 16}.tmp"))
    old.touch()
    new.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    storage.write(path, {"a": torch.ones(2)}, {})
    assert {each.name for each in tmp_path.iterdir()} == {"p", new.name}  # that may be of a process that still writes


def test_a_file_does_not_depend_on_the_order_of_its_tensors(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(2), "a": torch.zeros(3), "c": torch.ones(2, dtype=torch.float64)}
    storage.write(tmp_path / "one", tensors, {})
    storage.write(tmp_path / "other", dict(reversed(tensors.items())), {})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_a_block_of_one_weight_is_saved(tmp_path) -> None:
    """Its prior mean, one number expanded to one number, has no stride."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.PReLU()).eval()
    posterior = lw.fit(model, [(torch.randn(9, 3), torch.randn(9, 1))], lw.Diagonal(), tune=None)
    posterior.save(tmp_path / "posterior")
    assert torch.equal(lw.load(tmp_path / "posterior", model).prior.mean["1"], posterior.prior.mean["1"])
