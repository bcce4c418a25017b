"""The user's model and torch's switches are bit for bit what they were: after success, and after an exception."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests import conformance, oracle
from tests.zoo import ZOO, Case
from tests.zoo_modules import Net

CASES = [
    "mlp", "mlp_relu_inplace", "cnn_bn_inplace", "mha", "encoder_layer", "gpt2", "lstm", "tied", "custom_parameter",
    "weight_norm", "all_frozen", "frozen_trunk", "compiled", "residual_block",
]  # fmt: skip
EVERY = lw.matching("*")
HOOKS = [
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called", "_state_dict_hooks",
]  # fmt: skip


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that the library might leave changed: values are copied, objects are held by identity."""
    taken: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        taken[f"{path}/attributes"] = {key: id(value) for key, value in vars(module).items()}
        if isinstance(module, nn.RNNBase):  # lists of its own beside the parameters
            taken[f"{path}/flat"] = [id(value) for value in module._flat_weights]
        taken[f"{path}/training"] = module.training
        for store in ("_parameters", "_buffers", "_modules", *HOOKS):
            taken[f"{path}/{store}"] = {key: id(value) for key, value in getattr(module, store).items()}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        taken[f"{name}/value"] = value.detach().clone()
        taken[f"{name}/grad"] = None if value.grad is None else (id(value.grad), value.grad.clone())
        hooks = None if value._backward_hooks is None else len(value._backward_hooks)
        taken[f"{name}/flags"] = (value.requires_grad, value.is_leaf, value._version, value.data_ptr(), hooks)
    return taken


def switches() -> dict[str, Any]:
    """Torch's global state."""
    from torch._dynamo.eval_frame import _stance

    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "dtype": torch.get_default_dtype(),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fastpath": torch.backends.mha.get_fastpath_enabled(),
        "sdp": [
            torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled(),
        ],
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "threads": torch.get_num_threads(),
        "stance": _stance.stance,
        "random": torch.get_rng_state(),
    }  # fmt: skip


def assert_same(before: Any, after: Any, where: str = "") -> None:
    if isinstance(before, Tensor):
        assert before.dtype == after.dtype, where
        assert torch.equal(before, after), where
    elif isinstance(before, dict):
        assert before.keys() == after.keys(), where
        for key in before:
            assert_same(before[key], after[key], f"{where} {key}")
    elif isinstance(before, tuple):
        for old, new in zip(before, after, strict=True):
            assert_same(old, new, where)
    else:
        assert before == after, where


def untouched(model: nn.Module, *actions: Callable[[], Any]) -> list[Any]:
    """Run the actions and check after each that neither the model nor torch changed."""
    before, torch_before, results = snapshot(model), switches(), []
    for action in actions:
        results.append(action())
        assert_same(before, snapshot(model))
        assert_same(torch_before, switches())
    return results


def prepared(case: Case) -> nn.Module:
    """A model of the zoo with gradients of its own, as after a training step."""
    model = case.build()
    for index, parameter in enumerate(oracle.uncompiled(model).parameters()):
        parameter.grad = torch.full_like(parameter, index + 0.5)
    return model


