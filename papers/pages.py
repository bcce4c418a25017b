"""Tables of the pages of the papers, written from the ledger and the results: `python -m papers pages`.

A page marks the place of a table by a comment, and its end by `<!-- end -->`:

    <!-- verdicts of ella -->                      tables and figures of a paper: published, ours, verdict
    <!-- entries of ella -->                       all its entries, with settings and tests
    <!-- counts -->                                number of entries by paper and verdict
    <!-- table of ella/table5: divergence -->      the table "divergence" of papers/ella/table5.py

An experiment with tables has `tables(results)`, which returns name -> Markdown.
"""

from __future__ import annotations

import bisect
import functools
import importlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from papers import ledger
from papers.common import results
from papers.common.tables import MARKER, filled, grid, rounded

HOME = Path(__file__).parent
NUMBER = re.compile(r"(?<![\w.,/])-?(\d*\.\d+|\d+(?= %)|\d+e-?\d+)(e-?\d+)?( %)?(?![\w])")
"""Decimals, percentages and powers of ten; other whole numbers are counts, sizes and years."""
Entries = Sequence[ledger.Entry]


def paths() -> list[Path]:
    """Returns the pages: of the verdicts, and of each paper."""
    return [HOME / "README.md", *sorted(HOME.glob("*/README.md"))]


def written(text: str, entries: Entries) -> str:
    """Returns the text of a page with the tables of its markers."""
    return filled(text, lambda kind, of: _table(kind, of, entries))


def write() -> list[Path]:
    """Writes the tables into the pages; returns their paths."""
    entries = ledger.read()
    for path in paths():
        path.write_text(written(path.read_text(encoding="utf-8"), entries), encoding="utf-8")
    return paths()


def _table(kind: str, of: str, entries: Entries) -> str:
    if kind == "table of":
        name, _, table = of.partition(": ")
        experiment = importlib.import_module(f"papers.{name.replace('/', '.')}")
        return experiment.tables(results.read(str(experiment.__file__)))[table] + "\n" + origin(experiment) + "\n"
    if kind == "counts":
        return counts(entries)
    chosen = [entry for entry in entries if entry.paper == of]
    return verdicts(chosen) if kind == "verdicts of" else all_entries(chosen)


def origin(experiment: ModuleType) -> str:
    """Returns a line that says which commits and seeds made the results of an experiment."""
    path = results.path_of(str(experiment.__file__))
    made = results.made(str(experiment.__file__))
    dates = {record["commit"]: record["date"] for record in results.records(made)}
    commits = ", ".join(f"{commit} ({date})" for commit, date in dates.items())
    found: dict[str, set[int]] = {}
    for run, rows in ({"": {"": made}} if "commit" in made else made).items():
        for record in rows.values():
            found.setdefault(run.partition("seed")[0].rstrip(" ,"), set()).update(map(int, record["seeds"].split(", ")))
    groups: dict[str, list[str]] = {}
    for name, seeds in found.items():
        groups.setdefault(", ".join(map(str, sorted(seeds))), []).append(name)
    most = max(groups, key=lambda seeds: len(groups[seeds]))
    others = "".join(f"; of `{'`, `'.join(names)}` {seeds}" for seeds, names in groups.items() if seeds != most)
    return f"`{path.name}`: commit {commits}; seeds {most}{others}."


def counts(entries: Entries) -> str:
    """Returns the number of tables and figures by paper and verdict, with their sum, and that of the mathematics."""
    rows = {}
    for paper, heading in {**ledger.PAPERS, "": "**all**"}.items():
        found = Counter(entry.verdict for entry in entries if entry.paper == (paper or entry.paper))
        rows[heading] = [str(found[verdict] or "") for verdict in ledger.VERDICTS]
    return grid(ledger.VERDICTS, rows)


def verdicts(entries: Entries) -> str:
    """Returns what was published, the verdict and our findings, one in a row, for each table and figure."""
    rows = []
    for entry in entries:
        if entry.verdict != "tested":
            first, *others = findings(entry) or [""]
            rows.append((entry.item, [entry.claim, f"**{entry.verdict}**", first]))
            rows += [("", ["", "", other]) for other in others]
    return grid(("published", "verdict", "ours"), rows)


def all_entries(entries: Entries) -> str:
    """Returns every entry with its setting, and the tests that hold us to it."""
    rows = {}
    for entry in entries:
        tests = "; ".join(f"`{name.rpartition('::')[2]}`" for name in entry.test)
        rows[entry.item] = [entry.claim, entry.setting, f"**{entry.verdict}**", tests]
    return grid(("the paper's claim", "our setting", "verdict", "tests"), rows)


