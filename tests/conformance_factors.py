"""Kronecker factors by taps and plain loops, independent of the library's records: the oracle of KFAC and EKFAC."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lapwing.covariance import KroneckerBlock
from tests import oracle
from tests.conformance import Setup, close

MIXED = {"tied": "embedding", "functional_reuse": "fc"}
"""Blocks whose uses have different layouts, so that they have no factors."""

Factors = tuple[list[Tensor], list[Tensor], int]
"""A (I, I) and Γ (O, O) of each group, sums over data, and their count of positions."""


@dataclass
class Seen:
    """One use of a block's parameters by one sample, at T positions.

    Attributes:
        block: its name.
        inputs: a (T, I) of each group, the bias as a last column of ones.
        tap: zeros added to the output, for its gradient; in-place changes of activations happen behind it.
        split: that gradient -> g (T, O) of each group.
    """

    block: str
    inputs: list[Tensor]
    tap: Tensor
    split: Callable[[Tensor], list[Tensor]]


class Taps:
    """Notes the uses of a problem's treated parameters."""

    def __init__(self, problem: Setup) -> None:
        named = dict(oracle.uncompiled(problem.model).named_parameters())
        mixed = MIXED.get(problem.case.name)
        self.own = {id(named[n]): b.name for b in problem.blocks for n in b.parameters if b.name != mixed}
        self.seen: list[Seen] = []

    def add(self, weight: Tensor, bias: Tensor | None, inputs: list[Tensor], out: Tensor, split: Callable) -> Tensor:
        """Returns a layer's output with a tap, noted for the block of its weight and for that of its bias."""
        weights, biases = self.own.get(id(weight)), self.own.get(id(bias))
        tap = torch.zeros_like(out, requires_grad=True)
        for name in {weights, biases} - {None}:
            columns = [[x.detach().clone()] * (weights == name) + [ones(x)] * (biases == name) for x in inputs]
            self.seen.append(Seen(name, [torch.cat(parts, 1) for parts in columns], tap, split))
        return out + tap


def ones(x: Tensor) -> Tensor:
    return torch.ones(len(x), 1).double()


@contextmanager
def linear_functions(taps: Taps) -> Iterator[None]:
    """Taps linear layers, which are caught as functions: modules, attention projections and functional reuse."""
    plain_linear, plain_addmm = F.linear, torch.addmm
    flat = lambda g: [g.reshape(-1, g.shape[-1])]  # noqa: E731

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return taps.add(weight, bias, flat(x), plain_linear(x, weight, bias), flat)

    def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return taps.add(weight, bias, flat(x), plain_addmm(bias, x, weight), flat)

    with mock.patch.object(F, "linear", linear), mock.patch.object(torch, "addmm", addmm):
        yield


def in_groups(layer: nn.Module, x: Tensor, out: Tensor) -> tuple[list[Tensor], Callable]:
    """Inputs and gradients of a convolution, plain or transposed in two dimensions."""
    groups = range(layer.groups)
    if isinstance(layer, nn.ConvTranspose2d):
        inputs = [sources(layer, x, out, group) for group in groups]
    else:
        inputs = [positions_in(layer, x, group) for group in groups]
    return inputs, lambda g: [positions_out(layer, g, group) for group in groups]


def of_tokens(layer: nn.Embedding, x: Tensor, out: Tensor) -> tuple[list[Tensor], Callable]:
    """Inputs and gradients of an embedding: inputs are one-hot, the padding token takes no gradient."""
    tokens = x.flatten()
    taken = torch.ones(len(tokens)) if layer.padding_idx is None else tokens != layer.padding_idx
    one_hot = F.one_hot(tokens, layer.num_embeddings).double()
    return [one_hot], lambda g: [g.reshape(len(tokens), -1) * taken[:, None]]


@contextmanager
def modules(taps: Taps, model: nn.Module) -> Iterator[None]:
    """Taps convolutions and embeddings by hooks on their modules."""

    def hook(layer: nn.Module, args: tuple, out: Tensor) -> Tensor:
        inputs, split = (of_tokens if isinstance(layer, nn.Embedding) else in_groups)(layer, args[0], out)
        return taps.add(layer.weight, getattr(layer, "bias", None), inputs, out, split)

    with hooked(model, (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Embedding), hook):
        yield


def sources(layer: nn.ConvTranspose2d, x: Tensor, out: Tensor, group: int) -> Tensor:
    """What a transposed convolution multiplies by its weights at each output pixel of one sample (T, I)."""
    per_group, (height, width) = layer.in_channels // layer.groups, layer.kernel_size
    x = x[0, group * per_group : (group + 1) * per_group]
    rows = torch.zeros(*out.shape[2:], per_group, height, width).double()
    for p in range(x.shape[1]):
        for q in range(x.shape[2]):
            for i in range(height):
                for j in range(width):
                    row = p * layer.stride[0] - layer.padding[0] + i * layer.dilation[0]
                    column = q * layer.stride[1] - layer.padding[1] + j * layer.dilation[1]
                    if 0 <= row < out.shape[2] and 0 <= column < out.shape[3]:
                        rows[row, column, :, i, j] = x[:, p, q]
    return rows.flatten(0, 1).flatten(1)


