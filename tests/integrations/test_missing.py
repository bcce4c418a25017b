"""Where a package is missing, one sentence names the extra; lapwing itself imports without any of them."""

from __future__ import annotations

import importlib
import sys

import pytest

import lapwing as lw
from tests.hidden_package import HiddenPackage


@pytest.mark.parametrize(
    ("module", "package", "name"),
    [
        ("sklearn", "sklearn", "scikit-learn"),
        ("botorch", "botorch", "botorch"),
        ("lightning", "lightning", "lightning"),
        ("huggingface", "transformers", "transformers"),
        ("mapie", "mapie", "mapie"),
        ("ase", "ase", "ase"),
    ],
)
def test_a_missing_package_is_one_sentence(module: str, package: str, name: str, monkeypatch) -> None:
    adapter = f"lapwing.integrations.{module}"
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == package or loaded == adapter]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [HiddenPackage(package), *sys.meta_path])
    with pytest.raises(lw.LapwingError) as caught:
        importlib.import_module(adapter).fit_trainer(None)
    assert str(caught.value) == f'This needs {name}, which is not installed. Run pip install "lapwing-torch[{module}]".'
