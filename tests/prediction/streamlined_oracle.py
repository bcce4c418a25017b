"""Dense covariances, explicit loops over weights, and weight draws, against which streamlined prediction is tested."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.func import jacrev

from lapwing import tangent as tn
from lapwing.covariance import (
    Blockwise,
    DenseBlock,
    DenseCovariance,
    DiagonalBlock,
    ExplicitBasis,
    KroneckerBlock,
    LowRank,
    LowRankWithResidual,
)
from lapwing.data.inputs import Inputs
from lapwing.prediction.streamlined import Streamlined
from lapwing.prediction.uncertain import prepared
from tests.zoo import ZOO

F64 = torch.float64
KINDS = ("kronecker", "diagonal", "dense block", "dense", "low rank", "low rank with residual")
DRAWS = 20_000


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


class Shifted(Function):
    """A function of inputs, flattened, with a parameter that can be treated where the function has none."""

    def __init__(self, function):
        super().__init__(function)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, *inputs):
        return self.function(*inputs).flatten(1) + self.shift


def propagate(function, inputs, variances, **options):
    """Means and variances (B, n) of a function without treated weights at uncertain inputs, and it as a module."""
    model = Shifted(function).double().eval()
    tangent = tn.Tangent.survey(model, inputs, tn.matching("shift"))
    covariance = build(tangent, "diagonal")
    noisy = replace(Inputs(inputs), spreads=variances)
    latent = Streamlined(**options).latent(tangent, covariance, prepared(noisy))
    return latent.mean, latent.variance - covariance.diagonal()["shift"], model


def jacobians(model, x: Tensor) -> Tensor:
    """J (B, n_out, n_in) sample by sample."""
    rows = [jacrev(lambda one: model(one[None])[0])(sample).reshape(-1, sample.numel()) for sample in x]
    return torch.stack(rows).detach()


def psd(*shape: int) -> Tensor:
    root = torch.randn(*shape, shape[-1], dtype=F64)
    return root @ root.mT


def structure(block, kind):
    groups, outputs, inputs = block.matrix_shape
    if kind == "diagonal":
        return DiagonalBlock(torch.rand(block.size, dtype=F64))
    if kind == "dense block" or block.matrix is None:
        return DenseBlock(*torch.linalg.eigh(psd(block.size)))
    bases = [torch.linalg.qr(torch.randn(groups, n, n, dtype=F64))[0] for n in (inputs, outputs)]
    ones = torch.ones(groups, inputs, dtype=F64), torch.ones(groups, outputs, dtype=F64), torch.tensor([1])
    return replace(KroneckerBlock.of_factors(*bases, *ones), eigenvalues=torch.rand(groups, outputs, inputs, dtype=F64))


def build(tangent, kind, scale=3.0):
    """A random covariance over the tangent's blocks, a prior of its own for each."""
    blocks = tangent.blocks
    precision = 1.0 + torch.rand(len(blocks), dtype=F64)
    if kind in ("kronecker", "diagonal", "dense block"):
        return Blockwise(blocks, {block.name: structure(block, kind) for block in blocks}, precision, scale)
    curvature = psd(tangent.size)
    if kind == "dense":
        return DenseCovariance(blocks, curvature, precision, scale)
    rows = torch.randn(4, tangent.size, dtype=F64)
    parts = rows.split([block.size for block in blocks], -1)
    basis = ExplicitBasis({block.name: part for block, part in zip(blocks, parts, strict=True)})
    cls = LowRank if kind == "low rank" else LowRankWithResidual
    traces = curvature.diagonal().sum().expand(len(blocks))  # not looked at
    return cls(blocks, basis, rows @ curvature @ rows.T, traces, precision, scale)


def weight_covariances(tangent, covariance) -> dict[str, Tensor]:
    """Dense Cov[W_ji, W_j'i'] of each block, (O, I, O, I), the bias the last input."""
    dense, out, start = covariance.to_dense(), {}, 0
    for block in tangent.blocks:
        part, start = slice(start, start + block.size), start + block.size
        out[block.name] = dense[part, part].reshape(*block.matrix_shape[1:], *block.matrix_shape[1:])
    return out


def survey(model, x, params=None):
    return tn.Tangent.survey(model.eval(), x, params or tn.matching("*"))


@cache
def surveyed(name: str) -> tn.Tangent:
    """A network of the zoo with all its parameters treated, to be read only: its graph is traced once for all tests."""
    return survey(ZOO[name].build(), ZOO[name].inputs(4, 0))


def linear_by_loops(mean: Tensor, cov: Tensor, weight: Tensor, S: Tensor | None) -> Tensor:
    """Cov[h] (O, O) of one sample by equations 3 and 4; mean and cov with the bias as a last, certain input of one."""
    outputs, inputs = weight.shape
    out = torch.zeros(outputs, outputs, dtype=F64)
    for j in range(outputs):
        for k in range(outputs):
            for i in range(inputs):
                for l in range(inputs):
                    out[j, k] += weight[j, i] * weight[k, l] * cov[i, l]
                    if S is not None:
                        out[j, k] += (mean[i] * mean[l] + cov[i, l]) * S[j, i, k, l]
    return out


def mlp_by_loops(model, S: dict[str, Tensor], x: Tensor, diagonal: bool, of_x: Tensor | None = None) -> Tensor:
    """Output covariances (B, C, C) of linear layers with tanh between them, one sample at a time; `of_x` is Cov[x]."""
    results, last = [], str(len(model) - 1)
    for sample, mean in enumerate(x):
        cov = torch.zeros(len(mean), len(mean), dtype=F64) if of_x is None else of_x[sample]
        for name, module in model.named_children():
            if isinstance(module, nn.Tanh):
                mean = mean.tanh()
                cov = (1 - mean**2)[:, None] * cov * (1 - mean**2)
                continue
            joined = torch.cat([module.weight, module.bias[:, None]], 1).detach()
            mean = torch.cat([mean, torch.ones(1, dtype=F64)])
            padded = torch.zeros(len(mean), len(mean), dtype=F64)
            padded[:-1, :-1] = cov
            cov = linear_by_loops(mean, padded, joined, S.get(name))
            mean = joined @ mean
            if diagonal and name != last:
                cov = cov.diagonal().diag()
        results.append(cov)
    return torch.stack(results)


def draw_outputs(model, tangent, covariance, x) -> Tensor:
    """Outputs (S, B, C) under weight draws."""
    vectors = covariance.sample(DRAWS, torch.Generator().manual_seed(1))
    moved = {n: value + d for (n, d), value in zip(
        tn.split(tangent.blocks, vectors).items(), tangent.parameters.values(), strict=True
    )}  # fmt: skip
    call = lambda parameters: torch.func.functional_call(model, parameters, (x,))  # noqa: E731
    return torch.vmap(call)({n: m.detach() for n, m in moved.items()})


def assert_within_monte_carlo_error(draws: Tensor, mean: Tensor, covariance: Tensor, errors: float = 5.0) -> None:
    """Compares two moments with the draws', within `errors` standard errors estimated from the same draws."""
    centred = draws - mean
    products = centred[..., :, None] * centred[..., None, :]  # (S, B, C, C)
    for found, wanted in ((draws, mean), (products, covariance)):
        error = found.std(0) / len(found) ** 0.5
        assert ((found.mean(0) - wanted).abs() <= errors * error).all()
