"""One large sample within the memory budget: strips of positions do not change results, and limit the memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import lapwing as lw
from lapwing import tangent as tn
from lapwing.jacobian import strips
from lapwing.jacobian.jacobian import DiagonalWeights, MatrixJacobian
from lapwing.jacobian.layers import BatchAxis, norm
from lapwing.jacobian.layers.conv import unfold, window
from lapwing.jacobian.layers.use import READERS
from lapwing.jacobian.outer import Outer
from lapwing.jacobian.strips import Strips, at, boxes
from lapwing.network.tracing import output_gradients
from papers.common.measure import LiveBytes
from tests.conformance import covering
from tests.jacobian.test_contractions import check_contractions, close, dense, kronecker_factors, survey
from tests.jacobian.test_sliced import METHODS, Text, check_kronecker, check_small_records
from tests.zoo import ZOO

EVERY, SLOW = lw.matching("*"), pytest.mark.slow
NETWORKS = (
    "cnn_bn_inplace", "grouped_strided_conv", "conv1d", "attention", "mha_seq_first", "gpt2", "tied",
    "residual_block", "embedding_bag_of_tokens", "shared_module", "functional_reuse",
)  # fmt: skip


@pytest.mark.parametrize("grid", [(), (1,), (7,), (3, 4), (2, 3, 5), (0,), (3, 0)])
@pytest.mark.parametrize("most", [0, 1, 5, 100])
def test_boxes_cover_the_grid_once(grid: tuple[int, ...], most: int) -> None:
    places = torch.arange(torch.Size(grid).numel()).reshape(grid)
    parts = [at(places, box, 0).flatten() for box in boxes(grid, most)]
    assert sorted(torch.cat(parts).tolist()) == places.flatten().tolist()
    assert max(len(part) for part in parts) <= max(1, most)


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), [
    ((3, 3), (1, 1), (1, 1), (1, 1)), ((3, 2), (2, 3), (1, 0), (1, 1)), ((1, 1), (1, 1), (2, 1), (1, 1)),
    ((3, 3), (1, 2), (4, 2), (2, 3)), ((2,), (3,), (0,), (1,)), ((2, 1, 2), (1, 1, 2), (1, 0, 1), (1, 1, 1)),
])  # fmt: skip
@pytest.mark.parametrize("most", [1, 3, 8])
def test_windows_give_the_patches_of_their_positions(
    kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...], most: int
) -> None:
    """Some windows lie completely in the padding."""
    x = torch.randn(2, 3, *(8, 7, 6)[: len(kernel)])
    pairs = [(p, p) for p in padding]
    sizes = zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    grid = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes]
    whole = unfold(x, kernel, stride, pairs, dilation).unflatten(1, grid)
    for box in boxes(grid, most):
        seen, rest = window(x, box, kernel, stride, pairs, dilation)
        assert torch.equal(unfold(seen, kernel, stride, rest, dilation), at(whole, box, 1).flatten(1, len(grid)))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "most"), [*((name, 3) for name in NETWORKS), ("grouped_strided_conv", 1), ("embedding_bag_of_tokens", 1)]
)
def test_contractions_by_strips(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One position at a time, or three: every contraction equals the product with autograd's rows."""
    case = ZOO[name]
    model, x, tangent = survey(case, samples=3)
    other = case.inputs(2, 7)
    columns = [block.size for block in tangent.blocks]
    u = torch.randn(3, case.outputs, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain, theirs = dense(model, x, tangent), dense(model, other, tangent).split(columns, -1)
    for cotangents, rows in ((None, plain), (u, u.mT @ plain)):
        whole = tangent.record(x, cotangents)
        wholes = {block.name: whole[block.name] for block in tangent.blocks}
        with monkeypatch.context() as patch:
            for module in (strips, norm):
                patch.setattr(module, "boxes", lambda grid, _: boxes(grid, most))
            record, second = tangent.record(x, cotangents), tangent.record(other)
            cut = 0
            for block, wanted, their_rows in zip(tangent.blocks, rows.split(columns, -1), theirs, strict=True):
                jacobian = record[block.name]
                check_contractions(jacobian, wanted, second[block.name], their_rows)
                if isinstance(jacobian, MatrixJacobian) and block.matrix is not None:
                    check_kronecker(block, jacobian, wholes[block.name])
                cut += isinstance(jacobian, tn.SharedOuter) and len(jacobian.strips) > 1
    assert cut or name in NETWORKS[-3:]


def test_one_strip_is_kept_and_several_are_computed_in_each_sweep() -> None:
    made: list[int] = []

    def part(box: strips.Box) -> strips.Strip:
        made.append(box[0].stop - box[0].start)
        count = made[-1]
        return torch.ones(1, count, 1, 2), torch.ones(1, 1, count, 1, 3)

    shape = (1, 1, 1, 3, 2)
    one = tn.SharedOuter(Strips.cut(part, (6,), shape, torch.float32, 6 * 13))
    one.squared_sum(), one.sum_rows()
    assert made == [6]
    made.clear()
    several = tn.SharedOuter(Strips.cut(part, (6,), shape, torch.float32, 4 * 13))
    assert not made
    several.squared_sum(), several.sum_rows()
    assert made == [4, 2, 4, 2]
    assert one.positions == several.positions == 6


def image_network() -> nn.Module:
    """Convolutions with stride, dilation and groups, and three norms."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 3, dilation=2, groups=2),
        nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 3, 3, stride=3, padding=2), nn.LayerNorm(6), nn.Tanh(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


LARGE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "image": (image_network, lambda: torch.randn(3, 2, 20, 20, dtype=torch.float64)),
    "text": (lambda: Text(3, 4), lambda: torch.randint(7, (3, 90))),
}


@pytest.mark.quick(2)
@covering(LARGE, ["text"], METHODS, "kfac")
def test_posteriors_with_a_budget_below_one_sample(
    name: str, method: lw.Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fits and predictions of one sample at a time, with room for 600 numbers, against the oracle and all at once."""
    make, inputs = LARGE[name]
    model, x = make().double().eval(), inputs()
    data = [(x[:1], torch.tensor([1])), (x[1:2], torch.tensor([0]))]
    fit = lambda: lw.fit(model, data, method, params=EVERY, prior_precision=2.0)  # noqa: E731
    test = x[2:]
    strips: list[int] = []
    cut = Strips.cut

    def noted(*args: Any) -> Strips:
        strips.append(len(found := cut(*args)))
        return found

    monkeypatch.setattr(Strips, "cut", noted)
    small = check_small_records(fit, test, 600, monkeypatch)
    assert max(strips) > 5
    strips.clear()
    latent = small.latent(test)
    rows = dense(model, test, small.tangent)
    close(latent.covariance, rows @ small.covariance.to_dense() @ rows.mT)
    assert max(strips) > 5 or isinstance(method, (lw.ELLA, lw.Full))


@pytest.mark.parametrize("name", LARGE)
def test_one_output_and_derivatives_in_the_inputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C = 1 by strips; a record that is differentiable in its inputs has all positions in one strip."""
    make, inputs = LARGE[name]
    model, x = make().double().eval(), inputs()[:1]
    tangent = tn.Tangent.survey(model, x, EVERY)
    u = torch.randn(1, 3, 1, dtype=torch.float64)
    record = replace(tangent, memory=3000).record(x, u)
    close(record.rows(), u.mT @ dense(model, x, tangent))
    if name == "image":
        found = []
        for chosen in (tangent, replace(tangent, memory=3000)):
            leaf = x.clone().requires_grad_()
            record = chosen.record(leaf)
            sum(record[block].squared_norm() for block in record).backward()
            found.append(leaf.grad)
        close(*found)
        assert found[0].abs().max() > 0


def test_repeated_tokens_are_merged() -> None:
    case = Text(2, 4).double().eval()
    tokens = torch.randint(7, (3, 50), dtype=torch.int32)
    tangent = tn.Tangent.survey(case, tokens, lw.matching("embed*"))
    jacobian = tangent.record(tokens)["embed"]
    assert jacobian.g.shape == (3, 2, 7, 4)
    close(jacobian.rows(), dense(case, tokens, tangent))


class Built(LiveBytes):
    """Counts memory that is allocated within the block, not the storage of its arguments and their views."""

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._known:
                storage = leaf.untyped_storage()
                key = storage._cdata
                self._known[key] = weakref.ref(storage, lambda _, key=key: self._known.pop(key, None))
        return super().__torch_dispatch__(function, types, args, kwargs)


def picture() -> nn.Module:
    """A small network for large images."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


HUGE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "image": (picture, lambda: torch.randn(1, 3, 192, 192)),
    "larger image": (picture, lambda: torch.randn(1, 3, 512, 512)),
    "text": (lambda: Text(10, 64), lambda: torch.randint(7, (1, 30_000))),
}


