"""What every covariance structure and every method is held to: fitted problems, and their dense float64 oracles.

A `Setup` is one network of the zoo with uneven training batches (5 + 3 + 1) and test inputs. Its dense quantities come
from `tests.oracle` alone, with columns in the order of the library's blocks (bias as the last input column).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.methods import DataSummary, FisherRoot, Problem, Seen
from lapwing.methods.prior import Prior
from lapwing.tangent import Block, Tangent
from tests import oracle
from tests.pretended_device import Device
from tests.zoo import ZOO, Case

EVERY = lw.matching("*")
CUTS = (5, 3, 1)
NOISE = 0.3


PRETENDED = Device("cuda") if os.environ.get("LAPWING_DEVICE") == "pretended" else None
"""The device of all problems, where LAPWING_DEVICE says so; `tests/conftest.py` enters it."""


def on_device(model: nn.Module) -> nn.Module:
    """Returns a network on the device that LAPWING_DEVICE names; itself on the CPU."""
    name = os.environ.get("LAPWING_DEVICE", "cpu")
    if PRETENDED is not None:
        return PRETENDED.module(model)
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("LAPWING_DEVICE is cuda, and there is no GPU")
    return model if name == "cpu" else copy.deepcopy(model).to(name)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-9) -> None:
    """Asserts agreement to a tolerance relative to the largest wanted entry.

    On a GPU it is 1e-6: torch's kernel for weight norm rounds to float32 there.
    """
    tolerance = max(tolerance, 1e-6) if os.environ.get("LAPWING_DEVICE") == "cuda" else tolerance
    found, wanted = found.cpu(), wanted.cpu()
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    scale = float(wanted.abs().max()) if wanted.numel() else 1.0
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=tolerance, atol=tolerance * max(scale, 1e-12))


def skip_where_torch_writes_statistics() -> None:
    """Skips where torch itself writes an instance norm's statistics in eval mode, as 2.6 does; fits refuse that."""
    norm = nn.InstanceNorm1d(1, track_running_stats=True).eval()
    before = norm.running_mean._version
    norm(torch.arange(12.0).reshape(3, 1, 4))
    if norm.running_mean._version != before:
        pytest.skip("torch writes an instance norm's running statistics in eval mode")


def psd(matrix: Tensor, slack: float = 1e-10) -> bool:
    """Whether a matrix is symmetric positive semi-definite up to rounding relative to its largest entry."""
    scale = matrix.abs().max().clamp_min(1e-300)
    symmetric = (matrix - matrix.mT).abs().max() <= slack * scale
    return bool(symmetric and torch.linalg.eigvalsh((matrix + matrix.mT) / 2).min() >= -slack * scale)


def covering(names: Iterable[str], few: Iterable[str], methods: dict[str, Any], main: str) -> Any:
    """Parametrises a test over `name` and `method`: every network with the main method, a few with every method."""
    params = []
    for key in methods:
        for case in names if key == main else few:
            (name,), marks = ((case,), ()) if isinstance(case, str) else (case.values, case.marks)
            params.append(pytest.param(name, methods[key], id=f"{name}-{key}", marks=marks))
    return pytest.mark.parametrize(("name", "method"), params)


def sampled_from(draws: Tensor, covariance: Tensor, sigmas: float = 5.5) -> None:
    """Asserts that the second moments of draws (S, P) are those of N(0, Σ), each within its standard error.

    `Var[x_i x_j] = Σ_ii Σ_jj + Σ_ij²`, so the mean over S draws has the root of that over S as its standard error; 5.5
    of them leave out 4 entries in 10⁸.
    """
    found = draws.T @ draws / len(draws)
    variance = covariance.diagonal()
    error = ((torch.outer(variance, variance) + covariance.square()) / len(draws)).sqrt()
    assert ((found - covariance).abs() <= sigmas * error + 1e-10 * variance.max()).all()


def pack(x: Any, y: Tensor) -> Any:
    """Makes the batch a loader yields: (x, y), (x1, x2, y), or a dict with labels."""
    if isinstance(x, dict):
        return {**x, "labels": y}
    return (*x, y) if isinstance(x, tuple) else (x, y)


def cut(x: Any, y: Tensor, lengths: Sequence[int]) -> list[Any]:
    """Cuts data into batches of the given lengths."""
    return [pack(oracle.take(x, rows), y[rows]) for rows in torch.arange(len(y)).split(tuple(lengths))]


def block_slices(blocks: Sequence[Block]) -> dict[str, slice]:
    """Where each block lies among the P columns."""
    return oracle.slices_of({block.name: block.size for block in blocks})


def expanded(blocks: Sequence[Block], values: Tensor) -> Tensor:
    """Repeats one value a block over its weights, (P,) float64."""
    return values.cpu().double().repeat_interleave(torch.tensor([block.size for block in blocks]))


def block_columns(blocks: Sequence[Block], model: nn.Module) -> Tensor:
    """Returns the indices of the P weights, blocks in order, among the oracle's columns for the same names."""
    names = [name for block in blocks for name in block.parameters]
    named = dict(oracle.uncompiled(model).named_parameters(remove_duplicate=False))
    where = oracle.parameter_slices(model, names)
    index = {name: torch.arange(s.start, s.stop).reshape(named[name].shape) for name, s in where.items()}
    return torch.cat([block.join(index) for block in blocks], -1)