def findings(entry: ledger.Entry) -> list[str]:
    """Returns the statements that our numbers confirm (✓), refute (✗) or leave open (=), and a line of other numbers.

    Statements about rows that the paper does not have come last (+).
    """
    texts, named = numbers(entry), set()
    lines = []
    for mark, statements in (("✓", entry.holds), ("✗", entry.fails), ("=", entry.ties), ("+", entry.beyond)):
        for statement in statements:
            parts = re.split(r" ([<≈]) ", statement)
            named |= set(parts)
            lines.append(" ".join([mark, *(f"{part} ({texts[part]})" if part in texts else part for part in parts)]))
    others = "; ".join(f"{label}: {text}" for label, text in texts.items() if label not in named)
    return [*lines, others] if others else lines


def numbers(entry: ledger.Entry) -> dict[str, str]:
    """Returns label -> our number with its standard error."""
    texts = {}
    for label, key in entry.ours.items():
        found = ledger.value(key)
        if (number := ledger.mean(found)) is not None:
            error = found["standard_error"] if isinstance(found, Mapping) else 0
            texts[label] = rounded(number, 4 if abs(number) > 1 else 3) + f" ± {rounded(error)}" * (error >= 5e-5)
    return texts


def unsupported(path: Path) -> list[str]:
    """Returns the numbers in the prose of a page that no result and no published claim of its section has.

    Only decimals, percentages and powers of ten are looked up, at the digits that the page prints. The sources of a
    section are the results that it names by a table, a picture or a file; without one, all results of the paper. The
    scripts of the paper (settings, published numbers) and the claims in the ledger are sources of every section.
    """
    paper = path.parent.name
    known = set(_numbers_of_text(path.parent, paper))
    found = []
    for section in re.split(r"(?m)^(?=#+ |\*\*)", path.read_text(encoding="utf-8")):
        prose = re.sub(r"`[^`\n]*`|```.*?```|\]\(.*?\)", " ", MARKER.sub(" ", section), flags=re.DOTALL)
        files = _files(section, path.parent)
        values = sorted(known.union(*(_values_of(file) for file in files)))
        for match in NUMBER.finditer(prose):
            if not _is_known(match, values):
                found.append(match[0].strip())
    return found


def _files(section: str, folder: Path) -> list[Path]:
    names = set(re.findall(r"(?:<!-- table of |`)(\w+/)?(\w+)(?:: |\.json`)", section))
    names |= {("", name) for name in re.findall(r"figures/(\w+)\.png", section)}
    files = [(HOME / paper if paper else folder) / "results" / f"{name}.json" for paper, name in names]
    return [file for file in files if file.is_file()] or sorted((folder / "results").glob("*.json"))


@functools.cache
def _values_of(file: Path) -> frozenset[float]:
    return frozenset(_values(results.load(file)["results"]))


def _values(found: Any) -> Iterator[float]:
    if isinstance(found, Mapping):
        yield from _texts(found)
        for name, part in found.items():
            if not name.startswith("curve"):  # its hundreds of points would support any number
                yield from _values(part)
    elif isinstance(found, (list, tuple)):
        for part in found:
            yield from _values(part)
    elif isinstance(found, (int, float)):
        yield abs(float(found))


def _texts(texts: Iterable[str]) -> Iterator[float]:
    for text in texts:
        yield from (float(number) for number in re.findall(r"\d*\.?\d+(?:e-?\d+)?", text))


def _numbers_of_text(folder: Path, paper: str) -> Iterator[float]:
    scripts = [*folder.glob("*.py"), *(HOME / "common").glob("*.py")]
    yield from _texts(file.read_text(encoding="utf-8") for file in scripts)
    yield from _texts(text for entry in ledger.read() if entry.paper == paper for text in (entry.claim, entry.setting))


def _is_known(match: re.Match[str], values: Sequence[float]) -> bool:
    """Returns whether a number of the prose is one of some rising values, at the digits that it has."""
    number, power = float(match[1]), int(match[2][1:]) if match[2] else 0
    if "e" in match[1]:
        half = number / 2
    else:
        half = 0.5 * 10.0 ** -len(match[1].partition(".")[2]) * (1 + 1e-9)
    units = [10.0**power, 10.0 ** (power - 2)] if match[3] else [10.0**power]
    places = [(bisect.bisect_left(values, (number - half) * unit), (number + half) * unit) for unit in units]
    return any(at < len(values) and values[at] <= high for at, high in places)
