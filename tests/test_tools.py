"""The tools of developers, and the workflows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import lapwing
from tools.mutants import drawn, mutants

ROOT = Path(__file__).resolve().parents[1]


def faults(line: str) -> list[tuple[str, str]]:
    """The kind of each mutant of one line of code, and the line with the fault."""
    return [(mutant.kind, mutant.text) for mutant in mutants(line)]


@pytest.mark.parametrize(
    ("line", "others"),
    [
        ("a < b", ["(a >= b)"]),
        ("x is None", ["(x is not None)"]),
        ("a + b", ["(a)", "(b)"]),
        ("c * (a - b)", ["(c)", "(a - b)", "c * ((a))"]),
        ("σ / n", ["(σ)"]),
        ("x.mT @ y", ["(x) @ y"]),
        ("x.transpose(0, 1).sum(-1, True)", ["(x.transpose(0, 1).sum(-2, True))", "(x).sum(-1, True)"]),
        ("x.permute(0, 2, 1)", ["(x.permute(0, 1, 2))"]),
        ("torch.einsum('bk,k->b', x, y)", ["(torch.einsum('kb,k->b', x, y))"]),
        ("x.sum(3)", []),
        ("a < b < c", []),
        ("[0] + rest", []),
        ("raise Error(a + b)", []),
        ("f'{a + b}'", []),
    ],
)
def test_a_mutant_has_one_fault(line, others):
    assert [text for _, text in faults(line)] == others


def test_a_mutant_keeps_the_rest_of_the_file():
    source = '"""β."""\nσ = 1  # a + b\n\n\ndef f(α, β):\n    return (α +\n            β)  # ω\n'
    first, second = mutants(source)
    assert first[:4] == (6, "term", "α + β", "α")
    assert first.text == source.replace("α +\n            β", "(α)")
    assert second.text == source.replace("α +\n            β", "(β)")


def test_the_seed_draws_the_mutants():
    places = [[(path, mutant) for path, mutant in drawn(12, seed, ["data", "linalg"])] for seed in (0, 0, 1)]
    assert places[0] == places[1] != places[2]
    assert {mutant.kind for _, mutant in places[0]} == {"axes", "comparison", "term"}
    assert {path.parts[1] for path, _ in places[0]} == {"data", "linalg"}


def test_actions_are_pinned_by_commit():
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    if not workflows:
        pytest.skip("a source distribution has no workflows")
    for path in workflows:
        used = re.findall(r"uses: *(.*)", path.read_text(encoding="utf-8"))
        assert used
        for action in used:
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), f"{path.name}: {action}"


def declared() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_stands_in_all_places():
    latest = re.search(r"^## \[(.+)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert latest
    assert latest[1] == lapwing.__version__ == declared()["project"]["version"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f'version: {latest[1]}\ndate-released: "{latest[2]}"\n' in citation


def test_extras_that_are_named_are_declared():
    """Pages and messages write `lapwing-torch[extra]`; `.[extra]` is for a checkout."""
    files = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / ".").glob(".readthedocs.yaml")]
    for folder, kind in (("docs", "md"), ("examples", "py"), ("lapwing", "py")):
        files += (ROOT / folder).rglob(f"*.{kind}")
    found = re.findall(
        r"(?:lapwing-torch|[\" ]\.)\[([\w,]+)\]", "\n".join(path.read_text(encoding="utf-8") for path in files)
    )
    named = {name for names in found for name in names.split(",")}
    assert named <= declared()["project"]["optional-dependencies"].keys()
    assert {"eval", "huggingface", "mapie"} <= named