def jacobian(model: nn.Module, x: Any, blocks: Sequence[Block]) -> Tensor:
    """Returns the oracle's Jacobian (B, C, P) in the order of the blocks."""
    names = [name for block in blocks for name in block.parameters]
    return oracle.jacobian(model, x, names)[..., block_columns(blocks, model)]


@dataclass
class Setup:
    """A network of the zoo, its data, and the dense oracles.

    Attributes:
        case: the network.
        params: which parameters are treated.
        samples: N.
    """

    case: Case
    params: Any = EVERY
    samples: int = 9
    model: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.case.build()
        self.there = on_device(self.model)
        self.x = self.case.inputs(self.samples, 1)
        self.y = self.case.targets(self.samples, 1)
        self.test = self.case.inputs(3, 2)

    @property
    def loader(self) -> list[Any]:
        """Uneven batches."""
        return cut(self.x, self.y, CUTS if self.samples == sum(CUTS) else (self.samples,))

    @property
    def likelihood(self) -> lw.Likelihood:
        """Categorical, or Gaussian with a fixed noise."""
        return lw.Categorical() if self.case.classification else lw.Gaussian(NOISE)

    def fit(self, method: lw.Method, **options: Any) -> lw.Posterior:
        """Fits with prior precision 2 unless told otherwise."""
        given = {"params": self.params, "likelihood": self.likelihood, "prior_precision": 2.0, "tune": lw.Evidence()}
        given |= options
        return lw.fit(self.there, given.pop("loader", self.loader), method, **given)

    @cached_property
    def tangent(self) -> Tangent:
        """The surveyed network; its blocks fix the order of the columns."""
        return Tangent.survey(self.there, oracle.take(self.x, slice(0, 5)), self.params)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return self.tangent.blocks

    @cached_property
    def J(self) -> Tensor:
        """(N, C, P) at the training inputs."""
        return jacobian(self.model, self.x, self.blocks)

    @cached_property
    def J_test(self) -> Tensor:
        """(3, C, P) at the test inputs."""
        return jacobian(self.model, self.test, self.blocks)

    @cached_property
    def f(self) -> Tensor:
        """(N, C) at the training inputs."""
        return oracle.outputs(self.model, self.x)

    @cached_property
    def fisher(self) -> Tensor:
        """Λ (N, C, C), noise included."""
        return oracle.softmax_fisher(self.f) if self.case.classification else oracle.gaussian_fisher(self.f, NOISE)

    @cached_property
    def G(self) -> Tensor:
        """The GGN (P, P), noise included."""
        return oracle.ggn(self.J, self.fisher)

    @cached_property
    def theta(self) -> Tensor:
        """The trained weights (P,)."""
        names = [name for block in self.blocks for name in block.parameters]
        return oracle.flat_parameters(self.model, names)[block_columns(self.blocks, self.model)]

    @cached_property
    def log_likelihood(self) -> Tensor:
        """Log p(y|θ̂), constants included."""
        if self.case.classification:
            return oracle.categorical_log_likelihood(self.f, self.y)
        return oracle.gaussian_log_likelihood(self.f, self.y, NOISE)

    @cached_property
    def slices(self) -> dict[str, slice]:
        return block_slices(self.blocks)

    def expand(self, values: Tensor) -> Tensor:
        return expanded(self.blocks, values)

    def block_diagonal(self, matrix: Tensor) -> Tensor:
        """Keeps the blocks of a (P, P) matrix."""
        return torch.block_diag(*[matrix[where, where] for where in self.slices.values()])


@cache
def setup(name: str, last_layer: bool = False, samples: int = 9) -> Setup:
    """Returns the shared setup of a zoo case; its dense oracles are computed once a session."""
    return Setup(ZOO[name], lw.last_layer if last_layer else EVERY, samples)


def problem_of(
    tangent: Tangent, likelihood: lw.Likelihood, y: Tensor, prior_mean: float = 0.0, **options: Any
) -> Problem:
    """Returns the inputs of a method after data with these targets, with prior precision 2."""
    root, n = FisherRoot.of(tangent, likelihood, 0), len(y)
    prior = Prior.read(tangent, 2.0, prior_mean)
    return Problem(tangent, likelihood, root, prior, True, 0, read=Seen(n, DataSummary(n)), **options)


def subspace(rows: Tensor, rank: int | None = None) -> Tensor:
    """Returns an orthonormal basis (K, P) of the top right singular vectors of rows, rank cut at a relative 1e-11."""
    _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
    return vectors[: min(int((values > 1e-11 * values[0]).sum()), rank or len(values))]


def picked_rows(problem: Setup, count: int, seed: int = 0) -> Tensor:
    """Returns the rows of J that ELLA samples with a seed: pairs (input, output) without repetition."""
    rows = problem.J.flatten(0, 1)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]]


def subspace_covariance(V: Tensor, G: Tensor, delta: Tensor, residual: bool) -> Tensor:
    """Returns `Δ^(-1/2)[V C Vᵀ + r(I - VVᵀ)]Δ^(-1/2)`, `C = (VᵀΔ^(-1/2) G Δ^(-1/2)V + I)⁻¹`, V (K, P) whitened rows."""
    root = torch.diag(delta.rsqrt())
    inner = torch.linalg.inv(V @ root @ G @ root @ V.T + torch.eye(len(V)).double())
    middle = V.T @ inner @ V + (torch.eye(len(G)).double() - V.T @ V if residual else 0)
    return root @ middle @ root
