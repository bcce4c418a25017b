"""Naive dense references in float64: plain loops, one sample at a time, slow and obvious.

A Jacobian is (B, C, P) with P in the order of `names`, every parameter flattened row-major.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_PREFIX = "_orig_mod."


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile`'s wrapper, or the module itself."""
    return getattr(model, "_orig_mod", model)


def flat_parameters(model: nn.Module, names: Sequence[str] | None = None) -> Tensor:
    """Parameters in the order of `names` as one detached vector, (P,)."""
    named = dict(uncompiled(model).named_parameters(remove_duplicate=False))
    return torch.cat([named[name].detach().reshape(-1) for name in _resolve(model, names)])


def parameter_slices(model: nn.Module, names: Sequence[str] | None = None) -> dict[str, slice]:
    """Where each parameter lies among the P columns of the Jacobian."""
    named = dict(uncompiled(model).named_parameters(remove_duplicate=False))
    return slices_of({name: named[name].numel() for name in _resolve(model, names)})


def slices_of(sizes: dict[str, int]) -> dict[str, slice]:
    """Where each part lies if parts of these sizes follow one another."""
    ends = accumulate(sizes.values())
    return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}


def _resolve(model: nn.Module, names: Sequence[str] | None) -> list[str]:
    if names is None:  # in order of registration, tied ones once, by their first name
        return [name for name, _ in uncompiled(model).named_parameters()]
    resolved = [name.removeprefix(_PREFIX) for name in names]
    named = dict(uncompiled(model).named_parameters(remove_duplicate=False))
    assert len({id(named[name]) for name in resolved}) == len(resolved), f"a parameter is named twice: {resolved}"
    return resolved


@contextmanager
def reference_kernels() -> Iterator[None]:
    """Within: math attention kernel, no fused path of the transformer layers, plain norms; all restored afterwards.

    torch's own backward pass of a batch norm, or an instance norm, can be wrong for one sample.
    """
    before, norms = torch.backends.mha.get_fastpath_enabled(), (F.batch_norm, F.instance_norm)
    torch.backends.mha.set_fastpath_enabled(False)
    F.batch_norm, F.instance_norm = _batch_norm, _instance_norm
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
        F.batch_norm, F.instance_norm = norms


def _batch_norm(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, training: bool, momentum: float, eps: float
) -> Tensor:
    assert not training
    shape = (1, -1, *[1] * (x.ndim - 2))
    normalised = (x - mean.view(shape)) / (var.view(shape) + eps).sqrt()
    return normalised if weight is None else normalised * weight.view(shape) + bias.view(shape)


def _instance_norm(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, own: bool, momentum: float, eps: float
) -> Tensor:
    if not own:
        return _batch_norm(x, mean, var, weight, bias, False, momentum, eps)
    var, mean = torch.var_mean(x.flatten(2), 2, correction=0)
    normed = [_batch_norm(x[n : n + 1], mean[n], var[n], weight, bias, False, 0, eps) for n in range(len(x))]
    return torch.cat(normed)


def batch_size(x: Any) -> int:
    """Count the samples in a tensor, tuple or dict."""
    if isinstance(x, Tensor):
        return len(x)
    return len(next(iter(x.values()) if isinstance(x, dict) else iter(x)))


def take(x: Any, rows: slice | Tensor) -> Any:
    """Take the chosen samples of a tensor, tuple or dict."""
    if isinstance(x, Tensor):
        return x[rows]
    if isinstance(x, dict):
        return {key: value[rows] for key, value in x.items()}
    return tuple(value[rows] for value in x)


def call(model: nn.Module, x: Any) -> Tensor:
    """Call a model on a tensor, tuple or dict: logits (B, C), with (B,) made (B, 1)."""
    if isinstance(x, dict):
        result = model(**x)
    elif isinstance(x, tuple):
        result = model(*x)
    else:
        result = model(x)
    result = result.logits if hasattr(result, "logits") else result
    return result[:, None] if result.ndim == 1 else result


class _Bound(nn.Module):
    """A model together with the way of calling it, so that `functional_call` can swap the parameters."""

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, forward

    def forward(self, x: Any) -> Tensor:
        return self.call(self.model, x)


def outputs(model: nn.Module, x: Any) -> Tensor:
    """Compute the outputs of the uncompiled model with reference kernels, (B, C), without gradient."""
    with torch.no_grad(), reference_kernels():
        return call(uncompiled(model), x)


