"""What the documentation shows runs: Python blocks of README.md and docs/, and every docstring's examples."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lapwing
from papers.common.results import load
from tests.hidden_package import hide
from tests.quick import others_slow

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SLOW_PAGES = "training", "sensitivity", "deployment", "extending", "likelihoods", "first-hour", "which-method"
QUICK_PAGES = [page for page in PAGES if page.stem not in SLOW_PAGES]
OTHERS = pytest.mark.filterwarnings("default", "ignore::FutureWarning", "ignore::DeprecationWarning")
"""Packages on the pages of `docs/integrations` warn of each other."""

INTEGRATIONS = [
    pytest.param(page, marks=[pytest.mark.slow, OTHERS])
    for page in sorted((ROOT / "docs" / "integrations").glob("*.md"))
]
EVERY_PAGE = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "papers").rglob("*.md"))]
EVERY_PAGE.append(ROOT / "benchmarks" / "README.md")
SCRIPTS = sorted((ROOT / "examples" / "tasks").glob("plot_*.py"))
MODULES = ["lapwing", *sorted(module.name for module in pkgutil.walk_packages(lapwing.__path__, "lapwing."))]
WITH_EXAMPLES = [
    name for name in MODULES if ">>>" in Path(importlib.util.find_spec(name).origin).read_text(encoding="utf-8")
]
SLOW_EXAMPLES = {"lapwing.deployment", "lapwing.evaluation.sensitivity"}
PYTHON = re.compile(r"(?:<!-- needs ([\w. ]+) -->\s+)?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FOR_MAINTAINERS = "extending", "file-format", "how-it-works", "width"
MOST_WORDS, MOST_FOR_USERS = 25_000, 20_200
"""Ceilings on the words of all guides, and of those for users."""

LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize("page", [*others_slow(PAGES, QUICK_PAGES), *INTEGRATIONS], ids=lambda page: page.name)
def test_blocks_of_a_page_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs the blocks in one namespace, in an empty folder; a failure shows the page's own line."""
    if page.parent.name == "integrations":
        pytest.importorskip({"huggingface": "transformers"}.get(page.stem, page.stem))
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in PYTHON.finditer(text):
        if any(importlib.util.find_spec(package) is None for package in (block[1] or "").split()):
            continue
        before = "\n" * text.count("\n", 0, block.start(2))
        exec(compile(before + block[2], str(page), "exec", dont_inherit=True), namespace)


def test_the_readme_is_short_and_hides_nothing() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "<!--" not in text
    assert len(text.splitlines()) <= 120


def test_the_guides_are_short() -> None:
    """Counts words as `wc -w` does, without the reference, the changelog and the pages of papers and benchmarks."""
    outside = ("reference/", "papers", "benchmarks.md", "changelog", "tasks/", "_build/")
    words = {path.stem: len(path.read_text(encoding="utf-8").split())
             for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
             if not path.relative_to(ROOT).as_posix().removeprefix("docs/").startswith(outside)}  # fmt: skip
    assert sum(words.values()) <= MOST_WORDS, "shorten a page for each one that grows"
    assert sum(words.values()) - sum(words[page] for page in FOR_MAINTAINERS) <= MOST_FOR_USERS


@pytest.mark.slow
def test_blocks_of_the_readme_run_as_pasted(tmp_path: Path) -> None:
    """Each block runs in a fresh interpreter and an empty folder, and prints numbers."""
    for _, block in PYTHON.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", block], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        )
        assert re.search(r"\d\.\d", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_scripts_of_tasks_run(script: Path, tmp_path: Path) -> None:
    """Runs each script by itself, as a reader who downloads it does, and without a display."""
    if script.stem == "plot_guarantees":
        pytest.importorskip("mapie")
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, check=True)


def test_the_task_of_guarantees_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "mapie")
    with pytest.raises(SystemExit, match=r'needs MAPIE: run pip install "lapwing-torch\[mapie\]"'):
        runpy.run_path(str(ROOT / "examples" / "tasks" / "plot_guarantees.py"))


