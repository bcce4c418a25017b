"""Bad input gets one clear sentence: what was asked, what was found, what is accepted, the line to write."""

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
from scipy.sparse import csr_matrix
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset, default_collate

import lapwing as lw
from tests.network.test_untouched import assert_same, snapshot
from tests.refused import each_row, refused
from tests.trained import small_network as network
from tests.zoo_modules import Net

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


X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
REAL = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
DATA = [(X, Y)]
VIAS = [lw.Linearized(), lw.MonteCarlo(draws=2)]
WAYS = [*VIAS, lw.Streamlined()]


def changed(tensor: Tensor, index: Any, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def fit(data: Any = DATA, model: nn.Module | None = None, method: Any = None, **options: Any) -> lw.Posterior:
    return lw.fit(network() if model is None else model, data, method or lw.KFAC(), **options)


def linear(function: Callable[..., Any]) -> nn.Module:
    """A network of one linear layer, by a function of the layer and the inputs."""
    return Net(lambda net, *x, **named: function(net.layer, *x, **named), layer=nn.Linear(4, 3)).eval()


@functools.cache
def posterior() -> lw.Posterior:
    return fit()


@functools.cache
def regression() -> lw.Posterior:
    return fit([(X, REAL)])


def answers() -> Any:
    return fit([(X, Y > 0)], nn.Linear(4, 1).eval()).predict(X)


def mode(loader: Any = None) -> float:
    return posterior().log_marginal_likelihood(linearised_mode=True, loader=loader)


def predict(x: Any, *, via: Any = None, **options: Any) -> Any:
    return posterior().predict(x, via=via, **options)


# --- networks --------------------------------------------------------------------------------------------------------
def reciprocal() -> nn.Module:
    """Gives infinite outputs where an input is exactly 7."""
    return linear(lambda layer, x: layer(x) / (x[:, :1] != 7))


def scaling() -> nn.Module:
    return Net(lambda net, x: x * net.scale, scale=nn.Parameter(torch.ones(1))).eval()


def remembering(net: Any, x: Tensor) -> Tensor:
    """Adds what it saw in its last call."""
    fits = net.state is not None and len(net.state) == len(x)
    net.state = net.cell(x, net.state if fits else None).detach()
    return net.head(net.state)


class Adding(nn.Linear):
    """A cell whose operations a recording does not replace."""

    def forward(self, x: Tensor, state: Tensor | None) -> Tensor:
        return torch.tanh(super().forward(x) + (0 if state is None else state))


def overwriting(net: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(net.first(x))
    out = net.second(hidden)
    hidden.mul_(0.0)
    return out


def overwrites() -> nn.Module:
    return Net(overwriting, first=nn.Linear(4, 4), second=nn.Linear(4, 3)).eval()


def checkpointed(reentrant: bool) -> nn.Module:
    """A layer that is called again on the way back."""
    forward = lambda net, x: net.head(checkpoint(net.trunk, net.first(x), use_reentrant=reentrant))  # noqa: E731
    trunk = nn.Sequential(nn.Linear(5, 6), nn.Tanh())
    return Net(forward, first=nn.Linear(4, 5), trunk=trunk, head=nn.Linear(6, 3)).eval()


def quantized(layer: nn.Module) -> nn.Module:
    """A statically quantized layer between floating-point numbers."""
    quantize = lambda x: torch.quantize_per_tensor(x, 0.05, 128, torch.quint8)  # noqa: E731
    return Net(lambda net, x: net.layer(quantize(x)).dequantize(), layer=layer)


def without_weight() -> nn.Module:
    model = network()
    model[2].weight.data[0, 0] = NAN
    return model


def graphs() -> nn.Module:
    """Expects an object with the features `x`, as graph networks do."""
    layers = {"embedding": nn.Embedding(5, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 3)}
    return Net(lambda net, graph: net.head(net.norm(graph.x)), **layers).eval()


def dropping(x: Tensor) -> Tensor:
    return F.dropout(x, 0.2, training=True)


CONVOLUTION = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 3)).eval()
IMAGES = nn.Sequential(nn.BatchNorm2d(3), *CONVOLUTION).eval()
TOKENS = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 3)).eval()
LISTS = default_collate([{"tokens": [1, 2], "labels": i % 3} for i in range(8)])
SEQUENCES, POSITIONS = torch.randn(8, 5, 4), nn.Linear(4, 3).eval()
MAPS, BIG = nn.Conv2d(3, 4, 3, stride=4, padding=1).eval(), torch.randn(2, 3, 8, 12)
FINE = (torch.arange(96) % 4).view(1, 8, 12).expand(2, -1, -1)
"""Labels of each pixel of `BIG`, where the outputs of `MAPS` are coarser."""

NORMED = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
FROZEN = network().requires_grad_(False)


