"""`python -m papers verify`: results that are computed anew, against the statements of the ledger."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

pytest.importorskip("tomllib")  # Python 3.10 has none

from lapwing import LapwingError
from papers import __main__ as command
from papers import ledger, verify
from papers.common import results

KEYS = {"KFAC": "tiny/results/one.json: nll/KFAC", "MAP": "tiny/results/one.json: nll/MAP"}


def entry(**changes):
    given = {"paper": "ella", "item": "Table 9", "claim": "", "setting": "", "verdict": "partly", "ours": KEYS}
    return ledger.Entry(**{**given, "holds": ("KFAC < MAP",), **changes})


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """An experiment `papers.tiny.one`, whose short run has seed 3."""
    module = ModuleType("papers.tiny.one")
    module.__file__ = str(tmp_path / "tiny" / "one.py")
    module.FAST = {"seed": 3}
    module.run = lambda seed: {"nll": {"KFAC": 0.1 * seed, "MAP": 0.4}}
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "one.py").touch()
    monkeypatch.setitem(sys.modules, "papers.tiny.one", module)
    monkeypatch.setattr(verify, "HOME", tmp_path)
    monkeypatch.setattr(verify, "passing", lambda names: {name for name in names if "good" in name})
    return module


def test_recomputed_results_decide(tiny, tmp_path):
    lines = []
    slow = entry(item="Table 8", ours={"KFAC": "ella/results/cost.json: nll"}, holds=("KFAC < 1",))
    tested = entry(item="Theorem 1", verdict="tested", ours={}, holds=(), test=("tests/a.py::good",))
    ours = {"ViT": "../benchmarks/results/streamlined_cost.json: a"}
    benchmark = entry(item="Table 6", ours=ours, holds=("ViT < 2",))
    partial = entry(item="Table 5", ours={**KEYS, "EKFAC": "tiny/results/one.json: nll/EKFAC"})
    skipped = entry(item="Table 7", verdict="not run: no data", ours={}, holds=())
    assert verify.verify([entry(), slow, tested, skipped, benchmark, partial], lines.append)
    assert "ella, Table 9: agrees" in lines
    assert lines[-1] == "2 of 2 verified entries agree with the ledger; 3 take longer, 0 lack data."
    assert not any("Table 7" in line for line in lines)
    assert tiny.__file__ == str(tmp_path / "tiny" / "one.py")
    assert not (tmp_path / "tiny" / "results").exists()  # the committed results stay as they are


def test_rows_of_a_recomputed_experiment_are_written_beside_it(tiny):
    def run(seed):
        rows = results.Rows(tiny.__file__, {"nll": {"KFAC": 0.3, "MAP": 0.4}})
        rows.add(f"seed {seed}", "KFAC", dict)
        return rows.all()

    tiny.run = run
    assert verify.verify([entry()], [].append)


def test_a_statement_that_changed_is_reported(tiny):
    lines = []
    assert not verify.verify([entry(fails=("KFAC < 0.35",))], lines.append)
    assert "ella, Table 9: does not agree; 'KFAC < 0.35' changed" in lines
    assert lines[-1].startswith("0 of 1 verified entries agree")


def test_a_test_that_fails_and_data_that_are_missing_are_reported(tiny):
    def missing(seed):
        raise LapwingError("There is no file mnist.npz.")

    lines = []
    tiny.run = missing
    failing = entry(item="Theorem 1", verdict="tested", ours={}, holds=(), test=("tests/a.py::bad",))
    assert not verify.verify([entry(), failing], lines.append)
    assert "ella, Table 9: data missing" in lines
    assert "ella, Theorem 1: does not agree; tests/a.py::bad does not pass" in lines
    assert lines[-1] == "0 of 1 verified entries agree with the ledger; 0 take longer, 1 lack data."


def test_the_command_exits_with_an_error_if_an_entry_disagrees(monkeypatch):
    monkeypatch.setattr(verify, "verify", lambda entries: True)
    assert command.main(["verify"]) == ""
    monkeypatch.setattr(verify, "verify", lambda entries: False)
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
