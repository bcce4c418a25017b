"""A fit over several processes is the fit of one process on their shares, one after another."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lapwing as lw
from lapwing import ranks as collectives
from lapwing.data.data import Data
from lapwing.posterior.tuned import checked
from tests import ranks

ROOT = Path(lw.__file__).parent.parent


def check_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["method"] == other["method"]
    for name in ("chosen", "samples", "prediction"):
        torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=1e-10)


def check_cases(every: list[list[Any] | None], size: int, names: list[str]) -> None:
    alone = ranks.fit_cases_alone(size, names)
    for results in every:
        assert results is not None
        for name in names:
            check_equal(results[0][name], alone[name])


def test_two_ranks_fit_as_one_process_fail_together_and_go_on(tmp_path: Path) -> None:
    path = tmp_path / "fit.safetensors"
    every = ranks.run(
        tmp_path, 2, [
            (ranks.fit_cases, ranks.FEW), (ranks.novelties,), (ranks.known,), (ranks.padded, 7), (ranks.fail,),
            (ranks.interrupted, path),
        ],
    )  # fmt: skip
    check_cases(every, 2, ranks.FEW)
    check_novelty(every, 2)
    x, y = ranks.data(1, 7, 1)
    joined = [(x[[0, 2, 4]], y[[0, 2, 4]]), (x[[6]], y[[6]]), (x[[1, 3, 5]], y[[1, 3, 5]])]
    alone = ranks.numbers(lw.fit(ranks.network(1), joined, lw.KFAC()))
    assert all(results and "100 % of the validation" in "".join(results[2]) for results in every)
    (*_, first, here, kept), (*_, second, there, kept_too) = every  # type: ignore[misc]
    assert alone["samples"] == 7
    check_equal(first, alone)
    check_equal(second, alone)
    check_errors(here, there)
    for (error, left_out, resumed, expected), batches in ((kept, 2), (kept_too, 3)):
        assert "OSError: the disk is gone" in error
        assert left_out == batches  # of the first pass
        torch.testing.assert_close(resumed, expected, rtol=0, atol=0)
    assert not path.exists()


def check_novelty(every: list[list[Any] | None], size: int) -> None:
    """Checks that the detectors of all ranks score as the detector of the joined data in one process."""
    alone = ranks.novelties_alone(size)
    for results in every:
        assert results is not None
        assert "not at the same place of a fit" in results[1].pop("error")
        torch.testing.assert_close(results[1], alone, rtol=1e-8, atol=1e-10)


def check_errors(here: dict[str, str], there: dict[str, str]) -> None:
    """Checks the errors on rank 0 and on rank 1, of which rank 1 has made most."""
    failed = "The fit has failed in process 1 of 2, and ends here too: OSError: the disk is gone"
    differs = "The processes were given different options: "
    for name in ("while it loads", "held-out data"):
        assert failed in here[name]
        assert there[name] == "OSError: the disk is gone"
    assert "process 1 has other weights than the network of process 0: 0.weight differs" in here["other weights"]
    assert differs + "method is KFAC(" in here["method"]
    assert differs + "prior_precision is 2.0 in process 0 and 1 in process 1." in there["prior_precision"]
    assert differs + "tune is Validation(" in here["tune"]
    assert "process 1 of 2" in here["another shape"]
    assert here["tuning"].startswith("LapwingError: ")  # rank 0 tunes, and rank 1 gets its message
    assert "The fit has failed in process 0 of 2, and ends here too: " + here["tuning"] in there["tuning"]
    for errors in (here, there):
        assert "The steps of 'fine-tuning' are not summed over processes" in errors["steps"]
        assert "The steps of 'right-hand sides' are not summed over processes" in errors["solves"]
        assert errors.pop("then") == "no error"
        assert "no error" not in errors.values()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_ranks_fits_as_one_process(tmp_path: Path, size: int) -> None:
    names = list(ranks.CASES)
    every = ranks.run(tmp_path, size, [(ranks.fit_cases, names), (ranks.novelties,)])
    check_cases(every, size, names)
    check_novelty(every, size)


@pytest.mark.slow
def test_further_data_and_positions(tmp_path: Path) -> None:
    alone = ranks.further([batch for part in ranks.training(3, 2) for batch in part])
    for results in ranks.run(tmp_path, 2, [(ranks.further_of_share,)]):
        assert results is not None
        for name in ("update", "update of rows", "update on held-out data", "prior"):
            check_equal(results[0][name], alone[name])
        torch.testing.assert_close(results[0]["positions"], alone["positions"], rtol=1e-6, atol=0)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    first, second, third = ranks.run(tmp_path, 3, [(ranks.die,)], seconds=20.0)
    assert third is None
    for rank, results in enumerate((first, second)):
        assert results is not None
        assert f"Process {rank} of 3 cannot reach the others: " in results[0]


def test_processes_that_cannot_be_reached() -> None:
    error = RuntimeError("No backend type associated with device type cuda\nfurther")
    with pytest.raises(lw.LapwingError, match=r"others: No backend .* cuda\. .* init_process_group\(\)"):
        collectives._Group(0, 2).run(mock.Mock(side_effect=error))


@pytest.mark.parametrize(("samples", "size"), [(1, 3), (2, 3), (7, 2), (9, 4), (12, 4)])
def test_data_leave_out_the_samples_that_the_sampler_repeats(
    samples: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "several", lambda: True)
    dataset = TensorDataset(torch.arange(samples), torch.arange(samples))
    shown = []
    for rank in range(size):
        loader = DataLoader(dataset, 2, sampler=DistributedSampler(dataset, size, rank, shuffle=True))
        parts = [samples.inputs.value for samples in Data(loader, None)]
        shown += torch.cat(parts).tolist() if parts else []
    assert sorted(shown) == list(range(samples))


def test_all_ranks_get_the_noise_ratios_and_the_temperature_that_were_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 tunes, and its values are sent."""
    x, y = torch.randn(9, 3), torch.randn(9, 2)
    fitted = lw.fit(torch.nn.Linear(3, 2).eval(), (x, y), lw.Diagonal(), tune=None)
    changed = replace(fitted, likelihood=lw.Gaussian(noise_ratios=(1.0, 4.0)), temperature=3.0)
    tuned = changed.at(fitted.prior.precision, 0.5)
    message: list[Any] = []
    monkeypatch.setattr(collectives, "several", lambda: True)
    monkeypatch.setattr(collectives, "sent", lambda _, values: message.append(values) or message[0])
    for rank, posterior in enumerate((tuned, fitted)):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        sent = checked(posterior)
        torch.testing.assert_close(sent.predict(x).std, tuned.predict(x).std)
        assert sent.temperature == 3.0


def test_nothing_is_collective_in_one_process() -> None:
    loader = [(torch.zeros(2, 1), torch.zeros(2, 1))]
    with collectives.across_ranks():
        assert not collectives.several()
        assert Data(loader, None).on_first_rank().loader is loader
        assert collectives.gathered("", 3) == [3]
        assert collectives.on_first("", lambda: 3) == 3
        assert collectives.rank() == 0


@pytest.mark.slow
def test_the_example_runs_under_torchrun_and_alone() -> None:
    script, environment = str(ROOT / "examples" / "distributed_fit.py"), {**os.environ, "PYTHONPATH": str(ROOT)}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

    def lines(*arguments: str) -> list[str]:
        run = subprocess.run([sys.executable, *arguments, script], env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-2000:]
        return sorted(line for line in run.stdout.splitlines() if line.startswith("Process"))

    (alone,), (first, second) = lines(), lines(*launch)
    assert "of 1: 1001 samples" in alone
    assert "of 2: 1001 samples" in first
    assert "of 2: 1001 samples" in second
    numbers = [float(line.split("prior precision ")[1].split(",")[0]) for line in (alone, first, second)]
    assert numbers[1] == numbers[2]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.2)  # other samples tune it