def batch(case: Case, samples: int, seed: int = 0) -> Any:
    return conformance.pack(case.inputs(samples, seed), case.targets(samples, seed))


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", CASES)
def test_success_leaves_model_and_torch_as_they_were(name: str) -> None:
    case = ZOO[name]
    model, x = prepared(case), case.inputs(3, 5)
    data = [batch(case, 5), batch(case, 2, 1)]
    (posterior,) = untouched(model, lambda: lw.fit(model, data, lw.KFAC(), params=EVERY))
    untouched(
        model,
        lambda: lw.coverage(model, x, EVERY),
        lambda: lw.fit(model, data, lw.ELLA(rank=3, rows=6, residual="prior"), params=EVERY),
        lambda: name == "custom_parameter" or lw.fit(model, data),
        lambda: posterior.latent(x),
        lambda: posterior.latent(x, joint=True),
        lambda: name == "mlp" and posterior.latent(x.clone().requires_grad_()).variance.sum().backward(),
        lambda: posterior.predict(x).log_prob(case.targets(3, 5)),
        lambda: posterior.predict(data, via=lw.MonteCarlo(draws=2)),
        lambda: posterior.sample(2),
        lambda: posterior.sample_function()(x),
        lambda: posterior.with_prior(3.0),
        lambda: posterior.log_marginal_likelihood(linearised_mode=True, loader=data),
        lambda: posterior.diagnose(),
        lambda: lw.plan(model, data, lw.EKFAC(), params=EVERY),
    )


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["mlp", "cnn_bn_inplace", "encoder_layer", "gpt2", "lstm", "custom_parameter"])
def test_a_forward_that_raises_on_any_call(name: str) -> None:
    case = ZOO[name]
    model, x = prepared(case), case.inputs(3, 5)
    data, calls = [batch(case, 3), batch(case, 2, 1)], {"left": 10**9}

    def forward(net: nn.Module, inputs: Any) -> Any:
        out = oracle.call(net, inputs)
        calls["left"] -= 1
        if calls["left"] < 0:
            raise OSError("power cut")
        return out

    (posterior,) = untouched(model, lambda: lw.fit(model, data, lw.KFAC(), params=EVERY, forward=forward))
    fit = lambda: lw.fit(model, data, lw.KFAC(), params=EVERY, forward=forward)  # noqa: E731
    predict = lambda: (posterior.latent(x), posterior.latent(x, via=lw.MonteCarlo(draws=3)))  # noqa: E731

    def run(action: Callable[[], Any]) -> None:
        for k in range(4):
            calls["left"] = k
            with pytest.raises(OSError, match="power cut"):
                action()
            calls["left"] = 10**9

    untouched(model, lambda: run(fit), lambda: run(predict))


def test_hooks_of_the_user_still_run_and_stay() -> None:
    model = ZOO["mlp"].build()
    seen: list[str] = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append("pre"))
    model[0].register_forward_hook(lambda module, args, out: seen.append("post"))
    model[2].register_forward_hook(lambda module, args, out: out * 2.0)  # one that changes what the network computes
    x, y = ZOO["mlp"].inputs(6, 0), ZOO["mlp"].targets(6, 0)
    (posterior,) = untouched(model, lambda: lw.fit(model, [(x, y)], lw.Full()))
    assert {"pre", "post"} <= set(seen)
    seen.clear()
    latent = posterior.latent(x)
    assert {"pre", "post"} <= set(seen)
    torch.testing.assert_close(latent.mean, model(x).detach())
    jacobian = conformance.jacobian(model, x, posterior.tangent.blocks)
    torch.testing.assert_close(latent.covariance, jacobian @ posterior.covariance.to_dense() @ jacobian.mT)
    draws = posterior.latent(x, via=lw.MonteCarlo(draws=3))
    assert draws.draws.shape == (3, 6, 3)


def test_inputs_and_targets_are_not_written() -> None:
    case = ZOO["mlp_relu_inplace"]
    model = nn.Sequential(nn.ReLU(inplace=False), case.build()).eval()
    x, y = case.inputs(5, 0), case.targets(5, 0)
    before = x.clone(), y.clone()
    posterior = lw.fit(model, [(x, y)], lw.EKFAC(), params=EVERY)
    posterior.predict(x)
    posterior.predict(x, via=lw.MonteCarlo(draws=2))
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    assert not x.requires_grad
    assert x.grad is None


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["mlp", "cnn_bn_inplace", "mha", "lstm", "gpt2", "custom_parameter", "compiled"])
def test_inference_mode_changes_nothing(name: str) -> None:
    """`torch.inference_mode()` around fit, load or predict, and tensors made in it."""
    case = ZOO[name]
    model, x = case.build(), case.inputs(3, 5)
    posterior = lw.fit(model, [batch(case, 5)], lw.KFAC(), params=EVERY)
    expected = posterior.latent(x).covariance
    with torch.inference_mode():
        inside = lw.fit(model, [batch(case, 5)], lw.KFAC(), params=EVERY)
        made = case.inputs(3, 5)
        found = posterior.latent(x).covariance
        drawn = posterior.latent(made, via=lw.MonteCarlo(draws=2)).mean
        posterior.with_prior(2.0).diagnose()
        assert torch.is_inference_mode_enabled()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(inside.latent(made).covariance, expected)
    torch.testing.assert_close(drawn, posterior.latent(x, via=lw.MonteCarlo(draws=2)).mean)


