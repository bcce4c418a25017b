"""Cases drawn at random: method, network, likelihood, shape of outputs, weights and dtype, against dense oracles.

Hypothesis draws cases with uneven batches, the same in every run. If a case fails, it searches for a smaller one. The
oracle of the latent covariance at new inputs is a dense posterior in float64, with Jacobians by autograd, one sample
at a time, and with Λ as the Hessian of torch's own losses. A saved posterior is equal after loading.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from tests import oracle
from tests import zoo_modules as zm
from tests.conformance import block_columns, block_slices, close, psd
from tests.conformance_factors import ekfac_curvature, kfac_curvature, kronecker_factors

pytestmark = pytest.mark.slow

F64 = torch.float64
CASES, CHUNKS = 200, 8
TOLERANCES = {F64: 1e-7, torch.float32: 64 * 2**-24, torch.bfloat16: 16 * 2**-8}
"""Relative to the largest entry, by the unit roundoff u; the reference uses the same rounded weights and inputs.

About ten roundings in a row (layers, norms, activations, their backward passes) perturb J, and J Σ Jᵀ twice as much,
but some of them cancel: 16 u. Sums over data and decompositions of bfloat16 networks are in float32. For float32
networks they round at the same u, and more if the curvature is far above δ: 64 u.
"""


class Draw:
    """Choices of one case, which shrink, and numbers of one seed."""

    def __init__(self, data: st.DataObject) -> None:
        self.data, seed = data, data.draw(st.integers(0, 2**32 - 1))
        torch.manual_seed(seed)  # for the initial weights of layers
        self.generator = torch.Generator().manual_seed(seed)

    def whole(self, low: int, high: int) -> int:
        """Returns a number from low to high, both included."""
        return self.data.draw(st.integers(low, high))

    def one(self, options: Any) -> Any:
        return self.data.draw(st.sampled_from(list(options)))

    def yes(self, share: float = 0.5) -> bool:
        return self.data.draw(st.integers(1, 100)) > 100 * (1 - share)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=F64)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=F64)

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator)


# --- networks --------------------------------------------------------------------------------------------------------
class Recurrent(nn.Module):
    """A recurrent layer over tokens (B, T): outputs (B, T, C), or (B, C) of the final step."""

    def __init__(self, kind: type[nn.RNNBase], outputs: int, every_step: bool) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(6, 3), kind(3, 3, batch_first=True), nn.Linear(3, outputs)
        self.every_step = every_step

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.layer(self.embedding(tokens))[0]
        return self.head(states if self.every_step else states[:, -1])


class TiedTagger(nn.Module):
    """A next-token model: embedding and head share one weight."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(outputs, 3), nn.Linear(3, 3), nn.Linear(3, outputs)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))


def pooled(*layers: nn.Module, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Tanh(), zm.SpatialMean(), nn.Linear(width, outputs))


@dataclass(frozen=True)
class Network:
    """How to make a network of C outputs, and its inputs.

    Attributes:
        build: makes it.
        shape: of one real input; None for tokens.
        outputs: "plain" (B, C), "tokens" (B, T, C) or "pixels" (B, C, H, W).
        vocabulary: number of tokens; None for C.
        oracle: whether the loops of `conformance_factors` cover its layers.
    """

    build: Callable[[int], nn.Module]
    shape: tuple[int, ...] | None = None
    outputs: str = "plain"
    vocabulary: int | None = 6
    oracle: bool = False

    def inputs(self, draw: Draw, count: int, size: int, outputs: int) -> Tensor:
        """Draws inputs of T = `size` positions, or images of `size` by `size`, where the network takes any."""
        if self.shape is None:
            return draw.integers(self.vocabulary or outputs, count, size)
        shape = (self.shape[0], size, size) if self.outputs == "pixels" else self.shape
        return draw.normal(count, *shape)


def tagger(*layers: nn.Module, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(6, 4), *layers, nn.Linear(4, outputs))


def segmenter(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), *layers)


