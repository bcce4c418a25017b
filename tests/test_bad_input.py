"""Bad input gets one clear sentence: what was asked, what was found, what is accepted, the line to write (1 to 15)."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset, default_collate

import lapwing as lw
from tests.network.test_untouched import assert_same, snapshot

NAN = math.nan


def guarded(function: Callable[..., Any], model_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function, which may not change the network of its first argument, whether it succeeds or raises."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        model = model_of(args[0]) if args else None
        state = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
        plain = [not (v.is_meta or v.is_inference() or v.isnan().any()) for v in state]  # others cannot be compared
        if not all(plain) or not state:
            return function(*args, **kwargs)
        before = snapshot(model)
        try:
            return function(*args, **kwargs)
        finally:
            assert_same(before, snapshot(model))

    return call


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of this file leaves the network, its mode and its hooks bit for bit as they were."""
    for name in ("fit", "coverage"):
        monkeypatch.setattr(lw, name, guarded(getattr(lw, name), lambda model: model))
    for name in ("latent", "predict", "sample", "save", "with_prior", "log_marginal_likelihood", "diagnose"):
        monkeypatch.setattr(lw.Posterior, name, guarded(getattr(lw.Posterior, name), lambda self: self.tangent.model))


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).eval()


X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
REAL = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
VIAS = [lw.Linearized(), lw.MonteCarlo(draws=2)]


def changed(tensor: Tensor, index: Any, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def refused(action: Callable[[], Any], *parts: str) -> str:
    """Check that the action raises one LapwingError with all parts, in this order, in at most three sentences."""
    with pytest.raises(lw.LapwingError) as caught:
        action()
    message, at = str(caught.value), 0
    for part in parts:
        found = message.find(part, at)
        assert found >= 0, f"{part!r} is missing (or out of order) in: {message}"
        at = found + len(part)
    assert message.endswith((".", ")")), message
    assert "\n" not in message
    assert len(message) < 620, message
    return message


def fit(data: Any, model: nn.Module | None = None, method: Any = None, **options: Any) -> lw.Posterior:
    return lw.fit(network() if model is None else model, data, method or lw.KFAC(), **options)


@pytest.fixture(scope="module")
def posterior() -> lw.Posterior:
    return fit([(X, Y)])


# --- 1, 2, 3: NaN and infinite numbers -------------------------------------------------------------------------------
@pytest.mark.parametrize("method", [lw.KFAC(), lw.EKFAC(), lw.Full(), lw.Diagonal(), lw.ELLA(rank=2, rows=4)], ids=str)
def test_inputs_not_finite_in_fit(method: lw.Method) -> None:
    for at, bad in ((0, NAN), (1, math.inf), (1, -math.inf)):
        data = [(X, Y), (X, Y)]
        data[at] = (changed(X, (6, 1), bad), Y)  # beyond the few samples that are probed
        refused(
            lambda data=data: fit(data, method=method),
            "inputs of",
            "(8, 4)",
            "NaN or infinite",
            "sample 6",
            "nan_to_num",
        )


@pytest.mark.parametrize("via", [*VIAS, lw.Streamlined()], ids=str)
def test_inputs_not_finite_in_prediction(posterior: lw.Posterior, via: Any) -> None:
    bad = changed(X, (2, 0), NAN)
    for ask in (lambda: posterior.predict(bad, via=via), lambda: posterior.latent([X, bad], via=via)):
        refused(ask, "inputs", "(8, 4)", "NaN or infinite", "sample 2", "finite", "nan_to_num")


class Reciprocal(nn.Module):
    """Gives infinite outputs where an input is exactly 7."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) / (x[:, :1] != 7)


@pytest.mark.parametrize("method", [lw.KFAC(), lw.ELLA(rank=2, rows=4), lw.Full()], ids=str)
def test_outputs_not_finite(method: lw.Method) -> None:
    bad = changed(X, (5, 0), 7)
    parts = "outputs", "NaN or infinite", "1 of 8 samples", "sample 5", "finite", "model.float()"
    refused(lambda: fit([(X, Y), (bad, Y)], Reciprocal().eval(), method), *parts)
    fitted = fit([(X, Y)], Reciprocal().eval(), method)
    refused(lambda: fitted.predict(bad), *parts)


def test_weights_not_finite() -> None:
    model = network()
    model[2].weight.data[0, 0] = NAN
    refused(lambda: fit([(X, Y)], model), "outputs", "NaN or infinite", "check its weights")


def test_labels_not_finite() -> None:
    fitted = fit([(X, REAL)])
    holes = changed(REAL.abs().round(), (3, 2), NAN)
    refused(lambda: fit([(X, holes)]), "Drop those rows", "lw.Gaussian(missing=True)")
    refused(lambda: fitted.predict(X).log_prob(holes), "Drop those rows", "lw.Gaussian(missing=True)")
    noise = nn.Linear(4, 2).eval()
    refused(lambda: fit([(X, holes[:, 2:])], noise, likelihood="heteroscedastic"), "HeteroscedasticGaussian(missing")
    counts = fit([(X, REAL.abs().round())], likelihood="poisson")
    for action in (
        lambda: fit([(X, holes)], likelihood="poisson"),
        lambda: counts.predict(X).log_prob(holes),
    ):
        assert "Gaussian(missing" not in refused(action, "Drop those rows", "since this likelihood accepts no missing")


# --- 4, 5, 6, 7: range, shape, dtype, device -------------------------------------------------------------------------
def test_labels_out_of_range(posterior: lw.Posterior) -> None:
    refused(
        lambda: fit([(X, Y), (X, changed(Y, 2, 3))]), "0 to 2", "(8, 3)", "1 of 8", "index 2: 3", "Linear(features, 4)"
    )
    refused(lambda: fit([(X, Y - 1)]), "0 to 2", "index 0: -1", "keep")
    refused(
        lambda: posterior.log_marginal_likelihood(linearised_mode=True, loader=[(X, Y + 5)]), "0 to 2", "of shape (8,)"
    )
    refused(lambda: posterior.predict(X).log_prob(Y + 5), "0 to 2")


def test_inputs_of_the_wrong_shape(posterior: lw.Posterior) -> None:
    parts = "Sequential, called as model(x)", "(8, 3) float32", "RuntimeError", "shape", "loader"
    refused(lambda: fit([(X, Y), (X[:, :3], Y)]), *parts)
    for via in VIAS:
        refused(lambda via=via: posterior.predict(X[:, :3], via=via), *parts)
        refused(lambda via=via: posterior.predict(X[0], via=via), "(4,)", "one row for each sample", "x[None]")
        refused(lambda via=via: posterior.predict(X[:0], via=via), "(0, 4)", "no samples", "x[None]")
        refused(lambda via=via: posterior.predict(torch.tensor(1.0), via=via), "Tensor ()", "no samples", "x[None]")
    refused(lambda: fit([(X[0], Y[:1])]), "one row for each sample", "x[None]")
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 3)).eval()
    refused(lambda: fit([(torch.randn(8, 1, 3, 3), Y)], convolution), "(8, 1, 3, 3)", "channels", "loader")
    images = fit([(torch.randn(8, 3, 3, 3), Y)], nn.Sequential(nn.BatchNorm2d(3), *convolution).eval())
    refused(lambda: images.predict(torch.randn(3, 3, 3)), "expected 4D input", "pass a single sample as x[None]")
    raw = torch.ones(8, 3, 3, 3, dtype=torch.uint8)
    refused(lambda: fit([(raw, Y)], convolution), "uint8", "Input type", "x.to(torch.float32)")
    tokens = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 3)).eval()
    refused(lambda: fit([(torch.full((8, 2), 5), Y)], tokens), "int64", "IndexError", "range that it was trained with")


class Graphs(nn.Module):
    """Expects an object with the features `x`, as graph networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, graph: Any) -> Tensor:
        return self.head(self.norm(graph.x))


