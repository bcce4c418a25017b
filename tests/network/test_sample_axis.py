"""Networks whose layers hold the samples elsewhere from batch to batch: rows are autograd's, sample by sample."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import lapwing as lw
from lapwing.network.sample_axis import SampleAxisMoved
from lapwing.tangent import Tangent
from tests import oracle
from tests.conformance import covering
from tests.zoo_modules import Net

EVERY = lw.matching("*")


def unpadded(net: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Only the positions of a mask go through the layer."""
    out = x.new_zeros(*x.shape[:2], 6)
    out[mask] = torch.tanh(net.a(x[mask]))
    return net.head(out.sum(1))


def sliced(net: Any, x: Tensor, mask: Tensor) -> Tensor:
    """The same by Python's numbers, without a tensor that indexes."""
    lengths = mask.sum(1).tolist()
    parts = torch.tanh(net.a(torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)]))).split(lengths)
    return net.head(torch.stack([part.sum(0) for part in parts]))


def in_order(net: Any, x: Tensor) -> Tensor:
    """Samples are grouped by a key, as before an expert."""
    order = (x[:, 0] > 0).long().argsort(stable=True)
    return net.head(torch.tanh(net.a(x[order]))[order.argsort()])


def packed(net: Any, x: Tensor, mask: Tensor) -> Tensor:
    """A layer on the data of a packed sequence, then a recurrent one."""
    packed = pack_padded_sequence(x, mask.sum(1).cpu(), batch_first=True, enforce_sorted=False)
    data = torch.tanh(net.a(packed.data))
    again = PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
    return net.head(net.cell(again)[1][0])


def distinct(net: Any, tokens: Tensor) -> Tensor:
    """Tokens that repeat in a batch are looked up once."""
    found, where = tokens.unique(return_inverse=True)
    return torch.tanh(net.a(net.table(found)))[where]


def experts(net: Any, x: Tensor) -> Tensor:
    """Samples go to one of two layers, called without samples if none do."""
    choice, out = (x[:, 0] > 0).long(), x.new_zeros(len(x), 6)
    for i, expert in enumerate(net.experts):
        out[choice == i] = torch.tanh(expert(x[choice == i]))
    return net.head(out)


def time_major(net: Any, x: Tensor) -> Tensor:
    """Positions before samples: the same as samples alone if there is one position."""
    z = torch.tanh(net.a(x.transpose(0, 1).flatten(0, 1))).unflatten(0, (x.shape[1], x.shape[0]))
    return net.head(z.mean(0))


def gated(net: Any, x: Tensor, gate: Tensor) -> Tensor:
    """A branch with the positions first, without gradient where its gate is 0."""
    z = torch.tanh(net.a(x.transpose(0, 1))).mean(0)
    return net.head(torch.tanh(net.b(x)).mean(1) + z * gate[:, None])


def steps(net: Any, x: Tensor) -> Tensor:
    """A recurrence written by hand: as many uses as there are positions."""
    h = x.new_zeros(len(x), 6)
    for step in x.unbind(1):
        h = torch.tanh(net.w(step) + net.u(h))
    return net.head(h)


def two_layers(together: Callable[..., Tensor], outputs: int = 3) -> nn.Module:
    """The layer in question and a head."""
    return Net(together, a=nn.Linear(4, 6), head=nn.Linear(6, outputs))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_sided() -> Tensor:
    x = normal(8, 4)
    x[:4, 0] = x[:4, 0].abs()
    return x


def two_experts() -> nn.Module:
    return Net(experts, experts=nn.ModuleList(nn.Linear(4, 6) for _ in range(2)), head=nn.Linear(6, 3))


def branches() -> nn.Module:
    return Net(gated, a=nn.Linear(4, 6), b=nn.Linear(4, 6), head=nn.Linear(6, 3))