@pytest.mark.parametrize("within", [nn.BatchNorm1d(6), nn.Dropout(0.5)], ids=["norm", "dropout"])
def test_streamlined_leaves_modes_that_differ_within_a_network(within: nn.Module) -> None:
    """A container made around a trained backbone says `training`, its layers do not."""
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    if isinstance(within, nn.BatchNorm1d):
        within(3 * torch.randn(50, 6) + 2)  # running statistics that matter
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 6), within, nn.Tanh()).eval(), nn.Linear(6, 3))
    assert model.training
    posterior = lw.fit(model, [(x, y)], lw.Diagonal(), params=lw.last_layer, prior_precision=1.0)
    found = untouched(
        model,
        lambda: posterior.predict(x, via=lw.Streamlined()).probs,
        lambda: lw.deploy(posterior, x)(x),
        lambda: lw.scale_factor(posterior, [(x, y)]),
    )
    plain = lw.fit(model.eval(), [(x, y)], lw.Diagonal(), params=lw.last_layer, prior_precision=1.0)
    torch.testing.assert_close(found[0], plain.predict(x, via=lw.Streamlined()).probs)
    torch.testing.assert_close(found[1], lw.deploy(plain, x)(x))


class Keeping(nn.Module):
    """Keeps an activation, a list, dicts, a buffer, a table made of a weight, and a flag that its hook is there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.offset = nn.Parameter(torch.ones(3))
        self.maps: list[Tensor] = []
        self.answer: dict[str, Tensor] = {}
        self.register_buffer("latest", None)
        self.tables: dict[str, Tensor] = {}
        self.ready = False

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if not self.ready:
            self.head.register_forward_hook(lambda module, args, out: 2 * out)
            self.ready = True
        if not self.tables:
            self.tables["offset"] = self.offset.square()
        self.hidden = torch.tanh(self.first(x))
        self.latest = self.hidden.mean(0)
        self.maps.append(self.hidden)
        self.answer["logits"] = self.head(self.hidden) + self.tables["offset"]
        return self.answer


def contents(model: Keeping) -> list[Any]:
    hooks = len(model.head._forward_hooks)
    kept = vars(model).get("hidden"), *model.maps, model.answer.get("logits"), model.tables.get("offset")
    return [*kept, model.latest, hooks]


@pytest.mark.parametrize("ran", [False, True])
def test_what_a_network_keeps_is_put_back(ran: bool) -> None:
    """With hooks and buffers; a table that the user's own call made stays, and is a constant."""
    model, x = Keeping().double().eval(), torch.randn(8, 4, dtype=torch.float64)
    expected = copy.deepcopy(model)(x)["logits"].detach()
    if ran:
        with torch.no_grad():
            model(x)
    before = contents(model)
    posterior = lw.fit(model, [(x, torch.arange(8) % 3)], lw.Full(), params=lw.everything, prior_precision=1.0)
    for way in (lw.Linearized(), lw.MonteCarlo(3)):
        posterior.predict(x, via=way)
        assert all(one is other for one, other in zip(contents(model), before, strict=True))
    rows = posterior.tangent.record(x)["offset"].rows()
    torch.testing.assert_close(rows, 0 * rows if ran else 2 * torch.eye(3).double().expand(8, -1, -1))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.head.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        posterior.predict(x, via=lw.MonteCarlo(3))
    handle.remove()
    assert all(one is other for one, other in zip(contents(model), before, strict=True))
    torch.testing.assert_close(model(x)["logits"].detach(), expected)


