"""`Comparison.report`: what the page says, that it needs no other file, and that it fits a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import lapwing as lw
from lapwing.evaluation import Comparison
from lapwing.evaluation.report import pictures
from tests.full_disk import full_disk


class Page(HTMLParser):
    """The text of a page, and the attributes of its elements by tag."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: dict[str, list[dict[str, str | None]]] = {}
        self.words: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.setdefault(tag, []).append(dict(attrs))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_rows_may_have_any_names() -> None:
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    fit = lw.fit(nn.Linear(4, 3).eval(), (x, y), lw.KFAC(), prior_precision=1.0)
    figure = lw.compare({"_cost in $ and $x": fit}, (x, y), {"a $set$": 3 * x}, repeats=1).plot()
    figure.canvas.draw()
    texts = [text.get_text() for ax in figure.axes if ax.get_legend() for text in ax.get_legend().get_texts()]
    assert any(r"_cost in \$ and \$x" in text for text in texts)
    assert any(r"a \$set\$, _cost in \$ and \$x" in ax.get_title() for ax in figure.axes)


@pytest.fixture(scope="module")
def tables() -> dict[str, Comparison]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, y = torch.randn(160, 4), torch.arange(160) % 3
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).eval()
        fit = lw.fit(model, (x[:60], y[:60]), lw.KFAC(), prior_precision=1.0)
        line = nn.Linear(4, 1).eval()
        targets = line(x).detach() + torch.randn(160, 1)
        full = lw.fit(line, (x[:60], targets[:60]), lw.Full(), prior_precision=1.0)
        sets = {"far & wide": 5 * x[:30]}
        return {
            "classes": lw.compare({KFAC: fit}, (x[60:], y[60:]), sets, repeats=1),
            "regression": lw.compare({"Full": full}, (x[60:], targets[60:]), sets, repeats=1),
        }


KFAC = "<b>KFAC</b>"


def labels(page: Page) -> str:
    """The texts that stand for the pictures."""
    return " ".join(str(part.get("aria-label")) for part in page.tags["div"])


def percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def test_a_report_of_classes(tables: dict[str, Comparison], tmp_path: Path) -> None:
    table = tables["classes"]
    path = table.report(tmp_path / "report.html", title="Digits <1>")
    page = Page(path)
    assert page.tags["title"] == [{}]
    assert "Digits <1>" in page.text
    assert "b" not in {tag for tag in page.tags if "KFAC" in tag}
    assert "&lt;b&gt;KFAC&lt;/b&gt;" in path.read_text(encoding="utf-8")  # names are escaped
    assert table.notes[0] in page.text  # the verdict: the lowest NLL,
    best = min(table.rows, key=lambda name: table[name]["NLL"])
    assert f'the confidence of "{best}" differs from its accuracy by {percent(table[best]["ECE"])}' in page.text
    area = max(row[column] for row in table.rows.values() for column in row if "far & wide: AUROC" in column)
    assert f"detects far & wide best: AUROC {area:.3f}" in page.text  # and the best detector
    score = "mutual information" if f'mutual information of "{KFAC}" for held-out inputs' in labels(page) else "entropy"
    parts = table.predictions[KFAC]
    known, far = (part[score.replace(" ", "_")] for part in (parts.scores, parts.foreign["far & wide"]))
    limit = max(value for value in far if (far >= value).mean() >= 0.95)
    flagged = percent((known >= limit).mean())
    assert f"flags 95 % of far & wide also flags {flagged} of the held-out inputs" in page.text  # by the score drawn
    bold = [cell for cell in page.tags["td"] if cell.get("class") == "best"]
    assert len(bold) == (not table.ties)
    kept = parts.confidence.argsort()[10:]  # of 100 answers
    wrong = percent(1 - parts.correct[kept].mean())
    assert f"below {parts.confidence[kept[0]]:.3f}: then {wrong} of the others are wrong" in page.text
    for name in table.rows:
        assert page.text.count(name) >= 3  # in both tables and the texts
    for heading in ("Is the confidence right?", "Does the confidence find the errors?", "Does it notice far & wide?"):
        assert heading in page.text
    assert page.text.count("How to read it.") == page.text.count("What is bad here.") == len(page.tags["svg"]) == 3


def test_a_report_of_a_regression(tables: dict[str, Comparison], tmp_path: Path) -> None:
    table = tables["regression"]
    page = Page(table.report(tmp_path / "report.html"))
    best = min(table.rows, key=lambda name: table[name]["NLL"])
    assert f'The 90 % intervals of "{best}" hold {percent(table[best]["90 % interval"])} of the targets' in page.text
    own = table.predictions["Full"]
    kept = own.std.argsort()[:90]  # of 100 predictions
    rmse = ((own.y - own.mean)[kept] ** 2).mean() ** 0.5
    assert f"above {own.std[kept[-1]]:#.3g}: then the RMSE of the others is {rmse:#.3g}" in page.text
    assert "Do the intervals hold what they promise?" in page.text
    assert "Are narrow and wide error bars equally right?" in page.text
    assert "90 % interval, by quarter of the predicted standard deviation" in page.text
    assert page.text.count("where they are narrowest") == 1  # the network has one standard deviation


