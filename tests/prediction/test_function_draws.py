"""`posterior.sample_function`: one function of the linearised posterior, at every call, for every structure of Σ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests import oracle
from tests.conformance import Setup, close, cut, jacobian
from tests.prediction.test_linear_draws import METHODS, TUNED, _Sine
from tests.refused import refused
from tests.zoo import ZOO

EVERY_METHOD = {
    **METHODS,
    "optimal_subspace": lw.OptimalSubspace(rank=6),
    "subset_of_data": lw.SubsetOfData(4),
    "valla": lw.VaLLA(4),
    "temperature_scaling": lw.TemperatureScaling(),
}
UNTUNED = (*TUNED, "valla")


def fitted(method: str, name: str = "mlp", **options: object) -> tuple[Setup, lw.Posterior]:
    setup = Setup(ZOO[name])
    options = {"tune": None, **options} if method in UNTUNED else options
    if method == "temperature_scaling":
        return setup, lw.fit(setup.model, setup.loader, EVERY_METHOD[method])
    return setup, setup.fit(EVERY_METHOD[method], **options)


def steps_of(posterior: lw.Posterior, n: int, seed: int) -> Tensor:
    """Returns `posterior.sample(n, seed)` minus the weights of the network, (n, P) in the order of the blocks."""
    drawn, weights = posterior.sample(n, seed), posterior.tangent.parameters
    steps = {name: (values - weights[name].detach()) for name, values in drawn.items()}
    return torch.cat([block.join(steps) for block in posterior.tangent.blocks], -1)


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_values_are_the_linearised_network_at_the_draws_of_sample(method):
    setup, posterior = fitted(method)
    f = posterior.sample_function(seed=3, n=4)
    J = jacobian(posterior.model, setup.test, posterior.tangent.blocks)
    moved = torch.einsum("bcp,sp->sbc", J, steps_of(posterior, 4, 3))
    close(f(setup.test), oracle.outputs(posterior.model, setup.test) + moved)
    assert not f(setup.test).requires_grad


@pytest.mark.parametrize("method", ["full", "kfac", "sampled_lla"])
def test_a_function_is_the_same_at_every_call_and_in_every_batch(method, monkeypatch):
    setup, posterior = fitted(method)
    f, x = posterior.sample_function(seed=1), setup.x
    whole = f(x)
    assert whole.shape == (9, 3)
    assert f(x).equal(whole)
    close(torch.cat([f(x[:2]), f(x[2:3]), f(x[3:])]), whole)
    close(f(x.numpy()), whole)
    close(f([x[:4], x[4:]]), whole)  # a loader
    close(posterior.sample_function(1, n=1)(x)[0], whole)
    assert not posterior.sample_function(seed=2)(x).allclose(whole)
    f(x + 1)
    posterior.sample_function(seed=5, n=3)(x)
    monkeypatch.setattr(lw.tangent.Tangent, "chunk_length", lambda *_: 2)
    close(f(x), whole)


@pytest.mark.parametrize(
    ("method", "name"), [("kfac", "mlp"), ("full", "cnn_bn_inplace"), ("ella_prior", "weight_norm")]
)
def test_gradients_in_x_are_finite_differences(method, name):
    setup, posterior = fitted(method, name)
    x = setup.test[:2].clone().requires_grad_()
    for n in (None, 2):
        assert torch.autograd.gradcheck(posterior.sample_function(seed=1, n=n), x, eps=1e-5, atol=1e-6)


def test_a_function_has_second_derivatives():
    _, posterior = fitted("kfac")
    x = torch.randn(1, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(posterior.sample_function(), x, eps=1e-5, atol=1e-5)


INPUTS = [name for name in ZOO if not isinstance(ZOO[name].inputs(2, 0), Tensor)]


@pytest.mark.parametrize("name", INPUTS)
def test_several_inputs(name):
    setup = Setup(ZOO[name])
    posterior = setup.fit(lw.Diagonal(), tune=None)
    f = posterior.sample_function(seed=3)
    J = jacobian(setup.model, setup.test, posterior.tangent.blocks)
    close(f(setup.test), oracle.outputs(setup.model, setup.test) + J @ steps_of(posterior, 1, 3)[0])
    close(f(oracle.take(setup.test, slice(1, 3))), f(setup.test)[1:])
    if isinstance(setup.test, tuple):
        close(f(cut(setup.x, setup.y, (5, 4))), f(setup.x))


POSITIONS = {
    "tokens": lambda: ([nn.Embedding(6, 4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)], torch.randint(6, (7, 4))),
    "pixels": lambda: (
        [nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1)],
        torch.randn(7, 2, 3, 2).double(),
    ),
}


@pytest.mark.parametrize("params", [lw.everything, lw.last_layer])
@pytest.mark.parametrize("kind", POSITIONS)
def test_outputs_with_positions_keep_their_shape(kind: str, params: object):
    layers, x = POSITIONS[kind]()
    model = nn.Sequential(*layers).double().eval()
    y = torch.randint(3, x.shape if kind == "tokens" else (7, 3, 2))
    posterior = lw.fit(model, (x, y), lw.Diagonal(), params=params, prior_precision=1.0)
    weights, drawn = dict(model.named_parameters()), posterior.sample(2, seed=4)
    steps = {name: values - weights[name].detach() for name, values in drawn.items()}

    def moved(step: dict[str, Tensor]) -> Tensor:
        at = {name: weights[name].detach() for name in step}
        call: Callable = lambda values: torch.func.functional_call(model, values, x)  # noqa: E731
        return torch.func.jvp(call, (at,), (step,))[1]

    wanted = torch.stack([model(x) + moved({name: s[i] for name, s in steps.items()}) for i in range(2)]).detach()
    close(posterior.sample_function(4, n=2)(x), wanted)
    assert posterior.sample_function(4)(x).shape == model(x).shape
    if kind == "tokens":
        parts = posterior.sample_function(4, n=2)([x, x[:, :3]])
        close(parts[0], wanted)
        close(parts[1], wanted[:, :, :3])


def test_networks_without_products_and_uncertain_inputs_are_refused():
    setup = Setup(ZOO["mlp"])
    model = nn.Sequential(nn.Linear(4, 5), _Sine(), nn.Linear(5, 3)).double().eval()
    posterior = lw.fit(model, [(setup.x, setup.y)], lw.Diagonal(), prior_precision=1.0)
    f, uncertain = fitted("kfac")[1].sample_function(), lw.Uncertain(setup.test, torch.ones_like(setup.test))
    refused(lambda: posterior.sample_function()(setup.test), "neither forward mode … Write posterior.latent(x, joint=")
    refused(lambda: f(uncertain), "lw.Uncertain inputs are not supported here")


def test_a_function_of_weights_that_changed_is_refused():
    setup, posterior = fitted("kfac")
    f = posterior.sample_function()
    with torch.no_grad():
        next(setup.model.parameters()).add_(1.0)
    refused(lambda: f(setup.test), "after the fit")
