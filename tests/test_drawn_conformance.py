"""Cases drawn at random: method, network, likelihood, shapes, weights and dtype, against a dense posterior in float64.

The oracle has Jacobians by autograd and Λ as the Hessian of log p(y|f). A saved posterior is equal after loading.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests import oracle
from tests import zoo_modules as zm
from tests.conformance import block_columns, close, psd

pytestmark = pytest.mark.slow

F64 = torch.float64
TOLERANCES = {F64: 1e-7, torch.float32: 64 * 2**-24, torch.bfloat16: 16 * 2**-8}
"""Relative to the largest entry, by the unit roundoff u; the reference uses the same rounded weights and inputs.

About ten roundings in a row (layers, norms, activations, their backward passes) perturb J, and J Σ Jᵀ twice as much,
but some of them cancel: 16 u. Sums over data and decompositions of bfloat16 networks are in float32. For float32
networks they round at the same u, and more if the curvature is far above δ: 64 u.
"""


# --- networks --------------------------------------------------------------------------------------------------------
def recurrent(kind: type[nn.RNNBase], outputs: int, every_step: bool) -> nn.Module:
    """A recurrent layer over tokens (B, T): outputs (B, T, C), or (B, C) of the final step."""

    def forward(net: nn.Module, tokens: Tensor) -> Tensor:
        states = net.layer(net.embedding(tokens))[0]
        return net.head(states if every_step else states[:, -1])

    return zm.Net(forward, embedding=nn.Embedding(6, 3), layer=kind(3, 3, batch_first=True), head=nn.Linear(3, outputs))


def tied_tagger(outputs: int) -> nn.Module:
    """Embedding and head share one weight."""
    together = lambda net, tokens: net.head(torch.tanh(net.mix(net.embedding(tokens))))  # noqa: E731
    layers = {"embedding": nn.Embedding(outputs, 3), "mix": nn.Linear(3, 3), "head": nn.Linear(3, outputs)}
    layers["head"].weight = layers["embedding"].weight
    return zm.Net(together, **layers)


def tagger(*layers: nn.Module, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 4), *layers, nn.Linear(4, outputs))


def segmenter(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), *layers)


Build = Callable[[int], nn.Module]
PLAIN: dict[str, tuple[Build, tuple[int, ...] | None]] = {
    "mlp": (lambda c: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, c)), (3,)),
    "linear": (lambda c: nn.Linear(3, c), (3,)),
    "batch norm": (lambda c: zm.ResidualBlock(2, c), (2, 3, 3)),
    "attention": (lambda c: zm.SelfAttention(True, 4, 2, c), (3, 4)),
    "lstm": (lambda c: recurrent(nn.LSTM, c, False), None),
    "tied": (lambda c: zm.TiedTokens(c, 3), None),
}
TOKENS: dict[str, Build] = {
    "tagger": lambda c: tagger(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), outputs=c),
    "gru tagger": lambda c: recurrent(nn.GRU, c, True),
    "attention tagger": lambda c: tagger(nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True), outputs=c),
    "tied tagger": tied_tagger,
}
PIXELS: dict[str, Build] = {
    "maps": lambda c: segmenter(nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Conv2d(3, c, 3, padding=1)),
    "transposed maps": lambda c: segmenter(nn.Tanh(), nn.ConvTranspose2d(3, c, 2, stride=(2, 1))),
}
"""Networks by their outputs: (B, C) from inputs of a shape, or of tokens if None; (B, T, C) of tokens; (B, C, H, W)."""


def randomised(model: nn.Module) -> nn.Module:
    """Changes every parameter and statistic from its default."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.4 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
            elif name.endswith("running_mean"):
                buffer.normal_(0, 0.3)
    return model.double().eval()


# --- likelihoods -----------------------------------------------------------------------------------------------------
def some(count: int) -> Tensor:
    """Returns a mask (count, 1) that is True for the first row and most others."""
    return (torch.rand(count, 1) > 0.3) | (torch.arange(count) == 0)[:, None]