# --- data ------------------------------------------------------------------------------------------------------------
class Record:
    """A batch of a class of the user's own."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


class Rounds:
    """A loader that shows something in its first rounds only, and then so many batches."""

    def __init__(self, rounds: int, then: int = 0) -> None:
        self.rounds, self.then = rounds, then

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.rounds -= 1
        yield from DATA * (2 if self.rounds >= 0 else self.then)


class Stream(IterableDataset):
    """An iterable data set around one generator."""

    def __init__(self) -> None:
        self.items = iter(DATA * 2)

    def __iter__(self) -> Iterator[Any]:
        return self.items


class Samples(IterableDataset):
    """An iterable data set of single samples."""

    def __init__(self, labels: Any) -> None:
        self.labels = labels

    def __iter__(self) -> Iterator[Any]:
        return iter(self.labels) if isinstance(self.labels[0], dict) else zip(X, self.labels, strict=True)


TRAINER = type("Trainer", (), {"get_train_dataloader": lambda self: DATA})()
OWNERS = torch.arange(8) // 2


def pooled(layer: nn.Module, x: Tensor, owner: Tensor) -> Tensor:
    """The mean of the nodes of each graph."""
    return torch.zeros(int(owner.max()) + 1, 3).index_add(0, owner, layer(x)) / 2


def split_up(layer: nn.Module, x: Tensor, sizes: Tensor) -> Tensor:
    """The mean of the points of each cloud."""
    return torch.stack([layer(points).mean(0) for points in x.split(sizes.tolist())])


# --- words -----------------------------------------------------------------------------------------------------------
OUTPUTS_NOT_FINITE = "outputs … NaN or infinite … 1 of 8 samples … sample 5 … finite … model.float()"
MISSING = "Drop those rows … lw.Gaussian(missing=True)"
NARROW = "Sequential, called as model(x) … (8, 3) float32 … RuntimeError … shape … loader"
ONE_ROW = "one row for each sample"
TARGETS_OF_A_BATCH = f"The targets of a batch … {ONE_ROW}"
ONCE = "read only once … Pass a DataLoader or a list"
FRESH = "Every pass needs the same data … not a generator"
PARAMS = "params=lambda name, parameter"
ITERABLE = "needs an iterable of (inputs, targets) batches"
ONE_BATCH = "needs an iterable … [Tensor (8, 4) float32, Tensor (8,) int64] … [(x, y)]"
FORWARD = "forward=lambda model, inputs"
HEADS = "lw.Joint(...) … one head at a time"
NO_MODULE = "model has the type … torch.nn.Module … Pass the module itself"
MODES = "1 (BatchNorm1d) … Sequential … training mode … rest of the batch … model.eval()"
AGAIN = "Net … torch.utils.checkpoint.checkpoint … gradient_checkpointing_disable() … lw.last_layer"
TWO_COPIES = "on the same batch … differ … eval() … noise … self.training"
JOIN = "numbers of samples, [(torch.arange(len(y)), y)], and pass forward=lambda model, numbers: model(join("
DENSE = "x.to_dense()"
WAY = "not a way … Write via=lw.Linearized(), lw.MonteCarlo(draws=50) or lw.Streamlined()"


class Pair(NamedTuple):
    prediction: Tensor
    attention: Tensor


RAGGED = list(torch.randn(16, 4).split([3, 7, 2, 4]))
PACKED = pack_sequence(RAGGED, enforce_sorted=False)
BAGS = {"words": nn.EmbeddingBag(9, 4), "head": nn.Linear(4, 3)}


def bagged(net: Any, rows: Any) -> Tensor:
    """A network that gets a list of tensors, or a packed sequence."""
    rows = unpack_sequence(rows) if isinstance(rows, PackedSequence) else rows
    return torch.stack([net.head(row).mean(0) for row in rows])


def in_bags(net: Any, inputs: Any) -> Tensor:
    words, offsets = (Y, inputs["offsets"]) if isinstance(inputs, dict) else inputs
    return net.head(net.words(words, offsets))


def translator() -> nn.Module:
    """An encoder-decoder as in transformers, whose decoder would read the labels without decoder_input_ids."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 3)

        def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
            return labels

        def forward(self, input_ids: Tensor, decoder_input_ids: Tensor | None = None) -> Tensor:
            return self.head((input_ids if decoder_input_ids is None else decoder_input_ids).float())

    return Translator().eval()


def listener(net: Any, input_features: Tensor, decoder_input_ids: Tensor | None = None) -> Tensor:
    """An encoder-decoder as Whisper, which does not prepare the tokens of its decoder."""
    if decoder_input_ids is None:
        raise ValueError("You cannot specify both decoder_input_ids and decoder_inputs_embeds at the same time")
    return net.layer(input_features)


MANY = 10**12
"""More draws than memory holds."""

METHODS = [lw.KFAC(), lw.EKFAC(), lw.Full(), lw.Diagonal(), lw.ELLA(rank=2, rows=4)]
HOLES = changed(REAL.abs().round(), (3, 2), NAN)
LATE = [(X, Y), (changed(X, (6, 1), math.inf), Y)]
"""Inputs that are not finite beyond the few samples that are probed."""

