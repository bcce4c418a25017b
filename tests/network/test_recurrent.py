"""Recurrent layers opened: exact against autograd's rows, the network's own outputs, and what stays generic."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import lapwing as lw
from lapwing.data.inputs import Inputs
from lapwing.network.generic import forward_products
from lapwing.tangent import Tangent
from tests import oracle
from tests.conformance import close, jacobian
from tests.network.test_sample_axis import truth
from tests.zoo_modules import Net


class Head(nn.Module):
    """A recurrent layer over (B, T, 3), with initial states of its own, and a linear head on the outputs."""

    def __init__(self, kind: type[nn.RNNBase], starts: bool = False, **options) -> None:
        super().__init__()
        options = {"batch_first": True, **options}
        self.layer = kind(3, 4, **options)
        self.lead = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
        width = options.get("proj_size", 0) or 4
        self.starts = starts
        self.head = nn.Linear(width * (1 + options.get("bidirectional", False)), 2)

    def forward(self, x):
        batch_first = self.layer.batch_first
        x = x if batch_first else x.transpose(0, 1)
        states = None
        if self.starts:
            lead = x[:, 0] if batch_first else x[0]
            hidden = self.layer.proj_size or 4
            states = lead.sum(1)[None, :, None].expand(self.lead, -1, hidden).contiguous()
            if isinstance(self.layer, nn.LSTM):
                states = states, lead.cos().sum(1)[None, :, None].expand(self.lead, -1, 4).contiguous()
        y = self.layer(x, states)[0]
        return self.head(torch.tanh(y.mean(1 if batch_first else 0)))


def in_steps(net, x):
    """A cell called step by step."""
    states = None
    for step in x.unbind(1):
        states = net.cell(step, states)
    return net.head(states[0] if isinstance(states, tuple) else states)


def of_cell(kind: type[nn.RNNCellBase]) -> nn.Module:
    return Net(in_steps, cell=kind(3, 4), head=nn.Linear(4, 2))


def final() -> nn.Module:
    """The final state of a layer called twice, and before it a layer with a graph."""
    together = lambda net, x: net.head(net.layer(net.layer(torch.tanh(net.embed(x)))[0])[1][-1])  # noqa: E731
    return Net(together, embed=nn.Linear(3, 3), layer=nn.GRU(3, 3, batch_first=True), head=nn.Linear(3, 2))


def of_unequal_length(net, x, lengths):
    """Sequences of unequal length, packed."""
    packed = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    return net.head(net.layer(packed)[1][0][-1])


def double(model: nn.Module) -> nn.Module:
    return model.double().eval()


def data(samples: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(samples, 5, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


NETWORKS = {
    "lstm": lambda: Head(nn.LSTM, num_layers=2, bidirectional=True, starts=True),
    "lstm-projected": lambda: Head(nn.LSTM, proj_size=2, num_layers=2, batch_first=False, starts=True),
    "lstm-no-bias": lambda: Head(nn.LSTM, bias=False, proj_size=3, bidirectional=True),
    "gru": lambda: Head(nn.GRU, num_layers=2, bidirectional=True, starts=True, batch_first=False),
    "gru-no-bias": lambda: Head(nn.GRU, bias=False),
    "tanh": lambda: Head(nn.RNN, bidirectional=True, starts=True),
    "relu": lambda: Head(nn.RNN, nonlinearity="relu", num_layers=2, bias=False),
    "lstm-cell": lambda: of_cell(nn.LSTMCell),
    "gru-cell": lambda: of_cell(nn.GRUCell),
    "rnn-cell": lambda: of_cell(nn.RNNCell),
    "used-twice": final,
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", NETWORKS)
def test_rows_are_autograds_and_outputs_are_torchs(name):
    model = double(NETWORKS[name]())
    before = copy.deepcopy(model.state_dict())
    tangent = Tangent.survey(model, data(5))
    assert {block.family for block in tangent.blocks} == {"linear"}
    assert all(block.matrix is not None for block in tangent.blocks)  # so KFAC factors them
    for x in (data(3, seed=1), data(1, seed=2), data(9, seed=3)[:, :2]):  # other batches, one sample, shorter ones
        record = tangent.record(x)
        close(record.outputs.detach(), oracle.outputs(model, x), 1e-13)
        close(record.rows(), jacobian(model, x, tangent.blocks), 1e-12)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_part_of_the_weights():
    model = double(Head(nn.LSTM, num_layers=2, bidirectional=True))
    model.layer.weight_hh_l0.requires_grad_(False)
    x = data(4)
    for pattern in ("layer.weight_hh_l1", "layer.bias_ih_l0*", "layer.weight_ih_l0_reverse", "layer.weight_hh_l0"):
        tangent = Tangent.survey(model, x, lw.matching(pattern))
        assert {block.family for block in tangent.blocks} == {"linear"}
        close(tangent.record(x).rows(), jacobian(model, x, tangent.blocks), 1e-12)


def test_weights_that_are_computed_stay_generic():
    layer = nn.utils.parametrizations.weight_norm(nn.GRU(3, 4, batch_first=True), "weight_hh_l0")
    model = Head(nn.GRU)
    model.layer = layer
    model, x = double(model), data(4)
    tangent = Tangent.survey(model, x)
    families = {block.name: block.family for block in tangent.blocks}
    assert families.pop("head") == "linear"
    assert {name for name, family in families.items() if family == "generic"} >= {
        f"layer.parametrizations.weight_hh_l0.original{i}" for i in (0, 1)
    }
    close(tangent.record(x).rows(), jacobian(model, x, tangent.blocks), 1e-12)


def test_packed_sequences_stay_generic_and_exact():
    model = double(Net(of_unequal_length, layer=nn.LSTM(3, 4, batch_first=True), head=nn.Linear(4, 2)))
    x, lengths = data(5), torch.tensor([3, 5, 1, 4, 2])
    tangent = Tangent.survey(model, (x, lengths))
    families = {block.name: block.family for block in tangent.blocks}
    assert set(families.values()) == {"linear", "generic"}
    close(tangent.record((x, lengths)).rows(), truth(model, tangent, (x, lengths)), 1e-12)


def test_latents_are_differentiable_in_the_inputs():
    model, x = double(Head(nn.LSTM, num_layers=2)), data(4)
    posterior = lw.fit(model, [(x, torch.arange(4) % 2)], lw.KFAC(), prior_precision=1.0)

    def variance(x):
        return posterior.latent(x).variance

    x = x[:2, :2].clone().requires_grad_()
    assert torch.autograd.gradcheck(variance, (x,), atol=1e-7)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_forward_mode_of_float32(kind):
    """Torch's own kernel of float32 has none."""
    model = Head(kind, num_layers=2).eval()
    x = data(4).float()
    tangent = Tangent.survey(model, x)
    weights = dict(model.named_parameters())
    vectors = {name: torch.randn(3, *weight.shape) for name, weight in weights.items()}
    pushed = forward_products(tangent.call_with, weights, vectors, Inputs(x))
    J = oracle.jacobian(copy.deepcopy(model).double(), x.double(), list(weights))
    V = torch.cat([vectors[name].flatten(1) for name in weights], 1).double()
    close(pushed.double(), J @ V.T, 1e-4)


def test_a_half_precision_layer():
    model, x, y = Head(nn.LSTM).bfloat16().eval(), data(4).bfloat16(), torch.arange(4) % 2
    wide = copy.deepcopy(model).double()
    variances = [
        lw.fit(network, [(x.to(dtype), y)], lw.Diagonal(), prior_precision=1.0).latent(x.to(dtype)).variance
        for network, dtype in ((model, torch.bfloat16), (wide, torch.float64))
    ]
    close(variances[0].double(), variances[1], 0.05)


def test_blocks_of_one_module_have_names_of_their_own():
    shapes = {"w1": (4, 3), "b1": (4,), "w2": (2, 4), "b2": (2,)}
    weights = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    linear = nn.functional.linear
    functional = Net(lambda net, x: linear(torch.tanh(linear(x, net.w1, net.b1)), net.w2, net.b2), **weights)
    model, x = double(nn.Sequential(functional)), data(4)[:, 0]
    tangent = Tangent.survey(model, x)
    assert [block.name for block in tangent.blocks] == ["0.1", "0.2"]
    close(tangent.record(x).rows(), jacobian(model, x, tangent.blocks), 1e-12)
