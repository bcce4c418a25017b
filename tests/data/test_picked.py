"""`lw.batches`: loaders whose batches have names or forms of their own."""

from __future__ import annotations

import pickle
from collections import UserList
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lapwing as lw
from tests.refilling import Refilling
from tests.refused import refused
from tests.zoo_modules import Net

X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
ROWS = [{"pixels": x, "digit": y, "name": "a"} for x, y in zip(X, Y, strict=True)]
NAMED = [{"pixels": x, "digit": y, "name": ["a"] * 8} for x, y in zip(X.split(8), Y.split(8), strict=True)]
PAIRS = list(zip(X.split(8), Y.split(8), strict=True))


class Stream:
    """An iterable of batches without a length."""

    def __iter__(self) -> Any:
        return iter(NAMED)


class Rows(UserList):
    """A map-style data set that also iterates over its samples, as those of Hugging Face do."""

    def __getitems__(self, places: list[int]) -> list[Any]:
        return [self[i] for i in places]


class Sized(Stream):
    def __len__(self) -> int:
        return len(NAMED)


def second(batch: Any) -> Tensor:
    return batch["digit"]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).eval()


@pytest.mark.parametrize("targets", ["digit", second], ids=["key", "function"])
@pytest.mark.parametrize(
    "loader", [NAMED, Stream(), DataLoader(ROWS, 8), Rows(ROWS)], ids=["list", "iterable", "DataLoader", "data set"]
)
def test_a_fit_equals_the_fit_of_pairs(loader: Any, targets: Any) -> None:
    model = network()
    posterior = lw.fit(model, lw.batches(loader, "pixels", targets), lw.Full(), prior_precision=1.0)
    expected = lw.fit(model, PAIRS, lw.Full(), prior_precision=1.0)
    assert torch.equal(posterior.predict(X).probs, expected.predict(X).probs)
    torch.testing.assert_close(posterior.predict(lw.batches(loader, "pixels")).probs, posterior.predict(X).probs)
    tuned = lw.fit(model, PAIRS, validation=lw.batches(loader, inputs="pixels", targets=targets))
    assert tuned.prior_precision == lw.fit(model, PAIRS, validation=PAIRS).prior_precision


def test_several_keys_are_named_arguments_of_the_network_and_heads_of_joint() -> None:
    loader = [{"a": x, "b": 2 * x, "kind": y % 2, "size": y.float()} for x, y in PAIRS]
    ((inputs, targets), *_) = lw.batches(loader, inputs=["a", "b"], targets=["kind", "size"])
    assert list(inputs) == ["a", "b"]
    assert list(targets) == ["kind", "size"]
    heads = lw.Joint({"kind": lw.Categorical(), "size": lw.Gaussian(0.1)}, {"kind": slice(0, 2), "size": slice(2, 3)})
    model = Net(lambda net, a, b: net.layer(a + b), layer=nn.Linear(4, 3)).eval()
    picked = lw.batches(loader, ["a", "b"], ["kind", "size"])
    posterior = lw.fit(model, picked, likelihood=heads, prior_precision=1.0)
    assert posterior.samples == 24


def test_a_data_loader_keeps_its_sampler_and_reaches_worker_processes() -> None:
    loader = DataLoader(ROWS, 8, shuffle=True, generator=torch.Generator().manual_seed(3))
    picked = lw.batches(loader, "pixels", second)
    assert isinstance(picked, DataLoader)
    assert picked.sampler is loader.sampler
    assert next(iter(loader))["name"] == ["a"] * 8  # the given loader is as before
    again = pickle.loads(pickle.dumps(picked.collate_fn))
    x, y = again(ROWS[:5])
    assert torch.equal(x, X[:5])
    assert torch.equal(y, Y[:5])


def test_persistent_workers_of_the_given_loader_do_not_hand_out_whole_batches() -> None:
    loader = DataLoader(ROWS, 8, num_workers=1, persistent_workers=True)
    assert set(next(iter(loader))) == {"pixels", "digit", "name"}  # its worker stays
    x, y = next(iter(lw.batches(loader, "pixels", "digit")))
    assert torch.equal(x, X[:8])
    assert torch.equal(y, Y[:8])


def test_a_loader_keeps_its_length_and_an_iterator_can_be_read_once() -> None:
    assert len(lw.batches(Sized(), "pixels")) == 3
    assert not hasattr(lw.batches(Stream(), "pixels"), "__len__")
    picked = lw.batches(iter(NAMED), "pixels", "digit")
    assert len(list(picked)) == 3
    assert not list(picked)


def test_refusals() -> None:
    refused(lambda: lw.batches(X, "pixels"), "lw.batches needs a loader … Tensor (24, 4) float32. Pass [batch].")
    refused(
        lambda: lw.fit(network(), lw.batches(NAMED, "image", "digit")), "takes 'image' from … keys ['pixels', 'digit'"
    )
    refused(lambda: lw.fit(network(), lw.batches(PAIRS, "x", "y")), "takes 'x' from … tuple(Tensor (8, 4)")
    refused(lambda: lw.fit(network(), NAMED), "Write lw.batches(loader, inputs='pixels', targets='name'), or let")
    refused(
        lambda: lw.fit(network(), [{"pixels": X, "digit": Y}]), "lw.batches(loader, inputs='pixels', targets='digit')"
    )


REFILLING = Refilling({key: batch[key] for key in ("pixels", "digit")} for batch in NAMED)


@pytest.mark.parametrize("method", [lw.KFAC(), lw.ELLA(4), lw.VaLLA(4), lw.SubsetOfData(12)], ids=str)
def test_batches_that_share_their_tensors_are_kept_as_copies(method: lw.Method) -> None:
    """Subsets, inducing points and held-out data are kept while the loader writes the next batch."""
    loader = lw.batches(REFILLING, "pixels", "digit")
    found = lw.fit(network(), loader, method, validation=loader, seed=0)
    wanted = lw.fit(network(), PAIRS, method, validation=PAIRS, seed=0)
    torch.testing.assert_close(found.predict(X).probs, wanted.predict(X).probs)
    pixels = lw.batches(REFILLING, "pixels")
    torch.testing.assert_close(lw.mixture([found, wanted]).predict(pixels).probs, wanted.predict(X).probs)
