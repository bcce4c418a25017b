"""Every contraction of every network of the zoo against the dense Jacobian of `torch.func.jacrev`."""

from __future__ import annotations

from math import prod

import pytest
import torch

import lapwing as lw
from lapwing import tangent as tn
from lapwing.jacobian import shared_outer
from lapwing.jacobian.jacobian import DiagonalWeights, SumOfUses, reflect_
from lapwing.jacobian.layers.embedding import OneHot, TiedTable
from lapwing.jacobian.outer import Outer
from lapwing.jacobian.strips import Strips
from lapwing.linalg import add_squares, mirrored
from tests import conformance, oracle
from tests.quick import others_slow
from tests.zoo import ZOO
from tests.zoo_modules import Net

EVERY = tn.matching("*")


def survey(case, samples: int = 5, params=EVERY):
    model = case.build()
    x = case.inputs(samples, 1)
    return model, x, tn.Tangent.survey(model, x, params)


def dense(model, x, tangent) -> torch.Tensor:
    """The oracle's Jacobian (B, C, P), columns in the order of the tangent's blocks."""
    return conformance.jacobian(model, x, tangent.blocks)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


def kronecker_factors(block, jacobian, reduce: bool, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A, Γ and the count of positions, as a pass that begins with zeros has them."""
    groups, outputs, inputs = block.matrix_shape
    one_hot = block.matrix.one_hot
    a = torch.zeros((groups, inputs) if one_hot else (groups, inputs, inputs), dtype=dtype)
    gamma = torch.zeros(groups, outputs, outputs, dtype=dtype)
    count = jacobian.add_kronecker_factors(reduce, a, gamma)
    return a if one_hot else mirrored(a), mirrored(gamma), count


def check_weighted(jacobian, rows: torch.Tensor, weights: torch.Tensor) -> None:
    """`J diag(w) Jᵀ` for several w (n, P), its variances and its scale, against rows J (B, R, P)."""
    centred, turned = rows - rows.mean(1, keepdim=True), reflect_(rows.clone(), 1)
    norms = [torch.stack([part.square() @ w for part in (rows, centred)]) for w in weights]
    wanted = {
        "covariances": [(turned * w) @ turned.mT for w in weights],
        "variances": norms,
        "scale": [both[1].sum(-1) for both in norms],
    }
    for reads, tensors in wanted.items():
        found = list(jacobian.weighted((DiagonalWeights(w) for w in weights), reads))
        close(torch.stack(found), torch.stack(tensors))
        assert reads != "scale" or torch.stack(found).min() >= 0


def check_contractions(jacobian, rows: torch.Tensor, theirs, their_rows: torch.Tensor) -> None:
    """Every contraction of a block against products with its rows J (B, R, P), and with those of another record."""
    size = rows.shape[-1]
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(2, size, dtype=torch.float64, generator=generator) + 0.1
    vectors = torch.randn(4, size, dtype=torch.float64, generator=generator)
    weighted = [(rows * w) @ rows.mT for w in weights]
    flat = rows.flatten(0, 1)
    close(jacobian.rows(), rows)
    close(jacobian.weighted_gram(weights[0]), weighted[0])
    check_weighted(jacobian, rows, weights)
    factors = jacobian.weighted_factors([DiagonalWeights(w) for w in weights])
    assert (factors is None) == (not isinstance(jacobian, Outer))
    if factors is not None:
        g = jacobian.g if factors[0] is None else factors[0]
        for scale, gram in zip(factors[1], weighted, strict=True):
            close((g * scale.unsqueeze(1)) @ g.mT, gram)
    close(jacobian.squared_sum(), rows.square().sum((0, 1)))
    close(jacobian.squared_norm(), rows.square().sum())
    close(jacobian.sum_rows(), rows.sum(0))
    close(jacobian.jvp(vectors), rows @ vectors.T)
    u = torch.randn(*rows.shape[:2], 3, dtype=torch.float64, generator=generator)
    close(jacobian.vjp(u), torch.einsum("nrs,nrp->sp", u, rows))
    index = torch.randperm(size, generator=generator)[: min(size, 7)].sort().values
    close(torch.cat(list(jacobian.columns(index, index.tolist())), -1), rows[..., index])
    close(jacobian.joint_weighted_gram(weights[0], jacobian).flatten(2).flatten(0, 1), (flat * weights[0]) @ flat.T)
    close(
        jacobian.joint_weighted_gram(weights[0], theirs).flatten(2).flatten(0, 1),
        (flat * weights[0]) @ their_rows.flatten(0, 1).T,
    )
    close(jacobian.gram(theirs).flatten(2).flatten(0, 1), flat @ their_rows.flatten(0, 1).T)
    close(theirs.gram(jacobian).flatten(2).flatten(0, 1), their_rows.flatten(0, 1) @ flat.T)
    close(jacobian.gram(jacobian).flatten(2).flatten(0, 1), flat @ flat.T)


@pytest.mark.parametrize("name", ZOO)
def test_contractions_equal_dense_products(name):
    case = ZOO[name]
    model, x, tangent = survey(case)
    other, sizes = case.inputs(3, 7), [block.size for block in tangent.blocks]
    plain, theirs = dense(model, x, tangent), dense(model, other, tangent).split(sizes, -1)
    torch.testing.assert_close(tangent.record(x).outputs.reshape(5, -1), oracle.outputs(model, x))
    u = torch.randn(5, case.outputs, 2, dtype=torch.float64)
    for cotangents, rows in ((None, plain), (u, u.mT @ plain)):
        record, second = tangent.record(x, cotangents), tangent.record(other)
        close(record.rows(), rows)
        for block, mine, their_rows in zip(tangent.blocks, rows.split(sizes, -1), theirs, strict=True):
            check_contractions(record[block.name], mine, second[block.name], their_rows)


@pytest.mark.parametrize("name", others_slow(ZOO))
def test_products_with_vectors_by_either_mode(name, monkeypatch):
    """K = 1 direction and C > 2 outputs take forward mode; both modes equal the dense product, cotangents applied."""
    case = ZOO[name]
    model, x, tangent = survey(case)
    vectors = {b.name: torch.randn(1, b.size, dtype=torch.float64) for b in tangent.blocks}
    flat = torch.cat(list(vectors.values()), -1)
    jacobian, calls = dense(model, x, tangent), []
    plain = tn.record.forward_products

    def noted(*args):
        found = plain(*args)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(tn.record, "forward_products", noted)
    u = torch.randn(5, case.outputs, 4, dtype=torch.float64)
    for cotangents, rows in ((None, jacobian), (u, u.mT @ jacobian)):
        found = tangent.record(x, cotangents).jvp(vectors)
        torch.testing.assert_close(found, rows @ flat.T, rtol=1e-8, atol=1e-9)
    assert len(calls) == 1 + (case.outputs > 2)
    if name in ("mlp", "cnn_bn_inplace", "attention", "vit", "mha", "residual_block"):
        assert all(calls)


def test_a_table_used_by_two_families():
    """One table read by token and multiplied with soft tokens: two uses of one layout."""
    hard = lambda net, tokens: torch.nn.functional.embedding(tokens, net.table).mean(1)  # noqa: E731
    together = lambda net, tokens, soft: net.head(torch.tanh(hard(net, tokens) + soft @ net.table))  # noqa: E731
    model = Net(together, table=torch.nn.Parameter(torch.randn(6, 4)), head=torch.nn.Linear(4, 3)).double().eval()
    inputs = (torch.randint(6, (5, 3)), torch.randn(5, 6, dtype=torch.float64))
    tangent = tn.Tangent.survey(model, inputs, EVERY)
    assert not tangent.coverage.generic
    torch.testing.assert_close(tangent.record(inputs).rows(), dense(model, inputs, tangent), rtol=1e-9, atol=1e-10)
    posterior = lw.fit(model, [(*inputs, torch.randint(3, (5,)))], lw.KFAC(), params=EVERY, tune=None)
    assert posterior.latent(inputs).variance.min() > 0


def shared(batch: int, cotangents: int, positions: int, groups: int, outputs: int, inputs: int) -> tn.SharedOuter:
    a = torch.randn(batch, positions, groups, inputs, dtype=torch.float64)
    g = torch.randn(batch, cotangents, positions, groups, outputs, dtype=torch.float64)
    return tn.SharedOuter(Strips.whole(a, g))


def summed(form) -> torch.Tensor:
    """J (B, R, P) by the defining sum over positions."""
    ((a, g),) = form.strips
    return torch.einsum("nrtgo,ntgi->nrgoi", g, a).flatten(2)


@pytest.mark.quick(3)
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("slice_bytes", [2**24, 3000, 1])
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ((3, 2, 4, 1, 5, 6), (4, 3, 7, 1, 5, 6)),
        ((3, 2, 4, 3, 2, 5), (2, 1, 6, 3, 2, 5)),
        ((1, 1, 1, 2, 3, 2), (5, 4, 3, 2, 3, 2)),
        ((2, 5, 9, 1, 1, 1), (3, 2, 1, 1, 1, 1)),
    ],
)
def test_ntk_blocks_by_rows_and_by_positions(mine, theirs, slice_bytes, by_rows, monkeypatch):
    """Both ways, for any costs: one strip or several, different lengths, groups, and slices down to one entry."""
    monkeypatch.setattr(tn.SharedOuter, "rows_are_cheaper", lambda *_: by_rows)
    plain, other = shared(*mine), shared(*theirs)
    wanted = torch.einsum("nrp,mqp->nrmq", summed(plain), summed(other))
    for lengths in ((9, 9), (1, 2), (2, 5)):
        first, second = (
            tn.SharedOuter(in_strips(form.strips, length)).within(slice_bytes)
            for form, length in zip((plain, other), lengths, strict=True)
        )
        close(first.gram(second), wanted)
        close(second.gram(first), wanted.permute(2, 3, 0, 1))
        close(first.gram(first), torch.einsum("nrp,mqp->nrmq", summed(plain), summed(plain)))


def in_strips(strips: Strips, length: int) -> Strips:
    """Returns the strips, cut to at most `length` positions."""
    return Strips([lambda strip=strip: strip for strip in strips.finer(length)], strips.shape, strips.dtype)


@pytest.mark.parametrize("slice_bytes", [2**24, 500, 1])
def test_ntk_blocks_of_mixed_kinds(slice_bytes):
    """Pairs of all forms that blocks of one shape can take, cut into slices of their own."""
    outputs, inputs = 3, 4
    size = outputs * inputs
    first = tn.Outer(torch.randn(2, inputs).double(), torch.randn(2, 3, outputs).double(), outputs)
    last = tn.Outer(torch.randn(4, inputs).double(), None, outputs)
    hot = OneHot(torch.randint(inputs, (3, 5)), torch.randn(3, 2, 5, outputs).double(), inputs)
    forms = [first, last, hot, shared(5, 2, 3, 1, outputs, inputs), tn.Rows(torch.randn(2, 2, size).double())]
    forms.append(SumOfUses([shared(3, 2, 2, 1, outputs, inputs), tn.Rows(torch.randn(3, 2, size).double())]))
    for first in forms:
        for second in forms:
            mine, theirs = first.within(slice_bytes), second.within(slice_bytes)
            close(mine.gram(theirs), torch.einsum("nrp,mqp->nrmq", mine.rows(), theirs.rows()))


def test_the_cheaper_way_to_an_ntk_block_is_taken():
    """A wide convolution with few positions goes by positions, a narrow one with many goes by rows."""
    few, many = shared(8, 1, 4, 1, 64, 289), shared(8, 1, 64, 1, 4, 9)
    assert not few.rows_are_cheaper(few.strips)
    assert many.rows_are_cheaper(many.strips)
    many_outputs = shared(8, 60, 4, 1, 8, 9)
    assert many_outputs.rows_are_cheaper(many_outputs.strips)


@pytest.mark.quick(6)
@pytest.mark.parametrize("by_pairs", [True, False])
@pytest.mark.parametrize("cache", [2**20, 700, 1])
@pytest.mark.parametrize(
    "shape", [(3, 4, 3, 1, 5, 6), (1, 1, 2, 3, 2, 5), (5, 2, 40, 2, 3, 4), (2, 3, 9, 1, 1, 12), (3, 1, 1, 2, 4, 1)]
)
def test_sums_of_rows_in_parts_and_by_pairs_of_positions(shape, cache, by_pairs, monkeypatch):
    """Both ways, rotated on one side, on both and on none, in parts down to one number."""
    monkeypatch.setattr(shared_outer, "CACHE_BYTES", cache)
    monkeypatch.setattr(tn.SharedOuter, "pairs_are_cheaper", lambda *_, norms=False: by_pairs)
    form, size = shared(*shape), prod(shape[3:])
    form.within(max(form.pair_bytes, 2**20 if cache == 2**20 else 0))  # norms: all samples at once, or one by one
    groups, outputs, inputs = shape[3:]
    rows = summed(form).unflatten(-1, shape[3:])
    weights = torch.rand(2, size, dtype=torch.float64)
    for sides in ((None, None), (inputs, None), (None, outputs), (inputs, outputs)):
        turns = [None if n is None else torch.randn(groups, n, n, dtype=torch.float64) for n in sides]
        eyes = [
            torch.eye(n, dtype=torch.float64).expand(groups, n, n) if turn is None else turn
            for n, turn in zip((inputs, outputs), turns, strict=True)
        ]
        turned = torch.einsum("gop,nrgoi,gij->nrgpj", eyes[1], rows, eyes[0]).flatten(2)
        rotated = form.rotate(*turns)
        close(rotated.rows(), turned)
        close(rotated.squared_sum(), turned.square().sum((0, 1)))
        for count in (1, 2):
            check_weighted(rotated, turned, weights[:count])


def test_squares_of_rows_that_cancel_are_not_below_zero(monkeypatch):
    """As those of a key's bias in attention, which no output depends on: rounding must not make a variance of them."""
    monkeypatch.setattr(tn.SharedOuter, "pairs_are_cheaper", lambda *_, norms=False: True)
    a, g = torch.ones(1, 3, 1, 1).double(), torch.randn(1, 1, 3, 1, 500).double()
    g[:, :, 2] = -g[:, :, :2].sum(2)
    sums = tn.SharedOuter(Strips.whole(a, g)).squared_sum()
    assert sums.min() == 0
    assert sums.max() < 1e-14


def test_sums_of_a_layer_that_no_token_reaches_are_zero():
    form = shared(2, 3, 0, 1, 4, 5)
    assert not form.squared_sum().any()
    assert not form.weighted_gram(torch.ones(20, dtype=torch.float64)).any()


def test_pairs_of_positions_are_taken_where_they_are_few():
    """The last feature maps of a ResNet have pairs, its first ones rows; a strip of many is never joined for pairs."""
    last, first = shared(1, 10, 4, 1, 64, 576), shared(1, 10, 64, 1, 16, 144)
    asked = (0, False), (1, False), (1, True)  # the number of weights, and whether norms are read
    assert all(last.pairs_are_cheaper(*each) for each in (*asked, (17, True)))
    assert not any(first.pairs_are_cheaper(*each) for each in asked)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("size", [1, 128, 129, 300])
def test_symmetric_products_by_their_lower_triangles(size, groups):
    """What has been added twice, mirrored, is the whole product."""
    first, second = torch.randn(2, groups, 7, size, dtype=torch.float64)
    sums = torch.zeros(groups, size, size, dtype=torch.float64)
    add_squares(sums, first)
    add_squares(sums, second)
    close(mirrored(sums), first.mT @ first + second.mT @ second)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("first", ["samples", "cotangents"])
@pytest.mark.parametrize("size", [5, 128, 300])
def test_a_layer_adds_the_factors_it_returns(size, first, bias):
    """By triangles and whole, gradients in either order of memory, with and without a bias."""
    g = torch.randn(4, 2, 140).double()
    g = g if first == "samples" else g.transpose(0, 1).contiguous().transpose(0, 1)
    form = tn.Outer(torch.randn(4, size).double(), g, 140, bias)
    sums = torch.zeros(1, size + bias, size + bias).double(), torch.zeros(1, 140, 140).double()
    assert form.add_kronecker_factors(False, *sums) == 4
    a = form.a.double()
    close(mirrored(sums[0]), (a.T @ a)[None])
    close(mirrored(sums[1]), torch.einsum("nro,nrp->op", g, g)[None])
    basis, turn = torch.randn(1, size + bias, size + bias).double(), torch.randn(1, 140, 140).double()
    close(form.rotate(basis, turn).rows(), torch.einsum("nro,op,ni,ij->nrpj", g, turn[0], a, basis[0]).flatten(2))


@pytest.mark.parametrize("layout", ["maps of samples", "maps of cotangents", "channels last"])
@pytest.mark.parametrize("channels", [3, 20])
def test_output_factors_do_not_depend_on_how_gradients_lie_in_memory(layout, channels):
    a, g = torch.randn(4, 9, 1, 5, dtype=torch.float64), torch.randn(4, 2, 9, 1, channels, dtype=torch.float64)
    wanted_inputs, wanted = torch.einsum("ntgi,ntgj->gij", a, a), torch.einsum("nrtgo,nrtgp->gop", g, g)
    orders = {"maps of samples": (0, 1, 3, 4, 2), "maps of cotangents": (1, 0, 3, 4, 2), "channels last": range(5)}
    order = tuple(orders[layout])
    back = [order.index(dim) for dim in range(5)]
    laid = g.permute(order).contiguous().permute(back)
    inputs, outputs = torch.zeros(1, 5, 5, dtype=torch.float64), torch.zeros(1, channels, channels, dtype=torch.float64)
    assert tn.SharedOuter(Strips.whole(a, laid)).add_kronecker_factors(False, inputs, outputs) == 36
    torch.testing.assert_close(inputs.tril(), wanted_inputs.tril())
    torch.testing.assert_close(outputs.tril(), wanted.tril())


def tied_networks() -> dict:
    """Networks whose table is their embedding and the matrix of their last layer."""
    look, hidden = torch.nn.functional.embedding, lambda net, x: torch.tanh(net.hidden(x))
    return {
        "triples": lambda net, x: (look(x[:, 0], net.table) * look(x[:, 1], net.table)) @ net.table.T,
        "one lookup, padding": lambda net, x: hidden(net, look(x[:, 0], net.table, 0)) @ net.table.T,
        "positions": lambda net, x: (hidden(net, look(x, net.table)) @ net.table.T).square().sum(1),
        "two heads": lambda net, x: (
            look(x[:, 0], net.table) @ net.table.T + hidden(net, look(x[:, 1], net.table)) @ net.table.T
        ),
    }


@pytest.mark.parametrize("name", tied_networks())
def test_a_tied_table_forms_no_rows_for_sums_of_squares(name, monkeypatch):
    parts = {"table": torch.nn.Parameter(torch.randn(6, 4)), "hidden": torch.nn.Linear(4, 4)}
    model = Net(tied_networks()[name], **parts).double().eval()
    x, other = torch.randint(6, (7, 3)), torch.randint(6, (3, 3))
    tangent = tn.Tangent.survey(model, x, tn.matching("table"))
    (block,) = tangent.blocks
    plain, theirs = dense(model, x, tangent), dense(model, other, tangent)
    u = torch.randn(7, 6, 2, dtype=torch.float64)
    for cotangents, rows in ((None, plain), (u, u.mT @ plain)):
        jacobian = tangent.record(x, cotangents)[block.name]
        assert isinstance(jacobian, TiedTable)
        check_contractions(jacobian, rows, tangent.record(other)[block.name], theirs)
    monkeypatch.setattr(OneHot, "row_slices", lambda self: pytest.fail("rows of the table"))
    posterior = lw.fit(
        model, (x, torch.rand(7, 6) < 0.5), lw.KFAC(), params=tn.matching("table"), likelihood="bernoulli"
    )
    assert posterior.predict(x).probs.shape == (7, 6)