def test_pages_that_a_task_names_exist() -> None:
    """On the site `docs/conf.py` turns them into links; on GitHub they are read as they are."""
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8")
        assert ":doc:" not in text
        assert [name for name in re.findall(r"docs/[\w/-]+\.md", text) if not (ROOT / name).exists()] == [], script.name


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("name", others_slow(WITH_EXAMPLES, set(WITH_EXAMPLES) - SLOW_EXAMPLES))
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch, "lw": lapwing}, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_every_public_name_is_listed_and_found():
    assert dir(lapwing) == sorted(lapwing.__all__)
    assert len(set(lapwing.__all__)) == len(lapwing.__all__)
    assert all(getattr(lapwing, name) is not None for name in lapwing.__all__)


def test_import_is_light() -> None:
    """Beyond torch, only the standard library and what lapwing depends on; neither dynamo nor export is woken.

    What needs more is imported when it is asked for. A fresh process shows both.
    """
    code = (
        "import torch, sys; before = set(sys.modules); import lapwing; new = set(sys.modules) - before; "
        "tops = {name.partition('.')[0] for name in new} - set(sys.stdlib_module_names); "
        "assert tops <= {'lapwing', 'safetensors', 'tqdm'}, tops; "
        "assert not [name for name in new if name.startswith('torch.')], new; "
        "rare = ('lapwing.deployment', 'lapwing.evaluation', 'lapwing.prediction.streamlined.'); "
        "assert not [name for name in new if name.startswith(rare)], new; "
        "assert not {'tqdm.auto', 'tqdm.notebook', 'IPython'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_costs_in_the_readme_are_those_measured() -> None:
    """A table that was not updated with its JSON misleads; numbers are given to one decimal."""
    results = load(ROOT / "benchmarks" / "results" / "cost.json")["results"]
    mlp, larger, cnn = (
        results[f"{name}"]
        for name in (
            "MLP 784-128-64-10, batch 100", "MLP 784-128-64-10, batch 100, fitted on 2 000", "CNN 28x28, batch 50",
        )
    )  # fmt: skip
    last = results["last layer 512-512-100, batch 100"]
    wanted = [entry["covariance"] for found in (mlp, larger, cnn) for entry in found.values()]
    wanted += [mlp["KFAC"]["covariance by hand"], last["covariance"], last["variance"]]
    wanted += [results["last layer 512-512-1000, batch 100"]["variance"]]
    wanted += list(results["fit of the MLP, a batch of 100"].values())
    section = (ROOT / "docs" / "costs.md").read_text().partition("The memory budget is")[0]
    missing = [ratio for ratio in (f"{entry['ratio']:.1f}" for entry in wanted) if ratio not in section]
    assert not missing


def test_costs_of_deployed_networks_are_those_measured() -> None:
    results = load(ROOT / "benchmarks" / "results" / "streamlined_cost.json")["results"]
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    names = [f"{name}: {part}" for name in ("mlp", "resnet20") for part in ("diagonal", "last layer, KFAC")]
    for row in (results[name] for name in (*names, "vit: diagonal", "resnet20: last block, diagonal")):
        batches = [
            [row[size][runtime] for size in ("batch 1", "batch 100")]
            for runtime in ("eager", "compiled", "onnxruntime")
        ]
        assert " | ".join(f"{one:.1f} / {many:.1f}" for one, many in batches) in page
    correlated = results["resnet20: diagonal, positions correlated"]["batch 100"]["compiled"]
    summary = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")
    costs = f"costs {results['resnet20: diagonal']['batch 100']['compiled']:.1f} of its forward passes compiled"
    assert f"{costs}, and {correlated:.1f} with correlated positions" in " ".join(summary.split())


def test_tests_that_pages_name_exist() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8"))}
    assert named
    assert not [name for name in sorted(named) if f"def {name}(" not in code]


def test_messages_that_the_errors_page_quotes_exist() -> None:
    """Each quotation, cut where it leaves words out, is part of a text of the package."""
    texts = []
    for path in Path(lapwing.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    quoted = re.findall(r'^\| "(.+?)" \|', (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    parts = [part.strip() for words in quoted for part in words.split("…") if part.strip()]
    assert len(quoted) > 12
    assert [part for part in parts if not any(part in text for text in texts)] == []
