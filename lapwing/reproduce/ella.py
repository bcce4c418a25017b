"""ELLA's experiments (Deng et al. 2022) on what is at hand: Figures 1 to 4, 6 and 7, Tables 1, 4 and 5.

Every function returns a dict of plain numbers; `python -m benchmarks.papers ella` runs them and writes the results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw

from ..covariance import Latent, LowRank
from ..covariance.output import Thin
from ..evaluation import metrics
from ..evaluation.measures import gaussian_kl
from ..likelihoods import ClassPrediction
from ..tangent import Anchors, Tangent
from ..tuning import Training, Tuning
from .data import images
from .models import ResNet18, cifar_resnet20, mnist_cnn

Batches = list[tuple[Tensor, Tensor]]


def batched(x: Tensor, y: Tensor, size: int = 100) -> Batches:
    """Cuts data into batches."""
    return list(zip(x.split(size), y.split(size), strict=True))


# Figure 1 and Table 5 ------------------------------------------------------------------------------------------------


def illustrative_regression(seed: int, noise_variance: float = 0.01) -> dict[str, Any]:
    """Fits `y = sin 2x + ε` at 16 points with a tanh MLP; returns each method's KL divergence to full LLA.

    One noise variance and one prior precision (1) for all methods, unlike the paper's program, which gave ELLA the
    noise variance 0.01 and the others 0.0001.

    Args:
        seed: of data, network and rows.
        noise_variance: σ².

    Returns:
        method -> `KL(method || Full)` of the predictive Gaussians, averaged over 200 points of [-5, 5]; and the
        training error of the network.
    """
    generator = torch.Generator().manual_seed(seed)
    x = 8 * torch.rand(16, 1, generator=generator) - 4
    y = (2 * x).sin() + 0.2 * torch.randn(16, 1, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        widths = (1, 50, 50, 50, 1)
        layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
        model = nn.Sequential(*layers[:-1]).double()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-4)
    x, y = x.double(), y.double()
    for _ in range(1000):
        optimiser.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimiser.step()
    methods: dict[str, tuple[lw.Method, Any]] = {
        "ELLA": (lw.ELLA(rank=5, rows=16), lw.everything),
        "ELLA, 16 directions": (lw.ELLA(rank=16, rows=16), lw.everything),
        "ELLA with residual": (lw.ELLA(rank=5, rows=16, residual="prior"), lw.everything),
        "KFAC": (lw.KFAC(), lw.everything),
        "EKFAC": (lw.EKFAC(), lw.everything),
        "diagonal": (lw.Diagonal(), lw.everything),
        "last layer": (lw.Full(), lw.last_layer),
    }
    grid = torch.linspace(-5, 5, 200).double()[:, None]

    def predictive(method: lw.Method, params: Any) -> tuple[Tensor, Tensor]:
        posterior = lw.fit(
            model.eval(), [(x, y)], method, params=params, prior_precision=1.0, likelihood=lw.Gaussian(noise_variance),
            seed=seed,
        )  # fmt: skip
        latent = posterior.latent(grid)
        return latent.mean, latent.covariance

    exact = predictive(lw.Full(), lw.everything)
    found: dict[str, Any] = {"training error": float(loss.detach())}
    for name, chosen in methods.items():
        found[name] = float(gaussian_kl(*predictive(*chosen), *exact, noise_variance=noise_variance).mean())
    return found


# Figure 2 (a, b) -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExactNTK:
    """Rows of J, and `J_val Ψ J_valᵀ` of each validation image by the dual form at some prior precisions.

    Attributes:
        rows: J_X (NC, P) float32.
        top: the largest eigenvalue of the NTK.
        covariances: prior precision -> (B, C, C).
    """

    rows: Tensor
    top: float
    covariances: dict[float, Tensor]


def exact_reference(model: nn.Module, train: Tensor, val: Tensor, precisions: Sequence[float]) -> ExactNTK:
    """Computes exact linearised Laplace of the MNIST network, `Ψ = (JᵀΛJ + δI)⁻¹`, from 20 000 rows of J.

    `J_v Ψ J_vᵀ = (K_vv - K_vX R (δI + Rᵀ K_XX R)⁻¹ Rᵀ K_Xv)/δ`, with `R Rᵀ = Λ`.

    Cost: 20 000² numbers in float64 twice (6.4 GB), and their Cholesky factor once a precision: some minutes.
    """
    tangent = Tangent.survey(model, train[:4], memory=2**28)
    rows, val_rows = (_rows(tangent, x) for x in (train, val))
    with torch.no_grad():
        root = lw.Categorical().fisher_root(model(train))  # (N, C, C)
    count, width = len(train), tangent.outputs

    def rooted(matrix: Tensor) -> Tensor:
        """Returns Rᵀ times a matrix (NC, n), block by block."""
        return torch.einsum("ncr,ncm->nrm", root.to(matrix.dtype), matrix.reshape(count, width, -1)).flatten(0, 1)

    ntk = torch.empty(len(rows), len(rows), dtype=torch.float64)
    for start in range(0, len(rows), 2000):
        ntk[start : start + 2000] = (rows[start : start + 2000] @ rows.T).double()
    top = _largest(lambda v: rows @ (rows.T @ v), len(rows))
    ntk = rooted(ntk)
    ntk = rooted(ntk.T.contiguous())
    cross = rooted((rows @ val_rows.T).double())  # (NC, VC)
    blocks = val_rows.reshape(len(val), width, -1)
    prior = (blocks @ blocks.mT).double()
    found = {}
    for delta in precisions:
        diagonal = ntk.diagonal()
        diagonal += delta
        factor = torch.linalg.cholesky(ntk)
        diagonal -= delta
        solved = torch.linalg.solve_triangular(factor, cross, upper=False)  # (NC, VC)
        del factor
        solved = solved.reshape(len(rows), len(val), width)
        found[delta] = (prior - torch.einsum("mvc,mvd->vcd", solved, solved)) / delta
    return ExactNTK(rows, top, found)


def nystrom_errors(
    model: nn.Module, train: Batches, val: Tensor, exact: ExactNTK, rows: Sequence[int], ranks: Sequence[int], seed: int
) -> list[dict[str, float]]:
    """Returns ε_Nyström and ε_ELLA (section 5.1; spectral norms) at several M and K, one ELLA fit for each M."""
    found = []
    for count in rows:
        first = next(iter(exact.covariances))
        posterior = lw.fit(
            model, train, lw.ELLA(rank=count, rows=count), prior_precision=first, tune=None, seed=seed, memory=2**31
        )
        covariance = posterior.covariance
        assert isinstance(covariance, LowRank)
        directions = torch.cat([*covariance.basis.rows().values()], -1)  # (K, P)
        record_features = features(posterior, [(val, torch.zeros(len(val)))]).values
        projected = exact.rows @ directions.T  # (NC, K)
        for rank in ranks:
            if rank > covariance.rank:
                continue
            outside = projected[:, :rank]
            residual = _largest(
                lambda v, part=outside: exact.rows @ (exact.rows.T @ v) - part @ (part.T @ v), len(exact.rows)
            )
            row = {"rows": count, "rank": rank, "nystrom": residual / exact.top}
            for delta, wanted in exact.covariances.items():
                at = covariance.with_rank(rank).with_prior(torch.full_like(covariance.precision, delta), 1.0)
                factor = at.factor(record_features).double()
                norms = torch.linalg.matrix_norm(factor @ factor.mT - wanted, 2)
                row[f"ella at prior variance {1 / delta:g}"] = float(
                    (norms / torch.linalg.matrix_norm(wanted, 2)).mean()
                )
            found.append(row)
    return found


def mnist_setup(seed: int) -> tuple[nn.Module, Batches, Tensor]:
    """Returns ELLA's MNIST network, 2 000 training images in batches, and 256 others."""
    data = images("mnist")
    picked = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(seed))
    train, val = picked[:2000], picked[2000:2256]
    return mnist_cnn(), batched(data.x_train[train], data.y_train[train]), data.x_train[val]