def test_inputs_of_a_type_that_the_network_does_not_know() -> None:
    """Errors about attributes and keys of the inputs are explained, and others are not."""
    graphs = Graphs().eval()
    refused(lambda: fit([(X, Y)], graphs), "Graphs, called as model(x)", "(8, 4)", "no attribute 'x'", "forward=")
    keyed = lambda model, batch: model.head(batch["x"] + batch["labels"])  # noqa: E731
    refused(lambda: fit([{"x": X, "labels": Y}], graphs, forward=keyed), "dict(x=", "KeyError ('labels')", "names that")
    lists = [{"tokens": [1, 2], "labels": i % 3} for i in range(8)]
    for layer in ("embedding", "norm", "head"):
        first = lambda model, batch, layer=layer: model.get_submodule(layer)(batch["tokens"])  # noqa: E731
        parts = "tokens=list(", "not list", "let the data set return tensors"
        refused(lambda first=first: fit([default_collate(lists)], graphs, forward=first), *parts)
    sized = lambda model, batch: model.head(batch["tokens"].float())  # noqa: E731
    refused(lambda: fit([default_collate(lists)], graphs, forward=sized), "'list' object", "let the data set return")
    with pytest.raises(AttributeError, match="'Graphs' object has no attribute 'tail'"):
        fit([(X, Y)], graphs, forward=lambda model, x: model.tail(x))


def test_a_list_of_several_inputs_is_a_loader() -> None:
    """PyTorch's loaders make a list of several inputs, and a list of tensors is a loader of batches."""
    both = nn.Bilinear(4, 4, 3).eval()
    for batch, forward in (([X, X], None), ([X, X], lambda model, x: model(x[0], x[1]))):
        fitted = fit([(batch, Y)], both, forward=forward)
        refused(lambda fitted=fitted: fitted.predict([X, X]), "A list is read as a loader", "2 tensors", "tuple(x)")
        assert fitted.predict((X, X)).probs.shape == (8, 3)


