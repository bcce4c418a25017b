"""Many outputs within the memory budget: groups of blocks and slices of cotangents do not change results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import tangent as tn
from lapwing.jacobian.jacobian import MatrixJacobian, Sliced
from lapwing.tangent.record import grouped
from papers.common.measure import LiveBytes
from tests.conformance import covering
from tests.jacobian.test_contractions import check_contractions, close, dense, kronecker_factors, survey
from tests.zoo import ZOO
from tests.zoo_modules import Net

EVERY, SLOW = lw.matching("*"), pytest.mark.slow
NETWORKS = (
    "mlp", "mlp_scalar", "cnn_bn_inplace", "grouped_strided_conv", "conv1d", "attention", "mha_seq_first", "gpt2",
    "tied", "embedding_bag_of_tokens", "shared_module", "functional_reuse", "custom_parameter", "lstm", "all_frozen",
)  # fmt: skip
LONG = ("grouped_strided_conv", "conv1d", "attention", "lstm")
"""They take seconds; the same layers are in `cnn_bn_inplace`, `gpt2`, `custom_parameter` and the networks of strips."""


def heaviest(record: tn.Record) -> int:
    """Returns the maximum number of entries that one block needs."""
    return max(sum(record.load(block)) for block in record.tangent.blocks)


def with_budget(tangent: tn.Tangent, inputs: Any, cotangents: Any, part: float) -> tn.Tangent:
    """Returns the tangent with a budget of this part of the memory of a record's heaviest block."""
    return replace(tangent, memory=int(8 * part * heaviest(tangent.record(inputs, cotangents))))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "part"),
    [pytest.param(name, 0.4, marks=SLOW if name in LONG else []) for name in NETWORKS]
    + [("mlp", 1.0), ("attention", 1.0), ("shared_module", 0.02)]
    + [pytest.param(name, 0.02, marks=SLOW) for name in ("mlp", "cnn_bn_inplace", "tied")],
)
def test_contractions_with_a_tiny_budget(name: str, part: float) -> None:
    """All, a few or one of the cotangents of the heaviest block fit; in the last case rows are formed in parts, too."""
    case = ZOO[name]
    model, x, tangent = survey(case, samples=3)
    other = case.inputs(2, 7)
    columns = [block.size for block in tangent.blocks]
    u = torch.randn(3, case.outputs, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain, theirs = dense(model, x, tangent), dense(model, other, tangent).split(columns, -1)
    for cotangents, rows in ((None, plain), (u, u.mT @ plain), (u[..., :1], u[..., :1].mT @ plain)):
        small = with_budget(tangent, x, cotangents, part)
        record, second, whole = small.record(x, cotangents), small.record(other), tangent.record(x, cotangents)
        kinds = set()
        for block, wanted, their_rows in zip(tangent.blocks, rows.split(columns, -1), theirs, strict=True):
            jacobian = record[block.name]
            kinds.add(type(jacobian))
            check_contractions(jacobian, wanted, second[block.name], their_rows)
            if isinstance(jacobian, MatrixJacobian) and block.matrix is not None:
                check_kronecker(block, jacobian, whole[block.name])
        assert (Sliced in kinds) == (part < 1 and record.cotangents > 1)
        close(record.rows(), rows)
        vectors = {b.name: torch.randn(5, b.size, dtype=torch.float64) for b in tangent.blocks}
        close(record.jvp(vectors), rows @ torch.cat(list(vectors.values()), -1).T)


def check_kronecker(block: tn.Block, jacobian: MatrixJacobian, whole: Any) -> None:
    """Factors and rotations equal those of the whole block."""
    for reduce in (False, True):
        found, wanted = (kronecker_factors(block, one, reduce) for one in (jacobian, whole))
        close(found[0], wanted[0])
        close(found[1], wanted[1])
        assert found[2] == wanted[2]
    inputs, outputs = (torch.linalg.eigh(matrix)[1] if matrix.ndim == 3 else None for matrix in wanted[:2])
    found, wanted = jacobian.rotate(inputs, outputs), whole.rotate(inputs, outputs)
    weights = torch.rand(whole.size, dtype=torch.float64)
    close(found.weighted_gram(weights), wanted.weighted_gram(weights))
    close(found.squared_sum(), wanted.squared_sum())
    close(found.joint_weighted_gram(weights, found), wanted.joint_weighted_gram(weights, wanted))


def test_blocks_in_any_order() -> None:
    case = ZOO["cnn_bn_inplace"]
    model, x, tangent = survey(case)
    small = with_budget(tangent, x, None, 1.0)
    names = [block.name for block in tangent.blocks]
    wanted = dict(zip(names, dense(model, x, tangent).split([b.size for b in tangent.blocks], -1), strict=True))
    record = small.record(x)
    kept = {name: record[name] for name in reversed(names)}
    for name in (*names, *reversed(names)):
        close(record[name].rows(), wanted[name])
        close(kept[name].rows(), wanted[name])


def test_groups_are_consecutive_and_as_long_as_fits() -> None:
    loads = [(3, 12), (3, 12), (100, 400), (1, 4), (1, 4), (1, 4)]
    assert grouped(loads, 18) == [range(0, 2), range(2, 3), range(3, 6)]
    assert grouped(loads, 17) == [range(0, 1), range(1, 2), range(2, 3), range(3, 6)]
    assert grouped(loads, 5) == [range(i, i + 1) for i in range(6)]
    assert grouped(loads, 10**6) == [range(0, 6)]


def test_backward_passes_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """One set of backward passes if all blocks fit; otherwise each group runs once per sweep."""
    _, x, tangent = survey(ZOO["cnn_bn_inplace"])
    calls: list[int] = []
    plain = tn.record.output_gradients
    monkeypatch.setattr(tn.record, "output_gradients", lambda *args: calls.append(len(args[1])) or plain(*args))
    record = tangent.record(x)
    for name in (*record, *record):
        record[name].squared_sum()
    assert calls == [3]
    record, calls[:] = with_budget(tangent, x, None, 1.0).record(x), []
    for name in record:
        record[name].squared_sum()
    assert 1 < len(calls) <= len(record)


METHODS = {
    "kfac": lw.KFAC(), "ekfac": lw.EKFAC(), "reduce": lw.KFAC(weight_sharing="reduce", uncovered="dense"),
    "diagonal": lw.Diagonal(), "ella": lw.ELLA(6, 12), "ella_residual": lw.ELLA(6, 12, residual="prior"),
    "full": lw.Full(form="primal"),
}  # fmt: skip


def check_small_records(
    fit: Callable[[], lw.Posterior], test: Any, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> lw.Posterior:
    """Checks that a fit whose records have room for `numbers` entries equals the usual fit, and returns it."""
    whole = fit()
    wanted, joint = whole.latent(test), whole.latent(test, joint=True)
    init = tn.Record.__init__

    def tiny(self: tn.Record, *args: Any) -> None:
        init(self, *args)
        self._limit = self._slice_bytes = numbers

    monkeypatch.setattr(tn.Record, "__init__", tiny)
    small = fit()
    close(small.covariance.to_dense(), whole.covariance.to_dense())
    close(small.latent(test).covariance, wanted.covariance)
    close(small.latent(test).variance, wanted.variance)
    close(small.latent(test, joint=True).covariance, joint.covariance)
    close(torch.tensor(small.log_marginal_likelihood()), torch.tensor(whole.log_marginal_likelihood()))
    return small


@pytest.mark.quick(2)
@covering(
    ["mlp", "cnn_bn_inplace", "attention", "tied", "embedding_bag_of_tokens"], ["cnn_bn_inplace"], METHODS, "kfac"
)
def test_fits_and_predictions_with_a_tiny_budget(name: str, method: lw.Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records have room for a few hundred entries. The memory of methods is not limited."""
    case = ZOO[name]
    model, x, y = case.build(), case.inputs(9, 1), case.targets(9, 1)
    fit = lambda: lw.fit(model, [(x[:5], y[:5]), (x[5:], y[5:])], method, params=EVERY, prior_precision=2.0)  # noqa: E731
    sliced: list[int] = []
    row_slices = Sliced.row_slices

    def noted(self: Sliced) -> Any:
        sliced.append(self.size)
        return row_slices(self)

    monkeypatch.setattr(Sliced, "row_slices", noted)
    check_small_records(fit, case.inputs(4, 2), 100 if name == "mlp" else 500, monkeypatch)
    if not isinstance(method, (lw.ELLA, lw.Full)):
        assert sliced


class Text(nn.Module):
    """A long sequence through layers of every family."""

    def __init__(self, outputs: int, width: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, width, padding_idx=0), nn.LayerNorm(width)
        self.conv, self.mix = nn.Conv1d(width, width, 3, padding=1), nn.Linear(width, 2 * width)
        self.head = nn.Linear(2 * width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.norm(self.embed(tokens))
        h = h + torch.relu(self.conv(h.mT).mT)
        return self.head(torch.tanh(self.mix(h)).mean(1))


@pytest.mark.slow
@pytest.mark.parametrize("power", [24, 25])
def test_the_peak_of_many_outputs_at_many_positions(power: int) -> None:
    """400 outputs at 1024 positions: one sample's gradients are 225 MiB, 14 times the smallest budget."""
    model, x = Text(400, 32).eval(), torch.randint(7, (2, 1024))
    tangent = tn.Tangent.survey(model, x, EVERY, memory=2**power)
    assert tangent.bytes_per_sample() > 20 * tangent.memory
    found: dict[str, Tensor] = {}
    with torch.no_grad(), LiveBytes() as live:
        for _, record in tangent.records(x[:1]):
            for name in record:
                jacobian = record[name]
                found[name] = jacobian.weighted_gram(torch.ones(jacobian.size))
                if name == "conv":
                    found["squares"] = jacobian.squared_sum()
                    block = tangent.named_blocks[name]
                    inputs, outputs, _ = kronecker_factors(block, jacobian, False, torch.float32)
                    rotated = jacobian.rotate(torch.linalg.eigh(inputs)[1], torch.linalg.eigh(outputs)[1])
                    found["rotated"] = rotated.weighted_gram(torch.ones(jacobian.size))
    held = sum(value.numel() * value.element_size() for value in found.values())
    assert live.peak - held < 2 * tangent.memory, f"{(live.peak - held) / tangent.memory:.2f} times the budget"
    whole = replace(tangent, memory=2**34).record(x[:1])["conv"]
    wanted = whole.weighted_gram(torch.ones(whole.size))
    scale = float(wanted.abs().max())
    torch.testing.assert_close(found["conv"], wanted, rtol=1e-3, atol=1e-5 * scale)
    torch.testing.assert_close(found["rotated"], wanted, rtol=1e-3, atol=1e-5 * scale)
    squares = whole.squared_sum()
    torch.testing.assert_close(found["squares"], squares, rtol=1e-3, atol=1e-5 * float(squares.max()))


@pytest.mark.parametrize("positions", [4, pytest.param(64, marks=SLOW)])
def test_the_peak_of_many_outputs_of_a_wide_layer(positions: int) -> None:
    """Its rows (100 MiB) are formed in parts. With 4 positions the gradients fit, and slices of rows must fit, too."""
    wide = lambda net, x: net.head(torch.tanh(net.mix(x)).mean(1))  # noqa: E731
    model = Net(wide, mix=nn.Linear(256, 256), head=nn.Linear(256, 400)).eval()
    x = torch.randn(1, positions, 256)
    tangent = tn.Tangent.survey(model, x, EVERY, memory=2**24)
    with torch.no_grad(), LiveBytes() as live:
        jacobian = tangent.record(x)["mix"]
        gram, squares = jacobian.weighted_gram(torch.ones(jacobian.size)), jacobian.squared_sum()
    assert isinstance(jacobian, Sliced) == (positions == 64)
    held = gram.numel() * gram.element_size() + squares.numel() * squares.element_size()
    assert live.peak - held < 2 * tangent.memory, f"{(live.peak - held) / tangent.memory:.2f} times the budget"
    wanted = replace(tangent, memory=2**34).record(x)["mix"].weighted_gram(torch.ones(jacobian.size))
    torch.testing.assert_close(gram, wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()))
