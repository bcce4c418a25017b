"""Kronecker factors by hooks and plain loops, independent of the library's records: the oracle of KFAC and EKFAC."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lapwing.covariance import KroneckerBlock
from tests import oracle
from tests.conformance import Setup


def hooked_factors(problem: Setup, reduce: bool) -> dict[str, tuple[list[Tensor], list[Tensor], int]]:
    """Kronecker factors by hooks and loops: module name -> A and Γ of each group, and their count.

    A tap, zeros added to a layer's output, gets the gradients; in-place changes of activations happen behind it.
    """
    model = oracle.uncompiled(problem.model)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d))}
    found: dict[str, list] = {}
    for n in range(problem.samples):
        calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in layers}

        def note(name: str, calls: dict = calls):
            def hook(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
                tap = torch.zeros_like(out, requires_grad=True)
                calls[name].append((args[0].detach().clone(), tap))
                return out + tap

            return hook

        handles = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
        with torch.enable_grad(), oracle.reference_kernels():
            f = oracle.call(model, oracle.take(problem.x, slice(n, n + 1)))[0]  # (C,)
        for handle in handles:
            handle.remove()
        for name, layer in layers.items():
            taps = [tap for _, tap in calls[name]]
            if not taps:
                continue
            gradients = [torch.autograd.grad(f[c], taps, retain_graph=True) for c in range(len(f))]
            groups = getattr(layer, "groups", 1)
            slot = found.setdefault(name, [[0] * groups, [0] * groups, 0])
            for group in range(groups):
                a, g = [], []  # positions of all calls: (T, I), (C, T, O)
                for i, (inputs, _) in enumerate(calls[name]):
                    a.append(positions_in(layer, inputs, group))
                    g.append(torch.stack([positions_out(layer, row[i], group) for row in gradients]))
                a, g = torch.cat(a), torch.cat(g, 1)
                if layer.bias is not None:
                    a = torch.cat([a, torch.ones(len(a), 1).double()], 1)
                if reduce:
                    a, g = a.mean(0, keepdim=True), g.sum(1, keepdim=True)
                for t in range(len(a)):
                    slot[0][group] = slot[0][group] + torch.outer(a[t], a[t])
                    slot[1][group] = slot[1][group] + g[:, t].T @ problem.fisher[n] @ g[:, t]
            slot[2] += len(a)
    return {name: tuple(slot) for name, slot in found.items()}


def called_factors(problem: Setup, reduce: bool) -> dict[str, tuple[list[Tensor], list[Tensor], int]]:
    """As `hooked_factors`, block name -> factors, for linear layers called as functions, which are patched."""
    model = oracle.uncompiled(problem.model)
    own = {id(p): b for b in problem.blocks for n, p in model.named_parameters() if n in b.parameters}
    plain_linear, plain_addmm = F.linear, torch.addmm
    found: dict[str, list] = {}
    for n in range(problem.samples):
        calls: list[tuple[str, Tensor, Tensor]] = []

        def tapped(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, calls: list = calls) -> Tensor:
            blocks = {own[id(p)].name: own[id(p)] for p in (weight, bias) if id(p) in own}
            tap = torch.zeros_like(out, requires_grad=True)
            for name, block in blocks.items():
                a = x.detach().reshape(-1, x.shape[-1])
                ones = torch.ones(len(a), 1).double()
                a = ones if own.get(id(weight)) is not block else torch.cat([a, ones], 1) if block.bias else a
                calls.append((name, a, tap))
            return out + tap

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tapped: Any = tapped) -> Tensor:
            return tapped(x, weight, bias, plain_linear(x, weight, bias))

        def addmm(bias: Tensor, x: Tensor, weight: Tensor, tapped: Any = tapped) -> Tensor:
            return tapped(x, weight, bias, plain_addmm(bias, x, weight))

        with (
            mock.patch.object(F, "linear", linear), mock.patch.object(torch, "addmm", addmm), torch.enable_grad(),
            oracle.reference_kernels(),
        ):  # fmt: skip
            f = oracle.call(model, oracle.take(problem.x, slice(n, n + 1)))[0]  # (C,)
        taps = [tap for _, _, tap in calls]
        gradients = [torch.autograd.grad(f[c], taps, retain_graph=True) for c in range(len(f))]
        for name in {name for name, _, _ in calls}:
            mine = [i for i, call in enumerate(calls) if call[0] == name]
            a = torch.cat([calls[i][1] for i in mine])  # (T, I)
            g = torch.cat([torch.stack([row[i] for row in gradients]).flatten(1, -2) for i in mine], 1)  # (C, T, O)
            if reduce:
                a, g = a.mean(0, keepdim=True), g.sum(1, keepdim=True)
            slot = found.setdefault(name, [[0], [0], 0])
            slot[0][0] = slot[0][0] + a.T @ a
            slot[1][0] = slot[1][0] + torch.einsum("cto,cd,dtp->op", g, problem.fisher[n], g)
            slot[2] += len(a)
    return {name: tuple(slot) for name, slot in found.items()}


def positions_in(layer: nn.Module, x: Tensor, group: int) -> Tensor:
    """Inputs of one sample at each position (T, I); patches by explicit loops over output pixels."""
    if isinstance(layer, nn.Linear):
        return x.reshape(-1, x.shape[-1])
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
    """Gradients of one sample at each position (T, O)."""
    if isinstance(layer, nn.Linear):
        return g.reshape(-1, g.shape[-1])
    g = g[0].flatten(1).T  # (T, channels)
    per_group = layer.out_channels // layer.groups
    return g[:, group * per_group : (group + 1) * per_group]


def dense_basis(structure: KroneckerBlock) -> Tensor:
    groups, _, inputs = structure.eigenvalues.shape
    within = torch.eye(inputs).double().repeat(groups, 1, 1) if structure.inputs is None else structure.inputs
    pairs = zip(structure.outputs, within, strict=True)
    return torch.block_diag(*[torch.kron(o.contiguous(), i.contiguous()) for o, i in pairs])


def embedding_factors(problem: Setup) -> tuple[Tensor, Tensor, int]:
    """Token counts (V,), Γ over positions, and their number; the padding token 0 takes no gradient."""
    model, (vocabulary, width) = problem.model, problem.model.embedding.weight.shape
    counts, gamma, positions = torch.zeros(vocabulary).double(), torch.zeros(width, width).double(), 0
    for n in range(problem.samples):
        tokens = problem.x[n]
        vectors = model.embedding(tokens).detach()
        J = torch.func.jacrev(lambda v: model.head(v.sum(0)))(vectors).detach()  # (C, T, D)
        for t, token in enumerate(tokens.tolist()):
            positions += 1
            counts[token] += 1
            if token != 0:
                gamma += J[:, t].T @ problem.fisher[n] @ J[:, t]
    return counts, gamma, positions
