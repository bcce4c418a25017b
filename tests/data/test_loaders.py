"""What a loader shows: how much of it is read, how often, and whether that is all of its data set."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    get_worker_info,
)

import lapwing as lw
from lapwing.data.data import Data, warn_of_unseen
from tests.pretended_device import Device
from tests.refilling import Refilling
from tests.refused import refused

X, Y, REAL = torch.randn(20, 4), torch.arange(20) % 3, torch.randn(20, 1)
DATA = TensorDataset(X, Y)
CUDA = Device("cuda")


def network(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).eval()


# --- a stream without end --------------------------------------------------------------------------------------------
class Endless:
    """Batches without end, of which a test allows `most`."""

    def __init__(self, y: Tensor, most: int) -> None:
        self.y, self.left = y, most

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in itertools.count():
            self.left -= 1
            assert self.left >= 0, "more of the stream was read than needed"
            yield X[i % 4 :: 4], self.y[i % 4 :: 4]


STEPS = [
    lw.MeanField(steps=3),
    lw.VaLLA(lw.InducingPoints(X[:3]), lw.NaturalGradient(steps=3)),
    lw.VaLLA(lw.InducingPoints(X[:3]), lw.AlphaDivergence(steps=3)),
]


@pytest.mark.parametrize("method", STEPS, ids=lambda method: type(getattr(method, "fit", method)).__name__)
@pytest.mark.parametrize("real", [False, True])
def test_a_few_steps_on_a_stream_without_end(method: lw.Method, real: bool) -> None:
    stream = Endless(REAL if real else Y, 40)
    likelihood = lw.Gaussian(0.5) if real else None
    posterior = lw.fit(
        network(1 if real else 3), stream, method, data_size=1000, prior_precision=1.0, likelihood=likelihood
    )
    assert stream.left >= 30  # one batch to begin with, three steps, and for mean field three more at the new mean
    assert posterior.samples == 15
    assert posterior.samples * posterior.data_factor == pytest.approx(1000)


@pytest.mark.parametrize("real", [False, True])
def test_tuning_on_a_stream_without_end_looks_at_some_hundred_samples(real: bool) -> None:
    stream, tune = Endless(REAL if real else Y, 40), lw.BoundedEvidence(samples=20)
    posterior = lw.fit(network(1 if real else 3), stream, STEPS[1], data_size=1000, tune=tune)
    assert stream.left >= 40 - 5 - (4 if real else 1) * 20 // 5
    assert posterior.prior_precision


def test_a_stream_of_known_size_gives_what_a_list_gives() -> None:
    model, options = network(), {"data_size": 100, "prior_precision": 1.0}
    for method in STEPS:
        of_stream = lw.fit(model, DataLoader(WithoutLength(), batch_size=5), method, **options)
        of_list = lw.fit(model, DataLoader(DATA, batch_size=5), method, **options)
        assert of_stream.data_factor == pytest.approx(of_list.data_factor)
        torch.testing.assert_close(of_stream.latent(X).variance, of_list.latent(X).variance)


# --- fewer samples than the data set has -----------------------------------------------------------------------------
def half() -> DistributedSampler:
    return DistributedSampler(DATA, num_replicas=2, rank=0)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"batch_size": 6, "drop_last": True}, 18),
        ({"batch_size": 6, "sampler": half()}, 10),
        ({"batch_size": 6, "sampler": RandomSampler(DATA, num_samples=7)}, 7),
        ({"batch_sampler": [[0, 1, 2], [3, 4]]}, 5),
    ],
    ids=["drop_last", "distributed", "num_samples", "own batches"],
)
def test_a_part_of_the_data_set_is_said_once(
    options: dict[str, Any], shown: int, caplog: pytest.LogCaptureFixture
) -> None:
    lw.fit(network(), DataLoader(DATA, **options), lw.EKFAC())
    (line,) = [record.getMessage() for record in caplog.records if "data set" in record.getMessage()]
    assert f"shows {shown} of the 20 samples" in line
    assert "data_size=20" in line


def test_nothing_is_said_of_the_whole_or_where_the_size_is_given(caplog: pytest.LogCaptureFixture) -> None:
    quiet = [
        DataLoader(DATA, batch_size=6), DataLoader(DATA, batch_size=5, drop_last=True), [(X, Y)],
        DataLoader([(X, Y)], batch_size=None), DataLoader(DATA, batch_size=6, sampler=SubsetRandomSampler(range(7))),
    ]  # fmt: skip
    for loader in quiet:
        lw.fit(network(), loader)
    lw.fit(network(), DataLoader(DATA, batch_size=6, sampler=half()), data_size=20)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


class WithoutLength(IterableDataset):
    """A data set that every worker shows in full, or that shares its samples out."""

    def __init__(self, shares: bool = False) -> None:
        self.shares = shares

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        return islice(iter(DATA), worker.id, None, worker.num_workers) if self.shares and worker else iter(DATA)


class Twice(WithoutLength):
    def __len__(self) -> int:
        return 20


@pytest.mark.parametrize(("shown", "workers"), [(40, 2), (60, 3), (40, 3), (20, 1), (20, 0)])
def test_samples_that_each_worker_shows_are_said(shown: int, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unseen(DataLoader(Twice(), batch_size=5, num_workers=workers), shown)
    said = f"shows {shown} samples, each of the 20 of its data set once per worker" in caplog.text
    assert said == (shown == 20 * workers > 20)


@pytest.mark.parametrize("shares", [False, True])
def test_workers_that_begin_with_the_same_batch_are_said(shares: bool, caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(WithoutLength(shares), batch_size=5, num_workers=2)
    assert lw.fit(network(), loader, tune=None).samples == (20 if shares else 40)
    assert ("begin with the same batch" in caplog.text) == (not shares)


@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shares_of_a_distributed_sampler_leave_its_repeated_samples_out(count: int, ranks: int) -> None:
    for rank in range(ranks):
        sampler = DistributedSampler(range(count), ranks, rank, shuffle=False)
        shown = len(range(rank, count, ranks))
        loader = DataLoader(TensorDataset(X[:count]), batch_size=2, sampler=sampler)
        assert Data(loader, network()).sizes == [[min(2, shown - start) for start in range(0, shown, 2)]]


# --- the same tensors for every batch --------------------------------------------------------------------------------
def fresh(*columns: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(column.split(6) for column in columns), strict=True))


def refilling(*columns: Tensor) -> Refilling:
    return Refilling(fresh(*columns))


def _latents(posterior: lw.Posterior) -> Tensor:
    latent = posterior.latent(X)
    return torch.cat([latent.mean, latent.variance], 1)


def fitted(y: Tensor, **options: Any) -> lw.Posterior:
    torch.manual_seed(0)
    return lw.fit(network(1 if y is REAL else 3), [(X, y)], lw.KFAC(), prior_precision=1.0, **options)


def _fit(*arguments: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return _latents(lw.fit(network(1 if arguments[0] else 3), *arguments[1:], **options))


WAYS_IN = {
    "default": lambda kind, y: _fit(y is REAL, kind(X, y)),
    "points": lambda kind, y: _fit(y is REAL, kind(X, y), lw.VaLLA(4)),
    "labels": lambda kind, y: _fit(y is REAL, kind(X, y), lw.ELLA(3, 8, sampling="balanced" if y is Y else "uniform")),
    "subset": lambda kind, y: _fit(y is REAL, kind(X, y), lw.SubsetOfData(8)),
    "steps": lambda kind, y: _fit(y is REAL, kind(X, y), lw.MeanField(steps=3)),
    "weights": lambda kind, y: _fit(y is REAL, kind(X, y, torch.linspace(0.5, 2.0, 20)), sample_weights=True),
    "validation": lambda kind, y: _fit(y is REAL, [(X, y)], validation=kind(X + 0.1, y)),
    "early stopping": lambda kind, y: _fit(y is REAL, kind(X, y), lw.KFAC(), tune=lw.EarlyStopping(kind(X + 0.1, y))),
    "update": lambda kind, y: _latents(fitted(y).update(kind(X, y))),
    "scale factor": lambda kind, y: torch.tensor(lw.scale_factor(fitted(y), kind(X, y), decades=(-1, 1)).factor),
    "compare": lambda kind, y: torch.tensor(
        lw.compare({"a": fitted(y)}, kind(X, y), {"far": kind(-X, y)}, repeats=1).rows["a"]["NLL"]
    ),
    "mixture": lambda kind, y: lw.mixture([fitted(y)] * 2, kind(X + 0.1, y)).members[0].predict(X).log_prob(y),
    "prediction": lambda kind, y: fitted(y).latent(kind(X, y)).variance,
    "given variances": lambda kind, y: lw.MeanField.from_variances(
        network(1 if y is REAL else 3), {"2.bias": torch.full((1 if y is REAL else 3,), 0.1)}, kind(X, y)
    ).statistics,
    "mode": lambda kind, y: torch.tensor(
        fitted(y).log_marginal_likelihood(linearised_mode=True, loader=kind(X, y))
    ),
}  # fmt: skip


@pytest.mark.quick(15)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("y", [Y, REAL], ids=["classes", "real"])
@pytest.mark.parametrize("way_in", WAYS_IN)
def test_a_loader_that_fills_the_same_tensors_or_is_elsewhere_gives_what_a_list_gives(way_in: str, y: Tensor) -> None:
    wanted = WAYS_IN[way_in](fresh, y)
    for kind, place in ((refilling, nullcontext()), (lambda *columns: CUDA.put(fresh(*columns)), CUDA)):
        torch.manual_seed(0)
        with place:
            found = WAYS_IN[way_in](kind, y)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_bfloat16_network_and_a_loader_that_fills_the_same_tensors() -> None:
    model = network(1).bfloat16()
    found, wanted = (lw.fit(model, kind(X.bfloat16(), REAL)) for kind in (refilling, fresh))
    assert found.noise_variance == wanted.noise_variance
    assert torch.equal(found.latent(X.bfloat16()).variance, wanted.latent(X.bfloat16()).variance)


def test_batches_of_a_list_and_of_torchs_own_loader_are_not_copied() -> None:
    first = (X[:5], Y[:5])
    assert next(iter(Data([first], network()))).inputs.value is first[0]
    buffer = torch.zeros(5, 4)
    loader = DataLoader(DATA, 5, collate_fn=lambda samples: (buffer, Y[: len(samples)]))
    assert next(iter(Data(loader, network()))).inputs is not buffer


# --- a stream that shows more than N samples --------------------------------------------------------------------------
class Counted(Endless):
    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return islice(super().__iter__(), len(self))


def test_a_stream_ends_after_data_size_and_a_loader_with_a_length_is_refused() -> None:
    stream, model = Endless(Y, 100), network()
    posterior = lw.fit(model, stream, lw.Diagonal(), data_size=18, prior_precision=1.0)
    assert (posterior.samples, posterior.data_factor) == (18, 1)
    too_few = lambda: lw.fit(model, Counted(Y, 100), lw.Diagonal(), data_size=18)  # noqa: E731
    refused(too_few, "data_size=18 is below the 35 samples that the loader shows")
    assert lw.fit(model, Counted(Y, 100), lw.Diagonal(), data_size=70).data_factor == 2


# --- subclasses of Tensor ---------------------------------------------------------------------------------------------
class Tagged(Tensor):
    """A tensor with metadata, which most operations do not accept."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.__name__ in ("as_subclass", "dim", "size", "__len__", "__get__", "__format__"), function
        return super().__torch_function__(function, types, args, kwargs or {})


def test_subclasses_of_tensor_become_plain_tensors() -> None:
    model, weights = network(), torch.ones(20)
    x, y, w = (part.as_subclass(Tagged) for part in (X, Y, weights))
    expected = lw.fit(model, [(X, Y)])
    for posterior in (lw.fit(model, [(x, y)]), lw.fit(model, [(x, y, w)], sample_weights=True)):
        torch.testing.assert_close(posterior.latent(X).variance, expected.latent(X).variance)
    assert type(expected.predict(x).probs) is Tensor
    assert lw.compare({"a": expected}, [(x, y)], {"same": x}).rows["a"]["accuracy"] <= 1
