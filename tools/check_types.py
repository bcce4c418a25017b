"""Checks the types of what users write: the Python blocks of README.md and docs/, and calls that are right or wrong.

    make lint

mypy and pyright must accept every block. In `tools/typed_calls.py` they must refuse exactly the lines that end in
`# wrong`. The blocks of a page become one file in which each line keeps its number. pyright comes from PyPI with its
own node, and downloads itself from npm at the first call.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CALLS = ROOT / "tools" / "typed_calls.py"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
MYPY_ERROR = re.compile(r"^(.+?):(\d+): error: (.*)", re.MULTILINE)
OTHERS = (
    "BertConfig(", "ViTConfig(", "num_labels=", "get_test_dataloader(", "DataLoader(train, batch_size=16",
    ".posterior_ ", ".module_", "digits.data", "wine.data", "wine.target", "precision.grad.",
    "FlooredDiagonal.footprint = ", "axis.front(self.inputs", "SplitConformalRegressor(",
    "BinaryClassificationController(",
)  # fmt: skip
"""Parts of lines in pages with errors about other libraries, or in code that no user types."""
Errors = dict[tuple[str, int], str]
"""File and line -> message."""


def main() -> None:
    """Runs both checkers, and ends with the errors that are not as they must be."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "pages").mkdir()
        (folder / "pages" / "__init__.py").touch()
        for page in PAGES:
            name = re.sub(r"\W", "_", str(page.relative_to(ROOT).with_suffix("")))
            (folder / "pages" / f"{name}_page.py").write_text(program(page), encoding="utf-8")
        (folder / CALLS.name).write_text(CALLS.read_text(encoding="utf-8"), encoding="utf-8")
        lines = CALLS.read_text(encoding="utf-8").splitlines()
        wrong = {(CALLS.name, number) for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
        problems = []
        with ThreadPoolExecutor() as pool:
            results = list(pool.map(lambda checker: checker(folder), (mypy, pyright)))
        for checker, found in zip(("mypy", "pyright"), results, strict=True):
            errors = {place: text for place, text in found.items() if not is_of_others(folder, *place)}
            problems += [f"{checker}: {file}:{line}: {errors[file, line]}" for file, line in errors.keys() - wrong]
            problems += [f"{checker} accepts {file}:{line}" for file, line in wrong - errors.keys()]
    if problems:
        raise SystemExit("\n".join(sorted(problems)))
    print(f"mypy and pyright: {len(PAGES)} pages are right, {len(wrong)} wrong calls are refused")


def program(page: Path) -> str:
    """Returns the blocks of a page as one program, each line at its number in the page."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        for number, line in enumerate(block[1].splitlines(), first):
            lines[number] = line
    return "\n".join(lines) + "\n"


def is_of_others(folder: Path, file: str, line: int) -> bool:
    """Whether a line of a page has one of `OTHERS`."""
    page = folder / "pages" / file
    return page.exists() and any(part in page.read_text(encoding="utf-8").splitlines()[line - 1] for part in OTHERS)


def mypy(folder: Path) -> Errors:
    """Returns the errors of mypy in a folder."""
    options = ("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache"))
    output = run(folder, "-m", "mypy", *options, "--no-pretty", "--no-error-summary", "-p", "pages", "-m", CALLS.stem)
    return {(Path(file).name, int(line)): message for file, line, message in MYPY_ERROR.findall(output)}


def pyright(folder: Path) -> Errors:
    """Returns the errors of pyright in a folder."""
    settings = {"extraPaths": [str(ROOT)], "reportMissingImports": False, "reportMissingModuleSource": False}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    output = run(folder, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable)
    return {
        (Path(entry["file"]).name, entry["range"]["start"]["line"] + 1): entry["message"]
        for entry in json.loads(output)["generalDiagnostics"]
        if entry["severity"] == "error"
    }


def run(folder: Path, *command: str) -> str:
    """Returns what a checker prints; one that fails to run ends the program with its message."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
