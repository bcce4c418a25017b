"""A former posterior as the prior: exact where the model is linear, and its quadratic form with its gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests.conformance import close
from tests.trained import minimised
from tests.zoo import ZOO


@pytest.mark.parametrize("method", [lw.Full(form="primal"), lw.Full(form="dual"), lw.KFAC()], ids=str)
def test_one_half_after_the_other_is_both_at_once(method: lw.Method) -> None:
    """Conjugate Bayesian linear regression: mean and covariance. KFAC is exact with one layer and equal noises."""
    x = torch.randn(40, 3, dtype=torch.float64)
    y = x @ torch.randn(3, 2, dtype=torch.float64) + 0.3 * torch.randn(40, 2, dtype=torch.float64)
    options: Any = {"likelihood": lw.Gaussian(0.09), "prior_precision": 2.0}

    def loss(model: nn.Module, part: slice) -> Tensor:
        return (model(x[part]) - y[part]).square().sum() / (2 * 0.09)

    def decay(model: nn.Module) -> Tensor:
        return sum(weight.square().sum() for weight in model.parameters())  # δ/2 = 1

    first, second, both = slice(0, 17), slice(17, 40), slice(0, 40)
    start = nn.Linear(3, 2).double()
    whole = copy.deepcopy(start)
    minimised(whole, lambda: loss(whole, both) + decay(whole))
    former = copy.deepcopy(start)
    minimised(former, lambda: loss(former, first) + decay(former))
    posterior = lw.fit(former.eval(), (x[first], y[first]), method, **options)
    model = copy.deepcopy(former)
    minimised(model, lambda: loss(model, second) + posterior.penalty(model))
    for name, value in whole.state_dict().items():
        close(model.state_dict()[name], value, 1e-10)
    continued = lw.fit(model.eval(), (x[second], y[second]), prior=posterior)
    expected = lw.fit(whole.eval(), (x, y), method, **options)
    close(continued.latent(x).covariance, expected.latent(x).covariance, 1e-10)
    assert continued.samples == 40
    assert continued.prior_precision == 2.0
    for name, mean in posterior.tangent.mean().items():
        assert torch.equal(continued.prior.mean[name], mean)


def further_trained(model: nn.Module, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for value in model.parameters():
            value += 0.1 * torch.randn_like(value)
    return model


METHODS = {
    "primal": lw.Full(form="primal"), "dual": lw.Full(form="dual"), "diagonal": lw.Diagonal(), "kfac": lw.KFAC(),
    "dense": lw.KFAC(uncovered="dense"), "ekfac": lw.EKFAC(), "ella": lw.ELLA(rank=4, rows="all", residual="prior"),
}  # fmt: skip


@pytest.mark.quick(5)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["mlp", "cnn_bn_inplace", "tied"])
def test_the_penalty_is_the_dense_quadratic_form(name: str, method: str) -> None:
    case = ZOO[name]
    model, x, y = case.build(), case.inputs(6, 0), case.targets(6, 0)
    posterior = lw.fit(model, (x, y) if isinstance(x, Tensor) else [(x, y)], METHODS[method], prior_precision=2.0)
    other = further_trained(model)
    parameters = {n: p for n, p in other.named_parameters() if n in posterior.tangent.parameters}
    value = posterior.penalty(other)
    gradients = dict(zip(parameters, torch.autograd.grad(value, list(parameters.values())), strict=True))
    distance = {n: p.detach() - posterior.tangent.parameters[n].detach() for n, p in parameters.items()}
    flat = torch.cat([block.join(distance) for block in posterior.tangent.blocks])
    product = torch.linalg.solve(posterior.covariance.to_dense(), flat)
    close(value.detach(), flat @ product / 2, 1e-7)
    close(torch.cat([block.join(gradients) for block in posterior.tangent.blocks]), product, 1e-7)
    assert float(posterior.penalty(copy.deepcopy(model)).detach()) == 0.0


@pytest.mark.parametrize("method", ["primal", "dual", "diagonal"])
def test_the_precision_is_the_former_one_and_the_new_curvature(method: str, reloaded: Any) -> None:
    """Against dense sums of both Fisher matrices, each at the weights of its time, with an uneven last batch."""
    case = ZOO["mlp"]
    model, x, y = case.build(), case.inputs(9, 0), case.targets(9, 0)
    posterior = lw.fit(model, (x[:5], y[:5]), METHODS[method], prior_precision=2.0)
    other = further_trained(model)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    continued = lw.fit(other, [(x[5:8], y[5:8]), (x[8:], y[8:])], prior=posterior)
    parts = [fisher(model, x[:5]), fisher(other, x[5:])]
    dense = sum(part if method != "diagonal" else part.diagonal().diag() for part in parts)
    eye = torch.eye(len(dense), dtype=dense.dtype)
    close(continued.covariance.to_dense(), torch.linalg.inv(dense + 2 * eye), 1e-8)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
    loaded = reloaded(continued, other)
    close(loaded.latent(x).covariance, continued.latent(x).covariance, 1e-12)
    for one in (continued, loaded):
        assert one.diagnose().log_evidence is None
        with pytest.raises(lw.LapwingError, match="evidence is not defined for a posterior whose prior"):
            one.log_marginal_likelihood()
    third = further_trained(other, 2)
    again = lw.fit(third, (x[:3], y[:3]), prior=loaded)
    dense = dense + (fisher(third, x[:3]) if method != "diagonal" else fisher(third, x[:3]).diagonal().diag())
    close(again.covariance.to_dense(), torch.linalg.inv(dense + 2 * eye), 1e-8)


def fisher(model: nn.Module, x: Tensor) -> Tensor:
    """Returns G (P, P) of a classifier, in the order of the library's blocks."""
    posterior = lw.fit(model, (x, torch.zeros(len(x), dtype=torch.long)), lw.Diagonal(), prior_precision=1.0)
    rows = posterior.tangent.record(x, posterior.likelihood.fisher_root, torch.float64).rows().flatten(0, 1)
    return rows.T @ rows


def test_the_treated_weights_are_those_of_the_former_fit() -> None:
    case = ZOO["mlp"]
    model, data = case.build(), (case.inputs(9, 0), case.targets(9, 0))
    last = lw.fit(model, data, lw.KFAC(), params=lw.last_layer, prior_precision=1.0)
    assert lw.fit(further_trained(model), data, prior=last).tangent.size == last.tangent.size


def test_the_penalty_of_half_precision_and_under_autocast() -> None:
    model = nn.Linear(3, 2).bfloat16().eval()
    x, y = torch.randn(9, 3).bfloat16(), torch.arange(9) % 2
    posterior = lw.fit(model, (x, y), lw.KFAC(), prior_precision=1.0)
    other = further_trained(model).train()
    value = posterior.penalty(other)
    value.backward()
    assert value.dtype == torch.float32
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in other.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(posterior.penalty(other), value)
    assert not any(p.grad is not None for p in model.parameters())
