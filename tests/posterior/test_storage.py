"""Files of posteriors: complete or unchanged on disk, equal answers after loading, and refusals of other files."""

from __future__ import annotations

import copy
import errno
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import lapwing as lw
from lapwing import files
from lapwing.likelihoods.registry import REGISTERED
from papers.common.measure import LiveBytes
from tests.posterior import fixtures
from tests.refused import refused
from tests.trained import small_network as network
from tests.zoo_modules import Net

TENSORS = {
    "a": torch.randn(3, 2),
    "b/c": torch.randn(4, dtype=torch.float64),
    "half": torch.ones(2, 2, dtype=torch.bfloat16),
    "count": torch.tensor([3]),
    "scalar": torch.tensor(1.5),
    "none": torch.zeros(0, 5),
    "view": torch.randn(4, 6).T[1:, ::2],
    "one": torch.ones(1).expand(1),
}
TENSORS["shared"] = TENSORS["a"][0].requires_grad_()
HEADER = {"name": "µ", "list": [1, 2.5, None, True], "nested": {"x": [[1], []]}, "tiny": 1e-300}


X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "posterior.safetensors"
    lw.fit(network(), [(X, Y)], lw.KFAC()).save(path)
    return path


def test_tensors_and_header_come_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_safetensors(path, TENSORS, HEADER)
    tensors, header = files.read_safetensors(str(path))
    assert header == {"format": files.FORMAT, **HEADER}
    assert tensors.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert tensors[name].dtype == value.dtype
        assert torch.equal(tensors[name], value)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_posterior_is_not_copied_to_be_saved(tmp_path: Path) -> None:
    tensors = {f"{i}": torch.ones(2**18) for i in range(8)}
    tracemalloc.start()
    with LiveBytes() as live:
        files.write_safetensors(tmp_path / "file", {**tensors, "strided": torch.ones(2, 2**17).T}, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(peak, live.peak) < 3 * 2**20  # of 9 MiB: the strided tensor, and its copy


@pytest.mark.parametrize("failing", ["replace", "fsync"])
def test_an_exception_while_writing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "file"
    files.write_safetensors(path, {"a": torch.ones(2)}, {"version": "old"})
    before = path.read_bytes()
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patched:
        patched.setattr(files.os, failing, mock.Mock(side_effect=full))
        refused(
            lambda: files.write_safetensors(path, {"a": torch.zeros(1000)}, {"version": "new"}),
            str(path), "No space left on device", "Create its folder",
        )  # fmt: skip
        patched.setattr(files.os, failing, mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            files.write_safetensors(path, {"a": torch.zeros(1000)}, {"version": "new"})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["file"]  # nothing half-written is left
    assert files.read_safetensors(path)[1]["version"] == "old"


@pytest.mark.parametrize("path", [None, 3, b"bytes", "no\0name", "x" * 300, "/proc/none/file"], ids=repr)
def test_values_that_are_not_paths_of_files(path: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    refused(lambda: files.write_safetensors(path, {"a": torch.ones(2)}, {}), ".")
    refused(lambda: files.read_safetensors(path), ".")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="modes and links are those of POSIX")
def test_modes_and_links(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write_safetensors(tmp_path / "new", {"a": torch.ones(2)}, {})
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
        (tmp_path / "new").chmod(0o604)
        files.write_safetensors(tmp_path / "new", {"a": torch.zeros(2)}, {})
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o604
    finally:
        os.umask(before)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "new")
    (tmp_path / "to nothing yet").symlink_to(tmp_path / "folder" / "there")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for name, real in (("link", "new"), ("to nothing yet", "folder/there")):
        files.write_safetensors(tmp_path / name, {"a": torch.full((2,), 3.0)}, {})
        assert (tmp_path / name).is_symlink()
        assert torch.equal(files.read_safetensors(tmp_path / real)[0]["a"], torch.full((2,), 3.0))
    refused(lambda: files.write_safetensors(tmp_path / "loop", {}, {}), "cannot be written")
    refused(lambda: files.write_safetensors(tmp_path / "pipe", {}, {}), "is not an ordinary file")


def test_a_header_that_is_no_json_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_safetensors(path, {"a": torch.ones(2)}, {})
    before = path.read_bytes()
    for value in (object(), float("nan")):
        refused(lambda value=value: files.write_safetensors(path, {"a": torch.ones(2)}, {"x": value}), "JSON")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_places_that_cannot_be_written(saved: Path) -> None:
    posterior = lw.load(saved, network())
    missing = saved.parent / "missing" / "p"
    refused(lambda: posterior.save(missing), f"{missing} cannot be written: No such file", "Create its folder")
    refused(lambda: posterior.save(saved.parent), f"{saved.parent} is not an ordinary file", "posterior.safetensors'")


def test_a_file_and_its_parts_appear_together(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with files.replacing(tmp_path / "a") as new:
        new.write_text("new")
        new.with_name("a.data").write_text("more")
        assert (tmp_path / "a").read_text() == "old"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "new", "a.data": "more"}


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write to every file")
def test_a_read_only_file_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "a").touch(0o400)
    refused(lambda: files.check_writable(tmp_path / "a"), "a cannot be written: Permission denied")


@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.6, 0.999])
def test_truncated(saved: Path, part: float) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[: int(part * len(data))])
    refused(lambda: lw.load(saved, network()), str(saved), "damaged", "posterior.save(path)")


