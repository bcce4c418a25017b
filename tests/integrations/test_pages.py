"""The pages about other packages run, each where its package is installed."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "integrations"
BLOCK = re.compile(r"(?:<!-- needs ([\w. ]+) -->\s+)?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PACKAGES = {
    "botorch.md": ("botorch",),
    "huggingface.md": ("transformers",),
    "lightning.md": ("lightning",),
    "mapie.md": ("mapie",),
    "sklearn.md": ("sklearn",),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("default", "ignore::FutureWarning", "ignore::DeprecationWarning")  # of each other
@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.name)
def test_blocks_of_a_page_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs the blocks in one namespace, in an empty folder; those that need a missing package are left out."""
    for package in PACKAGES[page.name]:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        if any(find_spec(package) is None for package in (block[1] or "").split()):
            continue
        before = "\n" * text.count("\n", 0, block.start(2))
        exec(compile(before + block[2], str(page), "exec", dont_inherit=True), namespace)
