"""Batches: the structures that loaders yield, slices of them, and how the network is called."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lapwing as lw
from lapwing.data import batches, nesting
from lapwing.data.inputs import WEIGHT_KEYS, Inputs, Samples
from lapwing.network.call import Call
from tests import oracle
from tests.refused import refused
from tests.zoo import ZOO
from tests.zoo_modules import Net

X, Z, Y = torch.randn(6, 4), torch.randn(6, 2), torch.arange(6)
Pair = namedtuple("Pair", ["image", "label"])


@pytest.mark.parametrize(
    ("batch", "inputs"),
    [
        ((X, Y), X),
        ([X, Y], X),
        (Pair(X, Y), X),
        ((X, Z, Y), (X, Z)),
        ([X, Z, Y], (X, Z)),
        (((X, Z), Y), (X, Z)),
        (({"a": X}, Y), {"a": X}),
        ({"x": X, "labels": Y}, {"x": X}),
        ({"x": X, "z": Z, "label": Y}, {"x": X, "z": Z}),
        (OrderedDict(x=X, targets=Y), {"x": X}),
        (UserDict({"x": X, "y": Y}), {"x": X}),
        ({"x": X, "y": Z, "labels": Y}, {"x": X, "y": Z}),  # the first of the keys is the label
    ],
)
def test_split(batch: Any, inputs: Any) -> None:
    samples = Samples.of(batch)
    found = samples.inputs.value
    assert samples.targets is Y
    assert type(found) is type(inputs)
    leaves = zip(batches.tensors(found), batches.tensors(inputs), strict=True)
    assert all(one is other for one, other in leaves)


@pytest.mark.parametrize(
    ("batch", "inputs"),
    [
        (X, X), ([X], X), ((X,), X), ((X, Y), X), ((X, Z, Y), (X, Z)), (((X, Z), Y), (X, Z)), ({"a": X}, {"a": X}),
        ({"a": X, "labels": Y}, {"a": X}),
    ],
)  # fmt: skip
def test_inputs_of(batch: Any, inputs: Any) -> None:
    found = batches.inputs_of(batch)
    assert all(a is b for a, b in zip(batches.tensors(found), batches.tensors(inputs), strict=True))
    assert type(found) is type(inputs)


def test_is_loader() -> None:
    assert batches.is_loader([X])
    assert batches.is_loader(iter([X]))
    assert batches.is_loader(DataLoader(TensorDataset(X), batch_size=2))
    assert not any(batches.is_loader(x) for x in (X, (X, Z), {"x": X}, UserDict({"x": X}), 3, None))


def test_take_cuts_along_the_batch_and_passes_on_the_rest() -> None:
    mask = torch.ones(4, 4)
    inputs = {"x": X, "nested": [Z, (Y, "text")], "mask": mask, "flag": True, "scale": torch.tensor(2.0), "none": None}
    taken = Inputs(inputs).take(slice(1, 3)).value
    assert torch.equal(taken["x"], X[1:3])
    assert torch.equal(taken["nested"][0], Z[1:3])
    assert torch.equal(taken["nested"][1][0], Y[1:3])
    assert taken["nested"][1][1] == "text"
    assert taken["mask"] is mask
    assert (taken["flag"], taken["none"], float(taken["scale"])) == (True, None, 2.0)
    rows = torch.tensor([5, 0, 0])
    assert torch.equal(Inputs((X, Z)).take(rows).value[1], Z[rows])


def test_lists_of_texts_are_cut_with_the_samples_and_those_of_numbers_are_shared() -> None:
    x = torch.arange(4.0)
    inputs = {"x": x, "box": [3, 1, 2, 0], "texts": ["a", "b", "c", "d"], "few": ["a", "b"], "pair": (7, 7, 7, 7)}
    cut = Inputs(inputs).take(slice(1, 3)).value
    assert (cut["box"], cut["texts"], cut["few"], cut["pair"]) == ([3, 1, 2, 0], ["b", "c"], ["a", "b"], (7, 7, 7, 7))
    assert Inputs(inputs).take(torch.tensor([3, 0])).value["texts"] == ["d", "a"]
    parts = [part.value["texts"] for _, part in Inputs(inputs).chunks(3)]
    assert parts == [["a", "b", "c"], ["d"]]


def test_a_list_of_as_many_numbers_as_samples_is_refused_in_the_first_batch() -> None:
    model = Net(lambda net, x, box: net.head(x * torch.tensor(box).reshape(-1)[0]), head=nn.Linear(3, 2)).eval()
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    as_many = [((x, [2.0] * 6), y)]
    refused(lambda: lw.fit(model, as_many), "a list of 6 entries and have 6 samples … torch.tensor(numbers)")
    posterior = lw.fit(model, [((x, [2.0] * 4), y)], lw.KFAC(), prior_precision=1.0)
    whole = posterior.latent((x, [2.0] * 4)).variance
    torch.testing.assert_close(posterior.latent((x[:4], [2.0] * 4)).variance, whole[:4])
    torch.testing.assert_close(lw.fit(model, [((x, (2.0,) * 6), y)], lw.KFAC(), prior_precision=1.0).latent(
        (x, (2.0,) * 6)).variance, whole)  # fmt: skip


@pytest.mark.parametrize("length", [1, 2, 4, 6, 100])
def test_chunks_cover_every_sample_once(length: int) -> None:
    parts = [(rows, chunk.value) for rows, chunk in Inputs((X, Z)).chunks(length)]
    assert torch.equal(torch.cat([chunk[0] for _, chunk in parts]), X)
    assert [rows.stop for rows, _ in parts][-1] == 6
    assert all(chunk[1].shape[0] == rows.stop - rows.start <= length for rows, chunk in parts)
    whole = UserDict({"x": X})
    if length >= 6:
        assert next(iter(Inputs(whole).chunks(length)))[1].value is whole  # the user's own object where nothing is cut


@pytest.mark.parametrize(
    "inputs",
    [
        torch.ones(2), (torch.ones(2), [torch.zeros(1), None, True, 2, 0.5, float("inf"), '["tensor"]', ()]),
        {"x": torch.ones(2), "options": {"deep": [{"deeper": (torch.ones(1), "text")}], 3: "three"}, "none": []},
        OrderedDict(x=torch.ones(2)), UserDict(x=torch.ones(2)),
    ],
)  # fmt: skip
def test_inputs_are_flattened_and_put_together_again(inputs: Any) -> None:
    leaves, nest = nesting.flatten(Inputs(inputs))
    assert nesting.count_tensors(nest) == len(leaves)
    again = nesting.unflatten(leaves, nest).value
    assert repr(again) == repr(dict(inputs) if isinstance(inputs, (OrderedDict, UserDict)) else inputs)


def test_what_cannot_be_kept_is_not_flattened() -> None:
    for inputs in ({"x": object()}, namedtuple("Two", "a b")(torch.ones(1), 2), {("a", "b"): torch.ones(1)}):
        refused(partial(nesting.flatten, Inputs(inputs)), "cannot be kept … forward=")


def test_describe_names_structures_and_shapes() -> None:
    text = batches.describe({"x": X, "more": [Z, (Y, "a")], "n": None})
    expected = (
        "dict(x=Tensor (6, 4) float32, more=list(Tensor (6, 2) float32, tuple(Tensor (6,) int64, str)), n=NoneType)"
    )
    assert text == expected


def test_call_by_structure() -> None:
    two = Net(lambda net, left, right: left[:, :2] - right)
    for inputs in ((X, Z), [X, Z], {"left": X, "right": Z}, {"right": Z, "left": X}):
        assert torch.equal(Call(two).rows(Inputs(inputs)), X[:, :2] - Z)
    assert torch.equal(Call(two, lambda model, x: model(x, Z)).rows(Inputs(X)), X[:, :2] - Z)


def test_call_reads_outputs() -> None:
    class Out:
        logits = X

    model = nn.Identity()
    for out in (X, Out(), {"logits": X, "loss": None}, {"out": X, "aux": Z}):
        assert Call(model, lambda model, x, out=out: out).rows(Inputs(X)) is X
    assert Call(model, lambda model, x: x[:, 0]).rows(Inputs(X)).shape == (6, 1)


# --- the same posterior however the data come ------------------------------------------------------------------------
def same(one: lw.Posterior, other: lw.Posterior, x: Any) -> None:
    torch.testing.assert_close(one.latent(x).covariance, other.latent(x).covariance)
    assert one.samples == other.samples
    torch.testing.assert_close(one.log_marginal_likelihood(), other.log_marginal_likelihood())


class Streaming(IterableDataset):
    def __init__(self, x: Iterable[Tensor], y: Iterable[Tensor]) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Any:
        return zip(self.x, self.y, strict=True)


def test_loaders_and_batch_sizes_do_not_matter() -> None:
    case = ZOO["mlp"]
    model, x, y = case.build(), case.inputs(11, 0), case.targets(11, 0)
    whole = lw.fit(model, [(x, y)], lw.KFAC(), prior_precision=2.0)
    loaders: list[Any] = [
        [*zip(x.split(1), y.split(1), strict=True)],  # one sample at a time
        [(x[:10], y[:10]), (x[10:], y[10:])],  # an uneven last batch
        [(x[:6], y[:6]), (x[:0], y[:0]), (x[6:], y[6:])],  # an empty batch within
        ((x, y),),
        DataLoader(TensorDataset(x, y), batch_size=4),
        DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True),
        DataLoader(Streaming(x, y), batch_size=4),
        Streaming(x.split(4), y.split(4)),  # a data set of batches
    ]
    for loader in loaders:
        same(lw.fit(model, loader, lw.KFAC(), prior_precision=2.0), whole, x)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "name", ["mlp", "cnn_bn_inplace", "mha_seq_first", "embedding_bag_of_tokens", "conv1d", "lstm"]
)
def test_a_first_batch_of_one_sample(name: str) -> None:
    """Alone it cannot show where layers hold the batch: the same answer, or a sentence that says so."""
    case = ZOO[name]
    model, x, y = case.build(), case.inputs(6, 0), case.targets(6, 0)
    whole = lw.fit(model, [(x, y)], lw.KFAC(), prior_precision=1.0)
    try:
        split = lw.fit(model, [(x[:1], y[:1]), (x[1:], y[1:])], lw.KFAC(), prior_precision=1.0)
    except lw.LapwingError as error:
        assert "put a larger batch first" in str(error)  # noqa: PT017
    else:
        same(split, whole, x)


def test_dicts_tuples_and_forward() -> None:
    case = ZOO["bilinear"]
    model, (left, right), y = case.build(), case.inputs(6, 0), case.targets(6, 0)
    whole = lw.fit(model, [(left, right, y)], lw.KFAC(), prior_precision=1.0)
    x = (left, right)
    same(lw.fit(model, [((left, right), y)], lw.KFAC(), prior_precision=1.0), whole, x)
    same(lw.fit(model, [([left, right], y)], lw.KFAC(), prior_precision=1.0), whole, x)
    named = lw.fit(model, [{"left": left, "right": right, "y": y}], lw.KFAC(), prior_precision=1.0)
    for asked in (x, {"left": left, "right": right}):
        torch.testing.assert_close(named.latent(asked).covariance, whole.latent(x).covariance)
    forward = lambda net, both: net(*both.split([3, 4], 1))  # noqa: E731
    joined = lw.fit(model, [(torch.cat(x, 1), y)], lw.KFAC(), prior_precision=1.0, forward=forward)
    torch.testing.assert_close(joined.latent(torch.cat(x, 1)).covariance, whole.latent(x).covariance)
    for via in (lw.Linearized(), lw.MonteCarlo(draws=3)):
        parts = [(left[:4], right[:4], y[:4]), (left[4:], right[4:], y[4:])]
        torch.testing.assert_close(whole.predict(parts, via=via).mean, whole.predict(x, via=via).mean)


def test_hugging_face_batches() -> None:
    transformers = pytest.importorskip("transformers")
    case = ZOO["gpt2"]
    model, x, y = case.build(), case.inputs(5, 0), case.targets(5, 0)
    encoded = transformers.BatchEncoding({**x, "labels": y})
    posterior = lw.fit(model, [encoded], lw.KFAC(), prior_precision=1.0)
    expected = posterior.latent(x).covariance
    for asked in (encoded, transformers.BatchEncoding(x), [encoded], [x]):
        torch.testing.assert_close(posterior.latent(asked).covariance, expected)
    torch.testing.assert_close(posterior.latent(x).mean, oracle.call(model, x).detach())


def test_inputs_that_require_gradients() -> None:
    case = ZOO["mlp"]
    model, x, y = case.build(), case.inputs(6, 0), case.targets(6, 0)
    plain = lw.fit(model, [(x, y)], lw.KFAC())
    leaf = x.clone().requires_grad_()
    posterior = lw.fit(model, [(leaf, y)], lw.KFAC())
    same(posterior, plain, x)
    assert leaf.grad is None
    tensors = posterior.covariance.tensors().values()
    assert not any(tensor.requires_grad for tensor in [*tensors, *posterior.statistics.values()])
    latent = posterior.latent(leaf)
    (gradient,) = torch.autograd.grad(latent.variance.sum(), leaf)
    assert gradient.abs().sum() > 0
    with torch.no_grad():
        assert not posterior.latent(leaf).variance.requires_grad


def test_keys_are_equal_for_equal_samples_only() -> None:
    """Against a comparison of all pairs of samples by Python."""
    x, n = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 2.0]]), torch.tensor([1, 1, 1, 2])
    texts, titles = ["a", "ab", "a", "a"], ["c", "c", "d", "c"]
    columns: list[list[Any]] = [x.tolist(), n.tolist(), texts, titles]
    for given, targets, which in (
        (x, None, [0]), (x.bfloat16(), n, [0, 1]), ((n > 1, x.T.contiguous().T), None, [0, 1]),
        ({"a": [x, (n,)], "b": texts}, None, [0, 1, 2]), ({"b": texts, "n": n[:, None, None]}, x, [0, 1, 2]),
        ((x.cfloat().conj(), torch.zeros(3), torch.tensor(1.0), "shared"), None, [0]),
        ((x, texts, titles), None, [0, 2, 3]), (x, n.as_strided((4, 1), (1, 0)), [0, 1]),  # as NumPy makes a column
    ):  # fmt: skip
        samples = [tuple(columns[i][row] for i in which) for row in range(4)]
        keys = Inputs(given).digests(targets)
        assert keys.shape == (4,)
        assert (keys[:, None] == keys).tolist() == [[one == other for other in samples] for one in samples]
    assert torch.equal(Inputs(x[2:]).digests(n[2:]), Inputs(x).digests(n)[2:])  # in any batch
    assert torch.equal(Inputs(x).digests(n[:, None]), Inputs(x).digests(n.as_strided((4, 1), (1, 0))))
    assert Inputs(x[:0]).digests(n[:0]).shape == (0,)
    assert (Inputs((x, torch.zeros(3))).digests() != Inputs((x, torch.ones(3))).digests()).all()  # shared by all


def test_digests_tell_columns_of_texts_apart() -> None:
    columns = (["a", "b", "ab"], ["c", "d", "c"]), (["a", "b", "a"], ["c", "e", "bc"])
    one, other = (Inputs((X[:3] * 0, *texts)).digests() for texts in columns)
    assert (one == other).tolist() == [True, False, False]


@pytest.mark.parametrize("key", WEIGHT_KEYS)
def test_weights_are_the_last_part_of_a_tuple_or_have_a_key(key: str) -> None:
    weights = torch.arange(6.0)
    for batch in ((X, Z, Y, weights), {"x": X, "z": Z, "y": Y, key: weights}):
        leaves = Samples.of(batch, weighted=True).leaves()
        assert all(map(torch.equal, leaves, (X, Z, Y, weights)))
        assert len(leaves) == 4


def test_samples_on_a_device_keep_their_weights() -> None:
    samples = Samples.of((X, Y, torch.arange(6.0)), weighted=True)
    assert torch.equal(samples.to(X.device).weights, torch.arange(6.0))
    assert Samples.of((X, Y)).to(X.device).weights is None
    assert samples.to(torch.device("meta")).inputs.value.is_meta


def test_the_refusal_of_nan_prints_what_a_network_that_takes_nan_needs() -> None:
    filling = lambda net, x: net.head(torch.where(x.isnan(), net.fill, x))  # noqa: E731
    model = Net(filling, fill=nn.Parameter(torch.randn(4)), head=nn.Linear(4, 3)).double().eval()
    x, y = torch.randn(30, 4, dtype=torch.float64), torch.arange(30) % 3
    x[::3, 1] = torch.nan
    told = refused(lambda: lw.fit(model, (x, y)), "in 10 samples … If the network itself takes NaN")
    lines = told.partition("mark it: x = ")[2].rstrip(".").split(", and forward=")
    space = {"x": x, "torch": torch}
    marked, forward = eval(lines[0], space), eval(lines[1], space)
    options: Any = {"params": lw.everything, "prior_precision": 1.0}
    posterior = lw.fit(model, (marked, y), lw.Full(), forward=forward, **options)
    rows = oracle.jacobian(model, x)  # of the network itself, at NaN
    curvature = oracle.ggn(rows, oracle.softmax_fisher(oracle.outputs(model, x)))
    wanted = oracle.output_covariance(rows, oracle.laplace_covariance(curvature, 1.0))
    torch.testing.assert_close(posterior.latent(marked).covariance, wanted)


def test_targets_of_a_teacher_may_carry_a_graph() -> None:
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    y = torch.nn.Linear(4, 1)(x)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).eval()
    first, second = (lw.fit(model, (x, targets), lw.KFAC(), tune=lw.Refit()) for targets in (y, y.detach()))
    assert first.prior_precision == second.prior_precision
