"""The peak resident memory of all public calls: at most twice the budget plus the result."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import lapwing as lw
from tests.peaks import BUDGET, CASES

ROOT = Path(__file__).parents[1]
QUICK = ("of", "explain", "influence", "value", "sample", "weight_std", "novelty: knn")
ALIKE = {
    "at": "with_prior", "with_noise": "with_prior", "with_defaults": "with_prior",
    "MeanField.from_optimizer": "MeanField.from_variances",
}  # fmt: skip
"""Public calls that only prepare another one."""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="only Linux can start a peak again")
@pytest.mark.parametrize("names", [QUICK, pytest.param(sorted(CASES.keys() - QUICK), marks=pytest.mark.slow)], ids=len)
def test_resident_memory_stays_within_twice_the_budget_and_the_result(names: Sequence[str]) -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.peaks", *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    found = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert found.keys() == {*names}, done.stderr[-3000:]
    beyond = {name: (line["peak"] - line["result"]) / BUDGET for name, line in found.items()}
    # `of` also holds its gradients, which fit the budget
    assert not {name: budgets for name, budgets in beyond.items() if budgets > 2 + (name.partition(":")[0] == "of")}


def test_all_public_calls_with_a_budget_are_measured() -> None:
    names = {name for name in lw.__all__ if callable(getattr(lw, name)) and name != "LapwingError"}
    with_budget = set()
    for name in names:
        call = getattr(lw, name)
        members = {f"{name}.{key}": getattr(call, key) for key in vars(call)} if inspect.isclass(call) else {name: call}
        for key, value in members.items():
            if callable(value) and "memory" in inspect.signature(value).parameters:
                with_budget.add(key)
    with_budget |= {name for name, value in vars(lw.Posterior).items() if callable(value) and name[0] != "_"}
    assert with_budget <= {name.partition(":")[0] for name in CASES} | ALIKE.keys()
    assert {*ALIKE.values()} <= CASES.keys()
