"""A fit over several processes is the fit of one process on their shares, one after another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lapwing as lw
from lapwing.network import ranks as collectives
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
    kept = [(ranks.interrupted, tmp_path, ["default", "MeanField"], [0.6, 1.0]), (ranks.never_ending, tmp_path)]
    tasks = [(ranks.fit_cases, ranks.FEW), (ranks.padded, 7), (ranks.fail,), *kept]
    every = ranks.run(tmp_path, 2, tasks)
    check_cases(every, 2, ranks.FEW)
    x, y = ranks.data(1, 7, 1)
    joined = [(x[[0, 2, 4]], y[[0, 2, 4]]), (x[[6]], y[[6]]), (x[[1, 3, 5]], y[[1, 3, 5]])]
    alone = ranks.numbers(lw.fit(ranks.network(1), joined, lw.KFAC()))
    assert alone["samples"] == 7
    (_, first, here, *_), (_, second, there, *_) = every  # type: ignore[misc]
    check_equal(first, alone)
    check_equal(second, alone)
    failed = "The fit has failed in process 1 of 2, and ends here too: "
    assert failed + "OSError: the disk is gone" in here["while it loads"]
    assert there["while it loads"] == "OSError: the disk is gone"
    assert "process 1 has other weights than that of process 0: 0.weight differs" in here["other weights"]
    differs = "The processes were given different options: "
    assert differs + "method is KFAC(" in here["another method"]
    assert differs + "prior_precision is 2.0 in process 0 and 1 in process 1." in there["prior_precision"]
    for name in ("tune", "seed", "validation", "prior_mean"):
        assert f"{differs}{name} is " in here[name]
        assert f"{differs}{name} is " in there[name]
    assert differs + "tune is Validation(" in here["a tuning's"]
    assert failed in here["another shape"]
    assert "The steps of 'own steps' are not summed over processes" in here["steps from outside"]
    assert here["then"] == there["then"] == "no error"
    assert all("no error" not in error for errors in (here, there) for error in list(errors.values())[:-1])
    check_interrupted([results and results[3] for results in every])
    left = tmp_path / "left.safetensors"
    assert sorted(path.name for path in tmp_path.glob("*safetensors*")) == [left.name, f"{left.name}.1"]
    training, _ = ranks.everything("default", 2)
    with pytest.raises(lw.LapwingError, match=r"which differs in .*the number of processes"):
        lw.fit(ranks.network(3), [batch[:2] for batch in training[0]], lw.KFAC(), checkpoint=left)


def check_interrupted(every: list[dict[str, Any] | None]) -> None:
    for results in every:
        assert results is not None
        for name, (resumed, expected, errors, _) in results.items():
            assert "no error" not in errors[0], name
            torch.testing.assert_close(resumed, expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_number_of_ranks_fits_as_one_process(tmp_path: Path, size: int) -> None:
    names = list(ranks.ALL)
    check_cases(ranks.run(tmp_path, size, [(ranks.fit_cases, names)]), size, names)


@pytest.mark.slow
def test_further_data_positions_and_mistakes(tmp_path: Path) -> None:
    training, _ = ranks.everything("default", 2)
    alone = ranks.others([batch[:2] for part in training for batch in part])
    (first,), (second,) = ranks.run(tmp_path, 2, [(ranks.other_fits,)])  # type: ignore[misc]
    for results in (first, second):
        for name in ("update", "update of rows", "prior"):
            check_equal(results[name], alone[name])
        torch.testing.assert_close(results["positions"], alone["positions"], rtol=1e-6, atol=0)
    assert "Process 1 shows the same first batch as process 0" in second["same data"]
    assert "same first batch" not in first["same data"]


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 2, 10])
def test_padding_is_left_out_on_every_rank(tmp_path: Path, samples: int) -> None:
    x, y = ranks.data(1, samples, 1)
    order = [index for rank in range(3) for index in range(rank, samples, 3)]
    alone = ranks.numbers(lw.fit(ranks.network(1), [(x[order], y[order])], lw.KFAC()))
    for results in ranks.run(tmp_path, 3, [(ranks.padded, samples)]):
        assert results is not None
        check_equal(results[0], alone)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    first, second, third = ranks.run(tmp_path, 3, [(ranks.die,)], seconds=20.0)
    assert third is None
    for rank, results in enumerate((first, second)):
        assert results is not None
        assert f"Process {rank} of 3 cannot reach the others: one of them has ended" in results[0]
        assert results[0].isascii()
        assert "backend" not in results[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("No backend type associated with device type cuda\nfurther", r"cuda\. Every process .* without a backend"),
        ("[pair.cc:553] Connection closed by peer [::1]:1", "has ended, or was silent"),
        ("Timed out waiting 20000ms for recv", "has ended, or was silent"),
    ],
)
def test_processes_that_cannot_be_reached(text: str, words: str) -> None:
    def fail() -> None:
        raise RuntimeError(text)

    with pytest.raises(lw.LapwingError, match=words):
        collectives._Group(0, 2).run(fail, nbytes=0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_checkpoints_of_every_method(tmp_path: Path, size: int) -> None:
    parts = [part / 12 for part in range(4, 13)]
    every = ranks.run(tmp_path, size, [(ranks.interrupted, tmp_path, [*ranks.SUMS, *ranks.SOLVES], parts)])
    check_interrupted([results and results[0] for results in every])
    for name in ranks.STEPS:
        assert any("The fit goes on from" in results[0][name][3] for results in every if results), name


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["file", "write"])
def test_a_rank_whose_file_is_behind_goes_on_from_that_of_another(tmp_path: Path, lost: str) -> None:
    every = ranks.run(tmp_path, 3, [(ranks.interrupted, tmp_path, ranks.SOLVES, [0.6, 0.75, 0.9], lost)])
    check_interrupted([results and results[0] for results in every])
    assert any("The fit goes on from" in messages for *_, messages in every[-1][0].values())  # type: ignore[index]


KILLED = {
    "sums": (40, lw.EKFAC()), "steps": (12, lw.MeanField(40, initial_std=1e-9)),
    "moving points": (12, lw.VaLLA(ranks.POINTS, lw.VariationalBound(20, then=lw.NaturalGradient(5)))),
    "solves": (12, lw.SampledLLA(2, lw.ConjugateGradients(2), em_steps=1)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("least", "method"), KILLED.values(), ids=KILLED.keys())
def test_ranks_that_are_killed_go_on(tmp_path: Path, least: int, method: lw.Method) -> None:
    kills, ended, resumed, expected = ranks.kill_at_random(tmp_path, 2, least, method)
    assert kills >= least
    assert ended
    torch.testing.assert_close(resumed, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("samples", "size"), [(1, 3), (2, 3), (7, 2), (9, 4), (12, 4)])
def test_a_share_leaves_out_what_the_sampler_repeats(samples: int, size: int) -> None:
    dataset = TensorDataset(torch.arange(samples), torch.arange(samples))
    shown = []
    for rank in range(size):
        loader = DataLoader(dataset, 2, sampler=DistributedSampler(dataset, size, rank, shuffle=True))
        parts = [x for x, _ in collectives.Share(loader)]
        shown += torch.cat(parts).tolist() if parts else []
    assert sorted(shown) == list(range(samples))


def test_nothing_is_collective_in_one_process() -> None:
    loader = [(torch.zeros(2, 1), torch.zeros(2, 1))]
    with collectives.across_ranks():
        assert not collectives.several()
        assert collectives.share(loader) is loader
        assert collectives.gathered("", 3) == [3]
        assert collectives.decided("", 3) == 3
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
