"""Recomputes results, and compares them with the committed ones: `python -m papers verify [PAPER [NAME]]`.

An entry of the ledger agrees if its tests pass, and if its numbers are near the committed ones after they were computed
anew. Experiments with `FAST`, the arguments of a short run, are computed anew; a named one is, whatever it takes. Each
number is compared with the committed number of the same runs. It may differ by 5 % divided by the root of the number
of seeds, and by two standard errors if the committed number has other seeds too. Entries whose numbers no run has
touched are not called verified. Their statements hold for the committed numbers (`tests/papers/test_ledger.py`).
"""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from lapwing import LapwingError
from papers import ledger
from papers.common import results

HOME = Path(__file__).parent
RELATIVE = 0.05
"""Tolerance of a number of one seed, over the number: trained networks differ between machines."""
AGREES, DISAGREES, MISSING, SLOW = "agrees", "does not agree", "data missing", "not recomputed"
TESTED = "tests pass, numbers not recomputed"


def verify(entries: Sequence[ledger.Entry], name: str = "", report: Callable[[str], object] = print) -> bool:
    """Verifies the entries, reports each and last their counts; returns whether none disagrees.

    Args:
        entries: of the ledger.
        name: experiment that is computed anew, and whose entries are verified; "" for all with `FAST`.
        report: called with each line.
    """
    entries = [entry for entry in entries if not entry.verdict.startswith("not run")]
    if name:
        entries = [entry for entry in entries if any(file.endswith(f"/{name}.json") for file in files(entry))]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        counts: Counter[str] = Counter()
        names = {test for entry in entries for test in entry.test}
        report(f"{len(entries)} entries; {len(names)} tests run beside the experiments")
        tests = pool.submit(passing, names)  # in other processes
        states = recompute(entries, Path(folder), name, report)
        passed = tests.result()
        for entry in entries:
            outcome, reasons = _outcome(entry, Path(folder), states, passed)
            counts[outcome] += 1
            report(f"{entry.paper}, {entry.item}: {outcome}" + "".join(f"; {reason}" for reason in reasons))
    report(
        f"{counts[AGREES]} of {counts[AGREES] + counts[DISAGREES]} verified entries agree, numbers within "
        f"{RELATIVE:.0%} for one seed and less for more. Not verified: the numbers of {counts[TESTED]} entries whose "
        f"tests pass, {counts[SLOW]} that take longer, {counts[MISSING]} that lack data."
    )
    return not counts[DISAGREES]


def recompute(
    entries: Sequence[ledger.Entry], folder: Path, name: str, report: Callable[[str], object]
) -> dict[str, str]:
    """Runs experiments of the entries; returns file of results -> AGREES (it ran) or MISSING.

    "new" in the folder has their results, and "old" the committed results of the same runs.
    """
    chosen: dict[str, ModuleType] = {}
    for file in dict.fromkeys(file for entry in entries for file in files(entry)):
        paper, _, stem = file.removesuffix(".json").partition("/results/")
        if paper.startswith("..") or (name and stem != name):  # a benchmark, or another experiment
            continue
        experiment = importlib.import_module(f"papers.{paper}.{stem}")
        if name or hasattr(experiment, "FAST"):
            chosen[file] = experiment
    states = {}
    for number, (file, experiment) in enumerate(chosen.items(), 1):
        report(f"{number} of {len(chosen)}: {file} ...")
        start, own = time.perf_counter(), str(experiment.__file__)
        paper, _, _ = file.partition("/results/")
        places = {part: str(folder / part / paper / Path(own).name) for part in ("old", "new")}
        for place in places.values():
            Path(place).parent.mkdir(parents=True, exist_ok=True)
        experiment.__file__ = places["new"]
        try:
            fast = getattr(experiment, "FAST", {})
            found = experiment.run(**fast)
            results.write(places["new"], found, results.made(places["new"]) or results.record(fast.get("seeds", (0,))))
            old, made = results.read(own), results.made(own)
            if "runs" in found:
                old.pop("table")
                old["runs"], made = ({run: of[run] for run in found["runs"]} for of in (old["runs"], made))
            results.write(places["old"], old, made)
            states[file] = AGREES
        except LapwingError as error:  # data that are not at hand
            report(f"{file}: {error}")
            states[file] = MISSING
        finally:
            experiment.__file__ = own
        report(f"{file}: {time.perf_counter() - start:.0f} s")
    return states


def differences(entry: ledger.Entry, folder: Path) -> list[str]:
    """Returns the numbers of an entry that differ by more than the tolerance; raises KeyError if one lacks.

    With m recomputed and n committed seeds it is `5 %/√m` of the number, and two standard errors `SE √(n/m)` if m < n.
    """
    found = []
    for label, key in entry.ours.items():
        new, old = (ledger.value(key, folder / part) for part in ("new", "old"))
        value, before = ledger.mean(new), ledger.mean(old)
        if value is None or before is None:
            continue
        committed = folder / "old" if ": table/" in key else ledger.HOME  # only averages of runs are of the same runs
        m, n = (_number_of_seeds(key, home) for home in (folder / "new", committed))
        error = old["standard_error"] if m < n and isinstance(old, dict) else 0.0
        tolerance = RELATIVE / math.sqrt(m) * abs(before) + 2 * error * math.sqrt(n / m)
        if not abs(value - before) <= tolerance:
            found.append(f"{label} is {value:.4g}, and was {before:.4g} ± {tolerance:.2g}")
    return found


def _number_of_seeds(key: str, home: Path) -> int:
    made = results.load(home / key.partition(": ")[0]).get("made", {})
    return max(1, len({seed for record in results.records(made) for seed in str(record["seeds"]).split(", ")}))


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
    if found <= {AGREES}:
        try:
            reasons += differences(entry, folder)
        except KeyError:  # the short run lacks rows of this entry
            found = {SLOW}
    if reasons:
        return DISAGREES, reasons
    if found <= {AGREES}:
        return AGREES, []
    return (TESTED if entry.test else min(found - {AGREES})), []
