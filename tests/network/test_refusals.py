"""Networks that are refused: layers, each registered function by an example, and what a later batch does otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import lapwing as lw
from lapwing.network.gate import REFUSALS, check_layers
from lapwing.tangent import Tangent
from tests.network.test_chosen_layers import ALIKE, ONLY_FIRST, mlp, network, routed
from tests.network.test_chosen_layers import X as ROUTED
from tests.network.test_chosen_layers import Y as LABELS
from tests.network.test_functional import AWKWARD, adjoint
from tests.network.test_output_layers import ROWS, built, encoder, texts, tower, treated
from tests.network.test_sample_axis import TABLE, WITH_TOKENS, WITHOUT, made
from tests.network.test_seen_whole import USES, gated
from tests.network.test_survey import conditional, counting
from tests.refused import each_row, refused
from tests.zoo_modules import Net

EXAMPLES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "rescales_its_weights": (
        lambda: nn.Embedding(7, 5, max_norm=1.0).eval(),
        "The layer 1 (Embedding) of Sequential has max_norm=1.0, which writes the weights at every call, also after "
        "model.eval(). Write model.get_submodule('1').max_norm = None, once the weights are within it.",
    ),
    "uses_statistics_of_the_batch": (
        lambda: nn.BatchNorm1d(6, track_running_stats=False).eval(),
        "The layer 1 (BatchNorm1d) of Sequential has no running statistics, so a sample's output depends on the rest "
        "of the batch also after model.eval(). Train with BatchNorm1d(6, track_running_stats=True).",
    ),
    "writes_its_statistics": (
        lambda: nn.InstanceNorm1d(6, track_running_stats=True),
        "The layer 1 (InstanceNorm1d) of Sequential is in training mode, where every call writes its statistics. Call "
        "model.eval() first.",
    ),
    "drops_at_random": (
        lambda: nn.LSTM(4, 4, 2, dropout=0.3),
        "The layer 1 (LSTM, p=0.3) of Sequential is in training mode, where two identical calls differ. Call "
        "model.eval() first.",
    ),
    "is_quantized": (
        lambda: torch.ao.nn.quantized.dynamic.Linear(4, 3),
        "The layer 1 (Linear) of Sequential is quantized dynamically: no gradients pass through it, and its rounding "
        "of one sample depends on the rest of the batch. Fit the network before it is quantized. Or fit a head that is "
        "kept in floating point as a network of its own, on features that the layers before it give: lw.fit(head, "
        "[(features, targets)]).",
    ),
}


def said(*layers: nn.Module) -> str:
    with pytest.raises(lw.LapwingError) as error:
        check_layers(nn.Sequential(*layers))
    return str(error.value)


def test_every_function_has_an_example() -> None:
    assert {look.__name__ for _, look in REFUSALS} == EXAMPLES.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_layer_is_refused_in_a_sentence_and_a_line(name: str) -> None:
    make, message = EXAMPLES[name]
    assert said(nn.Linear(4, 6), make()) == message


def test_a_message_says_the_first_reason_with_three_layers() -> None:
    layers = [part for _ in range(5) for part in (nn.BatchNorm1d(6), nn.Dropout(0.5))]
    assert said(*layers[:3]) == (
        "The layer 0 (BatchNorm1d) of Sequential (also 2 (BatchNorm1d)) is in training mode, where a sample's output "
        "depends on the rest of the batch. Call model.eval() first."
    )
    assert "0 (BatchNorm1d) of Sequential (also 2 (BatchNorm1d), 4 (BatchNorm1d), 2 more)" in said(*layers)
    assert "Dropout" in said(*[layer.eval() if isinstance(layer, nn.BatchNorm1d) else layer for layer in layers])


# --- what a network does ---------------------------------------------------------------------------------------------
EVERY = lw.matching("*")
X, Y = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(6) % 3


def later(model: nn.Module, first: Any, then: Any, forward: Any = None) -> None:
    """Records a first batch, whose layers are all covered, another one, and the first one again."""
    tangent = Tangent.survey(model.double().eval(), first, EVERY, forward)
    assert not tangent.coverage.generic
    tangent.record(first)
    try:
        tangent.record(then)
    finally:
        tangent.record(first)


def turned(how: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """A weight that is used in another way if the sum of the inputs is negative."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = F.linear(x, net.weight) if bool(x.sum() > 0) else how(x, net.weight)
        return net.head(torch.tanh(hidden))

    return Net(forward, weight=nn.Parameter(torch.randn(4, 4)), head=nn.Linear(4, 2))