REFUSED = [
    # numbers that are not finite
    *((lambda data=data, method=method: fit(data, method=method),
       "inputs of … (8, 4) … NaN or infinite … sample 6 … nan_to_num") for method in METHODS
      for data in (LATE, [(-LATE[1][0], Y)], [(changed(X, (6, 1), NAN), Y), (X, Y)])),
    *((lambda ask=ask, via=via: ask(via), "inputs … (8, 4) … NaN or infinite … sample 2 … finite … nan_to_num")
      for via in WAYS for ask in (lambda via: predict(changed(X, (2, 0), NAN), via=via),
                                  lambda via: posterior().latent([X, changed(X, (2, 0), NAN)], via=via))),
    *((lambda method=method, ask=ask: ask(method), OUTPUTS_NOT_FINITE)
      for method in (lw.KFAC(), lw.ELLA(rank=2, rows=4), lw.Full()) for ask in (
        lambda method: fit([*DATA, (changed(X, (5, 0), 7), Y)], reciprocal(), method),
        lambda method: fit(DATA, reciprocal(), method).predict(changed(X, (5, 0), 7)))),
    (lambda: fit(model=without_weight()), "outputs … NaN or infinite … check its weights"),
    (lambda: fit([(X, HOLES)]), MISSING),
    (lambda: regression().predict(X).log_prob(HOLES), MISSING),
    (lambda: fit([(X, HOLES)], likelihood="poisson"), "Drop those rows … since this likelihood accepts no missing"),
    (lambda: fit([(X, REAL.abs().round())], likelihood="poisson").predict(X).log_prob(HOLES),
     "Drop those rows … since this likelihood accepts no missing"),
    # networks that cannot be called
    (lambda: fit(model=nn.ModuleDict({"net": nn.Linear(4, 3)})), "ModuleDict has no forward() … forward="),
    (lambda: fit(model=linear(lambda layer, x: (layer(x), x))),
     "model(inputs)[0] to return one, if the targets belong to it, and not to [1]"),
    # range, shape, dtype and device
    (lambda: fit([(X, Y), (X, changed(Y, 2, 3))]), "0 to 2 … (8, 3) … 1 of 8 … index 2: 3 … Linear(features, 4)"),
    (lambda: fit([(X, Y - 1)]), "0 to 2 … index 0: -1 … keep"),
    (lambda: fit(list(zip(X, Y, strict=True))), "no dimensions … a list of samples as … DataLoader(samples, "),
    (lambda: mode([(X, Y + 5)]), "0 to 2 … of shape (8,)"),
    (lambda: predict(X).log_prob(Y + 5), "0 to 2"),
    (lambda: fit([(X, Y), (X[:, :3], Y)]), NARROW),
    *((lambda via=via: predict(X[:, :3], via=via), NARROW) for via in VIAS),
    *((lambda via=via: predict(X[0], via=via), f"(4,) … {ONE_ROW} … x[None]") for via in VIAS),
    *((lambda via=via: predict(X[:0], via=via), "(0, 4) … no samples … x[None]") for via in VIAS),
    *((lambda via=via: predict(torch.tensor(1.0), via=via), "Tensor () … no samples … x[None]") for via in VIAS),
    (lambda: fit([(X[0], Y[:1])]), f"{ONE_ROW} … x[None]"),
    (lambda: fit([(torch.randn(8, 1, 3, 3), Y)], CONVOLUTION), "(8, 1, 3, 3) … channels … loader"),
    (lambda: fit([(torch.randn(8, 3, 3, 3), Y)], IMAGES).predict(torch.randn(3, 3, 3)),
     "expected 4D input … pass a single sample as x[None]"),
    (lambda: fit([(torch.ones(8, 3, 3, 3, dtype=torch.uint8), Y)], CONVOLUTION),
     "uint8 … Input type … x.to(torch.float32)"),
    (lambda: fit([(torch.full((8, 2), 5), Y)], TOKENS), "int64 … IndexError … range that it was trained with"),
    (lambda: fit([(torch.randn(5, 8, 4), Y)], POSITIONS), "(5, 8, 4) … x.transpose(0, 1)"),
    *((lambda via=via: fit([(X, X)], scaling()).predict(X[:, :3], via=via),
       "outputs of Net … (8, 3) … shape of the inputs") for via in VIAS),
    (lambda: fit([(X.to("meta"), Y)]), "(8, 4) … on meta … dense tensor"),
    (lambda: fit([(X, Y), (X.to("meta"), Y)]), "(8, 4) … on meta … dense tensor"),
    *((lambda via=via: predict(X.to("meta"), via=via), "(8, 4) … on meta … dense tensor") for via in WAYS),
    (lambda: fit([(X, Y.to("meta"))]), "(8,) … on meta … dense tensor"),
    (lambda: fit(model=network().to("meta")), "0.weight … meta … trained weights … load_state_dict"),
    (lambda: fit([(X.to_sparse(), Y)]), f"(8, 4) … sparse_coo … {DENSE}"),
    (lambda: fit([(X, Y.to_sparse())]), f"targets … sparse_coo … {DENSE}"),
    (lambda: fit([(torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(2, 4)]), Y[:2])]),
     "Tensor nested … x.to_padded_tensor(0.0)"),
    # options and labels that do not exist
    (lambda: fit(validaton=(X, Y)), "fit() has no option validaton= … did you mean validation="),
    (lambda: lw.novelty(network(), (X, Y), bye="knn"), "novelty() has no option bye= … did you mean by="),
    (lambda: fit(device="cuda"), "fit() has no option device= … model.to(device)"),
    (lambda: fit(subset_of_weights="last_layer"), "has no option subset_of_weights= … params=lw.last_layer"),
    (lambda: fit(zoo=1), "has no option zoo= … it has model, loader, method"),
    (lambda: fit(params="last_layer"), "params='last_layer' is none of … Write params=lw.last_layer."),
    (lambda: fit((X, ["cat", "dog"] * 4)), "numpy.unique(y, return_inverse=True)[1] for labels that are names"),
    (lambda: fit([(X, ["cat", "dog"] * 4)]), "list(str, … numpy.unique(y, return_inverse=True)[1] numbers names"),
    *((lambda call=call: call(csr_matrix(X.numpy())), "csr_matrix (pass its .toarray())")
      for call in (lambda x: fit((x, Y)), lambda x: fit([(x, Y)]), lambda x: lw.fit(network(), DATA).predict(x))),
    # samples of unequal sizes
    *((lambda data=data, forward=forward: fit(data, Net(bagged, head=nn.Linear(4, 3)).eval(), forward=forward), JOIN)
      for data in ([(RAGGED, Y[:4])], (tuple(RAGGED), Y[:4]), [(RAGGED[1:], Y[:3])], [(PACKED, Y[:4])])
      for forward in (None, lambda net, rows: net(rows))),
    *((lambda inputs=inputs: fit([(inputs, Y[:3])], Net(in_bags, **BAGS).eval(), forward=in_bags), JOIN)
      for inputs in ((torch.arange(8), torch.tensor([0, 2, 3])), {"offsets": torch.tensor([0, 2, 3]), "x": X})),
    (lambda: fit([{"input_ids": Y[:, None], "labels": Y}], translator()),
     "Translator … labels are only targets here … decoder_input_ids … DataCollatorForSeq2Seq"),
    (lambda: fit([{"input_features": X, "labels": Y}], Net(listener, layer=nn.Linear(4, 3)).eval()),
     "raised ValueError … labels are only targets here … decoder_input_ids: the labels moved by one place"),
    # what a forward does not know
    (lambda: fit(model=graphs()), "Net, called as model(x) … (8, 4) … no attribute 'x' … forward="),
    (lambda: fit([{"x": X, "labels": Y}], graphs(), forward=lambda net, batch: net.head(batch["x"] + batch["labels"])),
     "dict(x= … KeyError ('labels') … names that"),
    *((lambda layer=layer: fit([LISTS], graphs(), forward=lambda net, batch: getattr(net, layer)(batch["tokens"])),
       "tokens=list( … not list … let the data set return tensors") for layer in ("embedding", "norm", "head")),
    (lambda: fit([LISTS], graphs(), forward=lambda net, batch: net.head(batch["tokens"].float())),
     "'list' object … let the data set return"),
    (lambda: fit([{"pixels": X, "labels": Y}]), f"model(**inputs) … pixels=Tensor (8, 4) … 'pixels' … {FORWARD}"),
    (lambda: fit([(X, X, Y)]), f"model(*inputs) … tuple(Tensor (8, 4) … positional arguments … {FORWARD}"),
    (lambda: fit(forward=lambda model: model(X)), f"forward(model, inputs) … TypeError … {FORWARD}"),
    (lambda: fit(forward=lambda net, batch: net(batch["x"])), f"on Tensor (8, 4) … invalid data type … {FORWARD}"),
    (lambda: predict((X, Y)), f"model(*inputs) … without targets … {FORWARD}"),
    (lambda: predict({"foo": X}), f"model(**inputs) … 'foo' … {FORWARD}"),
    (lambda: fit([(X, Y, torch.rand(8))]), "positional arguments … needs sample_weights=True … lw.batches(loader"),
    (lambda: lw.fit(network(), DATA, [(X, Y)]), "the third argument is … validation=held_out"),
    (lambda: fit(val_loader=DATA), "no option val_loader=: write validation="),
    (lambda: lw.fit(network(), DATA).predict(X, X), "several inputs of one call as one argument"),
    # outputs
    (lambda: fit([(SEQUENCES, Y)], POSITIONS), "targets have the shape (8,) … outputs (8, 5, 3) … of shape (8, 5)"),
    (lambda: fit([(SEQUENCES, Y)], POSITIONS, forward=lambda model, x: model(x)[..., None, None, None]),
     "(8, 5, 3, 1, 1, 1) … (batch, outputs, rows, columns)"),
    (lambda: fit([(SEQUENCES, Y)], POSITIONS, forward=lambda model, x: model(x).flatten(0, 1)),
     f"Linear … shape (40, 3) … 8 samples … {ONE_ROW} … forward="),
    (lambda: fit(forward=lambda model, x: model(x).argmax(1)), "int64 … floating-point tensor of shape"),
    (lambda: fit(model=linear(lambda layer, x: ((out := layer(x)), out[0]))),
     "tuple(Tensor (8, 3) float32, Tensor (3,) float32) … model(inputs)[0] to"),
    (lambda: fit(model=linear(lambda layer, x: [layer(x).sum(), layer(x)])),
     "list(Tensor () float32, Tensor (8, 3) float32) … model(inputs)[1] to"),
    (lambda: fit(model=linear(lambda layer, x: Pair(layer(x), layer(x)))),
     "Pair(Tensor (8, 3) float32,  … model(inputs)[0] to"),
    (lambda: fit(model=linear(lambda layer, x: {"loss": x.sum(), "preds": layer(x)})),
     "dict(loss=Tensor () float32,  … model(inputs)['preds'] to"),
    (lambda: fit(model=linear(lambda layer, x: SimpleNamespace(scores=layer(x)))),
     "SimpleNamespace … model(inputs).scores to"),
    (lambda: fit(model=linear(lambda layer, x: None)), "NoneType … floating-point tensor"),
    (lambda: fit(model=linear(lambda layer, x: layer(x)[:, :0])),
     "Tensor (8, 0) float32 … floating-point tensor of shape (batch, outputs)"),
    (lambda: fit(model=linear(lambda layer, x: layer(x)[:, None, :0])),
     "Tensor (8, 1, 0) float32 … with positions (batch, positions, outputs)"),
    (lambda: fit([(X, X, Y)], linear(lambda layer, a, b: (layer(a + b),))), "model(*inputs)[0] to"),
    (lambda: fit([{"x": X, "labels": Y}], linear(lambda layer, x: (layer(x),))), "model(**inputs)[0] to"),
    (lambda: fit(model=linear(lambda layer, x: (layer(x),)), forward=lambda model, x: model(x)),
     "forward(model, inputs)[0] to"),
    *((lambda y=y, outputs=outputs: fit([(X, y)], nn.Linear(4, outputs).eval(),
       forward=lambda model, x: model(x).squeeze()),
       f"(8, {outputs}) at 8 samples … no dimension of the batch at one sample … Write squeeze(-1)")
      for y, outputs in ((X[:, 0], 1), (Y, 3))),
    (lambda: fit(model=linear(lambda layer, x: layer(torch.from_numpy(layer(x).numpy())))),
     "leaves torch in forward(), by numpy() … h.detach().numpy()"),
    (lambda: fit().predict(["one text", "another"]),
     "does not show what its inputs are … (texts, torch.arange(len(texts)))"),
    (lambda: fit([(["one text", "another"], Y[:2])]), "hold no tensor … (texts, torch.arange(len(texts)))"),
    (lambda: fit(validation=(X, ["cat", "dog"] * 4)), "Validation needs … numpy.unique(y, return_inverse=True)[1]"),
    *((lambda finer=finer: fit([(BIG, finer)], MAPS),
       "forward= … interpolate(..., size=(8, 12)), or pass y[..., ::4, ::4]") for finer in (FINE, FINE[:, None])),
    *((lambda other=other: fit([(BIG, other)], MAPS), "Pass targets of shape (2, 2, 3)")
      for other in (FINE[:, :7], FINE[:1])),
    (lambda: fit([(X, Y[:, None])], nn.Linear(4, 1).eval()), "2 outputs … 'gaussian'` for numbers"),
    # loaders
    (lambda: fit([]), "loader, of type list … no batch … length"),
    (lambda: fit(DataLoader(TensorDataset(X, Y), batch_size=20, drop_last=True)),
     "loader, of type DataLoader … no batch … drop_last=True"),
    (lambda: fit([(X[:0], Y[:0])]), "has no samples … length"),
    (lambda: predict([]), "loader, of type list … no batch … length"),
    (lambda: fit(tune=lw.Validation([])), "held-out data do not fit … no batch … length"),
    (lambda: fit(validation=[]), "held-out data do not fit … no batch … length"),
    (lambda: mode([]), "0 samples … the fit had 8 … loader"),
    (lambda: fit(iter(DATA)), f"list_iterator … {ONCE}"),
    (lambda: fit((X, Y) for _ in range(2)), f"generator … {ONCE}"),
    (lambda: fit(zip([X], [Y], strict=True)), f"zip … {ONCE}"),
    (lambda: fit(map(tuple, DATA)), f"map … {ONCE}"),
    (lambda: fit(Stream()), f"Stream … {ONCE}"),
    *((lambda rounds=rounds, method=method: fit(Rounds(rounds), method=method), f"shows 0 samples … {FRESH}")
      for method, rounds in ((lw.KFAC(), 1), (lw.KFAC(), 2), (lw.EKFAC(), 2), (METHODS[-1], 2), (lw.Full(), 1))),
    *((lambda then=then, method=method: fit(Rounds(2, then), method=method),
       f"16 at first and shows {8 * then} samples … same data")
      for method, then in ((lw.EKFAC(), 1), (METHODS[-1], 3), (lw.Full("dual"), 1), (lw.Full("dual"), 3))),
    (lambda: fit((X,)), f"{ITERABLE} … (Tensor (8, 4) … [(x, y)] for one batch"),
    (lambda: fit(X), f"{ITERABLE} … Tensor (8, 4) float32 … [(x, y)]"),
    (lambda: fit([X, Y]), f"{ITERABLE} … [Tensor (8, 4) float32 … [(x, y)]"),
    (lambda: fit(None), f"{ITERABLE} … not None … DataLoader"),
    (lambda: fit(TensorDataset(X)), "is list(Tensor (8, 4) … yield (inputs, targets)"),
    (lambda: fit({"x": X, "z": Y}), f"{ITERABLE} … Tensor (8, 4) … [(x, y)]"),
    (lambda: fit([(X[i], Y[i]) for i in range(8)]), f"(4,) … {ONE_ROW} … x[None]"),
    (lambda: lw.fit(DATA, network()), "are a network, of type Sequential … lw.fit(model, loader)"),
    (lambda: lw.fit(network(), X, Y), "lw.fit(model, [(x, y)])"),
    (lambda: lw.Validation([X, Y]), f"Validation … {ONE_BATCH}"),
    (lambda: lw.EarlyStopping([X, Y]), f"EarlyStopping … {ONE_BATCH}"),
    (lambda: fit(TRAINER), "not a Trainer … fit_trainer(trainer)"),
    (lambda: fit(validation=TRAINER), "not a Trainer … trainer.get_train_dataloader()"),
    *((lambda labels=labels: fit(Samples(labels)), "Samples … not a batch … DataLoader(dataset, batch_size")
      for labels in (Y, Y.tolist(), X[:, :1], [{"x": X[0], "y": 1}])),
    # batches
    *((lambda batch=batch: fit([batch]), f"batch … {found} … yield (inputs, targets) … {FORWARD}") for batch, found in (
        (Record(X, Y), "Record"), ("abc", "str"), ((X,), "tuple(Tensor (8, 4) float32)"),
        ({"x": X}, "dict(x=Tensor (8, 4) float32)"), ({"labels": Y}, "dict(labels=Tensor (8,) int64)"),
        ((X, Y.tolist()), "list(int"), (None, "NoneType"))),
    (lambda: fit([(Record(X, Y), Y)]), f"Record … first dimension is the batch … {FORWARD}"),
    (lambda: predict(Record(X, Y)), f"Record … {FORWARD}"),
    (lambda: predict(None), f"NoneType … {FORWARD}"),
    (lambda: predict([X.tolist(), None]), "a list of numbers … numpy.array(x)"),
    (lambda: fit([(X, (Y, Y))]), f"{HEADS} … [(x, y[0]) for x, y in loader] … {FORWARD}: model(inputs)[...]"),
    (lambda: fit([[X, {"kind": Y, "price": X}]]),
     f"{HEADS} … [(x, y['kind']) for x, y in loader] … {FORWARD}: model(inputs)[...]"),
    (lambda: fit((X, {"kind": Y, "price": X})), f"['kind', 'price'] … {HEADS}"),
    (lambda: fit([(X[:1], torch.tensor(1))]), f"no dimensions … {ONE_ROW} … y[None]"),
    *((lambda ask=ask, y=y: ask([(X[:2], y)]), TARGETS_OF_A_BATCH) for y in (Y, torch.tensor(1)) for ask in (
        lambda bad: fit(DATA + bad, tune=None), lambda bad: lw.Validation(bad).tune(posterior()), mode)),
    (lambda: fit([(X, OWNERS, Y[:4])], linear(pooled)), f"(4, 3) at 8 samples … (8, 4) … {JOIN}"),
    (lambda: fit([{"x": X, "owner": OWNERS, "y": Y[:4]}], linear(pooled)), f"(4, 3) at 8 samples … owner= … {JOIN}"),
    (lambda: fit([(X, torch.tensor([2, 3, 3]), Y[:3])], linear(split_up)), f"(3, 3) at 8 samples … (8, 4) … {JOIN}"),
    (lambda: fit(model=linear(lambda layer, x: layer(x.reshape(8, 4)))),
     f"accepts the first batch, Tensor (8, 4) … '[8, 4]' is invalid … {JOIN}"),
    # networks
    *((lambda model=model: lw.fit(model, DATA), NO_MODULE)
      for model in ("model.pt", lambda x: x, None, {"weight": X}, nn.Linear)),
    *((lambda model=model: lw.coverage(model, X), NO_MODULE)
      for model in ("model.pt", lambda x: x, None, {"weight": X}, nn.Linear)),
    (lambda: fit(model=FROZEN), "Sequential … has 4 (4 frozen … 0.weight … params=lw.matching('*')"),
    (lambda: lw.coverage(FROZEN, X), "params="),
    (lambda: fit(params=lw.matching("hed.*")), "selects no parameter … 0 frozen … params="),
    (lambda: fit(params=lambda name, parameter: False), "selects no parameter … 0 frozen … params="),
    (lambda: fit(model=nn.Tanh()), "Tanh … no parameters … Pass the nn.Module"),
    (lambda: fit(params="head"), f"params='head' … lw.everything … {PARAMS}"),
    (lambda: fit(params=["0.weight"]), f"['0.weight'] … lw.matching … {PARAMS}"),
    (lambda: fit(params=list(network().parameters())), "Parameter (6, 4) float32 … params=lambda name"),
    (lambda: fit(params=dict(network().named_parameters())), "Parameter (6, 4) float32 … params=lambda name"),
    (lambda: fit(params=lambda name: True), f"TypeError … {PARAMS}"),
    (lambda: lw.matching(), "matching() … lw.matching('*.lora_*'"),
    (lambda: lw.matching(["0.*"]), "matching(['0.*']) … each a string … lw.matching("),
    *((lambda noise=noise: fit(model=linear(lambda layer, x: layer(noise(x)))), f"Net … {TWO_COPIES}")
      for noise in (dropping, lambda x: x + 1e-4 * torch.rand(4))),
    (lambda: lw.coverage(linear(lambda layer, x: layer(dropping(x))), X), "on the same batch"),
    *((lambda params=params: fit(model=overwrites(), params=params), "Net overwrites … h.mul_(2)")
      for params in (lw.everything, lw.last_layer)),
    (lambda: fit(DATA, checkpointed(False), params=lw.everything), AGAIN),
    (lambda: fit(DATA, checkpointed(True), params=lw.everything), AGAIN),
    (lambda: fit(DATA, checkpointed(True), lw.MeanField(1), params=lw.everything), AGAIN),
    # options
    (lambda: fit(prior_precision=1.0, weight_decay=0.1), "prior_precision=1.0 … weight_decay … Leave one"),
    (lambda: fit(method=lw.SWAG), "SWAG … not a method … lw.SWAG.from_snapshots"),
    *((lambda options=options: fit(**options), words) for options, words in (
        ({"temperature": 0}, "temperature=0 … positive finite … temperature=1.0"),
        ({"weight_decay": 0}, "weight_decay=0 … positive finite … weight_decay=1e-4"),
        ({"progress": "no"}, "progress='no' … True … False … None … progress=None"),
        ({"memory": 100}, "memory=100 … 16 MiB … memory=2**30"),
        ({"seed": 1.5}, "seed=1.5 … whole number … seed=0"),
        ({"tune": "evidence"}, "tune='evidence' … lw.Evidence() … None"),
        ({"tune": lw.Evidence}, "Evidence … lw.Validation(loader) … tune=lw.BoundedEvidence()"),
        ({"forward": 3}, "forward=3 … function … forward=lambda model, inputs"),
        ({"method": lw.KFAC}, "method=KFAC … the class … lw.KFAC()"),
        ({"prior_mean": X}, "Tensor (8, 4) … {parameter: tensor} … prior_mean=0.0"),
        ({"prior_mean": {"0.wieght": X}}, "0.wieght … 0.weight (6, 4) … prior_mean={name: tensor}"),
        ({"prior_mean": {"0.weight": X}}, "0.weight … shape … 0.weight (6, 4) … prior_mean={name: tensor}"),
        ({"prior_mean": {"0.bias": torch.full((6,), NAN)}}, "0.bias … not finite … prior_mean={name: tensor}"),
        ({"prior_precision": {"4": 1.0, "*": 1.0}}, "{'4': 1.0} … no block … the blocks are 0, 2 … {'0': 1.0}"),
        ({"prior_precision": {"*": 1.0, "*.bias": 1e-4}},
         "{'*.bias': 0.0001} names 0.bias, and 0.weight, 0.bias share one … {'0': 0.0001}"),
        ({"prior_precision": {"*": 0.0}}, "prior_precision['*']=0.0 … positive … {'*': 1.0}"),
        ({"prior_precision": {"0": 1.0}}, "no value for 2. … '*': 1.0"))),
    (lambda: predict(X, via="mc"), f"via='mc' … {WAY}"),
    (lambda: posterior().latent(X, via=lw.Linearized), f"via=<class … {WAY}"),
    (lambda: predict(X, link="probit"), "link='probit' … link=lw.Probit()"),
    (lambda: predict(X, link=lw.SampledLink(), generator=3), "generator=3 … manual_seed(0)"),
    (lambda: posterior().latent([X, X], joint=True), "loader has no joint latent … Pass a tensor"),
    (lambda: posterior().sample(0), "posterior.sample(n=0) … at least 1 … n=512"),
    *((lambda ask=ask: ask(), "Ask for") for ask in (
        lambda: posterior().sample(MANY), lambda: posterior().latent(X).sample(10**400),
        lambda: posterior().latent(X, joint=True).sample(MANY), lambda: posterior().latent(X, via=VIAS[1]).sample(MANY),
        lambda: predict(X, via=lw.MonteCarlo(MANY)), lambda: predict(X).sample(MANY), lambda: answers().sample(MANY),
        lambda: regression().predict(X).sample(MANY), lambda: regression().predict(X, via=VIAS[1]).sample(MANY))),
    (lambda: answers().sample("a"), "not a number of draws"),
    (lambda: posterior().sample(2, seed=-1), "seed=-1 … from 0 to … seed=0"),
    (lambda: posterior().sample_function(seed=1.5), "posterior.sample_function(seed=1.5 … from 0 to … seed=0"),
    (lambda: posterior().sample_function(n=0), "posterior.sample_function(n=0) … at least 1 … n=512"),
    (lambda: posterior().sample_function()(X[:, :2]), "Sequential"),
    (lambda: posterior().latent(X).sample("a"), "n='a' … at least 1 … sample(n=512)"),
    (lambda: predict(X).sample(0), "n=0 … whole number … sample(n=512)"),
    (lambda: predict(X).scaled(0, 2), "ClassPrediction predicts labels … Leave it out"),
    (lambda: regression().predict(X).interval("0.9"), "'0.9' … interval(0.9)"),
    (lambda: regression().predict(X).quantile(50), "quantile() is 50 … quantile(0.5)"),
    (lambda: posterior().with_prior({"hed": 1.0}), "{'hed': 1.0} … the blocks are 0, 2"),
    (lambda: posterior().with_prior(1.0, noise_variance=0.1), "no noise variance … lw.Gaussian(noise_variance=...)"),
    (lambda: regression().with_prior(1.0, 0), "noise_variance=0 … positive finite … 0.1"),
    (lambda: mode(), "training data … loader=loader"),
    (lambda: lw.load(posterior().model, "p.st"), "is a Sequential … lw.load('posterior.safetensors', model)"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad", "ignore:The PyTorch API of nested tensors")
@each_row(REFUSED)
def test_a_call_is_refused_in_these_words(call: Callable[[], Any], words: str) -> None:
    message = refused(call, words)
    assert "accepts no missing" not in words or "Gaussian(missing" not in message


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.uint8])
def test_inputs_of_the_wrong_dtype(dtype: torch.dtype) -> None:
    words = f"Sequential, called as … {str(dtype)[6:]} … dtype … float32 … x.to(torch.float32)"
    wrong = (X * 10).abs().to(dtype)
    message = refused(lambda: fit([(wrong, Y)]), words)
    assert ("x.astype('float32')" in message) != dtype.is_floating_point
    refused(lambda: fit([(X, Y), (wrong, Y)]), words)
    for via in VIAS:
        refused(lambda via=via: predict(wrong, via=via), words)