def test_gradients_of_our_passes_are_not_shown_to_hooks_of_the_network() -> None:
    def mapped(net: Any, x: Tensor) -> Tensor:
        """Keeps what a class activation map needs."""
        hidden = net.conv(x)
        if hidden.requires_grad:
            hidden.register_hook(net.gradients.append).remove()
            hidden.register_hook(net.gradients.append)
        return net.head(torch.relu(hidden).flatten(1))

    model, x = Net(mapped, conv=nn.Conv2d(1, 2, 3), head=nn.Linear(8, 3), gradients=[]).eval(), torch.randn(6, 1, 4, 4)
    posterior = lw.fit(model, [(x, torch.arange(6) % 3)], lw.KFAC(), params=EVERY, prior_precision=1.0)
    posterior.latent(x)
    assert not model.gradients
    model(x).sum().backward()
    assert len(model.gradients) == 1


class Part(nn.Module):
    """Torch leaves classes of its own uncompiled, in place."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


@pytest.mark.quick(1)
@pytest.mark.parametrize("how", ["wrapped", "in place", "forward"])
@pytest.mark.parametrize("name", ["linear", "encoder"])
def test_compiled_parts_run_eagerly_and_are_not_compiled_again(name: str, how: str) -> None:
    """Torch would trace our recorder into their graphs, once a call, and fail on attention."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable:
        graphs.append(graph)
        return graph.forward

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        inner = nn.Linear(4, 4) if name == "linear" else nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        return nn.Sequential(nn.Linear(4, 4), Part(inner), nn.Flatten(), nn.Linear(12, 3)).double().eval()

    torch._dynamo.reset()
    plain, model = build(), build()
    if how == "wrapped":
        model[1] = torch.compile(model[1], backend=backend)
    elif how == "in place":
        model[1].compile(backend=backend)
    else:
        model[1].forward = torch.compile(model[1].forward, backend=backend)
    x, y = torch.randn(6, 3, 4, dtype=torch.float64), torch.arange(6) % 3
    with torch.no_grad():
        model(x)
    count = len(graphs)
    assert count > 0
    loader = [(x[:4], y[:4]), (x[4:], y[4:])]
    found, wanted = (lw.fit(net, loader, lw.KFAC(), params=EVERY, prior_precision=1.0) for net in (model, plain))
    assert [block.family for block in found.tangent.blocks] == [block.family for block in wanted.tangent.blocks]
    for via in (lw.Linearized(), lw.MonteCarlo(3)):
        latents = [posterior.latent(x[:n], via=via).variance for n in (5, 3, 1) for posterior in (found, wanted)]
        for pair in zip(latents[::2], latents[1::2], strict=True):
            torch.testing.assert_close(*pair)
    with torch.no_grad():
        model(x)  # still in the user's own graphs
    assert len(graphs) == count


@pytest.mark.slow
def test_the_process_is_as_it_was() -> None:
    """In a fresh process, what is imported on the way changes neither Python's random numbers nor the environment."""
    code = """
import os, random
import torch
import lapwing as lw
before = dict(os.environ), random.getstate()
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)).eval()
x, y = torch.randn(20, 3), torch.arange(20) % 2
posterior = lw.fit(model, [(x, y)], lw.VaLLA(4), prior_precision=1.0)
assert (dict(os.environ), random.getstate()) == before, "VaLLA"
posterior.predict(x, via=lw.Streamlined())
assert random.getstate() == before[1], "Streamlined"
"""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