def test_a_detector_belongs_to_no_row(tmp_path: Path) -> None:
    x, y = torch.randn(200, 4), torch.arange(200) % 3
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).eval()
    fit = lw.fit(model, (x[:60], y[:60]), lw.KFAC(), prior_precision=1.0)
    detector = lw.novelty(fit, (x[:60], y[:60]), held_out=(x[60:120], y[60:120]))
    table = lw.compare({"KFAC": fit}, (x[120:], y[120:]), {"far": 50 * x[:30]}, score=detector, repeats=1)
    page = Page(table.report(tmp_path / "report.html"))
    assert "detector" in page.text
    assert "detector of" not in page.text + labels(page)
    column = "far: AUROC by detector"
    assert len({row[column] for row in table.rows.values()}) == 1


def test_the_intervals_of_a_report_have_the_tails_of_the_predictions() -> None:
    """Normal intervals with the standard deviations of a Student t are too wide at most levels."""
    x, line = torch.randn(2000, 2), nn.Linear(2, 1).eval()
    y = line(x).detach() + torch.distributions.StudentT(3.0).sample((2000, 1))
    student = lw.fit(line, (x[:200], y[:200]), likelihood=lw.StudentT(df=3.0, noise_variance=3.0), prior_precision=1.0)
    table = lw.compare({"t": student}, (x[200:], y[200:]), repeats=1)
    axes = [Figure().add_subplot() for _ in range(2)]
    for ax, picture in zip(axes, pictures(table, "t"), strict=True):
        picture["draw"](ax=ax)
    levels, inside = axes[0].lines[-1].get_xydata().T
    prediction = student.predict(x[200:])
    for level, share in zip(levels, inside, strict=True):
        low, high = prediction.interval(level)
        assert share == pytest.approx(float(((low <= y[200:]) & (y[200:] <= high)).double().mean()), abs=2e-3)
    assert abs(axes[1].lines[-1].get_xydata()[:, 1] - 1).max() < 0.2


@pytest.mark.parametrize("kind", ["classes", "regression"])
def test_a_report_is_one_small_file_that_says_what_its_pictures_show(
    kind: str, tables: dict[str, Comparison], tmp_path: Path
) -> None:
    path = tables[kind].report(tmp_path / "report.html")
    text, page = path.read_text(encoding="utf-8"), Page(path)
    assert path.stat().st_size < 2e6
    assert not {"script", "link", "img", "iframe"} & page.tags.keys()
    assert not re.findall(r'(?:src|href)="(?!#)', text)
    pictures = [attributes["aria-label"] for attributes in page.tags["div"] if attributes.get("role") == "img"]
    assert len(pictures) == len(page.tags["svg"])
    assert all(label and any(name in label for name in tables[kind].rows) for label in pictures)
    assert all("viewbox" in svg and "width" not in svg for svg in page.tags["svg"])
    names = [attributes["id"] for parts in page.tags.values() for attributes in parts if "id" in attributes]
    assert not [name for name in names if name and name.startswith(("figure", "axes", "patch"))]


def test_a_full_disk_keeps_the_old_report(tables: dict[str, Comparison], tmp_path: Path) -> None:
    path = tables["classes"].report(tmp_path / "report.html")
    before = path.read_bytes()
    with full_disk(), pytest.raises(lw.LapwingError, match=r"report.html cannot be written: File too large"):
        tables["regression"].report(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_without_a_place_is_refused_before_it_is_drawn(
    tables: dict[str, Comparison], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lapwing.evaluation.comparison.pictures", lambda *_: pytest.fail("it draws first"))
    for path, words in ((tmp_path / "no" / "r.html", "Create its folder"), (tmp_path, "is not an ordinary file")):
        with pytest.raises(lw.LapwingError, match=words):
            tables["classes"].report(path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width", [500, 1280])  # headless windows are not narrower than 500: a frame holds 390
@pytest.mark.parametrize("kind", ["classes", "regression"])
def test_a_report_fits_the_window(kind: str, width: int, tables: dict[str, Comparison], tmp_path: Path) -> None:
    report = tables[kind].report(tmp_path / "report.html")
    inside = 390 if width == 500 else width
    page = tmp_path / "page.html"
    page.write_text(
        f'<iframe id="frame" src="report.html" style="width:{inside}px;height:900px;border:0"></iframe>'
        '<p id="found"></p>'
        '<script>window.onload = () => { const page = document.getElementById("frame").contentDocument.documentElement;'
        'document.getElementById("found").textContent = "width " + page.scrollWidth + " of " + page.clientWidth; }'
        "</script>"
    )
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    options = [f"--window-size={width},1000", "--enable-logging=stderr", "--dump-dom", page.as_uri()]
    run = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert report.is_file()
    assert "CONSOLE" not in run.stderr
    found = re.search(r"width (\d+) of (\d+)", run.stdout)
    assert found, run.stdout[-500:]
    assert int(found[1]) <= int(found[2]) <= inside
