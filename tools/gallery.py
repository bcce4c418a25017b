"""Runs scripts of examples/tasks, and keeps their pictures and printed lines in docs/pictures/tasks.

`python tools/gallery.py tables ood` runs two of them; without names, every script that changed since its pictures were
made. `home` is the first block of README.md, whose picture is on the first page and on the card that other sites show.
`make docs` runs no script: it shows what is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "examples" / "tasks"
KEPT = ROOT / "docs" / "pictures" / "tasks"
LARGEST = 40_000
"""Bytes of a picture: one that needs more gets fewer colours."""


def source(name: str) -> str:
    """Returns the Python source of a script, or for "home" the first block of README.md."""
    if name != "home":
        return (SCRIPTS / f"plot_{name}.py").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)[0]


def results_of(name: str) -> Path:
    """Returns the file that holds the results of a script, and the hash of its source."""
    return KEPT / ("home.json" if name == "home" else f"plot_{name}.json")


def digest(name: str) -> str:
    """Returns the hash of a script's source."""
    return hashlib.sha256(source(name).encode()).hexdigest()


def stale() -> list[str]:
    """Returns the names of the scripts that have no results, or results of an older source."""
    names = ["home", *(script.stem.removeprefix("plot_") for script in sorted(SCRIPTS.glob("plot_*.py")))]
    kept = {
        name: json.loads(results_of(name).read_text(encoding="utf-8")) for name in names if results_of(name).exists()
    }
    return [name for name in names if name not in kept or kept[name]["sha256"] != digest(name)]


def small_png(figure: Any) -> bytes:
    """Returns a figure as a PNG of at most `LARGEST` bytes, with as many colours as that allows."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100, facecolor="white")
    for colours in (128, 64, 32, 16):
        small = io.BytesIO()
        Image.open(drawn).convert("RGB").quantize(colours, dither=Image.Dither.NONE).save(small, "png", optimize=True)
        if small.tell() <= LARGEST:
            break
    return small.getvalue()


def run(name: str) -> None:
    """Runs one script, and writes what each block of its code draws and prints."""
    import matplotlib.pyplot as plt
    from sphinx_gallery.py_source_parser import split_code_and_text_blocks

    script = SCRIPTS / f"plot_{name}.py"
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    printed: list[str] = []
    pictures: list[list[str]] = []
    for kind, code, line in split_code_and_text_blocks(str(script))[1]:
        if kind != "code":
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("\n" * (line - 1) + code, str(script), "exec", dont_inherit=True), namespace)
        printed.append(out.getvalue().rstrip())
        pictures.append([])
        for number in plt.get_fignums():
            pictures[-1].append(f"{script.stem}-{sum(map(len, pictures)) + 1}.png")
            (KEPT / pictures[-1][-1]).write_bytes(small_png(plt.figure(number)))
        plt.close("all")
    write(name, {"printed": printed, "pictures": pictures})


def draw_home() -> None:
    """Draws the intervals of README's regression for the first page, and for the card."""
    import matplotlib.pyplot as plt
    import torch

    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(source("home"), "README.md", "exec", dont_inherit=True), namespace)
    grid = torch.linspace(-4.5, 4.5, 300)[:, None]
    prediction = namespace["posterior"].predict(grid)
    low, high = prediction.interval(0.9)

    def draw(ax: Any, dots: float) -> None:
        ax.fill_between(grid[:, 0], low[:, 0], high[:, 0], color="#8ec5e8", lw=0, label="90 % of new targets")
        ax.plot(grid, prediction.mean, color="#1769aa", lw=2, label="the network, as it was trained")
        ax.plot(namespace["x"], namespace["y"], "o", color="#222222", ms=dots, mew=0, label="training data")
        ax.set(xlim=(-4.5, 4.5), ylim=(-4, 4))

    figure, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
    draw(ax, 2.5)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    (KEPT.parent / "home.png").write_bytes(small_png(figure))

    card = plt.figure(figsize=(12, 6.3))
    draw(card.add_axes((0, 0, 1, 0.7)), 4)
    card.axes[0].set_ylim(-4, 5.5)
    card.axes[0].axis("off")
    card.text(0.05, 0.82, "lapwing", size=64, weight="bold", color="#1a5247")
    card.text(0.05, 0.73, "Calibrated error bars for a trained PyTorch network", size=26, color="#222222")
    (ROOT / "docs" / "_static" / "card.png").write_bytes(small_png(card))
    write("home", {})


def write(name: str, results: dict[str, Any]) -> None:
    """Writes the results of a script beside the hash of its source."""
    text = json.dumps({"sha256": digest(name), **results}, indent=1, ensure_ascii=False)
    results_of(name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ["MPLBACKEND"] = "Agg"
    sys.path.insert(0, str(ROOT))
    KEPT.mkdir(exist_ok=True)
    for asked in sys.argv[1:] or stale():
        draw_home() if asked == "home" else run(asked)