@contextmanager
def recurrent_modules(model: nn.Module) -> Iterator[None]:
    """Computes an LSTM of one layer by linear layers, step by step, which are tapped in their turn."""

    def hook(layer: nn.LSTM, args: tuple, out: tuple) -> tuple:
        h, c, states = *torch.zeros(2, 1, layer.hidden_size).double(), []
        for x in args[0].unbind(1):
            gates = F.linear(x, layer.weight_ih_l0, layer.bias_ih_l0)
            i, f, g, o = (gates + F.linear(h, layer.weight_hh_l0, layer.bias_hh_l0)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        close(torch.stack(states, 1).detach(), out[0].detach())
        return torch.stack(states, 1), out[1]

    with hooked(model, (nn.LSTM,), hook):
        yield


@contextmanager
def hooked(model: nn.Module, kinds: tuple[type[nn.Module], ...], hook: Callable) -> Iterator[None]:
    handles = [layer.register_forward_hook(hook) for layer in model.modules() if isinstance(layer, kinds)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def kronecker_factors(problem: Setup, reduce: bool) -> dict[str, Factors]:
    """Kronecker factors of the treated parameters by loops over samples and positions: block name -> factors.

    Reduced, a sample gives the mean of its a and the sum of its g over positions; embeddings are never reduced.
    """
    key = (problem.case.name, problem.samples, tuple(block.parameters for block in problem.blocks), reduce)
    if key in CACHE:
        return CACHE[key]
    model, found = oracle.uncompiled(problem.model), {}
    tables = {Taps(problem).own.get(id(m.weight)) for m in model.modules() if isinstance(m, nn.Embedding)}
    for n in range(problem.samples):
        taps = Taps(problem)
        with (
            linear_functions(taps), modules(taps, model), recurrent_modules(model), torch.enable_grad(),
            oracle.reference_kernels(),
        ):  # fmt: skip
            f = oracle.call(model, oracle.take(problem.x, slice(n, n + 1)))[0]  # (C,)
        seen, ends = taps.seen, [use.tap for use in taps.seen]
        gradients = [torch.autograd.grad(f_c, ends, retain_graph=True) for f_c in f] if seen else []
        for name in {use.block for use in seen}:
            mine = [i for i, use in enumerate(seen) if use.block == name]
            groups = len(seen[mine[0]].inputs)
            sums_a, sums_g, count = found.get(name, ([0] * groups, [0] * groups, 0))
            for group in range(groups):  # positions of all uses: a (T, I), g (C, T, O)
                a = torch.cat([seen[i].inputs[group] for i in mine])
                g = torch.cat([torch.stack([seen[i].split(row[i])[group] for row in gradients]) for i in mine], 1)
                if reduce and name not in tables:
                    a, g = a.mean(0, keepdim=True), g.sum(1, keepdim=True)
                for t in range(len(a)):
                    sums_a[group] = sums_a[group] + torch.outer(a[t], a[t])
                    sums_g[group] = sums_g[group] + g[:, t].T @ problem.fisher[n] @ g[:, t]
            found[name] = sums_a, sums_g, count + len(a)
    CACHE[key] = found
    return found


CACHE: dict[tuple, dict[str, Factors]] = {}


def kfac_curvature(factors: Factors) -> Tensor:
    """`Γ ⊗ A / #`, the groups on the diagonal."""
    inputs, outputs, count = factors
    return torch.block_diag(*[torch.kron(g, a) / count for a, g in zip(inputs, outputs, strict=True)])


def ekfac_curvature(own: Tensor, factors: Factors, structure: KroneckerBlock) -> Tensor:
    """The GGN block's diagonal in an eigenbasis of the factors: any one, as where eigenvalues agree there are many."""
    basis, kfac = dense_basis(structure), kfac_curvature(factors)
    close(basis.T @ basis, torch.eye(len(basis)).double())
    rotated = basis.T @ kfac @ basis
    close(rotated, torch.diag(rotated.diagonal()))
    return basis @ torch.diag((basis.T @ own @ basis).diagonal()) @ basis.T


def positions_in(layer: nn.Module, x: Tensor, group: int) -> Tensor:
    """A convolution's inputs of one sample at each position (T, I): patches by explicit loops over output pixels."""
    x = x[0]  # (channels, *space)
    per_group = layer.in_channels // layer.groups
    x = x[group * per_group : (group + 1) * per_group]
    if x.ndim == 2:
        x = x[:, None]  # a convolution in one dimension is one in two
    pair = lambda value: value if len(value) == 2 else (1, *value)  # noqa: E731
    kernel, stride, dilation = (pair(v) for v in (layer.kernel_size, layer.stride, layer.dilation))
    if layer.padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        before = [t // 2 for t in total]
        after = [t - b for t, b in zip(total, before, strict=True)]
    else:
        before = after = layer.padding if len(layer.padding) == 2 else (0, *layer.padding)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = nn.functional.pad(x[None], (before[1], after[1], before[0], after[0]), mode=mode)[0]
    rows = []
    for i in range(0, x.shape[1] - dilation[0] * (kernel[0] - 1), stride[0]):
        for j in range(0, x.shape[2] - dilation[1] * (kernel[1] - 1), stride[1]):
            patch = x[:, i : i + dilation[0] * kernel[0] : dilation[0], j : j + dilation[1] * kernel[1] : dilation[1]]
            rows.append(patch[:, : kernel[0], : kernel[1]].flatten())
    return torch.stack(rows)


def positions_out(layer: nn.Module, g: Tensor, group: int) -> Tensor:
    """A convolution's output gradients of one sample at each position (T, O)."""
    g = g[0].flatten(1).T  # (T, channels)
    per_group = layer.out_channels // layer.groups
    return g[:, group * per_group : (group + 1) * per_group]


def dense_basis(structure: KroneckerBlock) -> Tensor:
    groups, _, inputs = structure.eigenvalues.shape
    within = torch.eye(inputs).double().repeat(groups, 1, 1) if structure.inputs is None else structure.inputs
    pairs = zip(structure.outputs.cpu(), within.cpu(), strict=True)
    return torch.block_diag(*[torch.kron(o.contiguous(), i.contiguous()) for o, i in pairs])
