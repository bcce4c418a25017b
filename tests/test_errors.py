"""Packages that come with an extra: each missing one is one sentence with the line that installs it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo  # which looks for onnx as it is imported: torch.export would import it while onnx is hidden

import lapwing as lw
from lapwing.errors import PACKAGES, extra
from lapwing.evaluation import metrics, plots
from tests.hidden_package import hide
from tests.quick import others_slow


def _posterior() -> tuple[lw.Posterior, torch.Tensor, torch.Tensor]:
    x, y = torch.randn(30, 3), torch.arange(30) % 3
    return lw.fit(torch.nn.Linear(3, 3).eval(), [(x, y)], prior_precision=1.0), x, y


def _onnx() -> Any:
    posterior, x, _ = _posterior()
    return lw.deploy(posterior, x, via=lw.Linearized()).to_onnx("never.onnx", x)


def _compare(**foreign: torch.Tensor) -> Any:
    posterior, x, y = _posterior()
    return lw.compare({"KFAC": posterior}, [(x, y)], foreign, repeats=1)


def _adapter(module: str) -> Any:
    return importlib.import_module(f"lapwing.integrations.{module}").fit_trainer(None)


ADAPTERS = {
    "sklearn": "sklearn", "botorch": "botorch", "lightning": "lightning", "huggingface": "transformers",
    "mapie": "mapie", "ase": "ase",
}  # fmt: skip
"""Module of lapwing.integrations, which is also the extra -> the package that it needs."""

USES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "compare": (lambda: _compare(far=9 * torch.randn(30, 3)), "sklearn", "eval"),
    "to_pandas": (lambda: lw.evaluation.Comparison((), {}).to_pandas(), "pandas", "eval"),
    "report": (lambda: _compare().report("never.html"), "jinja2", "eval"),
    "auroc": (lambda: metrics.auroc(torch.rand(3), torch.rand(3)), "sklearn", "eval"),
    "bands": (lambda: plots.bands(torch.rand(3), (torch.rand(3), torch.rand(3))), "matplotlib", "eval"),
    "onnx": (_onnx, "onnx", "export"),
    "onnxscript": (_onnx, "onnxscript", "export"),
    **{module: (partial(_adapter, module), package, module) for module, package in ADAPTERS.items()},
}


@pytest.mark.parametrize("name", others_slow(USES, ("compare", *ADAPTERS)))
def test_a_missing_extra_is_one_sentence_and_a_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use, package, group = USES[name]
    hide(monkeypatch, package)
    monkeypatch.delitem(sys.modules, f"lapwing.integrations.{name}", raising=False)
    with pytest.raises(lw.LapwingError) as caught:
        use()
    assert str(caught.value) == (
        f'This needs {PACKAGES[package][0]}, which is not installed. Run pip install "lapwing-torch[{group}]".'
    )


def test_a_comparison_without_foreign_sets_needs_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in (*PACKAGES, "torchmetrics"):
        hide(monkeypatch, package)
    assert "ECE" in _compare().columns


def test_what_an_installed_package_lacks_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ModuleNotFoundError("No module named 'numpy'", name="numpy")
    monkeypatch.setattr("lapwing.errors.importlib.import_module", mock.Mock(side_effect=missing))
    with pytest.raises(ModuleNotFoundError, match="numpy"):
        extra("pandas")


def test_extras_declare_what_they_promise() -> None:
    lines = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    declared = {line.partition(" = ")[0]: line for line in lines}
    for package, group in PACKAGES.values():
        assert f'"{package.lower()}>=' in declared[group]
    assert '"numpy>=' in declared["dependencies"]  # safetensors.torch imports it
