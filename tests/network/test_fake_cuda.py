"""Fits and predictions on a pretended device: waits of the host, memory that runs out, and a device without float64.

That every method and network keeps its tensors on the device is tested by `tests/methods/test_methods.py` with
LAPWING_DEVICE=cuda (`make test-gpu`) or LAPWING_DEVICE=pretended.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import linalg
from lapwing.tangent import Record, Tangent
from lapwing.tangent.retry import memory_errors, retried
from tests.pretended_device import Device, OnDevice
from tests.quick import others_slow
from tests.zoo_modules import Net

pytestmark = [
    pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN"),
    pytest.mark.filterwarnings("ignore:at..frobenius_norm is deprecated"),
]

EVERY = lw.matching("*")


def network(layers: int = 1, outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        hidden = [part for i in range(layers) for part in (nn.Linear(6 if i else 4, 6), nn.Tanh())]
        return nn.Sequential(*hidden, nn.Linear(6, outputs)).eval()


def moments(posterior: lw.Posterior, x: Any) -> list[Tensor]:
    latent = posterior.latent(x)
    return [latent.mean, latent.variance, latent.covariance]


# --- the pretended device finds what it is for ------------------------------------------------------------------------


def test_tensors_of_two_places_do_not_meet() -> None:
    with Device("cuda") as device:
        x = device.put(torch.ones(2))
        assert (x + torch.tensor(1.0)).device == x.device == torch.zeros(2, device="cuda").device
        with pytest.raises(RuntimeError, match="of cuda and of the CPU"):
            x + torch.ones(2)
        with pytest.raises(RuntimeError, match="of cuda and of the CPU"):
            torch.stack([x.sum(), torch.tensor(1.0)])


@pytest.mark.parametrize(
    "read", [Tensor.item, bool, float, Tensor.cpu, lambda x: x.tolist(), lambda x: x.nonzero(), lambda x: x[x > 0]]
)
def test_reads_are_counted(read: Any) -> None:
    with Device("cuda") as device:
        x = device.put(torch.ones(1))
        assert (x + 1).sum().device.type == "cuda"
        assert not device.reads
        read(x)
    assert device.reads.total() == 1


Y = torch.arange(9) % 3
# --- the host waits for the device a fixed number of times a batch ----------------------------------------------------

READS = {"KFAC": 5, "Diagonal": 5, "EKFAC": 9, "ELLA": 10, "last": 5}
"""Inputs, outputs (twice where there are several chunks), which labels count, and their range; EKFAC and ELLA twice."""


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tangent, "chunk_length", lambda *_, **__: 2)


def reads_of_fit(kind: str, layers: int, samples: int, count: int) -> int:
    methods = {"Diagonal": lw.Diagonal(), "EKFAC": lw.EKFAC(), "ELLA": lw.ELLA(rank=2, rows=4)}
    params = lw.last_layer if kind == "last" else EVERY
    x, y = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0)), torch.arange(samples) % 3
    with Device("cuda") as device:
        model, loader = device.module(network(layers)), device.put([(x, y)] * count)
        lw.fit(model, loader, methods.get(kind, lw.KFAC()), params=params, prior_precision=1.0, tune=None)
    return device.reads.total()


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("kind", others_slow(READS, ["KFAC"]))
def test_reads_of_a_batch_do_not_grow_with_chunks_or_layers(kind: str) -> None:
    for layers, samples in ((1, 4), (3, 8)):
        more = reads_of_fit(kind, layers, samples, 3) - reads_of_fit(kind, layers, samples, 1)
        assert more <= 2 * READS[kind], (layers, samples)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(
    "method", others_slow([lw.KFAC(), lw.Diagonal(), lw.ELLA(rank=2, rows=4)], [lw.KFAC()]), ids=repr
)
def test_reads_of_a_prediction_do_not_grow_with_chunks_or_layers(method: lw.Method) -> None:
    for layers in (1, 3):
        with Device("cuda") as device:
            loader = device.put([(torch.randn(6, 4), torch.arange(6) % 3)])
            posterior = lw.fit(device.module(network(layers)), loader, method, params=EVERY, prior_precision=1.0)
            for samples in (4, 12):
                x = device.put(torch.randn(samples, 4))
                posterior.latent(x)  # its shapes are checked once
                device.reads.clear()
                posterior.predict(x)
                assert device.reads.total() <= 5, (layers, samples, device.reads)


def test_reads_of_a_check_of_layers_do_not_grow_with_layers() -> None:
    """The layers of a network that asks for positions by values are checked at every batch."""
    totals = []
    for layers in (1, 4):
        by_values = Net(lambda net, x: net.body(x.gather(1, x.argsort(1))), body=network(layers))
        with Device("cuda") as device:
            x = device.put(torch.randn(6, 4))
            tangent = Tangent.survey(device.module(by_values), x)
            device.reads.clear()
            tangent.record(x)
        totals.append(device.reads.total())
    assert totals[0] == totals[1]


@pytest.mark.usefixtures("short_chunks")
def test_outputs_of_a_later_chunk_that_are_not_finite() -> None:
    class Broken(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x[:, :1] > 9, torch.nan, super().forward(x))

    model, x = Broken(*network()).eval(), torch.randn(8, 4)
    posterior = lw.fit(model, [(x, torch.arange(8) % 3)], lw.KFAC(), prior_precision=1.0)
    x[5] = 10.0
    with pytest.raises(lw.LapwingError, match=r"1 of 8 samples \(first: sample 5\)"):
        posterior.predict(x)


# --- a device that fails ----------------------------------------------------------------------------------------------


def test_eigh_goes_on_on_the_cpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    x, y, eigh = torch.randn(9, 4), torch.arange(9) % 3, torch.linalg.eigh
    expected = moments(lw.fit(network(), [(x, y)], lw.KFAC(), prior_precision=1.0), x)

    def failing(matrix: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(matrix, OnDevice):
            raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")
        return eigh(matrix, *args, **kwargs)

    with Device("cuda") as device:
        monkeypatch.setattr(torch.linalg, "eigh", failing)
        posterior = lw.fit(device.module(network()), device.put([(x, y)]), lw.KFAC(), prior_precision=1.0)
        found = moments(posterior, device.put(x))
        values, vectors = linalg.symmetric_eigen(device.put(torch.eye(3)))
        assert values.device.type == vectors.device.type == "cuda"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.inner, other)
    assert "failed on cuda:0, and continues on the CPU" in caplog.text


NO_MEMORY = {
    "GPU": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 8 GiB"
    ),
    "CPU": RuntimeError(
        "[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
    ),
    "Python": MemoryError(),
}


@pytest.fixture(params=others_slow(["GPU", "CPU"], ["GPU"]))
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Lets the second block of a record with more samples than fit run out of memory, after the first block's sums."""
    fitting, take = {"samples": 2**30}, Record.__getitem__

    def limited(record: Record, name: str) -> Any:
        if record.samples > fitting["samples"] and name != record.tangent.blocks[0].name:
            raise NO_MEMORY[request.param]
        return take(record, name)

    monkeypatch.setattr(Record, "__getitem__", limited)
    return fitting


