"""`python -m papers verify`: results that are computed anew, against the statements of the ledger."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from lapwing import LapwingError
from papers import __main__ as command
from papers import ledger, verify
from papers.common import results
from papers.common.scores import averaged

KEYS = {"KFAC": "tiny/results/one.json: table//nll/KFAC", "MAP": "tiny/results/one.json: table//nll/MAP"}


def entry(**changes):
    given = {"paper": "ella", "item": "Table 9", "claim": "", "setting": "", "verdict": "partly", "ours": KEYS}
    return ledger.Entry(**{**given, "holds": ("KFAC < MAP",), **changes})


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """An experiment `papers.tiny.one` with committed results of the seeds 3 and 4, whose short run has seed 3."""
    module = ModuleType("papers.tiny.one")
    module.__file__ = str(tmp_path / "tiny" / "one.py")
    module.FAST = {"seeds": (3,)}
    module.KFAC = 0.3

    def run(seeds=(3, 4)):
        rows = results.Rows(module.__file__, {})
        for seed in seeds:
            rows.add(f"seed {seed}", "nll", lambda seed=seed: {"KFAC": module.KFAC * seed, "MAP": 4.0})
        return rows.all()

    module.run = run
    monkeypatch.setitem(sys.modules, "papers.tiny.one", module)
    monkeypatch.setattr(verify, "passing", lambda names: {name for name in names if "good" in name})
    (tmp_path / "tiny").mkdir()
    run()
    return module


def test_recomputed_numbers_decide(tiny):
    lines = []
    slow = entry(item="Table 8", ours={"KFAC": "ella/results/cost.json: nll"}, holds=("KFAC < 1",))
    tested = entry(item="Theorem 1", verdict="tested", ours={}, holds=(), test=("tests/a.py::good",))
    both = entry(item="Theorem 2", ours=slow.ours, holds=("KFAC < 1",), test=("tests/a.py::good",))
    ours = {"ViT": "../benchmarks/results/streamlined_cost.json: a"}
    benchmark = entry(item="Table 6", ours=ours, holds=("ViT < 2",))
    partial = entry(item="Table 5", ours={**KEYS, "EKFAC": "tiny/results/one.json: table//nll/EKFAC"})
    skipped = entry(item="Table 7", verdict="not run: no data", ours={}, holds=())
    before, own = results.read(tiny.__file__), tiny.__file__
    assert verify.verify([entry(), slow, tested, both, skipped, benchmark, partial], report=lines.append)
    assert "ella, Table 9: agrees" in lines
    assert "1 of 1: tiny/results/one.json ..." in lines
    assert "ella, Theorem 2: tests pass, numbers not recomputed" in lines
    assert lines[-1].startswith("2 of 2 verified entries agree, numbers within 5% for one seed")
    assert lines[-1].endswith("of 1 entries whose tests pass, 3 that take longer, 0 that lack data.")
    assert not any("Table 7" in line for line in lines)
    assert tiny.__file__ == own
    assert results.read(own) == before  # the committed results stay as they are


def test_numbers_are_compared_with_those_of_the_same_seeds(tiny):
    lines = []
    tiny.KFAC = 0.3 * 1.04  # the committed mean of seeds 3 and 4 is 17 % above the number of seed 3
    assert verify.verify([entry()], report=lines.append)
    tiny.KFAC = 0.3 * 1.06
    assert not verify.verify([entry()], report=lines.append)
    assert "ella, Table 9: does not agree; KFAC is 0.954, and was 0.9 ± 0.045" in lines
    assert lines[-1].startswith("0 of 1 verified entries agree")
    tiny.FAST = {"seeds": (3, 4)}  # more seeds, less tolerance
    tiny.KFAC = 0.3 * 1.04
    assert not verify.verify([entry()], report=lines.append)


def test_results_without_runs_have_a_wider_tolerance_for_fewer_seeds(tiny, monkeypatch):
    def run(seeds=(0, 1, 2, 3)):
        return {"mean": averaged([{"KFAC": tiny.KFAC * seed, "MAP": 4.0} for seed in seeds])}

    monkeypatch.setattr(ledger, "HOME", Path(tiny.__file__).parents[1])
    means = entry(ours={name: key.replace("table//nll", "mean") for name, key in KEYS.items()})
    tiny.run, tiny.FAST = run, {"seeds": (1,)}
    results.write(tiny.__file__, run(), results.record((0, 1, 2, 3)))
    assert verify.verify([means], report=[].append)  # .3 beside .45 ± .19, of which one seed may have four times
    tiny.FAST = {"seeds": (9,)}
    assert not verify.verify([means], report=[].append)


def test_a_named_experiment_is_computed_anew_without_a_short_run(tiny):
    lines = []
    del tiny.FAST
    other = entry(item="Table 8", ours={"KFAC": "ella/results/cost.json: nll"}, holds=("KFAC < 1",))
    assert verify.verify([entry(), other], report=lines.append)
    assert lines[-1].startswith("0 of 0")
    assert verify.verify([entry(), other], "one", report=lines.append)
    assert "ella, Table 9: agrees" in lines
    assert lines[-1].startswith("1 of 1")


def test_a_test_that_fails_and_data_that_are_missing_are_reported(tiny):
    def missing(seeds):
        raise LapwingError("There is no file mnist.npz.")

    lines = []
    tiny.run = missing
    failing = entry(item="Theorem 1", verdict="tested", ours={}, holds=(), test=("tests/a.py::bad",))
    assert not verify.verify([entry(), failing], report=lines.append)
    assert "ella, Table 9: data missing" in lines
    assert "ella, Theorem 1: does not agree; tests/a.py::bad does not pass" in lines
    assert lines[-1].startswith("0 of 1 verified entries agree")
    assert lines[-1].endswith("0 that take longer, 1 that lack data.")


def test_the_command_chooses_entries_and_exits_with_an_error_if_one_disagrees(monkeypatch):
    seen = []
    monkeypatch.setattr(verify, "verify", lambda entries, name: seen.append((entries, name)) or True)
    assert command.main(["verify"]) == command.main(["verify", "ella"]) == command.main(["verify", "ella", "table5"])
    assert [name for _, name in seen] == ["", "", "table5"]
    assert len(seen[0][0]) > len(seen[1][0]) > 0
    assert {chosen.paper for chosen in seen[1][0]} == {"ella"}
    monkeypatch.setattr(verify, "verify", lambda entries, name: False)
    with pytest.raises(SystemExit) as stopped:
        command.main(["verify"])
    assert stopped.value.code


@pytest.mark.slow
def test_results_of_tests_are_read():
    good = "tests/papers/test_ledger.py::test_every_result_has_one_entry"
    names = {good, "tests/papers/test_ledger.py::test_that_nobody_wrote"}
    assert verify.passing({good}) == {good}
    assert verify.passing(names) == {good}


@pytest.mark.slow
def test_the_ledger_is_verified(data_folder):
    assert verify.verify(ledger.read())
