"""Messages of every label and target error: count of bad values, index of the first, and line to write."""

from __future__ import annotations

import pytest
import torch

from lapwing.errors import LapwingError
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian

LABELS = [
    # outputs' shape, labels, what the message must say
    (
        (4, 3),
        torch.tensor([0, -1, 2, -1]),
        ["labels 0 to 2", "2 of 4", "index 1: -1", "keep = (y >= 0)", "ignore_index=-1"],
    ),
    ((4, 3), torch.tensor([0, 1, -1, 2]), ["1 of 4", "index 2: -1", "keep = (y >= 0) & (y < 3)"]),
    ((4, 3), torch.tensor([0, 255, 1, 255]), ["2 of 4", "index 1: 255", "lw.Categorical(ignore_index=255)"]),
    ((4, 3), torch.tensor([0, 5, 1, 7]), ["2 of 4", "features, 8)`, or correct the labels"]),
    ((4, 3), torch.tensor([1, 2, 3, 3]), ["2 of 4", "index 2: 3", "y = y - 1"]),
    ((4, 2), torch.tensor([-1, 1, 1, -1]), ["2 of 4", "index 0: -1", "y = (y + 1) // 2"]),
    ((4, 3), torch.tensor([0, 7, 1, 2], dtype=torch.int32), ["1 of 4", "index 1: 7", "torch.int32", "features, 8)"]),
    ((4, 3), torch.tensor([0, 7, 1, 2], dtype=torch.uint16), ["1 of 4", "index 1: 7", "torch.uint16", "y = y.long()"]),
    ((4, 3), torch.tensor([0.0, 1.0, 2.0, 0.0]), ["torch.float32", "(4,)", "y.long()", '"gaussian"']),
    ((4, 3), torch.tensor([0.0, 0.5, 2.0, 0.0]), ["torch.float32", 'Write `likelihood="gaussian"` for real targets.']),
    ((4, 2), torch.tensor([True, False, True, True]), ["torch.bool", "y.long()"]),
    ((4, 3), torch.tensor([0.0, float("nan"), 1.0, float("nan")]), ["2 of 4", "NaN", "index 1", "~y.isnan()"]),
    ((4, 3), torch.tensor([[0], [1], [2], [0]]), ["(4,)", "(4, 1)", "torch.int64", "y.squeeze(1)"]),
    ((4, 3), torch.eye(3, dtype=torch.long)[[0, 1, 2, 0]], ["(4,)", "(4, 3)", "y.argmax(1)"]),
    ((4, 3), torch.eye(3, dtype=torch.bool)[[0, 1, 2, 0]], ["(4,)", "bool", "y.long().argmax(1)"]),
    ((4, 3), torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 0], [1, 1, 1]]), ["(4, 3)", "likelihood='bernoulli'"]),
    ((4, 3), 20 + torch.eye(3, dtype=torch.long)[[0, 1, 2, 0]], ["(4, 3)", "likelihood='gaussian'", "y.float()"]),
    ((4, 3), torch.tensor([0, 1]), ["(4,)", "(2,)", "one label for each input"]),
    ((4, 1), torch.tensor([0, 1, 0, 1]), ["at least 2 outputs", "(4, 1)", "'bernoulli'", "features, 2)"]),
    ((4, 5, 3), torch.zeros(4, 5, dtype=torch.long), ["(4, 5, 3)", "(4, 5)", "f.reshape(-1, C)"]),
    ((4, 3), torch.zeros(4, dtype=torch.long, device="meta"), ["cpu", "meta", 'y.to("cpu")']),
    ((4, 3), [0, 1, 2, 0], ["list", "torch.as_tensor(y)"]),
]
TARGETS = [
    ((4, 1), torch.tensor([0.0, float("nan"), 1.0, float("inf")]), ["2 of 4", "index 1: nan", "keep = y.isfinite()"]),
    (
        (4, 2),
        torch.tensor([[0.0, 1], [1, float("inf")], [0, 0], [0, 0]]),
        ["1 of 8", "(1, 1): inf", "isfinite().all(1)"],
    ),
    ((4, 2), torch.tensor([0.0, 1, 1, 0]), ["(4, 2)", "(4,)", "y.long()", "torch.nn.Linear(features, 1)"]),
    (
        (4, 2),
        torch.full((4,), 0.5),
        ["(4, 2)", "(4,)", "torch.float32", "Give the network one output, `torch.nn.Linear"],
    ),
    ((4, 3), torch.zeros(4, dtype=torch.long), ["(4, 3)", "(4,)", "torch.int64", '"categorical"']),
    ((4, 1), torch.zeros(3, 1), ["(4, 1) or (4,)", "(3, 1)", "one target for each output"]),
    ((4, 1), torch.zeros(4, 2), ["(4, 1) or (4,)", "(4, 2)"]),
    ((4, 1), torch.zeros(1, 4), ["(1, 4)", "y.T"]),
    ((4, 2), torch.zeros(2, 4), ["(2, 4)", "y.T"]),
    ((4, 6), torch.zeros(4, 2, 3), ["(4, 2, 3)", "y.reshape(len(y), 6)"]),
    ((4, 1), torch.zeros(4, dtype=torch.bool), ["torch.bool", "y.float()"]),
    ((4, 1), torch.zeros(4, dtype=torch.complex64), ["torch.complex64", "y.real"]),
    ((4, 1), torch.zeros(4, device="meta"), ["meta", 'y.to("cpu")']),
]
BINARY = [
    ((4, 1), torch.tensor([0, 1, 2, 1]), ["1 of 4", "index 2: 2", "neither", '"categorical"']),
    ((4, 1), torch.tensor([-1, 1, 1, -1]), ["2 of 4", "index 0: -1", "(y + 1) // 2"]),
    ((4, 1), torch.tensor([-1.0, 1.0, 1.0, -1.0]), ["index 0: -1.0", "(y + 1) / 2"]),
    ((4, 1), torch.tensor([-1.0, 1.0, 0.0, -1.0]), ["2 of 4", '"gaussian"']),
    ((4, 2), torch.tensor([[0.0, 1], [0.25, 0], [1, 1], [0, 0.75]]), ["2 of 8", "(1, 0): 0.25", "y > 0.5"]),
    ((4, 1), torch.tensor([0.0, float("nan"), 1.0, 1.0]), ["1 of 4", "index 1: nan", "keep = ~y.isnan()"]),
    ((4, 2), torch.full((4, 2), float("nan")), ["8 of 8", "~y.isnan().any(1)"]),
    ((4, 1), torch.tensor([0.0, 3.7, 1.0, 1.0]), ["1 of 4", "index 1: 3.7", '"gaussian"']),
    ((4, 3), torch.zeros(4, dtype=torch.long), ["(4, 3)", "(4,)", '"categorical"']),
    ((4, 2), torch.zeros(4, dtype=torch.bool), ["(4, 2)", "(4,)", "`y.long()` and", '"categorical"']),
    ((4, 2), torch.zeros(2, 4, dtype=torch.bool), ["(4, 2)", "(2, 4)", "torch.bool", "y.T"]),
    ((4, 1), torch.zeros(1, 4), ["(4, 1) or (4,)", "(1, 4)"]),
    ((4, 1), torch.zeros(4, dtype=torch.complex64), ["torch.complex64", "y.real"]),
    ((4, 1), torch.zeros(4, device="meta"), ["meta", 'y.to("cpu")']),
    ((4, 1), [0, 1, 0, 1], ["list", "torch.as_tensor(y)"]),
]


