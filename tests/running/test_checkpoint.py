"""Checkpoints: a fit that was interrupted goes on, to the same posterior bit by bit."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.running import checkpoint
from lapwing.running.fingerprints import DEEP, differences, fingerprint_of
from lapwing.tuning import Tuning
from tests.posterior.test_lifecycle import EVERY, METHODS, data
from tests.refused import refused

STEPS = [
    lw.VaLLA(3), lw.VaLLA(3, lw.NaturalGradient(steps=6, rate=0.3)), lw.VaLLA(3, lw.VariationalBound(steps=6)),
    lw.MeanField(steps=6), lw.SubsetOfData(4), lw.SubsetOfData(6, "balanced"),
    lw.TemperatureScaling(),
    lw.SampledLLA(2, lw.ConjugateGradients(iterations=2, tolerance=0.5), em_steps=2, linearised_mode=True),
    lw.SampledLLA(2, lw.ConjugateGradients(4, preconditioner=lw.Diagonal()), em_steps=1, prior="g", per_block=True),
    lw.ELLA(rank=3, rows=5, sampling="balanced"), lw.KFAC(fisher="sampled"),
]  # fmt: skip


class Killed(BaseException):
    """Stands for a signal."""


class Loader:
    """A list of batches that raises after so many."""

    def __init__(self, every: list[Any], left: int = 10**9) -> None:
        self.every, self.left = every, left

    def __len__(self) -> int:
        return len(self.every)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.every:
            if not self.left:
                raise Killed
            self.left -= 1
            yield batch


def pieces(size: int = 3) -> tuple[nn.Module, list[Any]]:
    model, x, y, _ = data("mlp")
    return model, list(zip(x.split(size), y.split(size), strict=True))


def bits(posterior: lw.Posterior) -> dict[str, Any]:
    """All that a posterior says."""
    tensors = {**posterior.covariance.tensors(), **posterior.statistics, **posterior.tangent.state()}
    tensors |= {f"history/{name}": value for name, value in posterior.history.items()}
    tensors |= {"prior": posterior.prior.precision}
    numbers = {name: getattr(posterior, name) for name in ("samples", "data_factor", "noise_variance", "method")}
    return {**tensors, **numbers, "temperature": posterior.logit_temperature, "at": str(posterior.covariance.extra())}


def check_same(one: lw.Posterior, other: lw.Posterior) -> None:
    first, second = bits(one), bits(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        if isinstance(value, Tensor):
            assert torch.equal(value.nan_to_num(), second[name].nan_to_num()), name
        else:
            assert value == second[name], name


def interrupted(model: nn.Module, batches: list[Any], path: Path, *after: int, **options: Any) -> lw.Posterior:
    """Fits until it is killed after so many batches, again with the same path, ..., and in the end to the end."""
    for count in after:
        with suppress(Killed):
            return lw.fit(model, Loader(batches, count), checkpoint=path, **{"every": 1, **options})
    return lw.fit(model, Loader(batches), checkpoint=path, **{"every": 1, **options})


OFTEN = [(count, count) for count in range(3, 26, 3)]


@pytest.mark.quick(3)
@pytest.mark.parametrize("times", [[(5, 8, 12)], pytest.param(OFTEN, marks=pytest.mark.slow)], ids=["few", "often"])
@pytest.mark.parametrize("method", [*METHODS, *STEPS], ids=str)
def test_every_method_goes_on_to_the_same_posterior(method: Any, times: Any, tmp_path: Path) -> None:
    model, every = pieces()
    options = {"method": method, "params": EVERY}
    expected = lw.fit(model, every, **options)
    for after in times:
        check_same(interrupted(model, every, tmp_path / "fit", *after, **options), expected)
        check_same(interrupted(model, every, tmp_path / "fit", *after[:1], every=2, **options), expected)
        assert not list(tmp_path.iterdir())


HELD_OUT = data("mlp", 8)[3]
TUNINGS: dict[str, dict[str, Any]] = {
    "the default": {}, "held-out data of the default": {"validation": HELD_OUT}, "none": {"tune": None},
    "evidence": {"tune": lw.Evidence(per_layer=True)}, "held-out data": {"tune": lw.Validation(HELD_OUT)},
    "early stopping": {"method": lw.EKFAC(), "tune": lw.EarlyStopping(HELD_OUT, prefixes=2)},
    "early stopping of a subspace": {"method": lw.ELLA(3, rows=5), "tune": lw.EarlyStopping(HELD_OUT, prefixes=3)},
    "a part of the data": {"method": lw.KFAC(), "data_size": 20, "weight_decay": 0.1, "temperature": 0.5},
}  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.parametrize("options", TUNINGS.values(), ids=TUNINGS.keys())
def test_every_tuning_goes_on_to_the_same_posterior(options: dict[str, Any], tmp_path: Path) -> None:
    model, every = pieces()
    check_same(interrupted(model, every, tmp_path / "fit", 5, 8, 10, 12, **options), lw.fit(model, every, **options))


@pytest.mark.parametrize("method", [lw.Diagonal(), lw.SampledLLA(2, em_steps=0)], ids=str)
def test_many_outputs_are_sampled_by_the_same_generator(method: lw.Method, tmp_path: Path) -> None:
    x, y, model = torch.randn(6, 1), torch.arange(6), nn.Linear(1, 1001).eval()
    every = list(zip(x.split(2), y.split(2), strict=True))
    options = {"method": method, "prior_precision": 1.0, "tune": None}
    check_same(interrupted(model, every, tmp_path / "fit", 5, 9, **options), lw.fit(model, every, **options))


def test_a_former_posterior_is_continued(tmp_path: Path) -> None:
    model, every = pieces()
    prior = lw.fit(model, every, lw.KFAC())
    expected = lw.fit(model, every, prior=prior)
    check_same(interrupted(model, every, tmp_path / "fit", 4, 5, prior=prior), expected)


def test_the_file_is_written_after_passes_and_between_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, every = pieces()
    written, write = list[int](), checkpoint.write_safetensors

    def noted(*arguments: Any) -> None:
        written.append(1)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "write_safetensors", noted)
    lw.fit(model, every, lw.EKFAC(), checkpoint=tmp_path / "fit")
    assert len(written) == 2  # after both passes
    lw.fit(model, every, lw.EKFAC(), checkpoint=tmp_path / "fit", every=2)
    assert len(written) == 2 + 4  # after two batches of each pass too
    monkeypatch.setattr(checkpoint, "SECONDS", 0.0)
    lw.fit(model, every, lw.EKFAC(), checkpoint=tmp_path / "fit")
    assert len(written) == 2 + 4 + 8


def test_solves_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of conjugate gradients would need a state for each iteration."""
    model, every = pieces()
    passes: list[int] = []
    noted = lambda path, tensors, header: passes.append(len(header["checkpoint"]["passes"]))  # noqa: E731
    monkeypatch.setattr(checkpoint, "write_safetensors", noted)
    lw.fit(model, every, lw.SampledLLA(2, prior="g"), checkpoint=tmp_path / "fit")
    assert passes == [1]  # the features


