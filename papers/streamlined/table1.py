"""Tables 1 and 8: NLPD and RMSE on eleven UCI tables in five folds, as they are and with a factor of the covariance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.covariance import AnyLatent, Latent
from lapwing.covariance.terms import FactoredTerm
from lapwing.likelihoods import RegressionPrediction
from lapwing.prediction import Way
from lapwing.tangent import Tangent
from papers.common.data import Batches, Table, batched, rows_and_targets, standardised
from papers.common.networks import mlp
from papers.common.results import Rows, once
from papers.common.tables import grid, shown
from papers.common.training import ONE_NOISE, Recipe, seeded

NETWORKS: dict[str, tuple[str, tuple[int, ...]]] = {
    "SERVO": ("uci_servo", (50,)),
    "LD": ("uci_liver", (50,)),
    "AM": ("uci_autompg", (50,)),
    "REV": ("uci_real_estate", (50,)),
    "FF": ("uci_forest_fires", (50,)),
    "ITT": ("uci_thermography", (100,)),
    "CCS": ("uci_concrete", (100,)),
    "ASN": ("uci_airfoil", (100,)),
    "CAC": ("uci_communities", (100,)),
    "PT": ("uci_parkinsons", (50, 50)),
    "CCPP": ("uci_power", (50, 50)),
}
"""Table 7: shorthand -> file in LAPWING_DATA, hidden widths of the ReLU network."""

COLUMNS = ("MFVI sampling", "MFVI streamlined", "LA sampling", "LA GLM", "LA streamlined")

PUBLISHED: dict[str, Any] = {
    "columns": COLUMNS,
    "nlpd": {
        "SERVO": ((1.287, 0.069), (1.136, 0.182), (3.795, 0.110), (1.047, 0.172), (1.443, 0.077)),
        "LD": ((1.346, 0.280), (1.369, 0.440), (2.221, 0.110), (1.495, 0.580), (1.474, 0.648)),
        "AM": ((1.004, 0.052), (0.807, 0.087), (1.812, 0.065), (0.492, 0.279), (0.478, 0.309)),
        "REV": ((1.076, 0.059), (0.925, 0.091), (1.932, 0.045), (0.859, 0.129), (0.833, 0.156)),
        "FF": ((2.160, 3.003), (2.333, 3.671), (2.086, 0.292), (1.584, 0.950), (1.596, 1.217)),
        "ITT": ((0.937, 0.047), (0.841, 0.065), (1.681, 0.069), (0.825, 0.095), (0.756, 0.164)),
        "CCS": ((0.939, 0.068), (0.828, 0.108), (1.612, 0.048), (0.319, 0.109), (0.234, 0.161)),
        "ASN": ((0.962, 0.054), (0.899, 0.065), (1.788, 0.045), (0.422, 0.109), (0.396, 0.133)),
        "CAC": ((0.973, 0.092), (0.920, 0.118), (1.848, 0.055), (1.281, 0.069), (2.662, 1.096)),
        "PT": ((0.976, 0.069), (0.940, 0.074), (0.984, 0.101), (0.576, 0.181), (0.651, 0.306)),
        "CCPP": ((0.365, 0.040), (0.352, 0.042), (1.345, 0.085), (-0.062, 0.182), (-0.062, 0.200)),
    },
    "rmse": {
        "SERVO": ((0.749, 0.147), (0.740, 0.143), (1.632, 0.233), (0.658, 0.141), (0.658, 0.141)),
        "LD": ((0.884, 0.273), (0.881, 0.272), (0.989, 0.441), (0.977, 0.418), (0.977, 0.418)),
        "AM": ((0.415, 0.115), (0.417, 0.113), (0.505, 0.105), (0.371, 0.103), (0.371, 0.103)),
        "REV": ((0.563, 0.096), (0.562, 0.095), (0.789, 0.130), (0.532, 0.104), (0.532, 0.104)),
        "FF": ((0.874, 1.123), (0.874, 1.124), (0.910, 0.824), (0.852, 0.792), (0.852, 0.792)),
        "ITT": ((0.481, 0.057), (0.497, 0.066), (0.560, 0.075), (0.507, 0.072), (0.507, 0.072)),
        "CCS": ((0.472, 0.102), (0.476, 0.106), (0.494, 0.102), (0.301, 0.057), (0.301, 0.057)),
        "ASN": ((0.568, 0.062), (0.560, 0.062), (0.550, 0.069), (0.352, 0.055), (0.352, 0.055)),
        "CAC": ((0.571, 0.105), (0.585, 0.092), (1.481, 0.167), (0.703, 0.101), (0.703, 0.101)),
        "PT": ((0.601, 0.067), (0.590, 0.068), (0.479, 0.081), (0.410, 0.076), (0.410, 0.076)),
        "CCPP": ((0.241, 0.038), (0.241, 0.038), (0.358, 0.041), (0.224, 0.037), (0.224, 0.037)),
    },
}
"""Tables 1 and 8: metric -> shorthand -> (number, what stands behind its ±), one for each of `COLUMNS`."""


def run(names: Sequence[str] = (), folds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns scores of Laplace and mean-field posteriors, and p values; "seed" is the fold that is tested."""
    rows = Rows(__file__, {})
    for name in names or NETWORKS:
        for fold in folds:
            task = once(lambda name=name, fold=fold: RegressionTask.load(name, fold))  # type: ignore[misc]
            rows.add(f"{name}, seed {fold}", "LA", lambda task: task().laplace(), task)
            rows.add(f"{name}, seed {fold}", "MFVI", lambda task: task().mean_field(), task)
    rows.facts["p values"] = p_values(rows.runs)
    return rows.all()