NETWORKS = {
    "linear": Network(lambda c: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, c)), (3,), oracle=True),
    "only_linear": Network(lambda c: nn.Linear(3, c), (3,), oracle=True),
    "conv": Network(
        lambda c: pooled(nn.Conv2d(2, 4, 3, groups=2, padding=1), width=4, outputs=c), (2, 3, 4), oracle=True
    ),
    "conv1d": Network(
        lambda c: nn.Sequential(nn.Conv1d(2, 3, 2, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(9, c)),
        (2, 6), oracle=True,
    ),
    "transposed": Network(
        lambda c: pooled(nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1), width=4, outputs=c), (2, 2, 3), oracle=True
    ),
    "embedding": Network(lambda c: zm.TokenSum(6, 3, c), oracle=True),
    "norm": Network(
        lambda c: nn.Sequential(
            nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, c)
        ),
        (2, 3, 3),
    ),
    "batch_norm": Network(lambda c: zm.ResidualBlock(2, c), (2, 3, 3)),
    "lstm": Network(lambda c: Recurrent(nn.LSTM, c, False), oracle=True),
    "gru": Network(lambda c: Recurrent(nn.GRU, c, False)),
    "attention": Network(lambda c: zm.SelfAttention(True, 4, 2, c), (3, 4)),
    "pre_norm": Network(lambda c: zm.PreNormAttention(4, 2, c), (3, 4)),
    "tied": Network(lambda c: zm.TiedTokens(c, 3), vocabulary=None),
    "twice": Network(lambda c: zm.SharedModule(3, c), (3,), oracle=True),
    "tagger": Network(lambda c: tagger(nn.Linear(4, 4), nn.Tanh(), outputs=c), None, "tokens"),
    "norm_tagger": Network(lambda c: tagger(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), outputs=c), None, "tokens"),
    "lstm_tagger": Network(lambda c: Recurrent(nn.LSTM, c, True), None, "tokens"),
    "gru_tagger": Network(lambda c: Recurrent(nn.GRU, c, True), None, "tokens"),
    "attention_tagger": Network(
        lambda c: tagger(nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True), outputs=c), None, "tokens"
    ),
    "tied_tagger": Network(TiedTagger, None, "tokens", vocabulary=None),
    "conv_pixels": Network(lambda c: segmenter(nn.Tanh(), nn.Conv2d(3, c, 3, padding=1)), (2,), "pixels"),
    "norm_pixels": Network(
        lambda c: segmenter(nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Conv2d(3, c, 1)), (2,), "pixels"
    ),
    "transposed_pixels": Network(
        lambda c: segmenter(nn.Tanh(), nn.ConvTranspose2d(3, c, 2, stride=(2, 1))), (2,), "pixels"
    ),
}  # fmt: skip


def randomised(model: nn.Module, draw: Draw) -> nn.Module:
    """Changes every parameter and statistic from its default."""
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.4 * draw.normal(*parameter.shape)
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.copy_(0.5 + draw.uniform(*buffer.shape))
            elif name.endswith("running_mean"):
                buffer.copy_(0.3 * draw.normal(*buffer.shape))
    return model


# --- likelihoods -----------------------------------------------------------------------------------------------------
Loss = Callable[[Tensor, Tensor], Tensor]
"""-log p(y | f) up to a constant, for outputs (C,) and targets of one position."""


@dataclass(frozen=True)
class Observed:
    """A likelihood, how to draw its targets for rows (R, C), and its loss by torch's functions."""

    likelihood: lw.Likelihood
    targets: Callable[[int], Tensor]
    loss: Loss


def gaussian(draw: Draw, c: int) -> Observed:
    missing, several = draw.yes(), draw.yes()
    noise = 0.2 + draw.uniform(c) if several else (0.2 + draw.uniform(1)).expand(c)
    likelihood = lw.Gaussian(noise.tolist() if several else float(noise[0]), missing=missing)

    def targets(rows: int) -> Tensor:
        y = draw.normal(rows, c)
        gone = (draw.uniform(rows, c) < 0.3) & (torch.arange(rows) > 0)[:, None]
        return y.masked_fill(gone, torch.nan) if missing else y

    def loss(f: Tensor, y: Tensor) -> Tensor:
        known = ~y.isnan()
        return ((f - y).square() / (2 * noise))[known].sum()

    return Observed(likelihood, targets, loss)