def test_an_interruption_leaves_the_latest_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, every = pieces()
    with pytest.raises(Killed):
        lw.fit(model, Loader(every, 5), lw.KFAC(), checkpoint=tmp_path / "fit")
    assert not list(tmp_path.iterdir())  # never after an exception
    with pytest.raises(Killed):
        lw.fit(model, Loader(every, 8), lw.EKFAC(), checkpoint=tmp_path / "fit")
    assert [path.name for path in tmp_path.iterdir()] == ["fit"]
    assert f"Call lw.fit again with checkpoint='{tmp_path / 'fit'}' to continue." in caplog.text
    with caplog.at_level(logging.INFO, "lapwing"):
        lw.fit(model, every, lw.EKFAC(), checkpoint=tmp_path / "fit")
    assert "after 3 batches of 'Kronecker factors'" in caplog.text


class Unwilling(Tuning):
    """Cannot tune."""

    def tune(self, posterior: lw.Posterior, training: Any) -> lw.Posterior:
        raise KeyboardInterrupt


def test_the_sums_are_kept_when_the_tuning_fails(tmp_path: Path) -> None:
    model, every = pieces()
    with pytest.raises(KeyboardInterrupt):
        lw.fit(model, every, lw.EKFAC(), tune=Unwilling(), checkpoint=tmp_path / "fit")
    loader = Loader(every, 3)  # the first batch alone
    check_same(
        lw.fit(model, loader, lw.EKFAC(), tune=lw.Evidence(), checkpoint=tmp_path / "fit"),
        lw.fit(model, every, lw.EKFAC(), tune=lw.Evidence()),
    )


