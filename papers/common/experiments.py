"""What `python -m papers` and `python -m benchmarks` share: a listing, a folder for networks, pictures."""

from __future__ import annotations

import ast
import os
import tempfile
from pathlib import Path
from types import ModuleType

from papers.common import results


def found(folder: Path, function: str) -> dict[str, str]:
    """Returns the files of a folder that define a function: name -> first line of the docstring."""
    names = {}
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(part, ast.FunctionDef) and part.name == function for part in tree.body):
            names[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return names


def keep_networks() -> None:
    """Names a folder for trained networks if LAPWING_NETWORKS names none."""
    os.environ.setdefault("LAPWING_NETWORKS", str(Path(tempfile.gettempdir()) / "lapwing_networks"))


def draw(experiment: ModuleType) -> None:
    """Draws the pictures of an experiment from its results."""
    if hasattr(experiment, "draw"):
        experiment.draw(results.read(str(experiment.__file__)))
