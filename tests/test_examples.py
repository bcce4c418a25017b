"""The examples run."""

from __future__ import annotations

import csv
import importlib.util
import runpy
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


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
