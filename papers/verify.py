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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lapwing import LapwingError
from papers import ledger
from papers.common import results

HOME = Path(__file__).parent
AGREES, DISAGREES, MISSING, SLOW = "agrees", "does not agree", "data missing", "not recomputed"


def verify(entries: Sequence[ledger.Entry], report: Callable[[str], object] = print) -> bool:
    """Verifies the entries, reports each and last their counts; returns whether none disagrees."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        counts: Counter[str] = Counter()
        tests = pool.submit(passing, {test for entry in entries for test in entry.test})  # in other processes
        states = recompute(entries, Path(folder), report)
        passed = tests.result()
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
    """Runs tests by pytest, "file::name", slow ones included; returns those that pass, a class if all of it does.

    Each file has a process of its own, which gives its memory back.
    """
    found = set()
    for file in sorted({name.partition("::")[0] for name in names}):
        of_file = {name for name in names if name.startswith(f"{file}::")}
        outcomes, error = _pytest(of_file)
        if unknown := {name for name in of_file if f"{name}\n" in error}:  # pytest runs nothing if a name is unknown
            outcomes, _ = _pytest(of_file - unknown) if of_file - unknown else ({}, "")
        for name in of_file - unknown:
            of_name = [
                state for test, state in outcomes.items() if test == name or test.startswith((f"{name}[", f"{name}::"))
            ]
            if of_name and set(of_name) <= {"PASSED", "XFAIL"}:
                found.add(name)
    return found


def _pytest(names: set[str]) -> tuple[dict[str, str], str]:
    """Returns test -> outcome, and what pytest wrote as errors."""
    options = ["-q", "-rA", "-n", "0", "--no-header", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *sorted(names)]
    done = subprocess.run(command, cwd=HOME.parent, capture_output=True, text=True, check=False)
    pairs = (line.split(" ", 1) for line in done.stdout.splitlines() if "::" in line)
    states = ("PASSED", "FAILED", "ERROR", "XFAIL")
    return {test.partition(" - ")[0]: state for state, test in pairs if state in states}, done.stderr


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
