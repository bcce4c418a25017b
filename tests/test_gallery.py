"""The site shows kept pictures of the tasks: they are as new as the scripts, and small."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools import gallery


def test_pictures_are_as_new_as_their_scripts() -> None:
    assert gallery.stale() == [], "run python tools/gallery.py"


def test_a_changed_script_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(gallery.SCRIPTS, tmp_path / "tasks")
    monkeypatch.setattr(gallery, "SCRIPTS", tmp_path / "tasks")
    with (tmp_path / "tasks" / "plot_tables.py").open("a", encoding="utf-8") as script:
        script.write("print('more')\n")
    assert gallery.stale() == ["tables"]


def test_a_script_without_pictures_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "KEPT", tmp_path)
    assert gallery.stale()[:2] == ["home", "active_learning"]


def test_pictures_are_small() -> None:
    sizes = [path.stat().st_size for path in gallery.KEPT.glob("*.png")]
    assert max(sizes) <= gallery.LARGEST
    assert sum(sizes) < 700_000
