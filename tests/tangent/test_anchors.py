"""Anchors: every contraction of chosen rows of the Jacobian equals the rows written out by the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lapwing.covariance.base import split_blocks
from lapwing.data.inputs import Inputs
from lapwing.tangent import Anchors, Tangent
from tests.conformance import Setup, close, setup

NETWORKS = ("mlp", "mlp_scalar", "cnn_bn_inplace", "grouped_strided_conv", "attention", "tied", "gpt2", "prelu")


class Narrow(Tangent):
    """A network whose chunks hold two samples."""

    def chunk_length(self, *arguments: object, **options: object) -> int:
        """Two."""
        return 2


def narrow(tangent: Tangent) -> Tangent:
    return Narrow(*(getattr(tangent, field) for field in tangent.__dataclass_fields__))


@pytest.fixture(params=NETWORKS)
def case(request: pytest.FixtureRequest) -> tuple[Setup, Anchors, Tensor]:
    """A network, anchors that pick some samples not at all, once and several times, and their rows (M, P)."""
    problem = setup(request.param)
    count = problem.J.shape[1]
    samples = [5, 0, 2, 5, 7, 2, 5][: 7 if count > 2 else 4]
    outputs = [samples[:i].count(sample) % count for i, sample in enumerate(samples)]
    anchors = Anchors(narrow(problem.tangent), (Inputs(problem.x),), torch.tensor(samples), torch.tensor(outputs))
    return problem, anchors, problem.J[samples, outputs]


def weights(problem: Setup) -> dict[str, float]:
    return {block.name: 0.5 + i for i, block in enumerate(problem.blocks)}


def diagonal(problem: Setup) -> Tensor:
    return torch.cat([torch.full((block.size,), 0.5 + i) for i, block in enumerate(problem.blocks)]).double()


@pytest.mark.quick(4)
def test_rows_gram_combinations_and_products(case):
    problem, anchors, J = case
    blocks = problem.blocks
    close(anchors.rows(torch.float64), J)
    for slots, rows in anchors.row_chunks(torch.float64):
        close(rows, J[slots])
    close(anchors.gram(weights(problem), torch.float64), (J * diagonal(problem)) @ J.T)
    coefficients = torch.randn(3, len(anchors), generator=torch.Generator().manual_seed(0)).double()
    for name, vectors in split_blocks(blocks, coefficients @ J).items():
        close(anchors.combine(coefficients)[name], vectors)
    record = problem.tangent.record(problem.test)
    close(anchors.products(record, weights(problem)), problem.J_test @ (J * diagonal(problem)).T)
    vectors = torch.randn(2, J.shape[1], generator=torch.Generator().manual_seed(1)).double()
    close(anchors.inner(split_blocks(blocks, vectors)), vectors @ J.T)


def test_outputs_of_one_sample_that_do_not_fit_together():
    problem = setup("mlp")
    count = problem.J.shape[1]
    samples, outputs = torch.arange(3).repeat_interleave(count), torch.arange(count).repeat(3)
    J = problem.J[:3].flatten(0, 1)
    one = problem.tangent.bytes_per_sample(1, torch.float64)
    anchors = Anchors(replace(problem.tangent, memory=one), (Inputs(problem.x),), samples, outputs)
    assert [len(slots) for slots, _ in anchors.records(torch.float64)] == [1] * len(J)
    close(anchors.rows(torch.float64), J)
    close(anchors.gram(weights(problem), torch.float64), (J * diagonal(problem)) @ J.T)


def test_round_trip_and_groups_of_different_shapes():
    problem = setup("gpt2")
    x = problem.case.inputs(9, 1)
    groups = (Inputs(x), Inputs(problem.case.inputs(3, 4)))
    samples, outputs = torch.tensor([10, 1]), torch.tensor([1, 0])
    anchors = Anchors(problem.tangent, groups, samples, outputs)
    again = Anchors.from_tensors(problem.tangent, anchors.tensors(), anchors.nests())
    close(again.rows(torch.float64), anchors.rows(torch.float64))
    close(again.rows(torch.float64)[1], problem.J[1, 0])