# --- what is near to what is refused ---------------------------------------------------------------------------------
def test_other_errors_of_the_users_code_come_through_as_they_are() -> None:
    def broken(model: nn.Module, x: Tensor) -> Tensor:
        raise RuntimeError("the database is locked")

    with pytest.raises(RuntimeError, match="the database is locked"):
        fit(forward=broken)
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'tail'"):
        fit(model=graphs(), forward=lambda model, x: model.tail(x))


def test_a_list_of_several_inputs_is_a_loader() -> None:
    """PyTorch's loaders make a list of several inputs, and a list of tensors is a loader of batches."""
    both = nn.Bilinear(4, 4, 3).eval()
    for batch, forward in (([X, X], None), ([X, X], lambda model, x: model(x[0], x[1]))):
        fitted = fit([(batch, Y)], both, forward=forward)
        refused(lambda fitted=fitted: fitted.predict([X, X]), "A list is read as a loader … 2 tensors … tuple(x)")
        assert fitted.predict((X, X)).probs.shape == (8, 3)


@pytest.mark.parametrize("params", [lw.everything, lw.last_layer], ids=["everything", "last layer"])
@pytest.mark.parametrize("cell", [nn.GRUCell(4, 5), Adding(4, 5)], ids=["recurrent", "plain"])
def test_a_state_kept_between_calls(cell: nn.Module, params: Any) -> None:
    """It is restored after each call of ours, so that two calls agree, and predictions would depend on older calls."""
    model = Net(remembering, cell=cell, head=nn.Linear(5, 3), state=None).eval()
    refused(lambda: fit(DATA, model, params=params), "Net keeps a state … (state) … setattr(model, 'state', None)")
    inner = "(0.state) … setattr(model.get_submodule('0'), 'state', None)"
    refused(lambda: fit(DATA, nn.Sequential(model).eval(), params=params), inner)
    reset = lambda model, inputs: (setattr(model, "state", None), model(inputs))[1]  # noqa: E731
    fitted = fit(DATA, model, params=params, forward=reset)
    torch.testing.assert_close(fitted.predict(X[:3]).probs, fitted.predict(X).probs[:3])


