"""Checks of the zoo and of the oracle by themselves, without the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import oracle
from tests.zoo import ZOO, Case

B = 3
cases = pytest.mark.parametrize("case", ZOO.values(), ids=ZOO.keys())


def _close(actual: Tensor, expected: Tensor, rtol: float = 1e-12, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def _hessian(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Compute a Hessian by reverse mode over reverse mode (`torch.func.hessian` warns: forward mode uses torch.jit)."""
    return torch.func.jacrev(torch.func.jacrev(function))(at)


def _moved_outputs(case: Case, x: Any, step: Tensor) -> Tensor:
    """Compute the outputs of a fresh model whose parameters moved by a step (P,), without `functional_call`."""
    model = case.build()
    named = dict(oracle.uncompiled(model).named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, where in oracle.parameter_slices(model).items():
            named[name] += step[where].view_as(named[name])
    return oracle.outputs(model, x)


@pytest.mark.quick(10)
@cases
def test_jacobian_agrees_with_central_differences(case: Case) -> None:
    model, x = case.build(), case.inputs(B, 0)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    before = oracle.flat_parameters(model)
    J = oracle.jacobian(model, x)
    assert J.shape == (B, case.outputs, len(before))
    # a random unit direction, zero on padding rows, which take no gradient by convention: (P,)
    direction, step = torch.randn(len(before), generator=torch.Generator().manual_seed(7)).double(), 1e-5
    for name, where in oracle.parameter_slices(model).items():
        module = oracle.uncompiled(model).get_submodule(name.rpartition(".")[0])
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            direction[where].view_as(module.weight)[module.padding_idx] = 0
    direction /= direction.norm()
    difference = (_moved_outputs(case, x, step * direction) - _moved_outputs(case, x, -step * direction)) / (2 * step)
    derivative = J @ direction  # (B, C)
    assert (derivative - difference).norm() < 1e-5 * difference.norm()
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    _close(oracle.flat_parameters(model), before, rtol=0, atol=0)


def test_softmax_fisher_is_the_hessian_of_the_cross_entropy() -> None:
    f = ZOO["mlp"].inputs(B, 0)
    for logits, block in zip(f, oracle.softmax_fisher(f), strict=True):
        _close(block, _hessian(lambda z: -torch.log_softmax(z, 0)[1], logits))


def test_linear_regression_has_its_closed_form_evidence_and_predictive_covariance() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(6, 1, generator=generator, dtype=torch.float64)
    noise, delta = 0.3, 0.5 + torch.rand(4, generator=generator, dtype=torch.float64)
    mean0 = torch.full((4,), 0.2, dtype=torch.float64)
    model = nn.Linear(4, 1, bias=False).double()
    J = oracle.jacobian(model, x)
    G = oracle.ggn(J, oracle.gaussian_fisher(y, noise))
    Sigma = oracle.laplace_covariance(G, delta)
    mode = Sigma @ (x.T @ y[:, 0] / noise + delta * mean0)
    with torch.no_grad():
        model.weight.copy_(mode[None])
    likelihood = oracle.gaussian_log_likelihood(oracle.outputs(model, x), y, noise)
    kernel = x @ torch.diag(1 / delta) @ x.T
    observed = kernel + noise * torch.eye(6, dtype=torch.float64)
    marginal = torch.distributions.MultivariateNormal(x @ mean0, observed).log_prob(y[:, 0])
    _close(oracle.evidence(likelihood, mode, G, delta, mean0), marginal)
    expected = kernel - kernel @ torch.linalg.solve(observed, kernel)  # Gaussian-process posterior
    _close(oracle.joint_output_covariance(J, Sigma)[:, 0, :, 0], expected)
    _close(oracle.output_covariance(J, Sigma)[:, 0, 0], expected.diag())