def contractions(block: tn.Block, jacobian: tn.BlockJacobian) -> dict[str, Callable[[], Any]]:
    """Every contraction of a block."""
    weights = torch.ones(jacobian.size)
    found: dict[str, Callable[[], Any]] = {
        "weighted_gram": lambda: jacobian.weighted_gram(weights),
        "variances": lambda: jacobian.weighted([DiagonalWeights(weights)], "variances"),
        "scale": lambda: jacobian.weighted([DiagonalWeights(weights)], "scale"),
        "joint": lambda: jacobian.joint_weighted_gram(weights, jacobian),
        "squared_sum": jacobian.squared_sum,
        "squared_norm": jacobian.squared_norm,
        "sum_rows": jacobian.sum_rows,
        "jvp": lambda: jacobian.jvp(torch.ones(1, jacobian.size)),
        "many jvp": lambda: jacobian.jvp(torch.ones(200, jacobian.size)),
        "gram": lambda: jacobian.gram(jacobian),
    }
    if isinstance(jacobian, MatrixJacobian):
        factors = kronecker_factors(block, jacobian, False, torch.float32)
        inputs, outputs = (torch.linalg.eigh(m)[1] if m.ndim == 3 else None for m in factors[:2])
        found["factors"] = lambda: kronecker_factors(block, jacobian, False, torch.float32)
        found["reduced factors"] = lambda: kronecker_factors(block, jacobian, True, torch.float32)
        found["rotated"] = lambda: jacobian.rotate(inputs, outputs).weighted_gram(weights)
    return found


