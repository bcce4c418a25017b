"""The ledger of the papers: complete, with evidence that exists and agrees with the verdicts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from papers import ledger
from papers.common import results
from papers.optimal_subspace import table1, table2

ENTRIES = ledger.read()
RESULTS = {"ella": 20, "valla": 16, "optimal_subspace": 15, "streamlined": 23}
"""Tables and figures of each paper and its appendices, with parts that have verdicts of their own."""


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.paper}, {entry.item}")
def test_evidence_exists(entry):
    for key in entry.ours.values():
        assert ledger.value(key) is not None
    for name in entry.test:
        assert ledger.has_test(name), name
    assert entry.disagreements() == []


def test_every_result_has_one_entry():
    names = [(entry.paper, entry.item) for entry in ENTRIES]
    assert len(names) == len(set(names))
    assert not any("|" in text for entry in ENTRIES for text in (entry.item, entry.claim, entry.setting))
    shown = [entry.paper for entry in ENTRIES if entry.item.startswith(("Table", "Figure"))]
    assert Counter(shown) == RESULTS


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "fine"},
        {"verdict": "not run: compute"},
        {"verdict": "tested", "ours": {}},
        {"verdict": "not run: no data", "ours": {}, "test": ("tests/a.py::test_b",)},
        {"ours": {}},
        {"holds": ()},
        {"verdict": "reproduced", "fails": ("2 < 1",)},
        {"verdict": "order only", "fails": ("2 < 1",)},
        {"verdict": "contradicts"},
        {"verdict": "undecided"},
        {"verdict": "undecided", "holds": ()},
        {"paper": "another"},
    ],
    ids=str,
)
def test_entries_that_contradict_themselves_are_refused(change):
    entry = {"paper": "ella", "item": "Table 9", "claim": "", "setting": "", "verdict": "partly"}
    entry |= {"ours": {"KFAC": "a.json: b"}, "holds": ("1 < 2",)}
    ledger.Entry(**entry)
    with pytest.raises(ValueError, match="Table 9"):
        ledger.Entry(**{**entry, **change})


@pytest.fixture
def numbers(tmp_path, monkeypatch):
    """An entry whose rows have three seeds, which move all methods alike, and a row without seeds."""
    runs = {
        f"toy, seed {seed}": {"fit": {"KFAC": 1 + seed, "ELLA": 1.1 + seed + 0.01 * seed**2, "VaLLA": 1.4 + 0.1 * seed}}
        for seed in range(3)
    } | {"other": {"fit": {"MAP": 2.0}}}
    (tmp_path / "ella").mkdir()
    results.write(str(tmp_path / "ella" / "one.py"), {"runs": runs}, {})
    monkeypatch.setattr(ledger, "HOME", tmp_path)

    def made(**lists):
        ours = {
            name: f"ella/results/one.json: table/{'other' if name == 'MAP' else 'toy'}/fit/{name}"
            for name in ("KFAC", "ELLA", "VaLLA", "MAP")
        }
        fields = {"paper": "ella", "item": "Table 9", "claim": "", "setting": "", "verdict": "partly", "ours": ours}
        return ledger.Entry(**{**fields, "holds": ("1 < 2",), **lists})

    return made


def test_a_statement_holds_beyond_two_standard_errors_of_differences_that_are_paired_by_seed(numbers):
    entry = numbers()
    difference, error = entry.difference("KFAC", "ELLA")  # .1, .11 and .14
    assert difference == pytest.approx(0.35 / 3)
    assert error == pytest.approx(np.std([0.1, 0.11, 0.14], ddof=1) / 3**0.5)
    difference, error = entry.difference("MAP", "ELLA")  # 2, and 1.1, 2.11 and 3.14
    assert difference == pytest.approx(6.35 / 3 - 2)
    assert error == pytest.approx(np.std([1.1, 2.11, 3.14], ddof=1) / 3**0.5)
    outcomes = {
        "KFAC < ELLA": "holds", "ELLA < KFAC": "fails", "MAP < ELLA": "tie", "ELLA < MAP": "tie", "VaLLA < KFAC": "tie",
        "MAP < 2.1": "holds", "KFAC < ELLA < MAP": "tie", "ELLA < KFAC < MAP": "fails", "MAP < 2": "tie",
        "MAP ≈ 1.95": "holds", "MAP ≈ 1.8": "fails", "MAP ≈ ELLA": "tie", "VaLLA ≈ 1.5": "tie", "VaLLA ≈ 1.0": "fails",
    }  # fmt: skip
    assert {statement: entry.outcome(statement) for statement in outcomes} == outcomes
    with pytest.raises(KeyError, match=r"'LLA' of 'Table 9' is no label"):
        entry.outcome("LLA < 3")
    with pytest.raises(KeyError, match="compares nothing"):
        entry.outcome("3")


def test_statements_in_the_wrong_list_are_found(numbers):
    entry = numbers(
        holds=("KFAC < ELLA", "MAP < ELLA"), fails=("ELLA < KFAC", "KFAC < ELLA"), ties=("MAP ≈ ELLA", "1 < 2"),
        beyond=("KFAC < ELLA", "MAP < ELLA", "ELLA < KFAC"),
    )  # fmt: skip
    assert entry.disagreements() == ["MAP < ELLA", "KFAC < ELLA", "1 < 2", "ELLA < KFAC"]


def test_missing_keys_and_tests_are_noticed():
    with pytest.raises(KeyError):
        ledger.value("ella/results/table5.json: noise variance 0.01/another method")
    assert not ledger.has_test("tests/papers/test_ledger.py::test_that_nobody_wrote")
    assert not ledger.has_test("tests/papers/test_ledger.py")


def test_networks_of_optimal_subspaces(data_folder, monkeypatch):
    """Rates, epochs, warm-up and decay are those of Table 1; weights are those that the ledger states."""
    published = {
        "wine": (0.0004, 300, (0.3, 0.3)), "energy": (0.004, 1500, (0.1, 0.5)),
        "naval": (0.0004, 100, (0.3, 0.5)), "california": (0.0004, 100, (0.3, 0.5)),
    }  # fmt: skip
    found = {name: (row["rate"], row["epochs"], table1.PHASES[name]) for name, row in table1.TABLES.items()}
    assert found == published
    weights, rows = {}, {}
    for name, table in table1.TABLES.items():
        monkeypatch.setitem(table, "epochs", 1)
        model, (x, _), _ = table1.network(name, False, 0)
        weights[name], rows[name] = sum(weight.numel() for weight in model.parameters()), len(x)
    assert weights == {"wine": 18177, "energy": 17793, "california": 17793, "naval": 18561}
    assert rows == {"wine": 1279, "energy": 614, "california": 16512, "naval": 9547}
    assert sum(weight.numel() for weight in table2.PublishedCNN().parameters()) == 12458
    assert table2.SETTINGS == {"mnist": (20, 0.004, (0.1, 0.3)), "fashion_mnist": (40, 0.002, (0.1, 0.5))}


def test_variance_of_a_product_of_correlated_gaussians():
    """Streamlined prediction, equation 38: right with `2 μ₁ μ₂ c + c²` at its end, by exact quadrature of moments."""
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(6))
    weights = weights / weights.sum()
    (m1, s1), (m2, s2), correlation = (0.7, 1.3), (-0.4, 0.6), 0.5
    c = correlation * s1 * s2
    x1 = m1 + s1 * nodes[:, None]
    x2 = m2 + s2 * (correlation * nodes[:, None] + (1 - correlation**2) ** 0.5 * nodes)
    chances = weights[:, None] * weights
    mean = float((chances * x1 * x2).sum())
    variance = float((chances * (x1 * x2).square()).sum()) - mean**2
    independent = s1**2 * s2**2 + s1**2 * m2**2 + s2**2 * m1**2
    assert mean == pytest.approx(m1 * m2 + c)
    assert variance == pytest.approx(independent + 2 * m1 * m2 * c + c**2)
    assert variance != pytest.approx(independent + (s1**2 * s2**2 + 2 * m1 * m2) * c, rel=0.01)  # as printed