def _rows(tangent: Tangent, x: Tensor) -> Tensor:
    """Returns all rows of J at images (N C, P)."""
    width = tangent.outputs
    samples = torch.arange(len(x)).repeat_interleave(width)
    return Anchors(tangent, (x,), samples, torch.arange(width).repeat(len(x))).rows(torch.float32)


def _largest(product: Any, size: int, steps: int = 40) -> float:
    """Returns the largest eigenvalue of a positive semi-definite matrix by power iteration."""
    vector = torch.randn(size, generator=torch.Generator().manual_seed(0))
    value = 0.0
    for _ in range(steps):
        vector = vector / vector.norm()
        moved = product(vector)
        value = float(vector @ moved)
        vector = moved
    return value


# CIFAR-10: Tables 1 and 4, Figures 2 (c), 3, 4, 6 and 7 ---------------------------------------------------------------


@dataclass(frozen=True)
class Features:
    """What all posteriors on one basis need of some inputs.

    Attributes:
        outputs: f (N, C).
        values: J Wᵀ (N, C, K).
        labels: y (N,).
        seconds: that it took.
    """

    outputs: Tensor
    values: Tensor
    labels: Tensor
    seconds: float

    def predict(self, covariance: LowRank) -> ClassPrediction:
        """Returns the predictions of a posterior on this basis."""
        return lw.Categorical().predict(Latent(self.outputs, (Thin(covariance.factor(self.values)),)))