@pytest.mark.parametrize(
    ("name", "power"),
    [("image", 24)]
    + [pytest.param(name, power, marks=SLOW) for name in ("text", "larger image") for power in (24, 26)],
)
def test_the_peak_of_one_large_sample(name: str, power: int, caplog: pytest.LogCaptureFixture) -> None:
    """Each contraction for one output builds less than twice the budget, without activations and their gradients."""
    make, inputs = HUGE[name]
    model, x = make().eval(), inputs()
    with caplog.at_level("WARNING", "lapwing"):
        tangent = tn.Tangent.survey(model, x, EVERY, memory=2**power)
    assert not caplog.records
    assert tangent.bytes_per_sample(1) > 2 * tangent.memory
    record, cut = tangent.record(x, torch.randn(1, 10, 1)), 0
    for block in record:
        jacobian = record[block]
        cut += isinstance(jacobian, tn.SharedOuter) and len(jacobian.strips) > 1
        for key, contraction in contractions(tangent.named_blocks[block], jacobian).items():
            with torch.no_grad(), Built() as built:
                contraction()
            assert built.peak < 2 * tangent.memory, f"{block} {key}: {built.peak / tangent.memory:.2f} times the budget"
    assert cut >= 2


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=[] if (name, method) == ("image", lw.KFAC()) else SLOW)
        for method in (lw.KFAC(), lw.Diagonal())
        for name in ("image", "text", "larger image")
        if name != "larger image" or method == lw.KFAC()
    ],
    ids=str,
)
def test_the_peak_of_a_posterior_of_one_large_sample(
    name: str, method: lw.Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In addition to the network's own forward pass and backward pass of one output, without the survey."""
    make, inputs = HUGE[name]
    model, x = make().eval(), inputs()
    surveyed = tn.Tangent.survey(model, x, EVERY, memory=2**24)
    with LiveBytes() as network:
        record = surveyed.record(x)
        gradients = output_gradients(record.graph, record.noted, torch.ones(1, 10, 1), False)
    del record, gradients
    monkeypatch.setattr(tn.Tangent, "survey", lambda *_, **__: surveyed)
    with LiveBytes() as fitting:
        posterior = lw.fit(model, [(x, torch.tensor([1]))], method, params=EVERY, prior_precision=1.0, memory=2**24)
    with LiveBytes() as predicting:
        posterior.latent(x)
    for live in (fitting, predicting):
        added = (live.peak - network.peak) / 2**24
        assert added < 2, f"{added:.2f} times the budget in addition to the network's {network.peak >> 20} MiB"


HEADS = {
    "1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2), (2, 11)),
    "2d": (lambda: nn.Conv2d(2, 3, (3, 2), padding=(1, 0), bias=False), (2, 5, 6)),
    "same": (lambda: nn.Conv2d(2, 3, (3, 5), padding="same"), (2, 5, 6)),
    "3d": (lambda: nn.Conv3d(1, 2, 2), (1, 3, 4, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), (2, 3, 4)),
}


@pytest.mark.parametrize("step", [7, 10_000])
@pytest.mark.parametrize("name", HEADS)
def test_lazy_patches_equal_the_patches(name, step):
    """Products with a basis are convolutions; everything else forms the patches."""
    make, shape = HEADS[name]
    layer, x = make().double(), torch.randn(3, *shape, dtype=torch.float64)
    out = layer(x)
    weights = dict(layer.named_parameters())
    arguments = [layer.stride, layer.padding, layer.dilation, 1]
    if name == "transposed":
        arguments = [layer.stride, layer.padding, layer.output_padding, 1, layer.dilation]
    function = torch.conv_transpose2d if name == "transposed" else getattr(torch, f"conv{x.ndim - 2}d")
    use = READERS[function]((x, weights["weight"], weights.get("bias"), *arguments), {}, lambda _: True)
    roles, grid = frozenset(weights), out.shape[2:]
    a = torch.cat(list(use.position_inputs(grid, step)))
    wanted = Outer(a, None, out.shape[1], bias="bias" in roles)
    parts = list(use.position_uses(grid, step))
    assert (len(parts) > 1) == (step == 7)
    basis = torch.linalg.qr(torch.randn(wanted.inputs, wanted.inputs, dtype=torch.float64))[0][None]
    first = 0
    for count, part in parts:
        found = part.jacobian(None, BatchAxis(), count, roles, torch.float64, 0)
        here = slice(first, first + count)
        first += count
        torch.testing.assert_close(found.a, wanted.a[here])
        turned, expected = found.rotate(basis, None).a, wanted.rotate(basis, None).a[here]
        torch.testing.assert_close(turned, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.rows(), wanted.rows()[here])
        other = part.jacobian(None, BatchAxis(), count, roles, torch.float32, 0)
        torch.testing.assert_close(other.a, wanted.a[here].float())
    assert first == len(a)