@pytest.mark.quick(3)
@pytest.mark.parametrize("drawn", [False, True], ids=["exact", "drawn"])
@pytest.mark.parametrize(
    "method", [lw.KFAC(), lw.Diagonal(), lw.EKFAC(), lw.ELLA(rank=3, rows=6), lw.VaLLA(3)], ids=repr
)
def test_fits_begin_again_with_shorter_chunks(
    method: lw.Method, drawn: bool, memory: dict[str, int], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    if drawn:
        monkeypatch.setattr("lapwing.methods.problem.EXACT_FISHER_OUTPUTS", 1)
    model, x, y = network(2), torch.randn(23, 4), torch.arange(23) % 3
    batches = [(x[:4], y[:4]), (x[4:13], y[4:13]), (x[13:], y[13:])]  # the first batch fits
    with monkeypatch.context() as patch:
        patch.setattr(Tangent, "chunk_length", lambda *_, **__: 4)
        expected = lw.fit(model, batches, method, params=EVERY, prior_precision=1.0)
    assert not caplog.records
    memory["samples"] = 4
    found = lw.fit(model, batches, method, params=EVERY, prior_precision=1.0)
    for name, value in found.covariance.tensors().items():
        assert torch.equal(value, expected.covariance.tensors()[name]), name
    for name, value in found.statistics.items():  # those of ELLA's first pass, which fits, are of longer chunks
        torch.testing.assert_close(value, expected.statistics[name])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "ran out of memory with 9 samples of Sequential at once. lapwing begins again with 4." in lines[0]


def test_predictions_begin_again_with_shorter_chunks(memory: dict[str, int]) -> None:
    posterior = lw.fit(network(2), [(torch.randn(9, 4), torch.arange(9) % 3)], lw.KFAC(), params=EVERY)
    x = torch.randn(11, 4)
    expected = [*moments(posterior, x), posterior.latent(x, joint=True).covariance]
    memory["samples"] = 3
    for one, other in zip([*moments(posterior, x), posterior.latent(x, joint=True).covariance], expected, strict=True):
        torch.testing.assert_close(one, other)


def test_memory_that_does_not_suffice_for_one_sample(memory: dict[str, int]) -> None:
    x, y = torch.randn(9, 4), torch.arange(9) % 3
    posterior = lw.fit(network(2), [(x, y)], lw.KFAC(), params=EVERY)
    memory["samples"] = 0
    for step, call in (
        ("fit", lambda: lw.fit(network(2), [(x, y)], lw.KFAC(), params=EVERY)),
        ("prediction", lambda: posterior.predict(x)),
        ("prediction", lambda: posterior.latent(x)),
        ("update", lambda: posterior.update([(x, y)])),
    ):
        with pytest.raises(lw.LapwingError, match=f"The {step} ran out of memory: a tensor"):
            call()


def test_the_default_budget_is_an_eighth_of_a_large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 4)
    with Device("cuda") as device:
        model = device.module(network())
        for total, budget in ((2**30, 2**30), (80 * 2**30, 10 * 2**30)):
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, total=total: (total // 2, total))
            assert Tangent.survey(model, x).memory == budget
        assert Tangent.survey(model, x, memory=2**28).memory == 2**28


def test_memory_that_no_chunk_takes() -> None:
    tangent = Tangent.survey(network(), torch.randn(4, 4))

    def compute() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        retried(tangent, compute)

    def record_and_compute() -> None:
        tangent.record(torch.randn(9, 4))  # takes all at once, whatever the limit
        compute()

    with memory_errors("The fit", "Wait."):
        with pytest.raises(torch.OutOfMemoryError):
            retried(tangent, record_and_compute)
        assert tangent.chunk_length() > 9  # other inputs are cut as before


def test_a_fit_whose_memory_no_chunk_takes() -> None:
    wide = nn.Linear(2000, 2500).eval()  # whose dense covariance is longer than addresses of 47 bits are
    with pytest.raises(
        lw.LapwingError, match=r"a tensor of \d+ bytes did not fit .* smaller memory=.* lw\.plan"
    ) as found:
        lw.fit(wide, [(torch.randn(2, 2000), torch.arange(2))], lw.Full("primal"), memory=2**60)
    assert "DefaultCPUAllocator" in str(found.value.__cause__)


@pytest.mark.parametrize(
    ("kind", "words"), [("GPU", "of 3.00 GiB did not fit into the GPU"), ("Python", "a tensor did not fit into the")]
)
def test_memory_errors_say_what_did_not_fit(kind: str, words: str) -> None:
    with pytest.raises(lw.LapwingError, match=words), memory_errors("The fit", "Pass a smaller memory=..."):
        raise NO_MEMORY[kind]
    with pytest.raises(RuntimeError, match="^another$"), memory_errors("The fit", "Pass a smaller memory=..."):
        raise RuntimeError("another")


# --- a device without float64 -----------------------------------------------------------------------------------------


def test_float64_is_refused_on_mps() -> None:
    with Device("mps") as device:
        assert linalg.doubled(device.put(torch.ones(2))).device.type == "cpu"
        with pytest.raises(TypeError, match="float64"):
            device.put(torch.ones(2)).double()


WITHOUT_DOUBLE: dict[str, lw.Method | None] = {
    "dense": lw.KFAC(uncovered="dense"), "EKFAC": lw.EKFAC(), "Diagonal": lw.Diagonal(), "default": None,
    "ELLA": lw.ELLA(3, rows=6), "MeanField": lw.MeanField(steps=4), "SubsetOfWeights": lw.SubsetOfWeights(9),
    "TemperatureScaling": lw.TemperatureScaling(), "Full": lw.Full(), "VaLLA": lw.VaLLA(4),
    "OptimalSubspace": lw.OptimalSubspace(3), "NaturalGradient": lw.VaLLA(4, lw.NaturalGradient(steps=2)),
    "VariationalBound": lw.VaLLA(4, lw.VariationalBound(steps=3)),
    "AlphaDivergence": lw.VaLLA(4, lw.AlphaDivergence(steps=3)), "SampledLLA": lw.SampledLLA(3),
    "preconditioned": lw.SampledLLA(2, lw.ConjugateGradients(4, 0.5, lw.KFAC()), em_steps=1, per_block=True),
    "g-prior": lw.SampledLLA(2, lw.ConjugateGradients(4, 0.5), em_steps=1, prior="g", linearised_mode=True),
}  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "kind",
    others_slow(
        ["classes", "regression", "weights", *WITHOUT_DOUBLE],
        ["dense", "default", "ELLA", "Full", "MeanField", "TemperatureScaling", "VariationalBound"],
    ),
)
def test_fits_on_a_device_without_float64(kind: str) -> None:
    x, y = torch.randn(9, 4), torch.randn(9, 1) if kind in ("regression", "default") else Y
    batch = (x, y, torch.rand(9)) if kind == "weights" else (x, y)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, y.shape[1] if y is not Y else 3))
    method, options = WITHOUT_DOUBLE.get(kind, lw.KFAC()), {"sample_weights": kind == "weights"}
    expected = lw.fit(model.eval(), [batch], lw.KFAC() if method is None else method, **options)
    with Device("mps") as device:
        there = device.module(model)
        posterior = lw.fit(there, device.put([batch]), method, **options)
        prediction = posterior.predict(device.put(x))
        assert prediction.log_prob(device.put(y)).device.type == "mps"
        found = moments(posterior, device.put(x))
        assert all(draws.device.type == "mps" for draws in posterior.sample(2).values())
    assert posterior.prior.precision.device.type == "cpu"
    for one, other in zip(found, moments(expected, x), strict=True):
        torch.testing.assert_close(one.inner, other, rtol=1e-3, atol=1e-4)
