"""Pictures: the drawn numbers are those of formulas and of scikit-learn, for tensors, arrays and predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from matplotlib import pyplot as plt
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import lapwing as lw
from lapwing.evaluation import metrics, plots
from tests.refused import refused


@pytest.fixture(autouse=True)
def no_window() -> Iterator[None]:
    plt.switch_backend("Agg")
    yield
    plt.close("all")


def points(ax: Any, line: int = -1) -> np.ndarray:
    return np.array(ax.lines[line].get_xydata(), dtype=float)


def counts(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.texts]


def labelled(shape: tuple[int, ...], targets: Tensor, likelihood: Any = None, **options: Any) -> tuple[Any, Tensor]:
    """The prediction of a network whose outputs have this shape for each of the targets."""
    x = torch.randn(len(targets), 4)
    width = int(np.prod(shape))
    model = nn.Sequential(nn.Linear(4, width), nn.Unflatten(1, shape)) if len(shape) > 1 else nn.Linear(4, width)
    posterior = lw.fit(model.eval(), [(x, targets)], likelihood=likelihood, prior_precision=1.0, **options)
    return posterior.predict(x), targets


# ---- reliability


def test_reliability_is_accuracy_against_confidence_in_bins() -> None:
    probs, labels = torch.randn(200, 3).double().softmax(1), torch.randint(3, (200,))
    ax = plots.reliability_diagram(probs, labels, bins=5)
    confidence, right = probs.amax(1).numpy(), (probs.argmax(1) == labels).numpy()
    expected, sizes = [], []
    for b in range(5):
        inside = (confidence >= b / 5) & (confidence < (b + 1) / 5)
        if inside.any():
            expected.append((confidence[inside].mean(), right[inside].mean()))
            sizes.append(int(inside.sum()))
    np.testing.assert_allclose(points(ax), expected)
    assert counts(ax) == [str(size) for size in sizes]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["Perfectly calibrated", "lapwing"]
    gaps = np.abs(np.subtract(*points(ax).T)) @ sizes / 200
    assert gaps == pytest.approx(float(metrics.expected_calibration_error(probs, labels, bins=5)), rel=1e-5)


def test_the_band_holds_nine_in_ten_frequencies_of_drawn_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    stated = 0.1 * torch.arange(10).double().repeat_interleave(300) + 0.05
    ax = plots.reliability_diagram(stated, torch.bernoulli(stated, generator=generator))
    (band,) = (part.get_paths()[0].vertices for part in ax.collections)
    low, high = (band[np.isclose(band[:, 0], 0.55)][:, 1].min(), band[np.isclose(band[:, 0], 0.55)][:, 1].max())
    spread = np.sqrt(0.55 * 0.45 / 300)
    assert low == pytest.approx(0.55 - 1.645 * spread, abs=0.01)
    assert high == pytest.approx(0.55 + 1.645 * spread, abs=0.01)


def test_a_second_curve_has_a_row_of_counts_and_no_second_diagonal() -> None:
    probs, labels = torch.tensor([0.2, 0.8]), torch.tensor([0, 1])
    ax = plots.reliability_diagram(probs, labels, **plots.NETWORK)
    plots.reliability_diagram(probs, labels, ax)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "Perfectly calibrated", "network", "lapwing",
    ]  # fmt: skip
    assert [line.get_color() for line in ax.lines[1:]] == [plots.OOD_COLOR, plots.KNOWN_COLOR]
    assert ax.get_ylim()[0] == pytest.approx(-0.14)
    assert counts(ax) == ["1"] * 4


PIXELS = torch.arange(36).reshape(3, 3, 4) % 5
CASES: dict[str, Callable[[], tuple[Any, Tensor]]] = {
    "classes": lambda: labelled((5,), torch.arange(20) % 5),
    "ignored": lambda: labelled((5,), torch.where(torch.arange(20) % 3 > 0, torch.arange(20) % 5, -100)),
    "tokens": lambda: labelled((4, 5), torch.arange(24).reshape(6, 4) % 5),
    "pixels": lambda: labelled((5, 3, 4), torch.where(PIXELS > 0, PIXELS, -100)),
    "one sample": lambda: labelled((3,), torch.tensor([2])),
}


@pytest.mark.parametrize("case", CASES)
def test_predictions_and_arrays_of_classes_draw_the_same(case: str) -> None:
    prediction, labels = CASES[case]()
    probs = prediction.probs.detach()
    ax = plots.reliability_diagram(prediction, labels)
    assert sum(map(int, counts(ax))) == int((labels >= 0).sum())
    np.testing.assert_allclose(points(ax), points(plots.reliability_diagram(probs, labels, ax)), atol=1e-6)
    ax = plots.risk_coverage(prediction, labels)
    np.testing.assert_allclose(points(ax), points(plots.risk_coverage(probs.numpy(), labels.numpy(), ax)), atol=1e-6)


@pytest.mark.parametrize("outputs", [1, 3])
def test_yes_or_no_outputs_are_pooled_and_missing_answers_left_out(outputs: int) -> None:
    answers = (torch.rand(30, outputs) > 0.5).float()
    answers[4] = torch.nan
    prediction, _ = labelled((outputs,), answers, lw.Bernoulli(missing=True))
    ax = plots.reliability_diagram(prediction, answers)
    np.testing.assert_allclose(points(ax), points(plots.reliability_diagram(prediction.probs, answers)), atol=1e-6)
    known = ~answers.isnan()
    yes = prediction.probs.detach()[known].numpy()
    assert sum(map(int, counts(ax))) == len(yes) == 29 * outputs
    assert points(ax)[:, 0].min() == pytest.approx(yes[yes < np.ceil(10 * yes.min()) / 10].mean(), rel=1e-5)
    right = (yes > 0.5) == (answers[known].numpy() > 0.5)
    assert points(plots.risk_coverage(prediction, answers))[-1, 1] == pytest.approx(1 - right.mean())


# ---- out-of-distribution inputs


def test_the_legend_has_the_auroc_and_bars_sum_to_one() -> None:
    known, foreign = torch.rand(40) ** 9 + 1e-9, torch.rand(30).sqrt()
    expected = roc_auc_score([0] * 40 + [1] * 30, torch.cat([known, foreign]))
    ax = plots.ood_scores(known, foreign.numpy())
    assert ax.get_legend().get_title().get_text() == f"AUROC {expected:.3f}"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["known (40)", "out-of-distribution (30)"]
    assert ax.get_xscale() == "log"
    heights = np.array([bar.get_height() for bar in ax.patches]).reshape(2, -1)
    np.testing.assert_allclose(heights.sum(1), 1)
    assert ax.patches[0].get_facecolor()[:3] == pytest.approx((0, 0x72 / 255, 0xB2 / 255))
    assert plots.ood_scores(torch.zeros(3), torch.zeros(2)).get_xscale() == "linear"  # no spread


@pytest.mark.parametrize("score", ["mutual_information", "entropy", "confidence"])
def test_scores_of_predictions_are_those_of_the_table(score: str) -> None:
    prediction, _ = labelled((4, 5), torch.arange(24).reshape(6, 4) % 5)
    values = prediction.mutual_information() if score == "mutual_information" else prediction.uncertainty(score)
    ax = plots.ood_scores(prediction, values.flatten() + 0.01, score=score)
    expected = metrics.auroc(values.flatten(), values.flatten() + 0.01)
    assert ax.get_legend().get_title().get_text() == f"AUROC {expected:.3f}"


def test_risk_is_the_mean_error_of_the_most_certain_and_ties_share_theirs() -> None:
    confidence, right = torch.tensor([0.9, 0.5, 0.7, 0.7]), torch.tensor([1, 0, 1, 0])
    ax = plots.risk_coverage(confidence, right)
    np.testing.assert_allclose(points(ax), [(0.25, 0), (0.5, 0.25), (0.75, 1 / 3), (1, 0.5)])
    assert ax.get_legend().get_texts()[0].get_text() == "lapwing: AURC 0.271"
    assert len(points(plots.risk_coverage(torch.rand(5000), torch.ones(5000)))) == plots._MOST_POINTS


# ---- regressions


def regression() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    return labelled((2,), torch.randn(40, 2), params=lw.everything)


def test_interval_calibration_is_the_share_inside_each_level() -> None:
    prediction, y = regression()
    ax = plots.interval_calibration(prediction, y)
    for level, share in points(ax):
        low, high = prediction.interval(level)
        assert share == float(((low <= y) & (y <= high)).double().mean())
    pair = (prediction.mean.detach().numpy(), prediction.std.detach())
    np.testing.assert_allclose(points(plots.interval_calibration(pair, y.numpy())), points(ax))
    holes = y.clone()
    holes[:20] = torch.nan
    half = plots.interval_calibration((pair[0][20:], pair[1][20:]), y[20:])
    np.testing.assert_allclose(points(plots.interval_calibration(pair, holes)), points(half))


def test_scaled_residuals_have_the_root_mean_squares_of_ten_bins() -> None:
    mean, std = torch.ones(100).double(), torch.logspace(-1, 1, 100).double()
    y = mean + std * torch.randn(100).double()
    y[3] = torch.nan
    ax = plots.scaled_residuals((mean, std), y)
    kept = ~y.isnan()
    parts = np.array_split(np.stack([std[kept], ((y - mean) / std)[kept]]) ** 2, 10, axis=1)
    np.testing.assert_allclose(points(ax), np.transpose([np.sqrt(part.mean(1)) for part in parts]).T)
    np.testing.assert_allclose(points(ax, 0)[:, 1].max(), ((y - mean) / std)[kept].abs().max())
    assert ax.get_xscale() == "log"
    assert len(points(plots.scaled_residuals((mean, std * 0 + 2), y))) == 1  # one standard deviation, one bin
    low, high = (edge[:, 1] for edge in np.split(ax.collections[0].get_paths()[0].vertices[1:21], 2))
    chances = [scipy.stats.chi2.ppf(part, [10] * 9 + [9]) / ([10] * 9 + [9]) for part in (0.05, 0.95)]
    np.testing.assert_allclose([low, high[::-1]], np.sqrt(chances), rtol=0.06)


def test_scaled_residuals_of_a_student_t_are_the_normal_ones_of_the_same_probability() -> None:
    """So calibrated predictions with tails are in the band, and their squared residuals are not."""
    x, law = torch.randn(4000, 2).double(), torch.distributions.StudentT(3.0)
    likelihood = lw.StudentT(df=3.0, noise_variance=3.0)  # of law
    model = nn.Linear(2, 1).double().eval()
    y = model(x).detach() + law.sample((4000, 1)).double()
    prediction = lw.fit(model, (x, y), likelihood=likelihood, prior_precision=1e4).predict(x)
    y = prediction.mean + law.sample((4000, 1)).double()
    ax = plots.scaled_residuals(prediction, y)
    expected = scipy.stats.norm.ppf(scipy.stats.t.cdf((y - prediction.mean).detach().numpy(), 3.0))
    some = np.random.default_rng(0).permutation(4000)[:1000]
    np.testing.assert_allclose(points(ax, 0)[:, 1], np.abs(expected[some, 0]), rtol=0.01, atol=0.005)
    assert np.all(np.abs(points(ax)[:, 1] - 1) < 0.12)
    of_counts = labelled((1,), torch.poisson(torch.ones(50, 1)), lw.Poisson())
    assert len(points(plots.scaled_residuals(*of_counts), 0)) == 50


def test_bands_are_sorted_and_have_two_standard_deviations() -> None:
    x, y = torch.randn(15, 1), torch.randn(15, 1)
    posterior = lw.fit(nn.Linear(1, 1).eval(), [(x, y)], lw.Full(), prior_precision=1.0)
    prediction = posterior.predict(x)
    ax = plots.bands(x, prediction, training=(x, y))
    order = x[:, 0].argsort()
    np.testing.assert_allclose(points(ax, 0), torch.cat([x, prediction.mean.detach()], 1)[order], rtol=1e-6)
    np.testing.assert_allclose(points(ax, 1), torch.cat([x, y], 1))
    for band, std in zip(ax.collections, (prediction.std, prediction.epistemic_variance.sqrt()), strict=True):
        low, high = (prediction.mean + side * std for side in (-2, 2))
        path = band.get_paths()[0].vertices[:, 1]
        assert path.min() == pytest.approx(float(low.min()))
        assert path.max() == pytest.approx(float(high.max()))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "± 2 std with noise", "± 2 std of weights", "mean", "training data",
    ]  # fmt: skip
    assert len(plots.bands(x, (y, y.abs())).collections) == 1


# ---- maps and bars


def test_maps_show_the_values_over_the_image_and_no_doubt_is_empty() -> None:
    values, image = torch.tensor([[0.0, 1.0], [4.0, 2.0]]), torch.rand(1, 2, 2)
    ax = plots.uncertainty_map(values, image)
    over, under = ax.images
    np.testing.assert_allclose(over.get_array(), values)
    np.testing.assert_allclose(over.get_alpha(), 0.85 * values / 4)
    np.testing.assert_allclose(under.get_array(), image[0])
    assert under.get_zorder() < over.get_zorder()
    assert over.get_clim() == (0, 4)
    prediction, _ = labelled((5, 3, 4), PIXELS)
    alone = lw.fit(nn.Sequential(nn.Flatten(), nn.Linear(4, 60), nn.Unflatten(1, (5, 3, 4))).eval(), [
        (torch.randn(3, 4), PIXELS)], prior_precision=1e9).predict(torch.randn(1, 4))  # fmt: skip
    ax = plots.uncertainty_map(alone)
    np.testing.assert_allclose(ax.images[0].get_array(), alone.mutual_information()[0].detach(), rtol=1e-6)
    assert ax.images[0].get_clim() == (0, plots.LEAST_MAP_END)
    assert len(ax.figure.axes) == 2
    assert len(plots.uncertainty_map(values, label="").figure.axes) == 1
    refused(lambda: plots.uncertainty_map(prediction), "of one image")


def test_bars_are_mean_sensitivities_with_quartiles() -> None:
    values = torch.tensor([[0.2, 1.0], [0.4, 0.5], [0.6, 0.9]])
    ax = plots.sensitivity_bars(values, ["a", "b"])
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([0.4, 0.8])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    np.testing.assert_allclose([line[:, 0] for line in ax.collections[0].get_segments()], [(0.3, 0.5), (0.7, 0.95)])


# ---- the pictures of a comparison


def test_a_table_draws_its_best_row_beside_the_first() -> None:
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    posterior = lw.fit(nn.Linear(4, 3).eval(), [(x, y)], prior_precision=1.0)
    foreign = {"wide": 5 * torch.randn(20, 4), "shifted": torch.randn(20, 4) + 3, "near": torch.randn(20, 4)}
    table = lw.compare({"KFAC": posterior}, [(x, y)], foreign, repeats=1)
    figure = table.plot()
    assert [ax.get_title() for ax in figure.axes] == ["", "", "wide, KFAC", "shifted, KFAC", "near, KFAC", ""]
    reliability, risk, *sets, empty = figure.axes
    assert [line.get_label() for line in reliability.lines] == ["Perfectly calibrated", "network", "KFAC"]
    assert [line.get_color() for line in reliability.lines[1:]] == [plots.OOD_COLOR, plots.KNOWN_COLOR]
    np.testing.assert_allclose(
        points(reliability), points(plots.reliability_diagram(posterior.predict(x), y)), atol=1e-6
    )
    for name in ("network", "KFAC"):
        texts = [text.get_text() for text in risk.get_legend().get_texts()]
        assert f"{name}: AURC {table[name]['AURC']:.3g}" in texts
    for name, ax in zip(foreign, sets, strict=True):
        area = max(table["KFAC"][f"{name}: AUROC by {score}"] for score in ("MI", "entropy"))
        assert ax.get_legend().get_title().get_text() == f"AUROC {area:.3f}"
    assert not empty.axison
    titles = [ax.get_title() for ax in table.plot("network").axes]
    assert titles[2] == "wide, network"


def test_a_table_of_regressions_draws_intervals_and_residuals() -> None:
    x, y = torch.randn(60, 4), torch.randn(60, 1)
    posterior = lw.fit(nn.Linear(4, 1).eval(), [(x, y)], prior_precision=1.0)
    intervals, scaled = lw.compare({"Full": posterior}, [(x, y)], repeats=1).plot().axes
    assert len(points(scaled)) == 10
    expected = plots.interval_calibration(posterior.predict(x), y)
    np.testing.assert_allclose(points(intervals), points(expected), atol=0.02)  # rounding at the ends of intervals
    assert scaled.get_xlabel() == "predicted standard deviation"