FOLDS = 5
RECIPE = Recipe(F.mse_loss, 2000, 1e-2, 3e-4, 32, falling=1.0)
"""The paper does not give its own."""


def table(name: str, fold: int) -> Table:
    """Reads one of the eleven tables, a fifth of the rows left out to test, and a fifth of the others to validate.

    Columns with more than half of their values missing are left out, other missing values replaced by the mean of
    the training rows. Inputs and targets are standardised by the training rows.
    """
    return fold_of(name, *rows_and_targets(NETWORKS[name][0]), fold)


def fold_of(name: str, x: Tensor, y: Tensor, fold: int) -> Table:
    """Splits rows x (n, d) and y (n,) by a permutation that all folds share; every row is tested in one fold."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    parts = list(order.tensor_split(FOLDS))
    test = parts.pop(fold)
    rest = torch.cat(parts)
    rest = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(fold))]
    train = len(rest) - len(rest) // 5
    rows = torch.cat([rest, test])
    x, y = x[:, x.isnan().double().mean(0) < 0.5][rows], y[rows]
    x = torch.where(x.isnan(), x[:train].nanmean(0), x)
    return standardised(name, x, y, train, len(rest), "1")


@dataclass(frozen=True)
class RegressionTask:
    """A trained ReLU network and one fold of its table."""

    data: Table
    model: nn.Module
    loader: Batches
    val: Batches

    @classmethod
    def load(cls, name: str, fold: int, recipe: Recipe = RECIPE) -> RegressionTask:
        """Reads the fold and trains the network of table 7."""
        data = table(name, fold)
        with seeded(fold):
            model = mlp(data.train[0].shape[1], *NETWORKS[name][1], 1, activation=nn.ReLU)
        recipe.train(model, data.train, fold)
        return cls(data, model, batched(*data.train, 250), batched(*data.val, 250))

    def posterior(self) -> lw.Posterior:
        """Fits the Laplace posterior with full covariance, one δ and σ² by the evidence."""
        x, y = self.data.train
        options: dict[str, Any] = {"likelihood": ONE_NOISE, "tune": lw.Evidence()}
        if len(x) < sum(value.numel() for value in self.model.parameters()):
            delta, noise = evidence(self.model, x, y)
            options = {"likelihood": lw.Gaussian(noise), "prior_precision": delta}
        return lw.fit(self.model, self.loader, lw.Full(), **options)

    def laplace(self, draws: int = 1000) -> dict[str, Any]:
        """Returns the Laplace columns.

        Args:
            draws: of the weights; for more than 2 500 weights a fifth of them.
        """
        posterior = self.posterior()
        many = posterior.tangent.size < 2500
        return self.scores(posterior, self.ways(draws if many else draws // 5, True))

    def ways(self, draws: int, linearized: bool = False) -> dict[str, Way]:
        """Returns the ways to compare, the paper's first."""
        found: dict[str, Way] = {"streamlined": lw.Streamlined(covariance="full")}
        found["streamlined, diagonal"] = lw.Streamlined()
        if linearized:
            found["GLM"] = lw.Linearized()
        return {**found, "sampling": lw.MonteCarlo(draws)}

    def mean_field(self, steps: int = 2000, draws: int = 1000) -> dict[str, Any]:
        """Returns the mean-field columns: fine-tuned from the network, δ and σ² learned along."""
        method = lw.MeanField(steps, learning_rate=1e-3, std_rate=1e-2, initial_std=0.03)
        likelihood, tune = ONE_NOISE, lw.BoundedEvidence()
        posterior = lw.fit(self.model, batched(*self.data.train, 100), method, likelihood=likelihood, tune=tune)
        return self.scores(posterior, self.ways(draws))

    def scores(self, posterior: lw.Posterior, ways: Mapping[str, Way]) -> dict[str, Any]:
        """Returns scores of each way, plain and with the factor of the validation rows, and of the network's mean.

        Differences are to the first way with its factor, which is the paper's column "Ours".
        """
        x, y = self.data.test
        found: dict[str, Any] = {}
        reference: tuple[Tensor, Tensor] | None = None

        def row(latent: AnyLatent) -> dict[str, float]:
            nonlocal reference
            points = points_of(posterior, latent, y)
            reference = reference or points
            return _row(points, reference)

        for name, way in ways.items():
            factor = lw.scale_factor(posterior, self.val, way).factor
            latent = posterior.latent(x, via=way)
            ours = row(latent.scaled(factor))
            found[name] = {"plain": row(latent), "scaled": ours, "factor": float(f"{factor:.4g}")}
        certain = Latent(posterior.tangent.outputs_of(x), (FactoredTerm(torch.zeros(len(x), 1, 1)),))
        facts = {"noise": posterior.noise_variance, "δ": float(posterior.prior.precision[0])}
        return {**found, "no spread": {"plain": row(certain)}, **facts}