def features(posterior: lw.Posterior, loader: Iterable[tuple[Tensor, Tensor]]) -> Features:
    """Projects J at every input on the posterior's basis."""
    covariance = posterior.covariance
    assert isinstance(covariance, LowRank)
    start, outputs, values, labels = time.perf_counter(), [], [], []
    with torch.no_grad():
        for x, y in loader:
            for _, record in posterior.tangent.records(x):
                outputs.append(record.outputs)
                values.append(covariance.basis.project(record))
            labels.append(y)
    return Features(torch.cat(outputs), torch.cat(values), torch.cat(labels), time.perf_counter() - start)


def scores(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Returns accuracy, NLL and ECE."""
    return {
        "accuracy": float(metrics.accuracy(probs, labels)),
        "nll": float(metrics.negative_log_likelihood(probs, labels)),
        "ece": float(metrics.expected_calibration_error(probs, labels)),
    }


class KeepPrefixes(Tuning):
    """Tunes nothing and keeps the posteriors of the first parts of the data.

    Attributes:
        found: those posteriors, by rising number of samples, the whole last.
    """

    prefixes = 9
    found: tuple[lw.Posterior, ...] = ()

    def tune(self, posterior: lw.Posterior, training: Training = Training()) -> lw.Posterior:  # noqa: B008 (frozen)
        """Returns the posterior as it is."""
        self.found = training.prefixes or (posterior,)
        return posterior


def resnet18() -> nn.Module:
    """Returns a ResNet-18 for images of 32 x 32 with random weights: 11.2 million of them, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ResNet18().eval()


@dataclass(frozen=True)
class Cifar:
    """CIFAR-10 for the ResNet-20: training images, the first 2 000 test images to validate, the others to report."""

    model: nn.Module
    train: Batches
    val: Batches
    test: Batches

    @classmethod
    def load(cls, seed: int, shown: int = 4096, reported: int = 8000) -> Cifar:
        """Reads the data; `shown` of the training images, in the order of the seed."""
        data = images("cifar10")
        picked = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(seed))[:shown]
        return cls(
            cifar_resnet20(),
            batched(data.x_train[picked], data.y_train[picked]),
            batched(data.x_test[:2000], data.y_test[:2000]),
            batched(data.x_test[2000 : 2000 + reported], data.y_test[2000 : 2000 + reported]),
        )


DELTAS = tuple(10 ** (i / 2) for i in range(-8, 9))


def best_stop(
    posteriors: Sequence[lw.Posterior], val: Features, ranks: Sequence[int], deltas: Sequence[float] = DELTAS
) -> dict[int, dict[int, tuple[float, LowRank]]]:
    """Returns, for each number of samples and rank, the best validation NLL and its covariance."""
    found: dict[int, dict[int, tuple[float, LowRank]]] = {}
    for posterior in posteriors:
        covariance = posterior.covariance
        assert isinstance(covariance, LowRank)
        row = found.setdefault(posterior.samples, {})
        for rank in ranks:
            if rank > covariance.rank:
                continue
            shorter = covariance.with_rank(rank)
            candidates = [shorter.with_prior(torch.full_like(covariance.precision, d), 1.0) for d in deltas]
            losses = [-float(val.predict(c).log_prob(val.labels).mean()) for c in candidates]
            at = min(range(len(losses)), key=losses.__getitem__)
            row[rank] = losses[at], candidates[at]
    return found