GATES = torch.tensor([0, 0, 0, 0, 1.0, 1, 0, 1])
FULL, SEQUENCES = torch.ones(8, 4, dtype=torch.bool), normal(8, 4, 4)
EVEN, UNEVEN = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0]]).bool(), torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]]).bool()
CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "unpadded, divisible": (lambda: two_layers(unpadded), (SEQUENCES, FULL), (SEQUENCES[:2], EVEN)),
    "unpadded": (lambda: two_layers(unpadded), (SEQUENCES, FULL), (SEQUENCES[:2], UNEVEN)),
    "sliced": (lambda: two_layers(sliced), (SEQUENCES, FULL), (SEQUENCES[:2], EVEN)),
    "sorted": (lambda: two_layers(in_order), one_sided(), normal(6, 4, seed=1)),
    "packed": (
        lambda: Net(packed, a=nn.Linear(4, 5), cell=nn.GRU(5, 6, batch_first=True), head=nn.Linear(6, 3)),
        (SEQUENCES, FULL), (SEQUENCES[:2], EVEN),
    ),
    "distinct": (
        lambda: Net(distinct, table=nn.Embedding(20, 4), a=nn.Linear(4, 3)), torch.arange(8), torch.tensor([3, 1, 1, 7])
    ),
    "experts, first to one": (two_experts, one_sided(), normal(6, 4, seed=1)),
    "experts": (two_experts, normal(8, 4), normal(6, 4, seed=1)),
    "time-major": (lambda: two_layers(time_major), normal(8, 1, 4), normal(4, 3, 4, seed=1)),
    "gated": (branches, (SEQUENCES, GATES), (SEQUENCES[:3], torch.tensor([0, 1.0, 1]))),
    "gated, divisible": (branches, (SEQUENCES, GATES), (SEQUENCES[:4], torch.tensor([0, 1.0, 1, 0]))),
    "steps": (
        lambda: Net(steps, w=nn.Linear(4, 6), u=nn.Linear(6, 6), head=nn.Linear(6, 3)),
        normal(8, 5, 4), normal(4, 3, 4, seed=1),
    ),
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, Any, Any]:
    kind, first, then = CASES[name]
    torch.manual_seed(0)
    return kind().double().eval(), first, then


def part(inputs: Any, n: int) -> Any:
    return oracle.take(inputs, slice(n, n + 1))


def truth(model: nn.Module, tangent: Tangent, inputs: Any) -> Tensor:
    """J (B, C, P), one sample after the other, by plain autograd: torch.func does not take packed sequences."""
    names, rows = list(tangent.parameters), []
    weights = [model.get_parameter(name) for name in names]
    for n in range(oracle.batch_size(inputs)):
        slopes = [
            torch.autograd.grad(f, weights, retain_graph=True, allow_unused=True, materialize_grads=True)
            for f in oracle.call(model, part(inputs, n))[0]
        ]
        found = dict(zip(names, map(torch.stack, zip(*slopes, strict=True)), strict=True))  # (C, *shape)
        rows.append(torch.cat([block.join(found) for block in tangent.blocks], -1))
    return torch.stack(rows)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_one_sample_at_a_time(name: str) -> None:
    model, first, then = made(name)
    tangent = Tangent.survey(model, first, EVERY)
    for inputs in (first, then, then, first):
        found = torch.cat([record.rows() for _, record in tangent.records(inputs)])
        torch.testing.assert_close(found, truth(model, tangent, inputs), rtol=1e-10, atol=1e-12)


@pytest.mark.quick(3)
@covering(
    CASES, ["packed", "steps"],
    {"kfac": lw.KFAC(), "ekfac": lw.EKFAC(), "diagonal": lw.Diagonal(), "full": lw.Full(), "ella": lw.ELLA(9, 12)},
    "kfac",
)  # fmt: skip
def test_posteriors_do_not_depend_on_how_samples_come(name: str, method: lw.Method) -> None:
    model, first, then = made(name)
    options = {"params": EVERY, "likelihood": "categorical", "prior_precision": 1.0}
    together, alone = [], []
    for inputs in (first, then):
        labels = torch.arange(oracle.batch_size(inputs)) % 3
        together.append((inputs, labels))
        alone += [(part(inputs, n), labels[n : n + 1]) for n in range(len(labels))]
    one = lw.fit(model, together, method, **options)
    other = lw.fit(model, [together[0], *alone[len(together[0][1]) :]], method, **options)
    variances = [other.latent(part(then, n)).variance for n in range(oracle.batch_size(then))]
    torch.testing.assert_close(one.latent(then).variance, torch.cat(variances), rtol=1e-8, atol=1e-10)


