"""What a bug report needs: `lw.versions()` and `python -m lapwing`."""

from __future__ import annotations

import runpy
import sys

import torch

import lapwing as lw


def test_versions_name_what_runs():
    lines = dict(line.split(None, 1) for line in lw.versions().splitlines())
    assert lines["lapwing"] == lw.__version__
    assert lines["torch"] == torch.__version__
    assert lines["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert lines["threads"] == str(torch.get_num_threads())
    assert {"numpy", "safetensors", "tqdm", "system", "devices"} <= lines.keys()


def test_a_package_that_is_missing_is_named(monkeypatch):
    from lapwing import environment

    def missing(name):
        raise environment.PackageNotFoundError(name)

    monkeypatch.setattr(environment, "version", missing)
    assert "tqdm         not installed" in lw.versions()


def test_the_module_prints_them(capsys):
    runpy.run_module("lapwing", run_name="__main__")
    assert capsys.readouterr().out == lw.versions() + "\n"