def heteroscedastic(draw: Draw, c: int) -> Observed:
    """The Fisher information is the mean Hessian over y = m ± exp(s/2), whose first two moments are those of y."""

    def loss(f: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = f.chunk(2)
        ends = [mean.detach() + sign * (0.5 * log_variance.detach()).exp() for sign in (1, -1)]
        return sum(F.gaussian_nll_loss(mean, end, log_variance.exp(), reduction="sum") for end in ends) / 2

    return Observed(lw.HeteroscedasticGaussian(), lambda rows: draw.normal(rows, c // 2), loss)


def poisson(draw: Draw, c: int) -> Observed:
    return Observed(
        lw.Poisson(),
        lambda rows: draw.integers(4, rows, c).double(),
        lambda f, y: F.poisson_nll_loss(f, y, reduction="sum"),
    )


def bernoulli(draw: Draw, c: int) -> Observed:
    soft, missing = draw.yes(0.3), draw.yes(0.3)
    weight = 0.3 + 3 * draw.uniform(c) if draw.yes() else None
    options = {"pos_weight": weight if weight is None else weight.tolist(), "soft_targets": soft, "missing": missing}

    def targets(rows: int) -> Tensor:
        y = draw.uniform(rows, c) if soft else draw.integers(2, rows, c).double()
        gone = (draw.uniform(rows, c) < 0.3) & (torch.arange(rows) > 0)[:, None]
        return y.masked_fill(gone, torch.nan) if missing else y

    def loss(f: Tensor, y: Tensor) -> Tensor:
        known = ~y.isnan()
        each = F.binary_cross_entropy_with_logits(f, y.nan_to_num(0.0), pos_weight=weight, reduction="none")
        return each[known].sum()

    return Observed(lw.Bernoulli(**options), targets, loss)


def categorical(draw: Draw, c: int) -> Observed:
    soft, ignored = draw.yes(0.3), draw.one([-100, 255])
    weight = 0.3 + 3 * draw.uniform(c) if draw.yes() else None
    smoothing = draw.one([0.0, 0.2])
    options = {"class_weights": weight if weight is None else weight.tolist(), "label_smoothing": smoothing}

    def targets(rows: int) -> Tensor:
        if soft:
            return draw.normal(rows, c).softmax(-1)
        y = draw.integers(c, rows)
        return y.masked_fill((draw.uniform(rows) < 0.3) & (torch.arange(rows) > 0), ignored)

    def loss(f: Tensor, y: Tensor) -> Tensor:
        options = {} if soft else {"ignore_index": ignored}  # torch accepts it for labels only
        return F.cross_entropy(f[None], y[None], weight, reduction="sum", label_smoothing=smoothing, **options)

    return Observed(lw.Categorical(ignore_index=ignored, **options), targets, loss)


LIKELIHOODS = {
    "gaussian": gaussian,
    "heteroscedastic": heteroscedastic,
    "poisson": poisson,
    "bernoulli": bernoulli,
    "categorical": categorical,
}
METHODS = ("full", "primal", "dual", "diagonal", "kfac", "ekfac", "ella", "subset")


# --- cases -----------------------------------------------------------------------------------------------------------
class Case:
    """A drawn case, and its dense quantities in float64."""

    def __init__(self, draw: Draw) -> None:
        self.method_name, self.network_name = draw.one(METHODS), draw.one(NETWORKS)
        self.likelihood_name = draw.one(LIKELIHOODS)
        self.dtype = draw.one([F64, F64, F64, torch.float32, torch.bfloat16])
        self.network = NETWORKS[self.network_name]
        if self.method_name in ("kfac", "ekfac") and draw.yes():
            self.network_name = draw.one(name for name, network in NETWORKS.items() if network.oracle)
            self.network = NETWORKS[self.network_name]
        if self.method_name == "dual" and self.network.outputs != "plain":
            self.method_name = "full"  # the dual form does not support positions
        least = {"categorical": 2, "heteroscedastic": 2}.get(self.likelihood_name, 1)
        self.outputs = c = draw.one([2, 4]) if self.likelihood_name == "heteroscedastic" else draw.whole(least, 4)
        self.model = randomised(self.network.build(c), draw).to(self.dtype)
        self.reference = copy.deepcopy(self.model).double()
        self.observed = LIKELIHOODS[self.likelihood_name](draw, c)
        tied = "tied" in self.network_name
        self.last_layer = draw.yes(0.25) and not tied
        self.weighted, self.delta = (
            draw.yes(0.4 if self.method_name not in ("kfac", "ekfac") else 0.2),
            0.5 + 2 * float(draw.uniform()),
        )
        self.reduce, self.residual = draw.yes(), draw.one([None, "prior"])
        self.batches: list[tuple[Tensor, ...]] = []
        for number in range(draw.whole(1, 3)):
            # Targets (B, 1, C) of tokens are read as those of one output at C positions.
            least_size = 2 if self.network.outputs == "tokens" and number == 0 else 1
            size = 3 if self.network.outputs == "plain" else draw.whole(least_size, 3)
            x = self.network.inputs(draw, draw.whole(1, 5), size, c)
            weights = (draw.uniform(len(x)) * draw.integers(3, len(x)),) if self.weighted else ()
            if self.weighted and number == 0:
                weights[0][0] = 1.0  # one sample with a weight, since weights that are all 0 are refused
            y = self.in_place(self.observed.targets(self.places(x)), x)
            self.batches.append((self.real(x), y if y.dtype == torch.long else y.to(self.target_dtype), *weights))
        size = 3 if self.network.outputs == "plain" else draw.whole(1, 3)
        self.test = self.real(self.network.inputs(draw, draw.whole(1, 5), size, c))

    def __repr__(self) -> str:
        shapes = [tuple(x.shape) for x, *_ in self.batches]
        return (
            f"{self.method_name}, {self.network_name}, {self.observed.likelihood!r}, {self.dtype}, "
            f"C = {self.outputs}, inputs {shapes}, last_layer={self.last_layer}, weighted={self.weighted}, "
            f"reduce={self.reduce}, residual={self.residual}, delta={self.delta:.2f}"
        )

    @property
    def target_dtype(self) -> torch.dtype:
        """Returns float32 or float64 for targets: in half precision, class probabilities do not sum to 1."""
        return torch.float32 if self.dtype == torch.bfloat16 else self.dtype

    def real(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if x.is_floating_point() else x

    def rows(self, model: nn.Module, x: Tensor) -> Tensor:
        """Returns the outputs (B, T C), position by position."""
        f = model(x)
        return (f.movedim(1, -1) if f.ndim == 4 else f).flatten(1)

    def wide(self, x: Tensor) -> Tensor:
        return x.double() if x.is_floating_point() else x

    def shape(self, x: Tensor) -> torch.Size:
        with torch.no_grad():
            return self.reference(self.wide(x)).shape

    def places(self, x: Tensor) -> int:
        return self.shape(x).numel() // self.outputs

    def in_place(self, y: Tensor, x: Tensor) -> Tensor:
        """Returns targets of rows in the shape of a loader's targets."""
        shape = self.shape(x)
        places = (shape[0], *shape[2:]) if len(shape) == 4 else shape[:-1]
        y = y.unflatten(0, places)
        return y.movedim(-1, 1) if len(shape) == 4 and y.ndim == 4 else y

    def target_rows(self, y: Tensor) -> Tensor:
        """Returns targets as rows again."""
        dims = {"plain": 1, "tokens": 2, "pixels": 3}[self.network.outputs]
        y = y.movedim(1, -1) if dims == 3 and y.ndim == 4 else y
        return y.flatten(0, dims - 1)

    def jacobian(self, x: Tensor, names: list[str]) -> Tensor:
        """Returns (B T, C, P)."""
        J = oracle.jacobian(self.reference, self.wide(x), names, self.rows)
        return J.reshape(-1, self.outputs, J.shape[-1])

    def curvature(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Returns Λ (B T, C, C) times the weights of the samples, by Hessians of the loss."""
        with torch.no_grad(), oracle.reference_kernels():
            outputs = self.rows(self.reference, self.wide(x)).reshape(-1, self.outputs)
        targets = self.target_rows(y)
        targets = targets.double() if targets.is_floating_point() else targets
        each = [
            torch.autograd.functional.hessian(lambda f, t=t: self.observed.loss(f, t) + 0 * f.sum(), f)
            for f, t in zip(outputs, targets, strict=True)
        ]
        Lam = torch.stack(each)
        if weights is not None:
            Lam = Lam * weights.repeat_interleave(len(Lam) // len(weights))[:, None, None]
        return Lam

    @property
    def method(self) -> lw.Method:
        sharing = "reduce" if self.reduce else "expand"
        return {
            "full": lw.Full(),
            "primal": lw.Full(form="primal"),
            "dual": lw.Full(form="dual"),
            "diagonal": lw.Diagonal(),
            "kfac": lw.KFAC(weight_sharing=sharing),
            "ekfac": lw.EKFAC(weight_sharing=sharing),
            "ella": lw.ELLA(rank=10_000, rows="all", residual="prior"),
            "subset": lw.SubsetOfWeights(size=3, by="magnitude", residual=self.residual),
        }[self.method_name]

    def fit(self) -> lw.Posterior:
        return lw.fit(
            self.model, self.batches, self.method, likelihood=self.observed.likelihood, tune=None,
            params=lw.last_layer if self.last_layer else None, prior_precision=self.delta,
            sample_weights=self.weighted,
        )  # fmt: skip

    def covariance(self, posterior: lw.Posterior, G: Tensor, Lam: Tensor) -> Tensor | None:
        """Returns the dense Σ (P, P), columns in the order of the blocks, or None if there is no oracle."""
        if self.method_name == "diagonal":
            return oracle.laplace_covariance(torch.diag(G.diagonal()), self.delta)
        if self.method_name == "subset":
            return self.subset(posterior, G)
        if self.method_name not in ("kfac", "ekfac"):
            return oracle.laplace_covariance(G, self.delta)
        if not self.network.oracle or self.weighted or not bool((Lam != 0).flatten(1).any(1).all()):
            return None  # the loops have no sample weights
        if self.has_target_weights():
            return None
        problem: Any = SimpleNamespace(
            model=self.reference, blocks=posterior.tangent.blocks, case=SimpleNamespace(name=self),
            samples=len(Lam), fisher=Lam, x=torch.cat([self.wide(x) for x, *_ in self.batches]),
        )  # fmt: skip
        factors = kronecker_factors(problem, self.reduce)
        curvature = torch.zeros_like(G)
        for name, where in block_slices(posterior.tangent.blocks).items():
            block = G[where, where]
            if name not in factors:
                curvature[where, where] = torch.diag(block.diagonal())
            elif self.method_name == "kfac":
                curvature[where, where] = kfac_curvature(factors[name])
            elif self.dtype == F64:
                curvature[where, where] = ekfac_curvature(block, factors[name], posterior.covariance.structures[name])
            else:
                return None  # the oracle's eigenbasis is in float64
        return oracle.laplace_covariance(curvature, self.delta)

    def has_target_weights(self) -> bool:
        """Whether Λ depends on the targets: then the factors share the weights between A and Γ."""
        likelihood = self.observed.likelihood
        return any(
            likelihood.target_weights(torch.zeros(self.places(x), self.outputs, dtype=F64), self.target_rows(y))
            is not None
            for x, y, *_ in self.batches
        )

    def subset(self, posterior: lw.Posterior, G: Tensor) -> Tensor:
        names = list(posterior.tangent.parameters)
        theta = oracle.flat_parameters(self.reference, names)[block_columns(posterior.tangent.blocks, self.reference)]
        picked = theta.abs().argsort(descending=True, stable=True)[:3]
        Sigma = torch.zeros_like(G) if self.residual is None else torch.eye(len(G), dtype=F64) / self.delta
        Sigma[picked[:, None], picked] = oracle.laplace_covariance(G[picked][:, picked], self.delta)
        return Sigma


@pytest.mark.parametrize("chunk", range(CHUNKS))  # each chunk has its own cases
@settings(
    max_examples=CASES // CHUNKS, derandomize=True, deadline=None, phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(data=st.data())
def test_latents_are_those_of_a_dense_posterior(chunk: int, tmp_path: Path, data: st.DataObject) -> None:
    case = Case(Draw(data))
    note(repr(case))
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    posterior = case.fit()
    latent = posterior.latent(case.test)
    found = latent.covariance.double().flatten(0, -3)
    names = list(posterior.tangent.parameters)
    columns = block_columns(posterior.tangent.blocks, case.reference)
    J = torch.cat([case.jacobian(x, names) for x, *_ in case.batches])[..., columns]
    Lam = torch.cat([case.curvature(*batch) for batch in case.batches])
    G, J_test = oracle.ggn(J, Lam), case.jacobian(case.test, names)[..., columns]
    rounding = 1e-10 if case.dtype == F64 else TOLERANCES[case.dtype]
    assert psd(found, rounding)
    Sigma = case.covariance(posterior, G, Lam)
    if Sigma is not None:
        close(found, oracle.output_covariance(J_test, Sigma), TOLERANCES[case.dtype])
    posterior.save(tmp_path / "posterior.safetensors")
    again = lw.load(tmp_path / "posterior.safetensors", case.model)
    close(again.latent(case.test).covariance.double(), latent.covariance.double(), rounding)
    assert again.likelihood == posterior.likelihood
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