def clamping(net: Any, x: Tensor) -> Tensor:
    z = torch.tanh(net.first(x))
    u = net.second(z)
    if bool(x.sum() < 0):
        z.clamp_(max=0.1)
    return net.head(u + z)


def attending(net: Any, x: Tensor, memory: Tensor | None = None) -> Tensor:
    h = net.mix(x, x, x, need_weights=False)[0]
    if memory is not None:
        h = h + net.mix(x, memory, memory, need_weights=False)[0]
    return net.head(h.mean(1))


def closed() -> nn.Module:
    return Net(torch.no_grad()(lambda net, x: net.head(x)), head=nn.Linear(4, 3)).double().eval()


def fit(model: nn.Module, x: Any, *options: Any, **more: Any) -> lw.Posterior:
    return lw.fit(model.double().eval(), [(x, torch.arange(len(x)) % 3)], *options, **more)


@cache
def fitted() -> lw.Posterior:
    return fit(mlp(), X, lw.KFAC(), prior_precision=1.0)


def in_forward_mode(function: Callable[[Tensor], Any]) -> None:
    with forward_ad.dual_level():
        function(forward_ad.make_dual(X, torch.ones_like(X)))


def adaptive(net: Any, x: Tensor) -> Tensor:
    """An ODE whose steps depend on the largest slope of the batch."""
    steps = 1 + int(10 * net.flow(x).abs().max())
    for _ in range(steps):
        x = x + torch.tanh(net.flow(x)) / steps
    return net.head(x)


def padded() -> nn.Module:
    """Averages also over padded tokens, which the fast path sets to 0."""

    def mean(net: Any, x: Tensor) -> Tensor:
        mask = torch.tensor([False, False, True]).expand(len(x), 3).clone()
        mask[0] = False
        return net.head(net.encoder(x[:, None].expand(-1, 3, -1), src_key_padding_mask=mask).mean(1))

    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return Net(mean, encoder=nn.TransformerEncoder(layer, 2), head=nn.Linear(4, 3))


def observing(write: bool) -> nn.Module:
    """An observer of the smallest input, which moves in eval mode too, in place or as a new tensor."""

    def forward(net: Any, x: Tensor) -> Tensor:
        low = 0.5 * net.low + 0.5 * x.min() + 1.0
        if write:
            net.low.copy_(low)
        else:
            net.low = low
        return net.head(x * net.low)

    net = Net(forward, head=nn.Linear(4, 3))
    net.register_buffer("low", torch.tensor(1.0))
    return net


ON_GRID = {"one": nn.Linear(4, 3), "two": nn.Linear(1, 3)}
WEIGHED = {"gate": nn.Linear(4, 1), "experts": nn.ModuleList(mlp() for _ in range(4))}
ATTENDING = {"mix": nn.MultiheadAttention(4, 2, batch_first=True), "head": nn.Linear(4, 3)}
THREE = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4), "head": nn.Linear(4, 2)}
CONDITIONAL = {"first": nn.Linear(4, 4), "extra": nn.Linear(4, 4), "head": nn.Linear(4, 2), "positive": True}
SCRIPTED = AWKWARD["scripted"]().double().eval()
MIXED = {"cell": nn.LSTM(4, 5), "head": nn.Linear(5, 3)}
ONE_EXPERT = [(ROUTED[rows], LABELS[rows]) for rows in (ONLY_FIRST, ~ONLY_FIRST)]
OTHER_WAY = "uses its layers in another way at these inputs"
REST_OF_BATCH = "changes with the rest of the batch … batch_first=True"
TORCH_FUNC = "within a transformation of torch.func … torch.autograd.grad("