def empty(net: Any, tokens: Tensor) -> Tensor:
    """A table that is also averaged, for samples without tokens."""
    none, mean = (tokens == 0).all(1), net.table(tokens).mean(1)
    return net.head(torch.where(none[:, None], net.table.weight.mean(0), mean) if none.any() else mean)


TABLE = Net(empty, table=nn.Embedding(7, 4), head=nn.Linear(4, 3)).double().eval()
WITH_TOKENS, WITHOUT = torch.arange(1, 7).reshape(3, 2), torch.zeros(1, 2, dtype=torch.long)


def test_a_use_that_the_first_batch_shows_is_generic() -> None:
    """`test_refusals.py` has the one that it does not show."""
    tangent = Tangent.survey(TABLE, torch.cat([WITHOUT, WITH_TOKENS]), EVERY)
    assert {line.block: line.family for line in tangent.coverage.lines}["table.weight"] == "generic"
    torch.testing.assert_close(tangent.record(WITH_TOKENS).rows(), truth(TABLE, tangent, WITH_TOKENS))


def test_known_shapes_cost_no_further_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    ours = lw.network.sample_axis.moved_layer
    monkeypatch.setattr(lw.network.sample_axis, "moved_layer", lambda *a: looked.append(1) or ours(*a))
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double().eval()
    x = normal(6, 1, 4, 4)
    tangent = Tangent.survey(model, x, EVERY)
    for _ in range(3):
        tangent.record(x)
    assert len(looked) == 1
    tangent.record(x[:5])
    tangent.record(x[:1])  # one sample holds what it holds
    assert len(looked) == 2
    model, first, _ = made("sorted")
    tangent = Tangent.survey(model, first, EVERY)
    for _ in range(3):
        tangent.record(first[:4])
    assert len(looked) == 5


@pytest.mark.quick(1)
@pytest.mark.parametrize("samples", [2, 16, 17, 70])
def test_any_two_samples_that_change_places_are_seen(samples: int) -> None:
    swap: list[int] = []

    def swapped(net: Any, x: Tensor) -> Tensor:
        order = torch.arange(len(x))
        order[swap] = order[swap[::-1]]
        return net.head(torch.tanh(net.a(x.index_select(0, order))).index_select(0, order))

    model, x = two_layers(swapped).double().eval(), normal(samples, 4)
    tangent = Tangent.survey(model, x, EVERY)
    tangent.record(x)
    pairs = [(i, j) for i in range(samples) for j in range(i)]
    for pair in pairs[:: max(1, len(pairs) // 150)]:
        swap[:] = pair
        with pytest.raises(SampleAxisMoved):
            tangent.record(x)


@pytest.mark.parametrize(
    ("samples", "passes", "dtype"),
    [(2, 2, torch.float32), (64, 2, torch.float32), (65, 4, torch.float64), (17, 2, torch.bfloat16),
     (16, 2, torch.float16), (17, 4, torch.float16)],
)  # fmt: skip
def test_a_look_takes_two_backward_passes_a_digit(
    samples: int, passes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    ours = lw.network.sample_axis.output_gradients
    noting = lambda f, noted, u, *a, **k: taken.append(u) or ours(f, noted, u, *a, **k)  # noqa: E731
    monkeypatch.setattr(lw.network.sample_axis, "output_gradients", noting)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype).eval(), torch.randn(samples, 4)
    Tangent.survey(model, x[:2].to(dtype), EVERY).record(x.to(dtype))
    assert sum(u.shape[-1] for u in taken) == passes


def cast(net: Any, x: Tensor) -> Tensor:
    """Weights that are cast, made contiguous and looked at in every call, as many networks do."""
    z = nn.functional.linear(x, net.a.weight.to(x.dtype), net.a.bias.type_as(x))
    z = nn.functional.layer_norm(z, (6,), net.norm.weight.contiguous(), net.norm.bias)
    net.penalty = net.a.weight.pow(2).sum()
    return net.head(torch.tanh(z)) + 0.0 * sum(p.sum() for p in net.parameters())


@pytest.mark.parametrize("method", [None, lw.KFAC()], ids=str)
def test_weights_cast_and_looked_at_are_no_other_use(method: lw.Method | None, reloaded: Any) -> None:
    model, x = Net(cast, a=nn.Linear(4, 6), norm=nn.LayerNorm(6), head=nn.Linear(6, 3)).double().eval(), normal(8, 4)
    loader = [(x[:5], torch.arange(5) % 3), (x[5:], torch.arange(3))]
    posterior = lw.fit(model, loader, *([method] if method else []), prior_precision=1.0)
    tangent = posterior.tangent
    if method:
        torch.testing.assert_close(tangent.record(x).rows(), truth(model, tangent, x))
    again = reloaded(posterior, model)
    torch.testing.assert_close(again.latent(x).variance, posterior.latent(x).variance)
    assert again.tangent.plan == tangent.plan


def test_half_precision_is_no_false_alarm(caplog: pytest.LogCaptureFixture) -> None:
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Sigmoid())]
    model, x = nn.Sequential(*layers, nn.Linear(8, 3)), normal(64, 8).float()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        lw.fit(model.to(dtype).eval(), [(x.to(dtype), torch.arange(64) % 3)], lw.KFAC(), prior_precision=1.0)
    assert "one by one" not in caplog.text


