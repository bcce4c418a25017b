"""What a bug report needs, `lw.versions()` and `python -m lapwing`, and how much memory a process may use."""

from __future__ import annotations

import os
import runpy
import sys
from unittest import mock

import pytest
import torch

import lapwing as lw
from lapwing import environment
from lapwing.environment import memory_limit


def test_versions_name_what_runs():
    lines = dict(line.split(None, 1) for line in lw.versions().splitlines())
    assert lines["lapwing"] == lw.__version__
    assert lines["torch"] == torch.__version__
    assert lines["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert lines["threads"] == str(torch.get_num_threads())
    assert {"numpy", "safetensors", "tqdm", "system", "devices"} <= lines.keys()


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(environment, "version", mock.Mock(side_effect=environment.PackageNotFoundError))
    assert "tqdm         not installed" in lw.versions()


def test_the_distribution_lapwing_of_others_is_reported(monkeypatch):
    monkeypatch.setattr(environment, "version", {"lapwing": "1.1.0"}.get)
    assert "\nconflict     the distribution lapwing 1.1.0 is installed too" in lw.versions()
    assert "pip uninstall lapwing lapwing-torch" in lw.versions()


def test_the_module_prints_them(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lapwing"])
    runpy.run_module("lapwing", run_name="__main__")
    assert capsys.readouterr().out == lw.versions() + "\n"


GROUPS = {  # what /proc/self/cgroup holds, files below /sys/fs/cgroup, and the limit that they give
    "none": ("", {}, None),
    "version 2": ("0::/a/job\n", {"a/job/memory.max": "max\n", "a/memory.max": "5000000\n"}, 5_000_000),
    "version 2, the nearest": ("0::/a/job\n", {"a/job/memory.max": "4000000", "a/memory.max": "5000000"}, 4_000_000),
    "version 2, in a container": ("0::/\n", {"memory.max": "3000000\n"}, 3_000_000),
    "version 1": (
        "9:name=systemd:/\n4:cpu,memory:/job:1/x\n0::/\n",
        {"memory/job:1/x/memory.limit_in_bytes": "7000000", "memory/memory.limit_in_bytes": "9223372036854771712"},
        7_000_000,
    ),
    "version 1, in a container": ("4:memory:/docker/1\n", {"memory/memory.limit_in_bytes": "6000000"}, 6_000_000),
    "another group": ("0::/job\n", {"other/memory.max": "1000000"}, None),
    "without a limit": ("0::/job\n", {"job/memory.max": "max", "memory.max": "max"}, None),
    "absurdly large": ("4:memory:/job\n", {"memory/job/memory.limit_in_bytes": "9223372036854771712"}, None),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_memory_is_at_most_that_of_the_control_groups(name, tmp_path):
    groups, files, limit = GROUPS[name]
    for path, text in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{path}": text for path, text in files.items()},
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    machine = memory_limit(tmp_path / "nothing")
    assert machine > 10_000_000
    assert memory_limit(tmp_path) == (limit or machine)


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="the system does not say how much memory it has")
def test_the_memory_is_at_most_the_address_space_of_the_process(monkeypatch):
    resource = pytest.importorskip("resource")
    machine = memory_limit()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (machine - 4096, resource.RLIM_INFINITY))
    assert memory_limit() == machine - 4096