class Remembers(nn.Module):
    """Adds what it saw in its last call."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head, self.state = nn.GRUCell(4, 5), nn.Linear(5, 3), None

    def forward(self, x: Tensor) -> Tensor:
        fits = self.state is not None and len(self.state) == len(x)
        self.state = self.cell(x, self.state if fits else None).detach()
        return self.head(self.state)


@pytest.mark.parametrize("params", [lw.everything, lw.last_layer], ids=["everything", "last layer"])
def test_a_state_kept_between_calls(params: Any) -> None:
    """It is restored after each call of ours, so that two calls agree, and predictions would depend on older calls."""
    network = Remembers().eval()
    outer = "setattr(model, 'state', None)"
    refused(lambda: fit([(X, Y)], network, params=params), "Remembers keeps a state", "(state)", outer)
    inner = "setattr(model.get_submodule('0'), 'state', None)"
    refused(lambda: fit([(X, Y)], nn.Sequential(network).eval(), params=params), "(0.state)", inner)
    reset = lambda model, inputs: (setattr(model, "state", None), model(inputs))[1]  # noqa: E731
    fitted = fit([(X, Y)], network, params=params, forward=reset)
    torch.testing.assert_close(fitted.predict(X[:3]).probs, fitted.predict(X).probs[:3])


def test_outputs_that_are_no_matrix() -> None:
    sequence = nn.Linear(4, 3).eval()
    x = torch.randn(8, 5, 4)
    refused(lambda: fit([(x, Y)], sequence), "targets have the shape (8,)", "outputs (8, 5, 3)", "of shape (8, 5)")
    at = torch.arange(8) % 5
    picked = fit([((x, at), Y)], sequence, forward=lambda model, i: model(i[0])[torch.arange(len(i[1])), i[1]])
    assert picked.predict((x, at)).probs.shape == (8, 3)
    deep = lambda model, x: model(x)[..., None, None, None]  # noqa: E731
    refused(lambda: fit([(x, Y)], sequence, forward=deep), "(8, 5, 3, 1, 1, 1)", "(batch, outputs, rows, columns)")
    parts = "Linear", "shape (40, 3)", "8 samples", "one row for each sample", "forward="
    flat = lambda model, x: model(x).flatten(0, 1)  # noqa: E731
    refused(lambda: fit([(torch.randn(8, 5, 4), Y)], sequence, forward=flat), *parts)
    refused(
        lambda: fit([(X, Y)], forward=lambda model, x: model(x).argmax(1)), "int64", "floating-point tensor of shape"
    )


def test_other_number_of_outputs_later(posterior: lw.Posterior) -> None:
    class Wider(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    fitted = fit([(X, X)], Wider().eval())
    for via in VIAS:
        refused(lambda via=via: fitted.predict(X[:, :3], via=via), "outputs of Wider", "(8, 3)", "shape of the inputs")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.uint8])
def test_inputs_of_the_wrong_dtype(posterior: lw.Posterior, dtype: torch.dtype) -> None:
    parts = "Sequential, called as", str(dtype)[6:], "dtype", "float32", "x.to(torch.float32)"
    wrong = (X * 10).abs().to(dtype)
    message = refused(lambda: fit([(wrong, Y)]), *parts)
    assert ("x.astype('float32')" in message) != dtype.is_floating_point
    refused(lambda: fit([(X, Y), (wrong, Y)]), *parts)
    for via in VIAS:
        refused(lambda via=via: posterior.predict(wrong, via=via), *parts)


def test_inputs_targets_or_weights_elsewhere(posterior: lw.Posterior) -> None:
    away = X.to("meta")
    parts = "(8, 4)", "on meta", "dense tensor"
    refused(lambda: fit([(away, Y)]), *parts)
    refused(lambda: fit([(X, Y), (away, Y)]), *parts)
    for via in [*VIAS, lw.Streamlined()]:
        refused(lambda via=via: posterior.predict(away, via=via), *parts)
    refused(lambda: fit([(X, Y.to("meta"))]), "(8,)", *parts[1:])
    refused(lambda: fit([(X, Y)], network().to("meta")), "0.weight", "meta", "trained weights", "load_state_dict")


# --- 8, 9: loaders ---------------------------------------------------------------------------------------------------
class Rounds:
    """A loader that shows something in its first rounds only; begun counts what is really begun."""

    def __init__(self, rounds: int, then: int = 0) -> None:
        self.rounds, self.then = rounds, then

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.rounds -= 1
        yield from [(X, Y), (X, Y)] if self.rounds >= 0 else [(X, Y)] * self.then


class Stream(IterableDataset):
    """An iterable data set around one generator."""

    def __init__(self) -> None:
        self.items = iter([(X[i], Y[i]) for i in range(8)])

    def __iter__(self) -> Iterator[Any]:
        return self.items


def test_an_empty_loader(posterior: lw.Posterior) -> None:
    refused(lambda: fit([]), "loader, of type list", "no batch", "length")
    short = DataLoader(TensorDataset(X, Y), batch_size=20, drop_last=True)
    refused(lambda: fit(short), "loader, of type DataLoader", "no batch", "drop_last=True")
    refused(lambda: fit([(X[:0], Y[:0])]), "has no samples", "length")
    refused(lambda: posterior.predict([]), "loader, of type list", "no batch", "length")
    for options in ({"tune": lw.Validation([])}, {"validation": []}):
        refused(lambda options=options: fit([(X, Y)], **options), "held-out data do not fit", "no batch", "length")
    refused(
        lambda: posterior.log_marginal_likelihood(linearised_mode=True, loader=[]),
        "0 samples",
        "the fit had 8",
        "loader",
    )


def test_generators() -> None:
    parts = "read only once", "Pass a DataLoader or a list"
    for once in (iter([(X, Y)]), ((X, Y) for _ in range(2)), zip([X], [Y], strict=True), map(tuple, [(X, Y)])):
        refused(lambda once=once: fit(once), type(once).__name__, *parts)
    inner = Stream()
    inner.items = iter([(X, Y), (X, Y)])
    refused(lambda: fit(inner), "Stream", *parts)


@pytest.mark.parametrize(
    ("method", "rounds", "then"),
    [
        (lw.KFAC(), 1, 0), (lw.KFAC(), 2, 0), (lw.EKFAC(), 2, 0), (lw.ELLA(rank=2, rows=4), 2, 0), (lw.Full(), 1, 0),
        (lw.EKFAC(), 2, 1), (lw.ELLA(rank=2, rows=4), 2, 3), (lw.Full("dual"), 2, 1), (lw.Full("dual"), 2, 3),
    ],
    ids=str,
)  # fmt: skip
def test_another_number_of_samples_the_second_or_third_time(method: lw.Method, rounds: int, then: int) -> None:
    if rounds == 2 and type(method) is lw.KFAC:  # one batch to survey, one pass, and a look back to tune
        fit(Rounds(2), method=method, tune=lw.Evidence())
    found = f"16 at first and shows {8 * then} samples" if then else "shows 0 samples"
    parts = (found, "same data") if then else (found, "Every pass needs the same data", "not a generator")
    refused(lambda: fit(Rounds(rounds, then), method=method), *parts)


# --- 10: nothing to treat --------------------------------------------------------------------------------------------
def test_no_parameter() -> None:
    frozen = network().requires_grad_(False)
    parts = "Sequential", "has 4 (4 frozen", "0.weight", "params=lw.matching('*')"
    refused(lambda: fit([(X, Y)], frozen), *parts)
    assert lw.fit(frozen, [(X, Y)]).tangent.size == 21  # the last layer, frozen or not
    assert fit([(X, Y)], frozen, params=lw.matching("*")).tangent.size == 51
    for params in (lw.matching("hed.*"), lambda name, parameter: False):
        refused(lambda params=params: fit([(X, Y)], params=params), "selects no parameter", "0 frozen", "params=")
    refused(lambda: fit([(X, Y)], nn.Tanh()), "Tanh", "no parameters", "Pass the nn.Module")
    refused(lambda: fit([(X, Y)], params="head"), "params='head'", "lw.everything", "params=lambda name, parameter")
    refused(lambda: fit([(X, Y)], params=["0.weight"]), "['0.weight']", "lw.matching", "params=lambda name, parameter")
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).eval()
    for many in (list(model.parameters()), dict(model.named_parameters())):
        refused(lambda many=many: fit([(X, Y)], model, params=many), "Parameter (6, 4) float32", "params=lambda name")
    refused(lambda: fit([(X, Y)], params=lambda name: True), "TypeError", "params=lambda name, parameter")
    refused(lambda: lw.matching(), "matching()", "lw.matching('*.lora_*'")
    refused(lambda: lw.matching(["0.*"]), "matching(['0.*'])", "each a string", "lw.matching(")
    refused(lambda: lw.coverage(frozen, X), "params=")

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bi,io->bo", x, self.weight)

    assert list(lw.fit(Bare().eval(), [(X, Y)]).tangent.parameters) == ["weight"]


@pytest.mark.parametrize("model", ["model.pt", lambda x: x, None, {"weight": X}, nn.Linear])
def test_no_module(model: Any) -> None:
    parts = "model has the type", "torch.nn.Module", "Pass the module itself"
    refused(lambda: lw.fit(model, [(X, Y)]), *parts)
    refused(lambda: lw.coverage(model, X), *parts)


# --- 11, 12: networks that change, or mix samples --------------------------------------------------------------------
class Noisy(nn.Module):
    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.noise = nn.Linear(4, 3), noise

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.noise(x))


@pytest.mark.parametrize("noise", [lambda x: F.dropout(x, 0.2, training=True), lambda x: x + 1e-4 * torch.rand(4)])
def test_noise_in_forward(noise: Callable[[Tensor], Tensor]) -> None:
    model = Noisy(noise).eval()
    refused(lambda: fit([(X, Y)], model), "Noisy", "on the same batch", "differ", "eval()", "noise", "self.training")
    refused(lambda: lw.coverage(model, X), "on the same batch")


def test_a_network_that_writes_its_inputs() -> None:
    x, model = X.clone(), Noisy(lambda x: x.add_(1.0)).eval()
    refused(lambda: fit([(x, Y)], model), "Noisy writes its inputs in place", "x.clone()")
    assert torch.equal(x, X)
    assert fit([(x, Y)], model, forward=lambda model, x: model(x.clone())).predict(x).probs.shape == (len(X), 3)


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        out = self.second(hidden)
        hidden.mul_(0.0)
        return out


def test_a_network_that_overwrites_the_input_of_a_layer() -> None:
    for params in (lw.everything, lw.last_layer):
        refused(lambda p=params: fit([(X, Y)], Overwriting().eval(), params=p), "Overwriting overwrites", "h.mul_(2)")


def test_dropout_that_drops_nothing_is_fine() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.0), nn.Linear(6, 3))
    with_dropout, without = fit([(X, Y)], model.train()), fit([(X, Y)], nn.Sequential(model[0], model[2]).eval())
    torch.testing.assert_close(with_dropout.latent(X).covariance, without.latent(X).covariance)
    assert model.training


def test_batch_norm_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    parts = "1 (BatchNorm1d)", "Sequential", "training mode", "rest of the batch", "model.eval()"
    refused(lambda: fit([(X, Y)], model.train()), *parts)
    fitted = fit([(X, Y)], model.eval())
    model.train()
    refused(lambda: fitted.predict(X), *parts)


class Checkpointed(nn.Module):
    """A layer that is called again on the way back."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.trunk = nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 6), nn.Tanh())
        self.head, self.reentrant = nn.Linear(6, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.trunk, self.first(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize(
    ("method", "reentrant"),
    [(lw.KFAC(), False), (lw.KFAC(), True), (lw.MeanField(1), True)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpointing(reentrant: bool, method: lw.Method) -> None:
    model = Checkpointed(reentrant).eval()
    parts = "Checkpointed", "torch.utils.checkpoint.checkpoint", "gradient_checkpointing_disable()", "lw.last_layer"
    refused(lambda: fit([(X, Y)], model, method, params=lw.everything), *parts)
    last = lw.fit(model, [(X, Y)], prior_precision=1.0).predict(X).probs
    plain = nn.Sequential(model.first, model.trunk, model.head).eval()
    torch.testing.assert_close(last, lw.fit(plain, [(X, Y)], prior_precision=1.0).predict(X).probs)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("patterns", [("trunk.*",), ("trunk.*", "head.*")], ids=str)
@pytest.mark.parametrize("first", [nn.Linear(4, 5), nn.Identity()], ids=["layer", "none"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_whose_inputs_have_no_gradient(
    first: nn.Module, patterns: tuple[str, ...], frozen: bool
) -> None:
    """It returns outputs without a graph, so autograd shows neither its weights nor itself."""
    model = Checkpointed(True).eval().requires_grad_(not frozen)
    model.first = first.requires_grad_(not frozen)
    model.trunk[0] = nn.Linear(5 if isinstance(first, nn.Linear) else 4, 6)
    parts = "Checkpointed", "torch.utils.checkpoint.checkpoint", "gradient_checkpointing_disable()", "lw.last_layer"
    refused(lambda: lw.fit(model, [(X, Y)], lw.Diagonal(), params=lw.matching(*patterns)), *parts)
    assert list(lw.fit(model, [(X, Y)], prior_precision=1.0).tangent.parameters) == ["head.weight", "head.bias"]


class Quantized(nn.Module):
    """A statically quantized layer between floating-point numbers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.quantize_per_tensor(x, 0.05, 128, torch.quint8)).dequantize()


@pytest.mark.filterwarnings("ignore")
def test_quantised_layers() -> None:
    layers = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), {nn.Linear})
    model = nn.Sequential(nn.Linear(4, 4), layers).eval()
    refused(lambda: lw.fit(model, [(X, Y)]), "The layer 1.0 (Linear) of Sequential", "quantized dynamically")
    static = torch.ao.nn.quantized.Linear(4, 6)  # a trunk of fixed scales
    model = nn.Sequential(Quantized(static), nn.Linear(6, 3)).eval()
    refused(lambda: fit([(X, Y)], model), "The layer 0.layer", "quantized", "params=lw.last_layer")
    assert list(lw.fit(model, [(X, Y)]).tangent.parameters) == ["1.weight", "1.bias"]
    model = nn.Sequential(nn.Linear(4, 4), Quantized(static)).eval()
    refused(lambda: lw.fit(model, [(X, Y)]), "out of quantized layers (such as 1.layer)", "in floating point")


# --- 14: structures --------------------------------------------------------------------------------------------------
class Record:
    """A batch of a class of the user's own."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (Record(X, Y), "Record"),
        ("abc", "str"),
        ((X,), "tuple(Tensor (8, 4) float32)"),
        ({"x": X}, "dict(x=Tensor (8, 4) float32)"),
        ({"labels": Y}, "dict(labels=Tensor (8,) int64)"),
        ((X, Y.tolist()), "list(int"),
        (None, "NoneType"),
    ],
)
def test_batches_that_are_not_understood(batch: Any, found: str) -> None:
    refused(lambda: fit([batch]), "batch", found, "yield (inputs, targets)", "forward=lambda model, inputs")


def test_inputs_that_are_not_understood(posterior: lw.Posterior) -> None:
    parts = "Record", "first dimension is the batch", "forward=lambda model, inputs"
    refused(lambda: fit([(Record(X, Y), Y)]), *parts)
    for inputs in (Record(X, Y), None):
        refused(lambda inputs=inputs: posterior.predict(inputs), type(inputs).__name__, "forward=lambda model, inputs")
    refused(lambda: posterior.predict(3), "a single number", "numpy.array(x)")
    refused(lambda: posterior.predict([X.tolist(), None]), "a list of numbers", "numpy.array(x)")


def test_inputs_the_network_is_not_called_with(posterior: lw.Posterior) -> None:
    line = "forward=lambda model, inputs"
    refused(lambda: fit([{"pixels": X, "labels": Y}]), "model(**inputs)", "pixels=Tensor (8, 4)", "'pixels'", line)
    refused(lambda: fit([(X, X, Y)]), "model(*inputs)", "tuple(Tensor (8, 4)", "positional arguments", line)
    refused(lambda: fit([(X, Y)], forward=lambda model: model(X)), "forward(model, inputs)", "TypeError", line)
    refused(lambda: posterior.predict((X, Y)), "model(*inputs)", "without targets", line)
    refused(lambda: posterior.predict({"foo": X}), "model(**inputs)", "'foo'", line)
    refused(lambda: fit([(X, Y, torch.rand(8))]), "positional arguments", "needs sample_weights=True")


def test_a_trainer_is_no_loader() -> None:
    trainer = type("Trainer", (), {"get_train_dataloader": lambda self: [(X, Y)]})()
    refused(lambda: fit(trainer), "not a Trainer", "fit_trainer(trainer)")
    refused(lambda: fit([(X, Y)], validation=trainer), "not a Trainer", "trainer.get_train_dataloader()")


def test_targets_of_several_heads_and_samples_one_by_one() -> None:
    parts, line = ("lw.Joint(...)", "one head at a time"), "forward=lambda model, inputs: model(inputs)[...]"
    refused(lambda: fit([(X, (Y, Y))]), *parts, "[(x, y[0]) for x, y in loader]", line)
    refused(lambda: fit([[X, {"kind": Y, "price": X}]]), *parts, "[(x, y['kind']) for x, y in loader]", line)
    refused(lambda: fit((X, {"kind": Y, "price": X})), "['kind', 'price']", *parts)

    class Samples(IterableDataset):
        def __init__(self, labels: Any) -> None:
            self.labels = labels

        def __iter__(self) -> Iterator[Any]:
            return iter(self.labels) if isinstance(self.labels[0], dict) else zip(X, self.labels, strict=True)

    for labels in (Y, Y.tolist(), X[:, :1], [{"x": X[0], "y": 1}]):
        refused(lambda labels=labels: fit(Samples(labels)), "Samples", "not a batch", "DataLoader(dataset, batch_size")
    assert fit(DataLoader(Samples(Y), batch_size=4)).samples == 8


def test_labels_finer_than_the_outputs() -> None:
    maps, images, labels = nn.Conv2d(3, 4, 3, stride=4, padding=1).eval(), torch.randn(2, 3, 8, 12), torch.arange(96)
    labels = (labels % 4).view(1, 8, 12).expand(2, -1, -1)
    line = "interpolate(..., size=(8, 12)), or pass y[..., ::4, ::4]"
    for finer in (labels, labels[:, None]):
        refused(lambda finer=finer: fit([(images, finer)], maps), "forward=", line)
    for other in (labels[:, :7], labels[:1]):
        refused(lambda other=other: fit([(images, other)], maps), "Pass targets of shape (2, 2, 3)")
    assert fit([(images, labels[..., ::4, ::4])], maps).predict(images).probs.shape == (2, 4, 2, 3)


def test_loaders_that_are_none(posterior: lw.Posterior) -> None:
    needs = "needs an iterable of (inputs, targets) batches"
    refused(lambda: fit((X,)), needs, "(Tensor (8, 4)", "[(x, y)] for one batch")
    refused(lambda: fit(X), needs, "Tensor (8, 4) float32", "[(x, y)]")
    refused(lambda: fit([X, Y]), needs, "[Tensor (8, 4) float32", "[(x, y)]")
    refused(lambda: fit(None), needs, "not None", "DataLoader")
    refused(lambda: fit(TensorDataset(X)), "is list(Tensor (8, 4)", "yield (inputs, targets)")
    refused(lambda: fit({"x": X, "z": Y}), needs, "Tensor (8, 4)", "[(x, y)]")
    refused(lambda: fit([(X[i], Y[i]) for i in range(8)]), "(4,)", "one row for each sample", "x[None]")
    refused(lambda: lw.fit([(X, Y)], network()), "are a network, of type Sequential", "lw.fit(model, loader)")


@pytest.mark.slow
def test_a_prediction_within_a_compiled_function(posterior: lw.Posterior) -> None:
    compiled = torch.compile(lambda x: posterior.predict(x).probs, backend="eager")
    refused(lambda: compiled(X), "torch.compile compiles", "outside of that function", "lw.deploy(posterior, x)")
    assert posterior.predict(X).probs.shape == (8, 3)


def test_other_errors_of_the_users_code_come_through_as_they_are() -> None:
    def broken(model: nn.Module, x: Tensor) -> Tensor:
        raise RuntimeError("the database is locked")

    with pytest.raises(RuntimeError, match="the database is locked"):
        fit([(X, Y)], forward=broken)


# --- 15: options -----------------------------------------------------------------------------------------------------
def test_numbers_of_numpy_are_numbers() -> None:
    fitted = fit(
        [(X, Y)], prior_precision=np.float32(2.0), data_size=np.int64(80), temperature=np.float64(2.0), seed=np.int64(3)
    )
    assert fitted.prior_precision == 2.0
    assert (fitted.data_factor, fitted.temperature) == (10.0, 2.0)
    assert isinstance(fitted.temperature, float)


@pytest.mark.parametrize(
    ("option", "value", "parts"),
    [
        ("data_size", 3, ("data_size=3", "8 samples", "Leave data_size out")),
        ("temperature", 0, ("temperature=0", "positive finite", "temperature=1.0")),
        ("weight_decay", 0, ("weight_decay=0", "positive finite", "weight_decay=1e-4")),
        ("progress", "no", ("progress='no'", "True", "False", "None", "progress=None")),
        ("memory", 100, ("memory=100", "16 MiB", "memory=2**30")),
        ("seed", 1.5, ("seed=1.5", "whole number", "seed=0")),
        ("tune", "evidence", ("tune='evidence'", "lw.Evidence()", "None")),
        ("tune", lw.Evidence, ("Evidence", "lw.Validation(loader)", "tune=lw.BoundedEvidence()")),
        ("forward", 3, ("forward=3", "function", "forward=lambda model, inputs")),
        ("method", lw.KFAC, ("method=KFAC", "the class", "lw.KFAC()")),
        ("prior_mean", X, ("Tensor (8, 4)", "{parameter: tensor}", "prior_mean=0.0")),
        ("prior_mean", {"0.wieght": X}, ("0.wieght", "0.weight (6, 4)", "prior_mean={name: tensor}")),
        ("prior_mean", {"0.weight": X}, ("0.weight", "shape", "0.weight (6, 4)", "prior_mean={name: tensor}")),
        ("prior_mean", {"0.bias": torch.full((6,), NAN)}, ("0.bias", "not finite", "prior_mean={name: tensor}")),
        (
            "prior_precision",
            {"4": 1.0, "*": 1.0},
            ("{'4': 1.0}", "no block", "the blocks are 0, 2", "{'0': 1.0}"),
        ),
        ("prior_precision", {"*": 0.0}, ("prior_precision['*']=0.0", "positive", "{'*': 1.0}")),
        ("prior_precision", {"0": 1.0}, ("no value for 2.", "'*': 1.0")),
    ],
)
def test_options_of_fit(option: str, value: Any, parts: tuple[str, ...]) -> None:
    refused(lambda: fit([(X, Y)], **{option: value}), *parts)


@pytest.mark.parametrize(
    "loader",
    [
        [(X, Y)],
        [(X[:3], Y[:3]), (X[3:], Y[3:])],
        DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True),
        DataLoader(TensorDataset(*[torch.cat([v, v]) for v in (X, Y)]), batch_size=3, sampler=range(8)),
    ],
    ids=["batch", "batches", "loader", "sampler"],
)
def test_a_data_size_below_the_loader_is_seen_before_the_network_runs(loader: Any) -> None:
    model, runs = network(), []
    hook = model.register_forward_pre_hook(lambda *_: runs.append(1))
    refused(lambda: fit(loader, model, data_size=3), "data_size=3", "8 samples", "Leave data_size out")
    hook.remove()
    assert not runs


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(TensorDataset(X, Y), batch_size=4, collate_fn=lambda rows: default_collate(rows[:3])),
        DataLoader(TensorDataset(X, Y), batch_sampler=BatchSampler(range(6), batch_size=3, drop_last=False)),
        DataLoader(TensorDataset(X, Y), batch_size=6, drop_last=True),
    ],
    ids=["own collate", "own batches", "drop_last"],
)
def test_a_data_size_is_compared_with_what_is_shown(loader: Any) -> None:
    assert fit(loader, data_size=6).samples == 6
    refused(lambda: fit(loader, data_size=5), "data_size=5 ", "6 samples", "Leave data_size")


class Returning(nn.Module):
    """A linear layer, and a function of it and the inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 3), function
        self.eval()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self.layer, *inputs, **named)


class Pair(NamedTuple):
    prediction: Tensor
    attention: Tensor


@pytest.mark.parametrize(
    ("returned", "line"),
    [
        (lambda out: (out, out[0]), "tuple(Tensor (8, 3) float32, Tensor (3,) float32)|model(inputs)[0] to"),
        (lambda out: [out.sum(), out], "list(Tensor () float32, Tensor (8, 3) float32)|model(inputs)[1] to"),
        (lambda out: Pair(out, out), "Pair(Tensor (8, 3) float32, |model(inputs)[0] to"),
        (lambda out: {"loss": out.sum(), "preds": out}, "dict(loss=Tensor () float32, |model(inputs)['preds'] to"),
        (lambda out: SimpleNamespace(scores=out), "SimpleNamespace|model(inputs).scores to"),
        (lambda out: None, "NoneType|floating-point tensor"),
        (lambda out: out[:, :0], "Tensor (8, 0) float32|which has no entries|at least one output"),
        (lambda out: out[:, None][..., :0], "Tensor (8, 1, 0) float32|which has no entries|at least one output"),
    ],
)
def test_outputs_that_are_not_one_tensor(returned: Callable[[Tensor], Any], line: str) -> None:
    refused(lambda: fit([(X, Y)], Returning(lambda layer, x: returned(layer(x)))), *line.split("|"))


def test_the_line_to_write_has_the_call_of_the_network() -> None:
    pair = Returning(lambda layer, a, b: (layer(a + b),))
    refused(lambda: fit([(X, X, Y)], pair), "model(*inputs)[0] to")
    named = Returning(lambda layer, x: (layer(x),))
    refused(lambda: fit([{"x": X, "labels": Y}], named), "model(**inputs)[0] to")
    refused(lambda: fit([(X, Y)], named, forward=lambda model, x: model(x)), "forward(model, inputs)[0] to")


OWNERS = torch.arange(8) // 2


def pooled(layer: nn.Module, x: Tensor, owner: Tensor) -> Tensor:
    """The mean of the nodes of each graph."""
    outputs = layer(x)
    return torch.zeros(int(owner.max()) + 1, 3).index_add(0, owner, outputs) / 2


def split_up(layer: nn.Module, x: Tensor, sizes: Tensor) -> Tensor:
    """The mean of the points of each cloud."""
    return torch.stack([layer(points).mean(0) for points in x.split(sizes.tolist())])


def test_nodes_and_points_of_several_samples_in_one_tensor() -> None:
    """The message has the shapes that were passed, not those of the rows that are tried, and its line works."""
    join = "numbers of samples, [(torch.arange(len(y)), y)], and pass forward=lambda model, numbers: model(*join("
    graphs, clouds = Returning(pooled), Returning(split_up)
    refused(lambda: fit([(X, OWNERS, Y[:4])], graphs), "(4, 3) at 8 samples", "(8, 4)", join)
    refused(lambda: fit([{"x": X, "owner": OWNERS, "y": Y[:4]}], graphs), "(4, 3) at 8 samples", "owner=", join)
    refused(lambda: fit([(X, torch.tensor([2, 3, 3]), Y[:3])], clouds), "(3, 3) at 8 samples", "(8, 4)", join)
    needs_all = Returning(lambda layer, x: layer(x.reshape(8, 4)))
    refused(lambda: fit([(X, Y)], needs_all), "accepts the first batch, Tensor (8, 4)", "'[8, 4]' is invalid", join)

    def joined(numbers: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.cat([X[2 * k : 2 * k + 2] for k in numbers])
        return rows, torch.arange(len(numbers)).repeat_interleave(2)

    forward = lambda model, numbers: model(*joined(numbers.tolist()))  # noqa: E731
    posterior = fit([(torch.arange(4), Y[:4])], graphs, forward=forward)
    means = X.unflatten(0, (4, 2)).mean(1)
    torch.testing.assert_close(posterior.latent(torch.arange(4)).mean, graphs.layer(means))


def test_the_batch_as_second_dimension() -> None:
    refused(lambda: fit([(torch.randn(5, 8, 4), Y)], nn.Linear(4, 3).eval()), "(5, 8, 4)", "x.transpose(0, 1)")


@pytest.mark.parametrize("names", [("none", "x"), ("x", "none")])
def test_a_tensor_for_columns_that_a_data_set_does_not_have(names: tuple[str, str]) -> None:
    model = Returning(lambda layer, none, x: layer(x))
    inputs = {name: {"none": torch.empty(0), "x": X}[name] for name in names}
    posterior = fit([{**inputs, "y": Y}], model)
    assert posterior.predict(inputs).probs.shape == (8, 3)


@pytest.mark.parametrize(
    "method", [None, lw.KFAC(), lw.Full(), lw.Diagonal()], ids=lambda method: type(method).__name__
)
def test_parameters_without_entries_are_left_out(method: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    model[0].register_parameter("nothing", nn.Parameter(torch.empty(0)))
    posterior = fit([(X, Y)], model, method)
    assert list(posterior.tangent.parameters) == ["0.weight", "0.bias"]
    assert method is None or "Parameters without entries are left out: 0.nothing" in caplog.text


def test_options_that_exclude_each_other() -> None:
    refused(
        lambda: fit([(X, Y)], prior_precision=1.0, weight_decay=0.1), "prior_precision=1.0", "weight_decay", "Leave one"
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_are_not_dense() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(2, 4)])
    refused(lambda: fit([(nested, Y[:2])]), "Tensor nested", "x.to_padded_tensor(0.0)")
    refused(lambda: fit([(X.to_sparse(), Y)]), "(8, 4)", "sparse_coo", "x.to_dense()")
    refused(lambda: fit([(X, Y.to_sparse())]), "targets", "sparse_coo", "x.to_dense()")


def test_words_for_common_slips(posterior: lw.Posterior, tmp_path: Any) -> None:
    class Squeezed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).squeeze()

    refused(lambda: lw.fit(Squeezed(4, 1).eval(), [(X, X[:, 0])]), "Tensor ()", "write squeeze(-1)", "(batch, outputs)")
    one = "needs an iterable", "[Tensor (8, 4) float32, Tensor (8,) int64]", "[(x, y)]"
    for tuning in ("Validation", "EarlyStopping"):
        refused(lambda tuning=tuning: getattr(lw, tuning)([X, Y]), tuning, *one)
    refused(
        lambda: lw.load(posterior.model, tmp_path / "p.st"),
        "is a Sequential",
        "lw.load('posterior.safetensors', model)",
    )
    refused(lambda: posterior.predict(X).scaled(0, 2), "ClassPrediction predicts labels", "Leave it out")
    refused(lambda: fit([(X, Y)], method=lw.SWAG), "SWAG", "not a method", "lw.SWAG.from_snapshots")
    refused(lambda: fit([(X, Y[:, None])], nn.Linear(4, 1).eval()), "2 outputs", "'gaussian'` and `y.float()")
    refused(lambda: posterior.latent(X).sample("a"), "n='a'", "at least 1", "sample(n=512)")


def test_a_posterior_is_shown_in_one_line(posterior: lw.Posterior) -> None:
    shown = repr(posterior)
    assert shown.startswith("<Posterior by KFAC(")
    assert "over all 51 weights of Sequential (0.weight, 0.bias, 2.weight, 2.bias), 8 samples, Categorical()" in shown
    deep = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)).eval()
    assert "of Sequential (0.weight, 0.bias, 1.weight, 1.bias, ... 6 parameters), 8" in repr(fit([(X, Y)], deep))
    assert f"prior_precision={posterior.prior_precision:.4g}" in shown
    assert "\n" not in shown
    assert len(shown) < 280
    layers = posterior.with_prior({"0": 1.0, "2": 2.00001})
    assert "prior precision 0: 1, 2: 2\n" in str(layers.diagnose())
    assert "prior precision 0.3333\n" in str(posterior.with_prior(1 / 3).diagnose())
    assert "Gaussian(noise_variance=0.3333)" in repr(fit([(X, REAL)], likelihood=lw.Gaussian(1 / 3)))
    assert "prior_precision of 2 blocks" in repr(layers)
    assert "temperature=0.5" in repr(fit([(X, Y)], temperature=0.5))


def test_arguments_of_a_posterior(posterior: lw.Posterior) -> None:
    ways = "not a way", "Write via=lw.Linearized(), lw.MonteCarlo(draws=50) or lw.Streamlined()"
    refused(lambda: posterior.predict(X, via="mc"), "via='mc'", *ways)
    refused(lambda: posterior.latent(X, via=lw.Linearized), "via=<class", *ways)
    refused(lambda: posterior.predict(X, link="probit"), "link='probit'", "link=Probit()")
    refused(lambda: posterior.predict(X, link=lw.Probit), "Probit (a class", "link=Probit()")
    refused(lambda: posterior.predict(X, link=lw.SampledLink(), generator=3), "generator=3", "manual_seed(0)")
    refused(lambda: posterior.latent([X, X], joint=True), "loader has no joint latent", "Pass a tensor")
    refused(lambda: posterior.sample(0), "posterior.sample(n=0)", "at least 1", "n=5")
    refused(lambda: posterior.sample(2, seed=-1), "seed=-1", "from 0 to", "seed=0")
    refused(lambda: posterior.predict(X).sample(0), "n=0", "whole number", "sample(n=512)")
    refused(lambda: fit([(X, REAL)]).predict(X).interval("0.9"), "'0.9'", "interval(0.9)")
    refused(lambda: fit([(X[:1], torch.tensor(1))]), "no dimensions", "one row for each sample", "y[None]")
    for bad in ([(X[:2], Y)], [(X[:2], torch.tensor(1))]):  # which would be cut to the samples, or fail as an index
        refused(lambda bad=bad: fit([(X, Y), *bad], tune=None), "The targets of a batch", "one row for each sample")
        refused(lambda bad=bad: lw.Validation(bad).tune(posterior), "The targets of a batch", "one row for each sample")
        refused(
            lambda bad=bad: posterior.log_marginal_likelihood(linearised_mode=True, loader=bad),
            "The targets of a batch", "one row for each sample",
        )  # fmt: skip
    refused(lambda: posterior.with_prior({"hed": 1.0}), "{'hed': 1.0}", "the blocks are 0, 2")
    refused(
        lambda: posterior.with_prior(1.0, noise_variance=0.1), "no noise variance", "lw.Gaussian(noise_variance=...)"
    )
    refused(lambda: posterior.log_marginal_likelihood(linearised_mode=True), "training data", "loader=loader")
    regression = fit([(X, REAL)])
    refused(lambda: regression.with_prior(1.0, 0), "noise_variance=0", "positive finite", "0.1")


# --- weights that changed --------------------------------------------------------------------------------------------
def _write(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight[3, 2] += 1.0


def _fused(model: nn.Module) -> None:
    F.cross_entropy(model(X), Y).backward()
    torch.optim.SGD(model.parameters(), 0.1, fused=True).step()  # torch does not count these writes


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "fused": (_fused, "0.weight"),
    "entry": (_write, "0.weight"),
    "assigned": (lambda model: setattr(model[2].bias, "data", torch.ones(3)), "2.bias"),
    "reshaped": (lambda model: setattr(model[2].bias, "data", model[2].bias.data[None]), "2.bias"),
    "added": (lambda model: model.append(nn.Linear(3, 3)), "3.weight"),
    "signs": (lambda model: setattr(model[2].bias, "data", torch._neg_view(model[2].bias.data)), "2.bias"),
    "layer": (lambda model: model.__setitem__(2, nn.Linear(6, 3)), "2.weight"),
    "parameter": (lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.clone())), "0.weight"),
    "dtype": (lambda model: model.double(), "dtype or device of 0.weight"),
}


@pytest.mark.parametrize(
    ("change", "params", "copied"),
    [*((change, lw.everything, False) for change in CHANGES), ("fused", lw.last_layer, True)],
)
def test_weights_that_changed_after_the_fit(change: str, params: Any, copied: bool, tmp_path: Any) -> None:
    fitted = fit([(X, Y)], network(), params=params)
    fitted = copy.deepcopy(fitted) if copied else fitted
    model = fitted.tangent.model
    fitted.predict(X)  # a look at the weights before they change
    act, named = CHANGES[change]
    act(model)
    asks: list[Callable[[], Any]] = [lambda via=via: fitted.latent(X, via=via) for via in [*VIAS, lw.Streamlined()]]
    asks += [lambda: fitted.sample(2), lambda: fitted.save(tmp_path / "p"), lambda: fitted.log_marginal_likelihood()]
    asks.append(lambda: fitted.with_prior(2.0).predict(X))
    for ask in asks:
        refused(ask, named, "Sequential", "after the fit", "Fit again", "lw.load(path, model)")
    assert not list(tmp_path.iterdir())


def test_statistics_of_batch_norm_that_changed_after_the_fit() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).eval()
    fitted = lw.fit(model, [(X, Y)])
    model.train()(X)
    model.eval()
    refused(lambda: fitted.predict(X), "1.running_mean", "after the fit", "Fit again")


def test_what_does_not_change_the_weights_is_fine() -> None:
    model = network()
    fitted = fit([(X, Y)], model)
    expected = fitted.latent(X).covariance
    model.requires_grad_(False)
    model(X)
    model.train()
    model.share_memory()
    torch.testing.assert_close(fitted.latent(X).covariance, expected)


MANY = 10**12


def test_more_draws_than_memory_holds() -> None:
    x = torch.randn(6, 4)
    classes = lw.fit(nn.Linear(4, 3).eval(), [(x, torch.arange(6) % 3)])
    answers = lw.fit(nn.Linear(4, 1).eval(), [(x, torch.arange(6) > 2)])
    numbers = lw.fit(nn.Linear(4, 2).eval(), [(x, torch.randn(6, 2))])
    drawn = lw.MonteCarlo(3)
    for ask in (
        lambda: classes.sample(MANY),
        lambda: classes.latent(x).sample(10**400),
        lambda: classes.latent(x, joint=True).sample(MANY),
        lambda: classes.latent(x, via=drawn).sample(MANY),
        lambda: classes.predict(x, via=lw.MonteCarlo(MANY)),
        lambda: classes.predict(x).sample(MANY),
        lambda: answers.predict(x).sample(MANY),
        lambda: numbers.predict(x).sample(MANY),
        lambda: numbers.predict(x, via=drawn).sample(MANY),
    ):
        with pytest.raises(lw.LapwingError, match="Ask for (fewer|at most)"):
            ask()
    with pytest.raises(lw.LapwingError, match="not a number of draws"):
        answers.predict(x).sample("a")