def evidence(model: nn.Module, x: Tensor, y: Tensor, rounds: int = 200) -> tuple[float, float]:
    """Returns δ and σ² where the evidence of the linearised network is stationary, by MacKay's fixed point.

    `γ = Σ_i λ_i/(λ_i + δ σ²)`, `δ = γ/‖θ̂‖²`, `σ² = ‖r‖²/(N - γ)`, with the eigenvalues λ of `JᵀJ`; one decomposition,
    where `lw.Evidence` multiplies J out for every candidate of the dual form.
    """
    tangent = Tangent.survey(model, x)
    rows = torch.cat([tangent.record(part).rows()[:, 0] for part in x.split(500)]).double()
    gram = rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows
    values = torch.linalg.eigvalsh(gram).clamp_min(0)
    squares = float((tangent.outputs_of(x) - y).double().square().sum())
    weights = sum(float(value.double().square().sum()) for value in tangent.mean().values())
    delta, noise = 1.0, squares / len(x)
    for _ in range(rounds):
        effective = float((values / (values + delta * noise)).sum())
        delta, noise = effective / weights, squares / (len(x) - effective)
    return delta, noise


def points_of(posterior: lw.Posterior, latent: AnyLatent, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns negative log densities (n,) of standardised targets, and squared errors (n,)."""
    prediction = posterior.likelihood.predict(latent)
    assert isinstance(prediction, RegressionPrediction)
    return -prediction.log_prob(y).double(), (prediction.mean - y).double().square().squeeze(-1)


def _row(points: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Returns NLPD and RMSE over the test rows, and moments of the NLPD's differences to the reference, row by row."""
    nlpd, squares = points
    difference = nlpd - reference[0]
    numbers = {
        "n": float(len(nlpd)), "nlpd": float(nlpd.mean()), "rmse": float(squares.mean().sqrt()),
        "nlpd difference": float(difference.mean()), "nlpd difference²": float(difference.square().mean()),
    }  # fmt: skip
    return {name: float(f"{value:.6g}") for name, value in numbers.items()}


def paired_p_value(rows: Sequence[Mapping[str, float]]) -> float:
    """Returns the p value of a paired t-test over all test rows of the folds, two-sided; 1 for equal numbers.

    Args:
        rows: one a fold, with the moments of the NLPD's differences to a reference.
    """
    from scipy.stats import t

    count = sum(row["n"] for row in rows)
    mean, square = (
        sum(row["n"] * row[f"nlpd {kind}"] for row in rows) / count for kind in ("difference", "difference²")
    )
    variance = (square - mean**2) * count / (count - 1)
    if variance <= 0:
        return 1.0
    return float(2 * t.sf(abs(mean) / (variance / count) ** 0.5, count - 1))


def p_values(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns p values of the NLPD against the streamlined way with its factor, by table and by way.

    Args:
        runs: "table, seed fold" -> posterior -> way -> rows, as the benchmark keeps them.
    """
    folds: dict[str, dict[str, list[Mapping[str, float]]]] = {}
    for run, posteriors in runs.items():
        table = folds.setdefault(run.partition(",")[0], {})
        for posterior, ways in posteriors.items():
            for way, rows in ways.items():
                if isinstance(rows, Mapping):
                    for kind in ("plain", "scaled"):
                        if kind in rows:
                            table.setdefault(f"{posterior} {way}, {kind}", []).append(rows[kind])
    return {
        name: {label: float(f"{paired_p_value(rows):.3g}") for label, rows in table.items()}
        for name, table in folds.items()
    }


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns NLPD and RMSE beside the paper's, and factors and p values."""
    nlpd, mean_field, rmse, factors = {}, {}, {}, {}
    for name, found in results["table"].items():
        la, mf = found["LA"], found["MFVI"]
        paper, errors = (PUBLISHED[kind][name] for kind in ("nlpd", "rmse"))
        ways = [(way, kind) for way in ("sampling", "GLM", "streamlined") for kind in ("plain", "scaled")]
        ways.append(("no spread", "plain"))
        cells = [shown(la[way][kind]["nlpd"], 2) for way, kind in ways]
        nlpd[name] = [", ".join(f"{number:.2f}" for number, _ in paper[2:]), *cells]
        ways = [("sampling", "plain"), ("sampling", "scaled"), ("streamlined", "plain"), ("streamlined", "scaled")]
        cells = [shown(mf[way][kind]["nlpd"], 2) for way, kind in ways]
        mean_field[name] = [", ".join(f"{number:.2f}" for number, _ in paper[:2]), *cells]
        means = [shown(la[way]["plain"]["rmse"], 2) for way in ("sampling", "streamlined")]
        rmse[name] = [f"{errors[2][0]:.2f}, {errors[4][0]:.2f}", *means]
        p = results["p values"][name]
        cells = [f"{la[way]['factor']['mean']:.2g}" for way in ("sampling", "GLM", "streamlined")]
        factors[name] = [*cells, *(f"{p[f'LA GLM, {kind}']:.2g}" for kind in ("plain", "scaled"))]
    fields = ["sampling", "sampling x factor", "streamlined", "streamlined x factor"]
    columns = [*fields[:2], "GLM", "GLM x factor", *fields[2:], "no spread"]
    kinds = ["factor of sampling", "of GLM", "of streamlined", "p value of GLM", "of GLM x factor"]
    return {
        "nlpd": grid(["paper: sampling, GLM, streamlined", *columns], nlpd),
        "mean field": grid(["paper: sampling, streamlined", *fields], mean_field),
        "rmse": grid(["paper: sampling, mean", "sampling", "mean"], rmse),
        "factors": grid(kinds, factors),
    }
