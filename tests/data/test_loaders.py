"""What a loader shows: how much of it is read, how often, and whether that is all of its data set."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
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

X, Y, REAL = torch.randn(20, 4), torch.arange(20) % 3, torch.randn(20, 1)
DATA = TensorDataset(X, Y)


def network(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).eval()


# --- a stream without end --------------------------------------------------------------------------------------------
class Endless:
    """Batches without end, of which a test allows so many in all."""

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
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter(DATA)

    model, options = network(), {"data_size": 100, "prior_precision": 1.0}
    for method in STEPS:
        of_stream = lw.fit(model, DataLoader(Stream(), batch_size=5), method, **options)
        of_list = lw.fit(model, DataLoader(DATA, batch_size=5), method, **options)
        assert of_stream.data_factor == pytest.approx(of_list.data_factor)
        torch.testing.assert_close(of_stream.latent(X).variance, of_list.latent(X).variance)


# --- other data from pass to pass ------------------------------------------------------------------------------------
class Shrinking:
    """Five batches when it is first gone through, then four, then three, or six, then seven."""

    def __init__(self, y: Tensor, by: int) -> None:
        self.y, self.by, self.passes = y, by, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = 5 + self.by * self.passes
        self.passes += 1
        yield from [(X[i : i + 4], self.y[i : i + 4]) for i in [4 * j % 20 for j in range(count)]]


METHODS = [
    None, lw.Diagonal(), lw.KFAC(), lw.EKFAC(), lw.Full(form="primal"), lw.ELLA(rank=3, rows=6),
    lw.OptimalSubspace(3, lw.KFAC(), "all"), lw.SubsetOfWeights(5, "magnitude"), lw.VaLLA(4, initial="data"),
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize(("by", "real"), [(-1, True), (1, False)])
def test_loaders_that_shrink_or_grow_are_refused(method: lw.Method | None, by: int, real: bool) -> None:
    with pytest.raises(lw.LapwingError, match=r"at first and shows \d+ samples to .* Every pass needs the same data"):
        lw.fit(network(1 if real else 3), Shrinking(REAL if real else Y, by), method)


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


class Twice(IterableDataset):
    """A data set that every worker shows in full."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_samples_that_each_worker_shows_are_said(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Twice(), batch_size=5, num_workers=2)
    assert lw.fit(network(), loader, tune=None).samples == 40
    assert "shows 40 samples, each of the 20 of its data set once per worker" in caplog.text


class WithoutLength(IterableDataset):
    """A data set that every worker shows in full, or that shares its samples out."""

    def __init__(self, shares: bool) -> None:
        self.shares = shares

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        return islice(iter(DATA), worker.id, None, worker.num_workers) if self.shares and worker else iter(DATA)


@pytest.mark.parametrize("shares", [False, True])
def test_workers_that_begin_with_the_same_batch_are_said(shares: bool, caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(WithoutLength(shares), batch_size=5, num_workers=2)
    assert lw.fit(network(), loader, tune=None).samples == (20 if shares else 40)
    assert ("begin with the same batch" in caplog.text) == (not shares)
