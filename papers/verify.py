"""Recomputes what is fast, and compares it with the ledger: `python -m papers verify`.

An entry of the ledger agrees if its tests pass, and if the statements of the paper that it lists hold and fail with
results that are computed anew. An experiment with `FAST`, the arguments of a short run, is computed anew. Entries whose
results take longer are not verified: run their experiments, `python -m papers PAPER NAME`.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from lapwing import LapwingError
from papers import ledger
from papers.common import results

HOME = Path(__file__).parent
AGREES, DISAGREES, MISSING, SLOW = "agrees", "does not agree", "data missing", "not recomputed"


def verify(entries: Sequence[ledger.Entry], report: Callable[[str], object] = print) -> bool:
    """Verifies the entries, reports each and last their counts; returns whether none disagrees."""
    with tempfile.TemporaryDirectory() as folder:
        counts: Counter[str] = Counter()
        states = recompute(entries, Path(folder), report)
        passed = passing({test for entry in entries for test in entry.test})
        for entry in entries:
            if entry.verdict.startswith("not run"):
                continue
            outcome, reasons = _outcome(entry, Path(folder), states, passed)
            counts[outcome] += 1
            report(f"{entry.paper}, {entry.item}: {outcome}" + "".join(f"; {reason}" for reason in reasons))
    checked = counts[AGREES] + counts[DISAGREES]
    report(
        f"{counts[AGREES]} of {checked} verified entries agree with the ledger; {counts[SLOW]} take longer, "
        f"{counts[MISSING]} lack data."
    )
    return not counts[DISAGREES]


def recompute(entries: Sequence[ledger.Entry], folder: Path, report: Callable[[str], object]) -> dict[str, str]:
    """Runs every experiment with `FAST` that an entry names; returns file of results -> AGREES (it ran) or MISSING."""
    states = {}
    for file in dict.fromkeys(file for entry in entries for file in files(entry)):
        paper, _, name = file.partition("/results/")
        if paper.startswith(".."):  # a benchmark
            continue
        experiment = importlib.import_module(f"papers.{paper}.{name.removesuffix('.json')}")
        if not hasattr(experiment, "FAST"):
            continue
        start, own = time.perf_counter(), experiment.__file__
        experiment.__file__ = str((folder / paper / name).with_suffix(".py"))
        (folder / paper).mkdir(exist_ok=True)
        try:
            found = experiment.run(**experiment.FAST)
            results.write(experiment.__file__, found, results.made(experiment.__file__) or results.record((0,)))
            states[file] = AGREES
        except LapwingError as error:  # data that are not at hand
            report(f"{file}: {error}")
            states[file] = MISSING
        finally:
            experiment.__file__ = own
        report(f"{file}: {time.perf_counter() - start:.0f} s")
    return states


def files(entry: ledger.Entry) -> list[str]:
    """Returns the files of results of an entry."""
    return list(dict.fromkeys(key.partition(": ")[0] for key in entry.ours.values()))


def passing(names: set[str]) -> set[str]:
    """Runs tests by pytest, "file::name", slow ones included; returns those that pass, a class if all of it does."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-n", "0", "--no-header", "-p", "no:cacheprovider"]

    def run(known: set[str]) -> subprocess.CompletedProcess[str]:
        words = [*command, *sorted(known)]
        return subprocess.run(words, cwd=HOME.parent, capture_output=True, text=True, check=False)

    done = run(names)
    if unknown := {name for name in names if f"{name}\n" in done.stderr}:  # pytest runs nothing if a name is unknown
        done = run(names - unknown) if names - unknown else done
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    passed = [test for outcome, _, test in lines if outcome == "PASSED"]
    failed = [test.partition(" - ")[0] for outcome, _, test in lines if outcome in ("FAILED", "ERROR")]

    def covered(name: str, tests: Sequence[str]) -> bool:
        return any(test == name or test.startswith((f"{name}[", f"{name}::")) for test in tests)

    return {name for name in names if covered(name, passed) and not covered(name, failed)}


def _outcome(entry: ledger.Entry, folder: Path, states: dict[str, str], passed: set[str]) -> tuple[str, list[str]]:
    reasons = [f"{test} does not pass" for test in entry.test if test not in passed]
    found = {states.get(file, SLOW) for file in files(entry)}
    if reasons or (found - {AGREES} and not entry.test):
        return (DISAGREES if reasons else min(found - {AGREES})), reasons
    if found == {AGREES}:
        try:
            reasons = [f"{text!r} changed" for text in entry.disagreements(folder)]
        except KeyError:  # the short run lacks rows of this entry
            return (AGREES if entry.test else SLOW), []
    return (DISAGREES if reasons else AGREES), reasons