SEED, ROOT = 10**9, str(Path(lw.__file__).parent.parent)


def begun(path: Path, **options: Any) -> tuple[nn.Module, list[Any]]:
    """Leaves a checkpoint of a fit that has not ended."""
    model, every = pieces()
    with suppress(Killed):
        lw.fit(model, Loader(every, 5), **{"method": lw.KFAC(), "seed": SEED, **options}, checkpoint=path, every=1)
    assert path.exists()
    return model, every


def scaled(factor: Any) -> Callable[..., Tensor]:
    return lambda model, x: model(x * factor)


def moved(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-3
    return model


OTHERS: list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = [
    ("method", lambda call: {"method": lw.KFAC("reduce")}), ("seed", lambda call: {"seed": SEED + 1}),
    ("data_size", lambda call: {"data_size": 100}), ("temperature", lambda call: {"temperature": 2.0}),
    ("prior_precision", lambda call: {"prior_precision": 2.0}), ("memory", lambda call: {"memory": 2**28}),
    ("the parameters", lambda call: {"params": lw.matching("0.*")}),
    ("tune", lambda call: {"tune": lw.EarlyStopping(HELD_OUT)}),
    ("likelihood", lambda call: {"likelihood": lw.Categorical(label_smoothing=0.1)}),
    ("forward", lambda call: {"forward": scaled(3.0)}), ("forward", lambda call: {"forward": None}),
    ("the first batch", lambda call: {"loader": call["loader"][1:]}),
    ("the network", lambda call: {"model": moved(call["model"])}),
]  # fmt: skip
"""What differs, and what is given in place of the arguments of the first fit."""


@pytest.mark.parametrize(("what", "change"), OTHERS, ids=[what for what, _ in OTHERS])
def test_a_checkpoint_of_another_fit_is_refused(what: str, change: Any, tmp_path: Path) -> None:
    model, every = begun(tmp_path / "fit", forward=scaled(1.0))
    before = (tmp_path / "fit").read_bytes()
    call = {"model": model, "loader": every, "method": lw.KFAC(), "seed": SEED, "forward": scaled(1.0)}
    words = rf"is of another fit, which differs in (.*, )?{what}(, .*)?\. Pass what was"
    with pytest.raises(lw.LapwingError, match=words):
        lw.fit(**call | change(call), checkpoint=tmp_path / "fit")
    assert (tmp_path / "fit").read_bytes() == before
    if what == "forward":  # the same function continues the fit
        check_same(lw.fit(**call, checkpoint=tmp_path / "fit"), lw.fit(**call))


def test_a_checkpoint_of_another_number_of_samples_is_refused(tmp_path: Path) -> None:
    model, every = pieces()
    options: dict[str, Any] = {"method": lw.KFAC(), "checkpoint": tmp_path / "fit"}
    with pytest.raises(KeyboardInterrupt):
        lw.fit(model, every, tune=Unwilling(), **options)
    fewer = DataLoader(TensorDataset(*map(torch.cat, zip(*every[:2], strict=True))), 3)
    for other in (every[:-1], [*every, every[0]], fewer):
        refused(partial(lw.fit, model, other, **options), "another fit, which differs in the number of samples. Pass")
    check_same(lw.fit(model, Loader(every), **options), lw.fit(model, every, lw.KFAC()))  # of unknown size


class Step:
    """A callable object with a state, which knows itself."""

    def __init__(self, factor: float) -> None:
        self.factor, self.myself, self.names = factor, self, {"a", "b"}

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return model(x * self.factor)

    def step(self, model: nn.Module, x: Tensor) -> Tensor:
        return model(x / self.factor)


def counted(depth: int) -> Callable[..., Tensor]:
    def again(model: nn.Module, x: Tensor, left: int = depth) -> Tensor:
        return again(model, x, left - 1) if left else model(x)

    return again


def through(value: float) -> Callable[..., Tensor]:
    layer = nn.Linear(1, 1)
    nn.init.constant_(layer.weight, value)
    nn.init.zeros_(layer.bias)
    return lambda model, x: model(layer(x))


SAME_NAME: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "constant": (lambda: lambda m, x: m(x * 2), lambda: lambda m, x: m(x * 3)),
    "operation": (lambda: lambda m, x: m(x + x), lambda: lambda m, x: m(x * x)),
    "name": (lambda: lambda m, x: m(x.sin()), lambda: lambda m, x: m(x.cos())),
    "default": (lambda: lambda m, x, k=2: m(x * k), lambda: lambda m, x, k=3: m(x * k)),
    "keyword": (lambda: lambda m, x, *, k=2: m(x * k), lambda: lambda m, x, *, k=3: m(x * k)),
    "set": (lambda: lambda m, x: m(x.ndim in {"a", "b"}), lambda: lambda m, x: m(x.ndim in {"a", "c"})),
    "bytes": (lambda: lambda m, x: m(x, b"a"), lambda: lambda m, x: m(x, b"b")),
    "inner function": (lambda: lambda m, x: m((lambda z: z + 1)(x)), lambda: lambda m, x: m((lambda z: z + 2)(x))),
    "closure": (lambda: scaled(2.0), lambda: scaled(3.0)),
    "array in a closure": (lambda: scaled(np.float32([1, 2])), lambda: scaled(np.float32([1, 3]))),
    "tensor": (lambda: scaled(torch.ones(2)), lambda: scaled(torch.zeros(2))),
    "function in a closure": (lambda: scaled(scaled(2.0)), lambda: scaled(scaled(3.0))),
    "itself": (lambda: counted(2), lambda: counted(3)),
    "module": (lambda: through(1.0), lambda: through(2.0)),
    "partial": (lambda: partial(scaled, 2.0), lambda: partial(scaled, 3.0)),
    "function of a partial": (lambda: partial(scaled(2.0), x=1), lambda: partial(scaled(3.0), x=1)),
    "object": (lambda: Step(2.0), lambda: Step(3.0)),
    "method": (lambda: Step(2.0).step, lambda: Step(3.0).step),
}
"""Kind of difference -> makers of two functions that have one name and return different things."""