def test_a_flipped_bit_of_any_byte_is_noticed(saved: Path) -> None:
    """In tensors, in the header, and in the digest itself."""
    data, model = saved.read_bytes(), network()
    for i in range(0, len(data), 61):
        saved.write_bytes(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :])
        refused(lambda: lw.load(saved, model), str(saved), "damaged")


def test_missing_and_foreign(tmp_path: Path) -> None:
    path, model = tmp_path / "file", network()
    refused(lambda: lw.load(path, model), "no file", "posterior.save")
    refused(lambda: lw.load(tmp_path, model), "is a folder")
    origin = str(path), "has another origin than posterior.save(path)", "lw.load(path, model)"
    torch.save(model.state_dict(), path)
    refused(lambda: lw.load(path, model), *origin)
    path.write_text("hello, this is text and no safetensors file")
    refused(lambda: lw.load(path, model), *origin)
    save_file({k: v.clone() for k, v in model.state_dict().items()}, path)
    refused(lambda: lw.load(path, model), *origin)


def test_other_formats(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, parts in (
        (4, ("has format 4, older than the 5", "Fit again")),
        (8, ("format 8, newer", "newer version of lapwing-torch")),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(files, "FORMAT", version)
            files.write_safetensors(saved, {}, {})
        refused(lambda: lw.load(saved, network()), str(saved), *parts)
    for text in ("", "format", '{"format": "two"}', '{"format": true}', '{"format": ' + "[" * 100_000, "[5]", "{}"):
        save_file({"a": torch.ones(1)}, saved, {files.KEY: text})
        refused(lambda: lw.load(saved, network()), str(saved), "damaged or has another origin")


def test_unknown_keys_are_ignored_and_missing_keys_have_defaults(saved: Path) -> None:
    tensors, header = files.read_safetensors(saved)
    tangent = header["tangent"]
    block = tangent["blocks"][0]
    inner = tangent, tangent["plan"], block, block["matrix"], header["covariance"]["extra"], header["likelihood"]
    for part in (header, header["method"], *inner):
        part["of a later version"] = [1, {"x": None}]
    for name in ("tuning", "first_samples", "after_former", "sample_weights"):
        del header["method"][name]
    for name in ("single_sample", "spread", "shared", "unseen"):
        header["tangent"]["plan"].pop(name, None)
    files.write_safetensors(saved, {**tensors, "later/x": torch.ones(2), "covariance/later": torch.ones(2)}, header)
    posterior = lw.load(saved, network())
    assert (posterior.method.name, posterior.method.tuning) == ("KFAC", None)
    assert torch.equal(posterior.predict(X).probs, lw.fit(network(), [(X, Y)], lw.KFAC()).predict(X).probs)


def kron(key: str) -> str:
    return f"covariance/2/{key}"


KEYS = "tangent", "covariance", "likelihood", "given", "samples", "temperature"
PARTS = "covariance/precision", "covariance/0", "prior_mean/"
NO_POSTERIOR = "posterior.safetensors does not hold a posterior … {} … posterior.save(path)"
LIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    **{NO_POSTERIOR.format(key): lambda t, h, key=key: h.pop(key) for key in KEYS},
    **{
        NO_POSTERIOR.format(part): lambda t, h, part=part: [t.pop(n) for n in [*t] if n.startswith(part)]
        for part in PARTS
    },
    "the class 'Future' … not registered … newer version of": lambda t, h: h["covariance"].update({"class": "Future"}),
    "unknown": lambda t, h: h["likelihood"].update(name="unknown"),
    "covariance/2/inputs is missing": lambda t, h: t.pop(kron("inputs")),
    "instead of torch.float32": lambda t, h: t.update({kron("outputs"): t[kron("outputs")].double()}),
    "has shape": lambda t, h: t.update({kron("eigenvalues"): t[kron("eigenvalues")].mT.contiguous()}),
    "NaN or infinite": lambda t, h: t[kron("eigenvalues")].view(-1)[3:4].fill_(torch.nan),
    "prior_mean/0 holds NaN or infinite": lambda t, h: t["prior_mean/0"].fill_(torch.inf),
    "log_likelihood holds NaN": lambda t, h: t["statistics/log_likelihood"].fill_(torch.nan),
    "prior precision is -": lambda t, h: t["covariance/precision"].neg_(),
    "prior precision is 0": lambda t, h: t["covariance/precision"].zero_(),
    "temperature is -1.0": lambda t, h: h.update(temperature=-1.0),
    "logit temperature is 0": lambda t, h: h["likelihood"].update(logit_temperature=0),
    "noise variance is -2": lambda t, h: h["likelihood"].update(noise_variance=-2),
    "KeyError: 'os.system'": lambda t, h: h["covariance"]["extra"]["kinds"].update({"2": "os.system"}),
    "(6, 4)": lambda t, h: h["tangent"]["blocks"][0]["shapes"].reverse(),
}


@pytest.mark.parametrize("words", LIES)
def test_wrong_contents_are_refused(saved: Path, words: str) -> None:
    tensors, header = files.read_safetensors(saved)
    LIES[words](tensors, header)
    files.write_safetensors(saved, tensors, header)  # with the right digest
    refused(lambda: lw.load(saved, network()), words)


def test_nothing_is_saved_that_cannot_be_loaded(tmp_path: Path) -> None:
    posterior = lw.fit(network(), [(X, Y)], lw.Diagonal())
    posterior.covariance.structures["0"].eigenvalues[0] = torch.nan
    refused(lambda: posterior.save(tmp_path / "p"), "covariance/0/eigenvalues", "NaN or infinite", "fit again")
    assert not list(tmp_path.iterdir())


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

    refused(load(entry), "0.weight (6, 4)", "other values", str(saved), "Load the checkpoint of the fit")
    refused(load(swap), "2.weight", "other values", "Load the checkpoint of the fit")
    refused(load(lambda model: network(7)), "0.weight (6, 4)", "has (7, 4)", "same options")
    refused(load(lambda model: nn.Sequential(model[0], model[2])), "2.weight", "no such parameter", "same options")
    refused(load(lambda model: model.append(nn.Linear(3, 3))), "Only Sequential has '3.weight'", "same options")
    refused(load(nn.DataParallel), "0.weight", "no such parameter", "without the wrapper: pass model.module")
    wrapped = nn.DataParallel(network()).eval()
    lw.fit(wrapped, [(X, Y)], lw.Diagonal()).save(saved.with_name("wrapped"))
    bare = lambda: lw.load(saved.with_name("wrapped"), wrapped.module)  # noqa: E731
    refused(bare, "module.0.weight", "no such parameter", "pass torch.nn.DataParallel(model)")
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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("part", ["real", "imag"])
def test_other_complex_weights(tmp_path: Path, part: str) -> None:
    spectral = lambda net, x: net.head(net.inner(torch.complex(x, -x)).abs())  # noqa: E731
    model = Net(spectral, inner=nn.Linear(4, 8, dtype=torch.complex64), head=nn.Linear(8, 3)).eval()
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
    load = partial(lw.load, saved, model)
    refused(lambda: load(likelihood=lw.Gaussian()), "a categorical likelihood, not Gaussian … Leave likelihood= out")
    refused(lambda: load(forward=lambda net, x: net(x)), "made without forward=", "lw.load(path, model)")
    assert lw.load(saved, model, likelihood="categorical").likelihood == lw.Categorical()
    lw.fit(model, [(X, Y)], forward=lambda net, x: 2 * net(x)).save(saved)
    refused(lambda: lw.load(saved, model), "made with forward=", "forward=forward")


def test_training_mode_at_load(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).eval()
    lw.fit(model, [(X, Y)]).save(tmp_path / "p")
    refused(lambda: lw.load(tmp_path / "p", model.train()), "1 (Dropout, p=0.5)", "model.eval()")


def test_a_file_does_not_depend_on_the_order_of_its_tensors(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(2), "a": torch.zeros(3), "c": torch.ones(2, dtype=torch.float64)}
    files.write_safetensors(tmp_path / "one", tensors, {})
    files.write_safetensors(tmp_path / "other", dict(reversed(tensors.items())), {})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_every_option_of_a_registered_likelihood_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Scaled(lw.Gaussian):
        name: ClassVar[str] = "scaled"
        powers: Any = ()

    monkeypatch.setitem(REGISTERED, "scaled", Scaled)
    model = nn.Linear(4, 1).eval()
    lw.fit(model, [(X, X[:, :1])], lw.Diagonal(), likelihood=Scaled(powers=(1.0, 2.0))).save(tmp_path / "p")
    assert lw.load(tmp_path / "p", model).likelihood.powers == (1.0, 2.0)
    posterior = lw.fit(model, [(X, X[:, :1])], lw.Diagonal(), likelihood=Scaled(powers={3}))
    refused(lambda: posterior.save(tmp_path / "p"), "set is not JSON serializable")


@pytest.mark.parametrize("name", fixtures.CASES)
def test_files_of_every_version_since_format_5_are_read_and_written(name: str, tmp_path: Path) -> None:
    model, x, expected = fixtures.stored(name)
    posterior = lw.load(fixtures.FOLDER / f"{name}.safetensors", model)
    posterior.save(tmp_path / "again")
    for one in (posterior, lw.load(tmp_path / "again", model)):
        assert one.method == posterior.method
        for key, value in fixtures.answers(one, x).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)