def test_one_warning_that_samples_are_taken_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    model, first, then = made("unpadded")
    tangent = Tangent.survey(model, first, EVERY)
    for _ in range(2):
        assert len(list(tangent.records(then))) == 2
    assert caplog.text.count("They are taken one by one, which is slow") == 1


def twice(net: Any, x: Tensor, mask: Tensor) -> Tensor:
    """The layer in question is called on what the mask keeps and on what it leaves out."""
    out = x.new_zeros(*x.shape[:2], 6)
    out[mask] = torch.tanh(net.a(x[mask]))
    out[~mask] = torch.sin(net.a(x[~mask]))
    return net.head(out.sum(1))


@pytest.mark.quick(2)
@pytest.mark.parametrize(("together", "outputs"), [(unpadded, 3), (twice, 200)])
@pytest.mark.parametrize("case", ["float64", "bfloat16", "frozen layer", "frozen head"])
def test_edges_of_samples_taken_one_by_one(together: Callable[..., Tensor], outputs: int, case: str) -> None:
    """Many outputs, a module called twice, half precision and frozen layers: the rows are those of samples alone."""
    dtype = torch.bfloat16 if case == "bfloat16" else torch.float64
    model = two_layers(together, outputs).to(dtype).eval()
    if "frozen" in case:
        (model.a if case == "frozen layer" else model.head).requires_grad_(False)
    first, then = (SEQUENCES.to(dtype), FULL), (SEQUENCES[:2].to(dtype), UNEVEN)
    if together is twice:
        first = (first[0], FULL.index_fill(1, torch.tensor(3), False))
    for params in (EVERY, lw.everything):
        tangent = Tangent.survey(model, first, params)
        found = torch.cat([record.rows() for _, record in tangent.records(then)])
        alone = torch.cat([tangent.record(part(then, n)).rows() for n in range(2)])
        trained = copy.deepcopy(model).double().requires_grad_(True)
        exact = truth(trained, tangent, (then[0].double(), then[1]))
        assert found.shape == exact.shape
        torch.testing.assert_close(found, alone, rtol=1e-2 if case == "bfloat16" else 1e-10, atol=1e-12)
        assert (found.double() - exact).norm() < (0.05 if case == "bfloat16" else 1e-10) * exact.norm()


class Decomposed(nn.Module):
    """A low-rank update whose size is taken out by a detached norm, for which its factors see an identity matrix."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)
        self.size = nn.Parameter(torch.rand(outputs) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight + self.up(self.down(torch.eye(self.down.in_features, dtype=x.dtype))).T
        return self.size / weight.norm(dim=1).detach() * (self.base(x) + self.up(self.down(x)))


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_use_that_the_outputs_do_not_depend_on_holds_no_samples(count: int, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Decomposed(8, 6), nn.Tanh(), Decomposed(6, 3)).double().eval()
    x = torch.randn(5, 8).double()
    tangent = Tangent.survey(model, x[:4])
    assert {line.block for line in tangent.coverage.generic} == {"0.size", "2.size"}
    found = torch.cat([record.rows() for _, record in tangent.records(x[:count])])
    torch.testing.assert_close(found, oracle.jacobian(model, x[:count], tangent.parameters))
    assert not caplog.records
