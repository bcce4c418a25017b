"""Where a package is missing, one sentence names the extra; lapwing itself imports without any of them."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

import lapwing as lw


class _Hidden:
    """Makes a package look as if it were not installed."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == self._package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(
    ("module", "package", "name"),
    [
        ("sklearn", "sklearn", "scikit-learn"),
        ("botorch", "botorch", "botorch"),
        ("lightning", "lightning", "lightning"),
        ("huggingface", "transformers", "transformers"),
    ],
)
def test_a_missing_package_is_one_sentence(module: str, package: str, name: str, monkeypatch) -> None:
    adapter = f"lapwing.integrations.{module}"
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == package or loaded == adapter]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [_Hidden(package), *sys.meta_path])
    with pytest.raises(lw.LapwingError) as caught:
        importlib.import_module(adapter).fit_trainer(None)
    assert str(caught.value) == f"This needs {name}, which is not installed. Run pip install lapwing[{module}]."
