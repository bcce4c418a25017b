"""Cotangents: a tensor, a function and the outputs themselves give the records that the dense Jacobian gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lapwing.data.inputs import Inputs
from lapwing.methods import Batch
from lapwing.tangent import EVERY_OUTPUT, Cotangents, Reading
from lapwing.tangent.cotangents import ComputedCotangents, GivenCotangents
from tests.conformance import Setup, close, setup


class Squared(Cotangents):
    """One column, of which the entries are squared outputs."""

    columns = 1

    def __call__(self, outputs: Tensor) -> Tensor:
        return outputs.square()[..., None]


KINDS = ("tensor", "function", "class", "every output")


def cotangents_of(kind: str, problem: Setup) -> tuple[Cotangents, Tensor]:
    """Returns cotangents of the samples of a problem, and their values (B, C, R)."""
    f = problem.f
    if kind == "every output":
        return EVERY_OUTPUT, torch.eye(f.shape[1], dtype=f.dtype).expand(len(f), -1, -1)
    squared = f.square()[..., None]
    of_function = ComputedCotangents(Squared(), f.shape[1])
    return {"tensor": GivenCotangents(squared), "function": of_function, "class": Squared()}[kind], squared


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_its_rows(kind):
    problem = setup("mlp")
    given, u = cotangents_of(kind, problem)
    wanted = u.mT @ problem.J
    tangent = problem.tangent
    close(tangent.record(problem.x, given).rows(), wanted)
    ((rows, record),) = tangent.records(problem.x, given)
    assert rows == slice(0, len(problem.x))
    close(record.rows(), wanted)
    weights = torch.rand(len(problem.x), dtype=u.dtype) + 0.5
    batch = Batch(tangent, Inputs(problem.x), problem.y, 0, weights=weights)
    ((_, record),) = batch.records(given)
    roots = torch.ones_like(weights) if kind == "every output" else weights.sqrt()  # for the outputs there is no Λ
    close(record.rows(), wanted * roots[:, None, None])


def test_only_the_columns_and_the_scratch_shorten_chunks():
    """A function counts as C columns, since its R is not known before a chunk runs."""
    problem = setup("mlp")
    tangent = replace(problem.tangent, memory=problem.tangent.bytes_per_sample(1) * 4)
    chunks = {kind: list(tangent.records(problem.x, cotangents_of(kind, problem)[0])) for kind in ("class", "function")}
    lengths = {kind: part[0][0].stop for kind, part in chunks.items()}
    assert lengths == {
        "class": tangent.chunk_length(1),
        "function": tangent.chunk_length(tangent.outputs),
    }
    assert lengths["class"] == 4 > lengths["function"]
    assert next(rows.stop for rows, _ in tangent.records(problem.x, Squared(), reading=Reading(tangent.memory))) == 1