def likelihood_of(kind: str, random: Random, c: int) -> tuple[lw.Likelihood, Callable[[int], Tensor]]:
    """Returns a likelihood for C outputs, and what draws its targets for a number of rows."""
    weights = [0.3 + 3 * random.random() for _ in range(c)] if random.random() < 0.5 else None
    if kind == "gaussian":
        return lw.Gaussian(weights or 0.5, missing=True), lambda n: torch.randn(n, c).where(some(n), torch.nan)
    if kind == "heteroscedastic":
        return lw.HeteroscedasticGaussian(missing=True), lambda n: torch.randn(n, c // 2).where(some(n), torch.nan)
    if kind == "poisson":
        return lw.Poisson(), lambda n: torch.randint(4, (n, c)).double()
    if kind == "bernoulli":
        likelihood = lw.Bernoulli(pos_weight=weights, missing=True)
        return likelihood, lambda n: torch.randint(2, (n, c)).double().where(some(n), torch.nan)
    smoothing, ignored = random.choice([0.0, 0.2]), random.choice([-100, 255])
    likelihood = lw.Categorical(ignore_index=ignored, class_weights=weights, label_smoothing=smoothing)
    if random.random() < 0.3:
        return likelihood, lambda n: torch.randn(n, c).softmax(-1)
    return likelihood, lambda n: torch.randint(c, (n,)).where(some(n)[:, 0], ignored)


def hessian(likelihood: lw.Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Returns Λ (C, C) at one output (C,), which for heteroscedastic noise is a mean over y = m ± exp(s/2)."""
    targets = [y]
    if likelihood.name == "heteroscedastic":
        mean, log_variance = f.chunk(2)
        targets = [torch.where(y.isnan(), y, mean + sign * (0.5 * log_variance).exp()) for sign in (1, -1)]

    def loss(g: Tensor) -> Tensor:
        return -sum(likelihood.log_prob(g[None], target[None])[0] for target in targets) / len(targets) + 0 * g.sum()

    return torch.autograd.functional.hessian(loss, f)


# --- cases -----------------------------------------------------------------------------------------------------------
METHODS = {
    "full": lw.Full(), "primal": lw.Full(form="primal"), "dual": lw.Full(form="dual"), "diagonal": lw.Diagonal(),
    "ella": lw.ELLA(rank=10_000, rows="all", residual="prior"), "kfac": lw.KFAC(), "ekfac": lw.EKFAC("reduce"),
}  # fmt: skip
"""Kronecker factors have their oracle in tests/methods: here they are fitted, saved and loaded."""


@dataclass
class Case:
    """A drawn fit: the network in float64, the inputs to predict, and batches (inputs, targets, weights)."""

    model: nn.Module
    method: str
    likelihood: lw.Likelihood
    outputs: int
    dtype: torch.dtype
    options: dict
    test: Tensor
    batches: list[tuple[Tensor, ...]]

    @classmethod
    def drawn(cls, seed: int) -> Case:
        random = Random(seed)
        torch.manual_seed(seed)
        method, dtype = random.choice([*METHODS]), random.choice([F64, F64, F64, torch.float32, torch.bfloat16])
        shaped = "plain" if method == "dual" else random.choice(["plain", "tokens", "pixels"])
        kind = random.choice(["gaussian", "heteroscedastic", "poisson", "bernoulli", "categorical"])
        c = {"heteroscedastic": random.choice([2, 4]), "categorical": random.randint(2, 4)}.get(
            kind, random.randint(1, 4)
        )
        name = random.choice([*{"plain": PLAIN, "tokens": TOKENS, "pixels": PIXELS}[shaped]])
        build, shape = PLAIN[name] if shaped == "plain" else ((TOKENS | PIXELS)[name], None)
        model = randomised(build(c)).to(dtype)
        likelihood, targets = likelihood_of(kind, random, c)

        def inputs(size: int) -> Tensor:
            count = random.randint(1, 5)
            if shaped == "pixels":
                return torch.randn(count, 2, size, size).to(dtype)
            if shape is None:
                return torch.randint(c if "tied" in name else 6, (count, size))
            return torch.randn(count, *shape).to(dtype)

        weighted = random.random() < 0.4
        options = {"sample_weights": weighted, "prior_precision": 0.5 + 2 * random.random()}
        if random.random() < 0.25 and "tied" not in name:
            options["params"] = lw.last_layer
        case = cls(model, method, likelihood, c, dtype, options, inputs(random.randint(1, 3)), [])
        for number in range(random.randint(1, 3)):
            x = inputs(random.randint(2 if number == 0 else 1, 3))  # targets (B, 1, C) could be those of C positions
            f = case.rows(model, x)
            y = targets(len(f.flatten()) // c)
            y = y if y.dtype == torch.long else y.to(torch.float32 if dtype == torch.bfloat16 else dtype)
            with torch.no_grad():
                sizes = model(x).shape
            places = (sizes[0], *sizes[2:]) if shaped == "pixels" else sizes[:-1]
            y = y.unflatten(0, places)
            y = y.movedim(-1, 1) if shaped == "pixels" and y.ndim == 4 else y
            case.batches.append((x, y, *((torch.rand(len(x)) + 0.1,) if weighted else ())))
        return case

    def rows(self, model: nn.Module, x: Tensor) -> Tensor:
        """Returns the outputs (B, T C), position by position."""
        f = model(x)
        return (f.movedim(1, -1) if f.ndim == 4 else f).flatten(1)

    def jacobian(self, posterior: lw.Posterior, x: Tensor) -> Tensor:
        """Returns J (B T, C, P) in float64, columns in the order of the blocks."""
        reference = copy.deepcopy(self.model).double()
        columns = block_columns(posterior.tangent.blocks, reference)
        J = oracle.jacobian(reference, wide(x), list(posterior.tangent.parameters), self.rows)
        return J.reshape(-1, self.outputs, J.shape[-1])[..., columns]

    def curvature(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Returns Λ (B T, C, C) times the weights of the samples."""
        with torch.no_grad(), oracle.reference_kernels():
            f = self.rows(copy.deepcopy(self.model).double(), wide(x)).reshape(-1, self.outputs)
        y = wide(y.movedim(1, -1) if y.ndim == 4 else y)
        y = y.flatten(0, -2) if y.is_floating_point() else y.flatten()
        Lam = torch.stack([hessian(self.likelihood, *pair) for pair in zip(f, y, strict=True)])
        return Lam if weights is None else Lam * weights.repeat_interleave(len(Lam) // len(weights))[:, None, None]


def wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


@pytest.mark.parametrize("seed", range(200))
def test_latents_are_those_of_a_dense_posterior(seed: int, reloaded: Any) -> None:
    case = Case.drawn(seed)
    before = copy.deepcopy(case.model.state_dict())
    method, options = METHODS[case.method], {"likelihood": case.likelihood, "tune": None, **case.options}
    posterior = lw.fit(case.model, case.batches, method, **options)
    latent = posterior.latent(case.test)
    found = latent.covariance.double().flatten(0, -3)
    rounding = 1e-10 if case.dtype == F64 else TOLERANCES[case.dtype]
    assert psd(found, rounding)
    if "kfac" not in case.method:
        J = torch.cat([case.jacobian(posterior, x) for x, *_ in case.batches])
        G = oracle.ggn(J, torch.cat([case.curvature(*batch) for batch in case.batches]))
        G = torch.diag(G.diagonal()) if case.method == "diagonal" else G
        sigma = oracle.laplace_covariance(G, case.options["prior_precision"])
        wanted = oracle.output_covariance(case.jacobian(posterior, case.test), sigma)
        close(found, wanted, TOLERANCES[case.dtype])
    again = reloaded(posterior, case.model)
    close(again.latent(case.test).covariance.double(), latent.covariance.double(), rounding)
    assert again.likelihood == posterior.likelihood
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
