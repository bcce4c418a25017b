"""NTK blocks of a batch and moving anchors: the oracle's values, and gradients against finite differences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lapwing.data import nesting
from lapwing.data.inputs import Inputs
from lapwing.likelihoods import Categorical
from lapwing.methods.valla.inducing import DrawnOnce, kernel
from lapwing.tangent import Anchors, Cotangents
from lapwing.tangent.cotangents import ComputedCotangents
from tests import oracle
from tests.conformance import Setup, close, jacobian, setup
from tests.tangent.test_anchors import diagonal, narrow, weights

NETWORKS = ("mlp", "mlp_scalar", "cnn_bn_inplace", "grouped_strided_conv", "attention", "conv1d", "prelu", "vit")
PICKED = torch.tensor([1, 0, 2, 1, 3]), torch.tensor([0, 0, 1, 1, 0])  # one sample twice


def points(problem: Setup, small: bool = False) -> Anchors:
    """Five rows at four samples that are not training data; networks of one output have four rows."""
    inputs = problem.case.inputs(4, 7)
    samples, outputs = PICKED
    if problem.J.shape[1] == 1:
        samples, outputs = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    tangent = narrow(problem.tangent) if small else problem.tangent
    return Anchors(tangent, (Inputs(inputs),), samples, outputs)


def moved(anchors: Anchors, leaves: list[Tensor]) -> Anchors:
    nest = nesting.flatten(anchors.inputs[0])[1]
    return replace(anchors, inputs=(nesting.unflatten(leaves, nest),))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "small"),
    [*((name, True) for name in (*NETWORKS, "tied", "gpt2", "embedding_bag_of_tokens", "lstm")), ("mlp", False)],
)
def test_blocks_equal_the_oracle(name, small):
    problem = setup(name)
    anchors = points(problem, small)
    rows = jacobian(problem.model, anchors.inputs[0].value, problem.blocks)[anchors.samples, anchors.outputs]
    found = kernel(anchors, weights(problem), problem.test)
    D = diagonal(problem)
    close(found.inner, (rows * D) @ rows.T)
    close(found.cross, problem.J_test @ (rows * D).T)
    close(found.within, (problem.J_test * D) @ problem.J_test.mT)
    close(found.outputs, oracle.outputs(problem.model, problem.test))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "small"),
    [*((name, True) for name in NETWORKS[:-1]), ("mlp", False), pytest.param("vit", True, marks=pytest.mark.slow)],
)
def test_gradients_equal_finite_differences(name, small):
    """Central differences of random sums of K_Z and K_xZ, along random directions in Z."""
    problem = setup(name)
    anchors, generator = points(problem, small), torch.Generator().manual_seed(0)
    leaves = [leaf.clone().requires_grad_() for leaf in anchors.inputs[0].tensors]

    def draw(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    first = kernel(moved(anchors, leaves), weights(problem), problem.test)
    inner, cross = draw(first.inner.shape), draw(first.cross.shape)  # K_Z's need not be symmetric

    def value(at: list[Tensor]) -> Tensor:
        found = kernel(moved(anchors, at), weights(problem), problem.test)
        return (found.inner * inner).sum() + (found.cross * cross).sum()

    grads = torch.autograd.grad(value(leaves), leaves)
    for _ in range(3):
        directions, step = [draw(leaf.shape) for leaf in leaves], 1e-5
        with torch.no_grad():
            sides = [
                value([x.detach() + s * step * d for x, d in zip(leaves, directions, strict=True)]) for s in (1, -1)
            ]
        slope = (sides[0] - sides[1]) / (2 * step)
        wanted = sum((g * d).sum() for g, d in zip(grads, directions, strict=True))
        torch.testing.assert_close(wanted, slope, rtol=2e-5, atol=2e-5 * float(first.inner.detach().abs().max()))


class DrawnRoot(Cotangents):
    """One random column a sample, the same for any chunks."""

    columns = 1

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, outputs: Tensor) -> Tensor:
        return torch.stack([torch.rand(f.shape[0], 1, generator=self.generator).to(f) for f in outputs])


def test_cotangents_are_those_of_the_root():
    """Λ's root in place of the outputs; a drawn one is drawn once, whatever the chunks."""
    problem = setup("mlp")
    anchors = points(problem)
    root = problem.likelihood.fisher_root(problem.f)
    rows = jacobian(problem.model, anchors.inputs[0].value, problem.blocks)[anchors.samples, anchors.outputs]
    roots = ComputedCotangents(Categorical().fisher_root, problem.tangent.outputs)
    found = kernel(anchors, dict.fromkeys(weights(problem), 1.0), problem.x, roots)
    close(found.cross, root.mT @ problem.J @ rows.T)
    close(found.within, root.mT @ problem.J @ problem.J.mT @ root)
    leaf = anchors.inputs[0].value.clone().requires_grad_()
    grads = []
    for small in (False, True):
        fisher = DrawnOnce(DrawnRoot())
        tangent = narrow(problem.tangent) if small else problem.tangent
        there = replace(anchors, inputs=(Inputs(leaf),), tangent=tangent)
        found = kernel(there, weights(problem), oracle.take(problem.x, slice(0, 2)), fisher)
        assert found.cross.shape[1] == 1
        grads.append(torch.autograd.grad(found.cross.square().sum(), leaf)[0])
    close(grads[1], grads[0])


def test_only_some_leaves_move():
    problem = setup("bilinear")
    anchors = points(problem)
    first, second = anchors.inputs[0].tensors
    first = first.clone().requires_grad_()
    both = [leaf.detach().clone().requires_grad_() for leaf in (first, second)]
    grads = [
        torch.autograd.grad(kernel(moved(anchors, leaves), weights(problem), problem.test).cross.sum(), leaves[0])[0]
        for leaves in ([first, second], both)
    ]
    close(grads[0], grads[1])


def test_nothing_is_left_behind():
    """No gradient reaches the weights, and the network is as before."""
    problem = setup("cnn_bn_inplace")
    anchors = points(problem)
    leaf = anchors.inputs[0].value.clone().requires_grad_()
    kernel(moved(anchors, [leaf]), weights(problem), problem.test).inner.sum().backward()
    assert leaf.grad is not None
    assert all(p.grad is None for p in problem.model.parameters())
