"""One sample alone gives the same numbers as the same sample in a batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.data.inputs import Inputs
from lapwing.network.generic import forward_products, per_sample_rows
from lapwing.tangent import Tangent
from tests import oracle
from tests.conformance import EVERY, close, covering, jacobian, setup, skip_where_torch_writes_statistics
from tests.quick import others_slow
from tests.zoo import ZOO
from tests.zoo_modules import Net


@covering(others_slow(ZOO), ["grouped_strided_conv", "prelu"], {"diagonal": lw.Diagonal(), "kfac": lw.KFAC()}, "kfac")
def test_a_sample_alone_has_the_latent_that_it_has_in_a_batch(name: str, method: lw.Method) -> None:
    problem = setup(name)
    posterior = problem.fit(method, params=EVERY)
    together = posterior.latent(problem.test)
    alone = posterior.latent(oracle.take(problem.test, slice(1, 2)))
    close(alone.mean, together.mean[1:2])
    close(alone.covariance, together.covariance[1:2])


def normed(kind: str) -> nn.Module:
    """A convolution, a norm and a transpose, as patch embeddings have them, with values away from their defaults."""
    if kind == "instance, running statistics":
        skip_where_torch_writes_statistics()
    norm = {
        "batch": nn.BatchNorm2d(4),
        "batch, not affine": nn.BatchNorm2d(4, affine=False),
        "instance": nn.InstanceNorm2d(4, affine=True),
        "instance, running statistics": nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        "group": nn.GroupNorm(2, 4),
    }[kind]
    for name, values in (*norm.named_parameters(), *norm.named_buffers()):
        if values.is_floating_point():
            nn.init.uniform_(values, 0.5, 1.5) if name != "running_mean" else nn.init.normal_(values)
    together = lambda net, x: net.head(F.gelu(net.norm(net.conv(x)).flatten(2).transpose(1, 2)).mean(1))  # noqa: E731
    return Net(together, conv=nn.Conv2d(2, 4, 2), norm=norm, head=nn.Linear(4, 3)).double().eval()


KINDS = ["batch", "batch, not affine", "instance", "instance, running statistics", "group"]


@pytest.mark.parametrize("frozen", [False, True], ids=["tracked", "frozen"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_one_sample_through_a_norm_are_the_oracles(kind: str, frozen: bool) -> None:
    model, x = normed(kind), torch.randn(3, 2, 3, 4).double()
    model.norm.requires_grad_(not frozen)
    tangent = Tangent.survey(model, x, lw.everything)
    wanted = jacobian(model, x[:1], tangent.blocks)
    close(tangent.record(x[:1]).rows(), wanted)
    close(tangent.record(x).outputs.detach(), model(x).detach(), 1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_generic_rows_and_forward_mode_of_one_sample_are_the_oracles(kind: str) -> None:
    model, x = normed(kind), torch.randn(1, 2, 3, 4).double()
    J = oracle.jacobian(model, x)
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    network = Tangent.survey(model, x, EVERY).call_with
    rows = per_sample_rows(network, parameters, Inputs(x), torch.eye(3).double()[None])
    close(torch.cat([rows[name] for name in parameters], -1), J)
    directions = {name: torch.randn(2, *value.shape).double() for name, value in parameters.items()}
    flat = torch.cat([value.flatten(1) for value in directions.values()], 1)
    products = forward_products(network, parameters, directions, Inputs(x))
    assert products is not None
    close(products, J @ flat.T)