@pytest.mark.parametrize("kind", SAME_NAME)
def test_fingerprints_of_functions(kind: str) -> None:
    make, other = SAME_NAME[kind]
    one, again = json.loads(json.dumps(fingerprint_of(make()))), fingerprint_of(make())
    assert not differences({"f": one}, {"f": again})
    assert differences({"f": one}, {"f": fingerprint_of(other())})
    assert " at 0x" not in str(one)
    assert fingerprint_of(make(), functions=False) == fingerprint_of(other(), functions=False)


def test_fingerprints_of_functions_with_empty_cells_and_many_closures() -> None:
    """They are short, however much a closure holds."""

    def unfinished() -> Any:
        return later

    found = fingerprint_of(unfinished)
    nested = scaled(list(range(100_000)))
    for _ in range(2 * DEEP):
        nested = scaled(nested)
    assert len(str(fingerprint_of(nested))) + len(str(found)) < 1000
    later = 1
    assert fingerprint_of(unfinished) != found


@pytest.mark.slow
def test_fingerprints_of_functions_are_the_same_in_another_process() -> None:
    code = (
        "import json; from tests.running.test_checkpoint import SAME_NAME, fingerprint_of\n"
        "print(json.dumps([fingerprint_of(make()) for make, _ in SAME_NAME.values()]))"
    )
    texts = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": ROOT},
                       capture_output=True, text=True, check=True).stdout for seed in "12"
    ]  # fmt: skip
    assert json.loads(texts[0]) == json.loads(texts[1])