REFUSED = [
    # on a later batch
    *((lambda name=name, frozen=frozen: later(*gated(name, frozen, always=False)),
       "also uses first.weight in another way, which it did not do") for name, frozen in USES),
    (lambda: later(Net(attending, **ATTENDING), {"x": X[:, None]}, {"x": X[:, None], "memory": X[:, None]}),
     "also uses mix.in_proj_ … in another way"),
    (lambda: later(TABLE, WITH_TOKENS, torch.cat([WITH_TOKENS, WITHOUT])),
     "also uses table.weight in another way, which it did not do"),
    (lambda: later(turned(lambda x, weight: x @ weight), X, -X), OTHER_WAY),
    (lambda: later(turned(lambda x, weight: F.embedding(x.argmin(1), weight)), X, -X), OTHER_WAY),
    (lambda: later(Net(clamping, **THREE), X, -X), "writes the input of the layer of second.bias in place"),
    (lambda: later(Net(conditional, **CONDITIONAL), X, -X),
     "does not use extra.weight at … first batch … params=lw.matching"),
    (lambda: later(*made("unpadded")),
     "at 2 samples:  … a.weight does not hold … ask for single samples"),
    (lambda: lw.fit(network("routed"), ONE_EXPERT, likelihood="categorical"),
     "Net uses experts.1.2.weight at … Shuffle the data,  … params=lw.matching"),
    *((lambda params=params: lw.fit(network("routed"), ONE_EXPERT, lw.KFAC(), likelihood="categorical", params=params),
       "Net does not use experts.0.0.weight at … Shuffle the data,  … params=lw.matching")
      for params in (lw.everything, lw.matching("experts.*"))),
    # gradients
    (lambda: fit(closed(), X), "outputs of Net have no gradient … outside torch.no_grad"),
    (lambda: fit(closed(), X, lw.KFAC()),
     "2 parameters of Net (head.weight, head.bias … Take @torch.no_grad() off forward"),
    *((lambda strict=strict, frozen=frozen: Tangent.survey(adjoint(strict).requires_grad_(not frozen), X, EVERY),
       "Net uses block.0.weight in a torch.autograd.Function … odeint") for strict in (False, True)
      for frozen in (False, True)),
    (lambda held=SCRIPTED[2].weight: Tangent.survey(SCRIPTED, X, EVERY, lambda net, x: torch.tanh(net[0](x)) @ held.T),
     "Sequential uses 2.weight … by a reference from outside of the module"),
    *((lambda ask=ask, transform=transform: transform(partial(ask, fitted()))(X), TORCH_FUNC)
      for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.vmap) for ask in (
        *(lambda fitted, x, via=via: fitted.latent(x, via=via).variance.sum()
          for via in (lw.Linearized(), lw.MonteCarlo(3), lw.Streamlined())),
        lambda fitted, x: lw.fit(fitted.model, [(x, Y)]).latent(x).variance.sum(),
        lambda fitted, x: fitted.sample(2)["0.weight"].sum() * x.sum())),
    (lambda: in_forward_mode(fitted().latent), "forward-mode differentiation"),
    # samples that are not independent
    (lambda: fit(Net(lambda net, x: net.head(net.cell(x)[0][:, -1]), **MIXED), torch.randn(8, 6, 4).double()),
     REST_OF_BATCH),
    (lambda: fit(Net(lambda net, x: net.head(x.cumsum(0)), head=nn.Linear(4, 3)), X), REST_OF_BATCH),
    (lambda: fit(Net(adaptive, flow=nn.Linear(4, 4), head=nn.Linear(4, 3)), X), f"{REST_OF_BATCH} … adaptive solver"),
    (lambda: Tangent.survey(
        Net(lambda net, x, grid: net.one(x) @ net.two(grid).T, **ON_GRID).double().eval(), (X, X[:, :1]), EVERY),
     f"{REST_OF_BATCH} … input that all samples share, such as a grid … let forward= add it"),
    # calls that differ in eval mode
    (lambda: fit(padded(), X), "gives other outputs … if no gradient … TransformerEncoder … set_fastpath_enabled"),
    *((lambda write=write: fit(observing(write), X), "Net changes its buffers (low) … disable_observer … self.training")
      for write in (True, False)),
    # buffers, and the last layer
    (lambda: fit(counting(), X), "Net writes calls whenever … self.training … persistent=False"),
    (lambda: lw.coverage(counting(), X.float()), "Net writes calls whenever … self.training … persistent=False"),
    (lambda: treated(built(lambda: Net(lambda net, x: net.a(x) @ texts(net.b, ROWS).T, a=tower(), b=encoder()))),
     "write params=lw.matching('a.2.*', 'b.a.2.*')"),
    (lambda: fit(Net(lambda net, x: routed(net, x) * net.gate(x), **WEIGHED), ROUTED[ALIKE], likelihood="categorical"),
     "matching('gate.*', 'experts. … .2.*', 'experts. … .2.*', 'experts. … .2.*', 'experts. … .2.*')"),
    (lambda: lw.fit(nn.LazyLinear(3), (X, Y)), "weight of LazyLinear holds no numbers (not initialised)"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # of torch's own fast path
@each_row(REFUSED)
def test_a_call_is_refused_in_these_words(call, words):
    refused(call, words)
