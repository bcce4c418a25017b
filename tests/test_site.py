"""The site: its pictures are as new as their scripts, and small; types of other packages that it links to exist."""

from __future__ import annotations

import pydoc
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


def test_types_of_other_packages_exist() -> None:
    """An address ends with the name of the type, or with `$` if the entry has this name."""
    pages = [page.read_text(encoding="utf-8") for page in (gallery.ROOT / "docs" / "inventories").iterdir()]
    entries = [line.split() for page in pages for line in page.splitlines()]
    assert len(entries) > 30
    names = [address.partition("#")[2].replace("$", name) for name, _, _, address, _ in entries]
    assert [name for name in names if pydoc.locate(name) is None] == []