@pytest.mark.parametrize("left", [5, 10**9])
def test_a_loader_with_fewer_samples_than_the_checkpoint_has_is_refused(left: int, tmp_path: Path) -> None:
    """Else KFAC of all samples would pass for that of a few, amid the pass and after it."""
    model, every = pieces(size=2)

    class Ending(lw.Validation):
        def tune(self, *_: Any) -> Any:
            raise Killed

    options = {"method": lw.KFAC(), "prior_precision": 1.0, "checkpoint": tmp_path / "fit", "every": 1}
    with pytest.raises(Killed):
        lw.fit(model, Loader(every, left), **options, tune=Ending(HELD_OUT))
    x, y = (torch.cat(parts) for parts in zip(*every[:1], strict=True))
    for loader in (every[:1], DataLoader(TensorDataset(x, y), 2)):
        again = partial(lw.fit, model, loader, **options, tune=lw.Validation(HELD_OUT))
        refused(again, "The loader showed … at first and shows 2 samples now. Every pass")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that root cannot write to")
def test_a_folder_that_cannot_be_written_to_is_refused_before_the_fit() -> None:
    model, every = pieces()
    refused(lambda: lw.fit(model, Loader(every), checkpoint="/proc/fit"), "The file /proc/fit cannot be written: ")


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    model, every = begun(tmp_path / "fit")
    whole = (tmp_path / "fit").read_bytes()
    posterior = lw.fit(model, every, lw.KFAC())
    posterior.save(tmp_path / "posterior")
    damaged = [whole[:-1], whole[: len(whole) // 2], b"", b"text", (tmp_path / "posterior").read_bytes()]
    damaged.append(whole.replace(b"Kronecker", b"Cronecker"))
    for content in damaged:
        (tmp_path / "fit").write_bytes(content)
        again = partial(lw.fit, model, every, lw.KFAC(), checkpoint=tmp_path / "fit")
        refused(again, "is not a checkpoint of this version, or is damaged. Pass another path")
    (tmp_path / "fit").write_bytes(whole)
    refused(lambda: lw.load(tmp_path / "fit", model), "is a checkpoint of a fit that has not ended")


def test_a_loader_that_shuffles_is_refused(tmp_path: Path) -> None:
    model, x, y, _ = data("mlp", 8)
    loader = DataLoader(TensorDataset(x, y), 4, shuffle=True, generator=torch.Generator().manual_seed(0))
    again = partial(lw.fit, model, loader, checkpoint=tmp_path / "fit")
    refused(again, "Pass shuffle=False; the fit does not depend on the order")
    assert not list(tmp_path.iterdir())


def test_bad_arguments(tmp_path: Path) -> None:
    model, every = pieces()
    for options, words in (
        ({"checkpoint": 3}, "lw.fit(checkpoint=3) is not valid: checkpoint must be a path"),
        ({"checkpoint": tmp_path / "no" / "fit"}, "Create its folder"),
        ({"checkpoint": tmp_path}, "is a folder. Write checkpoint=' … fit.safetensors'"),
        ({"checkpoint": ""}, "checkpoint='' names no file. Write checkpoint='fit.safetensors'"),
        ({"checkpoint": tmp_path / "fit", "every": True}, "every=True"),
        ({"checkpoint": tmp_path / "fit", "every": 0}, "every=0"),
        ({"every": 3}, "every=3 needs a checkpoint"),
    ):
        refused(partial(lw.fit, model, every, **options), words)
    lw.fit(model, every, checkpoint=tmp_path / "fit", every=np.int64(1))


def test_a_disk_without_room_does_not_end_the_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, every = pieces()

    def full(*_: Any) -> None:
        raise lw.LapwingError("No space is left.")

    expected = lw.fit(model, every, lw.EKFAC())
    monkeypatch.setattr(checkpoint, "write_safetensors", full)
    check_same(lw.fit(model, every, lw.EKFAC(), checkpoint=tmp_path / "fit", every=1), expected)
    assert "The checkpoint was not written, and the fit continues. No space is left." in caplog.text


def test_a_checkpoint_that_cannot_be_removed_does_not_end_the_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, every = begun(tmp_path / "fit")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("Permission denied")

    expected = lw.fit(model, every, lw.KFAC(), seed=SEED)
    monkeypatch.setattr(Path, "unlink", refuse)
    check_same(lw.fit(model, every, lw.KFAC(), seed=SEED, checkpoint=tmp_path / "fit"), expected)
    assert "The fit has ended, and its checkpoint cannot be removed: Permission denied. Delete it." in caplog.text
