"""Checks a release as its users get it: builds it, installs the wheel alone, and runs there what needs no extra.

    make release-check
    python tools/release_check.py --keep dist    # keeps the two files in this folder

1. The source distribution is built, and the wheel from it. Neither misses a file, and the wheel holds the package
   alone.
2. An empty environment gets the wheel with the dependencies that it declares, and nothing else.
3. There run the Python blocks of the README that import nothing of the extra `eval`, and `tools/bare_install.py`.

Needs Python 3.11 or newer with venv, and PyPI; works in a temporary folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


SOURCES = {
    "README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "SECURITY.md", "pyproject.toml",
    "constraints.txt", "Makefile", "lapwing/py.typed", "lapwing/fitting/fit.py", "tests/oracle.py",
    "papers/__main__.py", "examples/own_network.py", "benchmarks/cost.py", "docs/how-it-works.md",
    "tools/release_check.py",
}  # fmt: skip
"""What the source distribution must hold, one of each folder."""


def main() -> None:
    """Runs the three steps; any failure ends with its own message."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = built(folder)
        python = environment(folder / "bare", str(wheel))
        run(python, "-m", "pip", "check")
        readme = folder / "readme.py"
        readme.write_text(blocks(ROOT / "README.md"), encoding="utf-8")
        empty = folder / "empty"
        empty.mkdir()
        for program in (readme, ROOT / "tools" / "bare_install.py"):
            run(python, "-I", str(program), cwd=empty)
        run(python, "-m", "lapwing", cwd=empty)
        if sys.argv[1:2] == ["--keep"]:
            shutil.copytree(folder / "dist", sys.argv[2])
        print(f"{wheel.name}: built, installed alone and run in {time.monotonic() - start:.0f} s", flush=True)


def built(folder: Path) -> Path:
    """Returns the wheel, made from the source distribution."""
    python = environment(folder / "builder", "build", "hatchling")
    run(python, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(ROOT))
    (source,), (wheel,) = ((folder / "dist").glob(pattern) for pattern in ("*.tar.gz", "*.whl"))
    with tarfile.open(source) as archive:
        missing = SOURCES - {name.partition("/")[2] for name in archive.getnames()}
    if missing:
        raise SystemExit(f"{source.name} lacks {', '.join(sorted(missing))}: see [tool.hatch.build.targets.sdist].")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    files = [path for path in (ROOT / "lapwing").rglob("*") if path.suffix in (".py", ".typed", ".jinja")]
    package = {path.relative_to(ROOT).as_posix() for path in files}
    odd = {name for name in packed ^ package if not re.fullmatch(r"lapwing_torch-[^/]+\.dist-info/.+", name)}
    if odd:
        raise SystemExit(f"{wheel.name} and the folder lapwing differ in {', '.join(sorted(odd))}.")
    return wheel


def environment(folder: Path, *packages: str) -> str:
    """Makes a virtual environment with these packages, at the versions that are tested; returns its interpreter."""
    run(sys.executable, "-m", "venv", str(folder))
    python = str(folder / ("Scripts" if os.name == "nt" else "bin") / "python")
    run(
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "-c",
        str(ROOT / "constraints.txt"),
        *packages,
    )
    return python


def blocks(page: Path) -> str:
    """Returns the Python blocks of a page that need no extra, as one program."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    wanted = [block for block in found if "sklearn" not in block]
    if not 0 < len(wanted) < len(found):
        raise SystemExit(f"{page.name} shows {len(wanted)} of {len(found)} blocks that need no extra.")
    return "\n".join(wanted)


def run(*command: str, cwd: Path | None = None) -> None:
    """Runs a command, and shows it first."""
    print("+", " ".join(command), flush=True)
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=outside, check=False)
    if done.returncode:
        raise SystemExit(f"The release check failed: {' '.join(command)} ended with {done.returncode}.")


if __name__ == "__main__":
    main()
