"""The examples run, and compare() counts what it says."""

from __future__ import annotations

import csv
import importlib.util
import runpy
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.evaluation import compare

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def problem() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    x = torch.randn(40, 4)
    return nn.Linear(4, 3).eval(), [(x[:25], torch.randint(3, (25,))), (x[25:], torch.randint(3, (15,)))]


# ---- compare


def test_compare_has_the_network_as_a_row(problem) -> None:
    model, loader = problem
    posterior = lw.fit(model, loader)
    table = compare(
        {"KFAC": posterior}, loader, foreign={"wide": torch.randn(9, 4) * 3}, fit_seconds={"KFAC": 1.5}, repeats=1
    )
    assert list(table.rows) == ["network", "temperature scaling", "KFAC"]
    assert table["network"]["passes"] == 1.0
    assert table["KFAC"]["fit s"] == 1.5
    assert "fit s" not in table["network"]
    logits, labels = torch.cat([model(x) for x, _ in loader]).detach(), torch.cat([y for _, y in loader])
    assert table["network"]["NLL"] == pytest.approx(float(nn.functional.cross_entropy(logits, labels)), rel=1e-6)
    assert table["network"]["accuracy"] == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
    probs = posterior.predict(loader).probs
    assert table["KFAC"]["NLL"] == pytest.approx(float(-probs[range(40), labels].log().mean()), rel=1e-5)


def test_compare_takes_ways_networks_and_regression(problem) -> None:
    model, loader = problem
    posterior = lw.fit(model, loader)
    table = compare({"net": model, "drawn": (posterior, lw.MonteCarlo(5))}, loader, repeats=1)
    assert list(table.rows) == ["net", "temperature scaling", "drawn"]
    targets = [(x, torch.randn(len(x), 3)) for x, _ in loader]
    table = compare({"Full": lw.fit(model, targets, lw.Full())}, targets, foreign={"same": [targets[0]]}, repeats=1)
    of_all = ("RMSE", "NLL", "CRPS", "90 % interval", "90 % width")
    of_set = ("AUROC by MI", "AUROC by entropy", "FPR95", "AUPR")
    quarters = tuple(f"90 % interval: Q{quarter}" for quarter in (1, 2, 3, 4))
    assert table.columns == (*of_all, *(f"same: {column}" for column in of_set), *quarters, "passes")


def test_the_network_alone_has_its_own_noise_in_any_order() -> None:
    torch.manual_seed(0)
    model, x, y = torch.nn.Linear(4, 1).eval(), torch.randn(30, 4), torch.randn(30, 1)
    train, held_out = [(x[:20], y[:20])], [(x[20:], y[20:])]
    methods = {"Full": lw.Full(), "Diagonal": lw.Diagonal()}
    fits = {name: lw.fit(model, train, method, tune=lw.Evidence()) for name, method in methods.items()}
    assert fits["Full"].noise_variance != fits["Diagonal"].noise_variance
    with torch.no_grad():
        noise = (model(x[:20]) - y[:20]).square().mean()
        own = -torch.distributions.Normal(model(x[20:]), noise.sqrt()).log_prob(y[20:]).mean()
    for names in (["Full", "Diagonal"], ["Diagonal", "Full"]):
        table = compare({name: fits[name] for name in names}, held_out, repeats=1)
        assert table.rows["network"]["NLL"] == pytest.approx(float(own), rel=1e-5)
    given = lw.fit(model, train, lw.Full(), likelihood=lw.Gaussian(3.0))
    own = -torch.distributions.Normal(model(x[20:]).detach(), 3.0**0.5).log_prob(y[20:]).mean()
    assert compare({"Full": given}, held_out, repeats=1).rows["network"]["NLL"] == pytest.approx(float(own), rel=1e-5)


def test_compare_prints_and_writes(problem) -> None:
    model, loader = problem
    table = compare({"KFAC": lw.fit(model, loader)}, loader, repeats=1)
    assert str(table).splitlines()[0].split() == ["accuracy", "NLL", "ECE", "Brier", "AURC", "passes"]
    rows = list(csv.DictReader(table.to_pandas().to_csv(index_label="candidate").splitlines()))
    assert float(rows[2]["NLL"]) == table["KFAC"]["NLL"]


@pytest.mark.parametrize(
    ("posteriors", "words"),
    [({}, "a dict of at least one"), ({"a": 3}, "is int"), ([], "a dict")],
)
def test_compare_refuses(posteriors, words: str, problem) -> None:
    with pytest.raises(lw.LapwingError, match=words):
        compare(posteriors, problem[1])


def test_compare_refuses_an_empty_loader_and_a_score(problem) -> None:
    model, loader = problem
    with pytest.raises(lw.LapwingError, match="no samples"):
        compare({"net": lw.fit(model, loader)}, [])
    with pytest.raises(lw.LapwingError, match="score is one of 'mutual_information', 'entropy', 'confidence'"):
        compare({"net": model}, loader, score="entropie")


# ---- examples


@pytest.mark.slow
def test_own_network_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "own_network.py"), run_name="__main__")
    assert "accuracy" in capsys.readouterr().out
    assert (tmp_path / "posterior.safetensors").is_file()


def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_demo_ends_with_its_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    demo().main()
    output = tmp_path / "demo-output"
    assert (
        "Open demo-output/report.html (digits) and demo-output/regression.html in a browser." in capsys.readouterr().out
    )
    assert (output / "regression.png").stat().st_size > 10_000
    assert "Does it notice photographs?" in (output / "report.html").read_text()
    assert "Does it notice the gap?" in (output / "regression.html").read_text()
    rows = {row["row"]: row for row in csv.DictReader((output / "report.csv").read_text().splitlines())}
    assert len(rows) == 5
    for name, row in rows.items():
        assert float(row["NLL"]) <= float(rows["network"]["NLL"]), name
    gap = {row["row"]: row for row in csv.DictReader((output / "regression.csv").read_text().splitlines())}
    assert float(gap["all weights (lw.Full())"]["the gap: AUROC by MI"]) > 0.95


@pytest.mark.slow
def test_continual_digits_keep_more_with_a_former_posterior(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    results = runpy.run_path(str(EXAMPLES / "continual_digits.py"))["main"]()
    for kind in ("split", "permuted"):
        first = {name: results[kind, name][0] for name in ("weights alone", "Diagonal", "KFAC")}
        assert first["weights alone"] < first["Diagonal"] < first["KFAC"]
    assert "permuted, KFAC" in capsys.readouterr().out
