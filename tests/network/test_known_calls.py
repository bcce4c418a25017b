"""A call that repeats an earlier one is recorded from its last layer on, and its modules are not compared again."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode

import lapwing as lw
from lapwing.network.tracing import Recorder
from tests.conformance import jacobian
from tests.posterior.test_lifecycle import in_threads
from tests.refused import refused
from tests.zoo_modules import Net


def plain(net: Any, x: Tensor) -> Tensor:
    return net.head(net.trunk(x))


def network(forward: Callable[..., Tensor] = plain, **more: Any) -> Any:
    """A trunk of three layers and a head, with a norm whose recorded form is the network's own."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU())
    return Net(forward, trunk=trunk, head=nn.Linear(5, 3), **more).double().eval()


def fitted(model: nn.Module) -> tuple[Any, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(6, 4, dtype=torch.float64)
    return lw.fit(model, [(x, torch.arange(6) % 3)], lw.KFAC(), params=lw.last_layer, prior_precision=1.0), x


def known(model: nn.Module) -> tuple[Any, Tensor]:
    """A posterior that has been asked so often for its inputs that it knows the call."""
    posterior, x = fitted(model)
    for _ in range(4):
        posterior.predict(x)
    return posterior, x


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that recorders have watched."""
    names: list[str] = []
    ours = Recorder.intercept

    def intercept(self: Recorder, function: Callable, args: tuple, kwargs: dict) -> Any:
        names.append(getattr(function, "__name__", ""))
        return ours(self, function, args, kwargs)

    monkeypatch.setattr(Recorder, "intercept", intercept)
    return names


def counted(watched: list[str], call: Callable[[], Any]) -> int:
    watched.clear()
    call()
    return len(watched)


def check(posterior: Any, x: Tensor) -> None:
    latent = posterior.latent(x)
    torch.testing.assert_close(latent.mean, posterior.model(x).detach())
    rows = jacobian(posterior.model, x, posterior.tangent.blocks)
    torch.testing.assert_close(latent.covariance, rows @ posterior.covariance.to_dense() @ rows.mT)


def test_only_the_head_of_a_repeated_call_is_watched(watched: list[str]) -> None:
    posterior, x = fitted(network())
    for part in (x, x[:1], x[:2]):
        counts = [counted(watched, lambda part=part: posterior.predict(part)) for _ in range(3)]
        assert counts[1:] == [1, 1]
        check(posterior, part)
    first = posterior.latent(x + 1)
    again = copy.deepcopy(posterior).latent(x + 1)  # recorded in full, since a copy knows no calls
    assert torch.equal(first.mean, again.mean)
    assert torch.equal(first.covariance, again.covariance)


def test_a_trunk_without_a_graph_keeps_no_activations() -> None:
    posterior, x = fitted(network())
    for _ in range(3):
        graph = posterior.tangent.record(x).graph
    seen, left = set(), [graph.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [branch for branch, _ in node.next_functions]
    assert len(seen) <= 3


def test_modules_are_compared_once_for_each_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    from lapwing.network import stamp

    posterior, x = fitted(network())
    for _ in range(3):
        posterior.model.note = 1.5  # compared anew after the first of these
        posterior.predict(x)
    made: list[nn.Module] = []
    ours = stamp.modules_of
    monkeypatch.setattr(stamp, "modules_of", lambda model: made.append(model) or ours(model))
    posterior.predict(x)
    assert not made


@pytest.mark.parametrize("how", ["dict", "tuple", "forward"])
def test_inputs_in_containers(how: str, watched: list[str]) -> None:
    pairs = lambda net, x, other=None: plain(net, x if other is None else x * other)  # noqa: E731
    model, x = network(pairs), torch.randn(6, 4).double()
    inputs: Any = {"x": x, "other": x} if how == "dict" else (x, x)
    forward = (lambda net, pair: net(*pair)) if how == "forward" else None
    posterior = lw.fit(
        model, [(inputs, torch.arange(6) % 3)], lw.KFAC(), params=lw.last_layer, prior_precision=1.0, forward=forward
    )
    counts = [counted(watched, lambda: posterior.predict(inputs)) for _ in range(3)]
    assert counts[-1] == 1
    if how == "dict":  # other names, although the shapes are the same
        posterior.predict({"x": x})
        posterior.predict({"x": x})
        torch.testing.assert_close(posterior.latent({"x": x}).mean, model(x).detach())


def again(net: Any, h: Tensor) -> Tensor:
    """Uses the weight of the head before the head."""
    return h + 0.1 * torch.tanh(h @ net.head.weight.T) @ torch.ones(3, 5, dtype=h.dtype)


READS: dict[str, Callable[[Tensor], Any]] = {
    "a value": lambda x: bool(x[0, 0] > 0),
    "a number of values, which a shape shows": lambda x: torch.where(x[:, 0] > 0)[0].numel(),
}


@pytest.mark.parametrize("kind", READS)
def test_a_network_that_reads_values_is_watched_in_every_call(kind: str) -> None:
    def branching(net: Any, x: Tensor) -> Tensor:
        h = net.trunk(x)
        return net.head(again(net, h) if READS[kind](x) else h)

    model = network(branching)
    torch.manual_seed(1)
    x = torch.randn(6, 4).double()
    x[:, 0] = -x[:, 0].abs()
    posterior = lw.fit(model, [(x, torch.arange(6) % 3)], lw.KFAC(), params=lw.last_layer, prior_precision=1.0)
    for _ in range(3):
        check(posterior, x)
    with pytest.raises(lw.LapwingError, match="unlike at the first|in another way"):
        posterior.predict(x.abs())
    check(posterior, x)


def flagged(net: Any, x: Tensor) -> Tensor:
    """Uses the weight of the head twice if a flag is set."""
    h = net.trunk(x)
    return net.head(h + torch.tanh(h @ net.head.weight.T).sum(1, keepdim=True) if net.twice else h)


def test_attributes_that_change_later_are_seen() -> None:
    model = network(flagged, twice=False)
    posterior, x = known(model)
    model.twice = True
    with pytest.raises(lw.LapwingError, match="unlike at the first|in another way"):
        posterior.predict(x)
    model.twice = False
    check(posterior, x)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    refused(lambda: posterior.predict(x), "head.weight of Net was written, replaced or added")


@pytest.mark.parametrize("change", ["train", "dropout", "buffer", "data", "written", "equal parameter"])
def test_changes_after_known_calls_are_refused(change: str) -> None:
    model = network()
    model.factor = nn.Parameter(torch.ones(1))  # of one entry: a new one compares as equal
    posterior, x = known(model)
    if change == "equal parameter":
        model.factor = nn.Parameter(torch.ones(1))
    elif change == "train":
        model.trunk[1].train()
    elif change == "dropout":
        model.trunk[2] = nn.Dropout(0.5)
    elif change == "buffer":
        model.register_buffer("scale", torch.ones(3))
    elif change == "data":
        model.head.weight.data = model.head.weight.data + 1
    else:
        model.trunk[0].bias.data += 1
    with pytest.raises(lw.LapwingError, match="training mode|was written, replaced or added"):
        posterior.predict(x)


@pytest.mark.parametrize("kept", [torch.zeros(1), torch.zeros(2), 0.0, []], ids=str)
def test_what_a_later_call_keeps_is_put_back(kept: Any) -> None:
    """An object that the network replaces by an equal one, or a list to which it appends; the user adds it later."""

    def keeping(net: Any, x: Tensor) -> Tensor:
        if isinstance(net.kept, list):
            net.kept.append(x)
        elif net.kept is not None:
            net.kept = torch.zeros(1)
        return plain(net, x)

    model = network(keeping, kept=None)
    posterior, x = known(model)
    model.kept = kept
    for _ in range(3):
        posterior.predict(x)
        assert model.kept is kept
    assert not isinstance(kept, list) or not kept


def test_an_equal_object_that_the_user_sets_later_stays() -> None:
    model = network()
    model.note = torch.zeros(1)
    posterior, x = known(model)
    mine = model.note = torch.zeros(1)
    for part in (x, x[:2], x[:2]):
        posterior.predict(part)
        assert model.note is mine


def test_a_fit_whose_data_switch_the_network_to_training_mode_raises() -> None:
    class Switching(list):
        def __iter__(self) -> Any:
            yield from list.__iter__(self)
            model.train()

    model, x = network(), torch.randn(6, 4).double()
    data = Switching([(x, torch.arange(6) % 3)])
    refused(lambda: lw.fit(model, data, lw.KFAC(), params=lw.last_layer, prior_precision=1.0), "training mode")


def test_hooks_that_the_user_adds_later_count() -> None:
    model = network()
    posterior, x = known(model)
    seen: list[Tensor] = []
    handles = [
        model.trunk.register_forward_hook(lambda module, args, out: seen.append(out)),
        model.head.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
        model.head.register_forward_hook(lambda module, args, out: out.tanh()),
    ]
    for _ in range(3):
        check(posterior, x)
        seen.clear()
        posterior.latent(x)
        assert len(seen) == 1
    for handle in handles:
        handle.remove()
    check(posterior, x)
    assert not model.head._forward_pre_hooks


def test_an_interrupted_call_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def passing(net: Any, x: Tensor) -> Tensor:
        """Keeps an activation while it runs."""
        net.hidden = net.trunk(x)
        out = net.head(net.hidden)
        del net.hidden
        return out

    model = network(passing)
    posterior, x = known(model)
    ours = F.linear

    def interrupt(*args: Any) -> Tensor:
        if len(args[1]) == 3:  # the head
            raise KeyboardInterrupt
        return ours(*args)

    monkeypatch.setattr(F, "linear", interrupt)
    with pytest.raises(KeyboardInterrupt):
        posterior.predict(x)
    monkeypatch.undo()
    assert not hasattr(model, "hidden")
    assert not model.head._forward_pre_hooks
    assert torch._C._len_torch_function_stack() == 0
    check(posterior, x)


def test_other_threads_run_the_network_meanwhile(watched: list[str]) -> None:
    """A call by the user in another thread, at the same time, is not recorded."""
    model = network()
    posterior, x = known(model)
    wanted = model(x).detach()
    outputs: list[Tensor] = []

    def other(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: outputs.append(model(x)))
            thread.start()
            thread.join()

    handle = model.trunk.register_forward_hook(other)
    for _ in range(3):
        watched.clear()
        latent = posterior.latent(x)
        assert torch.equal(latent.mean, wanted)
    handle.remove()
    assert all(torch.equal(out.detach(), wanted) for out in outputs)
    assert all(out.grad_fn is not None for out in outputs)
    wanted = posterior.latent(x).mean
    in_threads(lambda _: torch.testing.assert_close(posterior.latent(x).mean, wanted, rtol=0, atol=0), 5)


def within(net: Any, x: Tensor) -> Tensor:
    """Calls the head where gradients are off, and on again."""
    with torch.no_grad():
        h = net.trunk(x)
        with torch.enable_grad():
            out = net.head(h)
    return out.tanh()


def moded(net: Any, x: Tensor) -> Tensor:
    """Runs the head in a function mode of its own."""
    h = net.trunk(x)
    with BaseTorchFunctionMode():
        out = net.head(h)
    return 2 * out


KINDS: dict[str, Callable[[], Any]] = {
    "the weights of the head without a call of it": lambda: network(
        lambda net, x: F.linear(net.trunk(x), net.head.weight, net.head.bias)
    ),
    "gradients off and on": lambda: network(within),
    "attention, computed by plain products": lambda: Net(
        lambda net, x: net.head(net.layer(net.first(x)[:, None])[:, 0]),
        first=nn.Linear(4, 8), layer=nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), head=nn.Linear(8, 3),
    ),
    "recurrent": lambda: Net(
        lambda net, x: net.head(net.lstm(x[:, :, None])[0][:, -1]),
        lstm=nn.LSTM(1, 4, batch_first=True), head=nn.Linear(4, 3),
    ),
    "a function mode": lambda: network(moded),
    "a norm after the head": lambda: network(
        lambda net, x: net.norm(plain(net, x)).log_softmax(-1), norm=nn.BatchNorm1d(3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", [False, True])
def test_every_call_gives_the_same_bits(kind: str, frozen: bool) -> None:
    model = KINDS[kind]().double().eval().requires_grad_(not frozen)
    posterior, x = fitted(model)
    first, *others = [posterior.latent(x) for _ in range(4)]
    for other in others:
        assert torch.equal(other.mean, first.mean)
        assert torch.equal(other.covariance, first.covariance)
    check(posterior, x)
    assert torch._C._len_torch_function_stack() == 0


def test_inputs_that_require_gradients_have_them_after_known_calls() -> None:
    posterior, x = known(network())
    slope = torch.autograd.grad(posterior.latent(x.requires_grad_()).variance.sum(), x)[0]
    assert slope.abs().sum() > 0
    with torch.no_grad():
        x = x.detach() + 0
        step = 1e-6 * torch.randn_like(x)
        wanted = (posterior.latent(x + step).variance.sum() - posterior.latent(x - step).variance.sum()) / 2
    torch.testing.assert_close((slope * step).sum(), wanted, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_has_its_own_modules(copied: Callable[[Any], Any]) -> None:
    posterior, x = known(network())
    other = copied(posterior)
    for _ in range(4):
        other.predict(x)
    other.model.trunk[1].train()
    refused(lambda: other.predict(x), "training mode")
    other.model.eval()
    with torch.no_grad():
        other.model.head.weight.add_(1.0)
    posterior.predict(x)
    refused(lambda: other.predict(x), "head.weight of Net was written")


def test_pixels_of_a_head_are_known_too(watched: list[str]) -> None:
    trunk = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU())
    model = Net(plain, trunk=trunk, head=nn.Conv2d(4, 3, 1)).double().eval()
    x = torch.randn(4, 2, 5, 5).double()
    y = torch.randint(3, (4, 5, 5))
    posterior = lw.fit(model, [(x, y)], lw.KFAC(), params=lw.last_layer, prior_precision=1.0)
    first = posterior.latent(x)
    counts = [counted(watched, lambda: posterior.latent(x)) for _ in range(2)]
    assert counts[-1] == 1
    again = posterior.latent(x)
    assert torch.equal(first.mean, again.mean)
    assert torch.equal(first.variance, again.variance)