def cifar_ella(setup: Cifar, rows: int, rank: int, seed: int) -> tuple[KeepPrefixes, lw.Posterior, float]:
    """Fits ELLA once, keeping all prefixes; returns them, the posterior of all data and the seconds of the fit."""
    keep, start = KeepPrefixes(), time.perf_counter()
    posterior = lw.fit(
        setup.model, setup.train, lw.ELLA(rank=rank, rows=rows), prior_precision=1.0, tune=keep, seed=seed,
        memory=2**31 + 2**30,
    )  # fmt: skip
    return keep, posterior, time.perf_counter() - start


def cifar_posteriors(
    setup: Cifar, seed: int
) -> tuple[dict[str, Callable[[Tensor], Tensor]], dict[str, dict[str, Any]]]:
    """Fits every method of Table 1 to the ResNet-20, tuned on the validation images.

    ELLA chooses the number of its training images too (section 5.2); for the others, whose features cost more,
    the prior precision alone is chosen, on 500 of the validation images.

    Returns:
        method -> images to class probabilities, MAP among them; and method -> what was chosen.
    """
    methods: dict[str, tuple[lw.Method, Any, Tuning]] = {
        "ELLA": (lw.ELLA(rank=20, rows=2000), lw.everything, lw.EarlyStopping(setup.val)),
        "last layer, KFAC": (lw.KFAC(), lw.last_layer, lw.Validation(setup.val[:5])),
        "last layer, full, early stopping": (lw.Full(), lw.last_layer, lw.EarlyStopping(setup.val)),
        "diagonal": (lw.Diagonal(), lw.everything, lw.Validation(setup.val[:5])),
        "KFAC": (lw.KFAC(), lw.everything, lw.Validation(setup.val[:5])),
    }

    def plain(x: Tensor) -> Tensor:
        with torch.no_grad():
            return setup.model(x).softmax(-1)

    predict: dict[str, Callable[[Tensor], Tensor]] = {"MAP": plain}
    chosen: dict[str, dict[str, Any]] = {}
    for name, (method, params, tune) in methods.items():
        start = time.perf_counter()
        posterior = lw.fit(
            setup.model, setup.train, method, params=params, tune=tune, data_size=50_000, seed=seed, memory=2**32
        )
        chosen[name] = {
            "fit_seconds": time.perf_counter() - start, "prior_precision": posterior.prior_precision,
            "images": posterior.samples,
        }  # fmt: skip
        predict[name] = partial(_probabilities, posterior)
    return predict, chosen


def _probabilities(posterior: lw.Posterior, x: Tensor) -> Tensor:
    prediction = posterior.predict(x)
    assert isinstance(prediction, ClassPrediction)
    return prediction.probs


def error_against_confidence(probs: Tensor, labels: Tensor, foreign: Tensor) -> list[dict[str, float]]:
    """Returns the error of inputs predicted above each confidence, foreign ones always being errors (Figure 4 a)."""
    confidence = torch.cat([probs.amax(-1), foreign.amax(-1)])
    wrong = torch.cat([probs.argmax(-1) != labels, torch.ones(len(foreign), dtype=torch.bool)])
    rows = []
    for i in range(10):
        above = confidence >= i / 10
        rows.append(
            {"confidence": i / 10, "error": float(wrong[above].double().mean()), "kept": float(above.double().mean())}
        )
    return rows


def fashion_as_cifar(count: int) -> Tensor:
    """Returns Fashion-MNIST test images padded to 32 x 32, in three channels, normalised as the ResNet-20 expects."""
    x = images("fashion_mnist").x_test[:count]
    x = nn.functional.pad(x, (2, 2, 2, 2)).expand(-1, 3, -1, -1)
    return normalised(x)


CENTRE = torch.tensor((0.485, 0.456, 0.406))[:, None, None]
SCALE = torch.tensor((0.229, 0.224, 0.225))[:, None, None]


def normalised(pixels: Tensor) -> Tensor:
    """Returns pixels of [0, 1] as the ResNet-20 expects them."""
    return (pixels - CENTRE) / SCALE


def pixels(x: Tensor) -> Tensor:
    """Returns normalised images as pixels of [0, 1]."""
    return (x * SCALE + CENTRE).clamp(0, 1)