CASES = {Categorical(): LABELS, Gaussian(): TARGETS, Bernoulli(): BINARY}


@pytest.mark.parametrize(
    ("likelihood", "shape", "targets", "said"),
    [(likelihood, *case) for likelihood, cases in CASES.items() for case in cases],
)
def test_errors_say_what_is_wrong_and_what_to_write(likelihood, shape, targets, said):
    with pytest.raises(LapwingError) as caught:
        likelihood.check(torch.zeros(shape), targets)
    message = str(caught.value)
    assert message.startswith(type(likelihood).__name__)
    assert all(part in message for part in said), message


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_good_answers_pass_in_every_dtype(dtype, shape):
    outputs, answers = torch.arange(-2.0, 2.0)[:, None], torch.tensor([0, 1, 1, 0])
    targets = answers.to(dtype).reshape(shape)
    Bernoulli().check(outputs, targets)
    wanted = torch.where(answers == 1, outputs[:, 0].sigmoid(), (-outputs[:, 0]).sigmoid()).log()
    torch.testing.assert_close(Bernoulli().log_prob(outputs, targets), wanted)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.int64, torch.uint64])
def test_good_labels_pass_in_every_integer_dtype(dtype):
    labels = torch.tensor([0, 2, 1], dtype=dtype)
    Categorical().check(torch.zeros(3, 3), labels)
    assert Categorical().log_prob(torch.zeros(3, 3), labels).shape == (3,)


def test_targets_never_broadcast_against_outputs():
    outputs, targets = torch.arange(4.0)[:, None], torch.arange(4.0)
    assert Gaussian(1.0).statistics(outputs, targets)["squared_error"] == 0
    with pytest.raises(LapwingError, match=r"\(4, 2\)"):
        Gaussian(1.0).log_prob(torch.zeros(4, 2), torch.zeros(4))


def test_empty_batches_pass():
    cases = (
        (Categorical(), 3, torch.zeros(0, dtype=torch.long)),
        (Gaussian(1.0), 1, torch.zeros(0)),
        (Bernoulli(), 1, torch.zeros(0)),
    )
    for likelihood, outputs, targets in cases:
        likelihood.check(torch.zeros(0, outputs), targets)
        assert likelihood.log_prob(torch.zeros(0, outputs), targets).shape == (0,)
