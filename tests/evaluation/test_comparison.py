"""`lw.compare` against naive numbers: standard errors, rows by halves, scores of detectors, coverage by quarter."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor, nn

import lapwing as lw
from lapwing.evaluation import metrics
from tests.trained import overconfident


@pytest.fixture(scope="module")
def classes() -> tuple[nn.Module, lw.Posterior, Tensor, Tensor]:
    with torch.random.fork_rng():
        # far too sure, whatever a version of torch draws
        model, x, y = overconfident(4, 3, 120, slope=2.0, factor=20.0)
        return model, lw.fit(model, (x[:60], y[:60]), lw.KFAC(), prior_precision=1.0), x[60:], y[60:]


@pytest.fixture(scope="module")
def regression() -> tuple[nn.Module, lw.Posterior, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double().eval()
        x = torch.randn(100, 3, dtype=torch.float64)
        y = model(x).detach() + 0.3 * torch.randn(100, 2, dtype=torch.float64)
        return model, lw.fit(model, (x[:40], y[:40]), lw.Full(), prior_precision=1.0), x[40:], y[40:]


def batched(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(7), y.split(7), strict=True))  # odd batches: halves run through all samples


def test_standard_errors_are_those_of_paired_differences(classes: Any) -> None:
    model, posterior, x, y = classes
    table = lw.compare({"KFAC": posterior}, batched(x, y), fit_seconds={"KFAC": 1.5}, repeats=1)
    alone = -torch.log_softmax(model(x), -1)[range(60), y].detach()
    losses = -posterior.predict(x).log_prob(y).detach()
    assert table["network"]["NLL"] == pytest.approx(float(alone.mean()))
    assert table["KFAC"]["NLL"] == pytest.approx(float(losses.mean()))
    assert table["network"]["accuracy"] == pytest.approx(float((model(x).argmax(1) == y).double().mean()))
    assert (table["network"]["passes"], table["KFAC"]["fit s"], "fit s" in table["network"]) == (1.0, 1.5, False)
    assert table.errors["network"]["NLL"] == pytest.approx(float(alone.std() / 60**0.5))
    assert table.errors["KFAC"]["NLL"] == pytest.approx(float((losses - alone).std() / 60**0.5))
    right = (posterior.predict(x).classes == y).double() - (model(x).argmax(1) == y).double()
    assert table.errors["KFAC"]["accuracy"] == pytest.approx(float(right.std() / 60**0.5))
    np.testing.assert_allclose(table.predictions["KFAC"].log_prob, -losses)
    np.testing.assert_array_equal(table.predictions["KFAC"].correct, (posterior.predict(x).classes == y).numpy())


def test_positions_of_one_sample_are_one_draw(classes: Any) -> None:
    """Copies of a sample at four positions add nothing to what is known."""
    _, _, x, y = classes
    network = nn.Sequential(nn.Linear(4, 3)).double().eval()
    four = (x[:, None].expand(-1, 4, -1), y[:, None].expand(-1, 4))
    single, copies = (lw.compare({"a": lw.fit(network, [data])}, [data], repeats=1) for data in ((x, y), four))
    for column in ("NLL", "accuracy"):
        assert copies.errors["network"][column] == pytest.approx(single.errors["network"][column])


def test_temperature_scaling_takes_each_half_from_the_other(classes: Any) -> None:
    model, posterior, x, y = classes
    logits = model(x).detach()
    expected = torch.zeros(60, dtype=torch.float64)
    for half in (0, 1):
        mine, other = slice(half, None, 2), slice(1 - half, None, 2)
        best = minimize_scalar(
            lambda t, other=other: float(nn.functional.cross_entropy(logits[other] / 10**t, y[other])),
            bounds=(-2, 2), options={"xatol": 1e-9},
        )  # fmt: skip
        expected[mine] = nn.functional.cross_entropy(logits[mine] / 10**best.x, y[mine], reduction="none")
    table = lw.compare({"KFAC": posterior}, batched(x, y), repeats=1)
    assert list(table.rows) == ["network", "temperature scaling", "KFAC"]
    np.testing.assert_allclose(-table.predictions["temperature scaling"].log_prob, expected, atol=1e-5)
    assert table["temperature scaling"]["NLL"] < table["network"]["NLL"]
    assert "The samples of each half chose the number for the other half" in " ".join(str(table).split())


def test_a_noise_variance_of_each_half_is_the_other_halfs_mean_squared_residual(regression: Any) -> None:
    model, posterior, x, y = regression
    squares = (model(x) - y).square().detach()
    table = lw.compare({"Full": posterior}, batched(x, y), repeats=1)
    assert list(table.rows) == ["network", "held-out noise", "Full"]
    expected = torch.zeros_like(squares)
    expected[0::2], expected[1::2] = squares[1::2].mean(), squares[0::2].mean()
    np.testing.assert_allclose(table.predictions["held-out noise"].std, expected.sqrt().flatten())
    np.testing.assert_allclose(table.predictions["held-out noise"].y, y.flatten())  # in the order of the data


def test_a_censored_noise_variance_of_each_half_is_that_of_the_other_half() -> None:
    model, x = nn.Linear(2, 1).eval(), torch.randn(200, 2)
    y = model(x)[:, 0].detach() + 0.5 * torch.randn(200)
    ends = torch.stack([y.clamp(max=0.5), torch.where(y > 0.5, torch.inf, y)], 1)
    posterior = lw.fit(model, (x, ends), lw.Full(), likelihood=lw.Censored(0.01), prior_precision=1.0)
    table = lw.compare({"p": posterior}, (x, ends))
    numbers = [lw.fit(model, (x[i::2], ends[i::2]), likelihood="censored").noise_variance for i in (1, 0)]
    assert f"{numbers[0]:.3g} for half of the samples and {numbers[1]:.3g} for" in " ".join(str(table).split())


def test_the_network_alone_has_one_noise_if_held_out_data_chose_one_for_each_output() -> None:
    model, x = nn.Linear(3, 2).double().eval(), torch.randn(400, 3, dtype=torch.float64)
    y = model(x).detach() + torch.tensor([0.1, 0.18]).double() * torch.randn(400, 2, dtype=torch.float64)
    posterior = lw.fit(model, (x[:60], y[:60]), lw.Full(), validation=(x[60:360], y[60:360]))
    assert posterior.likelihood.noise_ratios is not None
    arrays = lw.compare({"Full": posterior}, (x[360:], y[360:]), repeats=1).predictions
    assert len(set(arrays["network"].std)) == 1
    assert len(set(arrays["held-out noise"].std)) == 2


def test_a_network_among_the_candidates_is_not_added_and_no_row_is_dropped(classes: Any) -> None:
    model, posterior, x, y = classes
    moved = lw.fit(model, (x, y), lw.MeanField(steps=2))
    assert next(iter(lw.compare({"a": moved, "b": posterior}, (x, y), repeats=1).rows)) == "network"
    given = lw.compare({"mine": model, "temperature scaling": (posterior, lw.MonteCarlo(5))}, (x, y), repeats=1)
    assert list(given.rows) == ["mine", "temperature scaling"]
    assert given["temperature scaling"]["passes"] != 1.0
    assert list(lw.compare({"one": model}, (x[:1], y[:1])).rows) == ["one"]  # no two halves


def test_a_posterior_does_not_take_the_place_of_the_network(classes: Any) -> None:
    model, posterior, x, y = classes
    for one in (posterior, (posterior, lw.Linearized()), lw.mixture([posterior, posterior])):
        with pytest.raises(lw.LapwingError, match='The name "network" belongs to the row of the network without'):
            lw.compare({"network": one, "other": posterior}, (x, y))
    assert next(iter(lw.compare({"network": model, "K": posterior}, (x[:9], y[:9]), repeats=1).rows)) == "network"


def test_a_note_names_the_posterior_of_the_network_alone(classes: Any) -> None:
    model, posterior, x, y = classes
    weighted = lw.fit(model, (x, y), likelihood=lw.Categorical(class_weights=(1.0, 2.0, 3.0)))
    other = lw.fit(nn.Linear(4, 3).double().eval(), (x, y))

    def notes(**posteriors: Any) -> list[str]:
        found = lw.compare(posteriors, (x, y), repeats=1).notes
        return [note for note in found if note.startswith("Rows of a network alone")]

    both = "Rows of a network alone have the network and the likelihood of"
    assert notes(a=posterior, b=weighted) == notes(a=posterior, b=other) == [f'{both} "a".']
    assert notes(b=weighted, a=posterior) == notes(b=other, a=posterior) == [f'{both} "b".']
    assert notes(mixed=lw.mixture([posterior, other])) == [f'{both} a member of "mixed".']
    assert notes(mixed=lw.mixture([other, posterior]), a=posterior) == [f'{both} "a".']
    assert notes(a=posterior, plain=other.model) == ['Rows of a network alone have the likelihood of "a".']
    tuned = lw.fit(model, (x, y), validation=(x, y))
    assert notes(a=posterior, b=tuned, c=model) == notes(a=model, b=other.model) == []


def test_an_order_that_changes_leaves_differences_unpaired(classes: Any) -> None:
    _, posterior, x, y = classes
    shuffled = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 10, shuffle=True)
    table = lw.compare({"KFAC": posterior, "again": posterior}, shuffled, repeats=1)
    assert table.errors["again"]["NLL"] > 0.5 * table.errors["network"]["NLL"]


def test_likelihoods_with_targets_of_another_shape_are_paired() -> None:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    y = torch.poisson(x[:, :1].exp(), torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Linear(3, 1)).eval()
    own = lw.FromDistribution(lambda f: torch.distributions.Poisson(f[..., 0].exp()))
    laws = {"poisson": "poisson", "own": own}
    fits = {name: lw.fit(model, (x, y), lw.KFAC(), likelihood=law, tune=None) for name, law in laws.items()}
    table = lw.compare(fits, (x, y), repeats=1)
    assert table.errors["own"]["RMSE"] < 0.1 * table.errors["network"]["RMSE"]


def test_scores_of_detectors_by_mutual_information_and_entropy(classes: Any) -> None:
    _, posterior, x, y = classes
    far = 4 * x[:30]
    for score in ("mutual_information", "entropy", "confidence"):
        table = lw.compare({"KFAC": posterior}, batched(x, y), {"far": far}, score=score, repeats=1)
        row, arrays = table["KFAC"], table.predictions["KFAC"]
        known, outside = arrays.scores[score], arrays.foreign["far"][score]
        labels, values = np.r_[np.zeros(60), np.ones(30)], np.r_[known, outside]
        name = {"mutual_information": "MI"}.get(score, score)
        assert row[f"far: AUROC by {name}"] == pytest.approx(roc_auc_score(labels, values))
        assert row["far: AUPR"] == pytest.approx(average_precision_score(labels, values))
        threshold = np.sort(outside)[1]  # the largest one with 29 of 30 at or above it, which are more than 95 %
        assert row["far: FPR95"] == pytest.approx((known >= threshold).mean())
    np.testing.assert_allclose(outside, 1 - posterior.predict(far).confidence)
    assert "far: AUROC by MI" not in table["network"]
    assert "far: AUROC by entropy" in table["temperature scaling"]


def test_scores_of_a_regression_are_those_of_gaussian_outputs(regression: Any) -> None:
    _, posterior, x, y = regression
    far = 5 * x[:20]
    table = lw.compare({"Full": posterior}, (x, y), {"far": far}, repeats=1)
    prediction = posterior.predict(far)
    information = 0.5 * (prediction.variance / prediction.aleatoric_variance).log().sum(1)
    np.testing.assert_allclose(table.predictions["Full"].foreign["far"]["mutual_information"], information)
    assert table["Full"]["far: AUROC by MI"] > 0.9
    assert "far: AUROC by entropy" not in table["held-out noise"]


def test_the_columns_of_a_regression_and_the_width(regression: Any) -> None:
    _, posterior, x, y = regression
    table = lw.compare({"Full": posterior}, (x, y), repeats=1)
    quarters = (f"90 % interval: Q{quarter}" for quarter in (1, 2, 3, 4))
    assert table.columns == ("RMSE", "NLL", "CRPS", "90 % interval", "90 % width", *quarters, "passes")
    row, prediction = table["Full"], posterior.predict(x)
    low, high = prediction.interval(0.9)
    assert row["90 % width"] == pytest.approx(float((high - low).mean()))


@pytest.mark.parametrize("missing", [(), (3,), (3, 40)], ids=["none", "one batch", "two batches"])
def test_missing_targets_of_some_batches(regression: Any, missing: tuple[int, ...]) -> None:
    model, _, x, y = regression
    y = y.clone()
    y[list(missing), 1] = torch.nan
    likelihood = lw.Gaussian(noise_variance=0.09, missing=True)
    posterior = lw.fit(model, (x, y), lw.Full(), likelihood=likelihood, prior_precision=1.0)
    table = lw.compare({"Full": posterior}, batched(x, y), repeats=1)
    prediction, known = posterior.predict(x), ~y.isnan()
    low, high = prediction.interval(0.9)
    inside = ((low <= y) & (y <= high)).double()
    row = table["Full"]
    assert row["RMSE"] == pytest.approx(float((prediction.mean - y)[known].square().mean().sqrt()))
    assert row["90 % interval"] == pytest.approx(float(inside[known].mean()))
    columns = []
    for output in (0, 1):  # quarters are of each output
        some = known[:, output]
        order = prediction.std[some, output].argsort()
        columns.append((inside[some, output][order], torch.arange(len(order)) * 4 // len(order)))
    for quarter in range(4):
        expected = torch.cat([column[number == quarter] for column, number in columns]).mean()
        assert row[f"90 % interval: Q{quarter + 1}"] == pytest.approx(float(expected))
    for plain in ("network", "held-out noise"):  # one and two noise variances have no quarters
        assert not any("Q1" in column for column in table[plain])
    half = known & (torch.arange(60) % 2 == 1)[:, None]
    variances = [float((model(x).detach() - y)[some].square().mean()) for some in (half, known & ~half)]
    words = "a noise variance of {:.3g} for half of the samples and {:.3g}".format(*variances)
    assert words in " ".join(str(table).split())


def test_the_area_under_the_risk_coverage_curve() -> None:
    uncertainty, errors = torch.rand(30, dtype=torch.float64), (torch.rand(30) < 0.3).double()
    order = uncertainty.argsort()
    risks = [float(errors[order[: k + 1]].mean()) for k in range(30)]
    assert metrics.aurc(uncertainty, errors).item() == pytest.approx(sum(risks) / 30)
    assert metrics.aurc(torch.ones(30), errors).item() == pytest.approx(float(errors.mean()))  # ties have no order


def test_one_batch_of_dicts_is_no_set_of_foreign_inputs() -> None:
    class Named(nn.Linear):
        def forward(self, features: Tensor) -> Tensor:
            return super().forward(features)

    x, y = torch.randn(20, 4), torch.arange(20) % 3
    data = [({"features": x}, y)]
    posterior = lw.fit(Named(4, 3).eval(), data)
    with pytest.raises(lw.LapwingError, match="Pass a dict from a name to"):
        lw.compare({"a": posterior}, data, {"features": x}, repeats=1)
    assert "far: AUPR" in lw.compare({"a": posterior}, data, {"far": {"features": 3 * x}}, repeats=1).columns


def test_arrays_are_limited_in_size(classes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.evaluation.evaluated.KEPT", 25)
    _, posterior, x, y = classes
    table = lw.compare({"KFAC": posterior}, (x, y), {"far": x}, repeats=1)
    arrays = table.predictions["KFAC"]
    assert len(arrays.log_prob) == len(arrays.confidence) == len(arrays.foreign["far"]["entropy"]) == 20


def test_the_notes_of_a_printed_table_fit_a_terminal(classes: Any) -> None:
    model, _, x, y = classes
    table = lw.compare({"one": model}, (x, y))
    below = str(table).partition(table.notes[0][:20])[2]
    assert max(map(len, below.splitlines())) <= 80
    assert "ECE is the mean gap between confidence and accuracy" in " ".join(below.split())


def test_the_verdict_names_every_row_that_the_data_cannot_tell_from_the_best() -> None:
    """Differences up to two standard errors are ties."""
    x, y = torch.randn(400, 2), torch.randint(2, (400,))
    near, far = (nn.Linear(2, 2).eval() for _ in range(2))
    with torch.no_grad():
        for model, scale in ((near, 0.05), (far, 40.0)):
            model.weight.copy_(scale * torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
            model.bias.zero_()
    table = lw.compare({"near": near, "far": far}, (x, y), repeats=1)
    gap = {name: table[name]["NLL"] - min(row["NLL"] for row in table.rows.values()) for name in table.rows}
    best = min(gap, key=lambda name: gap[name])
    assert {best, *table.ties} == {"near", "temperature scaling"}
    (tie,) = table.ties
    assert re.search(
        f'^"{best}" has the lowest NLL.* The data cannot tell it from "{tie}" \\({gap[tie]:.4f} ± ', table.notes[0]
    )
    assert re.search(f'It is better than "far" \\({gap["far"]:.4f} ± ', table.notes[0])


def test_a_row_that_ranks_strange_inputs_as_known_is_named() -> None:
    model, x = nn.Linear(2, 3).double().eval(), torch.randn(300, 2, dtype=torch.float64)
    y = model(x).argmax(1)
    sets = {"outliers": 100 * x[:100], "others": torch.randn(100, 2, dtype=torch.float64)}
    (verdict, *_) = lw.compare({"one": model}, (x, y), sets, repeats=1).notes
    assert 'By entropy, "one" ranks outliers as known: the AUROC is 0.0' in verdict  # logits are sure far away
    assert "others" not in verdict  # chance is within two standard errors


def test_parts_of_a_table_have_no_empty_rows() -> None:
    line, x = nn.Linear(4, 1).eval(), torch.randn(160, 4)
    y = line(x).detach() + torch.randn(160, 1)
    full = lw.fit(line, (x[:60], y[:60]), lw.Full(), prior_precision=1.0)
    parts = dict(lw.compare({"Full": full}, (x[60:], y[60:]), {"far": 5 * x[:30]}, repeats=1).tables())
    assert [row[0] for row in parts[""]] == ["", "network", "held-out noise", "Full"]
    for part in ("far", "90 % interval"):
        assert [row[0] for row in parts[part]] == ["", "Full"]


def test_the_network_alone_has_its_own_noise_in_any_order() -> None:
    model, x, y = nn.Linear(4, 1).eval(), torch.randn(30, 4), torch.randn(30, 1)
    train, held_out = [(x[:20], y[:20])], [(x[20:], y[20:])]
    methods = {"Full": lw.Full(), "Diagonal": lw.Diagonal()}
    fits = {name: lw.fit(model, train, method, tune=lw.Evidence()) for name, method in methods.items()}
    assert fits["Full"].noise_variance != fits["Diagonal"].noise_variance
    with torch.no_grad():
        noise = (model(x[:20]) - y[:20]).square().mean()
        own = -torch.distributions.Normal(model(x[20:]), noise.sqrt()).log_prob(y[20:]).mean()
    for names in (["Full", "Diagonal"], ["Diagonal", "Full"]):
        table = lw.compare({name: fits[name] for name in names}, held_out, repeats=1)
        assert table.rows["network"]["NLL"] == pytest.approx(float(own), rel=1e-5)
    given = lw.fit(model, train, lw.Full(), likelihood=lw.Gaussian(3.0))
    own = -torch.distributions.Normal(model(x[20:]).detach(), 3.0**0.5).log_prob(y[20:]).mean()
    table = lw.compare({"Full": given}, held_out, repeats=1)
    assert table["network"]["NLL"] == pytest.approx(float(own), rel=1e-5)