def jacobian(
    model: nn.Module,
    x: Any,
    names: Sequence[str] | None = None,
    forward: Callable[[nn.Module, Any], Tensor] | None = None,
) -> Tensor:
    """Jacobian of the outputs with respect to the named parameters, by jacrev on batches of one.

    Args:
        model: Network in eval mode, compiled or not, frozen or not.
        x: Batch: tensor, tuple or dict with the batch first.
        names: Parameters and their order, tied ones once; all of them by default.
        forward: `forward(model, x) -> (B, C)`; `call` by default.

    Returns:
        (B, C, P).
    """
    names = _resolve(model, names)
    bound = _Bound(uncompiled(model), forward or call)
    parameters = dict(bound.model.named_parameters(remove_duplicate=False))
    values = {f"model.{name}": parameters[name].detach() for name in names}
    rows = []
    with reference_kernels():
        for n in range(batch_size(x)):
            sample = take(x, slice(n, n + 1))

            def output(values: dict[str, Tensor], sample: Any = sample) -> Tensor:
                return torch.func.functional_call(bound, values, (sample,))[0]  # (C,)

            blocks = torch.func.jacrev(output, chunk_size=1)(values)  # one output at a time, no vmap
            rows.append(torch.cat([blocks[key].flatten(1) for key in values], 1))  # (C, P)
    return torch.stack(rows).detach()


def softmax_fisher(f: Tensor) -> Tensor:
    """Fisher information of the categorical likelihood at logits f (B, C): diag(p) - p pᵀ, (B, C, C)."""
    blocks = []
    for logits in f:
        p = torch.softmax(logits, 0)
        blocks.append(torch.diag(p) - torch.outer(p, p))
    return torch.stack(blocks)


def gaussian_fisher(f: Tensor, noise_variance: float = 1.0) -> Tensor:
    """Fisher information of Gaussian noise at outputs f (B, C): I / σ², (B, C, C)."""
    return torch.stack([torch.eye(f.shape[1], dtype=f.dtype) / noise_variance for _ in f])


def ggn(J: Tensor, Lam: Tensor) -> Tensor:
    """GGN G = Σ_n J_nᵀ Λ_n J_n, a sum over data, from J (N, C, P) and Λ (N, C, C): (P, P)."""
    G = torch.zeros(J.shape[2], J.shape[2], dtype=J.dtype)
    for J_n, Lam_n in zip(J, Lam, strict=True):
        G += J_n.T @ Lam_n @ J_n
    return (G + G.T) / 2


def precision_vector(precision: float | Tensor, size: int) -> Tensor:
    """Write a scalar or (P,) precision as a float64 vector (P,)."""
    return torch.as_tensor(precision, dtype=torch.float64).expand(size).clone()


def laplace_covariance(G: Tensor, precision: float | Tensor) -> Tensor:
    """Covariance Σ = (G + Δ)⁻¹, Δ diagonal given by a scalar or vector (P,): (P, P)."""
    Sigma = torch.linalg.inv(G + torch.diag(precision_vector(precision, len(G))))
    return (Sigma + Sigma.T) / 2


def output_covariance(J: Tensor, Sigma: Tensor) -> Tensor:
    """Covariance of each sample's outputs, J_n Σ J_nᵀ: (B, C, C)."""
    return torch.stack([J_n @ Sigma @ J_n.T for J_n in J])


def joint_output_covariance(J: Tensor, Sigma: Tensor) -> Tensor:
    """Covariance between outputs of all samples, J_n Σ J_mᵀ: entry [n, c, m, d] of (B, C, B, C)."""
    out = J.new_empty(*J.shape[:2], *J.shape[:2])
    for n, J_n in enumerate(J):
        for m, J_m in enumerate(J):
            out[n, :, m, :] = J_n @ Sigma @ J_m.T
    return out


def gaussian_log_likelihood(f: Tensor, y: Tensor, noise_variance: float) -> Tensor:
    """Σ_n log N(y_n; f_n, σ² I), all constants included; f (N, C), y of as many elements: scalar."""
    squared = (y.reshape(f.shape) - f).square().sum()
    return -0.5 * squared / noise_variance - 0.5 * f.numel() * math.log(2 * math.pi * noise_variance)


def categorical_log_likelihood(f: Tensor, y: Tensor) -> Tensor:
    """Σ_n log softmax(f_n)[y_n]; f (N, C), y (N,) classes: scalar."""
    return torch.stack([torch.log_softmax(f_n, 0)[y_n] for f_n, y_n in zip(f, y, strict=True)]).sum()


def evidence(
    log_likelihood: Tensor | float,
    theta: Tensor,
    G: Tensor,
    precision: float | Tensor,
    prior_mean: float | Tensor = 0.0,
) -> Tensor:
    """Laplace evidence: log p(y|θ) - 1/2 (θ-μ0)ᵀΔ(θ-μ0) - 1/2 logdet(I + Δ^-1/2 G Δ^-1/2), scalar.

    Args:
        log_likelihood: log p(y|θ), constants included.
        theta: Parameters, (P,).
        G: GGN, (P, P).
        precision: Prior precision Δ, scalar or (P,).
        prior_mean: μ0, scalar or (P,).
    """
    delta = precision_vector(precision, len(theta))
    offset = theta - prior_mean
    whitened = torch.diag(delta.rsqrt()) @ G @ torch.diag(delta.rsqrt())
    logdet = torch.linalg.slogdet(torch.eye(len(theta), dtype=G.dtype) + whitened).logabsdet
    return log_likelihood - 0.5 * (offset * delta * offset).sum() - 0.5 * logdet