def test_the_lines_of_messages_work() -> None:
    at = torch.arange(8) % 5
    picked = lambda model, i: model(i[0])[torch.arange(len(i[1])), i[1]]  # noqa: E731
    assert fit([((SEQUENCES, at), Y)], POSITIONS, forward=picked).predict((SEQUENCES, at)).probs.shape == (8, 3)
    assert fit([(BIG, FINE[..., ::4, ::4])], MAPS).predict(BIG).probs.shape == (2, 4, 2, 3)
    assert fit(DataLoader(Samples(Y), batch_size=4)).samples == 8
    assert lw.fit(FROZEN, DATA).tangent.size == 21  # the last layer, frozen or not
    assert fit(model=FROZEN, params=lw.matching("*")).tangent.size == 51
    bare = Net(lambda net, x: torch.einsum("bi,io->bo", x, net.weight), weight=nn.Parameter(torch.ones(4, 3)))
    assert list(lw.fit(bare.eval(), DATA).tangent.parameters) == ["weight"]
    fit(Rounds(2), tune=lw.Evidence())  # one batch to survey, one pass, and a look back to tune

    def joined(numbers: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.cat([X[2 * k : 2 * k + 2] for k in numbers])
        return rows, torch.arange(len(numbers)).repeat_interleave(2)

    means = linear(pooled)
    forward = lambda model, numbers: model(*joined(numbers.tolist()))  # noqa: E731
    fitted = fit([(torch.arange(4), Y[:4])], means, forward=forward)
    torch.testing.assert_close(fitted.latent(torch.arange(4)).mean, means.layer(X.unflatten(0, (4, 2)).mean(1)))


def test_a_network_that_writes_its_inputs() -> None:
    x, model = X.clone(), linear(lambda layer, x: layer(x.add_(1.0)))
    refused(lambda: fit([(x, Y)], model), "Net writes its inputs in place … x.clone()")
    assert torch.equal(x, X)
    assert fit([(x, Y)], model, forward=lambda model, x: model(x.clone())).predict(x).probs.shape == (len(X), 3)


def test_layers_in_training_mode() -> None:
    """Dropout that drops nothing is fine."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.0), nn.Linear(6, 3))
    with_dropout, without = fit(DATA, model.train()), fit(DATA, nn.Sequential(model[0], model[2]).eval())
    torch.testing.assert_close(with_dropout.latent(X).covariance, without.latent(X).covariance)
    assert model.training
    refused(lambda: fit(DATA, NORMED.train()), MODES)
    fitted = fit(DATA, NORMED.eval())
    NORMED.train()
    refused(lambda: fitted.predict(X), MODES)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("patterns", [("trunk.*",), ("trunk.*", "head.*")], ids=str)
@pytest.mark.parametrize("first", [nn.Linear(4, 5), nn.Identity()], ids=["layer", "none"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_whose_inputs_have_no_gradient(
    first: nn.Module, patterns: tuple[str, ...], frozen: bool
) -> None:
    """It returns outputs without a graph, so autograd shows neither its weights nor itself; a last layer has one."""
    model = checkpointed(True).requires_grad_(not frozen)
    model.first = first.requires_grad_(not frozen)
    model.trunk[0] = nn.Linear(5 if isinstance(first, nn.Linear) else 4, 6)
    refused(lambda: lw.fit(model, DATA, lw.Diagonal(), params=lw.matching(*patterns)), AGAIN)
    last = lw.fit(model, DATA, prior_precision=1.0)
    assert list(last.tangent.parameters) == ["head.weight", "head.bias"]
    if not frozen:
        plain = nn.Sequential(model.first, model.trunk, model.head).eval()
        torch.testing.assert_close(last.predict(X).probs, lw.fit(plain, DATA, prior_precision=1.0).predict(X).probs)


@pytest.mark.filterwarnings("ignore")
def test_quantised_layers() -> None:
    layers = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), {nn.Linear})
    model = nn.Sequential(nn.Linear(4, 4), layers).eval()
    refused(lambda: lw.fit(model, DATA), "The layer 1.0 (Linear) of Sequential … quantized dynamically")
    static = torch.ao.nn.quantized.Linear(4, 6)  # a trunk of fixed scales
    model = nn.Sequential(quantized(static), nn.Linear(6, 3)).eval()
    refused(lambda: fit(DATA, model), "The layer 0.layer … quantized … params=lw.last_layer")
    assert list(lw.fit(model, DATA).tangent.parameters) == ["1.weight", "1.bias"]
    model = nn.Sequential(nn.Linear(4, 4), quantized(static)).eval()
    refused(lambda: lw.fit(model, DATA), "out of quantized layers (such as 1.layer) … in floating point")


@pytest.mark.slow
def test_a_prediction_within_a_compiled_function() -> None:
    fitted = posterior()  # Dynamo warns of the cache of this function
    compiled = torch.compile(lambda x: fitted.predict(x).probs, backend="eager")
    refused(lambda: compiled(X), "torch.compile compiles … outside of that function … lw.deploy(posterior, x)")
    assert predict(X).probs.shape == (8, 3)


def test_numbers_of_numpy_are_numbers() -> None:
    numbers = {"prior_precision": np.float32(2.0), "temperature": np.float64(2.0)}
    fitted = fit(data_size=np.int64(80), seed=np.int64(3), **numbers)
    assert (fitted.prior_precision, fitted.data_factor, fitted.temperature) == (2.0, 10.0, 2.0)
    assert isinstance(fitted.temperature, float)


TWICE = TensorDataset(*[torch.cat([v, v]) for v in (X, Y)])


@pytest.mark.parametrize(
    "loader",
    [
        DATA, [(X[:3], Y[:3]), (X[3:], Y[3:])], DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True),
        DataLoader(TWICE, batch_size=3, sampler=range(8)),
    ],
    ids=["batch", "batches", "loader", "sampler"],
)  # fmt: skip
def test_a_data_size_below_the_loader_is_seen_before_the_network_runs(loader: Any) -> None:
    model, runs = network(), []
    hook = model.register_forward_pre_hook(lambda *_: runs.append(1))
    refused(lambda: fit(loader, model, data_size=3), "data_size=3 … 8 samples … Leave data_size out")
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
    refused(lambda: fit(loader, data_size=5), "data_size=5  … 6 samples … Leave data_size")


@pytest.mark.parametrize("names", [("none", "x"), ("x", "none")])
def test_a_tensor_for_columns_that_a_data_set_does_not_have(names: tuple[str, str]) -> None:
    inputs = {name: {"none": torch.empty(0), "x": X}[name] for name in names}
    fitted = fit([{**inputs, "y": Y}], linear(lambda layer, none, x: layer(x)))
    assert fitted.predict(inputs).probs.shape == (8, 3)


@pytest.mark.parametrize(
    "method", [None, lw.KFAC(), lw.Full(), lw.Diagonal()], ids=lambda method: type(method).__name__
)
def test_parameters_without_entries_are_left_out(method: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    model[0].register_parameter("nothing", nn.Parameter(torch.empty(0)))
    assert list(fit(DATA, model, method).tangent.parameters) == ["0.weight", "0.bias"]
    assert method is None or "Parameters without entries are left out: 0.nothing" in caplog.text


def test_a_posterior_is_shown_in_one_line() -> None:
    shown = repr(posterior())
    assert shown.startswith("<Posterior by KFAC(")
    assert "over all 51 weights of Sequential (0.weight, 0.bias, 2.weight, 2.bias), 8 samples, Categorical()" in shown
    deep = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)).eval()
    assert "of Sequential (0.weight, 0.bias, 1.weight, 1.bias, ... 6 parameters), 8" in repr(fit(DATA, deep))
    assert f"prior_precision={posterior().prior_precision:.4g}" in shown
    assert "\n" not in shown
    assert len(shown) < 280
    layers = posterior().with_prior({"0": 1.0, "2": 2.00001})
    assert "prior precision 0: 1, 2: 2\n" in str(layers.diagnose())
    assert "prior precision 0.3333\n" in str(posterior().with_prior(1 / 3).diagnose())
    assert "Gaussian(noise_variance=0.3333)" in repr(fit([(X, REAL)], likelihood=lw.Gaussian(1 / 3)))
    assert "prior_precision of 2 blocks" in repr(layers)
    assert "temperature=0.5" in repr(fit(temperature=0.5))


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
    fitted = fit(params=params)
    fitted = copy.deepcopy(fitted) if copied else fitted
    fitted.predict(X)  # a look at the weights before they change
    act, named = CHANGES[change]
    act(fitted.tangent.model)
    asks: list[Callable[[], Any]] = [lambda via=via: fitted.latent(X, via=via) for via in WAYS]
    asks += [lambda: fitted.sample(2), lambda: fitted.save(tmp_path / "p"), lambda: fitted.log_marginal_likelihood()]
    asks.append(lambda: fitted.with_prior(2.0).predict(X))
    for ask in asks:
        refused(ask, f"{named} … Sequential … after the fit … Fit again … lw.load(path, model)")
    assert not list(tmp_path.iterdir())


def test_statistics_of_batch_norm_that_changed_after_the_fit() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).eval()
    fitted = lw.fit(model, DATA)
    model.train()(X)
    model.eval()
    refused(lambda: fitted.predict(X), "1.running_mean … after the fit … Fit again")


def test_what_does_not_change_the_weights_is_fine() -> None:
    model = network()
    fitted = fit(DATA, model)
    expected = fitted.latent(X).covariance
    model.requires_grad_(False)
    model(X)
    model.train()
    model.share_memory()
    torch.testing.assert_close(fitted.latent(X).covariance, expected)
